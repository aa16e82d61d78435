"""Multi-token prediction modules: a decoder layer that reads the target's last hidden state.

    x = M [RMSNorm(e(t_{i+1})); RMSNorm(h_i)]
    h_{i+1} = Layer(x)
    logits of token i + 2 = U RMSNorm(h_{i+1})

for the last hidden state ``h_i`` of token ``i``, normed, the target's embeddings ``e`` and its LM
head ``U``. Behind a drafted token the output at the token before stands for the hidden state. Three
kinds are published, and are points in ``MTPConfig``:

- DeepSeek-V3: K modules, each with all of its own; the output is passed on as it is;
- Qwen3-Next, Qwen3.5: norms, ``M`` and the last norm are one for all; the normed output is passed;
- MiMo: as DeepSeek's, but the hidden state comes first, and the normed output is passed.

With several *distinct* modules the k-th is about the k-th token ahead and goes on with what the one
before it made: each has keys and values of all tokens so far. One module may serve all tokens
instead (``share_layers``), as DeepSeek's single one does in the servers, and FastMTP's by training.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig:
    """The shape of MTP modules.

    Attributes:
      layer: of a module's one layer, the target's own shape at best; it may have latent attention
        and experts.
      num_modules: K, tokens ahead that they were trained for.
      share_layers: one module serves all K; else there are K distinct ones, which draft no deeper.
      shared_ends: all modules have one ``M`` and one set of norms; their layers alone are distinct.
      embedding_first: ``M`` reads the embedding and then the hidden state.
      normed_output: what is passed on is ``RMSNorm(h)``, as the LM head reads it.
      own_embedding, own_head: tables of their own; else the target's are read. Of DeepSeek's
        modules, whose files hold them, they are the target's.
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

    @property
    def num_stages(self) -> int:
        """Distinct modules."""
        return 1 if self.share_layers else self.num_modules

    @property
    def vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size


class MTPEnds(nnx.Module):
    """What stands before and behind a module's layer."""

    def __init__(self, config: MTPConfig, *, rngs, param_dtype):
        size, norm = config.hidden_size, dict(param_dtype=param_dtype)
        self.embedding_norm = Norm(size, config.layer, **norm)
        self.hidden_norm = Norm(size, config.layer, **norm)
        self.fc = Linear(2 * size, size, rngs=rngs, param_dtype=param_dtype)
        self.norm = Norm(size, config.layer, **norm)


class MTPModules(FeatureModule):
    """The weights of MTP modules. ``norm``: what their last norms begin as (the target's)."""

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
        """float32 ``[B, N, V]`` of the own LM head, for normed outputs ``[H, B * N]``."""
        return logits_of(self.lm_head, x, batch)


@dataclasses.dataclass(frozen=True)
class MTP(FeatureDrafter):
    """Drafts with MTP modules; ``params["drafter"]`` are the weights of ``MTPModules``.

    Distinct modules draft as deep as there are; one that serves all tokens drafts any depth.

    Lossless: yes, under ``greedy`` and ``delta``; with
    ``sibling_sampling="iid"`` or ``"distinct"`` also under ``rejection``.

    References: DeepSeek-V3, arXiv 2412.19437; FastMTP, arXiv 2509.18362 (``share_layers``);
    MiMo, arXiv 2505.07608.
    """

    module = MTPModules
    name = "mtp"

    @property
    def num_stages(self) -> int:
        return self.config.num_stages

    @property
    def default_topology(self) -> Topology:
        return chain(self.config.num_modules)


def module_layer(target: DecoderConfig) -> DecoderConfig:
    """The shape of a module's layer for a target: that of the target's last one."""
    last = target.num_layers - 1
    plain = {} if target.has_experts(last) else dict(num_experts=0)
    window = dict(window=target.window_of(last), local_layers=None)
    alone = dict(num_layers=1, plain_first=0, plain_layers=(), sparse_step=1)
    return dataclasses.replace(target, **alone, **window, **plain)
