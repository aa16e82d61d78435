"""Sequential temperature scaling of a DSpark drafter's chances, after its training.

    s_k = prod_{i <= k} sigmoid(l_i / T_i)     what the head says of the first k tokens of a draft
    a_k = prod_{i <= k} accepted_i             what is so
    T_k = the T of a grid with the least expected calibration error of s_k, given T_1 ... T_{k-1}

``l_i`` are the logits of the confidence head. Whoever ends drafts by products (the policy
``schedule``) multiplies the errors of all chances; each temperature mends what those before it
left. ``accepted_i`` is the probability 1 - TV(q, p) that a drawn token is accepted at temperature
1, or at temperature 0 whether the most probable token of the drafter is the target's. The expected
calibration error sorts the stated products into ten bins, and is the mean over blocks of how far
the mean of a bin's stated products is from that of the true ones.

Every place is given the true tokens before it. On greedy text of the target at temperature 0 that
is exact, since a draft that is accepted is the text; elsewhere it is what the head was trained on.

References: DSpark, 2607.05147, section on sequential temperature scaling.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import block, chunks, head_losses

BINS = 10
GRID = np.exp2(np.arange(-32, 33) / 16)  # from 1/4 to 4; 1 is one of them
MOST_TURNS = 8  # how often anchors are laid anew over a row
LEAST = 500  # blocks; of fewer, the error of a bin is noise, and temperatures stay 1


class Chances(NamedTuple):
    """What is known of M blocks of K places, float32 ``[M, K]`` each.

    Attributes:
      logits: of the stated chances.
      drawn: the probability that the token is accepted at temperature 1.
      greedy: 1 where the most probable token is the target's, else 0.
      weight: 0 where the text has no such place.
    """

    logits: np.ndarray
    drawn: np.ndarray
    greedy: np.ndarray
    weight: np.ndarray


def measure(heads, lm, read, config, params, batches: Iterable) -> Chances:
    """Returns the chances at anchors that are spread evenly over held-out rows.

    Args:
      heads: a DSpark drafter as ``dspark.make_dspark`` makes it.
      lm: the target.
      read: see ``rows.make_reader``.
      config: of the recipe.
      params: the weights of the heads.
      batches: tokens and weights, as in ``frozen.Setting.sets``.
    """
    target, laws = lm.target, head_losses.Laws(lm.target)

    def terms_of(tables, states, law, pieces):
        found = []
        for (table, _), state, piece in zip(tables, states, pieces, strict=True):
            q, said = chunks.logits_of(table, state), laws.said(law, piece)
            distance = jnp.sum(jnp.abs(jax.nn.softmax(q) - said.law), axis=-1)
            hit = (jnp.argmax(q, axis=-1) == said.best).astype(jnp.float32)
            found.append((state[..., -1].astype(jnp.float32), 1 - distance / 2, hit))
        return found

    @jax.jit
    def of_batch(params, given, tokens, weight, offset):
        rows = read(given, {"tokens": tokens, "weight": weight})
        anchors = anchors_of(rows, config) + offset
        anchors = jnp.broadcast_to(anchors, (len(tokens), len(anchors)))
        masks = block.laid(heads.outputs(params, given, rows, anchors), rows, anchors)
        tables, states, pieces, fits = zip(*masks, strict=True)
        law = target.head_table(given)
        found = chunks.each(terms_of, tables, states, law, pieces, chunk=chunks.SEVERAL)
        parts = [*zip(*found, strict=True), fits]
        return [jnp.stack(part, axis=-1).reshape(-1, config.num_heads) for part in parts]

    parts = []
    for tokens, weight in batches:
        step = max((tokens.shape[1] - 1 - config.num_heads) // config.num_anchors, 1)
        turns = min(step, MOST_TURNS)
        for offset in range(turns):
            found = of_batch(params, lm.params, tokens, weight, offset * step // turns)
            parts.append([np.asarray(part) for part in found])
    return Chances(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def anchors_of(rows, config) -> jax.Array:
    """Anchors int32 ``[A]``, evenly spread over rows that have room for a block after each."""
    room = rows.hidden.shape[1] - config.num_heads
    return jnp.arange(config.num_anchors, dtype=jnp.int32) * room // config.num_anchors


def stated(logits: np.ndarray, temperatures=()) -> np.ndarray:
    """The chances of logits ``[M, K]`` at temperatures, one for each place; (): 1."""
    return 1 / (1 + np.exp(-logits / np.asarray(temperatures or 1.0)))


def expected_error(stated: np.ndarray, true: np.ndarray, weight: np.ndarray) -> float:
    """The expected calibration error of stated chances; all of one shape."""
    own = np.minimum((stated * BINS).astype(int), BINS - 1).ravel()
    gaps = np.bincount(own, (weight * (stated - true)).ravel(), minlength=BINS)
    return float(np.abs(gaps).sum() / max(weight.sum(), 1.0))


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray, weight: np.ndarray) -> tuple:
    """Returns the temperatures of K places, fitted one after the other.

    Args:
      logits, accepted, weight: float32 ``[M, K]``, as in ``Chances``.
    """
    if (weight[:, -1] > 0).sum() < LEAST:
        return ()
    product, true = np.ones(len(logits)), np.cumprod(accepted, axis=1)
    grid, found = sorted(GRID, key=lambda t: abs(np.log(t))), []  # of equals, the nearest to 1
    for k in range(logits.shape[1]):
        chances = [product * stated(logits[:, k], (t,)) for t in grid]
        errors = [expected_error(own, true[:, k], weight[:, k]) for own in chances]
        best = int(np.argmin(errors))
        product = chances[best]
        found.append(float(grid[best]))
    return tuple(found)
