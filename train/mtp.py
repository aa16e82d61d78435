"""Recipe ``mtp``: multi-token prediction modules on a frozen target.

    loss = sum_k beta_k * mean(-log q_k(token k + 1 places ahead)),   beta_k ~ decay ** k, sum 1

for K modules, or for one module that is applied K times (``share_layers``). A single module is
trained on its own outputs (see ``unroll.py``); FastMTP has ``decay=0.6``. Of distinct modules each
reads the output of the module before it for the true tokens; DeepSeek-V3 has ``decay=1``. With
``teacher_share=1`` the loss is against the target's law instead of the text.

References: DeepSeek-V3, 2412.19437, section 2.2; FastMTP, 2509.18362.
"""

from __future__ import annotations

import dataclasses

from specjax.drafters import mtp

from . import frozen, head_losses
from .rows import Heads, fresh
from .unroll import unroll


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPTrainingConfig(frozen.FrozenConfig):
    """The shape of an MTP module."""

    num_heads: int = 3  # the depth K of the unroll
    share_layers: bool = True  # one module serves every depth; else each depth has its own
    embedding_first: bool = True  # see specjax.drafters.mtp.MTPConfig
    normed_output: bool = False  # see specjax.drafters.mtp.MTPConfig
    decay: float = 0.6  # the loss of depth k is weighted by decay^k


Config = MTPTrainingConfig


def make_modules(target, config: mtp.MTPConfig, seed: int, norm=None) -> Heads:
    """Makes MTP modules for a ``CausalLM``; ``norm`` is the initial weight of their last norms."""
    drafter = mtp.MTP(config=config, target=target)

    def outputs(params, target_params, rows):
        head, depth = drafter.heads(params), config.num_modules
        steps = rows.steps(depth)
        read = rows.embedded(head, target, target_params, depth)
        hidden, segments = head.read(rows.states(0, steps)), rows.segments[:, :steps]
        outs = unroll(head, hidden, read, segments, config.num_stages)
        table, last = target.head_table(target_params), config.num_stages - 1
        ends = [head.ends_of(min(k, last)) for k in range(depth)]
        return [(table, None, own.norm(out)) for own, out in zip(ends, outs, strict=True)]

    return Heads(drafter, fresh(drafter, seed, norm=norm), outputs)


def make_mtp(config: MTPTrainingConfig, setting: frozen.Setting) -> Heads:
    """Makes MTP modules with initial weights for the target of a setting."""
    target = setting.lm.target
    shape = mtp.MTPConfig(
        layer=mtp.module_layer(target.config),
        num_modules=config.num_heads,
        share_layers=config.share_layers,
        embedding_first=config.embedding_first,
        normed_output=config.normed_output,
    )
    norm = setting.lm.params["norm"]["weight"][...]
    return make_modules(target, shape, config.run.seed, norm)


def weighted(losses, decay: float):
    """Returns the terms of the weighted mean of losses; module k (from 1) weighs ``decay ** k``."""
    return head_losses.shared(losses, decay, 1 / sum(decay ** (k + 1) for k in range(len(losses))))


def make_loss(made: Heads, target, read, config: MTPTrainingConfig):
    """Returns the loss of the modules for ``loop.TrainingTask``."""

    def loss(params, given, batch, keys):
        del keys
        rows = read(given["target"], batch)
        outputs = made.outputs(params, given["target"], rows)
        return weighted(
            head_losses.head_losses(outputs, target, given["target"], rows, config.teacher_share),
            config.decay,
        )

    return loss


def run(config: MTPTrainingConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``."""
    setting = frozen.make_setting(config)
    how = dict(make_loss=make_loss, make_measure=head_losses.make_mean_measure)
    frozen.train(config, setting, make_mtp(config, setting), dry_run=dry_run, **how)
