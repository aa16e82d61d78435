"""Published EAGLE, EAGLE-3, DFlash and DSpark drafters: which are refused or not written."""

import dataclasses
import json
import re
import warnings

import jax
import numpy as np
import pytest
import transformers
from published_heads import DEEPSPEC, GOLDEN, SPARK, edited
from toys import heads as weights_for

import specjax
from specjax import drafters, trees
from specjax.checkpoints import flat_keys

IDS = "eagle_aux_hidden_state_layer_ids"
OTHER = np.ones((24, 16), np.float32)


@pytest.fixture(scope="module")
def target():
    return specjax.load(GOLDEN / "target", tokenizer=False, dtype="float32")


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
NO_SIZE = {"sliding_window": None, "use_sliding_window": True}
SCALED = {"dflash_config": {"mask_token_id": 3, "output_multiplier": 1}}
UNSAID = json.loads((GOLDEN / "dflash_speculators/config.json").read_text())
UNSAID = UNSAID["transformer_layer_config"] | SLIDING | {"use_sliding_window": None}
UNSAID = {"transformer_layer_config": UNSAID}
SHORT = {"speculative_tokens": 0}
ROPES = {
    "full_attention": {"rope_theta": 10000.0},
    "sliding_attention": {"rope_theta": 77.0},
}


