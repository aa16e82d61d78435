"""A draft model that is itself decoded speculatively: a cascade of drafters, of any depth.

    target  <-  num_draft tokens of the outer model  <-  proposals of the inner drafter

The outer model may be the target itself over a window, sinks and chosen chunks of its own cache
(``SelfDraft``), for which a draft model drafts that has a small cache too: the three levels of
TriForce. A round then takes what the window shows from the target's cache once, writes its text
there, and throws it away.

The draft of a round is a text of ``num_draft`` tokens, and the outer model generates it as the loop
generates the text of the target: the inner drafter proposes, one pass of the outer model scores all
proposals, and an acceptance rule keeps some of them and draws one token more. These inner rounds
run in a ``while_loop`` of their own within the round. Where the inner drafter is often right, the
outer model runs fewer passes than tokens; its draft is the same.

The law q that the draft states is that of the outer model. The inner rule is lossless, so the
drafted tokens have exactly this law, whatever the inner drafter proposes.

With ``tree``, such as ``trees.comb(3, 6)``, further tokens from the laws of the outer model stand
beside each token of its text (StagedSpec), at no pass more: see ``cascade_tree.py``.

Each level reads ahead of the committed text, and ``rewind`` takes back what is then rejected:
entries beyond the text are never read, and are overwritten.

Lossless: yes (the draft states its laws), under every rule under which the outer model is.

Differs from CS Drafting, whose inner reviews may be lenient (then q is not the law of the outer
model; here at temperature 0 alone), and from TriForce as released, which draws from p instead of
the residual where it rejects.

Example::

    specjax.generate(lm, "...", drafter="cascade:owner/small:ngram")
    specjax.generate(lm, "...", drafter="cascade:self:window=64,budget=512:draft:window=256")
    drafter = Cascade(DraftModel(6, model=small), NGram(5))  # for `specjax.decode`
    params = {"target": weights, "drafter": {"outer": weights_of_small, "inner": None}}
    Cascade(DraftModel(8, model=a), Cascade(DraftModel(4, model=b), NGram(3)))  # four levels
    Hybrid(9, inner=Cascade(DraftModel(4, model=a), NGram(3)))  # and horizontally
    Cascade(DraftModel(6, model=a), NGram(5), tree=trees.comb(3, 6))  # two branches at each depth

References: StagedSpec, arXiv 2308.04623, section 3 (a tree of a draft model that an n-gram model
drafts for, which has branches of more tokens there, in which the draft model runs); CS Drafting,
arXiv 2312.11462, section 3.1 (the vertical cascade); TriForce, arXiv 2404.11912, section 4
(three levels); LLMCad, arXiv 2309.04255 (``stop``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .. import acceptance, trees
from .._internal.optional import required, unset
from .._internal.pytree import pytree_dataclass
from ..decoding import round, stats
from ..decoding.inputs import DecodeInputs
from ..decoding.state import State, initial_state
from ..decoding.stats import Stats
from ..trees.confidence import thresholds
from ..types import Context, Drafter, PyTree, Rule
from .base import check_field
from .cascade_levels import TwoLevels, check_inner, check_outer
from .cascade_notes import Notes, no_notes
from .cascade_tree import accepted_spine, check_noise, check_tree, most_siblings, spine, tree_draft
from .confidence_stop import CumulativeStop
from .draft_model import CATCH_UP
from .outer_level import OuterLevel


@pytree_dataclass
class CascadeState:
    """The state of a cascade.

    Attributes:
      outer: the state of the outer drafter.
      inner: the state of the inner drafter.
      stats: the counters of all inner rounds: ``rounds`` int32 ``[B]`` are the passes in which the
        outer model drafted, ``accepted`` what it kept of the inner drafts.
      threshold: float32 ``[B]``, that of ``stop``; None: there is none.
    """

    outer: PyTree
    inner: PyTree
    stats: Stats
    threshold: jax.Array | None = None


@pytree_dataclass
class _Writing:
    """The outer model's text in a round.

    Attributes:
      text: the state of the inner loop.
      notes: what is known of its tokens.
    """

    text: State
    notes: Notes


@dataclasses.dataclass(frozen=True)
class Cascade(TwoLevels):
    """Drafts a chain, or a comb, with a model that another drafter drafts for.

    ``params["drafter"] = {"outer": weights of the outer drafter (None: it has none), "inner": those
    of the other one}``. To the inner drafter the outer model is the target. Where ``context.width``
    is given, the text is that much shorter; where every row wants to stop, no further pass is run.

    Models with windows or small caches get slots for what is taken back, as many as all levels
    above them draft (``Target.rewindable``).

    Attributes:
      outer: a draft model or the target over a window (``SelfDraft``), whose ``num_draft`` tokens
        are the draft.
      inner: a drafter of the outer model: a table, a draft model, a ``Cascade``, or a ``Hybrid`` or
        ``Fallback`` of these.
      rule: how the outer model judges the inner drafts; a rule that is not lossless is refused
        above temperature 0.
      stop: where a draft ends before its full depth, row by row; None: nowhere.
      tree: a static tree as deep as the text, in which only the first child of a node has children
        (``trees.comb``): the text with further tokens beside it; None: the text alone.

    Raises:
      TypeError: ``outer`` is no ``DraftModel`` and no ``SelfDraft``, or ``inner`` no drafter.
      ValueError: ``outer`` drafts a tree or tokens of another vocabulary or, as ``SelfDraft``, has
        no window or stops by itself; ``inner`` cannot draft for a model whose text is taken back,
        ``tree`` is no such tree, or the rule is unknown.
    """

    outer: OuterLevel = unset()
    inner: Drafter = unset()
    rule: str | Rule = "auto"
    stop: CumulativeStop | None = None
    tree: trees.Tree | None = None
    can_rest = True
    takes_topology = True

    def __post_init__(self):
        check_outer(self.outer)
        check_inner(self.inner, self.outer)
        accepted = "confidence_stop.CumulativeStop(threshold=...) of specjax.drafters, or None"
        check_field(self, "stop", CumulativeStop | None, accepted)
        acceptance.named(self.rule)
        if self.tree is not None:
            check_tree(self.tree, self.depth)
            object.__setattr__(self, "tree", None if self.tree.is_chain else self.tree)
        made = self._rewindable(0)
        object.__setattr__(self, "outer", made["outer"])
        object.__setattr__(self, "inner", made["inner"])

    def _rewindable(self, num_tokens: int) -> dict[str, Any]:
        """Both levels, for a text that is itself taken back by ``num_tokens`` tokens."""
        most = num_tokens + self.depth + 2  # each level is up to two tokens behind
        own = most if self.outer.keeps_text else num_tokens
        return {"outer": self.outer.rewindable(own), "inner": self.inner.rewindable(most)}

    def rewindable(self, num_tokens):
        return dataclasses.replace(self, **self._rewindable(num_tokens))

    @property
    def name(self) -> str:
        return f"cascade({self.outer.name}, {self.inner.name})"

    @property
    def num_draft(self) -> int:
        return self.depth if self.tree is None else self.tree.num_nodes - 1

    @property
    def depth(self) -> int:
        return self.outer.depth

    @property
    def vocab_size(self) -> int:
        return self.outer.text_model.vocab_size

    @property
    def features(self) -> tuple[int, ...]:
        return self.outer.features

    @property
    def can_rewind(self) -> bool:
        return self.outer.can_rewind

    @property
    def topology(self):
        return self.outer.topology if self.tree is None else self.tree

    def with_topology(self, topology):
        check_tree(topology, topology.depth)
        text = self.outer.with_topology(trees.chain(topology.depth))
        return dataclasses.replace(self, outer=text, tree=topology)

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
                "outer drafter, and 'inner', those of the one that drafts for it (None where a "
                "drafter has none)"
            )
        room = capacity + self.depth  # a draft may go on beyond the end of the buffer
        weights = self.outer.text_params(params["outer"], target_params)
        return CascadeState(
            outer=self.outer.init(params["outer"], target_params, batch, room, inputs),
            inner=self.inner.init(params["inner"], weights, batch, room, inputs),
            stats=stats.start(batch, self.inner.depth, drafter=self.inner.name),
            threshold=None if self.stop is None else self.stop.init(batch),
        )

    def observe(self, params, target_params, state, segment):
        outer = self.outer.observe(params["outer"], target_params, state.outer, segment)
        state = dataclasses.replace(state, outer=outer)
        if segment.round is None:
            weights = self.outer.text_params(params["outer"], target_params)
            inner = self.inner.observe(params["inner"], weights, state.inner, segment)
            return dataclasses.replace(state, inner=inner)
        draft, verdict, _ = segment.round
        # the accepted tokens stay, and the root stands before them; what was committed beyond is
        # another drafter's, or stood beside the text, and no level has read it
        kept = verdict.count
        if self.tree is not None:
            kept = accepted_spine(self.tree, verdict.path, kept)
        state = self.rewind(state, segment.start + 2 + kept)
        if self.stop is None:
            return state
        shown = draft.tokens[:, 1:] >= 0  # where another drafter's token took the place, it is -1
        if draft.candidate is not None:
            shown &= draft.candidate[:, 1:]
        if self.tree is not None:  # a round without a draft has fewer nodes
            shown &= spine(self.tree)[1 : shown.shape[1] + 1]
        offered = jnp.where(segment.num > 0, jnp.sum(shown, axis=1, dtype=jnp.int32), 0)
        threshold = required(state.threshold, "threshold")
        threshold = self.stop.update(threshold, offered, jnp.maximum(kept, 0))
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
        weights = self.outer.text_params(params["outer"], target_params)
        here = dataclasses.replace(context, cache=None)  # it is there when the text begins
        inner = self.inner.sync(params["inner"], weights, state.inner, here, before=before)
        return dataclasses.replace(state, outer=outer, inner=inner)

    def _wanted(self, context) -> jax.Array:
        """int32 ``[B]``, how many tokens each row is to draft."""
        width = self.depth
        if context.width is not None:
            width = jnp.minimum(context.width, width)
        wants = context.asked_rows
        if context.stop_drafting is not None:
            wants &= ~context.stop_drafting(jnp.zeros((len(wants), 0), jnp.int32))
        return jnp.where(wants, width, 0).astype(jnp.int32)

    def draft_step(self, params, target_params, state, context):
        state = self.sync(params, target_params, state, context, before="draft")
        given = params["outer"], target_params
        wanted = jnp.where(self._wanted(context) > 0, context.budget, 0)  # others choose nothing
        here = dataclasses.replace(context, budget=wanted)
        cache, outer = self.outer.begin_text(*given, state.outer, here)
        own = {
            "target": self.outer.text_params(*given),
            "drafter": params["inner"],
            "logits_processor": context.processor_params,
        }
        rule = self._rule(context)
        model, steps = self.outer.text_model, jnp.arange(self.depth, dtype=jnp.int32)

        def going(writing):
            return jnp.any(writing.text.budget > 0)

        def step(writing):
            text = writing.text
            judged = round.draft_and_verify(model, self.inner, rule, own, text, noise=context.noise)
            after = round.commit_round(model, self.inner, own, text, judged)
            notes = writing.notes.after_round(context, text, after, judged)
            _, ends = self._count(state, context, after, notes.sure)
            after = dataclasses.replace(after, budget=jnp.where(ends, 0, after.budget))
            return _Writing(text=after, notes=notes)

        made = jax.lax.while_loop(going, step, self._begun(own, rule, state, cache, context))
        text, notes = made.text, made.notes
        count, _ = self._count(state, context, text, notes.sure)
        where = context.length[:, None] + steps
        tokens = jnp.take_along_axis(text.tokens, where, axis=1)
        shorter = context.stop_drafting is not None or notes.sure is not None
        proposed = None
        if shorter or self.tree is not None or context.sampling.logits_processor is not None:
            proposed = steps < count[:, None]
        if self.tree is not None:
            kept = required(proposed, "proposed")
            draft = tree_draft(context, self.tree, tokens, kept, notes.laws, notes.best)
        else:
            draft = trees.chain_draft(
                context, tokens, laws=notes.laws, candidate=proposed, scored=proposed
            )
        ran = text.length > context.length
        return draft, CascadeState(
            outer=self.outer.end_text(outer, text.cache, text.length, ran),
            inner=text.drafter_state,
            stats=text.stats,
            threshold=state.threshold,
        )

    def _rule(self, context: Context) -> str | Rule:
        """How the outer model judges in this round."""
        if context.noise is not None:  # its tokens are those that have the least ``E / q``
            check_noise(context.noise, self.tree)
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

    def _begun(self, own, rule, state: CascadeState, cache, context: Context) -> _Writing:
        """What the inner loop begins with: the committed text, and a budget of its depth."""
        batch, settings = len(context.length), context.sampling
        tokens = jnp.pad(context.tokens, ((0, 0), (0, self.depth)))
        request = DecodeInputs(
            tokens=tokens,
            lengths=context.length,
            key=context.key,
            budget=self._wanted(context),
            sampling=dataclasses.replace(settings, logits_processor=None),
            stops=jnp.full((batch, 1), -1, jnp.int32),  # the outer model goes on
        )
        text = initial_state(
            self.outer.text_model,
            self.inner,
            rule,
            own,
            tokens,
            context.length,
            cache,
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
        unsure = self.stop is not None or context.confidence is not None
        siblings = 1 if self.tree is None else most_siblings(self.tree)
        notes = no_notes(context, self.depth, self.vocab_size, unsure, siblings)
        return _Writing(text=text, notes=notes)

    def _count(self, state: CascadeState, context: Context, text: State, sure):
        """int32 ``[B]``, the tokens that are proposed of those drafted so far; and bool ``[B]``,
        rows that want no more of them."""
        drafted = text.length - context.length
        count, ends = drafted, jnp.zeros(drafted.shape, bool)
        steps = jnp.arange(self.depth, dtype=jnp.int32)
        known = steps < drafted[:, None]
        for least, along, keeps_last in thresholds(context, state.threshold):
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
