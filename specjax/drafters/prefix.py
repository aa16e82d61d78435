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

from .._internal.pytree import pytree_dataclass
from ..models import kv_cache
from ..models.config import DecoderConfig
from ..models.decoder import turns
from ..types import PyTree, Verdict
from .heads import HeadDrafter, HeadState, last_feature

PENDING = 64  # tokens of plain rounds that may wait to be read
AT_ONCE = 8  # of them are read in one pass


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
    """What a prefix layer has read, and what it has yet to. Without one a ``HeadState``.

    Attributes:
      feature: ``[B, W]``, what the layer reads of token ``done - 1``, the last that it has read
        (whose own keys and values are made again when it is gone through).
      cache: its keys and values of the tokens before ``done``, int32 ``[B]``.
      pending: ``[B, P, F]``, a ring with token ``i`` in slot ``i mod P``: hidden states of the
        tokens from ``done`` on, which plain rounds committed.
    """

    cache: PyTree = None
    pending: jax.Array | None = None
    done: jax.Array | None = None


class PrefixDrafter(HeadDrafter):
    """Heads that may have a prefix layer. Of the accepted path's tokens, keys and values alone are
    made; the layer is gone through for the last of them, and only where something is drafted. What
    plain rounds say waits until then; where there are ``PENDING`` tokens of it, ``AT_ONCE`` are
    read, so that of many plain rounds one in ``AT_ONCE`` reads."""

    @property
    def reads_last(self) -> bool:
        return self.config.prefix is None and type(self).observe is PrefixDrafter.observe

    def init(self, params, target_params, batch, capacity, inputs=None):
        state, c = super().init(params, target_params, batch, capacity, inputs), self.config.prefix
        if c is None:
            return PrefixState(feature=state.feature)
        size, dtype = state.feature.shape[1], state.feature.dtype
        slots = [c.slots(0, capacity)]
        return PrefixState(
            feature=jnp.zeros((batch, c.hidden_size), dtype),
            cache=kv_cache.init(slots, batch, c.num_kv_heads, c.head_dim, dtype),
            pending=jnp.zeros((batch, PENDING, size), dtype),
            done=jnp.zeros((batch,), jnp.int32),
        )

    def draft_step(self, params, target_params, state, context):
        state = self._caught_up(params, state, context, 0)
        return super().draft_step(params, target_params, state, context)

    def sync(self, params, target_params, state, context, *, before="prompt"):
        if before == "draft":  # whose first step this is
            return state
        return self._caught_up(params, state, context, 0 if before == "prompt" else PENDING - 1)

    def read(self, params, state, context) -> jax.Array:
        """``[W, B]``, what the heads read at a round's root, nothing being pending; without the
        layer the feature."""
        if self.config.prefix is None:
            return state.feature.T
        at = context.length[:, None] - 2
        return self.heads(params).prefix.hidden(
            context.root[:, None],
            at,
            jnp.ones((1, 1, 1), bool),
            prefix=state.cache,
            length=jnp.maximum(at[:, 0], 0),
            states=state.feature.T,
        )[0]

    def observe(self, params, target_params, state, segment):
        if self.config.prefix is None:
            return super().observe(params, target_params, state, segment)
        if segment.round is None or segment.round[0].num_nodes > 1:
            given = segment.features, segment.next, segment.start, segment.num
            return self._taken_in(params, state, *given)
        # nothing was drafted: at most the root was committed. There is room, since ``sync`` came
        # before; to ask for it orders this write behind its reads
        room = (segment.num > 0) & (segment.start - state.done < PENDING)
        where = jnp.where(room, segment.start % PENDING, PENDING)
        rows, own = jnp.arange(len(where)), segment.features[:, 0].astype(state.pending.dtype)
        pending = state.pending.at[rows, where].set(own, mode="drop")
        return dataclasses.replace(state, pending=pending)

    def _caught_up(self, params, state, context, most: int):
        """The state when no row has more than ``most`` tokens pending, the root not counted."""
        if self.config.prefix is None:
            return state
        end = context.length - 1

        def read(state):
            at = state.done[:, None] + jnp.arange(AT_ONCE, dtype=jnp.int32)
            hidden = jnp.take_along_axis(state.pending, (at % PENDING)[:, :, None], axis=1)
            after = jnp.take_along_axis(context.tokens, at + 1, axis=1, mode="clip")
            num = jnp.minimum(end - state.done, AT_ONCE)
            return self._taken_in(params, state, hidden, after, state.done, num)

        return jax.lax.while_loop(lambda state: jnp.any(end - state.done > most), read, state)

    def _taken_in(self, params, state, hidden, after, start, num):
        """The state behind ``num`` int32 ``[B]`` more tokens at ``start``, with hidden states
        ``[B, T, F]`` and int32 ``[B, T]`` behind them."""
        heads, (batch, steps) = self.heads(params), after.shape
        x = hidden.astype(state.feature.dtype).reshape(batch * steps, -1).T
        x = heads.enter(x, after.reshape(-1))
        index = jnp.arange(steps, dtype=jnp.int32)
        c, (block,) = self.config.prefix, heads.prefix.blocks
        rope = turns(c, start[:, None] + index, c.window_of(0) is None, x.dtype)
        entries = block.entries(x, rope, batch)
        verdict = Verdict(path=jnp.broadcast_to(index, after.shape), count=num - 1, token=num)
        rings = [c.is_ring(0, state.cache[0][0].shape[2])]
        return dataclasses.replace(
            state,
            feature=last_feature(state.feature, x.T.reshape(batch, steps, -1), num),
            cache=kv_cache.commit(state.cache, (entries,), start, verdict, rings),
            done=jnp.where(num > 0, start + num, state.done),
        )