@pytest.mark.parametrize(
    ("source", "config", "tensors", "words"),
    [
        ("eagle3", {}, {"d2t": None}, "draft_vocab_size=16 of 24, but the file has no d2t"),
        ("eagle3", {}, {"d2t": np.arange(16) + 9}, "d2t: draft token 8 would be token 25"),
        ("eagle3", {}, {"d2t": -np.arange(16) // 2}, "d2t: .* more than once"),
        ("eagle3", {}, {"d2t": np.ones(16, np.int64)}, "t2d .24. marks other tokens"),
        ("eagle3", {}, {"d2t": np.ones(15, np.int64)}, "d2t is int64 .15.: .* 16 tokens"),
        ("eagle3", {}, {"lm_head.weight": None}, "lm_head.weight is missing: only a head over all"),
        ("eagle3", {"pard_token": 3}, {}, "mask_hidden among its weights .no here"),
        ("eagle3", {}, {"mask_hidden": np.ones(48, np.float32)}, "here none.: give both"),
        ("eagle3", {"pard_token": 3}, {"mask_hidden": np.ones((2, 24))}, "expected .1, 48."),
        ("eagle3", {"pard_token": 99}, {"mask_hidden": np.ones(48)}, "pard_token=99"),
        ("eagle3", {"pard_token": 2.5}, {"mask_hidden": np.ones(48)}, "pard_token=2.5: it must be"),
        ("eagle3", {"pard_token": 3, "ptd_token_id": 4}, {}, "'ptd_token_id': 4}: these are one"),
        ("eagle3", {IDS: [2, 3, 9]}, {}, "ids=.2, 3, 9.: .* has 7 layers"),
        ("eagle3", {"eagle_config": {IDS: [1, 2, 7]}}, {}, "ids=.1, 2, 7.: .* has 7 layers"),
        ("eagle3", {IDS: [2, 3, 4], "eagle_config": {IDS: [2, 3, 4]}}, {}, "contradict each other"),
        ("eagle3", {IDS: "234"}, {}, "ids='234': it must be a list of whole numbers"),
        ("eagle3", {"draft_vocab_size": "16"}, {}, "draft_vocab_size='16': it must be a whole"),
        (
            "eagle3",
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            {},
            "rope_parameters has rope_theta=500000.0, and outside of it is 10000.0",
        ),
        ("eagle3", {}, {"t2d": np.ones(23, bool)}, "t2d .23. marks other tokens"),
        ("dflash", {"block_size": "5"}, {}, "block_size='5': it must be a whole number"),
        ("eagle3", {"num_key_value_heads": "1"}, {}, "num_key_value_heads='1': it must be"),
        ("eagle3", {IDS: [2, 4]}, {}, "fc.weight is .16, 48., expected .16, 32."),
        ("eagle3", {"vocab_size": 32}, {}, "another target .* vocab_size=32 .the target: 24"),
        ("eagle3", {"target_hidden_size": 32}, {}, "another target .* hidden_size=32"),
        ("eagle3", {}, {"midlayer.mlp.up_proj.weight": None}, "missing .1.: midlayer.mlp.up_proj"),
        ("eagle3", {}, {"mask_shown": OTHER}, "left over .1.: mask_shown"),
        ("eagle3", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "rope_type='dynamic'"),
        ("eagle3", {"model_type": "gpt2"}, {}, "model_type='gpt2' are not supported"),
        ("eagle3", {"fc_norm": True, "norm_before_fc": True}, {}, "exclude each other"),
        ("eagle3", {"specjax": {"target_fingerprint": "abc"}}, {}, "fingerprint abc"),
        (
            "eagle",
            {},
            {"embed_tokens.weight": OTHER},
            "embed_tokens.weight .*a copy of a table of the target",
        ),
        (
            "eagle",
            {},
            {"layers.0.self_attn.o_proj.weight": None},
            "missing .1.: layers.0.self_attn",
        ),
        ("speculators", {"transformer_layer_config": None}, {}, "lacks transformer_layer_config"),
        ("dflash", {"num_target_layers": 9}, {}, "num_target_layers=9: .* which has 7 layers"),
        ("dflash", {"num_target_layers": "7"}, {}, "num_target_layers='7': it must be a whole"),
        ("dflash", {"dflash_config": {}}, {}, "lacks mask_token_id"),
        ("dflash", {"block_size": None}, {}, "lacks block_size"),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 7]}},
            {},
            "target_layer_ids=.1, 3, 7.: .* numbered 0 to 6",
        ),
        ("dflash", {"dflash_config": {"mask_token_id": 99}}, {}, "mask_token_id=99"),
        ("dflash", {"output_multiplier": 0.5}, {}, "output_multiplier=0.5: only 1 is supported"),
        ("dflash", {"input_embedding_scale": 8}, {}, "input_embedding_scale=8: only 1 is supp"),
        ("dflash", {"final_logit_softcapping": 2.0}, {}, "softcapping=2.0: .* whose cap is None"),
        ("dspark", {"markov_rank": "5"}, {}, "markov_rank='5'"),
        ("dspark", {"markov_head_type": None}, {}, "lacks markov_head_type"),
        ("dspark", {"markov_head_type": "lstm"}, {}, "markov_head_type='lstm'"),
        ("dspark", {"enable_confidence_head": 1}, {}, "enable_confidence_head=1"),
        ("dspark", {"confidence_head_with_markov": None}, {}, "lacks confidence_head_with_markov"),
        ("dspark", {"confidence_head_with_markov": "false"}, {}, "with_markov='false': it must be"),
        ("eagle3", {"norm_before_residual": "false"}, {}, "norm_before_residual='false': it must"),
        ("dspark", {"is_causal": True}, {}, "is_causal=True: in this layout blocks are seen whole"),
        ("dspark", {"sample_from_anchor": False}, {}, "sample_from_anchor=false is not supported"),
        ("dspark", {"attention_sink_bias": True}, {}, "attention sinks are not supported"),
        ("dspark", {"target_layer_ids": [-2]}, {}, "target_layer_ids=.-2."),
        ("dspark", {}, {"lm_head.weight": OTHER}, "lm_head.weight .*a copy of a table"),
        (DEEPSPEC, {"target_layer_ids": None}, {}, "EAGLE-3 heads lacks target_layer_ids"),
        (DEEPSPEC, {"target_layer_ids": [1, 0, 3, 4, 5]}, {}, "ids=.1, 0, 3.*an ascending list"),
        (DEEPSPEC, {"target_layer_ids": [0, 1, 3, 4, 9]}, {}, "numbered 0 to 6"),
        (DEEPSPEC, {"target_layer_ids": [0, 1, 3, 4, 6]}, {}, "ids=.*: 6 is the last layer"),
        (DEEPSPEC, {"target_layer_ids": [1, 3, 5]}, {}, "fc.weight is .16, 80., expected .16, 48."),
        (DEEPSPEC, {"ttt_length": "7"}, {}, "ttt_length='7': it must be a whole number"),
        (DEEPSPEC, {"ttt_length": 0}, {}, "ttt_length=0: it must be at least 1"),
        (DEEPSPEC, {"draft_num_hidden_layers": 2}, {}, "draft_num_hidden_layers=2: each layer"),
        (DEEPSPEC, {"num_target_layers": 9}, {}, "num_target_layers=9: .* which has 7 layers"),
        (DEEPSPEC, {"norm_output": True}, {}, "norm_output=True: heads of DeepSpec have no such"),
        (DEEPSPEC, {"model_type": "gemma4_text"}, {}, "model_type='gemma4_text' are not supported"),
        (DEEPSPEC, {}, {"lm_head.weight": OTHER}, "lm_head.weight .*a copy of a table"),
        (DEEPSPEC, {}, {"layers.0.self_attn.q_norm.weight": None}, "missing .1.: .*q_norm"),
        (SPARK, {"transformer_layer_config": None}, {}, "lacks transformer_layer_config"),
        (SPARK, {"mask_token_id": None}, {}, "lacks mask_token_id"),
        (SPARK, {"block_size": "5"}, {}, "block_size='5': it must be a whole number"),
        (SPARK, {"sample_from_anchor": 1}, {}, "sample_from_anchor=1: it must be true or false"),
        (SPARK, {"sample_from_anchor": None}, {}, "lacks sample_from_anchor, and programs do not"),
        (SPARK, {"max_anchors": 3072, "sample_from_anchor": None}, {}, "lacks sample_from_anchor"),
        (SPARK, {"confidence_bias": 1}, {}, "config.json: confidence_bias=1 is not understood"),
        ("dflash", {"residual_scale": 2}, {}, "config.json: residual_scale=2 is not understood"),
        ("speculators", {"norm_twice": True}, {}, "config.json: norm_twice=True is not understood"),
        ("dflash", {}, {"markov_head.markov_w1.weight": OTHER}, "heads of DSpark, and names none"),
        (SPARK, {"draft_vocab_size": 25}, {}, "draft_vocab_size=25: it must be at least 1"),
        (SPARK, {}, {"d2t": None}, "draft_vocab_size=16 of 24, but the file has no d2t"),
        (SPARK, {}, {"lm_head.weight": OTHER[:16]}, "lm_head.weight .*a copy of a table"),
        (SPARK, {"aux_hidden_state_layer_ids": [1, 3, 9]}, {}, "layer_ids=.1, 3, 9.: .* 7 layers"),
        (SPARK, {"target_hidden_size": 32}, {}, "target_hidden_size=32: such drafters are as wide"),
        (SPARK, {"markov_head_type": "lstm"}, {}, "markov_head_type='lstm'"),
        (SPARK, {"enable_confidence_head": "no"}, {}, "enable_confidence_head='no'"),
        (f"{SPARK}_rnn", {"sample_from_anchor": False}, {}, "type='rnn' with sample_from_anchor"),
        ("dflash2_speculators", {"draft_vocab_size": 16}, {}, "a DFlash2 scores all 24 tokens"),
        ("dflash2_speculators", {"selector_rank": "5"}, {}, "selector_rank='5': it must be a"),
        ("xpress_speculators", {"sample_from_anchor": True}, {}, "sample_from_anchor=true is not"),
        ("xpress_speculators", {"num_jacobi_passes": -1}, {}, "num_jacobi_passes=-1: it must"),
        ("dflash", {"dflash_config": "x"}, {}, "dflash_config='x': it must be an object"),
        ("dflash", {"causal_head": True}, {}, "causal_head=True is not read there"),
        ("dflash", {"use_swa": True}, {}, "use_swa=True is not read there"),
        ("dflash", {"pure_draft_prefix_len": 1}, {}, "pure_draft_prefix_len=1 is not read there"),
        ("dspark", {"causal_head": True}, {}, "causal_head=True is not read there"),
        ("dspark", {"attention_mode": "mla"}, {}, "attention_mode='mla' is not read there"),
        ("dspark", {"markov_scale": 2.0}, {}, "markov_scale=2.0 is not understood.* markov_rank"),
        (DEEPSPEC, {"swa_window_size": 4}, {}, "swa_window_size=4 is not understood"),
        ("dspark", {"projector_type": "domino"}, {}, "projector_type='domino' is not read there"),
        (SPARK, {"is_causal": True}, {}, "is_causal=True is not read there"),
        (SPARK, {"output_multiplier": 0.5}, {}, "output_multiplier=0.5 is not read there"),
        (SPARK, {"attention_sink_bias": True}, {}, "attention_sink_bias=True is not read there"),
        ("dflash", SLIDING, {}, "sliding_attention, and use_sliding_window is None"),
        ("dflash", SLIDING | {"use_sliding_window": False}, {}, "use_sliding_window is False"),
        ("dflash_speculators", UNSAID, {}, "and use_sliding_window is None"),
        ("dflash", SLIDING | NO_SIZE, {}, "there is no sliding_window: give its number"),
        ("dflash", {"output_multiplier": 0.5} | SCALED, {}, "multiplier is 1 in the part"),
        ("eagle3", SLIDING | {"layer_types": SLIDING["layer_types"][:1]}, {}, "is None: some prog"),
        ("peagle", {"speculators_config": {"proposal_methods": [SHORT]}}, {}, "tokens=0: it must"),
        ("dflash", {"rope_parameters": ROPES}, {}, "rope_theta=77.0 of sliding_attention"),
        ("eagle3", {"eagle_config": {"norm_before_residual": True}}, {}, "config: norm_before_res"),
        ("eagle3", {"eagle_config": {"use_last_layernorm": False}}, {}, "accepted: True"),
        ("eagle3", {"eagle_config": [1]}, {}, "eagle_config=.1.: it must be an object"),
        ("peagle", {"speculators_config": [1]}, {}, "speculators_config=.1.: it must be an obj"),
        (SPARK, {"transformer_layer_config": ["x"]}, {}, "_config=.'x'.: it must be an object"),
        ("peagle", {"speculators_config": {"proposal_methods": ["x"]}}, {}, "a list of objects"),
        ("dflash", {"specjax": {"window": "x"}}, {}, "window='x': it must be a whole number"),
        ("dflash", {"specjax": {"tree": 5}}, {}, '"specjax": tree=5'),
        (
            "eagle3",
            {"eagle_aux_hidden_state_layer_ids": [True, 2, 3]},
            {},
            "ids=.True, 2, 3.: it must be a list of whole",
        ),
    ],
)
def test_what_is_wrong_with_a_drafter_is_named(source, config, tensors, words, target, tmp_path):
    edited(tmp_path, source, config, **tensors)
    with pytest.raises(ValueError, match=words):
        specjax.load_drafter(tmp_path, target)


