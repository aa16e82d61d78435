"""The options of ``decode``, which explains them, ``stream`` and ``init_state``, written once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import jax

from .. import acceptance
from .._internal.keywords import takes_fields
from ..sampling.distribution import Sampling
from ..types import Drafter, PyTree, Rule, Target
from .inputs import DecodeInputs, prepare_inputs

Array = jax.typing.ArrayLike
P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateOptions:
    """The options of ``init_state``."""

    key: jax.Array
    max_new_tokens: jax.typing.ArrayLike | Sequence[int]
    sampling: Sampling = Sampling()
    rule: str | Rule = "auto"
    capacity: int | None = None
    stops: jax.typing.ArrayLike | Sequence[int] = ()
    inputs: PyTree = None
    logprobs: bool | str = False
    num_samples: int = 1

    def prepare(
        self, target: Target, drafter: Drafter, tokens: Array, lengths: Array
    ) -> tuple[DecodeInputs, int]:
        """Checks the request and brings it into the shapes of the loop, see ``prepare_inputs``."""
        acceptance.named(self.rule)
        return prepare_inputs(
            target,
            drafter,
            tokens,
            lengths,
            self.key,
            self.max_new_tokens,
            self.sampling,
            self.capacity,
            self.stops,
            self.inputs,
            self.logprobs,
            self.num_samples,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOptions(StateOptions):
    """The options of ``decode``."""

    mesh: jax.sharding.Mesh | str | Mapping[str, int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOptions(DecodeOptions):
    """The options of ``stream``."""

    rounds: int = 1


def takes(
    options: Callable[P, StateOptions],
) -> Callable[
    [Callable[..., R]], Callable[Concatenate[Target, Drafter, PyTree, Array, Array, P], R]
]:
    """A decorator for ``f(target, drafter, params, tokens, lengths, *, options)``: the fields of
    ``options`` become its keyword arguments."""
    return takes_fields(options)
