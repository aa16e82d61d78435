"""EAGLE-3: one decoder layer on features from low, middle and high layers of the target.

    g_i = fc([l_i; m_i; h_i])                                   where the target has seen token i
    a_{i+1} = layer([norm(e(t_{i+1})); norm(g_i)]),             with g_i as the residual stream
    g_{i+1} = a_{i+1}                                           after a drafted token
    logits of token i + 2 = lm_head(norm(a_{i+1}))              over the draft vocabulary

The draft vocabulary consists of the tokens that texts mostly consist of; ``vocab`` holds the
target's id of each (published files hold ``d2t``, the differences). It limits what can be drafted,
never what is emitted: laws are put at the target's ids where a rule asks for them.

Lossless: yes, under ``greedy`` and ``delta``; in a static tree with ``sibling_sampling="iid"`` or
``"distinct"`` also under ``rejection``.

Example::

    heads = specjax.load_drafter("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", lm)
    specjax.generate(lm, "...", drafter=heads, drafting=specjax.Drafting(num=5))

References: EAGLE-3, arXiv 2503.01840.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .._internal.optional import required, unset
from ..models.config import DecoderConfig
from ..models.decoder import Attention, DecoderLayer
from ..models.layers import Linear, Norm
from .dependency import Dependency
from .eagle import check_layer, own_table
from .feature import FeatureDrafter
from .feature_module import FeatureModule, logits_of
from .heads import VocabMap
from .layer_sizes import SizesOfLayer

FC_NORMS = (None, "whole", "each")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(SizesOfLayer):
    """The shape of an EAGLE-3 head. H is its width, ``layer.hidden_size``.

    Attributes:
      layer: the shape of its layer, or of its layers, of which only the first reads embeddings.
        ``vocab_size`` is that of the target.
      feature_size: F, the target's hidden size; None: H.
      num_features: how many hidden states of the target ``fc`` reads, side by side.
      draft_vocab_size: Vd, size of the head's LM head; None: all tokens of the target; 0: the head
        has none and uses the target's, so that H must be F.
      norm_before_residual: whether the residual stream begins as the normed ``g``.
      fc_norm: norms before ``fc``: None, ``"whole"`` (one over all features side by side) or
        ``"each"`` (one for each hidden state).
      normed_output: whether ``norm(a)`` is passed on in place of ``a``.
      fc_bias: whether ``fc`` has a bias. (Biases of the layer are fields of ``layer``.)
      head_bias: whether the head's LM head has a bias.
      own_embedding: whether it has a table of embeddings ``[V, H]``; else that of the target is
        read.
      mask_token: of a P-EAGLE head, the token that stands for drafted ones; the weights then have a
        ``mask_hidden``, which stands for their features (``peagle.py``). None: an EAGLE-3 head.
      dependency_size: R, the size of the layer by which a depth of a P-EAGLE head reads the token
        drafted before it (``dependency.py``); 0: depths read nothing of the draft, as published.
    """

    layer: DecoderConfig
    feature_size: int = unset()
    num_features: int = 3
    draft_vocab_size: int = unset()
    norm_before_residual: bool = False
    fc_norm: str | None = None
    normed_output: bool = False
    fc_bias: bool = False
    head_bias: bool = False
    own_embedding: bool = False
    mask_token: int | None = None
    dependency_size: int = 0

    def __post_init__(self):
        check_layer(self.layer)
        if self.feature_size is None:
            object.__setattr__(self, "feature_size", self.hidden_size)
        if self.draft_vocab_size is None:
            object.__setattr__(self, "draft_vocab_size", self.vocab_size)
        if min(self.feature_size, self.num_features) < 1:
            raise ValueError(
                f"feature_size={self.feature_size}, num_features={self.num_features}: they must be "
                "at least 1"
            )
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size}: it must be from 1 to the target's "
                f"vocabulary, {self.vocab_size}, or 0 for the target's own LM head"
            )
        if not self.draft_vocab_size and self.feature_size != self.hidden_size:
            raise ValueError(
                f"draft_vocab_size=0: a head {self.hidden_size} wide cannot use the LM head of a "
                f"target {self.feature_size} wide; give it one of its own (draft_vocab_size)"
            )
        if self.fc_norm not in FC_NORMS:
            raise ValueError(f"fc_norm={self.fc_norm!r}: accepted are {FC_NORMS}")
        if self.mask_token is not None and not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(
                f"mask_token={self.mask_token}: the table of embeddings has {self.vocab_size} rows"
            )
        if self.dependency_size < 0 or (self.dependency_size and self.mask_token is None):
            raise ValueError(
                f"dependency_size={self.dependency_size} with mask_token={self.mask_token}: "
                "accepted are 0, and for a P-EAGLE head, which has a mask token, at least 1 "
                "(an EAGLE-3 head reads its draft anyway)"
            )

    @property
    def has_vocab(self) -> bool:
        """Whether the draft vocabulary is a part of the target's."""
        return 0 < self.draft_vocab_size < self.vocab_size

    @property
    def embedding_size(self) -> int:
        """E, the width of the embeddings that are read."""
        return self.hidden_size if self.own_embedding else self.feature_size


