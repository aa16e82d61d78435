"""Grammars: a logits processor that allows only texts that an automaton over bytes accepts.

The automaton is made once, on the host, and becomes a table over token classes. Two tokens are in
one class if they lead from every state to the same state, as most words inside a string do. Each
row has a state; the state of a node is the state after the node's path. A mask takes two gathers, a
step takes one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import jax.numpy as jnp
import numpy as np

from .base import LogitsProcessor
from .json_bytes import TOPS, accepting, advance, beginning

DEAD, START = 0, 1  # states; no byte leads out of DEAD
CHUNK = 1024  # tokens whose paths are followed at once, which limits the memory


@dataclasses.dataclass(frozen=True)
class Automaton(LogitsProcessor):
    """A logits processor that forbids every token that the automaton does not accept.

    End-of-text ids are allowed exactly where the text may end. A row that ends because its budget
    is used up holds the beginning of an accepted text.

    Attributes:
      name: the name of the grammar.
      params: ``next`` int32 ``[states, classes]``, the state that follows a state after a token of
        a class, 0 where such tokens are not allowed; ``kind`` int32 ``[V]``, the class of each
        token. Both are passed as ``params["logits_processor"]``, so they are arguments of the
        compiled program.
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
    """Returns a logits processor that allows only JSON texts (RFC 8259, in UTF-8).

    Args:
      lm: a model from ``specjax.load``, with its tokenizer.
      depth: how deep arrays and objects may be nested, 1 to 6. JSON has no limit, but a finite
        automaton needs one; each level doubles the automaton's table.
      blanks: the most white space characters in a row, where JSON admits them, 0 to 16.
      top: the value at the top of the text: ``any``, ``object`` or ``array``.

    Raises:
      ValueError: ``depth``, ``blanks`` or ``top`` is out of range, the tokenizer does not tell the
        bytes of its tokens, or the model has no end-of-text ids, so that no text could stop.

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
    """Makes the table of an automaton over bytes from its transition function.

    Args:
      first: the first state, which becomes state ``START``; hashable.
      advance: ``(state, byte) -> state``, or None where the byte is not allowed.
      accepting: ``state -> bool``, whether the text may end in the state.

    Returns:
      the table int32 ``[states, 256]`` of following states, 0 where the byte is not allowed, and
      bool ``[states]``, whether the text may end in each state.
    """
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
    """Turns an automaton over bytes into an automaton over tokens.

    Args:
      name: the name of the grammar.
      table: int32 ``[states, 256]``, see ``byte_table``.
      ends: bool ``[states]``, see ``byte_table``.
      token_bytes: the bytes of each token; a token without an entry is never allowed.
      eos_ids: the end-of-text ids, which are allowed where the text may end; no token follows them.
      vocab: V, the size of the model's vocabulary.

    Raises:
      ValueError: there are no end-of-text ids, or no text of the grammar can be written with the
        tokens.
    """
    eos = [token for token in eos_ids if 0 <= token < vocab]
    if not eos:
        raise ValueError(
            f"the grammar ({name}) needs a model with end-of-text ids; without them no text could "
            "stop"
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
        raise ValueError(
            f"the grammar ({name}) has no text that can be spelled with the model's tokens"
        )
    return Automaton(name=name, params={"next": after, "kind": kind})


def _follow(table: np.ndarray, words: list[bytes]) -> np.ndarray:
    """Returns int32 ``[words, states]``, the state to which each word leads from each state; pairs
    that have reached ``DEAD`` are not followed further."""
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
    """Returns ``after`` without the states from which no sequence of tokens leads to the end."""
    useful = np.zeros(len(after), bool)
    useful[over] = True
    while True:
        grown = useful | useful[after].any(axis=1)
        grown[DEAD] = False
        if (grown == useful).all():
            return np.where(useful[after], after, DEAD).astype(np.int32)
        useful = grown
