"""Heads of a small target, grown for the same target grown to another size (``grown.py``).

They grow as much as the target's hidden states, with zeros: they compute from the features that
they had what they computed, and write nothing to the others. Weights keep their dtypes, but for
those that are scaled, which bfloat16 would round. EAGLE-3 and P-EAGLE heads have a width of their
own, which they keep, and read the wider features.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.checkpoints import HeadLM
from specjax.drafters import MTP, Hydra, Medusa, ParallelHeads, PaSS, ReDrafter, SpecDec, Speculator
from specjax.drafters.block import BlockDrafter
from specjax.drafters.eagle3 import Eagle3
from specjax.models import LM, DecoderConfig
from specjax.models.seq2seq.config import EncoderDecoderConfig

KINDS = (Medusa, Hydra, Speculator, ReDrafter, MTP, ParallelHeads, PaSS, SpecDec, BlockDrafter)
SIZES = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")  # of layers
_OWN_SIZES = {Speculator: ("hidden_size", "inner_size"), ReDrafter: ("hidden_size", "exit_size")}
_NORM = re.compile(r"norms?\..*weight$")


def grown_heads(heads: HeadLM, target: LM) -> HeadLM:
    """Grows heads for a target from ``grown.grown_target``.

    Raises:
      ValueError: the heads are of another kind than ``KINDS``, EAGLE-3 and P-EAGLE; the size of the
        target's hidden states is not a multiple of theirs; or an EAGLE-3 head uses the target's
        embeddings or LM head.
    """
    drafter, wide = heads.drafter, target.config.hidden_size
    if isinstance(drafter, Eagle3):
        return _reading_more(heads, target)
    if not isinstance(drafter, KINDS):
        raise ValueError(f"{heads.name}: a {type(drafter).__name__} cannot be grown")
    small = drafter.target.config.hidden_size
    if wide % small:
        raise ValueError(f"{heads.name}: {small} features do not grow to {wide}")
    config = _wider(drafter, wide // small)
    last = drafter.layer == drafter.target.num_layers  # the hidden state that is read
    layer = None if last else drafter.layer
    grown = dataclasses.replace(drafter, config=config, target=target.target, layer=layer)

    def grow(path, old, new):
        if old.shape == new.shape:
            return old
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        places = [
            _places(drafter, name, axis, sizes, wide // small)
            for axis, sizes in enumerate(zip(old.shape, new.shape, strict=True))
        ]
        value = np.zeros(new.shape, np.float32)
        scale = _scale(drafter, name, wide // small)
        value[np.ix_(*places)] = np.asarray(old, np.float32) * np.float32(scale)
        return jnp.asarray(value, old.dtype if scale == 1 else jnp.float32)

    shapes = nnx.to_pure_dict(grown.shapes)
    params = jax.tree_util.tree_map_with_path(grow, heads.params, shapes)
    return _for_target(heads, grown, params, target)


def _for_target(heads: HeadLM, drafter, params, target: LM) -> HeadLM:
    """``heads`` with another drafter and weights, of ``target``."""
    return dataclasses.replace(
        heads,
        drafter=drafter,
        params=params,
        fingerprint=f"{heads.fingerprint}-{target.config.hidden_size}",
        target=target.checkpoint,
    )


def _wider(drafter, times: int):
    """The config of ``drafter``'s heads with all layers, and the sizes of its own, ``times`` as
    large."""
    config, more = drafter.config, {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, DecoderConfig | EncoderDecoderConfig):
            sizes = {n: times * getattr(value, n) for n in SIZES if hasattr(value, n)}
            more[field.name] = dataclasses.replace(value, **sizes, norm_eps=value.norm_eps / times)
        elif field.name in _OWN_SIZES.get(type(drafter), ("hidden_size",)):
            more[field.name] = times * value
    return dataclasses.replace(config, **more)


def _places(drafter, name: str, axis: int, sizes: tuple[int, int], times: int) -> np.ndarray:
    """Where the numbers of an axis of the weight ``name`` go, of its ``sizes`` before and after.

    Most axes are one vector, whose numbers stay together. Some are several vectors of one size,
    side by side, such as the hidden states that ``fc`` reads; after them there may be numbers that
    do not grow, or grow in their place.
    """
    (old, new), config = sizes, drafter.config
    one, count = drafter.target.config.hidden_size, None
    if isinstance(drafter, Speculator):  # fc: a token's embedding, and a hidden state
        one, count = config.inner_size if name.startswith("fc") and axis else old, 1
    elif "kernel_projection" in name and axis == 0:  # of DFlash2: a number for each group
        one //= config.conv_group
    elif re.search(r"attention\.|cross\.|mlp\.|relative_bias", name):
        one = old
    if old == new:
        return np.arange(old)
    if count is None:
        count = (new - old) // (one * (times - 1))
    starts = one * times * np.arange(count)
    grown = (starts[:, None] + np.arange(one)).reshape(-1)
    return np.append(grown, one * times * count + np.arange(old - len(grown)))


def _scale(drafter, name: str, times: int) -> float:
    """What a weight is multiplied by.

    The root mean square over all features is smaller by the square root of ``times``, and the
    weights of norms make up for it.
    """
    smaller = times**-0.5
    if isinstance(drafter, Speculator):
        scaled = drafter.config.scaled and name.startswith("projections.0")
        # `token_weight`, by which embeddings are multiplied, grows with the state
        return smaller if scaled or _NORM.search(name) or name.startswith(("embed", "fc")) else 1.0
    if (
        isinstance(drafter, SpecDec)
        and name == "norm.weight"
        and drafter.config.network.scale_logits
    ):
        return 1.0  # logits are divided by the square root of the features
    return smaller if _NORM.search(name) else 1.0


def _reading_more(heads: HeadLM, target: LM) -> HeadLM:
    """An EAGLE-3 or P-EAGLE head of the same width that reads the wider features of ``target``."""
    drafter, wide = heads.drafter, target.config.hidden_size
    config = drafter.config
    if not config.own_embedding or not config.draft_vocab_size or config.fc_norm:
        raise ValueError(
            f"{heads.name}: only a head with embeddings and an LM head of its own, and without "
            "norms of the features, can read a wider target"
        )
    own = dataclasses.replace(config, feature_size=wide)
    grown = dataclasses.replace(drafter, config=own, target=target.target, layer=None)

    def grow(old, new):
        if old.shape == new.shape:
            return old
        parts = (*old.shape[:-1], config.num_features, config.feature_size)
        added = [(0, 0)] * (len(parts) - 1) + [(0, wide - config.feature_size)]
        return jnp.pad(jnp.reshape(old, parts), added).reshape(new.shape)

    params = jax.tree.map(grow, heads.params, nnx.to_pure_dict(grown.shapes))
    return _for_target(heads, grown, params, target)
