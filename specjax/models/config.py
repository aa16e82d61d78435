"""The shape of a decoder: one frozen, hashable record for every family."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
)
ROUTINGS = ("greedy", "group_limited_greedy", "noaux_tc")
# the names of a layer's sublayers, each of which a sub-network may leave out with its norms
ATTENTION, MLP_SUBLAYER = "attention", "mlp"
EVERY_SUBLAYER = frozenset((ATTENTION, MLP_SUBLAYER))
INT8, FP8 = CACHE_BITS = ("int8", "fp8")  # of a cache in eight bits (``low_bits.py``)
SINKS = 4  # of a small cache, unless told otherwise: StreamingLLM's number
RopeScaling = tuple[tuple[str, object], ...]
_OPTIONAL_NUMBERS = ("local_rope_theta", "query_scalar", "score_softcap", "logit_softcap")
_OPTIONAL_INTEGERS = ("window", "q_rank", "bos_id")


def is_number(value: object) -> bool:
    """Whether a value of a config is a finite number."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> bool:
    """Whether a value of a config is a whole number."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that distinguishes one decoder-only family from another.

    The defaults are Llama's. A family is a point in these fields, never a copy of the model;
    ``specjax.models.translate`` reads the configuration files of Hugging Face into them.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 2048
    model_type: str = "llama"
    norm: str = "rms"  # "rms" | "layer"
    norm_eps: float = 1e-5
    norm_plus_one: bool = False  # a norm scales by 1 + weight (Gemma)
    sandwich_norms: bool = False  # the outputs of both layers of a block are normed too (Gemma)
    parallel_residual: bool = False  # attention and MLP read the same residual stream (GPT-NeoX)
    activation: str = "silu"  # a key of layers.ACTIVATIONS
    gated_mlp: bool = True
    positions: str = "rope"  # "rope" | "learned"
    position_offset: int = 0  # rows of a learned table before position 0 (OPT)
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None  # sorted items of the scaling dictionary
    rotary_fraction: float = 1.0  # share of a head's features that are rotated, from the first on
    window: int | None = None  # tokens that a token sees in a local layer, itself included
    local_layers: tuple[bool, ...] | None = None  # which layers are local; None: all, with a window
    local_rope_theta: float | None = None  # of local layers, unscaled; None: as the others
    # a small cache for drafting, of layers without a window of their own (``small_cache.py``)
    cache_window: int | None = None  # tokens that a token sees, itself included; None: all
    sinks: int = 0  # and the first tokens of the text, which it sees wherever it stands
    spare: int = 0  # further slots of caches with windows: so many tokens can be taken back
    cache_bits: str | None = None  # entries in eight bits, one of CACHE_BITS; None: as computed
    query_scalar: float | None = None  # scores are divided by its square root; default: head_dim
    score_softcap: float | None = None  # attention scores become cap * tanh(x / cap) (Gemma 2)
    logit_softcap: float | None = None  # logits become cap * tanh(x / cap)
    scale_embeddings: bool = False  # embeddings times the square root of hidden_size (Gemma)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of every head's query and key (Qwen3)
    # latent attention (``mla.py``), if kv_rank; then num_kv_heads is 1 and head_dim an entry's size
    kv_rank: int = 0
    q_rank: int | None = None  # rank of the queries' latent; None: queries have no latent
    nope_dim: int = 0  # features of a head that are not rotated by RoPE
    rope_dim: int = 0  # features of a head that are rotated by RoPE
    value_dim: int = 0
    rope_interleaved: bool = False  # the two features of a rotated pair are neighbours
    # experts (``moe.py``), if num_experts, in all layers but the plain ones
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0  # intermediate size of one expert
    shared_experts: int = 0  # experts that every token passes, as one wide layer
    routing: str = "greedy"  # | "group_limited_greedy" | "noaux_tc"; see ``moe.Router``
    expert_groups: int = 1
    groups_per_token: int = 1
    norm_expert_weights: bool = False  # the weights of a token's experts sum to 1
    expert_scale: float = 1.0  # factor on the weights of experts
    plain_first: int = 0  # how many of the first layers have no experts
    plain_layers: tuple[int, ...] = ()  # indices of further layers without experts
    sparse_step: int = 1  # of the other layers, every sparse_step-th has experts
    tie_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    def __post_init__(self):
        for name in SIZES:
            size = getattr(self, name)
            if not isinstance(size, numbers.Integral) or size < 1:
                raise ValueError(f"{name}={size!r}: it must be at least 1, and a whole number")
        self._check_kinds()
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}: "
                "grouped-query attention needs equal groups"
            )
        if self.positions == "rope" and (self.rotary_dim % 2 or self.rotary_dim < 2):
            raise ValueError(
                f"head_dim={self.head_dim}, rotary_fraction={self.rotary_fraction}: rotary "
                f"embedding turns pairs, and {self.rotary_dim} features are odd or none"
            )
        self._check_windows()
        self._check_small_cache()
        self._check_experts()
        self._check_latents()
        if self.cache_bits is not None and (self.cache_bits not in CACHE_BITS or self.kv_rank):
            raise ValueError(
                f"cache={self.cache_bits!r}, model_type={self.model_type!r}: accepted are "
                f"{' and '.join(map(repr, CACHE_BITS))}, for models with keys and values of their "
                "own (no latent attention); leave it out"
            )
        for name in ("query_scalar", "score_softcap", "logit_softcap"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive, or None")

    def _check_kinds(self):
        """Files may hold texts in place of numbers, as converters of YAML write ``"1e-05"``."""
        for field in dataclasses.fields(self):
            name, value, usual = field.name, getattr(self, field.name), field.default
            if value is None and usual is None or name == "sinks":  # which has errors of its own
                continue
            known, wanted = True, ""
            if isinstance(usual, bool):
                known, wanted = value in (True, False), "be True or False"
            elif isinstance(usual, float) or name in _OPTIONAL_NUMBERS:
                known, wanted = is_number(value), "be a number"
            elif isinstance(usual, int) or name in _OPTIONAL_INTEGERS:
                known, wanted = is_whole(value), "be a whole number"
            elif name in ("eos_ids", "plain_layers"):
                known = isinstance(value, tuple) and all(map(is_whole, value))
                wanted = "hold whole numbers, and nothing else"
                wanted = "be a tuple" if isinstance(value, list) else wanted
            if not known:
                raise ValueError(f"{name}={value!r}: it must {wanted}")

    def _check_windows(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: it must be at least 1, or None")
        if self.local_layers is None:
            return
        if self.window is None or len(self.local_layers) != self.num_layers:
            raise ValueError(
                f"local_layers={self.local_layers}, window={self.window}: give a window, and say "
                f"for each of {self.num_layers} layers whether it is local"
            )
        if not any(self.local_layers):
            raise ValueError(f"window={self.window}: no layer is local; give window=None")
        if all(self.local_layers):
            object.__setattr__(self, "local_layers", None)

    def _check_small_cache(self):
        given = f"window={self.cache_window}, sinks={self.sinks}"
        if self.cache_window is None:
            if self.sinks:
                raise ValueError(f"{given}: sinks are seen beside a window; give both")
            return
        for size, least in ((self.cache_window, 1), (self.sinks, 0)):
            if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < least:
                raise ValueError(
                    f"{given}: the window is a whole number of tokens from 1, and the number of "
                    "sinks one from 0"
                )
        if all(map(self.is_local, range(self.num_layers))):
            raise ValueError(
                f"{given}: every layer of {self.model_type!r} has a window of its own, of "
                f"{self.window} tokens, so its cache does not grow with the text; leave the small "
                "cache out"
            )
        if self.cache_window + self.sinks >= self.context_length:
            raise ValueError(
                f"{given}: the context of {self.model_type!r} is {self.context_length} tokens, so "
                f"a cache of {self.cache_window + self.sinks} would hold all of it; give a smaller "
                "window, or leave the small cache out"
            )

    def _check_experts(self):
        if not self.num_experts:
            return
        if self.routing not in ROUTINGS:
            raise ValueError(f"routing={self.routing!r} is unknown; known: {', '.join(ROUTINGS)}")
        sizes = ["num_experts", "experts_per_token", "expert_size", "sparse_step"]
        if self.routing != "greedy":
            sizes += ["expert_groups", "groups_per_token"]
        for name in sizes:
            size = getattr(self, name)
            if not isinstance(size, numbers.Integral) or size < 1:
                raise ValueError(f"{name}={size!r}: it must be at least 1, and a whole number")
        groups = self.expert_groups if self.routing != "greedy" else 1
        open_groups = self.groups_per_token if self.routing != "greedy" else 1
        each, rest = divmod(self.num_experts, groups)
        least = 2 if self.routing == "noaux_tc" else 1  # that a group is judged by
        if rest or each < least or not 1 <= open_groups <= groups:
            raise ValueError(
                f"num_experts={self.num_experts}, expert_groups={groups}, groups_per_token="
                f"{open_groups}: groups must be equal, of at least {least}, and as many"
            )
        if self.experts_per_token > open_groups * each:
            raise ValueError(
                f"experts_per_token={self.experts_per_token}: there are {open_groups * each} to "
                "choose from"
            )

    def _check_latents(self):
        if not self.kv_rank:
            return
        for name in ("nope_dim", "rope_dim", "value_dim"):
            size = getattr(self, name)
            if not isinstance(size, numbers.Integral) or size < 1:
                raise ValueError(f"{name}={size!r}: it must be at least 1, and a whole number")
        entry = self.kv_rank + self.rope_dim
        if self.num_kv_heads != 1 or self.head_dim != entry:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}: with kv_rank, the "
                f"cache has one head, of kv_rank + rope_dim = {entry} features"
            )

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward layer of ``layer`` is a ``moe.MoE``."""
        if not self.num_experts or layer < self.plain_first or layer in self.plain_layers:
            return False
        return (layer + 1) % self.sparse_step == 0

    @property
    def num_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rotary_dim(self) -> int:
        """Features of a head that rotary embedding turns."""
        return self.rope_dim or int(self.head_dim * self.rotary_fraction)

    def is_local(self, layer: int) -> bool:
        """Whether ``layer`` has a window of its own, with which the model was trained."""
        return self.window is not None and (self.local_layers is None or self.local_layers[layer])

    def window_of(self, layer: int) -> int | None:
        """The number of tokens that a node sees in ``layer``, itself included and sinks not
        counted; None: all."""
        return self.window if self.is_local(layer) else self.cache_window

    def sinks_of(self, layer: int) -> int:
        """The number of first tokens of the text that a node sees in ``layer`` beside a window."""
        return 0 if self.is_local(layer) else self.sinks

    def slots(self, layer: int, capacity: int) -> int:
        """Slots of a cache for ``capacity`` tokens: those of a layer with a window are bounded.

        A root sees ``window - 1`` committed tokens. One slot more lets a cache be one token ahead
        of the root, as the cache of a draft model is after the prompt. A ring can be rewound by
        ``spare`` tokens further.
        """
        window = self.window_of(layer)
        if window is None:
            return capacity
        return min(capacity, window + self.sinks_of(layer) + self.spare)

    def overwrites(self, length: int) -> bool:
        """Whether caches of a text of so many tokens have overwritten an entry, since a window is
        shorter."""
        return any(self.slots(i, length) < length for i in range(self.num_layers))

    def is_ring(self, layer: int, slots: int) -> bool:
        """Whether a cache of so many slots is a ring (see ``kv_cache.py``). A cache that is shorter
        than sinks and window holds every position that there is, each in the slot of its
        number."""
        window = self.window_of(layer)
        return window is not None and slots >= window + self.sinks_of(layer)

    @property
    def context_length(self) -> int:
        """The number of positions for which the model is made.

        RoPE scalings that files leave out of ``max_positions`` (Qwen2.5 with yarn, older linear
        ones) are counted. With ``longrope`` it is the context of the short factors, which alone
        are implemented.
        """
        scaling: dict[str, Any] = dict(self.rope_scaling or ())
        if scaling.get("rope_type") == "longrope":
            return min(self.max_positions, int(scaling["original_max_position_embeddings"]))
        counted = self.local_rope_theta is not None  # Gemma 3's files count it
        if scaling.get("rope_type") not in ("yarn", "linear") or counted:
            return self.max_positions
        original = scaling.get("original_max_position_embeddings", self.max_positions)
        return max(self.max_positions, int(original * scaling["factor"]))
