"""Published EAGLE, EAGLE-3, DFlash and DSpark drafters: layouts and settings."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from published_heads import DEEPSPEC, GOLDEN, SPARK, edited
from safetensors.numpy import load_file
from toys import heads as weights_for

import specjax
from specjax.drafters.peagle import PEagle
from specjax.text import drafter_names
from specjax.trees import chain


@pytest.fixture(scope="module")
def target():
    return specjax.load(GOLDEN / "target", tokenizer=False, dtype="float32")


def same(found, wanted):
    return jax.tree.structure(found) == jax.tree.structure(wanted) and all(
        jax.tree.leaves(jax.tree.map(np.array_equal, found, wanted))
    )


WRITTEN = [
    ("eagle", "eagle", ["embed_tokens.weight"]),
    ("eagle_bare", "eagle", []),
    ("eagle3", "eagle3", []),
    ("eagle3_wide", "eagle3", []),
    ("speculators", "eagle3-speculators", ["embed_tokens.weight"]),
    ("speculators_norms", "eagle3-speculators", ["embed_tokens.weight"]),
    ("peagle", "eagle3-speculators", ["embed_tokens.weight"]),
    ("dflash", "dflash", []),
    ("eagle3_deepspec", "eagle3-deepspec", []),
    *((name, "dspark", []) for name in ("dspark", "dspark_gated", "dspark_rnn", "dspark_bare")),
    ("dspark_specforge", "dspark", []),
    ("dflash_speculators", "block-speculators", []),
    ("dspark_speculators", "block-speculators", []),
    ("dspark_speculators_gated", "block-speculators", []),
    ("dspark_speculators_rnn", "block-speculators", []),
    ("dflash2_speculators", "block-speculators", []),
    ("dflash_speculators_window", "block-speculators", []),
    ("dflash2_speculators_window", "block-speculators", []),
    ("xpress_speculators", "block-speculators", []),
]


@pytest.mark.parametrize(("name", "layout", "shared"), WRITTEN)
def test_what_is_saved_has_the_authors_names_and_is_loaded_again(
    name, layout, shared, target, tmp_path
):
    heads = specjax.load_drafter(GOLDEN / name, target, topology="chain:2")
    given = dict(format=layout, target=target, dtype="bfloat16")
    specjax.save_drafter(heads.drafter, heads.params, tmp_path, **given)
    theirs, ours = (load_file(at / "model.safetensors") for at in (GOLDEN / name, tmp_path))
    wanted = {n: (x.dtype, x.shape) for n, x in theirs.items() if n not in shared}
    assert {n: (x.dtype, x.shape) for n, x in ours.items()} == wanted
    assert all(np.array_equal(x, theirs[n]) for n, x in ours.items())
    again = specjax.load_drafter(tmp_path, target)
    assert again.drafter == heads.drafter
    assert same(again.params, heads.params)


# what vLLM and SGLang read of a config, see specjax/checkpoints/README.md
READ = {
    "eagle": {"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama", "bias": True},
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "draft_vocab_size": 16,
        "vocab_size": 24,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 4],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    },
    "eagle3_wide": {"target_hidden_size": 16, "hidden_size": 20, "draft_vocab_size": 24},
    "speculators": {
        "speculators_model_type": "eagle3",
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "draft_vocab_size": 16,
        "torch_dtype": "bfloat16",
    },
    "eagle3_deepspec": {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        "draft_num_hidden_layers": 1,
        "num_target_layers": 7,
        "target_layer_ids": [0, 1, 3, 4, 5],
        "step_loss_decay": 0.8,
        "layer_types": ["full_attention"],
    },
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 5,
        "num_target_layers": 7,
        "dflash_config": {"mask_token_id": 23, "target_layer_ids": [1, 3, 5]},
        "layer_types": ["full_attention"] * 2,
    },
    "dspark_gated": {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 4,
        "mask_token_id": 23,
        "target_layer_ids": [1, 3, 5],
        "markov_rank": 5,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "dspark_specforge": {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 4,
        "num_target_layers": 7,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "markov_rank": 5,
        "enable_confidence_head": True,
        "dflash_config": {
            "mask_token_id": 23,
            "target_layer_ids": [1, 3, 5],
            "markov_rank": 5,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "projector_type": "dspark",
            "attention_mode": "gqa",
        },
    },
    "dspark_speculators": {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "draft_vocab_size": 16,
        "block_size": 5,
        "mask_token_id": 23,
        "aux_hidden_state_layer_ids": [1, 3, 6],
        "sample_from_anchor": True,
        "sliding_window_non_causal": True,
        "markov_rank": 5,
        "markov_head_type": "vanilla",
    },
    "dflash2_speculators": {
        "speculators_model_type": "dflash2",
        "draft_vocab_size": 24,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "conv_kernel_size": 2,
        "conv_group_size": 4,
        "selector_rank": 5,
        "selector_top_k": 4,
    },
    "xpress_speculators": {
        "speculators_model_type": "xpress",
        "xpress_rank": 5,
        "xpress_mlp_ratio": 2,
        "num_jacobi_passes": 2,
    },
}


@pytest.mark.parametrize("name", READ)
def test_configs_say_what_servers_read(name, target, tmp_path):
    layout = next(layout for source, layout, _ in WRITTEN if source == name)
    heads = specjax.load_drafter(GOLDEN / name, target)
    given = dict(format=layout, target=target, dtype="bfloat16")
    specjax.save_drafter(heads.drafter, heads.params, tmp_path, **given)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: written.get(key) for key in READ[name]} == READ[name]
    assert written["specjax"]["target_fingerprint"] == target.checkpoint


def test_heads_of_deepspec_are_drafted_as_deep_as_they_say_and_written_for_others(target, tmp_path):
    heads = specjax.load_drafter(GOLDEN / DEEPSPEC, target)
    assert heads.drafter.topology == chain(4)  # ttt_length
    given = dict(format="eagle3-speculators", target=target)
    specjax.save_drafter(heads.drafter, heads.params, tmp_path, **given)
    again = specjax.load_drafter(tmp_path, target)
    assert again.drafter == heads.drafter and same(again.params, heads.params)


@pytest.mark.parametrize("tree", ["chain:6", "3x2x1x1x1"])
def test_a_tree_deeper_than_deepspec_trained_is_said_and_the_trained_depth_is_kept(
    tree, target, tmp_path
):
    with pytest.warns(UserWarning, match="deep, and its file says .* trained for 4"):
        heads = specjax.load_drafter(GOLDEN / DEEPSPEC, target, topology=tree)
    specjax.save_drafter(heads.drafter, heads.params, tmp_path, format="eagle3-deepspec")
    assert json.loads((tmp_path / "config.json").read_text())["ttt_length"] == 4
    with pytest.warns(UserWarning, match="trained for 4"):
        assert specjax.load_drafter(tmp_path, target).drafter == heads.drafter


@pytest.mark.parametrize(
    ("name", "layout"), [("eagle3", "eagle3"), ("peagle", "eagle3-speculators")]
)
def test_what_the_layout_cannot_say_of_the_training_is_kept_beside_it(
    name, layout, target, tmp_path
):
    heads = specjax.load_drafter(GOLDEN / name, target)
    assert heads.drafter.trained_depth == (3 if name == "peagle" else None)
    drafter = dataclasses.replace(heads.drafter, trained_depth=3)
    specjax.save_drafter(drafter, heads.params, tmp_path, format=layout, target=target)
    assert specjax.load_drafter(tmp_path, target).drafter.trained_depth == 3
    with pytest.warns(UserWarning, match="trained for 3"):
        specjax.load_drafter(tmp_path, target, topology="chain:4")
    config = json.loads((tmp_path / "config.json").read_text())
    for wrong in (0, True, "3"):
        config["specjax"]["trained_depth"] = wrong
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="trained_depth="):
            specjax.load_drafter(tmp_path, target)


def test_heads_of_a_quantized_target_keep_no_second_table_that_was_not_trained(target, tmp_path):
    given = dict(tokenizer=False, dtype="float32", quantize="int8")
    rounded = specjax.load(GOLDEN / "target", **given)
    for trained in (False, True, None):
        folder = edited(tmp_path / str(trained), "speculators", {"embed_requires_grad": trained})
        own = [specjax.load_drafter(folder, lm).drafter.config for lm in (target, rounded)]
        assert [one.own_embedding for one in own] == [False, trained is not False]


def test_heads_for_sglang_always_have_the_bias_that_it_expects(target, tmp_path):
    heads = specjax.load_drafter(GOLDEN / "eagle_bare", target)
    specjax.save_drafter(heads.drafter, heads.params, tmp_path, format="eagle-sglang")
    assert not load_file(tmp_path / "model.safetensors")["fc.bias"].any()
    found = specjax.load_drafter(tmp_path, target)
    assert found.drafter.config.fc_bias


def test_heads_that_not_all_servers_know_are_written_for_those_that_do(target, tmp_path):
    heads = specjax.load_drafter(GOLDEN / "speculators", target)
    with pytest.raises(ValueError, match="know norm_before_residual; take 'eagle3-speculators'"):
        specjax.save_drafter(heads.drafter, heads.params, tmp_path)


def test_a_head_without_an_lm_head_says_so_as_sglang_reads_it(target, tmp_path):
    drafter = specjax.load_drafter(GOLDEN / "eagle3", target).drafter
    config = dataclasses.replace(drafter.config, draft_vocab_size=0)
    drafter = dataclasses.replace(drafter, config=config)
    specjax.save_drafter(drafter, weights_for(drafter), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["draft_vocab_size"] is None  # a number: an LM head of its own, left random
    assert specjax.load_drafter(tmp_path, target).drafter.config == config


def test_names_and_settings_of_other_writers_mean_the_same(target, tmp_path):
    wanted = specjax.load_drafter(GOLDEN / "eagle3", target)

    def layers(name):
        return name.replace("midlayer.", "layers.0.")

    ids, key = [2, 3, 4], "eagle_aux_hidden_state_layer_ids"
    variants = [
        dict(rename=layers),
        dict(config={"num_hidden_layers": 40}),  # the target's, in some published files
        dict(config={key: ids}),
        dict(config={"eagle_config": {key: [i - 1 for i in ids], "use_last_layernorm": True}}),
        dict(config={"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),
        dict(**{"embed_tokens.weight": np.asarray(target.params["embedding"])}),
    ]
    for i, variant in enumerate(variants):
        found = specjax.load_drafter(edited(tmp_path / str(i), "eagle3", **variant), target)
        assert found.drafter == wanted.drafter
        assert same(found.params, wanted.params)


def test_rotary_settings_are_read_in_either_place(target, tmp_path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, "rope_type": "llama3"}
    both = {"rope_scaling": scaling, "rope_parameters": {"rope_theta": 5e5}}
    places = [
        dict(rope_theta=5e5, rope_scaling=scaling),
        dict(rope_parameters={"rope_theta": 5e5, **scaling}),
        both,
    ]
    found = [
        specjax.load_drafter(edited(tmp_path / str(i), "eagle3", place), target).drafter.config
        for i, place in enumerate(places)
    ]
    assert found[0] == found[1] == found[2]
    assert found[0].layer.rope_theta == 5e5
    assert dict(found[0].layer.rope_scaling)["factor"] == 8.0
    outside = {"transformer_layer_config": None, "rope_theta": 2e4}
    layer = json.loads((GOLDEN / "speculators" / "config.json").read_text())
    layer = layer["transformer_layer_config"] | {"rope_parameters": None}
    outside["transformer_layer_config"] = layer
    other = specjax.load_drafter(edited(tmp_path / "o", "speculators", outside), target)
    assert other.drafter.config.layer.rope_theta == 2e4


@pytest.mark.parametrize("name", ["eagle3", "speculators"])
def test_a_residual_is_not_normed_unless_the_config_says_so(name, target, tmp_path):
    folder = edited(tmp_path, name, {"norm_before_residual": None})
    assert not specjax.load_drafter(folder, target).drafter.config.norm_before_residual
    older = {"num_depths": 8, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2}
    folder = edited(tmp_path, name, older | {"norm_before_residual": True})
    assert specjax.load_drafter(folder, target).drafter.config.norm_before_residual


def test_the_depth_for_which_a_p_eagle_head_was_trained_is_read_and_said(target, tmp_path):
    with pytest.warns(UserWarning, match="5 tokens deep, and its file says .* trained for 3"):
        found = specjax.load_drafter(GOLDEN / "peagle", target, topology="chain:5")
    assert found.drafter.trained_depth == 3
    specjax.save_drafter(found.drafter, found.params, tmp_path, format="eagle3-speculators")
    assert specjax.load_drafter(tmp_path, target, topology="chain:2").drafter.trained_depth == 3


def test_biases_that_no_config_promised_are_loaded(target, tmp_path):
    sizes = {"fc": 16, "lm_head": 16, "midlayer.self_attn.o_proj": 16, "midlayer.mlp.up_proj": 24}
    sizes |= {"midlayer.mlp.gate_proj": 24, "midlayer.mlp.down_proj": 16}
    sizes |= {f"midlayer.self_attn.{x}_proj": 16 if x == "q" else 8 for x in "qkv"}
    biases = {f"{name}.bias": np.full(n, 0.5, np.float32) for name, n in sizes.items()}
    heads = specjax.load_drafter(edited(tmp_path, "eagle3", **biases), target)
    flat = jax.tree_util.tree_leaves_with_path(heads.params)
    found = [x for path, x in flat if path[-1].key == "bias"]
    assert sorted(map(len, found)) == sorted(sizes.values())
    assert all((x == 0.5).all() for x in found)


LAYOUTS = [
    ("eagle3", {"pard_token": 5, "ptd_token_id": 5}, (1, 48)),
    (
        "eagle3-speculators",
        {"speculators_model_type": "peagle", "architectures": ["PEagleDraftModel"]},
        (1, 1, 48),
    ),
]


@pytest.mark.parametrize(("layout", "said", "shape"), LAYOUTS)
def test_heads_that_draft_all_at_once_are_written_and_loaded_again(
    layout, said, shape, target, tmp_path
):
    blank = np.arange(48, dtype=np.float32)
    source = edited(tmp_path / "a", "eagle3", {"ptd_token_id": 5}, mask_hidden=blank[None])
    heads = specjax.load_drafter(source, target, topology="chain:3")
    assert isinstance(heads.drafter, PEagle) and heads.drafter.config.mask_token == 5
    assert np.array_equal(heads.params["mask_hidden"], blank)
    specjax.save_drafter(heads.drafter, heads.params, tmp_path / "b", format=layout)
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert said.items() <= written.items() and written["mask_token_id"] == 5
    assert load_file(tmp_path / "b" / "model.safetensors")["mask_hidden"].shape == shape
    again = specjax.load_drafter(tmp_path / "b", target)
    assert again.drafter == heads.drafter and same(again.params, heads.params)


HEADS = ["eagle_bare", "eagle3", "dflash", "speculators", "dspark", "dspark_specforge"]
HEADS += [DEEPSPEC, SPARK]


@pytest.mark.parametrize("name", HEADS)
def test_a_path_is_taken_for_heads_though_its_config_may_be_a_models(name, target):
    heads = drafter_names.named(target, GOLDEN / name)
    assert heads.drafter == specjax.load_drafter(GOLDEN / name, target).drafter
    model = drafter_names.named(target, GOLDEN / "target", tokenizer=False)
    assert isinstance(model, specjax.LM)


def test_what_a_config_of_speculators_leaves_out_has_the_packages_default(target, tmp_path):
    usual = {
        "dspark_speculators": dict(enable_confidence_head=None, markov_head_type=None),
        "dflash2_speculators": dict(sliding_window_non_causal=None, conv_kernel_size=None),
        "xpress_speculators": dict(sample_from_anchor=None, xpress_mlp_ratio=None),
    }
    for name, left_out in usual.items():
        found = specjax.load_drafter(edited(tmp_path / name, name, left_out), target)
        assert found.drafter == specjax.load_drafter(GOLDEN / name, target).drafter


def test_heads_that_read_their_draft_name_an_architecture_of_their_own(target, tmp_path):
    draw = np.random.default_rng(0)
    sizes = {"norm": (16,), "gate_proj": (3, 48), "up_proj": (3, 48), "down_proj": (16, 3)}
    named = {f"dependency.{n}.weight": s for n, s in sizes.items()} | {"mask_hidden": (1, 48)}
    tensors = {name: draw.normal(size=size).astype(np.float32) for name, size in named.items()}
    said = {"ptd_token_id": 5, "dependency_size": 3, "norm_before_residual": True}
    heads = specjax.load_drafter(edited(tmp_path / "a", "eagle3", said, **tensors), target)
    for part, name in (("norm", "norm"), ("gate", "gate_proj"), ("down", "down_proj")):
        found = heads.params["dependency"][part]["weight"]
        assert np.array_equal(found, tensors[f"dependency.{name}.weight"])
    specjax.save_drafter(heads.drafter, heads.params, tmp_path / "b")
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert said.items() <= written.items()
    assert written["architectures"] == ["DependentPEagleDraftModel"]
    again = specjax.load_drafter(tmp_path / "b", target)
    assert again.drafter.config == heads.drafter.config and same(again.params, heads.params)
    shape = heads.drafter.config
    shape = dataclasses.replace(shape, layer=dataclasses.replace(shape.layer, qk_norm=True))
    with pytest.raises(ValueError, match="layer.qk_norm; no layout holds them beside dependency"):
        normed = dataclasses.replace(heads.drafter, config=shape)
        specjax.save_drafter(normed, heads.params, tmp_path / "n", format="eagle3")
    speculators = {"speculators_model_type": "peagle", "transformer_layer_config": {"x": 1}}
    with pytest.raises(ValueError, match="dependency_size=3: no other program that reads"):
        place = edited(tmp_path / "e", "eagle3", said | speculators, **tensors)
        specjax.load_drafter(place, target)
    with pytest.raises(ValueError, match="dependency_size=3: no other program that reads"):
        place, layout = tmp_path / "c", "eagle3-speculators"
        specjax.save_drafter(heads.drafter, heads.params, place, format=layout)
    for wrong, words in ((0, "dependency"), (4, "gate_proj.* is .3, 48., expected .4, 48.")):
        other = said | {"dependency_size": wrong}
        with pytest.raises(ValueError, match=words):
            specjax.load_drafter(edited(tmp_path / f"w{wrong}", "eagle3", other, **tensors), target)
    with pytest.raises(ValueError, match="dependency_size=3 with mask_token_id=None"):
        del tensors["mask_hidden"], said["ptd_token_id"]
        specjax.load_drafter(edited(tmp_path / "d", "eagle3", said, **tensors), target)
