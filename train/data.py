"""From documents to batches: packing, and a Grain pipeline that can be stopped and resumed.

Documents are laid end to end, each begun by the end-of-text token, and rows are cut from that
stream. ``segments`` numbers the documents within a row. Attention stays inside of a segment (see
``Decoder.__call__``), so packed documents do not see each other. Positions are counted through a
row. Rotary positions depend on distances only, so the logits of a document do not depend on its
place in the row; a model with learned positions reads it as if other text stood before it.

A batch is int32 ``[batch, length + 1]``. If some predictions do not count, it is a dictionary of
these ``"tokens"`` and their ``"weight"``, float32 ``[batch, length]``, where ``weight[t]`` is the
weight of predicting token ``t + 1``.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from . import conversations, corpora, sources
from .config import NOTHING, SEEDS, ConfigError, DataConfig

EPOCHS = 1_000_000  # practically endless; Grain needs a finite length
MIXED_SEED = 1000  # far from the seeds of samples, which follow that of the corpus


def pack(documents: Iterable[Sequence[int]], end_of_text: int) -> np.ndarray:
    """Lays tokenized documents end to end: int32 ``[end, doc 0, end, doc 1, ..., end]``."""
    parts = [part for ids in documents for part in ([end_of_text], ids)]
    return np.concatenate([np.asarray(part, np.int32) for part in (*parts, [end_of_text])])


def segments_of(rows, end_of_text: int):
    """Numbers the documents in ``rows [..., T]`` (NumPy or JAX), int32 ``[..., T]``.

    A document begins with its end-of-text token.
    """
    return (rows == end_of_text).cumsum(axis=-1, dtype="int32")


@dataclasses.dataclass(frozen=True)
class Stream:
    """Documents end to end.

    Attributes:
      tokens: int32 ``[n]``.
      counts: bool ``[n]``, whether the prediction of a token is learned; None: all are.
      aligned: whether rows begin only at multiples of ``data.length``.
      mixed: streams of further corpora, each with its share ``data.mixed_share`` of the rows.
    """

    tokens: np.ndarray
    counts: np.ndarray | None = None
    aligned: bool = False
    mixed: tuple[Stream, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, starts, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens int32 ``[..., length + 1]`` and weights float32 ``[..., length]``."""
        places = np.asarray(starts)[..., None] + np.arange(length + 1)
        weight = np.ones((*places.shape[:-1], length), np.float32)
        if self.counts is not None:
            weight = self.counts[places[..., 1:]].astype(np.float32)
        return self.tokens[places], weight


def load_stream(config: DataConfig, split: str) -> tuple[Stream, int]:
    """Returns the packed tokens of a split, and the id of the token between its documents.

    Texts lie end to end, and one that is longer than a row is continued in another row, which does
    not see the first. Conversations are kept whole (see ``lay``), and only the assistant's tokens
    count. The corpora of ``data.mixed`` are used for training only; held-out text comes from
    ``data.corpus``.

    Raises:
      ConfigError: the split holds too little text.
    """
    if config.mixed and split == "train":
        alone = dataclasses.replace(config, mixed=(), mixed_share=())
        stream, end_of_text = load_stream(alone, split)
        others = (dataclasses.replace(alone, corpus=name) for name in config.mixed)
        mixed = tuple(load_stream(other, split)[0] for other in others)
        return dataclasses.replace(stream, mixed=mixed), end_of_text
    from . import tokenizer as tokenizers

    tokenizer = tokenizers.load(config.tokenizer)
    end_of_text = tokenizers.end_of_text(config.tokenizer, tokenizer, config.end_of_text)
    how = dict(strict=config.strict, broken_share=config.broken_share)
    documents = corpora.documents(config.corpus, split, **how)
    if not corpora.are_texts(config.corpus, documents):
        return _conversations(documents, config, split, end_of_text), end_of_text
    texts = [text for _, text in documents]
    packed = pack(tokenizers.encoded(tokenizer, texts), end_of_text)
    if len(packed) < 2 * config.length + 2:
        raise ConfigError(
            f"data.length={config.length}, but the split {split!r} of {config.corpus!r} holds "
            f"{len(packed)} tokens; give more text or a smaller length"
        )
    return Stream(packed), end_of_text