def test_what_transformers_writes_of_qwen3_is_no_unknown_key(target, tmp_path):
    config = transformers.Qwen3Config().to_dict()
    kept = json.loads((GOLDEN / "dspark/config.json").read_text()) | {"rope_parameters": None}
    edited(tmp_path, "dspark", config | kept)
    found, usual = (specjax.load_drafter(x, target) for x in (tmp_path, GOLDEN / "dspark"))
    assert found.drafter == usual.drafter
    assert {*config} - {"_name_or_path"} <= {*flat_keys.QWEN3}


@pytest.mark.parametrize(
    ("name", "layout", "shape", "layer", "words"),
    [
        ("eagle3", "eagle3", {}, {"o_bias": True}, "know layer.o_bias; take"),
        ("eagle3", "eagle3", {}, {"mlp_bias": True}, "know layer.mlp_bias; take"),
        ("eagle3", "eagle3", {"fc_bias": True}, {}, "know fc_bias; no layout holds biases of fc"),
        ("eagle3", "eagle3-speculators", {"head_bias": True}, {}, "nor has any other"),
        ("eagle3", "eagle3", {"own_embedding": True}, {}, "know own_embedding; take"),
        ("eagle3", "eagle3", {}, {"num_layers": 2}, "know layer.num_layers=2; take"),
        ("eagle3", "eagle3-speculators", {}, {"qkv_bias": True}, "qkv_bias=True, o_bias=False"),
        ("eagle", "eagle", {}, {"qk_norm": True}, "no norms of queries and keys"),
        ("eagle3_deepspec", "eagle3-deepspec", {"fc_norm": "each"}, {}, "another fc_norm: take"),
    ],
)
def test_heads_of_which_readers_would_drop_a_part_are_not_written(
    name, layout, shape, layer, words, target, tmp_path
):
    drafter = specjax.load_drafter(GOLDEN / name, target).drafter
    shape["layer"] = dataclasses.replace(drafter.config.layer, **layer)
    drafter = dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, **shape))
    with pytest.raises(ValueError, match=words):
        specjax.save_drafter(drafter, weights_for(drafter), tmp_path, format=layout)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("layout", ["dspark", "dflash"])
