"""Times the parts of a round, and measures the memory of a decoding program.

Each part of a round is compiled alone and runs on inputs from the loop's own rounds, see
``replay.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from .._internal.optional import required
from ..decoding import loop, prefill
from ..decoding.state import State
from ..text.task import GenerationTask
from . import replay
from .timing import Call, ratio, tree_bytes


def part_calls(work: GenerationTask, state: State, *, rounds: int = 8) -> dict[str, Call]:
    """Calls for ``alternate`` that time the parts of a round, and the whole round in the loop.

    Args:
      work: a prepared request.
      state: a state in the middle of generation, with room for ``rounds`` rounds; its buffers are
        not donated. Its rows ignore stop tokens and budgets, so that every row takes part in every
        round.
      rounds: the number of consecutive rounds in one call. The parts get the inputs that they had
        in these rounds of the loop, and each part is compiled alone.

    Returns:
      calls by name: ``draft``, ``verify``, ``accept``, ``commit``, ``observe`` and ``round``. Each
      call measures seconds per round. See ``loop_efficiency``.

    Raises:
      ValueError: the rows have no room for so many rounds.
    """
    state = replay.without_limits(state, rounds, work.drafter.depth)
    calls = {
        name: Call(run, prepare, times=rounds)
        for name, (run, prepare) in replay.replays(work, state, rounds).items()
    }

    def whole(copied):
        return work.burst(rounds, copied).length

    calls["round"] = Call(whole, lambda: jax.tree.map(jnp.copy, state), times=rounds)
    return calls


def loop_efficiency(
    seconds: Mapping[str, np.ndarray],
) -> tuple[float, tuple[float, float], float]:
    """Returns the share of a round in the loop that its two models take: (draft + verify) / round.

    Args:
      seconds: the result of ``alternate(part_calls(...))``.

    Returns:
      the ratio with its interval, see ``timing.ratio``; 1 means that a round takes no longer than
      its two models.
    """
    return ratio(seconds["draft"] + seconds["verify"], seconds["round"])


def first_token_call(work: GenerationTask) -> Call:
    """Returns a call for ``alternate`` that reads the prompts of a request, which emits the first
    tokens."""
    return Call(lambda: work.start().length)


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Memory of a decoding program by the compiler's plan, and seconds to compile it.

    Attributes:
      peak: bytes of arguments, of temporaries, and of outputs that do not reuse an argument's
        buffer.
      weights: bytes of the weights of target, drafter and rule.
      cache: bytes of the target's cache and of the drafter's state.
      working_set: bytes of ``peak`` without ``weights`` and ``cache``.
      compile_start: seconds to trace and compile the program that reads the prompts. A persistent
        compilation cache, which the command turns on and the library does not, shortens them.
      compile_burst: seconds to trace and compile the program that runs the rounds.
    """

    peak: int
    weights: int
    cache: int
    working_set: int
    compile_start: float
    compile_burst: float


def program_memory(work: GenerationTask) -> ProgramMemory:
    """Compiles the two programs of a request anew, and returns the memory of the second program.

    Args:
      work: a prepared request.
    """
    objects = work.lm.target, work.drafter, work.rule
    # new functions, because those of the loop may be compiled already
    start = jax.jit(functools.partial(prefill.start, *objects, work.capacity))
    burst = jax.jit(functools.partial(loop.burst, *objects), donate_argnums=(2,))
    begin = time.perf_counter()
    start.lower(work.params, work.request).compile()
    middle = time.perf_counter()
    state = start.eval_shape(work.params, work.request)
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = burst.lower(rounds, work.params, state).compile()
    end = time.perf_counter()
    plan = required(compiled.memory_analysis(), "memory_analysis()")
    peak = (
        plan.argument_size_in_bytes
        + plan.output_size_in_bytes
        - plan.alias_size_in_bytes
        + plan.temp_size_in_bytes
    )
    weights = tree_bytes(work.params)
    cache = tree_bytes((state.cache, state.drafter_state))
    return ProgramMemory(
        peak=peak,
        weights=weights,
        cache=cache,
        working_set=peak - weights - cache,
        compile_start=middle - begin,
        compile_burst=end - middle,
    )
