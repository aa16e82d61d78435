"""A draft model that is itself decoded speculatively: a cascade of drafters, of any depth.

    target  <-  num_draft tokens of the outer model  <-  proposals of the inner drafter

The draft of a round is a text of ``num_draft`` tokens, and the outer model generates it as the loop
generates the text of the target: the inner drafter proposes, one pass of the outer model scores all
proposals, and an acceptance rule keeps some of them and draws one token more. These inner rounds
run in a ``while_loop`` of their own within the round. Where the inner drafter is often right, the
outer model runs fewer passes than tokens; its draft is the same.

The law q that the draft states is that of the outer model. The inner rule is lossless, so the
drafted tokens have exactly this law, whatever the inner drafter proposes.

Each level reads ahead of the committed text, and ``rewind`` takes back what is then rejected:
entries beyond the text are never read, and are overwritten.

Lossless: yes (the draft states its laws), under every rule under which the outer model is.

Differs from CS Drafting, whose inner reviews may be lenient (then q is not the law of the outer
model; here at temperature 0 alone), and from TriForce as released, which draws from p instead of
the residual where it rejects.

Example::

    specjax.generate(lm, "...", drafter="cascade:owner/small:ngram")
    drafter = Cascade(DraftModel(6, model=small), NGram(5))  # for `specjax.decode`
    params = {"target": weights, "drafter": {"outer": weights_of_small, "inner": None}}
    Cascade(DraftModel(8, model=a), Cascade(DraftModel(4, model=b), NGram(3)))  # four levels
    Hybrid(9, inner=Cascade(DraftModel(4, model=a), NGram(3)))  # and horizontally

References: StagedSpec, arXiv 2308.04623 (an n-gram model drafts for the draft model); CS Drafting,
arXiv 2312.11462, section 3.1 (the vertical cascade); TriForce, arXiv 2404.11912; LLMCad, arXiv
2309.04255 (``stop``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import acceptance, trees
from .._internal.optional import required, unset
from .._internal.pytree import pytree_dataclass
from ..acceptance.node_laws import TargetLaw
from ..decoding import round, stats
from ..decoding.inputs import DecodeInputs
from ..decoding.state import State, initial_state
from ..decoding.stats import Stats
from ..trees.confidence import most_probable
from ..types import Context, Drafter, PyTree, Rule
from .cascade_levels import check_inner, check_outer, check_window, levels
from .confidence_stop import CumulativeStop
from .draft_model import CATCH_UP, DraftModel, DraftModelState


@pytree_dataclass
class CascadeState:
    """The state of a cascade.

    Attributes:
      outer: the cache of the outer model; see ``DraftModel``.
      inner: the state of the inner drafter.
      stats: the counters of all inner rounds: ``rounds`` int32 ``[B]`` are the passes in which the
        outer model drafted, ``accepted`` what it kept of the inner drafts.
      threshold: float32 ``[B]``, that of ``stop``; None: there is none.
    """

    outer: DraftModelState
    inner: PyTree
    stats: Stats
    threshold: jax.Array | None = None


@pytree_dataclass
class _Writing:
    """The outer model's text in a round.

    Attributes:
      text: the state of the inner loop.
      laws: float32 ``[B, K, V]``, the law of each drafted token; None: none is stated.
      sure: float32 ``[B, K]``, its greatest probability before all settings; None: no one asks.
    """

    text: State
    laws: jax.Array | None
    sure: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Cascade(Drafter):
    """Drafts a chain with a draft model that another drafter drafts for.

    ``params["drafter"] = {"outer": weights of the draft model, "inner": those of the other one}``.
    To the inner drafter the outer model is the target. Where ``context.width`` is given, the text
    is that much shorter; where every row wants to stop, no further pass is run.

    Attributes:
      outer: a draft model, whose ``num_draft`` tokens are the draft.
      inner: a drafter of the outer model: a table, a draft model, a ``Cascade``, or a ``Hybrid`` or
        ``Fallback`` of these.
      rule: how the outer model judges the inner drafts; a rule that is not lossless is refused
        above temperature 0.
      stop: where a draft ends before ``num_draft`` tokens, row by row; None: nowhere.

    Raises:
      TypeError: ``outer`` is no ``DraftModel``, or ``inner`` no drafter.
      ValueError: ``outer`` drafts a tree or tokens of another vocabulary, ``inner`` cannot draft
        for a model whose text is taken back, or the rule is unknown.
    """

    outer: DraftModel = unset()
    inner: Drafter = unset()
    rule: str | Rule = "auto"
    stop: CumulativeStop | None = None
    can_rest = True
    takes_topology = True

    def __post_init__(self):
        check_outer(self.outer)
        check_inner(self.inner, self.outer)
        acceptance.named(self.rule)

    @property
    def name(self) -> str:
        return f"cascade({self.outer.name}, {self.inner.name})"

    @property
    def num_draft(self) -> int:
        return self.outer.num_draft

    @property
    def vocab_size(self) -> int:
        return self.outer.vocab_size

    @property
    def topology(self):
        return self.outer.topology

    def with_topology(self, topology):
        return dataclasses.replace(self, outer=self.outer.with_topology(topology))

    def shard(self, params, mesh):
        """The weights of all levels on a mesh; see ``sharding.place``."""
        return {
            "outer": self.outer.shard(params["outer"], mesh),
            "inner": self.inner.shard(params["inner"], mesh),
        }

    def init(self, params, target_params, batch, capacity, inputs=None):
        if not isinstance(params, dict) or set(params) != {"outer", "inner"}:
            raise ValueError(
                "params['drafter'] of a Cascade must be a dict with 'outer', the weights of the "
                "draft model, and 'inner', those of the drafter that drafts for it (None where it "
                "has none)"
            )
        room = capacity + self.num_draft  # a draft may go on beyond the end of the buffer
        for drafter in (self.outer, *levels(self.inner)):
            check_window(drafter, room)
        return CascadeState(
            outer=self.outer.init(params["outer"], target_params, batch, room, inputs),
            inner=self.inner.init(params["inner"], params["outer"], batch, room, inputs),
            stats=stats.start(batch, self.inner.depth, drafter=self.inner.name),
            threshold=None if self.stop is None else self.stop.init(batch),
        )

    def observe(self, params, target_params, state, segment):
        if segment.round is None:
            outer = self.outer.observe(params["outer"], target_params, state.outer, segment)
            inner = self.inner.observe(params["inner"], params["outer"], state.inner, segment)
            return dataclasses.replace(state, outer=outer, inner=inner)
        draft, verdict, _ = segment.round
        # the accepted tokens stay, and the root stands before them; what was committed beyond is
        # another drafter's, and no level has read it
        state = self.rewind(state, segment.start + 2 + verdict.count)
        if self.stop is None:
            return state
        shown = draft.tokens[:, 1:] >= 0  # where another drafter's token took the place, it is -1
        if draft.candidate is not None:
            shown &= draft.candidate[:, 1:]
        offered = jnp.where(segment.num > 0, jnp.sum(shown, axis=1, dtype=jnp.int32), 0)
        threshold = required(state.threshold, "threshold")
        threshold = self.stop.update(threshold, offered, jnp.maximum(verdict.count, 0))
        return dataclasses.replace(state, threshold=threshold)

    def rewind(self, state, length):
        return dataclasses.replace(
            state,
            outer=self.outer.rewind(state.outer, length),
            inner=self.inner.rewind(state.inner, length),
        )

    def sync(self, params, target_params, state, context, *, before="prompt"):
        if before == "rest":
            return state  # all levels lag
        until = context.length - 1
        if before == "draft":
            until = jnp.where(self._wanted(context) > 0, until, 0)
        # without rounds that draft nothing, only the last token of a whole draft can be lacking
        chunk = 2 if before == "draft" and context.width is None else CATCH_UP
        outer = self.outer.read_until(params["outer"], state.outer, context.tokens, until, chunk)
        here = dataclasses.replace(context, cache=outer.cache)
        inner = self.inner.sync(params["inner"], params["outer"], state.inner, here, before=before)
        return dataclasses.replace(state, outer=outer, inner=inner)

    def _wanted(self, context) -> jax.Array:
        """int32 ``[B]``, how many tokens each row is to draft."""
        width = self.num_draft
        if context.width is not None:
            width = jnp.minimum(context.width, width)
        wants = context.budget > 0
        if context.stop_drafting is not None:
            wants &= ~context.stop_drafting(jnp.zeros((len(wants), 0), jnp.int32))
        return jnp.where(wants, width, 0).astype(jnp.int32)

    def draft_step(self, params, target_params, state, context):
        state = self.sync(params, target_params, state, context, before="draft")
        own = {
            "target": params["outer"],
            "drafter": params["inner"],
            "logits_processor": context.processor_params,
        }
        rule = self._rule(context)
        model, steps = self.outer.model, jnp.arange(self.num_draft, dtype=jnp.int32)

        def going(writing):
            return jnp.any(writing.text.budget > 0)

        def step(writing):
            text = writing.text
            judged = round.draft_and_verify(model, self.inner, rule, own, text, noise=context.noise)
            after = round.commit_round(model, self.inner, own, text, judged)
            p = TargetLaw(judged.draft, required(judged.scores.logits, "logits"), judged.context)
            laws, sure = writing.laws, writing.sure
            if laws is not None:
                laws = _noted(laws, context, text, after, judged, p)
            if sure is not None:
                sure = _noted(sure, context, text, after, judged, lambda n: most_probable(p.raw(n)))
            _, ends = self._count(state, context, after, sure)
            after = dataclasses.replace(after, budget=jnp.where(ends, 0, after.budget))
            return _Writing(text=after, laws=laws, sure=sure)

        begun = self._begun(own, rule, state, context)
        made = jax.lax.while_loop(going, step, begun)
        text = made.text
        count, _ = self._count(state, context, text, made.sure)
        where = context.length[:, None] + steps
        tokens = jnp.take_along_axis(text.tokens, where, axis=1)
        shorter = context.stop_drafting is not None or made.sure is not None
        proposed = None
        if shorter or context.sampling.logits_processor is not None:
            proposed = steps < count[:, None]
        draft = trees.chain_draft(
            context, tokens, laws=made.laws, candidate=proposed, scored=proposed
        )
        ran = text.length > context.length
        filled = jnp.where(ran, text.length - 1, state.outer.filled)
        return draft, CascadeState(
            outer=DraftModelState(cache=text.cache, filled=filled),
            inner=text.drafter_state,
            stats=text.stats,
            threshold=state.threshold,
        )

    def _rule(self, context: Context) -> str | Rule:
        """How the outer model judges in this round."""
        if context.noise is not None:  # its tokens are those that have the least ``E / q``
            if self.rule != "auto":
                raise ValueError(
                    f"Cascade(rule={self.rule!r}): where the target's rule shares its noise with "
                    "the draft, so does the outer model's; leave rule out"
                )
            return "gls" if context.noise.by_path else "coupled"
        rule = acceptance.named(self.rule)
        if rule is not None and not rule.lossless and not context.sampling.greedy:
            raise ValueError(
                f"Cascade(rule={rule.name!r}): its drafts would not have the outer model's law, "
                "which they state; give a lossless rule, or temperature=0"
            )
        return self.rule

    def _begun(self, own, rule, state: CascadeState, context: Context) -> _Writing:
        """What the inner loop begins with: the committed text, and a budget of ``num_draft``."""
        batch, settings = len(context.length), context.sampling
        tokens = jnp.pad(context.tokens, ((0, 0), (0, self.num_draft)))
        request = DecodeInputs(
            tokens=tokens,
            lengths=context.length,
            key=context.key,
            budget=self._wanted(context),
            sampling=dataclasses.replace(settings, logits_processor=None),
            stops=jnp.full((batch, 1), -1, jnp.int32),  # the outer model goes on
        )
        text = initial_state(
            self.outer.model,
            self.inner,
            rule,
            own,
            tokens,
            context.length,
            state.outer.cache,
            state.inner,
            request,
        )
        text = dataclasses.replace(
            text,
            key=context.key,
            sampling=settings,
            begin=context.length if context.begin is None else context.begin,
            processor_state=None if settings.logits_processor is None else context.processor_state,
            stats=state.stats,
        )
        laws = sure = None
        if not settings.greedy and context.noise is None:
            laws = jnp.zeros((batch, self.num_draft, self.vocab_size), jnp.float32)
        if self.stop is not None or context.confidence is not None:
            sure = jnp.zeros((batch, self.num_draft), jnp.float32)
        return _Writing(text=text, laws=laws, sure=sure)

    def _count(self, state: CascadeState, context: Context, text: State, sure):
        """int32 ``[B]``, the tokens that are proposed of those drafted so far; and bool ``[B]``,
        rows that want no more of them."""
        drafted = text.length - context.length
        count, ends = drafted, jnp.zeros(drafted.shape, bool)
        steps = jnp.arange(self.num_draft, dtype=jnp.int32)
        known = steps < drafted[:, None]
        for least, along, keeps_last in _thresholds(state.threshold, context):
            value = jnp.cumprod(sure, axis=1) if along == "path" else sure
            unsure = known & (value < least)
            stopped = jnp.any(unsure, axis=1)
            last = jnp.argmax(unsure, axis=1).astype(jnp.int32) + keeps_last
            count = jnp.where(stopped, jnp.minimum(count, last), count)
            ends |= stopped
        if context.stop_drafting is not None:
            where = context.length[:, None] + steps
            tokens = jnp.take_along_axis(text.tokens, where, axis=1)
            # what is not drafted yet equals no token of the text
            ends |= context.stop_drafting(jnp.where(known, tokens, -2 - steps))
        return count, ends


def _thresholds(own: jax.Array | None, context: Context) -> list[tuple[Any, str, bool]]:
    """For each threshold its value, what is compared with it, and whether the token that falls
    below it is still proposed."""
    found: list[tuple[Any, str, bool]] = []
    if own is not None:
        found.append((own[:, None], "path", True))
    if context.confidence is not None:
        sure = context.confidence
        found.append((sure.least, sure.along, sure.keeps_last))
    return found


def _noted(notes, context: Context, before: State, after: State, judged, value):
    """Writes ``value(node)`` of the nodes below which an inner round drew tokens to the places of
    these tokens among ``notes`` ``[B, K, ...]``."""
    num, most = after.length - before.length, notes.shape[1]
    rows = jnp.arange(len(num))

    def visit(step, notes):
        said = value(judged.verdict.path[:, step])
        place = before.length - context.length + step
        return notes.at[rows, jnp.where(step < num, place, most)].set(said, mode="drop")

    return jax.lax.fori_loop(0, jnp.max(num), visit, notes)
