"""An independent draft model: any smaller target with the same vocabulary, run depth by depth.

    q(x_i | context, x_1 ... x_{i-1}),   i = 1 ... num_draft

The model lags by two tokens: its first pass feeds the last two committed ones. So the case in which
all drafted tokens were accepted, and the last of them has no cache entry yet, needs no special
treatment, and ``observe`` runs no pass: it keeps the entries of accepted tokens. A tree takes one
pass a depth, over the nodes that have children.

Lossless: yes (the draft states its laws), under ``rejection``, ``block``, ``traversal`` and the
other rules that judge drawn drafts; under ``greedy`` and ``delta`` too.

Example::

    small = specjax.load("Qwen/Qwen3-0.6B")
    specjax.generate(lm, "...", drafter=small, drafting=specjax.Drafting(num=4))
    drafter = DraftModel(num_draft=4, model=small.target)  # the same for `specjax.decode`

References: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318,
algorithm 2; trees: SpecInfer, arXiv 2305.09781, Sequoia, arXiv 2402.12374.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.pytree import pytree_dataclass
from ..decoding import contract_checks as checks
from ..trees import expand
from ..types import Draft, PyTree, Target, Verdict
from .model_passes import ModelPassDrafter

CATCH_UP = 8  # tokens read at once after rounds without a draft


@pytree_dataclass
class DraftModelState:
    """The state of a draft model: its cache, and during a round the entries of its passes.

    The last three fields are None between rounds.

    Attributes:
      cache: the model's entries of ``tokens[:filled]``.
      filled: int32 ``[B]``, ``length - 2`` or more, unless rounds were to draft nothing.
      fresh: the entries of this round's passes.
      place: int32 ``[B, N]``, where among them the nodes of the draft are.
      ran: bool ``[B]``, whether there are any.
    """

    cache: PyTree
    filled: jax.Array
    fresh: PyTree = None
    place: jax.Array | None = None
    ran: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class DraftModel(ModelPassDrafter):
    """Drafts a chain or a tree with a language model; ``params["drafter"]`` holds its weights.

    Where ``context.width`` is given, passes beyond it are left out. After rounds of width 0 the
    cache lags; the next round that drafts first reads what was missed, several tokens a pass.

    Attributes:
      num_draft: tokens of a chain; that of a tree follows from the topology.
      model: the draft model.
      topology: the tree to draft (see ``trees.topology``); None: a chain of ``num_draft`` tokens.
      sibling_sampling: how children are picked (see ``trees.expand``); None: drawn (``iid``), or
        ``top`` in a tree that the drafter grows.

    Raises:
      ValueError: there is no model, or nothing to draft.
    """

    model: Target = None
    topology: trees.Topology | None = None
    sibling_sampling: str | None = None
    name = "draft"

    def __post_init__(self):
        super().__post_init__()
        self._complete(self.model, "model", "a model")

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def shard(self, params, mesh):
        """Its weights on a mesh, as the model wants them; see ``sharding.place``."""
        return self.model.shard(params, mesh)

    def init(self, params, target_params, batch, capacity, inputs=None):
        cache = self.model.init(params, batch, capacity, inputs)
        return DraftModelState(cache=cache, filled=jnp.zeros((batch,), jnp.int32))

    def draft_step(self, params, target_params, state, context):
        ran = None
        if context.width is not None:
            state = self._catch_up(params, state, context)
            ran = jnp.broadcast_to(context.width > 0, context.length.shape)
        before = jnp.maximum(context.length - 2, 0)[:, None]
        before = jnp.take_along_axis(context.tokens, before, axis=1)

        def level(entries, grown, since):
            """A pass over the nodes of one depth; the first feeds the token before the root too."""
            block = _below(before, grown)
            first = since + 1 if since else 0
            scores = checks.verified(
                self.model, params, state.cache, block, since=first, entries=entries
            )
            return scores.logits[:, since + 1 - first :], scores.entries

        draft, entries, place = expand.expand(
            self.topology, context, level, None, sibling_sampling=self.picks
        )
        place = jnp.broadcast_to(place, draft.tokens.shape)
        return draft, dataclasses.replace(state, fresh=entries, place=place, ran=ran)

    def observe(self, params, target_params, state, segment):
        if segment.round is None:
            return self._read(params, state, segment.tokens, segment.start, segment.num)
        if state.fresh is None:
            return state
        # nodes of the passes: the last token but one, the root, and those drafted that were gone
        # on with; count accepted tokens leave the cache with the entries of all but the last two
        # committed ones
        count = segment.round[1].count
        if state.ran is not None:
            count = jnp.where(state.ran, count, -1)
        path = segment.round[1].path[:, :-1]
        path = 1 + jnp.maximum(jnp.take_along_axis(state.place, path, axis=1), 0)
        path = jnp.pad(path, ((0, 0), (1, 0)))
        verdict = Verdict(path=path, count=count, token=count)
        return DraftModelState(
            cache=checks.committed(
                self.model, state.cache, state.fresh, segment.start - 1, verdict
            ),
            filled=jnp.where(count >= 0, segment.start + count, state.filled),
        )

    def sync(self, params, target_params, state, context, *, before="prompt"):
        if before == "rest":
            return state  # the cache lags
        if before == "draft":  # what another drafter proposed it has not read
            return self._catch_up(params, state, context)
        return self._read_until(params, state, context.tokens, context.length - 1)

    def _catch_up(self, params, state, context):
        """Reads what it missed, up to where ``draft_step`` begins; nothing where no row drafts."""
        wanted = context.budget > 0
        if context.width is not None:
            wanted &= context.width > 0
        until = jnp.where(wanted, context.length - 2, 0)
        return self._read_until(params, state, context.tokens, until)

    def _read_until(self, params, state, tokens, until):
        """Reads what is lacking of ``tokens[:until]``, ``until`` int32 ``[B]``."""
        chunk = min(CATCH_UP, tokens.shape[1])
        steps = jnp.arange(chunk, dtype=jnp.int32)

        def lacking(state):
            return jnp.maximum(until - state.filled, 0)

        def read(state):
            where = state.filled[:, None] + steps
            piece = jnp.take_along_axis(tokens, where, axis=1, mode="clip")
            num = jnp.minimum(lacking(state), chunk)
            return self._read(params, state, piece, state.filled, num)

        return jax.lax.while_loop(lambda state: jnp.any(lacking(state) > 0), read, state)

    def _read(self, params, state, tokens, start, num):
        """Takes in the first ``num`` int32 ``[B]`` of committed ``tokens`` int32 ``[B, T]``."""
        width = tokens.shape[1]
        block = Draft(start=start, tokens=tokens, topology=trees.chain_parents(width - 1))
        scores = checks.verified(self.model, params, state.cache, block, logits=False)
        path = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
        verdict = Verdict(path=path, count=num - 1, token=num)
        return DraftModelState(
            cache=checks.committed(self.model, state.cache, scores.entries, start, verdict),
            filled=jnp.where(num > 0, start + num, state.filled),
        )


def _below(token: jax.Array, grown: Draft) -> Draft:
    """``grown`` below the token before its root, int32 ``[B, 1]``."""
    topology = grown.topology
    if topology is not None:
        topology = (-1, *(parent + 1 for parent in topology))
        parent = None
    else:
        parent = jnp.pad(grown.parent + 1, ((0, 0), (1, 0)), constant_values=-1)
    return Draft(
        start=grown.start - 1,
        tokens=jnp.concatenate([token, grown.tokens], axis=1),
        parent=parent,
        topology=topology,
    )
