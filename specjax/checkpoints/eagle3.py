"""EAGLE-3 heads in their authors' layout (github.com/SafeAILab/EAGLE), which is SGLang's.

A head of one layer, H wide, for a target F wide, over a draft vocabulary of Vd tokens, has ::

    fc.weight [H, 3 F]   norm.weight [H]   lm_head.weight [Vd, H]
    midlayer.hidden_norm.weight [H]   midlayer.(as Llama's, q, k and v_proj reading 2 H)
    d2t int64 [Vd]   t2d bool [V]   embed_tokens.weight [V, H], perhaps

``midlayer`` may be called ``layers.0`` (vLLM); further layers are ``layers.{i}``. ``d2t`` holds
differences: token ``i`` of the draft vocabulary is the target's ``i + d2t[i]``. The config is a
Llama's with ``draft_vocab_size``, ``target_hidden_size`` where F is not H, and, written by EAGLE
3.1 or other trainers, ``fc_norm`` (``fc_norm.{i}.weight [F]``), ``norm_before_fc``
(``input_norm.weight [3 F]``), ``norm_output`` and ``norm_before_residual``, all false by default.

The hidden states that are read: ``eagle_aux_hidden_state_layer_ids`` counts them as
``hidden_states[i]`` of Hugging Face (vLLM); inside of ``eagle_config`` it counts layers, whose
outputs are ``hidden_states[i + 1]`` (SGLang); without either they are 2, n // 2 and n - 3 of n
layers. All programs concatenate them in the order of the layers. Keys of ``eagle_config`` other
than ``OWN`` and ``ONLY`` are refused.

A P-EAGLE head has a ``mask_hidden [1, 3 F]`` too, and its config says which token's embedding
stands for drafted tokens: ``mask_token_id`` (speculators), ``pard_token`` or ``ptd_token_id``
(vLLM).

A P-EAGLE head whose depths read the draft (``dependency.py``) has ``dependency.norm.weight [E]``,
``dependency.{gate,up}_proj.weight [R, E + 2 H]`` and ``dependency.down_proj.weight [H, R]``, E the
width of the embeddings, and a config with ``dependency_size`` R. This is an extension of the layout
that no server reads, so the config names an architecture that no server knows.

A table of embeddings that equals the target's is not kept twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from .._internal.file_keys import file_keys
from ..drafters.eagle3 import Eagle3, Eagle3Config, check_vocab
from ..drafters.peagle import PEagle
from ..models.quantize import is_quantized
from .eagle import num_layers
from .flat_keys import check_part
from .layers import block_names, layer_config, layer_hf
from .weights import (
    check_integers,
    check_sizes,
    embedding_table,
    flags_of,
    params_of,
    same_table,
    tensors_of,
)

DESCRIPTION = "EAGLE-3's (fc.weight, midlayer... or layers.0..., lm_head.weight, d2t)"
DRAFTER, WEIGHTS_FILE = Eagle3, "model"
DEPENDENT = "DependentPEagleDraftModel"
_EMBEDDING = "embed_tokens.weight"
_BLANK = "mask_hidden"
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
_MAPS = ("d2t", "t2d")
IDS = "eagle_aux_hidden_state_layer_ids"
OWN = ("norm_before_fc", "parallel_draft_heads_num_layers", "use_aux_hidden_state", IDS)
ONLY = {  # further keys of ``eagle_config``, which Model-Optimizer writes
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
}
_DEEPSPECS = ("target_layer_ids", "ttt_length")
_OLD_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")  # of fc_norm, in older SGLang


def matches(config: Mapping, names: set[str]) -> bool:
    first = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    if "speculators_model_type" in config or is_deepspecs(config, names):
        return False
    return "fc.weight" in names and any(name in names for name in first)


def is_deepspecs(config: Mapping, names: set[str]) -> bool:
    """Whether heads are of DeepSpec's layout (``eagle3_deepspec.py``), some of whose names of
    tensors are those of this one."""
    said = "speculators_model_type" not in config and bool({*_DEEPSPECS} & {*config})
    return said and {"fc.weight", "layers.0.hidden_norm.weight"} <= names


def load(config: Mapping, tensors: Mapping, target, *, typed: bool = False):
    """As ``loading`` asks of a layout; ``typed``: see ``layer_config``."""
    own = config.get("eagle_config") or {}
    check_part("eagle_config", own, OWN, ONLY)
    reads = flags_of(config, use_aux_hidden_state=True)
    if not all(flags_of(own, **reads).values()):
        raise ValueError(
            "use_aux_hidden_state=false: an EAGLE-3 head that reads nothing but the last hidden "
            "state is not supported"
        )
    vocab = target.target.vocab_size
    layer = layer_config(
        {**config, "num_hidden_layers": num_layers(tensors)},
        tensors,
        typed=typed,
        model_type="llama",
        vocab_size=vocab,
    )
    size = config.get("target_hidden_size") or layer.hidden_size
    check_sizes(target, hidden_size=size, vocab_size=layer.vocab_size)
    layers = target_layers(config, target)
    said = config.get("draft_vocab_size") or vocab
    check_integers(draft_vocab_size=said, target_hidden_size=size)
    head = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else 0
    flags = flags_of(config, norm_before_residual=False, norm_output=False)
    dependency = config.get("dependency_size") or 0
    check_integers(dependency_size=dependency)
    mask = next((key for key in MASKS if config.get(key) is not None), MASKS[0])
    with file_keys({mask: "mask_token", "target_hidden_size": "feature_size"}):
        shape = Eagle3Config(
            layer=layer,
            feature_size=size,
            num_features=len(layers),
            draft_vocab_size=said if head else 0,
            norm_before_residual=flags["norm_before_residual"],
            fc_norm=_norms(config, own),
            normed_output=flags["norm_output"],
            fc_bias="fc.bias" in tensors,
            head_bias="lm_head.bias" in tensors,
            own_embedding=_has_own_table(config, tensors, target),
            mask_token=_mask(config, tensors, size * len(layers)),
            dependency_size=dependency,
        )
    if not head and said != vocab:
        raise ValueError(
            f"draft_vocab_size={said}, but lm_head.weight is missing: only a head over all {vocab} "
            "tokens can use the target's"
        )
    ids = vocabulary(tensors, said, vocab)
    kind = Eagle3 if shape.mask_token is None else PEagle
    drafter = kind(config=shape, target=target.target, layers=layers)
    others = (_EMBEDDING, _BLANK, *_MAPS)
    params = params_of(
        tensors, names(shape, *spelling(tensors)), drafter.shapes, target.dtype, others
    )
    if ids is not None:
        params["vocab"] = jnp.asarray(ids, jnp.int32)
    if shape.mask_token is not None:
        params[_BLANK] = jnp.asarray(tensors[_BLANK].reshape(-1), target.dtype)
    return drafter, params


def save(drafter: Eagle3, params, target=None) -> tuple[dict, dict]:
    shape, biases = drafter.config, ("qkv_bias", "o_bias", "mlp_bias")
    wrong = [f"layer.{key}" for key in ("qk_norm", *biases) if getattr(shape.layer, key)]
    other = "no layout holds them beside dependency_size; train a head without one of the two"
    if not shape.dependency_size:  # heads with one are read by no other program
        other = "take 'eagle3-speculators'"
        if shape.head_bias or shape.fc_bias:
            other = "no layout holds biases of fc and LM head; train a head without them"
        wrong += [key for key in ("head_bias", "fc_bias") if getattr(shape, key)]
        if shape.norm_before_residual:
            wrong.append("norm_before_residual")
        if shape.fc_norm == "whole":
            wrong.append("fc_norm='whole'")
        if shape.own_embedding and shape.feature_size == shape.hidden_size:
            wrong.append("own_embedding")  # SGLang puts the target's in its place
        if shape.layer.num_layers > 1 and shape.mask_token is None:
            wrong.append(f"layer.num_layers={shape.layer.num_layers}")
    if wrong:
        raise ValueError(
            f"format='eagle3': not all that read this layout know {', '.join(wrong)}; {other}"
        )
    named = DEPENDENT if shape.dependency_size else "LlamaForCausalLMEagle3"
    config = layer_hf(shape.layer) | {"architectures": [named]} | options(drafter)
    if shape.dependency_size:
        config["dependency_size"] = shape.dependency_size
    if not shape.draft_vocab_size:
        config["draft_vocab_size"] = None  # with a number SGLang's own LM head stays random
    first = "midlayer." if shape.layer.num_layers == 1 else "layers.0."
    return config, written(drafter, params, first)


def options(drafter: Eagle3) -> dict:
    """The config keys of EAGLE-3, at the top level of the config."""
    shape, layers = drafter.config, drafter.features
    config = {
        "draft_vocab_size": shape.draft_vocab_size or shape.vocab_size,
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.fc_norm == "whole",
        "fc_norm": shape.fc_norm == "each",
        "norm_output": shape.normed_output,
        IDS: list(layers),
    }
    if layers != tuple(sorted({*layers})):
        raise ValueError(
            f"layers={layers}: servers concatenate hidden states in the order of the layers, each "
            "once; train a head on ascending ones"
        )
    if shape.mask_token is not None:
        config |= dict.fromkeys(MASKS, shape.mask_token)
    if shape.feature_size != shape.hidden_size:
        config["target_hidden_size"] = shape.feature_size
    if layers != unsaid_layers(drafter.target.num_layers):
        ids = [i - 1 for i in layers]
        config["eagle_config"] = {"use_aux_hidden_state": True, IDS: ids}
    return config


def written(drafter: Eagle3, params, first: str) -> dict[str, np.ndarray]:
    """The tensors by name; ``first``: what the names of the first layer begin with."""
    shape = drafter.config
    tensors = tensors_of(params, names(shape, first))
    if shape.own_embedding:
        tensors[_EMBEDDING] = np.asarray(params["embedding"])
    if shape.has_vocab:
        tensors |= vocabulary_tensors(params["vocab"], shape.vocab_size)
    if shape.mask_token is not None:
        tensors[_BLANK] = np.asarray(params[_BLANK])[None]
    return tensors


def names(shape: Eagle3Config, first: str = "midlayer.", old_norms: bool = False):
    """Names of tensors in the file to paths of parameters.

    ``first``: what names of the first layer begin with; ``old_norms``: whether norms of features
    have the names of older SGLang.
    """
    named: dict[str, tuple] = {f"{name}.weight": (name, "weight") for name in ("fc", "norm")}
    if shape.fc_bias:
        named["fc.bias"] = ("fc", "bias")
    if shape.draft_vocab_size:
        named["lm_head.weight"] = ("lm_head", "weight")
        if shape.head_bias:
            named["lm_head.bias"] = ("lm_head", "bias")
    if shape.fc_norm == "whole":
        named["input_norm.weight"] = ("fc_norm", "weight")
    if shape.fc_norm == "each":
        for i in range(shape.num_features):
            name = _OLD_NORMS[i] if old_norms else f"fc_norm.{i}"
            named[f"{name}.weight"] = ("fc_norms", i, "weight")
    if shape.own_embedding:
        named[_EMBEDDING] = ("embedding",)
    for i in range(shape.layer.num_layers):
        named |= block_names(shape.layer, i, f"layers.{i}." if i else first, ())
    named[f"{first}hidden_norm.weight"] = ("blocks", 0, "hidden_norm", "weight")
    if shape.dependency_size:
        parts = {"norm": "norm", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
        for name, part in parts.items():
            named[f"dependency.{name}.weight"] = ("dependency", part, "weight")
    return named


def spelling(tensors: Mapping) -> tuple[str, bool]:
    """The arguments ``first`` and ``old_norms`` of ``names`` for a file."""
    first = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
    return first, any(name.startswith(_OLD_NORMS) for name in tensors)


def unsaid_layers(count: int) -> tuple[int, ...]:
    """The hidden states that all programs read of a target with ``count`` layers by default; if it
    has six layers or fewer, these are not three."""
    return 2, count // 2, count - 3


def target_layers(config: Mapping, target) -> tuple[int, ...]:
    """Returns the hidden states of the target that are read, as ``hidden_states[i]``, ascending.

    Raises:
      ValueError: the target lacks one of them, or the config contradicts itself.
    """
    count = target.target.num_layers
    inside, ids = (config.get("eagle_config") or {}).get(IDS), config.get(IDS)
    for given in (inside, ids):
        if given and not (isinstance(given, list) and all(type(i) is int for i in given)):
            raise ValueError(f"{IDS}={given!r}: it must be a list of whole numbers")
    if inside:
        shifted = [i + 1 for i in inside]
        if ids and sorted(ids) != sorted(shifted):
            raise ValueError(
                f"{IDS}={ids} counts hidden states from 0, the embeddings, and eagle_config's "
                f"{inside} layers from 0, which makes {shifted}: they contradict each other; "
                "delete the wrong one"
            )
        ids = shifted
    layers = tuple(sorted(ids or unsaid_layers(count)))
    if len({*layers}) < len(layers) or not all(0 <= i <= count for i in layers):
        told = f"{IDS}={list(inside or ids)}" if ids else f"no {IDS}, so {list(layers)}"
        raise ValueError(
            f"{told}: {target.name} has {count} layers, its hidden states are 0, the embeddings, "
            f"to {count}, each read once; load the target that the head belongs to"
        )
    return layers


def vocabulary(tensors: Mapping, size: int, vocab: int) -> np.ndarray | None:
    """int64 ``[size]``, the target's id of each token of the draft vocabulary; None: all tokens.

    Raises:
      ValueError: ``d2t`` is missing, as ``check_vocab`` does, or contradicted by ``t2d``.
    """
    found = tensors.get("d2t")
    if found is None:
        if size != vocab:
            raise ValueError(
                f"draft_vocab_size={size} of {vocab}, but the file has no d2t, which says which "
                "tokens these are: save the head again with it (int64, target id = i + d2t[i])"
            )
        return None
    ids = found if found.shape != (size,) else found.astype(np.int64) + np.arange(size)
    check_vocab(ids, size, vocab)
    mask, marks = tensors.get("t2d"), np.isin(np.arange(vocab), ids)
    if mask is not None and not np.array_equal(mask.astype(bool), marks):
        raise ValueError(
            f"t2d [{len(mask)}] marks other tokens than those of d2t: one of them belongs to "
            "another head"
        )
    if size == vocab:
        if np.any(found):
            raise ValueError("d2t of a head over the whole vocabulary must be zeros; leave it out")
        return None
    return ids


def vocabulary_tensors(vocab, vocab_size: int) -> dict[str, np.ndarray]:
    """``d2t`` and ``t2d`` of a draft vocabulary, int ``[Vd]``, the target's id of each token."""
    ids = np.asarray(vocab, np.int64)
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(vocab_size), ids)}