def test_a_draft_vocabulary_is_not_written_where_readers_have_none(layout, target, tmp_path):
    name = "dspark_speculators" if layout == "dspark" else "dflash_speculators"
    heads = specjax.load_drafter(GOLDEN / name, target)
    with pytest.raises(ValueError, match="draft_vocab_size=16: .* take 'block-speculators'"):
        specjax.save_drafter(heads.drafter, heads.params, tmp_path, format=layout)


class Letters:
    """23 letters, of which c ends a text (says the target); row 23 of the table is no token."""

    eos_ids = (2,)

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        return "".join("abcdefghijklmnopqrstuvw"[i] for i in ids)


MASKED = [("dflash", "mask_token_id"), ("dspark", "mask_token_id"), ("eagle3", "pard_token")]
MASKED += [("eagle3", "ptd_token_id"), (SPARK, "mask_token_id")]


@pytest.mark.parametrize(("source", "key"), MASKED)
def test_a_mask_that_is_a_token_of_texts_is_said_by_its_key(source, key, target, tmp_path):
    lm = specjax.load(GOLDEN / "target", tokenizer=Letters(), dtype="float32")
    blank = {"mask_hidden": np.ones(48, np.float32)} if source == "eagle3" else {}
    for mask in (4, 2, 23):
        own = {key: mask}
        if source == "dflash":
            own = {"dflash_config": own | {"target_layer_ids": [1, 3, 5]}}
        folder = edited(tmp_path / str(mask), source, own, **blank)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            specjax.load_drafter(folder, lm)
        told = [str(one.message) for one in found if "texts may contain" in str(one.message)]
        assert len(told) == (mask == 4)
        assert all(f"{key}=4 is the token 'e'" in line for line in told)


