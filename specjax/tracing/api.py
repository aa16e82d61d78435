"""``trace``: a text decoded round by round, with every draft, law and verdict on record."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Unpack

from .. import acceptance, sharding
from ..decoding.state import ENDED, STOPPED
from ..models.lm import LM
from ..models.seq2seq.encoder_inputs import encodes
from ..sampling import processors
from ..text import task
from ..text.stop_strings import RowText
from ..text.task import Options
from ..text.token_display import Spelled, speller
from .record import Round, record

ROUNDS = 128  # by default
_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")
_SETTINGS += ("frequency_penalty", "logit_bias", "law", "seed", "stop", "stop_strings")


@dataclasses.dataclass(frozen=True)
class Trace:
    """Rounds of one text.

    Attributes:
      model, drafter, rule: names; ``rule`` is the one that ``auto`` stood for, "" before any round.
      lossless: whether that rule leaves the target's law as it is.
      approximate: why the output law is not the model's own; empty where it is.
      settings: of the law, by name; ``greedy``: temperature 0, the program without a softmax.
      prompt: its text; ``source``: what an encoder read, or None.
      rounds: see ``rounds.Round``.
      pieces: of each round the text that became certain with each of its tokens; joined, the text
        that ``generate`` returns.
      reason: why the text ended, as in ``Generation.reasons``; empty if it goes on.
      interrupted: by Ctrl-C.
      spell: how a token is shown.
    """

    model: str
    drafter: str
    rule: str
    lossless: bool
    approximate: str
    settings: dict[str, str]
    greedy: bool
    prompt: str
    source: str | None
    rounds: list[Round]
    pieces: list[list[str]]
    reason: str
    interrupted: bool
    spell: Callable[[int], Spelled]

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(piece for pieces in self.pieces for piece in pieces)

    @property
    def tokens(self) -> list[int]:
        """The new token ids."""
        return [token for one in self.rounds for token in one.emitted]

    @property
    def tau(self) -> float:
        """Mean tokens emitted by a pass of the target."""
        return len(self.tokens) / max(1, len(self.rounds))

    def save(self, file: str | os.PathLike) -> int:
        """Writes the page (see ``trace_page``); returns its size in bytes."""
        from .html_page import save

        return save(self, file)


def trace(lm: LM, prompt=None, *, rounds: int = ROUNDS, **options: Unpack[Options]) -> Trace:
    """Continues one prompt as ``generate`` does, and keeps what happened in each round.

    The rounds are those of ``generate``: the same parts with the same keys, so that the text is
    the same, but run one by one, with the laws computed at every node; do not time it.

    Args:
      lm: the target, from ``specjax.load``.
      prompt: a text or its token ids, see ``generate``.
      rounds: at most so many are run.
      options: those of ``generate``, for one row.

    Returns:
      ``Trace``; ``Trace.save(file)`` writes it as a page for a browser. Ctrl-C ends the tracing,
      not the program: what is there is returned.

    Raises:
      ValueError: before anything is compiled, naming the argument and the way out.

    Example::

        traced = specjax.trace(lm, "def f(x):", drafter="draft", temperature=1.0)
        print(traced.rounds[0].nodes[1])  # Node(token=..., p=0.31, q=0.42, status='rejected', ...)
        traced.save("trace.html")
    """
    task.check_options("trace", options, "rounds")
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise ValueError(f"rounds={rounds!r}: it must be an integer, at least 1")
    work = task.prepare(lm, prompt, **options)
    if len(work.prompts) != 1:
        raise ValueError(
            f"trace: {len(work.prompts)} rows; a page shows one: give one prompt and num_samples=1"
        )
    spell = speller(lm.tokenizer)
    text = RowText(lm.tokenizer, work.prompts[0], work.stop_strings[0])
    found, pieces, interrupted = [], [], False
    with sharding.using(lm.mesh), sharding.peers():
        state = work.start()
        objects = lm.target, work.drafter, work.rule
        try:
            for one, _ in record(*objects, work.params, state, spell):
                fresh = _push(text, one.emitted)
                found.append(one.cut(len(fresh), ENDED[STOPPED]) if text.over else one)
                pieces.append(fresh)
                if text.over or len(found) == rounds:
                    break
        except KeyboardInterrupt:
            interrupted = True
    if pieces and pieces[-1]:
        pieces[-1][-1] += text.flush()
    rule = found[-1].rule if found else ""
    return Trace(
        model=lm.name,
        drafter=state.stats.drafter,
        rule=rule,
        lossless=getattr(acceptance.RULES.get(rule, work.rule), "lossless", True),
        approximate=state.stats.approximate,
        settings=_settings(options),
        greedy=state.sampling.greedy,
        prompt=lm.tokenizer.decode(work.prompts[0]),
        source=prompt if isinstance(prompt, str) and encodes(lm) else None,
        rounds=found,
        pieces=pieces,
        reason=found[-1].reason if found else "",
        interrupted=interrupted,
        spell=spell,
    )


def _push(text: RowText, emitted: list[int]) -> list[str]:
    """The text of each token, up to the one that completes a stop string."""
    fresh = []
    for token in emitted:
        if text.over:
            break
        fresh.append(text.push([token]))
    return fresh


def _settings(options: Options) -> dict[str, str]:
    """What of the options makes the law, as texts."""
    given = {"temperature": 0.0} | {n: options[n] for n in _SETTINGS if options.get(n) is not None}
    if "law" in given:
        given["law"] = processors.processor_name(given["law"])
    if not given["temperature"]:
        given.pop("seed", None)
    return {n: value if isinstance(value, str) else repr(value) for n, value in given.items()}
