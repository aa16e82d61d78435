"""The embedded target and its heads, grown to 100M weights with the same texts.

A model of a few megabytes stays in a processor's cache, where a pass over several tokens takes
longer than one over a single token. Models of practical size do not fit there: a pass reads their
weights from memory, even for few tokens. No trained model of such a size was at hand, so the
embedded models are *grown*: they get more features, layers and attention heads that do not change
what they compute, except for rounding. The added weights read existing features and write to
features that are never read; products are dense, so they cost as much as the others. Texts, drafts
and τ are therefore those of the small models, and the time is that of a target of 100M weights with
a small vocabulary: its LM head is 3 % of its weights (Llama 7B: 2 %), where models of 100M weights
often have a quarter. The target is float32, and heads keep the precision of their files
(``grown_heads.py``).

``python -m benchmarks.grown FOLDER`` writes the grown target, for recipes that make heads for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import sys

import jax.numpy as jnp
import numpy as np
from flax import nnx

import specjax
from specjax.checkpoints import HeadLM
from specjax.models import LM, CausalLM, Decoder, DecoderConfig, save_pretrained
from specjax.text import cascades
from specjax.text.drafter_names import WithLookup, is_simple, lookup_of, named, resolve_drafter

from .grown_heads import SIZES, grown_heads
from .pairs import SHAPES

SHAPE = dataclasses.replace(SHAPES["100m"], num_layers=16)
WIDE = {  # by the number of layers, none of which is added
    6: dict(hidden_size=1152, intermediate_size=3840, num_heads=18, num_kv_heads=6),
    12: dict(hidden_size=768, intermediate_size=2816, num_heads=12, num_kv_heads=4),
}
_SIZES = (*SIZES, "num_layers")
_WRITES = re.compile(r"embedding|attention\.o\.|mlp\.down\.")  # they write the residual stream


@functools.cache
def grown_embedded() -> LM:
    """The embedded target, grown to ``SHAPE``."""
    return grown_target(specjax.load("embedded", quantize="float"), SHAPE)


@functools.cache
def wide(name: str = "embedded") -> LM:
    """The embedded target, or another small Llama of 6 or 12 layers, grown to 100M weights with no
    further layers, for drafters that are a part of its layers: an added layer changes nothing and
    could be skipped for nothing.

    Raises:
      ValueError: the model has another number of layers, or is larger.
    """
    lm = specjax.load(name, quantize="float")
    layers = lm.config.num_layers
    if layers not in WIDE:
        raise ValueError(
            f"{name}: {layers} layers; grown are models of {' or '.join(map(str, WIDE))}"
        )
    return grown_target(lm, dataclasses.replace(SHAPE, **WIDE[layers], num_layers=layers))


def grown_drafter(name: str) -> str | LM | HeadLM | WithLookup:
    """Returns the drafter ``name`` for the grown target: a table, a light head, the embedded draft
    model as it is, or a cascade of it.

    A name such as ``ngram+medusa`` stands for a lookup, and a head where it finds nothing.

    Raises:
      ValueError: the drafter cannot be grown.
    """
    if is_simple(name) or name == "rest":
        return name
    if name == "draft":
        return specjax.load("embedded-draft")
    if cascades.is_cascade(name):
        return cascades.named_cascade(grown_embedded(), name, grown_drafter, resolve_drafter)
    if lookup := lookup_of(name):
        return WithLookup(grown_drafter(name.removeprefix(lookup)), lookup)
    heads = named(specjax.load("embedded"), name)
    if not isinstance(heads, HeadLM):
        raise ValueError(
            f"drafter={name!r} cannot be grown: give a table, draft, cascade:draft:TABLE, or the "
            "name or folder of heads"
        )
    return grown_heads(heads, grown_embedded())


def grown_target(lm: LM, shape: DecoderConfig) -> LM:
    """Returns a model with the sizes ``_SIZES`` of ``shape`` and the logits of ``lm``, a Llama
    whose weights are floats.

    The added features are zero, so the root mean square over all features is smaller; the weights
    of the norms contain the factor that makes up for it.

    Raises:
      ValueError: a size, or the number of queries of a key, is smaller than that of ``lm``.
    """
    old, wide = lm.config, {name: getattr(shape, name) for name in _SIZES}
    config = dataclasses.replace(
        old, **wide, norm_eps=old.norm_eps * old.hidden_size / shape.hidden_size
    )
    # an old query head stays with its key head, whose group is at least as large
    group, larger = (c.num_heads // c.num_kv_heads for c in (old, config))
    if larger < group or any(wide[name] < getattr(old, name) for name in _SIZES):
        raise ValueError(f"shape={wide}: each must be at least {lm.name}'s, the groups' size too")
    heads = np.arange(old.num_heads)
    heads = heads // group * larger + heads % group
    queries = (heads[:, None] * old.head_dim + np.arange(old.head_dim)).reshape(-1)

    fresh = nnx.state(Decoder(config, rngs=nnx.Rngs(0), param_dtype=lm.dtype))
    small, grown = dict(nnx.to_flat_state(lm.params)), []
    for path, param in nnx.to_flat_state(fresh):
        name, value = ".".join(map(str, path)), np.array(param.get_value())
        if _WRITES.search(name):
            value[...] = 0
        if path in small:
            given = np.asarray(small[path].get_value())
            where = [np.arange(size) for size in given.shape]
            if ".q." in name:
                where[0] = queries
            elif ".o." in name:
                where[1] = queries
            elif "norm" in name:
                given = given * math.sqrt(old.hidden_size / config.hidden_size)
            value[np.ix_(*where)] = given
        grown.append((path, param.replace(jnp.asarray(value))))
    mark = "x".join(str(size) for size in wide.values())
    return dataclasses.replace(
        lm,
        target=CausalLM(config),
        params=nnx.from_flat_state(grown),
        name=f"{lm.name}-{mark}",
        fingerprint=f"{lm.fingerprint}-{mark}",
        checkpoint=f"{lm.checkpoint}-{mark}",
        loaded=False,
    )


def main(arguments: list[str] | None = None) -> int:
    """Writes the grown target."""
    parser = argparse.ArgumentParser(description="Writes the embedded target, grown to 100M.")
    parser.add_argument("folder", help="the folder that it is written to")
    save_pretrained(grown_embedded(), parser.parse_args(arguments).folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