@pytest.mark.parametrize("source", ["dflash", "dspark"])
def test_a_mask_with_an_embedding_of_its_own_is_refused(source, target, tmp_path):
    edited(tmp_path, source)
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="mask_embedding.pt: masks .* target's of token 23"):
        specjax.load_drafter(tmp_path, target)
    heads = specjax.load_drafter(GOLDEN / source, target)
    specjax.save_drafter(heads.drafter, heads.params, tmp_path, overwrite=True)
    assert specjax.load_drafter(tmp_path, target).drafter == heads.drafter


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_weights_that_are_not_those_of_the_drafter_are_named(name, target):
    drafter = specjax.load_drafter(GOLDEN / name, target).drafter
    for wrong in (None, {}, target.params):
        with pytest.raises(ValueError, match="params\\['drafter'\\] are not the weights of this"):
            specjax.decode(
                target.target,
                drafter,
                {"target": target.params, "drafter": wrong},
                np.asarray([[1, 2]]),
                np.asarray([2]),
                key=jax.random.key(0),
                max_new_tokens=4,
            )


def test_a_head_that_drafts_all_depths_at_once_is_no_eagle3_head_and_the_reverse(target):
    for name, kind, other in (
        ("peagle", drafters.Eagle3, "PEagle"),
        ("eagle3", drafters.PEagle, "Eagle3"),
    ):
        head = specjax.load_drafter(GOLDEN / name, target).drafter
        parts = dict(config=head.config, target=head.target, layers=head.layers)
        with pytest.raises(ValueError, match=f"mask_token=.*; draft with {other}$"):
            kind(**parts)
        assert type(head)(**parts).config == head.config


