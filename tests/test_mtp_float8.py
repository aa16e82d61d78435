"""MTP modules whose weights are stored in float8, with a scale for each block."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.checkpoints.weights import Tensors
from specjax.models import quantized_files
from specjax.text.drafter_names import resolve_drafter

GOLDEN = Path(__file__).parent / "golden" / "mtp"
BLOCK = 16
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


def in_blocks(folder, floats):
    """Two folders: DeepSeek's golden model in float8, its module as well; and the floats for which
    these numbers stand."""
    random, stored, wide = np.random.default_rng(0), {}, {}
    for name, values in load_file(GOLDEN / "deepseek" / "model.safetensors").items():
        stored[name] = wide[name] = values
        if "_proj." in name and "eh_proj" not in name:
            stored[name] = values.astype(jnp.float8_e4m3fn)
            scale = random.uniform(0.5, 2, [-(-n // BLOCK) for n in values.shape])
            stored[f"{name}_scale_inv"] = scale = scale.astype(np.float32)
            rows, columns = values.shape
            scale = scale.repeat(BLOCK, 0).repeat(BLOCK, 1)[:rows, :columns]
            wide[name] = stored[name].astype(np.float32) * scale
    for place, tensors, said in (
        (folder, stored, {"quantization_config": FP8}),
        (floats, wide, {}),
    ):
        shutil.copytree(GOLDEN / "deepseek", place)
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(config | said))


def test_a_module_in_float8_is_read_as_the_floats_for_which_it_stands(tmp_path, monkeypatch):
    in_blocks(tmp_path / "blocks", tmp_path / "floats")
    ours, theirs = (
        specjax.load(tmp_path / name, tokenizer=False, dtype="float32")
        for name in ("blocks", "floats")
    )
    found, _ = resolve_drafter(ours, "auto")
    assert found.name == "mtp"  # what a model takes by default
    wanted = specjax.load_drafter(tmp_path / "floats", theirs).params
    heads = specjax.load_drafter(tmp_path / "blocks", ours)
    jax.tree.map(np.testing.assert_array_equal, heads.params, wanted)

    def forgotten(self, name):
        return np.asarray(self._decoded(name).values, np.float32)

    monkeypatch.setattr(quantized_files.QuantizedReader, "numbers", forgotten)  # no scales
    wrong = specjax.load_drafter(tmp_path / "blocks", ours).params
    apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), wrong, wanted)
    assert max(jax.tree.leaves(apart)) > 1e-2


def test_a_layout_without_quantized_weights_refuses_float8(tmp_path):
    save_file({"w": np.ones((2, 2)).astype(jnp.float8_e4m3fn)}, tmp_path / "model.safetensors")
    tensors = Tensors(tmp_path)
    assert "w" in tensors and "v" not in tensors and tensors.shape("w") == (2, 2)
    with pytest.raises(ValueError, match="w is F8_E4M3, .* only with its scale"):
        tensors["w"]
