"""Frozen dataclasses that are pytrees, with fields that stay static under ``jit``."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp

PyTree = Any
T = TypeVar("T")


def static(default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that stays a Python value under ``jit`` (part of the compilation key)."""
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, static)
)
def pytree_dataclass(cls: type[T]) -> type[T]:
    """Makes ``cls`` a frozen, keyword-only dataclass and registers it as a pytree."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


def filled(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Pads ``x`` with zeros at the end of each dimension, to the shape of ``like``."""
    return jnp.pad(x, [(0, n - m) for n, m in zip(like.shape, x.shape, strict=True)])
