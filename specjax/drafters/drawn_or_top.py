"""Drawn tokens or the most probable ones, whichever were accepted more often in the row's rounds.

Above temperature 0, with the target's law p and the drafter's law q of a token,

    a token that is drawn is accepted with the probability   sum_x min(p(x), q(x)),
    the most probable token with                             p(argmax q).

The first is greater where p is as blurred as q. The second is greater where p is sharp and q is
not, as at the later places of a parallel drafter, whose tokens do not know each other. Each row
tries both ways, and then takes the one with the higher score (a bandit of two arms, UCB1)::

    mean number of tokens of the way's rounds + explore * sqrt(log(rounds) / rounds of the way)

Lossless: yes, wherever ``inner`` is with drawn tokens. The choice reads what earlier rounds of the
row committed, and nothing of the round that it is for. The most probable token is drawn from the
law of temperature 0, and that is the law that the draft states.

Example::

    specjax.generate(lm, "def f(x):", drafter="p-eagle", sampling=specjax.Sampling(temperature=1.0),
                     drafting=specjax.Drafting(sibling_sampling="learned"))

References: the bandit is Auer et al., Machine Learning 47 (2002), figure 1; its use here is none of
a paper. That independent places are better not drawn where laws are sharp was measured in
github.com/z-lab/dflash/pull/169.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from .._internal.pytree import pytree_dataclass
from ..types import Drafter, DrafterWrapper, PyTree
from .base import check_field

LEARNED = "learned"  # ``sibling_sampling`` by which it is asked for
DRAWN, TOP, NEITHER = 0, 1, -1  # ways of a round; the last: it did not draft for the row


@pytree_dataclass
class DrawnOrTopState:
    """``inner``: the other drafter's; ``tokens``, ``rounds``: float32 ``[B, 2]``, the tokens that
    each way's rounds committed, and their number; ``way``: int32 ``[B]``, that of this round."""

    inner: PyTree
    tokens: jax.Array
    rounds: jax.Array
    way: jax.Array


@dataclasses.dataclass(frozen=True)
class DrawnOrTop(DrafterWrapper):
    """Drafts with ``inner``, whose weights are ``params["drafter"]``.

    At temperature 0 it does what ``inner`` does.

    Attributes:
      inner: a drafter that draws each token from its own law, such as heads with
        ``sibling_sampling="iid"``, or a draft model.
      explore: in tokens a round: how much better than the other a way may prove that was tried
        less; at least 0.

    Raises:
      TypeError: ``inner`` is no drafter.
      ValueError: ``explore`` is negative or not finite.
    """

    explore: float = 0.5

    def __post_init__(self):
        check_field(self, "inner", Drafter, "an object of specjax.Drafter")
        check_field(self, "explore", int | float, "a number of at least 0")
        if not 0 <= self.explore < math.inf:
            raise ValueError(f"DrawnOrTop(explore={self.explore}): give a number of at least 0")

    @property
    def has_weights(self) -> bool:
        return self.inner.has_weights

    @property
    def can_rewind(self) -> bool:
        return False  # the choice depends on the rounds before

    def init(self, params, target_params, batch, capacity, inputs=None):
        return DrawnOrTopState(
            inner=self.inner.init(params, target_params, batch, capacity, inputs),
            tokens=jnp.zeros((batch, 2), jnp.float32),
            rounds=jnp.zeros((batch, 2), jnp.float32),
            way=jnp.full((batch,), NEITHER, jnp.int32),
        )

    def choose(self, state: DrawnOrTopState) -> jax.Array:
        """Returns int32 ``[B]``, the way of each row's next round: at first each way once."""
        count = jnp.maximum(state.rounds, 1.0)
        bonus = self.explore * jnp.sqrt(jnp.log(jnp.sum(count, axis=1, keepdims=True)) / count)
        score = jnp.where(state.rounds > 0, state.tokens / count + bonus, jnp.inf)
        return jnp.argmax(score, axis=1).astype(jnp.int32)

    def draft_step(self, params, target_params, state, context):
        sampling, way = context.sampling, state.way
        if not sampling.greedy:
            way = self.choose(state)
            cold = jnp.where(way == TOP, 0.0, sampling.temperature)
            sampling = dataclasses.replace(sampling, temperature=cold)
            drafts = context.asked_rows
            if context.width is not None:
                drafts &= context.width > 0
            way = jnp.where(drafts, way, NEITHER)
        own = dataclasses.replace(context, sampling=sampling)
        draft, inner = self.inner.draft_step(params, target_params, state.inner, own)
        return draft, dataclasses.replace(state, inner=inner, way=way)

    def observe(self, params, target_params, state, segment):
        inner = self.inner.observe(params, target_params, state.inner, segment)
        tokens, rounds, way = state.tokens, state.rounds, state.way
        if segment.round is not None:
            way = jnp.where(segment.num > 0, way, NEITHER)
            took = jax.nn.one_hot(way, 2, dtype=jnp.float32)  # zeros where it is neither
            tokens, rounds = tokens + took * segment.num[:, None], rounds + took
        neither = jnp.full_like(way, NEITHER)
        return DrawnOrTopState(inner=inner, tokens=tokens, rounds=rounds, way=neither)

    def sync(self, params, target_params, state, context, *, before="prompt"):
        inner = self.inner.sync(params, target_params, state.inner, context, before=before)
        return dataclasses.replace(state, inner=inner)

    def rewind(self, state, length):
        return dataclasses.replace(state, inner=self.inner.rewind(state.inner, length))

    def plan(self, params, target_params, state, budget):
        return self.inner.plan(params, target_params, state.inner, budget)
