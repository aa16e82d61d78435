"""From what a user says to what the loop takes: prompts, sizes, drafters.

Prompt widths and buffers are rounded up to a few sizes, so that the next prompt finds its program
compiled. Everything that can be refused is refused here, before anything compiles.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping, Sequence
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from .. import acceptance, sharding, trees
from ..checkpoints import HeadLM
from ..decoding import continuous_batching, loop
from ..decoding.inputs import DecodeInputs, check_samples
from ..decoding.prefill import PREFILL_CHUNK, chunk_for
from ..decoding.round import draft_and_verify
from ..drafters.adaptive import Adaptive
from ..models.lm import LM
from ..models.seq2seq import encoder_inputs
from ..models.seq2seq.target import encode
from ..sampling.distribution import Sampling
from ..types import Drafter, PyTree
from .drafter_names import AUTO, resolve_drafter
from .round_costs import with_round_costs
from .stop_strings import Strings, per_row

SMALLEST_WIDTH, SMALLEST_BUFFER = 32, 256  # tokens; a step's cost follows those in use

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


class Options(TypedDict, total=False):
    """The options of ``text.generate``, where they are explained."""

    drafter: str | LM | HeadLM | Drafter | None
    num_draft: int | str | None
    tree: trees.Topology | str | Sequence[int] | None
    max_new_tokens: int | Sequence[int]
    temperature: jax.typing.ArrayLike
    top_k: jax.typing.ArrayLike | None
    top_p: jax.typing.ArrayLike | None
    min_p: jax.typing.ArrayLike | None
    repetition_penalty: jax.typing.ArrayLike | None
    presence_penalty: jax.typing.ArrayLike | None
    frequency_penalty: jax.typing.ArrayLike | None
    logit_bias: Mapping[int, float] | jax.typing.ArrayLike | None
    logits_processor: object
    process_drafts: bool
    seed: int | Sequence[int]
    num_samples: int
    rule: object
    stop: Sequence[int] | None
    stop_strings: str | Sequence[str] | Sequence[Sequence[str]] | None
    logprobs: bool | str
    drafter_params: PyTree
    inputs: PyTree


def check_options(function: str, options: Mapping, *own: str) -> None:
    """Raises TypeError for an option that ``function`` does not have, with the nearest that it has.

    ``own``: further keyword arguments of the function, which take no part in ``options``.
    """
    known = [*own, *Options.__annotations__]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise TypeError(f"{function}() has no {name}: {meant}It takes {', '.join(known)}")


@dataclasses.dataclass(frozen=True, eq=False)
class GenerationTask:
    """A request that is ready to run: ``start()``, then ``burst(rounds, state)`` until done.

    ``prompts`` and ``stop_strings`` have an entry for each row, also where rows are samples.
    ``one_memory``: the drafter's encoder is the target's, which reads for both.
    """

    lm: LM
    prompts: list[np.ndarray]
    drafter: Drafter
    rule: object
    capacity: int
    params: PyTree
    request: DecodeInputs
    stop_strings: list[Strings]
    chunk: int = PREFILL_CHUNK
    one_memory: bool = False

    def start(self) -> loop.State:
        """Reads the prompts."""
        objects = self.lm.target, self.drafter, self.rule
        with sharding.using(self.lm.mesh, self.lm.params):
            request = self.asked(self.request)
            return loop.jit_start(*objects, self.capacity, self.params, request, self.chunk)

    def burst(self, rounds: int, state: loop.State) -> loop.State:
        """At most ``rounds`` rounds; takes the buffers of ``state``."""
        objects = self.lm.target, self.drafter, self.rule
        with sharding.using(self.lm.mesh, self.lm.params):
            return loop.jit_burst(*objects, rounds, self.params, state)

    def turn(
        self,
        state: loop.State,
        over: np.ndarray,
        coming: tuple[np.ndarray, DecodeInputs] | None,
        rounds: int,
        live: int,
    ) -> tuple[loop.State, jax.Array]:
        """``rows.turn``; takes the buffers of ``state``."""
        objects = self.lm.target, self.drafter, self.rule
        with sharding.using(self.lm.mesh, self.lm.params):
            if coming is not None:
                coming = coming[0], self.asked(coming[1])
            given = self.params, state, over, coming, rounds, live, self.chunk
            return continuous_batching.jit_turn(*objects, *given)

    def asking(self, **fields) -> GenerationTask:
        """The same with other values, of the same shapes and types, in fields of its request."""
        mesh = self.lm.mesh
        if mesh is not None:
            fields = {name: sharding.put(x, mesh, sharding.DATA) for name, x in fields.items()}
        return dataclasses.replace(self, request=dataclasses.replace(self.request, **fields))

    def end(self, state: loop.State, which: np.ndarray) -> loop.State:
        """Ends the rows ``which`` (bool ``[B]``); takes the buffers of ``state``."""
        with sharding.using(self.lm.mesh, self.lm.params):
            return loop.jit_end(state, which)

    def asked(self, request: DecodeInputs) -> DecodeInputs:
        """``request``, with what the encoder read in place of its inputs where it serves both."""
        if not self.one_memory:
            return request
        inputs = encode(self.lm.target, self.lm.params, request.inputs)
        return dataclasses.replace(request, inputs=inputs)

    @functools.cached_property
    def rule_name(self) -> str:
        """Of the acceptance rule; where it is ``auto``, of the one that this stands for."""
        if self.rule != "auto":
            return self.rule if isinstance(self.rule, str) else self.rule.name
        objects = self.lm.target, self.drafter, self.rule
        given = self.capacity, self.params, self.request, self.chunk
        with sharding.using(self.lm.mesh, self.lm.params):
            state = loop.jit_start.eval_shape(*objects, *given)
            judged = jax.eval_shape(
                functools.partial(draft_and_verify, *objects), self.params, state
            )
        return acceptance.choose(self.rule, judged.draft, self.request.sampling.greedy).name

    @property
    def words(self) -> str:
        """Who drafts how much, and who judges, for a reader."""
        name, num, depth = self.drafter.name, self.drafter.num_draft, self.drafter.depth
        how = f"{num} tokens a round" if num == depth else f"trees of {num} tokens, {depth} deep"
        if isinstance(self.drafter, Adaptive):
            name, how = self.drafter.inner.name, f"as much of {how} as pays"
        return f"drafter {name}, {how}, rule {self.rule_name}"

    def check(self) -> None:
        """Traces both programs, which the run needs anyway, so that a drafter, rule and sampling
        that do not go together are refused before either compiles."""
        objects = self.lm.target, self.drafter, self.rule
        given = self.capacity, self.params, self.request, self.chunk
        with sharding.using(self.lm.mesh, self.lm.params):
            state = loop.jit_start.eval_shape(*objects, *given)
            loop.jit_burst.eval_shape(*objects, 1, self.params, state, 1)


def prepare(
    lm: LM,
    prompts,
    *,
    drafter="draft",
    num_draft=None,
    tree=None,
    max_new_tokens=128,
    temperature=0.0,
    top_k=None,
    top_p=None,
    min_p=None,
    repetition_penalty=None,
    presence_penalty=None,
    frequency_penalty=None,
    logit_bias=None,
    logits_processor=None,
    process_drafts=True,
    seed=0,
    num_samples=1,
    rule="auto",
    stop=None,
    stop_strings=None,
    logprobs=False,
    drafter_params=None,
    inputs=None,
    least_width=SMALLEST_WIDTH,
    least_buffer=SMALLEST_BUFFER,
    chunk=None,
) -> GenerationTask:
    """Checks the arguments of ``text.generate``, where they are explained; makes a ``Job``.

    ``least_width``, ``least_buffer``: of the padded prompts and of the buffer, in tokens, so that
    several requests can share their programs. ``chunk``: prompt tokens read at once; None:
    ``prefill.chunk_for``.
    """
    if isinstance(lm, LM) and encoder_inputs.encodes(lm):
        ids, inputs = encoder_inputs.read(lm, prompts, inputs, prompt_ids)
    else:
        ids = prompt_ids(lm, prompts)
    strings = per_row(stop_strings, len(ids))
    named_rule = acceptance.named(rule)
    if isinstance(logit_bias, Mapping):
        logit_bias = _bias(logit_bias, lm.target.vocab_size)
    logit_bias = encoder_inputs.suppressed(lm, logit_bias)
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        logits_processor=logits_processor,
        process_drafts=process_drafts,
    )
    draft_model, how = drafter, None
    if named_rule is not None and not sampling.greedy:  # at temperature 0 nothing is drawn
        how = named_rule.sibling_sampling
    drafter, drafter_params = resolve_drafter(lm, drafter, num_draft, drafter_params, tree, how)
    tokens, lengths, capacity = fit(lm, ids, max_new_tokens, least_width, least_buffer)
    stops = lm.tokenizer.eos_ids if stop is None else stop
    request, capacity = loop.prepare_inputs(
        lm.target,
        drafter,
        tokens,
        lengths,
        keys_of(seed, len(ids), num_samples),
        max_new_tokens,
        sampling,
        capacity,
        np.asarray(stops),
        inputs,
        logprobs=logprobs,
        num_samples=num_samples,
    )
    params = {"target": lm.params, "drafter": drafter_params} | processor_params(logits_processor)
    params, request = sharding.place(lm.mesh, lm.target, drafter, params, request)
    job = GenerationTask(
        lm=lm,
        prompts=[np.asarray(prompt, np.int32) for prompt in ids for _ in range(num_samples)],
        drafter=drafter,
        rule=rule,
        capacity=capacity,
        params=params,
        request=request,
        chunk=chunk or chunk_for(lm.params),
        stop_strings=[row for row in strings for _ in range(num_samples)],
    )
    job.check()
    if encoder_inputs.one_memory(lm, draft_model):
        job = dataclasses.replace(job, one_memory=True)
    return with_round_costs(job) if num_draft == AUTO and drafter.num_draft else job


def prompt_ids(lm: LM, prompts) -> list[list[int]]:
    """Token ids of each prompt. Raises ValueError for an empty batch or an empty prompt, TypeError
    for what is neither text nor ids."""
    check_lm(lm)
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence | np.ndarray):
        raise _no_prompt(prompts)
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
        prompts = [prompts]
    if not len(prompts):
        raise ValueError("prompts: the batch is empty; give at least one prompt")
    ids = []
    for row, prompt in enumerate(prompts):
        which = f"prompt {row}" if len(prompts) > 1 else "the prompt"
        if isinstance(prompt, jax.Array):
            prompt = np.asarray(prompt)
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence | np.ndarray):
            raise _no_prompt(prompt)
        if isinstance(prompt, str) and not _is_unicode(prompt):
            raise ValueError(f"{which} is no valid text: it was read from bytes that are not UTF-8")
        # a tokenizer that adds a BOS makes one token of "": it is an empty prompt nonetheless
        found = (
            (lm.tokenizer.encode(prompt) if prompt else []) if isinstance(prompt, str) else prompt
        )
        if not len(found):
            raise ValueError(
                f"{which} is empty: give at least one character, or the ids of a token to begin "
                "with, such as [lm.config.bos_id]"
            )
        if not all(isinstance(token, int | np.integer) for token in found):
            raise _no_prompt(prompt)
        ids.append([int(token) for token in found])
    return ids


def check_lm(lm) -> None:
    """Raises TypeError for what is no model, ValueError for one without a tokenizer."""
    if not isinstance(lm, LM):
        raise TypeError(f"lm={lm!r}: give what specjax.load returns, and then the prompts")
    if lm.tokenizer is None:
        raise ValueError(
            f"{lm.name} was loaded without a tokenizer: load it with one, or use specjax.decode, "
            "which takes and gives token ids"
        )


def fit(
    lm: LM,
    ids: list[list[int]],
    max_new_tokens,
    least_width: int = SMALLEST_WIDTH,
    least_buffer: int = SMALLEST_BUFFER,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Prompts padded to one of a few widths, and a buffer of one of a few sizes.

    Returns:
      tokens int32 ``[B, T]``, lengths int32 ``[B]``, the capacity of the buffer.

    Raises:
      ValueError: the prompt and what is asked for exceed the model's context.
    """
    context = lm.target.max_positions
    lengths = np.asarray([len(prompt) for prompt in ids], np.int32)
    budget = np.asarray(max_new_tokens)
    if not np.issubdtype(budget.dtype, np.integer) or budget.size == 0 or budget.min() < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}: it must be an integer, at least 1")
    if budget.shape not in ((), lengths.shape):
        raise ValueError(
            f"max_new_tokens has {budget.size} values for {len(ids)} prompts: give one number, or "
            "one a prompt"
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
    """The random key of a seed, or keys ``[rows * num_samples]`` of one seed a row.

    A row with a seed of its own says what it says alone with that seed.
    """
    check_samples(num_samples)
    seeds = [seed] if np.ndim(seed) == 0 else list(seed)
    keys = [seed_key(one) for one in seeds]
    if np.ndim(seed) == 0:
        return keys[0]
    if len(seeds) != rows:
        raise ValueError(
            f"seed has {len(seeds)} values for {rows} prompts: give one number, or one a prompt"
        )
    folded = [jax.random.fold_in(key, sample) for key in keys for sample in range(num_samples)]
    return jnp.stack(folded)


def processor_params(processor) -> PyTree:
    """``{"logits_processor": arrays}`` of a processor that has some, for ``params``."""
    arrays = getattr(processor, "params", None)
    return {} if arrays is None else {"logits_processor": arrays}


def _no_prompt(given) -> TypeError:
    return TypeError(
        f"prompts: {given!r:.60} is no prompt: give a text or a list of token ids (integers), or "
        "a list of either"
    )


def _is_unicode(text: str) -> bool:
    """False if bytes that are no UTF-8 were smuggled in, as in arguments of a command."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bias(bias: Mapping[int, float], vocab: int) -> np.ndarray:
    wrong = [token for token in bias if not 0 <= token < vocab]
    if wrong:
        raise ValueError(f"logit_bias: token ids {wrong[:4]} are not in [0, {vocab})")
    full = np.zeros(vocab, np.float32)
    full[list(bias)] = list(bias.values())
    return full
