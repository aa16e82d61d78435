"""Files of block drafters with heads: names, configs, what is refused."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import trees
from specjax.checkpoints import dflash

pytestmark = pytest.mark.usefixtures("quick_compilation")
GOLDEN = Path(__file__).parent / "golden" / "features"
SPECFORGE = "dspark_specforge"
NAMED = {
    "domino": {
        "architectures": ["DominoDraftModel", "DFlashDraftModel"],
        "block_size": 5,
        "dflash_config": {
            "mask_token_id": 23,
            "target_layer_ids": [1, 3, 5],
            "projector_type": "domino",
            "emb_dim": 5,
            "gru_hidden_dim": 6,
            "pure_draft_prefix_len": 1,
            "shift_label": True,
        },
    },
    "lilicorr": {
        "architectures": ["LiLiCorrDraftModel"],
        "block_size": 5,
        "dflash_config": {
            "mask_token_id": 23,
            "target_layer_ids": [1, 3, 5],
            "lilicorr_candidate_topk": 4,
            "lilicorr_hidden_size": 8,
            "lilicorr_num_layers": 2,
            "lilicorr_num_heads": 2,
            "lilicorr_mlp_ratio": 1.5,
            "lilicorr_factor_dim": 3,
            "lilicorr_vector_eps": 1e-4,
            "lilicorr_logit_scale": 8.0,
        },
    },
    "xpress": {
        "architectures": ["Qwen3XPressModel"],
        "xpress_rank": 5,
        "xpress_mlp_hidden": 10,
        "xpress_block_size": 5,
        "xpress_num_passes": 2,
        "sample_from_anchor": False,
        "dflash_config": {"mask_token_id": 23, "target_layer_ids": [1, 3, 5]},
    },
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "block_size": 5,
        "dflash_config": {
            "mask_token_id": 23,
            "target_layer_ids": [1, 3, 5],
            "conv_kernel_size": 2,
            "conv_group_size": 4,
            "selector_rank": 5,
            "selector_top_k": 4,
        },
    },
    "dflash2_window": {"sliding_window": 6, "is_causal": False},
}


@pytest.fixture(scope="module")
def golden_target():
    return specjax.load(GOLDEN / "target", tokenizer=False, dtype="float32")


def as_servers_name(name):
    """What vLLM 0.33 and SGLang 0.5.23 call a tensor of LiLiCorr."""
    name = name.replace("lilicorr.feature_mlp.0.", "lilicorr.feature_norm.")
    parts = {"feature_mlp.1": "feature_mlp.up_proj", "feature_mlp.3": "feature_mlp.down_proj"}
    parts |= {".mlp.0": ".mlp.up_proj", ".mlp.2": ".mlp.down_proj"}
    for older, servers in parts.items():
        name = name.replace(f"{older}.", f"{servers}.")
    return name


@pytest.mark.parametrize("name", [*NAMED, "domino_masks"])
def test_what_is_written_has_the_authors_names_and_is_loaded_again(name, golden_target, tmp_path):
    heads = specjax.load_drafter(GOLDEN / name, golden_target)
    given = dict(target=golden_target, dtype="bfloat16")
    specjax.save_drafter(heads.drafter, heads.params, tmp_path, **given)
    theirs, ours = (load_file(at / "model.safetensors") for at in (GOLDEN / name, tmp_path))
    if name == "lilicorr":  # whose golden file has the names of Model-Optimizer, which are read
        theirs = {as_servers_name(n): x for n, x in theirs.items()}
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(x, theirs[n]) for n, x in ours.items())
    written = json.loads((tmp_path / "config.json").read_text())
    own = NAMED.get(name, {})
    assert {key: written.get(key) for key in own} == own
    assert specjax.load_drafter(tmp_path, golden_target).drafter == heads.drafter


def edited(folder, source, own=(), tensors=(), rename=str):
    """A copy of a golden folder with other keys in its config or, where that lacks them, in its
    ``dflash_config``; None: removed."""
    shutil.copytree(GOLDEN / source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    flat = {key: value for key, value in dict(own).items() if key in config}
    kept = config["dflash_config"] | {k: x for k, x in dict(own).items() if k not in flat}
    config["dflash_config"] = {key: value for key, value in kept.items() if value is not None}
    config |= flat
    (folder / "config.json").write_text(json.dumps(config))
    found = load_file(folder / "model.safetensors") | dict(tensors)
    save_file({rename(name): x for name, x in found.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", ["domino", "dflash2"])
def test_heads_are_not_left_out_where_dspark_is_written(name, golden_target, tmp_path):
    source = edited(tmp_path / "a", name, {"sample_from_anchor": True})
    heads = specjax.load_drafter(source, golden_target)
    assert heads.drafter.config.from_root
    with pytest.raises(ValueError, match=f"'dspark': it has no place .*; take '{name}'"):
        specjax.save_drafter(heads.drafter, heads.params, tmp_path / "b", format="dspark")


@pytest.mark.parametrize(
    ("source", "key", "value", "field"),
    [
        ("dflash", "target_layer_ids", [2, 4, 5], "target_layers"),
        ("dflash", "block_size", 5, "block_size"),
        ("domino", "pure_draft_prefix_len", 2, "prefix"),
        ("dflash2", "selector_top_k", 3, "num_candidates"),
        ("xpress", "xpress_num_passes", 3, "num_passes"),
        ("xpress", "xpress_block_size", 5, "block_size"),
        ("lilicorr", "lilicorr_logit_scale", 2, "logit_scale"),
    ],
)
def test_a_key_of_two_places_is_read_in_either_and_may_not_have_two_values(
    source, key, value, field, golden_target, tmp_path
):
    edited(tmp_path, source)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for inside, outside in ((None, value), (value, None), (value, value)):
        config["dflash_config"][key], config[key] = inside, outside
        file.write_text(json.dumps(config))
        found = getattr(specjax.load_drafter(tmp_path, golden_target).drafter.config, field)
        assert found == (tuple(i + 1 for i in value) if isinstance(value, list) else value)
    config["dflash_config"][key] = [1, 3, 5] if isinstance(value, list) else value + 1
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{key} is .* in the part about blocks, and .* beside it"):
        specjax.load_drafter(tmp_path, golden_target)


def test_older_names_are_written_otherwise_and_mean_the_same(golden_target, tmp_path):
    def older(name):
        return f"logit_head.{name}" if name.startswith(("prefix_gru", "embed_proj")) else name

    source = edited(tmp_path, "domino", {"projector_type": "causal_v5"}, rename=older)
    found, wanted = (specjax.load_drafter(x, golden_target) for x in (source, GOLDEN / "domino"))
    assert found.drafter == wanted.drafter
    for ours, theirs in zip(*map(jax.tree.leaves, (found.params, wanted.params)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("source", "own", "words"),
    [
        ("domino", {"gru_hidden_dim": None}, "a Domino drafter lacks gru_hidden_dim"),
        ("domino", {"emb_dim": "5"}, "emb_dim='5': it must be a whole number"),
        ("domino", {"projector_type": "dspark"}, "projector_type='dspark'"),
        ("domino", {"pure_draft_prefix_len": 5}, "pure_draft_prefix_len=5: .* has 0 to 4"),
        ("lilicorr", {"lilicorr_num_heads": None}, "a LiLiCorr drafter lacks lilicorr_num_heads"),
        (
            "lilicorr",
            {"lilicorr_num_heads": 3},
            "lilicorr_num_heads=3: .* lilicorr_hidden_size=8",
        ),
        ("lilicorr", {"lilicorr_factor_dim": "3"}, "lilicorr_factor_dim='3': it must be a whole"),
        ("lilicorr", {"lilicorr_mlp_ratio": "2"}, "lilicorr_mlp_ratio='2': it must be a finite"),
        ("lilicorr", {"lilicorr_mlp_ratio": [2]}, "lilicorr_mlp_ratio=.2.: it must be a finite"),
        ("lilicorr", {"lilicorr_logit_scale": math.nan}, "logit_scale=nan: it must be a finite"),
        ("lilicorr", {"lilicorr_candidate_topk": 99}, "lilicorr_candidate_topk=99"),
        ("domino", {"gru_hidden_dim": 0}, "gru_hidden_dim=0: it must be at least 1"),
        ("dflash2", {"conv_kernel_size": 0}, "conv_kernel_size=0: it must be at least 1"),
        ("dflash2", {"selector_top_k": 99}, "selector_top_k=99"),
        ("xpress", {"xpress_rank": 0}, "xpress_rank=0: it must be at least 1"),
        ("xpress", {"xpress_rank": None}, "an XPress drafter lacks xpress_rank"),
        ("xpress", {"xpress_num_passes": "6"}, "xpress_num_passes='6': it must be a whole"),
        ("xpress", {"xpress_block_size": 7}, "xpress_block_size=7: the block has 5 places"),
        ("xpress", {"sample_from_anchor": True}, "sample_from_anchor=true is not supported"),
        ("domino", {"shift_label": "false"}, "shift_label='false': it must be true or false"),
        (
            "dflash",
            {"shift_label": True, "sample_from_anchor": False},
            "sample_from_anchor=False con",
        ),
        ("lilicorr", {"shift_label": True}, "shift_label=true is not supported"),
        ("lilicorr", {"lilicorr_enabled": False}, "lilicorr_enabled=false: the file holds"),
        ("dflash", {"projector_type": "dspark"}, "projector_type='dspark'.* is 'dflash'"),
        ("dflash2", {"projector_type": "domino"}, "projector_type='domino'"),
        ("dflash", {"conv_kernel_size": 2}, "conv_kernel_size=2 is not understood"),
        ("dflash2", {"kernel_mode": "input"}, "kernel_mode='input' is not understood, and may"),
        ("dflash", {"attention_mode": "mla"}, "attention_mode='mla' is not supported"),
        ("dflash", {"use_swa": "false"}, "use_swa='false': it must be true or false"),
        ("dflash", {"use_swa": True, "swa_window_size": "6"}, "swa_window_size='6'"),
        ("dflash", {"target_layer_ids": [True, 3, 5]}, "target_layer_ids=.True, 3, 5."),
        ("dflash", {"target_layer_ids": [1, 1, 5]}, "target_layer_ids=.1, 1, 5.: .* read once"),
        ("dflash", {"causal": False, "causal_head": True}, "causal=False, causal_head=True contra"),
        (
            "dflash2_window",
            {"is_causal": False, "causal": True},
            "is_causal=False, causal=True",
        ),
        (SPECFORGE, {"shift_label": False}, "shift_label=false is not supported: .* every place"),
        (SPECFORGE, {"sample_from_anchor": False}, "sample_from_anchor=false is not supported"),
        (SPECFORGE, {"projector_type": "dflash"}, "projector_type='dflash'.* is 'dspark'"),
        (SPECFORGE, {"markov_rank": "5"}, "markov_rank='5': it must be a whole number"),
        (SPECFORGE, {"markov_head_type": "gru"}, "markov_head_type='gru': accepted are vanilla"),
        (SPECFORGE, {"enable_confidence_head": "no"}, "enable_confidence_head='no': it must be"),
        (SPECFORGE, {"confidence_head_alpha": "1"}, "confidence_head_alpha='1': it must be a fin"),
        (SPECFORGE, {"head_temperature": 2.0}, "head_temperature=2.0 is not understood, and may"),
        (SPECFORGE, {"markov_rank": None}, "confidence_head_with_markov"),
        (SPECFORGE, {"draft_vocab_size": 16}, "draft_vocab_size=16: .* whole vocabulary, 24 to"),
        ("dspark_specforge_rnn", {"markov_rank": 6}, "markov_rank is 5 in the part about blocks"),
    ],
)
def test_configs_that_are_not_understood_are_refused(source, own, words, golden_target, tmp_path):
    with pytest.raises(ValueError, match=words):
        specjax.load_drafter(edited(tmp_path, source, own), golden_target)


@pytest.mark.parametrize(
    ("source", "own", "num_drafted"),
    [
        ("dflash", {}, 4),
        ("dflash", {"shift_label": True, "projector_type": "dflash", "attention_mode": "gqa"}, 5),
        ("dflash2", {"sample_from_anchor": True, "projector_type": None}, 5),
        ("dflash2_window", {"sample_from_anchor": False, "use_aux_hidden_state": True}, 4),
        ("domino", {"shift_label": None}, 4),
        ("lilicorr", {"lilicorr_enabled": True, "projector_type": "lilicorr", "causal": False}, 4),
    ],
)
def test_a_config_says_whether_the_place_of_the_root_drafts(
    source, own, num_drafted, golden_target, tmp_path
):
    found = specjax.load_drafter(edited(tmp_path, source, own), golden_target).drafter
    assert found.config.from_root is (num_drafted == 5)
    assert found.depth == num_drafted


def test_blocks_of_jetspec_are_causal_and_written_so_that_both_kinds_of_reader_know(
    golden_target, tmp_path
):
    found = specjax.load_drafter(GOLDEN / "jetspec", golden_target, topology="jetspec:3x4x11")
    assert found.drafter.config.causal is True
    specjax.save_drafter(found.drafter, found.params, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["dflash_config"]
    assert written["causal"] is written["causal_head"] is True
    again = specjax.load_drafter(tmp_path, golden_target).drafter  # its tree is stored, too
    assert again.topology == found.drafter.topology == trees.whole_families(3, 4, 11)


@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash_speculators"])
def test_what_could_not_be_loaded_again_is_not_written(name, golden_target, tmp_path):
    heads = specjax.load_drafter(GOLDEN / name, golden_target)
    twice = dataclasses.replace(heads.drafter.config, target_layers=(2, 2, 4))
    given = dict(format="block-speculators") if name == "dflash_speculators" else {}
    with pytest.raises(ValueError, match="target_layers=.2, 2, 4.: .* each hidden state is read"):
        drafter = dataclasses.replace(heads.drafter, config=twice)
        specjax.save_drafter(drafter, heads.params, tmp_path / "a", **given)
    if "draft_lm_head" in heads.params:
        other = heads.params | {"draft_lm_head": {"weight": heads.params["fc"]["weight"][:16, :16]}}
        with pytest.raises(ValueError, match="lm_head.weight .16, 16. is a copy of a table of the"):
            given |= dict(target=golden_target)
            specjax.save_drafter(heads.drafter, other, tmp_path / "b", **given)


WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}


def test_layers_of_dspark_with_a_window_see_what_their_program_says(golden_target, tmp_path):
    config = json.loads((GOLDEN / "dspark" / "config.json").read_text())
    source = shutil.copytree(GOLDEN / "dspark", tmp_path / "a")
    own = WINDOWED | {"sliding_window": 100}
    (source / "config.json").write_text(json.dumps(config | own))
    heads = specjax.load_drafter(source, golden_target)
    assert heads.drafter.config.causal is False
    specjax.save_drafter(heads.drafter, heads.params, tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["is_causal"] is False
    assert specjax.load_drafter(tmp_path / "b", golden_target).drafter == heads.drafter
    for i, causal in enumerate((None, True)):
        shape = dataclasses.replace(heads.drafter.config, causal=causal)
        other, at = dataclasses.replace(heads.drafter, config=shape), tmp_path / f"c{i}"
        if causal:
            with pytest.raises(ValueError, match="without a window; .* has another causal"):
                specjax.save_drafter(other, heads.params, at)
            continue
        specjax.save_drafter(other, heads.params, at)  # as SpecForge and servers read it
        written = json.loads((at / "config.json").read_text())
        assert "is_causal" not in written and written["dflash_config"]["markov_rank"] == 5
        assert specjax.load_drafter(at, golden_target).drafter == other


def test_drafters_of_specforge_have_its_defaults_and_its_older_names(golden_target, tmp_path):
    wanted = specjax.load_drafter(GOLDEN / SPECFORGE, golden_target)
    config = wanted.drafter.config
    assert config.causal is None and config.layers.window == 6 and config.from_root

    def older(name):
        return f"logit_head.{name}" if name.startswith(("markov_", "confidence_")) else name

    usual = {"enable_confidence_head": None, "markov_head_type": None, "projector_type": None}
    source = edited(tmp_path / "a", SPECFORGE, usual, rename=older)
    found = specjax.load_drafter(source, golden_target)
    assert found.drafter == wanted.drafter
    for ours, theirs in zip(*map(jax.tree.leaves, (found.params, wanted.params)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    bare = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    source = edited(tmp_path / "b", SPECFORGE, bare)
    kept = load_file(source / "model.safetensors")
    kept = {n: x for n, x in kept.items() if not n.startswith(("markov_", "confidence_"))}
    save_file(kept, source / "model.safetensors")
    found = specjax.load_drafter(source, golden_target)
    assert type(found.drafter).__name__ == "BlockDrafter" and found.drafter.config.from_root
    specjax.save_drafter(found.drafter, found.params, tmp_path / "c", format="dspark")
    assert specjax.load_drafter(tmp_path / "c", golden_target).drafter == found.drafter


@pytest.mark.parametrize("name", ["dflash", "domino", "dspark"])
def test_the_size_of_the_whole_vocabulary_that_specforge_writes_is_read(
    name, golden_target, tmp_path
):
    source = shutil.copytree(GOLDEN / name, tmp_path / "a")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 24}))
    found = specjax.load_drafter(source, golden_target).drafter
    assert found == specjax.load_drafter(GOLDEN / name, golden_target).drafter
    (source / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 16}))
    with pytest.raises(ValueError, match="draft_vocab_size=16: in this layout drafters are over"):
        specjax.load_drafter(source, golden_target)


def test_programs_that_take_the_raw_head_are_told_of_the_targets_cap(golden_target, tmp_path):
    heads = specjax.load_drafter(GOLDEN / "dflash2", golden_target)
    shape = dataclasses.replace(golden_target.target.config, logit_softcap=30.0)
    capped = dataclasses.replace(golden_target.target, config=shape)
    drafter = dataclasses.replace(heads.drafter, target=capped)
    specjax.save_drafter(drafter, heads.params, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["dflash_config"]
    assert written["final_logit_softcapping"] == 30
    with pytest.raises(ValueError, match="final_logit_softcapping=30.0: .* whose cap is None"):
        specjax.load_drafter(tmp_path, golden_target)
    own = dataclasses.replace(golden_target, target=capped)
    assert specjax.load_drafter(tmp_path, own).drafter == drafter


@pytest.mark.parametrize("bias", ["qkv_bias", "mlp_bias"])
@pytest.mark.parametrize("name", ["dflash", "dspark", "domino", "dflash_speculators"])
def test_biases_that_readers_would_leave_out_are_not_written(name, bias, golden_target, tmp_path):
    heads = specjax.load_drafter(GOLDEN / name, golden_target)
    layers = dataclasses.replace(heads.drafter.config.layers, **{bias: True})
    shape = dataclasses.replace(heads.drafter.config, layers=layers)
    given = dict(format="block-speculators") if name == "dflash_speculators" else {}
    with pytest.raises(ValueError, match=f"layers.{bias}=True, layers.o_bias=False: its readers"):
        drafter = dataclasses.replace(heads.drafter, config=shape)
        specjax.save_drafter(drafter, heads.params, tmp_path, **given)


def test_vllm_is_told_of_speculators_layers_whether_places_see_whole_blocks(
    golden_target, tmp_path
):
    heads = specjax.load_drafter(GOLDEN / "dflash_speculators_window", golden_target)
    local = heads.drafter.config.layers
    full = dataclasses.replace(local, window=None, local_layers=None)
    cases = ((local, None, False), (local, False, True), (full, None, True))
    for i, (layers, causal, key) in enumerate(cases):
        shape = dataclasses.replace(heads.drafter.config, layers=layers, causal=causal)
        drafter, at = dataclasses.replace(heads.drafter, config=shape), tmp_path / str(i)
        specjax.save_drafter(drafter, heads.params, at, format="block-speculators")
        written = json.loads((at / "config.json").read_text())
        assert written["sliding_window_non_causal"] is key
        inner = written["transformer_layer_config"]
        assert inner.get("is_causal") is (False if causal is False else None)
        assert specjax.load_drafter(at, golden_target).drafter == drafter


@pytest.mark.parametrize(
    ("num_layers", "count", "layers"),
    [(62, 5, (1, 16, 30, 44, 59)), (34, 5, (1, 8, 16, 24, 31)), (18, 5, (1, 4, 8, 12, 15))],
)
def test_layers_are_spread_as_the_authors_spread_them(num_layers, count, layers):
    assert tuple(dflash.usual_ids(num_layers, count)) == layers  # their `build_target_layer_ids`


@pytest.mark.parametrize("label", ["shift_label", "sample_from_anchor"])
def test_both_names_say_in_speculators_files_whether_the_place_of_the_root_drafts(
    label, golden_target, tmp_path
):
    source = shutil.copytree(GOLDEN / "dflash_speculators", tmp_path / "a")
    config = json.loads((source / "config.json").read_text())
    for key in ("shift_label", "sample_from_anchor"):
        config.pop(key, None)
    for value in (True, False):
        (source / "config.json").write_text(json.dumps(config | {label: value}))
        found = specjax.load_drafter(source, golden_target).drafter
        assert found.config.from_root is value
    other = {"shift_label": True, "sample_from_anchor": False}
    (source / "config.json").write_text(json.dumps(config | other))
    with pytest.raises(ValueError, match="contradict each other"):
        specjax.load_drafter(source, golden_target)


@pytest.mark.parametrize(
    ("name", "setting", "wrong"),
    [
        ("dspark", {"least": 0.5}, "0.5"),
        ("dspark_speculators", {"least": 0.25}, None),
        ("xpress", {"in_turn": True}, 1),
        ("dflash2", {"whole_law": False}, "no"),
        ("lilicorr", {"whole_law": True}, 0),
    ],
)
def test_settings_of_a_drafter_are_stored_with_its_weights(
    name, setting, wrong, golden_target, tmp_path
):
    heads = specjax.load_drafter(GOLDEN / name, golden_target)
    drafter = dataclasses.replace(heads.drafter, **setting)
    layout = "block-speculators" if name.endswith("speculators") else None
    specjax.save_drafter(drafter, heads.params, tmp_path, format=layout)
    assert specjax.load_drafter(tmp_path, golden_target).drafter == drafter
    if "least" in setting:
        with pytest.raises(ValueError, match='delete "least" from "specjax" in config.json'):
            specjax.load_drafter(tmp_path, golden_target, topology="2x2")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert setting.items() <= config["specjax"].items()
    config["specjax"] |= dict.fromkeys(setting, wrong)
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{[*setting][0]}=.*: it must be"):
        specjax.load_drafter(tmp_path, golden_target)


@pytest.mark.parametrize("name", ["dflash", "peagle", "dspark"])
def test_a_tree_without_a_node_to_draft_is_refused(name, golden_target):
    with pytest.raises(ValueError, match="has no node below the root to be drafted"):
        specjax.load_drafter(GOLDEN / name, golden_target, topology=[-1])


def test_a_shorter_draft_is_the_beginning_of_a_longer_one_where_blocks_are_whole(golden_target):
    names = ("dflash", "dspark", "dflash2", "lilicorr", "domino", "xpress", "peagle")
    found = {x: specjax.load_drafter(GOLDEN / x, golden_target).drafter.can_rewind for x in names}
    assert [x for x in names if found[x]] == ["domino", "xpress", "peagle"]
