"""From documents to batches: packing, and a Grain pipeline that can stop and go on anywhere.

Documents are laid end to end, each begun by the end-of-text token, and rows are cut out of that
stream. ``segments`` numbers the documents within a row: attention stays inside one (see
``Decoder.__call__``), so packing does not let documents see each other. Positions count on through
a row: rotary ones tell distances alone, so that a document says the same wherever it stands.

A batch is int32 ``[batch, length + 1]``; where some predictions do not count, a dictionary of these
``"tokens"`` and their ``"weight"``, float32 ``[batch, length]``: ``weight[t]`` is of token t + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from . import corpus
from .config import ConfigError, DataConfig

EPOCHS = 1_000_000  # without end, in effect; Grain wants a length that it can multiply


def pack(documents: list[list[int]], end_of_text: int) -> np.ndarray:
    """Lays tokenised documents end to end: int32 ``[end, doc 0, end, doc 1, ..., end]``."""
    parts = [part for ids in documents for part in ([end_of_text], ids)]
    return np.concatenate([np.asarray(part, np.int32) for part in (*parts, [end_of_text])])


def segments_of(rows, end_of_text: int):
    """Numbers the documents in ``rows [..., T]`` (NumPy or JAX), int32; each begins at its
    end-of-text."""
    return (rows == end_of_text).cumsum(axis=-1, dtype="int32")


@dataclasses.dataclass(frozen=True)
class Stream:
    """Documents end to end.

    Attributes:
      tokens: int32 ``[n]``.
      counts: bool ``[n]``, whether a token is one to learn; None: all are.
      aligned: rows begin at multiples of ``data.length`` and nowhere else.
    """

    tokens: np.ndarray
    counts: np.ndarray | None = None
    aligned: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, starts, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int32 ``[..., length + 1]`` and weights float32 ``[..., length]`` of rows."""
        places = np.asarray(starts)[..., None] + np.arange(length + 1)
        weight = np.ones((*places.shape[:-1], length), np.float32)
        if self.counts is not None:
            weight = self.counts[places[..., 1:]].astype(np.float32)
        return self.tokens[places], weight


def load_stream(config: DataConfig, split: str) -> tuple[Stream, int]:
    """The packed tokens of a split, and the id of the end-of-text token."""
    from . import tokenizer as tokenizers

    tokenizer = tokenizers.load(config.tokenizer)
    end_of_text = tokenizers.end_of_text(config.tokenizer, tokenizer)
    texts = [text for _, text in corpus.documents(config.corpus, split, strict=config.strict)]
    packed = pack([encoding.ids for encoding in tokenizer.encode_batch(texts)], end_of_text)
    if len(packed) < 2 * config.length + 2:
        raise ConfigError(
            f"data.length={config.length}, but the split {split!r} holds {len(packed)} tokens; "
            "give more text or a smaller length"
        )
    return Stream(packed), end_of_text


def unpacked(batch):
    """``(tokens [B, T + 1], weight [B, T])`` of a batch of either form; see the module's head."""
    if isinstance(batch, dict) and "weight" in batch:
        return batch["tokens"], batch["weight"]
    tokens = batch["tokens"] if isinstance(batch, dict) else batch
    return tokens, np.ones((tokens.shape[0], tokens.shape[1] - 1), np.float32)


def training_batches(
    stream: Stream, config: DataConfig, samples: Sequence = (), *, shard: tuple[int, int] = (0, 1)
):
    """An endless, deterministic Grain iterator over batches of rows of ``length + 1`` tokens.

    Each epoch visits the stream in a new order, cut at new places (a random shift within one row,
    but in an aligned stream), so that several epochs over a small corpus repeat no row.
    ``get_state`` and ``set_state`` of the iterator hold the position, in the middle of an epoch
    too; the position is the same on every host, however many there are.

    Args:
      samples: ``regenerate.Samples``, each of which gives its share ``samples_share`` of the rows.
      shard: ``(index, count)``: of each batch the rows ``index::count`` alone, one host's. No
        other row is read.

    Raises:
      ConfigError: samples of another length, see ``batched`` besides.
    """
    import grain

    length = config.length
    starts = np.arange(0, len(stream) - (1 if stream.aligned else 2) * length, length)
    weighted = stream.counts is not None or not all(own.weight.all() for own in samples)

    def row(tokens, weight):
        return {"tokens": tokens, "weight": weight} if weighted else tokens

    def cut(start, rng: np.random.Generator):
        shift = 0 if stream.aligned else rng.integers(length)
        return row(*stream.rows(start + shift, length))

    rows = grain.MapDataset.source(starts).seed(config.seed).shuffle().repeat(EPOCHS)
    rows = rows.random_map(cut)
    sources = [rows]
    for i, own in enumerate(samples):
        if own.tokens.ndim != 2 or own.tokens.shape[1] != length + 1:
            raise ConfigError(
                f"data.samples holds rows of shape {own.tokens.shape}, data.length={length} needs "
                f"[n, {length + 1}]: regenerate them with this length"
            )
        source = grain.MapDataset.source(np.arange(len(own.tokens))).seed(config.seed + 1 + i)
        source = source.shuffle().repeat(EPOCHS)
        sources.append(source.map(lambda n, own=own: row(own.tokens[n], own.weight[n])))
    if samples:
        shares = config.samples_share
        rows = grain.MapDataset.mix(sources, weights=[1 - sum(shares), *shares])
    return batched(rows, config, shard, prefetch=8)


def batched(rows, config: DataConfig, shard: tuple[int, int], *, prefetch: int):
    """The iterator over a host's part of the batches of a ``grain.MapDataset`` of rows. Raises
    ConfigError for a batch that cannot be parted evenly."""
    import grain

    index, count = shard
    if config.batch % count:
        raise ConfigError(
            f"data.batch={config.batch} cannot be shared evenly by {count} hosts: give a multiple "
            f"of {count}"
        )
    own = rows.slice(slice(index, None, count)) if count > 1 else rows
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
    return iter(own.batch(config.batch // count).to_iter_dataset(reading))


def heldout_batches(stream: Stream, config: DataConfig) -> list[tuple]:
    """``eval_rows`` rows spread evenly over a held-out stream, for ``evaluate.make_evaluate``.

    Returns:
      batches ``(tokens int32 [batch, length + 1], weight float32 [batch, length])``.
    """
    num_batches = max(1, config.eval_rows // config.batch)
    last = len(stream) - config.length - 1
    starts = np.linspace(0, last, num_batches * config.batch).astype(int)
    if stream.aligned:
        starts = starts // config.length * config.length
    tokens, weight = stream.rows(starts, config.length)
    shape = num_batches, config.batch, -1
    return list(zip(tokens.reshape(shape), weight.reshape(shape), strict=True))