def _mask(config: Mapping, tensors: Mapping, size: int) -> int | None:
    """The token that stands for drafted ones in a P-EAGLE head; None for any other head.

    Raises:
      ValueError: the file has the token without ``mask_hidden`` or the reverse, or it is misshapen.
    """
    given = {key: config[key] for key in MASKS if config.get(key) is not None}
    check_integers(**given)
    said = {*given.values()}
    if len(said) > 1:
        raise ValueError(
            f"config.json: {given}: these are one number, the id of the token that stands for "
            "drafted ones; give the same at each key"
        )
    if not said and _BLANK not in tensors:
        return None
    if len(said) != 1 or _BLANK not in tensors:
        raise ValueError(
            f"a P-EAGLE head has {_BLANK} among its weights ({'yes' if _BLANK in tensors else 'no'}"
            f" here) and one id of a mask in its config ({', '.join(MASKS)}; here "
            f"{sorted(said) or 'none'}): give both, or neither for an EAGLE-3 head"
        )
    found = tensors[_BLANK].shape
    if found[-1] != size or np.prod(found) != size:
        raise ValueError(f"{_BLANK} is {[*found]}, expected [1, {size}]")
    return said.pop()


def _norms(config: Mapping, own: Mapping) -> str | None:
    each = any(flags_of(config, fc_norm=False, use_aux_norm=False).values())
    whole = flags_of(own, **flags_of(config, norm_before_fc=False))["norm_before_fc"]
    if each and whole:
        raise ValueError("fc_norm and norm_before_fc exclude each other; the config has both")
    return "each" if each else "whole" if whole else None


def _has_own_table(config: Mapping, tensors: Mapping, target) -> bool:
    """Whether the embeddings in a file are others than the target's; of a quantized target, whether
    the config does not deny it."""
    trained = flags_of(config, embed_requires_grad=None)["embed_requires_grad"]
    if _EMBEDDING not in tensors:
        return False
    table, found = embedding_table(target), tensors[_EMBEDDING]
    if is_quantized(table):
        return trained is not False or found.shape != table.shape
    return not same_table(found, table)
