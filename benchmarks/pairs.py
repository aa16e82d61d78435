"""Pairs of real size without trained weights: a target, and its own first layers as the drafter.

The target has the shape of a Llama and random weights. The drafter consists of the target's first
layers, embedding, final norm and LM head. The output projections of the target's later layers are
scaled down until both models agree as often as requested; the scale is found by bisection on the
measured agreement. The target still computes all of its layers, so its speed is that of a trained
model of its shape. Such results are *synthetic*.

A pair is kept as two ordinary checkpoints, so that a peer runs the same weights.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import specjax
from specjax.analysis.comparison import repeated_ngrams
from specjax.models import LM, CausalLM, Decoder, DecoderConfig, load, save_pretrained
from specjax.models.causal_lm import graph_definition
from specjax.models.model_folder import EMBEDDED

VERSION = 1  # the version of the recipe below; another version makes other checkpoints
SHAPES = {
    "tiny": DecoderConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=4096,
        tie_embeddings=True,
    ),
    "100m": DecoderConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_layers=12,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        max_positions=32_768,
        tie_embeddings=True,
    ),
    "8b": DecoderConfig(  # Llama-3.1-8B
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=32_768,
        rope_theta=500_000.0,
    ),
}
# the first layer, which drafts, sees a window alone: what lies further back is the later layers'
SHAPES["100m-local"] = dataclasses.replace(
    SHAPES["100m"], window=508, local_layers=(True,) + (False,) * 11
)
EARLY = 1  # layers of the drafter
SHARPNESS = 3.0  # of queries and keys: attention must pick, or all contexts average to one
ROWS, PROMPT, NEW = 8, 16, 96  # text on which the agreement is measured: 768 positions
STEPS, TOLERANCE = 8, 0.01  # of the bisection


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A target and a drafter.

    Attributes:
      name: the name of the pair.
      target, draft: both models as ``specjax.load`` returns them; made ones have no tokenizer.
      asked: the requested agreement; this and the next three are None for trained models.
      found: the share of positions of the target's greedy text at which the most likely tokens of
        both models are the same.
      scale: the scale of the later layers' output projections.
      repeated: the share of repeated 4-grams in that text.
      folders: the two checkpoints; None while they exist on the device only.
    """

    name: str
    target: LM
    draft: LM
    asked: float | None = None
    found: float | None = None
    scale: float | None = None
    repeated: float | None = None
    folders: tuple[Path, Path] | None = None

    @property
    def synthetic(self) -> bool:
        return self.asked is not None

    def describe(self) -> str:
        if not self.synthetic:
            return f"{self.name}: trained"
        return (
            f"{self.name}: random weights, the drafter is the target's first {EARLY} of "
            f"{self.target.config.num_layers} layers; agreement asked {self.asked:.2f}, found "
            f"{self.found:.3f} (later outputs scaled by {self.scale:.4f}), repeated 4-grams "
            f"{self.repeated:.1%}"
        )


