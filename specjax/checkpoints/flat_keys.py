"""Keys of a ``config.json``: those of Qwen3 or Llama, those of the layout, and no others.

The configs of most layouts are a copy of a model's config, of which some keys are changed and to
which the drafter's are added. So a key that is in neither may mean something to a program that this
project does not know, and is refused. In speculators' configs the copy stands in
``transformer_layer_config``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

QWEN3 = (  # and Llama's: what transformers writes, in versions 4 and 5
    "architectures",
    "attention_bias",
    "attention_dropout",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "id2label",
    "initializer_range",
    "intermediate_size",
    "is_encoder_decoder",
    "label2id",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_sliding_window",
    "vocab_size",
)
TARGETS = (  # about the target, in several layouts
    "num_target_layers",
    "target_model_name_or_path",
    "target_model_type",
)
SPECULATORS = (  # in all kinds of files of speculators
    "draft_vocab_size",
    "has_no_defaults_at_init",
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "target_hidden_size",
    "transformer_layer_config",
)
OWN = ("base_model_name_or_path", "mlp_bias", "qkv_bias", "specjax")  # what this project writes


def check_flat(config: Mapping, known: Collection[str] = (), place: str = "config.json") -> None:
    """Raises ValueError for a key that is in neither ``QWEN3`` nor ``known``, those of the layout;
    ``place``: where the keys stand.

    Keys whose value is null say nothing, and names that begin with an underscore are transformers'
    own notes.
    """
    accepted = {*QWEN3, *OWN, *known}
    for key, value in config.items():
        if value is not None and key not in accepted and not key.startswith("_"):
            are = "Known, beside the keys of Qwen3's config, are" if known else "Known are"
            raise not_understood(place, key, value, are, known or accepted)


def check_speculators(
    config: Mapping, known: Collection[str], inside: Collection[str] = ()
) -> None:
    """As ``check_flat``, of a file of speculators; ``inside``: further keys of the config of its
    layers."""
    part = "transformer_layer_config"
    check_flat(config, {*SPECULATORS, *known})
    check_flat(config[part], inside, part)


def proposed_tokens(config: Mapping):
    """How many tokens the first proposal method of a file of speculators drafts; None: it is not
    said.

    Raises:
      ValueError: the methods are no list of objects.
    """
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not all(isinstance(one, Mapping) for one in methods):
        raise ValueError(
            f"config.json: speculators_config: proposal_methods={methods!r}: it must be a list of "
            "objects"
        )
    return methods[0].get("speculative_tokens")


def check_part(place: str, own: Mapping, known: Collection[str], only: Mapping) -> None:
    """Raises ValueError for a key of a part of a config that is not understood.

    Args:
      place: the key of the part, for errors.
      own: the part. Keys whose value is null say nothing.
      known: keys that the layout reads.
      only: further keys to their accepted values; others are another architecture's.
    """
    for key, value in own.items():
        if value is None or key in known:
            continue
        if key not in only:
            raise not_understood(place, key, value, "Known are", {*known, *only})
        if value not in only[key]:
            raise ValueError(
                f"{place}: {key}={value!r} is not supported; accepted: "
                f"{', '.join(map(repr, only[key]))}"
            )


def not_understood(place: str, key: str, value, are: str, known: Iterable[str]) -> ValueError:
    """The error of a key that is not read; ``are`` begins the sentence that names the ``known``."""
    return ValueError(
        f"{place}: {key}={value!r} is not understood, and may change what the drafter computes. "
        f"{are} {', '.join(sorted(known))}; if it is about training or a server alone, delete it "
        "from config.json"
    )
