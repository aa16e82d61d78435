"""EAGLE heads as SGLang wants them: the authors' layout, always with ``fc.bias``.

SGLang's ``fc`` has a bias whatever the config says, and one that the file lacks stays random; vLLM
knows none and refuses a file with one. So a head without it is written with zeros here, which makes
no difference to what it says. SGLang's name of the architecture is ``LlamaForCausalLMEagle``, which
vLLM refuses. What is read is the authors' layout."""

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
