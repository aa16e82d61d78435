"""Held-out τ, measured by decoding prompts that were not trained on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import sharding
from specjax.decoding.stats import tau_of as mean_emitted
from specjax.models.placement import check_divides
from specjax.serving import jsonl_input
from specjax.sharding import DATA, MODEL
from specjax.types import Drafter

from . import data
from .config import ConfigError, check_stems
from .evaluate import KEPT

RESAMPLES = 2000  # bootstrap samples of the prompts for an interval
Prompts = tuple[np.ndarray, np.ndarray]  # int32 [n, T], padded at the end, and lengths int32 [n]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """Held-out prompts that are decoded to measure τ, by which the exported weights are chosen."""

    num_prompts: int = 32  # windows of the held-out corpus, a multiple of batch; 0: not measured
    files: tuple[str, ...] = ()  # further prompts (JSON lines with "text"), measured by file
    prompt_tokens: int = 48  # tokens of a prompt
    new_tokens: int = 64  # tokens decoded per prompt
    batch: int = 8  # prompts that are decoded together

    def __post_init__(self):
        for name in ("prompt_tokens", "new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"decoding.{name}={getattr(self, name)}; accepted: at least 1")
        if self.num_prompts < 0 or self.num_prompts % self.batch:
            raise ConfigError(
                f"decoding.num_prompts={self.num_prompts}; accepted: 0 or a multiple of "
                f"decoding.batch={self.batch}"
            )
        if self.files and not self.num_prompts:
            raise ConfigError(
                "decoding.num_prompts=0 measures no decoding.files either: leave them out, or say "
                "how many prompts of each"
            )
        check_stems("decoding.files", self.files)


def decode_all(
    lm, drafter, params, tokens, lengths, *, batch, new_tokens, temperature=0.0, mesh=None
) -> dict:
    """Decodes prompts int32 ``[n, T]``, ``batch`` at a time, in one compiled loop.

    Args:
      lm: the target.
      drafter: the drafter.
      params: the parameters of target and drafter, as ``specjax.decode`` takes them.
      tokens: int32 ``[n, T]``.
      lengths: int32 ``[n]``.
      batch: the number of prompts that are decoded together.
      new_tokens: the number of tokens that are emitted for each prompt.
      temperature: 0 is greedy.
      mesh: the mesh on which the parameters are placed, if any.

    Returns:
      ``rounds``, ``emitted`` int32 ``[n]`` and ``accepted_at`` int32 ``[n, D]``, see ``Stats``.
    """
    found: dict[str, list] = {"rounds": [], "emitted": [], "accepted_at": []}
    for first in range(0, len(tokens), batch):
        stats = specjax.decode(
            lm.target,
            drafter,
            params,
            jnp.asarray(tokens[first : first + batch]),
            jnp.asarray(lengths[first : first + batch]),
            key=jax.random.key(first),
            max_new_tokens=new_tokens,
            sampling=specjax.Sampling(temperature=temperature),
            stops=lm.config.eos_ids,
            mesh=mesh,
        ).stats
        for name, parts in found.items():
            parts.append(sharding.gather(getattr(stats, name)))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def tau_of(found: dict[str, np.ndarray]) -> tuple[float, float, float]:
    """Returns τ and the ends of its 95 % interval, from resampled prompts."""
    rng, count = np.random.default_rng(0), len(found["rounds"])
    picks = rng.integers(0, count, (RESAMPLES, count))
    taus = [mean_emitted(found["emitted"][pick], found["rounds"][pick]) for pick in picks]
    tau = mean_emitted(found["emitted"], found["rounds"])
    return (tau, *(float(x) for x in np.quantile(taus, [0.025, 0.975])))


def names(sets: Mapping[str, Prompts]) -> list[str]:
    """The names of the measures of ``make_decoded``, without those that begin with ``KEPT``."""
    return [f"{prefix}decoded_tau" for prefix in sets]


def make_decoded(
    lm, drafter: Drafter, sets: Mapping[str, Prompts], config: DecodingConfig, mesh=None
):
    """Returns ``decoded(target params, drafter params) -> {"decoded_tau": ..., ...}``.

    ``decoded_kept_d`` is the share of rounds in which position ``d`` of the draft was accepted. The
    names of measures begin with that of their set. Decoding is greedy. Without prompts, nothing is
    measured.

    Args:
      lm: the target.
      drafter: the drafter.
      sets: the prompts by the name of their set.
      config: the section ``decoding`` of the configuration.
      mesh: the mesh of the run, if any.

    Raises:
      ConfigError: the mesh cannot share the target or the prompts of a batch.
    """
    if mesh is not None and sets:
        try:
            check_divides(lm.config, mesh.shape[MODEL])
            for tokens, _ in sets.values():
                for rows in {min(config.batch, len(tokens)), len(tokens) % config.batch}:
                    sharding.check_rows(rows, mesh.shape[DATA])
        except ValueError as error:
            raise ConfigError(
                f"run.mesh cannot decode held-out prompts: {error}; or measure without them, with "
                "decoding.num_prompts=0 and no decoding.files"
            ) from error

    def decoded(target_params, params) -> dict[str, float]:
        both, measured = {"target": target_params, "drafter": params}, {}
        for prefix, prompts in sets.items():
            sizes = dict(batch=config.batch, new_tokens=config.new_tokens, mesh=mesh)
            found = decode_all(lm, drafter, both, *prompts, **sizes)
            rounds = max(found["rounds"].sum(), 1)
            measured[f"{prefix}decoded_tau"] = mean_emitted(found["emitted"], found["rounds"])
            for depth, kept in enumerate(found["accepted_at"].sum(axis=0), 1):
                measured[f"{prefix}{KEPT}{depth}"] = float(kept / rounds)
        return measured

    return decoded


def prompt_sets(lm, stream: data.Stream, config: DecodingConfig, end_of_text: int) -> dict:
    """Returns prompts by the prefix of their measures, which is ``""`` for the held-out stream.

    Raises:
      ConfigError: a file of prompts is missing, holds something else, or has too few prompts; or
        the target's context has no room for a prompt and the new tokens.
    """
    if not config.num_prompts:
        return {}
    asked, context = config.prompt_tokens + config.new_tokens, lm.max_positions
    if context is not None and asked > context:
        raise ConfigError(
            f"decoding.prompt_tokens={config.prompt_tokens}, decoding.new_tokens="
            f"{config.new_tokens}: these are {asked} tokens a prompt, and {lm.name} reads up to "
            f"{context}; give fewer, or decoding.num_prompts=0, which decodes no prompts"
        )
    tokens = heldout_prompts(stream, config, end_of_text)
    sets = {"": (tokens, np.full(len(tokens), tokens.shape[1], np.int32))}
    for name in config.files:
        sets[f"{Path(name).stem}/"] = _read_prompts(lm, name, config)
    return sets


def _read_prompts(lm, name: str, config: DecodingConfig) -> Prompts:
    """Reads ``num_prompts`` evenly spread prompts of a file; keeps their last ``prompt_tokens``."""
    try:
        lines = jsonl_input.divided(Path(name).read_bytes())
        texts = [jsonl_input.parsed(line)["text"] for _, line in lines]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f'decoding.files: {name!r} is no file of prompts, JSON lines with a "text" '
            f"({type(error).__name__}: {error})"
        ) from None
    if empty := [text for text in texts if not isinstance(text, str) or not text]:
        raise ConfigError(
            f'decoding.files: {name!r} has a line with "text": {json.dumps(empty[0])}; accepted: '
            "a text that is not empty; leave that line out"
        )
    count = min(config.num_prompts, len(texts) // config.batch * config.batch)
    if not count:
        raise ConfigError(
            f"decoding.files: {name!r} has {len(texts)} prompts; give at least "
            f"decoding.batch={config.batch}"
        )
    ids = [lm.tokenizer.encode(texts[i * len(texts) // count]) for i in range(count)]
    ids = [row[-config.prompt_tokens :] for row in ids]
    lengths = np.asarray([len(row) for row in ids], np.int32)
    tokens = np.zeros((count, lengths.max()), np.int32)
    for row, own in zip(tokens, ids, strict=True):
        row[: len(own)] = own
    return tokens, lengths


def heldout_prompts(stream: data.Stream, config: DecodingConfig, end_of_text: int) -> np.ndarray:
    """Returns evenly spread windows of a held-out stream as prompts.

    Each window lies within one document and, if not all tokens count, before a token that counts.
    """
    size = config.prompt_tokens
    way_out = "lower decoding.prompt_tokens, or give decoding.num_prompts=0"
    places = data.whole_windows(stream.tokens, size, end_of_text, way_out)
    if stream.counts is not None:
        counts = np.append(stream.counts, False)[places + size]
        places = places[counts] if counts.any() else places
    chosen = places[np.linspace(0, len(places) - 1, config.num_prompts).astype(int)]
    return stream.tokens[chosen[:, None] + np.arange(size)]
