"""Text in, text out: ``generate`` and ``stream_text``.

Rounds run in bursts of about a fixed duration: short enough to show text early and to stop on
Ctrl-C, long enough that the return to Python costs nothing. All bursts are one compiled program.
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
from .prepare import prepare_fastest
from .stop_strings import RowText
from .task import GenerationTask

PROMPTLY, AT_LEISURE = 0.03, 0.3  # intended seconds of a burst with and without streaming


@dataclasses.dataclass(frozen=True)
class Generation:
    """The generated texts, row by row.

    Attributes:
      texts: the generated text of each row, without the prompt and without special tokens.
      tokens: the generated token ids of each row, int32 ``[n]``, including an end-of-text token.
      from_draft: bool ``[n]`` for each row: True for an accepted draft token, False for one of the
        target's own tokens.
      prompts: the token ids of each row's prompt, int32 ``[t]``.
      stats: counters, see ``Stats``. They count the tokens after a stop string that the last round
        committed.
      reasons: why each row ended: ``"stop"`` (an end-of-text id or a stop string), ``"length"``
        (its budget is used up), ``"no token"`` (the law gave no token any probability, or the
        logits were NaN); empty for a row that has not ended.
      logprobs: log-probabilities of the tokens (natural logarithms), float32 ``[n]`` for each row;
        None if they were not requested.
      finished: whether all rows have ended; False after Ctrl-C, and while a stream is running.
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
        """The text of the only row. Raises ``ValueError`` if there are several rows."""
        if len(self.texts) != 1:
            raise ValueError(f"text: there are {len(self.texts)} rows; use texts")
        return self.texts[0]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of newly committed text: accepted draft tokens, or the target's own tokens.

    Attributes:
      text: the text.
      from_draft: whether its tokens were drafted.
      row: the index of its row.
    """

    text: str
    from_draft: bool
    row: int = 0


@takes(Options)
def generate(lm: LM, prompts: Prompts | None = None, *, options: Options) -> Generation:
    """Continues one prompt or a batch of prompts.

    Args:
      lm: the target, from ``specjax.load`` or ``specjax.LM.of``.
      prompts: a text, its token ids, or a conversation, ``{"messages": [{"role": "user",
        "content": "..."}]}``, which the model's chat template turns into tokens; or a list of
        these; never empty. A model without a tokenizer takes and returns token ids. T5's encoder
        reads the prompts. With ``inputs``, the prompts are the token ids with which the decoder
        begins (None: the model's default).
      drafter: the drafter.

        - ``"auto"``: the heads, the small draft model or the saved layers (``self.json``) in the
          model's own folder, else ``"ngram"``.
        - ``"none"``, ``"plain"`` or None: no drafter, for plain decoding.
        - ``"ngram"``, ``"suffix"`` or ``"sam"``: copies from the text so far. ``"recycling"``: the
          tokens that the target last found most probable after each token. ``"jacobi"`` or
          ``"lookahead"``: the tokens that the target predicted at later positions.
        - ``"draft"``: the target's own draft model. ``"self:exit=E"`` or ``"self:skip=..."``: a
          part of the target's own layers (see ``drafters.SelfDraft``). ``"draft:window=512"`` and
          ``"self:window=512"``: these over the first and the last tokens of the text alone (see
          ``models.windowed``), with ``budget=512`` besides also over tokens that they choose.
          ``"draft:cache=int8"``: with a cache in eight bits (see ``models.low_bit_cache``).
        - The name of heads that belong to the target: ``"eagle"``, ``"eagle3"``, ``"p-eagle"``,
          ``"mtp"``, ``"mtp_heads"``, ``"medusa"``, ``"hydra"``, ``"blockwise"``,
          ``"speculator"``, ``"redrafter"``, ``"block"`` (or ``"dflash"``), ``"kangaroo"``,
          ``"spire"``.
        - The folder or hub name of a draft model, of heads, or of a table of ``specjax bigram``
          (``"bigram"``: that in the model's own folder). ``"tli:NAME"`` or ``"slem:NAME"``: a
          draft model with another tokenizer (see ``text.translated``).
        - ``"ngram+NAME"``, ``"suffix+NAME"`` or ``"sam+NAME"``: copies where the text so far has a
          match, else the draft model, heads or layers of that name (see ``drafters.Hybrid`` and
          ``drafters.Fallback``). ``"copy+NAME"``: heads, a draft model or layers, at temperature 0
          with a bonus for tokens that followed the same words in the text (see
          ``drafters.Copying``).
        - ``"cascade:OUTER:INNER"``: the draft model OUTER (``draft``, a folder or a hub name), or
          the target over a window (``self:window=64,budget=512``), for which the drafter INNER
          drafts (see ``drafters.Cascade``). Settings belong to the name before them.
        - ``"module:Class"`` or ``"module:Class:period=3"``: a drafter of your own without weights,
          made with these settings; the module may lie in the current folder.
        - An object: a model from ``specjax.load``, heads from ``specjax.load_drafter``, a
          ``specjax.Drafter``, a ``specjax.text.Session`` or a ``specjax.text.Retrieval``.

        ``specjax drafters`` on the command line lists all names with what they propose, and
        ``specjax.drafters.registry.entries()`` also those that you registered.

      drafting: how much is drafted, in which shape, and which rule accepts: ``specjax.Drafting``.
      sampling: how tokens are drawn, by default greedily: ``specjax.Sampling``. Each setting is one
        number, or one for each row; a ``logit_bias`` may be a mapping from token id to bias.
      max_new_tokens: for all rows, or one number for each row.
      seed: of the random draws; one number, or one for each prompt: a row with a seed of its own
        has the text that it has alone with that seed. A row's text depends on the seed, its index,
        its prompt and its settings, not on the rest of the batch. Above temperature 0 there are
        two exceptions, in which its distribution stays the same: with ``Drafting(num="auto")`` the
        text also depends on the clock, and where heads draft a static tree, on whether any row is
        greedy (then they draw no tokens).
      stop: token ids that end a row; None: the model's end-of-text ids; ``()``: none.
      stop_strings: one string or several strings that end a row, or several for each prompt. The
        text is cut before the stop string, and the tokens after the token that completed it.
      drafter_params: the weights of a drafter object; refused with any other drafter.
      num_samples: the number of texts for each prompt, which is read once. Rows
        ``i * num_samples`` to ``(i + 1) * num_samples - 1`` continue prompt ``i``.
      logprobs: ``True`` or ``"raw"`` for the log-probabilities of the generated tokens in the
        model's softmax, ``"law"`` for those in the law from which the tokens were drawn.
      inputs: the input of the encoder of an encoder-decoder model; for Whisper the features of
        30 seconds for each row, ``[B, bins, frames]`` (see ``specjax.models.whisper``).

    Returns:
      a ``Generation``. Ctrl-C ends the generation, but raises nothing: the tokens that were
      committed until then are returned.

    Raises:
      ValueError, TypeError: before anything is compiled: an option is wrong. The error names the
        argument and the accepted values.

    Example::

        lm = specjax.load("embedded")
        out = specjax.generate(lm, "def quicksort(xs):", max_new_tokens=64)
        print(out.text, out.stats)
    """
    return TextStream(prepare_fastest(lm, prompts, options)).finish()


@takes(Options)
def stream_text(lm: LM, prompts: Prompts | None = None, *, options: Options) -> TextStream:
    """Continues prompts as ``generate`` does, and yields the text piece by piece.

    Args:
      lm, prompts, drafter, ...: see ``generate``.

    Returns:
      a ``TextStream``, whose iteration yields ``Piece``s. Ctrl-C raises ``KeyboardInterrupt``
      within the iteration; ``TextStream.generation`` then holds the tokens that were committed
      until then. Of a model without a tokenizer there is no text to yield, and the tokens are
      there after the iteration.

    Raises:
      ValueError, TypeError: before anything is compiled, see ``generate``.

    Example::

        stream = specjax.stream_text(lm, "def quicksort(xs):")
        for piece in stream:
            print(piece.text, end="", flush=True)
        print(stream.generation.stats)
    """
    return TextStream(prepare_fastest(lm, prompts, options))


class TextStream:
    """The text of a task, ``Piece`` by ``Piece``; each iteration decodes it from the beginning.

    Args:
      work: the task.

    Attributes:
      generation: the ``Generation`` of all tokens committed so far.
      state: the state of the loop after the last burst, or None.
    """

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
        """Runs until all rows end, or until Ctrl-C, and returns the ``Generation``."""
        try:
            # stop strings are matched in the text, so it must be decoded piece by piece
            for _ in self if any(self._task.stop_strings) else self._run(AT_LEISURE):
                pass
        except KeyboardInterrupt:
            if self._seen is None:  # no token was committed
                raise
        return self.generation

    @property
    def rule(self) -> str:
        """The name of the acceptance rule; for ``auto``, of the rule that was chosen."""
        return self._task.rule_name

    @property
    def num_tokens(self) -> int:
        """The number of generated tokens so far, summed over all rows."""
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
        """The ``Generation`` of all tokens committed so far.

        Raises:
          ValueError: no burst was run yet.
        """
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
        """Whether a burst was run."""
        return self._seen is not None

    def look(self) -> Decoded:
        """Returns the committed tokens of the current state, and takes them into ``generation``.

        After Ctrl-C these may include a burst whose text was not shown.

        Raises:
          RuntimeError: an interrupted burst has consumed the state.
        """
        # copies on the host, because the buffers of the state are donated to the next burst
        state = required(self.state, "state")
        with sharding.peers():
            self._seen = seen = sharding.gather(result(state))
            self._finished = not np.any(sharding.gather(state.budget) > 0)
        return seen

    def _going(self) -> list[np.ndarray]:
        """Returns the token ids of each row that is still decoded."""
        seen = required(self._seen, "the state of a burst")
        tokens, lengths = np.asarray(seen.tokens), np.asarray(seen.lengths)
        rows = np.flatnonzero(np.asarray(seen.ended) == 0)
        return [tokens[row, : lengths[row]] for row in rows]

    def _learn(self) -> None:
        """Adds the generated texts to the session."""
        if self._task.session is not None:
            new = self.generation
            for prompt, tokens in zip(new.prompts, new.tokens, strict=True):
                self._task.session.add(prompt, tokens)

    def _run(self, seconds: float) -> Iterator[Decoded]:
        """Yields the committed tokens, on the host, after each burst of about ``seconds``."""
        self.state, rounds = self._task.start(), 1
        if self._task.session is not None and self._task.session.asks:
            seconds = min(seconds, PROMPTLY)  # results of a search are soon out of date
        while True:
            seen = self.look()
            over = self._over.copy()
            yield seen
            if (self._over & ~over).any():  # rows with a stop string take no part in further rounds
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
