"""Recipe ``block``: a DFlash block drafter on a frozen target, from random anchors.

    loss = mean over anchors a, weighted, of  -log q_k(token a + k),   k = 1 ... block_size - 1,
    the weight of k being exp(-(k - 1) / decay_length), or by another ``weighting`` (``streaks.py``)

An anchor is a token in the place of a round's root. Its block is the anchor and masks, which see
each other and the target's features before the anchor, and nothing after it. Each row of text has
``num_anchors`` anchors, drawn anew in each step and computed in one pass. They are drawn with
replacement, where the authors draw 256 to 512 without. ``teacher_share`` works as for other heads:
the loss is against the target's law instead of the text.

References: DFlash, 2602.06036.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from specjax.drafters import block

from . import chunks, frozen, head_losses, streaks
from .config import ConfigError
from .eagle3 import layer_config
from .evaluate import Mean, mean
from .rows import Heads, fresh


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnchorConfig(frozen.FrozenConfig):
    """The weights of a loss of blocks after random anchors."""

    num_anchors: int = 32  # blocks per row and step
    decay_length: float = 7.0  # place k of a block is weighted by exp(-(k - 1) / decay_length)
    weighting: str = "decay"  # of places: by decay_length; by accepted streaks: d-pace, streak, ...
    streak_temperature: float = 1.0  # at which drafts will be drawn; divides logits in streaks
    pace_floor: float = streaks.PACE_FLOOR  # alpha of d-pace: 0: as streak, 1: place k by K+1-k
    TEXT: ClassVar[tuple[str, float]] = "teacher_share", 0.0  # where the loss is the text's alone

    def __post_init__(self):
        super().__post_init__()
        streaks.check(self.weighting, self.pace_floor, self.streak_temperature)
        streaks.check_text(self.weighting, self.TEXT[0], vars(self)[self.TEXT[0]], self.TEXT[1])
        if self.decay != frozen.FrozenConfig.decay:
            raise ConfigError(
                f"decay={self.decay}: places of blocks are weighted by decay_length; leave it out"
            )
        if self.num_anchors < 1:
            raise ConfigError(f"num_anchors={self.num_anchors}; accepted: at least 1")
        if not 0 < self.decay_length < math.inf:
            raise ConfigError(f"decay_length={self.decay_length}; accepted: above 0, and finite")

    @property
    def reads_law(self) -> bool:
        """Whether the loss reads the target's law."""
        return self.teacher_share > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockTrainingConfig(AnchorConfig):
    """The shape of a block drafter."""

    num_heads: int = 7  # the masks of a block, which has one token more
    num_layers: int = 2  # layers of the drafter
    layers: tuple[int, ...] = ()  # layers whose hidden states are read; []: up to five, spread
    mask_token: int = -1  # whose embedding is a mask's; -1: an unused row, else end of text
    intermediate_size: int = 0  # of its layers; 0: the target's
    causal: bool = False  # whether a place sees only the places before it, as in JetSpec

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("num_layers", 1), ("intermediate_size", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least {least}")
        if len({*self.layers}) < len(self.layers):
            raise ConfigError(f"layers={list(self.layers)}: each layer is read once; name it once")


Config = BlockTrainingConfig


def make_block(config: BlockTrainingConfig, setting: frozen.Setting) -> Heads:
    """Makes a block drafter with initial weights for the target of a setting.

    Its ``outputs`` take anchors as a further argument, see ``states_of``.
    """
    target = setting.lm.target
    shape = block.BlockConfig(**shape_of(config, setting), block_size=config.num_heads + 1)
    drafter = block.BlockDrafter(config=shape, target=target)

    def outputs(params, target_params, rows, anchors):
        states = states_of(drafter, params, target_params, rows, anchors)
        return [(target.head_table(target_params), None, state) for state in states]

    params = fresh(drafter, config.run.seed)
    return Heads(drafter, params, outputs, layers=shape.target_layers)


def layers_of(config: AnchorConfig, count: int) -> tuple[int, ...]:
    """Returns the layers of a target with ``count`` layers whose hidden states a drafter reads;
    none for recipes whose drafters read the last layer alone."""
    if not isinstance(config, BlockTrainingConfig):
        return ()
    return config.layers or block.usual_layers(count)


def shape_of(config: BlockTrainingConfig, setting: frozen.Setting) -> dict:
    """Returns the shape of a block drafter for ``BlockConfig``, without the size of a block."""
    layers = layer_config(setting.lm.target.config, config.intermediate_size)
    # layers of the published layout have norms of queries and keys
    own = dict(num_layers=config.num_layers, qk_norm=True, model_type="qwen3")
    return dict(
        layers=dataclasses.replace(layers, **own),
        mask_token=frozen.mask_of(config.mask_token, setting),
        target_layers=layers_of(config, setting.lm.config.num_layers),
        causal=config.causal or None,
    )


def check_uncapped(config: frozen.FrozenConfig, target) -> None:
    """Raises ``ConfigError`` for a target that caps its logits, to which corrections would be added
    before the cap."""
    if target.config.logit_softcap is not None:
        raise ConfigError(
            f"teacher={config.teacher!r} caps its logits, which this recipe cannot train on; take "
            "the recipe block"
        )


def wide_table(target, target_params, more: jax.Array | None, spare: int) -> jax.Array:
    """Returns the LM head and further columns side by side, ``[V, H + R + spare]``.

    The logits of a corrected place are then one product, with its state and what corrects it.

    Args:
      target, target_params: whose LM head it is.
      more: ``[V, R]``, the table of the correction; None: there is none.
      spare: the number of columns of zeros, for numbers of a state that are no part of its logits.
    """
    head = target.head_table(target_params)
    parts = [head, *([] if more is None else [more.astype(head.dtype)])]
    return jnp.concatenate([*parts, jnp.zeros((len(head), spare), head.dtype)], axis=1)


def states_of(drafter, params, target_params, rows, anchors, shown=None) -> list[jax.Array]:
    """Returns the normed states ``[H, B * A]`` of each place that drafts; see ``blocks_of``."""
    return drafting(drafter, blocks_of(drafter, params, target_params, rows, anchors, shown))


def drafting(drafter, blocks: jax.Array) -> list[jax.Array]:
    """Returns the states ``[H, B * A]`` of each place that drafts, of ``[H, B, A, size]``."""
    first, size = int(not drafter.config.from_root), drafter.config.block_size
    return [blocks[..., k].reshape(len(blocks), -1) for k in range(first, size)]


def blocks_of(drafter, params, target_params, rows, anchors, shown=None) -> jax.Array:
    """Returns the normed states ``[H, B, A, size]`` of all places of blocks.

    ``anchors``: int32 ``[B, A]``. ``shown``: bool ``[B, A, size]``, the places which hold the
    text's token and no mask; None: the first, that of the root.

    The scores of A blocks over a row, ``[B, T + A * size, A * size]``, are in memory at once.
    """
    shape, (batch, count) = drafter.config, anchors.shape
    size, place = shape.block_size, jnp.arange(shape.block_size)
    if shown is None:
        tokens, shown = at(rows.tokens, anchors)[:, :, None], place == 0
    else:
        tokens = at(rows.tokens, (anchors[:, :, None] + place).reshape(batch, -1))
        tokens = tokens.reshape(batch, count, size)
    tokens = jnp.where(shown, tokens, shape.mask_token).reshape(batch, -1)
    positions, sees = places_of(rows, anchors, size)
    module = drafter.heads(params)
    read = jnp.concatenate([rows.layers[i] for i in shape.target_layers], axis=2)
    entries = module.entries(read, positions[:, : rows.hidden.shape[1]])
    states = module(tokens, positions, sees, drafter.target, target_params, earlier=entries)
    return states.reshape(-1, batch, count, size)


def places_of(rows, anchors, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns where A blocks of ``size`` places are, and what they see.

    Args:
      rows: of T positions.
      anchors: int32 ``[B, A]``, the position of the first place of each block.
      size: the number of places.

    Returns:
      positions int32 ``[B, T + A * size]``, of the rows and then of the blocks; and bool ``[B, T +
      A * size, A * size]``: a place sees what is before its anchor in the document of the anchor,
      and all places of its block.
    """
    (batch, count), length = anchors.shape, rows.hidden.shape[1]
    index, place = (jnp.arange(n, dtype=jnp.int32) for n in (length, size))
    here = (anchors[:, :, None] + place).reshape(batch, -1)
    positions = jnp.concatenate([jnp.broadcast_to(index, (batch, length)), here], axis=1)
    document = jnp.take_along_axis(rows.segments, anchors, axis=1)  # below [B, key, query]
    before = (index[:, None] < anchors[:, None]) & (
        rows.segments[:, :length, None] == document[:, None]
    )
    before = jnp.repeat(before, size, axis=2)
    own = jnp.repeat(jnp.arange(count), size)
    own = jnp.broadcast_to(own[:, None] == own, (batch, count * size, count * size))
    return positions, jnp.concatenate([before, own], axis=1)


def at(x: jax.Array, places: jax.Array) -> jax.Array:
    """Returns ``x [B, T, ...]`` at ``places`` int32 ``[B, A]``, ``[B, A, ...]``."""
    index = places.reshape(*places.shape, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1)


def laid(outputs, rows, anchors) -> list[chunks.Head]:
    """Returns a head for each mask, over all anchors.

    The weight is 0 unless the anchor and the tokens up to the predicted one are in one document,
    and all tokens after the anchor up to that one count, as those of a round do: in a conversation
    a block ends where the part that is learned ends.
    """
    document, found = at(rows.segments, anchors), []
    counts = jnp.ones(anchors.shape, bool)
    for k, (table, bias, state) in enumerate(outputs):
        states = state.reshape(len(state), *anchors.shape).transpose(1, 2, 0)
        piece = {"next": at(rows.tokens, anchors + 1 + k), "hidden": at(rows.hidden, anchors + k)}
        fits = at(rows.segments, anchors + k) == document
        weight = at(rows.weight, anchors + k)
        counts &= weight > 0
        weight = fits * counts * weight
        found.append(chunks.Head((table, bias), states, piece, weight))
    return found


def make_terms(target, config: AnchorConfig):
    """Returns the function ``terms`` of ``chunks.totals`` for a place of a block."""
    laws, cap = head_losses.Laws(target), target.config.logit_softcap

    def terms_of(output, states, law, pieces):
        table, bias = output
        q = chunks.logits_of(table, states, cap, bias) / config.streak_temperature
        return {"loss": head_losses.nats(q, laws.said(law, pieces), config.teacher_share)}

    return terms_of


def drawn_anchors(keys, rows, config: AnchorConfig) -> jax.Array:
    """Returns int32 ``[B, A]``: random anchors after which a row has room for a block, and the next
    token counts; in rows in which no token does, any."""
    size, room = config.num_anchors, rows.hidden.shape[1] - config.num_heads
    counts = rows.weight[:, :room] > 0
    order = jnp.argsort(~counts, axis=1, stable=True).astype(jnp.int32)  # those that count first
    most = jnp.sum(counts, axis=1)
    most = jnp.where(most > 0, most, room)
    draw = jax.vmap(lambda key, most: jax.random.randint(key, (size,), 0, most, jnp.int32))
    return at(order, draw(keys.rows, most))


def make_loss(
    made: Heads,
    target,
    read,
    config: AnchorConfig,
    terms=make_terms,
    moving=None,
    text_logits=lambda config, target: None,
):
    """Returns the loss of blocks after random anchors for ``loop.TrainingTask``.

    Args:
      made, target, read, config: as of ``head_losses.make_loss``.
      terms: as ``make_terms``; other terms than ``loss`` are logged.
      moving: ``moving(config, number) -> {name: [N]}``, numbers that depend on the step, which the
        terms find at each place among its pieces, ``[B, C, N]``; None: there are none.
      text_logits: ``text_logits(config, target)`` returns what ``streaks.of_text`` takes as
        ``logits_of``.
    """
    terms_of = terms(target, config)

    def loss(params, given, batch, keys):
        rows = read(given["target"], batch)
        anchors = drawn_anchors(keys, rows, config)
        if made.lay is None:
            outputs = made.outputs(params, given["target"], rows, anchors)
            masks, logged = laid(outputs, rows, anchors), {}
        else:
            masks, logged = made.lay(params, given["target"], rows, anchors, keys.rows)
        if moving is not None:
            found = {
                name: jnp.broadcast_to(x, (*anchors.shape, len(x)))
                for name, x in moving(config, keys.number).items()
            }
            masks = [head._replace(pieces=head.pieces | found) for head in masks]
        law = target.head_table(given["target"]) if config.reads_law else None
        if config.weighting != "decay":
            cap, said = target.config.logit_softcap, text_logits(config, target)
            return streaks.loss_of(masks, terms_of, law, config, cap, said)
        total, counted, terms = 0.0, 0.0, logged
        for k, (nats, others) in enumerate(chunks.totals(terms_of, masks, law)):
            weight, count = math.exp(-k / config.decay_length), jnp.sum(masks[k].weight)
            seen = {"mask": nats, **others}
            terms |= {f"{name}_{k + 1}": Mean(x, count, 0.0) for name, x in seen.items()}
            total, counted = total + weight * nats, counted + weight * count
        return {"loss": Mean(total, counted), **terms}

    return loss


def make_measure(made: Heads, target, read, config: AnchorConfig):
    """Returns measures as ``head_losses.make_measure``, at anchors evenly spread over each row."""
    laws, cap = head_losses.Laws(target), target.config.logit_softcap

    def terms_of(tables, states, law, pieces):
        """Returns for each mask its loss, and whether its best token is the target's."""
        found = []
        for (table, bias), state, piece in zip(tables, states, pieces, strict=True):
            q, said = chunks.logits_of(table, state, cap, bias), laws.said(law, piece)
            hit = jnp.argmax(q, axis=-1) == said.best
            found.append((head_losses.nats(q, said, config.teacher_share), hit))
        return found

    def measure(params, given, tokens, weight):
        rows = read(given["target"], {"tokens": tokens, "weight": weight})
        room = rows.hidden.shape[1] - config.num_heads
        anchors = jnp.linspace(0, room - 1, config.num_anchors).astype(jnp.int32)
        anchors = jnp.broadcast_to(anchors, (len(tokens), len(anchors)))
        masks = laid(made.outputs(params, given["target"], rows, anchors), rows, anchors)
        tables, states, pieces, fits = zip(*masks, strict=True)
        law = target.head_table(given["target"])
        alive = counted = tau = jnp.ones(anchors.shape)
        scales = [math.exp(-k / config.decay_length) for k in range(len(masks))]
        found, terms = {}, {}
        values = chunks.each(terms_of, tables, states, law, pieces, chunk=chunks.SEVERAL)
        for k, (nats, hit) in enumerate(values):
            found[f"accuracy_{k + 1}"] = mean(hit, fits[k])
            alive, counted, tau = alive * hit, counted * fits[k], tau + alive * hit
            terms[f"mask_{k + 1}"] = mean(nats, fits[k], scales[k] / sum(scales))  # as in the loss
        found["greedy_tau"] = mean(tau, counted)
        return {"heldout_loss": terms, **found}

    return measure


def run_blocks(
    config: AnchorConfig, make, make_loss=make_loss, *, dry_run: bool, make_settle=None
) -> None:
    """Trains what ``make(config, setting)`` makes on blocks after anchors, draws the curves,
    exports to ``run.folder/model``. ``make_settle(config, setting)`` makes ``settle`` of
    ``frozen.train``."""
    setting = frozen.make_setting(config, functools.partial(layers_of, config))
    how = dict(make_loss=make_loss, make_measure=make_measure)
    how["settle"] = make_settle and make_settle(config, setting)
    frozen.train(config, setting, make(config, setting), dry_run=dry_run, **how)


def run(config: BlockTrainingConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``."""
    run_blocks(config, make_block, dry_run=dry_run)
