"""Counts which rank the target's own next tokens have among a drafter's choices.

The target continues prompts plainly. Then, at each token of the text, the drafter computes its most
likely choices after the true tokens. From the shares of right choices by depth and rank,
``tree_search`` finds the static tree that is expected to give most tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from ..decoding import loop
from ..decoding.inputs import prepare_inputs
from ..drafters.base import ChainDrafter
from ..drafters.plain import Plain
from ..sampling.distribution import Sampling
from ..types import Drafter

CONFIDENCE_Z = 1.96  # the normal quantile of 95 % intervals


@dataclasses.dataclass(frozen=True, eq=False)
class RankCounts:
    """Counts of how often a drafter's choice of each rank was right, by depth below the root.

    Attributes:
      hits: int ``[D, R]``, number of times that the true token at depth ``d + 1`` was the drafter's
        choice of rank ``r``, given the true tokens before it.
      trials: int ``[D]``, number of times that a true token at this depth was known.
    """

    hits: np.ndarray
    trials: np.ndarray

    @property
    def rates(self) -> np.ndarray:
        """float ``[D, R]``: shares of right choices; a row sums to at most 1."""
        return self.hits / np.maximum(self.trials, 1)[:, None]

    def interval(self, depth: int, rank: int) -> tuple[float, float]:
        """Returns Wilson's 95 % interval of the share at ``[depth, rank]``."""
        n, z = max(int(self.trials[depth]), 1), CONFIDENCE_Z
        share = self.hits[depth, rank] / n
        middle = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        return float(max(middle - half, 0.0)), float(min(middle + half, 1.0))

    def __str__(self) -> str:
        rows = []
        for depth, trials in enumerate(self.trials):
            shares = " ".join(f"{rate:6.1%}" for rate in self.rates[depth, :6])
            rows.append(f"depth {depth + 1}: {shares}  of {trials}")
        return "\n".join(rows)


@dataclasses.dataclass(frozen=True)
class _Followed(ChainDrafter):
    """Drafts nothing, and counts the ranks of the true tokens among the choices of ``inner``.

    The topology of ``inner`` is ``trees.Follow``. ``params`` are the weights of ``inner``, and the
    true text with its lengths.
    """

    num_draft: int = 0
    inner: Drafter = dataclasses.field(kw_only=True)
    name = "followed"

    @property
    def features(self):
        return self.inner.features

    def init(self, params, target_params, batch, capacity, inputs=None):
        follow = self.inner.topology
        counts = jnp.zeros((batch, follow.depth, follow.ranks), jnp.int32)
        trials = jnp.zeros((batch, follow.depth), jnp.int32)
        return self.inner.init(params[0], target_params, batch, capacity, inputs), counts, trials

    def draft_step(self, params, target_params, state, context):
        inner, counts, trials = state
        follow, (own, (truth, ends)) = self.inner.topology, params
        inner = self.inner.sync(own, target_params, inner, context, before="draft")
        seen = dataclasses.replace(context, tokens=truth)
        draft, inner = self.inner.draft_step(own, target_params, inner, seen)
        choices = draft.tokens[:, 1:].reshape(-1, follow.depth, follow.ranks)
        where = context.length[:, None] + jnp.arange(follow.depth)
        true = jnp.take_along_axis(truth, where, axis=1, mode="clip")
        known = (where < ends[:, None]) & (context.budget > 0)[:, None]
        hit = (choices == true[:, :, None]) & known[:, :, None]
        plain = trees.chain_draft(context, jnp.zeros((len(truth), 0), jnp.int32))
        return plain, (inner, counts + hit, trials + known)

    def observe(self, params, target_params, state, segment):
        inner = self.inner.observe(params[0], target_params, state[0], segment)
        return inner, *state[1:]


def count_ranks(
    target,
    drafter,
    params,
    tokens: jax.typing.ArrayLike,
    lengths: jax.typing.ArrayLike,
    *,
    max_new_tokens: int = 64,
    key: jax.Array | None = None,
    sampling: Sampling = Sampling(),
    depth: int | None = None,
    ranks: int = 8,
    capacity: int | None = None,
    stops: Sequence[int] = (),
) -> RankCounts:
    """Counts the ranks of the target's own next tokens among a drafter's choices.

    Args:
      target: the target.
      drafter: a drafter that ranks siblings, ``takes_sibling_sampling`` (a draft model, heads);
        only the depth of its topology matters.
      params: the weights, see ``specjax.decode``.
      tokens: prompts, int32 ``[B, T]``.
      lengths: lengths of the prompts, int32 ``[B]``.
      max_new_tokens: the number of tokens that the target generates after each prompt.
      key: a random key; needed above temperature 0.
      sampling: the sampling settings of the target's text.
      depth: D, the greatest depth that is counted, at most the drafter's own; None: the depth of
        its topology.
      ranks: R, the number of choices that are counted at each depth.
      capacity: the number of slots of the buffers; None: as many as needed.
      stops: token ids that end a text.

    Returns:
      the counts over all rows.

    Raises:
      ValueError: the drafter does not rank siblings, or ``depth`` is greater than its depth.
    """
    if not (drafter.takes_topology and drafter.takes_sibling_sampling):
        raise ValueError(
            f"count_ranks: {drafter.name} has no choices to rank; give a drafter whose "
            "takes_topology and takes_sibling_sampling are True, such as a draft model or heads"
        )
    follow = trees.Follow(depth or drafter.topology.depth, ranks)
    followed = _Followed(
        inner=dataclasses.replace(drafter, topology=follow, sibling_sampling="top")
    )
    key = jax.random.key(0) if key is None else key

    def run(drafter, params):
        request, slots = prepare_inputs(
            target, drafter, tokens, lengths, key, max_new_tokens, sampling, capacity, stops
        )
        state = loop.jit_start(target, drafter, "auto", slots, params, request)
        return loop.jit_burst(target, drafter, "auto", 10**9, params, state)

    plain = run(Plain(), params)
    truth = plain.tokens, plain.length
    _, hits, trials = run(
        followed, {**params, "drafter": (params.get("drafter"), truth)}
    ).drafter_state
    return RankCounts(np.asarray(hits).sum(axis=0), np.asarray(trials).sum(axis=0))
