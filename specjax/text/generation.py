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

from .. import sharding
from ..decoding import loop
from ..decoding.state import ENDED, STOPPED
from ..decoding.stats import Stats
from ..models.lm import LM
from . import task
from .stop_strings import RowText
from .task import Options, Prompts

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
      stats: counters, see ``Stats``; tokens behind a stop string, which the round that met it may
        have committed, are counted.
      reasons: why each row ended: ``"stop"`` (an end-of-text id or a stop string), ``"length"``
        (its budget), ``"no token"`` (the law gave no token any probability, or the logits were
        NaN); empty where the row still runs.
      logprobs: natural logarithms, float32 ``[n]`` of each row; None if not asked for.
      finished: False if Ctrl-C ended it, or if it still runs: then this is what is committed.
    """

    texts: list[str]
    tokens: list[np.ndarray]
    from_draft: list[np.ndarray]
    prompts: list[np.ndarray]
    stats: Stats
    reasons: list[str]
    logprobs: list[np.ndarray] | None = None
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


def generate(lm: LM, prompts: Prompts | None = None, **options: Unpack[Options]) -> Generation:
    """Continues one prompt or a batch of prompts.

    Args:
      lm: the target, from ``specjax.load``.
      prompts: a text or its token ids, or a list of either. Never empty: for text out of nothing
        give ``[lm.config.bos_id]``, if the model has such a token. For T5 this is what its encoder
        reads; with ``inputs``, the ids that the decoder begins with (None: the model's own).
      drafter: ``"draft"`` (the default: the target's own draft model), ``"ngram"`` (copies from
        the context), ``"eagle3"``, ``"mtp"``, ``"medusa"``, ``"hydra"``, ``"speculator"``,
        ``"blockwise"`` (the target's own heads), ``None`` or ``"plain"`` (no drafts), a draft model
        from ``specjax.load`` with the target's tokenizer, heads from ``specjax.load_drafter``, the
        folder or hub name of either, any of these names behind ``"ngram+"`` (copies where there
        is something to copy, else that drafter; see ``drafters.Hybrid``), or an object that
        implements ``specjax.Drafter``.
      num_draft: tokens drafted a round, 3 by default; heads of which each drafts one depth draft
        as many as there are, or fewer; a drafter object has its own number.
        ``"auto"``: as many as pay, from none to 7, following what was accepted and what rounds
        cost on this machine (see ``drafters.Adaptive``); measuring takes about a second, besides
        reading a prompt as long as this one.
      tree: what a draft model or heads draft instead of a chain, see ``specjax.trees``: a
        ``Tree`` or ``Expand``, parents ``(-1, 0, 0, 1)``, or words such as ``"3x2x1"`` and
        ``"expand:8x4x24"``.
      max_new_tokens: 128 by default; for all rows, or one number a row.
      temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
        logit_bias: the law, a number for all rows or one a row, see ``specjax.Sampling``; greedy
        decoding by default. The bias may be a mapping from token id to bias.
      logits_processor: a function of logits and prefix of your own, or an object, see
        ``specjax.processors``; ``process_drafts=False`` keeps it from the drafter, which changes
        the speed alone.
      seed: of the random draws, 0 by default; one number, or one a prompt: then each row says what
        it says alone with its seed. A row's text depends on the seed, its index, its
        prompt and its settings, not on its batch mates; with ``num_draft="auto"`` and a
        temperature, on the clock and the batch mates as well (its law does not).
      num_samples: texts a prompt, which is read once. Rows ``i * num_samples ...`` are those of
        prompt ``i``.
      rule: the acceptance rule; by default ``"auto"``, lossless and chosen by the drafter.
      stop: ids that end a row; default: the model's end-of-text ids. ``()``: none.
      stop_strings: a text or several that end a row, or several for each prompt. The text is cut
        before it, the tokens behind the one that completed it.
      logprobs: ``True`` or ``"raw"`` for the model's own log-probabilities of the new tokens, or
        ``"law"`` for those under the law they were drawn from; see ``specjax.decode``.
      drafter_params: weights of a drafter object.
      inputs: what the encoder of an encoder-decoder model reads: for Whisper the features of
        30 seconds a row, ``[B, bins, frames]`` (see ``specjax.models.whisper``).

    Returns:
      ``Generation``. Ctrl-C ends the generation, not the program: what is there is returned.

    Raises:
      ValueError: before anything is compiled, naming the argument and the way out.

    Example::

        lm = specjax.load("embedded")
        out = specjax.generate(lm, "def quicksort(xs):", max_new_tokens=64)
        print(out.text, out.stats)
    """
    task.check_options("generate", options)
    return TextStream(task.prepare(lm, prompts, **options)).finish()


def stream_text(lm: LM, prompts: Prompts | None = None, **options: Unpack[Options]) -> TextStream:
    """The same as ``generate``, piece by piece as it is committed.

    Example::

        stream = specjax.stream_text(lm, "def quicksort(xs):")
        for piece in stream:
            print(piece.text, end="", flush=True)
        print(stream.generation.stats)
    """
    task.check_options("stream_text", options)
    return TextStream(task.prepare(lm, prompts, **options))


class TextStream:
    """An iterator over ``Piece``s; ``generation`` is what there is at any moment."""

    def __init__(self, work: task.GenerationTask):
        self._job, self._seen, self._finished = work, None, False
        self.state: loop.State | None = None  # after the last burst
        self._over = np.zeros(len(work.prompts), bool)  # rows that met a stop string

    def __iter__(self) -> Iterator[Piece]:
        rows = self._texts()
        shown = [len(prompt) for prompt in self._job.prompts]
        for seen in self._run(PROMPTLY):
            for row, text in enumerate(rows):
                ids = seen.tokens[row, shown[row] : seen.lengths[row]]
                drafted = seen.from_draft[row, shown[row] : seen.lengths[row]]
                shown[row] = int(seen.lengths[row])
                for run in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(drafted)) + 1):
                    if run.size and (piece := text.push(ids[run])):
                        yield Piece(piece, bool(drafted[run[0]]), row)
                self._over[row] = text.over
        for row, text in enumerate(rows):
            if piece := text.flush():
                yield Piece(piece, bool(seen.from_draft[row, shown[row] - 1]), row)

    def finish(self) -> Generation:
        """Runs to the end, or to Ctrl-C, without cutting the text into pieces."""
        try:
            # stop strings are found in the text, so it has to be looked at as it comes
            for _ in self if any(self._job.stop_strings) else self._run(AT_LEISURE):
                pass
        except KeyboardInterrupt:
            if self._seen is None:  # nothing to give back
                raise
        return self.generation

    @property
    def rule(self) -> str:
        """The acceptance rule's name; where it is ``auto``, that of the one this stands for."""
        return self._job.rule_name

    @property
    def num_tokens(self) -> int:
        """New tokens until now, over all rows."""
        if self._seen is None:
            return 0
        if any(self._job.stop_strings):
            return sum(map(len, self.generation.tokens))
        return int(sum(self._seen.lengths)) - sum(map(len, self._job.prompts))

    def _texts(self) -> list[RowText]:
        prompts, strings = self._job.prompts, self._job.stop_strings
        tokenizer = self._job.lm.tokenizer
        return [RowText(tokenizer, *row) for row in zip(prompts, strings, strict=True)]

    @property
    def generation(self) -> Generation:
        """All that was committed until now."""
        if self._seen is None:
            raise ValueError("generation: nothing has run yet; iterate, or call finish()")
        seen, texts, rows, reasons = self._seen, [], [], []
        for row, text in enumerate(self._texts()):
            begin, end = len(self._job.prompts[row]), int(seen.lengths[row])
            texts.append(text.push(seen.tokens[row, begin:end]) + text.flush())
            rows.append((row, slice(begin, begin + text.num)))
            reasons.append(ENDED[STOPPED if text.over else int(seen.ended[row])])
        return Generation(
            texts=texts,
            tokens=[seen.tokens[new] for new in rows],
            from_draft=[seen.from_draft[new] for new in rows],
            prompts=self._job.prompts,
            stats=seen.stats,
            reasons=reasons,
            logprobs=None if seen.logprobs is None else [seen.logprobs[new] for new in rows],
            finished=self._finished or all(reasons),
        )

    @property
    def begun(self) -> bool:
        """Whether anything of the state was seen."""
        return self._seen is not None

    def look(self) -> None:
        """Takes in what was committed, also by a burst that Ctrl-C cut off from being shown.

        Raises:
          RuntimeError: the state was lost with the burst.
        """
        # real copies: the next burst is given the state's buffers
        with sharding.peers():
            self._seen = sharding.gather(loop.result(self.state))
            self._finished = not np.any(sharding.gather(self.state.budget) > 0)

    def _run(self, seconds: float) -> Iterator[loop.Decoded]:
        """What is committed, on the host, after each burst of about ``seconds``."""
        self.state, rounds = self._job.start(), 1
        while True:
            self.look()
            over = self._over.copy()
            yield self._seen
            if (self._over & ~over).any():  # they must not cost anything more
                self.state = self._job.end(self.state, self._over)
                self._finished = not np.any(sharding.gather(self.state.budget) > 0)
            if self._finished:
                return
            begin = time.perf_counter()
            with sharding.peers():
                self.state = self._job.burst(rounds, self.state)
                jax.block_until_ready(self.state.length)
                if sharding.agreed(time.perf_counter() - begin) < seconds / 2:
                    rounds *= 2
