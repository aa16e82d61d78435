"""Turns prompts and options into a task that is ready to run.

Prompt widths and buffers are rounded up to a few sizes, so that the program for the next prompt has
already been compiled. Wrong input is refused here, before anything is compiled.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from .. import acceptance, sharding
from .._internal.optional import required
from .._internal.own_objects import is_own
from ..decoding.contract_checks import MissingWeightsError
from ..decoding.inputs import check_even, check_samples, check_stops, prepare_inputs
from ..decoding.prefill import chunk_for
from ..drafters.adaptive import Adaptive
from ..models.lm import LM
from ..models.seq2seq import encoder_inputs
from ..sampling import processors
from ..sampling.distribution import Sampling
from ..types import Drafter
from . import sibling_sampling
from .auto_number import is_auto
from .drafter_names import named, resolve_drafter
from .options import Drafting, Options
from .prompts import check_lm, check_tokenizer, prompt_ids
from .session import Session
from .stop_strings import per_row
from .task import GenerationTask
from .unused_options import refuse_unused

SMALLEST_WIDTH, SMALLEST_BUFFER = 32, 256  # tokens; the time of a step depends on the slots in use

_CHUNKS: weakref.WeakKeyDictionary[LM, int] = weakref.WeakKeyDictionary()  # tokens, see _chunk


def prepare(
    lm: LM,
    prompts,
    options: Options,
    *,
    least_width: int = SMALLEST_WIDTH,
    least_buffer: int = SMALLEST_BUFFER,
    chunk: int | None = None,
    all_rows: Sampling | None = None,
) -> GenerationTask:
    """Checks a request of ``generate`` and makes a task of it.

    With ``num="auto"`` the costs of the drafter's rounds are not measured yet, see
    ``prepare_measured``.

    Args:
      lm, prompts, options: see ``generate``.
      least_width: the least width of the padded prompts, in tokens. Requests with equal widths and
        buffers share their compiled programs.
      least_buffer: the least capacity of the token buffer, in tokens.
      chunk: the number of prompt tokens that one pass reads; None: ``prefill.chunk_for``.
      all_rows: the settings of all rows that the task will decode, where further ones take the
        places of those that end; None: ``options.sampling``.

    Raises:
      ValueError, TypeError: an option is wrong; the error names it and the accepted values.
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
    sampling.check()
    drafter = options.drafter
    if isinstance(drafter, str | os.PathLike):
        drafter = named(lm, drafter)
    acceptance.named(drafting.rule)
    refuse_unused(options.drafter, drafter, drafting, options.drafter_params)
    drafter, drafter_params = resolve_drafter(
        lm,
        drafter,
        drafting.num,
        options.drafter_params,
        drafting.tree,
        sibling_sampling.wanted(drafting, sampling if all_rows is None else all_rows),
    )
    stops = end_ids(lm) if options.stop is None else options.stop
    check_even("stop", stops, "with -1")
    if np.asarray(stops).dtype.kind == "U":
        raise ValueError(f"stop={stops!r:.60}: it takes token ids; give texts as stop_strings")
    check_stops(stops, (len(ids),), "stop")
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
        np.asarray(stops),
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
        chunk=chunk or _chunk(lm),
        stop_strings=[row for row in strings for _ in range(num_samples)],
        session=options.drafter if isinstance(options.drafter, Session) else None,
    )
    _check(work, options)
    shared = encoder_inputs.one_memory(lm, options.drafter)
    return dataclasses.replace(work, one_memory=True) if shared else work


def prepare_measured(lm: LM, prompts, options: Options, **sizes) -> GenerationTask:
    """Prepares a task; with ``num="auto"``, also measures the costs of rounds if they are unknown
    and the policy reads them.

    Args:
      lm, prompts, options: see ``generate``.
      sizes: further arguments of ``prepare``.

    Raises:
      ValueError, TypeError: as for ``prepare``.
    """
    work = prepare(lm, prompts, options, **sizes)
    if _priced(work, options) is None:
        return work
    from .round_costs import with_round_costs  # times programs, which no other request needs

    return with_round_costs(work)


def _priced(work: GenerationTask, options: Options) -> Adaptive | None:
    """The drafter of ``num="auto"`` where its policy reads costs; else None."""
    drafter = work.drafter
    if not is_auto(options.drafting.num) or not isinstance(drafter, Adaptive):
        return None
    return drafter if drafter.decides.reads_costs else None


def prepare_fastest(lm: LM, prompts, options: Options, **sizes) -> GenerationTask:
    """Prepares a task as ``prepare_measured`` does, for plain decoding where the policy of
    ``num="auto"`` finds that no number of drafts could pay, even if the target accepted all: then
    not even the prompt is read for the drafter. A session keeps its drafter, which learns.

    Args:
      lm, prompts, options: see ``generate``.
      sizes: further arguments of ``prepare``.

    Raises:
      ValueError, TypeError: as for ``prepare``.
    """
    work = prepare_measured(lm, prompts, options, **sizes)
    drafter = _priced(work, options)
    if drafter is None or work.session is not None:
        return work
    costs = sharding.gather(work.params["drafter"]["costs"])
    if drafter.decides.may_pay(required(drafter.widths, "widths"), costs):
        return work
    drafting = Drafting(rule=options.drafting.rule)
    plain = dataclasses.replace(options, drafter=None, drafter_params=None, drafting=drafting)
    return dataclasses.replace(prepare(lm, prompts, plain, **sizes), unpaid=work)


