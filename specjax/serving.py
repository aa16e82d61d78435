"""``serve_offline``: a file of prompts through a batch whose finished rows are filled again.

Whole batches wait for their longest row. Here the compiled loop runs until a few rows are free,
the next prompts take their place (``rows.insert``), and it goes on: three programs in all, however
long prompts and texts are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from . import job, loop, prompt_file
from .job import Job
from .models.lm import LM
from .models.tokenizer import StreamDecoder
from .output_file import OutputFile
from .prompt_file import NEUTRAL, Broken, Prompt
from .rows import CHUNK, CHUNK_ON_CPU, jit_insert

KEYS = "threefry2x32"  # whatever the default: as the loop's own
COUNTS = ("rounds", "emitted", "drafted", "accepted")
BURST = 0.3  # seconds after which a burst ends at the latest, about: for Ctrl-C and progress


@dataclasses.dataclass(frozen=True)
class Row:
    """A finished prompt.

    Attributes:
      index: its place among the prompts; in a file, the line's number less one.
      id: as given with the prompt, or None.
      text: what was generated, without special tokens.
      tokens: its token ids; an end-of-text token is kept.
      finish: why it ended: ``stop``, ``length`` (what was asked for), ``context`` (it is full).
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


@dataclasses.dataclass(frozen=True)
class Served:
    """What a run served.

    Attributes:
      rows: the finished prompts, by index, those of earlier runs included.
      broken: prompts that were left out.
      earlier: how many rows are of earlier runs.
      seconds: that this run decoded for, programs and output included.
      finished: False if Ctrl-C ended it.
    """

    rows: list[Row]
    broken: list[Broken]
    earlier: int
    seconds: float
    finished: bool

    @property
    def texts(self) -> list[str]:
        """The text of each finished prompt, by index."""
        return [row.text for row in self.rows]


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is: ``done`` of ``total`` prompts, those of earlier runs included; new
    ``tokens`` and target passes (``rounds``, of each row) of this run, after ``seconds``."""

    done: int
    total: int
    tokens: int
    rounds: int
    seconds: float

    @property
    def tau(self) -> float:
        """Mean tokens emitted by a pass of the target over a row."""
        return self.tokens / max(1, self.rounds)

    @property
    def rate(self) -> float:
        """New tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.done} of {self.total} prompts · {self.tokens:,} tokens · "
            f"{self.rate:,.0f} tokens/s · τ {self.tau:.2f}"
        )


