"""Heads on the last hidden state: numbers and drafts of their authors' code, layouts, bad input."""

import dataclasses
import functools
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from toys import heads as weights_for
from toys import own_params, whole

import specjax
from specjax import Sampling, trees
from specjax.checkpoints import weights
from specjax.drafters import hydra, medusa
from specjax.types import Context, Segment

GOLDEN = Path(__file__).parent / "golden" / "heads"
PUBLISHED = {"medusa": medusa, "medusa_tied": medusa, "hydra": hydra, "hydra_prefix": hydra}


@pytest.fixture(scope="module")
def target():
    return specjax.load(GOLDEN / "target", tokenizer=False, dtype="float32")


@functools.partial(jax.jit, static_argnums=0)
def hidden_states(model, params, tokens):
    """``[B, T, H]`` of int32 ``tokens [B, T]``, normed."""
    cache, layer = model.init(params, *tokens.shape), model.config.num_layers
    return model.verify(params, cache, whole(tokens), features=(layer,), logits=False).features


@functools.partial(jax.jit, static_argnums=0)
def observe_and_draft(drafter, params, state, segment, context):
    return drafter.draft_step(
        *own_params(params), drafter.observe(*own_params(params), state, segment), context
    )


def drafted(heads, lm, tokens, roots):
    """The drafts int32 ``[rounds, N]`` after one text; in each round ``tokens[i]`` are read and
    then ``roots[i]`` is the root."""
    params = {"target": lm.params, "drafter": heads.params}
    state, start, drafts = heads.drafter.init(*own_params(params), 1, 32), 0, []
    text = jnp.zeros((1, 32), jnp.int32)
    features = hidden_states(lm.target, lm.params, np.concatenate(tokens)[None])
    for own, root in zip(tokens, roots, strict=True):
        end = start + len(own)
        text = text.at[0, start : end + 1].set(jnp.asarray([*own, root]))
        segment = Segment(
            tokens=text[:, start:end],
            next=text[:, start + 1 : end + 1],
            features=features[:, start:end],
            start=jnp.asarray([start]),
            num=jnp.asarray([len(own)]),
        )
        context = Context(
            tokens=text,
            length=jnp.asarray([end + 1]),
            budget=jnp.asarray([9]),
            key=jax.random.split(jax.random.key(0), 1),
            sampling=Sampling().rows(1),
        )
        draft, state = observe_and_draft(heads.drafter, params, state, segment, context)
        drafts.append(np.asarray(draft.tokens[0]))
        start = end
    return np.stack(drafts)


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_and_drafts_are_those_of_the_authors_code(name, target):
    expected, module = np.load(GOLDEN / name / "expected.npz"), PUBLISHED[name]
    paths = [[rank for rank in path if rank >= 0] for path in expected["paths"].tolist()]
    heads = specjax.load_drafter(GOLDEN / name, target, topology=trees.from_paths(paths))
    tokens = expected["tokens"]
    weights = heads.drafter.heads(heads.params)
    given = () if module is medusa else (tokens,)
    hidden = hidden_states(target.target, target.params, tokens)
    logits = jax.jit(lambda p: weights.logits(hidden, *given, target.target, p))(target.params)
    np.testing.assert_allclose(logits.transpose(2, 0, 1, 3), expected["logits"], atol=1e-5)
    first, second, fed = (expected[key] for key in ("first", "second", "fed"))
    found = drafted(heads, target, [tokens[0], fed], [first[0], second[0]])
    assert found.tolist() == [first.tolist(), second.tolist()]


# ----------------------------------------------------------------------------- layouts


def written(lm, folder, **settings):
    """Medusa heads of no merit in a folder; the drafter and its weights."""
    config = medusa.MedusaConfig(hidden_size=24, vocab_size=72, num_heads=2, **settings)
    params = nnx.to_pure_dict(nnx.split(medusa.MedusaHeads(config, rngs=nnx.Rngs(0)))[1])
    drafter = medusa.Medusa(config=config, target=lm.target)
    specjax.save_drafter(drafter, params, folder, target=lm)
    return drafter, params


