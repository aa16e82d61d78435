"""Recipe ``hydra``: Hydra's heads on a frozen target, by the teacher loss.

    loss = sum_k decay ** k * mean(-sum_x p(x) log q_k(x)),   k = 1 ... K

``p`` is the target's law after the true tokens, which head k reads in place of drafted ones. With
``teacher_share=0`` the loss is Hydra's first one, the cross-entropy of the text. Hydra++ has the
teacher loss, ``num_layers=4`` and ``prefix=true``.

Embeddings are often much smaller than hidden states, and an optimizer with equal steps in all
directions would learn slowly to use them. In training, heads therefore read the embeddings at the
scale of the hidden states. The weights of the exported drafter contain that factor.

References: Hydra, 2402.05109.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from specjax.drafters import hydra
from specjax.drafters.prefix import prefix_config
from specjax.models.config import DecoderConfig

from . import frozen
from .config import ConfigError
from .rows import Heads, fresh


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraTrainingConfig(frozen.FrozenConfig):
    """The shape of Hydra heads."""

    num_layers: int = 1  # layers of a head, the first included
    tied: bool = True  # share the target's LM head; else each head has one, initialized by it
    prefix: bool = False  # add the prefix layer of Hydra++ before the heads
    teacher_share: float = 1.0  # share of the loss against the target's law

    def __post_init__(self):
        super().__post_init__()
        if self.num_layers < 1:
            raise ConfigError(f"num_layers={self.num_layers}; accepted: at least 1")


Config = HydraTrainingConfig


def scale_of(target, params) -> float:
    """The root mean square of hidden states (that of the norm's weight) over the embeddings'."""

    def size(x):
        return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))

    tokens = jnp.arange(target.config.vocab_size, dtype=jnp.int32)[None]
    weight = params["norm"]["weight"][...]
    if target.config.norm_plus_one:
        weight = 1 + weight
    return float(size(weight) / size(target.embed(params, tokens)))


def rescaled(params, factor: float, size: int):
    """Multiplies the weights of embeddings in the first layers by ``factor``.

    The embeddings are the inputs after the first ``size`` ones.
    """

    def first(path, x):
        reads = path[0].key == "heads" and path[2].key == 0 and path[-1].key == "weight"
        return x.at[:, size:].multiply(factor) if reads else x

    return jax.tree_util.tree_map_with_path(first, params)


def make_hydra(config: HydraTrainingConfig, setting: frozen.Setting) -> Heads:
    """Makes Hydra heads with initial weights for the target of a setting."""
    lm, target = setting.lm, setting.lm.target
    shape = hydra.HydraConfig(
        **setting.sizes,
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        tied=config.tied,
        prefix=prefix_config(target.config) if config.prefix else None,
    )
    table = None if config.tied else target.head_table(lm.params)
    drafter = hydra.Hydra(config=shape, target=target)
    size, scale = shape.hidden_size, scale_of(target, lm.params)

    def outputs(params, target_params, rows):
        heads = drafter.heads(params)
        batch, length, _ = rows.hidden.shape
        steps, tokens = rows.steps(config.num_heads), rows.tokens[:, :-1]
        x = rows.seen_by(heads, steps)
        embedded = scale * target.embed(target_params, tokens).reshape(size, batch, length)
        found = []
        for k in range(config.num_heads):
            after = embedded[:, :, 1 + k : 1 + k + steps].reshape(size, -1)
            x = jnp.concatenate([x, after], axis=0)
            state = heads.state(k, x)
            if heads.lm_heads is None:
                found.append((target.head_table(target_params), None, state))
            else:
                own = heads.lm_heads[k]
                found.append((own.weight[...], own.bias[...], state))
        return found

    return Heads(
        drafter=drafter,
        params=fresh(drafter, config.run.seed, lm_head=table),
        outputs=outputs,
        capped=config.tied,
        publish=lambda params: rescaled(params, scale, size),
        unpublish=lambda params: rescaled(params, 1 / scale, size),
    )


def check_prefix(config: HydraTrainingConfig, target: DecoderConfig) -> None:
    """Raises ConfigError for a target whose rotary positions no prefix layer can have.

    The layout gives the layer the target's rotary scaling, and rotates all features of its heads.
    """
    scaling = dict(target.rope_scaling or ())
    if config.prefix and len(scaling.get("short_factor", ())) not in (0, target.head_dim // 2):
        raise ConfigError(
            f"prefix=true: teacher={config.teacher!r} has rotary positions of the rope_type "
            f"{scaling.get('rope_type')!r} on {target.rotary_dim} of {target.head_dim} features of "
            "a head, and a prefix layer, which rotates all of them, has no factors for the "
            "others; give prefix=false, or take the recipe eagle3, eagle, block or heads"
        )


def run(config: HydraTrainingConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``."""
    setting = frozen.make_setting(config, check=functools.partial(check_prefix, config))
    frozen.train(config, setting, make_hydra(config, setting), dry_run=dry_run)
