"""The closed-form calculator: the speed of speculative decoding from a few numbers.

    speed-up = tau * (T(B) + o) / (T(B N) + drafting + o + o_d)
    tau      = 1 + sum over drafted nodes of the product of the acceptance rates on their path
    T(n)     = max(1, n / knee)          cost of a pass over n tokens, in passes over one token
    drafting = c * sum over levels of T(B * nodes of the level that get children)
    o, o_d   = costs of a round besides its passes: of every round, and of one that drafts

For a chain of ``g`` tokens with one acceptance rate ``a`` at every position, and without a knee,
this is the formula of the field, ``(1 - a^(g + 1)) / ((1 - a) (1 + g c))``. The tokens of a round
are those of ``tree_search.expected_tokens``, and the cost of a round is that of the planner
(``plan.predict.Costs``), which measures the same quantities on a machine.

What the numbers leave out: positions are accepted independently of each other, a pass does not
become dearer with the length of the text, and all rows of a batch take the mean number of rounds.
``specjax plan`` measures instead.

References: 2211.17192, section 3.3 (chains); 2402.01528, section 3 (what a draft model costs);
Sequoia, 2402.12374, section 3.1 (trees).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import trees
from .._internal.table_text import table_text
from .calculator_inputs import Rates, check_ranges, given_rates, passes_of, rates_of, shape_of
from .plan.predict import Costs, Rounds
from .tree_search import expected_tokens

MOST = 16  # drafted tokens up to which the best number is looked for
DRAFTS = "drafts"  # the name of the drafter in ``Costs``


@dataclasses.dataclass(frozen=True)
class Outlook:
    """What one shape of draft gives.

    Seconds are in units of ``pass_seconds``: real seconds if that is given, else passes of the
    target over one token.

    Attributes:
      num_draft: the number of drafted tokens; 0 is plain decoding.
      tokens: the expected tokens per round and row, τ.
      cost: the cost of a round, in rounds of plain decoding at the same batch size.
      speedup: the speed of the rounds, in that of plain decoding at the same batch size.
      whole_speedup: the same for whole requests, which include reading the prompt.
      ttft: seconds until the first token: reading the prompt, or without one a round.
      tpot: seconds per token of a row while rounds run.
      seconds: seconds of a whole request.
      throughput: emitted tokens per second of whole requests, over all rows.
    """

    num_draft: int
    tokens: float
    cost: float
    speedup: float
    whole_speedup: float
    ttft: float
    tpot: float
    seconds: float
    throughput: float


@dataclasses.dataclass(frozen=True)
class Calculation:
    """The result of ``calculate``; prints as a table.

    Attributes:
      asked: the outlook of the given draft.
      plain: the outlook of plain decoding.
      best: that of the fastest chain; ``plain`` where no chain is faster.
      chains: the outlooks of all chains, from plain decoding on, in ascending length.
      acceptance: the acceptance rates by depth and by rank among siblings, which a given τ implies.
      shape: the given draft: ``chain(4)``, or a tree as ``trees.parse`` reads it.
      batch: the number of rows.
      unit: the unit of seconds, ``"s"`` or ``"passes"``.
    """

    asked: Outlook
    plain: Outlook
    best: Outlook
    chains: list[Outlook]
    acceptance: list[list[float]]
    shape: str
    batch: int
    unit: str

    @property
    def verdict(self) -> str:
        """The result in one line."""
        asked, best = self.asked, self.best
        line = f"{self.shape}: {asked.tokens:.2f} tokens a round, {asked.speedup:.2f} × plain"
        if best is self.plain:
            return f"{line}; no chain is faster than plain decoding"
        if best == asked:
            return f"{line}; no chain is faster"
        return f"{line}; the best chain has {best.num_draft}: {best.speedup:.2f} × plain"

    def table(self):
        """Returns the chains, and a given tree, as a ``rich`` table."""
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        unit = "ms" if self.unit == "s" else "passes"
        for name in (
            *("drafts", "tokens a round", "cost of a round", "× plain", "whole"),
            *(f"TTFT, {unit}", f"TPOT, {unit}", "tokens/s" if unit == "ms" else "tokens a pass"),
        ):
            table.add_column(name, justify="right")
        rows = [(str(one.num_draft or "plain"), one) for one in self.chains]
        if self.asked not in self.chains:
            rows.append((self.shape, self.asked))
        times = 1e3 if self.unit == "s" else 1.0
        for name, one in rows:
            cells = [f"{one.tokens:.2f}", f"{one.cost:.2f}", f"{one.speedup:.2f}"]
            cells += [f"{one.whole_speedup:.2f}", f"{times * one.ttft:.4g}"]
            cells += [f"{times * one.tpot:.3g}", f"{one.throughput:.4g}"]
            table.add_row(name, *cells, style="bold" if one == self.asked else None)
        return table

    def as_json(self) -> dict:
        """Returns the result as JSON values."""
        return dataclasses.asdict(self) | {"verdict": self.verdict}

    def text(self, width: int = 100) -> str:
        """Returns the table, in lines of at most ``width`` characters, and the verdict."""
        return table_text(self.table(), width) + self.verdict

    def __str__(self) -> str:
        return self.text()


@dataclasses.dataclass(frozen=True)
class _Machine:
    """The costs of passes and the sizes of requests; see ``calculate``."""

    draft_cost: float
    parallel: bool
    overhead: float
    draft_overhead: float
    read_cost: float
    knee: float
    passes: tuple[tuple[int, float], ...]
    batch: int
    prompt: int
    new_tokens: int
    pass_seconds: float

    def pass_over(self, tokens: int) -> float:
        """The cost of a pass over so many tokens of all rows, in passes over one token."""
        return max(1.0, tokens / self.knee)

    @property
    def widest(self) -> int:
        """The number of nodes of the widest pass with a known cost."""
        return self.passes[-1][0] if self.passes else trees.MOST_NODES

    def verification(self, nodes: int) -> float:
        """The cost of the target's pass over ``nodes`` nodes of each row."""
        if not self.passes:
            return self.pass_over(self.batch * nodes)
        sizes, costs = zip(*self.passes, strict=True)
        if nodes > self.widest:
            raise ValueError(
                f"passes has sizes up to {self.widest}, and the draft has {nodes} nodes, the root "
                "included: give the cost of a pass that is as wide, or a smaller draft"
            )
        return self.pass_over(self.batch) * float(np.interp(nodes, sizes, costs))

    def drafting(self, shape: trees.Tree) -> float:
        """The cost of drafting: a pass of the drafter for each level, or one for all of them."""
        if self.parallel:
            return self.draft_cost * self.pass_over(self.batch * shape.depth)
        parents = set(shape.parents)
        fed = [
            sum(d == level for n, d in enumerate(shape.depths) if n in parents)
            for level in range(shape.depth)
        ]
        return self.draft_cost * sum(self.pass_over(self.batch * wide) for wide in fed)

    def outlook(self, shape: trees.Tree | None, rates: np.ndarray) -> Outlook:
        """The outlook of a draft, or of plain decoding (None)."""
        plain = self.pass_over(self.batch) + self.overhead
        nodes = 1 if shape is None else shape.num_nodes
        drafts = 0.0 if shape is None else self.drafting(shape) + self.draft_overhead
        costs = Costs(
            unit=plain * self.pass_seconds,
            passes={n: self.verification(n) / plain for n in (1, nodes)},
            drafts={DRAFTS: {nodes - 1: drafts / plain}},
        )
        one = Rounds({nodes: 1}, per_row=1, drafted=nodes - 1, accepted=0)
        cost = costs.of(one, DRAFTS, nodes - 1)
        tokens = 1.0 if shape is None else expected_tokens(shape, rates)
        reading = self.pass_over(self.batch * self.prompt) if self.prompt else 0.0
        read = self.pass_seconds * reading * (1 if shape is None else 1 + self.read_cost)
        later = self.new_tokens - bool(self.prompt)  # reading a prompt emits the first token
        seconds = read + later / tokens * cost * costs.unit
        plain_seconds = self.pass_seconds * reading + later * costs.unit
        return Outlook(
            num_draft=nodes - 1,
            tokens=tokens,
            cost=cost,
            speedup=tokens / cost,
            whole_speedup=plain_seconds / seconds,
            ttft=read or cost * costs.unit,
            tpot=cost * costs.unit / tokens,
            seconds=seconds,
            throughput=self.batch * self.new_tokens / seconds,
        )


