"""A decoder as a target: the three functions that the loop needs of a model."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from .. import sharding, trees
from .._internal.optional import required
from ..sampling.distribution import IMPOSSIBLE
from ..sharding import DATA
from ..types import Draft, HeadTarget, PyTree, Scores, Verdict
from . import kv_cache, low_bits
from .checkpoint_target import CheckpointTarget
from .config import EVERY_SUBLAYER, DecoderConfig
from .decoder import abstract
from .layers import columns
from .sub_network import DecoderPart, SwitchedPart, decoder_part


def graph_definition(config: DecoderConfig) -> nnx.GraphDef:
    """Returns the structure of the decoder, without its weights."""
    return abstract(config)[0]


def layout(draft: Draft) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the positions of the nodes of a draft and which nodes see each other.

    Returns:
      positions int32 ``[B, N]``; ``sees`` bool ``[B or 1, N, N]``, true at ``[b, m, n]`` if node
      ``n`` sees entry ``m``; int32 ``[B]``, the number of committed tokens that all nodes see.
    """
    positions = draft.start[:, None] + trees.depths(draft)
    sees = trees.ancestors(draft)
    if draft.scored is not None:
        sees = sees & draft.scored[:, :, None]
    if draft.topology is None or len(draft.topology) > 1:
        # a node before the first token does not exist; the root itself always does in a round
        sees = (sees & (positions >= 0)[:, :, None]) | jnp.eye(draft.num_nodes, dtype=bool)
    return positions, sees, jnp.maximum(draft.start, 0)


def fit(logits: jax.Array, rows: int) -> jax.Array:
    """Returns logits ``[B, N, V]`` cut, or padded with minus infinity, to ``[B, N, rows]``."""
    lacking = rows - logits.shape[-1]
    if lacking <= 0:
        return logits[..., :rows] if lacking else logits
    return jnp.pad(logits, ((0, 0), (0, 0), (0, lacking)), constant_values=IMPOSSIBLE)


def spread_logits(logits: jax.Array, rows: int, axis: str | None) -> jax.Array:
    """``fit``, sharded: each device of the mesh in use has its rows and, over ``axis``, tokens."""
    logits = sharding.spread(logits, DATA, None, axis)
    return sharding.spread(fit(logits, rows), DATA, None, axis)


def write(
    cache, entries, start, verdict: Verdict, axis: str | None, rings=None, sinks=None
) -> PyTree:
    """``kv_cache.commit``, sharded: each device writes its rows and, over ``axis``, its heads."""
    parts, commit = (DATA, axis), functools.partial(kv_cache.commit, rings=rings, sinks=sinks)
    commit = sharding.locally(commit, [parts, parts, (DATA,), (DATA,)], parts)
    return commit(cache, entries, start, verdict)


def of_nodes(hidden: jax.Array, node: jax.Array) -> jax.Array:
    """``[H, B]``: of states ``[H, B * N]`` those of one node of each row, int32 ``[B]``."""
    states = hidden.reshape(len(hidden), len(node), -1)
    return jnp.take_along_axis(states, node[None, :, None], axis=2)[:, :, 0]


