"""Grammars: a logits processor that allows only texts that an automaton over bytes accepts.

The automaton is made once, on the host, and becomes a table over token classes: two tokens are in
one class if they lead from every state to the same state (most words do, inside a string). Each row
has a state, and the state of a node is that after its path. A mask takes two gathers, a step one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import jax.numpy as jnp
import numpy as np

from .base import LogitsProcessor
from .json_bytes import TOPS, accepting, advance, beginning

DEAD, START = 0, 1  # states; nothing leads out of DEAD
CHUNK = 1024  # tokens whose paths are followed at once: bounds the memory


@dataclasses.dataclass(frozen=True)
class Automaton(LogitsProcessor):
    """A logits processor: tokens that the automaton does not accept have no probability.

    End-of-text ids come exactly where the text may end. A row that its budget ends holds the
    beginning of such a text.

    Attributes:
      name: the name of the grammar.
      params: ``next`` int32 ``[S, C]``, the state after a state and a class of tokens, 0 where the
        tokens are not allowed; ``kind`` int32 ``[V]``, the class of each token. They are passed as
        ``params["logits_processor"]``, so they are arguments of the compiled program.
    """

    name: str = dataclasses.field()  # without it, the base class's attribute would be the default
    params: Mapping[str, np.ndarray] = dataclasses.field(compare=False, repr=False)

    def init(self, params, tokens, lengths):
        return jnp.full(lengths.shape, START, jnp.int32)

    def step(self, params, state, token):
        return jnp.asarray(params["next"])[state, jnp.asarray(params["kind"])[token]]

    def __call__(self, logits, prefix):
        after = jnp.asarray(prefix.params["next"])[prefix.state]
        lawful = jnp.take(after, jnp.asarray(prefix.params["kind"]), axis=1) != DEAD
        return jnp.where(lawful, logits, -jnp.inf)


def json_text(lm, *, depth: int = 4, blanks: int = 1, top: str = "any") -> Automaton:
    """A law of JSON texts (RFC 8259, in UTF-8) for the tokenizer of ``lm``.

    Args:
      lm: what ``specjax.load`` returns, with its tokenizer.
      depth: how deep arrays and objects may be nested, 1 to 6; JSON itself has no bound, a finite
        automaton needs one, and its table doubles with each level.
      blanks: white space characters in a row, where JSON admits them, 0 to 16.
      top: what the text is: ``any``, ``object`` or ``array``.

    Raises:
      ValueError: a depth, number or name out of range; a tokenizer whose tokens have no bytes; a
        model without end-of-text ids, which could never stop.

    Example::

        processor = specjax.sampling.processors.json_text(lm, top="object")
        sampling = specjax.Sampling(logits_processor=processor)
        out = specjax.generate(lm, "A person as JSON: ", sampling=sampling)
        json.loads(out.text)  # where out.reasons == ["stop"]
    """
    if not (isinstance(depth, int) and 1 <= depth <= 6):
        raise ValueError(f"json_text(depth={depth!r}): give a number from 1 to 6")
    if not (isinstance(blanks, int) and 0 <= blanks <= 16):
        raise ValueError(f"json_text(blanks={blanks!r}): give a number from 0 to 16")
    if top not in TOPS:
        raise ValueError(f"json_text(top={top!r}): give one of {', '.join(TOPS)}")
    table, ends = byte_table(
        beginning(top), lambda state, byte: advance(state, byte, depth, blanks), accepting
    )
    return of_bytes(
        f"json {top}, depth {depth}, {blanks} blanks",
        table,
        ends,
        lm.tokenizer.token_bytes,
        lm.tokenizer.eos_ids,
        lm.target.vocab_size,
    )


def byte_table(first, advance: Callable, accepting: Callable) -> tuple[np.ndarray, np.ndarray]:
    """The table int32 ``[S, 256]`` of an automaton given as a function, and bool ``[S]``: the text
    may end here. ``first`` becomes ``START``; ``advance(state, byte)`` is a state or None."""
    numbers, queue, rows = {first: START}, [first], []
    for state in queue:
        row = np.zeros(256, np.int32)
        for byte in range(256):
            after = advance(state, byte)
            if after is not None:
                if after not in numbers:
                    numbers[after] = len(numbers) + 1
                    queue.append(after)
                row[byte] = numbers[after]
        rows.append(row)
    table = np.stack([np.zeros(256, np.int32), *rows])
    return table, np.asarray([False, *map(accepting, queue)])


def of_bytes(
    name: str,
    table: np.ndarray,
    ends: np.ndarray,
    token_bytes: Mapping[int, bytes],
    eos_ids: Iterable[int],
    vocab: int,
) -> Automaton:
    """An automaton over bytes as one over tokens.

    Args:
      table, ends: see ``byte_table``.
      token_bytes: the bytes of each token; a token without an entry is never allowed.
      eos_ids: the ids that are allowed where the text may end; no token follows them.
      vocab: the number of tokens of the model.

    Raises:
      ValueError: there are no end-of-text ids, or no text of the grammar can be spelled.
    """
    eos = [token for token in eos_ids if 0 <= token < vocab]
    if not eos:
        raise ValueError(
            f"a grammar ({name}) needs a model with end-of-text ids, else no text could stop"
        )
    size = len(table)
    over = size  # the state after the end
    classes: dict[bytes, int] = {}
    columns, kind = [], np.zeros(vocab, np.int32)

    def number(column: np.ndarray) -> int:
        found = classes.setdefault(column.tobytes(), len(columns))
        if found == len(columns):
            columns.append(column)
        return found

    nothing = np.zeros(size + 1, np.int32)
    kind[:] = number(nothing)
    words: dict[bytes, list[int]] = {}
    for token, spelled in token_bytes.items():
        if spelled and token < vocab and token not in eos:
            words.setdefault(spelled, []).append(token)
    spellings = sorted(words, key=len)
    for begin in range(0, len(spellings), CHUNK):
        chunk = spellings[begin : begin + CHUNK]
        for spelled, column in zip(chunk, _follow(table, chunk), strict=True):
            kind[words[spelled]] = number(np.append(column, DEAD).astype(np.int32))
    ending = np.where(np.append(ends, True), over, DEAD).astype(np.int32)
    kind[eos] = number(ending)
    after = _trim(np.stack(columns, axis=1), over)
    if not after[START].any():
        raise ValueError(f"a grammar ({name}): no text of it can be spelled with these tokens")
    return Automaton(name=name, params={"next": after, "kind": kind})


def _follow(table: np.ndarray, words: list[bytes]) -> np.ndarray:
    """int32 ``[words, S]``: where each word leads from each state; dead pairs are not followed."""
    longest = max(map(len, words))
    letters = np.zeros((len(words), longest), np.uint8)
    for row, word in enumerate(words):
        letters[row, : len(word)] = np.frombuffer(word, np.uint8)
    lengths = np.asarray([len(word) for word in words])
    found = np.zeros((len(words), len(table)), np.int32)
    word, origin = (x.reshape(-1) for x in np.indices(found.shape))
    state = origin
    for place in range(longest):
        state = table[state, letters[word, place]]
        alive = state != DEAD
        word, origin, state = word[alive], origin[alive], state[alive]
        done = lengths[word] == place + 1
        found[word[done], origin[done]] = state[done]
        word, origin, state = word[~done], origin[~done], state[~done]
    return found


def _trim(after: np.ndarray, over: int) -> np.ndarray:
    """``after`` without the states from which no sequence of tokens leads to the end."""
    useful = np.zeros(len(after), bool)
    useful[over] = True
    while True:
        grown = useful | useful[after].any(axis=1)
        grown[DEAD] = False
        if (grown == useful).all():
            return np.where(useful[after], after, DEAD).astype(np.int32)
        useful = grown
