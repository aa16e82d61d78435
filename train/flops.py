"""The operations of a training step, the peak rate of the device, and the utilisation.

*Model-FLOP utilisation* is the time that the matrix products of a step would take at the device's
peak rate, divided by the time of the step. Products are counted in the traced step, forward and
backward, with two operations for each multiply-add. Attention is included; elementwise work and the
optimizer are not. With rematerialisation, products that are computed twice count twice. The peak
rate is measured in the same run by a square product of the same dtype, so that no data sheet is
needed and a shared machine is compared with itself.

Reference: PaLM, 2204.02311, appendix B, which divides by the data sheet's rate.
"""

from __future__ import annotations

import functools
import math
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

from specjax import kernels

from .step import make_keys, size_of

LARGEST = 8192  # rows of the square product at most; fewer if a product takes LONG_ENOUGH
LONG_ENOUGH = 0.02  # seconds
REPETITIONS = 5


def products(fun, *arguments) -> Counter:
    """Counts the floating-point operations of matrix products in ``fun(*arguments)``, by dtype.

    Nothing is run or compiled; arguments may be ``jax.ShapeDtypeStruct``. The body of a ``scan``
    counts as often as it runs, that of another loop once, and of branches the most expensive one.
    """
    return _count(jax.make_jaxpr(fun)(*arguments).jaxpr)


def _count(jaxpr) -> Counter:
    total: Counter = Counter()
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = [_count(sub) for sub in jaxprs_in_params(eqn.params)]
        if name in ("dot_general", "ragged_dot", "ragged_dot_general"):
            total[str(eqn.invars[0].aval.dtype)] += _product(eqn)
        elif name == "scan":
            total.update({k: n * eqn.params["length"] for k, n in sum(inner, Counter()).items()})
        elif name == "cond":
            total += max(inner, key=Counter.total)
        else:
            total += sum(inner, Counter())
    return total


def _product(eqn) -> int:
    """Returns 2 * (entries of the result) * (products that are summed for an entry)."""
    left, result = eqn.invars[0].aval, eqn.outvars[0].aval
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = numbers.dot_dimension_numbers if numbers else eqn.params.get("dimension_numbers")
    summed = numbers[0][0] if numbers else (left.ndim - 1,)
    return 2 * math.prod(result.shape) * math.prod(left.shape[i] for i in summed)


def of_step(loss, params, frozen, batch) -> Counter:
    """Counts the ``products`` of a loss and its gradient, see ``step.make_loss``."""
    rows = size_of(batch)[0]
    keys = jax.eval_shape(lambda: make_keys(jax.random.key(0), jnp.arange(rows)))
    return products(jax.value_and_grad(loss, has_aux=True), params, frozen, batch, keys)


@functools.cache
def peak(dtype: str) -> float:
    """Measures the operations per second of square products of a dtype on the first device."""
    device, size, best = jax.local_devices()[0], 512, 0.0
    multiply = jax.jit(jnp.matmul)
    while True:
        x = jax.device_put(np.ones((size, size), jnp.dtype(dtype)), device)
        jax.block_until_ready(multiply(x, x))  # compiles
        seconds = []
        for _ in range(REPETITIONS):
            begin = time.perf_counter()
            jax.block_until_ready(multiply(x, x))
            seconds.append(time.perf_counter() - begin)
        best = max(best, 2 * size**3 / min(seconds))
        if min(seconds) > LONG_ENOUGH or size >= LARGEST:
            return best
        size *= 2


def ideal_seconds(counted: Counter, num_devices: int = 1) -> float:
    """Returns the seconds that products take at the peak rate of ``num_devices`` devices.

    Virtual devices of a CPU share its cores, and count as one.
    """
    if kernels.current().devices_share_cores():
        num_devices = 1
    return sum(n / peak(dtype) for dtype, n in counted.items() if n) / num_devices
