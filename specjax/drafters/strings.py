"""Tokens of one vocabulary to those of another through the string that they spell, in the loop.

The tables hold the bytes of each token of the draft model, and the target's tokens by two hashes
of their bytes. The string is cut greedily, the longest token first; of several spaces before a word
the last one goes to the word where the target's tokenizer does so. What a tokenizer does besides
(the order of its merges, other rules about where words end, normalization) no table says, so its
own cut may be another one.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from .._internal.pytree import pytree_dataclass
from ..models import vocabularies
from ..models.tokenizer import Tokenizer

MOST_BYTES = 32  # of a token; a longer one of the drafter is cut, one of the target is not found
_FACTORS = (0x01000193, 0x5BD1E995)  # odd, so that they have inverses modulo 2**32
_SPREAD = 0x9E3779B1
_WORD = 2**32
_SPACE, _WHITE = 33, (33, 14, 11, 10)  # letters: a space; that, a return, a newline, a tab


@pytree_dataclass
class StringTables:
    """What ``retokenize`` reads.

    Attributes:
      letters: int32 ``[Vd, S]``, one more than each byte of a draft token, 0 after the last.
      sizes: int32 ``[Vd]``, how many bytes there are.
      last: bool ``[Vd]``, tokens after which the string ends: special ones, and those that are cut.
      special: int32 ``[Vd]``, the target's partner of a special token, else -1.
      checks: uint32 ``[H, K]``, for each bucket of the hash the other hash of its tokens.
      ids: int32 ``[H, K]``, the target's ids of those tokens; -1: there is none.
      lengths: int32 ``[T]``, 1 to the number of bytes of the target's longest token.
      lends: bool, whether a word takes the last of several spaces before it.
      each: float32, how many of the target's tokens a draft token takes, on average.
    """

    letters: jax.Array
    sizes: jax.Array
    last: jax.Array
    special: jax.Array
    checks: jax.Array
    ids: jax.Array
    lengths: jax.Array
    lends: jax.Array
    each: jax.Array


def string_tables(
    target: Tokenizer,
    draft: Tokenizer,
    vocab_size: int,
    draft_vocab_size: int,
    spelling: vocabularies.Spellings | None = None,
) -> StringTables:
    """Makes the tables; the arguments and errors are those of ``translation.vocabulary_tables``."""
    ours, theirs = spelling or vocabularies.spellings(target, draft)
    words = {i: word for i, word in theirs.bytes_of.items() if i < draft_vocab_size}
    letters = vocabularies.padded(
        {i: [byte + 1 for byte in word[:MOST_BYTES]] for i, word in words.items()},
        draft_vocab_size,
        MOST_BYTES,
    )
    letters = np.maximum(letters, 0)
    last = np.ones(draft_vocab_size, bool)
    last[[i for i, word in words.items() if len(word) <= MOST_BYTES]] = False
    special = np.full(draft_vocab_size, -1, np.int32)
    partners = vocabularies.special_tokens(target, draft).items()
    for token, own in sorted(partners, key=lambda pair: pair[0] in target.eos_ids):
        if own < draft_vocab_size and own not in words:
            special[own] = token
    known = {word: i for word, i in ours.ids.items() if i < vocab_size and len(word) <= MOST_BYTES}
    checks, ids = _buckets(known)
    return StringTables(
        letters=jnp.asarray(letters),
        sizes=jnp.asarray(np.sum(letters > 0, axis=1, dtype=np.int32)),
        last=jnp.asarray(last),
        special=jnp.asarray(special),
        checks=jnp.asarray(checks),
        ids=jnp.asarray(ids),
        lengths=jnp.arange(1, max(map(len, known), default=1) + 1, dtype=jnp.int32),
        lends=jnp.asarray(_lends_spaces(target, ours)),
        each=jnp.float32(vocabularies.mean_length({i: ours.match(w) for i, w in words.items()})),
    )


def _lends_spaces(tokenizer: Tokenizer, spelling: vocabularies.Spelling) -> bool:
    """Whether a tokenizer cuts ``"a     b"`` before the last space."""
    ids = [i for i in tokenizer.encode("a     b") if i in spelling.bytes_of]
    return bool(ids) and spelling.bytes_of[ids[-1]] == b" b"


def _buckets(words: Mapping[bytes, int]) -> tuple[np.ndarray, np.ndarray]:
    """A table of tokens by the hashes of their bytes: see ``StringTables``."""
    order = sorted(words, key=words.__getitem__)
    spelled = {i: [byte + 1 for byte in word] for i, word in enumerate(order)}
    letters = np.maximum(vocabularies.padded(spelled, len(order), MOST_BYTES), 0)
    letters = letters.astype(np.uint32)
    powers = [_powers(factor, letters.shape[1]) for factor in _FACTORS]
    both = [np.asarray(np.sum(letters * x, axis=1, dtype=np.uint32)) for x in powers]
    num = 1 << max(1, len(order) - 1).bit_length()
    bucket = _bucket(both[0], num)
    by_bucket = np.argsort(bucket, kind="stable")
    sorted_buckets = bucket[by_bucket]
    place = np.arange(len(order)) - np.searchsorted(sorted_buckets, sorted_buckets)
    checks = np.zeros((num, int(place.max(initial=0)) + 1), np.uint32)
    ids = np.full(checks.shape, -1, np.int32)
    checks[sorted_buckets, place] = both[1][by_bucket]
    ids[sorted_buckets, place] = np.asarray([words[word] for word in order], np.int32)[by_bucket]
    return checks, ids


def _bucket(hashes, num: int):
    """Which of ``num`` buckets, a power of two, uint32 ``hashes`` fall into."""
    spread = hashes * np.uint32(_SPREAD)
    return (spread >> np.uint32(33 - num.bit_length())).astype(np.int32)


def _powers(factor: int, count: int) -> np.ndarray:
    """uint32 ``[count]``, the powers of a factor modulo 2**32."""
    return np.asarray([pow(factor, n, _WORD) for n in range(count)], np.uint32)


def retokenize(tables: StringTables, drafted: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """The target's tokens of the string that a draft spells.

    Args:
      drafted: int32 ``[B, P]``, tokens of the draft model; -1 after the last.
      most: how many tokens of the target there may be.

    Returns:
      tokens int32 ``[B, most]``, and how many of them there are, int32 ``[B]``. The string ends
      before a byte with which none of the target's tokens begins, and where it grows too long (more
      than eight bytes a token, and 32).
    """
    batch, size = drafted.shape[0], tables.letters.shape[1]
    rows = jnp.arange(batch)[:, None]
    last = (tables.last[drafted] & (drafted >= 0)).astype(jnp.int32)
    ended = jnp.cumsum(last, axis=1)
    whole = (ended == last) & (drafted >= 0)  # no earlier token ended the string
    sizes = jnp.where(whole, tables.sizes[drafted], 0)
    ends = jnp.cumsum(sizes, axis=1)
    room = min(size, MOST_BYTES // 4) * drafted.shape[1] + MOST_BYTES
    total = jnp.minimum(ends[:, -1], room)
    where = (ends - sizes)[:, :, None] + jnp.arange(size)
    where = jnp.where(jnp.arange(size) < sizes[:, :, None], where, room)
    string = jnp.zeros((batch, room), jnp.uint32)
    string = string.at[rows, where.reshape(batch, -1)].set(
        tables.letters[drafted].reshape(batch, -1).astype(jnp.uint32), mode="drop"
    )
    sums = [
        jnp.pad(jnp.cumsum(string * _powers(factor, room), axis=1), ((0, 0), (1, 0)))
        for factor in _FACTORS
    ]
    spaces = jnp.pad(jnp.cumsum(string == _SPACE, axis=1), ((0, 0), (1, 0)))
    word = jnp.pad(~jnp.isin(string, jnp.asarray(_WHITE)), ((0, 0), (0, 1)))
    shifts = [jnp.asarray(_powers(pow(factor, -1, _WORD), room + 1)) for factor in _FACTORS]

    def cut(at, _):
        """The longest token that begins at the byte ``at`` int32 ``[B]``."""
        stop = at[:, None] + tables.lengths
        within = jnp.minimum(stop, room)
        first, second = (
            (jnp.take_along_axis(sums_to, within, axis=1) - sums_to[rows, at[:, None]])
            * shift[at][:, None]
            for sums_to, shift in zip(sums, shifts, strict=True)
        )
        bucket = _bucket(first, len(tables.checks))
        same = (tables.checks[bucket] == second[:, :, None]) & (tables.ids[bucket] >= 0)
        token = jnp.max(jnp.where(same, tables.ids[bucket], -1), axis=2)  # [B, T]
        blank = jnp.take_along_axis(spaces, within, axis=1) - spaces[rows, at[:, None]]
        before_word = (stop < total[:, None]) & jnp.take_along_axis(word, within, axis=1)
        lent = tables.lends & (blank == tables.lengths) & (tables.lengths > 1) & before_word
        token = jnp.where((stop <= total[:, None]) & ~lent, token, -1)
        best = jnp.max(jnp.where(token >= 0, tables.lengths, 0), axis=1)
        found = jnp.take_along_axis(token, jnp.maximum(best - 1, 0)[:, None], axis=1)[:, 0]
        return at + best, jnp.where(best > 0, found, -1)

    at, tokens = jax.lax.scan(cut, jnp.zeros((batch,), jnp.int32), length=most)
    tokens = tokens.T
    count = jnp.sum(jnp.cumprod(tokens >= 0, axis=1), axis=1, dtype=jnp.int32)
    # a special token after the whole string
    which = jnp.argmax(ended > 0, axis=1)[:, None]
    final = jnp.take_along_axis(drafted, which, axis=1)[:, 0]
    final = jnp.where((ended[:, -1] > 0) & (at == total), tables.special[final], -1)
    place = jnp.where(final >= 0, count, most)
    tokens = tokens.at[rows[:, 0], place].set(final, mode="drop")
    return jnp.maximum(tokens, 0), jnp.minimum(count + (final >= 0), most)
