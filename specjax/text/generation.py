"""Text in, text out: ``generate`` and ``stream_text``, on top of the loop.

Rounds run in bursts whose length follows the clock: short enough to show text early and to stop on
Ctrl-C, long enough to cost nothing. All bursts are one compiled program.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import jax
import numpy as np

from .. import sharding
from .._internal.optional import required
from ..decoding.state import ENDED, STOPPED, Decoded, State, result
from ..decoding.stats import Stats
from ..models.lm import LM
from .options import Options, Prompts, takes
from .prepare import prepare_measured
from .stop_strings import RowText
from .task import GenerationTask

PROMPTLY, AT_LEISURE = 0.03, 0.3  # seconds that a burst should last when streamed, when not


@dataclasses.dataclass(frozen=True)
class Generation:
    """The generated texts, row by row.

    Attributes:
      texts: the new text of each row, without the prompt and without special tokens.
      tokens: the new token ids of each row, int32 ``[n]``; an end-of-text token is kept.
      from_draft: bool ``[n]`` of each row: the token was drafted and accepted, else it is the
        target's own.
      prompts: the prompt's token ids of each row, int32 ``[t]``.
      stats: counters, see ``Stats``. Tokens after a stop string, which the round that completed
        it may have committed, are counted.
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


@takes(Options)
def generate(lm: LM, prompts: Prompts | None = None, *, options: Options) -> Generation:
    """Continues one prompt or a batch of prompts.

    Args:
      lm: the target, from ``specjax.load`` or ``specjax.LM.of``.
      prompts: a text or its token ids, or a list of either; never empty. A model without a
        tokenizer takes and gives token ids. For T5 this is what its encoder reads; with ``inputs``,
        the ids that the decoder begins with (None: the model's own).
      drafter: who drafts.

        - ``"auto"``: the heads or the small draft model in the model's own folder, else
          ``"ngram"``.
        - ``"none"``, ``"plain"`` or None: nobody, for plain decoding.
        - ``"ngram"``, ``"suffix"`` or ``"sam"``: copies from the text so far. ``"recycling"``: the
          tokens that the target last found most probable after each token. ``"jacobi"`` or
          ``"lookahead"``: the tokens that the target predicted at later positions.
        - ``"draft"``: the target's own draft model. ``"self:exit=E"`` or ``"self:skip=..."``: a
          part of the target's own layers (see ``drafters.SelfDraft``).
        - The name of heads that belong to the target: ``"eagle"``, ``"eagle3"``, ``"p-eagle"``,
          ``"mtp"``, ``"mtp_heads"``, ``"medusa"``, ``"hydra"``, ``"blockwise"``,
          ``"speculator"``, ``"redrafter"``, ``"block"`` (or ``"dflash"``).
        - The folder or hub name of a draft model or of heads.
        - ``"ngram+NAME"``, ``"suffix+NAME"`` or ``"sam+NAME"``: copies where there is something to
          copy, else the draft model, heads or layers of that name (see ``drafters.Hybrid`` and
          ``drafters.Fallback``).
        - An object: what ``specjax.load`` or ``specjax.load_drafter`` returns, a
          ``specjax.Drafter``, a ``specjax.text.Session`` or a ``specjax.text.Retrieval``.

      drafting: how much is drafted, in which shape, and which rule accepts: ``specjax.Drafting``.
      sampling: how tokens are drawn, by default greedily: ``specjax.Sampling``. Each setting is one
        number, or one for each row; a ``logit_bias`` may be a mapping from token id to bias.
      max_new_tokens: for all rows, or one number for each row.
      seed: of the random draws; one number, or one for each prompt: a row with a seed of its own
        has the text that it has alone with that seed. A row's text depends on the seed, its index,
        its prompt and its settings, not on the rest of the batch. Only with
        ``Drafting(num="auto")`` above temperature 0 does the text also depend on the clock; its
        distribution does not.
      stop: ids that end a row; None: the model's end-of-text ids; ``()``: none.
      stop_strings: a text or several that end a row, or several for each prompt. The text is cut
        before the stop string, the tokens after the one that completed it.
      drafter_params: the weights of a drafter object; refused with any other drafter.
      num_samples: texts for each prompt, which is read once. Rows ``i * num_samples`` to
        ``(i + 1) * num_samples - 1`` belong to prompt ``i``.
      logprobs: ``True`` or ``"raw"`` for the log-probabilities that the model itself gives the new
        tokens, ``"law"`` for those under the distribution that they were drawn from.
      inputs: what the encoder of an encoder-decoder model reads: for Whisper the features of
        30 seconds a row, ``[B, bins, frames]`` (see ``specjax.models.whisper``).

    Returns:
      ``Generation``. Ctrl-C ends the generation, not the program: what is there is returned.

    Raises:
      ValueError, TypeError: before anything is compiled, naming the argument and the way out.

    Example::

        lm = specjax.load("embedded")
        out = specjax.generate(lm, "def quicksort(xs):", max_new_tokens=64)
        print(out.text, out.stats)
    """
    return TextStream(prepare_measured(lm, prompts, options)).finish()