class Eagle3Block(DecoderLayer):
    """The first layer, whose columns are embedding and hidden state, ``[E + H, M]``."""

    def __init__(self, config: Eagle3Config, *, rngs, param_dtype):
        c, common = config.layer, dict(rngs=rngs, param_dtype=param_dtype)
        super().__init__(c, 0, **common)
        self.early = config.norm_before_residual
        self.attention_norm = Norm(config.embedding_size, c, param_dtype=param_dtype)
        self.hidden_norm = Norm(c.hidden_size, c, param_dtype=param_dtype)
        self.attention = Attention(c, config.embedding_size + c.hidden_size, **common)

    def enter(self, x):
        embedded, hidden = jnp.split(x, (len(self.attention_norm.weight[...]),))
        normed = self.hidden_norm(hidden)
        read = jnp.concatenate([self.attention_norm(embedded), normed], axis=0)
        return read, normed if self.early else hidden


class Eagle3Head(FeatureModule):
    """The weights of an EAGLE-3 head.

    ``vocab`` is among them where there is a draft vocabulary; select what is trained by
    ``nnx.Param``.

    Args:
      lm_head: ``[Vd, H]``, the initial value of the LM head (rows of the target's), or None.
      vocab: int32 ``[Vd]``, the draft vocabulary; None: the first Vd tokens.
    """

    def __init__(
        self, config: Eagle3Config, *, rngs, param_dtype=jnp.float32, lm_head=None, vocab=None
    ):
        self.config, self.layer = config, config.layer
        common = dict(rngs=rngs, param_dtype=param_dtype)
        c, size, tokens = config.layer, config.hidden_size, config.draft_vocab_size
        num, wide = config.num_features, config.feature_size

        def norm(width):
            return Norm(width, c, param_dtype=param_dtype)

        self.embedding = own_table(c, **common) if config.own_embedding else None
        self.fc_norm = norm(num * wide) if config.fc_norm == "whole" else None
        each = config.fc_norm == "each"
        self.fc_norms = nnx.List([norm(wide) for _ in range(num)]) if each else None
        self.fc = Linear(num * wide, size, bias=config.fc_bias, **common)
        rest = [DecoderLayer(c, i, **common) for i in range(1, c.num_layers)]
        self.blocks = nnx.List([Eagle3Block(config, **common), *rest])
        self.norm = norm(size)
        self.lm_head = Linear(size, tokens, bias=config.head_bias, **common) if tokens else None
        if lm_head is not None:
            required(self.lm_head, "lm_head").weight[...] = jnp.asarray(lm_head, param_dtype)
        ids = jnp.arange(tokens) if vocab is None else jnp.asarray(vocab)
        self.vocab = VocabMap(ids.astype(jnp.int32)) if config.has_vocab else None
        blank = None
        if config.mask_token is not None:
            drawn = jax.random.normal(rngs.params(), (num * wide,))
            blank = nnx.Param(drawn.astype(param_dtype))
        self.mask_hidden = blank
        sizes = c, config.embedding_size, config.dependency_size
        self.dependency = Dependency(*sizes, **common) if config.dependency_size else None

    def read(self, features):
        """``g``, ``[H, M]``, of the target's features ``[num_features * F, M]``."""
        if self.fc_norm is not None:
            features = self.fc_norm(features)
        if self.fc_norms is not None:
            parts = jnp.split(features, len(self.fc_norms))
            parts = [norm(x) for norm, x in zip(self.fc_norms, parts, strict=True)]
            features = jnp.concatenate(parts, axis=0)
        return self.fc(features)

    def enter(self, embedded, hidden, stage=0):
        """The embedding comes first."""
        return jnp.concatenate([embedded.astype(hidden.dtype), hidden], axis=0)

    def passed(self, out, stage=0):
        if self.mask_hidden is not None:
            return jnp.broadcast_to(self.read(self.mask_hidden[...][:, None]), out.shape)
        return self.norm(out) if self.config.normed_output else out

    def logits(self, out, batch, target, params, stage=0):
        return self.say(self.norm(out), batch, target, params)

    def say(self, x: jax.Array, batch: int, target, params) -> jax.Array:
        """Logits float32 ``[B, N, Vd]`` of normed states ``[H, B * N]``, by the head's LM head or
        the target's."""
        if self.lm_head is None:
            return target.head(params, x, batch)
        return logits_of(self.lm_head, x, batch)


