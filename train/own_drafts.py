"""Blocks that hold a drafter's own drafts, scored by the target (on-policy distillation).

    x_1 ... x_{K-1}   what the drafter drafts after an anchor: x_k is drawn from q_k at temperature
                      T, or is the most probable token of q_k at T = 0; q_k is given x_1 ... x_{k-1}
    p_k               the target's law after the row up to the anchor and x_1 ... x_{k-1}
    s_k               the chance that x_k is accepted: min(1, p_k(x_k) / q_k(x_k)) at T; at T = 0
                      whether x_k is the target's most probable token
    weight of place k = sg(prod_{i < k} s_i),    0 after a drafted end of text

``sg`` stops the gradient; none flows through drafting either. Places after a rejection have no
weight, since no round reaches them. At T = 1 the mean over drafts of ``prod_{i < k} s_i (1 -
TV(q_k, p_k))`` is the probability that k tokens of a draft are accepted.

The drafts are a tree over the row: the target's pass over the row gives its keys and values, and
one further pass scores the blocks of all anchors, each of which sees the row before its anchor and
its own earlier tokens.

Differs from Draft-OPD: anchors are drawn at random, where Draft-OPD replays the places at which a
verification rejected; whole laws are compared, where its code estimates divergences from the
drafted tokens; and places after a rejection do not count, which its code gives weights that fall
with the distance from the rejection.

References: Draft-OPD, arXiv 2605.29343; github.com/bingyang-lei/Draft-OPD.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.causal_lm import graph_definition

from . import block, chunks
from .config import ConfigError
from .evaluate import Mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnDraftsConfig(block.BlockTrainingConfig):
    """A block drafter that may be trained on its own drafts."""

    on_policy: float = 0.0  # share of the anchors after which the drafter's own drafts stand
    temperature: float = 1.0  # at which they are drawn; 0: its most probable tokens

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.on_policy <= 1 or not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"on_policy={self.on_policy}, temperature={self.temperature}; accepted: 0 to 1, "
                "and at least 0 and finite"
            )
        if not self.on_policy:
            if self.temperature != 1:
                raise ConfigError(
                    f"temperature={self.temperature} with on_policy=0, which drafts nothing: leave "
                    "it out, or give a share of anchors such as on_policy=0.5"
                )
            return
        if not self.own_anchors:
            raise ConfigError(
                f"on_policy={self.on_policy} of num_anchors={self.num_anchors} is less than one "
                "anchor: give a larger share or more anchors, or 0"
            )
        if self.features:
            raise ConfigError(
                f"on_policy={self.on_policy} with features={self.features!r}: the target must "
                "score the drafts of each step, and stored hidden states are of the text alone; "
                "leave features out, or give on_policy=0"
            )
        if self.weighting != "decay":
            raise ConfigError(
                f"on_policy={self.on_policy} with weighting={self.weighting!r}: own drafts are "
                "weighted by the chance that the target accepts them; leave weighting out, or give "
                "on_policy=0"
            )

    @property
    def own_anchors(self) -> int:
        """How many anchors of a row have own drafts."""
        return round(self.on_policy * self.num_anchors)

    @property
    def reads_law(self) -> bool:
        """Whether the loss reads the target's law, as that of own drafts does."""
        return super().reads_law or self.on_policy > 0


def make_lay(config: OwnDraftsConfig, setting, outputs, logits_of=chunks.logits_of):
    """Returns ``rows.Heads.lay`` for blocks of which the first anchors hold own drafts.

    Args:
      config: of the recipe.
      setting: see ``frozen.Setting``.
      outputs: as of ``rows.Heads``, with a further argument ``chosen``: ``chosen(k, output of place
        k) -> int32 [B, A]`` is called once for each place but the last, and returns the tokens of
        place k, which the next place reads.
      logits_of: ``logits_of(table, states [B, D, F])``, the logits ``[B, D, V]`` of the law from
        which the drafter drafts.
    """
    target, count = setting.lm.target, config.own_anchors
    graphdef, last = graph_definition(setting.lm.config), setting.lm.config.num_layers
    temperature, cap = config.temperature, target.config.logit_softcap

    def lay(params, target_params, rows, anchors, keys):
        own, drafts, log_q = anchors[:, :count], [block.at(rows.tokens, anchors[:, :count])], []
        draw = jax.vmap(lambda key: jax.random.uniform(key, (config.num_heads, count)))
        uniform = draw(jax.vmap(jax.random.fold_in, (0, None))(keys, 1))

        def chosen(k, output):
            tokens, said = drafted(output, anchors, uniform[:, k], temperature, logits_of)
            drafts.append(tokens)
            log_q.append(said)
            text = block.at(rows.tokens, anchors[:, count:] + 1 + k)
            return jnp.concatenate([tokens, text], axis=1)

        masks = block.laid(outputs(params, target_params, rows, anchors, chosen), rows, anchors)
        tokens = jnp.stack(drafts, axis=2)
        hidden = scored(graphdef, target_params, rows, own, tokens, last)
        table = target.head_table(target_params)
        accepted = chances(table, hidden, tokens, jnp.stack(log_q, axis=2), temperature, cap)
        goes_on = tokens[:, :, 1:] != setting.end_of_text
        alive = jnp.cumprod(accepted * goes_on, axis=2)
        first = block.at(rows.weight, own)
        alive = jnp.concatenate([first[..., None], first[..., None] * alive], axis=2)
        is_own = jnp.broadcast_to(jnp.arange(anchors.shape[1]) < count, anchors.shape)
        found = [
            of_drafts(head, is_own, hidden[:, :, k], alive[:, :, k]) for k, head in enumerate(masks)
        ]
        survived = {
            f"survived_{k}": Mean(jnp.sum(alive[:, :, k]), jnp.sum(first), 0.0)
            for k in range(1, len(masks))
        }
        return found, survived

    return lay


