"""Config files of Hugging Face, in the layouts of transformers 4 and 5, to and from ours."""

import dataclasses
import json
import math

import jax
import pytest
from checkpoints import CASES, GOLDEN, SMALL

from specjax.models import load_config
from specjax.models.decoder import abstract
from specjax.models.families import FAMILIES
from specjax.models.translate import config_from_hf, config_to_hf

LLAMA = json.loads((GOLDEN / "llama" / "config.json").read_text())
LLAMA = {k: v for k, v in LLAMA.items() if not k.startswith("rope")}
QWEN = LLAMA | {"model_type": "qwen2"}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize("case", CASES)
def test_a_config_survives_the_way_to_hugging_face_and_back(case):
    config = load_config(GOLDEN / case)
    again = json.loads(json.dumps(config_to_hf(config)))
    assert config_from_hf(again) == config


PUBLISHED = {
    "gpt2": (
        124_439_808,
        dict(model_type="gpt2", vocab_size=50257, n_ctx=1024, n_positions=1024, n_embd=768)
        | dict(n_head=12, n_layer=12, activation_function="gelu_new", layer_norm_epsilon=1e-5),
    ),
    "TinyLlama-1.1B": (
        1_100_048_384,
        dict(model_type="llama", vocab_size=32000, hidden_size=2048, intermediate_size=5632)
        | dict(num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4)
        | dict(rms_norm_eps=1e-5, rope_scaling=None, tie_word_embeddings=False, pretraining_tp=1),
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        dict(model_type="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192)
        | dict(num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
        | dict(tie_word_embeddings=True, attention_bias=False, mlp_bias=False, rope_theta=5e5)
        | dict(max_position_embeddings=131072, rope_scaling=LLAMA3 | {"rope_type": "llama3"}),
    ),
    "Qwen2.5-0.5B": (
        494_032_768,
        dict(model_type="qwen2", vocab_size=151936, hidden_size=896, intermediate_size=4864)
        | dict(num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2)
        | dict(tie_word_embeddings=True, sliding_window=32768, max_window_layers=24)
        | dict(use_sliding_window=False, use_mrope=False, rope_theta=1e6),
    ),
    "Qwen3-0.6B": (
        596_049_920,
        dict(model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072)
        | dict(num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
        | dict(tie_word_embeddings=True, attention_bias=False, sliding_window=None)
        | dict(use_sliding_window=False, max_window_layers=28, rope_theta=1e6),
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        dict(model_type="mistral", vocab_size=32000, hidden_size=4096, intermediate_size=14336)
        | dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
        | dict(sliding_window=4096, rms_norm_eps=1e-5, rope_theta=1e4, hidden_act="silu"),
    ),
    "gemma-2-2b": (
        2_614_341_888,
        dict(model_type="gemma2", vocab_size=256000, hidden_size=2304, intermediate_size=9216)
        | dict(num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4, head_dim=256)
        | dict(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096)
        | dict(query_pre_attn_scalar=256, hidden_act="gelu_pytorch_tanh", rope_theta=1e4),
    ),
    "gemma-3-1b": (
        999_885_952,
        dict(model_type="gemma3_text", vocab_size=262144, hidden_size=1152, rope_scaling=None)
        | dict(intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4)
        | dict(num_key_value_heads=1, head_dim=256, sliding_window=512, sliding_window_pattern=6)
        | dict(rope_theta=1000000, rope_local_base_freq=10000, query_pre_attn_scalar=256),
    ),
    "Phi-3-mini-4k": (
        3_821_079_552,
        dict(model_type="phi3", vocab_size=32064, hidden_size=3072, intermediate_size=8192)
        | dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32)
        | dict(sliding_window=2047, original_max_position_embeddings=4096, rope_scaling=None),
    ),
    "opt-125m": (
        125_239_296,
        dict(model_type="opt", vocab_size=50272, hidden_size=768, ffn_dim=3072, dropout=0.1)
        | dict(num_hidden_layers=12, num_attention_heads=12, max_position_embeddings=2048)
        | dict(do_layer_norm_before=True, word_embed_proj_dim=768, prefix="</s>"),
    ),
    "pythia-160m": (
        162_322_944,
        dict(model_type="gpt_neox", vocab_size=50304, hidden_size=768, intermediate_size=3072)
        | dict(num_hidden_layers=12, num_attention_heads=12, max_position_embeddings=2048)
        | dict(rotary_pct=0.25, rotary_emb_base=10000, use_parallel_residual=True),
    ),
}

PUBLISHED |= {
    "Mixtral-8x7B": (
        46_702_792_704,
        dict(model_type="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336)
        | dict(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
        | dict(num_local_experts=8, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e6)
        | dict(max_position_embeddings=32768, sliding_window=None),
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        dict(model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144)
        | dict(num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
        | dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
        | dict(norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1)
        | dict(use_sliding_window=False, sliding_window=None, max_window_layers=48),
    ),
    "DeepSeek-V2-Lite": (
        15_706_484_224,
        dict(model_type="deepseek_v2", vocab_size=102400, hidden_size=2048)
        | dict(intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=27)
        | dict(num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512)
        | dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, n_routed_experts=64)
        | dict(n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1)
        | dict(topk_method="greedy", n_group=1, topk_group=1, scoring_func="softmax"),
    ),
    "DeepSeek-V3": (
        671_026_419_200,
        dict(model_type="deepseek_v3", vocab_size=129280, hidden_size=7168)
        | dict(intermediate_size=18432, moe_intermediate_size=2048, num_hidden_layers=61)
        | dict(num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536)
        | dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
        | dict(n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8)
        | dict(topk_group=4, first_k_dense_replace=3, topk_method="noaux_tc")
        | dict(scoring_func="sigmoid", moe_layer_freq=1, num_nextn_predict_layers=1),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_their_published_number_of_parameters(name):
    count, hf = PUBLISHED[name]
    shapes = jax.tree.leaves(abstract(config_from_hf(hf))[1])
    assert sum(math.prod(x.shape) for x in shapes) == count


def test_rope_settings_read_alike_in_both_layouts():
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}}
    older = LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}}
    new = LLAMA | {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}}
    assert config_from_hf(old) == config_from_hf(older) == config_from_hf(new)
    assert config_from_hf(new).rope_theta == 5e5
    assert dict(config_from_hf(new).rope_scaling) == LLAMA3 | {"rope_type": "llama3"}


def test_a_plain_rope_needs_no_scaling():
    assert config_from_hf(LLAMA).rope_scaling is None
    assert config_from_hf(LLAMA).rope_theta == 10_000.0
    named = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert config_from_hf(named) == config_from_hf(LLAMA | {"rope_theta": 1e6})


def test_yarn_takes_its_original_context_where_transformers_does():
    scaling = {"rope_type": "yarn", "factor": 4.0}
    original = "original_max_position_embeddings"
    inside, outside = scaling | {original: 16}, LLAMA | {original: 16}
    configs = [LLAMA | {"rope_scaling": inside}, outside | {"rope_scaling": scaling}]
    for config in map(config_from_hf, configs):
        assert dict(config.rope_scaling)[original] == 16
    assert config_from_hf(LLAMA | {"rope_scaling": scaling}).context_length == 4 * 64


def test_keys_that_a_scaling_does_not_use_are_dropped():
    plain = {"rope_type": "linear", "factor": 2.0}
    more = plain | {"mrope_section": [1, 2], "attention_factor": None}
    configs = [config_from_hf(LLAMA | {"rope_scaling": s}) for s in (plain, more)]
    assert configs[0] == configs[1]
    assert hash(configs[0]) == hash(configs[1])


def test_left_out_keys_mean_what_transformers_assumes():
    sparse = {k: LLAMA[k] for k in ("model_type", "vocab_size", "hidden_size", "intermediate_size")}
    config = config_from_hf(sparse | {"num_hidden_layers": 2, "num_attention_heads": 4})
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 8, 1e-6)
    assert not config.tie_embeddings and config.eos_ids == ()
    mistral = LLAMA | {"model_type": "mistral", "num_key_value_heads": None}
    assert config_from_hf(mistral).num_kv_heads == LLAMA["num_attention_heads"]
    gpt2 = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    assert config_from_hf(gpt2).intermediate_size == 128
    assert config_from_hf(gpt2).tie_embeddings


