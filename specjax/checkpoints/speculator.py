"""MLP speculators in IBM's layout (fms-extras, vLLM), LSTM ones in Snowflake's (ArcticTraining).

MLP, of step i::

    emb.{i}.weight [V, D]   proj.{i}.weight [D, F or D]   ln.{i}.weight, ln.{i}.bias [D]
    head.{i}.weight [V, D]

LSTM, with ``{gate}`` forget, input, output and cell, ``proj.0`` of the first step::

    {gate}_emb.0.weight [V, D]   {gate}_proj.{0,1}.weight [D, F or D]
    cell_ln.0.weight, .bias [D]   state_ln.0.weight, .bias [D]   head.{i}.weight [V, D]

All names may begin with ``speculator.``. Weights that several steps (``tie_weights``) or gates
(``tie_lstm_embs``) share may have each of their names or only the first, which is what is written
here, except for LM heads of MLP speculators, which are written under each name.

A prefix layer, W wide and specific to this project, has the names of a Llama of one layer::

    prefix.fc.weight [W, D + F], for (token, hidden state)   prefix.layers.0...   prefix.norm.weight

and its config is ``"specjax": {"prefix": ...}``. Servers ignore tensors that they do not know and
would draft without the layer, so such a file has another ``model_type``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .._internal.file_keys import file_keys
from ..drafters.speculator import Speculator, SpeculatorConfig
from .layers import block_names, layer_config, layer_hf
from .weights import check_sizes, flags_of, params_of, tensors_of

DESCRIPTION = (
    "MLP and LSTM speculators' (emb.{i}.weight, proj.{i}.weight; forget_proj.{i}.weight, ...)"
)
DRAFTER, WEIGHTS_FILE = Speculator, "model"
_PREFIX = "speculator."
_LAYER = "prefix."
KEYS = {"n_predict": "num_heads", "inner_dim": "inner_size", "tie_weights": "tied"}
_GATES = ("forget", "input", "output", "cell")
_MARKS = ("proj.0.weight", "proj.0.0.weight", "forget_proj.0.weight")


def matches(config: Mapping, names: set[str]) -> bool:
    return any(_PREFIX * behind + mark in names for mark in _MARKS for behind in (0, 1))


def load(config: Mapping, tensors: Mapping, target):
    shape = config_of(config, tensors)
    check_sizes(target, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size)
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in tensors) else ""
    wanted = names(shape, prefix)
    shared = names(shape, prefix, shared=True)
    wanted |= {name: path for name, path in shared.items() if name in tensors}
    drafter = Speculator(config=shape, target=target.target)
    params = params_of(tensors, wanted, drafter.shapes, target.dtype)
    return drafter, params


def save(drafter: Speculator, params, target=None) -> tuple[dict, dict]:
    shape = drafter.config
    config = {
        "model_type": "mlp_speculator",
        "vocab_size": shape.vocab_size,
        "n_predict": shape.num_heads,
        "n_candidates": shape.num_heads,
        "top_k_tokens_per_head": [1] * shape.num_heads,
        "tie_weights": shape.tied,
        "scale_input": shape.scaled,
    }
    if shape.prefix is not None:
        config["specjax"] = {"prefix": layer_hf(shape.prefix)}
        config["model_type"] = "prefix_speculator"
    else:
        mlp = shape.cell == "mlp"
        name = "MLPSpeculatorPreTrainedModel" if mlp else "ArcticLSTMSpeculatorPreTrainedModel"
        config["architectures"] = [name]
    if shape.cell == "mlp":
        config |= {"emb_dim": shape.hidden_size, "inner_dim": shape.inner_size}
        # vLLM shares all weights but the LM heads, and leaves those that the file lacks random
        heads = [f"{_PREFIX}head.{i}.weight" for i in range(shape.num_heads)]
        every = names(shape, _PREFIX, shared=True)
        wanted = names(shape, _PREFIX) | {name: every[name] for name in heads}
        return config, tensors_of(params, wanted)
    config |= {"method": "sum_lstm", "tie_lstm_embs": shape.one_table}
    config["input_hidden_dim"] = shape.hidden_size
    config |= dict.fromkeys(("inner_dim", "proj_dim", "emb_dim"), str(shape.inner_size))
    return config, tensors_of(params, names(shape))


def config_of(config: Mapping, tensors: Iterable[str] = ()) -> SpeculatorConfig:
    """The shape that a published config describes, for a file with these ``tensors``.

    Raises:
      ValueError: the config is incomplete, or of a variant that is not supported.
    """
    method = config.get("method", "mlp")
    hidden = "input_hidden_dim" if "input_hidden_dim" in config else "emb_dim"
    lacking = [name for name in (hidden, "vocab_size", "n_predict") if name not in config]
    if lacking:
        raise ValueError(f"the config.json of a speculator lacks {', '.join(lacking)}")
    if method not in ("mlp", "sum_lstm"):
        raise ValueError(
            f"method={method!r} is not supported: 'sum_lstm' is, and MLP speculators in IBM's "
            "layout, without a method"
        )
    keys = ("inner_dim", "proj_dim", "emb_dim") if method == "sum_lstm" else ("inner_dim",)
    sizes = {str(config.get(key, 0)) for key in keys}
    if len(sizes) > 1 or not min(sizes).isdigit():
        raise ValueError(
            f"{', '.join(keys)}: {', '.join(sorted(sizes))}; only one size is supported"
        )
    layer = (config.get("specjax") or {}).get("prefix")
    if not isinstance(layer, Mapping | None):
        raise ValueError(f"config.json: prefix={layer!r} within specjax is no layer's config")
    flags = flags_of(config, tie_weights=False, scale_input=False, tie_lstm_embs=False)
    prefix = None if layer is None else layer_config(layer, tensors)
    with file_keys({hidden: "hidden_size"} | KEYS):
        return SpeculatorConfig(
            hidden_size=config[hidden],
            vocab_size=config["vocab_size"],
            inner_size=int(min(sizes)) or config[hidden],
            num_heads=config["n_predict"],
            cell="mlp" if method == "mlp" else "lstm",
            tied=flags["tie_weights"],
            scaled=flags["scale_input"],
            one_table=method == "mlp" or flags["tie_lstm_embs"],
            prefix=prefix,
        )


def names(shape: SpeculatorConfig, prefix: str = "", *, shared: bool = False) -> dict[str, tuple]:
    """Names of tensors in the file to paths of parameters.

    ``shared``: whether to include all further names of weights that steps or gates share.
    """
    named = {}
    lstm = shape.cell == "lstm"
    gates = [f"{gate}_" for gate in _GATES] if lstm else [""]
    for i in range(shape.num_heads):
        own = 0 if shape.tied else i
        named[f"head.{i}.weight"] = ("lm_heads", own, "weight")
        if not lstm:
            named[f"emb.{i}.weight"] = ("embeddings", own, 0)
            for leaf in ("weight", "bias"):
                named[f"ln.{i}.{leaf}"] = ("norms", own, leaf)
    for k, gate in enumerate(gates):
        for i in range(2 if lstm else shape.num_heads):
            own = min(i, 1) if shape.tied else i
            named[f"{gate}proj.{i}.weight"] = ("projections", own, k, "weight")
        if lstm:
            named[f"{gate}emb.0.weight"] = ("embeddings", 0, 0 if shape.one_table else k)
    if lstm:
        for leaf in ("weight", "bias"):
            named[f"cell_ln.0.{leaf}"] = ("norms", 0, leaf)
            named[f"state_ln.0.{leaf}"] = ("cell_norms", 0, leaf)
    if shape.prefix is not None:
        named[f"{_LAYER}fc.weight"] = ("fc", "weight")
        named[f"{_LAYER}norm.weight"] = ("prefix", "norm", "weight")
        named |= block_names(shape.prefix, 0, f"{_LAYER}layers.0.", ("prefix",))
    if not shared:
        first: dict[tuple, str] = {}
        for name, path in named.items():
            first.setdefault(path, name)
        named = {name: path for path, name in first.items()}
    return {prefix + name: path for name, path in named.items()}
