"""A batch whose finished rows are filled again: which prompt stands in which row, and when.

The compiled loop runs until enough rows are free, the next prompts are inserted (``rows.insert``),
and it goes on.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from . import encoder_inputs, job, loop, sharding
from .job import Job
from .models.lm import LM
from .models.seq2seq import BEGIN
from .prompt_file import NEUTRAL, Prompt
from .request import Request
from .rows import CHUNK, CHUNK_ON_CPU
from .state import ENDED, STOPPED
from .stopping import RowText

KEYS = "threefry2x32"  # whatever the default: as the loop's own
COUNTS = ("rounds", "emitted", "drafted", "accepted")
# seconds after which a burst ends at the latest, about: for Ctrl-C and progress; and where a stop
# string may be met, behind which every round is in vain
BURST, WATCHFUL = 0.3, 0.03


@dataclasses.dataclass(frozen=True)
class Row:
    """A finished prompt.

    Attributes:
      index: its place among the prompts; in a file, the line's number less one.
      id: as given with the prompt, or None.
      text: what was generated, without special tokens.
      tokens: its token ids; an end-of-text token is kept.
      finish: why it ended: ``stop``, ``length`` (what was asked for, or the context is full),
        ``no token`` (its law gave none a probability).
      rounds, drafted, accepted: see ``Stats``.
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
class Standing:
    """A prompt in a row, and its text: what is ``said`` is what became certain of it."""

    prompt: Prompt
    text: RowText
    said: str = ""


