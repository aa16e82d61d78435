"""The display of single tokens, which may be parts of a character or not readable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..models.tokenizer import Tokenizer

TEXT, BYTES, SPECIAL = "text", "bytes", "special"


@dataclasses.dataclass(frozen=True)
class Spelled:
    """The displayed form of a token.

    Attributes:
      text: the token's text for the kind ``text``; its bytes in hexadecimal for the kind ``bytes``,
        if they are not complete UTF-8; its name for the kind ``special``.
      kind: ``text``, ``bytes`` or ``special``.
    """

    text: str
    kind: str = TEXT

    def __str__(self) -> str:
        """Returns a text in quotes, with escapes for invisible characters; other kinds in ‹›."""
        return repr(self.text) if self.kind == TEXT else f"‹{self.text}›"


def speller(tokenizer: Tokenizer | None) -> Callable[[int], Spelled]:
    """Returns a function from a token id to its displayed form.

    Args:
      tokenizer: the tokenizer; None: each token is shown by its id.
    """
    if tokenizer is None:
        return lambda token: Spelled(str(int(token)), SPECIAL)
    words, added = tokenizer.vocabulary, tokenizer.added
    try:
        stands_for = tokenizer.token_bytes
    except ValueError:  # a vocabulary without the tokens' bytes: tokens are shown as it spells them
        stands_for = {}

    def spell(token: int) -> Spelled:
        token = int(token)
        if token not in words:  # a model may have more rows than its tokenizer has tokens
            return Spelled(f"no token {token}", SPECIAL)
        if token in added:
            return Spelled(words[token], SPECIAL)
        if token not in stands_for:
            return Spelled(words[token])
        data = stands_for[token]
        try:
            return Spelled(data.decode())
        except UnicodeDecodeError:
            return Spelled(data.hex(" ").upper(), BYTES)

    return spell
