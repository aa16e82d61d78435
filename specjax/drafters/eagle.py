"""EAGLE: one decoder layer that goes on with the target's last hidden state.

    f'_{i+1} = layer(fc([e(t_{i+1}); f_i]))
    logits of token i + 2 = the target's LM head of f'_{i+1}

``f_i`` is the last hidden state of token ``i``, normed, as the target's LM head reads it, and ``e``
are the target's embeddings. After a drafted token, ``f'`` stands for ``f``. The layer does not norm
what it reads.

EAGLE's trees are static; with ``trees.Expand`` (``tree="expand:8x4x24"``) this is EAGLE-2.

Lossless: yes, under ``greedy`` and ``delta``; in a static tree with ``sibling_sampling="iid"`` or
``"distinct"`` also under ``rejection``.

Example::

    heads = specjax.load_drafter("yuhuili/EAGLE-Vicuna-7B-v1.3", lm)
    drafting = specjax.Drafting(tree="expand:8x4x24")
    specjax.generate(lm, "...", drafter=heads, drafting=drafting)

References: EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858; HASS, arXiv 2408.15766,
which trains the same head otherwise.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ..models.config import DecoderConfig
from ..models.decoder import DecoderLayer
from ..models.layers import Linear, Norm
from .feature import FeatureDrafter
from .feature_module import FeatureModule
from .layer_sizes import SizesOfLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(SizesOfLayer):
    """The shape of an EAGLE head.

    Attributes:
      layer: the shape of its layer or layers. ``hidden_size`` and ``vocab_size`` are those of the
        target, whose LM head reads the output.
      fc_bias: whether ``fc`` has a bias.
      input_norm: whether the first layer norms what it reads, as a Llama layer does. Published
        heads do not.
      embedding_norm: whether the embedding is normed (``layernorms`` of speculators' files).
      head_norm: whether the output is normed before the LM head; what is passed on is not.
      own_embedding: whether it has a table of embeddings; else that of the target is read.
    """

    layer: DecoderConfig
    fc_bias: bool = False
    input_norm: bool = False
    embedding_norm: bool = False
    head_norm: bool = False
    own_embedding: bool = False

    def __post_init__(self):
        check_layer(self.layer)


def check_layer(layer: DecoderConfig) -> None:
    """Raises ValueError unless an EAGLE head can be made from the layer."""
    if layer.kv_rank or layer.positions != "rope":
        raise ValueError(
            f"layer: kv_rank={layer.kv_rank}, positions={layer.positions!r}: an EAGLE head is made "
            "of layers with plain attention and rotary embedding; give kv_rank=0, positions='rope'"
        )


class BareBlock(DecoderLayer):
    """A block whose attention reads the residual stream without a norm."""

    def __init__(self, config: DecoderConfig, layer: int, **common):
        super().__init__(config, layer, **common)
        self.attention_norm = None

    def enter(self, x):
        return x, x


class EagleHead(FeatureModule):
    """The weights of an EAGLE head."""

    def __init__(self, config: EagleConfig, *, rngs, param_dtype=jnp.float32):
        self.config, self.layer = config, config.layer
        common = dict(rngs=rngs, param_dtype=param_dtype)
        c, size = config.layer, config.hidden_size
        self.embedding = own_table(c, **common) if config.own_embedding else None
        norm = lambda wanted: Norm(size, c, param_dtype=param_dtype) if wanted else None  # noqa: E731
        self.embedding_norm, self.head_norm = norm(config.embedding_norm), norm(config.head_norm)
        self.fc = Linear(2 * size, size, bias=config.fc_bias, **common)
        first = DecoderLayer if config.input_norm else BareBlock
        kinds = [first, *[DecoderLayer] * (c.num_layers - 1)]
        self.blocks = nnx.List([kind(c, i, **common) for i, kind in enumerate(kinds)])

    def enter(self, embedded, hidden, stage=0):
        """The embedding comes first."""
        if self.embedding_norm is not None:
            embedded = self.embedding_norm(embedded)
        return self.fc(jnp.concatenate([embedded.astype(hidden.dtype), hidden], axis=0))

    def logits(self, out, batch, target, params, stage=0):
        return target.head(params, out if self.head_norm is None else self.head_norm(out), batch)


def own_table(config: DecoderConfig, *, rngs, param_dtype) -> nnx.Param:
    """A table of embeddings ``[V, H]``, random."""
    values = jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size)) * 0.02
    return nnx.Param(values.astype(param_dtype))


@dataclasses.dataclass(frozen=True)
class Eagle(FeatureDrafter):
    """Drafts with an EAGLE head; ``params["drafter"]`` holds the weights of an ``EagleHead``.

    ``target``: the target whose last hidden state, embeddings and LM head are read.
    """

    module = EagleHead
    name = "eagle"
