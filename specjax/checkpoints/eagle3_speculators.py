"""EAGLE-3 heads in the layout of github.com/vllm-project/speculators, which vLLM reads.

The tensors are those of ``eagle3``, the first layer being ``layers.0``. The config says
``speculators_model_type: eagle3``, has the layer's config in ``transformer_layer_config`` (a
Llama's, or a Qwen3's with norms of queries and keys), the head's options beside it, and in
``speculators_config`` how many tokens are drafted and for which target (``verifier``).

``norm_before_residual`` is false by default, as in the code of speculators; in vLLM the default is
true. Files written by either, or here, state it. P-EAGLE heads have ``speculators_model_type:
peagle``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..drafters.eagle3 import Eagle3
from ..models.causal_lm import CausalLM
from ..models.translate import family_of
from . import eagle3
from .flat_keys import check_speculators, proposed_tokens
from .layers import layer_hf, rope_of
from .weights import check_integers

DESCRIPTION = "speculators' of EAGLE-3 and P-EAGLE (speculators_model_type: eagle3, peagle)"
DRAFTER, WEIGHTS_FILE = Eagle3, "model"
KINDS = (("eagle3", "Eagle3DraftModel"), ("peagle", "PEagleDraftModel"))
READ = (  # beside those that all files of speculators have
    "down_sample_ratio",  # this and some others of training, in files of before version 0.7
    "down_sample_ratio_min",
    "eagle_config",
    "embed_requires_grad",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "num_depths",
    "use_aux_hidden_state",
    "use_aux_norm",
    eagle3.IDS,
    *eagle3.MASKS,
)
_NO_DEPENDENCY = (
    "no other program that reads speculators' layout knows depths that read the draft; the layout "
    "'eagle3' holds such heads"
)


def matches(config: Mapping, names: set[str]) -> bool:
    return config.get("speculators_model_type") in ("eagle3", "peagle")


def load(config: Mapping, tensors: Mapping, target):
    layer = config.get("transformer_layer_config")
    if not layer:
        raise ValueError("the config.json of a speculator lacks transformer_layer_config")
    if config.get("dependency_size"):
        raise ValueError(f"dependency_size={config['dependency_size']}: {_NO_DEPENDENCY}")
    check_speculators(config, READ, inside=("fc_norm",))
    own = {key: value for key, value in config.items() if key not in ("model_type", "vocab_size")}
    drafter, params = eagle3.load(own | rope_of(config) | layer, tensors, target, typed=True)
    return _trained(drafter, config), params


def _trained(drafter: Eagle3, config: Mapping) -> Eagle3:
    """The drafter with the depth for which the file says that all depths at once were trained.

    Files of this project have the depth that was drafted in that place.
    """
    most = proposed_tokens(config)
    if drafter.config.mask_token is None or "specjax" in config or most is None:
        return drafter
    check_integers(speculative_tokens=most)
    if most < 1:
        raise ValueError(f"config.json: speculative_tokens={most}: it must be at least 1")
    return dataclasses.replace(drafter, trained_depth=most, topology=None)


def save(drafter: Eagle3, params, target=None) -> tuple[dict, dict]:
    if drafter.config.fc_bias or drafter.config.head_bias:
        raise ValueError(
            "format='eagle3-speculators': the layout has no biases of fc and LM head, nor has any "
            "other that holds this head; train a head without them"
        )
    if drafter.config.dependency_size:
        raise ValueError(
            f"format='eagle3-speculators': dependency_size={drafter.config.dependency_size}: "
            f"{_NO_DEPENDENCY}"
        )
    layer = drafter.config.layer
    if layer.qkv_bias != layer.o_bias:
        raise ValueError(
            f"format='eagle3-speculators': layer.qkv_bias={layer.qkv_bias}, o_bias={layer.o_bias}: "
            "one key of the layout, attention_bias, is for both; a bias of zeros changes nothing"
        )
    options = eagle3.options(drafter)
    options.pop("eagle_config", None)
    parallel = drafter.config.mask_token is not None
    kind, architecture = KINDS[parallel]
    inner = layer_hf(layer)
    if parallel and options["fc_norm"]:
        inner["fc_norm"] = True  # of P-EAGLE's, vLLM reads this key nowhere else
    config = options | {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": proposals(drafter, kind, target, "eagle3-speculators", "eagle3"),
        "embed_requires_grad": drafter.config.own_embedding,
        "tie_word_embeddings": False,
        "transformer_layer_config": inner,
    }
    tensors = eagle3.written(drafter, params, "layers.0.")
    if parallel:
        tensors["mask_hidden"] = tensors["mask_hidden"][None]  # [1, 1, k F] there
    return config, tensors


def proposals(drafter, kind: str, target, layout: str, other: str) -> dict:
    """``speculators_config`` of a file, without which vLLM refuses it.

    Args:
      drafter: what is written.
      kind: ``speculators_model_type``.
      target: the ``LM`` for which the drafter was trained, or None.
      layout: the name of the layout, for errors.
      other: the layout that an error proposes in its place.

    Raises:
      ValueError: the target is one of your own.
    """
    reads = drafter.target
    if not isinstance(reads, CausalLM):
        raise ValueError(
            f"format={layout!r} names the architecture of the target, and a target of your own "
            f"has none; take format={other!r}"
        )
    drafted = {"proposal_type": "greedy", "speculative_tokens": drafter.depth}
    return {
        "algorithm": kind,
        "proposal_methods": [drafted | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "default_proposal_method": "greedy",
        "verifier": {
            "name_or_path": None if target is None else target.name,
            "architectures": [family_of(reads.config.model_type).architecture],
        },
    }
