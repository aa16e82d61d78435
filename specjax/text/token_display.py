"""Shows single tokens, which may be half a character or not readable at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ..models.tokenizer import Tokenizer

TEXT, BYTES, SPECIAL = "text", "bytes", "special"


@dataclasses.dataclass(frozen=True)
class Spelled:
    """A token as it can be shown.

    Attributes:
      text: of kind ``text`` what the token stands for; of kind ``bytes``, where that is no whole
        UTF-8, its bytes in hexadecimal; of kind ``special`` its name.
    """

    text: str
    kind: str = TEXT

    def __str__(self) -> str:
        """In quotes, with escapes for what cannot be seen."""
        return repr(self.text) if self.kind == TEXT else f"‹{self.text}›"


def speller(tokenizer: Tokenizer | None) -> Callable[[int], Spelled]:
    """``spell(token) -> Spelled`` for the tokens of a model; without a tokenizer a token's name is
    its id."""
    if tokenizer is None:
        return lambda token: Spelled(str(int(token)), SPECIAL)
    words, added = tokenizer.vocabulary, tokenizer.added
    try:
        stands_for = tokenizer.token_bytes
    except ValueError:  # a vocabulary that does not say which bytes: its own spelling has to do
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
