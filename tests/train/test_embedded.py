"""The models inside the package are those that were recorded at their export."""

import hashlib
import json
from pathlib import Path

import pytest
from specjax.train import export, tokenizer

import specjax

FOLDER = Path(specjax.__path__[0]) / "models" / "embedded"
LARGEST = {"target": 9_000_000, "draft": 1_000_000}  # bytes of weights


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
def test_shipped_weights_are_bfloat16_and_small_enough(name, limit):
    from safetensors import safe_open

    path = FOLDER / name / "model.safetensors"
    assert path.stat().st_size <= limit
    with safe_open(path, "np") as file:
        assert {file.get_slice(tensor).get_dtype() for tensor in file.keys()} == {"BF16"}


def test_the_heads_are_small_bfloat16_and_the_shipped_targets_own():
    target, size = specjax.load("embedded"), {}
    for name in ("medusa", "hydra", "speculator", "eagle3", "mtp"):
        folder = FOLDER / name
        record = json.loads((folder / "config.json").read_text())
        assert record["torch_dtype"] == "bfloat16"
        assert record["specjax"]["target_fingerprint"] == target.checkpoint
        size[name] = sum(path.stat().st_size for path in folder.iterdir())
        assert specjax.load_drafter(folder, target).drafter.name == name
    assert size["medusa"] + size["hydra"] <= 4_000_000 and size["speculator"] <= 2_000_000
    assert sum(size.values()) <= 9_500_000
