"""Draft models that draft the next round while the target verifies this one.

The draft of a round is there before the round begins, so nothing of the target's pass depends on
what the drafter computes in it: the two can run at the same time. The drafter reads its own draft
to the end, expects one or several outcomes of the verification (how many tokens are accepted, and
which token follows them), and drafts on after each of them. ``observe`` compares the outcomes with
what was committed. A hit is the draft of the next round; after a miss there is none.

Every draft is drawn with random numbers that no verification has seen, and states the laws from
which it was drawn. Which of the drafts is used depends on the verdict, which knows nothing of these
numbers. So the law of the draft that is used is what it states, hit or miss.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..sampling import drawing
from ..trees import expand
from ..types import AheadDrafter, Context, Draft, Guess, PyTree
from .draft_model import DraftModel, DraftModelState

AHEAD = 2**31  # folded into a row's key for what is drafted ahead: no number of empty rounds


@pytree_dataclass
class Ready:
    """What a row will draft.

    Attributes:
      tokens: int32 ``[B, K]``.
      laws: float32 ``[B, K, V]``, from which they were drawn; without meaning where no laws are
        stated.
      count: int32 ``[B]``, K or 0 (nothing is ready).
    """

    tokens: jax.Array
    laws: jax.Array
    count: jax.Array


@pytree_dataclass
class Outcomes:
    """The M outcomes that a row expects, and what it then drafts.

    Attributes:
      count: int32 ``[B, M]``, accepted tokens of the draft.
      token: int32 ``[B, M]``, the token after them.
      tokens: int32 ``[B, M, K]``, the draft of the next round.
      laws: float32 ``[B, M, K, V]``, or None: no laws are stated.
    """

    count: jax.Array
    token: jax.Array
    tokens: jax.Array
    laws: jax.Array | None


@pytree_dataclass
class AheadState:
    """The state of a drafter that drafts ahead; ``outcomes`` is None between rounds."""

    model: DraftModelState
    ready: Ready
    outcomes: Outcomes | None = None


class Begun(NamedTuple):
    """A round whose draft is known, before anything is drafted ahead.

    Attributes:
      chain: the root and the tokens of the draft, N nodes.
      count: int32 ``[B]``, how many of the tokens are candidates.
      logits: float32 ``[B, N, V]``, the draft model's, after each node.
      entries: those of the model's pass over ``chain``.
      before: int32 ``[B, 1]``, the token before the root.
      uniform: float32 ``[B, (K + 1) M]``, random numbers for what is drafted ahead.
    """

    chain: Draft
    count: jax.Array
    logits: jax.Array
    entries: PyTree
    before: jax.Array
    uniform: jax.Array


@dataclasses.dataclass(frozen=True)
class DraftAhead(DraftModel, AheadDrafter):
    """The base of ``PEARL`` and ``SSD``; ``params["drafter"]`` are the draft model's weights.

    Only chains are drafted, and all rows draft as many tokens as ``context.width`` allows: a stop
    by confidence would save nothing, since the draft is there before it is asked for.
    """

    can_rewind = False  # what is ready belongs to the text of this very round
    takes_topology = False
    takes_sibling_sampling = False

    def __post_init__(self):
        if self.num_draft < 1 and self.topology is None:
            raise ValueError(f"{type(self).__name__}(num_draft={self.num_draft}): at least 1")
        super().__post_init__()
        if self.topology != trees.chain(self.num_draft):
            raise ValueError(
                f"{type(self).__name__}(topology={self.topology}): it drafts chains; give "
                "num_draft, or DraftModel for a tree"
            )
        if self.sibling_sampling not in (None, "iid"):
            raise ValueError(
                f"{type(self).__name__}(sibling_sampling={self.sibling_sampling!r}): a chain has "
                "no siblings; leave sibling_sampling out"
            )

        window, nodes = self.model.cache_window, self.num_draft * (self.num_outcomes + 1) + 1
        if window is not None and window < nodes:
            raise ValueError(
                f"{type(self).__name__}: a window of {window} tokens is smaller than what is "
                f"drafted ahead, {nodes} nodes; give window={nodes} or more, or draft fewer tokens"
            )

    @property
    @abc.abstractmethod
    def num_outcomes(self) -> int:
        """M, how many outcomes of a round are drafted for."""

    @property
    @abc.abstractmethod
    def always_drafts(self) -> bool:
        """Whether every round has a whole draft."""

    @abc.abstractmethod
    def redraft(self, params, state: AheadState, context: Context) -> tuple[Ready, jax.Array]:
        """The draft of a round, where none is ready too.

        Returns:
          it, and bool ``[B]``, where it was ready or need not be.
        """

    @abc.abstractmethod
    def expect(self, context: Context, begun: Begun) -> tuple[jax.Array, jax.Array, Guess | None]:
        """The outcomes that are drafted for.

        Returns:
          the accepted tokens and the token after them, int32 ``[B, M]`` each, and the guess.
        """

    def init(self, params, target_params, batch, capacity, inputs=None):
        size = self.num_draft
        return AheadState(
            model=super().init(params, target_params, batch, capacity, inputs),
            ready=Ready(
                tokens=jnp.zeros((batch, size), jnp.int32),
                laws=jnp.zeros((batch, size, self.vocab_size), jnp.float32),
                count=jnp.zeros((batch,), jnp.int32),
            ),
        )

    def draft_step(self, params, target_params, state, context):
        return AheadDrafter.draft_step(self, params, target_params, state, context)

    def draft_ready(self, params, target_params, state: AheadState, context: Context):
        model, _, ran = self._begin(params, state.model, context)
        state = dataclasses.replace(state, model=dataclasses.replace(model, ran=ran))
        ready, hidden = self.redraft(params, state, context)
        count = ready.count
        if context.width is not None:
            count = jnp.where(context.asked_rows, jnp.minimum(count, context.width), 0)
        wanted = jnp.arange(self.num_draft) < count[:, None]
        every = self.always_drafts and context.width is None
        draft = trees.chain_draft(
            dataclasses.replace(context, width=None),
            ready.tokens,
            laws=ready.laws if states_laws(context) else None,
            candidate=None if every else wanted,
            scored=None if every else wanted,
        )
        return dataclasses.replace(draft, hidden=hidden), state

    def draft_on(self, params, target_params, state: AheadState, context: Context, draft: Draft):
        place = jnp.maximum(context.length - 2, 0)[:, None]
        before = jnp.take_along_axis(context.tokens, place, axis=1)
        chain = Draft(
            start=draft.start, tokens=jnp.maximum(draft.tokens, 0), topology=draft.topology
        )
        logits, entries = self.look(params, state.model.cache, before, chain, 0, None)
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(context.key, jnp.uint32(AHEAD))
        able = self.num_draft if draft.candidate is None else draft.candidate[:, 1:].sum(axis=1)
        begun = Begun(
            chain=chain,
            count=jnp.broadcast_to(able, context.length.shape).astype(jnp.int32),
            logits=logits,
            entries=entries,
            before=before,
            uniform=drawing.uniforms(keys, (self.num_draft + 1) * self.num_outcomes),
        )
        count, token, guess = self.expect(context, begun)
        tokens, laws, entries = self._continue(params, state, context, begun, count, token)
        nodes = jnp.arange(chain.num_nodes, dtype=jnp.int32)
        model = dataclasses.replace(
            state.model, fresh=entries, place=jnp.broadcast_to(nodes, chain.tokens.shape)
        )
        outcomes = Outcomes(count=count, token=token, tokens=tokens, laws=laws)
        state = dataclasses.replace(state, model=model, outcomes=outcomes)
        return dataclasses.replace(draft, guess=guess), state

    def _continue(self, params, state, context, begun: Begun, count, token):
        """Drafts K tokens after each outcome, one pass of the model for all outcomes a token.

        Returns:
          tokens int32 ``[B, M, K]``, laws float32 ``[B, M, K, V]`` or None, and the entries of all
          passes.
        """
        chain, entries, width = begun.chain, begun.entries, self.num_outcomes
        first = chain.num_nodes
        above = jnp.broadcast_to(trees.parents(chain), chain.tokens.shape)
        grown = dataclasses.replace(
            chain,
            tokens=jnp.concatenate([chain.tokens, jnp.maximum(token, 0)], axis=1),
            parent=jnp.concatenate([above, count], axis=1),
            topology=None,
        )
        tokens, laws = [], []
        for step in range(self.num_draft):
            since = first + step * width
            logits, entries = self.look(
                params, state.model.cache, begun.before, grown, since, entries
            )
            nodes = since + jnp.arange(width, dtype=jnp.int32)
            uniform = begun.uniform[:, (step + 1) * width : (step + 2) * width]
            depth = count + 2 + step
            drawn, q = say(context, grown, nodes[None], logits, depth, uniform)
            tokens.append(drawn)
            laws.append(q)
            if step + 1 < self.num_draft:
                here = jnp.broadcast_to(nodes, drawn.shape)
                grown = dataclasses.replace(
                    grown,
                    tokens=jnp.concatenate([grown.tokens, jnp.maximum(drawn, 0)], axis=1),
                    parent=jnp.concatenate([required(grown.parent, "parent"), here], axis=1),
                )
        stated = jnp.stack(laws, axis=2) if states_laws(context) else None
        return jnp.stack(tokens, axis=2), stated, entries

    def observe(self, params, target_params, state, segment):
        model = super().observe(params, target_params, state.model, segment)
        model = dataclasses.replace(model, fresh=None, place=None, ran=None)
        if segment.round is None:
            return AheadState(model=model, ready=state.ready)
        happened = segment.num > 0
        if state.outcomes is None:  # a round without a draft
            nothing = jnp.where(happened, 0, state.ready.count)
            return AheadState(model=model, ready=dataclasses.replace(state.ready, count=nothing))
        ready = self.found(state.outcomes, segment, state.ready)
        if state.model.ran is not None:  # a row that was not asked may lag behind its text
            count = jnp.where(state.model.ran, ready.count, 0)
            ready = dataclasses.replace(ready, count=count)

        def kept(new, old):
            return jnp.where(happened.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        return AheadState(model=model, ready=jax.tree.map(kept, ready, state.ready))

    def found(self, outcomes: Outcomes, segment, old: Ready) -> Ready:
        """What is ready for the next round: the draft of the outcome that came true."""
        verdict = segment.round[1]
        # where another drafter's tokens were committed, the text is none of the expected ones
        own = (segment.num == verdict.count + 1) & (verdict.token >= 0)
        same = (outcomes.count == verdict.count[:, None]) & own[:, None]
        same &= outcomes.token == verdict.token[:, None]
        which = jnp.argmax(same, axis=1)[:, None, None]
        laws = old.laws
        if outcomes.laws is not None:
            laws = jnp.take_along_axis(outcomes.laws, which[..., None], axis=1)[:, 0]
        return Ready(
            tokens=jnp.take_along_axis(outcomes.tokens, which, axis=1)[:, 0],
            laws=laws,
            count=jnp.where(jnp.any(same, axis=1), self.num_draft, 0).astype(jnp.int32),
        )

    def drawn_now(self, params, state: AheadState, context: Context) -> Ready:
        """A draft that is drawn in the round itself, as ``DraftModel`` draws it."""
        before = jnp.maximum(context.length - 2, 0)[:, None]
        before = jnp.take_along_axis(context.tokens, before, axis=1)

        def level(entries, grown, since):
            return self.look(params, state.model.cache, before, grown, since, entries)

        alone: Any = dataclasses.replace(context, width=None, confidence=None, stop_drafting=None)
        draft, _, _ = expand.expand(self.topology, alone, level, None, sibling_sampling="iid")
        laws = state.ready.laws if draft.laws is None else draft.laws
        count = jnp.full_like(context.length, self.num_draft)
        return Ready(tokens=draft.tokens[:, 1:], laws=laws, count=count)

    def sync(self, params, target_params, state, context, *, before="prompt"):
        model = super().sync(params, target_params, state.model, context, before=before)
        ready = state.ready
        if before == "prompt":  # what is ready follows another text
            ready = _none(ready)
        return dataclasses.replace(state, model=model, ready=ready)

    def rewind(self, state, length):
        return AheadState(model=super().rewind(state.model, length), ready=_none(state.ready))


def _none(ready: Ready) -> Ready:
    """Where nothing is ready any more."""
    return dataclasses.replace(ready, count=jnp.zeros_like(ready.count))


def say(context: Context, grown: Draft, nodes, logits, depth, uniform):
    """Draws a token below each of W nodes, as the request wants tokens of a drafter.

    Args:
      context: the round's.
      grown: the nodes and what they hang below.
      nodes: int32 ``[1 or B, W]``.
      logits: float32 ``[B, W, V]``, the model's after them.
      depth: int32 ``[B, W]``, of the drawn tokens.
      uniform: float32 ``[B, W]``.

    Returns:
      the tokens int32 ``[B, W]``, and their laws float32 ``[B, W, V]``, or None where no laws are
      stated.
    """
    if not states_laws(context):
        return drawing.argmax(scores(context, grown, nodes, logits, depth)), None
    q = _at(context, grown, nodes, logits, context.sampling.probabilities)
    return jax.vmap(drawing.draw, in_axes=1, out_axes=1)(q, uniform), q


def scores(context: Context, grown: Draft, nodes, logits, depth) -> jax.Array:
    """What the most probable tokens below W nodes are best by; arguments as ``say`` takes them.

    Returns:
      float32 ``[B, W, V]``: adjusted logits; with noise that the rule shares, ``log(q / E)``.
    """
    settings = context.sampling
    if context.noise is None:
        if not settings.adjusts:
            return logits
        return _at(context, grown, nodes, logits, settings.adjust)
    q = _at(context, grown, nodes, logits, settings.probabilities)
    at = jax.vmap(lambda depth: required(context.noise, "noise").at(depth, q.shape[2]), 1, 1)
    return jnp.log(q) - jnp.log(at(context.length[:, None] + depth - 1))


def _at(context: Context, grown: Draft, nodes, logits, says) -> jax.Array:
    """``says(logits [B, V], prefix)`` at each of W nodes, ``[B, W, V]``."""
    nodes = jnp.broadcast_to(nodes, logits.shape[:2])

    def at(logits, node):
        prefix = None
        if context.sampling.needs_prefix:
            prefix = context.prefix(trees.prefix_tokens(grown, node))
        return says(logits, prefix)

    return jax.vmap(at, in_axes=1, out_axes=1)(logits, nodes)


def states_laws(context: Context) -> bool:
    """Whether drafts state the laws from which they were drawn."""
    return not context.sampling.greedy and context.noise is None
