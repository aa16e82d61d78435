"""Hugging Face transformers on PyTorch, by the adapter of the suite ``peers``."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from .engine import METHODS, Setting, UnsupportedError

LACKING = {
    "int8": "transformers has no weights in 8 bits of its own on CPUs; it needs a further library",
    "int4": "transformers has no weights in 4 bits of its own on CPUs; it needs a further library",
}
NAMES = {"plain": "hf plain", "draft": "hf assisted", "lookup": "hf lookup"}


def prepare(pair, precision: str, folder: Path) -> None:
    """Nothing: transformers reads the checkpoints.

    Raises:
      UnsupportedError: eight or four bits.
    """
    if precision in LACKING:
        raise UnsupportedError(LACKING[precision])


def start(setting: Setting) -> Transformers:
    return Transformers(setting)


class Transformers:
    """See ``engine.Engine``. A request of one token of method ``draft`` is one of each model."""

    methods = METHODS

    def __init__(self, setting: Setting):
        from specjax.models import load

        from .. import pairs, peers

        models = [load(folder, tokenizer=False) for folder in setting.folders]
        folders = tuple(map(Path, setting.folders))
        pair = pairs.Pair("pair", *models, folders=folders)
        self.peer = peers.HuggingFace(pair, setting.precision)
        self.peer.torch.set_num_threads(setting.threads)
        self.scheme = f"weights, activations and cache in {setting.precision}"

    def generate(self, method, prompt, new, num_draft):
        names = ["hf plain", "hf draft"] if (method, new) == ("draft", 1) else [NAMES[method]]
        with self.peer.counting() as passes:
            outs = [self.peer.generate(name, prompt, new, num_draft) for name in names]
        return np.asarray(outs[0], np.int32), len(passes)

    def pass_seconds(self, nodes, length):
        torch, model = self.peer.torch, self.peer.target
        read = torch.as_tensor([[1 + t % 97 for t in range(length)]])
        with torch.inference_mode():
            cache = model(read, use_cache=True, logits_to_keep=1).past_key_values
            begin = time.perf_counter()
            out = model(torch.ones((1, nodes), dtype=torch.long), past_key_values=cache)
            out.logits.argmax(-1).tolist()
            return time.perf_counter() - begin
