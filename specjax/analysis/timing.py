"""The instruments: interleaved timing, ratios with intervals, bandwidth, the parts of a round.

All timings are seconds on the host's clock, compiled and warmed up, and each belongs to a set
that was measured *in turn*: a machine that slows down for a while then slows all alike, and only
ratios within a set mean anything on a machine that is shared. What takes microseconds is repeated
within one program, since a call of its own would measure the call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from .._internal.host import last_level_cache
from ..decoding import loop
from ..models.layers import product
from ..text.task import GenerationTask
from ..types import Draft, PyTree
from . import replay

WORTH_TIMING = 0.02  # seconds that a timed call should last at least
MOST_TIMES = 256  # repetitions within one timed call
COLUMNS = (1, 4, 8, 16)  # of the products whose best rate counts as the bandwidth
LEAST_BYTES, MOST_BYTES = 256 << 20, 1 << 30  # of the weights in them; between, 8 times the cache


@dataclasses.dataclass(frozen=True)
class Call:
    """Something to time that does its work several times, or needs buffers to give away.

    Attributes:
      run: called with what ``prepare`` returns, or with nothing.
      prepare: makes the argument; not timed.
      times: how often ``run`` does what is to be timed; its seconds are divided by it.
    """

    run: Callable[..., Any]
    prepare: Callable[[], Any] | None = None
    times: int = 1

    def __call__(self) -> Any:
        return self.run() if self.prepare is None else self.run(self.prepare())

    def seconds(self) -> float:
        """Of one run, divided by ``times``."""
        given = () if self.prepare is None else (jax.block_until_ready(self.prepare()),)
        begin = time.perf_counter()
        jax.block_until_ready(self.run(*given))
        return (time.perf_counter() - begin) / self.times


def alternate(
    calls: Mapping[str, Callable[[], Any]], *, repetitions: int, warmup: int = 2
) -> dict[str, np.ndarray]:
    """Seconds of each call, float64 ``[repetitions]``, called in turn; index ``i`` is one turn.

    Who goes first rotates, so that neither drift nor what ran just before favours anyone.
    ``warmup`` turns are thrown away. A ``Call`` is timed without its preparation.

    Example::

        seconds = alternate({"plain": run_plain, "ngram": run_ngram}, repetitions=9)
        median, (low, high), confidence = ratio(seconds["plain"], seconds["ngram"])

    Raises:
      ValueError: nothing to call, or no repetitions.
    """
    if not calls or repetitions < 1 or warmup < 0:
        raise ValueError(
            f"alternate: {len(calls)} calls, repetitions={repetitions}, warmup={warmup}: give at "
            "least one call, one repetition, and no negative warm-up"
        )
    names = list(calls)
    timed = {n: c if isinstance(c, Call) else Call(c) for n, c in calls.items()}
    seconds = {name: np.empty(repetitions) for name in names}
    for turn in range(-warmup, repetitions):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            spent = timed[name].seconds()
            if turn >= 0:
                seconds[name][turn] = spent
    return seconds


def median_interval(values: np.ndarray) -> tuple[float, tuple[float, float], float]:
    """The median of ``values [n]``, an interval for it of about 95 %, and its exact confidence.

    The number of values below the true median is binomial(n, 1/2), whatever their law, so the
    ``k``-th smallest and ``k``-th largest enclose it with a known probability. Below 6 values no
    interval reaches 95 %: it is then the whole range.
    """
    values, n = np.sort(values), len(values)
    below = np.cumsum([math.comb(n, i) for i in range(n)]) / 2.0**n
    k = max(0, int(np.sum(below <= 0.025)) - 1)
    return (
        float(np.median(values)),
        (float(values[k]), float(values[-1 - k])),
        float(1 - 2 * below[k]),
    )


def ratio(a: np.ndarray, b: np.ndarray) -> tuple[float, tuple[float, float], float]:
    """Median of the paired ratios ``a / b`` with its interval, see ``median_interval``.

    ``a`` and ``b`` are seconds from one ``alternate``: with ``a`` the baseline's, above 1 means
    that ``b`` is faster.
    """
    if len(a) != len(b):
        raise ValueError(f"ratio: {len(a)} and {len(b)} values: they are pairs, from one alternate")
    return median_interval(np.asarray(a) / np.asarray(b))


# ---------------------------------------------------------------- one pass of the target


def pass_call(
    lm,
    nodes: int,
    *,
    batch: int = 1,
    length: int = 255,
    capacity: int = 256,
    lasting: float = WORTH_TIMING,
    inputs=None,
) -> Call:
    """The target's ``verify`` over a chain of ``nodes`` nodes and the argmax of its logits.

    Args:
      lm: an ``LM``, or ``(target, params)``.
      nodes: N, the root included: 1 is a plain step.
      length: committed tokens before the root, in a cache of ``capacity`` slots, which the pass
        only reads.
      lasting: seconds that a call should take: as many passes as it needs for that, each over the
        tokens that the one before chose.
      inputs: what an encoder read.
    """
    target, params = lm if isinstance(lm, tuple) else (lm.target, lm.params)
    if nodes < 1 or batch < 1 or not 0 <= length <= capacity:
        raise ValueError(
            f"pass_call: nodes={nodes}, batch={batch}, length={length}, capacity={capacity}: need "
            "at least one node and one row, and a length within the capacity"
        )
    limit = target.max_positions
    if limit is not None and capacity > limit:
        raise ValueError(f"pass_call: capacity={capacity} exceeds the model's context of {limit}")
    cache = target.init(params, batch, capacity, inputs)
    start = jnp.full((batch,), length, jnp.int32)
    call = Call(lambda: _passes(target, nodes, 1, params, cache, start))
    times = _enough(call, lasting)
    return Call(lambda: _passes(target, nodes, times, params, cache, start), times=times)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _passes(target, nodes, times, params, cache, start):
    def step(_, tokens):
        draft = Draft(start=start, tokens=tokens, topology=trees.chain_parents(nodes - 1))
        scores = target.verify(params, cache, draft)
        return jnp.argmax(scores.logits, axis=-1).astype(jnp.int32)

    first = jnp.zeros((start.shape[0], nodes), jnp.int32)
    return jax.lax.fori_loop(0, times, step, first)


def pass_seconds(
    lm, nodes: int | Sequence[int], *, repetitions: int = 15, **options
) -> dict[int, np.ndarray]:
    """Seconds of a pass over each number of ``nodes``, ``[repetitions]``, measured in turn.

    ``options`` are those of ``pass_call``. The roofline's floor of a pass is
    ``weight_bytes(lm) / bandwidth().best``; where the clock drifts, time ``product_calls`` in turn
    with the passes.
    """
    nodes = [nodes] if isinstance(nodes, int) else list(nodes)
    calls = {str(n): pass_call(lm, n, **options) for n in nodes}
    seconds = alternate(calls, repetitions=repetitions)
    return {n: seconds[str(n)] for n in nodes}


def weight_bytes(lm) -> int:
    """Bytes of weights that a pass reads: all but tables of which only a few rows are looked up."""
    total = tree_bytes(lm.params)
    if not lm.config.tie_embeddings:
        total -= lm.params["embedding"][...].nbytes
    if lm.config.positions == "learned":
        total -= lm.params["position_embedding"][...].nbytes
    return total


def tree_bytes(values: PyTree) -> int:
    """Bytes of all arrays in a pytree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(values))


