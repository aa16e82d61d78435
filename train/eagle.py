"""Recipe ``eagle``: EAGLE's head on a frozen target, by regression on its features; and HASS's.

    loss = sum_k decay ** (k - 1) * (regression * SmoothL1(f'_k, f) + law * -sum_x p(x) log q_k(x)
                                     + top * -sum_{x in top K of p} p(x) log q_k(x))

for the head's feature ``f'``, the target's ``f`` (its last hidden state, normed) and ``q`` what the
target's LM head makes of ``f'``. EAGLE's has one step, uniform noise on the features it reads and
no third term. HASS's goes on with its own features as it will when it drafts, by the unroll of
EAGLE-3 (``unroll.py``): ``num_heads=3 top_k=10 noise=0``. Gradients flow through all steps.

Embeddings are often much smaller than hidden states; while it is trained the head reads them at
their scale, and what is exported holds that factor, see ``hydra.py``.

References: EAGLE, 2401.15077; HASS, 2408.15766.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.drafters import eagle

from . import frozen, hydra
from .config import ConfigError
from .eagle3 import layer_config
from .evaluate import mean
from .unroll import unroll


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(frozen.FrozenConfig):
    """``num_heads``: steps, 1 is EAGLE's. ``noise``: features are shifted by up to
    ``noise * 256 / data.length`` either way. ``regression``, ``law``, ``top``: weights of the
    loss; ``top_k``: tokens of its third part, 0: none. ``intermediate_size``: of the layer; 0: as
    the target's."""

    num_heads: int = 1
    decay: float = 1.0
    noise: float = 0.2
    regression: float = 1.0
    law: float = 0.1
    top: float = 1.0
    top_k: int = 0
    intermediate_size: int = 0
    teacher_share: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        for name in ("noise", "regression", "law", "top", "top_k", "intermediate_size"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least 0")


Config = EagleConfig


def make_eagle(config: EagleConfig, setting: frozen.Setting) -> frozen.Heads:
    """An EAGLE head for the target of a setting, freshly initialised."""
    target = setting.lm.target
    shape = eagle.EagleConfig(layer=layer_config(target.config, config.intermediate_size))
    drafter = eagle.Eagle(config=shape, target=target)
    size, scale = shape.hidden_size, hydra.scale_of(target, setting.lm.params)

    def outputs(params, target_params, rows):
        head, steps = drafter.heads(params), rows.steps(config.num_heads)
        read = rows.embedded(head, target, target_params, config.num_heads)
        read = [scale * x for x in read]
        outs = unroll(head, head.read(rows.states(0, steps)), read, rows.segments[:, :steps])
        return [(target.head_table(target_params), None, out) for out in outs]

    def rescaled(params, factor):
        fc = params["fc"]["weight"]
        return {**params, "fc": {**params["fc"], "weight": fc.at[:, :size].multiply(factor)}}

    return frozen.Heads(
        drafter=drafter,
        params=frozen.fresh(drafter, config.run.seed),
        outputs=outputs,
        publish=lambda params: rescaled(params, scale),
        unpublish=lambda params: rescaled(params, 1 / scale),
    )


def smooth_l1(x: jax.Array, y: jax.Array) -> jax.Array:
    """``d^2 / 2`` where ``d = |x - y| < 1``, else ``d - 1 / 2``."""
    distance = jnp.abs(x - y)
    return jnp.where(distance < 1, distance**2 / 2, distance - 0.5)


def make_loss(made: frozen.Heads, target, read, config: EagleConfig):
    """The loss of the module's head, as ``loop.Job`` takes it; ``frozen``'s measures stand."""
    cap = target.config.logit_softcap

    def loss(params, given, batch, key):
        rows = read(given["target"], batch)
        reach = config.noise * 512 / rows.hidden.shape[1]
        noise = reach * (jax.random.uniform(key, rows.hidden.shape) - 0.5)
        noisy = dataclasses.replace(rows, hidden=rows.hidden + noise)
        outputs = made.outputs(params, given["target"], noisy)
        laws = jax.nn.softmax(frozen.target_logits(target, given["target"], rows), axis=0)
        steps, terms = rows.steps(len(outputs)), {}
        for k, output in enumerate(outputs):
            weight, share = frozen.inside(rows, k, steps), config.decay**k
            apart = jnp.mean(smooth_l1(output[2], rows.states(1 + k, steps)), axis=0)
            terms[f"regression_{k + 1}"] = mean(apart, weight, config.regression * share)
            logs = jax.nn.log_softmax(frozen.logits_of(output, cap), axis=0)
            law = laws[:, :, 1 + k : 1 + k + steps].reshape(logs.shape)
            said = -jnp.sum(law * logs, axis=0)
            terms[f"head_{k + 1}"] = mean(said, weight, config.law * share)
            if config.top_k:
                most, where = jax.lax.top_k(law.T, config.top_k)
                said = -jnp.sum(most.T * jnp.take_along_axis(logs, where.T, axis=0), axis=0)
                terms[f"top_{k + 1}"] = mean(said, weight, config.top * share)
        return terms

    return loss


def run(config: EagleConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``."""
    setting = frozen.make_setting(config)
    made = make_eagle(config, setting)
    read = frozen.make_reader(setting.lm.config, setting.end_of_text)
    loss = make_loss(made, setting.lm.target, read, config)
    frozen.train(config, setting, made, dry_run=dry_run, loss=loss)
