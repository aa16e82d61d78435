"""A request that is ready to run, on top of the compiled programs of the loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

from .. import acceptance, sharding
from ..decoding import continuous_batching, loop
from ..decoding.inputs import DecodeInputs
from ..decoding.prefill import PREFILL_CHUNK
from ..decoding.round import draft_and_verify
from ..decoding.state import State
from ..drafters.adaptive import Adaptive
from ..models.lm import LM
from ..models.seq2seq.target import encode
from ..types import Drafter, PyTree, Rule
from .session import Session, refreshed
from .stop_strings import Strings


@dataclasses.dataclass(frozen=True, eq=False)
class GenerationTask:
    """A request that is ready to run: ``start()``, then ``burst(rounds, state)`` until done.

    ``prompts`` and ``stop_strings`` have an entry for each row, also where rows are samples.
    ``one_memory``: the drafter's encoder is the target's, which reads for both. ``session``: takes
    what is generated.
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

    def start(self) -> State:
        """Reads the prompts."""
        objects = self.lm.target, self.drafter, self.rule
        with sharding.using(self.lm.mesh, self.lm.params):
            request = self.asked(self.request)
            return loop.jit_start(*objects, self.capacity, self.params, request, self.chunk)

    def burst(self, rounds: int, state: State) -> State:
        """At most ``rounds`` rounds; takes the buffers of ``state``."""
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
        """``continuous_batching.turn``; takes the buffers of ``state``."""
        objects = self.lm.target, self.drafter, self.rule
        with sharding.using(self.lm.mesh, self.lm.params):
            if coming is not None:
                coming = coming[0], self.asked(coming[1])
            given = self.params, state, over, coming, rounds, live, self.chunk
            return continuous_batching.jit_turn(*objects, *given)

    def refreshed(self, texts: Callable[[], list[np.ndarray]]) -> GenerationTask:
        """The same with what its session holds now; without one itself. ``texts()``: the tokens of
        the rows that go on."""
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
        """The same with other values, of the same shapes and types, in fields of its request."""
        mesh = self.lm.mesh
        if mesh is not None:
            fields = {name: sharding.put(x, mesh, sharding.DATA) for name, x in fields.items()}
        return dataclasses.replace(self, request=dataclasses.replace(self.request, **fields))

    def end(self, state: State, which: np.ndarray) -> State:
        """Ends the rows ``which`` (bool ``[B]``); takes the buffers of ``state``."""
        with sharding.using(self.lm.mesh, self.lm.params):
            return loop.jit_end(state, which)

    def asked(self, request: DecodeInputs) -> DecodeInputs:
        """``request``, with what the encoder read in place of its inputs where it serves both."""
        if not self.one_memory:
            return request
        inputs = encode(self.lm.target, self.lm.params, request.inputs)
        return dataclasses.replace(request, inputs=inputs)

    @functools.cached_property
    def rule_name(self) -> str:
        """The name of the acceptance rule; for ``auto`` that of the rule that was chosen."""
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
        """Who drafts how much, and who judges, for a reader."""
        name, num, depth = self.drafter.name, self.drafter.num_draft, self.drafter.depth
        riding = self.drafter.num_passengers
        num -= riding
        how = f"{num} tokens a round" if num == depth else f"trees of {num} tokens, {depth} deep"
        how += f" and {riding} passengers" if riding else ""
        if isinstance(self.drafter, Adaptive):
            name, how = self.drafter.inner.name, f"as much of {how} as pays"
        return f"drafter {name}, {how}, rule {self.rule_name}"

    def check(self) -> None:
        """Traces both programs, which the run needs anyway, so that a drafter, rule and sampling
        that do not go together are refused before either compiles."""
        objects = self.lm.target, self.drafter, self.rule
        given = self.capacity, self.params, self.request, self.chunk
        with sharding.using(self.lm.mesh, self.lm.params):
            state = loop.jit_start.eval_shape(*objects, *given)
            loop.jit_burst.eval_shape(*objects, 1, self.params, state, 1)
