"""What a level of a growing tree says: its depth, its paths, and its logits after all settings.

A level is the nodes of one depth that get children: the nodes ``since:`` of the draft ``grown``,
with the logits that a method gives for them (see ``expand.py``).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.pytree import filled
from ..types import Draft


class Words(NamedTuple):
    """The tokens that a drafter can say, where they are a part of the target's vocabulary.

    ``ids``: int32 ``[Vd]``, the target's id of each; ``size``: V."""

    ids: jax.Array
    size: int

    def of(self, index: jax.Array) -> jax.Array:
        """The target's ids at ``index``, int32 ``[...]`` like ``index``; -1 where that is -1."""
        return jnp.where(index < 0, index, self.ids[index])

    def adjusted(self, say):
        """``say(logits [B, V], prefix)`` for logits ``[B, Vd]``: bias, penalties and a user's law
        are about the target's ids, and to all that cannot be said gives no probability."""

        def over(logits, prefix):
            full = jnp.full((len(logits), self.size), -jnp.inf, logits.dtype)
            return say(full.at[:, self.ids].set(logits), prefix)[:, self.ids]

        return over


def depth_of(grown: Draft, since: int) -> int:
    """Depth of the nodes ``since:`` of what a method is shown, static."""
    if grown.topology is None:  # ``_expand``'s: the root, then as many nodes a depth
        return since and 1 + (since - 1) // (grown.num_nodes - since)
    depth, node = 0, since
    while node:
        depth, node = depth + 1, grown.topology[node]
    return depth


def path_tokens(grown: Draft, since: int) -> jax.Array:
    """int32 ``[B, W, D + 1]``: from the root down, the tokens to each of the nodes ``since:``."""
    above = jnp.maximum(trees.parents(grown), 0)
    node = jnp.arange(since, grown.num_nodes, dtype=jnp.int32)[None]
    tokens = []
    for _ in range(depth_of(grown, since) + 1):
        at = jnp.broadcast_to(node, (grown.tokens.shape[0], node.shape[1]))
        tokens.append(jnp.take_along_axis(grown.tokens, at, axis=1))
        node = jnp.take_along_axis(above, node, axis=1)
    return jnp.stack(tokens[::-1], axis=2)


def if_wanted(step, depth, width, carry, grown, wanted: jax.Array | bool = True):
    """``step(carry, grown)`` if any row wants this depth; else zeros stand for what it adds."""
    if width is None and wanted is True:
        return step(carry, grown)
    if width is not None:
        wanted = wanted & (depth < width)
    logits, after = jax.eval_shape(step, carry, grown)

    def zeros(like):
        return jnp.zeros(like.shape, like.dtype)

    def skip(carry, grown):
        if jax.tree.structure(carry) != jax.tree.structure(after):  # before the first depth
            return zeros(logits), jax.tree.map(zeros, after)
        return zeros(logits), jax.tree.map(filled, carry, after)

    return jax.lax.cond(wanted, step, skip, carry, grown)


def _at_nodes(context, grown, since, logits, say):
    """``say(logits [B, V], prefix)`` at each of the nodes ``since:``; one row stands for all
    unless the law looks at prefixes."""
    wide = grown.num_nodes - since
    needed = context.sampling.needs_prefix
    if logits.shape[1] == 1 and (wide == 1 or not needed):
        node = jnp.full((logits.shape[0],), since, jnp.int32)
        prefix = context.prefix(trees.prefix_tokens(grown, node)) if needed else None
        return say(logits[:, 0], prefix)[:, None]
    if not needed:
        return jax.vmap(lambda x: say(x, None), in_axes=1, out_axes=1)(logits)
    logits = jnp.broadcast_to(logits, (logits.shape[0], wide, logits.shape[2]))

    def at(x, node):
        node = jnp.full((logits.shape[0],), node, jnp.int32)
        return say(x, context.prefix(trees.prefix_tokens(grown, node)))

    return jax.vmap(at, in_axes=(1, 0), out_axes=1)(logits, since + jnp.arange(wide))


def adjusted_logits(context, grown, since, logits, words):
    """Logits after bias, penalties and law."""
    if not context.sampling.adjusts:
        return logits
    return _said(context, grown, since, logits, words, context.sampling.adjust)


def scores(context, grown, since, logits, words):
    """What the best tokens are best by: logits as they are adjusted; with noise, ``log(q / E)``."""
    if context.noise is None:
        return adjusted_logits(context, grown, since, logits, words)
    q = probabilities(context, grown, since, logits, words)
    vocab = q.shape[2] if words is None else words.size
    noise = context.noise.at(context.length + depth_of(grown, since), vocab)
    return jnp.log(q) - jnp.log(noise if words is None else noise[:, words.ids])[:, None]


def probabilities(context, grown, since, logits, words):
    """The law q at each node, all settings applied."""
    return _said(context, grown, since, logits, words, context.sampling.probabilities)


def _said(context, grown, since, logits, words, say):
    """``_at_nodes`` for a drafter of these ``words``. Without bias, penalties and law its own
    tokens are all that matters."""
    if words is not None and context.sampling.adjusts:
        say = words.adjusted(say)
    return _at_nodes(context, grown, since, logits, say)