def same(found, wanted):
    return jax.tree.structure(found) == jax.tree.structure(wanted) and all(
        jax.tree.leaves(jax.tree.map(np.array_equal, found, wanted))
    )


def test_nothing_is_overwritten_unless_that_is_asked_for(target, tmp_path):
    drafter, params = written(target, tmp_path)
    with pytest.raises(FileExistsError, match="holds a model or a drafter already.*overwrite=True"):
        specjax.save_drafter(drafter, params, tmp_path, target=target)
    other = jax.tree.map(lambda x: x + 1, params)
    specjax.save_drafter(drafter, other, tmp_path, target=target, overwrite=True)
    assert same(specjax.load_drafter(tmp_path, target).params, other)
    settings = dict(target=target, overwrite=True)
    (tmp_path / "medusa_lm_head.safetensors").rename(tmp_path / "other.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"older")
    specjax.save_drafter(drafter, params, tmp_path, pickled=True, **settings)
    assert same(specjax.load_drafter(tmp_path, target).params, params)
    (tmp_path / "config.json").unlink()
    for name in ("model-00001-of-00002.safetensors", "medusa_lm_head.safetensors"):
        (tmp_path / name).write_bytes(b"of another")
        with pytest.raises(FileExistsError):
            specjax.save_drafter(drafter, params, tmp_path, target=target)
        (tmp_path / name).unlink()
    specjax.save_drafter(drafter, params, tmp_path, target=target)  # a reader does not see the .pt
    specjax.save_drafter(drafter, other, tmp_path, format="medusa-vllm", **settings)
    assert same(specjax.load_drafter(tmp_path, target).params, other)


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, None) for name in PUBLISHED]
    + [("medusa", "medusa-vllm"), ("medusa_tied", "medusa-vllm")],
)
def test_what_is_saved_is_loaded_again(name, layout, target, tmp_path):
    heads = specjax.load_drafter(GOLDEN / name, target, topology="2x1")  # saved, too
    specjax.save_drafter(heads.drafter, heads.params, tmp_path, format=layout, target=target)
    again = specjax.load_drafter(tmp_path, target)
    assert again.drafter == heads.drafter
    assert same(again.params, heads.params)
    if layout is None:  # the authors' code finds its names
        (weights,) = (GOLDEN / name).glob("*.safetensors")
        theirs = {n: x.shape for n, x in load_file(weights).items()}
        tables = ("embed_fn.weight", "embed_tokens.weight")
        theirs = {n: shape for n, shape in theirs.items() if not n.endswith(tables)}
        ours = {n: x.shape for n, x in load_file(tmp_path / weights.name).items()}
        assert ours == theirs


@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_the_hidden_state_that_heads_read_is_kept(name, target, tmp_path):
    heads = specjax.load_drafter(GOLDEN / name, target)
    other = dataclasses.replace(heads.drafter, layer=1)
    specjax.save_drafter(other, heads.params, tmp_path, target=target)
    assert specjax.load_drafter(tmp_path, target).drafter.features == (1,)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.get("hidden_state_offset", config["specjax"].get("layer")) == 1


def test_heads_without_a_block_are_written_in_the_authors_layout_alone(target, tmp_path):
    medusa = specjax.load_drafter(GOLDEN / "medusa", target).drafter
    config = dataclasses.replace(medusa.config, num_layers=0)
    bare = dataclasses.replace(medusa, config=config)
    with pytest.raises(ValueError, match="num_layers=0: .* take 'medusa'"):
        specjax.save_drafter(bare, weights_for(bare), tmp_path, format="medusa-vllm")
    specjax.save_drafter(bare, weights_for(bare), tmp_path)
    assert specjax.load_drafter(tmp_path, target).drafter == bare


