"""Folders in Hugging Face layout, read and written; and everything that can be wrong with one."""

import dataclasses
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import CASES, GOLDEN, SMALL, byte_tokenizer, random_model
from flax import nnx
from safetensors.numpy import load_file, save_file

from specjax import kernels
from specjax.kernels.cpu.backend import CpuBackend
from specjax.kernels.xla import XlaBackend
from specjax.kernels.xla_cpu import XlaCpuBackend
from specjax.models import DecoderConfig, load_config, load_weights, save_pretrained
from specjax.models.causal_lm import graph_definition

WEIGHTS = "model.safetensors"


def read(folder, dtype=None):
    return load_weights(folder, load_config(folder), dtype)


def change(folder, **tensors):
    """Rewrites the weights: a value replaces or adds a tensor, None removes it."""
    stored = load_file(folder / WEIGHTS)
    for name, value in tensors.items():
        name = name.replace("__", ".")
        stored = {k: v for k, v in stored.items() if k != name}
        if value is not None:
            stored[name] = value
    save_file(stored, folder / WEIGHTS, {"format": "pt"})


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


# What comes out is what went in.


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_transformers_is_written_back_byte_for_byte(case, tmp_path):
    config = load_config(GOLDEN / case)
    model = nnx.merge(graph_definition(config), read(GOLDEN / case))
    save_pretrained(model, tmp_path, dtype="bfloat16")
    theirs, ours = load_file(GOLDEN / case / WEIGHTS), load_file(tmp_path / WEIGHTS)
    assert theirs.keys() == ours.keys()
    for name in theirs:
        assert theirs[name].tobytes() == ours[name].tobytes()
    assert load_config(tmp_path) == config


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 20_000, 1])
def test_saving_and_loading_is_exact_in_one_file_and_in_shards(small, tmp_path, shard_bytes):
    save_pretrained(small, tmp_path, max_shard_bytes=shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    if shard_bytes == 20_000:
        assert 1 < len(files) < 10
        single = 320 * 32 * 4  # the embedding is larger than the limit and stands alone
        assert sum(path.stat().st_size > 20_000 + 2_000 for path in files) == 2
        assert max(path.stat().st_size for path in files) < single + 2_000
    index = tmp_path / "model.safetensors.index.json"
    assert index.is_file() == (len(files) > 1)
    assert_same(read(tmp_path), nnx.state(small))


def test_saving_again_leaves_no_old_shard_and_no_temporary_file(small, tmp_path):
    (tmp_path / "README.md").write_text("kept")
    save_pretrained(small, tmp_path, max_shard_bytes=20_000)
    (tmp_path / "chat_template.jinja").write_text("of another model")
    save_pretrained(small, tmp_path, tokenizer=byte_tokenizer())
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    wanted = {"README.md", "config.json", WEIGHTS}
    assert {p.name for p in tmp_path.iterdir()} == wanted | tokenizer
    for name in tokenizer:
        (tmp_path / name).unlink()
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [7, 8], "top_k": 5}')
    save_pretrained(small, tmp_path)
    assert load_config(tmp_path) == small.config
    assert json.loads(generation.read_text())["top_k"] == 5
    generation.unlink()
    assert {p.name for p in tmp_path.iterdir()} == wanted
    assert len({p.stat().st_mode for p in tmp_path.iterdir()}) == 1  # whoever reads one reads all
    assert_same(read(tmp_path), nnx.state(small))


