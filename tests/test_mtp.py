"""MTP modules: the numbers of transformers, slow ones without a cache, checkpoints, bad input."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from specjax.train import head_export
from specjax.train.config import ConfigError
from starts import unanswered
from toys import heads as weights_for
from toys import whole

import specjax
from specjax import Sampling, trees
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.round import commit_round, draft_and_verify
from specjax.drafters.mtp import MTP, MTPConfig, module_layer
from specjax.drafters.mtp_heads import MTPHeadsConfig, ParallelHeads
from specjax.text.drafter_names import resolve_drafter

GOLDEN = Path(__file__).parent / "golden" / "mtp"
CASES = ("deepseek", "mimo", "qwen")
PROMPT = np.load(GOLDEN / "qwen" / "expected.npz")["tokens"][:7]


@pytest.fixture(scope="module")
def targets():
    def loaded(case):
        lm = specjax.load(GOLDEN / case, tokenizer=False, dtype="float32")
        return lm, specjax.load_drafter(GOLDEN / case, lm)

    return {case: loaded(case) for case in CASES}


def rounds(lm, drafter, weights, num):
    """``(length, drafts int32 [N])`` of each round of a greedy generation, and its tokens."""
    params = {"target": lm.params, "drafter": weights}
    common = lm.target, drafter
    request, capacity = prepare_inputs(
        *common, PROMPT[None], np.asarray([7]), jax.random.key(0), num, Sampling(), None, ()
    )
    state = unanswered(*common, "auto", capacity, params, request)

    @jax.jit
    def step(params, state):
        judged = draft_and_verify(*common, "auto", params, state)
        return judged.draft.tokens, commit_round(*common, params, state, judged)

    found = []
    while int(state.budget[0]) > 0:
        length = int(state.length[0])
        drafted, state = step(params, state)
        found.append((length, np.asarray(drafted)[0, 1:].tolist()))
    return found, np.asarray(state.tokens)[0, : int(state.length[0])]


@pytest.mark.parametrize("case", CASES)
def test_drafts_and_accepted_tokens_over_a_generation_are_those_of_transformers(case, targets):
    expected, (lm, heads) = np.load(GOLDEN / case / "expected.npz"), targets[case]
    found, tokens = rounds(lm, heads.drafter, heads.params, len(expected["tokens"]) - 7)
    assert tokens.tolist() == expected["tokens"].tolist()
    assert [length for length, _ in found] == expected["lengths"].tolist()
    assert [drafts for _, drafts in found] == expected["drafts"].tolist()


# --------------------------------------------------------- modules over whole rows, no cache


@functools.partial(jax.jit, static_argnums=0)
def hidden_of(model, params, tokens):
    """``[H, T]`` of a row int32 ``[T]``, normed."""
    cache, layer = model.init(params, 1, tokens.shape[0]), model.config.num_layers
    draft = whole(tokens[None])
    return model.verify(params, cache, draft, features=(layer,), logits=False).features[0].T


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def one_step(drafter, stage, fault, params, hidden, tokens):
    """Logits ``[V]`` of the last pair, and what is passed on ``[H, T]``."""
    head, positions = drafter.heads(params["drafter"]), jnp.arange(len(tokens), dtype=jnp.int32)
    if fault == "positions off by one":
        positions = positions.at[-1].add(1)
    embedded = head.embed(tokens[None], drafter.target, params["target"])
    sees = jnp.triu(jnp.ones((len(tokens),) * 2, bool))[None]
    x = head.enter(embedded, hidden, stage)
    out, _ = head.run(x, positions[None], sees, batch=1, stage=stage)
    logits = head.logits(out[:, -1:], 1, drafter.target, params["target"], stage)
    return logits[0, 0], head.passed(out, stage)


def slow(lm, drafter, weights, text, depth, fault=None):
    """The next ``depth`` tokens after ``text``, and the logits ``[depth, V]``, each from a pass
    over all pairs: (state, token), ..."""
    params = {"target": lm.params, "drafter": weights}
    hidden, said = hidden_of(lm.target, lm.params, text)[:, :-1], []
    if fault == "features shifted":
        hidden = jnp.roll(hidden, 1, axis=1)
    tokens = text[:-1] if fault == "tokens not shifted" else text[1:]
    for step in range(depth):
        distinct = drafter.num_stages > 1
        stage = step if distinct else 0
        logits, passed = one_step(drafter, stage, fault, params, hidden, tokens)
        said.append(np.asarray(logits))
        if distinct:  # all goes on to the next module, a token further
            hidden, tokens = passed, np.append(tokens[1:], np.argmax(logits))
        else:  # the last alone goes on, as one more pair
            hidden = np.concatenate([hidden, passed[:, -1:]], axis=1)
            tokens = np.append(tokens, np.argmax(logits))
    return [int(np.argmax(x)) for x in said], np.stack(said)


@pytest.mark.parametrize("case", CASES)
def test_logits_over_whole_rows_are_those_of_transformers_and_broken_twins_differ(case, targets):
    expected, (lm, heads) = np.load(GOLDEN / case / "expected.npz"), targets[case]
    length, depth = int(expected["lengths"][-1]), expected["drafts"].shape[1]
    own = lm, heads.drafter, heads.params, expected["tokens"][:length], depth
    drafts, logits = slow(*own)
    assert drafts == expected["drafts"][-1].tolist()
    np.testing.assert_allclose(logits, expected["logits"][-1], atol=2e-5)
    for fault in ("features shifted", "tokens not shifted", "positions off by one"):
        assert np.abs(slow(*own, fault)[1] - logits).max() > 1e-2, fault


SHAPES = {
    "one for all tokens": dict(share_layers=True),
    "distinct": dict(shared_ends=True, normed_output=True),
    "tables of its own": dict(share_layers=True, own_embedding=True, own_head=True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_drafts_are_those_of_modules_without_a_cache(name, targets):
    lm, _ = targets["mimo"]
    config = MTPConfig(layer=module_layer(lm.config), num_modules=3, **SHAPES[name])
    drafter = MTP(config=config, target=lm.target)
    weights = weights_for(drafter)
    found, tokens = rounds(lm, drafter, weights, 9)
    length, drafts = found[-1]
    assert drafts == slow(lm, drafter, weights, tokens[:length], 3)[0]


# ------------------------------------------------------------------------------ checkpoints


def same(found, wanted):
    return jax.tree.structure(found) == jax.tree.structure(wanted) and all(
        jax.tree.leaves(jax.tree.map(np.array_equal, found, wanted))
    )


@pytest.mark.parametrize("case", CASES)
def test_modules_saved_alone_or_with_their_target_are_loaded_again(case, targets, tmp_path):
    lm, heads = targets[case]
    specjax.save_drafter(heads.drafter, heads.params, tmp_path / "alone", target=lm)
    again = specjax.load_drafter(tmp_path / "alone", lm)
    assert again.drafter == heads.drafter and same(again.params, heads.params)

    specjax.models.save_pretrained(lm, tmp_path / "whole", dtype="bfloat16")
    specjax.save_drafter(
        heads.drafter, heads.params, tmp_path / "whole", target=lm, dtype="bfloat16"
    )
    whole = specjax.load(tmp_path / "whole", tokenizer=False)
    assert same(whole.params, lm.params)
    drafter, weights = resolve_drafter(whole, "mtp")
    assert drafter.config == heads.drafter.config and same(weights, heads.params)
    tables = ("embed_tokens.weight", "head.weight")  # DeepSeek's files repeat the target's

    def names(folder):
        found = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
        return {n: x.shape for each in found for n, x in each.items() if not n.endswith(tables)}

    assert names(tmp_path / "whole") == names(GOLDEN / case)


def test_modules_of_a_llama_become_a_part_of_it_and_change_nothing_else(tmp_path):
    shutil.copytree(GOLDEN.parent / "features" / "target", tmp_path, dirs_exist_ok=True)
    lm = specjax.load(tmp_path, tokenizer=False, dtype="float32")
    layer = module_layer(lm.config)

    def saved(normed=True, **shape):
        config = MTPConfig(layer=layer, normed_output=normed, **shape)
        drafter = MTP(config=config, target=lm.target)
        params = weights_for(drafter)
        specjax.save_drafter(drafter, params, tmp_path, target=lm)
        return drafter, params

    for shape in (dict(num_modules=3, share_layers=True, normed=False), dict(num_modules=2)):
        drafter, params = saved(**shape)  # the second in the place of the first
        again = specjax.load(tmp_path, tokenizer=False, dtype="float32")
        assert same(again.params, lm.params) and again.checkpoint == lm.checkpoint
        found, weights = resolve_drafter(again, "mtp")
        assert found.config == drafter.config and same(weights, params)
    shard = "model-00001-of-00001.safetensors"  # the same target, published as one with an index
    (tmp_path / "model-00000-of-00001.safetensors").rename(tmp_path / shard)
    (tmp_path / "mtp.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    places = {name: shard for name, place in places.items() if place != "mtp.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    before = specjax.load(tmp_path, tokenizer=False, dtype="float32").checkpoint
    saved()
    again = specjax.load(tmp_path, tokenizer=False, dtype="float32")
    assert again.checkpoint == before != lm.checkpoint and resolve_drafter(again, "mtp")
    with pytest.raises(ValueError, match="pickled=True with format='mtp': modules are read from"):
        specjax.save_drafter(drafter, params, tmp_path / "b", target=lm, pickled=True)
    for shape in (dict(num_modules=1, embedding_first=False), dict(num_modules=2)):
        config = MTPConfig(layer=layer, own_head=True, **shape)
        with pytest.raises(ValueError, match="format='mtp': own_head: the layout of modules"):
            specjax.save_drafter(MTP(config=config, target=lm.target), {}, tmp_path / "c")
    file = tmp_path / "config.json"
    wrong = json.loads(file.read_text()) | {"specjax": {"normed_output": "false"}}
    file.write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match="normed_output='false': it must be true or false"):
        resolve_drafter(specjax.load(tmp_path, tokenizer=False, dtype="float32"), "mtp")


def test_modules_are_those_of_the_revision_that_the_target_was_loaded_from(targets, monkeypatch):
    asked = []

    def download(name, *, revision, **_):
        asked.append(revision)
        return str(GOLDEN / "mimo")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    lm = specjax.load("owner/model", tokenizer=False, dtype="float32", revision="v2")
    drafter, weights = resolve_drafter(lm, "mtp")
    assert same(weights, targets["mimo"][1].params)
    assert {*asked} == {"v2"}


def test_transformers_reads_the_modules_that_are_written(targets, tmp_path):
    torch = pytest.importorskip("torch")
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("transformers before 5.23 has no MTP")
    from transformers import AutoModelForCausalLM

    lm, heads = targets["deepseek"]
    specjax.models.save_pretrained(lm, tmp_path, dtype="float32")
    specjax.save_drafter(heads.drafter, heads.params, tmp_path, target=lm)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\..*"]  # not only the 61st
    expected = np.load(GOLDEN / "deepseek" / "expected.npz")["tokens"]
    tokens = theirs.generate(
        torch.tensor(PROMPT[None]), use_mtp=True, do_sample=False, max_new_tokens=12
    )
    assert tokens[0].tolist() == expected[: 7 + 12].tolist()


def test_modules_are_not_put_into_another_models_checkpoint(targets, tmp_path):
    lm, heads = targets["deepseek"]
    shutil.copytree(GOLDEN.parent / "features" / "target", tmp_path, dirs_exist_ok=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="another model than the modules belong to: its hidden"):
        specjax.save_drafter(heads.drafter, heads.params, tmp_path, target=lm)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("heads", ["eagle", "speculators"])  # one reads like a model, one does not
def test_modules_are_not_put_into_the_folder_of_other_heads(heads, tmp_path):
    shutil.copytree(GOLDEN.parent / "features" / heads, tmp_path, dirs_exist_ok=True)
    lm = specjax.load(GOLDEN.parent / "features" / "target", tokenizer=False, dtype="float32")
    drafter = MTP(config=MTPConfig(layer=module_layer(lm.config)), target=lm.target)
    weights = weights_for(drafter)
    before = specjax.load_drafter(tmp_path, lm)
    with pytest.raises(FileExistsError, match="holds a model or a drafter already"):
        specjax.save_drafter(drafter, weights, tmp_path, target=lm)
    assert specjax.load_drafter(tmp_path, lm).drafter == before.drafter
    specjax.save_drafter(drafter, weights, tmp_path, target=lm, overwrite=True)
    again = specjax.load_drafter(tmp_path, lm)
    assert again.drafter == drafter and same(again.params, weights)


def test_fastmtps_one_module_drafts_as_many_tokens_as_its_file_says(targets, tmp_path):
    shutil.copytree(GOLDEN / "mimo", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_speculative_steps": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lm, one = targets["mimo"]
    assert one.drafter.trained_depth is None  # so "auto" asks for no more than its one token
    assert resolve_drafter(lm, one, "auto")[0].depth == 1
    heads = specjax.load_drafter(tmp_path, lm)
    assert heads.drafter.topology == trees.chain(3)
    assert heads.drafter.num_stages == 1 and heads.drafter.max_depth is None
    with pytest.warns(UserWarning, match="4 tokens deep, and its file says .* trained for 3"):
        heads.drafter.with_topology(trees.chain(4))
    specjax.save_drafter(heads.drafter, heads.params, tmp_path / "again", target=lm)
    assert specjax.load_drafter(tmp_path / "again", lm).drafter == heads.drafter


def test_parallel_heads_are_loaded_as_they_were_saved(targets, tmp_path):
    lm, _ = targets["qwen"]
    layers = dataclasses.replace(lm.config, num_layers=2, tie_embeddings=False)
    drafter = ParallelHeads(config=MTPHeadsConfig(layers=layers), target=lm.target)
    weights = weights_for(drafter)
    specjax.save_drafter(drafter, weights, tmp_path, target=lm)
    again = specjax.load_drafter(tmp_path, lm)
    assert again.drafter.layer == 1 and again.drafter.num_draft == 2
    assert same(again.params, weights)


# --------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("case", "config", "tensors", "words"),
    [
        ("mimo", {}, {"model.mtp_layers.0.input_proj.weight": None}, "in no layout of heads"),
        (
            "mimo",
            {},
            {"model.mtp_layers.0.hidden_layernorm.weight": None},
            "missing .1.: model.mtp",
        ),
        ("qwen", {}, {"mtp.layers.0.x.weight": np.ones(2, np.float32)}, "left over .1.: mtp.lay"),
        ("qwen", {}, {"mtp.norm.weight": np.ones(3, np.float32)}, "is .3., expected .24."),
        ("qwen", {"num_nextn_predict_layers": 2}, {}, "=2, .* have the numbers .0.*are 0 to 1"),
        ("qwen", {"num_speculative_steps": "3"}, {}, "num_speculative_steps='3': it must be a wh"),
        (
            "qwen",
            {"speculators_config": {"proposal_methods": [1]}},
            {},
            "must be a list of objects",
        ),
        (
            "deepseek",
            {},
            {"model.layers.2.shared_head.head.weight": np.ones((48, 24), np.float32)},
            "made for another target",
        ),
    ],
)
def test_broken_modules_are_named(case, config, tensors, words, targets, tmp_path):
    shutil.copytree(GOLDEN / case, tmp_path, dirs_exist_ok=True)
    own = json.loads((tmp_path / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(own))
    changed = load_file(tmp_path / "model.safetensors") | tensors
    kept = {n: x for n, x in changed.items() if x is not None}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        specjax.load_drafter(tmp_path, targets[case][0])


def test_bad_shapes_and_absent_modules_are_named(targets):
    lm, heads = targets["deepseek"]
    layer = module_layer(lm.config)
    assert MTPConfig(layer=layer, share_layers=True) == MTPConfig(layer=layer)  # one is one
    with pytest.raises(ValueError, match="num_modules=0"):
        MTPConfig(layer=layer, num_modules=0)
    with pytest.raises(ValueError, match="num_layers=2: a module has one layer"):
        MTPConfig(layer=lm.config)
    with pytest.raises(ValueError, match="is 3 deep, and the drafter has 2 heads"):
        specjax.load_drafter(GOLDEN / "deepseek", lm, topology="chain:3")
    embedded = specjax.load("embedded", tokenizer=False)
    with pytest.raises(ValueError, match="made for another target|numbers .*load the target"):
        specjax.load_drafter(GOLDEN / "deepseek", embedded)
    with pytest.raises(ValueError, match="no published layout has"):
        config = MTPConfig(layer=layer, shared_ends=True, embedding_first=False)
        drafter = MTP(config=config, target=lm.target)
        specjax.save_drafter(drafter, weights_for(drafter), "nowhere")


def test_modules_whose_layer_the_file_could_not_hold_are_refused_before_training(targets):
    lm, _ = targets["qwen"]
    layer = dataclasses.replace(module_layer(lm.config), intermediate_size=12)
    drafter = MTP(config=MTPConfig(layer=layer), target=lm.target)
    words = "modules' layer has intermediate_size=12, and the target makes it"
    with pytest.raises(ValueError, match=f"{words}.*module_layer"):
        specjax.save_drafter(drafter, weights_for(drafter), "nowhere")
    assert not Path("nowhere").exists()
    with pytest.raises(ConfigError, match=words):  # the first thing that every recipe does
        head_export.layout_of(lm, drafter, weights_for(drafter))


def test_modules_of_speculators_are_those_of_qwen_under_other_names(targets, tmp_path):
    lm, heads = targets["qwen"]
    (weights,) = (GOLDEN / "qwen").glob("*.safetensors")
    theirs = {"layers.0": "", "pre_fc_norm_embedding": "token_layernorm", "fc": "input_proj"}
    theirs |= {"pre_fc_norm_hidden": "hidden_layernorm", "norm": "final_layernorm"}
    named = {}
    for name, x in load_file(weights).items():
        if part := next((p for p in theirs if name.startswith(f"mtp.{p}.")), None):
            end = name.removeprefix(f"mtp.{part}.")
            named[f"mtp_layers.0.{theirs[part]}.{end}".replace("..", ".")] = x
    save_file(named, tmp_path / "model.safetensors")
    said = {"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}}
    said |= {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(said))
    found = specjax.load_drafter(tmp_path, lm)
    assert found.drafter.config.num_modules == 3 and found.drafter.config.share_layers
    shape = dataclasses.replace(found.drafter.config, shared_ends=True)
    wanted = dataclasses.replace(heads.drafter.config, num_modules=3, share_layers=True)
    assert shape == wanted
    jax.tree.map(np.testing.assert_array_equal, found.params, heads.params)
