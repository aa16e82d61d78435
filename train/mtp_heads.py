"""Recipe ``mtp_heads``: Meta's parallel heads of multi-token prediction, alone or with the target.

    loss = weighted mean over k of  -log q_k(token k + 1 places ahead),   weights decay ** k

Each head is a Transformer layer on the target's trunk, the hidden states that the target's last
layer reads, so that the target's own last layer is the first head of the paper. The heads are
differentiated one after the other (``in_turn.py``), so that the activations of one head are in
memory at a time, whatever their number.

With ``with_target=true`` the target learns too, as in the paper: its own loss is added, the
gradients of all heads flow into its trunk, and the result is ANOTHER target, exported to
``run.folder/target``, and heads for this target only. (The paper trains from the beginning:
``target_share=1 head_warmup=0 head_weight=K decay=1`` for K heads is its loss.) Otherwise the
target is frozen, and ``teacher_share=1`` learns its law instead of the text.

References: Gloeckle et al., Better & Faster Large Language Models via Multi-token Prediction,
2404.19737.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.drafters.mtp_heads import MTPHeadsConfig, ParallelHeads, over_rows
from specjax.models.config import DecoderConfig

from . import chunks, frozen, head_losses, joint
from .config import ConfigError, check_unused
from .eagle3 import check_rotation, layer_config
from .evaluate import Mean
from .in_turn import in_turn
from .rows import Heads, fresh, in_float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPHeadsTrainingConfig(joint.JointConfig):
    """The shape of parallel heads, and whether the target learns with them."""

    num_heads: int = 3  # layers that predict the tokens after the next one
    decay: float = 1.0  # the loss of head k is weighted by decay^k
    copied: bool = True  # heads begin as copies of the target's last layer
    intermediate_size: int = 0  # of their layers; 0: the target's, the only size of a copy
    with_target: bool = False  # the target learns too, see joint.py; three fields are about that
    head_weight: float = 1.0  # the weight of the heads' loss beside the target's own

    def __post_init__(self):
        super().__post_init__()
        if self.intermediate_size < 0:
            raise ConfigError(f"intermediate_size={self.intermediate_size}; accepted: at least 0")
        if self.with_target:
            return self.check_joint()
        names = ("head_weight", "head_warmup", "target_share")
        check_unused(self, names, "the target stays as it is", "give with_target=true")


Config = MTPHeadsTrainingConfig
# what a layer computes beyond its weights, as ``layer_config`` leaves it at its default
UNWEIGHTED = ("norm", "norm_plus_one", "parallel_residual", "gated_mlp", "rotary_fraction")
UNWEIGHTED += ("rope_interleaved", "query_scalar", "score_softcap")


def check_target(config: MTPHeadsTrainingConfig, target: DecoderConfig) -> None:
    """Raises ConfigError for a target whose last layer heads cannot begin as copies of."""
    if not config.copied:
        return
    reason = "with copied=true the heads begin as copies of the target's last layer"
    check_rotation(config.teacher, target, reason, "give copied=false")
    head, last = layer_config(target, config.intermediate_size), target.num_layers - 1
    wrong = {name: getattr(target, name) for name in UNWEIGHTED}
    wrong = {name: value for name, value in wrong.items() if value != getattr(head, name)}
    if wrong.get("query_scalar") == target.head_dim:  # as by default
        wrong.pop("query_scalar")
    if target.is_local(last):
        if target.local_rope_theta not in (None, target.rope_theta):
            wrong["local_rope_theta"] = target.local_rope_theta
        if target.window < config.data.length:
            wrong["window"] = target.window
    if wrong:
        found = ", ".join(f"{name}={value}" for name, value in wrong.items())
        raise ConfigError(
            f"copied=true: the last layer of teacher={config.teacher!r} computes something else "
            f"with its weights than a head, which is a plain Llama layer: it has {found}; give "
            "copied=false"
        )


def make_heads(config: MTPHeadsTrainingConfig, setting: frozen.Setting) -> Heads:
    """Makes parallel heads for the target of a setting.

    Raises:
      ConfigError: the heads cannot be copies of the target's last layer.
    """
    target = setting.lm.target
    layers = layer_config(target.config, config.intermediate_size)
    shape = MTPHeadsConfig(layers=dataclasses.replace(layers, num_layers=config.num_heads))
    drafter = ParallelHeads(config=shape, target=target)
    params = fresh(drafter, config.run.seed)
    if config.copied:
        params = copied(params, setting.lm.params)

    def outputs(params, target_params, rows):
        module, table = drafter.heads(params), target.head_table(target_params)
        read, steps = rows.layers[drafter.layer], rows.steps(config.num_heads)
        found = []
        for block in module.layers.blocks:
            state = over_rows(shape, block, read, rows.segments[:, :-1])
            state = module.layers.norm(state).reshape(len(state), len(read), -1)[:, :, :steps]
            found.append((table, None, state.reshape(len(state), -1)))
        return found

    return Heads(drafter, params, outputs, layers=drafter.features)


def copied(params, target_params):
    """Returns the weights of heads with those of the target's last layer and its last norm."""

    def pure(x):
        return in_float32(nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x)

    own, theirs = params["layers"], target_params["blocks"]
    last, norm = pure(theirs[max(theirs)]), pure(target_params["norm"])
    made = {"blocks": {k: last for k in own["blocks"]}, "norm": norm}
    shapes = [jax.tree.map(jnp.shape, x) for x in (own, made)]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            "copied=true: the target's last layer has other weights than a head, which is a plain "
            "Llama layer of intermediate_size; give copied=false"
        )
    return {**params, "layers": jax.tree.map(jnp.array, made)}


