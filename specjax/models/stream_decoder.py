"""Token ids to text while the ids arrive, never half a character."""

from __future__ import annotations

from collections.abc import Iterable

from .tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what an incomplete or invalid UTF-8 sequence decodes to


class StreamDecoder:
    """Decodes a stream of ids, and returns only text that is certain, never half a character.

    The texts that ``push`` returned, joined, and the result of ``flush`` at the end are ``decode``
    of all ids. A character may take several tokens: while the text ends in U+FFFD, up to three of
    them (as many as an unfinished UTF-8 character can leave) are held back.

        stream = StreamDecoder(tokenizer)
        stream.push([226, 130])  # ''
        stream.push([172])       # '€'
    """

    def __init__(self, tokenizer: Tokenizer, context: Iterable[int] = ()):
        """Makes a stream.

        Args:
          tokenizer: the tokenizer that decodes.
          context: ids before the first pushed id (a prompt). Some tokenizers drop the space
            before the first word of a text; with a context that space is kept.
        """
        self._tokenizer = tokenizer
        self._restart([int(i) for i in context][-16:])
        # a character that begins in the context and ends after it is shown
        self._before = self._tokenizer.decode(self._window) if self._window else ""
        if not _held(self._before):
            return
        texts = [self._tokenizer.decode(self._window[:-k]) for k in (1, 2, 3)]
        whole = [text for text in texts if not _held(text)]
        if whole:  # else it begins before the window
            # a token may hold a character and the beginning of the next one
            self._begun = True
            self._whole = max(len(whole[0]), len(self._before.rstrip(REPLACEMENT)))

    def _restart(self, window: list[int]) -> None:
        # A window begins at a token that was shown, so that decoding it treats what follows as
        # the middle of a text; it holds little, so that a push costs the same at any length.
        self._window, self._fresh, self._begun = list(window), [], False
        self._shown = len(self._tokenizer.decode(window)) if window else 0

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that became certain with ``ids``; it may be empty."""
        self._fresh += [int(i) for i in ids]
        text = self._text()
        held = _held(text)
        new = text[self._shown : len(text) - held]
        self._shown += len(new)
        if not held and self._tokenizer.decode(self._fresh):
            # bytes that end a character are no text without those that begin it
            self._restart([*self._window, *self._fresh] if self._begun else self._fresh)
        return new

    def flush(self) -> str:
        """Returns the text that is still held back, and resets the stream."""
        rest = self._text()[self._shown :]
        self._restart([])
        return rest

    def _text(self) -> str:
        """The text of the window and of what was pushed since."""
        text = self._tokenizer.decode(self._window + self._fresh)
        if self._begun and not text.startswith(self._before):  # once
            self._shown, self._before = self._whole, ""
        return text


def _held(text: str) -> int:
    """How many characters at the end of a text may become another one by further bytes."""
    return min(len(text) - len(text.rstrip(REPLACEMENT)), 3)
