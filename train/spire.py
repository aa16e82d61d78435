"""Recipe ``spire``: the target's last layers, over a window and a sink, with feedback memory.

    loss = mean over k = 1 ... K of  (1 - w) * -sum_x p log q_k  -  w * sum_x min(p, q_k)

Blocks and norm begin as copies of the target's last ``num_layers`` layers and of its last norm.
From each position K tokens are drafted, of which each is fed the text's own: the k-th reads the
target's hidden states up to that position and the drafter's memories after it, as in a round
(``drafters/spire.py``). ``p`` is the target's law after the true tokens; ``w`` is
``acceptance_share``.

The memory of a block begins as what the block itself reads, but for a tenth: then the drafter
begins as the plain copy of the target's last layers over a window.

Differs from the paper, which drafts from every K-th position of a row, here from each; its drafter
has embeddings and an LM head of its own that are trained too. What the mean of a memory begins with
is not said there.

References: SPIRe, 2504.06419 (w = 0.5, K = 4, two of eight layers, window 64, one sink).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.checkpoints.layers import check_layer
from specjax.drafters import spire
from specjax.models import remat
from specjax.models.config import DecoderConfig

from . import chunks, eagle3, frozen, head_losses, losses, prune, unroll
from .config import ConfigError
from .evaluate import Mean
from .rows import Heads, fresh

OWN_SHARE = 0.9  # of what a block itself reads, in its memory before training
BIASES = ("qk_norm", "qkv_bias", "o_bias", "mlp_bias")  # fields of DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SPIReTrainingConfig(frozen.FrozenConfig):
    """The shape of a SPIRe drafter, and its loss."""

    num_heads: int = spire.NUM_DRAFT  # the drafted tokens K of each position
    num_layers: int = 2  # how many of the target's last layers are copied
    window: int = spire.WINDOW  # the last tokens that a token sees
    sinks: int = spire.SINKS  # the first tokens of the text that it sees besides
    acceptance_share: float = 0.5  # w, the share of -sum min(p, q) in the loss
    decay: float = 1.0  # the paper's loss is the mean over all K
    teacher_share: float = 1.0  # always 1: the loss is against the target's law

    def __post_init__(self):
        super().__post_init__()
        if self.teacher_share != 1:
            raise ConfigError(
                f"teacher_share={self.teacher_share}: this loss is against the target's law; leave "
                "it out"
            )
        if not 0 <= self.acceptance_share <= 1:
            raise ConfigError(f"acceptance_share={self.acceptance_share}; accepted: 0 to 1")
        if self.num_layers < 1:
            raise ConfigError(f"num_layers={self.num_layers}; accepted: at least 1")
        if self.window <= self.num_heads:
            raise ConfigError(
                f"window={self.window}; accepted: more than num_heads={self.num_heads}, since a "
                "token sees those drafted before it"
            )
        if self.sinks < 0:
            raise ConfigError(f"sinks={self.sinks}; accepted: at least 0")


Config = SPIReTrainingConfig


def blocks_of(target: DecoderConfig, count: int) -> DecoderConfig:
    """Returns the shape of the last ``count`` layers of a target.

    Raises:
      ConfigError: the target has no more layers, or they are none that a drafter's file can hold.
    """
    if not count < target.num_layers:
        raise ConfigError(
            f"num_layers={count}; accepted: fewer than the {target.num_layers} layers of the target"
        )
    more = {name: getattr(target, name) for name in BIASES}
    own = dataclasses.replace(eagle3.layer_config(target), num_layers=count, **more)
    try:
        wanted = dataclasses.replace(
            target, num_layers=count, local_layers=None, cache_bits=None, logit_softcap=None
        )
        check_layer("the drafter", own, wanted, "take another target, or the recipe eagle3")
    except ValueError as error:
        raise ConfigError(f"teacher: {error}") from None
    return own


def check_target(config: SPIReTrainingConfig, target: DecoderConfig) -> None:
    """Raises ConfigError for a target whose layers no drafter can be made of."""
    reason = "the drafter consists of copies of the target's layers"
    way_out = "give another target, or take the recipe eagle3, eagle, block or heads"
    eagle3.check_rotation(config.teacher, target, reason, way_out)
    blocks_of(target, config.num_layers)


def make_spire(config: SPIReTrainingConfig, setting: frozen.Setting) -> Heads:
    """Makes a drafter of copies of the last layers of a setting's target."""
    lm, count = setting.lm, config.num_layers
    layers = blocks_of(lm.config, count)
    try:
        shape = spire.SPIReConfig(layers=layers, window=config.window, sinks=config.sinks)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    drafter = spire.SPIRe(config=shape, target=lm.target)
    first = lm.config.num_layers - count

    def outputs(params, target_params, rows):
        table = lm.target.head_table(target_params)
        states = states_of(drafter, params, target_params, rows, config.num_heads)
        return [(table, None, state) for state in states]

    every = {name: x for name, x in nnx.to_pure_dict(lm.params).items() if name in COPIED}
    params = fresh(drafter, config.run.seed)
    params |= prune.part_params(every, range(first, lm.config.num_layers))
    own = math.log(OWN_SHARE / (1 - OWN_SHARE) * count)
    params["memory"] = own * jnp.eye(count, count + 1, dtype=jnp.float32)
    return Heads(drafter, params, outputs, layers=drafter.features)


