"""Frozen dataclasses that are pytrees, with fields that stay static under ``jit``."""

import dataclasses

import jax


def static(default=dataclasses.MISSING):
    """A dataclass field that stays a Python value under ``jit`` (part of the compilation key)."""
    return dataclasses.field(default=default, metadata={"static": True})


def pytree_dataclass(cls):
    """Makes ``cls`` a frozen, keyword-only dataclass and registers it as a pytree."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))
