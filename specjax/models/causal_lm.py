"""A decoder as a target: the three functions that the loop needs of a model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from .. import cache as kv_cache
from .. import tree
from ..types import Draft, PyTree, Scores, Verdict
from .config import DecoderConfig
from .decoder import abstract

IMPOSSIBLE = -1e30  # a logit whose probability is exactly zero in float32, and no NaN


def graph_definition(config: DecoderConfig) -> nnx.GraphDef:
    """The structure of the decoder, without its weights."""
    return abstract(config)[0]


def layout(draft: Draft) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where the nodes of a draft stand and what they see of each other.

    Returns:
      positions int32 ``[B, N]``; ``sees`` bool ``[B or 1, N, N]``, node ``n`` sees entry ``m`` at
      ``[b, m, n]``; int32 ``[B]``, how many committed tokens all of them see.
    """
    positions = draft.start[:, None] + tree.depths(draft)
    sees = tree.ancestors(draft)
    if draft.scored is not None:
        sees = sees & draft.scored[:, :, None]
    if draft.topology is None or len(draft.topology) > 1:
        # a node before the first token does not exist; the root itself always does in a round
        sees = (sees & (positions >= 0)[:, :, None]) | jnp.eye(draft.num_nodes, dtype=bool)
    return positions, sees, jnp.maximum(draft.start, 0)


def fit(logits: jax.Array, rows: int) -> jax.Array:
    """``[B, N, V]`` cut, or filled with what is impossible, to ``[B, N, rows]``."""
    lacking = rows - logits.shape[-1]
    if lacking <= 0:
        return logits[..., :rows] if lacking else logits
    return jnp.pad(logits, ((0, 0), (0, 0), (0, lacking)), constant_values=IMPOSSIBLE)


@dataclasses.dataclass(frozen=True)
class CausalLM:
    """Implements ``types.Target`` for every decoder-only family. ``params`` is its NNX state.

    ``rows``: of the logits, where they should differ from the checkpoint's. Models of one
    tokenizer pad their vocabularies differently; a drafter answers in the rows of its target.
    Those that it lacks have no probability, those that the target lacks are cut.

    ``quantized``: what ``params`` were quantized to (see ``quantize.py``), or None.
    """

    config: DecoderConfig
    rows: int | None = None
    quantized: str | None = None

    @property
    def approximate(self) -> str:
        """Why this is not the law of the checkpoint; empty if it is."""
        return f"target quantized to {self.quantized}" if self.quantized else ""

    @property
    def vocab_size(self) -> int:
        return self.rows or self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.context_length

    def check_inputs(self, batch: int, inputs) -> None:
        """Raises ValueError: there is no encoder that could read ``inputs``."""
        if inputs is not None:
            raise ValueError(
                f"inputs: {self.config.model_type!r} is a decoder-only model, which reads nothing "
                "but its prompt; leave inputs out, or take an encoder-decoder model (T5, Whisper)"
            )

    def init(self, params, batch: int, capacity: int, inputs=None) -> PyTree:
        self.check_inputs(batch, inputs)
        c = self.config
        dtype = params["norm"]["weight"].dtype  # of the activations; other weights may be quantized
        slots = [c.slots(i, capacity) for i in range(c.num_layers)]
        leaves = 1 if c.kv_rank else 2
        return kv_cache.init(slots, batch, c.num_kv_heads, c.head_dim, dtype, leaves)

    def verify(
        self, params, cache, draft: Draft, *, features=(), since=0, entries=None, logits=True
    ) -> Scores:
        model = nnx.merge(graph_definition(self.config), params)
        batch = draft.tokens.shape[0]
        positions, sees, length = layout(draft)
        live = None
        if self.config.num_experts:
            live = positions >= 0 if draft.scored is None else (positions >= 0) & draft.scored
            live = jnp.broadcast_to(live, draft.tokens.shape)[:, since:]
        hidden, tapped, fresh = model.hidden(
            draft.tokens[:, since:],
            positions,
            sees[:, :, since:],
            prefix=cache,
            length=length,
            earlier=entries,
            live=live,
            taps=features,
        )
        out = fit(model.head(hidden, batch), self.vocab_size) if logits else None
        return Scores(logits=out, features=tapped, entries=fresh)

    def commit(self, cache, entries, start, verdict: Verdict) -> PyTree:
        sizes = [jax.tree.leaves(layer)[0].shape[2] for layer in cache]
        rings = [self.config.is_ring(i, slots) for i, slots in enumerate(sizes)]
        return kv_cache.commit(cache, entries, start, verdict, rings)
