"""Quantized checkpoints: what is saved comes back bit for bit, published layouts are read as their
definitions say, and all others are refused by the name of the field."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import SMALL, byte_tokenizer, random_model
from quantized_encoders import AWQ, GPTQ, GROUP, LAYOUTS, OTHERS, compressed_config, published
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import specjax
from specjax.decoding import reference
from specjax.models import quantize as q
from specjax.models import quantized_layouts, save_pretrained
from specjax.models.hf import _named
from specjax.models.quantized_layouts import Values, layout_of

EVEN = dataclasses.replace(SMALL, intermediate_size=64)


@pytest.fixture
def even(tmp_path):
    """A folder with random weights, all of whose sizes 32 divides, and a tokenizer."""
    save_pretrained(random_model(EVEN), tmp_path / "even", tokenizer=byte_tokenizer())
    return tmp_path / "even"


def arrays_of(lm):
    return {name: param.get_value() for name, param in _named(lm.params)}


def assert_same(ours, theirs):
    for name, array in arrays_of(ours).items():
        other = arrays_of(theirs)[name]
        assert q.is_quantized(array) == q.is_quantized(other), name
        jax.tree.map(np.testing.assert_array_equal, array, other)


@pytest.mark.parametrize(
    "wish",
    [
        specjax.Quantization("int8"),
        specjax.Quantization("int8", group_size=32, lm_head="float"),
        specjax.Quantization("int4"),
        specjax.Quantization("int4", lm_head="int4"),
    ],
    ids=str,
)
def test_a_quantized_model_comes_back_bit_for_bit_as_a_law_of_its_own(even, tmp_path, wish):
    lm = specjax.load(even, quantize=wish)
    save_pretrained(lm, tmp_path / "saved", max_shard_bytes=20_000)
    again = specjax.load(tmp_path / "saved")
    assert_same(again, lm)
    assert again.target.approximate == "" and "int" in again.target.quantized
    assert "approximate" not in repr(again) and "quantized to int" in repr(again)
    tokens = np.asarray([[5, 9, 2, 7]], np.int32)
    ours, theirs = (reference.logits(x.target, x.params, tokens) for x in (lm, again))
    np.testing.assert_array_equal(ours, theirs)
    widened = specjax.load(tmp_path / "saved", quantize="float")
    save_pretrained(widened, tmp_path / "floats")
    once, twice = (specjax.load(tmp_path / name, quantize="int4") for name in ("floats", "saved"))
    assert_same(twice, once)  # the floats for which the stored weights stand are quantized
    assert twice.target.approximate == once.target.approximate == "target quantized to int4"
    assert widened.target.quantized is None and not q.is_quantized(widened.params["embedding"][...])
    theirs = reference.logits(widened.target, widened.params, tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_head_of_its_own_beside_a_quantized_embedding_that_is_called_its_own_is_refused(tmp_path):
    """The same tensors under the head's name alone are the embedding."""
    tied = random_model(dataclasses.replace(EVEN, tie_embeddings=True))
    save_pretrained(tied, tmp_path / "tied")
    lm = specjax.load(tmp_path / "tied", tokenizer=False, quantize="int8")
    save_pretrained(lm, tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    held = load_file(file)
    head = {n.replace("model.embed_tokens", "lm_head"): x for n, x in held.items() if "embed" in n}
    for own in (head, {"lm_head.weight": np.zeros((EVEN.vocab_size, EVEN.hidden_size), "float32")}):
        save_file(held | own, file, {"format": "pt"})
        with pytest.raises(ValueError, match="lm_head.weight, which is not model.embed_tokens"):
            specjax.load(tmp_path / "saved", tokenizer=False)
    save_file({n: x for n, x in held.items() if "embed" not in n} | head, file, {"format": "pt"})
    assert_same(specjax.load(tmp_path / "saved", tokenizer=False), lm)


OWN_NAMES = {"q_proj": "attention.q", "o_proj": "attention.o", "down_proj": "mlp.down"}


def check_published(folder, layout, bits=4, group=GROUP):
    wanted = published(folder, layout)
    lm = specjax.load(folder)
    assert lm.target.quantized == f"int{bits}" and not lm.target.approximate
    held = arrays_of(lm)
    for kind, own in OWN_NAMES.items():
        block = "self_attn" if "attention" in own else "mlp"
        weight = held[f"blocks.1.{own}.weight"]
        # four bits are packed where their groups are multiples of 32 inputs
        assert weight.bits == (8 if (group or 32) % 32 else bits)
        assert weight.scale.shape[1] == weight.shape[1] // (group or weight.shape[1])
        numbers = wanted[f"model.layers.1.{block}.{kind}.weight"]
        np.testing.assert_allclose(q.floats(weight, "float32"), numbers, rtol=1e-6)
    assert not q.is_quantized(held["lm_head.weight"])
    return lm


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_weights_are_the_numbers_of_their_definition(even, layout):
    lm = check_published(even, layout)
    out = specjax.generate(lm, "ab", drafter="ngram", max_new_tokens=4)
    assert out.stats.approximate == ""


@pytest.mark.parametrize("layout", OTHERS)
def test_other_widths_and_groups_are_the_numbers_of_their_definition(even, layout, tmp_path):
    bits, group = OTHERS[layout][2:]
    lm = check_published(even, layout, bits, group)
    save_pretrained(lm, tmp_path / "saved")
    assert_same(specjax.load(tmp_path / "saved"), lm)


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors", "gptq 8", "plain groups"])
def test_fault_scales_that_are_read_a_group_off_are_seen(even, layout, monkeypatch):
    centred = quantized_layouts._centred

    def shifted(codes, scale, *rest):
        return centred(codes, np.roll(scale, 1, axis=1), *rest)

    monkeypatch.setattr(quantized_layouts, "_centred", shifted)
    bits, group = OTHERS[layout][2:] if layout in OTHERS else (4, GROUP)
    with pytest.raises(AssertionError, match="Mismatched"):
        check_published(even, layout, bits, group)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8 |= {"weight_block_size": [48, 32]}


def in_blocks(folder, kind=jnp.float8_e4m3fn):
    """Turns a folder's projections into float8 in blocks, some of which are cut off at the edge;
    the float64 numbers by name."""
    rng, tensors, wanted = np.random.default_rng(0), load_file(folder / "model.safetensors"), {}
    outputs, inputs = FP8["weight_block_size"]
    for name in [name for name in tensors if "_proj." in name]:
        values = tensors[name].astype(kind)
        out, columns = values.shape
        scale = rng.uniform(0.5, 2, (-(-out // outputs), -(-columns // inputs)))
        tensors |= {name: values, f"{name}_scale_inv": scale.astype(np.float32)}
        wide = np.repeat(np.repeat(scale.astype(np.float32), outputs, 0), inputs, 1)
        wanted[name] = values.astype(np.float64) * wide[:out, :columns]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf | {"quantization_config": FP8}))
    return wanted


def test_blocks_of_float8_are_the_numbers_of_their_definition(even, tmp_path):
    widened, wanted = load_file(even / "model.safetensors"), in_blocks(even)
    lm = specjax.load(even)
    assert lm.target.quantized == "fp8" and not lm.target.approximate
    held = arrays_of(lm)
    assert {str(x.dtype) for x in held.values() if not q.is_quantized(x)} == {"float32"}
    for kind, own in OWN_NAMES.items():
        block = "self_attn" if "attention" in own else "mlp"
        weight = held[f"blocks.1.{own}.weight"]
        assert weight.qvalue.dtype == jnp.float8_e4m3fn
        numbers = wanted[f"model.layers.1.{block}.{kind}.weight"]
        np.testing.assert_allclose(q.floats(weight, "float32"), numbers, rtol=1e-6)
    out = specjax.generate(lm, "ab", drafter="ngram", max_new_tokens=4)
    assert out.stats.approximate == ""
    with pytest.raises(ValueError, match="there is no layout for fp8"):
        save_pretrained(lm, tmp_path / "saved")

    hf = json.loads((even / "config.json").read_text())
    del hf["quantization_config"]
    (even / "config.json").write_text(json.dumps(hf))
    widened |= {name: numbers.astype(np.float32) for name, numbers in wanted.items()}
    save_file(widened, even / "model.safetensors", {"format": "pt"})
    floats, tokens = specjax.load(even), np.asarray([[5, 9, 2, 7]], np.int32)
    ours, theirs = (reference.logits(x.target, x.params, tokens) for x in (lm, floats))
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_float8_of_another_kind_is_refused_by_the_name_of_the_tensor(even):
    in_blocks(even, jnp.float8_e5m2)
    with pytest.raises(
        ValueError, match="_proj.weight is F8_E5M2, .* F8_E4M3 is; use the unquantized"
    ):
        specjax.load(even)


def test_fault_blocks_of_another_size_are_refused(even):
    in_blocks(even)
    hf = json.loads((even / "config.json").read_text())
    hf["quantization_config"]["weight_block_size"] = [16, 32]
    (even / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ValueError, match="weight_scale_inv is .* blocks of 16 by 32"):
        specjax.load(even)


def test_experts_and_stacked_tensors_come_back_too(tmp_path):
    config = dataclasses.replace(
        EVEN,
        model_type="qwen3_moe",
        num_experts=4,
        experts_per_token=2,
        expert_size=32,
        qk_norm=True,
    )
    save_pretrained(random_model(config), tmp_path / "moe")
    lm = specjax.load(tmp_path / "moe", tokenizer=False, quantize="int4")
    save_pretrained(lm, tmp_path / "saved")
    again = specjax.load(tmp_path / "saved", tokenizer=False)
    assert_same(again, lm)
    assert arrays_of(again)["blocks.0.mlp.experts.up"].qvalue.shape == (4, 32, 16)
    phi = dataclasses.replace(EVEN, model_type="phi3")
    save_pretrained(random_model(phi), tmp_path / "phi")
    lm = specjax.load(tmp_path / "phi", tokenizer=False, quantize="int4")
    save_pretrained(lm, tmp_path / "phi2")
    with safe_open(tmp_path / "phi2" / "model.safetensors", "np") as file:
        assert "model.layers.0.self_attn.qkv_proj.weight_packed" in file.keys()
    assert_same(specjax.load(tmp_path / "phi2", tokenizer=False), lm)


@pytest.mark.parametrize(
    "config, message",
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method='bitsandbytes'"),
        (GPTQ | {"bits": 3}, r"quantization_config.bits=3.*accepted: 4, 8"),
        (GPTQ | {"desc_act": True}, r"quantization_config.desc_act=True"),
        (AWQ | {"version": "gemv"}, r"quantization_config.version='gemv'"),
        (AWQ | {"zero_point": False}, r"quantization_config.zero_point=False"),
        (compressed_config(num_bits=2), r"group_0.weights.num_bits=2.*accepted: 4, 8"),
        (compressed_config(type="float"), r"group_0.weights.type='float'"),
        (compressed_config(actorder="group"), r"group_0.weights.actorder='group'"),
        (compressed_config(strategy="tensor"), r"group_0.weights.strategy='tensor'"),
        (compressed_config() | {"format": "float-quantized"}, r"format='float-quantized'"),
        (compressed_config() | {"kv_cache_scheme": {"num_bits": 8}}, r"config.kv_cache_scheme="),
        (FP8 | {"activation_scheme": "static"}, r"quantization_config.activation_scheme='static'"),
        (FP8 | {"weight_block_size": None}, r"quantization_config.weight_block_size=None"),
        (compressed_config() | {"config_groups": {}}, r"quantization_config.config_groups="),
        (
            compressed_config() | {"transform_config": {"config_groups": {"u": {}}}},
            "transform_config=",
        ),
        (compressed_config() | {"rotation": "hadamard"}, "quantization_config.rotation='hadamard'"),
        (
            compressed_config() | {"sparsity_config": {"format": "marlin-24"}},
            "sparsity_config.format=",
        ),
        (
            GPTQ | {"adapter": {"rank": 8}},
            "quantization_config.adapter={'rank': 8}.*accepted: None",
        ),
        (
            GPTQ | {"pack_dtype": "int8"},
            "quantization_config.pack_dtype='int8'.*accepted: None, 'int32'",
        ),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format=True"),
        (GPTQ | {"format": "marlin"}, "config.format='marlin'.*accepted: None, 'gptq', 'gptq_v2'"),
        (
            GPTQ | {"format": "gptq", "checkpoint_format": "gptq_v2"},
            "config.format='gptq' .*accepted: None, 'gptq_v2'",
        ),
        (AWQ | {"rescale": 2.0}, "quantization_config.rescale=2.0"),
        (FP8 | {"static_scale": False}, "quantization_config.static_scale=False"),
        (GPTQ | {"group_size": 0}, r"config.group_size=0 .*accepted: 'a positive integer', -1"),
        (AWQ | {"group_size": None}, r"quantization_config.group_size=None"),
        (compressed_config(group_size=True), r"group_0.weights.group_size=True"),
        (compressed_config(strategy="channel"), r"weights.group_size=32 .*accepted: None, -1"),
    ],
)
def test_a_layout_that_is_not_read_is_refused_by_the_name_of_its_field(config, message):
    with pytest.raises(ValueError, match=message + ".*use the unquantized checkpoint"):
        layout_of({"quantization_config": config})


@pytest.mark.parametrize(
    "config",
    [
        compressed_config()
        | {"transform_config": {}, "sparsity_config": {}, "global_compression_ratio": 1.9}
        | {"quantization_status": "compressed", "version": "0.12.2", "kv_cache_scheme": None},
        GPTQ
        | {"format": "gptq", "pack_dtype": "int32", "sym": True, "lm_head": False, "dynamic": {}}
        | {"damp_percent": 0.05, "static_groups": False, "true_sequential": True, "adapter": None}
        | {"meta": {"quantizer": ["gptqmodel:4.0"]}, "is_marlin_format": False},
        AWQ | {"modules_to_not_convert": None, "backend": "autoawq", "do_fuse": False},
        FP8 | {"modules_to_not_convert": ["lm_head"], "scale_fmt": "ue8m0"},
    ],
)
def test_fields_that_change_no_law_are_not_read(config):
    assert layout_of({"quantization_config": config}) is not None


def test_quantized_activations_are_refused():
    config = compressed_config()
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(ValueError, match="group_0.input_activations={'num_bits': 8}.*unquantized"):
        layout_of({"quantization_config": config})


def test_inputs_out_of_the_order_of_their_groups_are_refused(even):
    published(even, "gptq")
    tensors = load_file(even / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.g_idx"
    tensors[name] = tensors[name][::-1].copy()
    save_file(tensors, even / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="gptq: model.layers.0.mlp.down_proj.g_idx: the groups"):
        specjax.load(even)


def test_a_zero_that_readers_of_version_1_differ_about_is_refused_by_the_name_of_its_tensor(even):
    published(even, "gptq")
    tensors = load_file(even / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.qzeros"
    tensors[name][0, 1] |= 15 << 8
    save_file(tensors, even / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"gptq: {name} holds 15, .* accepted: 0 to 14; .*gptq_v2"):
        specjax.load(even)
    # version 2 has a zero of 15, and no other
    hf = json.loads((even / "config.json").read_text())
    hf["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (even / "config.json").write_text(json.dumps(hf))
    zero = arrays_of(specjax.load(even))["blocks.0.mlp.down.weight"].zero
    assert zero[10, 0] == 15


@pytest.mark.parametrize("zero", [16, -1])
def test_a_zero_that_does_not_fit_in_its_bits_is_neither_read_nor_written(zero):
    scale, zeros = np.ones((8, 1), np.float32), np.full((8, 1), zero, np.int32)
    codes = np.zeros((8, 32), np.uint8)
    with pytest.raises(ValueError, match=f"qzeros has a zero point of {zero}, .* are 0 to 15; use"):
        quantized_layouts._centred(codes, scale, zeros, 4, "qzeros")
    values = Values(codes.astype(np.int8), scale, (zeros - 8).astype(np.int8), 4)
    message = f"a.weight_zero_point cannot be written: a code is {zero}; 4 bits hold 0 to 15"
    with pytest.raises(ValueError, match=message):
        quantized_layouts.encode("a", values)


@pytest.mark.parametrize("layout", ["gptq v2", "awq", "compressed-tensors"])
@pytest.mark.parametrize("size", [16, 64, -1])
def test_groups_that_contradict_the_config_are_refused_by_field_and_tensor(even, layout, size):
    published(even, layout)
    hf = json.loads((even / "config.json").read_text())
    config, field = hf["quantization_config"], "quantization_config."
    if config["quant_method"] == "compressed-tensors":
        config, field = config["config_groups"]["group_0"]["weights"], "config_groups.group_0."
        config["strategy"] = "group" if size > 0 else "channel"
    config["group_size"] = size
    (even / "config.json").write_text(json.dumps(hf))
    message = (
        rf"{hf['quantization_config']['quant_method']}: model\.layers\..*scales? has \d groups"
    )
    with pytest.raises(
        ValueError, match=rf"{message}.* contradicts .*{field}.*group_size={size} of"
    ):
        specjax.load(even)
