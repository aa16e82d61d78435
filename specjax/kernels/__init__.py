"""Products, attention and the choice of tokens, by what computes them best on the devices in use.

Every model and sampler asks ``current()`` for a ``Backend`` and calls its operations; no other
package asks which processor it runs on. The backends are:

========================  ======================================================================
``xla``                   XLA's operations as they are: GPUs, TPUs, and the reference for tests
``xla-cpu``               XLA on a CPU, with the detours that its CPU compiler rewards
``cpu``                   the library in C++ (``kernels/cpu``), and ``xla-cpu`` for all else
========================  ======================================================================

How the devices in use are found, in this order: the mesh in use (``jax.set_mesh``),
``jax.default_device``, JAX's default backend. All three are part of the key under which ``jax.jit``
keeps a traced function, so the choice is made once a trace and stays right for it. Where weights
lie on other devices than these (a CPU on a machine with a GPU), the functions that run a compiled
loop enter ``following(params)``.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.backend import backends
from jax.sharding import Mesh

from .interface import Backend

__all__ = ["Backend", "current", "following", "of", "platform"]


def current(mesh: Mesh | None = None) -> Backend:
    """The backend for the devices in use.

    Args:
      mesh: the devices to choose for; default: those in use.

    Raises:
      ValueError: ``SPECJAX_NATIVE`` is none of ``auto``, ``always`` and ``never``, or ``always``
        where the library in C++ cannot be had.
    """
    return _backend(platform() if mesh is None else mesh.devices.flat[0].platform)


def platform() -> str:
    """JAX's name for the kind of devices in use: ``"cpu"``, ``"gpu"``, ``"tpu"``."""
    used = jax.sharding.get_abstract_mesh()
    if not used.empty and used.abstract_device is not None:
        device = used.abstract_device
        return getattr(device, "platform", None) or device.device_kind
    chosen = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if chosen is None:
        return jax.default_backend()
    return chosen if isinstance(chosen, str) else chosen.platform


def of(tree) -> Backend:
    """The backend for the devices on which the arrays of ``tree`` lie.

    Traced values and arrays of the host have no device: for a tree of these it is ``current()``.
    """
    device = _device_of(tree)
    return current() if device is None else _backend(device.platform)


def following(tree):
    """A context in which ``current()`` is right for the arrays of ``tree``.

    It sets ``jax.default_device`` where the arrays lie on another platform than JAX would use, and
    nothing otherwise: programs that are compiled already stay valid.

    Args:
      tree: weights; traced values and arrays of the host count for nothing.
    """
    if len(backends()) == 1:
        return contextlib.nullcontext()
    device = _device_of(tree)
    if device is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return contextlib.nullcontext() if device.platform == platform() else jax.default_device(device)


def _device_of(tree) -> Any:
    """A device on which arrays of ``tree`` lie, or None."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            return next(iter(leaf.sharding.device_set))
    return None


@functools.cache
def _backend(platform: str) -> Backend:
    """The one backend for a platform (``cpu``, ``gpu``, ``tpu``) in this process."""
    from . import cpu, xla, xla_cpu

    if cpu.chosen(platform):
        from .cpu.backend import CpuBackend

        return CpuBackend()
    return xla_cpu.XlaCpuBackend() if platform == "cpu" else xla.XlaBackend()
