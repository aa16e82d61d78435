"""The optimizer and its schedule."""

from __future__ import annotations

import jax
import optax
from optax import contrib

from .config import OptimizerConfig


def schedule(peak: float, config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns a linear warm-up, a plateau, and a linear decay to zero at the last step.

    With the plateau a run can be prolonged: ``run.steps`` changes no rate before the decay begins
    (warmup-stable-decay, 2404.06395).
    """
    decay_from = max(config.warmup, steps - round(steps * config.decay_share))
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, config.warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, max(1, steps - decay_from)),
        ],
        [config.warmup, decay_from],
    )


def _is_hidden_matrix(path, leaf) -> bool:
    """Whether Muon trains a parameter: a matrix that is neither an embedding nor an LM head."""
    name = jax.tree_util.keystr(path)
    return leaf.ndim == 2 and "embedding" not in name and "lm_head" not in name


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Returns clipping, then Muon (weights ``[out, in]``) with AdamW for the rest, or AdamW."""
    adam_rate = schedule(config.adam_rate, config, steps)
    if config.name == "adamw":
        update = optax.adamw(adam_rate, b2=0.95, weight_decay=config.weight_decay)
    else:
        shape = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)

        def dimensions(params):
            return jax.tree_util.tree_map_with_path(
                lambda path, leaf: shape if _is_hidden_matrix(path, leaf) else None, params
            )

        update = contrib.muon(
            schedule(config.rate, config, steps),
            weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=dimensions,
            adam_learning_rate=adam_rate,
            adam_b2=0.95,
        )
    return optax.chain(optax.clip_by_global_norm(config.clip), update)
