"""LiLiCorr's drafter in training: the candidates of a block, and the scores that fit them together.

The recipe is ``block_heads`` with ``kind="lilicorr"``.

References: LiLiCorr, 2608.20530.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.drafters.lilicorr import LiLiCorr, LiLiCorrConfig

from . import block, chunks
from .rows import Heads, fresh


def make_lattice(own: LiLiCorrConfig, target, seed: int) -> Heads:
    """Makes a LiLiCorr drafter of this shape, see ``block_heads.make_block_heads``; ``seed`` is
    that of the initial weights."""
    drafter = LiLiCorr(config=own, target=target)

    def outputs(params, target_params, rows, anchors):
        heads, (batch, count) = drafter.heads(params), anchors.shape
        blocks = block.blocks_of(drafter, params, target_params, rows, anchors)
        head, hidden = target.head_table(target_params), blocks[..., 1:]
        table = block.wide_table(target, target_params, None, 2 * own.num_candidates)

        def likely(table, states, fixed, pieces):
            """The candidates, and the logs of their probabilities."""
            logits = chunks.logits_of(*jax.lax.stop_gradient((table, states)))
            best, tokens = jax.lax.top_k(logits, own.num_candidates)
            return tokens, best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

        found = [
            chunks.each(likely, head, hidden[..., k].transpose(1, 2, 0), None, ())
            for k in range(own.num_heads)
        ]
        tokens, logs = (jnp.stack(x, axis=2) for x in zip(*found, strict=True))  # [B, A, D, K]
        before = jnp.maximum(anchors - 1, 0)
        known = block.at(rows.segments, before) == block.at(rows.segments, anchors)
        known = (known & (anchors > 0)).reshape(-1)
        read = jnp.concatenate([rows.layers[i] for i in own.target_layers], axis=2)
        read = block.at(read, before).reshape(batch * count, -1)
        embedded = target.embed(target_params, tokens.reshape(batch, -1))
        start, pairs = heads.lattice(
            embedded.astype(hidden.dtype),
            logs.reshape(batch * count, *logs.shape[2:]),
            hidden.reshape(len(hidden), batch * count, -1),
            heads.hidden_norm(heads.fc(read.T)),
            known,
        )
        true = jnp.stack([block.at(rows.tokens, anchors + 1 + k) for k in range(own.num_heads)])
        hits = tokens == true.transpose(1, 2, 0)[..., None]
        hits = hits.reshape(batch * count, *hits.shape[2:])
        counts = jnp.cumprod(hits.any(axis=2), axis=1)[:, :, None] * hits
        which, states = jnp.argmax(hits, axis=2), block.drafting(drafter, blocks)
        outputs, scores = [], start
        for k, state in enumerate(states):
            if k:
                given = which[:, k - 1, None, None]
                scores = jnp.take_along_axis(pairs[:, k - 1], given, axis=1)[:, 0]
            parts = [state, *(x.T.astype(state.dtype) for x in (scores, counts[:, k]))]
            outputs.append((table, None, jnp.concatenate(parts)))
        return outputs

    return Heads(drafter, fresh(drafter, seed), outputs, layers=own.target_layers)
