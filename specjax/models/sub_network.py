"""A part of a decoder that drafts over the weights and the cache of the whole.

Leaving out a sublayer leaves out its norms: the residual stream passes it unchanged. The committed
tokens have entries in every layer, which the target wrote; the drafted nodes have entries of their
own in the layers that ran.

With a small cache (``small_cache.py``) the part reads only the sinks and the window of the target's
cache, whose entries are taken from it once a round. It may then be the whole of the target.

The first layers, up to the first that lacks a sublayer, compute for a drafted node what the target
computes. Their entries and the states after them are handed to the target's pass
(``Draft.partial``), which runs the other layers alone. With a small cache nothing is handed over.

References: Draft & Verify, arXiv 2309.08168 (``skip``); LayerSkip, arXiv 2404.16710, section 4.3
(``exit``, and the reuse of entries and states).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .._internal.optional import required
from .._internal.pytree import pytree_dataclass, static
from ..types import Draft, Scores, SubNetwork, Target
from .chosen_entries import ChosenEntries, choosing_layers
from .config import ATTENTION, EVERY_SUBLAYER, MLP_SUBLAYER
from .part_model import PartModel, RunsInPart

KINDS = (ATTENTION, MLP_SUBLAYER)
MOST_LAYERS = 10_000  # of any model; a range that ends above it is a mistake
_ITEM = re.compile(r"(?:(attention|mlp)[.:])?(\d+)(?:-(\d+))?")


@pytree_dataclass
class PartialEntries:
    """What a part computed of M nodes.

    Attributes:
      layers: per layer the entries, leaves ``[B, K, M, E]``; None where no attention ran.
      states: ``[B, M, H]``, the residual stream after the first ``shared`` layers.
      shared: the number of leading layers that computed what the target computes.
    """

    layers: tuple[Any, ...]
    states: jax.Array
    shared: int = static(default=0)

    def of_nodes(self, place: jax.Array | None, num_nodes: int) -> PartialEntries:
        """The first ``shared`` layers' entries and states, of the nodes at ``place``.

        Args:
          place: int32 ``[1 or B, N]`` indices among the M nodes, or None: the first ``num_nodes``.
        """

        def take(x, axis):
            if place is None:
                return jax.lax.slice_in_dim(x, 0, num_nodes, axis=axis)
            shape = [1] * x.ndim
            shape[0], shape[axis] = place.shape
            return jnp.take_along_axis(x, place.reshape(shape), axis=axis)

        first = self.layers[: self.shared]
        return dataclasses.replace(
            self,
            layers=jax.tree.map(lambda x: take(x, 2), first),
            states=take(self.states, 1),
        )

    @property
    def columns(self) -> jax.Array:
        """The states as layers read them, ``[H, B * M]``."""
        return self.states.reshape(-1, self.states.shape[-1]).T


class HasLayers(Protocol):
    """A target that says how many layers it has."""

    @property
    def num_layers(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class DecoderPart(SubNetwork):
    """The layers of ``whole`` but for some sublayers, with its norm and its head.

    Attributes:
      whole: the target.
      without: for each layer the sublayers that are left out.
      small: ``whole`` with a small cache, which then drafts; None: the part reads all tokens.
    """

    whole: RunsInPart
    without: tuple[frozenset[str], ...]
    small: RunsInPart | None = None

    @property
    def shared(self) -> int:
        """The number of leading layers that compute what the target computes: the whole ones, the
        last layer of all not counted; 0 with a small cache."""
        if self.small is not None:
            return 0
        whole = [not left_out for left_out in self.without[:-1]] + [False]
        return whole.index(False)

    @property
    def hands_over(self) -> bool:
        return self.shared > 0

    def select(self, cache, length, chosen: jax.Array | None = None):
        """See ``SubNetwork.select``; ``chosen``: what ``choose`` returned last."""
        if self.small is None:
            return cache
        places = None
        if chosen is not None:
            of = {layer: chosen[:, i] for i, layer in enumerate(self.choosing_layers)}
            places = [of.get(i) for i in range(len(self.without))]
        return self.small.recent(cache, length, places)

    def as_target(self) -> Target:
        return super().as_target() if self.small is None else PartModel(self.small, self.without)

    def own_cache(self, cache, length, chosen: jax.Array | None = None):
        """See ``SubNetwork.own_cache``; ``chosen``: what ``choose`` returned last."""
        taken, config = self.select(cache, length, chosen), required(self.small, "small").config

        def whole(slots, layer):
            lacking = (config.window_of(layer) or 0) + config.sinks_of(layer) - slots.shape[2]
            return jnp.pad(slots, ((0, 0), (0, 0), (0, max(lacking, 0)), (0, 0)))

        return tuple(tuple(whole(x, i) for x in layer) for i, layer in enumerate(taken))

    @property
    def choosing_layers(self) -> tuple[int, ...]:
        """The layers that choose entries; the inputs of these are the hidden states so numbered."""
        return choosing_layers(self.whole.config, self.without)

    def choose(
        self, params, cache, states, last, begin, length, chosen: ChosenEntries
    ) -> jax.Array:
        """The positions that the layers choose; see ``ChosenEntries.choose``."""
        small, layers = required(self.small, "small").config, self.choosing_layers
        return chosen.choose(small, params, cache, states, last, begin, length, layers)

    def verify(
        self, params, cache, draft: Draft, *, features=(), since=0, entries=None, logits=True
    ) -> Scores:
        shared, without = self.shared, self.without
        if max(features, default=0) > shared:
            raise ValueError(
                f"features={features}: this part computes the hidden states 0 to {shared} as the "
                f"target does, and no later ones; ask for these, or take a later exit"
            )
        if not logits:
            later = len(without) - shared
            without = without[:shared] + (EVERY_SUBLAYER,) * later
        scores = (self.small or self.whole).run(
            params,
            cache,
            draft,
            features=(*features, shared),
            since=since,
            entries=None if entries is None else entries.layers,
            logits=logits,
            without=without,
        )
        found = scores.features
        split = found.shape[-1] // (len(features) + 1) * len(features)
        asked, states = found[..., :split], found[..., split:]
        if entries is not None:
            states = jnp.concatenate([entries.states, states], axis=1)
        made = PartialEntries(layers=scores.entries, states=states, shared=shared)
        return Scores(logits=scores.logits, features=asked if features else None, entries=made)


@dataclasses.dataclass(frozen=True)
class SwitchedPart(SubNetwork):
    """The sublayers of ``whole`` that an array says, so that one program serves all parts.

    ``params`` are here the weights of the target and the switches, bool ``[L, 2]``: whether the
    attention and the MLP of each layer run. What a sublayer that does not run would cost is not
    spent. Nothing is handed over, since no program knows which layers are whole.

    Attributes:
      whole: the target.
    """

    whole: RunsInPart

    def verify(
        self, params, cache, draft: Draft, *, features=(), since=0, entries=None, logits=True
    ) -> Scores:
        if features:
            raise ValueError(f"features={features}: a part with switches has no hidden states")
        weights, switches = params
        return self.whole.run(
            weights,
            cache,
            draft,
            features=(),
            since=since,
            entries=entries,
            logits=logits,
            gates=switches,
        )


def switches_of(target: HasLayers, skip: str | Iterable[str] | Mapping) -> np.ndarray:
    """Returns bool ``[L, 2]``: False for the attention and the MLP of each layer that is skipped.

    Args:
      target: the target.
      skip: the skipped sublayers, see ``skipped_sublayers``; none: everything runs.

    Raises:
      ValueError: a layer does not exist, or nothing would be left.
    """
    layers = target.num_layers
    switches, names = np.ones((layers, len(KINDS)), bool), skipped_sublayers(skip)
    left_out = _left_out(names, layers) if names else []
    for layer, kinds in enumerate(left_out):
        switches[layer] = [kind not in kinds for kind in KINDS]
    return switches


def skipped_by(switches) -> tuple[str, ...]:
    """Returns the names of the sublayers that switches bool ``[L, 2]`` leave out."""
    off = np.argwhere(~np.asarray(switches))
    return tuple(f"{KINDS[kind]}.{layer}" for layer, kind in off)


def decoder_part(
    whole: RunsInPart, exit: int | None, skip, small: RunsInPart | None = None
) -> DecoderPart:
    """The part that ``Target.sub_network`` returns of a decoder.

    Args:
      small: ``whole`` with a small cache, or None; with it neither ``exit`` nor ``skip`` is needed.

    Raises:
      ValueError: both or neither of ``exit`` and ``skip`` are given, a layer does not exist, or
        nothing would be left.
    """
    layers = whole.num_layers
    if small is not None and exit is None and not skip:
        return DecoderPart(whole, (frozenset(),) * layers, small)
    if (exit is None) == (not skip):
        raise ValueError(
            f"exit={exit}, skip={skip!r}: give one of the two, exit=E (the first E layers and the "
            "head) or skip= (the sublayers that are left out, such as 'attention.3,mlp.5-7'); with "
            "window= neither is needed"
        )
    if exit is not None:
        if isinstance(exit, bool) or not isinstance(exit, int) or not 1 <= exit <= layers:
            raise ValueError(
                f"exit={exit!r}: the model has {layers} layers, so exit is a whole number from 1 "
                f"to {layers}; a drafter that pays runs few of them"
            )
        without = (frozenset(),) * exit + (EVERY_SUBLAYER,) * (layers - exit)
        return DecoderPart(whole, without, small)
    return DecoderPart(whole, _left_out(skipped_sublayers(skip), layers), small)


def _left_out(names: tuple[str, ...], layers: int) -> tuple[frozenset[str], ...]:
    """Returns for each layer the sublayers of ``names``.

    Raises:
      ValueError: a layer does not exist, or nothing would be left.
    """
    said, skipped = ",".join(names), [set[str]() for _ in range(layers)]
    for name in names:
        kind, _, layer = name.partition(".")
        if int(layer) >= layers:
            raise ValueError(
                f"skip={said!r}: there is no layer {layer}; the model has {layers}, counted from "
                f"0 to {layers - 1}"
            )
        skipped[int(layer)].add(kind)
    if all(left_out == EVERY_SUBLAYER for left_out in skipped):
        raise ValueError(
            f"skip={said!r}: it leaves out all {2 * layers} sublayers of {layers} layers, and "
            "nothing would draft; leave at least one in, or take another drafter"
        )
    return tuple(map(frozenset, skipped))


def skipped_sublayers(skip: str | Iterable[str] | Mapping[str, Iterable[int]]) -> tuple[str, ...]:
    """The names of skipped sublayers, each once, layer by layer: ``("attention.3", "mlp.5")``.

    Args:
      skip: a text such as ``"attention.3-5,mlp.7,9"`` (a number alone stands for both sublayers of
        that layer, and a range includes its end), such items one by one, or the layers of each
        kind as published files have them: ``{"attention": [3, 4], "mlp": [7]}``. Layers count
        from 0.

    Raises:
      ValueError: an item is none of these.
    """
    if isinstance(skip, Mapping):
        if not {*skip} <= {*KINDS}:
            raise ValueError(
                f"skip={dict(skip)!r}: its keys are kinds of sublayers, {' and '.join(KINDS)}"
            )
        items = [f"{kind}.{layer}" for kind, layers in skip.items() for layer in layers]
    else:
        items = skip.split(",") if isinstance(skip, str) else [str(item) for item in skip]
    found = set()
    for item in filter(None, map(str.strip, items)):
        read = _ITEM.fullmatch(item)
        if read is None:
            raise ValueError(
                f"skip: {item!r} is no sublayer; accepted: attention.N, mlp.N, N for both, with "
                "N a layer counted from 0 or a range such as 3-5"
            )
        kind, first, last = read[1], int(read[2]), int(read[3] or read[2])
        if not first <= last < MOST_LAYERS:
            raise ValueError(
                f"skip: {item!r} is no range of layers: the first one comes first, and no model "
                f"has a layer {MOST_LAYERS} or above"
            )
        for layer in range(first, last + 1):
            found |= {(layer, one) for one in ([kind] if kind else KINDS)}
    return tuple(f"{kind}.{layer}" for layer, kind in sorted(found))


def usual_sets(layers: int) -> list[tuple[str, ...]]:
    """Returns the sets of the first trials, without duplicates: every second layer without the
    first and the last (SWIFT's start), the attention of the middle half of the layers, and both
    sublayers of the layers of the middle third."""
    inner = range(1, max(layers - 1, 2))
    half = range(layers // 4, max(layers - layers // 4, layers // 4 + 1))
    third = range(layers // 3, max(layers - layers // 3, layers // 3 + 1))
    sets = [
        tuple(f"{kind}.{layer}" for layer in inner[::2] for kind in KINDS),
        tuple(f"attention.{layer}" for layer in half),
        tuple(f"{kind}.{layer}" for layer in third for kind in KINDS),
    ]
    real = [one for one in sets if one and len(one) < 2 * layers]
    real = [one for one in real if all(int(name.rpartition(".")[2]) < layers for name in one)]
    return list(dict.fromkeys(real)) or [(f"{KINDS[1]}.0",)]
