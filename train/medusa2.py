"""Recipe ``medusa2``: Medusa's heads and their target trained together.

    loss = -log p(next token)  +  head_weight * sum_k decay ** k * (-log q_k(token k + 1 further))

For ``head_warmup`` steps the heads alone move, so that their first, large gradients do not reach
the target; from then on its weights move too, at ``target_share`` of the rates. The result is
ANOTHER target, exported to ``run.folder/target``, and heads that belong to it alone.

References: Medusa, 2401.10774, section 2.2.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import specjax

from . import card, decoding, export, frozen, heads, report, scale, tokenizer
from .config import ConfigError, resolved
from .evaluate import make_evaluate, mean
from .loop import Job, estimate, fit

TARGET = "target"  # the folder, within the run's, that the target is exported to


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa2Config(heads.HeadsConfig):
    """``head_weight``: lambda_0. ``head_warmup``: steps. ``target_share``: of the rates."""

    head_weight: float = 0.2
    head_warmup: int = 100
    target_share: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        for name in ("head_weight", "target_share"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}={value}; accepted: above 0, and finite")
        if self.head_warmup < 0:
            raise ConfigError(f"head_warmup={self.head_warmup}; accepted: at least 0")
        if self.features:
            raise ConfigError(
                f"features={self.features!r}: a target that learns has other hidden states at each "
                "step; leave features out"
            )
        if self.kind != "medusa" or self.sample_head or self.teacher_share:
            raise ConfigError(
                f"kind={self.kind!r}, sample_head={self.sample_head}, teacher_share="
                f"{self.teacher_share}: this recipe is Medusa-2's; leave them out"
            )


Config = Medusa2Config


def slowed(optimizer, share: float, warmup: int) -> optax.GradientTransformation:
    """``optimizer``, its updates of ``params["target"]`` times ``share``, and zero for ``warmup``
    steps."""

    def init(params):
        return jnp.int32(0)

    def update(updates, count, params=None):
        factor = jnp.where(count < warmup, 0.0, share)
        target = jax.tree.map(lambda x: factor * x, updates["target"])
        return {**updates, "target": target}, count + 1

    return optax.chain(optimizer, optax.GradientTransformation(init, update))


def next_token_loss(target, params, rows):
    """``-log p(next token)`` of the target itself, ``[B, L]``."""
    logits = frozen.target_logits(target, params, rows)
    said = jnp.take_along_axis(logits, rows.tokens[None, :, 1:], axis=0)[0]
    return jax.nn.logsumexp(logits, axis=0) - said


def make_loss(made: frozen.Heads, target, read, config: Medusa2Config):
    """The loss of the module's head, as ``loop.Job`` takes it, over both."""

    def loss(params, given, batch, key):
        del given, key  # nothing is frozen, nothing drawn
        rows = read(params["target"], batch)
        nats = next_token_loss(target, params["target"], rows)
        outputs = made.outputs(params["drafter"], params["target"], rows)
        losses = frozen.head_losses(outputs, target, params["target"], rows, 0.0)
        terms = frozen.shared(losses, config.decay, config.head_weight)
        return {"target_loss": mean(nats, rows.weight), **terms}

    return loss


def make_measure(made: frozen.Heads, target, read, config: Medusa2Config):
    """The heads' measures, and the target's own loss, which joint training must not spoil."""
    measure_heads = frozen.make_measure(made, target, read, config)

    def measure(params, given, tokens, weight):
        del given
        own = {"target": params["target"]}
        rows = read(params["target"], tokens)
        found = measure_heads(params["drafter"], own, tokens, weight)
        found["target_loss"] = mean(next_token_loss(target, params["target"], rows), weight)
        return found

    return measure


def run(config: Medusa2Config, *, dry_run: bool = False) -> None:
    """Trains both, draws the curves, exports the target and its heads."""
    setting = frozen.make_setting(config)
    lm, target = setting.lm, setting.lm.target
    made = heads.make_medusa(config, setting)
    read = frozen.make_reader(lm.config, setting.end_of_text, gradient=True)
    cheap = make_evaluate(make_measure(made, target, read, config), setting.sets)
    mesh = scale.layout_of(config.run).mesh
    decoded = decoding.make_decoded(lm, made.drafter, setting.prompts, config.decoding, mesh)

    def evaluate(params, given):
        return cheap(params, given) | decoded(params["target"], params["drafter"])

    job = Job(
        loss=make_loss(made, target, read, config),
        params={
            "target": frozen.in_float32(nnx.to_pure_dict(lm.params)),
            "drafter": frozen.starting_params(config, lm, made),
        },
        batches=setting.batches,
        evaluate=evaluate,
        best=frozen.best_of(config),
        adjust=lambda optimizer: slowed(optimizer, config.target_share, config.head_warmup),
    )
    if dry_run:
        words = f"{frozen.describe(setting, made)}, and its target"
        return estimate(job, config.optimizer, config.run, words)
    params = fit(job, resolved(config), config.optimizer, config.run)
    folder = Path(config.run.folder)
    vocabulary = tokenizer.load(config.data.tokenizer)
    export.export(lm.config, params["target"], folder / TARGET, vocabulary)
    trained = specjax.load(folder / TARGET)
    own = card.Export(folder / TARGET, card.TARGET, "target", resolved(config))
    report.finish(config, own)
    frozen.export_heads(folder, trained, made.drafter, params["drafter"])
    frozen.finish(config, trained, made.drafter, params["drafter"], setting.prompts)
