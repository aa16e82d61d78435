"""A datastore as the memory of a drafter: it is asked on the host, between bursts of rounds."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from .. import trees
from ..drafters import context_index
from ..drafters.datastore import Datastore, sorted_places
from ..drafters.indexed import IndexedDrafter, TextTable
from ..drafters.suffix import Suffix
from ..models.lm import LM
from .session import Session, fingerprint

MATCHES, AFTER = 16, 48  # of each row: matches that are taken, and tokens after each


class Retrieval(Session):
    """What a datastore holds about the texts that are being written, for a drafter that looks it
    up: REST.

    Give it in place of a drafter. Between bursts of rounds the datastore is asked for the places
    that are most like the end of each row; what follows them there goes into a small table on the
    device, which the compiled loop reads. Answers are not added to it.

    Args:
      lm: the target.
      path: the folder of a datastore, from ``specjax datastore build``.
      drafter: an ``IndexedDrafter``; None: ``Suffix`` with a tree of 16 tokens.
      rows: how many rows a request has at most.

    Raises:
      ValueError: the datastore was made with another tokenizer, or as ``Datastore`` does.

    Example::

        store = specjax.text.Retrieval(lm, "corpus.store")
        print(specjax.generate(lm, "def main():", drafter=store).text)

    References: REST, arXiv 2311.08252.
    """

    asks = True

    def __init__(
        self,
        lm: LM,
        path: str | os.PathLike,
        drafter: IndexedDrafter | None = None,
        rows: int = 8,
    ):
        own = Suffix(topology=trees.Expand(8, 8, 16)) if drafter is None else drafter
        size = rows * MATCHES * (own.longest + AFTER + 1)
        super().__init__(lm, own, 1 << (size - 1).bit_length())
        self.store = Datastore(path)
        if self.store.tokenizer != fingerprint(lm):
            raise ValueError(
                f"{os.fspath(path)}: it was built with another tokenizer than that of {lm.name}; "
                "build it again with --model"
            )

    def add(self, prompt, tokens) -> None:
        """Takes nothing: a datastore is what it was built from."""

    def ask(self, texts: Sequence[np.ndarray]) -> None:
        """Fills the table with what follows the places that are most like the ends of ``texts``."""
        known, found = set(), []
        for text in texts:
            places, _ = self.store.search(text, MATCHES)
            fresh = [place for place in places.tolist() if place not in known]
            known.update(fresh)
            found += self.store.texts_around(np.asarray(fresh), self.drafter.longest, AFTER)
        self.table = table_of(found, self.capacity, self.drafter)


def table_of(texts: Sequence[np.ndarray], capacity: int, drafter: IndexedDrafter) -> TextTable:
    """A table of texts, as many of the first as fit. It is sorted on the host."""
    parts = [np.append(text, np.int32(-1)) for text in texts]
    ends = np.cumsum([len(part) for part in parts])
    parts = parts[: int(np.searchsorted(ends, capacity, side="right"))]
    joined = np.concatenate([np.zeros(0, np.int32), *parts])
    tokens, order = np.full((1, capacity), -1, np.int32), np.zeros((1, capacity), np.int32)
    tokens[0, : len(joined)] = joined
    order[0, : len(joined)] = sorted_places(joined, drafter.longest)
    count = jnp.asarray([len(joined)], jnp.int32)
    index = context_index.ContextIndex(order=jnp.asarray(order), count=count, block=drafter.block)
    return TextTable(tokens=jnp.asarray(tokens), length=count, index=index)
