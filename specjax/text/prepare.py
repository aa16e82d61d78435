"""From prompts and options to a task that is ready to run.

Prompt widths and buffers are rounded up to a few sizes, so that the program for the next prompt has
already been compiled. Everything that can be refused is refused here, before anything compiles.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from .. import acceptance, sharding
from ..decoding.contract_checks import MissingWeightsError
from ..decoding.inputs import check_samples, prepare_inputs
from ..decoding.prefill import chunk_for
from ..models.lm import LM
from ..models.seq2seq import encoder_inputs
from ..sampling import processors
from ..sampling.distribution import Sampling
from ..types import Drafter
from .drafter_names import AUTO, named, resolve_drafter
from .options import Drafting, Options
from .prompts import check_lm, check_tokenizer, prompt_ids
from .session import Session
from .stop_strings import per_row
from .task import GenerationTask
from .unused_options import refuse_unused

SMALLEST_WIDTH, SMALLEST_BUFFER = 32, 256  # tokens; a step's cost follows those in use


def prepare(
    lm: LM,
    prompts,
    options: Options,
    *,
    least_width: int = SMALLEST_WIDTH,
    least_buffer: int = SMALLEST_BUFFER,
    chunk: int | None = None,
) -> GenerationTask:
    """Checks what ``generate`` was asked for, and makes a task of it.

    With ``num="auto"`` the costs of the drafter's rounds are still to be measured, see
    ``prepare_measured``.

    Args:
      lm, prompts, options: as ``generate`` takes them.
      least_width, least_buffer: of the padded prompts and of the buffer, in tokens; requests of
        equal sizes share their programs.
      chunk: prompt tokens that are read at once; None: ``prefill.chunk_for``.

    Raises:
      ValueError, TypeError: naming the argument and the way out.
    """
    check_lm(lm)
    inputs, num_samples, drafting = options.inputs, options.num_samples, options.drafting
    if encoder_inputs.encodes(lm):
        ids, inputs = encoder_inputs.read(lm, prompts, inputs, prompt_ids)
    else:
        ids = prompt_ids(lm, prompts)
    strings = per_row(options.stop_strings, len(ids))
    if any(strings):
        check_tokenizer(lm, "stop_strings")
    sampling = with_bias(lm, options.sampling)
    drafter = options.drafter
    if isinstance(drafter, str | os.PathLike):
        drafter = named(lm, drafter)
    refuse_unused(options.drafter, drafter, drafting, options.drafter_params)
    drafter, drafter_params = resolve_drafter(
        lm,
        drafter,
        drafting.num,
        options.drafter_params,
        drafting.tree,
        _sibling_sampling(drafting, sampling),
    )
    tokens, lengths, capacity = fit(lm, ids, options.max_new_tokens, least_width, least_buffer)
    request, capacity = prepare_inputs(
        lm.target,
        drafter,
        tokens,
        lengths,
        keys_of(options.seed, len(ids), num_samples),
        options.max_new_tokens,
        sampling,
        capacity,
        np.asarray(end_ids(lm) if options.stop is None else options.stop),
        inputs,
        logprobs=options.logprobs,
        num_samples=num_samples,
    )
    arrays = processors.processor_params(sampling.logits_processor)
    params = {"target": lm.params, "drafter": drafter_params} | arrays
    params, request = sharding.place(lm.mesh, lm.target, drafter, params, request)
    work = GenerationTask(
        lm=lm,
        prompts=[np.asarray(prompt, np.int32) for prompt in ids for _ in range(num_samples)],
        drafter=drafter,
        rule=drafting.rule,
        capacity=capacity,
        params=params,
        request=request,
        chunk=chunk or chunk_for(lm.params),
        stop_strings=[row for row in strings for _ in range(num_samples)],
        session=options.drafter if isinstance(options.drafter, Session) else None,
    )
    _check(work, options)
    shared = encoder_inputs.one_memory(lm, options.drafter)
    return dataclasses.replace(work, one_memory=True) if shared else work


def prepare_measured(lm: LM, prompts, options: Options, **sizes) -> GenerationTask:
    """``prepare``, and with ``num="auto"`` the costs of rounds, measured where they are unknown.

    Args:
      sizes: what ``prepare`` takes besides.
    """
    work = prepare(lm, prompts, options, **sizes)
    if options.drafting.num != AUTO or not work.drafter.num_draft:
        return work
    from .round_costs import with_round_costs  # a stopwatch, which no other request needs

    return with_round_costs(work)


def _check(work: GenerationTask, options: Options) -> None:
    """``work.check()``; a drafter object that fails without weights is told to bring them."""
    own = isinstance(options.drafter, Drafter) and options.drafter_params is None
    try:
        work.check()
    except MissingWeightsError as error:
        if not own:
            raise
        raise ValueError(
            f"drafter={options.drafter!r:.80} needs weights: give them as drafter_params=..."
        ) from error


def _sibling_sampling(drafting: Drafting, sampling: Sampling) -> str | None:
    """How children are chosen: as the drafting says, else as its rule wants it; None where nothing
    is drawn."""
    if sampling.greedy:
        return None
    if drafting.sibling_sampling is not None:
        return drafting.sibling_sampling
    rule = acceptance.named(drafting.rule)
    return None if rule is None else rule.sibling_sampling


def end_ids(lm: LM) -> tuple[int, ...]:
    """The ids that end a text of the model; none where neither tokenizer nor config knows them."""
    if lm.tokenizer is not None:
        return tuple(lm.tokenizer.eos_ids)
    config = lm.config_if_any
    return () if config is None else tuple(config.eos_ids or ())


def fit(
    lm: LM,
    ids: list[list[int]],
    max_new_tokens,
    least_width: int = SMALLEST_WIDTH,
    least_buffer: int = SMALLEST_BUFFER,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Prompts padded to one of a few widths, and a buffer of one of a few sizes.

    Returns:
      tokens int32 ``[B, T]``, lengths int32 ``[B]``, the capacity of the buffer in tokens.

    Raises:
      ValueError: a prompt and its new tokens exceed the model's context.
    """
    context = lm.max_positions
    lengths = np.asarray([len(prompt) for prompt in ids], np.int32)
    budget = np.asarray(max_new_tokens)
    if not np.issubdtype(budget.dtype, np.integer) or budget.size == 0 or budget.min() < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: it must be an integer, at least 1")
    if budget.shape not in ((), lengths.shape):
        raise ValueError(
            f"max_new_tokens has {budget.size} values for {len(ids)} prompts: give one number, or "
            "one for each prompt"
        )
    ends = lengths + budget
    if context is not None and ends.max() > context:
        length = int(lengths[ends.argmax()])
        room = context - length
        way_out = f"ask for at most {room} new tokens" if room > 0 else "shorten the prompt"
        raise ValueError(
            f"a prompt of {length} tokens and {int(budget.max())} new ones do not fit into the "
            f"context of {lm.name}, {context} tokens: {way_out}"
        )
    tokens = np.zeros((len(ids), round_up(lengths.max(), least_width, context)), np.int32)
    for row, prompt in enumerate(ids):
        tokens[row, : len(prompt)] = prompt
    return tokens, lengths, round_up(ends.max(), least_buffer, context)


