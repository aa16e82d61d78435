"""Continuous rows: a new prompt takes the place of a finished row, between bursts of the loop.

Every leaf of a state leads with B and no row reads another's, so a row is replaced by overwriting
its slice of each leaf. The new prompts are read apart from the batch, as a small one of their own:
a row that comes costs its own prompt and a copy of its own cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import loop, sharding
from .loop import State
from .request import Request

# prompt tokens fed at once. A processor is busy with few: more would be wasted on short prompts
CHUNK, CHUNK_ON_CPU = 256, 32


def insert(
    target, drafter, rule, params, state: State, rows, request: Request, chunk: int = CHUNK
) -> State:
    """``state`` with prompts of ``request`` in place of the rows ``rows``; the others stay as they
    are, bit by bit: tokens, caches, keys, statistics.

    An inserted row is what ``loop.start`` makes of its prompt, so its text is the one that the
    prompt has in any batch, alone included. Of an ``Adaptive`` drafter, what belongs to the whole
    batch (pauses between probes) comes from the rows that run.

    Args:
      rows: int32 ``[K]``, each row at most once; what is not below B is left out, so that fewer
        prompts than K can be inserted by the same program.
      request: of K rows, with settings of the same kind as the state's (greedy or sampled, the
        same ones None) and as many stops.

    Raises:
      ValueError: when it is traced, for settings of another kind.
    """
    capacity = state.tokens.shape[1]
    fresh = loop.start(target, drafter, rule, capacity, params, request, chunk=chunk)
    alike = jax.tree.structure(fresh) == jax.tree.structure(state)
    pairs = zip(jax.tree.leaves(fresh), jax.tree.leaves(state), strict=alike)
    if not alike or any(new.shape[1:] != old.shape[1:] for new, old in pairs):
        raise ValueError(
            "insert: the request has settings of another kind than the batch that it joins: give "
            f"what it has (greedy={state.sampling.greedy}, the same settings, as many stops)"
        )
    rows = jnp.asarray(rows, jnp.int32)
    after = jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), state, fresh)
    return sharding.rows(after)


jit_insert = jax.jit(insert, static_argnums=(0, 1, 2, 7), donate_argnums=(4,))
