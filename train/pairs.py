"""Pairs of a source and what a target wrote after it, for the recipe ``specdec``.

In all functions ``config`` is a ``SpecDecTrainingConfig``.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import jax
import numpy as np

import specjax
from specjax.models import lm as models
from specjax.models.seq2seq import encoder_inputs
from specjax.serving import jsonl_input

from . import samples, tokenizer
from .config import ConfigError, check_unread
from .writing import teller

PAIRS = "pairs.npz"  # the file in ``run.folder`` that keeps what an encoder-decoder target wrote
UNREAD = ("corpus", "mixed", "strict", "broken_share", "end_of_text")  # of the section ``data``
UNFINISHED = "pairs.jsonl"  # the file beside it that keeps the texts written so far, until all are


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


def written_pairs(config, teacher: models.LM, *, dry_run: bool = False) -> Pairs:
    """What an encoder-decoder target writes for each source, from ``run.folder`` if it is there.

    Args:
      dry_run: return the pairs of the first sources alone, as many as one batch needs, and write
        no file.

    Raises:
      ConfigError: there are no sources, the target cannot write after them, ``run.folder`` holds
        unfinished texts of other sources or settings, or several processes would write.
    """
    hears = teacher.target.reads == "features"
    asked, source, lengths, told = (_windows if hears else _texts)(config, teacher)
    begin = list(config.start_ids or teacher.config.start_ids)
    _check_begin(config, teacher, begin)
    check_count(config, len(asked))
    kept, of = Path(config.run.folder) / PAIRS, {"fingerprint": teacher.checkpoint or ""}
    of |= {"sources": told, "longest": str(config.data.length), "begin": str(begin)}
    count = config.data.batch if dry_run else len(asked)
    arrays = _kept(kept, of)
    if arrays is None:
        _check_one_process(config)
        room = dict(max_new_tokens=config.data.length + 1 - len(begin))
        if hears:
            room["prompt"] = begin
        unfinished = None if dry_run else kept.with_name(UNFINISHED)
        rows = _written(config, teacher, [one | room for one in asked[:count]], unfinished)
        texts = [[*begin, *row.tokens] for row in rows]
        arrays = rows_of(texts, config.data.length + 1), np.asarray([*map(len, texts)], np.int32)
        if not dry_run:
            _keep(kept, arrays, of)
            unfinished.unlink()
    return Pairs(source, lengths, *arrays, num_given=len(begin)).some(np.arange(count))


def _written(config, teacher: models.LM, asked: list[dict], unfinished: Path | None) -> list:
    """The rows that the target writes for requests.

    Each finished row is kept in the file ``unfinished``, if one is named, and a later call with the
    same requests goes on from there.
    """
    if unfinished is not None:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
    how = dict(batch=config.data.batch, drafter="ngram", output=unfinished, progress=teller())
    try:
        served = specjax.serve_offline(teacher, asked, **how)
    except ValueError as error:
        if not str(error).startswith("output "):
            raise
        raise ConfigError(
            f"run.folder={config.run.folder!r}: {error} (another run.folder has another output; if "
            "this file is removed, all texts are written anew)"
        ) from error
    if not served.finished:
        if unfinished is not None:
            print(
                f"stopped after {len(served.rows):,} of {len(asked):,} texts, saved in "
                f"{unfinished.parent}; the same command goes on from there"
            )
        raise KeyboardInterrupt
    return served.rows


def _keep(path: Path, arrays: tuple[np.ndarray, np.ndarray], of: dict[str, str]) -> None:
    """Writes the file that ``_kept`` reads, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez(file, text=arrays[0], length=arrays[1], **of)
    temporary.replace(path)


def _check_one_process(config) -> None:
    """Raises ConfigError where several processes would write the texts of the target."""
    if jax.process_count() > 1:
        raise ConfigError(
            f"--processes: here are {jax.process_count()} processes, run.folder="
            f"{config.run.folder!r} has no {PAIRS} of these sources, and one process alone can "
            "write it; first give the same command without --processes and run.mesh and with "
            f"another run.folder, copy the {PAIRS} that it writes to this one, then start again "
            "with --processes"
        )


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
    try:
        lines = [jsonl_input.plain(line) for _, line in jsonl_input.divided(written)]
    except ValueError as error:
        raise ConfigError(f"sources={config.sources!r}: {error}; give a file in UTF-8") from None
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


def check_written(config) -> None:
    """Raises ConfigError if a target with an encoder is given texts that are not read."""
    reason = f"{config.teacher!r} has an encoder, and its drafter learns from sources alone"
    way_out = "give what the target reads as sources"
    check_unread(config.data, ("samples", "tokenizer", *UNREAD), reason, way_out)


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
    if config.sources:
        raise ConfigError(
            f"sources={config.sources!r}: {config.teacher!r} is a decoder-only target, which "
            "learns from data.samples alone; leave it out"
        )
    reason = f"the drafter of {config.teacher!r}, a decoder-only target, learns from data.samples"
    reason += " alone, from each text as often"
    way_out = "give other files of the recipe regenerate as data.samples"
    check_unread(config.data, (*UNREAD, "samples_share"), reason, way_out)


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
