"""Kangaroo: the target's first layers and a small trained adapter draft for the target.

    h_i     = what the target's first E layers say of token i              (``layer=E``)
    y_i     = h_i + attention(norm_1(h))_i
    logits of token i + 1 = the target's LM head of norm_2(y_i)

The first E layers have the target's weights and read its cache of committed tokens. The adapter is
one causal attention with rotary positions and a cache of its own, and two RMS norms; it has no MLP
and reads no embeddings. What the E layers computed of the drafted tokens is handed to the target's
pass (``Draft.partial``), which runs the other layers alone. So no layer runs twice for a token of a
chain. Rows of a tree end in different places; there the E layers read all drafted tokens once more,
in one pass.

*Double early exit*: a row drafts nothing below a token whose law has a greatest probability less
than ``threshold``, and at most as deep as its topology. The comparison is with the drafter's own
softmax at temperature 1. The tokens drawn from that last law are still proposed, so where a row
ends follows from laws and never from which token was drawn.

Lossless: yes, under ``greedy`` and ``delta``; where the draft is drawn (a chain or a static tree
with ``sibling_sampling="iid"`` or ``"distinct"``, which states its laws) also under ``rejection``,
``block`` and the other rules that judge drawn drafts.

Differs from the authors' code, which is greedy and drafts chains for one row: here batches, trees
and drawn drafts. After a round the adapter reads the accepted tokens anew, by two products for keys
and values, from the hidden states of the target's pass.

Example::

    adapter = specjax.load_drafter("my-kangaroo", lm)  # trained by `specjax train kangaroo`
    specjax.generate(lm, "...", drafter=adapter)

References: Kangaroo, arXiv 2404.18911. The adapter, the round and the defaults are those of the
authors' code, github.com/Equationliu/Kangaroo at 4f0949d.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from .. import trees
from .._internal.optional import required
from ..decoding import contract_checks as checks
from ..models.config import MLP_SUBLAYER, DecoderConfig
from ..models.decoder import DecoderLayer
from ..models.layers import Norm, turns
from ..trees import expand
from ..types import Confidence, SubNetwork
from .feature_cache import FeatureReader
from .feature_module import FeatureModule
from .hand_over import hand_over, wanted_depth
from .layer_sizes import SizesOfLayer

NUM_DRAFT, THRESHOLD = 6, 0.6  # gamma and eta, as the authors' README gives them


@dataclasses.dataclass(frozen=True, kw_only=True)
class KangarooConfig(SizesOfLayer):
    """The shape of an adapter.

    Attributes:
      layer: the shape of its attention and norms. ``hidden_size`` and ``vocab_size`` are those of
        the target; ``intermediate_size`` is only kept, since there is no MLP.

    Raises:
      ValueError: ``layer`` is no single layer of plain attention with rotary positions.
    """

    layer: DecoderConfig

    def __post_init__(self):
        c = self.layer
        if c.num_layers != 1 or c.kv_rank or c.positions != "rope" or c.sandwich_norms:
            raise ValueError(
                f"layer: num_layers={c.num_layers}, kv_rank={c.kv_rank}, positions="
                f"{c.positions!r}, sandwich_norms={c.sandwich_norms}: an adapter is one plain "
                "attention with rotary positions after a norm; give num_layers=1, kv_rank=0, "
                "positions='rope', sandwich_norms=False"
            )


class AttentionBlock(DecoderLayer):
    """A block without an MLP."""

    def __init__(self, config: DecoderConfig, layer: int, **common):
        super().__init__(config, layer, **common)
        self.mlp_norm = self.mlp = None


class Adapter(FeatureModule):
    """The weights of an adapter.

    ``norm``: ``[H]``, the initial weight of the last norm (the target's), or None.
    """

    def __init__(self, config: KangarooConfig, *, rngs, param_dtype=jnp.float32, norm=None):
        self.config, self.layer = config, config.layer
        block = AttentionBlock(config.layer, 0, rngs=rngs, param_dtype=param_dtype)
        self.blocks = nnx.List([block])
        self.norm = Norm(config.hidden_size, config.layer, param_dtype=param_dtype)
        if norm is not None:
            self.norm.weight[...] = jnp.asarray(norm, param_dtype)

    def enter(self, embedded, hidden, stage=0):
        """Reads the hidden states alone."""
        return hidden

    def run(self, x, positions, own_mask, *, batch, stage: int = 0, **settings):
        without = (frozenset({MLP_SUBLAYER}),)
        return super().run(x, positions, own_mask, batch=batch, without=without, **settings)

    def entries(self, hidden: jax.Array, positions: jax.Array):
        """Keys and values ``[B, K, T, E]`` of hidden states ``[H, B * T]``, without attention.

        Args:
          hidden: the states after the target's first layers.
          positions: int32 ``[B, T]``.
        """
        c = self.layer
        rope = turns(c, positions, not c.is_local(0), hidden.dtype)
        return tuple(block.entries(hidden, rope, len(positions)) for block in self.blocks)

    def logits(self, out, batch, target, params, stage=0):
        return target.head(params, self.norm(out), batch)


@dataclasses.dataclass(frozen=True)
class Kangaroo(FeatureReader):
    """Drafts with the target's first layers and an adapter, which ``params["drafter"]`` holds.

    Attributes:
      layer: E, the number of the target's layers that run before the adapter. It must be given.
      threshold: eta, in [0, 1]; a row drafts nothing below a law whose greatest probability is
        less. 0: every draft is as deep as the topology. Where ``context.confidence`` is given, as
        by a policy for the length of drafts, that stands in its place.
      topology: the tree to draft; None: a chain of 6 tokens.

    Raises:
      ValueError: ``layer`` is missing, or is not one of the target's layers before the last; the
        target has no such part; ``threshold`` is out of range.
    """

    threshold: float = THRESHOLD
    module = Adapter
    name = "kangaroo"
    stored_settings = ()  # the layout has a key for the layer

    def __post_init__(self):
        self.check_parts()
        most = max(self.target.num_layers - 1, 1)  # a target of one layer may be a toy
        if self.layer is None or not 1 <= self.layer <= most or self.layers is not None:
            raise ValueError(
                f"Kangaroo(layer={self.layer}, layers={self.layers}): give layer=E alone, the "
                f"number of the target's first layers that draft, from 1 to {most}"
            )
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"Kangaroo(threshold={self.threshold}): it must be from 0 to 1")
        _ = self.part  # refuses targets that have no such part
        super().__post_init__()

    @property
    def default_topology(self) -> trees.Topology:
        return trees.chain(NUM_DRAFT)

    @property
    def part(self) -> SubNetwork:
        """The target's first layers."""
        return self.target.sub_network(exit=self.layer)

    def draft_step(self, params, target_params, state, context):
        if context.confidence is None and self.threshold:
            context = dataclasses.replace(context, confidence=Confidence(self.threshold))
        state, _ = self._catch_up(params, target_params, state, context)
        level, carry = self.make_level(params, target_params, state, context)
        draft, (early, _), _ = expand.expand(
            self.tree, context, level, carry, sibling_sampling=self.sibling_sampling
        )
        if not self.part.hands_over or context.stop_drafting is not None:
            return draft, state
        width = wanted_depth(draft, context, context.width)
        run = self._first_layers(target_params, context)
        return hand_over(run, self.tree, draft, early, width), state

    def make_level(self, params, target_params, state, context):
        """See ``HeadDrafter.make_level``; the state has read all tokens before the root."""
        head, cache, dtype = self.heads(params), state.cache[0], state.features.dtype
        first_layers, batch = self._first_layers(target_params, context), len(context.length)

        def level(carry, grown, since):
            early, earlier = carry or (None, None)
            given = dict(features=self.features, since=since, entries=early, logits=False)
            scores = first_layers(grown, **given)
            hidden = required(scores.features, "scores.features").astype(dtype)
            out, entries = head.run(
                hidden.reshape(-1, hidden.shape[-1]).T,
                grown.start[:, None] + trees.depths(grown),
                trees.ancestors(grown)[:, :, since:],
                batch=batch,
                prefix=cache,
                length=grown.start,
                earlier=earlier,
            )
            logits = head.logits(out, batch, self.target, target_params)
            return logits, (scores.entries, entries)

        return level, None

    def _first_layers(self, target_params, context):
        """``SubNetwork.verify`` of the target's first layers, checked."""
        part = self.part
        own = part.select(context.cache, context.length - 1)
        given = part, self.target, target_params, own
        return functools.partial(checks.verified_by_part, *given)

    def _root(self, head, target_params, cache, features, tokens, start, count):
        """Reads pending tokens; the root is not among them, so there are no logits."""
        outs, entries = self._read(head, target_params, cache, features, tokens, start)
        return None, (self._last(outs[0], count, 0),), entries

    def _read(self, head, target_params, cache, features, tokens, start):
        """Keys and values of tokens; those of one layer need no attention."""
        batch, steps = tokens.shape
        hidden = features.reshape(batch * steps, -1).T
        positions = start[:, None] + jnp.arange(steps, dtype=jnp.int32)
        return [hidden], (head.entries(hidden, positions),)
