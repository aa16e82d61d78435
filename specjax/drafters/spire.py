"""SPIRe: the target's last layers, over a window and a sink, with feedback memory.

    x^0 = e(t_i),   x^(l+1) = block_l(x^l)   for n blocks;   logits of token i + 1 = U norm(x^n)
    block l at token i sees:  itself;  of tokens j < i drafted in this round  m_j^l;
                              of tokens j < i committed before it            y_j^(L-n+l)
    m_j^l = sum_k softmax(w_l)_k x_j^k,   k = 0 ... n

Keys and values of earlier tokens follow from a *memory* of them, and not from what block l computed
of them: of tokens that the target has read from ``y^(L-n+l)``, the hidden state that the target's
own block ``L-n+l`` read, of the others (the root and the drafted tokens) from a learned mean over
all states of the drafter. So the first block too knows what the last one found. ``e`` and ``U`` are
the target's; blocks and norm begin as copies of its last ``n`` blocks and of its last norm
(``train/spire.py``).

Of committed tokens nothing but keys and values is computed, by two products a block, so there is
nothing to catch up with and no pass over the prompt. The cache holds ``sinks + window`` tokens a
block: token i sees j if ``j < sinks`` or ``j > i - window``, in training too. Positions are those
of the text, so neither the cost of a pass nor the memory grows with it.

Lossless: yes, under ``greedy`` and ``delta``; with ``sibling_sampling="iid"`` or ``"distinct"``
also under ``rejection`` and the other rules that judge drawn drafts.

Differs from the paper, whose drafter has embeddings and an LM head of its own that begin as the
target's; here they are the target's and stay so. It drafts chains; here trees too.

Example::

    heads = specjax.load_drafter("my-spire", lm)  # trained by `specjax train spire`
    specjax.generate(lm, "...", drafter=heads)

References: Neelam et al., SPIRe, arXiv 2504.06419 (window 64, one sink, two of eight layers, four
drafted tokens); feedback memory: Fan et al., arXiv 2002.09402.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from .. import trees
from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..models import kv_cache
from ..models.config import DecoderConfig
from ..models.decoder import DecoderLayer, run_blocks
from ..models.layers import Norm, turns
from ..types import PyTree, Verdict
from .heads import HeadDrafter
from .layer_sizes import SizesOfLayers

NUM_DRAFT, WINDOW, SINKS = 4, 64, 1  # k, window and sink of the paper


@dataclasses.dataclass(frozen=True, kw_only=True)
class SPIReConfig(SizesOfLayers):
    """The shape of a SPIRe drafter.

    Attributes:
      layers: the shape of its blocks, those of the target's last layers; ``num_layers`` is n.
      window: how many of the last tokens a token sees, itself included.
      sinks: how many of the first tokens of the text it sees besides.

    Raises:
      ValueError: the blocks have windows of their own, latent attention, experts or no rotary
        positions; or the numbers are none of tokens, or as great as the context.
    """

    layers: DecoderConfig
    window: int = WINDOW
    sinks: int = SINKS

    def __post_init__(self):
        c = self.layers
        if c.kv_rank or c.num_experts or c.positions != "rope" or c.window is not None:
            raise ValueError(
                f"layers: kv_rank={c.kv_rank}, num_experts={c.num_experts}, positions="
                f"{c.positions!r}, window={c.window}: blocks of SPIRe are plain ones with rotary "
                "positions; give kv_rank=0, num_experts=0, positions='rope', window=None"
            )
        if self.window is None:
            raise ValueError("window=None: give the number of the last tokens that are seen")
        _ = self.sparse  # refuses windows that cannot be

    @property
    def sparse(self) -> DecoderConfig:
        """The shape of the blocks with their small cache."""
        return dataclasses.replace(self.layers, cache_window=self.window, sinks=self.sinks)


class SPIReModule(nnx.Module):
    """The weights of a SPIRe drafter; drafting and training both go through its methods.

    Attributes:
      blocks: the n blocks.
      norm: the last norm.
      memory: ``[n, n + 1]``, the weights w of the states whose mean is the memory of each block.
    """

    def __init__(self, config: SPIReConfig, *, rngs, param_dtype=jnp.float32):
        self.config, count = config, config.layers.num_layers
        common = dict(rngs=rngs, param_dtype=param_dtype)
        self.blocks = nnx.List([DecoderLayer(config.layers, i, **common) for i in range(count)])
        self.norm = Norm(config.hidden_size, config.layers, param_dtype=param_dtype)
        self.memory = nnx.Param(jnp.zeros((count, count + 1), param_dtype))

    def embed(self, tokens: jax.Array, target, params) -> jax.Array:
        """``x^0 [H, B * N]`` of ``tokens`` int32 ``[B, N]``; ``params``: the target's."""
        x = target.embed(params, tokens)
        scale = self.config.layers.scale_embeddings
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype) if scale else x

    def run(self, x, positions, own_mask, *, batch, **settings):
        """All states ``x^0 ... x^n``, each ``[H, M]``, and the entries; see ``run_blocks``."""
        return run_blocks(
            self.config.sparse, self.blocks, x, positions, own_mask, batch=batch, **settings
        )

    def memories(self, states) -> list[jax.Array]:
        """What each block remembers of tokens, ``[H, M]`` each, given ``x^0 ... x^n``."""
        shares = jax.nn.softmax(self.memory[...].astype(jnp.float32), axis=1)
        found = jnp.einsum("lk,khm->lhm", shares, jnp.stack(states).astype(jnp.float32))
        return list(found.astype(states[0].dtype))

    def entries(self, memories, positions: jax.Array) -> tuple:
        """Keys and values ``[B, K, T, E]`` of each block, of memories ``[H, B * T]`` of each.

        Args:
          memories: those of the drafter, or the target's hidden states in their place.
          positions: int32 ``[B, T]``.
        """
        c, dtype = self.config.layers, self.norm.weight[...].dtype
        rope, blocks = turns(c, positions, True, dtype), zip(self.blocks, memories, strict=True)
        return tuple(block.entries(x.astype(dtype), rope, len(positions)) for block, x in blocks)


