"""Recipe ``features``: the target's last hidden states over rows of text, computed once.

A head on a frozen target is far smaller than the target, so most of a step would go into the
target's forward pass. Stored, the pass is paid for once however many heads and epochs follow; its
logits need not be stored, since they are one product away (the target's own head).

    FOLDER/tokens.npy     int32    [n, length + 1]
    FOLDER/hidden.npy     bfloat16 [n, length, F], its bits as uint16; of ``tokens[:, :-1]``
    FOLDER/features.json  the target's fingerprint and the layer, for which they are
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from specjax.models.causal_lm import graph_definition

from . import data, regenerate, tokenizer
from .config import ConfigError, DataConfig, RunConfig

TOKENS, HIDDEN, RECORD = "tokens.npy", "hidden.npy", "features.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeaturesConfig:
    """``num_rows`` rows of ``data.length + 1`` tokens in the mixture of ``data``, to ``output``.

    A row takes ``2 * data.length * hidden size`` bytes.
    """

    teacher: str = "embedded"
    split: str = "train"
    num_rows: int = 1024
    output: str = "runs/features"
    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self):
        if self.num_rows < 1 or self.num_rows % self.data.batch:
            raise ConfigError(
                f"num_rows={self.num_rows}; accepted: a multiple of data.batch={self.data.batch}"
            )


Config = FeaturesConfig


def hidden_states(graphdef, params, tokens, segments):
    """Normed last hidden states ``[B, T, F]`` of int32 ``tokens [B, T]``, attention within
    segments."""
    model, (batch, nodes) = nnx.merge(graphdef, params), tokens.shape
    positions = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), tokens.shape)
    mask = jnp.triu(jnp.ones((nodes, nodes), bool))[None]  # [key, query]
    mask = mask & (segments[:, :, None] == segments[:, None, :])
    hidden, _, _ = model.hidden(tokens, positions, mask)
    return hidden.T.reshape(batch, nodes, -1)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of text with their features, as a source for Grain; both arrays stay on disk."""

    tokens: np.ndarray
    hidden: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index) -> dict[str, np.ndarray]:
        hidden = np.asarray(self.hidden[index]).view(ml_dtypes.bfloat16)
        return {"tokens": np.asarray(self.tokens[index]), "hidden": hidden}


def read(folder: str, fingerprint: str, length: int) -> Rows:
    """The rows of a finished folder.

    Raises:
      ConfigError: there are none, they are another target's, or rows of another length.
    """
    path = Path(folder)
    if not (path / RECORD).is_file():
        raise ConfigError(f"no features at {folder!r}: run the recipe `features` first")
    record = json.loads((path / RECORD).read_text())
    if record["target_fingerprint"] != fingerprint:
        raise ConfigError(
            f"the features at {folder!r} are of the target {record['teacher']!r} with fingerprint "
            f"{record['target_fingerprint']}, the teacher's is {fingerprint}: compute them anew"
        )
    rows = Rows(*(np.load(path / name, mmap_mode="r") for name in (TOKENS, HIDDEN)))
    if rows.tokens.shape[1] != length + 1:
        raise ConfigError(
            f"the features at {folder!r} are of rows of {rows.tokens.shape[1] - 1} tokens, "
            f"data.length={length}: give that length"
        )
    return rows


def batches(rows: Rows, config: DataConfig):
    """An endless Grain iterator over batches of ``rows``, in a new order each epoch."""
    import grain

    dataset = grain.MapDataset.source(rows).seed(config.seed).shuffle().repeat(data.EPOCHS)
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return iter(dataset.batch(config.batch).to_iter_dataset(reading))


def run(config: FeaturesConfig, *, dry_run: bool = False) -> None:
    """Writes the folder ``output``; one that is finished already is left alone."""
    from .distill import load_teacher

    folder = Path(config.output)
    if (folder / RECORD).is_file():
        print(f"{folder} is there already")
        return
    teacher = load_teacher(config.teacher, tokenizer.load(config.data.tokenizer))
    stream, end_of_text = data.load_stream(config.data, config.split)
    samples = [regenerate.read(path).tokens for path in config.data.samples]
    source = data.training_batches(stream, config.data, samples)
    graphdef, size = graph_definition(teacher.config), teacher.config.hidden_size

    @jax.jit
    def compute(params, tokens):
        segments = data.segments_of(tokens, end_of_text)
        return hidden_states(graphdef, params, tokens, segments).astype(jnp.bfloat16)

    rows, length = config.num_rows, config.data.length
    print(f"{rows} rows of {length} tokens, {2 * rows * length * size / 1e6:.1f} MB")
    if dry_run:
        return
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {TOKENS: (np.int32, (rows, length + 1)), HIDDEN: (np.uint16, (rows, length, size))}
    tokens, hidden = (
        np.lib.format.open_memmap(folder / name, "w+", *of) for name, of in shapes.items()
    )
    began, step = time.monotonic(), config.data.batch
    for first in range(0, rows, step):
        batch = next(source)
        tokens[first : first + step] = batch
        states = np.asarray(compute(teacher.params, batch[:, :-1]))
        hidden[first : first + step] = states.view(np.uint16)
        if first // step % 20 == 0:
            rate = (first + step) * length / (time.monotonic() - began)
            print(f"row {first + step}/{rows}: {rate:,.0f} tokens/s", flush=True)
    tokens.flush()
    hidden.flush()
    record = {
        "teacher": config.teacher,
        "target_fingerprint": teacher.checkpoint,
        "layer": teacher.config.num_layers,
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")  # last: it says "finished"
    print(f"wrote {folder}")
