"""An independent draft model: any target with the same vocabulary, run token by token."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from .. import sampling as law
from .. import tree
from ..pytree import pytree_dataclass
from ..sampling import Prefix
from ..types import Draft, PyTree, Target, Verdict
from .base import ChainDrafter


@pytree_dataclass
class DraftModelState:
    """``cache`` holds the entries of ``tokens[:length - 2]``; ``fresh`` those of this round."""

    cache: PyTree
    fresh: PyTree = None


@dataclasses.dataclass(frozen=True)
class DraftModel(ChainDrafter):
    """Drafts a chain with a small language model; ``params["drafter"]`` are its weights.

    It stays two tokens behind: its first pass feeds the last two committed tokens. Then a full
    acceptance, after which the last drafted token has no entry yet, is no special case, and
    ``observe`` runs no pass at all: it keeps the entries of what was accepted.

    Lossless: yes, under ``greedy``, ``rejection`` (its law is recorded) and ``delta``.

    References: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    """

    model: Target = None
    name = "draft"

    def __post_init__(self):
        super().__post_init__()
        if self.num_draft < 1 or self.model is None:
            raise ValueError(
                f"DraftModel(num_draft={self.num_draft}, model={type(self.model).__name__}): it "
                "needs a model and at least one token to draft; for plain decoding use Plain()"
            )

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def init(self, params, batch, capacity, inputs=None):
        return DraftModelState(cache=self.model.init(params["drafter"], batch, capacity, inputs))

    def draft_step(self, params, state, context):
        sampling, greedy = context.sampling, context.sampling.greedy
        tail = context.length[:, None] - 2 + jnp.arange(2)
        known = jnp.take_along_axis(context.tokens, jnp.maximum(tail, 0), axis=1)
        uniform = None if greedy else law.uniforms(context.key, self.num_draft)
        tokens, laws, entries = known, [], None
        for step in range(self.num_draft):
            nodes = tokens.shape[1]
            drafted = tokens[:, 2:]
            block = Draft(
                start=context.length - 2, tokens=tokens, topology=tree.chain_topology(nodes - 1)
            )
            scores = self.model.verify(
                params["drafter"],
                state.cache,
                block,
                since=0 if step == 0 else nodes - 1,
                entries=entries,
            )
            entries, logits = scores.entries, scores.logits[:, -1]
            prefix = Prefix(tokens=context.tokens, length=context.length, path=drafted)
            if greedy:
                token = law.argmax(sampling.adjust(logits, prefix))
            else:
                q = sampling.probabilities(logits, prefix)
                laws.append(q)
                token = law.draw(q, uniform[:, step])
            tokens = jnp.concatenate([tokens, token[:, None]], axis=1)
        laws = None if greedy else jnp.stack(laws, axis=1)
        draft = tree.chain(context, tokens[:, 2:], laws)
        return draft, dataclasses.replace(state, fresh=entries)

    def observe(self, params, state, segment):
        if segment.round is None:
            return DraftModelState(cache=self._read_prompt(params, state, segment))
        # nodes of the pass: (last but one, root, d_1 ... ), so count accepted tokens leave the
        # cache with the entries of all but the last two committed tokens
        count = segment.num - 1
        nodes = self.num_draft + 1
        path = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (count.shape[0], nodes))
        verdict = Verdict(path=path, count=count, token=count)
        cache = self.model.commit(state.cache, state.fresh, segment.start - 1, verdict)
        return DraftModelState(cache=cache)

    def _read_prompt(self, params, state, segment):
        width = segment.tokens.shape[1]
        block = Draft(
            start=segment.start, tokens=segment.tokens, topology=tree.chain_topology(width - 1)
        )
        scores = self.model.verify(params["drafter"], state.cache, block, logits=False)
        path = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), segment.tokens.shape)
        verdict = Verdict(path=path, count=segment.num - 1, token=segment.num)
        return self.model.commit(state.cache, scores.entries, segment.start, verdict)
