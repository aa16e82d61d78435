"""EAGLE heads as SGLang reads them: the authors' layout, always with ``fc.bias``.

In SGLang ``fc`` has a bias whatever the config says, and stays random if the file lacks it; vLLM
has no such bias and refuses a file with one. So a head without it is written here with zeros, which
change nothing. SGLang's name of the architecture is ``LlamaForCausalLMEagle``, which vLLM refuses.
Reading is that of the authors' layout.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from . import eagle
from .eagle import DESCRIPTION, DRAFTER, WEIGHTS_FILE, load  # noqa: F401


def matches(config: Mapping, names: set[str]) -> bool:
    return False  # ``eagle`` reads it


def save(drafter, params, target=None) -> tuple[dict, dict]:
    config, tensors = eagle.save(drafter, params, target)
    fc = tensors["fc.weight"]
    tensors.setdefault("fc.bias", np.zeros(len(fc), fc.dtype))
    return config | {"architectures": ["LlamaForCausalLMEagle"], "bias": False}, tensors
