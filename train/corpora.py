"""Reads the documents of any corpus that ``data.corpus`` can name."""

from __future__ import annotations

from pathlib import Path

from . import corpus, packages, sharded, sources
from .config import ConfigError, DataConfig
from .sources import Document


def documents(
    name: str, split: str, *, strict: bool = True, broken_share: float = 0.0
) -> list[Document]:
    """Reads the documents of a corpus.

    Args:
      name: ``"stdlib"``, ``"packages"``, or a file, folder or data set that ``sources`` reads; or
        the name, without the numbers of its shards, of conversations that ``regenerate`` wrote.
      split: ``"train"`` or ``"heldout"``.
      strict: refuse files that differ from the manifest of ``stdlib`` or ``packages``.
      broken_share: the share of a file's documents that may be unreadable, and are left out.

    Raises:
      ConfigError: the corpus or one of its shards cannot be read, or has no documents in this
        split.
    """
    if name == "stdlib":
        found = corpus.stdlib_documents(split, strict=strict)
    elif name == "packages":
        found = packages.documents(split, strict=strict)
    elif not (path := Path(name)).exists() and sharded.num_shards(path):
        files = sharded.shards_of(path, "regenerate")
        found = [own for file in files for own in sources.read(str(file), split, broken_share)]
    else:
        found = sources.read(name, split, broken_share)
    if not found:
        raise ConfigError(
            f"data.corpus={name!r} has no documents in the split {split!r}: give a folder that "
            "holds some of its files in a subfolder named heldout"
        )
    return found


def are_texts(name: str, documents: list[Document]) -> bool:
    """Whether the documents of a corpus are texts, not conversations.

    Raises:
      ConfigError: some are texts, others conversations.
    """
    count = sum(isinstance(document, str) for _, document in documents)
    if 0 < count < len(documents):
        raise ConfigError(
            f"data.corpus={name!r} holds {count:,} texts and {len(documents) - count:,} "
            "conversations: give one kind at a time"
        )
    return count > 0


def texts(config: DataConfig, split: str) -> list[tuple[str, str]]:
    """The documents of a run's corpora as bare texts ``[(name, text)]``, without roles.

    The split ``train`` includes the corpora of ``data.mixed``.
    """
    how = dict(strict=config.strict, broken_share=config.broken_share)
    mixed = config.mixed if split == "train" else ()
    found = [own for name in (config.corpus, *mixed) for own in documents(name, split, **how)]
    return [(name, sources.text_of(document)) for name, document in found]
