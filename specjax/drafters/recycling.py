"""Token recycling: a table of the tokens that the target found most probable after each token.

After every pass the row of each node's token becomes the best tokens of its logits, whether the
node was accepted or not; so the table keeps what a verification computes and would throw away. The
draft is a static tree: the r-th child of a node is the r-th entry of its token's row.

    M[token(n)] <- top-k of the target's logits at node n,    token(child) = M[token(parent), rank]

Cost of a round and row, whatever the context: ``N`` rows of ``4 k`` bytes are read and written (10
KB for the published tree of 80 nodes), and the ``k`` best of ``N`` laws are found. The state is
``4 k V`` bytes a row: 5 MB for k = 8 and V = 152k.

Lossless: yes, under ``greedy``, ``delta`` and all rules that take a function of the context.

Example::

    specjax.generate(lm, "...", drafter="recycling")
    drafter = Recycling(vocab_size=target.vocab_size, topology=specjax.trees.branching(3, 2, 1))

Differs from the reference implementation: a row that is not known yet proposes nothing (there:
token 0); where a token stands in the tree several times the last node counts (there: any of them);
the prompt's own successors are in the table (``reads_prompt``).

References: Token Recycling, arXiv 2408.08696, section 3.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from .._internal.host import check_table_fits
from .._internal.optional import required, unset
from ..sampling import drawing
from ..types import ROOT
from .base import ChainDrafter

# how many children the node at the end of each path of ranks has, level by level
PUBLISHED = (
    {"": 8},
    {"0": 8, "1": 4, "2": 3, "3": 2, "4": 1, "5": 1, "6": 1, "7": 1},
    {"00": 8, "01": 3, "02": 2, "03": 1, "04": 1, "05": 1, "06": 1, "07": 1}
    | {"10": 2, "11": 1, "20": 1, "30": 1, "40": 1, "50": 1},
    {"000": 5, "001": 2, "002": 1, "003": 1, "004": 1, "010": 1, "020": 1}
    | {"100": 1, "200": 1, "300": 1},
    {"0000": 3, "0001": 1, "0002": 1, "0010": 1, "0100": 1, "1000": 1},
    {"00000": 2, "00010": 1},
)


def published_tree() -> trees.Tree:
    """The tree of the reference implementation: 80 nodes below the root, six levels."""
    return trees.from_paths(
        [
            [*map(int, path), rank]
            for level in PUBLISHED
            for path, count in level.items()
            for rank in range(count)
        ]
    )


@dataclasses.dataclass(frozen=True)
class Recycling(ChainDrafter):
    """Drafts a static tree from the best successors that the target last named of each token.

    Attributes:
      num_draft: tokens of a chain; 0: that of a tree follows from the topology.
      vocab_size: of the target.
      topology: a static tree; None: a chain of ``num_draft`` tokens, or ``published_tree()``.
      reads_prompt: whether the successors of the prompt's tokens are put into the table too.

    Raises:
      ValueError: there is no vocabulary, or the tree is not static.
    """

    num_draft: int = 0
    vocab_size: int = unset()
    topology: trees.Topology | None = None
    reads_prompt: bool = True
    name = "recycling"
    has_weights = False
    can_rest = True
    takes_topology = True
    reads_nodes = True
    can_rewind = False

    @classmethod
    def for_target(cls, target, **settings):
        return cls(vocab_size=target.vocab_size, **settings)

    def __post_init__(self):
        shape = self.topology or (trees.chain(self.num_draft) if self.num_draft else None)
        object.__setattr__(self, "topology", shape or published_tree())
        shape = self.tree
        if not self.vocab_size or self.vocab_size <= max(shape.ranks):
            raise ValueError(
                f"Recycling(vocab_size={self.vocab_size}): give the size of the target's "
                f"vocabulary, above {max(shape.ranks)} for this tree"
            )
        object.__setattr__(self, "num_draft", shape.num_nodes - 1)

    @property
    def tree(self) -> trees.Tree:
        """The tree that is drafted. Raises ValueError if it is not static."""
        if not isinstance(self.topology, trees.Tree):
            raise ValueError(
                f"Recycling(topology={self.topology}): the table holds ranks, no probabilities; "
                "give a static tree, such as trees.branching(3, 2, 1) or trees.chain(4)"
            )
        return self.topology

    @property
    def depth(self) -> int:
        return self.tree.depth

    @property
    def width(self) -> int:
        """Entries of a row of the table."""
        return max(self.tree.ranks) + 1

    def init(self, params, target_params, batch, capacity, inputs=None):
        check_table_fits(
            4 * batch * self.vocab_size * self.width,
            f"Recycling(vocab_size={self.vocab_size}) with {self.width} ranks, for {batch} rows",
            "give a tree with fewer ranks, or fewer rows",
        )
        return jnp.full((batch, self.vocab_size, self.width), -1, jnp.int32)

    def draft_step(self, params, target_params, state, context):
        tree = self.tree
        parents, ranks, depths = map(np.asarray, (tree.parents, tree.ranks, tree.depths))
        tokens = context.root[:, None]
        for depth in range(1, tree.depth + 1):
            here = np.flatnonzero(depths == depth)
            above = tokens[:, parents[here]]
            row = jnp.take_along_axis(state, jnp.maximum(above, 0)[:, :, None], axis=1)
            said = jnp.take_along_axis(row, jnp.asarray(ranks[here])[None, :, None], axis=2)
            said = jnp.where(above >= 0, said[:, :, 0], -1)
            tokens = jnp.concatenate([tokens, said], axis=1)
        drafted = tokens[:, ROOT + 1 :]
        known = drafted >= 0
        drafted = jnp.maximum(drafted, 0)
        draft = trees.tree_draft(context, drafted, tree.parents, candidate=known, scored=known)
        return draft, state

    def readout(self, draft, scores):
        return drawing.best(required(scores.logits, "scores.logits"), self.width)

    def observe(self, params, target_params, state, segment):
        if segment.round is None:
            return self._read(state, segment) if self.reads_prompt else state
        draft, _, best = segment.round
        scored = jnp.ones(draft.tokens.shape, bool) if draft.scored is None else draft.scored
        scored &= (segment.num > 0)[:, None]
        same = (draft.tokens[:, :, None] == draft.tokens[:, None, :]) & scored[:, None, :]
        later = jnp.arange(draft.num_nodes)[:, None] < jnp.arange(draft.num_nodes)
        wins = scored & ~jnp.any(same & later, axis=2)
        where = jnp.where(wins, draft.tokens, self.vocab_size)  # out of range: dropped
        rows = jnp.arange(len(where))[:, None]
        return state.at[rows, where].set(best, mode="drop")

    def _read(self, state, segment):
        """Puts the successor of each token of the prompt at the front of that token's row."""
        rows = jnp.arange(state.shape[0])

        def put(step, state):
            token, follower = segment.tokens[:, step], segment.next[:, step]
            row = moved_to_front(state[rows, token], follower)
            where = jnp.where(step < segment.num, token, self.vocab_size)
            return state.at[rows, where].set(row, mode="drop")

        return jax.lax.fori_loop(0, jnp.max(segment.num), put, state)


def moved_to_front(entries: jax.Array, entry: jax.Array) -> jax.Array:
    """``entries`` ``[B, K, ...]`` with ``entry`` ``[B, ...]`` first: it moves there from its place,
    or, where it is not among them, the last one falls out."""
    count = entries.shape[1]
    same = (entries == entry[:, None]).reshape(*entries.shape[:2], -1)
    same = jnp.all(same, axis=2)
    place = jnp.where(jnp.any(same, axis=1), jnp.argmax(same, axis=1), count - 1)
    moved = jnp.roll(entries, 1, axis=1).at[:, 0].set(entry)
    moves = jnp.arange(count) <= place[:, None]
    return jnp.where(moves.reshape(*moves.shape, *(1,) * (entries.ndim - 2)), moved, entries)
