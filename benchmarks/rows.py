"""The kinds of rows of suites: ``KINDS[kind](bench, **settings) -> figures``.

Figures are plain numbers, lists and dictionaries, ready for JSON. Seconds are medians unless a
name says otherwise. Ratios come from pairs of runs in turn, are above 1 if the second run is
faster, and have an interval of about 95 %.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.analysis import round_timing, timing
from specjax.analysis.comparison import repeated_ngrams
from specjax.decoding.state import State
from specjax.drafters import registry
from specjax.text.prepare import SMALLEST_BUFFER, round_up
from specjax.text.task import GenerationTask

from . import (
    drafting,
    heldout,
    micro,
    pairs,
    peers,
    regeneration,
    self_drafting,
    serving,
    small_caches,
    training,
)
from . import quality as rule_quality
from .cpu_peers.measure import cpu_peers
from .figures import interval, spread
from .jobs import SHORT, informed, made_up, make_job

PART_ROUNDS = 8  # consecutive rounds over which the parts of a round are timed
PARTS = ("draft", "verify", "accept", "commit", "observe")


@dataclasses.dataclass(frozen=True)
class Bench:
    """The state that the rows of one run of a suite share.

    Attributes:
      cache: the folder of the checkpoints of made pairs.
      dtype: the dtype of weights and caches.
      on_device: whether pairs are made on the device and never written.
    """

    cache: Path
    dtype: str = "float32"
    on_device: bool = False

    def pair(self, name: str, agreement: float | None = None) -> pairs.Pair:
        """Returns a pair. The last pair is kept, so rows of one pair should follow each other."""
        return _pair(name, agreement, self.dtype, None if self.on_device else self.cache)

    def bandwidth(self) -> float:
        """Measures the bytes per second that the fastest product reads."""
        return timing.bandwidth(dtype=self.dtype, repetitions=5).best


@functools.lru_cache(maxsize=1)
def _pair(name, agreement, dtype, cache):
    if name == "embedded":
        return pairs.embedded(dtype)
    return pairs.pair(name, agreement, dtype=dtype, cache=cache)


# ---------------------------------------------------------------- kinds of rows


def bandwidth(bench: Bench) -> dict:
    """Measures the bytes per second that products with a few columns read."""
    found = timing.bandwidth(dtype=bench.dtype)
    return {"best": found.best, "by_columns": found.by_columns, "weights": found.weights}


def decode(
    bench: Bench,
    *,
    pair: str,
    drafter: str,
    num_draft: int = 0,
    tree: str | None = None,
    agreement: float | None = None,
    batch: int = 1,
    context: int = 64,
    new: int = 64,
    temperature: float = 0.0,
    read: bool = True,
    parts: bool = True,
    repetitions: int = 7,
) -> dict:
    """Measures plain and speculative decoding of one batch, in turn.

    Args:
      bench: the state of the run.
      pair: the name of the pair.
      drafter: as ``jobs.make_job`` takes it.
      num_draft: the number of tokens that are drafted in a round; 0: the usual number of a table.
      tree: a tree as ``topology.parse`` takes it, instead of a chain.
      agreement: the agreement of a made pair.
      batch: the number of rows.
      context: the tokens of a prompt.
      new: the tokens that are emitted for each row.
      temperature: 0 is greedy.
      read: whether the context is read; False: it is made up, see ``jobs.made_up``.
      parts: whether the parts of a round, bandwidth, memory and compilation are measured too,
        which doubles the time.
      repetitions: the number of pairs of runs.
    """
    made = bench.pair(pair, agreement)
    tokens = pairs.prompts(made.target.config, batch, context if read else SHORT)
    # slots for the rounds whose parts are timed
    if tree is not None:
        num_draft = trees.parse(tree).depth
    deepest = num_draft
    if not num_draft and drafter in registry.table_names():
        deepest = registry.drafter_class(drafter).for_target(made.target.target).depth
    limit = made.target.config.context_length
    end = context + max(new, PART_ROUNDS * (deepest + 1) + new if parts else 0)
    capacity = round_up(min(end, limit), SMALLEST_BUFFER, limit)
    common = dict(temperature=temperature, capacity=capacity)
    works, begins, ends = {}, {}, {}
    for name, said, shape in (
        ("plain", ("plain", 0), None),
        ("speculative", (drafter, num_draft), tree),
    ):
        work = make_job(made, *said, tokens, new, **common, tree=shape)
        begin = work.start
        if not read:
            state = made_up(work, made, context, new)
            begin = functools.partial(jax.tree.map, jnp.copy, state)
        if name == "speculative":
            work = informed(work, ends["plain"], begin)
            begin = work.start if read else begin
        works[name], begins[name] = work, begin
        ends[name] = work.burst(capacity, begin())
    texts = {name: np.asarray(end.tokens)[:, context : context + new] for name, end in ends.items()}
    stats = ends["speculative"].stats

    calls = {}
    for name, work in works.items():
        run = functools.partial(_rounds, work)
        calls[name] = timing.Call(run, begins[name])
        if read:
            calls[f"{name} read"] = timing.Call(work.start)
            calls[f"{name} first"] = round_timing.first_token_call(work)
    rates = [bench.bandwidth()] if parts else []
    seconds = timing.alternate(calls, repetitions=repetitions, warmup=1)
    rates += [bench.bandwidth()] if parts else []

    later = new - read  # reading the prompt emits the first token
    emitted = batch * later
    step = np.median(seconds["plain"]) / later
    used = timing.weight_bytes(made.target) + _entries(works["plain"], context + new // 2)
    figures = {
        "synthetic": made.synthetic or stats.drafter.startswith("synthetic"),
        "pair_found": made.describe(),
        "drafter_name": stats.drafter,
        "tau": stats.tau,
        "acceptance": stats.acceptance if deepest else None,
        "acceptance_by_position": stats.acceptance_by_position.tolist(),
        "rounds": int(np.max(stats.rounds)),
        "emitted": int(np.sum(stats.emitted)),
        "plain_tokens_per_second": spread(emitted / seconds["plain"]),
        "tokens_per_second": spread(emitted / seconds["speculative"]),
        "ratio_rounds": interval(timing.ratio(seconds["plain"], seconds["speculative"])),
        "seconds_per_plain_step": float(step),
        "seconds_per_round": float(np.median(seconds["speculative"]) / np.max(stats.rounds)),
        "seconds_per_token": {name: spread(seconds[name] / later) for name in works},
        "roofline_fraction": float(used / max(rates) / step) if parts else None,
        "repeated_4grams": repeated_ngrams(list(texts["speculative"])),
        "identical": None
        if temperature
        else bool(np.array_equal(texts["plain"], texts["speculative"])),
    }
    if read:
        whole = {name: seconds[name] + seconds[f"{name} read"] for name in works}
        figures["ratio_whole"] = interval(timing.ratio(whole["plain"], whole["speculative"]))
        figures["first_token"] = {n: spread(seconds[f"{n} first"]) for n in works}
    if parts:
        figures |= _anatomy(works["speculative"], begins["speculative"], deepest)
    return figures


def _rounds(work: GenerationTask, state: State):
    return work.burst(work.capacity, state).length


def _entries(work: GenerationTask, length: int) -> int:
    """Returns the bytes of the target's cache that a step at ``length`` reads."""
    cache = jax.eval_shape(work.start).cache
    return timing.tree_bytes(cache) * length // work.capacity