@pytest.mark.parametrize("eos, expected", [(None, ()), (2, (2,)), ([2, 3], (2, 3))])
def test_end_of_text_is_one_id_or_several_or_none(eos, expected):
    config = config_from_hf(LLAMA | {"eos_token_id": eos})
    assert config.eos_ids == expected
    assert config_to_hf(config)["eos_token_id"] == eos


def test_an_unknown_model_type_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="'mamba'") as error:
        config_from_hf(LLAMA | {"model_type": "mamba"})
    assert all(name in str(error.value) for name in FAMILIES)
    with pytest.raises(ValueError, match="model_type=None"):
        config_from_hf({})


def windows(hf):
    config = config_from_hf(hf)
    return [config.window_of(i) for i in range(config.num_layers)]


def test_a_sliding_window_counts_only_where_transformers_would_use_it():
    window = {"sliding_window": 8, "max_window_layers": 1}
    expected = config_from_hf(QWEN)
    assert config_from_hf(QWEN | window) == expected  # off by default
    assert config_from_hf(QWEN | window | {"use_sliding_window": False}) == expected
    on = window | {"use_sliding_window": True}
    assert config_from_hf(QWEN | on | {"max_window_layers": 2}) == expected  # beyond the last
    assert config_from_hf(QWEN | on | {"sliding_window": None}) == expected
    assert windows(QWEN | on) == [None, 8]
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    assert windows(QWEN | on | kinds) == [8, None]
    assert windows(LLAMA | on) == [None, None]  # Llama has none


