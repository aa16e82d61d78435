"""The measurements of the planner at one batch size: texts, rounds, passes and seconds."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ... import acceptance
from ...checkpoints import HeadLM
from ...decoding.round import widths
from ...decoding.stats import Stats
from ...drafters.cascade_levels import levels
from ...drafters.indexed import IndexedDrafter
from ...models.lm import LM
from ...models.seq2seq import encoder_inputs
from ...text import drafter_names
from ...text.options import Options
from ...text.prepare import fit, prepare_measured
from ...text.prompts import check_lm, prompt_ids
from ...text.tables import takes_number
from ...text.task import GenerationTask
from ...text.unused_options import draws_siblings
from ..timing import Call, pass_call, timed_run
from .candidate import Candidate, spell
from .predict import AcceptanceRecord, Costs, Rounds, beyond_the_pass, rounds
from .try_rounds import check_rewinds, try_rounds

PLAIN = "plain"
PLAIN_WAY = (PLAIN, 0)
NO_ROUNDS = Rounds({}, 0, 0, 0)
RESAMPLES = 400  # the number of bootstrap samples
LEAST_TURNS = 2  # a single turn may be disturbed
A_PASS = 0.005  # the intended seconds of a timed call of passes


@dataclasses.dataclass(frozen=True)
class Readings:
    """Seconds of one way to decode.

    Attributes:
      start: float ``[turns, groups]``, the seconds to read the prompts.
      run: float ``[turns, groups]``, the seconds of the rounds.
    """

    start: np.ndarray
    run: np.ndarray


class Survey:
    """All measurements at one batch size.

    A *way* is ``(name of the drafter, num_draft)``. A *group* is one batch of prompts; the last
    group is filled up with the first prompts.

    Args:
      lm: the target.
      prompts: see ``plan``.
      batch: the batch size.
      drafters: the drafters by name.
      lengths: the numbers of drafts to consider, in ascending order.
      common: the options of all ways.
    """

    def __init__(
        self, lm: LM, prompts, batch: int, drafters, lengths: Sequence[int], common: Options
    ):
        check_lm(lm)
        ids, sources = zip(*encoder_inputs.of_prompts(lm, prompts, prompt_ids), strict=True)
        self.lm, self.batch, self.num_prompts, self.common = lm, batch, len(ids), common
        self.drafters = drafters
        self.lengths = {name: possible(drafter, lengths) for name, drafter in drafters.items()}
        rows = np.arange(-(-len(ids) // batch) * batch).reshape(-1, batch) % len(ids)
        self.groups = [[ids[row] for row in group] for group in rows]
        width = encoder_inputs.width_of(sources)
        read = [[sources[row] for row in group] for group in rows]
        self.inputs = [encoder_inputs.of_rows(group, width) for group in read]
        tokens, _, self.buffer = fit(lm, list(ids), common.max_new_tokens)
        self.width = tokens.shape[1]
        self.jobs: dict[tuple[str, int], list[GenerationTask]] = {}
        self.jobs[PLAIN_WAY] = self.prepared(*PLAIN_WAY)
        for name in drafters:
            self.jobs[name, self.lengths[name][-1]] = self.prepared(name, self.lengths[name][-1])
            for length in self.runs(name)[:-1]:
                self.jobs[name, length] = self.prepared(name, length)
        self.stats: dict[tuple[str, int], list[Stats]] = {}
        self.traces: dict[tuple[str, int], list[AcceptanceRecord]] = {}
        self.readings: dict[tuple[str, int], Readings] = {}
        self.passes: dict[int, np.ndarray] = {}  # [turns, groups]
        self.calls: dict[int, Call] = {}
        self.counted: dict[tuple, np.ndarray] = {}

    def ends(self, name: str) -> tuple[int, int]:
        """Returns the shortest and the longest draft of a drafter."""
        return self.lengths[name][0], self.lengths[name][-1]

    def rewinds(self, name: str) -> bool:
        """Returns whether rounds of a drafter can be tried from earlier positions of a text; those
        of ``ngram+NAME`` and the like cannot, since drafts are no beginnings of longer ones."""
        held = drafter_names.without_copying(self.drafters[name])
        if isinstance(held, drafter_names.WithLookup):
            return False
        drafter = self.jobs[name, self.lengths[name][-1]][0].drafter
        # an index of the text holds later places, too, and a threshold learns from each round
        learns = any(
            isinstance(part, IndexedDrafter) or getattr(part, "stop", None) is not None
            for part in levels(drafter)
        )
        return drafter.can_rewind and not learns and not self.rule_changes

    def runs(self, name: str) -> list[int]:
        """Returns the lengths of a drafter that are run, the longest last."""
        return sorted({*self.ends(name)}) if self.rewinds(name) else self.lengths[name]

    @property
    def rule_changes(self) -> str:
        """The rule, if texts do not follow the target's law by it: each number of drafts then has
        texts of its own."""
        rule = acceptance.named(self.common.drafting.rule)
        greedy = self.jobs[PLAIN_WAY][0].request.sampling.greedy
        return "" if rule is None or acceptance.exact(rule, greedy) else f"rule {rule.name}"

    @property
    def ready(self) -> bool:
        """Whether any drafter was measured beside plain decoding."""
        return len(self.readings) > 1

    def prepared(self, name: str, length: int) -> list[GenerationTask]:
        """Returns the requests of one way, one for each group.

        All requests have one shape, so that they share their compiled programs.

        Raises:
          ValueError: ``try_rounds`` cannot go back in a text, see ``check_rewinds``.
        """
        drafting = dataclasses.replace(self.common.drafting, num=length or None)
        drafter, how = self.drafters.get(name), drafting.sibling_sampling
        if how is not None and not draws_siblings(drafter, how):
            drafting = dataclasses.replace(drafting, sibling_sampling=None)
        jobs = [
            prepare_measured(
                self.lm,
                group,
                dataclasses.replace(self.common, drafter=drafter, drafting=drafting, inputs=inputs),
                least_width=self.width,
                least_buffer=self.buffer,
            )
            for group, inputs in zip(self.groups, self.inputs, strict=True)
        ]
        for work in jobs:
            check_rewinds(work)
        return jobs

    # ------------------------------------------------------------ measuring

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Compiles all ways, runs each once, and tries their rounds at every position.

        Args:
          tell: a function that is called with a line of text whenever a measurement begins.
        """
        sampled = not self.jobs[PLAIN_WAY][0].request.sampling.greedy
        for way, jobs in self.jobs.items():
            tell(f"batch {self.batch}: {spell(*way)}")
            timed_run(jobs[0])  # compiles
            traces, spent, self.stats[way] = [], [], []
            for group, work in enumerate(jobs):
                *seconds, state = timed_run(work)
                spent.append(seconds)
                self.stats[way].append(jax.tree.map(np.array, state.stats))
                if way != PLAIN_WAY and not self.rewinds(way[0]):
                    continue
                if sampled or way == PLAIN_WAY or way[1] == self.ends(way[0])[1]:
                    traces.append(try_rounds(work, state))
                else:  # the text is the same, and the drafts are beginnings of the longest drafts
                    traces.append(self.traces[way[0], self.ends(way[0])[1]][group])
            if way == PLAIN_WAY:
                tell(f"batch {self.batch}: passes of the target")
                self.calls = self._pass_calls()
                once = {n: [call.seconds() for _ in jobs] for n, call in self.calls.items()}
                self.passes = {n: np.asarray([seconds]) for n, seconds in once.items()}
            self.traces[way] = traces
            self.readings[way] = Readings(*np.asarray(spent).T[:, None])

    def _pass_calls(self) -> dict[int, Call]:
        mean = int(np.mean([len(ids) for group in self.groups for ids in group]))
        length = min(mean + int(np.max(self.common.max_new_tokens)) // 2, self.buffer)
        at: dict[str, Any] = dict(
            batch=self.batch,
            length=length,
            capacity=self.buffer,
            lasting=A_PASS,
            inputs=self.inputs[0],
        )
        lengths = {length for own in self.lengths.values() for length in own}
        sizes = {1, *(w for n in lengths for w in widths(n + 1))}
        return {n: pass_call(self.lm, n, **at) for n in sorted(sizes)}

    def read(self, turns: int, seconds: float, tell: Callable[[str], None]) -> None:
        """Times all ways and passes in turn, group by group.

        Args:
          turns: the most turns.
          seconds: after so many seconds no further turn begins, from the third turn on.
          tell: a function that is called with a line of text whenever a turn begins.
        """
        begin, ways, found = time.perf_counter(), list(self.jobs), []
        for turn in range(turns):
            if turn >= LEAST_TURNS and time.perf_counter() - begin > seconds:
                break
            tell(f"batch {self.batch}: reading the clock, turn {turn + 1} of at most {turns}")
            spent = {way: [] for way in ways}
            passes = {n: [] for n in self.calls}
            for group in range(len(self.groups)):
                first = (turn + group) % len(ways)
                for way in ways[first:] + ways[:first]:
                    spent[way].append(timed_run(self.jobs[way][group])[:2])
                for n, call in self.calls.items():
                    passes[n].append(call.seconds())
            found.append((spent, passes))
            self.readings = {
                way: Readings(*np.moveaxis(np.asarray([s[way] for s, _ in found]), 2, 0))
                for way in ways
            }
            self.passes = {n: np.asarray([p[n] for _, p in found]) for n in self.calls}

    def verify(self, candidates, chosen, turns, seconds, tell) -> list[Candidate]:
        """Runs some candidates of this batch size and plain decoding in turn.

        Args:
          candidates: all candidates.
          chosen: the candidates that are run.
          turns, seconds, tell: see ``read``.

        Returns:
          ``candidates``, with measured rates for those that were run.
        """
        ways = [PLAIN_WAY, *((c.drafter, c.num_draft) for c in chosen if c.batch == self.batch)]
        jobs = {way: self.jobs.get(way) or self.prepared(*way) for way in ways}
        spent = np.full((turns, len(ways), len(self.groups), 2), np.nan)
        tokens, firsts = np.zeros((2, len(ways), len(self.groups)))
        for way in ways:
            tell(f"batch {self.batch}: verifying {spell(*way)}")
            timed_run(jobs[way][0])
        begin = time.perf_counter()
        for turn in range(turns):
            if turn >= LEAST_TURNS and time.perf_counter() - begin > seconds:
                break
            for group in range(len(self.groups)):
                for index in np.roll(np.arange(len(ways)), turn + group):
                    *times, state = timed_run(jobs[ways[index]][group])
                    spent[turn, index, group] = times
                    tokens[index, group] = int(np.sum(state.stats.emitted))
                    firsts[index, group] = len(state.length)  # of the passes over the prompts
        fastest = np.nanmin(spent, axis=0).sum(axis=1)  # [ways, (start, run)]
        rate = (tokens + firsts).sum(axis=1) / fastest.sum(axis=1)
        rounds_rate = tokens.sum(axis=1) / fastest[:, 1]
        found = []
        for c in candidates:
            if c.batch == self.batch and (c.drafter, c.num_draft) in ways:
                index = ways.index((c.drafter, c.num_draft))
                c = dataclasses.replace(
                    c,
                    measured=float(rate[index]),
                    measured_rounds=float(rounds_rate[index]),
                    measured_ratio=float(rate[index] / rate[0]),
                )
            found.append(c)
        return found

    # ------------------------------------------------------------ predicting

    def relative_costs(self, pick: slice | np.ndarray = slice(None)) -> Costs:
        """Returns the cost of rounds in units of a plain round, over the groups ``pick``."""
        steps = sum(taken.count for taken in self._taken(PLAIN_WAY, 0)[pick])
        unit = self._fastest(PLAIN_WAY).run[pick].sum() / steps
        passes = {n: float(s.min(axis=0)[pick].mean() / unit) for n, s in self.passes.items()}
        drafts: dict[str, dict[int, float]] = {}
        for name, length in self.readings:
            if name != PLAIN and not self.rewinds(name):
                continue  # the rates of such a drafter are not predicted
            taken = sum(self._taken((name, length), length)[pick], start=NO_ROUNDS)
            spent = self._fastest((name, length)).run[pick].sum() / unit
            drafts.setdefault(name, {})[length] = float(beyond_the_pass(spent, taken, passes))
        return Costs(unit=float(unit), passes=passes, drafts=drafts)

    def _taken(self, way, length: int) -> np.ndarray:
        """Returns the rounds of each group at a draft length, on the texts of a way: an array of
        ``Rounds``, ``[groups]``."""
        if (way, length) not in self.counted:
            found = [rounds(trace, length) for trace in self.traces[way]]
            self.counted[way, length] = np.asarray(found, object)
        return self.counted[way, length]

    def _fastest(self, way) -> Readings:
        """Returns the fastest turn of each group, ``[groups]``, which excludes disturbances."""
        reading = self.readings[way]
        return Readings(reading.start.min(axis=0), reading.run.min(axis=0))

    def candidates(self) -> list[Candidate]:
        """Returns all ways with predicted rates, and intervals by resampling the groups."""
        groups, rng = len(self.groups), np.random.default_rng(0)
        counts = np.asarray([taken.count for taken in self._taken(PLAIN_WAY, 0)])
        if not counts.any():
            raise ValueError(
                "prompts: each text ends with its first token, which the reading of the prompt "
                "emits, so that there is no round to plan; give prompts with longer answers"
            )
        picks = [np.arange(groups)]
        picks += [rng.integers(0, groups, groups) for _ in range(RESAMPLES if groups > 1 else 0)]
        picks = [pick for pick in picks if counts[pick].any()]  # the others have no rate of rounds
        costs = [self.relative_costs(pick) for pick in picks]
        found, plain = [], None
        for name, length in self._ways():
            if name != PLAIN and not self.rewinds(name):
                found.append(self._as_measured(name, length, picks, plain))
                continue
            # above temperature 0, a length that was run has its own text
            known = name, length
            if known not in self.traces:
                known = name, self.ends(name)[1]
            traces, reading = self.traces[known], self._fastest(known).start
            taken = self._taken(known, length)
            tokens = np.asarray([trace.tokens for trace in traces])
            firsts = np.asarray([len(trace.proposed) for trace in traces])
            rates = []
            for pick, cost in zip(picks, costs, strict=True):
                all_taken = sum(taken[pick], start=NO_ROUNDS)
                # where a round seems faster than a plain one, the clock was noisy
                spent = max(cost.of(all_taken, name, length), all_taken.count) * cost.unit
                whole = (tokens + firsts)[pick].sum() / (spent + reading[pick].sum())
                rates.append([whole, tokens[pick].sum() / spent])
            rates = np.asarray(rates)  # [picks, (whole, rounds alone)]
            plain = rates[:, 0] if plain is None else plain
            ratios, total = rates[:, 0] / plain, sum(taken, start=NO_ROUNDS)
            joined = AcceptanceRecord(
                proposed=[row for trace in traces for row in trace.proposed],
                accepted=[row for trace in traces for row in trace.accepted],
            )
            found.append(
                Candidate(
                    drafter=name,
                    num_draft=length,
                    batch=self.batch,
                    tau=float(tokens.sum() / total.per_row),
                    acceptance=total.accepted / total.drafted if total.drafted else math.nan,
                    by_position=joined.acceptance(length),
                    rate=float(rates[0, 0]),
                    rounds_rate=float(rates[0, 1]),
                    ratio=float(ratios[0]),
                    interval=_interval(ratios[1:]),
                )
            )
        return found

    def _as_measured(self, name: str, length: int, picks, plain) -> Candidate:
        """Returns the candidate of a way whose rounds cannot be tried again, with measured rates.

        Args:
          name: the drafter.
          length: the number of drafts.
          picks: the resampled groups of ``candidates``.
          plain: the rate of plain decoding for each of ``picks``.
        """
        fastest, stats = self._fastest((name, length)), self.stats[name, length]
        tokens = np.asarray([np.sum(one.emitted) for one in stats])
        spent = np.stack([fastest.start + fastest.run, fastest.run])
        both = np.stack([tokens + [len(one.rounds) for one in stats], tokens])
        rates = [both[:, pick].sum(axis=1) / spent[:, pick].sum(axis=1) for pick in picks]
        rates = np.asarray(rates)  # [picks, (whole, rounds alone)]
        ratios = rates[:, 0] / plain
        whole = jax.tree.map(lambda *parts: np.concatenate(parts), *stats)
        drafted, kept = (np.sum(x, axis=0) for x in (whole.drafted_at, whole.accepted_at))
        tried = np.minimum(drafted, np.concatenate([drafted[:1], kept[:-1]]))
        return Candidate(
            drafter=name,
            num_draft=length,
            batch=self.batch,
            tau=whole.tau,
            acceptance=whole.acceptance,
            by_position=np.where(tried > 0, kept / np.maximum(tried, 1), np.nan).tolist(),
            rate=float(rates[0, 0]),
            rounds_rate=float(rates[0, 1]),
            ratio=float(ratios[0]),
            interval=_interval(ratios[1:]),
            predicted=False,
        )

    def _ways(self) -> list[tuple[str, int]]:
        """Returns plain decoding, and the draft lengths of each drafter that can be predicted."""
        ways: list[tuple[str, int]] = [PLAIN_WAY]
        for name in self.drafters:
            ends = [length for other, length in self.readings if other == name]
            if len(ends) == len(self.runs(name)):
                ways += [(name, length) for length in self.lengths[name]]
            else:  # interrupted
                ways += [(name, length) for length in ends]
        return ways


def possible(drafter, lengths: Sequence[int]) -> list[int]:
    """Returns the lengths that a drafter can draft.

    Heads draft at most as many tokens as they have depths. A table whose other settings determine
    the number of drafts has the single length 0.

    Args:
      drafter: the drafter, or its name.
      lengths: the requested lengths, in ascending order.
    """
    if isinstance(drafter, str) and not takes_number(drafter):
        return [0]
    held = drafter_names.without_copying(drafter)
    most = held.drafter.max_depth if isinstance(held, HeadLM) else None
    return [*lengths] if most is None else sorted({min(length, most) for length in lengths})


def _interval(values: np.ndarray) -> tuple[float, float] | None:
    if not values.size:
        return None
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)
