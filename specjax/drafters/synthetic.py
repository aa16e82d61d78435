"""Synthetic acceptance, for benchmarks: drafted tokens are right with a stated probability.

What is measured with it says how fast a drafter of this acceptance rate would be, not that there is
such a drafter: its name, and with it all statistics, say synthetic. The output is the target's.

Lossless: yes, under ``greedy``, at temperature 0 only.

Example::

    plain = specjax.decode(target, Plain(), {"target": weights}, tokens, lengths, **settings)
    params = {"target": weights, "drafter": {"truth": plain.tokens, "inner": None}}
    out = specjax.decode(target, Synthetic(4, 0.8), params, tokens, lengths, **settings)
"""

from __future__ import annotations

import dataclasses
from numbers import Real

import jax.numpy as jnp

from .. import trees
from ..sampling import drawing
from ..types import Drafter
from .base import CombinedDrafter, check_field


@dataclasses.dataclass(frozen=True)
class Synthetic(CombinedDrafter):
    """Drafts a chain of tokens, each of which is right with a stated probability.

    ``params["drafter"] = {"truth": int32 [B, L], "inner": weights}``: the prompts followed by the
    target's greedy text, in a buffer at least as large as that of the loop, such as the ``tokens``
    of a plain ``decode``. At each position the true token is drafted with probability ``accuracy``,
    else another one, so this is the acceptance rate there, given that all tokens before were
    accepted. With ``inner``, that drafter runs too, so that its time is paid, and its tokens are
    replaced.

    Attributes:
      num_draft: tokens drafted a round, the same as that of ``inner``.
      accuracy: in [0, 1], one number, or one for each position.
      inner: a drafter of chains, or None.

    Raises:
      ValueError: an accuracy is out of range, ``inner`` drafts another number of tokens, or
        ``truth`` is too small; when traced, a temperature is above 0, since the truth of a sampled
        text is not known beforehand.
    """

    accuracy: float | tuple[float, ...] = 0.8
    inner: Drafter | None = None

    def __post_init__(self):
        super().__post_init__()
        check_field(self, "inner", Drafter | None, "an object of specjax.Drafter, or None")
        check_field(self, "accuracy", Real | tuple | list, "numbers in [0, 1]")
        rates = self.accuracy if isinstance(self.accuracy, tuple | list) else [self.accuracy]
        if len(rates) == 1:
            rates = [*rates] * self.num_draft
        if len(rates) != self.num_draft or not all(0 <= rate <= 1 for rate in rates):
            raise ValueError(
                f"Synthetic(accuracy={self.accuracy}): give one number in [0, 1], or one for each "
                f"of {self.num_draft} positions"
            )
        object.__setattr__(self, "accuracy", tuple(float(rate) for rate in rates))
        if self.inner is not None and self.inner.num_draft != self.num_draft:
            raise ValueError(
                f"Synthetic(num_draft={self.num_draft}): {self.inner.name} drafts "
                f"{self.inner.num_draft} tokens; give both the same number"
            )

    @property
    def name(self) -> str:
        return "synthetic" if self.inner is None else f"synthetic({self.inner.name})"

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return () if self.inner is None else (self.inner,)

    def rewindable(self, num_tokens):
        if self.inner is None:
            return self
        return dataclasses.replace(self, inner=self.inner.rewindable(num_tokens))

    def shard(self, params, mesh):
        """The weights of ``inner`` on a mesh; see ``sharding.place``."""
        if self.inner is None:
            return params
        return {**params, "inner": self.inner.shard(params.get("inner"), mesh)}

    def init(self, params, target_params, batch, capacity, inputs=None):
        if not isinstance(params, dict) or "truth" not in params:
            raise ValueError(
                "params['drafter'] of a Synthetic drafter must be a dict with 'truth', the tokens "
                "of a plain greedy decode of the same prompts, and 'inner', weights or None"
            )
        rows, size = jnp.shape(params["truth"])
        if rows != batch or size < capacity:
            raise ValueError(
                f"truth has shape {(rows, size)}: this batch needs {batch} rows of at least "
                f"{capacity} tokens; take it from a plain decode of the same capacity"
            )
        if self.inner is None:
            return ()
        return self.inner.init(params.get("inner"), target_params, batch, capacity, inputs)

    def draft_step(self, params, target_params, state, context):
        if not context.sampling.greedy:
            raise ValueError(
                "the Synthetic drafter knows the target's greedy text only: use temperature=0 (the "
                "number, not an array)"
            )
        steps = jnp.arange(self.num_draft)
        where = context.length[:, None] + steps
        truth = jnp.asarray(params["truth"], jnp.int32)
        truth = jnp.take_along_axis(truth, where, axis=1, mode="clip")
        other = jnp.where(truth == 0, 1, truth - 1)
        right = drawing.uniforms(context.key, self.num_draft) < jnp.asarray(self.accuracy)
        tokens = jnp.where(right, truth, other)
        if self.inner is None:
            return trees.chain_draft(context, tokens), state
        draft, state = self.inner.draft_step(params.get("inner"), target_params, state, context)
        if draft.topology != trees.chain_parents(self.num_draft):
            raise ValueError(
                f"Synthetic(inner={self.inner.name}): it replaces the tokens of chains; this draft "
                "is a tree"
            )
        tokens = jnp.concatenate([draft.tokens[:, :1], tokens], axis=1)
        # no token is negative, but the compiler can't know, so it leaves the inner work in place
        tokens = jnp.where(draft.tokens < 0, draft.tokens, tokens)
        return dataclasses.replace(draft, tokens=tokens, partial=None), state

    def readout(self, draft, scores):
        return None if self.inner is None else self.inner.readout(draft, scores)

    def rewind(self, state, length):
        return state if self.inner is None else self.inner.rewind(state, length)

    def observe(self, params, target_params, state, segment):
        if self.inner is None:
            return state
        return self.inner.observe(params.get("inner"), target_params, state, segment)
