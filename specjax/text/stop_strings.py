"""Stop strings: a text is cut before them, and the beginning of a stop string is never shown.

Stop strings are matched on the host, in the text and not in tokens, so that a string may begin and
end within tokens. The match reads one token after the other, so the text does not depend on how
many tokens a round commits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..models.stream_decoder import StreamDecoder
from ..models.tokenizer import Tokenizer

Strings = tuple[str, ...]
Ids = Sequence[int] | np.ndarray


class StopStrings:
    """Cuts a text that arrives in pieces before the first stop string.

    Example::

        stop = StopStrings(("END",))
        stop.push("a E")  # 'a ': the E may be the beginning of END
        stop.push("ND b")  # '', and stop.found is True

    Args:
      strings: the stop strings.

    Attributes:
      found: whether a stop string was found.
    """

    def __init__(self, strings: Strings):
        self._strings, self._held, self.found = strings, "", False

    def push(self, text: str) -> str:
        """Returns the text that can be shown after the next piece, ``text``.

        A possible beginning of a stop string is held back. After a stop string was found, the
        result is empty.
        """
        if self.found:
            return ""
        text = self._held + text
        places = [place for place in map(text.find, self._strings) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        # the longest end of the text that is the beginning of a stop string
        longest = min(len(text), max(map(len, self._strings), default=1) - 1)
        held = next((n for n in range(longest, 0, -1) if self._begins(text[-n:])), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Returns the text that was held back, at the end of a text."""
        text, self._held = self._held, ""
        return text

    def _begins(self, text: str) -> bool:
        return any(string.startswith(text) for string in self._strings)


class RowText:
    """The text of one row while its tokens arrive; empty for a model without a tokenizer.

    Args:
      tokenizer: the tokenizer, or None.
      prompt: the token ids of the prompt.
      strings: the stop strings of the row.

    Attributes:
      num: the number of tokens read, up to the token that completed a stop string.
      over: whether a stop string was found.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Ids, strings: Strings):
        self._decoder = _NoText() if tokenizer is None else StreamDecoder(tokenizer, prompt)
        self._stop = StopStrings(strings)
        self._strings, self.num = strings, 0

    @property
    def over(self) -> bool:
        return self._stop.found

    def push(self, ids: Ids) -> str:
        """Returns the text that can be shown after the next tokens ``ids``."""
        if not self._strings:
            self.num += len(ids)
            return self._decoder.push(ids)
        text = ""
        for token in ids:
            if self.over:
                break
            text += self._stop.push(self._decoder.push([token]))
            self.num += 1
        return text

    def flush(self) -> str:
        """Returns the text that is still held back, at the end of the row."""
        if self.over:
            return ""
        rest = self._stop.push(self._decoder.flush())
        return rest + self._stop.flush()


class _NoText:
    """Takes the place of a ``StreamDecoder`` for a model without a tokenizer."""

    def push(self, ids: Ids) -> str:
        return ""

    def flush(self) -> str:
        return ""


def per_row(given, rows: int) -> list[Strings]:
    """Returns the stop strings of each prompt.

    Args:
      given: None, one string, several strings for all prompts, or several strings for each prompt.
      rows: the number of prompts.

    Raises:
      ValueError: a string is empty, which would stop before the first token, or there are other
        numbers of entries and prompts.
      TypeError: a stop string is not a string.
    """
    if given is None:
        return [()] * rows
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, Sequence) or isinstance(given, bytes):
        raise TypeError(f"stop_strings={given!r}: give a string, or a list of strings")
    several = [entry for entry in given if not isinstance(entry, str)]
    if several:
        if len(given) != rows:
            raise ValueError(
                f"stop_strings has {len(given)} rows for {rows} prompts: give one list of strings "
                "for all prompts, or one list for each prompt"
            )
        return [row for entry in given for row in per_row(_flat(entry), 1)]
    if not all(given):
        raise ValueError(
            "stop_strings: an empty string would stop every text before its first token; leave it "
            "out"
        )
    return [tuple(given)] * rows


def _flat(entry):
    if isinstance(entry, Sequence) and not all(isinstance(string, str) for string in entry):
        raise TypeError(f"stop_strings={entry!r}: the stop strings of a row are a list of strings")
    return entry