def test_an_interrupted_save_leaves_the_old_checkpoint_whole(small, tmp_path, monkeypatch):
    save_pretrained(small, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def interrupted(tensors, path, metadata):
        path.write_bytes(b"half a fi")
        raise KeyboardInterrupt

    monkeypatch.setattr("specjax.models.hf.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(small, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_weights_are_float32_on_cpu_and_what_was_asked_elsewhere(llama, monkeypatch):
    dtypes = lambda params: {x.dtype.name for x in jax.tree.leaves(params)}  # noqa: E731
    monkeypatch.setattr(kernels, "current", lambda mesh=None: XlaCpuBackend())
    assert dtypes(read(llama)) == {"float32"}  # stored in bfloat16
    for name in ("bfloat16", "float16", "float32"):
        assert dtypes(read(llama, name)) == {name}
    assert dtypes(read(llama, jnp.bfloat16)) == {"bfloat16"}
    monkeypatch.setattr(kernels, "current", lambda mesh=None: XlaBackend())
    assert dtypes(read(llama)) == {"bfloat16"}


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_matrices_in_bfloat16_are_computed_in_float32_from_half_of_the_bytes(
    tmp_path, monkeypatch, stored
):
    monkeypatch.setattr(kernels, "current", lambda mesh=None: CpuBackend())
    save_pretrained(random_model(SMALL), tmp_path / "first", dtype=stored)
    params, config = read(tmp_path / "first"), load_config(tmp_path / "first")
    kinds = {(x.ndim, str(x.dtype)) for x in jax.tree.leaves(params)}
    assert kinds == {(1, "float32"), (2, stored)}
    floats = load_weights(tmp_path / "first", config, quantize="float")  # as training wants them
    assert {x.dtype for x in jax.tree.leaves(floats)} == {jnp.dtype("float32")}
    assert_same(jax.tree.map(lambda x: x.astype(jnp.float32), params), floats)
    # what has numbers of both types is written in the wider one
    norm = jnp.full_like(params["norm"]["weight"].get_value(), 1 + 2**-12)
    params["norm"]["weight"] = params["norm"]["weight"].replace(norm)
    save_pretrained(nnx.merge(graph_definition(config), params), tmp_path / "second")
    held = load_file(tmp_path / "second" / WEIGHTS)
    assert {x.dtype.name for x in held.values()} == {"float32"}
    np.testing.assert_array_equal(held["model.norm.weight"], norm)
    monkeypatch.setattr(kernels, "current", lambda mesh=None: XlaCpuBackend())
    assert_same(read(tmp_path / "first"), floats)


@pytest.mark.parametrize("dtype", ["float8", "int8", jnp.int32, 16, "fp32"])
def test_a_wrong_dtype_is_refused_with_the_accepted_ones(llama, dtype):
    with pytest.raises(ValueError, match="dtype=.*accepted: float32, bfloat16, float16"):
        read(llama, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_host_never_holds_the_model_twice(tmp_path, dtype):
    config = dataclasses.replace(SMALL, num_layers=8, hidden_size=128, intermediate_size=256)
    model = random_model(config)
    save_pretrained(model, tmp_path, dtype=dtype)
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    read(tmp_path)  # imports and caches are not counted
    tracemalloc.start()
    params = read(tmp_path)
    kept, peak = tracemalloc.get_traced_memory()  # on CPU a parameter may be numpy's own memory
    tracemalloc.stop()
    assert peak - kept < size / 3  # the largest tensor has 1/24 of it
    del params


def test_a_model_too_large_for_this_machine_fails_by_its_headers_alone(llama):
    """Nothing is initialised before loading: 3 TB of embeddings could not be."""
    config = json.loads((llama / "config.json").read_text())
    large = {"vocab_size": 100_000_000, "hidden_size": 8192}
    (llama / "config.json").write_text(json.dumps(config | large))
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight is \[64, 32\], expected \[100000000"
    ):
        read(llama)


# Names that differ without harm.


def test_buffers_and_tied_heads_that_nobody_needs_are_ignored(llama):
    expected = read(llama)
    change(llama, model__layers__0__self_attn__rotary_emb__inv_freq=np.zeros(4, np.float32))
    assert_same(read(llama), expected)
    change(llama, lm_head__weight=load_file(llama / WEIGHTS)["model.embed_tokens.weight"])
    config = dataclasses.replace(load_config(llama), tie_embeddings=True)
    tied = load_weights(llama, config)
    assert "lm_head" not in tied
    held = load_file(llama / WEIGHTS)
    del held["model.embed_tokens.weight"]  # some programs keep the other name of the two
    save_file(held, llama / WEIGHTS)
    assert_same(load_weights(llama, config), tied)


def test_a_head_of_its_own_in_a_model_that_is_called_tied_is_refused(llama):
    config = dataclasses.replace(load_config(llama), tie_embeddings=True)
    with pytest.raises(ValueError, match="tie_word_embeddings=true, .*lm_head.weight, which is no"):
        load_weights(llama, config)


def test_a_single_file_goes_before_an_index_as_in_transformers(small, tmp_path):
    save_pretrained(small, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "absent"}}')
    assert_same(read(tmp_path), nnx.state(small))


def test_a_checkpoint_of_the_bare_trunk_is_read_without_its_prefix(tmp_path, llama):
    """As GPT-2 lies on the hub: ``h.0...`` for ``transformer.h.0...``, with its mask buffers."""
    stored = load_file(GOLDEN / "gpt2" / WEIGHTS)
    bare = {name.removeprefix("transformer."): value for name, value in stored.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)
    bare["h.1.attn.masked_bias"] = np.ones((), np.float32)
    save_file(bare, tmp_path / WEIGHTS)
    found = load_weights(tmp_path, load_config(GOLDEN / "gpt2"))
    assert_same(found, read(GOLDEN / "gpt2"))


def test_the_text_part_of_a_model_that_also_sees_images_is_read_alone(tmp_path):
    """As the larger Gemma 3 lie on the hub; it is written as the text model that it is."""
    text = json.loads((GOLDEN / "gemma3" / "config.json").read_text())
    stored = load_file(GOLDEN / "gemma3" / WEIGHTS)
    whole = {f"language_model.{name}": value for name, value in stored.items()}
    whole["vision_tower.encoder.layers.0.mlp.fc1.bias"] = np.ones(4, np.float32)
    whole["multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(4, np.float32)
    save_file(whole, tmp_path / WEIGHTS)
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    untied = config | {"tie_word_embeddings": False}  # of both, that of the larger model counts
    (tmp_path / "config.json").write_text(json.dumps(untied))
    assert not load_config(tmp_path).tie_embeddings
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, 5]}))
    config = load_config(tmp_path)
    expected = load_config(GOLDEN / "gemma3")
    assert config == dataclasses.replace(expected, eos_ids=(1, 5))
    assert_same(read(tmp_path), read(GOLDEN / "gemma3"))
    del whole["language_model.model.layers.1.mlp.up_proj.weight"]
    save_file(whole, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"missing \(1\): model.layers.1.mlp.up_proj.weight$"):
        read(tmp_path)


