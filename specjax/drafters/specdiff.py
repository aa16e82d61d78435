"""SpecDiff: a masked diffusion drafter, which fills in the masks of a block in several passes.

    pass s of S reads   [e(root), e(x) where a token is known, e(mask) elsewhere],
    and the tokens of n_s further places become known,    n_1 + ... + n_S = D

The network is that of ``block.py``, and with one pass so is the draft. The ``schedule`` says how
many places each pass fills in: ``"even"`` D / S of them, ``"cosine"`` D (cos(pi (s - 1) / 2 S) -
cos(pi s / 2 S)), so that the first passes, which know the least, fill in fewer. Which places those
are is the ``order``:

- ``"left-to-right"``: the next n_s. Each token is drawn from the law of its place in the pass that
  fills it in, and that pass reads the tokens of earlier passes only, all of which are to its left.
- ``"confidence"``: the n_s places whose best token is most probable, wherever they are. They get
  that best token.

Lossless: yes, under ``greedy`` and ``delta``, in both orders. With ``sibling_sampling="iid"`` or
``"distinct"`` also under ``rejection`` and ``block``, and then from left to right alone: such a
rule needs of each token the law given the tokens before it, and the law of a place is one, since
nothing that the pass read is to the right of the place, and the places of one pass are drawn
independently. In the order of confidence the law of a place is given tokens to its right. Whether
the rule accepts a token depends on that law, so that among accepted beginnings the tokens to their
right no longer follow the law that was stated for them. Such a law is never stated: a draft in the
order of confidence is a function of the text, a point mass, and to ask for another one is an error.

Example::

    heads = specjax.load_drafter("path/to/a-specdiff-drafter", lm)
    specjax.generate(lm, "...", drafter=heads)

Differs from the paper: attention to the text by keys and values made of the target's hidden states,
as in DFlash; the passes are a fixed number, without a draw of which masks stay (MDLM's sampler
unmasks each place with a probability).

References: SpecDiff, arXiv 2408.05636; MDLM, arXiv 2406.07524; SpecDiff-2, arXiv 2511.00606, whose
several drafts are ``trees.chains`` with one pass and ``sibling_sampling="iid"``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.pytree import pytree_dataclass, static
from ..sampling import drawing
from ..trees.levels import depth_of, path_tokens
from .block import BlockDrafter
from .heads import independent_level

Order = Literal["left-to-right", "confidence"]
Schedule = Literal["even", "cosine"]
ORDERS: tuple[Order, ...] = ("left-to-right", "confidence")
SCHEDULES: tuple[Schedule, ...] = ("even", "cosine")


def check_settings(steps: int, order: str, schedule: str, most: int) -> None:
    """Raises ``ValueError`` for an unknown order or schedule, and for more passes than masks."""
    for name, value, known in (("order", order, ORDERS), ("schedule", schedule, SCHEDULES)):
        if value not in known:
            raise ValueError(f"{name}={value!r}: accepted are {', '.join(known)}")
    if not 1 <= steps <= most:
        raise ValueError(
            f"steps={steps}: a block drafts {most} tokens, and each pass fills in at least one; "
            f"accepted are 1 to {most}"
        )


def filled_in(schedule: Schedule, depth: int, steps: int) -> tuple[int, ...]:
    """How many of ``depth`` places each pass fills in, at least one; one a pass where there are
    fewer places than ``steps``."""
    steps = min(steps, depth)
    ends = [0]
    for step in range(1, steps + 1):
        share = step / steps
        if schedule == "cosine":
            share = 1 - math.cos(math.pi * share / 2)
        # half a place is a whole one; places are left for the passes that follow
        end = min(math.floor(depth * share + 0.5), depth - steps + step)
        ends.append(max(end, ends[-1] + 1))
    return tuple(after - before for before, after in itertools.pairwise(ends))


def most_certain(certainty: jax.Array, known: jax.Array, count: jax.Array) -> jax.Array:
    """The ``count`` most certain places that are not known, the first of equally certain ones.

    Args:
      certainty: float32 ``[B, D]``, not negative.
      known: bool ``[B, D]``.
      count: int32 scalar.

    Returns:
      bool ``[B, D]``.
    """
    score = jnp.where(known, -1.0, certainty)
    place = jnp.arange(score.shape[1])
    ahead = score[:, None, :] > score[:, :, None]
    ahead |= (score[:, None, :] == score[:, :, None]) & (place[None, :] < place[:, None])
    return ~known & (jnp.sum(ahead, axis=2) < count)


@pytree_dataclass
class _Pass:
    """What the last pass said.

    Attributes:
      logits: float32 ``[B, W, n, V]``, of the n places that it fills in, after each of W paths.
      since: the first of the W nodes in which these paths end.
    """

    logits: jax.Array
    since: int = static()


@dataclasses.dataclass(frozen=True)
class SpecDiff(BlockDrafter):
    """Drafts with a block drafter in several passes; its weights are those of ``BlockLayers``.

    In a tree that is drafted from left to right, each pass reads one block for every path of the
    tree so far. In the order of confidence the places have one law each, so that a tree has the
    same tokens below every node of a depth.

    Attributes:
      steps: S, how many passes a round takes; a draft of fewer tokens takes one pass a token.
      order: ``"left-to-right"`` or ``"confidence"``.
      schedule: ``"even"`` or ``"cosine"``.

    Raises:
      ValueError: as for ``BlockDrafter``; or ``steps``, ``order`` or ``schedule`` is none that is
        accepted; or siblings are to be drawn in the order of confidence.
    """

    steps: int = 1
    order: Order = "left-to-right"
    schedule: Schedule = "even"
    name = "specdiff"
    can_draw_from_part = False

    def __post_init__(self):
        super().__post_init__()
        check_settings(self.steps, self.order, self.schedule, self.config.num_heads)
        if self.order == "confidence" and self.sibling_sampling != "top":
            raise ValueError(
                f"sibling_sampling={self.sibling_sampling!r} with order='confidence': the law of a "
                "place would be given tokens to its right, and no rule keeps the target's law with "
                "it; take sibling_sampling='top', whose draft is judged as a point mass, or "
                "order='left-to-right'"
            )

    @property
    def drawing(self) -> str | None:
        return None if self.order == "confidence" else super().drawing

    @property
    def counts(self) -> tuple[int, ...]:
        """How many places each pass fills in."""
        return filled_in(self.schedule, self.depth, self.steps)

    def make_level(self, params, target_params, state, context):
        heads = self.heads(params)

        def say(known, first, count):
            """The logits ``[B, W, count, V]`` of the places from ``first`` on, of blocks in which
            ``known`` int32 ``[B, W, K]`` are the root and the tokens after it."""
            size = self.depth + (not self.config.from_root)
            tokens = jnp.pad(
                known[:, :, :size],
                ((0, 0), (0, 0), (0, max(size - known.shape[2], 0))),
                constant_values=self.config.mask_token,
            )
            hidden = self.read_blocks(heads, target_params, state, context, tokens)
            begin = first + (not self.config.from_root)
            hidden = hidden[..., begin : begin + count]
            batch, wide = tokens.shape[:2]
            logits = self.target.head(target_params, hidden.reshape(len(hidden), -1), batch)
            return logits.reshape(batch, wide, count, -1)

        if self.order == "confidence":
            return independent_level(lambda: self._by_confidence(say, context))
        starts = dict(zip(itertools.accumulate(self.counts, initial=0), self.counts, strict=False))

        def level(carry, grown, since):
            depth = depth_of(grown, since)
            if depth in starts:
                said = say(path_tokens(grown, since), depth, starts[depth])
                return said[:, :, 0], _Pass(logits=said, since=since)
            start = max(first for first in starts if first < depth)
            said = carry.logits[:, :, depth - start]
            if said.shape[1] > 1:
                path = _ancestors(grown, since, depth - start) - carry.since
                said = jnp.take_along_axis(said, path[:, :, None], axis=1)
            return said, carry

        return level, ()

    def _by_confidence(self, say, context) -> jax.Array:
        """Logits ``[B, D, V]`` of each place, as the pass said them that filled it in."""
        root, depth = context.root[:, None, None], self.depth
        unknown = jnp.full((len(root), depth), self.config.mask_token, jnp.int32)

        def step(carry, count):
            tokens, known, kept = carry
            logits = say(jnp.concatenate([root, tokens[:, None]], axis=2), 0, depth)[:, 0]
            certainty = jnp.max(jax.nn.softmax(logits, axis=-1), axis=-1)
            chosen = most_certain(certainty, known, count)
            tokens = jnp.where(chosen, drawing.argmax(logits), tokens)
            return (tokens, known | chosen, jnp.where(chosen[:, :, None], logits, kept)), None

        begin = (
            unknown,
            jnp.zeros(unknown.shape, bool),
            jnp.zeros((*unknown.shape, self.vocab_size)),
        )
        (_, _, kept), _ = jax.lax.scan(step, begin, jnp.asarray(self.counts, jnp.int32))
        return kept


def _ancestors(grown, since: int, levels: int) -> jax.Array:
    """int32 ``[B, W]``: the node so many levels above each of the nodes ``since:``."""
    batch, nodes = grown.tokens.shape
    above = jnp.broadcast_to(trees.parents(grown), (batch, nodes))
    found = jnp.broadcast_to(jnp.arange(since, nodes, dtype=jnp.int32), (batch, nodes - since))
    for _ in range(levels):
        found = jnp.take_along_axis(above, found, axis=1)
    return found