def usual_layers(num_layers: int) -> tuple[int, int, int]:
    """The hidden states that EAGLE-3 reads of a target with n layers.

    Those of layers 2, n // 2 and n - 3, as published, if these are three; of shallower targets 1,
    n // 2 and n - 1; of three layers or fewer the last three hidden states, embeddings included.
    """
    n = num_layers
    for low, high in ((2, n - 3), (1, n - 1)):
        if low < n // 2 < high:
            return low, n // 2, high
    return max(n - 2, 0), max(n - 1, 0), n


def check_vocab(ids, draft_vocab_size: int, vocab_size: int) -> None:
    """Checks the target's ids of a draft vocabulary (``i + d2t[i]`` of a published file).

    Raises:
      ValueError: there are not ``draft_vocab_size`` ids, one is outside of the target's vocabulary,
        or one occurs twice.
    """
    ids = np.asarray(ids)
    if ids.shape != (draft_vocab_size,) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"d2t is {ids.dtype} {list(ids.shape)}: it must be one integer for each of the "
            f"{draft_vocab_size} tokens that the LM head knows"
        )
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        raise ValueError(
            f"d2t: draft token {wrong[0]} would be token {ids[wrong[0]]} of the target, whose "
            f"vocabulary is {vocab_size} ({wrong.size} such tokens): the file holds differences, "
            "id = i + d2t[i]; is it of this target?"
        )
    same, times = np.unique(ids, return_counts=True)
    if len(same) < len(ids):
        raise ValueError(
            f"d2t: {np.sum(times > 1)} tokens of the target stand in the draft vocabulary more "
            f"than once, {same[times > 1][0]} for one; each may once"
        )


@dataclasses.dataclass(frozen=True)
class Eagle3(FeatureDrafter):
    """Drafts with an EAGLE-3 head; ``params["drafter"]`` holds the weights of an ``Eagle3Head``.

    ``layers``: the hidden states that are read; None: ``usual_layers``.

    Raises:
      ValueError: the head has a mask token, so it was trained to draft all depths at once; or
        ``layers`` are not as many as the head reads.
    """

    module = Eagle3Head
    name = "eagle3"
    parallel = False

    def __post_init__(self):
        self.check_parts()
        masked = self.config.mask_token is not None
        if masked and not self.parallel:
            raise ValueError(
                f"eagle3: mask_token={self.config.mask_token}: the head was trained to draft all "
                "depths at once; draft with PEagle"
            )
        if self.parallel and not masked:
            raise ValueError(
                "p-eagle: mask_token=None: the head was not trained to draft all depths at once; "
                "draft with Eagle3"
            )
        layers = usual_layers(self.target.num_layers) if self.layers is None else self.layers
        object.__setattr__(self, "layers", layers)
        if len(layers) != self.config.num_features:
            raise ValueError(
                f"layers={layers}: the head reads {self.config.num_features} hidden states of "
                "the target; give as many"
            )
        super().__post_init__()

    @property
    def feature_size(self):
        return self.config.num_features * self.config.feature_size
