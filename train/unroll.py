"""Training-time test: a drafting layer is trained on its own outputs, at all positions at once.

At position ``t``, step 0 reads the target's features and token ``t + 1``. Step ``s`` reads the
layer's own output of step ``s - 1`` at position ``t``, and token ``t + 1 + s``, as the layer does
when it drafts. Its query therefore sees the entries of step 0 up to ``t``, which come from true
features, and one entry of each of the steps ``1 ... s``, the one at position ``t``:

    scores(t, s) = [q . k_0(0 ... t),  q . k_1(t),  ...  q . k_s(t)]

A query has T + s scores, so no mask over ``[T * steps]^2`` is needed, and products are computed
over all positions at once. Step ``s`` at position ``t`` has the rotary position ``t + s``.

References: EAGLE-3, 2503.01840, section 3.2; HASS, 2408.15766, which aligns the same contexts.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.models import remat

BLOCK = 512  # queries scored at once, so that memory grows linearly with the length of a row
SPAN = 128  # queries of a short row that see the entries up to the last of them, not later ones


def attend(query, entries, segments, window=None):
    """Attention of the queries of step ``s`` to the entries of the steps ``0 ... s``.

    Args:
      query: ``[B, K, E, G, T]``, rotated, not scaled.
      entries: a list of ``s + 1`` pairs ``(keys, values)``, each ``[B, K, T, E]``. A query sees
        the entries of step 0 up to its position, and those of other steps at its position.
      segments: int32 ``[B, T]``; entries of step 0 are seen within one segment.
      window: ``(W, sinks)``: of step 0 a query at position t sees the entries after ``t - W``, and
        those where ``sinks`` bool ``[B, T]`` is true; None: all of them.

    Returns:
      ``[B, K, E, G, T]``.
    """
    (keys, values), *later = entries
    batch, heads, size, groups, steps = query.shape
    query = query.transpose(0, 1, 3, 4, 2) * size**-0.5  # [B, K, G, T, E]
    own = [jnp.sum(query * key[:, :, None], axis=-1) for key, _ in later]  # [B, K, G, T] each
    index = jnp.arange(steps)

    def attended(query, own, here, segment, end=steps):
        """Attention of a block of queries ``[B, K, G, W, E]`` at the positions ``here [W]``, all
        of them before ``end``."""
        key, value = keys[:, :, :end], values[:, :, :end]
        sees = (index[:end] <= here[:, None]) & (segments[:, None, :end] == segment[:, :, None])
        if window is not None:
            sees &= (index[:end] > here[:, None] - window[0]) | window[1][:, None, :end]
        scores = jnp.einsum("bkgwe,bkte->bkgwt", query, key, preferred_element_type=jnp.float32)
        scores = jnp.where(sees[:, None, None], scores, -jnp.inf)
        top = jnp.max(scores, axis=-1)  # finite: a position sees its own entry
        for score in own:
            top = jnp.maximum(top, score)
        top = jax.lax.stop_gradient(top)
        weights = jnp.exp(scores - top[..., None])
        rest = [jnp.exp(score - top) for score in own]
        total = jnp.sum(weights, axis=-1) + sum(rest)
        out = jnp.einsum("bkgwt,bkte->bkgwe", weights.astype(value.dtype), value)
        return out / total[..., None], [share / total for share in rest]

    if steps <= BLOCK:
        spans = [slice(start, min(start + SPAN, steps)) for start in range(0, steps, SPAN)]
        found = [
            attended(
                query[:, :, :, span],
                [x[..., span] for x in own],
                index[span],
                segments[:, span],
                span.stop,
            )
            for span in spans
        ]
        outs, parts = zip(*found, strict=True)
        out = jnp.concatenate(outs, axis=3)
        shares = [jnp.concatenate(own, axis=3) for own in zip(*parts, strict=True)]
    else:
        spare = -steps % BLOCK

        def parts(x, axis):
            """Splits ``axis`` into blocks, which become axis 0; the end is repeated as padding."""
            pad = [(0, spare if i == axis else 0) for i in range(x.ndim)]
            shape = (*x.shape[:axis], -1, BLOCK, *x.shape[axis + 1 :])
            return jnp.moveaxis(jnp.pad(x, pad, mode="edge").reshape(shape), axis, 0)

        def whole(x, axis):
            x = jnp.moveaxis(x, 0, axis)
            x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
            return jax.lax.slice_in_dim(x, 0, steps, axis=axis)

        blocks = parts(query, 3), [parts(x, 3) for x in own], parts(index, 0), parts(segments, 1)
        out, shares = jax.lax.map(jax.checkpoint(lambda block: attended(*block)), blocks)
        out, shares = whole(out, 3), [whole(x, 3) for x in shares]
    for share, (_, value) in zip(shares, later, strict=True):
        out = out + share[..., None] * value[:, :, None]
    return out.astype(values.dtype).transpose(0, 1, 4, 2, 3)


def unroll(head, hidden, embedded, segments, stages: int = 1) -> list[jax.Array]:
    """Returns the outputs ``[H, B * T]`` of each step.

    Stages with weights of their own (``FeatureModule``) have caches of their own, whose entries
    all come from true tokens. A query sees the entries of its own stage up to its position.

    Args:
      head: a ``FeatureModule``.
      hidden: ``[H, B * T]``, the target's features as ``head.read`` returns them.
      embedded: for each step ``s``, ``[E, B * T]``: the embeddings of tokens ``t + 1 + s``.
      segments: int32 ``[B, T]``, the document of each token.
      stages: the number of stages of the head.
    """
    batch, steps = segments.shape
    index = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32), segments.shape)
    entries: dict[int, list] = {}
    outs = []

    def run(step, stage, read, hidden, entries):
        """Returns the output of a step, and the entries of all steps up to it."""
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