# ---------------------------------------------------------------- bandwidth


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """What products with a few columns reach, see ``bandwidth``.

    Attributes:
      best: weight bytes a second of the fastest.
      by_columns: ``{M: bytes a second}``, medians.
      weights: bytes of the weights that were read.
    """

    best: float
    by_columns: dict[int, float]
    weights: int


def bandwidth(*, dtype: str = "float32", repetitions: int = 9) -> Bandwidth:
    """The rate at which the best product reads weights, now, on this machine.

    ``W [out, in] @ x [in, M]`` for M in 1, 4, 8, 16, by the function that the models use, over a
    weight matrix well beyond the last-level cache. Below it lies no pass: F = weight bytes / best.
    """
    calls, size = product_calls(dtype)
    seconds = alternate(calls, repetitions=repetitions)
    rates = {int(m): size / float(np.median(s)) for m, s in seconds.items()}
    return Bandwidth(best=max(rates.values()), by_columns=rates, weights=size)


def product_calls(dtype: str = "float32") -> tuple[dict[str, Call], int]:
    """The products of ``bandwidth``, by their number of columns, and the bytes that each reads."""
    size = min(max(LEAST_BYTES, 8 * last_level_cache()), MOST_BYTES)
    width = int(math.sqrt(size / jnp.dtype(dtype).itemsize)) // 256 * 256
    weight = jax.random.normal(jax.random.key(0), (width, width), jnp.float32) / math.sqrt(width)
    weight = jax.block_until_ready(weight.astype(dtype))
    calls = {
        str(m): Call(functools.partial(_products, 4, weight, jnp.ones((width, m), dtype)), times=4)
        for m in COLUMNS
    }
    return calls, weight.nbytes


