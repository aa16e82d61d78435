"""Goodput: the draft length with the most expected tokens a second.

    argmax over w of   sum over rows of E[tokens | w]  /  E[cost | w]
    E[tokens | w] = 1 + m (r_1 + r_1 r_2 + ... + r_1 ... r_w),   cut at the row's budget

``m`` is how often the drafter proposes anything, and ``r_i`` how often position ``i`` is accepted
if those before it are. A round in which no row proposes costs as much as a plain one.

Reads: how many tokens were proposed and accepted, row by row; the measured cost of a round at each
width, in seconds or any other unit.

Lossless: yes; the decision is a function of committed tokens.

Example::

    specjax.generate(lm, "...", drafting=specjax.Drafting(num="auto:goodput:max_pause=64"))
    drafter = Adaptive(NGram(num_draft=7), policy=Goodput(max_pause=64))

References: TurboSpec (SmartSpec), Liu et al., arXiv 2406.14066, which has one acceptance rate for
the batch, a cost linear in the tokens, and no probes.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..._internal.pytree import pytree_dataclass
from .policy import DraftLengthPolicy, Outcome, check_settings


@pytree_dataclass
class GoodputMemory:
    """The state of ``Goodput``.

    Attributes:
      hits: float32 ``[B, D]``, rounds in which position ``d`` was accepted; older ones fade.
      tries: float32 ``[B, D]``, rounds in which it could have been, as all before it were.
      offers: float32 ``[B]``, rounds in which anything was proposed.
      asked: float32 ``[B]``, rounds in which drafts were asked for.
      pause: int32 ``[B]``, plain rounds until the next probe; this and the following have one value
        for the whole batch.
      interval: int32 ``[B]``, plain rounds after the next probe that loses.
      price: float32 ``[B]``, the cost of the round under way, in plain rounds.
      lost: bool ``[B]``, whether the last round drafted and lost.
    """

    hits: jax.Array
    tries: jax.Array
    offers: jax.Array
    asked: jax.Array
    pause: jax.Array
    interval: jax.Array
    price: jax.Array
    lost: jax.Array


@dataclasses.dataclass(frozen=True)
class Goodput(DraftLengthPolicy):
    """The width with the most expected tokens a second, from measured acceptance and cost.

    Rates are exponential moving averages. A row's rate is shrunk towards that of the other rows at
    the same position, that one towards the rate at other positions, and that one towards
    ``prior_acceptance``. A batch is done when its slowest row is, which drafting speeds up less
    than the mean row: of n rows, drafting must promise to beat plain rounds by
    ``min_gain * (1 - 1/n)``.

    While no width beats plain decoding, the policy falls back to plain rounds and probes with the
    least bad width: after ``min_pause`` plain rounds, or as many as make the probe cost
    ``probe_share`` of their time, then each time after twice as many, at most ``max_pause`` unless
    that share asks for more; never with a probe that costs more than ``probe_share`` of the tokens
    still to come. A probe wins if it emits as much as plain rounds of its cost (and the gain
    above), or if all that it proposed was accepted; then another one follows at once. Drafting is
    resumed, and the pause reset, when the rates say so. Each probe after a pause halves the weight
    of what was known before.

    A width with an infinite cost is never taken, nor one that would lose with every token accepted.

    Attributes:
      prior_acceptance: the acceptance rate assumed before anything was measured, in [0, 1].
      prior_tries: how many tries the shrinkage is worth, above 0.
      fade_rounds: after how many rounds evidence has faded to 1/e, at least 1.
      min_pause: the shortest pause between probes, in plain rounds.
      max_pause: the longest pause between probes, in plain rounds.
      min_gain: the gain over plain decoding that a large batch must be promised, at least 0.
      probe_share: what a probe may cost, as a share of the plain rounds before it and of those that
        the longest row still needs, above 0. (What a drafter reads to catch up is not counted.)

    Raises:
      ValueError: a setting is out of range, NaN or infinite.
    """

    prior_acceptance: float = 0.6
    prior_tries: float = 2.0
    fade_rounds: float = 16.0
    min_pause: int = 8
    max_pause: int = 128
    min_gain: float = 0.1
    probe_share: float = 0.02
    name = "goodput"
    reads_costs = True
    learns_from_rests = False

    def __post_init__(self):
        numbers = "prior_acceptance", "prior_tries", "fade_rounds", "min_gain", "probe_share"
        check_settings(self, numbers, rounds=("min_pause", "max_pause"))
        prior = 0 <= self.prior_acceptance <= 1 and self.prior_tries > 0
        if not (prior and self.fade_rounds >= 1):
            raise ValueError(
                f"Goodput(prior_acceptance={self.prior_acceptance}, "
                f"prior_tries={self.prior_tries}, fade_rounds={self.fade_rounds}): need "
                "0 <= prior_acceptance <= 1, prior_tries > 0 and fade_rounds >= 1"
            )
        if not (1 <= self.min_pause <= self.max_pause and self.probe_share > 0):
            raise ValueError(
                f"Goodput(min_pause={self.min_pause}, max_pause={self.max_pause}, "
                f"probe_share={self.probe_share}): need 1 <= min_pause <= max_pause and "
                "probe_share > 0"
            )
        if self.min_gain < 0:
            raise ValueError(f"Goodput(min_gain={self.min_gain}): min_gain must be at least 0")

    def init(self, batch: int, depth: int) -> GoodputMemory:
        counts, row = jnp.zeros((batch, depth)), jnp.zeros((batch,))
        return GoodputMemory(
            hits=counts,
            tries=counts,
            offers=row,
            asked=row,
            pause=row.astype(jnp.int32),
            interval=jnp.full((batch,), self.min_pause, jnp.int32),
            price=row + 1,
            lost=row.astype(bool),
        )

    def rates(self, memory: GoodputMemory, live: jax.Array) -> jax.Array:
        """float32 ``[B, D]``: the chance in each row that position ``d`` is accepted if all before
        it are."""

        def shrink(hits, tries, towards):
            return (hits + self.prior_tries * towards) / (tries + self.prior_tries)

        # evidence of the row, of other rows at this position, of other positions: each counts once
        own = jnp.stack([memory.hits, memory.tries])
        seen = jnp.where(live[:, None], own, 0.0)
        here = jnp.sum(seen, axis=1, keepdims=True)
        elsewhere = jnp.sum(here, axis=2, keepdims=True) - here
        others = here - seen
        rate = shrink(elsewhere[0], elsewhere[1], self.prior_acceptance)
        rate = shrink(others[0], others[1], rate)
        return shrink(memory.hits, memory.tries, rate)

    def hurdle(self, live: jax.Array) -> jax.Array:
        """float32 scalar: by which factor drafting must beat plain rounds. The factor of one live
        row must not exceed that of several, because ``may_pay`` asks for the factor of one row."""
        return 1 + self.min_gain * (1 - 1 / jnp.maximum(jnp.sum(live), 1))

    def may_pay(self, widths, costs):
        last = float(self.hurdle(jnp.ones(1, bool)))  # of the last live row
        return bool(np.any(wins_if_all_are_accepted(np.asarray(widths), costs, last)))

    def expected(self, memory, widths, costs, budget) -> tuple[jax.Array, jax.Array]:
        """Tokens and cost of a round at each width, float32 ``[W]`` each."""
        live = budget > 0
        proposes = jnp.where(live, (memory.offers + 1) / (memory.asked + 1), 0.0)
        kept = proposes[:, None] * jnp.cumprod(self.rates(memory, live), axis=1)
        kept = jnp.concatenate([jnp.ones_like(kept[:, :1]), kept], axis=1)
        kept = jnp.where(jnp.arange(kept.shape[1]) < budget[:, None], kept, 0.0)
        tokens = jnp.cumsum(jnp.sum(kept, axis=0))[jnp.asarray(widths)]
        busy = 1 - jnp.prod(1 - proposes)  # some row proposes
        idle = jnp.where(jnp.isfinite(costs[0]), costs[0], 0.0)
        return tokens, jnp.where(jnp.isfinite(costs), busy * costs + (1 - busy) * idle, jnp.inf)

    def choose(self, memory, widths, costs, budget):
        live = budget > 0
        # a width that loses even with every token accepted: a probe would tell nothing
        able = wins_if_all_are_accepted(jnp.asarray(widths), costs, self.hurdle(live))
        costs = jnp.where(able | (jnp.arange(len(widths)) == 0), costs, jnp.inf)
        tokens, cost = self.expected(memory, widths, costs, budget)
        goodput = tokens / cost
        best = jnp.argmax(goodput[1:]) + 1
        worth = goodput[best] > self.hurdle(live) * goodput[0]

        # one value for the batch; finished rows keep an old one
        before, interval = (jnp.max(jnp.where(live, x, 0)) for x in (memory.pause, memory.interval))
        lost = jnp.any(memory.lost & live)
        price = jnp.max(jnp.where(live, memory.price, 1.0))
        rest = jnp.maximum(interval, jnp.ceil((price - 1) / self.probe_share).astype(jnp.int32))
        pause = jnp.where(lost, rest, jnp.maximum(before - 1, 0))
        pause = jnp.where(worth, 0, pause)
        longer = jnp.where(lost, jnp.clip(2 * rest, self.min_pause, self.max_pause), interval)
        dear = costs[best] / costs[0] - 1 > self.probe_share * jnp.max(budget)
        probe = (pause == 0) & ~dear & jnp.isfinite(costs[best]) & (tokens[best] > tokens[0])
        drafts = worth | probe
        fade = jnp.where(~worth & drafts & (before > 0), 0.5, 1.0)
        width = jnp.where(drafts, jnp.asarray(widths, jnp.int32)[best], 0)
        row = lambda x: jnp.broadcast_to(x, live.shape)  # noqa: E731
        return width, dataclasses.replace(
            memory,
            hits=fade * memory.hits,
            tries=fade * memory.tries,
            pause=row(pause),
            interval=row(jnp.where(worth, self.min_pause, longer)),
            price=row(jnp.where(drafts, costs[best] / costs[0], 1.0)),
            lost=row(False),
        )

    def fell_short(self, outcome: Outcome) -> jax.Array:
        """bool ``[B]``: rows in which a token that was proposed was not accepted. A drafter that
        had nothing to propose is no loss, since such rounds cost what plain ones cost."""
        return outcome.accepted < outcome.offered

    def update(self, memory: GoodputMemory, outcome: Outcome) -> GoodputMemory:
        keep = 1 - 1 / self.fade_rounds
        asked = outcome.live & (outcome.width > 0)
        evidence = asked & (outcome.offered > 0)
        position = jnp.arange(1, memory.hits.shape[1] + 1)
        tried = (position <= outcome.accepted[:, None] + 1) & (position <= outcome.width[:, None])
        hit = position <= outcome.accepted[:, None]

        def fold(old, new, rows):
            rows = rows.reshape((-1,) + (1,) * (old.ndim - 1))
            return jnp.where(rows, keep * old + new, old)

        emitted = jnp.sum(jnp.where(outcome.live, outcome.accepted + 1, 0))
        dear = emitted < self.hurdle(outcome.live) * memory.price * jnp.sum(outcome.live)
        lost = dear & jnp.any(asked & self.fell_short(outcome))
        return dataclasses.replace(
            memory,
            hits=fold(memory.hits, hit, evidence),
            tries=fold(memory.tries, tried, evidence),
            offers=fold(memory.offers, outcome.offered > 0, asked),
            asked=fold(memory.asked, 1.0, asked),
            lost=lost,
        )


def wins_if_all_are_accepted(widths, costs, hurdle):
    """bool ``[W]``: which widths beat plain rounds by the factor ``hurdle`` where every token is
    accepted; never the width 0. Arrays of JAX, or on the host of NumPy."""
    return (widths > 0) & (costs < costs[0] * (1 + widths) / hurdle)