def serve_offline(
    lm: LM,
    prompts: str | os.PathLike | Sequence,
    *,
    output: str | os.PathLike | None = None,
    batch: int = 8,
    gather: int | None = None,
    max_broken: int = 0,
    progress: Callable[[Progress], None] | None = None,
    drafter="draft",
    num_draft: int | str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    stop=None,
    rule="auto",
    drafter_params=None,
) -> Served:
    """Continues many prompts, ``batch`` at a time; a row that finishes makes room for the next.

    Args:
      lm: the target, from ``specjax.load``.
      prompts: a file of JSON lines, or a list. Each is a text, token ids, or an object with
        ``"prompt"`` (or ``"text"``) and, where it differs from the others, ``max_new_tokens``,
        ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``seed``,
        ``stop``; its ``"id"`` stands in the output. Other fields are not looked at.
      output: a file to which each finished prompt is appended at once, as one JSON line with the
        fields of ``Row``, in the order of finishing. Prompts that are in it are not decoded again,
        so that the same call goes on where an earlier one stopped.
      batch: rows that are decoded together.
      gather: rows that must be free before prompts are inserted; default: an eighth of the batch.
        ``gather=batch`` waits for whole batches.
      max_broken: how many prompts may be broken (no JSON, no prompt, longer than the context ...)
        and are left out; with more, nothing is decoded.
      progress: called after every burst of rounds.
      drafter, num_draft, rule, drafter_params: see ``specjax.generate``.
      max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, stop: see
        ``specjax.generate``; one value, for prompts without their own. A text ends earlier where
        the context is full.
      seed: of the random draws. A prompt's text is that of row ``index`` in ``specjax.generate``
        with this seed, whatever its batch mates; a prompt with its own seed has the text that it
        has alone with it. (Except ``num_draft="auto"`` above temperature 0, as there.)

    Returns:
      ``Served``. Ctrl-C ends the run, not the program: what is finished is returned, and kept.

    Raises:
      ValueError: before anything is compiled: too many broken prompts, wrong options, an output
        that was made with another model, other prompts or options, or that another run writes to.

    Example::

        lm = specjax.load("embedded")
        done = specjax.serve_offline(lm, ["def f(x):", {"prompt": "import", "max_new_tokens": 9}])
        print(done.texts)
    """
    for name, value in (("batch", batch), ("gather", 1 if gather is None else gather)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: it must be an integer, at least 1")
    if gather is not None and gather > batch:
        raise ValueError(f"gather={gather}: of a batch of {batch} no more rows can be free")
    defaults = dict(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=None,
        stop=stop,
    )
    found, broken = prompt_file.read(lm, prompts, defaults, max_broken)
    job.seed_key(seed)
    ways = dict(drafter=drafter, num_draft=num_draft, rule=rule, drafter_params=drafter_params)
    made_with = _made_with(lm, found, seed, ways)
    if output is None:
        return _serve(lm, found, broken, None, batch, gather, progress, seed, ways)
    with OutputFile(output, made_with) as file:
        return _serve(lm, found, broken, file, batch, gather, progress, seed, ways)


def _serve(lm, found, broken, file, batch, gather, progress, seed, ways) -> Served:
    begin = time.perf_counter()
    there = {} if file is None else file.there
    names = [field.name for field in dataclasses.fields(Row)]
    done = {index: Row(**{n: line.get(n) for n in names}) for index, line in there.items()}
    waiting = [prompt for prompt in found if prompt.index not in done]
    finished = True
    try:
        if waiting:
            serving = Serving(lm, found, waiting, batch, gather, seed, ways)
            for fresh in serving.run():
                if file is not None and fresh:
                    file.add(dataclasses.asdict(row) for row in fresh)
                done |= {row.index: row for row in fresh}
                if progress is not None:
                    spent = time.perf_counter() - begin
                    counts = serving.tokens, serving.rounds
                    progress(Progress(len(done), len(found), *counts, spent))
    except KeyboardInterrupt:
        finished = False
    return Served(
        rows=[done[index] for index in sorted(done)],
        broken=broken,
        earlier=len(there),
        seconds=time.perf_counter() - begin,
        finished=finished,
    )


class Serving:
    """A batch under way; ``tokens`` and ``rounds`` count what it has done, over all rows.

    Args:
      found: all prompts of the run: they decide the buffers and which settings programs have, so
        that a run that goes on has the programs of the one before.
      waiting: those to be decoded, at least one; the first ones make the batch.
      batch, gather, seed, ways: of ``serve_offline``.
    """

    def __init__(self, lm: LM, found, waiting: list[Prompt], batch: int, gather, seed: int, ways):
        self._batch = min(batch, len(waiting))
        self._gather = min(self._batch, gather or max(1, self._batch // 8))
        self._lm, self._waiting, self._next = lm, waiting, self._batch
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
        first = waiting[: self._batch]
        work = job.prepare(
            lm,
            [prompt.tokens for prompt in first],
            max_new_tokens=[prompt.max_new_tokens for prompt in first],
            stop=self._stops(first),
            least_width=capacity,
            least_buffer=capacity,
            chunk=CHUNK_ON_CPU if jax.default_backend() == "cpu" else CHUNK,
            **self._values(first),
            **ways,
        )
        request = dataclasses.replace(work.request, key=self._keys(first))
        self._work: Job = dataclasses.replace(work, request=request)
        self._owners: list[Prompt | None] = list(first)
        self._done = np.zeros(2, int)
        self.tokens = self.rounds = 0

    def run(self) -> Iterator[list[Row]]:
        """What finished, after each burst, until everything has."""
        state, rounds = self._work.start(), 1
        yield self._collect(state)
        while True:
            state = self._fill(state)
            running, left = self._batch - self._owners.count(None), len(self._waiting) - self._next
            if not running:
                return
            # it ends as soon as the next prompts have room
            live = self._batch - min(self._gather, left) + 1 if left else 1
            before, begin = self.rounds, time.perf_counter()
            state = jax.block_until_ready(self._work.burst(rounds, state, live))
            spent = time.perf_counter() - begin
            yield self._collect(state)
            # a row may have ended early, so this is what a round takes at most
            rounds = max(1, int(BURST / spent * (self.rounds - before) / running))

    def _collect(self, state: loop.State) -> list[Row]:
        """The rows that have finished since; they are free then."""
        lengths, budgets = np.asarray(state.length), np.asarray(state.budget)
        counts = {
            n: np.asarray(getattr(state.stats, n))
            for n in ("rounds", "drafted", "accepted", "emitted")
        }
        ended = [row for row, owner in enumerate(self._owners) if owner and not budgets[row]]
        found = []
        tokens = np.asarray(state.tokens) if ended else None
        for row in ended:
            prompt = self._owners[row]
            ids = tokens[row, len(prompt.tokens) : lengths[row]].tolist()
            decoder = StreamDecoder(self._lm.tokenizer, prompt.tokens)
            found.append(
                Row(
                    index=prompt.index,
                    id=prompt.id,
                    text=decoder.push(ids) + decoder.flush(),
                    tokens=ids,
                    finish="stop" if ids[-1] in prompt.stop else "length",
                    rounds=int(counts["rounds"][row]),
                    drafted=int(counts["drafted"][row]),
                    accepted=int(counts["accepted"][row]),
                )
            )
            self._owners[row] = None
            self._done += len(ids), counts["rounds"][row]
        running = [row for row, owner in enumerate(self._owners) if owner]
        self.tokens, self.rounds = (
            int(done + counts[name][running].sum())
            for done, name in zip(self._done, ("emitted", "rounds"), strict=True)
        )
        return found

    def _fill(self, state: loop.State) -> loop.State:
        """Inserts the next prompts, if enough rows are free for them."""
        while left := len(self._waiting) - self._next:
            free = [row for row, owner in enumerate(self._owners) if owner is None]
            num = min(self._gather, left)
            if len(free) < num:
                break
            prompts = self._waiting[self._next : self._next + num]
            self._next += num
            for row, prompt in zip(free, prompts, strict=False):
                self._owners[row] = prompt
            # always of one size: what is beyond the batch is left out
            where = [*free[:num], *[self._batch] * (self._gather - num)]
            request = self._request([*prompts, *[prompts[0]] * (self._gather - num)])
            work = self._work
            objects = work.lm.target, work.drafter, work.rule
            state = jit_insert(
                *objects, work.params, state, np.asarray(where, np.int32), request, work.chunk
            )
        return state

    def _request(self, prompts: list[Prompt]) -> loop.Request:
        """A request of as many rows, in the shapes of the batch's."""
        like = self._work.request
        tokens = np.zeros((len(prompts), self._work.capacity), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt.tokens)] = prompt.tokens
        cold = np.zeros(len(prompts), np.float32)
        sampling = {"temperature": cold, **self._values(prompts)}
        return dataclasses.replace(
            like,
            tokens=tokens,
            lengths=np.asarray([len(prompt.tokens) for prompt in prompts], np.int32),
            key=self._keys(prompts),
            budget=np.asarray([prompt.max_new_tokens for prompt in prompts], np.int32),
            sampling=dataclasses.replace(like.sampling, **sampling),
            stops=self._stops(prompts),
        )

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


def _made_with(lm: LM, prompts: list[Prompt], seed: int, ways: Mapping) -> dict[int, dict]:
    """By index, hashes of the model, the drafter and the prompt with its options."""
    model = _hash(lm.fingerprint, str(lm.dtype))
    drafter = ways["drafter"]
    if isinstance(drafter, LM):
        drafter = drafter.fingerprint, str(drafter.dtype)
    elif not isinstance(drafter, str | None):
        drafter = getattr(drafter, "name", None), getattr(drafter, "num_draft", None)
    rule = getattr(ways["rule"], "name", str(ways["rule"]))
    drafter = _hash(drafter, ways["num_draft"], rule)
    same = {"model": model, "drafter": drafter}
    return {
        p.index: same
        | {
            "prompt_and_options": _hash(
                {**dataclasses.asdict(p), "seed": [seed, p.seed], "id": None}
            )
        }
        for p in prompts
    }


def _hash(*parts) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
