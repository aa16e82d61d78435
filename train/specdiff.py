"""Recipe ``specdiff``: a masked diffusion drafter on a frozen target, from random anchors.

    random    t uniform in (0, 1), place k a mask with probability t:   w_k = 1 / t at the masks
    suffix    c uniform in 0 ... K - 1, place k a mask if k > c:        w_k = K / k at the masks
    loss = mean over places of  w_k * exp(-(k - 1) / decay_length) * -log q_k(token a + k)

``random`` is the objective of MDLM within a block of K places after an anchor a, with its
log-linear noise: the sum over masks, weighted by 1 / t, bounds the negative log-likelihood of the
block from above. The ratios t of a row are spread evenly over its blocks. ``suffix`` shows the
drafter nothing but what it is shown from left to right, tokens and then masks; each place counts as
much as in ``random`` on average. ``glancing`` is how SpecDec's drafter learns to fill in a block at
once: a pass without a gradient over masks alone counts the m places whose best token is not the
text's, floor(c m) random places of the block then show the text's token, and w_k = 1, in a mean
over the places that are still masks; c falls from 0.5 to 0.3. ``all`` is the loss of the recipe
``block``, with its weightings: with ``weighting=streak`` and ``init=`` a trained drafter it is
SpecDiff-2's distillation.

Places that are no masks hold the text's token, unless it belongs to another document. Blocks,
anchors and ``teacher_share`` are those of the recipe ``block``, and so are the held-out measures,
which fill in all masks in one pass; ``decoded_tau`` is measured with the passes of ``steps``,
``order`` and ``schedule``, which are exported.

Differs from MDLM: places far from the anchor count less by ``decay_length``, since a token after
one that was rejected is of no use (``decay_length=1000`` leaves that out); there is no average of
the weights.

References: SpecDiff, 2408.05636; MDLM, 2406.07524; SpecDiff-2, 2511.00606; SpecDec, 2203.16487 and
github.com/hemingkx/SpecDec (glancing).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from specjax.drafters.block import BlockConfig
from specjax.drafters.specdiff import ORDERS, SCHEDULES, SpecDiff, check_settings

from . import block, chunks, frozen, streaks
from .config import ConfigError
from .evaluate import Mean
from .rows import Heads, fresh

MASKINGS = ("random", "suffix", "glancing", "all")
LEAST = 1e-3  # the least ratio of masks, and the probability of no mask where the ratio is 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecDiffTrainingConfig(block.BlockTrainingConfig):
    """Which places are masks, and the passes that the drafter is exported with."""

    masking: str = "random"  # which places are masks: random (MDLM), suffix, glancing, or all
    steps: int = 2  # passes of a round
    order: str = "left-to-right"  # in which they fill in masks; or confidence
    schedule: str = "even"  # how many masks each fills in: even, or cosine (few at first)

    def __post_init__(self):
        super().__post_init__()
        if self.masking not in MASKINGS:
            raise ConfigError(f"masking={self.masking!r}; known: {', '.join(MASKINGS)}")
        if self.weighting != "decay" and self.masking != "all":
            raise ConfigError(
                f"weighting={self.weighting!r} with masking={self.masking!r}: it weighs blocks of "
                "which all places are masks; give masking=all, or weighting=decay"
            )
        try:
            check_settings(self.steps, self.order, self.schedule, self.num_heads)
        except ValueError as error:
            raise ConfigError(str(error)) from None


Config = SpecDiffTrainingConfig


def make_specdiff(config: SpecDiffTrainingConfig, setting: frozen.Setting) -> Heads:
    """Makes a SpecDiff drafter with initial weights for the target of a setting.

    Its ``outputs`` take anchors and ``shown`` as further arguments, see ``block.states_of``.
    """
    target = setting.lm.target
    shape = block.shape_of(config, setting)
    drafter = SpecDiff(
        config=BlockConfig(**shape, block_size=config.num_heads + 1),
        target=target,
        steps=config.steps,
        order=next(name for name in ORDERS if name == config.order),
        schedule=next(name for name in SCHEDULES if name == config.schedule),
    )

    def outputs(params, target_params, rows, anchors, shown=None):
        states = block.states_of(drafter, params, target_params, rows, anchors, shown)
        return [(target.head_table(target_params), None, state) for state in states]

    return Heads(
        drafter, fresh(drafter, config.run.seed), outputs, layers=drafter.config.target_layers
    )


def masked(keys: jax.Array, count: int, places: int, masking: str) -> tuple[jax.Array, jax.Array]:
    """Which places are masks, and their weights.

    Args:
      keys: ``[B]``, one of each row.
      count: A, blocks of a row.
      places: K, of a block, without the anchor's.
      masking: ``"random"`` or ``"suffix"``.

    Returns:
      bool ``[B, A, K]`` and float32 ``[B, A, K]``; the weight of what is no mask is 0.
    """

    def of_row(key):
        first, second = jax.random.split(key)
        if masking == "suffix":
            seen = jax.random.randint(first, (count, 1), 0, places)
            place = 1 + jnp.arange(places)
            masks = place > seen
            return masks, jnp.broadcast_to(places / place, masks.shape)
        spread = jax.random.uniform(first) + jnp.arange(count) / count
        ratio = (LEAST + (1 - LEAST) * (spread % 1))[:, None]
        uniform = jax.random.uniform(second, (count, places))
        return uniform < (1 - LEAST) * ratio, 1 / ratio

    masks, weight = jax.vmap(of_row)(keys)
    return masks, jnp.where(masks, weight, 0.0)


def glanced(keys: jax.Array, first, share: jax.Array, cap: float | None):
    """Which places are still masks after a glance at the text, and their weights, as ``masked``.

    Args:
      keys: ``[B]``, one of each row.
      first: a head for each place, of blocks that hold masks alone.
      share: float32 scalar, how many places are shown for each that is wrong.
      cap: of the target's logits.
    """

    def right(q, tokens):
        return jnp.argmax(q, axis=-1) == tokens

    hit = jnp.moveaxis(streaks.of_text(first, cap, right), 0, 2)
    fits = jnp.stack([head.weight for head in first], axis=2) > 0
    count = jnp.floor(share * jnp.sum(fits & ~hit, axis=2, keepdims=True))
    noise = jax.vmap(lambda key: jax.random.uniform(key, hit.shape[1:]))(keys)
    before = fits[:, :, None, :] & (noise[:, :, None, :] < noise[:, :, :, None])
    masks = ~(fits & (jnp.sum(before, axis=3) < count))
    return masks, masks.astype(jnp.float32)


def make_loss(made: Heads, target, read, config: SpecDiffTrainingConfig):
    """Returns the loss of blocks of which some places are masks, for ``loop.TrainingTask``."""
    if config.masking == "all":
        return block.make_loss(made, target, read, config)
    terms_of, places = block.make_terms(target, config), config.num_heads

    def loss(params, given, batch, keys):
        rows = read(given["target"], batch)
        anchors = block.drawn_anchors(keys, rows, config)
        others = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys.rows)  # than the anchors'
        if config.masking == "glancing":
            still = jax.lax.stop_gradient(params)
            first = block.laid(made.outputs(still, given["target"], rows, anchors), rows, anchors)
            share = 0.5 - 0.2 * jnp.minimum(1, keys.number / config.run.steps)
            masks, weights = glanced(others, first, share, target.config.logit_softcap)
        else:
            masks, weights = masked(others, config.num_anchors, places, config.masking)
        shown = shown_to(rows, anchors, masks)
        outputs = made.outputs(params, given["target"], rows, anchors, shown)
        heads = block.laid(outputs, rows, anchors)
        own = [head.weight * weights[..., k] for k, head in enumerate(heads)]
        weighted = [head._replace(weight=x) for head, x in zip(heads, own, strict=True)]
        law = target.head_table(given["target"]) if config.teacher_share else None
        total, counted, terms = 0.0, 0.0, {}
        for k, (nats, _) in enumerate(chunks.totals(terms_of, weighted, law)):
            decay = math.exp(-k / config.decay_length)
            terms[f"mask_{k + 1}"] = Mean(nats, jnp.sum(weighted[k].weight), 0.0)
            learned = weighted if config.masking == "glancing" else heads
            total, counted = total + decay * nats, counted + decay * jnp.sum(learned[k].weight)
        return {"loss": Mean(total, counted), **terms}

    return loss


def shown_to(rows, anchors, masks) -> jax.Array:
    """Returns bool ``[B, A, 1 + K]``: the anchor's place, and those in its document that are no
    ``masks``, bool ``[B, A, K]``."""
    document = block.at(rows.segments, anchors)[:, :, None]
    batch, count, places = masks.shape
    where = anchors[:, :, None] + 1 + jnp.arange(places)
    own = block.at(rows.segments, where.reshape(batch, -1)).reshape(masks.shape)
    shown = (own == document) & ~masks
    return jnp.concatenate([jnp.ones((batch, count, 1), bool), shown], axis=2)


def run(config: SpecDiffTrainingConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``."""
    block.run_blocks(config, make_specdiff, make_loss, dry_run=dry_run)
