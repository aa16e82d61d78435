"""Many devices: one mesh with the axes ``data`` (rows), ``model`` (heads, features, vocabulary) and
``stage`` (layers; see ``models/pipeline.py``).

The loop runs under ``jax.set_mesh`` and says in few places how an array lies: a mesh is *in use*
or it is not, and without one everything here is the identity. What falls apart into independent
blocks (attention, the writes of a cache, an argmax of its own part of the vocabulary) runs block
by block in ``locally``; between, the compiler's partitioner adds what a sum over features needs.

Several processes hold one mesh together: each calls the same functions with the same arguments,
and ``gather`` brings results to all of them.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import warnings
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from . import kernels
from ._internal import callers
from ._internal.pytree import PyTree
from .kernels.xla_cpu import THREADS_PER_DEVICE

DATA, MODEL, STAGE = "data", "model", "stage"
AXES = (DATA, MODEL, STAGE)

# ---------------------------------------------------------------- meshes


def as_mesh(mesh: Mesh | str | Mapping[str, int] | None) -> Mesh | None:
    """A mesh over the first devices, from ``"data=2,model=4"``, ``{"data": 2, "model": 4}`` or
    ``"data=2,stage=4"``.

    A ``Mesh`` is checked and returned; None stays None. Warns of virtual CPU devices that have too
    few threads (see ``THREADS_PER_DEVICE``).

    Raises:
      ValueError: other axes, axes that are not ``Auto``, both ``model`` and ``stage``, more devices
        than there are.
    """
    if mesh is None:
        return None
    if isinstance(mesh, Mesh):
        check_axes(mesh)
        _check_threads(mesh)
        return mesh
    sizes = axis_sizes(mesh)
    wanted, devices = math.prod(sizes.values()), jax.devices()
    if wanted > len(devices):
        raise ValueError(
            f"mesh={mesh!r} needs {wanted} devices, there are {len(devices)}; to try a mesh on a "
            f"CPU, set XLA_FLAGS=--xla_force_host_platform_device_count={wanted} and "
            f"NPROC={THREADS_PER_DEVICE * wanted}"
        )
    if wanted < len(devices) and jax.process_count() > 1:
        raise ValueError(
            f"mesh={mesh!r} has {wanted} devices, the {jax.process_count()} processes together "
            f"{len(devices)}: every process must have its part, so give a mesh of all"
        )
    shape = tuple(sizes.values())
    kinds = (AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(shape, tuple(sizes), axis_types=kinds, devices=devices[:wanted])
    _check_threads(mesh)
    return mesh


def axis_sizes(mesh: Mesh | str | Mapping[str, int]) -> dict[str, int]:
    """``{"data": D, "model": M}`` of a mesh or its description, and ``"stage": S`` where S is above
    1; an axis left out has size 1.

    Raises:
      ValueError: unknown axes, sizes that are no positive whole numbers, or both ``model`` and
        ``stage`` above 1.
    """
    accepted = "give sizes of the axes data and model, or data and stage, such as 'data=2,model=4'"
    if isinstance(mesh, Mesh):
        mesh = dict(mesh.shape)
    if isinstance(mesh, str):
        parts = [part.strip() for part in mesh.split(",")]
        if not all(re.fullmatch(r"\w+=\d+", part) for part in parts):
            raise ValueError(f"mesh={mesh!r} cannot be read: {accepted}")
        pairs = [part.split("=") for part in parts]
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError(f"mesh={mesh!r} names an axis twice: {accepted}")
        mesh = {name: int(size) for name, size in pairs}
    if not isinstance(mesh, Mapping):
        raise ValueError(f"mesh={mesh!r} is no mesh: {accepted}, or a jax.sharding.Mesh")
    _check_names(mesh)
    for name, size in mesh.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh: {name}={size!r} is no positive whole number: {accepted}")
    _check_stages(mesh)
    whole = {name: mesh.get(name, 1) for name in AXES}
    return {name: n for name, n in whole.items() if name != STAGE or n > 1}


def check_axes(mesh) -> None:
    """Raises ``ValueError`` for a mesh (abstract or not) with other axes, with axes that are not
    ``Auto``, or with both ``model`` and ``stage``."""
    _check_names(mesh.axis_names)
    _check_stages(dict(mesh.shape))
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    wrong = [name for name, kind in kinds if kind != AxisType.Auto]
    if wrong:
        raise ValueError(
            f"the mesh has axes {wrong} that are not Auto; the loop leaves the sharding of what "
            "lies between to the compiler: make the mesh with axis_types="
            f"(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
        )


def _check_stages(sizes: Mapping[str, int]) -> None:
    stages, parts = sizes.get(STAGE, 1), sizes.get(MODEL, 1)
    if stages > 1 and parts > 1:
        raise ValueError(
            f"mesh: model={parts} and stage={stages} at once: devices share either the heads of "
            "each layer (model) or the layers (stage); give one of the two, with the axis data "
            f"beside it, such as 'data={parts},stage={stages}'"
        )


def check_divided(stages: int, devices: int) -> None:
    """Raises ``ValueError`` unless each of ``devices`` along ``stage`` has a part of the layers."""
    if stages != devices:
        raise ValueError(
            f"mesh: stage={devices}, and the layers of the target are divided into {stages} parts: "
            "load the target on the mesh on which it decodes, with specjax.load(..., mesh=), or "
            "divide it with specjax.models.PipelinedLM"
        )


def check_rows(batch: int, parts: int) -> None:
    """Raises ``ValueError`` unless ``parts`` devices of the axis ``data`` can share the rows."""
    if batch % parts:
        raise ValueError(
            f"tokens: {batch} rows cannot be shared by data={parts} devices; give a multiple of "
            f"{parts} prompts, or a mesh whose axis data divides {batch}"
        )


def _check_names(names) -> None:
    wrong = [name for name in names if name not in AXES]
    if wrong:
        raise ValueError(
            f"the mesh has axes {wrong}: accepted are 'data' (rows of the batch) and 'model' "
            "(heads, features, vocabulary), or 'data' and 'stage' (layers); make it with "
            "jax.make_mesh((2, 4), ('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2)"
        )


def _check_threads(mesh: Mesh) -> None:
    local = len(mesh.local_devices)
    wanted = kernels.current(mesh).threads_wanted(local)
    threads = int(os.environ.get("NPROC") or os.cpu_count() or 1)  # as XLA counts, without affinity
    if wanted is not None and threads < wanted:
        warnings.warn(
            f"{local} virtual CPU devices share {max(threads, local)} threads and may come to wait "
            f"for each other without end: set NPROC={wanted} before JAX starts",
            stacklevel=callers.outside(),
        )


def join(address: str, count: int, index: int, *, patience: int = 20) -> None:
    """Makes this one of ``count`` processes whose devices make meshes together; call it first.

    On CPUs they speak over gloo. ``patience``: seconds without a sign of life after which a
    process counts as dead; then every other one ends with a message instead of waiting for it.

    Raises:
      ValueError: an index that is not below the count.
      RuntimeError: the first process cannot be reached within a minute, or JAX is already in use.
    """
    if not 0 <= index < count:
        raise ValueError(f"process {index} of {count}: the index must be in [0, {count - 1}]")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address,
        count,
        index,
        initialization_timeout=60,
        heartbeat_timeout_seconds=patience,
        shutdown_timeout_seconds=patience,
    )


@contextlib.contextmanager
def peers():
    """Where several processes compute together: a failure says that one of them may be gone.

    Raises:
      ConnectionError: in place of what JAX raised.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise ConnectionError(
            f"process {jax.process_index()} of {jax.process_count()} lost another one, which died "
            f"or cannot be reached; what was not finished is lost, start all again ({reason:.200})"
        ) from error


