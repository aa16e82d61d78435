"""Timing in turn, ratios with intervals, passes of the target, memory bandwidth.

All timings are seconds on the host's clock, of compiled and warmed-up programs. Calls that are
compared are timed *in turn*, so that a machine that slows down for a while slows all of them alike;
on a shared machine only ratios between such calls are meaningful. Operations of microseconds are
repeated within one program, because a separate call would measure the overhead of the call.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import kernels, trees
from .._internal.host import last_level_cache
from ..decoding.state import State
from ..models.causal_lm import CausalLM
from ..models.layers import product
from ..models.seq2seq.target import Seq2SeqLM
from ..text.task import GenerationTask
from ..types import Draft, PyTree

WORTH_TIMING = 0.02  # seconds that a timed call should last at least
MOST_TIMES = 256  # repetitions within one timed call
COLUMNS = (1, 4, 8, 16)  # columns of the products whose best rate is the bandwidth
LEAST_BYTES, MOST_BYTES = 256 << 20, 1 << 30  # limits of their weights' size, 8 times the cache


@dataclasses.dataclass(frozen=True)
class Call:
    """A function to time that repeats its work, or that needs buffers which it may consume.

    Attributes:
      run: the timed function, called with the result of ``prepare``, or with nothing.
      prepare: makes the argument; not timed.
      times: number of times that ``run`` does its work; seconds are divided by this number.
    """

    run: Callable[..., Any]
    prepare: Callable[[], Any] | None = None
    times: int = 1

    def __call__(self) -> Any:
        return self.run() if self.prepare is None else self.run(self.prepare())

    def seconds(self) -> float:
        """Seconds of one run, divided by ``times``."""
        prepared = () if self.prepare is None else (jax.block_until_ready(self.prepare()),)
        begin = time.perf_counter()
        jax.block_until_ready(self.run(*prepared))
        return (time.perf_counter() - begin) / self.times


def alternate(
    calls: Mapping[str, Callable[[], Any]], *, repetitions: int, warmup: int = 2
) -> dict[str, np.ndarray]:
    """Times several calls in turn.

    The first call of a turn rotates, so that neither drift nor the call before favours any of them.

    Args:
      calls: functions, or ``Call``s, which are timed without their preparation.
      repetitions: the number of timed turns.
      warmup: the number of turns before them, which are not timed.

    Returns:
      seconds of each call by name, float64 ``[repetitions]``; index ``i`` is one turn.

    Example::

        seconds = alternate({"plain": run_plain, "ngram": run_ngram}, repetitions=9)
        median, (low, high), confidence = ratio(seconds["plain"], seconds["ngram"])

    Raises:
      ValueError: there are no calls or no repetitions, or ``warmup`` is negative.
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
    """Returns the median of values, an interval of about 95 %, and its exact confidence.

    The number of values below the true median is binomial(n, 1/2), whatever the distribution of the
    values, so the ``k``-th smallest and the ``k``-th largest value enclose the median with a known
    probability. With fewer than 6 values no interval reaches 95 %, and the whole range is returned.

    Args:
      values: float ``[n]``.

    Returns:
      the median, ``(lower, upper)`` bound of the true median, and the confidence in [0, 1].
    """
    values, n = np.sort(values), len(values)
    counts = itertools.accumulate(math.comb(n, i) for i in range(n))  # beyond 64 bits
    below = [count / 2**n for count in counts]
    k = max(0, sum(share <= 0.025 for share in below) - 1)
    return (
        float(np.median(values)),
        (float(values[k]), float(values[-1 - k])),
        float(1 - 2 * below[k]),
    )


def ratio(a: np.ndarray, b: np.ndarray) -> tuple[float, tuple[float, float], float]:
    """Returns the median of the paired ratios ``a / b`` with its interval, see ``median_interval``.

    Args:
      a: seconds of the baseline, from the same ``alternate`` as ``b``.
      b: seconds of the other call; a ratio above 1 means that ``b`` is faster.

    Raises:
      ValueError: ``a`` and ``b`` differ in length.
    """
    if len(a) != len(b):
        raise ValueError(f"ratio: {len(a)} and {len(b)} values: give pairs from one alternate call")
    return median_interval(np.asarray(a) / np.asarray(b))


def timed_run(work: GenerationTask) -> tuple[float, float, State]:
    """Decodes a request.

    Args:
      work: a prepared request.

    Returns:
      the seconds to read the prompts, the seconds of all rounds, and the last state.
    """
    begin = time.perf_counter()
    state = jax.block_until_ready(work.start())
    middle = time.perf_counter()
    state = jax.block_until_ready(work.burst(work.capacity, state))
    return middle - begin, time.perf_counter() - middle, state


# ---------------------------------------------------------------- one pass of the target


