"""The embedded target and its light heads at 100M weights: the same texts, a larger model's cost.

A model of a few megabytes stays in a processor's cache, where a pass over several tokens takes
longer than one over a single token. The models that people run do not fit there: a pass reads their
weights from memory, however few tokens it is about. No trained model of such a size is at hand, so
the trained ones are *grown*: wider, with more layers and attention heads, so that they compute what
they did, but for rounding. What is added reads what was there and writes nothing that is read; it
is as much work as what does. So texts, drafts and tau are those of the small models, and the time
is that of large ones. The vocabulary stays as it is, 1.5 % of all weights (of Llama 7B: 2 %).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import specjax
from specjax.drafters.speculator import Speculator
from specjax.formats import HeadLM
from specjax.models import LM, CausalLM, Decoder, DecoderConfig
from specjax.resolve import LOOKUP, WithLookup, named

from .pairs import SHAPES

SHAPE = dataclasses.replace(SHAPES["100m"], num_layers=16)  # 100M weights beside the vocabulary
_WRITES = re.compile(r"embedding|attention\.o\.|mlp\.down\.")  # into the residual stream


@functools.cache
def embedded() -> LM:
    """The embedded target, grown to ``SHAPE``."""
    return grown_target(specjax.load("embedded"), SHAPE)


@functools.cache
def drafter(name: str) -> str | HeadLM | WithLookup:
    """What ``drafter=name`` means for it: ``ngram``, light heads, or these behind a lookup."""
    if name.startswith(LOOKUP):
        return WithLookup(drafter(name.removeprefix(LOOKUP)))
    found = named(specjax.load("embedded"), name)
    return grown_heads(found, embedded()) if isinstance(found, HeadLM) else found


def grown_target(lm: LM, shape: DecoderConfig) -> LM:
    """A model that says what the Llama-shaped ``lm`` says, of the sizes of ``shape``, which are at
    least its own.

    The root mean square over more features, those added being zero, is smaller: the weights of the
    norms make up for it.
    """
    old = lm.config
    sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
    config = dataclasses.replace(
        old,
        **{name: getattr(shape, name) for name in sizes},
        norm_eps=old.norm_eps * old.hidden_size / shape.hidden_size,
    )
    # an old query head stays with its keys: in a larger group, among as many as are in its own
    group, larger = (c.num_heads // c.num_kv_heads for c in (old, config))
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
    return dataclasses.replace(
        lm,
        target=CausalLM(config),
        params=nnx.from_flat_state(grown),
        name=f"{lm.name}, grown",
        fingerprint=f"{lm.fingerprint}-grown",
        checkpoint=f"{lm.checkpoint}-grown",
    )


def grown_heads(heads: HeadLM, target: LM) -> HeadLM:
    """Medusa's, Hydra's or a speculator's ``heads`` for what ``grown_target`` made of their target.

    They grow as much as its hidden states; what is added is zero.
    """
    drafter, wide = heads.drafter, target.config.hidden_size
    size, recurrent = drafter.config.hidden_size, isinstance(drafter, Speculator)
    times, sizes = wide // size, {"hidden_size": wide}
    if recurrent:
        sizes["inner_size"] = drafter.config.inner_size * times
    config = dataclasses.replace(drafter.config, **sizes)
    found = dataclasses.replace(drafter, config=config, target=target.target, layer=None)

    def grow(path, old, new):
        name, old = jax.tree_util.keystr(path, simple=True, separator="."), np.asarray(old)
        scale = 1.0
        if recurrent and re.search(r"norms.*weight|^embeddings", name):
            scale = times**-0.5  # as in the target; and `token_weight` grows with the state
        elif recurrent and drafter.config.scaled and name.startswith("projections.0"):
            scale = times**-0.5
        value = np.zeros(new.shape, old.dtype)
        where = [np.arange(length) for length in old.shape]
        if old.ndim == 2 and old.shape[1] % size == 0:  # one or several hidden states side by side
            states = np.arange(old.shape[1] // size)
            where[1] = (states[:, None] * wide + np.arange(size)).reshape(-1)
        value[np.ix_(*where)] = old * np.asarray(scale, np.float32)
        return jnp.asarray(value)

    shapes = nnx.to_pure_dict(found.shapes)
    params = jax.tree_util.tree_map_with_path(grow, heads.params, shapes)
    return dataclasses.replace(heads, drafter=found, params=params, target=target.checkpoint)
