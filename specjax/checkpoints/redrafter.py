"""ReDrafters in their authors' layout (github.com/apple/ml-recurrent-drafter)::

    rnn_w.weight [F, F]   rnn_u.weight [F, F]   rnn_u.bias [F]          with ``rnn``
    input_proj.weight [X, 2 F]   input_proj.bias [X]                    unless X = exit_dim = 2 F
    lm_head.{i}.linear.weight [X, X]   lm_head.{i}.linear.bias [X]      L = num_draft_layers of them
    lm_head.{L}.weight [V, X]

The embeddings are those of the target. The authors' code keeps only the 50 most likely tokens,
which their files do not state; a file written here states any other number, ``"specjax": {"kept":
n}``.
"""

from __future__ import annotations

from collections.abc import Mapping

from .._internal.file_keys import file_keys
from ..drafters.redrafter import ReDrafter, ReDrafterConfig
from .weights import check_integers, check_sizes, flags_of, params_of, tensors_of

DESCRIPTION = "ReDrafter's (rnn_u.weight, lm_head.{i}.linear.weight)"
DRAFTER, WEIGHTS_FILE = ReDrafter, "model"
_TYPE = "recurrent_drafting_drafter"
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "exit_dim": "exit_size",
    "num_draft_layers": "num_layers",
}


def matches(config: Mapping, names: set[str]) -> bool:
    return config.get("model_type") == _TYPE or {"rnn_u.weight", "rnn_w.weight"} <= names


def load(config: Mapping, tensors: Mapping, target):
    lacking = [name for name in _KEYS if name not in config]
    if lacking:
        raise ValueError(f"the config.json of a ReDrafter lacks {', '.join(lacking)}")
    kept = (config.get("specjax") or {}).get("kept", ReDrafterConfig.kept)
    check_integers(**{name: config[name] for name in _KEYS}, kept=kept)
    with file_keys(_KEYS):
        shape = ReDrafterConfig(
            **{name: config[key] for key, name in _KEYS.items()},
            recurrent=flags_of(config, rnn=False)["rnn"],
            kept=kept,
        )
    check_sizes(target, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size)
    drafter = ReDrafter(config=shape, target=target.target)
    params = params_of(tensors, names(shape), drafter.shapes, target.dtype)
    return drafter, params


def save(drafter: ReDrafter, params, target=None) -> tuple[dict, dict]:
    shape = drafter.config
    config = {
        "model_type": _TYPE,
        "architectures": ["Drafter"],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "exit_dim": shape.exit_size,
        "num_draft_layers": shape.num_layers,
        "rnn": shape.recurrent,
    }
    if shape.kept != ReDrafterConfig.kept:
        config["specjax"] = {"kept": shape.kept}
    return config, tensors_of(params, names(shape))


def names(shape: ReDrafterConfig) -> dict[str, tuple]:
    """Names of tensors in the file to paths of parameters."""
    named: dict[str, tuple] = {f"lm_head.{shape.num_layers}.weight": ("lm_head", "weight")}
    if shape.recurrent:
        named["rnn_w.weight"] = ("token", "weight")
    for leaf in ("weight", "bias"):
        for i in range(shape.num_layers):
            named[f"lm_head.{i}.linear.{leaf}"] = ("layers", i, leaf)
        if shape.recurrent:
            named[f"rnn_u.{leaf}"] = ("state", leaf)
        if shape.exit_size != 2 * shape.hidden_size:
            named[f"input_proj.{leaf}"] = ("projection", leaf)
    return named