@jax.jit
def _products(times, weight, x):
    return jax.lax.fori_loop(0, times, lambda _, x: product(weight, x).astype(x.dtype), x)


# ---------------------------------------------------------------- a job: its round, its memory


def parts(work: GenerationTask, state: loop.State, *, rounds: int = 8) -> dict[str, Call]:
    """A round's parts, and the round as it is in the loop, over the same ``rounds`` rounds.

    Args:
      work: from ``specjax.text.task.prepare``.
      state: mid-generation, with room for ``rounds`` rounds; it is not given away. Stops and
        budgets of its rows are lifted, so that every row lives in every round.
      rounds: in one call. Those of ``draft``, ``verify``, ``accept``, ``commit``, ``observe`` are
        given what the loop's own rounds were given, one after the other, and compiled alone.

    Returns:
      ``{"draft", "verify", "accept", "commit", "observe", "round"}``, each one's seconds a round;
      for ``alternate``. See ``loop_efficiency``.

    Raises:
      ValueError: the rows have no room for so many rounds.
    """
    state = replay.endless(state, rounds, work.drafter.depth)
    calls = {
        name: Call(run, prepare, times=rounds)
        for name, (run, prepare) in replay.parts(work, state, rounds).items()
    }

    def whole(copied):
        return work.burst(rounds, copied).length

    calls["round"] = Call(whole, lambda: jax.tree.map(jnp.copy, state), times=rounds)
    return calls


def loop_efficiency(
    seconds: Mapping[str, np.ndarray],
) -> tuple[float, tuple[float, float], float]:
    """(draft + verify, each alone) / (the round in the loop), from ``alternate(parts(...))``.

    1 means that the loop adds nothing to what its two models cost; with its interval, see
    ``ratio``.
    """
    return ratio(seconds["draft"] + seconds["verify"], seconds["round"])


def first_token(work: GenerationTask) -> Call:
    """From the prompt to its first new tokens: prefill and one round; for ``alternate``."""
    return Call(lambda: work.burst(1, work.start()).length)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a job's decoding program as the compiler planned them, and seconds to compile.

    Attributes:
      peak: arguments, outputs that are no donated arguments, and temporaries.
      weights: of target, drafter and rule.
      cache: of the target's and the drafter's state.
      working_set: the rest of the peak.
      compile_start, compile_burst: seconds of the two programs, tracing included. A persistent
        compilation cache, which the command turns on and the library does not, shortens them.
    """

    peak: int
    weights: int
    cache: int
    working_set: int
    compile_start: float
    compile_burst: float


def memory(work: GenerationTask) -> Memory:
    """Compiles a job's two programs anew; reads off what the decoding one needs."""
    objects = work.lm.target, work.drafter, work.rule
    # functions of their own: those of the loop may be compiled already
    start = jax.jit(functools.partial(loop.start, *objects, work.capacity))
    burst = jax.jit(functools.partial(loop.burst, *objects), donate_argnums=(2,))
    begin = time.perf_counter()
    start.lower(work.params, work.request).compile()
    middle = time.perf_counter()
    state = start.eval_shape(work.params, work.request)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = burst.lower(rounds, work.params, state).compile()
    end = time.perf_counter()
    plan = compiled.memory_analysis()
    peak = (
        plan.argument_size_in_bytes
        + plan.output_size_in_bytes
        - plan.alias_size_in_bytes
        + plan.temp_size_in_bytes
    )
    weights = tree_bytes(work.params)
    cache = tree_bytes((state.cache, state.drafter_state))
    return Memory(
        peak=peak,
        weights=weights,
        cache=cache,
        working_set=peak - weights - cache,
        compile_start=middle - begin,
        compile_burst=end - middle,
    )


def _enough(call: Call, lasting: float) -> int:
    """How often ``call`` must do its work to last so many seconds."""
    call.seconds()  # compiles
    once = min(call.seconds(), call.seconds())
    return int(np.clip(math.ceil(lasting / once), 1, MOST_TIMES))