def of_drafts(head: chunks.Head, own: jax.Array, hidden: jax.Array, weight: jax.Array):
    """Returns a place of ``block.laid`` with own drafts at its first anchors.

    Args:
      head: the place, over the anchors ``[B, A]``.
      own: bool ``[B, A]``, which anchors have own drafts; a further piece of the place.
      hidden: ``[B, D, F]``, the target's states of these anchors, whose laws are learned.
      weight: float32 ``[B, D]``, the weights of these anchors.
    """
    count, pieces = hidden.shape[1], head.pieces
    states = jnp.concatenate([hidden, pieces["hidden"][:, count:]], axis=1)
    weight = jnp.concatenate([weight, head.weight[:, count:]], axis=1)
    return head._replace(pieces=pieces | {"hidden": states, "own": own}, weight=weight)


def drafted(output, anchors, uniform, temperature: float, logits_of) -> tuple[jax.Array, jax.Array]:
    """Returns the drafter's own tokens of a place, and the logarithms of their probabilities.

    Args:
      output: ``(table, None, state [F, B * A])`` of the place.
      anchors: int32 ``[B, A]``.
      uniform: float32 ``[B, D]`` in [0, 1); tokens of the first D anchors are drawn.
      temperature: T; 0: the most probable tokens, each with the probability 1.
      logits_of: see ``make_lay``; tokens of the logit -inf are not drawn.

    Returns:
      int32 and float32 ``[B, D]``, without a gradient.
    """
    table, _, state = jax.lax.stop_gradient(output)
    states = state.reshape(len(state), *anchors.shape).transpose(1, 2, 0)

    def terms(table, states, _, uniform):
        logits = logits_of(table, states)
        if not temperature:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), jnp.zeros(uniform.shape)
        log_q = jax.nn.log_softmax(logits / temperature)
        below = jnp.cumsum(jnp.exp(log_q), axis=-1)
        reached = (below > uniform[..., None] * below[..., -1:]) & (log_q > -jnp.inf)
        tokens = jnp.argmax(reached, axis=-1).astype(jnp.int32)
        # where the sums, which are rounded, reach the number at no token that has a probability
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        tokens = jnp.where(jnp.any(reached, axis=-1), tokens, best)
        return tokens, of_tokens(log_q, tokens)

    return chunks.each(terms, table, states[:, : uniform.shape[1]], None, uniform)


def of_tokens(x: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the entries ``[...]`` of ``x [..., V]`` at int32 ``tokens [...]``."""
    return jnp.take_along_axis(x, tokens[..., None], axis=-1)[..., 0]


def scored(graphdef, params, rows, anchors, tokens, last: int) -> jax.Array:
    """Returns the target's last hidden states ``[B, D, K, F]`` over blocks of tokens.

    Args:
      graphdef, params: the target.
      rows: with ``entries``.
      anchors: int32 ``[B, D]``, the positions of the first tokens of the blocks.
      tokens: int32 ``[B, D, K]``.
      last: the number of the target's layers.
    """
    batch, count, size = tokens.shape
    positions, sees = block.places_of(rows, anchors, size)
    place = jnp.tile(jnp.arange(size), count)
    is_later = jnp.pad(place[:, None] > place, ((rows.hidden.shape[1], 0), (0, 0)))
    model, flat = nnx.merge(graphdef, params), tokens.reshape(batch, -1)
    how = dict(taps=(last,), earlier=rows.entries)
    _, found, _ = model.hidden(flat, positions, sees & ~is_later, **how)
    return jax.lax.stop_gradient(found).reshape(batch, count, size, -1)


def chances(table, hidden, tokens, log_q, temperature: float, cap: float | None) -> jax.Array:
    """Returns the chances that the tokens after the first of each block are accepted.

    Args:
      table: the target's LM head.
      hidden: ``[B, D, K, F]``, see ``scored``.
      tokens: int32 ``[B, D, K]``.
      log_q: float32 ``[B, D, K - 1]``, the logarithms of their probabilities in the drafter.
      temperature: T.
      cap: of the target's logits.

    Returns:
      float32 ``[B, D, K - 1]``.
    """

    def terms(table, states, _, pieces):
        logits, token, said = chunks.logits_of(table, states, cap), *pieces
        if not temperature:
            return (jnp.argmax(logits, axis=-1) == token).astype(jnp.float32)
        log_p = of_tokens(jax.nn.log_softmax(logits / temperature), token)
        return jnp.exp(jnp.minimum(log_p - said, 0.0))

    def flat(x):
        return x.reshape(len(x), -1, *x.shape[3:])

    pieces = flat(tokens[:, :, 1:]), flat(log_q)
    found = chunks.each(terms, table, flat(hidden[:, :, :-1]), None, pieces)
    return found.reshape(log_q.shape)