def check_one_process(what: str) -> None:
    """Raises ``ValueError`` where several processes would go by clocks of their own."""
    if jax.process_count() > 1:
        raise ValueError(
            f"{what} follows one process's clock and files, here are {jax.process_count()}: run it "
            "in one process, or decode with specjax.generate, which they can share"
        )


def using(mesh: Mesh | None, params: PyTree = None):
    """A context in which ``mesh`` is in use; without one, the devices on which ``params`` lie."""
    return kernels.following(params) if mesh is None else jax.set_mesh(mesh)


# ---------------------------------------------------------------- within a compiled program


def size(axis: str) -> int:
    """Devices along an axis of the mesh in use; 1 without a mesh, without the axis, or where
    blocks run one by one already."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return mesh.shape[axis] if kinds.get(axis) == AxisType.Auto else 1


def in_use() -> bool:
    """Whether a mesh of more than one device is in use."""
    return any(size(axis) > 1 for axis in AXES)


def divides(axis: str, length: int) -> bool:
    """Whether an axis of more than one device splits ``length`` into equal parts."""
    return size(axis) > 1 and length % size(axis) == 0


def spread(x: jax.Array, *axes: str | None) -> jax.Array:
    """``x`` with its dimensions spread over ``axes`` (None: not spread), as far as they divide."""
    if not in_use():
        return x
    spec = (a if a and divides(a, n) else None for a, n in zip(axes, x.shape, strict=True))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def rows(tree: PyTree) -> PyTree:
    """Every leaf with its rows over ``data``; how the rest of it lies is left as it is."""
    if size(DATA) == 1:
        return tree

    def constrain(x):
        if not np.ndim(x) or not divides(DATA, x.shape[0]):
            return x
        free = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
        return jax.lax.with_sharding_constraint(x, PartitionSpec(DATA, *free))

    return jax.tree.map(constrain, tree)


def locally(function, in_specs, out_specs):
    """``function`` on each device's blocks of its arguments; specs as of ``jax.shard_map``.

    ``in_specs`` has one spec an argument: a tuple of axis names and None, for all of its leaves;
    axes that the mesh in use lacks are left out. ``out_specs`` is the spec of the result, or a list
    with one spec a result. Without a mesh in use: ``function`` itself.
    """
    if not in_use():
        return function

    def run(*args):
        # rows that do not divide (a few prompts on their own) are worked on everywhere
        given = [x for x, spec in zip(args, in_specs, strict=True) if spec[:1] == (DATA,)]
        split = all(len(x) % size(DATA) == 0 for x in jax.tree.leaves(given))

        def as_spec(axes):
            kept = (a if a and size(a) > 1 and (split or a != DATA) else None for a in axes)
            return PartitionSpec(*kept)

        several = isinstance(out_specs, list)
        out = tuple(map(as_spec, out_specs)) if several else as_spec(out_specs)
        specs = dict(in_specs=tuple(map(as_spec, in_specs)), out_specs=out)
        return jax.shard_map(function, **specs, check_vma=False)(*args)

    return run


# ---------------------------------------------------------------- between host and devices


def put(x, mesh: Mesh, *axes: str | None) -> jax.Array:
    """A host value on the devices, each taking its own part; what lies there already stays."""
    if isinstance(x, jax.core.Tracer) or _lies_on(x, mesh):
        return x
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = put(jax.random.key_data(x), mesh, *axes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    axes = tuple(axis if axis in mesh.shape else None for axis in axes)
    where = NamedSharding(mesh, PartitionSpec(*axes))
    if isinstance(x, jax.Array):
        if jax.process_count() == 1:
            return jax.device_put(x, where)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index], dtype=x.dtype)


def _lies_on(x, mesh: Mesh) -> bool:
    where = x.sharding if isinstance(x, jax.Array) else None
    return isinstance(where, NamedSharding) and where.mesh == mesh


def place(mesh: Mesh | None, target, drafter, params, request):
    """Weights and request of ``decode`` on the devices of ``mesh``.

    Arrays that lie on it already stay as they are. Of the others, weights go where the target's
    and the drafter's ``shard(params, mesh)`` puts them, else to every device.
    """
    if mesh is None:
        return params, request

    check_rows(request.tokens.shape[0], mesh.shape.get(DATA, 1))
    check_divided(target.stages, mesh.shape.get(STAGE, 1))

    def whole(tree):
        return jax.tree.map(lambda x: put(x, mesh), tree)

    placed = dict(params)
    for name, owner in (("target", target), ("drafter", drafter)):
        if name in params:
            placed[name] = owner.shard(params[name], mesh)
    return whole(placed), jax.tree.map(lambda x: put(x, mesh, DATA), request)


def gather(tree: PyTree) -> PyTree:
    """NumPy arrays of the whole, on every process; all of them must call this."""

    def host(x):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            from jax.experimental import multihost_utils

            return np.asarray(multihost_utils.process_allgather(x, tiled=True))
        return np.array(x)  # a real copy: the loop may be given the buffer

    return jax.tree.map(host, tree)


def agreed(value) -> np.ndarray:
    """The first process's ``value``, float32, on all: clocks differ, what they run must not."""
    if jax.process_count() == 1:
        return np.asarray(value, np.float32)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.broadcast_one_to_all(np.asarray(value, np.float32)))
