"""Block drafters in the layout of speculators: DFlash, DSpark, DFlash2, XPress.

The layout is that of github.com/vllm-project/speculators. ``speculators_model_type`` names the
kind, ``transformer_layer_config`` is the config of the layers; beside it are ``block_size``,
``mask_token_id``, ``aux_hidden_state_layer_ids`` (``hidden_states[i]`` of Hugging Face),
``draft_vocab_size``, ``sliding_window_non_causal`` (whether places see both ways in layers with a
window) and ``sample_from_anchor``, in other files ``shift_label`` (whether each place says the
token after it, so that the root's drafts too). What a config leaves out has the default of the
classes of speculators 0.9, but a DSpark file must have ``sample_from_anchor``: the default of the
package is true, older files were trained with false, and programs read them either way.

The tensors are those of the authors' layouts (``dflash.py``, ``dspark.py``, ``dflash2.py``), but
that the refiner of XPress has other names::

    refiner_head.token_embed.weight [V, R]   refiner_head.readout.weight [V, R]
    refiner_head.{down_h, down_g}.weight [R, H]   refiner_head.in_proj.weight [R, 3R]
    refiner_head.mix_l [R, N, N]   refiner_head.{mlp_gate, mlp_up, mlp_down}.weight

DFlash and DSpark drafters may be over a part of the vocabulary: ``d2t`` and ``t2d`` say which
tokens (as in ``eagle3.py``), ``lm_head.weight [Vd, H]`` holds these rows of the target's LM head,
and ``markov_head.markov_w2.weight`` is ``[Vd, R]``. Other copies of the target's tables are in
older files; they are compared with the target and not kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._internal.file_keys import file_keys
from ..drafters.block import BlockConfig, BlockDrafter
from ..drafters.dflash2 import DFlash2, DFlash2Config
from ..drafters.dspark import DSpark, DSparkConfig
from ..drafters.xpress import XPress, XPressConfig
from . import block_keys, dflash, dflash2, dspark, eagle3, xpress
from .eagle3_speculators import proposals
from .flat_keys import check_speculators
from .layers import layer_hf, rope_of
from .weights import check_integers, flags_of, tensors_of

DESCRIPTION = "speculators' of block drafters (speculators_model_type: dflash, dspark, ...)"
DRAFTER, WEIGHTS_FILE = BlockDrafter, "model"
KINDS = {  # the kind of a file, its class, its architecture as the package writes it
    "dflash": (BlockDrafter, "DFlashDraftModel"),
    "dspark": (DSpark, "DSparkDraftModel"),
    "dflash2": (DFlash2, "DFlash2DraftModel"),
    "xpress": (XPress, "XPressDraftModel"),
}
KEYS = (
    dflash2.KEYS
    | dspark.KEYS
    | {
        "xpress_rank": "rank",
        "num_jacobi_passes": "num_passes",
        "sample_from_anchor": "from_root",
    }
)
BOTH_WAYS = ("dflash2",)  # the kinds whose default is ``sliding_window_non_causal: true``
BLOCK_SIZE = 8
READ = (  # of any kind
    "aux_hidden_state_layer_ids",
    "block_size",
    "markov_rank",
    "max_anchors",  # of training, in files of before version 0.7
    "sliding_window_non_causal",
    "xpress_mlp_ratio",
    *KEYS,
    *block_keys.LABELS,
    *block_keys.OUTSIDE,
)
REFINER = {
    "token_embed.weight": "w1.weight",
    "mix_l": "mix.L",
    "mlp_gate.weight": "mlp.gate_proj.weight",
    "mlp_up.weight": "mlp.up_proj.weight",
    "mlp_down.weight": "mlp.down_proj.weight",
    "readout.weight": "w2.weight",
} | {f"{name}.weight": f"{name}.weight" for name in ("down_h", "down_g", "in_proj")}
_UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "d2t", "t2d")  # of training
_HEAD = {dflash.LM_HEAD: ("draft_lm_head", "weight")}


def matches(config: Mapping, names: set[str]) -> bool:
    return config.get("speculators_model_type") in KINDS and "hidden_norm.weight" in names


def load(config: Mapping, tensors: Mapping, target):
    kind = config["speculators_model_type"]
    said = _block(config, tensors, target)
    with file_keys(KEYS):
        drafter = _drafter(kind, said, config, target.target)
    few = drafter.config.draft_vocab_size
    named, others = _names(drafter.config), _UNUSED
    vocab = target.target.vocab_size
    ids = eagle3.vocabulary(tensors, vocab if few is None else few, vocab)
    if ids is not None:
        named = named | _HEAD
    _, params = dflash.drafter_of(drafter, tensors, target, named, others, rows=ids)
    if ids is not None:
        params["vocab"] = jnp.asarray(ids, jnp.int32)
    return drafter, params


def save(drafter: BlockDrafter, params, target=None) -> tuple[dict, dict]:
    shape = drafter.config
    kind = next((kind for kind, (own, _) in KINDS.items() if type(drafter) is own), None)
    if kind is None:
        raise ValueError(
            f"format='block-speculators' has no {type(drafter).__name__}; it holds "
            f"{', '.join(KINDS)}: take {drafter.name!r}"
        )
    dflash.check_layers(shape, "block-speculators")
    if shape.causal:
        raise ValueError(
            "format='block-speculators': causal=True: only places of layers with a window can be "
            "causal there; take 'dflash'"
        )
    config = {
        "architectures": [KINDS[kind][1]],
        "speculators_model_type": kind,
        "speculators_config": proposals(drafter, kind, target, "block-speculators", kind),
        "draft_vocab_size": shape.draft_vocab_size or shape.vocab_size,
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token,
        "aux_hidden_state_layer_ids": [*shape.target_layers],
        # vLLM takes false for all layers, those without a window too
        "sliding_window_non_causal": shape.causal is False or shape.layers.window is None,
        "sample_from_anchor": shape.from_root,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
    } | _options(shape)
    dflash.check_read_once(shape, "block-speculators")
    inner = layer_hf(shape.layers)
    inner.setdefault("layer_types", ["full_attention"] * shape.layers.num_layers)
    if shape.layers.window is not None and shape.causal is False:
        inner["is_causal"] = False  # vLLM does not read the other key in files of DSpark
    config["transformer_layer_config"] = inner
    config |= dspark.own_entry(drafter)
    named = dflash.names(shape) | _names(shape)
    if shape.draft_vocab_size is None:
        return config, tensors_of(params, named)
    tensors = tensors_of(params, named | _HEAD)
    if target is not None:  # a reader takes the target's LM head
        dflash.check_tables(tensors, target, np.asarray(params["vocab"]))
    return config, tensors | eagle3.vocabulary_tensors(params["vocab"], shape.vocab_size)


def _block(config: Mapping, tensors: Mapping, target) -> dict[str, Any]:
    """The arguments of ``BlockConfig``.

    Raises:
      ValueError: a key is missing, or of another kind; or the file is one of another target.
    """
    kind = config["speculators_model_type"]
    inner = config.get("transformer_layer_config")
    if not inner:
        raise ValueError("the config.json of a speculator lacks transformer_layer_config")
    own = {"block_size": BLOCK_SIZE} | {
        key: config[key] for key in ("block_size", "mask_token_id") if config.get(key) is not None
    }
    known = ["projector_type"] * (config.get("projector_type") == kind)
    where = "what is about layers is in transformer_layer_config"
    block_keys.check_outside(config, known, where)
    block_keys.check_outside(inner, known, "no drafter of this layout has it")
    merged = rope_of(config) | inner | own
    layers, said = dflash.layers_of(merged, own, tensors, target, typed=True)
    check_speculators(config, READ, inside=block_keys.OUTSIDE)
    size = config.get("target_hidden_size")
    if size not in (None, layers.hidden_size):
        raise ValueError(
            f"target_hidden_size={size!r}: such drafters are as wide as their target, and this one "
            f"is {layers.hidden_size} wide"
        )
    from_root = block_keys.drafts_from_root(config, config)
    if from_root is None and kind == "dspark":
        raise ValueError(
            "the config.json lacks sample_from_anchor, and programs do not agree on what that "
            "means: write true into it if every place was trained to say the token after it, so "
            "that the root's drafts too, and false if the root's place says nothing (so it is in "
            "files of speculators of before version 0.7, July 2026); with the wrong one hardly a "
            "draft is accepted"
        )
    both_ways = flags_of(config, sliding_window_non_causal=kind in BOTH_WAYS)
    sees_all = both_ways["sliding_window_non_causal"] and layers.window is not None
    few: Any = config.get("draft_vocab_size")
    if few is None:  # the file knows better than the package's default, 32,000
        few = len(tensors["d2t"]) if "d2t" in tensors else layers.vocab_size
    check_integers(draft_vocab_size=few)
    return said | dict(
        layers=layers,
        target_layers=_states(config, target),
        from_root=bool(from_root),
        causal=False if sees_all else None,
        draft_vocab_size=None if few == layers.vocab_size else few,
    )


def _states(config: Mapping, target) -> tuple[int, ...]:
    """The hidden states that are read, in the order of the list."""
    key, count = "aux_hidden_state_layer_ids", target.target.num_layers
    ids = config.get(key) or [2, count // 2, count - 3]
    wrong = not isinstance(ids, list) or any(type(i) is not int for i in ids)
    if wrong or len({*ids}) < len(ids) or not all(0 <= i <= count for i in ids):
        raise ValueError(
            f"{key}={ids!r}: {target.name} has {count} layers, its hidden states are 0, the "
            f"embeddings, to {count}, each read once; load the target that the drafter belongs to"
        )
    return tuple(ids)


def _drafter(kind: str, said: dict, config: Mapping, target) -> BlockDrafter:
    """The drafter of a kind, with the options of its heads."""

    def number(key, default):
        value = config.get(key, default)
        check_integers(**{key: value})
        return value

    if kind == "dflash2":
        sizes = {name: number(key, dflash2.USUAL[key]) for key, name in dflash2.KEYS.items()}
        return DFlash2(config=DFlash2Config(**said, **sizes), target=target)
    if kind == "xpress":
        if said["from_root"]:
            raise ValueError(
                "sample_from_anchor=true is not supported in an XPress drafter: the place of the "
                "root drafts nothing"
            )
        rank = number("xpress_rank", 256)
        inner = rank * number("xpress_mlp_ratio", 2)
        passes = number("num_jacobi_passes", 6)
        shape = XPressConfig(**said, rank=rank, inner_size=inner, num_passes=passes)
        return XPress(config=shape, target=target)
    if kind == "dspark":
        rank, markov = number("markov_rank", 256), config.get("markov_head_type", "vanilla")
        flags = flags_of(config, enable_confidence_head=True, confidence_head_with_markov=True)
        confidence, reads = flags.values()
        if rank or confidence:
            heads: dict[str, Any] = dict(markov_rank=rank, markov=markov, confidence=confidence)
            if confidence and reads and not rank:
                raise ValueError(
                    "markov_rank=0 with confidence_head_with_markov=true: the confidence head "
                    "reads the Markov head's table of tokens, which there is none of; change one"
                )
            shape = DSparkConfig(**said, **heads, confidence_reads_token=confidence and reads)
            own = dspark.temperatures_of(config)
            return DSpark(config=shape, target=target, temperatures=own)
    return BlockDrafter(config=BlockConfig(**said), target=target)


def _options(shape: BlockConfig) -> dict:
    """The keys of a config that are about heads."""
    if isinstance(shape, DSparkConfig):
        return {
            "markov_rank": shape.markov_rank,
            "markov_head_type": shape.markov,
            "enable_confidence_head": shape.confidence,
            "confidence_head_with_markov": shape.confidence_reads_token,
        }
    if isinstance(shape, DFlash2Config):
        return {key: getattr(shape, name) for key, name in dflash2.KEYS.items()}
    if isinstance(shape, XPressConfig):
        ratio, rest = divmod(shape.inner_size, shape.rank)
        if rest:
            raise ValueError(
                f"format='block-speculators': inner_size={shape.inner_size} is no multiple of "
                f"rank={shape.rank}, as it is in this layout; take 'xpress'"
            )
        sizes = {"xpress_rank": shape.rank, "xpress_mlp_ratio": ratio}
        return sizes | {"num_jacobi_passes": shape.num_passes}
    return {}


def _names(shape: BlockConfig) -> dict[str, tuple]:
    """Names of the tensors of heads to paths of parameters."""
    if isinstance(shape, DSparkConfig):
        return dspark.head_names(shape)
    if isinstance(shape, DFlash2Config):
        return dflash2.head_names(shape)
    if isinstance(shape, XPressConfig):
        return {
            f"refiner_head.{name}": ("refiner", *xpress.NAMES[theirs])
            for name, theirs in REFINER.items()
        }
    return {}