def test_a_size_that_differs_is_named_before_the_fingerprint(target, tmp_path):
    edited(tmp_path, "eagle3", {"specjax": {"target_fingerprint": "abc"}, "hidden_size": 32})
    with pytest.raises(ValueError, match="made for another target.*hidden_size=32"):
        specjax.load_drafter(tmp_path, target)


def test_a_file_that_names_another_target_on_the_hub_is_read_with_a_warning(target, tmp_path):
    def named(theirs, ours, source="eagle3"):
        config = {"speculators_config": {"verifier": {"name_or_path": theirs}}}
        if source == DEEPSPEC:
            config = {"target_model_name_or_path": theirs}
        edited(tmp_path / source, source, config)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            specjax.load_drafter(tmp_path / source, dataclasses.replace(target, name=ours))
        return [str(one.message) for one in found if "drafts for" in str(one.message)]

    for source in ("eagle3", DEEPSPEC):
        (message,) = named("Owner/Model-8B", "owner/other-8b", source)
        assert "drafts for Owner/Model-8B" in message and "target is owner/other-8b" in message
    for theirs, ours in (
        ("Owner/Model-8B", "copies/model-8b"),
        ("/home/me/other", "owner/model"),
        (None, "owner/model"),
        ("owner/model", str(GOLDEN / "target")),
        ("owner/model", "embedded"),
    ):
        assert named(theirs, ours) == []


def test_a_topology_is_named_and_said_to_be_too_deep_once(target, tmp_path):
    heads = specjax.load_drafter(GOLDEN / "eagle3", target, topology=[[0], [1], [0, 0]])
    assert heads.drafter.tree == trees.Tree((-1, 0, 0, 1))
    with pytest.raises(ValueError, match="topology='2y1'"):
        heads.drafter.with_topology("2y1")
    assert heads.drafter.with_topology("chain:2").depth == 2
    for wrong in ("2y1", (0, 1), [[0], [0, 0, 0]], ["a"]):
        words = f"topology={re.escape(repr(wrong))}.*Accepted"
        with pytest.raises((ValueError, TypeError), match=words):
            specjax.load_drafter(GOLDEN / "eagle3", target, topology=wrong)
    edited(tmp_path, "eagle3", {"specjax": {"trained_depth": 2, "tree": [-1, 0, 1, 2, 3]}})
    with pytest.warns(UserWarning, match="trained for 2") as found:
        assert specjax.load_drafter(tmp_path, target, topology="chain:3").drafter.depth == 3
    assert len(found) == 1 and found[0].filename == __file__
    heads = specjax.load_drafter(tmp_path, target, topology="chain:1")
    with pytest.warns(UserWarning, match="trained for 2") as found:
        heads.drafter.with_topology(trees.chain(4))
    assert found[0].filename == __file__
    edited(tmp_path / "no_tree", "eagle3", {"specjax": {"trained_depth": 2}})
    assert specjax.load_drafter(tmp_path / "no_tree", target).drafter.depth == 2
