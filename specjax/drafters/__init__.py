"""Drafters: what proposes tokens. One method, one file; registered here by one line."""

from .adaptive import Adaptive
from .model import DraftModel
from .ngram import NGram
from .plain import Plain
from .policies import POLICIES, ExLlama, Goodput, HuggingFace
from .synthetic import Synthetic
from .union import Union

DRAFTERS = {drafter.name: drafter for drafter in (Plain, DraftModel, NGram)}
DRAFTERS |= {
    "adaptive": Adaptive,
    "synthetic": Synthetic,
    "union": Union,
}  # named after what they hold

__all__ = [
    "DRAFTERS",
    "POLICIES",
    "Adaptive",
    "DraftModel",
    "ExLlama",
    "Goodput",
    "HuggingFace",
    "NGram",
    "Plain",
    "Synthetic",
    "Union",
]
