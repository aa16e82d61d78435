"""What the planner measures at one batch size: texts, rounds, passes, seconds."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...checkpoints import HeadLM
from ...decoding import loop
from ...decoding.round import widths
from ...drafters.draft_model import DraftModel
from ...drafters.heads import HeadDrafter
from ...models.causal_lm import CausalLM
from ...models.lm import LM
from ...models.seq2seq import encoder_inputs
from ...text.options import Options
from ...text.prepare import fit
from ...text.prompts import check_lm, prompt_ids
from ...text.round_costs import prepare_measured
from ...text.task import GenerationTask
from ..timing import Call, pass_call
from .predict import AcceptanceRecord, Costs, Rounds, beyond_the_pass, rounds

PLAIN = "plain"
PLAIN_WAY = (PLAIN, 0)
NO_ROUNDS = Rounds({}, 0, 0, 0)
RESAMPLES = 400  # of the bootstrap
LEAST_TURNS = 2  # one alone may have met with something
A_PASS = 0.005  # seconds that a timed call of passes should last


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to decode, and what to expect of it. Rates are new tokens a second, over all rows.

    Attributes:
      drafter, num_draft, batch: the way; ``plain`` with 0 drafts is plain decoding.
      tau: tokens that a row's pass of the target yields.
      acceptance: of drafted tokens, in [0, 1]; NaN where none are.
      by_position: for each position of a draft, given that all before were accepted.
      rate: of whole requests, the reading of prompts included.
      rounds_rate: of the rounds alone.
      ratio, interval: ``rate`` over that of plain decoding at the same batch, and about 95 % of
        what other prompts of this kind would give (bootstrap); None with one group.
      measured, measured_rounds, measured_ratio: the same rates and ratio as they came out, where
        they were verified.
    """

    drafter: str
    num_draft: int
    batch: int
    tau: float
    acceptance: float
    by_position: list[float]
    rate: float
    rounds_rate: float
    ratio: float
    interval: tuple[float, float] | None
    measured: float | None = None
    measured_rounds: float | None = None
    measured_ratio: float | None = None

    def __str__(self) -> str:
        return _spell(self.drafter, self.num_draft)


@dataclasses.dataclass(frozen=True)
class Readings:
    """Seconds of one way, ``[turns, groups]``."""

    start: np.ndarray
    run: np.ndarray


