"""What the golden files of feature drafters share: sizes, random weights, the layout of a case."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent / "features"
SIZES = dict(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
)
MASK = 23
KEPT = [1, 2, 3, 5, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 21, 22]  # of the draft vocabulary


@torch.no_grad()
def rounded(module, seed: int, scale: float = 0.35):
    """``module`` with random weights, none of them zero, that bfloat16 holds."""
    generator = torch.Generator().manual_seed(seed)
    for name, x in module.named_parameters():
        drawn = torch.randn(x.shape, generator=generator) * (scale if x.dim() > 1 else 0.2)
        x.copy_((drawn + ("norm" in name)).bfloat16().float())
    return module.float().eval()


def save(name: str, config: dict, tensors: dict, **expected) -> None:
    folder = HERE / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    own = {n: x.detach().clone() for n, x in tensors.items() if "rotary" not in n}
    own = {n: x.bfloat16() if x.is_floating_point() else x for n, x in own.items()}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    if expected:
        save_arrays(folder / "expected.npz", **expected)


def save_arrays(path: Path, **arrays) -> None:
    kinds = {name: np.asarray(x) for name, x in arrays.items()}
    kinds = {n: x.astype("f4" if x.dtype.kind == "f" else "i4") for n, x in kinds.items()}
    np.savez_compressed(path, **kinds)


def vocabulary_map(size: int) -> dict:
    """``d2t`` and ``t2d`` of the draft vocabulary ``KEPT``."""
    kept = torch.tensor(KEPT)
    return dict(d2t=kept - torch.arange(len(kept)), t2d=torch.isin(torch.arange(size), kept))
