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
from specjax.models.seq2seq import encoder_inputs

from . import samples, tokenizer
from .config import ConfigError

PAIRS = "pairs.npz"  # the file in ``run.folder`` that keeps what an encoder-decoder target wrote


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Sources, and what the target wrote after them.

    Attributes:
      source: int32 ``[n, S]``, padded with zeros; or ``[n]``, the names of files of features.
      source_length: int32 ``[n]``, the positions of the memory.
      text: int32 ``[n, T + 1]``; it begins with the decoder's first tokens, or with the last token
        of the prompt.
      length: int32 ``[n]``, of the text.
      num_given: how many tokens each text begins with that nobody predicts.
    """

    source: np.ndarray
    source_length: np.ndarray
    text: np.ndarray
    length: np.ndarray
    num_given: int = 1

    def row(self, n: int) -> dict[str, np.ndarray]:
        """One pair, as the loss reads it."""
        predicted = np.arange(1, self.text.shape[1])
        written = (predicted >= self.num_given) & (predicted < self.length[n])
        source = self.source[n] if self.source.ndim > 1 else _features(self.source[n])
        own = dict(source=source, source_length=self.source_length[n])
        return dict(
            tokens=self.text[n], weight=written.astype(np.float32), length=self.length[n], **own
        )

    def some(self, which: np.ndarray) -> Pairs:
        """The pairs of the numbers ``which``."""
        arrays = ("source", "source_length", "text", "length")
        return dataclasses.replace(self, **{name: vars(self)[name][which] for name in arrays})


def _features(name: str) -> np.ndarray:
    return encoder_inputs.Features(Path(name), "").read()


def rows_of(lists, width: int) -> np.ndarray:
    """int32 ``[n, width]``, padded with zeros."""
    rows = np.zeros((len(lists), width), np.int32)
    for row, ids in zip(rows, lists, strict=True):
        row[: len(ids)] = ids
    return rows


def written_pairs(config, teacher: models.LM) -> Pairs:
    """What an encoder-decoder target writes for each source, from ``run.folder`` if it is there.

    Raises:
      ConfigError: there are no sources, or the target cannot write after them.
    """
    hears = teacher.target.reads == "features"
    asked, source, lengths, told = (_windows if hears else _texts)(config, teacher)
    begin = list(config.start_ids or teacher.config.start_ids)
    _check_begin(config, teacher, begin)
    kept, of = Path(config.run.folder) / PAIRS, {"fingerprint": teacher.checkpoint or ""}
    of |= {"sources": told, "longest": str(config.data.length), "begin": str(begin)}
    arrays = _kept(kept, of)
    if arrays is None:
        check_count(config, len(asked))
        room = dict(max_new_tokens=config.data.length + 1 - len(begin))
        if hears:
            room["prompt"] = begin
        how = dict(batch=config.data.batch, drafter="ngram")
        served = specjax.serve_offline(teacher, [one | room for one in asked], **how)
        if not served.finished:
            raise KeyboardInterrupt
        texts = [[*begin, *row.tokens] for row in served.rows]
        arrays = rows_of(texts, config.data.length + 1), np.asarray([*map(len, texts)], np.int32)
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez(file, text=arrays[0], length=arrays[1], **of)
        temporary.replace(kept)
    return Pairs(source, lengths, *arrays, num_given=len(begin))


def _kept(path: Path, of: dict[str, str]) -> tuple[np.ndarray, np.ndarray] | None:
    """The texts that a file keeps, and their lengths; None if it is not there, or not ``of``."""
    if not path.is_file():
        return None
    with np.load(path) as arrays:
        if any(name not in arrays or str(arrays[name]) != of[name] for name in of):
            return None
        return arrays["text"], arrays["length"]


def _check_begin(config, teacher: models.LM, begin: list[int]) -> None:
    """Raises ConfigError for texts that cannot begin so, or would be longer than the target's."""
    if not begin:
        raise ConfigError(
            f"start_ids=[]: {config.teacher!r} knows several languages and has no default prompt; "
            "give the tokens that the decoder begins with, see specjax.models.start_ids"
        )
    most = teacher.config.max_positions or config.data.length + 1
    if not len(begin) < config.data.length < most:
        raise ConfigError(
            f"data.length={config.data.length}: texts begin with {len(begin)} given tokens, and "
            f"{config.teacher!r} has {most} positions; accepted: {len(begin) + 1} to {most - 1}"
        )


def _texts(config, teacher: models.LM) -> tuple:
    """The lines of the file ``sources``: requests, sources ``[n, S]``, lengths, a digest."""
    path = Path(config.sources)
    if not config.sources or not path.is_file():
        raise ConfigError(
            f"sources={config.sources!r}: give a file of the texts that the target reads, one a "
            "line"
        )
    if config.start_ids:
        raise ConfigError(
            f"start_ids={list(config.start_ids)}: {config.teacher!r} has its own, which every text "
            "begins with; leave them out"
        )
    written = path.read_bytes()
    lines = [line for line in written.decode().splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"sources={config.sources!r} has no text; give one a line")
    ids = [teacher.tokenizer.encode(line) for line in lines]
    lengths = np.asarray([len(row) for row in ids], np.int32)
    asked = [{"prompt": row} for row in ids]
    return asked, rows_of(ids, lengths.max()), lengths, hashlib.sha256(written).hexdigest()


def _windows(config, teacher: models.LM) -> tuple:
    """The files of the folder ``sources``: requests, names ``[n]``, lengths, a digest."""
    files = sorted(Path(config.sources).glob("*.npy")) if config.sources else []
    if not files:
        raise ConfigError(
            f"sources={config.sources!r}: give a folder of .npy files, one for each window of "
            "features that the target reads"
        )
    told = hashlib.sha256()
    for file in files:
        try:
            told.update(encoder_inputs.window_of(teacher.config, file).tobytes())
        except ValueError as error:
            raise ConfigError(f"sources={config.sources!r}: {file.name}: {error}") from error
    names = [str(file.resolve()) for file in files]
    lengths = np.full(len(names), teacher.config.max_source, np.int32)
    asked = [{encoder_inputs.FEATURES: name} for name in names]
    return asked, np.asarray(names), lengths, told.hexdigest()


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
    """Raises ConfigError if a decoder-only target lacks what it needs, or is given too much."""
    if config.start_ids:
        raise ConfigError(
            f"start_ids={list(config.start_ids)}: {config.teacher!r} is a decoder-only target, "
            "whose texts begin with their prompts; leave them out"
        )
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