@takes(Options)
def stream_text(lm: LM, prompts: Prompts | None = None, *, options: Options) -> TextStream:
    """The same as ``generate``, with the same options, piece by piece as it is committed.

    Args:
      lm, prompts, drafter, ...: as ``generate`` takes them.

    Returns:
      ``TextStream``, an iterator over ``Piece``s. Ctrl-C is raised where the pieces are asked for;
      ``TextStream.generation`` then holds what was committed until then.

    Raises:
      ValueError, TypeError: before anything is compiled, as ``generate`` does.

    Example::

        stream = specjax.stream_text(lm, "def quicksort(xs):")
        for piece in stream:
            print(piece.text, end="", flush=True)
        print(stream.generation.stats)
    """
    return TextStream(prepare_measured(lm, prompts, options))


class TextStream:
    """An iterator over ``Piece``s; ``generation`` is what there is at any moment."""

    def __init__(self, work: GenerationTask):
        self._task, self._finished = work, False
        self._seen: Decoded | None = None
        self.state: State | None = None  # after the last burst
        self._over = np.zeros(len(work.prompts), bool)  # rows that met a stop string

    def __iter__(self) -> Iterator[Piece]:
        rows = self._texts()
        shown = [len(prompt) for prompt in self._task.prompts]
        for seen in self._run(PROMPTLY):
            for row, text in enumerate(rows):
                ids = np.asarray(seen.tokens[row, shown[row] : seen.lengths[row]])
                drafted = np.asarray(seen.from_draft[row, shown[row] : seen.lengths[row]])
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
            for _ in self if any(self._task.stop_strings) else self._run(AT_LEISURE):
                pass
        except KeyboardInterrupt:
            if self._seen is None:  # nothing to give back
                raise
        return self.generation

    @property
    def rule(self) -> str:
        """The acceptance rule's name; where it is ``auto``, that of the one this stands for."""
        return self._task.rule_name

    @property
    def num_tokens(self) -> int:
        """New tokens until now, over all rows."""
        if self._seen is None:
            return 0
        if any(self._task.stop_strings):
            return sum(map(len, self.generation.tokens))
        return int(sum(self._seen.lengths)) - sum(map(len, self._task.prompts))

    def _texts(self) -> list[RowText]:
        prompts, strings = self._task.prompts, self._task.stop_strings
        tokenizer = self._task.lm.tokenizer
        return [RowText(tokenizer, *row) for row in zip(prompts, strings, strict=True)]

    @property
    def generation(self) -> Generation:
        """All that was committed until now."""
        if self._seen is None:
            raise ValueError("generation: nothing has run yet; iterate, or call finish()")
        seen, texts, rows, reasons = self._seen, [], [], []
        logprobs = seen.logprobs
        for row, text in enumerate(self._texts()):
            begin, end = len(self._task.prompts[row]), int(seen.lengths[row])
            texts.append(text.push(np.asarray(seen.tokens[row, begin:end])) + text.flush())
            rows.append((row, slice(begin, begin + text.num)))
            reasons.append(ENDED[STOPPED if text.over else int(seen.ended[row])])
        return Generation(
            texts=texts,
            tokens=[np.asarray(seen.tokens[new]) for new in rows],
            from_draft=[np.asarray(seen.from_draft[new]) for new in rows],
            prompts=self._task.prompts,
            stats=seen.stats,
            reasons=reasons,
            logprobs=None if logprobs is None else [np.asarray(logprobs[new]) for new in rows],
            finished=self._finished or all(reasons),
        )

    @property
    def begun(self) -> bool:
        """Whether anything of the state was seen."""
        return self._seen is not None

    def look(self) -> Decoded:
        """Takes in what was committed, also by a burst that Ctrl-C cut off from being shown, and
        returns it.

        Raises:
          RuntimeError: the state was lost with the burst.
        """
        # real copies: the next burst is given the state's buffers
        state = required(self.state, "state")
        with sharding.peers():
            self._seen = seen = sharding.gather(result(state))
            self._finished = not np.any(sharding.gather(state.budget) > 0)
        return seen

    def _going(self) -> list[np.ndarray]:
        """The tokens of the rows that go on."""
        seen = required(self._seen, "the state of a burst")
        tokens, lengths = np.asarray(seen.tokens), np.asarray(seen.lengths)
        rows = np.flatnonzero(np.asarray(seen.ended) == 0)
        return [tokens[row, : lengths[row]] for row in rows]

    def _learn(self) -> None:
        """Gives what was generated to the session."""
        if self._task.session is not None:
            new = self.generation
            for prompt, tokens in zip(new.prompts, new.tokens, strict=True):
                self._task.session.add(prompt, tokens)

    def _run(self, seconds: float) -> Iterator[Decoded]:
        """What is committed, on the host, after each burst of about ``seconds``."""
        self.state, rounds = self._task.start(), 1
        if self._task.session is not None and self._task.session.asks:
            seconds = min(seconds, PROMPTLY)  # what it was asked is soon out of date
        while True:
            seen = self.look()
            over = self._over.copy()
            yield seen
            if (self._over & ~over).any():  # they must not cost anything more
                self.state = self._task.end(self.state, self._over)
                self._finished = not np.any(sharding.gather(self.state.budget) > 0)
            if self._finished:
                self._learn()
                return
            self._task = self._task.refreshed(self._going)
            begin = time.perf_counter()
            with sharding.peers():
                self.state = self._task.burst(rounds, self.state)
                jax.block_until_ready(self.state.length)
                if sharding.agreed(time.perf_counter() - begin) < seconds / 2:
                    rounds *= 2
