"""Multi-token prediction modules: a decoder layer that reads the target's last hidden state.

    x = M [RMSNorm(e(t_{i+1})); RMSNorm(h_i)]
    h_{i+1} = Layer(x)
    logits of token i + 2 = U RMSNorm(h_{i+1})

``h_i`` is the last hidden state of token ``i``, normed, ``e`` the target's embeddings and ``U`` its
LM head. After a drafted token, the output at the token before stands for the hidden state. Three
variants are published; each is a setting of ``MTPConfig``:

- DeepSeek-V3: K modules that share nothing; the output is passed on as it is;
- Qwen3-Next, Qwen3.5: all share norms, ``M`` and the last norm; the normed output is passed on;
- MiMo: as DeepSeek-V3, but the hidden state comes first, and the normed output is passed on.

Of several *distinct* modules, the k-th predicts the k-th token ahead from the output of the one
before, and has keys and values of all tokens so far. Instead, one module may serve all tokens
(``share_layers``): servers run DeepSeek's single one so, and FastMTP trains one for it.

Lossless: yes, under ``greedy`` and ``delta``; with ``sibling_sampling="iid"`` or ``"distinct"``
also under ``rejection``.

Example::

    lm = specjax.load("XiaomiMiMo/MiMo-7B-RL")  # whose checkpoint has a module
    specjax.generate(lm, "...", drafter="mtp")

References: DeepSeek-V3, arXiv 2412.19437, section 2.2; FastMTP, arXiv 2509.18362
(``share_layers``); MiMo, arXiv 2505.07608.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from ..models.config import DecoderConfig
from ..models.decoder import DecoderLayer
from ..models.layers import Linear, Norm
from ..trees.topology import Topology, chain
from .eagle import own_table
from .feature import FeatureDrafter
from .feature_module import FeatureModule, logits_of
from .layer_sizes import SizesOfLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(SizesOfLayer):
    """The shape of MTP modules.

    Attributes:
      layer: the shape of a module's only layer, see ``module_layer``; it may have latent attention
        and experts.
      num_modules: K, the number of tokens ahead for which the modules were trained.
      share_layers: whether one module serves all K; else there are K distinct ones, which draft no
        deeper than K. A single module is the same either way, and has False.
      shared_ends: whether all modules share ``M`` and the norms, so that only layers are distinct.
      embedding_first: whether ``M`` reads the embedding before the hidden state.
      normed_output: whether ``RMSNorm(h)``, which the LM head reads, is passed on in place of h.
      own_embedding: whether the modules have a table of embeddings; else the target's is read.
        (DeepSeek's files hold a copy of the target's.)
      own_head: the same of the LM head.
    """

    layer: DecoderConfig
    num_modules: int = 1
    share_layers: bool = False
    shared_ends: bool = False
    embedding_first: bool = True
    normed_output: bool = False
    own_embedding: bool = False
    own_head: bool = False

    def __post_init__(self):
        if self.num_modules < 1:
            raise ValueError(f"num_modules={self.num_modules}: it must be at least 1")
        if self.layer.positions != "rope" or self.layer.num_layers != 1:
            raise ValueError(
                f"layer: positions={self.layer.positions!r}, num_layers={self.layer.num_layers}: a "
                "module has one layer with rotary positions; give positions='rope', num_layers=1"
            )
        if self.num_modules == 1:
            object.__setattr__(self, "share_layers", False)

    @property
    def num_stages(self) -> int:
        """The number of distinct modules."""
        return 1 if self.share_layers else self.num_modules


class MTPEnds(nnx.Module):
    """The norms and the projection ``M`` before and after the layer of a module."""

    def __init__(self, config: MTPConfig, *, rngs, param_dtype):
        size, norm = config.hidden_size, dict(param_dtype=param_dtype)
        self.embedding_norm = Norm(size, config.layer, **norm)
        self.hidden_norm = Norm(size, config.layer, **norm)
        self.fc = Linear(2 * size, size, rngs=rngs, param_dtype=param_dtype)
        self.norm = Norm(size, config.layer, **norm)


class MTPModules(FeatureModule):
    """The weights of MTP modules.

    ``norm``: ``[H]``, the initial weight of their last norms (that of the target), or None.
    """

    def __init__(self, config: MTPConfig, *, rngs, param_dtype=jnp.float32, norm=None):
        self.config, self.layer = config, config.layer
        common, num = dict(rngs=rngs, param_dtype=param_dtype), config.num_stages
        self.embedding = own_table(config.layer, **common) if config.own_embedding else None
        ends = 1 if config.shared_ends else num
        self.ends = nnx.List([MTPEnds(config, **common) for _ in range(ends)])
        self.blocks = nnx.List([DecoderLayer(config.layer, 0, **common) for _ in range(num)])
        sizes = config.hidden_size, config.vocab_size
        self.lm_head = Linear(*sizes, **common) if config.own_head else None
        for own in self.ends if norm is not None else ():
            own.norm.weight[...] = jnp.asarray(norm, param_dtype)

    @property
    def num_stages(self) -> int:
        return self.config.num_stages

    def ends_of(self, stage: int) -> MTPEnds:
        return self.ends[0 if self.config.shared_ends else stage]

    def stage_blocks(self, stage):
        return self.blocks[stage : stage + 1]

    def enter(self, embedded, hidden, stage=0):
        own = self.ends_of(stage)
        parts = own.embedding_norm(embedded.astype(hidden.dtype)), own.hidden_norm(hidden)
        return own.fc(jnp.concatenate(parts if self.config.embedding_first else parts[::-1]))

    def passed(self, out, stage=0):
        return self.ends_of(stage).norm(out) if self.config.normed_output else out

    def logits(self, out, batch, target, params, stage=0):
        x = self.ends_of(stage).norm(out)
        return target.head(params, x, batch) if self.lm_head is None else self.say(x, batch)

    def say(self, x: jax.Array, batch: int) -> jax.Array:
        """Logits float32 ``[B, N, V]`` of the modules' LM head, for normed ``[H, B * N]``."""
        return logits_of(self.lm_head, x, batch)


@dataclasses.dataclass(frozen=True)
class MTP(FeatureDrafter):
    """Drafts with MTP modules; ``params["drafter"]`` holds the weights of ``MTPModules``.

    Distinct modules draft as deep as there are; one that serves all tokens drafts any depth.
    ``target``: the target whose last hidden state, embeddings and LM head are read.
    """

    module = MTPModules
    name = "mtp"

    @property
    def num_stages(self) -> int:
        return self.config.num_stages

    @property
    def default_topology(self) -> Topology:
        return chain(self.config.num_modules)

    def greatest_number(self, most: int) -> int | None:
        # where a file does not say so, a module was trained for one token
        return super().greatest_number(most) if self.trained_depth else None


def module_layer(target: DecoderConfig) -> DecoderConfig:
    """The shape of a module's layer for a target: that of the target's last layer."""
    last = target.num_layers - 1
    plain = {} if target.has_experts(last) else dict(num_experts=0)
    window = dict(window=target.window if target.is_local(last) else None, local_layers=None)
    window |= dict(cache_window=None, sinks=0, spare=0, cache_bits=None)
    alone = dict(num_layers=1, plain_first=0, plain_layers=(), sparse_step=1)
    return dataclasses.replace(target, **alone, **window, **plain)
