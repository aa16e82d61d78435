"""Recipe ``medusa2``: Medusa's heads and their target trained together (see ``joint.py``).

    loss = -log p(next token)  +  head_weight * sum_k decay ** k * (-log q_k(token k + 1 further))

References: Medusa, 2401.10774, section 2.2.
"""

from __future__ import annotations

import dataclasses

from . import frozen, head_losses, heads, joint
from .config import ConfigError
from .evaluate import Mean
from .rows import Heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Medusa2Config(joint.JointConfig, heads.HeadsConfig):
    """The settings of Medusa-2."""

    def __post_init__(self):
        super().__post_init__()
        self.check_joint()
        if self.kind != "medusa" or self.sample_head:
            raise ConfigError(
                f"kind={self.kind!r}, sample_head={self.sample_head}: this recipe is Medusa-2's; "
                "leave them out"
            )


Config = Medusa2Config


def head_terms(made: Heads, target, params, target_params, rows, config) -> dict[str, Mean]:
    """Returns the terms of the heads' loss, for ``joint.make_loss``."""
    outputs = made.outputs(params, target_params, rows)
    means = head_losses.head_losses(outputs, target, target_params, rows, 0.0, capped=made.capped)
    return head_losses.shared(means, config.decay)


def run(config: Medusa2Config, *, dry_run: bool = False) -> None:
    """Trains target and heads, draws the curves, and exports both."""
    setting = frozen.make_setting(config)
    made = heads.make_medusa(config, setting)
    joint.train(config, setting, made, head_terms, dry_run=dry_run)
