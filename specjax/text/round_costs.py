"""The costs of rounds at each width, measured with the programs of the request itself.

With ``Drafting(num="auto")`` the number of drafts follows from measured acceptance and from these
costs. The costs are an argument of the compiled program, and the measurement passes costs that
force one width, so it compiles nothing that the request does not need. The time in which a drafter
reads tokens that plain rounds emitted is not part of any cost.
"""

from __future__ import annotations

import dataclasses
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np

from .. import sharding
from .._internal.optional import required
from ..decoding.state import State
from ..drafters import Fallback, Hybrid
from ..drafters.adaptive import Adaptive
from .task import GenerationTask

log = logging.getLogger("specjax")
TURNS, ENOUGH = 9, 1.0  # the most calls at each width; seconds after which three calls are enough
LASTING, MOST_ROUNDS = 0.01, 8  # the intended seconds of a call, and the most rounds in a call
SHORTEST = 16  # the least tokens of the text, so that a drafter can copy from it
PATIENCE = 4  # the second measurement waits so many times the duration of the first


@dataclasses.dataclass(frozen=True)
class Timed:
    """Times of calls.

    Attributes:
      rounds: the number of rounds in a call.
      calls: float ``[1 + W]``: seconds of the fastest call without rounds, and of the fastest call
        with ``rounds`` rounds at each width.
    """

    rounds: int
    calls: np.ndarray

    @property
    def costs(self) -> np.ndarray:
        """Seconds of a round at each width, float32 ``[W]``. No width is taken to cost more than a
        greater one: where it was timed so, the machine is taken to have been slower then."""
        costs = (self.calls[1:] - self.calls[0]) / self.rounds
        costs = np.minimum.accumulate(costs[::-1])[::-1]
        # a coarse clock, or a call that was delayed, may give 0 or less: every cost is above 0
        return np.maximum(costs, 1e-3 * max(costs.max(), 1e-9)).astype(np.float32)

    def fastest(self, other: Timed) -> Timed:
        """Returns the faster of each pair of calls; ``self`` if the numbers of rounds differ."""
        alike = self.rounds == other.rounds
        return Timed(self.rounds, np.minimum(self.calls, other.calls)) if alike else self


@dataclasses.dataclass(frozen=True)
class Price:
    """Measured costs, and when to measure again.

    Attributes:
      timed: the times after each kind of text.
      due: the value of ``time.monotonic`` from which on the costs are measured again.
      wait: seconds between the last measurement and ``due``.
    """

    timed: tuple[Timed, ...]
    due: float
    wait: float

    @property
    def costs(self) -> np.ndarray:
        """Seconds of a round at each width, float32 ``[W]``, after the text with slower rounds."""
        return np.max([timed.costs for timed in self.timed], axis=0)


_KNOWN: dict[tuple, Price] = {}


def with_round_costs(work: GenerationTask) -> GenerationTask:
    """Returns a task whose ``Adaptive`` drafter has measured costs of its widths.

    Costs are kept in memory for each model, mesh, drafter, dtype of weights, batch, buffer and kind
    of sampling. Later requests measure them again, at growing intervals, because a shared machine
    has slow moments in which rounds of different widths slow down differently. The fastest of all
    measurements count.

    Args:
      work: a task with an ``Adaptive`` drafter.
    """
    key = (
        work.lm.fingerprint,
        work.lm.target,  # it may divide a batch into microbatches
        work.lm.mesh,
        work.drafter,
        work.rule if isinstance(work.rule, str) else repr(work.rule),
        len(work.prompts),
        work.capacity,
        work.request.sampling.greedy,
        work.request.sampling.logits_processor,
        tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(work.params)),  # also if quantized
    )
    known = _KNOWN.get(key)
    if known is None:
        timed, seconds = _measured(work)
        _KNOWN[key] = _price(timed, PATIENCE * seconds)
    elif sharding.agreed(time.monotonic() >= known.due):
        _KNOWN[key] = _again(work, known)
    return _with_costs(work, _KNOWN[key].costs)


def _price(timed: tuple[Timed, ...], wait: float) -> Price:
    return Price(timed, time.monotonic() + wait, wait)


def _again(work: GenerationTask, known: Price) -> Price:
    """Returns ``known`` after another measurement.

    If the measurement fails in a single process, for example because a conversation takes most of
    the memory, the times stay as they were.
    """
    begin, timed = time.monotonic(), known.timed
    try:
        fresh = _measured(work)[0]
        timed = tuple(a.fastest(b) for a, b in zip(fresh, timed, strict=True))
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() > 1:  # the other processes may have succeeded
            raise
        log.warning("the costs of rounds could not be measured again: %s", error)
    spent = PATIENCE * (time.monotonic() - begin)
    return _price(timed, max(spent, 2 * known.wait))