def pass_call(
    lm,
    nodes: int,
    *,
    batch: int = 1,
    length: int = 255,
    capacity: int = 256,
    lasting: float = WORTH_TIMING,
    times: int | None = None,
    inputs=None,
) -> Call:
    """Returns a call that runs the target's ``verify`` over a chain, and the argmax of its logits.

    Args:
      lm: an ``LM``, or ``(target, params)``.
      nodes: N, the number of nodes, the root included; 1 is a step of plain decoding.
      batch: the number of rows.
      length: the number of committed tokens before the root, in a cache of ``capacity`` slots,
        which the pass only reads.
      capacity: the number of slots of the cache.
      lasting: the intended duration of a call in seconds. A call runs as many passes as fit, each
        over the most likely tokens after the pass before.
      times: the number of passes of a call; None: by ``lasting``.
      inputs: the input of the encoder, or None.

    Raises:
      ValueError: there is no node, no row or no pass, ``length`` exceeds the capacity, or the
        capacity exceeds the context.
    """
    target, params = lm if isinstance(lm, tuple) else (lm.target, lm.params)
    if nodes < 1 or batch < 1 or not 0 <= length <= capacity:
        raise ValueError(
            f"pass_call: nodes={nodes}, batch={batch}, length={length}, capacity={capacity}: need "
            "at least one node and one row, and a length within the capacity"
        )
    if times is not None and times < 1:
        raise ValueError(f"pass_call: times={times}: give at least 1, or None")
    limit = target.max_positions
    if limit is not None and capacity > limit:
        raise ValueError(f"pass_call: capacity={capacity} exceeds the model's context of {limit}")
    cache = target.init(params, batch, capacity, inputs)
    start = jnp.full((batch,), length, jnp.int32)
    if times is None:
        call = Call(lambda: _passes(target, nodes, 1, params, cache, start))
        times = _times_to_last(call, lasting)
    return Call(lambda: _passes(target, nodes, times, params, cache, start), times=times)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _passes(target, nodes, times, params, cache, start):
    def step(_, tokens):
        draft = Draft(start=start, tokens=tokens, topology=trees.chain_parents(nodes - 1))
        scores = target.verify(params, cache, draft)
        return kernels.current().argmax(scores.logits)

    first = jnp.zeros((start.shape[0], nodes), jnp.int32)
    return jax.lax.fori_loop(0, times, step, first)


def pass_seconds(
    lm, nodes: int | Sequence[int], *, repetitions: int = 15, **options
) -> dict[int, np.ndarray]:
    """Times passes over several numbers of nodes, in turn.

    By the roofline model, no pass is faster than ``weight_bytes(lm) / bandwidth().best``. If the
    speed of the machine drifts, time ``product_calls`` in turn with the passes.

    Args:
      lm: an ``LM``, or ``(target, params)``.
      nodes: the numbers of nodes, or one number.
      repetitions: the number of timed turns.
      options: further arguments of ``pass_call``.

    Returns:
      for each number of nodes the seconds of a pass, float64 ``[repetitions]``.
    """
    nodes = [nodes] if isinstance(nodes, int) else list(nodes)
    calls = {str(n): pass_call(lm, n, **options) for n in nodes}
    seconds = alternate(calls, repetitions=repetitions)
    return {n: seconds[str(n)] for n in nodes}


def weight_bytes(lm) -> int:
    """Returns the bytes of weights that a pass reads: all, except for the tables of embeddings, of
    which it reads a few rows."""
    total = tree_bytes(lm.params)
    if not isinstance(lm.target, CausalLM | Seq2SeqLM):  # a user's own: its tables are unknown
        return total
    if not lm.config.tie_embeddings:
        total -= lm.params["embedding"][...].nbytes
    if lm.config.positions == "learned":
        total -= lm.params["position_embedding"][...].nbytes
    return total


def tree_bytes(values: PyTree) -> int:
    """Returns the bytes of all arrays in a pytree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(values))


# ---------------------------------------------------------------- bandwidth


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """The memory bandwidth of matrix products with few columns, see ``bandwidth``.

    Attributes:
      best: weight bytes per second of the fastest product.
      by_columns: ``{M: bytes per second}``, medians, for M columns.
      weights: bytes of the weights that each product reads.
    """

    best: float
    by_columns: dict[int, float]
    weights: int


def bandwidth(*, dtype: str = "float32", repetitions: int = 9) -> Bandwidth:
    """Measures the rate at which the fastest matrix product reads weights on this machine.

    The products are ``W [out, in] @ x [in, M]`` for M in 1, 4, 8, 16, computed by the function that
    the models use; the weight matrix is much larger than the last-level cache. No pass takes less
    time than its weight bytes divided by ``best``.

    Args:
      dtype: the dtype of the weights.
      repetitions: the number of timed turns.
    """
    calls, size = product_calls(dtype)
    seconds = alternate(calls, repetitions=repetitions)
    rates = {int(m): size / float(np.median(s)) for m, s in seconds.items()}
    return Bandwidth(best=max(rates.values()), by_columns=rates, weights=size)


def product_calls(dtype: str = "float32") -> tuple[dict[str, Call], int]:
    """Returns the calls of ``bandwidth`` by number of columns, and the bytes that each one reads.

    Args:
      dtype: the dtype of the weights.
    """
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


def _times_to_last(call: Call, lasting: float) -> int:
    """Returns how often ``call`` must repeat its work to last ``lasting`` seconds."""
    call.seconds()  # compiles
    once = min(call.seconds(), call.seconds())
    return int(np.clip(math.ceil(lasting / once), 1, MOST_TIMES))
