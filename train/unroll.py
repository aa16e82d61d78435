"""Training-time test: a drafting layer practised on its own outputs, all positions at once.

At position ``t`` step 0 reads the target's features there and token ``t + 1``; step ``s`` reads
the layer's own output of step ``s - 1`` at the same position and token ``t + 1 + s``, as it will
when it drafts. So its query sees the entries of step 0 up to ``t``, which are of true features,
and of the steps ``1 ... s`` one each, those at its own position:

    scores(t, s) = [q . k_0(0 ... t),  q . k_1(t),  ...  q . k_s(t)]

These are T + s numbers a query; no mask over ``[T * steps]^2`` exists, and what is left is products
over all positions at once. Step ``s`` at position ``t`` stands at position ``t + s``.

References: EAGLE-3, 2503.01840, section 3.2; HASS, 2408.15766, which aligns the same contexts.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.models import remat

BLOCK = 512  # queries scored at once: memory grows with a row's length, not with its square


def attend(query, entries, segments):
    """What the queries of step ``s`` see of the entries of the steps ``0 ... s``.

    Args:
      query: ``[B, K, E, G, T]``, rotated, not scaled.
      entries: a list of ``s + 1`` pairs ``(keys, values)``, each ``[B, K, T, E]``; of step 0 all up
        to a query's position are seen, of the others that at its position.
      segments: int32 ``[B, T]``; step 0's entries are seen within one segment.

    Returns:
      ``[B, K, E, G, T]``.
    """
    (keys, values), *later = entries
    batch, heads, size, groups, steps = query.shape
    query = query.transpose(0, 1, 3, 4, 2) * size**-0.5  # [B, K, G, T, E]
    own = [jnp.sum(query * key[:, :, None], axis=-1) for key, _ in later]  # [B, K, G, T] each
    index = jnp.arange(steps)

    def behind(query, own, here, segment):
        """The softmax of a block of queries ``[B, K, G, W, E]`` at ``here`` ``[W]``."""
        sees = (index <= here[:, None]) & (segments[:, None] == segment[:, :, None])
        scores = jnp.einsum("bkgwe,bkte->bkgwt", query, keys, preferred_element_type=jnp.float32)
        scores = jnp.where(sees[:, None, None], scores, -jnp.inf)
        top = jnp.max(scores, axis=-1)  # finite: a position sees its own entry
        for score in own:
            top = jnp.maximum(top, score)
        top = jax.lax.stop_gradient(top)
        weights = jnp.exp(scores - top[..., None])
        rest = [jnp.exp(score - top) for score in own]
        total = jnp.sum(weights, axis=-1) + sum(rest)
        out = jnp.einsum("bkgwt,bkte->bkgwe", weights.astype(values.dtype), values)
        return out / total[..., None], [share / total for share in rest]

    if steps <= BLOCK:
        out, shares = behind(query, own, index, segments)
    else:
        spare = -steps % BLOCK

        def parts(x, axis):
            """``x`` in blocks along ``axis``, the blocks in front; the end is repeated to fill."""
            pad = [(0, spare if i == axis else 0) for i in range(x.ndim)]
            shape = (*x.shape[:axis], -1, BLOCK, *x.shape[axis + 1 :])
            return jnp.moveaxis(jnp.pad(x, pad, mode="edge").reshape(shape), axis, 0)

        def whole(x, axis):
            x = jnp.moveaxis(x, 0, axis)
            x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
            return jax.lax.slice_in_dim(x, 0, steps, axis=axis)

        blocks = parts(query, 3), [parts(x, 3) for x in own], parts(index, 0), parts(segments, 1)
        out, shares = jax.lax.map(jax.checkpoint(lambda block: behind(*block)), blocks)
        out, shares = whole(out, 3), [whole(x, 3) for x in shares]
    for share, (_, value) in zip(shares, later, strict=True):
        out = out + share[..., None] * value[:, :, None]
    return out.astype(values.dtype).transpose(0, 1, 4, 2, 3)


def unroll(head, hidden, embedded, segments, stages: int = 1) -> list[jax.Array]:
    """Outputs ``[H, B * T]`` of as many steps as there are ``embedded``.

    Stages with weights of their own (``FeatureModule``) have caches of their own, whose entries are
    all of true tokens: there a query sees those of its own stage, up to its position.

    Args:
      head: a ``FeatureModule``.
      hidden: ``[H, B * T]``, the target's features as ``head.read`` gives them.
      embedded: ``[E, B * T]`` a step: the embeddings of tokens ``t + 1 + s``.
      segments: int32 ``[B, T]``, the documents that tokens belong to.
      stages: how many the head has.
    """
    batch, steps = segments.shape
    index = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32), segments.shape)
    entries: dict[int, list] = {}
    outs = []

    def run(step, stage, read, hidden, entries):
        """The output of a step, and the entries of all up to it."""
        entries = {layer: list(own) for layer, own in entries.items()}

        def seen(layer, query, *fresh):
            own = entries.setdefault(layer, [])
            if stages > 1:
                own.clear()
            own.append((fresh[0], fresh[-1]))  # latents are keys and values
            return attend(query, own, segments), None

        x = head.enter(read, hidden, stage)
        out, _ = head.run(x, index + step, None, batch=batch, stage=stage, attend=seen)
        return out, entries

    for step, read in enumerate(embedded):
        stage = min(step, stages - 1)
        out, entries = remat.layer(functools.partial(run, step, stage))(read, hidden, entries)
        outs.append(out)
        hidden = head.passed(out, stage)
    return outs
