"""Adaptive width: any drafter, asked for as many tokens as a policy wants, down to none.

    w = policy(acceptance so far, costs of rounds at each width),   before each round

A policy may also bound the depth of each row by its committed text, and end a draft within the
round, where the drafter's own laws are unsure or its chances do not pay.

Lossless: as the drafter inside is. No decision looks at a drafted token that it may leave out, so
none changes the law of the output; see ``specjax.types.Confidence``.

Example::

    drafter = Adaptive(NGram(num_draft=7))  # widths 0, 1, 3, 7
    costs = jnp.asarray([1.0, 1.3, 1.4, 1.7])  # measured: rounds over plain rounds
    params = {"target": weights, "drafter": {"inner": None, "costs": costs}}
    out = specjax.decode(target, drafter, params, tokens, lengths, key=key, max_new_tokens=64)

    drafter = Adaptive(NGram(num_draft=7), "exllama:skip=0")  # another policy, by its name

References: those of the policies, in ``draft_length``.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from .. import trees
from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..acceptance.walk import eligible
from ..types import Drafter, DrafterWrapper, PyTree
from .base import check_field
from .draft_length import DraftLengthPolicy, Goodput, Outcome, named_policy
from .resting import LAG, is_rest


@pytree_dataclass
class AdaptiveState:
    """The state: ``inner`` is that of the inner drafter, ``memory`` that of the policy.

    ``width``: int32 ``[B]``, that of the round under way; None between rounds.
    """

    inner: PyTree
    memory: PyTree
    width: PyTree = None


@dataclasses.dataclass(frozen=True)
class Adaptive(DrafterWrapper):
    """Asks ``inner`` for a number of tokens that follows acceptance and cost.

    Shapes stay those of ``inner``: the width is a traced number, so neither another width nor other
    costs compile anything. Narrow rounds cost less, since the loop verifies in the narrowest
    compiled width that holds every scored node, and drafters leave out what is not wanted.

    ``params["drafter"] = {"inner": its weights, "costs": float32 [W]}``, the time of a whole round
    at each of ``widths``, in any unit. A policy that reads no costs needs none. ``only(width)``
    returns costs that leave ``Goodput`` no choice, for measuring.

    There is one decision for the whole batch: under sampling, the text that a key gives may depend
    on the other rows, but its law does not.

    Attributes:
      inner: the drafter. In trees, a width is a depth.
      policy: what decides: a ``DraftLengthPolicy``, or its name in ``specjax.drafters.POLICIES``
        with or without settings, such as ``"huggingface:start=5,threshold=0.4"``.
      widths: the widths that have a cost, increasing from 0; None: 0, 1, 3, 7, 15 ... up to the
        depth of ``inner``, which with the root fill the widths for which passes are compiled.

    Raises:
      ValueError: widths beyond the depth or without 0; an unknown policy or setting;
        ``params["drafter"]`` has another form (before anything is compiled).
      TypeError: ``policy`` is neither a policy nor a text.
    """

    policy: DraftLengthPolicy | str = Goodput()
    widths: tuple[int, ...] | None = None

    def __post_init__(self):
        check_field(self, "inner", Drafter, "an object of specjax.Drafter")
        object.__setattr__(self, "policy", named_policy(self.policy))
        if self.decides.can_rest:
            object.__setattr__(self, "inner", self.inner.lagging(LAG))
        depth = self.inner.depth
        usual = (2**k - 1 for k in range(depth.bit_length() + 1))
        given = (*(w for w in usual if w < depth), depth) if self.widths is None else self.widths
        widths = tuple(int(w) for w in given)
        object.__setattr__(self, "widths", widths)
        if widths[:1] != (0,) or list(widths) != sorted({*widths}):
            raise ValueError(f"Adaptive(widths={widths}): they must increase from 0")
        if not 1 <= widths[-1] <= depth:
            raise ValueError(
                f"Adaptive(widths={widths}): {self.inner.name} drafts {depth} deep, so give "
                f"at least one width from 1 to {depth} besides 0"
            )

    @property
    def name(self) -> str:
        return f"adaptive({self.inner.name})"

    @property
    def decides(self) -> DraftLengthPolicy:
        """The policy, which is an object from ``__post_init__`` on."""
        return named_policy(self.policy)

    def with_topology(self, topology):
        inner = self.inner.with_topology(topology)
        usual = Adaptive(self.inner, self.policy).widths == self.widths
        return dataclasses.replace(self, inner=inner, widths=None if usual else self.widths)

    def only(self, width: int) -> np.ndarray:
        """Costs that pin ``Goodput`` to one of ``widths``: float32 ``[W]``, infinite elsewhere."""
        widths = required(self.widths, "widths")
        if width not in widths:
            raise ValueError(f"only({width}): the widths are {widths}")
        return np.where(np.asarray(widths) == width, 1, np.inf).astype(np.float32)

    def shard(self, params, mesh):
        """The weights of ``inner`` on a mesh; see ``sharding.place``."""
        return params | {"inner": self.inner.shard(params["inner"], mesh)}

    def init(self, params, target_params, batch, capacity, inputs=None):
        keys = {*params} if isinstance(params, dict) else set()
        if keys != {"inner", "costs"} and (keys != {"inner"} or self.decides.reads_costs):
            raise ValueError(
                "params['drafter'] of an Adaptive drafter must be a dict with 'inner' (weights of "
                f"the inner drafter) and 'costs' (seconds of a round at widths {self.widths})"
            )
        widths = required(self.widths, "widths")
        if "costs" in keys and jnp.shape(params["costs"]) != (len(widths),):
            raise ValueError(
                f"costs has shape {jnp.shape(params['costs'])}: give one cost for each of the "
                f"widths {self.widths}"
            )
        return AdaptiveState(
            inner=self.inner.init(params["inner"], target_params, batch, capacity, inputs),
            memory=self.decides.init(batch, self.depth),
        )

    def _costs(self, params):
        """``(widths, costs float32 [W])``, which are 1 where none are given."""
        widths = required(self.widths, "widths")
        return widths, jnp.asarray(params.get("costs", np.ones(len(widths))), jnp.float32)

    def plan(self, params, target_params, state, budget):
        return self.decides.choose(state.memory, *self._costs(params), budget)

    @property
    def plans(self) -> bool:
        return self.inner.can_rest

    @property
    def can_rest(self) -> bool:
        return False  # it decides by itself

    def rests(self, plan):
        return plan[0] == 0

    def rewind(self, state, length):
        return dataclasses.replace(state, inner=self.inner.rewind(state.inner, length))

    def sync(self, params, target_params, state, context, *, before="prompt"):
        if before != "rest":
            inner = self.inner.sync(
                params["inner"], target_params, state.inner, context, before=before
            )
            return dataclasses.replace(state, inner=inner)
        width, memory = context.plan
        context = dataclasses.replace(context, plan=None)
        inner = self.inner.sync(params["inner"], target_params, state.inner, context, before="rest")
        asked = jnp.broadcast_to(width, context.length.shape)
        return AdaptiveState(inner=inner, memory=memory, width=asked)

    def draft_step(self, params, target_params, state, context):
        plan = context.plan
        if plan is None:
            plan = self.plan(params, target_params, state, context.budget)
        width, memory = plan
        limit = self.decides.limit(context.tokens, context.length, self.depth)
        if limit is not None:
            width = jnp.minimum(width, jnp.max(jnp.where(context.budget > 0, limit, 0)))
        context = dataclasses.replace(
            context,
            width=width,
            plan=None,
            confidence=self.decides.confidence,
            costs=self.decides.costs_within(*self._costs(params), self.inner.depth),
        )
        own = params["inner"], target_params
        inner = self.inner.sync(*own, state.inner, context, before="draft")
        draft, inner = self.inner.draft_step(*own, inner, context)
        if limit is not None:
            draft = trees.limit_depth(draft, limit)
        asked = jnp.broadcast_to(width, context.length.shape)
        return draft, AdaptiveState(inner=inner, memory=memory, width=asked)

    def observe(self, params, target_params, state, segment):
        inner = self.inner.observe(params["inner"], target_params, state.inner, segment)
        if segment.round is None:
            return dataclasses.replace(state, inner=inner)
        if is_rest(segment) and not self.decides.learns_from_rests:
            return dataclasses.replace(state, inner=inner, width=None)
        draft, verdict, _ = segment.round  # of its own nodes, where others proposed too
        outcome = Outcome(
            width=state.width,
            offered=jnp.max(jnp.where(eligible(draft), trees.depths(draft), 0), axis=1),
            accepted=jnp.maximum(jnp.minimum(segment.num - 1, verdict.count), 0),
            live=segment.num > 0,
        )
        return AdaptiveState(inner=inner, memory=self.decides.update(state.memory, outcome))
