"""Recipe ``eagle``: EAGLE's head on a frozen target, by regression on its features; and HASS's.

    loss = sum_k decay ** (k - 1) * (regression * SmoothL1(f'_k, f) + law * -sum_x p(x) log q_k(x)
                                     + top * -sum_{x in top K of p} p(x) log q_k(x))

Here ``f'`` is the head's feature, ``f`` the target's (its last hidden state, normed), and ``q`` the
law of the target's LM head on ``f'``. EAGLE has one step, uniform noise on the features that it
reads, and no third term. HASS reads its own features in further steps, as it does when it drafts,
by the unroll of EAGLE-3 (``unroll.py``): ``num_heads=3 top_k=10 noise=0``. Gradients flow through
all steps.

In training the head reads embeddings at the scale of hidden states; the exported weights contain
that factor (see ``hydra.py``).

References: EAGLE, 2401.15077; HASS, 2408.15766.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax.drafters import eagle

from . import chunks, frozen, head_losses, hydra, losses
from .config import ConfigError
from .eagle3 import layer_config
from .evaluate import Mean, mean
from .rows import Heads, fresh
from .unroll import unroll


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleTrainingConfig(frozen.FrozenConfig):
    """The shape of an EAGLE-1 or HASS head, and the weights of its loss."""

    num_heads: int = 1  # the steps of the unroll; 1 is EAGLE-1
    decay: float = 1.0  # the loss of step k is weighted by decay^(k - 1)
    noise: float = 0.2  # features are shifted by up to noise * 256 / data.length
    regression: float = 1.0  # the weight of the regression onto the features
    law: float = 0.1  # the weight of the cross-entropy against the target's law
    top: float = 1.0  # the weight of the loss over the top_k tokens
    top_k: int = 0  # the target's most likely tokens in that loss; 0: none
    intermediate_size: int = 0  # of the layer; 0: the target's
    teacher_share: float = 1.0  # share of the target's law in the held-out loss alone; see law, top

    def __post_init__(self):
        super().__post_init__()
        for name in ("noise", "regression", "law", "top", "top_k", "intermediate_size"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least 0")


Config = EagleTrainingConfig


def make_eagle(config: EagleTrainingConfig, setting: frozen.Setting) -> Heads:
    """Makes an EAGLE head with initial weights for the target of a setting."""
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

    return Heads(
        drafter=drafter,
        params=fresh(drafter, config.run.seed),
        outputs=outputs,
        publish=lambda params: rescaled(params, scale),
        unpublish=lambda params: rescaled(params, 1 / scale),
    )


def smooth_l1(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns ``d^2 / 2`` where ``d = |x - y| < 1``, else ``d - 1 / 2``."""
    distance = jnp.abs(x - y)
    return jnp.where(distance < 1, distance**2 / 2, distance - 0.5)


def make_terms(target, config: EagleTrainingConfig):
    """Returns the terms of a head, and ``common``, both for ``chunks.totals``."""
    laws, cap = head_losses.Laws(target), target.config.logit_softcap

    def common(table, pieces):
        law = laws.said(table, pieces).law
        return law, jax.lax.top_k(law, config.top_k) if config.top_k else None

    def terms(output, states, seen, _):
        (table, bias), (law, top) = output, seen
        logits = chunks.logits_of(table, states, cap, bias)
        found = {"head": losses.soft_cross_entropy(law, logits)}
        if top:
            most, where = top
            own = jnp.take_along_axis(logits, where, axis=-1)
            own = own - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            found["top"] = -jnp.sum(most * own, axis=-1)
        share = {"head": config.law, "top": config.top}
        return {"loss": sum(share[name] * value for name, value in found.items()), **found}

    return terms, common


def make_loss(made: Heads, target, read, config: EagleTrainingConfig):
    """The loss of the module's head, in the form of ``TrainingTask.loss``.

    The term ``laws_k`` is the sum of the two terms of step k that compare with the target's law,
    ``head_k`` and ``top_k``. The held-out measures are those of ``head_losses``.
    """
    terms_of, common = make_terms(target, config)

    def loss(params, given, batch, keys):
        rows = read(given["target"], batch)
        reach = config.noise * 512 / rows.hidden.shape[1]
        draw = jax.vmap(lambda key: jax.random.uniform(key, rows.hidden.shape[1:]))
        noise = reach * (draw(keys.rows) - 0.5)
        noisy = dataclasses.replace(rows, hidden=rows.hidden + noise)
        outputs = made.outputs(params, given["target"], noisy)
        laid, table = head_losses.laid(outputs, rows), target.head_table(given["target"])
        pieces = head_losses.places_of(rows)
        found = chunks.totals(terms_of, laid, table, pieces, common=common)
        steps, terms = rows.steps(len(outputs)), {}
        for k, (output, (law, parts)) in enumerate(zip(outputs, found, strict=True)):
            weight, share = head_losses.inside(rows, k, steps).reshape(-1), config.decay**k
            apart = jnp.mean(smooth_l1(output[2], rows.states(1 + k, steps)), axis=0)
            terms[f"regression_{k + 1}"] = mean(apart, weight, config.regression * share)
            count = jnp.sum(weight)
            terms[f"laws_{k + 1}"] = Mean(law, count, share)
            for name, value in parts.items():
                terms[f"{name}_{k + 1}"] = Mean(value, count, 0.0)
        return terms

    return loss


def run(config: EagleTrainingConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``."""
    setting = frozen.make_setting(config)
    frozen.train(config, setting, make_eagle(config, setting), dry_run=dry_run, make_loss=make_loss)
