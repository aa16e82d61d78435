"""The *prefix layer*: what light heads may read in place of the target's hidden state.

A Transformer layer of their own, gone through once a round, over what the target made of every
token so far. Its attention finds what one hidden state does not hold, how the text went on where it
was like this before; the heads behind it stay as cheap as they were. It is Hydra++'s, and may stand
before a speculator. A module with such a layer has

    prefix: Decoder or None
    enter(hidden [F, M], after int32 [M]) -> [W, M]     what the layer reads at each token, of the
                                                        hidden state there and the token behind it

and its ``config`` the layer's shape, ``prefix``, or None.

References: Hydra++, section 4.3 of arXiv 2402.05109.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .. import cache as kv_cache
from ..models.config import DecoderConfig
from ..pytree import pytree_dataclass
from ..types import PyTree, Verdict
from .heads import HeadDrafter, HeadState, last_feature


def prefix_config(target: DecoderConfig) -> DecoderConfig:
    """The shape of a prefix layer for a target: a Llama layer of its sizes.

    Raises:
      ValueError: the target's attention has no such sizes.
    """
    if target.kv_rank:
        raise ValueError(
            f"a {target.model_type} target has latent attention: Hydra++'s prefix layer, one like "
            "the target's, is not made for it; take Hydra without it (prefix=None)"
        )
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
    names += ("head_dim", "max_positions", "norm_eps", "rope_theta", "rope_scaling", "window")
    sizes = {name: getattr(target, name) for name in names}
    return DecoderConfig(**sizes, num_layers=1, tie_embeddings=True)


def check_prefix(layer: DecoderConfig | None) -> None:
    """Raises ValueError for what is no shape of a prefix layer: one, with rotary positions."""
    if layer is not None and (layer.num_layers, layer.positions, layer.kv_rank) != (1, "rope", 0):
        raise ValueError(
            f"prefix: num_layers={layer.num_layers}, positions={layer.positions!r}, kv_rank="
            f"{layer.kv_rank}; accepted: one layer with rotary positions and keys of its own (0)"
        )


def read_rows(heads, hidden: jax.Array, tokens: jax.Array, segments=None) -> jax.Array:
    """What the prefix layer makes of whole rows, for training.

    Args:
      heads: a module with a prefix layer.
      hidden: ``[F, B * T]``, the target's hidden states.
      tokens: int32 ``[B, T + 1]``, with the token behind each row.
      segments: int32 ``[B, T]`` or None: what attention keeps apart.

    Returns:
      ``[W, B * T]``.
    """
    own, after = tokens[:, :-1], tokens[:, 1:].reshape(-1)
    steps = own.shape[1]
    positions = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32), own.shape)
    sees = jnp.triu(jnp.ones((steps, steps), bool))[None]  # [key, query]
    if segments is not None:
        sees = sees & (segments[:, :, None] == segments[:, None, :])
    return heads.prefix.hidden(own, positions, sees, states=heads.enter(hidden, after))[0]


@pytree_dataclass
class PrefixState(HeadState):
    """``feature`` is what the heads read: with a prefix layer, its output ``[B, W]``. ``cache``:
    that layer's keys and values of all tokens before the root; None without it."""

    cache: PyTree = None


class PrefixDrafter(HeadDrafter):
    """Heads that may have a prefix layer. It runs in ``observe``, over the tokens of the accepted
    path, and its cache is written there: the path's entries alone."""

    @property
    def reads_last(self) -> bool:
        return self.config.prefix is None

    def init(self, params, batch, capacity, inputs=None):
        feature, c = super().init(params, batch, capacity, inputs).feature, self.config.prefix
        if c is None:
            return PrefixState(feature=feature)
        cache = kv_cache.init(
            [c.slots(0, capacity)], batch, c.num_kv_heads, c.head_dim, feature.dtype
        )
        return PrefixState(feature=jnp.zeros((batch, c.hidden_size), feature.dtype), cache=cache)

    def observe(self, params, state, segment):
        if state.cache is None:
            return super().observe(params, state, segment)
        heads = self.heads(params["drafter"])
        batch, steps = segment.tokens.shape
        index = jnp.arange(steps, dtype=jnp.int32)
        x = segment.features.astype(state.feature.dtype).reshape(batch * steps, -1).T
        out, _, entries = heads.prefix.hidden(
            segment.tokens,
            segment.start[:, None] + index,
            jnp.triu(jnp.ones((steps, steps), bool))[None],
            prefix=state.cache,
            length=segment.start,
            states=heads.enter(x, segment.next.reshape(-1)),
        )
        out = out.T.reshape(batch, steps, -1)
        path = jnp.broadcast_to(index, segment.tokens.shape)
        # the layer's keys and values come from its input: what must be read first is the output
        count = kv_cache.after(segment.num - 1, out)
        verdict = Verdict(path=path, count=count, token=count)
        rings = [self.config.prefix.is_ring(0, state.cache[0][0].shape[2])]
        cache = kv_cache.commit(state.cache, entries, segment.start, verdict, rings)
        own = dataclasses.replace(segment, features=out)
        return PrefixState(feature=last_feature(state.feature, own), cache=cache)
