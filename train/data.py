"""From documents to batches: packing, and a Grain pipeline that can stop and go on anywhere.

Documents are laid end to end, each begun by the end-of-text token, and rows are cut out of that
stream. ``segments`` numbers the documents within a row: attention stays inside one (see
``Decoder.__call__``), so packing does not let documents see each other.
"""

from __future__ import annotations

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


def load_stream(config: DataConfig, split: str) -> tuple[np.ndarray, int]:
    """The packed tokens of a split, int32 ``[n]``, and the id of the end-of-text token."""
    from . import tokenizer as tokenizers

    tokenizer = tokenizers.load(config.tokenizer)
    end_of_text = tokenizers.end_of_text(config.tokenizer, tokenizer)
    texts = [text for _, text in corpus.documents(config.corpus, split, strict=config.strict)]
    stream = pack([encoding.ids for encoding in tokenizer.encode_batch(texts)], end_of_text)
    if len(stream) < 2 * config.length + 2:
        raise ConfigError(
            f"data.length={config.length}, but the split {split!r} holds {len(stream)} tokens; "
            "give more text or a smaller length"
        )
    return stream, end_of_text


def training_batches(stream: np.ndarray, config: DataConfig, samples: Sequence[np.ndarray] = ()):
    """An endless, deterministic Grain iterator over int32 batches ``[batch, length + 1]``.

    Each epoch visits the stream in a new order, cut at new places (a random shift within one row),
    so that several epochs over a small corpus repeat no row. ``samples`` are arrays int32
    ``[n, length + 1]``, each of which gives its share ``samples_share`` of the rows. ``get_state``
    and ``set_state`` of the iterator hold the position, in the middle of an epoch too.
    """
    import grain

    length = config.length
    starts = np.arange(0, len(stream) - 2 * length, length)

    def cut(start, rng: np.random.Generator):
        start = start + rng.integers(length)
        return stream[start : start + length + 1]

    rows = grain.MapDataset.source(starts).seed(config.seed).shuffle().repeat(EPOCHS)
    rows = rows.random_map(cut)
    sources = [rows]
    for i, written in enumerate(samples):
        if written.ndim != 2 or written.shape[1] != length + 1:
            raise ConfigError(
                f"data.samples holds rows of shape {written.shape}, data.length={length} needs "
                f"[n, {length + 1}]: regenerate them with this length"
            )
        source = grain.MapDataset.source(written).seed(config.seed + 1 + i)
        sources.append(source.shuffle().repeat(EPOCHS))
    if samples:
        shares = config.samples_share
        rows = grain.MapDataset.mix(sources, weights=[1 - sum(shares), *shares])
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    return iter(rows.batch(config.batch).to_iter_dataset(reading))


def heldout_batches(stream: np.ndarray, config: DataConfig) -> list[tuple]:
    """``eval_rows`` rows spread evenly over a held-out stream, for ``evaluate.make_evaluate``.

    Returns:
      batches ``(tokens int32 [batch, length + 1], weight float32 [batch, length])`` of ones.
    """
    num_batches = max(1, config.eval_rows // config.batch)
    last = len(stream) - config.length - 1
    starts = np.linspace(0, last, num_batches * config.batch).astype(int)
    rows = np.stack([stream[start : start + config.length + 1] for start in starts])
    rows = rows.reshape(num_batches, config.batch, config.length + 1)
    weight = np.ones((config.batch, config.length), np.float32)
    return [(tokens, weight) for tokens in rows]