def test_medusa_heads_lie_beside_the_model_that_was_trained_with_them(target, tmp_path):
    model = load_file(GOLDEN / "target" / "model.safetensors")
    heads = load_file(GOLDEN / "medusa" / "medusa_lm_head.safetensors")
    behind = {f"medusa_head.{name}": x for name, x in heads.items()}
    save_file(model | behind, tmp_path / "model.safetensors")
    config = json.loads((GOLDEN / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"medusa_num_heads": 3}))
    lm = specjax.load(tmp_path, tokenizer=False, dtype="float32")
    assert same(lm.params, target.params)
    found = specjax.load_drafter(tmp_path, lm)
    assert same(found.params, specjax.load_drafter(GOLDEN / "medusa", target).params)


def test_vllm_heads_may_lack_biases_and_hold_the_targets_lm_head(target, tmp_path):
    heads = load_file(GOLDEN / "medusa_tied" / "medusa_lm_head.safetensors")
    named = {f"blocks.{i}.layers.0.weight": heads[f"{i}.0.linear.weight"] for i in range(3)} | {
        "lm_head.weight": load_file(GOLDEN / "target" / "model.safetensors")["lm_head.weight"]
    }
    save_file(named, tmp_path / "model.safetensors")
    config = dict(model_type="medusa", num_heads=3, vocab_size=72, original_lm_head=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = specjax.load_drafter(tmp_path, target)
    assert found.drafter.config == medusa.MedusaConfig(
        hidden_size=24, vocab_size=72, num_heads=3, bias=False, tied=True
    )


def test_pytorch_files_are_read_and_written(target, tmp_path):
    pytest.importorskip("torch")
    heads = specjax.load_drafter(GOLDEN / "medusa", target)
    specjax.save_drafter(heads.drafter, heads.params, tmp_path, dtype="bfloat16", pickled=True)
    assert (tmp_path / "medusa_lm_head.pt").is_file()
    assert same(specjax.load_drafter(tmp_path, target).params, heads.params)


def test_weights_take_the_type_of_the_target(target, tmp_path):
    lm = dataclasses.replace(
        target, params=jax.tree.map(lambda x: x.astype("bfloat16"), target.params)
    )
    heads = specjax.load_drafter(GOLDEN / "hydra_prefix", lm)
    assert {x.dtype for x in jax.tree.leaves(heads.params)} == {jnp.bfloat16.dtype}


# ----------------------------------------------------------------------------- bad input


def edited(folder, source, config=None, **tensors):
    """A copy of golden heads with other entries; None: left out."""
    shutil.copytree(GOLDEN / source, folder, dirs_exist_ok=True)
    own = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(own))
    (path,) = folder.glob("*.safetensors")
    changed = load_file(path) | tensors
    save_file({n: x for n, x in changed.items() if x is not None}, path)


