"""Copies where the text repeats itself, and asks another drafter where it does not.

A row whose last tokens occurred before in its context copies what followed there (``ngram.py``).
Where they did not, the inner drafter drafts, token by token, until the text with the drafted tokens
did; the rest is copied. The expensive drafter thus proposes the first tokens, on which all others
depend, and the cheap one those after them: the horizontal cascade of CS Drafting.

Lossless: yes, as the inner drafter is; a copied token is judged as a function of the context.

Example::

    specjax.generate(lm, "...", drafter="ngram+mtp")
    drafter = Hybrid(7, inner=DraftModel(3, model=small))  # for `specjax.decode`
    params = {"target": weights, "drafter": weights_of_small}

References: CS Drafting, arXiv 2312.11462, section 3.2 (the horizontal cascade, whose last drafter
is a statistical one); with a lookup first: SuffixDecoding, arXiv 2411.04975, and SAM Decoding,
arXiv 2411.10666.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from .._internal.optional import required, unset
from .._internal.pytree import pytree_dataclass, static
from ..trees.topology import chain
from ..types import POINT_MASS, ROOT, Draft, Drafter, DrafterWrapper, PyTree
from .base import CombinedDrafter, check_field
from .ngram import NGram
from .shared_round import round_of, scores_of


@pytree_dataclass
class HybridState:
    """``inner``: the other drafter's; ``draft``: what it proposed, None between rounds."""

    inner: PyTree
    draft: Draft | None = None


@pytree_dataclass
class MatchedText:
    """Where a text can be copied from, as it grows; as ``Context.stop_drafting``, where it can.

    Attributes:
      tokens: int32 ``[B, L]``, a buffer of which ``length`` int32 ``[B]`` tokens are the text.
      lookup: which matches are followed.
      steps: the most tokens that are copied.
    """

    tokens: jax.Array
    length: jax.Array
    lookup: NGram = static()
    steps: int = static()

    def text(self, drafted: jax.Array) -> jax.Array:
        """int32 ``[B, L]``: the buffer with ``drafted`` int32 ``[B, K]`` after the text."""
        where = self.length[:, None] + jnp.arange(drafted.shape[1])
        rows = jnp.arange(len(drafted))[:, None]
        return self.tokens.at[rows, where].set(drafted, mode="drop")

    def matches(self, drafted: jax.Array) -> list[jax.Array]:
        """``lookup.matches`` of the text, and with each one more of ``drafted`` ``[B, K]``."""
        text = self.text(drafted)
        found = [self.lookup.matches(self.tokens, self.length)]
        for k in range(drafted.shape[1]):
            found.append(self.lookup.matches_after(text, self.length + k, found[-1]))
        return found

    def copies(self, drafted: jax.Array) -> list[jax.Array]:
        """Bool ``[B]`` each: whether there is something to copy after the text, and after it with
        each one more of ``drafted``."""
        found = enumerate(self.matches(drafted))
        return [self.lookup.followed(m, self.length + k, self.steps) > 0 for k, m in found]

    def __call__(self, drafted: jax.Array) -> jax.Array:
        return jnp.any(jnp.stack(self.copies(drafted)), axis=0)


class TableBefore(CombinedDrafter):
    """What a table proposes, or else ``inner``, whose weights and wishes are its own.

    The nodes of ``inner`` are the first of a draft, as far as they are in it.
    """

    inner: Drafter

    @property
    def has_weights(self) -> bool:
        return self.inner.has_weights

    @property
    def reads_last(self) -> bool:
        return self.inner.reads_last

    def beside(self, num_tokens):
        return dataclasses.replace(self, inner=self.inner.beside(num_tokens))

    def rewindable(self, num_tokens):
        return dataclasses.replace(self, inner=self.inner.rewindable(num_tokens))

    def shard(self, params, mesh):
        """The weights of ``inner`` on a mesh; see ``sharding.place``."""
        return self.inner.shard(params, mesh)

    def readout(self, draft, scores):
        """The scores at the nodes of ``inner``, if it reads them."""
        return scores_of(scores, self._own) if self.reads_nodes else None

    @property
    def _own(self) -> np.ndarray:
        """Where the nodes of ``inner`` stand in a round: they are the first."""
        return np.arange(self.inner.num_draft + 1)


