"""Copies of the published drafters of ``golden/features``, with other settings and weights."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parent / "golden" / "features"
DEEPSPEC, SPARK = "eagle3_deepspec", "dspark_speculators"


def edited(folder, source, config=None, rename=None, **tensors):
    """A copy of a golden drafter with other entries (None: left out) and other names."""
    shutil.copytree(GOLDEN / source, folder, dirs_exist_ok=True)
    own = json.loads((folder / "config.json").read_text()) | (config or {})
    own = {key: value for key, value in own.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(own))
    changed = load_file(folder / "model.safetensors") | tensors
    kept = {n: np.asarray(x) for n, x in changed.items() if x is not None}
    named = {(rename or str)(n): x for n, x in kept.items()}
    save_file(named, folder / "model.safetensors")
    return folder