@pytest.mark.parametrize(
    ("source", "config", "tensors", "words"),
    [
        ("medusa", {}, {"1.0.linear.bias": None}, "missing .1.: 1.0.linear.bias"),
        ("medusa", {}, {"extra.x": np.ones(2, np.float32)}, "left over .1.: extra.x"),
        ("medusa", {}, {"0.0.linear.bias": np.ones(3, np.float32)}, "is .3., expected .24."),
        ("medusa", {}, {"0.0.linear.bias": np.ones(24, np.int32)}, "no floating point"),
        ("hydra", {"hydra_head_arch": "eagle-attn"}, {}, "known: mlp, prefix-mlp"),
        ("hydra", {"grounded_heads": False}, {}, "Medusa"),
        ("hydra", {"hydra_num_heads": 5}, {}, "missing .12."),
        ("hydra", {"hydra_num_heads": 0}, {}, "hydra_num_heads=0: it must be at least 1"),
        ("hydra", {"hidden_state_offset": 3}, {}, "has 2 layers"),
        ("hydra", {"hidden_state_offset": "0"}, {}, "offset='0': it must be a whole number"),
        ("medusa", {"specjax": {"layer": "1"}}, {}, "layer='1': it must be a whole number"),
        ("medusa", {"specjax": {"layer": 9}}, {}, "medusa: layer=9: the target has 2 layers"),
        (
            "hydra",
            {},
            {"input_embed_fn.weight": np.ones((72, 24), np.float32)},
            "input_embed_fn.weight .72, 24. .*that of .*target differs",
        ),
        (
            "hydra_prefix",
            {},
            {"hydra_mlp.0.5.linear.bias": np.ones(24, np.float32)},
            "differs from hydra_mlp.0.3.linear.bias",
        ),
        ("medusa", {"specjax": {"target_fingerprint": "abc"}}, {}, "fingerprint abc"),
        ("medusa", {"specjax": [1]}, {}, "it must be an object"),
    ],
)
def test_what_is_wrong_with_heads_is_named(source, config, tensors, words, target, tmp_path):
    edited(tmp_path, source, config, **tensors)
    with pytest.raises(ValueError, match=words):
        specjax.load_drafter(tmp_path, target)


def test_an_unknown_layout_is_told_with_what_is_known(target, tmp_path):
    with pytest.raises(ValueError, match="that is known .*lm_head.weight.*Medusa's.*Hydra's"):
        specjax.load_drafter(GOLDEN / "target", target)
    (tmp_path / "config.json").write_text('{"speculators_model_type": "jetspec"}')
    with pytest.raises(FileNotFoundError, match="has no weights, .*safetensors, .*pt"):
        specjax.load_drafter(tmp_path, target)
    shutil.copy(GOLDEN / "target" / "model.safetensors", tmp_path)
    with pytest.raises(ValueError, match="that is known .model_type='jetspec'"):
        specjax.load_drafter(tmp_path, target)


def test_of_two_files_with_one_name_the_index_says_which_counts(target, tmp_path):
    shutil.copytree(GOLDEN / "medusa", tmp_path, dirs_exist_ok=True)
    wanted = specjax.load_drafter(tmp_path, target).params
    own = tmp_path / "medusa_lm_head.safetensors"
    name, found = "0.0.linear.bias", load_file(own)
    save_file({name: found[name] + 1}, tmp_path / "other.safetensors")
    words = f"{name} is both in {own.name} and in other.safetensors, and no model.safetensors.index"
    with pytest.raises(ValueError, match=words):
        specjax.load_drafter(tmp_path, target)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: own.name}}))
    assert same(specjax.load_drafter(tmp_path, target).params, wanted)
    index.write_text(json.dumps({"weight_map": {name: "other.safetensors"}}))
    assert not same(specjax.load_drafter(tmp_path, target).params, wanted)
    index.write_text(json.dumps({"weight_map": [name]}))
    with pytest.raises(ValueError, match=words):
        specjax.load_drafter(tmp_path, target)


def test_tables_are_compared_some_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(weights, "ROWS_AT_ONCE", 3)
    values = np.arange(16, dtype=np.float32).reshape(8, 2)

    class Table:
        shape, read = values.shape, []

        def __getitem__(self, rows):
            self.read.append(len(values[rows]))
            return values[rows]

    assert weights.same_table(values, Table()) and Table.read == [3, 3, 2]
    other = values.copy()
    other[-1, -1] += 1
    assert not weights.same_table(other, Table())


def test_a_pytorch_file_says_what_it_lacks(target, tmp_path, monkeypatch):
    shutil.copy(GOLDEN / "medusa" / "config.json", tmp_path)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"no pickle")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        with pytest.raises(ValueError, match="PyTorch is not installed: pip install torch"):
            specjax.load_drafter(tmp_path, target)
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match="medusa_lm_head.pt cannot be read as PyTorch tensors"):
        specjax.load_drafter(tmp_path, target)
