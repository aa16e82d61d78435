"""How many tokens to draft next: policies for ``Adaptive``, with one contract.

A policy decides once a round for the whole batch, since the widest row sets the cost of a pass. It
learns from what was committed and from nothing else: a decision that looked at drafted tokens
before they are verified would change their law, and with it the output's.

The contract, for a small frozen dataclass without arrays::

    init(batch, depth) -> memory                            leaves lead with B
    choose(memory, widths, costs, budget) -> width, memory  int32 scalar in [0, widths[-1]]
    update(memory, outcome) -> memory                       after the round

``widths``: a static tuple of ints, beginning with 0; ``costs``: float32 ``[W]``, what a round at
each of them takes; ``budget``: int32 ``[B]``, tokens that a row may still emit, 0 where finished.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .._internal.pytree import pytree_dataclass


@pytree_dataclass
class Outcome:
    """What a round brought, row by row.

    Attributes:
      width: int32 ``[B]``, tokens that were asked for, the same in every row.
      offered: int32 ``[B]``, depth of the draft; 0 where the drafter proposed nothing, which is no
        evidence about acceptance.
      accepted: int32 ``[B]``, drafted tokens that were kept.
      live: bool ``[B]``, the row took part.
    """

    width: jax.Array
    offered: jax.Array
    accepted: jax.Array
    live: jax.Array


@pytree_dataclass
class GoodputMemory:
    """``hits``, ``tries`` float32 ``[B, D]``: rounds in which position ``d`` was kept, and in which
    it could have been, since all before it were; the past fades. ``offers``, ``asked`` float32
    ``[B]``: rounds in which anything was proposed, and in which it was asked for.

    One value for the batch, in every row: ``pause`` int32, plain rounds until the next probe;
    ``interval`` int32, plain rounds after the next probe that loses; ``price`` float32, cost of
    the round under way over a plain one's; ``lost`` bool, the last round drafted and lost.
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
class Goodput:
    """The width with the most expected tokens a second, from measured acceptance and cost::

        argmax over w of   sum over rows of E[tokens | w]  /  E[cost | w]

    ``E[tokens | w] = 1 + m (r_1 + r_1 r_2 + ... + r_1 ... r_w)``, cut at the row's budget, where
    ``m`` is how often the drafter has anything to propose and ``r_i`` how often position ``i`` is
    kept if those before it are. A round in which no row proposes costs a plain one. A batch is done
    when its slowest row is, which lags behind their mean: of n rows, drafting must promise to beat
    plain rounds by ``lag (1 - 1/n)``. (So much is forgone where rows are alike, or are refilled.)

    Rates are exponential moving averages. A row's rate is shrunk towards that of the other rows at
    this position, that one towards the rate at other positions, and that one towards ``prior``.

    While no width beats plain decoding it draws back to plain rounds, and probes with the least bad
    width after ``first`` of them, or so many that the probe costs ``share`` of their time, and then
    each time after twice as many, at most ``last``; none that costs more than ``share`` of the
    tokens still to come, which could not pay for it. A probe wins if it emits as much as plain
    rounds of its cost (and the lag), or if all that it proposed was kept; then another follows at
    once. Drafting is resumed, and the interval reset, when the rates say so. Each probe after a
    pause halves the weight of what was known before it.

    A cost of infinity rules a width out; so does one that all its tokens, were they kept, would not
    make up for (of several rows, by what a batch must gain).

    Attributes:
      prior: the acceptance rate assumed before anything was measured, in [0, 1].
      weight: how many tries the shrinkage is worth, above 0.
      memory: after how many rounds evidence has faded to 1/e, at least 1.
      first, last: shortest and longest interval between probes, in plain rounds.
      lag: what a large batch must gain by drafting, over plain decoding, at least 0.
      share: what a probe may cost of the plain rounds before it, and of those that the longest
        row still needs, above 0; what a drafter reads to catch up comes on top.

    Lossless: yes.

    References: TurboSpec (SmartSpec), Liu et al., arXiv 2406.14066, which has one acceptance rate
    for the batch, cost linear in the tokens, and no probes.
    """

    prior: float = 0.6
    weight: float = 2.0
    memory: float = 16.0
    first: int = 8
    last: int = 128
    lag: float = 0.1
    share: float = 0.05
    name = "goodput"

    def __post_init__(self):
        if not (0 <= self.prior <= 1 and self.weight > 0 and self.memory >= 1):
            raise ValueError(
                f"Goodput(prior={self.prior}, weight={self.weight}, memory={self.memory}): need "
                "0 <= prior <= 1, weight > 0 and memory >= 1"
            )
        if not (1 <= self.first <= self.last and self.share > 0 and self.lag >= 0):
            raise ValueError(
                f"Goodput(first={self.first}, last={self.last}, share={self.share}, "
                f"lag={self.lag}): intervals between probes need 1 <= first <= last and share > 0; "
                "lag is 0 or more"
            )

    def init(self, batch: int, depth: int) -> GoodputMemory:
        counts, row = jnp.zeros((batch, depth)), jnp.zeros((batch,))
        return GoodputMemory(
            hits=counts,
            tries=counts,
            offers=row,
            asked=row,
            pause=row.astype(jnp.int32),
            interval=jnp.full((batch,), self.first, jnp.int32),
            price=row + 1,
            lost=row.astype(bool),
        )

    def rates(self, memory: GoodputMemory, live: jax.Array) -> jax.Array:
        """float32 ``[B, D]``: each row's chance that position ``d`` is kept if those before are."""

        def shrink(hits, tries, towards):
            return (hits + self.weight * towards) / (tries + self.weight)

        # own evidence, that of other rows at this position, that at other positions: each once
        own = jnp.stack([memory.hits, memory.tries])
        seen = jnp.where(live[:, None], own, 0.0)
        here = jnp.sum(seen, axis=1, keepdims=True)
        elsewhere = jnp.sum(here, axis=2, keepdims=True) - here
        rate = shrink(*elsewhere, self.prior)
        rate = shrink(*(here - seen), rate)
        return shrink(*own, rate)

    def hurdle(self, live: jax.Array) -> jax.Array:
        """What drafting must reach, over plain rounds: float32 scalar."""
        return 1 + self.lag * (1 - 1 / jnp.maximum(jnp.sum(live), 1))

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
        # what loses even if all is kept is no matter of acceptance: a probe would tell nothing
        most = costs[0] * (1 + jnp.asarray(widths)) / self.hurdle(live)
        costs = jnp.where((costs < most) | (jnp.arange(len(widths)) == 0), costs, jnp.inf)
        tokens, cost = self.expected(memory, widths, costs, budget)
        goodput = tokens / cost
        best = jnp.argmax(goodput[1:]) + 1
        worth = goodput[best] > self.hurdle(live) * goodput[0]

        # one value for the batch; rows that finished keep an old one
        before, interval = (jnp.max(jnp.where(live, x, 0)) for x in (memory.pause, memory.interval))
        lost = jnp.any(memory.lost & live)
        price = jnp.max(jnp.where(live, memory.price, 1.0))
        rest = jnp.maximum(interval, jnp.ceil((price - 1) / self.share).astype(jnp.int32))
        pause = jnp.where(lost, rest, jnp.maximum(before - 1, 0))
        pause = jnp.where(worth, 0, pause)
        longer = jnp.where(lost, jnp.clip(2 * rest, self.first, self.last), interval)
        dear = costs[best] / costs[0] - 1 > self.share * jnp.max(budget)
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
            interval=row(jnp.where(worth, self.first, longer)),
            price=row(jnp.where(drafts, costs[best] / costs[0], 1.0)),
            lost=row(False),
        )

    def update(self, memory: GoodputMemory, outcome: Outcome) -> GoodputMemory:
        keep = 1 - 1 / self.memory
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
        lost = dear & jnp.any(evidence & (outcome.accepted < outcome.offered))
        return dataclasses.replace(
            memory,
            hits=fold(memory.hits, hit, evidence),
            tries=fold(memory.tries, tried, evidence),
            offers=fold(memory.offers, outcome.offered > 0, asked),
            asked=fold(memory.asked, 1.0, asked),
            lost=lost,
        )


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """Two more after a draft that was kept whole, else one less, never below one.

    The ``heuristic`` schedule of assisted generation, as a baseline: it knows no costs and never
    ceases to draft. A batch takes the widest wish among its rows (Hugging Face has batch 1), and no
    wish grows beyond the drafter's own number. A round in which nothing was proposed changes
    nothing.

    Attributes:
      start: tokens of the first round; Hugging Face's ``num_assistant_tokens``.

    Lossless: yes.

    References: Hugging Face transformers 5,
    ``AssistedCandidateGenerator.update_candidate_strategy``.
    """

    start: int = 20
    name = "huggingface"

    def __post_init__(self):
        if self.start < 1:
            raise ValueError(f"HuggingFace(start={self.start}): it drafts at least one token")

    def init(self, batch: int, depth: int) -> jax.Array:
        return jnp.full((batch,), min(self.start, depth), jnp.int32)

    def choose(self, memory, widths, costs, budget):
        memory = jnp.minimum(memory, widths[-1])
        return jnp.max(jnp.where(budget > 0, memory, 1)), memory

    def update(self, memory, outcome: Outcome):
        whole = outcome.accepted >= outcome.offered
        wish = jnp.where(whole, memory + 2, jnp.maximum(memory - 1, 1))
        return jnp.where(outcome.live & (outcome.offered > 0), wish, memory)


