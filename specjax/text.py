"""Text in, text out: ``generate`` and ``stream_text``, on top of the loop.

Rounds run in bursts whose length follows the clock: short enough to show text early and to stop on
Ctrl-C, long enough to cost nothing. All bursts are one compiled program.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Unpack

import jax
import numpy as np

from . import job, loop, sharding
from .job import Options, Prompts
from .models.lm import LM
from .models.tokenizer import StreamDecoder
from .stats import Stats

PROMPTLY, AT_LEISURE = 0.03, 0.3  # seconds that a burst should last when streamed, when not


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated, row by row.

    Attributes:
      texts: the new text of each row, without the prompt and without special tokens.
      tokens: the new token ids of each row, int32 ``[n]``; an end-of-text token is kept.
      from_draft: bool ``[n]`` of each row: the token was drafted and accepted, else it is the
        target's own.
      prompts: the prompt's token ids of each row, int32 ``[t]``.
      stats: counters, see ``Stats``.
      finished: False if Ctrl-C ended it, or if it still runs: then this is what is committed.
    """

    texts: list[str]
    tokens: list[np.ndarray]
    from_draft: list[np.ndarray]
    prompts: list[np.ndarray]
    stats: Stats
    finished: bool = True

    @property
    def text(self) -> str:
        """The text of the only row."""
        if len(self.texts) != 1:
            raise ValueError(f"text: there are {len(self.texts)} rows; use texts")
        return self.texts[0]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Freshly committed text of one origin: accepted draft tokens, or the target's own."""

    text: str
    from_draft: bool
    row: int = 0


def generate(lm: LM, prompts: Prompts, **options: Unpack[Options]) -> Generation:
    """Continues one prompt or a batch of prompts.

    Args:
      lm: the target, from ``specjax.load``.
      prompts: a text or its token ids, or a list of either. Never empty: for text out of nothing
        give ``[lm.config.bos_id]``, if the model has such a token.
      drafter: ``"draft"`` (the default: the target's own draft model), ``"ngram"`` (copies from
        the context), ``None`` or ``"plain"`` (no drafts), a draft model from ``specjax.load``
        with the target's tokenizer, or an object that implements ``specjax.Drafter``.
      num_draft: tokens drafted a round, 3 by default; a drafter object has its own number.
        ``"auto"``: as many as pay, from none to 7, following what was accepted and what rounds
        cost on this machine (see ``drafters.Adaptive``); measuring takes about a second, besides
        reading a prompt as long as this one.
      max_new_tokens: 128 by default; for all rows, or one number a row.
      temperature, top_k, top_p, min_p, repetition_penalty, logit_bias: the law, a number for all
        rows or one a row, see ``specjax.Sampling``; greedy decoding by default. The bias may be
        a mapping from token id to bias.
      seed: of the random draws, 0 by default. A row's text depends on the seed, its index, its
        prompt and its settings, not on its batch mates; with ``num_draft="auto"`` and a
        temperature, on the clock and the batch mates as well (its law does not).
      rule: the acceptance rule; by default ``"auto"``, lossless and chosen by the drafter.
      stop: ids that end a row; default: the model's end-of-text ids. ``()``: none.
      drafter_params: weights of a drafter object.

    Returns:
      ``Generation``. Ctrl-C ends the generation, not the program: what is there is returned.

    Raises:
      ValueError: before anything is compiled, naming the argument and the way out.

    Example::

        lm = specjax.load("embedded")
        out = specjax.generate(lm, "def quicksort(xs):", max_new_tokens=64)
        print(out.text, out.stats)
    """
    return stream_text(lm, prompts, **options).finish()


def stream_text(lm: LM, prompts: Prompts, **options: Unpack[Options]) -> TextStream:
    """The same as ``generate``, piece by piece as it is committed.

    Example::

        stream = specjax.stream_text(lm, "def quicksort(xs):")
        for piece in stream:
            print(piece.text, end="", flush=True)
        print(stream.generation.stats)
    """
    return TextStream(job.prepare(lm, prompts, **options))


class TextStream:
    """An iterator over ``Piece``s; ``generation`` is what there is at any moment."""

    def __init__(self, work: job.Job):
        self._job, self._seen, self._finished = work, None, False

    def __iter__(self) -> Iterator[Piece]:
        shown = [len(prompt) for prompt in self._job.prompts]
        decoders = [StreamDecoder(self._job.lm.tokenizer, prompt) for prompt in self._job.prompts]
        for seen in self._run(PROMPTLY):
            for row, decoder in enumerate(decoders):
                ids = seen.tokens[row, shown[row] : seen.lengths[row]]
                drafted = seen.from_draft[row, shown[row] : seen.lengths[row]]
                shown[row] = int(seen.lengths[row])
                for run in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(drafted)) + 1):
                    if run.size and (text := decoder.push(ids[run])):
                        yield Piece(text, bool(drafted[run[0]]), row)
        for row, decoder in enumerate(decoders):
            if text := decoder.flush():
                yield Piece(text, bool(seen.from_draft[row, shown[row] - 1]), row)

    def finish(self) -> Generation:
        """Runs to the end, or to Ctrl-C, without cutting the text into pieces."""
        try:
            for _ in self._run(AT_LEISURE):
                pass
        except KeyboardInterrupt:
            if self._seen is None:  # nothing to give back
                raise
        return self.generation

    @property
    def num_tokens(self) -> int:
        """New tokens until now, over all rows."""
        if self._seen is None:
            return 0
        return int(sum(self._seen.lengths)) - sum(map(len, self._job.prompts))

    @property
    def generation(self) -> Generation:
        """All that was committed until now."""
        if self._seen is None:
            raise ValueError("generation: nothing has run yet; iterate, or call finish()")
        seen, rows = self._seen, []
        for row, prompt in enumerate(self._job.prompts):
            new = slice(len(prompt), int(seen.lengths[row]))
            rows.append((seen.tokens[row, new], seen.from_draft[row, new]))
        texts = []
        for prompt, (ids, _) in zip(self._job.prompts, rows, strict=True):
            decoder = StreamDecoder(self._job.lm.tokenizer, prompt)
            texts.append(decoder.push(ids) + decoder.flush())
        return Generation(
            texts=texts,
            tokens=[ids for ids, _ in rows],
            from_draft=[drafted for _, drafted in rows],
            prompts=self._job.prompts,
            stats=seen.stats,
            finished=self._finished,
        )

    def _run(self, seconds: float) -> Iterator[loop.Decoded]:
        """What is committed, on the host, after each burst of about ``seconds``."""
        state, rounds = self._job.start(), 1
        while True:
            # real copies: the next burst is given the state's buffers
            self._seen = sharding.gather(loop.result(state))
            self._finished = not np.any(sharding.gather(state.budget) > 0)
            yield self._seen
            if self._finished:
                return
            begin = time.perf_counter()
            state = self._job.burst(rounds, state)
            jax.block_until_ready(state.length)
            if sharding.agreed(time.perf_counter() - begin) < seconds / 2:
                rounds *= 2
