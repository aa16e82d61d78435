"""Sessions: tables of answers, from which later requests draft."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .._internal.host import check_table_fits
from .._internal.own_arithmetic import own_arithmetic
from ..drafters import registry, text_table
from ..drafters.indexed import IndexedDrafter, TextTable
from ..models.lm import LM
from ..types import Drafter

VERSION = 1
SMALLEST, LARGEST = 256, 2**26  # the capacity of a table in tokens; 8 bytes each on the device
_with_answer = own_arithmetic(text_table.add)


class Session:
    """A table of the answers to earlier requests, from which a drafter copies tokens.

    Pass a session in place of a drafter. Each request drafts from its own text and from the table,
    and its answer is added to the table when it ends. The table holds at most ``capacity`` tokens;
    the oldest answers are dropped first. The answers in the table change the speed of a request;
    they change neither its text under greedy decoding nor the distribution of its text otherwise.

    Attributes:
      drafter: the drafter, an ``IndexedDrafter`` such as ``drafters.Suffix``.
      table: the table of answers.

    Args:
      lm: the target.
      drafter: ``"suffix"``, ``"sam"`` or an ``IndexedDrafter``.
      capacity: the most tokens that the table holds, with 8 bytes each.

    Raises:
      TypeError: the drafter reads no table of texts.
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
        longest = getattr(drafter, "longest", 1)
        if (longest + 1) * capacity >= 2**31:  # places are sorted by their matches in one number
            raise ValueError(
                f"capacity={capacity}: with matches of up to {longest} tokens a table holds at "
                f"most {(2**31 - 1) // (longest + 1)}; give that, or a drafter that compares fewer"
            )
        check_table_fits(8 * capacity, f"capacity={capacity}", "give a smaller one")
        self.lm, self.drafter = lm, drafter
        self.table: TextTable = text_table.empty(capacity, drafter.block)

    asks = False  # whether ``ask`` must be called between bursts

    @property
    def name(self) -> str:
        """The drafter's name."""
        return self.drafter.name

    @property
    def params(self) -> TextTable | tuple[TextTable, ...]:
        """What the drafter reads as ``params["drafter"]``: the table."""
        return self.table

    @property
    def capacity(self) -> int:
        """The most tokens that the table holds."""
        return self.table.tokens.shape[1]

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the table, including one separator after each answer."""
        return int(self.table.length[0])

    def add(self, prompt, tokens) -> None:
        """Adds an answer to the table, together with the end of its prompt.

        Args:
          prompt: the token ids of the prompt.
          tokens: the token ids of the answer.
        """
        if len(tokens):
            before = np.asarray(prompt, np.int32)[-self.drafter.longest :]
            text = np.concatenate([before, np.asarray(tokens, np.int32)])
            self.table = _with_answer(self.table, text, self.drafter.longest)

    def ask(self, texts: Sequence[np.ndarray]) -> None:
        """Updates the table before a burst of rounds. Default: does nothing.

        Args:
          texts: the token ids of each row that is still decoded, int32 ``[n]`` each.
        """

    def drafter_for(self, lm: LM) -> Drafter:
        """The drafter for requests to ``lm``; a subclass whose drafter is made for one model raises
        ValueError for another."""
        del lm
        return self.drafter

    def save(self, path: str | os.PathLike) -> None:
        """Writes the answers to a file, whole or not at all.

        Raises:
          OSError: the file cannot be written.
        """
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
        """Returns a session with the answers in a file; if not all fit, with the latest ones.

        Args:
          lm: the target.
          path: a file from ``save``.
          drafter, capacity: see ``Session``.

        Raises:
          FileNotFoundError: there is no such file.
          PermissionError: the file may not be read.
          ValueError: the file is not a session, is truncated, or has another version or the answers
            of another tokenizer.
        """
        session = cls(lm, drafter, capacity)
        try:
            with np.load(path) as held:
                version, tokenizer = int(held["version"]), str(held["tokenizer"])
                lengths, tokens = held["lengths"], held["tokens"]
        except (zipfile.BadZipFile, KeyError, TypeError, ValueError, EOFError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            if isinstance(error, PermissionError):
                raise PermissionError(
                    f"{os.fspath(path)}: the session may not be read ({error.strerror}); change "
                    "its permissions, or take another file"
                ) from None
            reason = getattr(error, "strerror", None)  # what NumPy says is about other files
            why = f" ({reason})" if reason else ""
            raise ValueError(
                f"{os.fspath(path)}: it is no session, or is truncated{why}; delete it, or take "
                "another file"
            ) from error
        if version != VERSION:
            raise ValueError(
                f"{os.fspath(path)}: its version is {version}, and this installation reads version "
                f"{VERSION}; delete it"
            )
        if tokenizer != fingerprint(lm):
            raise ValueError(
                f"{os.fspath(path)}: the session was filled with another tokenizer than that of "
                f"{lm.name}; take another file"
            )
        for answer in np.split(tokens, np.cumsum(lengths)[:-1]):
            session.table = _with_answer(session.table, answer, session.drafter.longest)
        return session


def fingerprint(lm: LM) -> str:
    """Returns the fingerprint of a model's tokenizer; without a tokenizer, a text with the size of
    the vocabulary."""
    return lm.tokenizer.fingerprint if lm.tokenizer else f"vocabulary {lm.target.vocab_size}"


def refreshed(params, drafter, session: Session):
    """Returns ``params["drafter"]`` with the current table of the session.

    Args:
      params: the drafter's parameters.
      drafter: the session's drafter, or an ``Adaptive`` around it.
      session: the session.
    """
    if isinstance(drafter, type(session.drafter)):
        return session.params
    return params | {"inner": session.params}
