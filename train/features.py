"""Recipe ``features``: hidden states of the target over rows of text, computed once.

A head on a frozen target is far smaller than the target, so most of a training step would be the
target's forward pass. With stored hidden states the pass is computed once for any number of heads
and epochs. Logits need not be stored, since the target's LM head computes them by one product.

    FOLDER/tokens.npy     int32    [n, length + 1]
    FOLDER/weight.npy     float32  [n, length], whether the prediction of token t + 1 counts
    FOLDER/hidden.I.npy   bfloat16 [n, length, F], its bits as uint16; of ``tokens[:, :-1]``
    FOLDER/laws.*.npy     with ``top_k``: ids int32 and logits float32 [n, length, K] of the K most
                          likely tokens, rest float32 [n, length] (see ``losses.TopLaws``)
    FOLDER/features.json  the target, the tokenizer, the layers I, and what was asked for

Layers are counted as ``hidden_states[I]`` of Hugging Face; the last one is normed. A recipe reads
the layers that it needs.

If a run is stopped, the same command resumes it: ``unfinished.json`` says how many rows are stored
already, and these are not computed again. A finished folder is left as it is, and a command that
asks for other rows in it is refused.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from specjax.models.causal_lm import graph_definition

from . import chunks, data, losses, model, outlook, samples, sharded, tokenizer, unroll
from .checkpoint import NO_ROOM, NotWritten
from .config import (
    ConfigError,
    DataConfig,
    check_named,
    check_split,
    check_unread,
)
from .request import REQUEST, check_request, request_of
from .teacher import load_teacher

TOKENS, WEIGHT = "tokens.npy", "weight.npy"
HIDDEN, LAWS, RECORD = "hidden.{}.npy", "laws.{}.npy", "features.json"
UNFINISHED = "unfinished.json"  # the record of a folder in which only the first rows are written
WRITTEN = "written"  # how many rows an unfinished folder has
UNASKED = ("output", "shard", "shards", "data.eval_rows")  # in the folder's name, or without effect
PAUSE = 60.0  # seconds after which rows that were written are counted in ``unfinished.json``
PARTS = ("ids", "logits", "rest")  # the parts of a law
VERSION = 3  # the version of the layout of a folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesConfig:
    """The rows whose hidden states are stored.

    A row takes ``2 * data.length * hidden size`` bytes per layer, or with ``top_k``
    ``data.length * (8 * top_k + 4)`` bytes in place of the last layer.
    """

    teacher: str = "embedded"  # the target: a name or folder that specjax.load takes
    split: str = "train"  # the split of the corpus: train or heldout
    num_rows: int = 1024  # a multiple of data.batch
    layers: tuple[int, ...] = ()  # stored besides the last layer; EAGLE-3 reads some
    top_k: int = 0  # store the target's most likely tokens in place of the last layer; 0: do not
    shard: int = 0  # this run writes the rows shard::shards alone
    shards: int = 1  # the number of runs that share the rows
    output: str = "runs/features"  # the folder to write
    data: DataConfig = DataConfig()

    def __post_init__(self):
        if self.num_rows < 1 or self.num_rows % self.data.batch:
            raise ConfigError(
                f"num_rows={self.num_rows}; accepted: a multiple of data.batch={self.data.batch}"
            )
        check_named("output", self.output)
        check_split(self.split)
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k}; accepted: at least 0")
        if not 0 <= self.shard < self.shards:
            raise ConfigError(
                f"shard={self.shard}, shards={self.shards}; accepted: shard from 0 to shards - 1"
            )


Config = FeaturesConfig


def hidden_states(graphdef, params, tokens, segments, layers, gates=None):
    """Returns the hidden states ``[B, T, F]`` of each layer over int32 ``tokens [B, T]``; see
    ``states_and_entries``."""
    return states_and_entries(graphdef, params, tokens, segments, layers, gates)[0]


def states_and_entries(graphdef, params, tokens, segments, layers, gates=None):
    """Returns the hidden states ``[B, T, F]`` of each layer over int32 ``tokens [B, T]``, and the
    entries of all layers, which ``decoder.Decoder.hidden`` takes as ``earlier``.

    Attention stays within segments. In long rows a block of queries attends at a time, so that
    memory grows linearly with the length of a row; for a target with windows, capped scores or
    latents it grows with the square. ``gates``: see ``decoder.run_blocks``.
    """
    model, nodes = nnx.merge(graphdef, params), tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), tokens.shape)
    c = model.config
    if nodes > unroll.BLOCK and c.window is None and c.score_softcap is None and not c.kv_rank:
        mask = None

        def attend(layer, query, keys, values):
            return unroll.attend(query, [(keys, values)], segments), (keys, values)

    else:
        mask, attend = jnp.triu(jnp.ones((nodes, nodes), bool))[None], None  # [key, query]
        mask = mask & (segments[:, :, None] == segments[:, None, :])
    how = dict(taps=layers, attend=attend, gates=gates, causal=True)
    _, tapped, entries = model.hidden(tokens, positions, mask, **how)
    return jnp.split(tapped, len(layers), axis=2), entries


def check_layers(layers, count: int, name: str = "layers") -> None:
    """Raises ConfigError for layers that a target with ``count`` layers does not have."""
    if any(not 0 <= layer <= count for layer in layers) or len({*layers}) < len(layers):
        raise ConfigError(
            f"{name}={list(layers)}; accepted: different ones, 0 (the embeddings) to {count} (the "
            "last layer of the target)"
        )


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """Rows of text with their features by layer, as a source for Grain.

    The features are one array for each shard, and stay on disk.
    """

    tokens: np.ndarray
    weight: np.ndarray
    hidden: dict[int, list[np.ndarray]]
    laws: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index) -> dict:
        def row(shards):
            return np.asarray(shards[index % len(shards)][index // len(shards)])

        hidden = {i: row(shards).view(ml_dtypes.bfloat16) for i, shards in self.hidden.items()}
        tokens, weight = np.asarray(self.tokens[index]), np.asarray(self.weight[index])
        found = {"tokens": tokens, "weight": weight, "hidden": hidden}
        if self.laws:
            found["laws"] = {name: row(shards) for name, shards in self.laws.items()}
        return found


def read(folder: str, of: dict, length: int, layers, top_k: int = 0) -> StoredRows:
    """Reads the rows of a finished folder, with the hidden states of ``layers``.

    If one of the layers is not stored, the rows have no hidden states, and the target runs over
    them in each step. With ``top_k`` the rows have laws instead, if laws of as many tokens are
    stored.

    Args:
      folder: the folder, or its name without the numbers of shards.
      of: the record that the folder must have, see ``record_of``.
      length: the tokens of a row.
      layers: the layers to read.
      top_k: the number of tokens of a law; 0: no laws.

    Raises:
      ConfigError: the folder is missing, was written for another target, tokenizer or version, or
        holds rows of another length.
    """
    try:
        paths = sharded.shards_of(Path(folder), "features", RECORD)
    except ConfigError as error:
        raise ConfigError(
            f'{error}; or give features="", which runs the target in each step'
        ) from None
    records = [json.loads((path / RECORD).read_text()) for path in paths]
    for record in records:
        anew = "compute them anew, with the recipe `features` and another `output`"
        samples.check_of(f"the features at {folder!r} are", record, of, anew)
    laws = PARTS if 0 < top_k <= min(record.get("top_k", 0) for record in records) else ()
    layers = () if laws else layers
    kept = sorted(set.intersection(*(set(record["layers"]) for record in records)))
    if any(layer not in kept for layer in layers):
        print(
            f"{folder} holds the hidden states {kept}, wanted are {layers}: the target "
            "runs in each step, over the same rows"
        )
        layers = ()

    def arrays(name):
        return [np.load(path / name, mmap_mode="r") for path in paths]

    hidden = {i: arrays(HIDDEN.format(i)) for i in layers}
    laws = {name: arrays(LAWS.format(name)) for name in laws}
    rows = StoredRows(
        *(samples.interleaved(arrays(name)) for name in (TOKENS, WEIGHT)), hidden, laws
    )
    if rows.tokens.shape[1] != length + 1:
        raise ConfigError(
            f"the features at {folder!r} are of rows of {rows.tokens.shape[1] - 1} tokens, "
            f"data.length={length}: give that length"
        )
    return rows


def record_of(teacher, vocabulary) -> dict:
    """Returns the record of stored features: fingerprints of target and tokenizer, and version."""
    return {"version": VERSION, **samples.fingerprints(teacher, vocabulary)}


def batches(rows: StoredRows, config: DataConfig, *, shard: tuple[int, int] = (0, 1)):
    """Returns an endless Grain iterator over batches of ``rows``, in a new order each epoch.

    ``shard`` is that of ``data.training_batches``.

    Raises:
      ConfigError: ``config`` names further text, which is not read.
    """
    import grain

    reason = "with features= all rows to learn from are those stored there"
    check_unread(config, ("samples", "mixed"), reason, "leave features out")

    dataset = grain.MapDataset.source(rows).seed(config.seed).shuffle().repeat(data.EPOCHS)
    return data.batched(dataset, config, shard, prefetch=4)


def asked_of(config: FeaturesConfig) -> dict:
    """What a configuration asks for, which the record of its folder holds; the order of ``layers``
    changes nothing."""
    return request_of(config, UNASKED) | {"layers": sorted(config.layers)}


def check_finished(folder: Path, config: FeaturesConfig) -> bool:
    """Whether a folder is finished, which is printed.

    Raises:
      ConfigError: it is, and holds other rows than the configuration asks for.
    """
    if not (folder / RECORD).is_file():
        return False
    check_request(folder, json.loads((folder / RECORD).read_text()), config, asked_of(config))
    print(f"{folder} is there already")
    return True


def rows_written(folder: Path, record: dict) -> int:
    """How many rows an earlier run of the same command wrote before it was stopped; 0: none."""
    path = folder / UNFINISHED
    if not path.is_file():
        return 0
    found = json.loads(path.read_text())
    written = found.pop(WRITTEN)
    return written if found == json.loads(json.dumps(record)) else 0


def reserve(path: Path) -> None:
    """Takes the room of a file on the disk, where the system has a call for that: a page of a
    mapped file that finds no room later ends the process without a word.

    Raises:
      OSError: there is no room.
    """
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
            except OSError as error:
                if error.errno in NO_ROOM:
                    raise


def run(config: FeaturesConfig, *, dry_run: bool = False) -> None:
    """Writes the folder ``output``, unless it is finished already."""
    shard = config.shard, config.shards
    folder = sharded.shard_of(Path(config.output), *shard)
    if check_finished(folder, config):
        return
    vocabulary = tokenizer.load(config.data.tokenizer)
    teacher = load_teacher(config.teacher, vocabulary, config.data.length)
    check_layers(config.layers, teacher.config.num_layers)
    last, top_k = teacher.config.num_layers, config.top_k
    layers = sorted({*config.layers} if top_k else {*config.layers, last})
    known = teacher.target.vocab_size
    if top_k > known:
        raise ConfigError(f"top_k={top_k}; accepted: at most {known}")
    stream, end_of_text = data.load_stream(config.data, config.split)
    of = samples.fingerprints(teacher, vocabulary)
    own_text = [samples.read(path, of, known) for path in config.data.samples]
    source = data.training_batches(stream, config.data, own_text, shard=shard)
    graphdef, size = graph_definition(teacher.config), teacher.config.hidden_size

    @jax.jit
    def compute(params, tokens):
        segments = data.segments_of(tokens, end_of_text)
        wanted = sorted({*layers, last})
        found = dict(
            zip(wanted, hidden_states(graphdef, params, tokens, segments, wanted), strict=True)
        )
        states = [found[layer].astype(jnp.bfloat16) for layer in layers]
        return states, top_laws(params, found[last]) if top_k else ()

    def top_laws(params, states):
        """Computes the parts of the laws, for one chunk of positions at a time."""

        def terms(table, states, *_):
            logits = chunks.logits_of(table, states, teacher.config.logit_softcap)
            laws = losses.compress(logits, top_k)
            return [getattr(laws, name) for name in PARTS]

        return chunks.each(terms, teacher.target.head_table(params), states, None, ())

    rows, length = config.num_rows // config.shards, config.data.length
    stored = rows * length * (2 * len(layers) * size + (8 * top_k + 4 if top_k else 0))
    print(f"{rows} rows of {length} tokens, {stored / 1e6:.1f} MB")
    if dry_run:
        batch = data.unpacked(next(source))[0][:, :-1]
        compiled = compute.lower(teacher.params, batch).compile()
        work = compiled.memory_analysis()
        seconds = outlook.seconds_of(lambda: compiled(teacher.params, batch))
        return outlook.show(
            model=f"{teacher.name}: {model.words(teacher.config)}",
            shapes=f"{len(batch)} rows x {length} tokens a step, hidden states {layers} of {size}",
            parameters=f"{outlook.num_parameters(teacher.params):,}, none to train",
            memory={
                "parameters": outlook.num_bytes(teacher.params),
                "work space of a step": work.temp_size_in_bytes if work else 0,
            },
            steps=f"{rows // len(batch):,}; {stored / 1e6:,.1f} MB on disk",
            seconds=rows / len(batch) * seconds,
        )
    folder.mkdir(parents=True, exist_ok=True)
    record = {"teacher": config.teacher, "layers": layers, "top_k": top_k}
    record |= {**record_of(teacher, vocabulary), REQUEST: asked_of(config)}
    written = rows_written(folder, record)
    if written:
        print(f"goes on after {written} of {rows} rows", flush=True)
    mode = "r+" if written else "w+"
    if not written:  # a count of other rows
        (folder / UNFINISHED).unlink(missing_ok=True)

    made: list[Path] = []

    def file(name, dtype, *shape):
        made.append(folder / name)
        try:
            array = np.lib.format.open_memmap(made[-1], mode, dtype, (rows, *shape))
            if not written:
                reserve(made[-1])
        except OSError as error:
            if written or error.errno not in NO_ROOM:
                raise
            for path in made:
                path.unlink(missing_ok=True)
            raise NotWritten(
                f"output={config.output!r}: {error.strerror}: the rows take {stored / 1e6:,.1f} "
                "MB; make room, give another output, or fewer num_rows"
            ) from error
        return array

    tokens, weight = file(TOKENS, np.int32, length + 1), file(WEIGHT, np.float32, length)
    hidden = [file(HIDDEN.format(i), np.uint16, length, size) for i in layers]
    shapes = [(np.int32, top_k), (np.float32, top_k), (np.float32,)] if top_k else []
    laws = [
        file(LAWS.format(name), dtype, length, *shape)
        for name, (dtype, *shape) in zip(PARTS, shapes, strict=False)
    ]
    arrays = [tokens, weight, *hidden, *laws]

    def count(number: int) -> None:
        """Records that the first ``number`` rows are on disk."""
        for array in arrays:
            array.flush()
        temporary = folder / f"{UNFINISHED}.tmp"
        temporary.write_text(json.dumps({**record, WRITTEN: number}, indent=2) + "\n")
        temporary.replace(folder / UNFINISHED)

    step = config.data.batch // config.shards
    for _ in range(0, written, step):
        next(source)
    began = counted = time.monotonic()
    for first in range(written, rows, step):
        batch = next(source)
        own, weight[first : first + step] = data.unpacked(batch)
        tokens[first : first + step] = own
        states, parts = compute(teacher.params, own[:, :-1])
        for layer, found in zip(hidden, states, strict=True):
            layer[first : first + step] = np.asarray(found).view(np.uint16)
        for part, found in zip(laws, parts, strict=True):
            part[first : first + step] = np.asarray(found)
        if first // step % 20 == 0:
            rate = (first + step - written) * length / (time.monotonic() - began)
            print(f"row {first + step}/{rows}: {rate:,.0f} tokens/s", flush=True)
        if time.monotonic() - counted >= PAUSE:
            count(first + step)
            counted = time.monotonic()
    for array in arrays:
        array.flush()
    temporary = folder / f"{RECORD}.tmp"
    temporary.write_text(json.dumps(record, indent=2) + "\n")
    temporary.replace(folder / RECORD)  # last: it says "finished"
    (folder / UNFINISHED).unlink(missing_ok=True)
    print(f"wrote {folder}")
