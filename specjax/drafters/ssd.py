"""Speculative speculative decoding: drafts for the likely outcomes while the target verifies.

While the target verifies the chain ``d_1 ... d_K``, the draft model takes at each of its K + 1
places the tokens that it finds most probable there in place of ``d_{k+1}``, and drafts K tokens
after each of them, all in one batch of K passes. If the outcome (how many tokens are accepted, and
which token follows) is among these, its draft is the next round's, and is there at once: a hit.
Otherwise the draft is drawn when the round begins, as a draft model draws it: a miss.

Lossless: yes (the draft states its laws), under every rule under which the draft model is. The
fan-out and the choice by outcome never see the random numbers that a draft was drawn with.

Differs from the released code where an outcome is missing: there one miss makes all rows of the
batch redraft (here it takes time, and the other rows keep what is ready), or random tokens are
verified as if the target's greatest probability were 1, which is biased.

Example::

    specjax.decode(target, SSD(num_draft=4, model=small.target, fan_out=3), params, ...)
    SSD(4, model=small.target, fan_out=geometric_fan_out(16, 4, acceptance=0.8))

References: arXiv 2603.03251.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..sampling import drawing
from .draft_ahead import Begun, DraftAhead, Ready, scores


@dataclasses.dataclass(frozen=True)
class SSD(DraftAhead):
    """Drafts for several outcomes ahead; ``params["drafter"]`` are the draft model's weights.

    Attributes:
      num_draft: K, the tokens of a chain.
      model: the draft model.
      fan_out: how many tokens are expected after 0, 1, ... K accepted ones, K + 1 ints; an int: as
        many after each.

    Raises:
      ValueError: there is no model, or nothing to draft; a tree; a fan-out of another length, with
        negative numbers, without any outcome or beyond the vocabulary.
    """

    fan_out: int | tuple[int, ...] = 3
    name = "ssd"

    def __post_init__(self):
        size = self.num_draft if self.topology is None else self.topology.depth
        given = self.fan_out
        alike = isinstance(given, numbers.Integral)
        if not alike and not isinstance(given, Sequence):
            raise ValueError(f"SSD(fan_out={given!r}): give an integer, or one for each place")
        each = (int(given),) * (size + 1) if alike else tuple(map(int, given))
        object.__setattr__(self, "fan_out", each)
        super().__post_init__()
        if len(each) != self.num_draft + 1 or min(each) < 0 or not sum(each):
            raise ValueError(
                f"SSD(fan_out={given}): give {self.num_draft + 1} numbers from 0 up for "
                f"num_draft={self.num_draft}, not all of them 0, or one number for all"
            )
        if max(each) > self.vocab_size:
            raise ValueError(
                f"SSD(fan_out={given}): the vocabulary has {self.vocab_size} tokens; give less"
            )

    @property
    def places(self) -> tuple[int, ...]:
        """The numbers of accepted tokens of the M outcomes."""
        each = (self.fan_out,) if isinstance(self.fan_out, int) else self.fan_out
        return tuple(place for place, wide in enumerate(each) for _ in range(wide))

    @property
    def num_outcomes(self) -> int:
        return len(self.places)

    @property
    def always_drafts(self) -> bool:
        return True

    def redraft(self, params, state, context):
        old, there = state.ready, state.ready.count > 0
        wanted = ~there & context.asked_rows
        if context.width is not None:
            wanted &= context.width > 0
        fresh = jax.lax.cond(
            jnp.any(wanted), lambda: self.drawn_now(params, state, context), lambda: old
        )
        ready = Ready(
            tokens=jnp.where(there[:, None], old.tokens, fresh.tokens),
            laws=jnp.where(there[:, None, None], old.laws, fresh.laws),
            count=jnp.full_like(old.count, self.num_draft),
        )
        return ready, there

    def expect(self, context, begun: Begun):
        chain, batch = begun.chain, len(begun.count)
        nodes = jnp.arange(chain.num_nodes, dtype=jnp.int32)[None]
        depth = jnp.broadcast_to(nodes + 1, (batch, chain.num_nodes))
        said = scores(context, chain, nodes, begun.logits, depth)
        # a token that was drafted there is accepted, or is not the outcome
        following = jnp.pad(chain.tokens[:, 1:], ((0, 0), (0, 1)))
        taken = jnp.arange(said.shape[2]) == following[:, :, None]
        said = jnp.where(taken & (nodes < begun.count[:, None])[:, :, None], -jnp.inf, said)
        places = np.asarray(self.places)
        rank = np.concatenate([np.arange(np.sum(places == k)) for k in range(chain.num_nodes)])
        best = drawing.best(said, int(rank.max()) + 1)
        count = jnp.broadcast_to(jnp.asarray(places, jnp.int32), (batch, len(places)))
        return count, best[:, places, rank], None


def geometric_fan_out(
    total: int, num_draft: int, acceptance: float, miss_exponent: float = 1.0
) -> tuple[int, ...]:
    """Returns the fan-out with the fewest expected misses for a number of outcomes.

    With acceptance α, k of K tokens are accepted with ``P_k = α^k (1 - α)``, all with ``P_K =
    α^K``. If F outcomes at a place miss with probability ``F^-r``, the best F is proportional to
    ``P_k^(1 / (1 + r))``.

    Args:
      total: the sum of the fan-out, at least 1.
      num_draft: K.
      acceptance: α, above 0 and below 1.
      miss_exponent: r, above 0.

    Returns:
      K + 1 ints from 0 up, whose sum is ``total``.

    Raises:
      ValueError: a number is out of range.
    """
    if not (0 < acceptance < 1 and miss_exponent > 0 and total >= 1 and num_draft >= 1):
        raise ValueError(
            f"geometric_fan_out({total}, {num_draft}, acceptance={acceptance}, "
            f"miss_exponent={miss_exponent}): acceptance is between 0 and 1, the exponent above 0, "
            "and the others at least 1"
        )
    chance = acceptance ** np.arange(num_draft + 1.0)
    chance[:-1] *= 1 - acceptance
    share = chance ** (1 / (1 + miss_exponent))
    exact = total * share / share.sum()
    found = np.floor(exact).astype(int)
    largest = np.argsort(found - exact, kind="stable")  # the greatest remainders first
    found[largest[: total - found.sum()]] += 1
    return tuple(found.tolist())
