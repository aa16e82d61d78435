"""Recipe ``regenerate``: the target goes on from prompts of the corpus; a drafter learns from that.

The first tokens of a row come from the corpus, the rest from the target, greedily or drawn at a
temperature, through ``specjax.decode``. The file holds finished rows only.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from . import data, tokenizer
from .config import ConfigError, DataConfig, RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """``num_rows`` rows of ``data.length + 1`` tokens, ``data.batch`` at a time.

    ``new_tokens``: how many are generated a row at most. Prompts have ``shortest`` tokens to as
    many as leave room for them. The first ``greedy_share`` of the batches is written greedily,
    the rest at ``temperature``.
    """

    teacher: str = "embedded"
    split: str = "train"
    num_rows: int = 1024
    new_tokens: int = 192
    shortest: int = 16
    greedy_share: float = 0.5
    temperature: float = 1.0
    output: str = "runs/samples.npz"
    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self):
        room = self.data.length + 1 - self.shortest
        if not 0 < self.new_tokens <= room:
            raise ConfigError(f"new_tokens={self.new_tokens}; accepted: 1 to {room}")


Config = RegenerateConfig


@dataclasses.dataclass(frozen=True)
class Samples:
    """Attributes:
    tokens: int32 ``[n, length + 1]``, filled up with end-of-text.
    start, stop: int32 ``[n]``; the target wrote ``tokens[start:stop]``.
    """

    tokens: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @functools.cached_property
    def weight(self) -> np.ndarray:
        """float32 ``[n, length]`` to learn from: all but what a row was filled up with counts."""
        predicted = np.arange(1, self.tokens.shape[1])
        return (predicted < self.stop[:, None]).astype(np.float32)

    def batches(self, size: int) -> list[tuple]:
        """``(tokens, weight [size, length])`` whose weights count the generated tokens alone."""
        predicted = np.arange(1, self.tokens.shape[1])
        weight = (predicted >= self.start[:, None]) & (predicted < self.stop[:, None])
        whole = len(self.tokens) // size * size
        return [
            (self.tokens[i : i + size], weight[i : i + size].astype(np.float32))
            for i in range(0, whole, size)
        ]


def read(path: str) -> Samples:
    """Reads a file of this recipe. Raises ConfigError where there is none."""
    if not Path(path).is_file():
        raise ConfigError(
            f"no samples at {path!r}: run the recipe `regenerate` first, with output={path}"
        )
    with np.load(path) as arrays:
        return Samples(**{name: arrays[name] for name in ("tokens", "start", "stop")})


def whole_windows(stream: np.ndarray, size: int, end_of_text: int) -> np.ndarray:
    """Where ``size`` tokens lie within one document (they may begin with its end-of-text)."""
    ends = np.concatenate([[0], np.cumsum(stream == end_of_text)])
    starts = np.arange(len(stream) - size + 1)
    places = starts[ends[starts + size] == ends[starts + 1]]
    if not len(places):
        raise ConfigError(f"no document holds {size} tokens: raise new_tokens, for shorter prompts")
    return places


def make_writer(teacher, config: RegenerateConfig, end_of_text: int):
    """``write(prompts [B, T], lengths [B], key, temperature) -> Decoded``; 0.0: greedily."""
    import specjax

    stops = sorted({end_of_text, *teacher.config.eos_ids})

    def write(prompts, lengths, key, temperature):
        return specjax.decode(
            teacher.target,
            specjax.drafters.Plain(),
            {"target": teacher.params},
            jnp.asarray(prompts),
            jnp.asarray(lengths),
            key=key,
            max_new_tokens=config.new_tokens,
            sampling=specjax.Sampling(temperature=temperature),
            capacity=config.data.length + 1,
            stops=stops,
        )

    return write


def run(config: RegenerateConfig, *, dry_run: bool = False) -> None:
    """Writes ``output`` (.npz); a file that is there already is left alone."""
    from .distill import load_teacher

    path, rows = Path(config.output), config.data.batch
    if path.is_file():
        print(f"{path} is there already")
        return
    vocabulary = tokenizer.load(config.data.tokenizer)
    teacher = load_teacher(config.teacher, vocabulary, config.data.length)
    stream, end_of_text = data.load_stream(config.data, config.split)
    num_batches = -(-config.num_rows // rows)
    write = make_writer(teacher, config, end_of_text)
    longest = config.data.length + 1 - config.new_tokens
    places = whole_windows(stream.tokens, longest, end_of_text)
    rng, key = np.random.default_rng(config.data.seed), jax.random.key(config.data.seed)
    parts, began, count = [], time.monotonic(), 0
    print(f"{num_batches} batches of {rows} rows, prompts of {config.shortest} to {longest} tokens")
    for i in range(0 if dry_run else num_batches):
        lengths = rng.integers(config.shortest, longest + 1, rows).astype(np.int32)
        starts = rng.choice(places, rows)
        prompts = stream.tokens[starts[:, None] + np.arange(longest)]
        greedy = i < round(config.greedy_share * num_batches)
        temperature = 0.0 if greedy else config.temperature
        out = write(prompts, lengths, jax.random.fold_in(key, i), temperature)
        stop, tokens = np.asarray(out.lengths), np.asarray(out.tokens)
        tokens = np.where(np.arange(tokens.shape[1]) < stop[:, None], tokens, end_of_text)
        parts.append((tokens.astype(np.int32), lengths, stop.astype(np.int32)))
        count += int(np.sum(stop - lengths))
        rate = count / (time.monotonic() - began)
        print(f"batch {i + 1}/{num_batches}: {count:,} tokens, {rate:,.0f} tokens/s", flush=True)
    if parts:
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, tokens=columns[0], start=columns[1], stop=columns[2])
        temporary.replace(path)
        print(f"wrote {path}")
