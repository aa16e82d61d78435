"""``Trace``: the rounds of a traced text, and the data of the page that shows them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from ..text.token_display import Spelled
from . import html_page
from .record import Round


@dataclasses.dataclass(frozen=True)
class Trace:
    """The rounds of one text, from ``specjax.trace``.

    Attributes:
      model: name of the target.
      drafter: name of the drafter.
      rule: name of the acceptance rule; for ``auto``, of the rule that was chosen; empty if no
        round was run.
      lossless: whether the rule keeps the target's law.
      approximate: why the law of the text is not the law of the named model; empty if it is.
      settings: the sampling settings, as texts by name.
      greedy: whether the temperature is 0.
      prompt: the prompt as text.
      source: the text that an encoder read, or None.
      rounds: the rounds in order, see ``Round``.
      pieces: for each round, the text that each of its tokens completes. All pieces joined are the
        text that ``specjax.generate`` returns. Without a tokenizer, ``pieces`` and ``prompt`` hold
        token ids, each after a space, in place of text.
      reason: why the text ended, as in ``Generation.reasons``; empty if the text did not end.
      interrupted: whether Ctrl-C ended the trace.
      spell: a function from a token id to its displayed form.
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
        """The generated text, without the prompt."""
        return "".join(piece for pieces in self.pieces for piece in pieces)

    @property
    def tokens(self) -> list[int]:
        """The generated token ids."""
        return [token for one in self.rounds for token in one.emitted]

    @property
    def tau(self) -> float:
        """Acceptance length τ: mean number of tokens that a round emits. The first of ``rounds``,
        the pass over the end of the prompt, which has no draft, is left out."""
        return (len(self.tokens) - 1) / (len(self.rounds) - 1) if len(self.rounds) > 1 else 1.0

    def save(self, file: str | os.PathLike) -> int:
        """Writes the trace as one HTML page, which needs no network and no other file.

        Args:
          file: the name of the page. An earlier trace page is replaced, any other file is not.

        Returns:
          the size of the page in bytes.

        Raises:
          ValueError: ``file`` cannot be written, or exists and is not a trace page.
          OSError: writing failed, for example because the disk is full.
        """
        return html_page.save(self.page_data(), file)

    def page_data(self) -> dict:
        """Returns the data of the page, as JSON values: nodes as columns, the text of each token
        once."""
        used = {token for one in self.rounds for token in _token_ids(one) if token >= 0}
        tokens = {}
        for token in sorted(used):
            spelled = self.spell(token)
            plain = spelled.kind == "text"
            tokens[token] = [spelled.text] if plain else [spelled.text, spelled.kind]
        names = ("model", "drafter", "rule", "lossless", "approximate", "settings", "greedy")
        names += ("prompt", "source", "interrupted")
        rounds = zip(self.rounds, self.pieces, strict=True)
        return {name: getattr(self, name) for name in names} | {
            "tokens": tokens,
            "rounds": [_columns(one, pieces) for one, pieces in rounds],
        }


def _columns(one: Round, pieces: list[str]) -> dict:
    nodes = one.nodes
    return {
        "token": [node.token for node in nodes],
        "parent": [node.parent for node in nodes],
        "p": [_short(node.p) for node in nodes],
        "q": [_short(node.q) for node in nodes],
        "status": [node.status for node in nodes],
        "why": [node.why for node in nodes],
        "top": {
            n: [[token, _short(p)] for token, p in node.top]
            for n, node in enumerate(nodes)
            if node.top
        },
        "path": one.path,
        "kind": one.kind,
        "last": one.token,
        "p_last": _short(one.p),
        "emitted": one.emitted,
        "drafted": one.from_draft,
        "pieces": pieces,
        "reason": one.reason,
    }


def _token_ids(one: Round) -> list[int]:
    best = [token for node in one.nodes for token, _ in node.top]
    return [node.token for node in one.nodes] + best + [one.token, *one.emitted]


def _short(p: float | None) -> float | None:
    """Returns a number rounded to four significant digits."""
    return None if p is None else float(f"{p:.4g}")
