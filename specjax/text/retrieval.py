"""A session that drafts from a datastore, which the host searches between bursts of rounds."""

from __future__ import annotations

import os
from collections.abc import Sequence

import jax
import numpy as np

from .. import trees
from .._internal.host import check_table_fits
from ..drafters import context_index
from ..drafters.datastore import Datastore, sorted_places
from ..drafters.indexed import IndexedDrafter, TextTable
from ..drafters.suffix import Suffix
from ..models.lm import LM
from .session import LARGEST, Session, fingerprint

USUAL = Suffix(topology=trees.Expand(8, 8, 16))  # the drafter, unless another one is given
MATCHES, AFTER = 16, 48  # the matches that are taken for a row, and the tokens after each


class Retrieval(Session):
    """A session whose drafter also drafts from a datastore on disk (REST).

    Pass a ``Retrieval`` in place of a drafter. Between bursts of rounds the host searches the
    datastore for the positions with the longest match of the end of each row. The tokens after
    these positions are copied into a small table on the device, which the compiled loop reads.
    Answers are not added to the datastore; with a ``session`` they are added to that, and its table
    is read as well.

    Args:
      lm: the target.
      path: the folder of a datastore, from ``specjax datastore build``.
      drafter: an ``IndexedDrafter``; None: that of ``session``, or without one ``Suffix`` with a
        tree of 16 tokens.
      rows: the rows of a request for which the table has room at first. Where more rows find more
        than that, the table grows, and the programs that read it are compiled anew.
      session: a ``Session`` of the same target, or None.

    Raises:
      TypeError: the drafter reads no table of texts.
      ValueError: the folder holds no datastore, the datastore was made with another tokenizer,
        the session belongs to another target, or ``rows`` is no whole number or out of range.

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
        session: Session | None = None,
    ):
        usual = USUAL if session is None else session.drafter
        own = usual if drafter is None else drafter
        if not isinstance(own, IndexedDrafter):
            raise TypeError(
                f"drafter={own!r:.60}: give an object of specjax.drafters.Suffix or "
                "specjax.drafters.SAM, or leave it out"
            )
        super().__init__(lm, own, _capacity(rows, own))
        self.store = Datastore(path)
        if self.store.tokenizer != fingerprint(lm):
            raise ValueError(
                f"{os.fspath(path)}: the datastore was built with another tokenizer than that of "
                f"{lm.name}; build it again with --model"
            )
        if session is not None and fingerprint(session.lm) != fingerprint(lm):
            raise ValueError(
                f"session: it belongs to {session.lm.name}, and its tokens are not those of "
                f"{lm.name}; make a Session of {lm.name}"
            )
        self.session = session

    @property
    def params(self) -> TextTable | tuple[TextTable, ...]:
        """What the drafter reads as ``params["drafter"]``: the table of what the search found, and
        before it the table of the session, if there is one."""
        return self.table if self.session is None else (self.session.table, self.table)

    def add(self, prompt, tokens) -> None:
        """Adds an answer to the session; without a session, does nothing."""
        if self.session is not None:
            self.session.add(prompt, tokens)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the answers of the session to a file, see ``Session.save``.

        Raises:
          ValueError: there is no session.
        """
        if self.session is None:
            raise ValueError("this Retrieval has no session, and keeps no answers to save")
        self.session.save(path)

    def ask(self, texts: Sequence[np.ndarray]) -> None:
        """Fills the table with the tokens that follow the longest matches of the ends of ``texts``.

        Args:
          texts: the token ids of each row that is still decoded, int32 ``[n]`` each.

        Raises:
          ValueError: no table can hold the matches of so many rows.
        """
        known, found = set(), []
        for text in texts:
            places, _ = self.store.search(text, MATCHES)
            fresh = [place for place in places.tolist() if place not in known]
            known.update(fresh)
            found += self.store.texts_around(np.asarray(fresh), self.drafter.longest, AFTER)
        capacity = self.capacity
        if sum(len(text) + 1 for text in found) > capacity:
            capacity = max(capacity, _capacity(len(texts), self.drafter))
        self.table = table_of(found, capacity, self.drafter)


def _capacity(rows: int, drafter: IndexedDrafter) -> int:
    """Returns the tokens of a table that has room for all matches of so many rows.

    Raises:
      ValueError: there is no such table.
    """
    each = MATCHES * (drafter.longest + AFTER + 1)
    whole = isinstance(rows, int | np.integer) and not isinstance(rows, bool)
    if not whole or not 1 <= rows <= LARGEST // each:
        raise ValueError(
            f"rows={rows!r:.60}: give a whole number from 1 to {LARGEST // each}, and decode more "
            "rows in several requests"
        )
    capacity = 1 << (int(rows) * each - 1).bit_length()
    check_table_fits(8 * capacity, f"rows={rows}", "give fewer rows")
    return capacity


def table_of(texts: Sequence[np.ndarray], capacity: int, drafter: IndexedDrafter) -> TextTable:
    """Returns a table of texts with its index, which is sorted on the host.

    Args:
      texts: token ids, int32 ``[n]`` each; only the first texts that fit are taken.
      capacity: the number of tokens that the table can hold.
      drafter: the drafter that reads the table.
    """
    ends = np.cumsum([len(text) + 1 for text in texts])
    taken = texts[: int(np.searchsorted(ends, capacity, side="right"))]
    end = np.full(1, -1, np.int32)
    joined = np.concatenate([end[:0], *(part for text in taken for part in (text, end))])
    tokens, order = np.full((1, capacity), -1, np.int32), np.zeros((1, capacity), np.int32)
    tokens[0, : len(joined)] = joined
    order[0, : len(joined)] = sorted_places(joined, drafter.longest)
    tokens, order, count = jax.device_put((tokens, order, np.asarray([len(joined)], np.int32)))
    index = context_index.ContextIndex(order=order, count=count, block=drafter.block)
    return TextTable(tokens=tokens, length=count, index=index)
