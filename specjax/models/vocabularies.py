"""Two vocabularies that differ: which tokens they share, and how one spells those of the other.

Tokens are compared by the bytes that they stand for, so that ``Ġthe`` of a byte-level vocabulary,
``▁the`` of SentencePiece and the text `` the`` are one token, and so are ``<0x0A>`` and ``Ċ``.
Special tokens are compared by what they are for (beginning, end, padding), then by their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .stream_decoder import REPLACEMENT
from .tokenizer import OwnTokenizer, Tokenizer

_FLAT = 32  # ids below it are about equally frequent
_ROLES = ("bos_token", "pad_token", "unk_token")  # beside the end, which may be several tokens


class SharedTokens(NamedTuple):
    """The tokens that two vocabularies share, in increasing order of the target's ids.

    Attributes:
      target, draft: int32 ``[Vs]``, the ids of each in the target's and the drafter's vocabulary;
        no id stands there twice.
      words: how many of them are no special tokens.
    """

    target: np.ndarray
    draft: np.ndarray
    words: int


class Spelling:
    """How a tokenizer's tokens spell bytes.

    Attributes:
      bytes_of: id -> bytes, of the tokens that stand for any.
      ids: bytes -> the id that stands for them. Where several do, that of a token of text goes
        before that of a single byte (``<0x41>`` of SentencePiece), then the lowest.
      longest: the number of bytes of the longest token.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Raises ValueError where the vocabulary does not say which bytes its tokens stand for."""
        self.bytes_of = {i: word for i, word in _bytes_of(tokenizer).items() if word}
        fallback = {i for i, word in tokenizer.vocabulary.items() if word.startswith("<0x")}
        order = sorted(self.bytes_of, key=lambda i: (i in fallback, i), reverse=True)
        self.ids = {self.bytes_of[i]: i for i in order}
        self.longest = max(map(len, self.ids), default=0)

    def match(self, text: bytes) -> list[int]:
        """The ids that spell ``text``, the longest match first from left to right; bytes with which
        no token begins are left out."""
        found, at = [], 0
        while at < len(text):
            for size in range(min(self.longest, len(text) - at), 0, -1):
                if (token := self.ids.get(text[at : at + size])) is not None:
                    found.append(token)
                    break
            else:
                size = 1
            at += size
        return found


Spellings = tuple[Spelling, Spelling]


def spellings(target: Tokenizer, draft: Tokenizer) -> Spellings:
    """How the tokens of a target and of a drafter spell bytes, which takes long to find out.

    Raises:
      ValueError: a vocabulary does not say which bytes its tokens stand for.
    """
    return Spelling(target), Spelling(draft)


def _bytes_of(tokenizer: Tokenizer) -> dict[int, bytes]:
    if not isinstance(tokenizer, OwnTokenizer):
        return tokenizer.token_bytes
    listed = tokenizer.vocabulary.items()  # which a tokenizer of one's own spells as text
    words = {i: word for i, word in listed if i not in tokenizer.added}
    return {i: word.encode() for i, word in words.items() if REPLACEMENT not in word}


def special_tokens(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    """The target's ids of special tokens -> the drafter's ids of those that mean the same.

    Several ids that end a text may have one partner, the drafter's first.
    """
    found = {}
    # an id that decodes to nothing has no name
    theirs = {draft.vocabulary.get(i): i for i in sorted(draft.added, reverse=True)}
    for i in target.added:
        name = target.vocabulary.get(i)
        if name is not None and (partner := theirs.get(name)) is not None:
            found[i] = partner
    for role in _ROLES:
        if role in target.roles and role in draft.roles:
            found[target.roles[role]] = draft.roles[role]
    for i in target.eos_ids if draft.eos_ids else ():
        found[i] = found[i] if found.get(i) in draft.eos_ids else draft.eos_ids[0]
    return found


def shared_tokens(
    target: Tokenizer, draft: Tokenizer, spelling: Spellings | None = None
) -> SharedTokens:
    """The tokens that a target and a drafter with another vocabulary share.

    Args:
      spelling: ``spellings(target, draft)``; None: they are made here.

    Raises:
      ValueError: a vocabulary does not say which bytes its tokens stand for.
    """
    ours, theirs = (one.ids for one in spelling or spellings(target, draft))
    pairs = {ours[word]: theirs[word] for word in ours.keys() & theirs.keys()}
    words, taken = len(pairs), {*pairs.values()}
    special = special_tokens(target, draft)
    first = [i for i in target.eos_ids if i in special]  # an id that ends a text goes first
    for i in (*first, *sorted(special)):
        if i not in pairs and special[i] not in taken:
            pairs[i] = special[i]
            taken.add(special[i])
    order = np.asarray(sorted(pairs), np.int32)
    return SharedTokens(order, np.asarray([pairs[i] for i in order], np.int32), words)


def beginning(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The special tokens with which a tokenizer begins every text: one, or none."""
    ids = tokenizer.encode("")
    return tuple(ids[:1]) if ids and ids[0] in tokenizer.added else ()


