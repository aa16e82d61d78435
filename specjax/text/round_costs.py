"""What a round costs at each width, measured with the programs of the request itself.

``Drafting(num="auto")`` lets the number of drafts follow what was accepted and what rounds cost;
this is where the costs come from. The costs that the drafter is given pin a width, and are
an argument of the compiled program: measuring compiles nothing that the request would not. What a
drafter reads to catch up after plain rounds is in no cost.
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
TURNS, ENOUGH = 9, 1.0  # calls at each width at most; seconds after which three must do
LASTING, MOST_ROUNDS = 0.01, 8  # seconds that a call should last, and rounds in it at most
SHORTEST = 16  # tokens of the text: there must be something to copy
PATIENCE = 4  # times as long as measuring took pass before it is done for the second time


@dataclasses.dataclass(frozen=True)
class Timed:
    """``calls`` float ``[1 + W]``: seconds of the fastest call without any round, and of that with
    ``rounds`` rounds at each width."""

    rounds: int
    calls: np.ndarray

    @property
    def costs(self) -> np.ndarray:
        """Seconds of a round, float32 ``[W]``."""
        costs = (self.calls[1:] - self.calls[0]) / self.rounds
        # a clock that is too coarse, or a call that was held up: no cost is nothing, or below
        return np.maximum(costs, 1e-3 * max(costs.max(), 1e-9)).astype(np.float32)

    def fastest(self, other: Timed) -> Timed:
        """Combines both, call by call; returns ``self`` if they cannot be compared."""
        alike = self.rounds == other.rounds
        return Timed(self.rounds, np.minimum(self.calls, other.calls)) if alike else self


@dataclasses.dataclass(frozen=True)
class Price:
    """``timed``: after each kind of text; ``due``: when it is to be measured again, by
    ``time.monotonic``, ``wait`` seconds after the last time."""

    timed: tuple[Timed, ...]
    due: float
    wait: float

    @property
    def costs(self) -> np.ndarray:
        """Seconds of a round, float32 ``[W]``: after the text where a round takes longer."""
        return np.max([timed.costs for timed in self.timed], axis=0)


_KNOWN: dict[tuple, Price] = {}


def with_round_costs(work: GenerationTask) -> GenerationTask:
    """``work``, whose drafter is ``Adaptive``, with measured costs of its widths.

    They are kept in memory for each model, drafter, type of weights, batch, buffer and kind of
    sampling, and measured again by later requests, after ever longer times: a machine that others
    use as well has slow moments, in which rounds of different widths slow down differently. The
    fastest of all measurements count.
    """
    key = (
        work.lm.fingerprint,
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
    """``known``, measured once more. Where that fails, for want of memory beside a conversation for
    instance, it stays what it was, in a single process."""
    begin, timed = time.monotonic(), known.timed
    try:
        fresh = _measured(work)[0]
        timed = tuple(a.fastest(b) for a, b in zip(fresh, timed, strict=True))
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() > 1:  # the others may have gone on
            raise
        log.warning("costs of rounds are not measured again: %s", error)
    spent = PATIENCE * (time.monotonic() - begin)
    return _price(timed, max(spent, 2 * known.wait))


def round_costs(work: GenerationTask, state: State | None = None) -> np.ndarray:
    """Seconds of a round of an ``Adaptive`` drafter at each of its widths, float32 ``[W]``.

    Every round is run after one repeated token: there a drafter that copies always has something
    to propose, and a draft is as wide as was asked for. For a ``Hybrid`` or ``Fallback``, rounds
    after tokens that are all different are timed as well, where its inner drafter is asked; the
    dearer count. The fastest of several calls counts, less what one without any round takes. A
    round alone takes longer than one among others, most of all a plain one: where rounds are short,
    a call has several, if there is room and all of them draft what was asked for.

    Args:
      state: where the rounds begin, with room for one; it is not given away. Default: after
        prompts of the request's lengths, of 16 tokens at least.
    """
    return Price(_measured(work, state)[0], 0.0, 0.0).costs


def _measured(work: GenerationTask, state: State | None = None) -> tuple[tuple[Timed, ...], float]:
    """What ``round_costs`` is made of, and the seconds for which calls were timed."""
    hybrid = isinstance(_adaptive(work).inner, Hybrid | Fallback)
    texts = (_repeated, _different) if hybrid else (_repeated,)
    timed, seconds = zip(*(_timed_after(text, work, state) for text in texts), strict=True)
    return timed, sum(seconds)


def _adaptive(work: GenerationTask) -> Adaptive:
    """The drafter of ``work``, whose costs are measured."""
    if not isinstance(work.drafter, Adaptive):
        raise TypeError(f"drafter={work.drafter.name!r}: only Adaptive drafters have costs")
    return work.drafter


def _timed_after(text, work: GenerationTask, given: State | None) -> tuple[Timed, float]:
    """Timed rounds after ``text(tokens, vocabulary)``."""
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
        """Whether so many rounds draft as much as the widest can."""
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
            seconds, state = spend(*way, state)
            best[index] = min(best[index], seconds)
    return Timed(rounds, sharding.agreed(best)), float(time.perf_counter() - begin)


def _repeated(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """The first token of each row, in all its places."""
    return np.broadcast_to(tokens[:, :1], tokens.shape).copy()


def _different(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """One token of the vocabulary after the other."""
    one = np.arange(tokens.shape[1], dtype=tokens.dtype) % vocabulary
    return np.broadcast_to(one, tokens.shape).copy()


def _with_costs(work: GenerationTask, costs: np.ndarray) -> GenerationTask:
    mesh, known = work.lm.mesh, np.asarray(costs, np.float32)
    placed = jnp.array(known) if mesh is None else sharding.put(known, mesh)
    given = work.params["drafter"] | {"costs": placed}
    return dataclasses.replace(work, params=work.params | {"drafter": given})
