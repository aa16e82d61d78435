"""The *prefix layer*: a Transformer layer whose output light heads read in place of a hidden state.

It runs once a round, over the hidden states of all tokens so far. Its attention finds what a single
hidden state does not hold, as how a similar passage went on; the heads after it stay as cheap as
they were. It is Hydra++'s, and may come before a speculator too. A module with such a layer has ::

    prefix: Decoder or None
    enter(hidden [F, M], after int32 [M]) -> [W, M]     the layer's input at each token, from the
                                                        hidden state there and the next token

and its ``config.prefix`` is the layer's shape, or None.

Lossless: as the heads that read it. Example: ``HydraConfig(..., prefix=prefix_config(lm.config))``.

References: Hydra++, section 4.3 of arXiv 2402.05109.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .._internal.pytree import pytree_dataclass
from ..models import kv_cache
from ..models.config import DecoderConfig
from ..models.layers import turns
from ..types import PyTree, Verdict
from .heads import HeadDrafter, HeadState, last_feature

PENDING = 64  # tokens of plain rounds that may wait to be read
AT_ONCE = 8  # tokens of those that one pass reads


def prefix_config(target: DecoderConfig) -> DecoderConfig:
    """The shape of a prefix layer for a target: a Llama layer of its sizes.

    Raises:
      ValueError: the target has latent attention, whose layers have no such sizes.
    """
    if target.kv_rank:
        raise ValueError(
            f"a {target.model_type} target has latent attention, for which Hydra++'s prefix layer "
            "is not defined: take Hydra without it (prefix=None)"
        )
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
    names += ("head_dim", "max_positions", "norm_eps", "rope_theta", "rope_scaling", "window")
    sizes = {name: getattr(target, name) for name in names}
    return DecoderConfig(**sizes, num_layers=1, tie_embeddings=True)


def check_prefix(layer: DecoderConfig | None) -> None:
    """Raises ValueError unless the shape is that of one layer with rotary positions, or None."""
    if layer is not None and (layer.num_layers, layer.positions, layer.kv_rank) != (1, "rope", 0):
        raise ValueError(
            f"prefix: num_layers={layer.num_layers}, positions={layer.positions!r}, kv_rank="
            f"{layer.kv_rank}; accepted: one layer with rotary positions and keys of its own (0)"
        )


def read_rows(heads, hidden: jax.Array, tokens: jax.Array, segments=None) -> jax.Array:
    """The outputs of the prefix layer over whole rows, for training.

    Args:
      heads: a module with a prefix layer.
      hidden: ``[F, B * T]``, the target's hidden states.
      tokens: int32 ``[B, T + 1]``, each row with the token that follows it.
      segments: int32 ``[B, T]`` or None; the layer attends within a segment only.

    Returns:
      ``[W, B * T]``.
    """
    own, after = tokens[:, :-1], tokens[:, 1:].reshape(-1)
    steps = own.shape[1]
    positions = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32), own.shape)
    sees = jnp.triu(jnp.ones((steps, steps), bool))[None]  # [key, query]
    if segments is not None:
        sees = sees & (segments[:, :, None] == segments[:, None, :])
    states = heads.enter(hidden, after)
    return heads.prefix.hidden(own, positions, sees, states=states, causal=True)[0]


@pytree_dataclass
class PrefixState(HeadState):
    """The state of a prefix layer: its cache and pending tokens. Without a layer: a ``HeadState``.

    Attributes:
      feature: ``[B, W]``, the layer's input at token ``done - 1``, the last one that was read. (Its
        keys and values are computed again when the layer runs.)
      cache: keys and values of the tokens before ``done``.
      pending: ``[B, P, F]``, a ring with token ``i`` in slot ``i mod P``: hidden states of the
        tokens from ``done`` on, which plain rounds committed.
      done: int32 ``[B]``, how many tokens were read.
    """

    cache: PyTree = None
    pending: jax.Array | None = None
    done: jax.Array | None = None


class PrefixDrafter(HeadDrafter):
    """The base class of heads that may have a prefix layer.

    For the tokens of an accepted path only keys and values are computed; the layer runs for the
    last of them, and only in rounds that draft. Tokens of plain rounds wait until then; where
    ``PENDING`` of them wait, ``AT_ONCE`` are read, so that one plain round in ``AT_ONCE`` reads.
    """

    @property
    def reads_last(self) -> bool:
        return self.config.prefix is None

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
        """``[W, B]``, what the heads read at the root: the output of the prefix layer, when nothing
        is pending, or the target's hidden state if there is no such layer."""
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
        # nothing was drafted, so at most the root was committed. There is room, since ``sync`` ran
        # before; the condition orders this write after those reads
        room = (segment.num > 0) & (segment.start - state.done < PENDING)
        where = jnp.where(room, segment.start % PENDING, PENDING)
        rows, own = jnp.arange(len(where)), segment.features[:, 0].astype(state.pending.dtype)
        pending = state.pending.at[rows, where].set(own, mode="drop")
        return dataclasses.replace(state, pending=pending)

    def _caught_up(self, params, state, context, most: int):
        """Reads until no row has more than ``most`` tokens pending, the root not counted."""
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
        """The state after reading ``num`` int32 ``[B]`` more tokens from position ``start`` on.

        Args:
          hidden: ``[B, T, F]``, their hidden states.
          after: int32 ``[B, T]``, the token that follows each.
        """
        heads, (batch, steps) = self.heads(params), after.shape
        x = hidden.astype(state.feature.dtype).reshape(batch * steps, -1).T
        x = heads.enter(x, after.reshape(-1))
        index = jnp.arange(steps, dtype=jnp.int32)
        c, (block,) = self.config.prefix, heads.prefix.blocks
        rope = turns(c, start[:, None] + index, not c.is_local(0), x.dtype)
        entries = block.entries(x, rope, batch)
        verdict = Verdict(path=jnp.broadcast_to(index, after.shape), count=num - 1, token=num)
        rings = [c.is_ring(0, state.cache[0][0].shape[2])]
        return dataclasses.replace(
            state,
            feature=last_feature(state.feature, x.T.reshape(batch, steps, -1), num),
            cache=kv_cache.commit(state.cache, (entries,), start, verdict, rings),
            done=jnp.where(num > 0, start + num, state.done),
        )
