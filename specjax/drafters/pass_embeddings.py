"""PaSS: the target drafts for itself, by learned vectors that ride after each candidate.

    a pass reads the candidates and, at the positions after each of them, v_1 ... v_K
    logits of the k-th token drafted next = the target's logits at v_k after the last token kept

``v_k`` are K learned vectors in place of token embeddings, and all that is trained. They are
passengers of the pass that verifies (``Draft``): ``v_k`` sees the text, the candidates up to its
own and the vectors before it; nothing sees ``v_k``, and its keys and values are dropped. So one
pass a round verifies a draft and makes the next, and no other weights are read.

Cost of a round: the pass has ``N (1 + K)`` nodes for N candidates, the root counted: 16 for chains
of 3. The state is ``4 K V`` bytes a row.

Lossless: yes, whatever the vectors are; under ``greedy`` and ``delta``, and with
``sibling_sampling="iid"`` or ``"distinct"`` also under ``rejection``: each token is drawn from the
law of its place, which reads no token of the draft.

Example::

    # specjax train pass_embeddings teacher=my-model num_heads=3 run.folder=runs/pass
    specjax.generate(lm, "...", drafter="runs/pass/model")

Differs from the paper, in which passes take turns: one of the vectors after the last token, which
also says the next token, and one that verifies. Two such passes emit ``2 + a`` tokens for ``a``
accepted ones, and two passes here ``2 + 2 a``, for more nodes.

References: Monea et al., PaSS: Parallel Speculative Sampling, arXiv 2311.13581.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..acceptance.walk import at_node
from ..trees import Tree
from ..types import POINT_MASS, NodeVectors
from .heads import HeadDrafter, independent_level


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaSSConfig:
    """The shape of look-ahead vectors.

    Attributes:
      hidden_size: H, that of the target's embeddings.
      vocab_size: V, that of the target.
      num_heads: K, the number of vectors, and of tokens that they draft.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 3

    def __post_init__(self):
        for name in ("hidden_size", "vocab_size", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")


class PaSSVectors(nnx.Module):
    """The weights: ``embeddings`` ``[K, H]``."""

    def __init__(self, config: PaSSConfig, *, rngs, param_dtype=jnp.float32):
        shape = config.num_heads, config.hidden_size
        values = jax.random.normal(rngs.params(), shape) * 0.02
        self.embeddings = nnx.Param(values.astype(param_dtype))


@pytree_dataclass
class PaSSState:
    """What the target said at the vectors after the last token that was kept.

    Attributes:
      logits: float32 ``[B, K, V]``.
      known: bool ``[B]``; False before the first round, which proposes nothing.
    """

    logits: jax.Array
    known: jax.Array


@dataclasses.dataclass(frozen=True)
class PaSS(HeadDrafter):
    """Drafts with look-ahead vectors; ``params["drafter"]`` holds those of ``PaSSVectors``.

    ``topology``: a static tree of candidates, no deeper than there are vectors; ``num_draft``
    counts the vectors after them too, which are passengers.

    Raises:
      ValueError: the target reads no vectors, or the tree is not static.
    """

    module = PaSSVectors
    name = "pass"
    reads_nodes = True
    can_rewind = False

    def __post_init__(self):
        super().__post_init__()
        if not self.target.reads_vectors:
            raise ValueError(
                f"pass: a {type(self.target).__name__} reads tokens and no vectors; accepted are "
                "the decoder-only models of specjax.load and targets with reads_vectors = True"
            )
        object.__setattr__(self, "num_draft", self.tree.num_nodes - 1 + self.num_passengers)

    @property
    def tree(self) -> Tree:
        """The tree of candidates. Raises ValueError if it is not static."""
        if not isinstance(self.topology, Tree):
            raise ValueError(
                f"pass: {self.topology} follows the drafted tokens: give a static tree"
            )
        return self.topology

    @property
    def features(self) -> tuple[int, ...]:
        return ()

    @property
    def num_passengers(self) -> int:
        return self.tree.num_nodes * self.depth

    @property
    def _shape(self) -> tuple[tuple[int, ...], np.ndarray]:
        """The parents of candidates and then of passengers, after the candidates in their order;
        and the vector at each node, -1 at candidates."""
        nodes, depth = self.tree.num_nodes, self.depth
        after = nodes + np.arange(nodes * depth).reshape(nodes, depth)
        above = np.concatenate([np.arange(nodes)[:, None], after[:, :-1]], axis=1)
        index = np.concatenate([np.full(nodes, -1), np.tile(np.arange(depth), nodes)])
        return (*self.tree.parents, *(int(n) for n in above.reshape(-1))), index

    def init(self, params, target_params, batch, capacity, inputs=None):
        shape = batch, self.depth, self.config.vocab_size
        return PaSSState(logits=jnp.zeros(shape), known=jnp.zeros((batch,), bool))

    def make_level(self, params, target_params, state, context):
        return independent_level(lambda: state.logits)

    def draft_step(self, params, target_params, state, context):
        draft, state = super().draft_step(params, target_params, state, context)
        nodes, (parents, index) = self.tree.num_nodes, self._shape
        index = jnp.asarray(index, jnp.int32)

        def after(x, value):
            """``[B, N]`` with ``value`` at each passenger."""
            spare = ((0, 0), (0, len(index) - nodes))
            return jnp.pad(x, spare, constant_values=value)

        real = jnp.arange(nodes) < 1  # the root
        kept = jnp.ones(draft.tokens.shape, bool) if draft.candidate is None else draft.candidate
        kept &= real | state.known[:, None]
        riding = jnp.repeat(kept, self.depth, axis=1)  # after what is proposed
        heads = self.heads(params)
        return dataclasses.replace(
            draft,
            tokens=after(draft.tokens, 0),
            topology=parents,
            scored=jnp.concatenate([kept, riding], axis=1),
            candidate=after(kept, False),
            law=None if draft.law is None else after(draft.law, POINT_MASS),
            deepest=self.depth,
            vectors=NodeVectors(table=heads.embeddings[...], index=index[None]),
        ), state

    def readout(self, draft, scores):
        logits = required(scores.logits, "scores.logits")
        return logits[:, self.tree.num_nodes :]

    def observe(self, params, target_params, state, segment):
        more = segment.num > 0
        if segment.round is None or segment.round[0].num_nodes == 1:
            return dataclasses.replace(state, known=state.known & ~more)
        draft, verdict, said = segment.round
        last = jnp.maximum(at_node(verdict.path, verdict.count), 0)
        said = said.reshape(len(said), self.tree.num_nodes, self.depth, -1)
        said = jnp.take_along_axis(said, last[:, None, None, None], axis=1)[:, 0]
        whole = segment.num == verdict.count + 1  # what was kept ends at that node
        return PaSSState(
            logits=jnp.where(more[:, None, None], said, state.logits),
            known=jnp.where(more, whole, state.known),
        )