@dataclasses.dataclass(frozen=True)
class Hybrid(TableBefore):
    """Copies by ``lookup`` where it finds a match, else drafts with ``inner``.

    A round in which all rows copy costs no more than the lookup: ``inner`` is not run, and reads
    what it missed when it is next asked. (Only a prefix layer computes keys and values at once.)
    ``params["drafter"]`` holds the weights of ``inner``.

    Attributes:
      num_draft: tokens a round, at least those of ``inner``; 0: twice those and one more.
      inner: a drafter of chains.
      lookup: which matches are followed, and how far; None: ``NGram()``.

    Raises:
      TypeError: ``inner`` is no drafter, or ``lookup`` no ``NGram``.
      ValueError: ``lookup`` has a topology, or ``inner`` drafts trees, or cannot be asked for less
        than all that it drafts.
    """

    num_draft: int = 0
    inner: Drafter = unset()
    lookup: NGram | None = None
    can_rest = True

    def __post_init__(self):
        inner = self.inner
        check_inner("Hybrid", inner)
        check_field(self, "lookup", NGram | None, "an NGram of specjax.drafters, or None")
        if self.lookup is not None and self.lookup.topology is not None:
            raise ValueError(
                f"Hybrid(lookup={self.lookup}): one match is copied after another, so give a "
                "lookup without a topology; Fallback(first=NGram(...), inner=...) copies trees"
            )
        name, depth = inner.name, inner.depth
        if not drafts_chains(inner):
            raise ValueError(
                f"Hybrid(inner={name}): copies go on from the end of a chain, so give a drafter of "
                "chains; Fallback(first=NGram(...), inner=...) copies or drafts trees"
            )
        if self.num_draft and self.num_draft < depth:
            raise ValueError(
                f"Hybrid(num_draft={self.num_draft}): {name} alone drafts {depth}; give at least "
                "as many"
            )
        object.__setattr__(self, "num_draft", self.num_draft or 2 * depth + 1)
        object.__setattr__(self, "lookup", self.lookup or NGram())
        object.__setattr__(self, "inner", inner.beside(self.num_draft + 1))

    @property
    def _lookup(self) -> NGram:
        """``lookup``, or what stands for None."""
        return required(self.lookup, "lookup")

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self._lookup, self.inner

    @property
    def name(self) -> str:
        return f"{self._lookup.name}+{self.inner.name}"

    def init(self, params, target_params, batch, capacity, inputs=None):
        return HybridState(inner=self.inner.init(params, target_params, batch, capacity, inputs))

    def draft_step(self, params, target_params, state, context):
        most = self.inner.depth
        width = most if context.width is None else jnp.minimum(context.width, most)
        none = jnp.zeros((len(context.length), 0), jnp.int32)
        text = dict(tokens=context.tokens, length=context.length)
        copying = MatchedText(**text, lookup=self._lookup, steps=self.num_draft)
        asks = context.asked_rows & ~copying.copies(none)[-1]
        asked = dataclasses.replace(
            context,
            width=jnp.where(jnp.any(asks), width, 0),
            asked=asks,
            stop_drafting=copying,
        )
        own, inner = self.inner.draft_step(params, target_params, state.inner, asked)
        return self._joined(context, copying, own, inner)

    def _joined(self, context, copying: MatchedText, own: Draft, inner):
        """The draft of each row: tokens of ``inner`` up to where copying begins, then the copy."""
        steps = jnp.arange(self.num_draft, dtype=jnp.int32)
        most = own.num_nodes - 1
        said = own.tokens[:, 1:]
        found = copying.matches(said)
        copies = jnp.stack(copying.copies(said), axis=1)
        # after all tokens of the inner drafter there need not be anything to copy
        first = jnp.where(jnp.any(copies, axis=1), jnp.argmax(copies, axis=1), most)
        first = first.astype(jnp.int32)
        matched = jnp.take_along_axis(jnp.stack(found, axis=1), first[:, None, None], axis=1)[:, 0]
        text = copying.text(said)
        copied, count = self._lookup.copy(text, context.length + first, matched, self.num_draft)
        copied = jnp.take_along_axis(copied, jnp.maximum(steps - first[:, None], 0), axis=1)
        draft, own = joined(
            context, own, steps < first[:, None], copied, steps < (first + count)[:, None]
        )
        return draft, HybridState(inner=inner, draft=own)

    def sync(self, params, target_params, state, context, *, before="prompt"):
        inner = self.inner.sync(params, target_params, state.inner, context, before=before)
        return HybridState(inner=inner)

    def rewind(self, state, length):
        return HybridState(inner=self.inner.rewind(state.inner, length))

    def observe(self, params, target_params, state, segment):
        if segment.round is not None:
            segment = round_of(self.inner, segment, state.draft, segment.round[2], self._own)
        return HybridState(inner=self.inner.observe(params, target_params, state.inner, segment))


