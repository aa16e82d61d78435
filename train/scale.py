"""The placement of a run's arrays on one mesh, with axes ``data`` and ``model`` of ``sharding``.

Rows of a batch are split over ``data``. Weights, trained or frozen, and the optimizer's moments are
split over ``model`` as for decoding (``placement.TABLE``). With ``run.fully_sharded`` every matrix
is split over ``data`` too, along the longest dimension that is not yet split, and is gathered where
it is used (ZeRO, 1910.02054). A step is written for the whole batch and XLA partitions it, so a
mesh changes only the order of sums.

Several processes (``specjax.sharding.join``) share one mesh of all their devices. Each process
reads its own rows of a batch, from a disk that all processes see; only the first process writes
logs and exports.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import sharding
from specjax.models.placement import spec_of
from specjax.sharding import DATA, MODEL
from specjax.types import PyTree

from .config import ConfigError, RunConfig


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """The layout of arrays on ``mesh``.

    With ``mesh=None`` all arrays are on the default device, and every method is the identity.
    """

    mesh: Mesh | None = None
    fully_sharded: bool = False

    def spec(self, name: str, shape: tuple[int, ...]) -> tuple:
        """Returns for each dimension of an array the axis over which it is split, or None.

        ``name`` is the name of the parameter, with any prefix.
        """
        sizes = self.mesh.shape
        spec = list(spec_of(name.removesuffix(".value"), shape, sizes[MODEL], MODEL))
        if self.fully_sharded and len(shape) > 1:  # vectors are small, and gathered at each use
            free = [i for i, axis in enumerate(spec) if not axis and shape[i] % sizes[DATA] == 0]
            if free:
                spec[max(free, key=lambda i: shape[i])] = DATA
        return tuple(spec)

    def _map(self, function: Callable, tree: PyTree) -> PyTree:
        """Calls ``function(array, *spec)`` for every array of a tree."""

        def one(path, x):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return function(x, *self.spec(name, x.shape))

        return jax.tree_util.tree_map_with_path(one, tree)

    def shardings(self, tree: PyTree) -> PyTree:
        """Returns the ``NamedSharding`` of every weight or moment of a tree of arrays or shapes."""
        return self._map(lambda _, *spec: NamedSharding(self.mesh, PartitionSpec(*spec)), tree)

    def place(self, tree: PyTree) -> PyTree:
        """Places weights or moments on the devices, on each device its part."""
        if self.mesh is None:
            return tree
        return self._map(lambda x, *spec: sharding.put(x, self.mesh, *spec), tree)

    def whole(self, tree: PyTree) -> PyTree:
        """Gathers weights on the default device of each process; every process must call this."""
        if self.mesh is None:
            return tree
        return jax.tree.map(jnp.asarray, sharding.gather(tree))

    def constrain(self, tree: PyTree) -> PyTree:
        """Constrains weights within a compiled function to the layout of ``place``."""
        if self.mesh is None:
            return tree
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, self.shardings(tree))

    def rows(self, batch: PyTree) -> PyTree:
        """Makes the whole batch on the devices from the rows that each process has read."""
        if self.mesh is None:
            return batch
        where, (_, count) = NamedSharding(self.mesh, PartitionSpec(DATA)), host_share(self.mesh)

        def put(x):
            shape = len(x) * count, *x.shape[1:]
            return jax.make_array_from_process_local_data(where, np.asarray(x), shape)

        return jax.tree.map(put, batch)

    def index(self, rows: int) -> jax.Array:
        """Returns int32 ``[rows]``: the number of each row in the batch as one process reads it.

        Part ``i`` of ``count`` parts of a batch holds the rows ``i::count``.
        """
        if self.mesh is None:
            return jnp.arange(rows, dtype=jnp.int32)
        held, size = _parts(self.mesh), rows // self.mesh.shape[DATA]
        found = [
            (part.index(block) * size + place) * len(held) + i
            for block in range(self.mesh.shape[DATA])
            for i, part in enumerate(held)
            if block in part
            for place in range(size)
        ]
        return sharding.spread(jnp.asarray(found, jnp.int32), DATA)

    def anywhere(self, flag: bool) -> bool | jax.Array:
        """Whether ``flag`` is set in any process; with several processes an array, read later."""
        if jax.process_count() == 1:
            return flag
        where = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        own = np.full(jax.local_device_count(), flag)
        flags = jax.make_array_from_process_local_data(where, own, (self.mesh.size,))
        return _any(flags)

    def using(self):
        """A context in which compiled functions use the mesh."""
        return sharding.using(self.mesh)


_any = jax.jit(jnp.any)


def layout_of(run: RunConfig, batch: int | None = None) -> MeshLayout:
    """Returns the layout of the arrays of a run.

    Args:
      run: the section ``run`` of the configuration.
      batch: the rows of a step, of all processes together; None: they are not checked.

    Raises:
      ConfigError: the mesh has more devices than there are, or gives a process no part of its own;
        or the rows cannot be shared evenly.
    """
    try:
        mesh = sharding.as_mesh(run.mesh or None)
    except ValueError as error:
        raise ConfigError(f"run.{error}") from error
    count, devices = jax.process_count(), jax.device_count()
    if mesh is None and count > 1:
        raise ConfigError(
            f"run.mesh is empty, and here are {count} processes with {devices} devices: give a "
            f"mesh of all of them, such as run.mesh=data={devices}"
        )
    if run.fully_sharded and (mesh is None or mesh.shape[DATA] == 1):
        raise ConfigError(
            "run.fully_sharded=true splits weights over the axis data, which "
            f"run.mesh={run.mesh!r} does not have: give a mesh such as run.mesh=data=4"
        )
    host_share(mesh)  # raises if processes have no parts of their own
    parts = 1 if mesh is None else mesh.shape[DATA]
    if batch is not None and batch % (parts * run.accumulate):
        raise ConfigError(
            f"data.batch={batch} cannot be shared evenly by data={parts} devices in run.accumulate="
            f"{run.accumulate} parts: give a multiple of {parts * run.accumulate}"
        )
    return MeshLayout(mesh, run.fully_sharded)


def host_share(mesh: Mesh | None) -> tuple[int, int]:
    """Returns ``(index, count)``: this process reads part ``index`` of ``count`` parts of a batch.

    Processes that share an axis ``model`` read the same part.
    """
    if mesh is None:
        return 0, 1
    own = jax.process_index()
    mine = {row for (row, _), device in np.ndenumerate(mesh.devices) if device.process_index == own}
    parts = _parts(mesh)
    return parts.index(tuple(sorted(mine))), len(parts)


def _parts(mesh: Mesh) -> list[tuple[int, ...]]:
    """Returns the indices along ``data`` of each process's devices, in order, without repetition.

    Raises:
      ConfigError: the indices of two processes overlap in part, or their numbers differ, so that a
        batch has no part for each process.
    """
    held: dict[int, set] = {}
    for (row, _), device in np.ndenumerate(mesh.devices):
        held.setdefault(device.process_index, set()).add(row)
    parts = sorted({tuple(sorted(rows)) for rows in held.values()})
    places = [row for part in parts for row in part]
    if len(set(places)) < len(places) or len({len(part) for part in parts}) > 1:
        data, model = mesh.devices.shape
        raise ConfigError(
            f"run.mesh='data={data},model={model}' lays the devices of {len(held)} processes so "
            f"that they hold the rows {', '.join(str(list(part)) for part in parts)} along data, "
            "which overlap or are unlike: give an axis model that divides the devices of a "
            "process, or is a multiple of them"
        )
    return parts


def shard_of(run: RunConfig) -> tuple[int, int]:
    """Returns ``host_share`` of a run's mesh, as ``data.training_batches`` takes it."""
    return host_share(layout_of(run).mesh)


def is_first() -> bool:
    """Whether this process is the first one, which alone writes."""
    return jax.process_index() == 0


def by_first(write: Callable) -> Callable:
    """Wraps ``write`` so that only the first process runs it, while the others wait."""

    @functools.wraps(write)
    def run(*args, **kwargs):
        if is_first():
            write(*args, **kwargs)
        wait(write.__name__)

    return run


def wait(what: str) -> None:
    """Returns when all processes have called this with the same ``what``."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)