def prompts(config: DecoderConfig, rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Returns random token ids, int32 ``[rows, length]``."""
    rng = np.random.default_rng([seed, length])
    return rng.integers(0, config.vocab_size, (rows, length), dtype=np.int32)


def embedded(dtype: str = "float32") -> Pair:
    """Returns the trained pair that is part of the package."""
    target, draft = (load(name, dtype=dtype) for name in EMBEDDED)
    return Pair("embedded", target, draft, folders=tuple(EMBEDDED.values()))


def pair(
    name: str,
    agreement: float = 0.8,
    *,
    dtype: str = "float32",
    seed: int = 0,
    cache: Path | None = None,
) -> Pair:
    """Makes a pair, or reads it if it was made before.

    Args:
      name: a key of ``SHAPES``.
      agreement: the requested agreement, in [0.05, 1].
      dtype: of the weights.
      seed: of the weights.
      cache: the folder for checkpoints; None: nothing is written or read, nor of a shape with
        local layers, which the checkpoint of a Llama does not express.

    Raises:
      ValueError: the shape is unknown, or the agreement is out of range.
    """
    if name not in SHAPES:
        raise ValueError(f"pair={name!r} is unknown; known: {', '.join(SHAPES)}")
    if not 0.05 <= agreement <= 1:
        raise ValueError(f"agreement={agreement}: it must lie in [0.05, 1]")
    if cache is None or SHAPES[name].local_layers:
        return _make(name, agreement, dtype, seed)
    recipe = repr((VERSION, SHAPES[name], EARLY, SHARPNESS, ROWS, PROMPT, NEW, STEPS, TOLERANCE))
    mark = hashlib.sha256(recipe.encode()).hexdigest()[:8]
    folder = Path(cache) / f"{name}-{agreement:g}-{dtype}-{seed}-{mark}"
    folders, record = (folder / "target", folder / "draft"), folder / "pair.json"
    if not record.exists():  # written last: without it the checkpoints may be incomplete
        made = _make(name, agreement, dtype, seed)
        for lm, place in zip((made.target, made.draft), folders, strict=True):
            save_pretrained(lm, place)
        facts = {k: getattr(made, k) for k in ("name", "asked", "found", "scale", "repeated")}
        beside = folder / f"pair.json.{os.getpid()}"
        beside.write_text(json.dumps(facts, indent=1) + "\n")
        os.replace(beside, record)
    target, draft = (load(place, dtype=dtype, tokenizer=False) for place in folders)
    facts = json.loads(record.read_text())
    return Pair(target=target, draft=draft, folders=folders, **facts)


def _make(name: str, asked: float, dtype: str, seed: int) -> Pair:
    config = SHAPES[name]
    weights = _random(config, dtype, seed)
    tokens = jnp.asarray(prompts(config, ROWS, PROMPT, seed=2**31 + seed))

    def at(scale):
        target, draft = _lms(name, config, _scaled(weights, scale))
        return target, draft, *_agreement(target, draft, tokens)

    scale, target, draft, found, text = bisect(at, asked)
    repeated = repeated_ngrams(list(np.asarray(text)))
    return Pair(name, target, draft, asked, found, scale, repeated)


def bisect(at: Callable, asked: float) -> tuple:
    """Returns ``(scale, *at(scale))`` for the scale whose agreement ``at(scale)[2]`` is nearest.

    The agreement is 1 at scale 0 and falls with the scale, but not strictly, because the text on
    which it is measured changes with the scale.
    """
    low, high = 0.0, 1.0
    best = None
    for _ in range(STEPS):
        scale = (low + high) / 2
        tried = (scale, *at(scale))
        found = tried[3]
        if best is None or abs(found - asked) < abs(best[3] - asked):
            best = tried
        if abs(found - asked) <= TOLERANCE:
            break
        low, high = (scale, high) if found > asked else (low, scale)
    return best


def _random(config: DecoderConfig, dtype: str, seed: int) -> nnx.State:
    """Returns weights whose greedy text neither repeats one token nor forgets its context.

    The first layers write at full strength, because a tied embedding would otherwise repeat its
    input. Queries and keys are sharp, because attention over random values would otherwise average
    to nothing and the text would end in a short cycle.
    """
    model = Decoder(config, rngs=nnx.Rngs(seed), param_dtype=jnp.dtype(dtype))
    full = (2 * config.num_layers) ** 0.5  # undoes the decoder's own scale of residual outputs

    def factor(path):
        if re.fullmatch(r"blocks\.\d+\.attention\.[qk]\.weight", path):
            return SHARPNESS
        output = re.fullmatch(_OUTPUT, path)
        return full if output and int(output[1]) < EARLY else 1.0

    return _times(nnx.state(model), factor)


_OUTPUT = r"blocks\.(\d+)\.(?:attention\.o|mlp\.down)\.weight"


def _scaled(weights: nnx.State, scale: float) -> nnx.State:
    """Returns the weights with scaled outputs of the layers after ``EARLY``; the rest is shared."""

    def factor(path):
        output = re.fullmatch(_OUTPUT, path)
        return scale if output and int(output[1]) >= EARLY else 1.0

    return _times(weights, factor)


def _times(weights: nnx.State, factor: Callable[[str], float]) -> nnx.State:
    scaled = []
    for path, param in nnx.to_flat_state(weights):
        by = factor(".".join(map(str, path)))
        value = param.get_value()
        scaled.append((path, param if by == 1 else param.replace((value * by).astype(value.dtype))))
    return nnx.from_flat_state(scaled)


def _lms(name: str, config: DecoderConfig, weights: nnx.State) -> tuple[LM, LM]:
    """Returns the target, and the drafter that shares its arrays."""
    local = config.local_layers and config.local_layers[:EARLY]
    short = dataclasses.replace(config, num_layers=EARLY, local_layers=local)
    early = [
        (path, param)
        for path, param in nnx.to_flat_state(weights)
        if path[0] != "blocks" or path[1] < EARLY
    ]
    make = functools.partial(LM, tokenizer=None, fingerprint="")
    return (
        make(target=CausalLM(config), params=weights, name=f"{name}-target"),
        make(target=CausalLM(short), params=nnx.from_flat_state(early), name=f"{name}-draft"),
    )


def _agreement(target: LM, draft: LM, tokens: jax.Array) -> tuple[float, jax.Array]:
    """Returns the share of the target's greedy tokens that the drafter predicts, and the tokens."""
    lengths = jnp.full((len(tokens),), tokens.shape[1])
    out = specjax.decode(
        target.target,
        specjax.drafters.Plain(),
        {"target": target.params},
        tokens,
        lengths,
        key=jax.random.key(0),
        max_new_tokens=NEW,
    )
    said = _argmax(graph_definition(draft.config), draft.params, out.tokens)
    new = slice(tokens.shape[1], None)
    same = said[:, :-1] == out.tokens[:, 1:]
    return float(jnp.mean(same[:, tokens.shape[1] - 1 :])), out.tokens[:, new]


@functools.partial(jax.jit, static_argnums=0)
def _argmax(graph, params, tokens):
    return jnp.argmax(nnx.merge(graph, params)(tokens), axis=-1)