def check_inner(called: str, inner: Drafter) -> None:
    """Raises TypeError or ValueError for what cannot be asked in some rows only."""
    if not isinstance(inner, Drafter):
        raise TypeError(f"{called}(inner={inner!r}): give an instance of specjax.Drafter")
    if inner.plans or not inner.can_rest:
        raise ValueError(
            f"{called}(inner={inner.name}): it cannot be asked to draft nothing in some rounds; of "
            "an adaptive drafter give the inner one, and wrap the hybrid in Adaptive; a drafter of "
            "your own says by can_rest = True that it can"
        )
    if not inner.depth:
        raise ValueError(
            f"{called}(inner={inner.name}): it drafts nothing; give a drafter of at least one token"
        )


def drafts_chains(drafter: Drafter) -> bool:
    """Whether all that a drafter, and what it is made of, proposes is a chain of candidates."""
    depth, parts = drafter.depth, ()
    if isinstance(drafter, CombinedDrafter):
        parts = drafter.parts
    elif isinstance(drafter, DrafterWrapper):
        parts = (drafter.inner,)
    own = drafter.num_draft == depth and drafter.topology in (None, chain(depth))
    return own and all(map(drafts_chains, parts))


def joined(context, own: Draft, mine, copied, kept) -> tuple[Draft, Draft]:
    """A chain of tokens of ``own``, a shorter chain, and of copied ones.

    Args:
      mine: bool ``[B, K]``, which of its tokens are those of ``own``.
      copied: int32 ``[B, K]``, the others.
      kept: bool ``[B, K]``, which of the others are proposed.

    Returns:
      the chain; and ``own`` without the tokens that are not in it.

    Raises:
      ValueError: ``own`` is no chain.
    """
    if not trees.is_chain(own):
        raise ValueError(
            "a drafter that a lookup goes before, and whose depth is its num_draft, returned a "
            "tree; return trees.chain_draft(...), or state the depth of the tree"
        )
    said, total = own.tokens[:, 1:], copied.shape[1]
    most = said.shape[1]
    wide = ((0, 0), (0, total - most))
    mine = jnp.broadcast_to(mine, copied.shape)
    tokens = jnp.where(mine, jnp.pad(said, wide), copied)
    own_kept = jnp.ones(said.shape, bool) if own.candidate is None else own.candidate[:, 1:]
    proposed = jnp.where(mine, jnp.pad(own_kept, wide), kept)
    proposed = jnp.cumsum(~proposed, axis=1) == 0  # nothing hangs below what is not proposed
    law = None
    if own.laws is not None:
        law = jnp.where(mine, jnp.pad(required(own.law, "law")[:, 1:], wide), POINT_MASS)
    draft = trees.tree_draft(
        context,
        tokens,
        trees.chain_parents(total),
        law=law,
        laws=own.laws,
        candidate=proposed,
        scored=proposed,
        draws="iid" if law is None else "mixed",
    )
    return dataclasses.replace(draft, vocab=own.vocab), left(own, mine[:, :most], draft)


def left(own: Draft, mine, draft: Draft) -> Draft:
    """``own`` as far as it is in ``draft``, whose first nodes are those of ``own``: without tokens
    that are not ``mine``, bool ``[B, N - 1]``, which may not have been computed at all."""
    tokens = own.tokens.at[:, ROOT + 1 :].set(jnp.where(mine, own.tokens[:, 1:], -1))
    kept = jnp.pad(mine, ((0, 0), (1, 0)), constant_values=True)
    scored = kept & required(draft.scored, "draft.scored")[:, : own.num_nodes]
    return dataclasses.replace(own, tokens=tokens, scored=scored)