def round_up(size: int, smallest: int, limit: int | None = None) -> int:
    """``smallest`` doubled until it holds ``size``, but not beyond ``limit``."""
    rounded = smallest
    while rounded < size:
        rounded *= 2
    return rounded if limit is None else min(rounded, limit)


def seed_key(seed) -> jax.Array:
    """The random key of a seed. JAX would take more seeds, and make equal keys of some."""
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}: it must be an integer from 0 to 2**32 - 1")
    return jax.random.key(int(seed))


def keys_of(seed, rows: int, num_samples: int) -> jax.Array:
    """The random key of a seed, or keys ``[rows * num_samples]`` where each row has a seed.

    A row with a seed of its own has the text that it has alone with that seed.
    """
    check_samples(num_samples)
    seeds = [seed] if np.ndim(seed) == 0 else list(seed)
    keys = [seed_key(one) for one in seeds]
    if np.ndim(seed) == 0:
        return keys[0]
    if len(seeds) != rows:
        raise ValueError(
            f"seed has {len(seeds)} values for {rows} prompts: give one number, or one for each "
            "prompt"
        )
    folded = [jax.random.fold_in(key, sample) for key in keys for sample in range(num_samples)]
    return jnp.stack(folded)


def with_bias(lm: LM, sampling: Sampling) -> Sampling:
    """``sampling`` with a bias that was given as a mapping as an array ``[V]``, and with what the
    model must never write."""
    bias, vocab = sampling.logit_bias, lm.target.vocab_size
    if isinstance(bias, Mapping):
        wrong = [token for token in bias if not 0 <= token < vocab]
        if wrong:
            raise ValueError(f"logit_bias: token ids {wrong[:4]} are not in [0, {vocab})")
        bias, given = np.zeros(vocab, np.float32), bias
        bias[list(given)] = list(given.values())
    bias = encoder_inputs.suppressed(lm, bias)
    return (
        sampling if bias is sampling.logit_bias else dataclasses.replace(sampling, logit_bias=bias)
    )
