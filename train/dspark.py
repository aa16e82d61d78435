"""Recipe ``dspark``: a DSpark drafter on a frozen target, from random anchors.

    loss = weighted mean over places of  ce_share * -log q(token) + (1 - ce_share) * |q - p|_1
           + confidence_weight * BCE(c, 1 - TV(q, p)),     TV = |q - p|_1 / 2

``p`` is the target's law after the true tokens and ``q`` the drafter's, given the true token before
each place; ``c`` is the chance that the confidence head states, which learns from q as it is. The
k-th place is weighted by exp(-(k - 1) / decay_length), or with ``ce_share=1`` by another
``weighting`` (``streaks.py``), which then weighs the confidence head's loss too. Blocks and anchors
are those of the recipe ``block``, but that the place of the anchor predicts too.

With ``on_policy``, a share of the anchors is followed by the drafter's own drafts instead of the
text (``own_drafts.py``). There p and q are the laws after these drafts, the cross-entropy is that
of the tokens that the target would draw, ``-sum_x p(x) log q(x)``, and a place is also weighted by
the chance that all drafted tokens before it are accepted.

At the end of a run the temperatures of the chances are fitted on the held-out rows of the corpus,
so that products of chances say how often drafts survive (``calibrate.py``); ``scaled_for`` says at
which temperature of the drafts.

References: DSpark, 2607.05147; github.com/deepseek-ai/DeepSpec (whose weights these are).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specjax._internal.optional import required
from specjax.drafters.dspark import DSpark, DSparkConfig
from specjax.drafters.markov import KINDS

from . import block, calibrate, chunks, frozen, head_losses, losses, own_drafts
from .config import ConfigError, check_unused
from .rows import Heads, fresh

SCALED = ("drawn", "greedy", "nothing")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkTrainingConfig(own_drafts.OwnDraftsConfig):
    """The two heads of DSpark, and the weights of its loss."""

    num_heads: int = 7  # the places of a block, all of which draft
    markov: str = "vanilla"  # the kind of Markov head: vanilla, gated or rnn
    markov_rank: int = 256  # the rank of its tables
    decay_length: float = 4.0  # place k of a block is weighted by exp(-(k - 1) / decay_length)
    ce_share: float = 0.1  # share of the cross-entropy of the text, beside the distance of laws
    confidence_weight: float = 1.0  # weight of the confidence head's loss; 0: there is no such head
    scaled_for: str = "drawn"  # chances, by temperatures: drawn (T = 1), greedy (T = 0) or nothing
    teacher_share: float = 1.0  # always 1: the drafter learns the target's law
    TEXT = "ce_share", 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.markov not in KINDS:
            raise ConfigError(f"markov={self.markov!r}; known: {', '.join(KINDS)}")
        if self.scaled_for not in SCALED:
            raise ConfigError(f"scaled_for={self.scaled_for!r}; known: {', '.join(SCALED)}")
        if not self.confidence_weight and self.scaled_for != "nothing":
            reason = "with confidence_weight=0 the drafter has no chances"
            check_unused(self, ("scaled_for",), reason, "give a confidence_weight above 0")
        if self.num_heads < 2 or self.markov_rank < 1:
            raise ConfigError(
                f"num_heads={self.num_heads}, markov_rank={self.markov_rank}; accepted: at least 2 "
                "and 1"
            )
        if not 0 <= self.ce_share <= 1 or not 0 <= self.confidence_weight:
            raise ConfigError(
                f"ce_share={self.ce_share}, confidence_weight={self.confidence_weight}; accepted: "
                "0 to 1, and at least 0"
            )
        if self.teacher_share != 1:
            raise ConfigError(
                f"teacher_share={self.teacher_share}: DSpark learns the target's law; leave it out"
            )


Config = DSparkTrainingConfig


def make_dspark(config: DSparkTrainingConfig, setting: frozen.Setting) -> Heads:
    """Makes a DSpark drafter with initial weights for the target of a setting.

    Its ``outputs`` take anchors as a further argument, and ``chosen`` of ``own_drafts.make_lay``.
    The logits of a place are one product with the LM head and W2 side by side; the logit of the
    chance is the last number of a state.

    Raises:
      ConfigError: the target caps its logits, to which the Markov head would add before the cap.
    """
    target = setting.lm.target
    block.check_uncapped(config, target)
    shape = DSparkConfig(
        **block.shape_of(config, setting),
        block_size=config.num_heads,
        markov=next(kind for kind in KINDS if kind == config.markov),
        markov_rank=config.markov_rank,
        confidence=config.confidence_weight > 0,
    )
    drafter = DSpark(config=shape, target=target)

    def outputs(params, target_params, rows, anchors, chosen=None):
        heads = drafter.heads(params)
        states = block.states_of(drafter, params, target_params, rows, anchors)
        memory = jnp.zeros((heads.memory_size, states[0].shape[1]), states[0].dtype)
        found, w2 = [], required(heads.markov, "markov").lm_head.weight[...]
        table = block.wide_table(target, target_params, w2, 1)  # of the chance
        before = block.at(rows.tokens, anchors)
        for k, state in enumerate(states):
            if k and chosen is None:
                before = block.at(rows.tokens, anchors + k)
            elif k:
                before = chosen(k - 1, found[-1])
            latent, memory, chance = heads.step(memory, before.reshape(-1), state)
            parts = [state, required(latent, "latent"), chance[None].astype(state.dtype)]
            found.append((table, None, jnp.concatenate(parts)))
        return found

    lay = own_drafts.make_lay(config, setting, outputs) if config.on_policy else None
    params = fresh(drafter, config.run.seed)
    return Heads(drafter, params, outputs, layers=drafter.config.target_layers, lay=lay)


def make_terms(target, config: DSparkTrainingConfig):
    """Returns the terms of a place, see ``block.make_terms``: also ``accepted``, the probability
    1 - TV that a token is accepted, and ``chance_error``, how far the stated chance is from it."""
    laws = head_losses.Laws(target)

    def terms_of(output, states, law, pieces):
        q, said = chunks.logits_of(output[0], states), laws.said(law, pieces)
        distance = jnp.sum(jnp.abs(jax.nn.softmax(q) - required(said.law, "law")), axis=-1)
        accepted, chance = jax.lax.stop_gradient(1 - distance / 2), states[..., -1]
        nats = losses.cross_entropy(q / config.streak_temperature, said.next)
        if config.on_policy:  # an own draft has no next token but those that the target would say
            nats = jnp.where(pieces["own"], losses.soft_cross_entropy(said.law, q), nats)
        value = config.ce_share * nats + (1 - config.ce_share) * distance
        value += config.confidence_weight * optax.sigmoid_binary_cross_entropy(chance, accepted)
        error = jnp.abs(jax.nn.sigmoid(chance) - accepted)
        return {"loss": value, "accepted": accepted, "chance_error": error}

    return terms_of


make_loss = functools.partial(block.make_loss, terms=make_terms)


def make_settle(config: DSparkTrainingConfig, setting: frozen.Setting):
    """Returns the function that fits the temperatures of chances, see ``frozen.train``."""

    def settle(heads: Heads, lm, read, params):
        if config.scaled_for == "nothing" or not config.confidence_weight:
            return heads.drafter
        held_out = next(iter(setting.sets.values()))  # the corpus; other text measures the result
        local = jax.tree.map(np.asarray, params)
        found = calibrate.measure(heads, lm, read, config, local, held_out)
        true = found.drawn if config.scaled_for == "drawn" else found.greedy
        temperatures = calibrate.fit_temperatures(found.logits, true, found.weight)
        if not temperatures:
            print(f"temperatures of chances: 1, for fewer than {calibrate.LEAST} held-out blocks")
        else:
            print(f"temperatures of chances: {', '.join(f'{t:.2f}' for t in temperatures)}")
        return dataclasses.replace(heads.drafter, temperatures=temperatures)

    return settle


def run(config: DSparkTrainingConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``."""
    block.run_blocks(config, make_dspark, make_loss, dry_run=dry_run, make_settle=make_settle)
