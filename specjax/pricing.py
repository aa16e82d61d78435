"""What a round costs at each width, measured at start-up with the programs of the request itself.

``num_draft="auto"`` lets the number of drafts follow what was accepted and what rounds cost; this
is where the costs come from. A width is pinned by the costs that the drafter is given, which are
an argument of the compiled program: measuring compiles nothing that the request would not.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from . import loop, sharding
from .drafters import Hybrid

if TYPE_CHECKING:
    from .job import Job

TURNS, ENOUGH = 9, 1.0  # calls at each width at most; seconds after which three must do
LASTING, MOST_ROUNDS = 0.01, 8  # seconds that a call should last, and rounds in it at most
SHORTEST = 16  # tokens of the text: there must be something to copy
PATIENCE = 4  # times as long as measuring took pass before it is done for the second time


@dataclasses.dataclass
class Price:
    """``costs`` float32 ``[W]``, seconds; ``due``: when they are to be measured again, by
    ``time.monotonic``, ``wait`` seconds after the last time."""

    costs: np.ndarray
    due: float
    wait: float


_KNOWN: dict[tuple, Price] = {}


def priced(work: Job) -> Job:
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
        work.request.sampling.law,
        tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(work.params)),  # also if quantized
    )
    known = _KNOWN.get(key)
    if known is None or sharding.agreed(time.monotonic() >= known.due):
        costs, seconds = _measured(work)
        wait = PATIENCE * seconds
        if known is not None:
            costs, wait = np.minimum(costs, known.costs), max(wait, 2 * known.wait)
        known = _KNOWN[key] = Price(costs, time.monotonic() + wait, wait)
    return _with_costs(work, known.costs)


def round_costs(work: Job, state: loop.State | None = None) -> np.ndarray:
    """Seconds of a round of an ``Adaptive`` drafter at each of its widths, float32 ``[W]``.

    Every round is run behind one repeated token: there a drafter that copies always has something
    to propose, and a draft is as wide as was asked for. Of a ``Hybrid``, rounds behind tokens that
    are all different are timed as well, where its inner drafter is asked; the dearer count. The
    fastest of several calls counts, less what one without any round takes. A round alone takes
    longer than one among others, most of all a plain one: where rounds are short, a call has
    several, if there is room and all of them draft what was asked for.

    Args:
      state: where the rounds begin, with room for one; it is not given away. Default: behind
        prompts of the request's lengths, of 16 tokens at least.
    """
    return _measured(work, state)[0]


def _measured(work: Job, state: loop.State | None = None) -> tuple[np.ndarray, float]:
    """``round_costs``, and the seconds that measuring took, programs not counted."""
    costs, seconds = _costs_behind(_repeated, work, state)
    if isinstance(work.drafter.inner, Hybrid):
        others, more = _costs_behind(_different, work, state)
        costs, seconds = np.maximum(costs, others), seconds + more
    return costs, seconds


def _costs_behind(text, work: Job, state: loop.State | None) -> tuple[np.ndarray, float]:
    """``_measured`` behind ``text(tokens, vocabulary)``."""
    drafter, mesh = work.drafter, work.lm.mesh
    vocabulary = work.lm.target.vocab_size

    def placed(x):
        return jnp.array(x) if mesh is None else sharding.put(x, mesh, sharding.DATA)

    if state is None:
        tokens, lengths = sharding.gather((work.request.tokens, work.request.lengths))
        lengths = np.maximum(lengths, min(SHORTEST, tokens.shape[1]))
        state = work.asking(tokens=text(tokens, vocabulary), lengths=lengths).start()
    else:
        state = jax.tree.map(jnp.copy, state)
    begun = {
        name: sharding.gather(getattr(state, name))
        for name in ("tokens", "length", "budget", "silent", "stops")
    }
    begun["tokens"] = text(begun["tokens"], vocabulary)
    begun["budget"] = np.full_like(begun["budget"], work.capacity)
    begun["stops"] = np.full_like(begun["stops"], -1)

    def spend(rounds: int, pinned: Job, state: loop.State) -> tuple[float, loop.State]:
        state = dataclasses.replace(state, **{k: placed(v) for k, v in begun.items()})
        jax.block_until_ready(state)
        begin = time.perf_counter()
        state = jax.block_until_ready(pinned.burst(rounds, state))
        return time.perf_counter() - begin, state

    def drafts(rounds: int, state: loop.State) -> tuple[bool, loop.State]:
        """Whether so many rounds draft as much as the widest can."""
        before = sharding.gather(state.stats.drafted)
        _, state = spend(rounds, pinned[-1], state)
        drafted = sharding.gather(state.stats.drafted) - before
        return bool(np.all(drafted == rounds * drafter.num_draft)), state

    pinned = [_with_costs(work, drafter.only(width)) for width in drafter.widths]
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
    costs = (best[1:] - best[0]) / rounds
    # a clock that is too coarse, or a call that was held up: no cost is nothing, or below
    costs = sharding.agreed(np.maximum(costs, 1e-3 * max(costs.max(), 1e-9)))
    return costs, float(time.perf_counter() - begin)


def _repeated(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """The first token of each row, in all its places."""
    return np.broadcast_to(tokens[:, :1], tokens.shape).copy()


def _different(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """One token of the vocabulary after the other."""
    one = np.arange(tokens.shape[1], dtype=tokens.dtype) % vocabulary
    return np.broadcast_to(one, tokens.shape).copy()


def _with_costs(work: Job, costs: np.ndarray) -> Job:
    mesh, costs = work.lm.mesh, np.asarray(costs, np.float32)
    costs = jnp.array(costs) if mesh is None else sharding.put(costs, mesh)
    given = work.params["drafter"] | {"costs": costs}
    return dataclasses.replace(work, params=work.params | {"drafter": given})