def spelled_by(
    target: Tokenizer, draft: Tokenizer, spelling: Spellings | None = None
) -> dict[int, list[int]]:
    """The target's ids -> the drafter's tokens that spell them, as far as there are any.

    A shared token is spelled by its partner. Any other token of text is cut as the drafter's
    tokenizer cuts it where that gives the same bytes, else by the longest match. The token that
    begins a text is spelled by nothing where the drafter's tokenizer begins every text by itself.

    Args:
      spelling: ``spellings(target, draft)``; None: they are made here.

    Raises:
      ValueError: a vocabulary does not say which bytes its tokens stand for.
    """
    ours, theirs = spelling or spellings(target, draft)
    found = {i: [partner] for i, partner in special_tokens(target, draft).items()}
    begin = target.roles.get("bos_token")
    if begin is not None and begin not in target.eos_ids and beginning(draft):
        found[begin] = []
    for i, word in ours.bytes_of.items():
        if (partner := theirs.ids.get(word)) is not None:
            found[i] = [partner]
        else:
            found[i] = _as_encoded(draft, theirs, word) or theirs.match(word)
    return found


def _as_encoded(tokenizer: Tokenizer, spelling: Spelling, word: bytes) -> list[int]:
    """The tokens of ``word`` by its tokenizer; empty where they do not stand for these bytes."""
    try:
        ids = [i for i in tokenizer.encode(word.decode()) if i not in tokenizer.added]
    except ValueError:  # a part of a character
        return []
    return ids if b"".join(spelling.bytes_of.get(i, b"") for i in ids) == word else []


def padded(lists: Mapping[int, Sequence[int]], rows: int, most: int) -> np.ndarray:
    """Lists by their row as int32 ``[rows, W]``, -1 after the last; W is the length of the longest,
    at most ``most`` and at least 1. Of a longer list the last ``most`` are kept."""
    width = max(1, min(most, max(map(len, lists.values()), default=0)))
    table = np.full((rows, width), -1, np.int32)
    for row, items in lists.items():
        if row < rows and items:
            kept = items[-width:]
            table[row, : len(kept)] = kept
    return table


def mean_length(lists: Mapping[int, Sequence]) -> float:
    """The mean length of lists by token id, 1 without any; empty ones are left out.

    Ids are in the order of merges, the low ones frequent: their weights follow Zipf's law."""
    weights = {i: 1 / (_FLAT + i) for i, items in lists.items() if items}
    total = sum(len(lists[i]) * weight for i, weight in weights.items())
    return total / sum(weights.values()) if weights else 1.0


class OtherTokenizer(ValueError):
    """A draft model has another tokenizer than the target.

    Args:
      message: the whole message.
      across: the part of it that names ways across vocabularies; empty: there are none.
    """

    def __init__(self, message: str, across: str):
        super().__init__(message)
        self.across = across

    def without_ways_across(self) -> OtherTokenizer:
        """The same error where neither ``tli`` nor ``slem`` can be used, and neither is named."""
        message = str(self)
        return OtherTokenizer(message.replace(self.across, "") if self.across else message, "")


def way_out(target: Tokenizer, draft: Tokenizer, name: str) -> str:
    """How the model ``name``, whose tokens are ``draft``'s, can draft for a target: the middle of
    an error, which states how many tokens they share; empty where it cannot."""
    try:
        shared = len(shared_tokens(target, draft).target)
    except ValueError:  # a vocabulary that does not say which bytes its tokens stand for
        return ""
    ours, theirs = shared / len(target.vocabulary), shared / len(draft.vocabulary)
    return (
        f"give drafter='tli:{name}' or 'slem:{name}', which draft across vocabularies (the two "
        f"share {shared} tokens, {ours:.0%} of the target's and {theirs:.0%} of the drafter's; "
        "take 'tli' above temperature 0, at 0 specjax.plan tells which is faster), or "
    )
