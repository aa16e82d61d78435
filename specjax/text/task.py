"""A request that is ready to run, and the calls of the loop's compiled programs for it."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable

import jax
import numpy as np

from .. import acceptance, sharding
from ..decoding import continuous_batching, loop
from ..decoding.inputs import DecodeInputs
from ..decoding.prefill import PREFILL_CHUNK, resumed
from ..decoding.round import draft_and_verify
from ..decoding.state import State
from ..drafters.adaptive import Adaptive
from ..models.lm import LM
from ..models.seq2seq.target import encode
from ..types import Drafter, PyTree, Rule
from .session import Session, refreshed
from .stop_strings import Strings

# The programs that were traced for each model: what their tracing depends on. For a small model,
# finding a trace that JAX keeps takes as long as the pass over a short prompt.
_TRACED: weakref.WeakKeyDictionary[LM, set] = weakref.WeakKeyDictionary()
MOST_TRACED = 256  # of a model


@dataclasses.dataclass(frozen=True, eq=False)
class GenerationTask:
    """A request that is ready to run: ``start()``, then ``burst(rounds, state)`` until rows end.

    Attributes:
      lm: the target.
      prompts: the token ids of each row's prompt, int32 ``[t]``; samples of one prompt are rows of
        their own.
      drafter: the drafter.
      rule: the acceptance rule, or its name.
      capacity: L, the size of the token buffer.
      params: ``params`` of ``specjax.decode``.
      request: the inputs of the loop.
      stop_strings: the stop strings of each row.
      chunk: the number of prompt tokens that one pass reads.
      one_memory: whether target and drafter have the same encoder, which then runs once for both.
      session: the session to which the answers are added, or None.
      unpaid: the task that was asked for, whose drafts cannot pay here, or None.
    """

    lm: LM
    prompts: list[np.ndarray]
    drafter: Drafter
    rule: str | Rule
    capacity: int
    params: PyTree
    request: DecodeInputs
    stop_strings: list[Strings]
    chunk: int = PREFILL_CHUNK
    one_memory: bool = False
    session: Session | None = None
    unpaid: GenerationTask | None = None

    def start(self) -> State:
        """Reads the prompts and returns the state after their first tokens."""
        objects = self.lm.target, self.drafter, self.rule
        with sharding.using(self.lm.mesh, self.lm.params):
            request = self.asked(self.request)
            return loop.jit_start(*objects, self.capacity, self.params, request, self.chunk)

    def unanswered(self) -> State:
        """Reads the prompts and returns the state before their first tokens, which ``start`` emits:
        see ``prefill.unanswered``."""
        nothing = self.asking(budget=np.zeros(self.request.budget.shape, np.int32))
        return resumed(nothing.start(), self.request.budget)

    def burst(self, rounds: int, state: State) -> State:
        """Runs at most ``rounds`` rounds and returns the state after them.

        The buffers of ``state`` are donated: it cannot be used afterwards.
        """
        objects = self.lm.target, self.drafter, self.rule
        with sharding.using(self.lm.mesh, self.lm.params):
            return loop.jit_burst(*objects, rounds, self.params, state)

    def turn(
        self,
        state: State,
        over: np.ndarray,
        coming: tuple[np.ndarray, DecodeInputs] | None,
        rounds: int,
        live: int,
    ) -> tuple[State, jax.Array]:
        """Ends rows, inserts prompts and runs rounds, see ``continuous_batching.turn``.

        Args:
          state: the state, whose buffers are donated.
          over: bool ``[B]``, the rows that end.
          coming: the rows and the inputs of the prompts that are inserted, or None.
          rounds: the most rounds that are run.
          live: the burst ends when fewer rows than this are still decoded.

        Returns:
          the state, and the report of ``continuous_batching.turn``.
        """
        objects = self.lm.target, self.drafter, self.rule
        with sharding.using(self.lm.mesh, self.lm.params):
            if coming is not None:
                coming = coming[0], self.asked(coming[1])
            given = self.params, state, over, coming, rounds, live, self.chunk
            return continuous_batching.jit_turn(*objects, *given)

    def refreshed(self, texts: Callable[[], list[np.ndarray]]) -> GenerationTask:
        """Returns this task with the current table of its session.

        Args:
          texts: a function that returns the token ids of each row that is still decoded.
        """
        if self.session is None:
            return self
        if self.session.asks:
            self.session.ask(texts())
        own = refreshed(self.params["drafter"], self.drafter, self.session)
        mesh = self.lm.mesh
        if mesh is not None:
            own = jax.tree.map(functools.partial(sharding.put, mesh=mesh), own)
        return dataclasses.replace(self, params=self.params | {"drafter": own})

    def asking(self, **fields) -> GenerationTask:
        """Returns this task with other values in fields of its request, of equal shapes and
        dtypes."""
        mesh = self.lm.mesh
        if mesh is not None:
            fields = {name: sharding.put(x, mesh, sharding.DATA) for name, x in fields.items()}
        return dataclasses.replace(self, request=dataclasses.replace(self.request, **fields))

    def end(self, state: State, which: np.ndarray) -> State:
        """Ends the rows ``which``, bool ``[B]``; the buffers of ``state`` are donated."""
        with sharding.using(self.lm.mesh, self.lm.params):
            return loop.jit_end(state, which)

    def asked(self, request: DecodeInputs) -> DecodeInputs:
        """Returns ``request``; if target and drafter share an encoder, with the encoder's output in
        the place of its inputs."""
        if not self.one_memory:
            return request
        inputs = encode(self.lm.target, self.lm.params, request.inputs)
        return dataclasses.replace(request, inputs=inputs)

    @functools.cached_property
    def rule_name(self) -> str:
        """The name of the acceptance rule; for ``auto``, of the rule that was chosen."""
        if self.rule != "auto":
            return self.rule if isinstance(self.rule, str) else self.rule.name
        objects = self.lm.target, self.drafter, self.rule
        given = self.capacity, self.params, self.request, self.chunk
        with sharding.using(self.lm.mesh, self.lm.params):
            state = loop.jit_start.eval_shape(*objects, *given)
            judged = jax.eval_shape(
                functools.partial(draft_and_verify, *objects), self.params, state
            )
        return acceptance.choose(self.rule, judged.draft, self.request.sampling.greedy).name

    @property
    def words(self) -> str:
        """The drafter, the size of its draft and the rule, as a text for users."""
        if self.unpaid is not None:
            return f"{self.unpaid.words}; no number of drafts pays here, so that decoding is plain"
        name, num, depth = self.drafter.name, self.drafter.num_draft, self.drafter.depth
        riding = self.drafter.num_passengers
        num -= riding
        how = f"{num} tokens a round" if num == depth else f"trees of {num} tokens, {depth} deep"
        how += f" and {riding} passengers" if riding else ""
        if isinstance(self.drafter, Adaptive):
            policy = self.drafter.decides
            wanted = "as pay" if policy.reads_costs else f"as {policy.name} wants"
            name, how = self.drafter.inner.name, f"at most {how}, as many {wanted}"
        return f"drafter {name}, {how}, rule {self.rule_name}"

    def check(self) -> None:
        """Traces both programs of the task, so that a drafter, a rule and sampling settings that
        cannot be combined are refused before anything is compiled.

        Programs of the same model that were traced for another request are not traced again.

        Raises:
          ValueError: they cannot be combined.
        """
        objects = self.lm.target, self.drafter, self.rule
        given = self.capacity, self.params, self.request, self.chunk
        leaves, structure = jax.tree.flatten(given)
        shapes = tuple((np.shape(x), getattr(x, "dtype", type(x))) for x in leaves)
        program = *objects, self.capacity, self.chunk, structure, shapes
        traced = _TRACED.setdefault(self.lm, set())
        if program in traced:
            return
        if len(traced) >= MOST_TRACED:
            traced.clear()
        with sharding.using(self.lm.mesh, self.lm.params):
            state = loop.jit_start.eval_shape(*objects, *given)
            loop.jit_burst.eval_shape(*objects, 1, self.params, state)
        traced.add(program)
