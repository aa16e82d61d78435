"""The tokens whose embeddings stand for drafted tokens in files of block drafters and P-EAGLE."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from .._internal import callers
from ..drafters.block import BlockConfig
from ..drafters.eagle3 import Eagle3Config
from ..drafters.heads import HeadDrafter
from ..drafters.specdec import SpecDecConfig
from ..models.lm import LM
from ..types import Drafter

KEYS = ("mask_token_id", "pard_token", "ptd_token_id", "mask_token")
PLACES = ("dflash_config", "specdiff_config", "specdec_config", "transformer_layer_config")


def warn_of_text(name: str, config: Mapping, drafter: Drafter, target: LM) -> None:
    """Warns where the mask token of a drafter is one that the tokenizer decodes to text.

    A drafter cannot tell such a token from a token that is to be drafted. Special tokens, and rows
    of the embedding table that are no token, are what trainers use. Nothing is refused, since there
    are files of either kind.

    Args:
      name: of the folder, for the warning.
      config: the file's.
      drafter: what was loaded from it.
      target: the target; without a tokenizer nothing is known of its tokens.
    """
    tokenizer = target.tokenizer
    if tokenizer is None or not isinstance(drafter, HeadDrafter):
        return
    shape = drafter.config
    if not isinstance(shape, BlockConfig | Eagle3Config | SpecDecConfig):
        return
    mask = shape.mask_token
    if mask is None or mask not in tokenizer.vocabulary:
        return
    text = tokenizer.decode([mask])
    if text:
        warnings.warn(
            f"{name}: {_key_of(config)}={mask} is the token {text!r}, which texts may contain: the "
            "drafter takes it for a token to be drafted. If this id is not the one with which it "
            "was trained, correct it in config.json",
            stacklevel=callers.outside(),
        )


def _key_of(config: Mapping) -> str:
    """The key of a config that says which token it is."""
    parts = [config, *(config.get(place) or {} for place in PLACES)]
    return next((key for part in parts for key in KEYS if part.get(key) is not None), KEYS[0])
