"""XLA on a CPU, with the detours that its CPU compiler rewards."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .._internal.host import last_level_cache
from . import narrow, pages, quantized
from .xla import XlaBackend

# A processor is busy with few columns, and what fills up a prompt's last chunk is wasted: a token
# of 32 takes at most a tenth longer than one of 256 where the weights stay in the cache, and a
# token of 128 is as fast where they do not.
SMALL_PREFILL_CHUNK, PREFILL_CHUNK = 32, 128
# Threads that a virtual CPU device should have. XLA's threads run independent operations side by
# side, and a collective that waits for other devices holds its thread: with one thread a device
# (the default, where there are fewer cores) all can wait for operations that no thread is left to
# run; after a minute XLA ends the process.
THREADS_PER_DEVICE = 4


class XlaCpuBackend(XlaBackend):
    """XLA's operations on a CPU.

    Its compiler folds a transposition into the product before it, and so selects the slow order of
    operands; it fuses cheap operations into every consumer and so repeats them; and it copies
    converted weights as a whole.
    """

    name = "XLA"

    def _dot(self, weight, x, transpose_out):
        """5 to 7 columns cost a quarter more than 8, and 9 to 15 more than 16: columns of zeros
        fill them up."""
        columns = x.shape[1]
        few = 4 < columns < 16 and not on_mesh()  # there, columns lie on several devices
        spare = -columns % 8 if few else 0
        y = self._plain_dot(weight, jnp.pad(x, ((0, 0), (0, spare))) if spare else x)
        y = self.fence(y)[:, :columns]
        return y.T if transpose_out else y

    def _quantized_by_blocks(self):
        return not on_mesh()

    def einsum_float32(self, subscripts, x, y):
        """The products of other narrow numbers than two of bfloat16 would be narrow on CPUs."""
        if narrow.is_narrow(x, y):
            return narrow.einsum(subscripts, x, y)
        return super().einsum_float32(subscripts, x.astype(jnp.float32), y.astype(jnp.float32))

    def _plain_dot(self, weight, x):
        if not quantized.is_quantized(weight) and narrow.is_narrow(weight, x):
            if x.shape[1] >= narrow.LEAST_COLUMNS:
                return narrow.einsum("oi,im->om", weight, x).astype(x.dtype)
        return super()._plain_dot(weight, x)

    def materialize(self, x):
        """Nothing is fused into a product, and a product with the identity is exact."""
        return (jnp.eye(x.shape[0], dtype=x.dtype) @ x.reshape(x.shape[0], -1)).reshape(x.shape)

    def fence(self, x):
        return jax.lax.optimization_barrier(x)

    def settle(self, params):
        return pages.enlarge(params)

    def param_dtype(self, stored):
        """float32: only processors with instructions for bfloat16 compute faster in it."""
        del stored
        return jnp.dtype("float32")

    def loops_over_experts(self):
        return jax.sharding.get_abstract_mesh().size <= 1

    def prefill_chunk(self, weights):
        """Few tokens where a model loses little by reading its weights again, since most of them
        stay in the processor's cache."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(list(weights)))
        small = size <= 2 * last_level_cache()
        return SMALL_PREFILL_CHUNK if small else PREFILL_CHUNK

    def serving_chunk(self):
        return SMALL_PREFILL_CHUNK

    def threads_wanted(self, num_devices):
        return None if num_devices == 1 else THREADS_PER_DEVICE * num_devices

    def devices_share_cores(self):
        return True


def on_mesh() -> bool:
    """Whether arrays are spread over several devices by the compiler's partitioner."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return any(kind == jax.sharding.AxisType.Auto and mesh.shape[axis] > 1 for axis, kind in kinds)
