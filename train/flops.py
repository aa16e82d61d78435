"""What a training step has to compute, what the device could, and which share of that it reaches.

*Model-FLOP utilisation* is the time that the matrix products of a step would take at the device's
best rate, over the time that the step takes. The products are counted in the traced step, forward
and backward (two operations a multiply-add; attention included, elementwise work and the optimiser
not; under rematerialisation what is computed twice counts twice). The best rate is measured in the
same run by a square product of the same type of numbers, on whatever device it is: no table of
data sheets is needed, and a machine that is shared is compared with itself.

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

LARGEST = 8192  # rows of the square product; fewer where one takes long enough
LONG_ENOUGH = 0.02  # seconds
REPETITIONS = 5


def products(fun, *arguments) -> Counter:
    """Floating-point operations of the matrix products in ``fun(*arguments)``, by type of number.

    Nothing is run or compiled; arguments may be ``jax.ShapeDtypeStruct``. A loop counts as often as
    it goes around where that is known (``scan``), else once; of branches the dearest counts.
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
    """2 * every entry of the result * what is summed over for it."""
    left, result = eqn.invars[0].aval, eqn.outvars[0].aval
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    numbers = numbers.dot_dimension_numbers if numbers else eqn.params.get("dimension_numbers")
    summed = numbers[0][0] if numbers else (left.ndim - 1,)
    return 2 * math.prod(result.shape) * math.prod(left.shape[i] for i in summed)


def of_step(loss, params, frozen, batch) -> Counter:
    """``products`` of a loss and its gradient, see ``loop.make_loss``."""
    rows = size_of(batch)[0]
    keys = jax.eval_shape(lambda: make_keys(jax.random.key(0), jnp.arange(rows)))
    return products(jax.value_and_grad(loss, has_aux=True), params, frozen, batch, keys)


@functools.cache
def peak(dtype: str) -> float:
    """Operations a second of the best of a few square products of this type on the first device."""
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
    """How long the products would take at the best rate of ``num_devices`` devices.

    Virtual devices of a CPU share its cores, and count as one.
    """
    if kernels.current().devices_share_cores():
        num_devices = 1
    return sum(n / peak(dtype) for dtype, n in counted.items() if n) / num_devices