def test_every_family_fills_left_out_windows_as_transformers_does():
    seven = LLAMA | {"num_hidden_layers": 7, "head_dim": 8}
    far = {"sliding_window": 99}
    assert windows(seven | {"model_type": "mistral"}) == [4096] * 7
    assert windows(seven | {"model_type": "mistral", "sliding_window": None}) == [None] * 7
    assert windows(seven | {"model_type": "phi3"}) == [None] * 7
    assert windows(seven | far | {"model_type": "phi3"}) == [99] * 7
    assert windows(seven | far | {"model_type": "gemma2"}) == [99, None, 99, None, 99, None, 99]
    gemma3 = seven | far | {"model_type": "gemma3_text"}
    assert windows(gemma3) == [99, 99, 99, 99, 99, None, 99]
    assert windows(gemma3 | {"sliding_window_pattern": 3}) == [99, 99, None, 99, 99, None, 99]
    with pytest.raises(ValueError, match="sliding_window=None, but layers of it are local"):
        windows(gemma3 | {"sliding_window": None})


def test_a_mistral_with_types_of_layers_is_read_as_transformers_reads_it():
    """As a Ministral, some of whose layers see all; without types it stays a Mistral."""
    mistral = LLAMA | {"model_type": "mistral", "sliding_window": 8}
    mixed = mistral | {"layer_types": ["full_attention", "sliding_attention"]}
    assert windows(mixed) == [None, 8]
    config = config_from_hf(mixed)
    assert config_from_hf(config_to_hf(config)) == config
    assert "layer_types" not in config_to_hf(config_from_hf(mistral))


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_gemma_whose_layers_all_see_everything_is_written_with_its_usual_window(family):
    """transformers makes the mask of a window in any case, and fails where the window is null."""
    whole = {"model_type": family, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    config = config_from_hf(LLAMA | whole | {"sliding_window": 8})
    written = config_to_hf(config)
    assert config.window is None and "sliding_window" not in written
    assert written["layer_types"] == ["full_attention"] * 2


def test_global_and_local_layers_of_gemma_have_rotations_of_their_own():
    gemma = LLAMA | {"model_type": "gemma3_text"}
    old = {"rope_theta": 5e5, "rope_local_base_freq": 700.0}
    scaling = {"rope_type": "linear", "factor": 8.0}
    new = {"sliding_attention": {"rope_type": "default", "rope_theta": 700.0}}
    new |= {"full_attention": scaling | {"rope_theta": 5e5}}
    config = config_from_hf(gemma | old | {"rope_scaling": scaling})
    assert config == config_from_hf(gemma | {"rope_parameters": new})
    assert (config.rope_theta, config.local_rope_theta) == (5e5, 700.0)
    usual = config_from_hf(gemma)
    assert (usual.rope_theta, usual.local_rope_theta) == (1e6, 1e4)


def test_long_factors_are_kept_but_the_context_is_that_of_the_short_ones():
    factors = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    phi3 = LLAMA | {"model_type": "phi3", "original_max_position_embeddings": 16}
    config = config_from_hf(phi3 | {"rope_scaling": factors})
    assert (config.max_positions, config.context_length) == (64, 16)
    assert config_to_hf(config)["rope_scaling"] == factors | {"type": "longrope"}
    with pytest.raises(ValueError, match="short_factor has 5 numbers, one for each of 4"):
        config_from_hf(phi3 | {"rope_scaling": factors | {"short_factor": [1.0] * 5}})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "opt", "ffn_dim": 64, "do_layer_norm_before": False}, "norm_before=False"),
        ({"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 16}, "proj_dim=16.*equal"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 9.0}, "softcapping=9.0"),
        ({"model_type": "mistral", "sliding_window": "8"}, "sliding_window='8': .* whole number"),
        ({"model_type": "qwen2", "use_sliding_window": "false"}, "use_sliding_window='false'"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None},
            "max_window_layers=None must be a whole number",
        ),
        ({"model_type": "mistral", "layer_types": 2}, "layer_types=2 is not supported"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": "6"}, "window_pattern='6'"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types.*each of 2"),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"] * 2}, "sliding_attention,"),
        ({"model_type": "phi3", "rope_scaling": {"rope_type": "yarn"}}, "known: default, longrope"),
        ({"model_type": "gpt_neox", "rotary_pct": 0.1}, "rotary_fraction=0.1"),
    ],
    ids=lambda x: "" if isinstance(x, str) else "-".join(map(str, [*x.values()][:1] + [*x][-1:])),
)
def test_variants_of_a_family_that_are_not_implemented_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(LLAMA | change)