def test_end_of_text_of_the_generation_config_takes_precedence(llama):
    assert load_config(llama).eos_ids == (2,)
    (llama / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert load_config(llama).eos_ids == (5, 6)
    (llama / "generation_config.json").write_text("{}")
    assert load_config(llama).eos_ids == (2,)


# Bad input: one clear error, before a byte of a weight is read.


def test_all_differences_are_reported_at_once(llama, monkeypatch):
    change(
        llama,
        model__norm__weight=None,
        lm_head__weight=np.zeros((60, 32), np.float32),
        model__layers__1__mlp__up_proj__bias=np.zeros(40, np.float32),
        model__layers__0__input_layernorm__weight=np.zeros(32, np.int8),
    )
    monkeypatch.setattr(jax, "device_put", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ValueError) as error:
        read(llama)
    message = str(error.value)
    assert "missing (1): model.norm.weight" in message
    assert "wrong shape (1): lm_head.weight is [60, 32], expected [64, 32]" in message
    assert "left over (1): model.layers.1.mlp.up_proj.bias" in message
    assert "wrong type (1): model.layers.0.input_layernorm.weight is I8" in message
    assert str(llama) in message


def promise(llama, layers):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))


def test_layers_that_the_config_promises_and_the_files_lack_are_named(llama):
    promise(llama, 4)
    change(llama, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ValueError) as error:
        read(llama)
    message = str(error.value)
    assert "whole layers missing (2): model.layers.2; model.layers.3\n" in message
    assert "  missing (1): model.layers.1.mlp.up_proj.weight" in message


