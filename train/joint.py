"""Trains heads and their target together, for the recipes ``medusa2`` and ``mtp_heads``.

    loss = -log p(next token)  +  head_weight * (the loss of the heads)

For ``head_warmup`` steps only the heads are trained, so that their first, large gradients do not
change the target. After that the target is trained too, at ``target_share`` of the learning rates.
The result is ANOTHER target, exported to ``run.folder/target``, and heads for this target only.
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

from . import (
    card,
    chunks,
    decoding,
    export,
    frozen,
    head_export,
    head_losses,
    losses,
    report,
    scale,
    tokenizer,
)
from .config import ConfigError, resolved
from .evaluate import Mean, make_evaluate, mean
from .loop import TrainingTask, estimate, fit
from .rows import Heads, in_float32, make_reader

TARGET = "target"  # the folder within run.folder to which the target is exported


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointConfig(frozen.FrozenConfig):
    """The settings of joint training."""

    head_weight: float = 0.2  # the weight of the heads' loss beside the target's own
    head_warmup: int = 100  # steps in which the heads alone are trained
    target_share: float = 0.1  # the learning rate of the target, as a share of the heads'

    def check_joint(self) -> None:
        """Raises ``ConfigError`` where a target that learns cannot be trained so."""
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
        if self.teacher_share:
            raise ConfigError(
                f"teacher_share={self.teacher_share}: a target that learns is no teacher; leave "
                "teacher_share out"
            )


def slowed(optimizer, share: float, warmup: int) -> optax.GradientTransformation:
    """Multiplies the optimizer's updates of ``params["target"]`` by ``share``.

    In the first ``warmup`` steps these updates are zero.
    """

    def init(params):
        return jnp.int32(0)

    def update(updates, count, params=None):
        factor = jnp.where(count < warmup, 0.0, share)
        target = jax.tree.map(lambda x: factor * x, updates["target"])
        return {**updates, "target": target}, count + 1

    return optax.chain(optimizer, optax.GradientTransformation(init, update))


def make_nats(target):
    """Returns ``nats(params, rows)``, the arguments of ``chunks`` for the target's own loss.

    Its term ``loss`` is ``-log p(next token)`` in nats at each position.
    """

    def terms(table, states, _, tokens):
        logits = chunks.logits_of(table, states, target.config.logit_softcap)
        return {"loss": losses.cross_entropy(logits, tokens)}

    def nats(params, rows):
        return terms, target.head_table(params), rows.hidden, None, rows.tokens[:, 1:]

    return nats


def make_loss(made: Heads, target, read, config: JointConfig, head_terms):
    """Returns the loss of target and heads for ``loop.TrainingTask``.

    Args:
      made, target, read, config: as of ``frozen.train``.
      head_terms: ``head_terms(made, target, params, target params, rows, config) -> {name: Mean}``,
        the terms of the heads' loss.
    """
    nats = make_nats(target)

    def loss(params, given, batch, keys):
        del given, keys  # there are no frozen parameters and no draws
        rows = read(params["target"], batch)
        own, _ = chunks.total(*nats(params["target"], rows), rows.weight)
        terms = head_terms(made, target, params["drafter"], params["target"], rows, config)
        terms = {n: x._replace(share=config.head_weight * x.share) for n, x in terms.items()}
        return {"target_loss": Mean(own, jnp.sum(rows.weight)), **terms}

    return loss


def make_measure(
    made: Heads, target, read, config: JointConfig, make_heads_measure=head_losses.make_measure
):
    """Returns the measures of the heads and the target's own loss, which should not rise.

    ``make_heads_measure`` makes the former, with the heads' loss as it is trained.
    """
    measure_heads, nats = make_heads_measure(made, target, read, config), make_nats(target)

    def measure(params, given, tokens, weight):
        del given
        own = {"target": params["target"]}
        rows = read(params["target"], tokens)
        found = measure_heads(params["drafter"], own, tokens, weight)
        values = chunks.each(*nats(params["target"], rows))
        return found | {"target_loss": mean(values["loss"], weight)}

    return measure


def train(
    config: JointConfig,
    setting,
    made: Heads,
    head_terms,
    *,
    dry_run: bool,
    make_heads_measure=head_losses.make_measure,
) -> None:
    """Trains target and heads, draws the curves, and exports both.

    Args:
      config: the configuration of the recipe.
      setting: the target and the text, see ``frozen.make_setting``.
      made: the heads.
      head_terms: see ``make_loss``.
      dry_run: print the estimates alone.
      make_heads_measure: see ``make_measure``.
    """
    lm, target = setting.lm, setting.lm.target
    read = make_reader(lm.config, setting.end_of_text, made.layers, gradient=True)
    measure = make_measure(made, target, read, config, make_heads_measure)
    cheap = make_evaluate(measure, setting.sets)
    mesh = scale.layout_of(config.run).mesh
    decoded = decoding.make_decoded(lm, made.drafter, setting.prompts, config.decoding, mesh)

    def evaluate(params, given):
        return cheap(params, given) | decoded(params["target"], params["drafter"])

    start = {
        "target": in_float32(nnx.to_pure_dict(lm.params)),
        "drafter": frozen.starting_params(config, lm, made),
    }
    task = TrainingTask(
        loss=make_loss(made, target, read, config, head_terms),
        params=start,
        batches=setting.batches,
        evaluate=evaluate,
        measures=lambda: [*cheap.names(start, None), *decoding.names(setting.prompts)],
        best=frozen.best_of(config),
        adjust=lambda optimizer: slowed(optimizer, config.target_share, config.head_warmup),
    )
    if dry_run:
        words = f"{frozen.describe(setting, made)}, and its target"
        return estimate(task, config.optimizer, config.run, words)
    params = fit(task, resolved(config), config.optimizer, config.run)
    folder = Path(config.run.folder)
    source = config.data.tokenizer
    vocabulary = tokenizer.load(source)
    export.export(lm.config, params["target"], folder / TARGET, vocabulary, source=source)
    trained = specjax.load(folder / TARGET)
    own = card.Export(folder / TARGET, card.TARGET, "target", resolved(config))
    report.finish(config, own)
    head_export.export_heads(folder, trained, made.drafter, params["drafter"])
    head_export.finish(config, trained, made.drafter, params["drafter"], setting.prompts)
