"""Held-out tau by real decoding: the loop itself, on prompts that nothing was trained on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.types import Drafter

from . import data, regenerate
from .config import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """Held-out tau by decoding: of how many prompts (0: not measured), how long, how batched.

    Prompts are windows of the held-out corpus. The parameters kept are those at the best tau.
    """

    num_prompts: int = 32
    prompt_tokens: int = 48
    new_tokens: int = 64
    batch: int = 8

    def __post_init__(self):
        for name in ("prompt_tokens", "new_tokens", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"decoding.{name}={getattr(self, name)}; accepted: at least 1")
        if self.num_prompts < 0 or self.num_prompts % self.batch:
            raise ConfigError(
                f"decoding.num_prompts={self.num_prompts}; accepted: 0 or a multiple of "
                f"decoding.batch={self.batch}"
            )


def decode_all(lm, drafter, params, tokens, lengths, *, batch, new_tokens, temperature=0.0) -> dict:
    """Decodes prompts int32 ``[n, T]``, ``batch`` at a time, in one compiled loop.

    ``params``: of target and drafter, as ``specjax.decode`` takes them. At ``temperature`` 0
    greedily.

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
        ).stats
        for name, parts in found.items():
            parts.append(np.asarray(getattr(stats, name)))
    return {name: np.concatenate(parts) for name, parts in found.items()}


def make_decoded(lm, drafter: Drafter, prompts: np.ndarray, config: DecodingConfig):
    """``decoded(target params, drafter params) -> {"decoded_tau": tau}``; nothing without prompts.

    ``prompts``: int32 ``[n, T]``. Greedy.
    """
    lengths = np.full(len(prompts), prompts.shape[1], np.int32)

    def decoded(target_params, params) -> dict[str, float]:
        if not len(prompts):
            return {}
        both = {"target": target_params, "drafter": params}
        sizes = dict(batch=config.batch, new_tokens=config.new_tokens)
        found = decode_all(lm, drafter, both, prompts, lengths, **sizes)
        return {"decoded_tau": float(found["emitted"].sum() / max(found["rounds"].sum(), 1))}

    return decoded


def heldout_prompts(stream: data.Stream, config: DecodingConfig, end_of_text: int) -> np.ndarray:
    """Windows of a held-out stream, evenly spread, each within one document and, where not all
    tokens count, before one that does."""
    size = config.prompt_tokens
    places = regenerate.whole_windows(stream.tokens, size, end_of_text)
    if stream.counts is not None:
        counts = np.append(stream.counts, False)[places + size]
        places = places[counts] if counts.any() else places
    chosen = places[np.linspace(0, len(places) - 1, config.num_prompts).astype(int)]
    return stream.tokens[chosen[:, None] + np.arange(size)]