COPIED = ("blocks", "norm")  # of the target's weights


def states_of(drafter: spire.SPIRe, params, target_params, rows, steps: int) -> list[jax.Array]:
    """Returns the normed last states ``[H, B * T]`` of each of the tokens drafted.

    Args:
      drafter: the drafter, whose topology is not looked at.
      params, target_params: its weights, and those of the target.
      rows: text with the hidden states of the layers that it reads.
      steps: K, the tokens drafted from each position.
    """
    head, length = drafter.heads(params), rows.steps(steps)
    segments, (size, sinks) = (
        rows.segments[:, :length],
        (drafter.config.window, drafter.config.sinks),
    )
    batch = len(segments)
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segments.shape)
    states = [rows.states(0, length, layer) for layer in drafter.features]
    committed = head.entries(states, index)
    opens = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    begin = jax.lax.cummax(jnp.where(opens, index, 0), axis=1)  # of each token's document
    seen_always = index - begin < sinks

    def run(step, x, memory):
        """The last state of a step, and what is remembered of it by each block."""
        window = size - 1 - step, seen_always

        def attend(layer, query, *own):
            entries = [committed[layer], *(kept[layer] for kept in memory), own]
            return unroll.attend(query, entries, segments, window), None

        here = index + 1 + step
        states, _ = head.run(x, here, None, batch=batch, attend=attend)
        return head.norm(states[-1]), head.entries(head.memories(states), here)

    outs, memory = [], []
    for step in range(steps):
        tokens = rows.tokens[:, 1 + step : 1 + step + length]
        x = head.embed(tokens, drafter.target, target_params)
        out, kept = remat.layer(functools.partial(run, step))(x, memory)
        outs.append(out)
        memory = [*memory, kept]
    return outs


def loss_of(q, said: head_losses.Said, share: float) -> jax.Array:
    """The loss at each place for logits ``q``, with ``acceptance_share=share``."""
    nats = losses.soft_cross_entropy(said.law, q)
    return (1 - share) * nats - share * losses.overlap(said.law, q)


def make_loss(made: Heads, target, read, config: SPIReTrainingConfig):
    """Returns the loss of the drafted tokens for ``loop.TrainingTask``."""
    laws, cap = head_losses.Laws(target), target.config.logit_softcap

    def terms(output, states, said, _):
        table, bias = output
        q = chunks.logits_of(table, states, cap, bias)
        value = loss_of(q, said, config.acceptance_share)
        return {"loss": value, "acceptance": losses.overlap(said.law, q)}

    def loss(params, given, batch, keys):
        del keys
        rows = read(given["target"], batch)
        heads = head_losses.laid(made.outputs(params, given["target"], rows), rows)
        places, table = head_losses.places_of(rows), laws.table(given["target"])
        found = chunks.totals(terms, heads, table, places, common=laws.said)
        counts = [jnp.sum(head.weight) for head in heads]
        whole = sum(config.decay**k for k in range(len(heads)))
        terms_of = {}
        for k, ((nats, others), count) in enumerate(zip(found, counts, strict=True)):
            terms_of[f"head_{k + 1}"] = Mean(nats, count, config.decay**k / whole)
            terms_of[f"acceptance_{k + 1}"] = Mean(others["acceptance"], count, 0.0)
        return terms_of

    return loss


def make_measure(made: Heads, target, read, config: SPIReTrainingConfig):
    """Returns the measures of ``head_losses.make_mean_measure``, with the loss of the training."""
    own = functools.partial(loss_of, share=config.acceptance_share)
    return head_losses.make_mean_measure(made, target, read, config, loss_of=own)


def run(config: SPIReTrainingConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``."""
    last = lambda count: tuple(range(count - config.num_layers, count))  # noqa: E731
    setting = frozen.make_setting(config, last, functools.partial(check_target, config))
    made = make_spire(config, setting)
    how = dict(make_loss=make_loss, make_measure=make_measure)
    frozen.train(config, setting, made, dry_run=dry_run, **how)
