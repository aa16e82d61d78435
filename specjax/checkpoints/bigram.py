"""Tables of n-grams in a layout of this project; no other is published::

    after.1 int32 [V]         the most frequent successor of each token, -1: none
    contexts.n int32 [M, n]   contexts of n tokens, sorted; n from 2 to order - 1
    after.n int32 [M]         their most frequent successors

The config has ``model_type: bigram``, ``vocab_size`` and ``order``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..drafters.bigram import Bigram, check_tables
from .weights import check_integers, listed

DESCRIPTION = "tables of n-grams (model_type bigram; after.1)"
DRAFTER, WEIGHTS_FILE = Bigram, "model"
_SIZES = ("vocab_size", "order")


def matches(config: Mapping, names: set[str]) -> bool:
    return config.get("model_type") == "bigram"


def load(config: Mapping, tensors: Mapping, target):
    sizes: dict[str, Any] = {name: config.get(name) for name in _SIZES}
    check_integers(**sizes)
    vocab = target.target.vocab_size
    if sizes["vocab_size"] != vocab:
        raise ValueError(
            f"it has vocab_size={sizes['vocab_size']} (the target: {vocab}): count the n-grams of "
            "texts in the target's own tokens, with specjax bigram"
        )
    drafter = Bigram(**sizes)
    tables = {name: np.asarray(tensors[name], np.int32) for name in tensors}
    check_tables(tables, drafter.vocab_size, drafter.order)
    wrong = [name for name, x in tables.items() if x.min() < -1 or x.max() >= vocab]
    if wrong:
        raise ValueError(f"{listed(wrong)}: there are tokens that the vocabulary of {vocab} lacks")
    return drafter, {name: jnp.asarray(x) for name, x in tables.items()}


def save(drafter: Bigram, params, target=None) -> tuple[dict, dict]:
    check_tables(params, drafter.vocab_size, drafter.order)
    sizes = {name: getattr(drafter, name) for name in _SIZES}
    tables = {name: np.asarray(x, np.int32) for name, x in params.items()}
    return {"model_type": "bigram"} | sizes, tables