def test_windows_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="window=0"):
        dataclasses.replace(SMALL, window=0)
    with pytest.raises(ValueError, match="each of 2 layers"):
        dataclasses.replace(SMALL, window=4, local_layers=(True,))
    with pytest.raises(ValueError, match="window=None: give a window"):
        dataclasses.replace(SMALL, local_layers=(True, False))
    with pytest.raises(ValueError, match="no layer is local"):
        dataclasses.replace(SMALL, window=4, local_layers=(False, False))
    every = dataclasses.replace(SMALL, window=4, local_layers=(True, True))
    assert every == dataclasses.replace(SMALL, window=4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_act": "xielu"}, "xielu.*known: silu"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_attention_heads": "4"}, "num_attention_heads='4'"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_attention_heads": 5, "head_dim": None}, "5 heads do not divide"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized.*'awq'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rms_norm_eps": "1e-05"}, "rms_norm_eps='1e-05': it must be a number"),
        ({"eos_token_id": "2"}, "eos_token_id=.*'2'.*whole numbers"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': it must be True or False"),
        ({"hidden_act": ["silu"]}, "activation .*silu"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' is no object"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2' of rope_type='linear'"),
        ({"quantization_config": "gptq"}, "quantization_config='gptq' is no object"),
        ({"is_causal": False}, "is_causal=False.*accepted: True"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 1.0}}}, "per_layer_config="),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 4.0},
                    "sliding_attention": {"rope_type": "default"},
                }
            },
            "rope_type='linear' of full_attention, and none of sliding_attention",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'.*known: default"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor, high"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_is_not_implemented_or_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(LLAMA | change)


@pytest.mark.parametrize(
    "case, change, message",
    [
        ("qwen3_moe", {"mlp_only_layers": 2}, "mlp_only_layers=2: it must hold whole numbers"),
        ("deepseek_v3", {"first_k_dense_replace": "1"}, "first_k_dense_replace='1': it must be"),
        ("deepseek_v3", {"n_group": 0}, "n_group=0: it must be at least 1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_settings_of_experts_that_make_no_sense_are_refused_by_their_keys(case, change, message):
    hf = json.loads((GOLDEN / case / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        config_from_hf(hf | change)


@pytest.mark.parametrize("key", ["scale_attn_by_inverse_layer_idx", "add_cross_attention"])
def test_variants_of_gpt2_that_change_its_attention_are_refused(key):
    gpt2 = json.loads((GOLDEN / "gpt2" / "config.json").read_text())
    with pytest.raises(ValueError, match=f"{key}=True"):
        config_from_hf(gpt2 | {key: True})


def test_a_config_that_its_family_cannot_express_is_not_written():
    with pytest.raises(ValueError, match="qk_norm=True"):
        config_to_hf(dataclasses.replace(SMALL, qk_norm=True))


@pytest.mark.parametrize("size", ["hidden_size", "num_layers", "num_kv_heads"])
def test_a_decoder_without_a_size_is_refused(size):
    with pytest.raises(ValueError, match=f"{size}=0: it must be at least 1"):
        dataclasses.replace(SMALL, **{size: 0})


@pytest.mark.parametrize(
    "ids, message",
    [([2], r"eos_ids=\[2\]: it must be a tuple"), ((2.5,), "it must hold whole numbers")],
)
def test_ends_of_text_that_are_no_tuple_of_whole_numbers_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, eos_ids=ids)
