"""The scheduler of continuous batching: it decides which prompt is decoded in which row, and when.

The compiled loop runs until enough rows are free; then the next prompts are inserted as the loop
continues (``continuous_batching.turn``).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import kernels, sharding
from ..decoding.continuous_batching import REPORT, jit_report
from ..decoding.inputs import KEYS, DecodeInputs
from ..decoding.state import ENDED, SPENT, STOPPED, State
from ..models.lm import LM
from ..models.seq2seq import encoder_inputs
from ..models.seq2seq.target import BEGIN
from ..sampling.distribution import Sampling
from ..text.options import Options
from ..text.prepare import SMALLEST_BUFFER, prepare_fastest, round_up
from ..text.stop_strings import RowText
from ..text.task import GenerationTask
from .jsonl_input import NEUTRAL, Prompt

# the intended duration of a burst in seconds, for Ctrl-C and progress; it is shorter where a stop
# string may occur, because every round after it is wasted
BURST, WATCHFUL = 0.3, 0.03
CONTEXT = "context"  # ``Row.finish`` where the context is full before the budget is used up
FOLDED = 256  # the number of keys that one program makes


@dataclasses.dataclass(frozen=True)
class Row:
    """A finished prompt.

    Attributes:
      index: the index of the prompt in the list; in a file, the number of its line, counted from 0.
      id: the ``id`` that was given with the prompt, or None.
      text: the generated text, without special tokens.
      tokens: the generated token ids, including an end-of-text token.
      finish: why the text ended: ``stop`` (an end-of-text token or a stop string), ``length`` (the
        budget ``max_new_tokens`` is used up), ``context`` (the context is full before the budget is
        used up), or ``no token`` (the law gave no token any probability).
      rounds, drafted, accepted: the numbers of rounds, of drafted and of accepted tokens, see
        ``Stats``.
    """

    index: int
    id: Any
    text: str
    tokens: list[int]
    finish: str
    rounds: int
    drafted: int
    accepted: int


@dataclasses.dataclass
class LiveRow:
    """A prompt in a row, and its text.

    Attributes:
      prompt: the prompt.
      text: turns tokens into text.
      said: the part of the text that later tokens cannot change.
      tokens: all committed tokens, or None before the first burst.
    """

    prompt: Prompt
    text: RowText
    said: str = ""
    tokens: np.ndarray | None = None


class Continuous:
    """A batch that is being decoded.

    Args:
      lm: the target.
      found: all prompts of the run. They determine the sizes of the buffers and the settings in the
        compiled programs, so that a resumed run has the same programs as the run before.
      waiting: the prompts to be decoded, at least one; the first ones fill the batch.
      batch, gather, options: see ``serve_offline``.

    Attributes:
      tokens: the number of emitted tokens, summed over all rows, with those after a stop string.
      rounds: the number of rounds, summed over all rows.
      firsts: how many of the tokens were the first of their row, which no round emits.
    """

    def __init__(
        self, lm: LM, found, waiting: list[Prompt], batch: int, gather: int | None, options: Options
    ):
        # on a mesh, each device has a whole number of rows
        parts = 1 if lm.mesh is None else lm.mesh.shape.get(sharding.DATA, 1)
        sharding.check_rows(batch, parts)
        self._batch = -(-min(batch, len(waiting)) // parts) * parts
        self._gather = min(self._batch, gather or max(1, self._batch // 8))
        self._lm, self._waiting = lm, waiting
        # settings that no prompt has stay out of the programs
        self._settings = [
            name
            for name, none in NEUTRAL.items()
            if any(prompt.settings[name] not in (None, none) for prompt in found)
        ]
        self._num_stops = max(1, *(len(prompt.stop) for prompt in found))
        longest = max(len(prompt.tokens) + prompt.max_new_tokens for prompt in found)
        context = lm.max_positions
        capacity = round_up(longest, SMALLEST_BUFFER, context)
        self._width = encoder_inputs.width_of([prompt.source for prompt in found])
        first = waiting[: self._batch]
        self._next = len(first)
        idle = self._batch - len(first)
        self._standing: list[LiveRow | None] = [*map(self._stand, first), *[None] * idle]
        first = [*first, *first[:1] * idle]
        work = prepare_fastest(
            lm,
            [prompt.tokens for prompt in first],
            dataclasses.replace(
                options,
                sampling=Sampling(
                    logits_processor=options.sampling.logits_processor,
                    process_drafts=options.sampling.process_drafts,
                    **self._values(first),
                ),
                max_new_tokens=[prompt.max_new_tokens for prompt in first],
                seed=0,
                stop=self._stops(first),
                stop_strings=None,
                inputs=self._inputs(first),
            ),
            least_width=capacity,
            least_buffer=capacity,
            # a few prompts are inserted at a time
            chunk=kernels.of(lm.params).serving_chunk(),
            all_rows=Sampling(**self._values(found)),
        )
        # the keys of ``generate``: that of row ``index`` for the run's seed; for a prompt with its
        # own seed, the key that it has alone
        own = [(options.seed, p.index) if p.seed is None else (p.seed, 0) for p in waiting]
        self._keys = _keys(np.asarray(own, np.uint32))
        self._work: GenerationTask = work.asking(
            key=jax.random.wrap_key_data(
                jnp.asarray(np.resize(self._keys, (self._batch, 2))), impl=KEYS
            ),
            budget=np.asarray(
                [s.prompt.max_new_tokens if s else 0 for s in self._standing], np.int32
            ),
        )
        self._done = [0, 0, 0]  # tokens, rounds and first tokens of finished rows
        self.tokens = self.rounds = self.firsts = 0

    def run(self) -> Iterator[list[Row]]:
        """Yields the finished rows after each burst, until all prompts are finished."""
        state, rounds = self._work.start(), 1
        found, over = self._collect(state, np.asarray(jit_report(state)))
        yield found
        while True:
            coming = self._coming()
            standing, left = [s for s in self._standing if s], len(self._waiting) - self._next
            if not standing:
                return
            # the burst ends as soon as enough rows are free for the next prompts
            live = self._batch - min(self._gather, left) + 1 if left else 1
            before, begin = self.rounds, time.perf_counter()
            self._work = self._work.refreshed(self._texts)
            # rows with a stop string (``over``) take no part in further rounds
            state, report = self._work.turn(state, over, coming, rounds, live)
            report = np.asarray(report)
            spent = time.perf_counter() - begin
            found, over = self._collect(state, report)
            yield found
            wanted = WATCHFUL if any(s.prompt.stop_strings for s in standing) else BURST
            if done := self.rounds - before:
                # a row may have ended early, so this bounds the time of a round from above
                rounds = max(1, int(wanted / spent * done / len(standing)))

    def _collect(self, state: State, report: np.ndarray) -> tuple[list[Row], np.ndarray]:
        """Returns the rows that have finished since the last call, which are now free, and bool
        ``[B]``: the rows whose text has met a stop string."""
        tokens, said = np.asarray(state.tokens), report.tolist()
        found, over = [], np.zeros(self._batch, bool)
        self.tokens, self.rounds, self.firsts = self._done
        for row, standing in enumerate(self._standing):
            if standing is None:
                continue
            prompt, text = standing.prompt, standing.text
            length, ended, *counts = said[row]
            begin = len(prompt.tokens)
            standing.tokens = tokens[row, :length]
            self.tokens += length - begin
            self.rounds += counts[0]
            self.firsts += length > begin
            if prompt.stop_strings or ended:
                standing.said += text.push(tokens[row, begin + text.num : length])
            over[row] = text.over
            if not (ended or text.over):
                continue
            found.append(
                Row(
                    index=prompt.index,
                    id=prompt.id,
                    text=standing.said + text.flush(),
                    tokens=tokens[row, begin : begin + text.num].tolist(),
                    finish=_finish(prompt, STOPPED if text.over else ended),
                    **dict(zip(REPORT[2:], counts, strict=True)),
                )
            )
            if self._work.session is not None:
                self._work.session.add(prompt.tokens, found[-1].tokens)
            self._done[0] += length - begin
            self._done[1] += counts[0]
            self._done[2] += length > begin
            self._standing[row] = None
        return found, over

    def _texts(self) -> list[np.ndarray]:
        """Returns the committed tokens of the rows that are still decoded."""
        rows = [standing for standing in self._standing if standing]
        return [np.asarray(r.prompt.tokens if r.tokens is None else r.tokens) for r in rows]

    def _coming(self) -> tuple[np.ndarray, DecodeInputs] | None:
        """Returns the rows and the inputs of the next prompts; None if too few rows are free."""
        free = [row for row, standing in enumerate(self._standing) if standing is None]
        begin, num = self._next, min(self._gather, len(self._waiting) - self._next)
        if not num or len(free) < num:
            return None
        self._next += num
        # the size is always the same: entries with a row beyond the batch are ignored
        which = [begin + min(i, num - 1) for i in range(self._gather)]
        where = np.full(self._gather, self._batch, np.int32)
        where[:num] = free[:num]
        for row, index in zip(free, which[:num], strict=False):
            self._standing[row] = self._stand(self._waiting[index])
        return where, self._request(which)

    def _stand(self, prompt: Prompt) -> LiveRow:
        return LiveRow(prompt, RowText(self._lm.tokenizer, prompt.tokens, prompt.stop_strings))

    def _request(self, which: list[int]) -> DecodeInputs:
        """Returns the inputs of waiting prompts, in the shapes of the batch; keys are raw data."""
        prompts, like = [self._waiting[index] for index in which], self._work.request
        tokens = np.zeros((len(prompts), self._work.capacity), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt.tokens)] = prompt.tokens
        cold = np.zeros(len(prompts), np.float32)
        sampling = {"temperature": cold, **self._values(prompts)}
        lengths = encoder_inputs.lengths_of([prompt.tokens for prompt in prompts])
        inputs = self._inputs(prompts)
        if inputs is not None:
            inputs[BEGIN] = lengths
            bias = encoder_inputs.suppressed(self._lm, None)
            if bias is not None:
                sampling["logit_bias"] = np.tile(bias, (len(prompts), 1))
        return dataclasses.replace(
            like,
            tokens=tokens,
            lengths=lengths,
            key=self._keys[which],
            budget=np.asarray([prompt.max_new_tokens for prompt in prompts], np.int32),
            sampling=dataclasses.replace(like.sampling, **sampling),
            stops=self._stops(prompts),
            inputs=inputs,
        )

    def _inputs(self, prompts: list[Prompt]) -> dict | None:
        """Returns the inputs of the encoder, always of the same shapes; None without an encoder."""
        return encoder_inputs.of_rows([prompt.source for prompt in prompts], self._width)

    def _values(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Returns each sampling setting of the programs as an array ``[K]``, one value a prompt."""

        def values(name, none):
            given = [prompt.settings[name] for prompt in prompts]
            dtype = np.int32 if isinstance(none, int) else np.float32
            return np.asarray([none if value is None else value for value in given], dtype)

        return {name: values(name, NEUTRAL[name]) for name in self._settings}

    def _stops(self, prompts: list[Prompt]) -> np.ndarray:
        """Returns the token ids that end each of K texts: int32 ``[K, E]``, padded with -1."""
        padded = [[*p.stop, *[-1] * (self._num_stops - len(p.stop))] for p in prompts]
        return np.asarray(padded, np.int32).reshape(len(prompts), self._num_stops)


def _finish(prompt: Prompt, ended: int) -> str:
    """Returns why the text of a prompt ended; ``ended`` is an index into ``state.ENDED``."""
    full = ended == SPENT and prompt.max_new_tokens < prompt.asked_tokens
    return CONTEXT if full else ENDED[ended]


def _keys(own: np.ndarray) -> np.ndarray:
    """Returns raw keys uint32 ``[P, 2]`` by one compiled program for any number P.

    Args:
      own: uint32 ``[P, 2]``, the seed and the number that is folded into its key.
    """
    size = -(-len(own) // FOLDED) * FOLDED
    pieces = np.pad(own, ((0, size - len(own)), (0, 0))).reshape(-1, FOLDED, 2)
    return np.concatenate([np.asarray(_fold(*piece.T)) for piece in pieces])[: len(own)]


@jax.jit
@jax.vmap
def _fold(seed, index):
    return jax.random.key_data(jax.random.fold_in(jax.random.key(seed, impl=KEYS), index))