def head_terms(made: Heads, target, params, target_params, rows, config) -> dict[str, Mean]:
    """Returns the terms of the heads' loss: ``heads``, their weighted mean, and each for the log.

    With ``with_target``, gradients flow into the states that the heads read, and into the LM head.
    """
    drafter, count = made.drafter, config.num_heads
    module, steps = drafter.heads(params), rows.steps(count)
    blocks = [nnx.split(block) for block in module.layers.blocks]
    norm_graph, norm = nnx.split(module.layers.norm)
    block_graph, laws = blocks[0][0], head_losses.Laws(target)
    cap, share = target.config.logit_softcap, config.teacher_share
    weights = jnp.stack([head_losses.inside(rows, k, steps) for k in range(count)])
    scales = config.decay ** jnp.arange(1.0, count + 1)
    read, table = rows.layers[drafter.layer], target.head_table(target_params)
    shared = {"norm": norm, "read": read, "table": table}
    # what no gradient is needed for is computed without one
    given = {} if config.with_target else {name: shared.pop(name) for name in ("read", "table")}
    given |= {"rows": rows, "law": table if share else None}

    def terms_of(table, states, law, pieces):
        q = chunks.logits_of(table, states, cap)
        return {"loss": head_losses.nats(q, laws.said(law, pieces), share)}

    def loss_of(own, shared, each, fixed):
        weight, scale, k = each
        seen, rows = fixed | shared, fixed["rows"]
        state = over_rows(
            drafter.config, nnx.merge(block_graph, own), seen["read"], rows.segments[:, :-1]
        )
        state = nnx.merge(norm_graph, seen["norm"])(state).T.reshape(*seen["read"].shape)

        def cut(x, offset):
            return jax.lax.dynamic_slice_in_dim(x, offset + k, steps, axis=1)

        pieces = {"next": cut(rows.tokens, 2)} | ({"hidden": cut(rows.hidden, 1)} if share else {})
        total, _ = chunks.total(
            terms_of, seen["table"], state[:, :steps], fixed["law"], pieces, weight
        )
        return scale * total, total

    own = jax.tree.map(lambda *x: jnp.stack(x), *[state for _, state in blocks])
    each = weights, scales, jnp.arange(count)
    total, totals = in_turn(loss_of, own, shared, each, given)
    counts = jnp.sum(weights, axis=(1, 2))
    terms = {f"head_{k + 1}": Mean(totals[k], counts[k], 0.0) for k in range(count)}
    return {"heads": Mean(total, jnp.sum(scales * counts)), **terms}


def make_loss(made: Heads, target, read, config: MTPHeadsTrainingConfig):
    """Returns the loss of heads on a frozen target for ``loop.TrainingTask``."""

    def loss(params, given, batch, keys):
        del keys
        rows = read(given["target"], batch)
        return head_terms(made, target, params, given["target"], rows, config)

    return loss


def run(config: MTPHeadsTrainingConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``, and a target beside it."""
    check = functools.partial(check_target, config)
    setting = frozen.make_setting(config, lambda count: (count - 1,), check)
    made = make_heads(config, setting)
    measure = head_losses.make_mean_measure
    if config.with_target:
        how = dict(dry_run=dry_run, make_heads_measure=measure)
        joint.train(config, setting, made, head_terms, **how)
    else:
        how = dict(make_loss=make_loss, make_measure=measure)
        frozen.train(config, setting, made, dry_run=dry_run, **how)
