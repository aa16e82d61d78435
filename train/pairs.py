"""Pairs of a source and what a target wrote after it, for the recipe ``specdec``.

In all functions ``config`` is a ``SpecDecTrainingConfig``.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np

import specjax
from specjax.models import lm as models

from . import samples, tokenizer
from .config import ConfigError

PAIRS = "pairs.npz"  # the file in ``run.folder`` that keeps what an encoder-decoder target wrote


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Sources, and what the target wrote after them.

    Attributes:
      source: int32 ``[n, S]``, padded with zeros.
      source_length: int32 ``[n]``.
      text: int32 ``[n, T + 1]``; it begins with the decoder's first token, or with the last token
        of the prompt.
      length: int32 ``[n]``, of the text.
    """

    source: np.ndarray
    source_length: np.ndarray
    text: np.ndarray
    length: np.ndarray

    def row(self, n: int) -> dict[str, np.ndarray]:
        """One pair, as the loss reads it."""
        predicted = np.arange(1, self.text.shape[1])
        weight = (predicted < self.length[n]).astype(np.float32)
        own = dict(source=self.source[n], source_length=self.source_length[n])
        return dict(tokens=self.text[n], weight=weight, length=self.length[n], **own)


def rows_of(lists, width: int) -> np.ndarray:
    """int32 ``[n, width]``, padded with zeros."""
    rows = np.zeros((len(lists), width), np.int32)
    for row, ids in zip(rows, lists, strict=True):
        row[: len(ids)] = ids
    return rows


def written_pairs(config, teacher: models.LM) -> Pairs:
    """What an encoder-decoder target writes for each source, from ``run.folder`` if it is there.

    Raises:
      ConfigError: there are no sources, or the target reads none.
    """
    if teacher.target.reads != "tokens":
        raise ConfigError(
            f"teacher={config.teacher!r} reads features; accepted: a target that reads texts"
        )
    if not config.sources or not Path(config.sources).is_file():
        raise ConfigError(
            f"sources={config.sources!r}: give a file of the texts that the target reads, one a "
            "line"
        )
    kept, of = Path(config.run.folder) / PAIRS, {"fingerprint": teacher.checkpoint or ""}
    told = hashlib.sha256(Path(config.sources).read_bytes()).hexdigest()
    of |= {"sources": told, "longest": str(config.data.length)}
    if kept.is_file():
        with np.load(kept) as arrays:
            if all(str(arrays[name]) == value for name, value in of.items()):
                return Pairs(**{f.name: arrays[f.name] for f in dataclasses.fields(Pairs)})
    lines = [line for line in Path(config.sources).read_text("utf-8").splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"sources={config.sources!r} has no text; give one a line")
    check_count(config, len(lines))
    ids = [teacher.tokenizer.encode(line) for line in lines]
    how = dict(batch=config.data.batch, drafter="ngram")
    asked = [{"prompt": row, "max_new_tokens": config.data.length} for row in ids]
    served = specjax.serve_offline(teacher, asked, **how)
    if not served.finished:
        raise KeyboardInterrupt
    begin = list(teacher.config.start_ids)
    texts = [[*begin, *row.tokens][: config.data.length + 1] for row in served.rows]
    pairs = Pairs(
        rows_of(ids, max(map(len, ids))),
        np.asarray([len(row) for row in ids], np.int32),
        rows_of(texts, config.data.length + 1),
        np.asarray([len(row) for row in texts], np.int32),
    )
    kept.parent.mkdir(parents=True, exist_ok=True)
    temporary = kept.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez(file, **vars(pairs), **of)
    temporary.replace(kept)
    return pairs


def held_out(config) -> int:
    """How many texts are held out."""
    return max(1, config.data.eval_rows // config.data.batch) * config.data.batch


def check_count(config, size: int) -> None:
    """Raises ConfigError if ``size`` texts are not enough to learn from and to measure on."""
    kept, batch = held_out(config), config.data.batch
    if size < kept + batch:
        raise ConfigError(
            f"data.batch={batch}, data.eval_rows={config.data.eval_rows}: there are {size} texts, "
            f"and {kept} are held out; give at least {kept + batch} texts"
        )


def check_mask(config, pairs: Pairs) -> None:
    """Raises ConfigError if the texts have the token whose embedding stands for a mask."""
    within = np.arange(pairs.text.shape[1]) < pairs.length[:, None]
    share = np.mean(pairs.text[within] == config.mask_token)
    if config.mask_token >= 0 and share:
        raise ConfigError(
            f"mask_token={config.mask_token}: {share:.1%} of the texts are this token, whose "
            "embedding would stand for two things; give one that no text has, or -1"
        )


def check_sampled(config) -> None:
    """Raises ConfigError if a decoder-only target lacks what it needs."""
    if not config.source or not config.data.samples:
        raise ConfigError(
            f"source={config.source}, data.samples={list(config.data.samples)}: "
            f"{config.teacher!r} is a decoder-only target; give source=64, the tokens of a prompt "
            "that are encoded, and files of the recipe regenerate"
        )


def sampled_pairs(config, teacher: models.LM) -> Pairs:
    """What a decoder-only target wrote, from files of the recipe ``regenerate``."""
    of = samples.fingerprints(teacher, tokenizer.load(config.data.tokenizer))
    sources, texts = [], []
    for path in config.data.samples:
        found = samples.read(path, of, teacher.target.vocab_size)
        for row, start, stop in zip(found.tokens, found.start, found.stop, strict=True):
            if start >= 1 and stop > start:
                sources.append(row[max(start - config.source, 0) : start])
                texts.append(row[start - 1 : stop][: config.data.length + 1])
    return Pairs(
        rows_of(sources, config.source),
        np.asarray([len(row) for row in sources], np.int32),
        rows_of(texts, config.data.length + 1),
        np.asarray([len(row) for row in texts], np.int32),
    )