def round_costs(work: GenerationTask, state: State | None = None) -> np.ndarray:
    """Measures the seconds of a round of an ``Adaptive`` drafter at each of its widths.

    Every round runs after one repeated token, so that a drafter that copies always has a proposal,
    and drafts are as wide as requested. For a ``Hybrid`` or ``Fallback``, rounds after tokens that
    all differ are timed as well, in which its inner drafter runs; the slower of the two counts. The
    cost is the time of the fastest of several calls, minus the time of a call without rounds. That
    call lacks a part of what a call costs by itself; but what a call costs, found from calls of
    different numbers of rounds, scatters more than this part. A single round takes longer than one
    of several in a call, above all a plain round; so where rounds are short, a call has several
    rounds, if the buffer has room and all of them draft the requested width.

    Args:
      work: a task with an ``Adaptive`` drafter.
      state: the state before the rounds, with room for one round; its buffers are not donated.
        Default: the state after prompts of the request's lengths, but of at least 16 tokens.

    Returns:
      seconds, float32 ``[W]``.

    Raises:
      TypeError: the drafter is not ``Adaptive``.
    """
    return Price(_measured(work, state)[0], 0.0, 0.0).costs


def _measured(work: GenerationTask, state: State | None = None) -> tuple[tuple[Timed, ...], float]:
    """Returns the times for ``round_costs``, and the duration of the timing in seconds."""
    hybrid = isinstance(_adaptive(work).inner, Hybrid | Fallback)
    texts = (_repeated, _different) if hybrid else (_repeated,)
    timed, seconds = zip(*(_timed_after(text, work, state) for text in texts), strict=True)
    return timed, sum(seconds)


def _adaptive(work: GenerationTask) -> Adaptive:
    """Returns the drafter of ``work``. Raises ``TypeError`` if it is not ``Adaptive``."""
    if not isinstance(work.drafter, Adaptive):
        raise TypeError(f"drafter={work.drafter.name!r}: only Adaptive drafters have costs")
    return work.drafter


def _timed_after(text, work: GenerationTask, given: State | None) -> tuple[Timed, float]:
    """Returns the times of rounds after ``text(tokens, vocabulary)``, and the seconds they took."""
    drafter, mesh = _adaptive(work), work.lm.mesh
    vocabulary = work.lm.target.vocab_size

    def placed(x):
        return jnp.array(x) if mesh is None else sharding.put(x, mesh, sharding.DATA)

    if given is None:
        tokens, lengths = sharding.gather((work.request.tokens, work.request.lengths))
        lengths = np.maximum(lengths, min(SHORTEST, tokens.shape[1]))
        state: State = work.asking(tokens=text(tokens, vocabulary), lengths=lengths).start()
    else:
        state = jax.tree.map(jnp.copy, given)
    begun = {
        name: sharding.gather(getattr(state, name))
        for name in ("tokens", "length", "budget", "num_empty_rounds", "stops")
    }
    begun["tokens"] = text(begun["tokens"], vocabulary)
    begun["budget"] = np.full_like(begun["budget"], work.capacity)
    begun["stops"] = np.full_like(begun["stops"], -1)

    def spend(rounds: int, pinned: GenerationTask, state: State) -> tuple[float, State]:
        state = dataclasses.replace(state, **{k: placed(v) for k, v in begun.items()})
        jax.block_until_ready(state)
        begin = time.perf_counter()
        state = jax.block_until_ready(pinned.burst(rounds, state))
        return time.perf_counter() - begin, state

    def drafts(rounds: int, state: State) -> tuple[bool, State]:
        """Returns whether all ``rounds`` rounds draft the greatest width, and the state."""
        before = sharding.gather(state.stats.drafted)
        _, state = spend(rounds, pinned[-1], state)
        drafted = sharding.gather(state.stats.drafted) - before
        most = drafter.num_draft - drafter.num_passengers
        return bool(np.all(drafted == rounds * most)), state

    pinned = [
        _with_costs(work, drafter.only(width)) for width in required(drafter.widths, "widths")
    ]
    _, state = spend(1, pinned[-1], state)  # compiles
    one, state = spend(1, pinned[-1], state)
    room = (work.capacity - begun["length"].max()) // (drafter.depth + 1)
    rounds = int(np.clip(min(sharding.agreed(LASTING / max(one, 1e-6)), room), 1, MOST_ROUNDS))
    if rounds > 1:
        whole, state = drafts(rounds, state)
        rounds = rounds if whole else 1
    ways = [(0, pinned[0]), *((rounds, one) for one in pinned)]
    best, begin = np.full(len(ways), np.inf), time.perf_counter()
    for turn in range(TURNS):
        if turn >= 3 and sharding.agreed(time.perf_counter() - begin) > ENOUGH:
            break
        for index, way in enumerate(ways):
            if index == 2:  # the drafter reads what plain rounds emitted before it is timed
                _, state = spend(1, pinned[-1], state)
            seconds, state = spend(*way, state)
            best[index] = min(best[index], seconds)
    return Timed(rounds, sharding.agreed(best)), float(time.perf_counter() - begin)


def _repeated(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Returns ``tokens`` with the first token of each row in all positions of the row."""
    return np.broadcast_to(tokens[:, :1], tokens.shape).copy()


def _different(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Returns rows that hold one token of the vocabulary after the other."""
    one = np.arange(tokens.shape[1], dtype=tokens.dtype) % vocabulary
    return np.broadcast_to(one, tokens.shape).copy()


def _with_costs(work: GenerationTask, costs: np.ndarray) -> GenerationTask:
    mesh, known = work.lm.mesh, np.asarray(costs, np.float32)
    placed = jnp.array(known) if mesh is None else sharding.put(known, mesh)
    given = work.params["drafter"] | {"costs": placed}
    return dataclasses.replace(work, params=work.params | {"drafter": given})
