"""The requests over token ids that suites decode."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax import drafters, trees
from specjax.checkpoints import HeadLM
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.prefill import chunk_for
from specjax.decoding.state import State
from specjax.drafters import registry
from specjax.drafters.adaptive import AdaptiveState
from specjax.drafters.draft_model import DraftModelState
from specjax.models import CausalLM, as_drafter
from specjax.sampling.distribution import Sampling
from specjax.text import own_layers, round_costs, small_caches
from specjax.text.prepare import SMALLEST_BUFFER, round_up
from specjax.text.task import GenerationTask
from specjax.types import PyTree

from . import pairs

SHORT = 32  # tokens that are read where a longer context is made up


def make_job(
    pair: pairs.Pair,
    drafter: str,
    num_draft: int,
    tokens: np.ndarray,
    new: int,
    *,
    temperature: float = 0.0,
    capacity: int | None = None,
    tree: str | None = None,
) -> GenerationTask:
    """Makes a request that is ready to run.

    Args:
      pair: the target and its draft model.
      drafter: ``plain``, ``draft``, ``draft:window=512``, ``self:window=512`` (both with any
        settings of a cache), a table (``ngram``), ``adaptive draft``, ``adaptive ngram``,
        ``synthetic 0.8`` (each token is right with that probability). See ``informed`` for the last
        three.
      num_draft: the number of tokens that are drafted in a round.
      tokens: int32 ``[B, T]``, the prompts.
      new: the number of tokens that are emitted for each prompt.
      temperature: 0 is greedy.
      capacity: the slots of the buffers; None: as ``specjax.generate`` chooses them.
      tree: the tree that ``draft`` drafts, as ``topology.parse`` takes it; None: a chain.
    """
    if capacity is None:
        limit = pair.target.config.context_length
        capacity = round_up(tokens.shape[1] + new, SMALLEST_BUFFER, limit)
    found, params = _drafter(pair, drafter, num_draft, (len(tokens), capacity))
    if tree is not None:
        found = dataclasses.replace(found, topology=trees.parse(tree))
    request, capacity = prepare_inputs(
        pair.target.target,
        found,
        tokens,
        np.full((len(tokens),), tokens.shape[1], np.int32),
        jax.random.key(0),
        new,
        Sampling(temperature=temperature),
        capacity,
        (),
    )
    return GenerationTask(
        lm=pair.target,
        prompts=list(tokens),
        drafter=found,
        rule="auto",
        capacity=capacity,
        params={"target": pair.target.params, "drafter": params},
        request=request,
        chunk=chunk_for(pair.target.params),
        stop_strings=[()] * len(tokens),
    )


def _drafter(pair: pairs.Pair, name: str, num_draft: int, shape: tuple[int, int]):
    """Returns the drafter and its weights; ``shape`` is that of the token buffer."""
    if name == "plain":
        return drafters.Plain(), None
    if name in registry.table_names():
        settings = {"num_draft": num_draft} if num_draft else {}
        return registry.drafter_class(name).for_target(pair.target.target, **settings), None
    if name == "draft":
        model = as_drafter(pair.target, pair.draft)
        return drafters.DraftModel(num_draft=num_draft, model=model), pair.draft.params
    if name.startswith("draft:"):
        found = small_caches.with_small_cache(pair.target, name, pair.draft, num_draft)
        if isinstance(found, HeadLM):
            return found.drafter, found.params
        model = as_drafter(pair.target, found)
        return drafters.DraftModel(num_draft=num_draft, model=model), found.params
    if name.startswith("self:"):
        return own_layers.named_layers(pair.target, name, num_draft), None
    kind, _, of = name.partition(" ")
    if kind == "adaptive" and of in ("draft", "ngram"):
        inner, weights = _drafter(pair, of, num_draft, shape)
        found = drafters.Adaptive(inner)
        return found, {"inner": weights, "costs": found.only(num_draft)}
    if kind == "synthetic" and of:
        truth = jnp.zeros(shape, jnp.int32)
        return drafters.Synthetic(num_draft, float(of)), {"truth": truth, "inner": None}
    raise ValueError(
        f"drafter={name!r} is unknown; known: plain, draft, draft:window=N, self:window=N, "
        f"{', '.join(registry.table_names())}, adaptive ngram, adaptive draft, "
        "synthetic ACCURACY"
    )


def informed(work: GenerationTask, plain_end: State, begin) -> GenerationTask:
    """Adds to a request what its drafter needs: costs of rounds, or the text to imitate.

    Args:
      work: the request.
      plain_end: the state after plain decoding of the same request, from which a synthetic drafter
        takes its tokens.
      begin: makes the state before the first round, from which the costs of rounds are measured
        for an adaptive drafter.
    """
    given = work.params["drafter"]
    if isinstance(work.drafter, drafters.Synthetic):
        given = given | {"truth": plain_end.tokens}
    elif isinstance(work.drafter, drafters.Adaptive):
        given = given | {"costs": round_costs.round_costs(work, begin())}
    return dataclasses.replace(work, params=work.params | {"drafter": given})


def made_up(
    work: GenerationTask, pair: pairs.Pair, context: int, new: int, cache: PyTree = None
) -> State:
    """Returns the state of a request as if it had read ``context`` random tokens.

    To read 32,000 tokens takes minutes on a CPU and is not measured. Entries of the cache are drawn
    from a normal distribution with the deviation of a few entries that were really read. The
    drafter is a copy of the target's first layers, and has the entries of these. With ``cache``,
    that of such a state of the same size, nothing is drawn.
    """
    small = dataclasses.replace(work, capacity=SMALLEST_BUFFER).start()
    shapes = jax.eval_shape(work.start)
    bare = [dataclasses.replace(one, cache=()) for one in (small, shapes)]
    state = jax.tree.map(_grown, *bare)
    tokens = np.random.default_rng(0).integers(
        0, pair.target.config.vocab_size, state.tokens.shape, dtype=np.int32
    )
    if cache is None:
        leaves, structure = jax.tree.flatten(small.cache)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        wide = [jnp.std(leaf[:, :, : SHORT - 1].astype(jnp.float32)) for leaf in leaves]
        drawn = [
            (jax.random.normal(key, leaf.shape) * by).astype(leaf.dtype)
            for key, leaf, by in zip(keys, jax.tree.leaves(shapes.cache), wide, strict=True)
        ]
        cache = structure.unflatten(drawn)
    early = jax.tree.map(jnp.copy, cache[: pair.draft.config.num_layers])
    model = getattr(work.drafter, "model", None)
    if isinstance(model, CausalLM) and model.cache_window is not None:
        early = model.recent(early, jnp.full_like(state.length, context - 2))
    learned = _with_cache(state.drafter_state, early, context)
    return dataclasses.replace(
        state,
        tokens=jnp.where(jnp.arange(work.capacity) < context, tokens, 0),
        length=jnp.full_like(state.length, context),
        budget=jnp.full_like(state.budget, new),
        cache=cache,
        drafter_state=learned,
    )


def _with_cache(learned, early, context: int):
    """Returns a drafter's state in which the cache of the draft model, if any, is ``early``."""
    if isinstance(learned, AdaptiveState):
        return dataclasses.replace(learned, inner=_with_cache(learned.inner, early, context))
    if not isinstance(learned, DraftModelState):
        return learned
    # the draft model's cache has the entries of all but the last two tokens
    return dataclasses.replace(
        learned, cache=early, filled=jnp.full_like(learned.filled, context - 2)
    )


def _grown(x: jax.Array, like) -> jax.Array:
    """Pads ``x`` with zeros at the end, to the shape of ``like``."""
    if x.shape == like.shape:
        return x
    return jnp.pad(x, [(0, n - m) for n, m in zip(like.shape, x.shape, strict=True)])