@pytree_dataclass
class SPIReState:
    """The state of a SPIRe drafter.

    Attributes:
      cache: keys and values of the committed tokens before the root, per block, in rings after
        sinks.
    """

    cache: PyTree


@dataclasses.dataclass(frozen=True)
class SPIRe(HeadDrafter):
    """Drafts with a ``SPIReModule``, which ``params["drafter"]`` holds.

    Attributes:
      topology: the tree to draft; None: a chain of 4 tokens. Trees of any depth can be drafted.

    Raises:
      ValueError: the target has fewer layers than the drafter has blocks, or other hidden states;
        the window is smaller than the draft.
    """

    module = SPIReModule
    name = "spire"

    def __post_init__(self):
        self.check_parts()
        own, theirs = self.config.layers, self.target
        fits = theirs.hidden_size in (None, own.hidden_size)
        if own.num_layers > theirs.num_layers or not fits:
            raise ValueError(
                f"SPIRe: its {own.num_layers} blocks read hidden states {own.hidden_size} wide, "
                f"and the target has {theirs.num_layers} layers and hidden states "
                f"{theirs.hidden_size} wide: take the target that it belongs to"
            )
        super().__post_init__()
        if self.config.window < self.tree.num_nodes:
            raise ValueError(
                f"SPIRe: a window of {self.config.window} tokens is smaller than the draft, which "
                f"has {self.tree.num_nodes} nodes with its root; draft fewer tokens"
            )

    @property
    def max_depth(self) -> None:
        return None

    @property
    def default_topology(self) -> trees.Topology:
        return trees.chain(NUM_DRAFT)

    @property
    def features(self) -> tuple[int, ...]:
        count = self.target.num_layers
        return tuple(range(count - self.config.layers.num_layers, count))

    def init(self, params, target_params, batch, capacity, inputs=None):
        c, dtype = self.config.sparse, self.dtype_of(params)
        slots = [c.slots(i, capacity) for i in range(c.num_layers)]
        return SPIReState(cache=kv_cache.init(slots, batch, c.num_kv_heads, c.head_dim, dtype))

    def make_level(self, params, target_params, state, context):
        head, batch = self.heads(params), len(context.length)

        def level(memory, grown, since):
            positions = grown.start[:, None] + trees.depths(grown)
            states, entries = head.run(
                head.embed(grown.tokens[:, since:], self.target, target_params),
                positions,
                trees.ancestors(grown)[:, :, since:],
                batch=batch,
                prefix=state.cache,
                length=jnp.maximum(grown.start, 0),
                earlier=memory,
            )
            logits = self.target.head(target_params, head.norm(states[-1]), batch)
            here = jnp.broadcast_to(positions[:, since:], (batch, grown.num_nodes - since))
            fresh = head.entries(head.memories(states), here)

            def remembered(entry, new):  # in place of what the blocks read of these nodes
                return jnp.concatenate([entry[:, :, :since], new.astype(entry.dtype)], axis=2)

            return logits, jax.tree.map(remembered, entries, fresh)

        return level, None

    def observe(self, params, target_params, state, segment):
        head, features = self.heads(params), required(segment.features, "segment.features")
        batch, steps, _ = features.shape
        positions = segment.start[:, None] + jnp.arange(steps, dtype=jnp.int32)
        parts = jnp.split(features, self.config.layers.num_layers, axis=2)
        entries = head.entries([x.reshape(batch * steps, -1).T for x in parts], positions)
        c, sizes = self.config.sparse, [layer[0].shape[2] for layer in state.cache]
        path = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32), (batch, steps))
        verdict = Verdict(path=path, count=segment.num - 1, token=segment.num)
        rings = [c.is_ring(i, size) for i, size in enumerate(sizes)]
        sinks = [c.sinks_of(i) for i in range(len(sizes))]
        given = state.cache, entries, segment.start, verdict
        return SPIReState(cache=kv_cache.commit(*given, rings, sinks))