class Survey:
    """All that is measured at one batch size. A *way* is ``(drafter's name, num_draft)``.

    A *group* is one batch of prompts; the last is filled up with the first prompts.
    """

    def __init__(
        self, lm: LM, prompts, batch: int, drafters, lengths: Sequence[int], common: Options
    ):
        check_lm(lm)
        ids, sources = zip(*encoder_inputs.of_prompts(lm, prompts, prompt_ids), strict=True)
        self.lm, self.batch, self.num_prompts, self.common = lm, batch, len(ids), common
        self.drafters = drafters
        self.lengths = {name: _possible(drafter, lengths) for name, drafter in drafters.items()}
        rows = np.arange(-(-len(ids) // batch) * batch).reshape(-1, batch) % len(ids)
        self.groups = [[ids[row] for row in group] for group in rows]
        width = encoder_inputs.width_of(sources)
        read = [[sources[row] for row in group] for group in rows]
        self.inputs = [encoder_inputs.of_rows(group, width) for group in read]
        tokens, _, self.buffer = fit(lm, ids, common.max_new_tokens)
        self.width = tokens.shape[1]
        self.jobs = {PLAIN_WAY: self.prepared(*PLAIN_WAY)}
        for name in drafters:
            for length in sorted({*self.ends(name)}, reverse=True):
                self.jobs[name, length] = self.prepared(name, length)
        self.traces: dict[tuple[str, int], list[AcceptanceRecord]] = {}
        self.readings: dict[tuple[str, int], Readings] = {}
        self.passes: dict[int, np.ndarray] = {}  # [turns, groups]
        self.calls: dict[int, Call] = {}
        self.counted: dict[tuple, np.ndarray] = {}

    def ends(self, name: str) -> tuple[int, int]:
        """The shortest and the longest length of a drafter: those that are run."""
        return self.lengths[name][0], self.lengths[name][-1]

    @property
    def ready(self) -> bool:
        """Whether there is anything to compare with plain decoding."""
        return len(self.readings) > 1

    def prepared(self, name: str, length: int) -> list[GenerationTask]:
        """The jobs of one way, all in one shape, so that they share their programs.

        Raises:
          ValueError: a text that ``trace`` cannot go back in.
        """
        jobs = [
            prepare_measured(
                self.lm,
                group,
                dataclasses.replace(
                    self.common,
                    drafter=self.drafters.get(name),
                    drafting=dataclasses.replace(self.common.drafting, num=length or None),
                    inputs=inputs,
                ),
                least_width=self.width,
                least_buffer=self.buffer,
            )
            for group, inputs in zip(self.groups, self.inputs, strict=True)
        ]
        check_rewinds(jobs[0])
        return jobs

    # ------------------------------------------------------------ measuring

    def prepare(self, tell: Callable[[str], None]) -> None:
        """Compiles all ways and traces them; what is ready has a first turn of readings."""
        sampled = not self.jobs[PLAIN_WAY][0].request.sampling.greedy
        for way, jobs in self.jobs.items():
            tell(f"batch {self.batch}: {_spell(*way)}")
            run_once(jobs[0])  # compiles
            traces, spent = [], []
            for group, work in enumerate(jobs):
                *seconds, state = run_once(work)
                spent.append(seconds)
                if sampled or way == PLAIN_WAY or way[1] == self.ends(way[0])[1]:
                    traces.append(trace(work, state))
                else:  # the same text, and the beginnings of the same drafts
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
        at = dict(batch=self.batch, length=length, capacity=self.buffer, lasting=A_PASS)
        at["inputs"] = self.inputs[0]
        lengths = {length for own in self.lengths.values() for length in own}
        sizes = {1, *(w for n in lengths for w in widths(n + 1))}
        return {n: pass_call(self.lm, n, **at) for n in sorted(sizes)}

    def read(self, turns: int, seconds: float, tell: Callable[[str], None]) -> None:
        """Reads the clock, all ways and passes in turn, group by group."""
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
                    spent[way].append(run_once(self.jobs[way][group])[:2])
                for n, call in self.calls.items():
                    passes[n].append(call.seconds())
            found.append((spent, passes))
            self.readings = {
                way: Readings(*np.moveaxis(np.asarray([s[way] for s, _ in found]), 2, 0))
                for way in ways
            }
            self.passes = {n: np.asarray([p[n] for _, p in found]) for n in self.calls}

    def verify(self, candidates, chosen, turns, seconds, tell) -> list[Candidate]:
        """``candidates`` with measured rates where they are ``chosen`` or plain, and of this
        batch; runs them and plain decoding in turn."""
        ways = [PLAIN_WAY, *((c.drafter, c.num_draft) for c in chosen if c.batch == self.batch)]
        jobs = {way: self.jobs.get(way) or self.prepared(*way) for way in ways}
        spent = np.full((turns, len(ways), len(self.groups), 2), np.nan)
        tokens = np.zeros((len(ways), len(self.groups)))
        for way in ways:
            tell(f"batch {self.batch}: verifying {_spell(*way)}")
            run_once(jobs[way][0])
        begin = time.perf_counter()
        for turn in range(turns):
            if turn >= LEAST_TURNS and time.perf_counter() - begin > seconds:
                break
            for group in range(len(self.groups)):
                for index in np.roll(np.arange(len(ways)), turn + group):
                    *times, state = run_once(jobs[ways[index]][group])
                    spent[turn, index, group] = times
                    tokens[index, group] = int(np.sum(state.stats.emitted))
        fastest = np.nanmin(spent, axis=0).sum(axis=1)  # [ways, (start, run)]
        rate = tokens.sum(axis=1) / fastest.sum(axis=1)
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

    def relative_costs(self, pick=slice(None)) -> Costs:
        """What rounds cost in plain rounds, over the groups ``pick``."""
        steps = sum(taken.count for taken in self._taken(PLAIN_WAY, 0)[pick])
        unit = self._fastest(PLAIN_WAY).run[pick].sum() / steps
        passes = {n: float(s.min(axis=0)[pick].mean() / unit) for n, s in self.passes.items()}
        drafts: dict[str, dict[int, float]] = {}
        for name, length in self.readings:
            taken = sum(self._taken((name, length), length)[pick], start=NO_ROUNDS)
            spent = self._fastest((name, length)).run[pick].sum() / unit
            drafts.setdefault(name, {})[length] = float(beyond_the_pass(spent, taken, passes))
        return Costs(unit=float(unit), passes=passes, drafts=drafts)

    def _taken(self, way, length: int) -> np.ndarray:
        """Rounds of each group at a draft length, on the texts of a way: objects ``[groups]``."""
        if (way, length) not in self.counted:
            found = [rounds(trace, length) for trace in self.traces[way]]
            self.counted[way, length] = np.asarray(found, object)
        return self.counted[way, length]

    def _fastest(self, way) -> Readings:
        """The fastest turn of each group, ``[groups]``: what else the machine did is left out."""
        reading = self.readings[way]
        return Readings(reading.start.min(axis=0), reading.run.min(axis=0))

    def candidates(self) -> list[Candidate]:
        """All ways, with predicted rates; intervals by resampling the groups."""
        groups, rng = len(self.groups), np.random.default_rng(0)
        picks = [np.arange(groups)]
        picks += [rng.integers(0, groups, groups) for _ in range(RESAMPLES if groups > 1 else 0)]
        costs = [self.relative_costs(pick) for pick in picks]
        found, plain = [], None
        for name, length in self._ways():
            # where tokens are drawn, a length that was run has a text of its own
            known = name, length
            if known not in self.traces:
                known = name, self.ends(name)[1]
            traces, reading = self.traces[known], self._fastest(known).start
            taken = self._taken(known, length)
            tokens = np.asarray([trace.tokens for trace in traces])
            rates = []
            for pick, cost in zip(picks, costs, strict=True):
                spent = cost.of(sum(taken[pick], start=NO_ROUNDS), name, length) * cost.unit
                rates.append(tokens[pick].sum() / np.asarray([spent + reading[pick].sum(), spent]))
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

    def _ways(self) -> list[tuple[str, int]]:
        """Plain decoding, and the lengths of each drafter that are known or lie between two."""
        ways = [PLAIN_WAY]
        for name in self.drafters:
            ends = [length for other, length in self.readings if other == name]
            if len(ends) == len({*self.ends(name)}):
                ways += [(name, length) for length in self.lengths[name]]
            else:  # interrupted
                ways += [(name, length) for length in ends]
        return ways


def _possible(drafter, lengths: Sequence[int]) -> list[int]:
    """``lengths`` as far as a drafter goes: heads draft no more tokens than there are heads."""
    most = drafter.drafter.max_depth if isinstance(drafter, HeadLM) else None
    return [*lengths] if most is None else sorted({min(length, most) for length in lengths})


def run_once(work: GenerationTask) -> tuple[float, float, loop.State]:
    """Seconds of reading the prompts, seconds of all rounds, and the state at the end."""
    begin = time.perf_counter()
    state = jax.block_until_ready(work.start())
    middle = time.perf_counter()
    state = jax.block_until_ready(work.burst(work.capacity, state))
    return middle - begin, time.perf_counter() - middle, state


def check_rewinds(work: GenerationTask) -> None:
    """Raises ``ValueError`` where a state cannot be set back to an earlier token of its text: a
    window's cache has forgotten what it held then, and so has a law that carries a state."""
    target = work.lm.target
    drafter = work.drafter
    small = (drafter.model,) if isinstance(drafter, DraftModel) else ()
    for model in (target, *target.parts, *small):
        if not isinstance(model, CausalLM):
            continue
        config = model.config
        layers = range(config.num_layers)
        if any(config.is_ring(i, config.slots(i, work.capacity)) for i in layers):
            raise ValueError(
                f"plan: the buffer of {work.capacity} tokens is longer than the window of "
                f"{config.window} that {config.model_type} attends to, and planning goes back in "
                "the text; give shorter prompts or fewer max_new_tokens"
            )
    if hasattr(work.request.sampling.logits_processor, "step"):
        raise ValueError(
            "plan: a logits processor that carries a state cannot be planned with, since "
            "planning goes back in it; leave logits_processor= out"
        )


def trace(work: GenerationTask, state: loop.State) -> AcceptanceRecord:
    """Tries a round of ``work`` from every position of the text in ``state``, its end.

    From the last position to the first: a round reads what is committed before its root alone,
    in the text and in the caches, and writes behind. That holds for drafters whose state is a
    cache, or nothing. Heads read what the target made of the token before the root, which is known
    once that is committed: they go through the text from the first position on, see ``_walk``.
    """
    if isinstance(work.drafter, HeadDrafter):
        return _walk(work, state)
    begins = np.asarray([len(prompt) for prompt in work.prompts])
    ends = np.asarray(state.length) - begins  # new tokens of each row
    depth, batch = work.drafter.depth, len(begins)
    proposed = np.zeros((batch, ends.max()), np.int64)
    accepted = np.zeros_like(proposed)
    state = dataclasses.replace(state, stops=jnp.full_like(state.stops, -1))
    for at in reversed(range(proposed.shape[1]) if depth else ()):
        live = at < ends
        zeros = dict.fromkeys(("drafted", "accepted"), np.zeros(batch, np.int32))
        fresh = jax.device_put(
            dict(
                length=(begins + np.minimum(at, ends)).astype(np.int32),
                budget=np.where(live, depth + 1, 0).astype(np.int32),
                num_empty_rounds=np.zeros(batch, np.int32),
                stats=zeros,
            )
        )
        stats = dataclasses.replace(state.stats, **fresh.pop("stats"))
        state = work.burst(1, dataclasses.replace(state, stats=stats, **fresh))
        proposed[:, at] = state.stats.drafted
        accepted[:, at] = state.stats.accepted
    return _cut(proposed, accepted, ends)


def _walk(work: GenerationTask, state: loop.State) -> AcceptanceRecord:
    """``trace`` of heads: at each position a whole round is tried on a copy, and a round with room
    for one token goes on. Where tokens are drawn, these are drawn anew."""
    ends = np.asarray(state.length) - [len(prompt) for prompt in work.prompts]
    proposed = np.zeros((len(ends), ends.max()), np.int64)
    accepted = np.zeros_like(proposed)
    state = work.start()
    state = dataclasses.replace(state, stops=jnp.full_like(state.stops, -1))

    def round_of(state: loop.State, budget: np.ndarray) -> loop.State:
        zero = jnp.zeros(len(ends), jnp.int32)
        stats = dataclasses.replace(state.stats, drafted=zero, accepted=zero.copy())
        budget = jnp.asarray(budget, jnp.int32)
        return work.burst(1, dataclasses.replace(state, stats=stats, budget=budget))

    for at in range(ends.max()):
        live = at < ends
        tried = round_of(jax.tree.map(jnp.copy, state), np.where(live, work.drafter.depth + 1, 0))
        proposed[:, at], accepted[:, at] = tried.stats.drafted, tried.stats.accepted
        state = round_of(state, live)
    return _cut(proposed, accepted, ends)


def _cut(proposed: np.ndarray, accepted: np.ndarray, ends: np.ndarray) -> AcceptanceRecord:
    """What is known of each row, up to the end of its text."""
    return AcceptanceRecord(
        proposed=[row[:end] for row, end in zip(proposed, ends, strict=True)],
        accepted=[row[:end] for row, end in zip(accepted, ends, strict=True)],
    )


def _interval(values: np.ndarray) -> tuple[float, float] | None:
    if not values.size:
        return None
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def _spell(name: str, length: int) -> str:
    return f"{name}, {length} a round" if length else name
