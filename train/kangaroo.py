"""Recipe ``kangaroo``: Kangaroo's adapter on the first layers of a frozen target.

    loss = mean over t of -sum_x p(x | tokens up to t) log q(x | tokens up to t)

``p`` is the target's law and ``q`` that of the adapter, which reads the hidden states after the
first ``exit`` layers. One adapter drafts every depth, and what it reads of a drafted token is what
it reads of a token of the text, so there is nothing to unroll. With ``teacher_share=0`` the loss is
the cross-entropy of the text.

The last norm of the adapter begins as the target's last norm. As with other heads, the first token
of a document predicts nothing: position ``t`` counts if token ``t - 1`` is of the same document.

References: Kangaroo, 2404.18911. The authors' trainer, whose loss this is, has AdamW at a constant
batch of 4 rows a device and clips gradients by value; here the optimizer is that of the config.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from specjax.drafters import kangaroo

from . import frozen
from .config import ConfigError
from .eagle3 import layer_config
from .rows import Heads, fresh
from .unroll import unroll


@dataclasses.dataclass(frozen=True, kw_only=True)
class KangarooTrainingConfig(frozen.FrozenConfig):
    """The shape of an adapter, and where it drafts."""

    exit: int = 2  # how many of the target's first layers run before the adapter
    threshold: float = kangaroo.THRESHOLD  # where a draft stops; it is saved beside the weights
    num_heads: int = 1  # always 1: one adapter drafts every depth
    decay: float = 1.0  # a factor on the whole loss, since there is one head
    teacher_share: float = 1.0  # share of the loss against the target's law, not the next token

    def __post_init__(self):
        super().__post_init__()
        if self.num_heads != 1:
            raise ConfigError(
                f"num_heads={self.num_heads}: one adapter drafts every depth; leave it out"
            )
        if self.exit < 1:
            raise ConfigError(f"exit={self.exit}; accepted: at least 1")
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold={self.threshold}; accepted: 0 to 1")


Config = KangarooTrainingConfig


def make_kangaroo(config: KangarooTrainingConfig, setting: frozen.Setting) -> Heads:
    """Makes an adapter with initial weights for the target of a setting.

    Raises:
      ConfigError: the target has no layer after the exit, or no attention whose sizes an adapter
        could take.
    """
    target, exit = setting.lm.target, config.exit
    if exit >= target.num_layers:
        raise ConfigError(
            f"exit={exit}: {setting.lm.name} has {target.num_layers} layers, and some must follow "
            f"the exit; accepted: 1 to {target.num_layers - 1}"
        )
    shape = kangaroo.KangarooConfig(layer=layer_config(target.config))
    drafter = kangaroo.Kangaroo(config=shape, target=target, layer=exit, threshold=config.threshold)

    def outputs(params, target_params, rows):
        head = drafter.heads(params)
        batch, length, _ = rows.hidden.shape
        (out,) = unroll(head, rows.states(0, length, exit), [None], rows.segments[:, :length])
        after = out.reshape(-1, batch, length)[:, :, 1:]  # the token before predicts the root
        return [(target.head_table(target_params), None, head.norm(after.reshape(len(out), -1)))]

    norm = setting.lm.params["norm"]["weight"][...]
    norm = jnp.float32(1 + norm if target.config.norm_plus_one else norm)
    return Heads(
        drafter=drafter,
        params=fresh(drafter, config.run.seed, norm=norm),
        outputs=outputs,
        layers=(exit,),
    )


def run(config: KangarooTrainingConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``."""
    setting = frozen.make_setting(config, lambda count: (config.exit,))
    frozen.train(config, setting, make_kangaroo(config, setting), dry_run=dry_run)
