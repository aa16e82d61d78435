"""Tables that requests fill and later requests read."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..drafters import registry, text_table
from ..drafters.indexed import IndexedDrafter, TextTable
from ..models.lm import LM

VERSION = 1
SMALLEST, LARGEST = 256, 2**26  # tokens of a table; 8 bytes each on the device


class Session:
    """What earlier requests were answered, for a drafter that looks it up.

    Give it in place of a drafter: each request drafts from its own text and from the table, and
    adds its answer when it ends. The table is bounded; the oldest answers are forgotten first. What
    others said changes how fast a text is written, never the text under greedy decoding, nor its
    distribution when it is drawn.

    Attributes:
      drafter: the drafter, an ``IndexedDrafter`` such as ``drafters.Suffix``.
      table: what it looks up, ``params["drafter"]``.

    Args:
      lm: the target.
      drafter: ``"suffix"``, ``"sam"`` or a drafter object of that kind.
      capacity: tokens that the table holds at most; 8 bytes each.

    Raises:
      TypeError: the drafter looks nothing up in a table.
      ValueError: ``capacity`` is out of range.

    Example::

        session = specjax.text.Session(lm)
        for prompt in prompts:
            print(specjax.generate(lm, prompt, drafter=session).text)
        session.save("answers.session")
    """

    def __init__(self, lm: LM, drafter: str | IndexedDrafter = "suffix", capacity: int = 2**16):
        if isinstance(drafter, str) and drafter in registry.table_names():
            drafter = registry.drafter_class(drafter).for_target(lm.target)
        if not isinstance(drafter, IndexedDrafter):
            raise TypeError(
                f"Session(drafter={drafter!r}): accepted are 'suffix', 'sam', or an object of "
                "specjax.drafters.Suffix or specjax.drafters.SAM"
            )
        if isinstance(capacity, bool) or not isinstance(capacity, int):
            raise ValueError(f"capacity={capacity!r}: give a number of tokens")
        if not SMALLEST <= capacity <= LARGEST:
            raise ValueError(f"capacity={capacity}: give {SMALLEST} to {LARGEST} tokens")
        self.lm, self.drafter = lm, drafter
        self.table: TextTable = text_table.empty(capacity, drafter.block)

    asks = False  # whether ``ask`` wants to be called between bursts

    @property
    def name(self) -> str:
        """The drafter's name."""
        return self.drafter.name

    @property
    def capacity(self) -> int:
        """Tokens that the table holds at most."""
        return self.table.tokens.shape[1]

    @property
    def num_tokens(self) -> int:
        """Tokens that the table holds, one after each answer included."""
        return int(self.table.length[0])

    def add(self, prompt, tokens) -> None:
        """Puts an answer into the table, after the end of its prompt (token ids, both)."""
        if len(tokens):
            before = np.asarray(prompt, np.int32)[-self.drafter.longest :]
            text = np.concatenate([before, np.asarray(tokens, np.int32)])
            self.table = text_table.add(self.table, text, self.drafter.longest)

    def ask(self, texts: Sequence[np.ndarray]) -> None:
        """Is shown the tokens of all rows that go on, before a burst of rounds."""

    def save(self, path: str | os.PathLike) -> None:
        """Writes the answers to a file, which is never left half-written."""
        path = Path(path)
        answers = text_table.texts(self.table)
        held = {
            "version": np.int32(VERSION),
            "tokenizer": np.asarray(fingerprint(self.lm)),
            "lengths": np.asarray([len(one) for one in answers], np.int64),
            "tokens": np.concatenate([np.zeros(0, np.int32), *map(np.asarray, answers)]),
        }
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=path.parent) as staging:
            staged = Path(staging) / "session"
            with open(staged, "wb") as file:
                np.savez_compressed(file, **held)
            os.replace(staged, path)

    @classmethod
    def load(
        cls,
        lm: LM,
        path: str | os.PathLike,
        drafter: str | IndexedDrafter = "suffix",
        capacity: int = 2**16,
    ) -> Session:
        """A session with the answers of a file; of more than fit, the latest.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is no session, is truncated, of another version or of another tokenizer.
        """
        session = cls(lm, drafter, capacity)
        try:
            with np.load(path) as held:
                version, tokenizer = int(held["version"]), str(held["tokenizer"])
                lengths, tokens = held["lengths"], held["tokens"]
        except (zipfile.BadZipFile, KeyError, ValueError, EOFError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ValueError(
                f"{os.fspath(path)}: it is no session, or is truncated ({error}); delete it"
            ) from error
        if version != VERSION:
            raise ValueError(
                f"{os.fspath(path)}: its version is {version}, this installation reads {VERSION}; "
                "delete it"
            )
        if tokenizer != fingerprint(lm):
            raise ValueError(
                f"{os.fspath(path)}: it was filled with another tokenizer than that of {lm.name}; "
                "take another file"
            )
        for answer in np.split(tokens, np.cumsum(lengths)[:-1]):
            session.table = text_table.add(session.table, answer, session.drafter.longest)
        return session


def fingerprint(lm: LM) -> str:
    """Of the tokenizer; of a model without one the size of its vocabulary."""
    return lm.tokenizer.fingerprint if lm.tokenizer else f"vocabulary {lm.target.vocab_size}"


def refreshed(params, drafter, session: Session):
    """``params["drafter"]`` with the session's table as it is now."""
    if isinstance(drafter, IndexedDrafter):
        return session.table
    return params | {"inner": session.table}  # of an ``Adaptive`` one
