"""A bonus for tokens that followed where the end of a path stood before.

    logits'[x] = logits[x] + bonus[m]

The end of a path is the tokens drafted down to a node and the committed ones before them. m is the
length of its longest part that stands in the committed text with x after it. ``COPIES`` different
tokens have a bonus: those with the greatest m, and of equal ones those that followed last. A token
that the method rules out (a logit of -inf) stays so. ``drafters/copying.py`` says what that is good
for.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._internal.optional import required
from ..types import Context, Draft
from .levels import Words, path_tokens

COPIES = 2
# the usual bonus, in nats, by the number of tokens that match, from one on; the last is for more
BONUS = (0.0, 0.0, 1.0, 2.0, 3.0, 4.0)


def with_copies(level, context: Context, words: Words | None):
    """The method ``level`` of ``trees.expand`` with ``context.copy_bonus`` on its logits.

    Args:
      words: those of the drafter, see ``trees.expand``.

    Returns:
      a method whose logits are ``[B, W, V]``, or ``[B, W, Vd]``. Each call makes
      ``L (K + COPIES)`` comparisons for each of its W nodes.
    """
    bonus = required(context.copy_bonus, "copy_bonus")
    gains = jnp.pad(bonus, ((0, 0), (1, 0)))  # of no match: 0

    def copying(carry, grown, since):
        logits, carry = level(carry, grown, since)
        ids = jnp.arange(logits.shape[2], dtype=jnp.int32) if words is None else words.ids
        end = ends(context, grown, since, bonus.shape[1])
        for matched, token in latest_longest(context, end):
            gain = jnp.take_along_axis(gains, matched, axis=1).astype(logits.dtype)
            logits += jnp.where(ids == token[..., None], gain[..., None], 0)
        return logits, carry

    return copying


def ends(context: Context, grown: Draft, since: int, longest: int) -> jax.Array:
    """The last tokens of the paths to the nodes ``since:``, int32 ``[B, W, longest]``, the newest
    first. Before the beginning of the text stands its first token: no match is so long."""
    path = path_tokens(grown, since)[:, :, ::-1]  # [B, W, D + 1], the root last
    before = context.length[:, None] - 2 - jnp.arange(longest, dtype=jnp.int32)
    text = jnp.take_along_axis(context.tokens, jnp.maximum(before, 0), axis=1)[:, None]
    text = jnp.broadcast_to(text, (*path.shape[:2], longest))
    return jnp.concatenate([path, text], axis=2)[:, :, :longest]


def latest_longest(context: Context, ends: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Finds the tokens that follow where most of each end stands in the committed text.

    Args:
      ends: int32 ``[B, W, K]``, the newest token first.

    Returns:
      ``COPIES`` pairs for different tokens, int32 ``[B, W]`` each: how many tokens of the end stand
      before the token, from 0 to K, and the token. A pair with more comes first, of equal ones that
      of the later place. The token is any where none match.
    """
    tokens, size = context.tokens, context.tokens.shape[1]
    found, places = matches(tokens, context.length, ends), jnp.arange(size, dtype=jnp.int32)
    after, pairs = jnp.roll(tokens, -1, axis=1), []
    for _ in range(COPIES):
        best = jnp.max(found * size + places, axis=2)
        token = jnp.take_along_axis(after, best % size, axis=1)
        pairs.append((best // size, token))
        found = jnp.where(after[:, None] == token[..., None], 0, found)
    return pairs


def matches(tokens: jax.Array, length: jax.Array, ends: jax.Array) -> jax.Array:
    """Counts how many tokens up to each place are those of an end.

    Args:
      tokens: int32 ``[B, L]``.
      length: int32 ``[B]``; the first ``length`` tokens of a row are its text.
      ends: int32 ``[B, W, K]``, the newest token first.

    Returns:
      int32 ``[B, W, L]``, at most K; 0 at the last token of the text and after it.
    """
    size = tokens.shape[1]
    same = (jnp.arange(size, dtype=jnp.int32) < length[:, None] - 1)[:, None]
    matched = jnp.zeros((*ends.shape[:2], size), jnp.int32)
    for back in range(ends.shape[2]):
        before = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-2)[:, None, :size]
        same = same & (before == ends[:, :, back, None])
        matched += same
    return matched