def _conversations(documents, config: DataConfig, split: str, end_of_text: int) -> Stream:
    """The stream of a split's conversations; prints how many were cut or left out, and why."""
    from . import tokenizer as tokenizers

    tokenizer = tokenizers.load_chat(config.tokenizer)
    found, refused, long, mute = [], [], 0, 0
    for name, messages in documents:
        try:
            if not any(message["role"] == "assistant" for message in messages):
                raise ValueError("the assistant says nothing in it")
            ids, counts = conversations.encode(tokenizer, messages)
        except ValueError as error:
            refused.append(f"{name}: {error}")
            continue
        if ids[0] == end_of_text:  # a template may begin with it
            ids, counts = ids[1:], counts[1:]
        if end_of_text in ids:
            raise ConfigError(
                f"data.tokenizer={config.tokenizer!r}: the token that would part conversations, "
                f"{tokenizer.vocabulary[end_of_text]!r}, stands within them ({name}): give another "
                "as data.end_of_text, one of its special tokens that does not: "
                + (", ".join(tokenizer.vocabulary[i] for i in tokenizer.added - {*ids}) or "none")
            )
        long += len(ids) >= config.length
        room = config.length - 1
        mute += not any(counts[:room])
        if any(counts[:room]):
            found.append((ids[:room], counts[:room]))
    sources.judge("conversations", refused, len(documents), config.broken_share)
    if long:
        sources.say_once(
            f"{split}: {long:,} of {len(documents):,} conversations are longer than "
            f"data.length={config.length} and are cut there; {mute:,} of them before the assistant "
            "speaks, which are left out"
        )
    if not found:
        raise ConfigError(
            f"data.length={config.length}: in no conversation of the split {split!r} of "
            f"{config.corpus!r} does the assistant speak that early; give a greater length"
        )
    return lay(found, config.length, end_of_text)


def lay(documents: Sequence[tuple], length: int, end_of_text: int) -> Stream:
    """Whole documents in rows of ``length`` tokens, each begun by the end-of-text token.

    Documents are placed by best fit, the longest first. The rest of a row is filled with
    end-of-text tokens.

    Args:
      documents: ``(ids, counts)``: at most ``length - 1`` ids, and which of them count.
      length: the tokens of a row.
      end_of_text: the id of the end-of-text token.
    """
    rows: list[list] = []
    spaces: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for document in sorted(documents, key=lambda document: -len(document[0])):
        size = 1 + len(document[0])
        place = bisect.bisect_left(spaces, (size, 0))
        if place == len(spaces):
            spaces.append((length, len(rows)))
            rows.append([])
        left, row = spaces.pop(place)
        rows[row].append(document)
        bisect.insort(spaces, (left - size, row))
    tokens = np.full((len(rows), length), end_of_text, np.int32)
    counts = np.zeros(tokens.shape, bool)
    for n, row in enumerate(rows):
        place = 0
        for ids, own in row:
            tokens[n, place + 1 : place + 1 + len(ids)] = ids
            counts[n, place + 1 : place + 1 + len(ids)] = own
            place += 1 + len(ids)
    # a row is read with one token more, the first token of the next row
    return Stream(np.append(tokens, np.int32(end_of_text)), np.append(counts, False), aligned=True)


def whole_windows(
    stream: np.ndarray, size: int, end_of_text: int, way_out: str = "ask for fewer"
) -> np.ndarray:
    """Returns the starts of all windows of ``size`` tokens that lie within one document.

    A window may begin with the end-of-text token of its document.

    Raises:
      ConfigError: no document is as long; the message ends with ``way_out``.
    """
    ends = np.concatenate([[0], np.cumsum(stream == end_of_text)])
    starts = np.arange(len(stream) - size + 1)
    places = starts[ends[starts + size] == ends[starts + 1]]
    if not len(places):
        raise ConfigError(f"no document holds {size} tokens: {way_out}")
    return places


def unpacked(batch):
    """Returns ``(tokens [B, T + 1], weight [B, T])`` of a batch in either form (see above)."""
    if isinstance(batch, dict) and "weight" in batch:
        return batch["tokens"], batch["weight"]
    tokens = batch["tokens"] if isinstance(batch, dict) else batch
    return tokens, np.ones((tokens.shape[0], tokens.shape[1] - 1), np.float32)