def calculate(
    acceptance: Rates | None = None,
    *,
    tau: float | None = None,
    draft_cost: float = 0.05,
    num_draft: int | None = None,
    tree: str | trees.Tree | None = None,
    parallel: bool = False,
    overhead: float = 0.0,
    draft_overhead: float = 0.0,
    read_cost: float | None = None,
    knee: float = math.inf,
    passes: Mapping[int, float] | None = None,
    batch: int = 1,
    prompt: int = 0,
    new_tokens: int = 128,
    pass_seconds: float | None = None,
    most: int = MOST,
) -> Calculation:
    """Computes tokens per round, speed-up, TTFT and TPOT from rates and costs, without a model.

    Args:
      acceptance: the acceptance rate, in [0, 1]: one number for every position of a chain, or one
        for each position, given that all positions before were accepted. For a tree, a list for
        each depth of the shares in which the drafter's best, second, ... choice is right
        (``specjax tree`` measures them).
      tau: instead of ``acceptance``, τ: the tokens that a chain of ``num_draft`` emits per round,
        the target's own token included. One rate at every position follows from it.
      draft_cost: c, the cost of one pass of the drafter over one token, in those of the target.
      num_draft: the length of the chain; 4 by default, or as many as ``acceptance`` has positions.
      tree: instead of ``num_draft``, a static tree, such as ``"3x2x1"``; see ``trees.parse``.
      parallel: whether the drafter drafts all levels in one pass, as DFlash and Medusa do.
      overhead: the cost of a round besides its passes, plain or not, in passes over one token.
      draft_overhead: what a round that drafts costs beside that and its passes, such as accepting
        tokens and keeping what the drafter reads of them, in passes over one token.
      read_cost: what reading the prompt for the drafter costs, in the time that the target takes to
        read it; None: ``draft_cost``.
      knee: the number of tokens up to which a pass takes as long as one over a single token; above
        it, a pass takes time in proportion. It is the machine's ratio of arithmetic to memory
        speed. Default: no pass is ever bound by arithmetic.
      passes: measured costs of the target's pass over N nodes of each row, ``{N: cost}``, relative
        to N = 1, at this batch size. Costs between are interpolated. ``knee`` then decides what
        more rows, the drafter's passes and the reading of the prompt cost. Default: by ``knee``.
      batch: B, the number of rows that are decoded together.
      prompt: the tokens of a prompt; 0: reading it is not counted. The drafter reads it, too.
      new_tokens: the tokens that a request emits.
      pass_seconds: seconds of the target's pass over one token; None: seconds are given in passes.
      most: the longest chain that is considered, where ``acceptance`` is one number.

    Returns:
      a ``Calculation``.

    Raises:
      ValueError: a number is out of its range or of another kind, ``acceptance`` and ``tau`` are
        both given or both missing, or there are too few rates for a depth of the draft.

    Example::

        found = specjax.analysis.calculate(0.8, draft_cost=0.05, num_draft=4)
        found.asked.tokens, found.asked.speedup, found.best.num_draft  # 3.36, 2.80, 8
    """
    costs: dict[str, Any] = {
        "draft_cost": draft_cost,
        "overhead": overhead,
        "draft_overhead": draft_overhead,
        "read_cost": draft_cost if read_cost is None else read_cost,
        "batch": batch,
        "prompt": prompt,
        "new_tokens": new_tokens,
    }
    check_ranges(knee, pass_seconds, most=most, **costs)
    costs |= {name: int(costs[name]) for name in ("batch", "prompt", "new_tokens")}
    acceptance = given_rates(acceptance)
    shape = shape_of(acceptance, num_draft, tree)
    rates = rates_of(acceptance, tau, shape, most)
    machine = _Machine(
        **costs,
        parallel=parallel,
        knee=knee,
        passes=passes_of(passes),
        pass_seconds=1.0 if pass_seconds is None else pass_seconds,
    )
    first = rates[:, :1]  # the rates of chains
    longest = min(len(rates), machine.widest - 1)
    chains = [machine.outlook(trees.chain(n) if n else None, first) for n in range(longest + 1)]
    return Calculation(
        asked=machine.outlook(shape, rates),
        plain=chains[0],
        best=max(chains, key=lambda one: one.speedup),
        chains=chains,
        acceptance=rates.tolist(),
        shape=tree if isinstance(tree, str) else repr(shape),
        batch=costs["batch"],
        unit="passes" if pass_seconds is None else "s",
    )