def _anatomy(work: GenerationTask, begin, num_draft: int) -> dict:
    """Measures the parts of a round, the loop's efficiency, memory, and seconds of compilation."""
    state = jax.block_until_ready(work.burst(2, begin()))
    room = work.capacity - int(jnp.max(state.length))
    rounds = min(PART_ROUNDS, room // (num_draft + 1))
    figures = {"memory": dataclasses.asdict(round_timing.program_memory(work))}
    if rounds:
        seconds = timing.alternate(
            round_timing.part_calls(work, state, rounds=rounds), repetitions=7
        )
        figures["parts"] = {name: float(np.median(seconds[name])) for name in (*PARTS, "round")}
        figures["loop_efficiency"] = interval(round_timing.loop_efficiency(seconds))
    return figures


def passes(
    bench: Bench,
    *,
    pair: str,
    nodes: list[int],
    agreement: float | None = None,
    batch: int = 1,
    length: int = 255,
    capacity: int = 512,
    repetitions: int = 15,
) -> dict:
    """Measures T(N), the time of the target's pass over N nodes, against T(1) and the floor.

    The floor is the time in which the fastest product reads the weights. It is timed in turn with
    the passes, because the memory's rate drifts by a third within a minute on a shared machine.
    """
    made = bench.pair(pair, agreement)
    common = dict(batch=batch, length=length, capacity=capacity)
    products, size = timing.product_calls(bench.dtype)
    calls = {str(n): timing.pass_call(made.target, n, **common) for n in nodes}
    calls |= {f"product {m}": call for m, call in products.items()}
    found = timing.alternate(calls, repetitions=repetitions)
    seconds = {n: found[str(n)] for n in nodes}
    best = min((found[f"product {m}"] for m in products), key=np.median)
    floor = best * timing.weight_bytes(made.target) / size
    return {
        "bandwidth": float(size / np.median(best)),
        "pair_found": made.describe(),
        "floor": float(np.median(floor)),
        "seconds": {n: spread(s) for n, s in seconds.items()},
        "over_floor": {n: interval(timing.ratio(s, floor)) for n, s in seconds.items()},
        "over_one": {
            n: interval(timing.ratio(s, seconds[nodes[0]]))
            for n, s in seconds.items()
            if nodes[0] == 1
        },
    }


def buffers(
    bench: Bench,
    *,
    pair: str,
    capacities: list[int],
    agreement: float | None = None,
    nodes: int = 1,
    length: int = 255,
    repetitions: int = 15,
) -> dict:
    """Measures a pass in buffers of several sizes; its time should depend on used tokens only."""
    made = bench.pair(pair, agreement)
    calls = {
        str(c): timing.pass_call(made.target, nodes, length=length, capacity=c) for c in capacities
    }
    seconds = timing.alternate(calls, repetitions=repetitions)
    first = seconds[str(capacities[0])]
    return {
        "seconds": {c: spread(s) for c, s in seconds.items()},
        "over_first": {c: interval(timing.ratio(s, first)) for c, s in seconds.items()},
    }


KINDS = {
    "bandwidth": bandwidth,
    "passes": passes,
    "buffers": buffers,
    "decode": decode,
    "drafters": heldout.measure_ways,
    "tables": heldout.measure_ways,
    "drafting": drafting.table_cost,
    "datastore": drafting.made_datastore,
    "requests": drafting.repeated_requests,
    "quality": rule_quality.measure_rule,
    "product": micro.product_orders,
    "attention": micro.attention_layouts,
    "peer": peers.side_by_side,
    "cpu peers": cpu_peers,
    "serving": serving.measure_serving,
    "regeneration": regeneration.measure_regeneration,
    "part memory": self_drafting.part_memory,
    "resumed pass": self_drafting.resumed_pass,
    "skip search": self_drafting.skip_search,
    "early exits": self_drafting.early_exits,
    "schedules": self_drafting.schedules,
    "training": training.training,
    "long context": training.long_context,
    "budgets": small_caches.acceptance_by_budget,
    "drafting cost": small_caches.drafting_cost,
    "long rounds": small_caches.long_rounds,
}


def run(row: dict, bench: Bench) -> dict:
    """Returns the figures of one row, ``{"kind": ..., **settings}``."""
    settings = {k: v for k, v in row.items() if k != "kind"}
    return KINDS[row["kind"]](bench, **settings)