def _chunk(lm: LM) -> int:
    """Returns ``chunk_for`` of the model's weights, which are looked through once."""
    if lm not in _CHUNKS:
        _CHUNKS[lm] = chunk_for(lm.params)
    return _CHUNKS[lm]


def _check(work: GenerationTask, options: Options) -> None:
    """Calls ``work.check()``; if a drafter object lacks its weights, the error says how to give
    them."""
    given = options.drafter
    own = isinstance(given, Drafter) and options.drafter_params is None
    try:
        work.check()
    except MissingWeightsError as error:
        if isinstance(given, str) and is_own(given):
            raise ValueError(
                f"drafter={given!r} needs weights, which its name does not bring: in Python, give "
                "the object as drafter=..., and its weights as drafter_params=..."
            ) from error
        if not own:
            raise
        raise ValueError(
            f"drafter={given!r:.80} needs weights: give them as drafter_params=..."
        ) from error


def end_ids(lm: LM) -> tuple[int, ...]:
    """Returns the ids that end a text of the model; none if neither the tokenizer nor the config
    has them."""
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
    """Pads prompts to one of a few widths, and chooses one of a few sizes of the buffer.

    Args:
      lm: the target.
      ids: the token ids of each prompt.
      max_new_tokens: the budget of all rows, or of each row.
      least_width, least_buffer: see ``prepare``.

    Returns:
      tokens int32 ``[B, T]``, lengths int32 ``[B]``, and the capacity of the buffer in tokens.

    Raises:
      ValueError: an id is none of the vocabulary, ``max_new_tokens`` is wrong, or a prompt and its
        new tokens exceed the model's context.
    """
    context = lm.max_positions
    lengths = np.asarray([len(prompt) for prompt in ids], np.int32)
    least, most = min(map(min, ids)), max(map(max, ids))
    if least < 0 or most >= lm.target.vocab_size:
        raise ValueError(
            f"prompts: ids from {least} to {most}, and the target's vocabulary has "
            f"{lm.target.vocab_size}: was another tokenizer used?"
        )
    budget = np.asarray(max_new_tokens)
    if not np.issubdtype(budget.dtype, np.integer) or budget.size == 0 or budget.min() < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}: it must be an integer, at least 1")
    if budget.shape not in ((), lengths.shape):
        raise ValueError(
            f"max_new_tokens has {budget.size} values for {len(ids)} prompts: give one number, or "
            "one for each prompt"
        )
    ends = lengths + budget
    if context is not None and ends.max() > context:
        row = ends.argmax()
        length, asked = int(lengths[row]), int(np.broadcast_to(budget, ends.shape)[row])
        room = context - length
        way_out = f"ask for at most {room} new tokens" if room > 0 else "shorten the prompt"
        raise ValueError(
            f"a prompt of {length} tokens and {asked} new ones do not fit into the "
            f"context of {lm.name}, which has {context} tokens: {way_out}"
        )
    tokens = np.zeros((len(ids), round_up(lengths.max(), least_width, context)), np.int32)
    for row, prompt in enumerate(ids):
        tokens[row, : len(prompt)] = prompt
    return tokens, lengths, round_up(ends.max(), least_buffer, context)


def round_up(size: int, smallest: int, limit: int | None = None) -> int:
    """Returns ``smallest`` times the least power of two that makes it at least ``size``, at most
    ``limit``."""
    rounded = smallest
    while rounded < size:
        rounded *= 2
    return rounded if limit is None else min(rounded, limit)


def seed_key(seed) -> jax.Array:
    """Returns the random key of a seed.

    Args:
      seed: an integer from 0 to 2**32 - 1. JAX accepts other seeds as well, but some of them have
        equal keys.

    Raises:
      ValueError: ``seed`` is out of range.
    """
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}: it must be an integer from 0 to 2**32 - 1")
    return jax.random.key(int(seed))


def keys_of(seed, rows: int, num_samples: int) -> jax.Array:
    """Returns the random key of a seed, or a key for each row if each prompt has a seed.

    A row whose prompt has its own seed has the text that it has alone with that seed.

    Args:
      seed: one integer, or one for each prompt.
      rows: the number of prompts.
      num_samples: the number of texts for each prompt.

    Returns:
      one key, or keys ``[rows * num_samples]``.

    Raises:
      ValueError: a seed is out of range, or there are other numbers of seeds and prompts.
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
    """Returns sampling settings whose ``logit_bias`` is an array and suppresses forbidden tokens.

    A mapping from token id to bias becomes float32 ``[V]``. The tokens that the model must never
    emit get the bias -inf.

    Raises:
      ValueError: a token id is out of range, or its bias is NaN or inf.
    """
    bias, vocab = sampling.logit_bias, lm.target.vocab_size
    if isinstance(bias, Mapping):
        wrong = [
            token
            for token in bias
            if not (isinstance(token, int | np.integer) and 0 <= token < vocab)
        ]
        if wrong:
            raise ValueError(f"logit_bias: token ids {wrong[:4]} are not in [0, {vocab})")
        for token, value in bias.items():
            if not np.asarray(value, np.float32) < np.inf:  # so that NaN is found, too
                raise ValueError(
                    f"logit_bias={{{token}: {value}}}: a bias must be a finite number or -inf"
                )
        bias, given = np.zeros(vocab, np.float32), bias
        bias[list(given)] = list(given.values())
    bias = encoder_inputs.suppressed(lm, bias)
    return (
        sampling if bias is sampling.logit_bias else dataclasses.replace(sampling, logit_bias=bias)
    )
