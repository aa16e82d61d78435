"""Drafters: what proposes tokens. One method, one file; registered here by one line."""

from .model import DraftModel
from .ngram import NGram
from .plain import Plain

DRAFTERS = {drafter.name: drafter for drafter in (Plain, DraftModel, NGram)}

__all__ = ["DRAFTERS", "DraftModel", "NGram", "Plain"]
