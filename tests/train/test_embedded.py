"""The models inside the package are those that were recorded at their export."""

import hashlib
import json
from pathlib import Path

import pytest
from specjax.train import export, tokenizer

import specjax

FOLDER = Path(specjax.__path__[0]) / "models" / "embedded"
LARGEST = {"target": 10_000_000, "draft": 1_800_000}  # bytes of weights


@pytest.mark.parametrize("name", LARGEST)
def test_shipped_files_match_their_recorded_hashes(name):
    record = json.loads((FOLDER / name / export.FINGERPRINTS).read_text())
    assert {"config.json", "model.safetensors"} <= set(record["files"])
    for file, expected in record["files"].items():
        assert hashlib.sha256((FOLDER / name / file).read_bytes()).hexdigest() == expected, file


@pytest.mark.parametrize("name", LARGEST)
def test_both_models_were_trained_with_the_shipped_tokenizer(name):
    record = json.loads((FOLDER / name / export.FINGERPRINTS).read_text())
    assert record["tokenizer"] == tokenizer.fingerprint(tokenizer.load("embedded"))


@pytest.mark.parametrize(("name", "limit"), LARGEST.items())
def test_shipped_weights_are_small_the_targets_in_eight_bits_the_others_in_bfloat16(name, limit):
    from safetensors import safe_open

    path = FOLDER / name / "model.safetensors"
    assert path.stat().st_size <= limit
    with safe_open(path, "np") as file:
        parts = {tensor: file.get_slice(tensor) for tensor in file.keys()}
    if name == "draft":
        assert {part.get_dtype() for part in parts.values()} == {"BF16"}
    else:
        assert specjax.load(FOLDER / name).target.quantized == "int8"
        assert specjax.load("embedded").target.quantized is None  # its floats are computed with
        floats = {tensor for tensor, part in parts.items() if part.get_dtype() == "F32"}
        assert all(tensor.endswith(("norm.weight", "_scale")) for tensor in floats)


def test_all_that_ships_is_less_than_28_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 28_000_000


def test_the_heads_are_small_bfloat16_and_the_shipped_targets_own():
    target, size = specjax.load("embedded"), {}
    for name in ("medusa", "speculator", "eagle3", "p-eagle", "mtp"):
        folder = FOLDER / name
        record = json.loads((folder / "config.json").read_text())
        assert record["torch_dtype"] == "bfloat16"
        assert record["specjax"]["target_fingerprint"] == target.checkpoint
        size[name] = sum(path.stat().st_size for path in folder.iterdir())
        assert specjax.load_drafter(folder, target).drafter.name == name
    assert size["eagle3"] <= 2_500_000 and sum(size.values()) <= 15_000_000
