"""Where a run's arrays lie: one mesh with the axes ``data`` and ``model`` of ``specjax.sharding``.

Rows of a batch go over ``data``. Weights, trained or frozen, and the optimiser's moments are split
over ``model`` as for decoding (``placement.TABLE``); with ``run.fully_sharded`` every matrix is
split over ``data`` too, along its longest dimension that is whole yet, and is gathered where it is
used (ZeRO, 1910.02054). The compiler's partitioner does the rest: a step says what it computes over
the whole batch, and a mesh changes no more than the order of its sums.

Several processes (``specjax.sharding.join``) hold one mesh of all their devices. Each reads its own
rows of a batch, from a disk that all see; the first one alone writes logs and exports.
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
class Layout:
    """``mesh``: None: all lies on the default device, and everything here is the identity."""

    mesh: Mesh | None = None
    fully_sharded: bool = False

    def spec(self, name: str, shape: tuple[int, ...]) -> tuple:
        """For each dimension of an array the axis that it is split over, or None. ``name``: of the
        parameter, with anything before it."""
        sizes = self.mesh.shape
        spec = list(spec_of(name.removesuffix(".value"), shape, sizes[MODEL], MODEL))
        if self.fully_sharded and len(shape) > 1:  # vectors are small, and gathered at each use
            free = [i for i, axis in enumerate(spec) if not axis and shape[i] % sizes[DATA] == 0]
            if free:
                spec[max(free, key=lambda i: shape[i])] = DATA
        return tuple(spec)

    def _map(self, function: Callable, tree: PyTree) -> PyTree:
        """``function(array, *spec)`` of every array of a tree."""

        def one(path, x):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return function(x, *self.spec(name, x.shape))

        return jax.tree_util.tree_map_with_path(one, tree)

    def shardings(self, tree: PyTree) -> PyTree:
        """The ``NamedSharding`` of every weight or moment, given arrays or their shapes."""
        return self._map(lambda _, *spec: NamedSharding(self.mesh, PartitionSpec(*spec)), tree)

    def place(self, tree: PyTree) -> PyTree:
        """Weights or moments on the devices, each holding its part."""
        if self.mesh is None:
            return tree
        return self._map(lambda x, *spec: sharding.put(x, self.mesh, *spec), tree)

    def whole(self, tree: PyTree) -> PyTree:
        """Weights on the default device of each process; all of them must call this."""
        if self.mesh is None:
            return tree
        return jax.tree.map(jnp.asarray, sharding.gather(tree))

    def constrain(self, tree: PyTree) -> PyTree:
        """Within a compiled function: as ``place`` puts them."""
        if self.mesh is None:
            return tree
        return jax.tree.map(jax.lax.with_sharding_constraint, tree, self.shardings(tree))

    def rows(self, batch: PyTree) -> PyTree:
        """The whole batch on the devices, of the rows that this process has read."""
        if self.mesh is None:
            return batch
        where, (_, count) = NamedSharding(self.mesh, PartitionSpec(DATA)), host_share(self.mesh)

        def put(x):
            shape = len(x) * count, *x.shape[1:]
            return jax.make_array_from_process_local_data(where, np.asarray(x), shape)

        return jax.tree.map(put, batch)

    def index(self, rows: int) -> jax.Array:
        """int32 ``[rows]``, for each place of a batch on the devices the number that its row has in
        the batch as one process would read it: of ``count`` parts, part i is its rows
        ``i::count``."""
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
        """Whether ``flag`` is set in any process; of several, an array, to be read later."""
        if jax.process_count() == 1:
            return flag
        where = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        own = np.full(jax.local_device_count(), flag)
        flags = jax.make_array_from_process_local_data(where, own, (self.mesh.size,))
        return _any(flags)

    def using(self):
        """A context in which compiled functions know the mesh."""
        return sharding.using(self.mesh)


_any = jax.jit(jnp.any)


def layout_of(run: RunConfig, batch: int | None = None) -> Layout:
    """Where the arrays of a run are to lie.

    Args:
      batch: rows of a step, of all processes together, to be shared by devices; None: not checked.

    Raises:
      ConfigError: a mesh larger than the devices, or one that leaves a process without a part of
        its own; rows that cannot be shared evenly.
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
    host_share(mesh)  # or processes have no parts
    parts = 1 if mesh is None else mesh.shape[DATA]
    if batch is not None and batch % (parts * run.accumulate):
        raise ConfigError(
            f"data.batch={batch} cannot be shared evenly by data={parts} devices in run.accumulate="
            f"{run.accumulate} parts: give a multiple of {parts * run.accumulate}"
        )
    return Layout(mesh, run.fully_sharded)


def host_share(mesh: Mesh | None) -> tuple[int, int]:
    """``(index, count)``: which of how many parts of a batch's rows the devices of this process
    hold. Processes that share an axis ``model`` hold, and read, the same."""
    if mesh is None:
        return 0, 1
    own = jax.process_index()
    mine = {row for (row, _), device in np.ndenumerate(mesh.devices) if device.process_index == own}
    parts = _parts(mesh)
    return parts.index(tuple(sorted(mine))), len(parts)


def _parts(mesh: Mesh) -> list[tuple[int, ...]]:
    """The places along the axis ``data`` that the devices of each process hold, in order; those
    that several processes share, once.

    Raises:
      ConfigError: processes share some of their places and not others, or hold unlike numbers of
        them, so that a batch has no part that each could read.
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
    """``host_share`` of a run's mesh, as ``data.training_batches`` takes it."""
    return host_share(layout_of(run).mesh)


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def by_first(write: Callable) -> Callable:
    """``write``, which returns nothing, run in the first process, while the others wait for it."""

    @functools.wraps(write)
    def run(*args, **kwargs):
        if is_first():
            write(*args, **kwargs)
        wait(write.__name__)

    return run


def wait(what: str) -> None:
    """Returns when all processes have come here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)
