"""What to draft from the places where the end of a text occurred before: counts, paths, scores.

A path of tokens after the last ``m`` tokens of a text has the probability

    P_m(path) = count(last m tokens, then path) / count(last m tokens),

which is the product of the counts of each child over its parent's in a suffix tree. The text's own
end is an occurrence too: what was seen once before has 1/2. Every ``m`` proposes the paths that are
most frequent after it, within a budget that grows with ``m``; the sum of their probabilities, the
number of tokens that the counts expect to be accepted, is the score by which the lengths compete.

References: SuffixDecoding, arXiv 2411.04975, section 3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._internal.pytree import pytree_dataclass
from ..types import ROOT
from .context_index import look


@pytree_dataclass
class Proposal:
    """What one table proposes.

    Attributes:
      tokens: int32 ``[B, N - 1]``, the most frequent first; those from ``count`` on mean nothing.
      parent: int32 ``[B, N]``, or None for a chain.
      count: int32 ``[B]``.
      score: float32 ``[B]``, tokens that are expected to be accepted.
    """

    tokens: jax.Array
    parent: jax.Array | None
    count: jax.Array
    score: jax.Array


def following(tokens, places, length, steps: int) -> jax.Array:
    """int32 ``[B, C, steps]``: the tokens after each of ``places`` ``[B, C]``, -1 from the end of
    the text on, which has ``length`` int32 ``[R]`` of ``tokens`` ``[R, L]``."""
    where = places[:, :, None] + 1 + jnp.arange(steps, dtype=jnp.int32)
    found = look(tokens, jnp.minimum(where, tokens.shape[1] - 1))
    found = jnp.where(where < length[:, None, None], found, -1)
    ended = jnp.cumsum(found < 0, axis=2) > 0  # an entry below 0 ends one text of several
    return jnp.where(ended, -1, found)


def first_with_prefix(after) -> jax.Array:
    """int32 ``[B, C, S]``: the first of C paths whose tokens up to and including this one are those
    of the path itself; ``after`` int32 ``[B, C, S]``, -1 from the end of a path on."""
    same, first = jnp.ones((*after.shape[:2], after.shape[1]), bool), []
    for step in range(after.shape[2]):
        token = after[:, :, step]
        same &= (token[:, :, None] == token[:, None, :]) & (token >= 0)[:, None]
        first.append(jnp.argmax(same, axis=2))
    return jnp.stack(first, axis=2)


def budgets(longest: int, most: int, factor: float, offset: float) -> jax.Array:
    """int32 ``[longest]``: how many tokens a match of 1, 2, ... tokens may propose."""
    length = jnp.arange(1, longest + 1)
    # a thousandth of a thousandth more: what is whole in decimals may be less in binary
    return jnp.clip(jnp.floor(length * factor + offset + 1e-6), 0, most).astype(jnp.int32)


def chain(after, matched, budget, least: float) -> Proposal:
    """Follows the most frequent token; of equal ones, that of the longest, then latest match.

    Args:
      after: int32 ``[B, C, S]``, from ``following``.
      matched: int32 ``[B, C]``, of how many tokens each match is; falling.
      budget: int32 ``[M]``, for matches of ``1 ... M`` tokens.
      least: the probability below which a path is not gone on with.
    """
    on, total = _matching(matched, budget)

    def step(carry, at):
        on, going = carry
        depth, token = at
        able = on & (token >= 0)[:, None]
        same = token[:, :, None] == token[:, None, :]
        count = _counted(able, same)
        best = jnp.argmax(count, axis=2)
        share = jnp.max(count, axis=2) / total
        going &= (share >= least) & (share > 0) & (depth < budget)
        said = jnp.take_along_axis(token, best, axis=1)
        return (able & (token[:, None] == said[:, :, None]), going), (said, going * share)

    steps = jnp.arange(after.shape[2], dtype=jnp.int32)
    going = jnp.ones(total.shape, bool)
    _, (said, share) = jax.lax.scan(step, (on, going), (steps, jnp.moveaxis(after, 2, 0)))
    said, share = jnp.moveaxis(said, 0, 2), jnp.moveaxis(share, 0, 2)  # [B, M, S]
    score = jnp.sum(share, axis=2)
    length = _best_length(score)
    share = _at(share, length)
    count = jnp.sum(share > 0, axis=1, dtype=jnp.int32)
    score = jnp.sum(share, axis=1)
    return Proposal(tokens=_at(said, length), parent=None, count=count, score=score)


def tree(after, matched, budget, least: float, nodes: int) -> Proposal:
    """The most frequent paths as a tree of at most ``nodes`` tokens; the rest as ``chain``.

    A path is at least as frequent as those that go on from it, so the most frequent ones are a
    tree. Of equally frequent ones the shorter comes first, then that of the longest match.
    """
    on, total = _matching(matched, budget)
    batch, places, steps = after.shape
    index = jnp.arange(places)

    def step(same, token):
        same = same & (token[:, :, None] == token[:, None, :]) & (token >= 0)[:, None]
        first = jnp.argmax(same, axis=2).astype(jnp.int32)  # the place that stands for a path
        stands = (first == index) & (token >= 0)
        return same, (_counted(on, same) * stands[:, None], first)

    every = jnp.ones((batch, places, places), bool)
    _, (count, first) = jax.lax.scan(step, every, jnp.moveaxis(after, 2, 0))
    count = jnp.moveaxis(count, 0, 2)  # [B, M, S, C]
    wanted = (count > 0) & (count >= least * total[:, :, None, None])
    shallow = (steps - jnp.arange(steps, dtype=jnp.int32))[:, None]
    key = jnp.where(wanted, count.astype(jnp.int32) * (steps + 1) + shallow, 0)
    most = min(nodes, steps * places)
    key, which = jax.lax.top_k(key.reshape(batch, total.shape[1], -1), most)
    kept = (key > 0) & (jnp.arange(most) < budget[:, None])
    share = kept * (key // (steps + 1)) / total[:, :, None]
    length = _best_length(jnp.sum(share, axis=2))
    which, share = _at(which, length), _at(share, length)
    depth, place = which // places, which % places
    first = jnp.moveaxis(first, 0, 1)  # [B, S, C]
    rows = jnp.arange(batch)[:, None]
    tokens = after[rows, place, depth]
    above = first[rows, jnp.maximum(depth - 1, 0), place]
    is_parent = (depth[:, None, :] == depth[:, :, None] - 1) & (
        place[:, None, :] == above[:, :, None]
    )
    parent = jnp.where(depth > 0, jnp.argmax(is_parent, axis=2).astype(jnp.int32) + 1, ROOT)
    parent = jnp.where(share > 0, parent, ROOT)  # what is not proposed hangs below the root
    spare = nodes - most
    root = jnp.full((batch, 1), -1, jnp.int32)
    return Proposal(
        tokens=jnp.pad(tokens, ((0, 0), (0, spare))),
        parent=jnp.concatenate([root, jnp.pad(parent, ((0, 0), (0, spare)))], axis=1),
        count=jnp.sum(share > 0, axis=1, dtype=jnp.int32),
        score=jnp.sum(share, axis=1),
    )


def better(first: Proposal, second: Proposal) -> Proposal:
    """Row by row the proposal with the higher score; the first where they are equal."""
    other = second.score > first.score
    return jax.tree.map(
        lambda a, b: jnp.where(other.reshape(-1, *(1,) * (a.ndim - 1)), b, a), first, second
    )


def _matching(matched, budget):
    """Which places match each length, bool ``[B, M, C]``, and their number, the end included."""
    length = jnp.arange(1, budget.shape[0] + 1)
    on = matched[:, None, :] >= length[:, None]
    return on, 1.0 + jnp.sum(on, axis=2)


def _counted(on, same):
    """float32 ``[B, M, C]``: of the places ``on``, how many are the ``same``; 0 where not on."""
    count = jnp.einsum("bmk,bkj->bmj", on.astype(jnp.float32), same.astype(jnp.float32))
    return jnp.where(on, count, 0.0)


def _best_length(score):
    """int32 ``[B]``, the index of the highest score, of equal ones the longest match."""
    last = score.shape[1] - 1
    return (last - jnp.argmax(score[:, ::-1], axis=1)).astype(jnp.int32)


def _at(x, length):
    return jnp.take_along_axis(x, length[:, None, None], axis=1)[:, 0]
