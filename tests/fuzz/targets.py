"""Targets: the toy, random decoders of all families, and the model that the package ships."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from registry import Cases, cases
from toys import bag

import specjax
from specjax.models import DecoderConfig
from specjax.models.causal_lm import CausalLM
from specjax.models.decoder import abstract
from specjax.types import Target

from .draws import between, pick
from .reference_model import bag_logits, decoder_logits

SHARPNESS = 1.6  # of random decoders: high enough for laws that are far from flat


@dataclasses.dataclass(frozen=True)
class Model:
    """A target with its weights and its reference.

    Attributes:
      kind: ``toy``, ``decoder`` or ``shipped``.
      words: a description.
      logits: the reference: token ids to float64 ``[T, V]`` and bool ``[T]``, see
        ``reference_model``.
      lines: the registry's drafters for this target; None: it has its own, those that are shipped.
      lm: the loaded model, where it is the one that is shipped.
    """

    kind: str
    words: str
    target: Target
    params: object
    logits: Callable
    lines: Cases | None = None
    lm: specjax.LM | None = None

    @property
    def vocab(self) -> int:
        return self.target.vocab_size


def toy(vocab: int, seed: int, sharpness: float) -> Model:
    target, params = bag(vocab, seed, features=8, sharpness=sharpness)
    weights = jax.tree.map(np.asarray, params)
    return Model(
        kind="toy",
        words=f"toy of {vocab} tokens, seed {seed}",
        target=target,
        params=params,
        logits=functools.partial(bag_logits, weights),
        lines=cases(target, params),
    )


# What distinguishes families from each other, group by group, beside the sizes.
LINEAR = (("factor", 4.0), ("rope_type", "linear"))
LLAMA = dict(
    qk_norm=(False, True),
    qkv_bias=(False, True),
    o_bias=(False, True),
    mlp_bias=(False, True),
    rope_scaling=(None, None, LINEAR),
)
GEMMA = dict(
    norm_plus_one=(True,),
    sandwich_norms=(True, False),
    activation=("gelu_tanh",),
    scale_embeddings=(True,),
    query_scalar=(None, 6.0),
    score_softcap=(None, 8.0),
    logit_softcap=(None, 6.0),
    qk_norm=(False, True),
)
LEARNED = dict(
    norm=("layer",),
    positions=("learned",),
    position_offset=(0, 2),
    gated_mlp=(False,),
    activation=("gelu_tanh", "relu"),
    qkv_bias=(True,),
    o_bias=(True,),
    mlp_bias=(True,),
)
NEOX = dict(
    norm=("layer",),
    parallel_residual=(True, False),
    rotary_fraction=(0.5, 1.0),
    gated_mlp=(False,),
    activation=("gelu",),
    qkv_bias=(True,),
    o_bias=(True,),
    mlp_bias=(True,),
)
EXPERTS = dict(
    num_experts=(4, 8),
    experts_per_token=(1, 2),
    expert_size=(6,),
    shared_experts=(0, 1),
    norm_expert_weights=(True, False),
    routing=("greedy", "group_limited_greedy", "noaux_tc"),
    expert_groups=(2,),
    groups_per_token=(1, 2),
    expert_scale=(1.0, 1.7),
    plain_first=(0, 1),
)
LATENT = dict(
    kv_rank=(6,),
    q_rank=(None, 5),
    nope_dim=(4,),
    rope_dim=(4,),
    value_dim=(3,),
    rope_interleaved=(True, False),
    num_kv_heads=(1,),
    head_dim=(10,),
)
WINDOWS = dict(window=(3, 5), local_layers=((True, False), None), local_rope_theta=(None, 500.0))
GROUPS = {
    "llama": LLAMA,
    "gemma": GEMMA,
    "learned": LEARNED,
    "neox": NEOX,
    "experts": LLAMA | EXPERTS,
    "latent": LATENT,
    "latent experts": LATENT | EXPERTS,
}


def random_config(generator, vocab: int) -> tuple[str, DecoderConfig]:
    """The name of a group, and a tiny decoder of it."""
    name = pick(generator, GROUPS)
    fields = {key: pick(generator, values) for key, values in GROUPS[name].items()}
    if "latent" not in name and generator.random() < 0.4:
        fields |= {key: pick(generator, values) for key, values in WINDOWS.items()}
    shape = dict(
        vocab_size=vocab,
        hidden_size=pick(generator, (8, 12)),
        intermediate_size=10,
        num_layers=2,
        num_heads=4,
        num_kv_heads=pick(generator, (1, 2, 4)),
        head_dim=4,
        max_positions=64,
        tie_embeddings=bool(generator.random() < 0.3),
    )
    return name, DecoderConfig(**shape | fields)


def random_weights(config: DecoderConfig, seed: int):
    """Weights of a decoder that says something, as nested dictionaries; nothing is compiled."""
    generator = np.random.default_rng(seed)

    def draw(path, x):
        name = jax.tree_util.keystr(path)
        noise = generator.standard_normal(x.shape)
        if "norm" in name and "weight" in name:
            value = 0.2 * noise + (not config.norm_plus_one)
        elif x.ndim == 1:
            value = 0.3 * noise
        elif "embedding" in name:
            value = noise
        else:
            value = SHARPNESS * noise / np.sqrt(x.shape[-1])
        return jnp.asarray(value, x.dtype)

    return jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(abstract(config)[1]))


def plain_weights(params):
    """Weights as the reference reads them: nested dictionaries of float64."""
    params = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def near(params, seed: int, noise: float):
    """Weights near ``params``, leaf by leaf."""
    generator = np.random.default_rng(seed)

    def moved(x):
        return x + (noise * np.std(x) * generator.standard_normal(x.shape)).astype(x.dtype)

    return jax.tree.map(moved, params)


def decoder(generator, vocab: int) -> Model:
    name, config = random_config(generator, vocab)
    seed = between(generator, 0, 2**31 - 1)
    params, target = random_weights(config, seed), CausalLM(config)
    weights = plain_weights(params)
    others = near(params, seed + 1, 0.3), near(params, seed + 2, 1.5)
    return Model(
        kind="decoder",
        words=f"decoder ({name}), weights {seed}, {config}",
        target=target,
        params=params,
        logits=functools.partial(decoder_logits, config, weights),
        lines=cases(target, params, *others),
    )


@functools.cache
def shipped() -> Model:
    """The model that the package ships."""
    lm = specjax.load("embedded")
    weights = plain_weights(lm.params)
    return Model(
        kind="shipped",
        words="the embedded model",
        target=lm.target,
        params=lm.params,
        logits=functools.partial(decoder_logits, lm.target.config, weights),
        lm=lm,
    )
