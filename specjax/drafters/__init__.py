"""Drafters: what proposes tokens. One method, one file; registered here by one line."""

import importlib

from .adaptive import Adaptive
from .draft_length import POLICIES, ExLlama, Goodput, HuggingFace
from .draft_model import DraftModel
from .hybrid import Hybrid
from .ngram import NGram
from .plain import Plain
from .synthetic import Synthetic
from .union import Union

DRAFTERS = {drafter.name: drafter for drafter in (Plain, DraftModel, NGram)}
DRAFTERS |= {
    "adaptive": Adaptive,
    "hybrid": Hybrid,
    "synthetic": Synthetic,
    "union": Union,
}  # named after what they hold

# drafters with layers of their own bring Flax along: imported when first asked for
_LAZY = {"Block": "block", "Blockwise": "blockwise", "Hydra": "hydra", "Medusa": "medusa"}
_LAZY |= {"Eagle": "eagle", "Eagle3": "eagle3", "PEagle": "peagle"}
_LAZY |= {"MTP": "mtp", "ParallelHeads": "mtp_heads"}
_LAZY |= {"Speculator": "speculator", "ReDrafter": "redrafter"}

__all__ = [
    "DRAFTERS",
    "POLICIES",
    "Adaptive",
    "Block",
    "Blockwise",
    "DraftModel",
    "Eagle",
    "Eagle3",
    "ExLlama",
    "Goodput",
    "HuggingFace",
    "Hybrid",
    "Hydra",
    "MTP",
    "Medusa",
    "NGram",
    "PEagle",
    "ParallelHeads",
    "Plain",
    "ReDrafter",
    "Speculator",
    "Synthetic",
    "Union",
]


def __getattr__(name: str):
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