@pytree_dataclass
class ExLlamaMemory:
    """``average`` float32 ``[B]`` of accepted tokens, -1 before the first round; ``skipped`` int32
    ``[B]``, rounds without a draft."""

    average: jax.Array
    skipped: jax.Array


@dataclasses.dataclass(frozen=True)
class ExLlama:
    """Just above the moving average of accepted tokens; none while it is below a threshold.

    The dynamic draft window of ExLlamaV3, as a baseline: it knows no costs. A draft that was kept
    whole counts as one token more, since acceptance is cut off by the width. Below ``skip`` a row
    wants nothing but two tokens every ``probe`` rounds. A batch takes the widest wish of its rows.

    Attributes:
      up, down: weight of the last round when it raises or lowers the average (above 1, the
        average overshoots: that is how the window widens).
      skip: the threshold, in tokens; 0: always at least one token.
      probe: rounds between probes.

    Lossless: yes.

    References: ExLlamaV3, ``Job.draft_target`` and ``Job.update_draft_ema`` in
    ``exllamav3/generator/job.py`` at commit 4f8ad01.
    """

    up: float = 1.3
    down: float = 0.65
    skip: float = 0.3
    probe: int = 16
    name = "exllama"

    def __post_init__(self):
        if not (0 < self.down <= 1 and self.up > 0 and self.skip >= 0 and self.probe >= 1):
            raise ValueError(
                f"ExLlama(up={self.up}, down={self.down}, skip={self.skip}, probe={self.probe}): "
                "need up > 0, 0 < down <= 1, skip >= 0 and probe >= 1"
            )

    def init(self, batch: int, depth: int) -> ExLlamaMemory:
        zero = jnp.zeros((batch,))
        return ExLlamaMemory(average=zero - 1, skipped=zero.astype(jnp.int32))

    def choose(self, memory, widths, costs, budget):
        most, average = widths[-1], memory.average
        idle = (average >= 0) & (average < self.skip)
        skipped = jnp.where(idle, memory.skipped + 1, 0)
        due = skipped >= self.probe
        wish = jnp.clip(jnp.ceil(average).astype(jnp.int32), 1, most)
        wish = jnp.where(idle, jnp.where(due, min(2, most), 0), wish)
        wish = jnp.where(average < 0, most, wish)
        skipped = jnp.where(due, 0, skipped)
        width = jnp.max(jnp.where(budget > 0, wish, 0))
        return width, dataclasses.replace(memory, skipped=skipped)

    def update(self, memory, outcome: Outcome):
        kept = outcome.accepted + (outcome.accepted >= outcome.offered)
        old = memory.average
        share = jnp.where(kept > old, self.up, self.down)
        average = jnp.where(old < 0, kept, share * kept + (1 - share) * old)
        learns = outcome.live & (outcome.offered > 0)
        return dataclasses.replace(memory, average=jnp.where(learns, average, old))


POLICIES = {policy.name: policy for policy in (Goodput, HuggingFace, ExLlama)}