@dataclasses.dataclass(frozen=True)
class CausalLM(CheckpointTarget, HeadTarget):
    """The ``HeadTarget`` of every decoder-only family; ``params`` is the NNX state of ``Decoder``.

    Attributes:
      config: the shape of the model.
      rows, quantized, axis: as of ``CheckpointTarget``.
    """

    config: DecoderConfig
    reads_vectors = True
    picks_logits = True

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def max_positions(self) -> int:
        return self.config.context_length

    @property
    def cache_window(self) -> int | None:
        return self.config.cache_window

    @property
    def approximate(self) -> str:
        """The reason why the law is not that of the checkpoint; empty if it is."""
        said, c = super().approximate, self.config
        small = f"attention to {c.sinks} sinks and a window of {c.cache_window}"
        reasons = [said, "" if c.cache_window is None else small]
        reasons += [] if c.cache_bits is None else [f"a cache in {c.cache_bits}"]
        return ", ".join(filter(None, reasons))

    def check_inputs(self, batch: int, inputs) -> None:
        """Raises ValueError: there is no encoder that could read ``inputs``."""
        if inputs is not None:
            raise ValueError(
                f"inputs: {self.config.model_type!r} is a decoder-only model, which reads nothing "
                "but its prompt; leave inputs out, or take an encoder-decoder model (T5, Whisper)"
            )

    @property
    def _heads(self) -> str | None:
        """The axis over which the cache's heads are spread; None for latents, a single head."""
        return None if self.config.kv_rank else self.axis

    def init(self, params, batch: int, capacity: int, inputs=None) -> PyTree:
        self.check_inputs(batch, inputs)
        c = self.config
        self._check_mesh()
        dtype = self.activation_dtype(params)
        slots = [c.slots(i, capacity) for i in range(c.num_layers)]
        sizes = slots, batch, c.num_kv_heads, c.head_dim
        if c.cache_bits is None:
            cache = kv_cache.init(*sizes, dtype, 1 if c.kv_rank else 2)
        else:
            cache = low_bits.init(c.cache_bits, *sizes)
        return jax.tree.map(lambda x: sharding.spread(x, DATA, self._heads, None, None), cache)

    def verify(
        self, params, cache, draft: Draft, *, features=(), since=0, entries=None, logits=True
    ) -> Scores:
        run = dict(features=features, since=since, entries=entries, logits=logits)
        partial = draft.partial
        if partial is None or since or min(features, default=1 << 30) < partial.entries.shared:
            return self.run(params, cache, draft, **run)
        # a sub-network ran the first layers: the others go on from its states
        done = partial.entries.of_nodes(partial.place, draft.num_nodes)
        rest = tuple(EVERY_SUBLAYER if i < done.shared else () for i in range(self.num_layers))
        scores = self.run(params, cache, draft, **run, states=done.columns, without=rest)
        entries = done.layers[: done.shared] + scores.entries[done.shared :]
        return dataclasses.replace(scores, entries=entries)

    def sub_network(
        self, *, exit=None, skip=(), window=None, sinks=0, switched=False
    ) -> DecoderPart | SwitchedPart:
        if switched:
            return SwitchedPart(self)
        if window is not None and self.cache_window is not None:
            raise ValueError(
                f"window={window}: this target has a small cache itself, of {self.cache_window} "
                "tokens, and keeps no others; leave the window out, or draft with the model whose "
                "cache is whole"
            )
        small = None if window is None else self.windowed(window, sinks)
        return decoder_part(self, exit, skip, small)

    def windowed(self, window: int | None, sinks: int) -> CausalLM:
        """This model with a small cache; see ``small_cache.windowed``."""
        config = dataclasses.replace(self.config, cache_window=window, sinks=sinks)
        return dataclasses.replace(self, config=config)

    def low_bit_cache(self, kind: str) -> CausalLM:
        """This model with a cache in eight bits; see ``small_cache.low_bit_cache``."""
        config = dataclasses.replace(self.config, cache_bits=kind)
        return dataclasses.replace(self, config=config)

    def rewindable(self, num_tokens: int) -> CausalLM:
        c = self.config
        if num_tokens <= c.spare or not any(map(c.window_of, range(c.num_layers))):
            return self
        return dataclasses.replace(self, config=dataclasses.replace(c, spare=num_tokens))

    def recent(self, cache, length: jax.Array, chosen=None) -> PyTree:
        """What the small cache of this model would hold, taken from a cache that holds all tokens.

        Args:
          cache: of the same model without a small cache.
          length: int32 ``[B]``, the number of committed tokens.
          chosen: for each layer the positions of chosen tokens, see ``kv_cache.recent``.
        """
        c, parts = self.config, (DATA, self._heads)
        budget = required(c.cache_window, "cache_window"), c.sinks
        budgets = [None if c.is_local(i) else budget for i in range(c.num_layers)]

        def take(cache, length, chosen):
            return kv_cache.recent(cache, length, budgets, chosen)

        return sharding.locally(take, [parts, (DATA,), parts], parts)(cache, length, chosen)

    def run(
        self,
        params,
        cache,
        draft: Draft,
        *,
        features=(),
        since=0,
        entries=None,
        logits=True,
        states=None,
        without=None,
        gates=None,
    ) -> Scores:
        """Does what ``verify`` does, with some of the sublayers; it ignores ``draft.partial``.

        Args:
          states: ``[H, B * (N - since)]``, read by the first layer in place of embeddings; or None.
          without: for each layer the sublayers that are left out, see ``decoder.run_blocks``.
          gates: factors on the sublayers' outputs, or whether they run, see
            ``decoder.run_blocks``.

        Returns:
          ``Scores``; the entries of layers without attention are None.
        """
        model = nnx.merge(graph_definition(self.config), params)
        batch = draft.tokens.shape[0]
        positions, sees, length = layout(draft)
        live = None
        if self.config.num_experts:
            live = positions >= 0 if draft.scored is None else (positions >= 0) & draft.scored
            live = jnp.broadcast_to(live, draft.tokens.shape)[:, since:]
        own = draft.vectors
        hidden, tapped, fresh = model.hidden(
            draft.tokens[:, since:],
            positions,
            sees[:, :, since:],
            prefix=cache,
            length=length,
            axis=self.axis,
            earlier=entries,
            live=live,
            taps=features,
            states=states,
            without=without,
            gates=gates,
            vectors=None if own is None else (own.table, own.index[:, since:]),
        )
        if not isinstance(logits, bool):
            hidden = of_nodes(hidden, logits - since)
        out = None if logits is False else self._logits(model, hidden, batch)
        return Scores(logits=out, features=tapped, entries=fresh)

    def head(self, params, hidden: jax.Array, batch: int) -> jax.Array:
        """Applies the LM head; drafters that share the target's LM head call it.

        Args:
          params: the weights of the model.
          hidden: ``[H, B * N]``, states like the last hidden state, which is normed.
          batch: B, the number of rows.

        Returns:
          Logits float32 ``[B, N, V]``.
        """
        return self._logits(nnx.merge(graph_definition(self.config), params), hidden, batch)

    def embed(self, params, tokens: jax.Array) -> jax.Array:
        """Returns the embeddings ``[H, B * N]`` of ``tokens`` int32 ``[B, N]``."""
        return columns(self.table(params), tokens, self.activation_dtype(params))

    def table(self, params) -> jax.Array:
        """The embedding table ``[V, H]``."""
        return params["embedding"][...]

    def head_table(self, params) -> jax.Array:
        """The weight ``[V, H]`` of the LM head; where it is tied, the embedding."""
        if self.config.tie_embeddings:
            return self.table(params)
        return params["lm_head"]["weight"][...]

    def _logits(self, model, hidden, batch):
        return spread_logits(model.head(hidden, batch), self.vocab_size, self.axis)

    def commit(self, cache, entries, start, verdict: Verdict) -> PyTree:
        sizes = [jax.tree.leaves(layer)[0].shape[2] for layer in cache]
        rings = [self.config.is_ring(i, slots) for i, slots in enumerate(sizes)]
        sinks = [self.config.sinks_of(i) for i in range(len(sizes))]
        return write(cache, entries, start, verdict, self._heads, rings, sinks)