def training_batches(
    stream: Stream, config: DataConfig, samples: Sequence = (), *, shard: tuple[int, int] = (0, 1)
):
    """An endless, deterministic Grain iterator over batches of rows of ``length + 1`` tokens.

    Each epoch visits the stream in a new order and, unless the stream is aligned, cuts it at new
    places (shifted at random within one row), so several epochs over a small corpus repeat no row.
    ``get_state`` and ``set_state`` of the iterator hold the position, also within an epoch. The
    position is the same on every host, for any number of hosts.

    Args:
      stream: the corpus.
      config: the section ``data`` of the configuration.
      samples: ``samples.Samples``, each with its share ``samples_share`` of the rows.
      shard: ``(index, count)``: only the rows ``index::count`` of each batch are read, which are
        those of one host.

    Raises:
      ConfigError: samples have another length, or a batch cannot be shared evenly.
    """
    import grain

    length = config.length
    streams = (stream, *stream.mixed)
    weighted = any(own.counts is not None for own in streams)
    weighted = weighted or not all(own.weight.all() for own in samples)

    def row(tokens, weight):
        return {"tokens": tokens, "weight": weight} if weighted else tokens

    def rows_of(stream: Stream, seed: int):
        def cut(start, rng: np.random.Generator):
            shift = 0 if stream.aligned else rng.integers(length)
            return row(*stream.rows(start + shift, length))

        starts = np.arange(0, len(stream) - (1 if stream.aligned else 2) * length, length)
        return grain.MapDataset.source(starts).seed(seed).shuffle().repeat(EPOCHS).random_map(cut)

    sources = [
        rows_of(own, (config.seed + MIXED_SEED * i) % SEEDS) for i, own in enumerate(streams)
    ]
    for i, own in enumerate(samples):
        if own.tokens.ndim != 2 or own.tokens.shape[1] != length + 1:
            raise ConfigError(
                f"data.samples holds rows of shape {own.tokens.shape}, data.length={length} needs "
                f"[n, {length + 1}]: regenerate them with this length"
            )
        seed = (config.seed + 1 + i) % SEEDS
        source = grain.MapDataset.source(np.arange(len(own.tokens))).seed(seed)
        source = source.shuffle().repeat(EPOCHS)
        sources.append(source.map(lambda n, own=own: row(own.tokens[n], own.weight[n])))
    rows = sources[0]
    if len(sources) > 1:
        shares = *config.mixed_share, *config.samples_share
        shares = 1 - sum(shares), *shares
        read = [pair for pair in zip(sources, shares, strict=True) if pair[1] > NOTHING]
        rows = grain.MapDataset.mix(*map(list, zip(*read, strict=True)))
    return batched(rows, config, shard, prefetch=8)


def batched(rows, config: DataConfig, shard: tuple[int, int], *, prefetch: int):
    """Returns the iterator over a host's part of the batches of a ``grain.MapDataset`` of rows.

    Raises:
      ConfigError: a batch cannot be shared evenly.
    """
    import grain

    index, count = shard
    if config.batch % count:
        raise ConfigError(
            f"data.batch={config.batch} cannot be shared evenly by {count} processes (or shards "
            f"of the recipe features): give a multiple of {count}"
        )
    own = rows.slice(slice(index, None, count)) if count > 1 else rows
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
    return iter(own.batch(config.batch // count).to_iter_dataset(reading))


def heldout_batches(stream: Stream, config: DataConfig) -> list[tuple]:
    """Spreads ``eval_rows`` rows evenly over a held-out stream, for ``evaluate.make_evaluate``.

    Returns:
      Batches ``(tokens int32 [batch, length + 1], weight float32 [batch, length])``.
    """
    num_batches = max(1, config.eval_rows // config.batch)
    last = len(stream) - config.length - 1
    starts = np.linspace(0, last, num_batches * config.batch).astype(int)
    if stream.aligned:
        starts = starts // config.length * config.length
    tokens, weight = stream.rows(starts, config.length)
    shape = num_batches, config.batch, -1
    return list(zip(tokens.reshape(shape), weight.reshape(shape), strict=True))