class Continuous:
    """A batch under way; ``tokens`` and ``rounds`` count what it has done, over all rows.

    Args:
      found: all prompts of the run: they decide the buffers and which settings programs have, so
        that a run that goes on has the programs of the one before.
      waiting: those to be decoded, at least one; the first ones make the batch.
      batch, gather, seed, ways: of ``serve_offline``.
    """

    def __init__(self, lm: LM, found, waiting: list[Prompt], batch: int, gather, seed: int, ways):
        # over a mesh, a whole number of rows on each device
        parts = 1 if lm.mesh is None else lm.mesh.shape.get(sharding.DATA, 1)
        sharding.check_rows(batch, parts)
        self._batch = -(-min(batch, len(waiting)) // parts) * parts
        self._gather = min(self._batch, gather or max(1, self._batch // 8))
        self._lm, self._waiting = lm, waiting
        self._seed = seed
        # settings that no prompt has stay out of the programs
        self._settings = [
            name
            for name, none in NEUTRAL.items()
            if any(prompt.settings[name] not in (None, none) for prompt in found)
        ]
        self._num_stops = max(1, *(len(prompt.stop) for prompt in found))
        longest = max(len(prompt.tokens) + prompt.max_new_tokens for prompt in found)
        context = getattr(lm.target, "max_positions", None)
        capacity = job.round_up(longest, job.SMALLEST_BUFFER, context)
        self._width = encoder_inputs.width_of([prompt.source for prompt in found])
        first = waiting[: self._batch]
        self._next = len(first)
        idle = self._batch - len(first)
        self._standing: list[Standing | None] = [*map(self._stand, first), *[None] * idle]
        first = [*first, *first[:1] * idle]
        work = job.prepare(
            lm,
            [prompt.tokens for prompt in first],
            max_new_tokens=[prompt.max_new_tokens for prompt in first],
            stop=self._stops(first),
            inputs=self._inputs(first),
            least_width=capacity,
            least_buffer=capacity,
            chunk=CHUNK_ON_CPU if jax.default_backend() == "cpu" else CHUNK,
            **self._values(first),
            **ways,
        )
        self._work: Job = work.asking(
            key=self._keys(first),
            budget=np.asarray(
                [s.prompt.max_new_tokens if s else 0 for s in self._standing], np.int32
            ),
        )
        self._done = [0, 0]  # tokens and rounds of finished rows
        self.tokens = self.rounds = 0

    def run(self) -> Iterator[list[Row]]:
        """What finished, after each burst, until everything has."""
        state, rounds = self._work.start(), 1
        found, over = self._collect(state)
        yield found
        while True:
            if over.any():  # they met a stop string: they must cost nothing more
                state = self._work.end(state, over)
            state = self._fill(state)
            standing, left = [s for s in self._standing if s], len(self._waiting) - self._next
            if not standing:
                return
            # it ends as soon as the next prompts have room
            live = self._batch - min(self._gather, left) + 1 if left else 1
            before, begin = self.rounds, time.perf_counter()
            state = self._work.burst(rounds, state, live)
            jax.block_until_ready(state.length)
            spent = time.perf_counter() - begin
            found, over = self._collect(state)
            yield found
            wanted = WATCHFUL if any(s.prompt.stop_strings for s in standing) else BURST
            # a row may have ended early, so this is what a round takes at most
            rounds = max(1, int(wanted / spent * (self.rounds - before) / len(standing)))

    def _collect(self, state: loop.State) -> tuple[list[Row], np.ndarray]:
        """The rows that have finished since, which are free then; and which of them met a stop
        string, bool ``[B]``."""
        lengths, ended, tokens = (np.asarray(x) for x in (state.length, state.ended, state.tokens))
        counts = {name: np.asarray(getattr(state.stats, name)) for name in COUNTS}
        found, over = [], np.zeros(self._batch, bool)
        self.tokens, self.rounds = self._done
        for row, standing in enumerate(self._standing):
            if standing is None:
                continue
            prompt, text = standing.prompt, standing.text
            new = tokens[row, len(prompt.tokens) : lengths[row]]
            self.tokens += len(new)
            self.rounds += int(counts["rounds"][row])
            if prompt.stop_strings or ended[row]:
                standing.said += text.push(new[text.num :])
            over[row] = text.over
            if not (ended[row] or text.over):
                continue
            found.append(
                Row(
                    index=prompt.index,
                    id=prompt.id,
                    text=standing.said + text.flush(),
                    tokens=new[: text.num].tolist(),
                    finish=ENDED[STOPPED if text.over else int(ended[row])],
                    rounds=int(counts["rounds"][row]),
                    drafted=int(counts["drafted"][row]),
                    accepted=int(counts["accepted"][row]),
                )
            )
            self._done[0] += text.num
            self._done[1] += found[-1].rounds
            self._standing[row] = None
        return found, over

    def _fill(self, state: loop.State) -> loop.State:
        """Inserts the next prompts, if enough rows are free for them."""
        while left := len(self._waiting) - self._next:
            free = [row for row, standing in enumerate(self._standing) if standing is None]
            num = min(self._gather, left)
            if len(free) < num:
                break
            prompts = self._waiting[self._next : self._next + num]
            self._next += num
            for row, prompt in zip(free, prompts, strict=False):
                self._standing[row] = self._stand(prompt)
            # always of one size: what is beyond the batch is left out
            where = [*free[:num], *[self._batch] * (self._gather - num)]
            request = self._request([*prompts, *[prompts[0]] * (self._gather - num)])
            state = self._work.insert(np.asarray(where, np.int32), request, state)
        return state

    def _stand(self, prompt: Prompt) -> Standing:
        return Standing(prompt, RowText(self._lm.tokenizer, prompt.tokens, prompt.stop_strings))

    def _request(self, prompts: list[Prompt]) -> Request:
        """A request of as many rows, in the shapes of the batch's."""
        like = self._work.request
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
            key=self._keys(prompts),
            budget=np.asarray([prompt.max_new_tokens for prompt in prompts], np.int32),
            sampling=dataclasses.replace(like.sampling, **sampling),
            stops=self._stops(prompts),
            inputs=inputs,
        )

    def _inputs(self, prompts: list[Prompt]) -> dict | None:
        """What the encoder reads, if there is one, always in the same shapes."""
        return encoder_inputs.of_rows([prompt.source for prompt in prompts], self._width)

    def _values(self, prompts: list[Prompt]) -> dict[str, np.ndarray]:
        """Each setting of the programs, one value a prompt."""

        def values(name, none):
            given = [prompt.settings[name] for prompt in prompts]
            dtype = np.int32 if isinstance(none, int) else np.float32
            return np.asarray([none if value is None else value for value in given], dtype)

        return {name: values(name, NEUTRAL[name]) for name in self._settings}

    def _keys(self, prompts: list[Prompt]) -> jax.Array:
        """As ``generate`` gives them: row ``index`` under the run's seed; under a prompt's own, the
        one that it has alone."""
        own = [(self._seed, p.index) if p.seed is None else (p.seed, 0) for p in prompts]
        return _fold(*np.asarray(own, np.uint32).T)

    def _stops(self, prompts: list[Prompt]) -> np.ndarray:
        """int32 ``[K, E]``, padded with -1."""
        padded = [[*p.stop, *[-1] * (self._num_stops - len(p.stop))] for p in prompts]
        return np.asarray(padded, np.int32).reshape(len(prompts), self._num_stops)


@jax.jit
@jax.vmap
def _fold(seed, index):
    return jax.random.fold_in(jax.random.key(seed, impl=KEYS), index)