def test_layers_of_which_the_config_does_not_know_are_named_too(llama):
    promise(llama, 1)
    with pytest.raises(ValueError, match=r"left over \(9\): model.layers.1.*and 1 more"):
        read(llama)


def test_a_long_list_of_differences_is_cut_short(llama):
    promise(llama, 30)
    with pytest.raises(ValueError, match=r"whole layers missing \(28\): model.*and 20 more"):
        read(llama)


def test_an_error_in_a_fused_and_transposed_tensor_names_it_as_the_file_does(tmp_path):
    config = load_config(GOLDEN / "gpt2")
    stored = load_file(GOLDEN / "gpt2" / WEIGHTS)
    name = "transformer.h.0.attn.c_attn.weight"
    stored[name] = np.ascontiguousarray(stored[name].T)
    save_file(stored, tmp_path / WEIGHTS)
    with pytest.raises(ValueError) as error:
        load_weights(tmp_path, config)
    assert f"{name} is [96, 32], expected [32, 96]" in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 200, -100])
def test_a_truncated_file_is_called_truncated(llama, keep):
    path = llama / WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.safetensors is truncated or corrupt"):
        read(llama)


def test_a_corrupt_header_is_called_corrupt(llama):
    path = llama / WEIGHTS
    content = bytearray(path.read_bytes())
    content[8:40] = b"x" * 32
    path.write_bytes(content)
    with pytest.raises(ValueError, match="truncated or corrupt"):
        read(llama)


def test_absent_weights_are_named_with_what_the_folder_holds(llama):
    (llama / WEIGHTS).rename(llama / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="no weights.*pytorch_model.bin.*as safetensors"):
        read(llama)


def test_absent_shards_are_named(small, tmp_path):
    save_pretrained(small, tmp_path, max_shard_bytes=20_000)
    shard = sorted(tmp_path.glob("model-*"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=rf"lacks 1 of the .*: {shard.name}; download"):
        read(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", r"..\x.safetensors", r"C:\x"]
)
def test_an_index_that_names_files_outside_its_folder_is_refused(small, tmp_path, name):
    save_pretrained(small, tmp_path / "inner")
    (tmp_path / "inner" / WEIGHTS).rename(tmp_path / "x.safetensors")
    index = {"weight_map": {"model.norm.weight": name}}
    (tmp_path / "inner" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names the file .*x.* outside its folder"):
        read(tmp_path / "inner")


def test_an_index_without_a_map_is_refused(small, tmp_path):
    save_pretrained(small, tmp_path, max_shard_bytes=20_000)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        read(tmp_path)


@pytest.mark.parametrize(
    "content, kind, message",
    [
        (None, FileNotFoundError, "has no config.json .it holds: .*model.safetensors"),
        ("{", ValueError, "config.json is not valid JSON"),
        ("[]", ValueError, "holds a list, not an object"),
        (
            '{"model_type": "mamba"}',
            ValueError,
            "'mamba' is not supp.*: llama, .*t5, whisper",
        ),
    ],
)
def test_a_broken_config_is_refused(llama, content, kind, message):
    (llama / "config.json").unlink()
    if content is not None:
        (llama / "config.json").write_text(content)
    with pytest.raises(kind, match=message):
        load_config(llama)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        load_config(tmp_path / "nowhere")


def test_a_model_that_no_family_can_hold_writes_nothing(tmp_path):
    config = DecoderConfig(**dataclasses.asdict(SMALL) | {"norm": "layer"})
    with pytest.raises(ValueError, match="norm='layer'"):
        save_pretrained(random_model(config), tmp_path / "out")
    assert not (tmp_path / "out").exists()
