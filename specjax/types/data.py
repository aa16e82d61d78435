"""The data of the contract: what flows between drafters, targets, acceptance rules and the loop.

Shape letters, used in every docstring of the project::

    B batch rows          T tokens of a segment      L slots of the token buffer
    S slots of a cache    N nodes of a draft         D depth of the deepest candidate
    Q proposal laws       V vocabulary               F features

The invariant. A row has ``length`` committed tokens; the target's cache holds the entries of
``tokens[:length - 1]``. ``tokens[length - 1]`` is the *root*: known, not yet fed. The last
prompt token is the first root.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .._internal.pytree import PyTree, pytree_dataclass, static
from ..sampling.distribution import Prefix, Sampling
from ..sampling.noise import Noise
from .confidence import Confidence

ROOT = 0  # index of the root among the nodes of a draft
DRAWS = ("iid", "mixed", "distinct", "hub")  # values of `Draft.draws`
POINT_MASS = -1  # value of `Draft.law` for a node that was not drawn from a law


@pytree_dataclass
class PartialPass:
    """What a sub-network of the target computed of a draft, for the target's pass to go on from.

    Attributes:
      entries: as ``SubNetwork.verify`` returned them, of M nodes; opaque.
      place: int32 ``[1 or B, N]``, where among the M nodes those of the draft are; None: node
        ``n`` is the ``n``-th.
    """

    entries: PyTree
    place: jax.Array | None = None


@pytree_dataclass
class NodeVectors:
    """Learned vectors that the target reads at nodes of a draft, in place of token embeddings.

    Attributes:
      table: of a floating dtype ``[P, H]``, as large as what the target's first layer reads.
      index: int32 ``[1 or B, N]``, the row of ``table`` at each node; -1: the node's token.
    """

    table: jax.Array
    index: jax.Array


@pytree_dataclass
class Guess:
    """A drafter's guess of the token that follows a chain, drawn while the target verifies it.

    The target does not score a guess. The rule judges it by the target's law after the last
    candidate of the chain, as it judges a candidate: if it accepts the guess, the guess is the
    correction or bonus token of the round. So the token has the target's law, and it is the guess
    more often than an independent draw would be.

    Attributes:
      token: int32 ``[B]``, -1 where there is none.
      law: float32 ``[B, V]``, the law from which ``token`` was drawn; None: it is a function of the
        context.
    """

    token: jax.Array
    law: jax.Array | None = None


@pytree_dataclass
class Draft:
    """A tree of proposed tokens for every row. Build one with the functions of ``specjax.trees``.

    Node 0 is the root and ``parent[n] < n``, so every prefix of the nodes is a subtree.
    Siblings stand in the order in which they were drawn; equal siblings are kept: each is a draw.

    A *passenger* is a node that is scored but no candidate. It rides along in the target's pass, so
    that ``Drafter.readout`` can read the scores there, and obeys these laws:

    - It is a node like the others: it stands at the position of its depth and sees the committed
      text, its ancestors and itself. No other node sees it, so it changes no score of theirs.
    - It is never accepted, and neither is what hangs below it. Its entries never reach the cache.
    - It may stand deeper than any candidate: D counts candidates only (``deepest``).
    - ``Context.width`` asks for fewer candidates; passengers stay.
    - The pass is as wide as candidates and passengers together, which is what passengers cost.
      ``Stats.passengers`` counts them, ``Drafter.num_passengers`` bounds them, and τ and
      ``Stats.drafted`` leave them out.

    Attributes:
      start: int32 ``[B]``, position of the root. It may be negative in a drafter's own pass, which
        feeds some of the last committed tokens. A node at a negative position does not exist.
      tokens: int32 ``[B, N]``.
      parent: int32 ``[B, N]``, or None where ``topology`` is static. ``parent[:, 0] = -1``.
      scored: bool ``[B, N]`` or None (all): the node goes through the target.
      candidate: bool ``[B, N]`` or None (all): the node may be accepted. False at the root: the
        row emits nothing this round.
      law: int32 ``[B, N]`` or None (all are point masses): the row of ``laws`` from which this
        node was drawn, -1 for a point mass. Given the earlier siblings from that row, the law of
        a draw was as ``draws`` says.
      laws: float32 ``[B, Q, Vq]`` probabilities, or None.
      vocab: int32 ``[B, Vq]`` or None, draft id -> target id where the draft vocabulary is smaller.
      topology: the static ``parent``, a tuple of N ints beginning with -1, or None.
      draws: how siblings were drawn, one of ``DRAWS``. ``iid``: independently, all from one law,
        that of the tokens before them. ``mixed``: independently, each from its own law or a point
        mass. ``distinct``: from their row of ``laws`` without replacement. ``hub``: two from a row,
        as ``drawing.draw_hub``.
      deepest: static; the depth that no candidate exceeds; None: that of the deepest node of
        ``topology``, or N - 1 where ``parent`` differs by row.
      partial: what a sub-network of the target computed of these very nodes, or None. Whoever
        changes tokens or parents must set it to None.
      vectors: what the target reads at some nodes in place of their tokens, or None. Such nodes are
        passengers, and the target is one that reads it (``Target.reads_vectors``).
      guess: what the drafter expects after a chain, or None; ignored in drafts that are trees.
      hidden: bool ``[B]`` or None (nowhere): the draft was complete before the round began, so that
        the target's pass need not wait for a drafter. ``Stats.hidden`` counts such rounds.
    """

    start: jax.Array
    tokens: jax.Array
    parent: jax.Array | None = None
    scored: jax.Array | None = None
    candidate: jax.Array | None = None
    law: jax.Array | None = None
    laws: jax.Array | None = None
    vocab: jax.Array | None = None
    topology: tuple[int, ...] | None = static(default=None)
    draws: str = static(default="iid")
    deepest: int | None = static(default=None)
    partial: PartialPass | None = None
    vectors: NodeVectors | None = None
    guess: Guess | None = None
    hidden: jax.Array | None = None

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]


@pytree_dataclass
class Scores:
    """The result of one pass of the target over a draft.

    Attributes:
      logits: float32 ``[B, N, V]``, raw; row ``n`` is about the token after node ``n``. None if
        they were not asked for.
      features: of a floating dtype ``[B, N, F]``, the hidden states that the drafter asked for, or
        None.
      entries: what ``commit`` needs to keep of each node; leaves lead with B, opaque otherwise.
    """

    logits: jax.Array | None
    features: jax.Array | None
    entries: PyTree


@pytree_dataclass
class Verdict:
    """The longest lawful path and one more token.

    Attributes:
      path: int32 ``[B, D + 1]``, nodes from the root down; beyond ``count`` meaningless but valid.
      count: int32 ``[B]``, accepted nodes, the root not counted; -1 where nothing happens to the
        row (it is finished, or the round emits nothing).
      token: int32 ``[B]``, the correction or bonus token: the next root; -1 where nothing happens,
        and where the law after the path gives no token any probability: the row then ends.
    """

    path: jax.Array
    count: jax.Array
    token: jax.Array


@pytree_dataclass
class Segment:
    """Freshly committed tokens, the only thing from which a drafter learns.

    Attributes:
      tokens: int32 ``[B, T]`` at positions ``start ...``; the first ``num`` of a row are valid.
      next: int32 ``[B, T]``, the token after each of them.
      features: of a floating dtype ``[B, T, F]``, the hidden states of ``tokens``, or None.
      start, num: int32 ``[B]``; ``num = 0`` where nothing happened to the row.
      round: None on the prompt, else ``(draft, verdict, readout)``.
    """

    tokens: jax.Array
    next: jax.Array
    features: jax.Array | None
    start: jax.Array
    num: jax.Array
    round: tuple | None = None


@pytree_dataclass
class Context:
    """The part of the state that a drafter may read.

    Attributes:
      tokens: int32 ``[B, L]``; the first ``length`` of a row are committed.
      length: int32 ``[B]``.
      budget: int32 ``[B]``, tokens that the row may still emit; 0 when it is finished.
      key: random keys ``[B]``, already folded with the root's position and the drafting role.
      sampling: the law's settings, rows aligned with B.
      cache: the target's.
      begin: int32 ``[B]``, where what was generated begins.
      processor_state, processor_params: what ``sampling.logits_processor`` carries at the
        root, and its arrays.
      width: int32 scalar or None (all of ``num_draft``), how many tokens are wanted this round, at
        most ``num_draft``; in a tree, how deep. Shapes stay those of ``num_draft``; deeper nodes
        are no candidates and, unless they are passengers, not scored (``trees.tree_draft`` sees
        to that), and a drafter saves what they would cost.
      asked: bool ``[B]`` or None (all): the rows whose draft is used where ``width`` is above 0.
        The width is that of the batch; what a drafter remembers of a row depends on the row alone.
      stop_drafting: None, or a callable pytree: of the tokens that were drafted so far in chains,
        int32 ``[B, K]`` below the root, it returns bool ``[B]``: rows that want nothing deeper.
        Where that is all of them, a drafter saves what deeper nodes would cost; what stands there
        is no draft.
      confidence: static; None, or where a row stops drafting by the laws of its draft. Children of
        nodes below that threshold are no candidates and not scored (``trees.expand`` sees to that),
        and where that is so in all rows, a drafter saves what deeper nodes would cost. Drafters
        without laws of their own leave it alone.
      costs: float32 ``[D + 1]`` or None, what a round costs at each depth, which may be more than
        the drafter's own, in a combination: a drafter that knows its chances ends the draft where
        more of it does not pay (``drafters.draft_length.schedule``). Others leave it alone.
      copy_bonus: float32 ``[B, K]`` or None, nats that are added to the logits of tokens which
        followed where the end of a path stood before, by the number of tokens that match, from one
        to K or more (``trees.copies``; ``trees.expand`` sees to it).
      plan: what the drafter's own ``plan`` said before the round, or None.
      noise: under a rule that shares its noise (see ``Rule.noise``), that noise, else None. Drafts
        made with it are judged without their laws, and none need be stated.
    """

    tokens: jax.Array
    length: jax.Array
    budget: jax.Array
    key: jax.Array
    sampling: Sampling
    cache: PyTree = None
    width: jax.Array | None = None
    asked: jax.Array | None = None
    begin: jax.Array | None = None
    processor_state: PyTree = None
    processor_params: PyTree = None
    stop_drafting: Callable[[jax.Array], jax.Array] | None = None
    confidence: Confidence | None = static(default=None)
    costs: jax.Array | None = None
    copy_bonus: jax.Array | None = None
    plan: PyTree = None
    noise: Noise | None = None

    @property
    def asked_rows(self) -> jax.Array:
        """Bool ``[B]``: the rows that are to draft where ``width`` is above 0 (or None)."""
        live = self.budget > 0
        return live if self.asked is None else live & self.asked

    def prefix(self, path: jax.Array) -> Prefix:
        """The committed tokens and then ``path`` int32 ``[B, K]`` in its order, -1: none."""
        return Prefix(
            tokens=self.tokens,
            length=self.length,
            path=path,
            begin=self.begin,
            state=self.processor_state,
            params=self.processor_params,
        )

    @property
    def root(self) -> jax.Array:
        """int32 ``[B]``, the last committed token."""
        at = self.length[:, None] - 1
        return jnp.take_along_axis(self.tokens, at, axis=1, mode="clip")[:, 0]
