"""A table of the most frequent successor of each token, counted from texts: CS Drafting's base.

    x_{i+1} = argmax_x count(x_i, x)

With ``order`` above 2 there are tables for longer contexts too. The longest context that the tables
know decides, as in StagedSpec's back-off model; a token without any successor ends the draft.

A table is counted once, by ``count`` from token ids or by ``specjax bigram`` from files, and saved
like heads: ``specjax.save_drafter``, ``specjax.load_drafter``. It keeps nothing of the text that is
generated, so it may be INNER of a ``Cascade``; after ``ngram+`` it drafts where nothing can be
copied, which together is the statistical drafter of CS Drafting.

Cost of a round and row: a number is read for each token, and with ``order`` above 2 a binary search
for each token and longer context. The weights are 4 V bytes, and ``4 n`` for each context of ``n -
1 > 1`` tokens.

Lossless: yes, under ``greedy``, ``delta`` and all rules that take a function of the context.

Example::

    params = bigram.count(ids, vocab_size=target.vocab_size)  # ids: lists of token ids
    drafter = Bigram(num_draft=4, vocab_size=target.vocab_size)  # for `specjax.decode`
    specjax.save_drafter(drafter, params, "my-bigrams")
    specjax.generate(lm, "...", drafter="cascade:draft:ngram+my-bigrams")

Differs from StagedSpec, whose model draws from Katz's law, with discounted counts: here the most
frequent token is proposed, a point mass.

References: CS Drafting, arXiv 2312.11462, section 4 (max-gram, then bigrams); StagedSpec, arXiv
2308.04623, section 3.2 (an n-gram model drafts for the draft model).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from .. import trees
from .._internal.optional import unset
from ..trees.topology import chain
from .base import ChainDrafter, check_topology

MOST_ORDER = 8
END = -1  # stands between texts, and for a successor that is not known


@dataclasses.dataclass(frozen=True)
class Bigram(ChainDrafter):
    """Drafts the most frequent successor of each token; ``params["drafter"]`` is from ``count``.

    Attributes:
      num_draft: tokens of a chain.
      vocab_size: of the target.
      order: how many tokens an n-gram has, the successor included; 2: bigrams alone. It is that of
        the tables.
      topology: None or a chain, of which ``num_draft`` follows.

    Raises:
      ValueError: there is no vocabulary, ``order`` is out of range, or the topology is no chain.
    """

    num_draft: int = 4
    vocab_size: int = unset()
    order: int = 2
    topology: trees.Topology | None = None
    name = "bigram"
    can_rest = True
    takes_topology = True

    def __post_init__(self):
        super().__post_init__()
        check_topology(self)
        check_order("Bigram", self.order)
        if not self.vocab_size or self.vocab_size < 1:
            raise ValueError(
                f"Bigram(vocab_size={self.vocab_size}): give the size of the target's vocabulary"
            )
        shape = self.topology or chain(self.num_draft)
        if shape != chain(shape.depth):
            raise ValueError(
                f"Bigram(topology={shape}): a token has one most frequent successor, so give "
                "trees.chain(n) or num_draft=n"
            )
        object.__setattr__(self, "topology", shape)
        object.__setattr__(self, "num_draft", shape.depth)

    def init(self, params, target_params, batch, capacity, inputs=None):
        check_tables(params, self.vocab_size, self.order)
        return ()

    def draft_step(self, params, target_params, state, context):
        back = jnp.arange(self.order - 1, dtype=jnp.int32)[::-1]
        where = context.length[:, None] - 1 - back
        last = jnp.take_along_axis(context.tokens, jnp.maximum(where, 0), axis=1)
        last = jnp.where(where >= 0, last, END)

        def step(last, _):
            token = successor(params, last)
            return jnp.concatenate([last[:, 1:], token[:, None]], axis=1), token

        _, tokens = jax.lax.scan(step, last, length=self.num_draft)
        tokens = tokens.T
        known = tokens >= 0  # after an unknown token no successor is known
        draft = trees.chain_draft(context, jnp.maximum(tokens, 0), candidate=known, scored=known)
        return draft, state


def successor(tables, last: jax.Array) -> jax.Array:
    """The most frequent successor of each context.

    Args:
      tables: from ``count``.
      last: int32 ``[B, n]``, the last tokens, ``END`` where there are none.

    Returns:
      int32 ``[B]``: that of the longest context that ``tables`` know, ``END`` where they know none.
    """
    tables = {name: jnp.asarray(x) for name, x in tables.items()}
    token = last[:, -1]
    found = jnp.where(token >= 0, tables["after.1"][jnp.maximum(token, 0)], END)
    for size in range(2, last.shape[1] + 1):
        keys, wanted = tables[f"contexts.{size}"], last[:, -size:]
        place = _place(keys, wanted)
        there = jnp.all(keys[place] == wanted, axis=1) & jnp.all(wanted >= 0, axis=1)
        found = jnp.where(there, tables[f"after.{size}"][place], found)
    return found


def _place(keys: jax.Array, wanted: jax.Array) -> jax.Array:
    """int32 ``[B]``: where ``wanted`` ``[B, n]`` stands among sorted ``keys`` ``[M, n]``, if it is
    one of them."""
    last = len(keys) - 1
    low = jnp.zeros((len(wanted),), jnp.int32)
    high = jnp.full_like(low, last)
    for _ in range(max(last, 0).bit_length()):
        middle = (low + high) // 2
        key = keys[middle]
        before, same = jnp.zeros(low.shape, bool), jnp.ones(low.shape, bool)
        for column in range(wanted.shape[1]):
            before |= same & (key[:, column] < wanted[:, column])
            same &= key[:, column] == wanted[:, column]
        low, high = jnp.where(before, middle + 1, low), jnp.where(before, high, middle)
        low = jnp.minimum(low, high)
    return low


def count(
    texts: Iterable[Sequence[int] | npt.ArrayLike],
    vocab_size: int,
    order: int = 2,
    *,
    least: int = 2,
    most: int = 2**18,
) -> dict[str, np.ndarray]:
    """Counts the n-grams of texts; what ``Bigram`` reads as ``params["drafter"]``.

    Of equally frequent successors the one with the smallest id is taken. No n-gram reaches over the
    end of a text.

    Args:
      texts: token ids of each text; they are held in memory, with about ``24 + 4 order`` bytes for
        each token.
      vocab_size: V, of the target.
      order: how many tokens an n-gram has at most.
      least: how often a context of more than one token and its successor must have occurred.
      most: how many contexts of each length above 1 are kept, the most frequent ones.

    Returns:
      ``after.1`` int32 ``[V]``, the successor of each token, -1 for none; and for each n from 2 to
      ``order - 1`` ``contexts.n`` int32 ``[M, n]``, sorted, and ``after.n`` int32 ``[M]``. Contexts
      that say what shorter ones say are left out.

    Raises:
      ValueError: ``order``, ``least`` or ``most`` is out of range, a token is not in the
        vocabulary, or the texts have no two tokens in a row.
    """
    check_order("count", order)
    if least < 1 or most < 1:
        raise ValueError(f"count(least={least}, most={most}): both must be at least 1")
    parts = []
    for text in texts:
        ids = np.asarray(text, np.int64).reshape(-1)
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(
                f"count: a text has the token {ids.max() if ids.min() >= 0 else ids.min()}, and "
                f"the vocabulary has {vocab_size} tokens (vocab_size): count the ids of the "
                "target's own tokenizer"
            )
        parts += [ids.astype(np.int32), np.full((1,), END, np.int32)]
    tokens = np.concatenate([np.zeros((0,), np.int32), *parts])
    contexts, after, _ = _most_frequent(tokens, 1, 1)
    if not len(contexts):
        raise ValueError("count: texts have no two tokens in a row: give texts to count")
    first = np.full((vocab_size,), END, np.int32)
    first[contexts[:, 0]] = after
    tables: dict[str, np.ndarray] = {"after.1": first}
    for size in range(2, order):
        contexts, after, often = _most_frequent(tokens, size, least)
        known = np.asarray(successor(tables, jnp.asarray(contexts[:, 1:])))
        kept = np.flatnonzero(known != after)
        kept = np.sort(kept[np.argsort(-often[kept], kind="stable")[:most]])
        tables[f"contexts.{size}"] = contexts[kept]
        tables[f"after.{size}"] = after[kept]
        if not len(kept):  # a search needs a row; no context has this token
            tables[f"contexts.{size}"] = np.full((1, size), END, np.int32)
            tables[f"after.{size}"] = np.full((1,), END, np.int32)
    return tables


def _most_frequent(tokens: np.ndarray, size: int, least: int):
    """The contexts of ``size`` tokens, sorted, int32 ``[M, size]``; the most frequent successor of
    each int32 ``[M]``; and how often it followed. ``tokens`` int32 ``[n]`` has ``END`` after each
    text."""
    columns = [tokens[back : len(tokens) - size + back] for back in range(size + 1)]
    grams = np.stack(columns, axis=1) if len(tokens) > size else np.zeros((0, size + 1), np.int32)
    grams = grams[(grams != END).all(axis=1)]
    grams = grams[np.lexsort(grams.T[::-1])]
    new = np.ones((len(grams),), bool)
    new[1:] = (grams[1:] != grams[:-1]).any(axis=1)
    begins = np.flatnonzero(new)
    often = np.diff(np.append(begins, len(grams)))
    grams = grams[begins]
    grams, often = grams[often >= least], often[often >= least]
    order = np.lexsort((grams[:, -1], -often, *grams[:, :-1].T[::-1]))
    grams, often = grams[order], often[order]
    best = np.ones((len(grams),), bool)
    best[1:] = (grams[1:, :-1] != grams[:-1, :-1]).any(axis=1)
    return grams[best, :-1], grams[best, -1], often[best]


def check_order(called: str, order: int) -> None:
    """Raises ValueError for an order that no table has."""
    if not 2 <= order <= MOST_ORDER:
        raise ValueError(
            f"{called}(order={order}): an n-gram has 2 to {MOST_ORDER} tokens; 2 is a bigram"
        )


def check_tables(tables, vocab_size: int, order: int) -> None:
    """Raises ValueError for what is no table of a vocabulary and an order."""
    shapes = {n: jnp.shape(x) for n, x in tables.items()} if isinstance(tables, dict) else {}
    wanted: dict[str, tuple[int, ...]] = {"after.1": (vocab_size,)}
    for size in range(2, order):
        num = math.prod(shapes.get(f"after.{size}", (0,)))
        wanted |= {f"contexts.{size}": (num, size), f"after.{size}": (num,)}
    if shapes != wanted or not all(map(math.prod, shapes.values())):
        raise ValueError(
            f"params['drafter'] of Bigram(vocab_size={vocab_size}, order={order}) has "
            f"{shapes or type(tables).__name__}: give what bigram.count(texts, {vocab_size}, "
            f"order={order}) returns"
        )
