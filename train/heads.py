"""Recipe ``heads``: Medusa-1 or Blockwise heads on a frozen target, by cross-entropy of each head.

    loss = sum_k decay ** k * mean(-log q_k(token k + 1 places ahead)),   k = 1 ... K

The paper on Medusa has ``decay=0.8``, its released trainer the plain sum, ``decay=1``. The paper on
Blockwise has ``sample_head``: each step descends the loss of one head that is drawn at random.

References: Medusa, 2401.10774; Blockwise parallel decoding, 1811.03115.
"""

from __future__ import annotations

import dataclasses

import jax

from specjax.drafters import blockwise, medusa

from . import frozen, head_losses
from .config import ConfigError, check_unused
from .rows import Heads, fresh


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsConfig(frozen.FrozenConfig):
    """The shape of Medusa or Blockwise heads."""

    kind: str = "medusa"  # medusa or blockwise
    num_layers: int = 1  # residual blocks of a Medusa head
    tied: bool = True  # share the target's LM head; else each Medusa head begins with a copy
    trunk_size: int = 0  # of Blockwise's hidden layer; 0: num_heads times the hidden size
    sample_head: bool = False  # each step trains one head, drawn at random (Blockwise)

    def __post_init__(self):
        super().__post_init__()
        if self.kind not in MAKERS:
            raise ConfigError(f"kind={self.kind!r}; known: {', '.join(MAKERS)}")
        for name, least in (("num_layers", 1), ("trunk_size", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least {least}")
        for kind, names in (("medusa", ("num_layers", "tied")), ("blockwise", ("trunk_size",))):
            if self.kind != kind:
                check_unused(self, names, f"kind={self.kind} does not read it", f"give kind={kind}")
        if self.sample_head:
            reason = "with sample_head=true the losses of all heads weigh the same"
            check_unused(self, ("decay",), reason, "give sample_head=false")


Config = HeadsConfig


def make_medusa(config: HeadsConfig, setting: frozen.Setting) -> Heads:
    """Makes Medusa heads with initial weights for the target of a setting."""
    target = setting.lm.target
    shape = medusa.MedusaConfig(
        **setting.sizes,
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        tied=config.tied,
    )
    table = None if config.tied else target.head_table(setting.lm.params)
    drafter = medusa.Medusa(config=shape, target=target)

    def outputs(params, target_params, rows):
        heads = drafter.heads(params)
        steps = rows.steps(config.num_heads)
        states = heads.states(rows.states(0, steps))
        if heads.lm_heads is None:
            tables = [target.head_table(target_params)] * len(states)
        else:
            tables = [head.weight[...] for head in heads.lm_heads]
        return [(table, None, state) for table, state in zip(tables, states, strict=True)]

    params = fresh(drafter, config.run.seed, lm_head=table)
    return Heads(drafter, params, outputs, capped=config.tied)


def make_blockwise(config: HeadsConfig, setting: frozen.Setting) -> Heads:
    """Makes Blockwise heads with initial weights for the target of a setting."""
    target = setting.lm.target
    shape = blockwise.BlockwiseConfig(
        **setting.sizes,
        num_heads=config.num_heads,
        trunk_size=config.trunk_size or None,
    )
    drafter = blockwise.Blockwise(config=shape, target=target)

    def outputs(params, target_params, rows):
        heads = drafter.heads(params)
        states = heads.states(rows.states(0, rows.steps(config.num_heads)))
        return [(target.head_table(target_params), None, state) for state in states]

    return Heads(drafter, fresh(drafter, config.run.seed), outputs)


MAKERS = {"medusa": make_medusa, "blockwise": make_blockwise}


def make_sampled_loss(heads: Heads, target, read, config: HeadsConfig):
    """Returns Blockwise's loss: that of one random head a step, times the number of heads."""

    def loss(params, given, batch, keys):
        rows = read(given["target"], batch)
        outputs = heads.outputs(params, given["target"], rows)
        how = target, given["target"], rows, config.teacher_share
        losses = head_losses.head_losses(outputs, *how, capped=heads.capped)
        drawn = jax.random.randint(keys.step, (), 0, len(losses))
        terms = enumerate(losses)
        return {f"head_{k + 1}": x._replace(share=len(losses) * (drawn == k)) for k, x in terms}

    return loss


def make_sampled_measure(*given):
    """As ``head_losses.make_measure``, with the sum of the heads' losses as the held-out loss,
    which is the mean of ``make_sampled_loss`` over its draws."""
    measure = head_losses.make_measure(*given)

    def summed(*read):
        found = measure(*read)
        terms = {name: x._replace(share=1.0) for name, x in found["heldout_loss"].items()}
        return {**found, "heldout_loss": terms}

    return summed


def run(config: HeadsConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``."""
    setting = frozen.make_setting(config)
    heads = MAKERS[config.kind](config, setting)
    sampled = dict(make_loss=make_sampled_loss, make_measure=make_sampled_measure)
    frozen.train(config, setting, heads, dry_run=dry_run, **sampled if config.sample_head else {})
