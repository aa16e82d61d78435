"""Schedule: within a round, as deep as the drafter's own chances make the batch faster.

    rate(d) = sum over rows of (1 + a_1 + ... + a_d)  /  cost(d),   a_k = c_1 c_2 ... c_k
    the depth is the last one before the rate first fails to rise

``c_k`` is the drafter's estimate that its k-th token is accepted if those before it are. The depth
is one for the batch: rows of a pass are equally wide, so what one row drafts less saves nothing.

Whether rounds draft at all is decided as by ``goodput``: a drafter that computes its draft before
it knows that no token of it is worth its cost has lost that pass already. With ``rests=false``
every round drafts, as in the paper.

Reads: the drafter's chances (a confidence head, as DSpark's; other drafters draft all they can);
the measured cost of a round at each width; how many tokens were proposed and accepted.

Lossless: yes. Whether the k-th tokens are drafted follows from chances that read the tokens before
them. The search ends at the first depth that does not pay, and does not look at what the tokens of
that depth would make of the next one: a search for the best of all depths would look at tokens that
it may leave out, which turns a target (.7, .3) into (.85, .15).

Example::

    specjax.generate(lm, "...", drafter=heads, drafting=specjax.Drafting(num="auto:schedule"))
    drafter = Adaptive(dspark, policy=Schedule())

References: DSpark, arXiv 2607.05147, algorithm 1, which sorts the pairs of rows and depths, since a
pass there is as long as the tokens of all rows; it never rests.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .goodput import Goodput
from .policy import Outcome


@dataclasses.dataclass(frozen=True)
class Schedule(Goodput):
    """Drafts to the depth at which the expected tokens a second stop rising.

    Costs between two measured widths are interpolated. Where any cost is infinite
    (``Adaptive.only``), the one width with a finite cost is drafted.

    Attributes:
      rests: whether there are rounds without a draft, as ``Goodput`` decides, whose settings hold;
        False: every round drafts.
    """

    rests: bool = True
    name = "schedule"

    @property
    def can_rest(self) -> bool:
        return self.rests

    def choose(self, memory, widths, costs, budget):
        able = jnp.isfinite(costs)
        most = jnp.max(jnp.where(able, jnp.asarray(widths, jnp.int32), 0))
        if not self.rests:
            return most, memory
        width, memory = super().choose(memory, widths, costs, budget)
        return jnp.where(width > 0, most, 0), memory

    def may_pay(self, widths, costs):
        return not self.rests or super().may_pay(widths, costs)

    def expected(self, memory, widths, costs, budget):
        """A draft of which nothing is proposed costs as much as any."""
        return super().expected(memory, widths, costs, budget)[0], costs

    def fell_short(self, outcome: Outcome) -> jax.Array:
        return (outcome.accepted < outcome.offered) | (outcome.offered == 0)

    def costs_within(self, widths, costs, depth):
        # the draft is made already: a round that drops all of it costs as much as the narrowest
        measured = jnp.interp(
            jnp.arange(depth + 1), jnp.asarray(widths[1:], jnp.float32), costs[1:]
        )
        pinned = 1 / (1.0 + jnp.arange(depth + 1))  # the rate rises, whatever the chances are
        return jnp.where(jnp.all(jnp.isfinite(costs)), measured, pinned)

    def update(self, memory, outcome: Outcome):
        # what the schedule left out was not refused by the target
        tried = jnp.clip(outcome.offered, 1, outcome.width)
        return super().update(memory, dataclasses.replace(outcome, width=tried))


def worth_drafting(survival: jax.Array, costs: jax.Array, budget: jax.Array) -> jax.Array:
    """The depth at which the rate first fails to rise, int32 scalar.

    Args:
      survival: float32 ``[B, K]``, the chances that the first k tokens are all accepted.
      costs: float32 ``[K + 1]``, of a round at each depth.
      budget: int32 ``[B]``, tokens that a row may still emit, of which a round without drafts emits
        one.
    """
    counted = jnp.arange(1, survival.shape[1] + 1) < budget[:, None]
    expected = jnp.sum(jnp.where(counted, survival, 0.0), axis=0)
    tokens = jnp.concatenate([jnp.sum(budget > 0)[None].astype(jnp.float32), expected])
    rate = jnp.cumsum(tokens) / costs
    return jnp.sum(jnp.cumprod(rate[1:] > rate[:-1])).astype(jnp.int32)
