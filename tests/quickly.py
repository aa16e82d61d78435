"""Compilation without most of XLA's optimizations, for models so small that their run is short."""

import contextlib
import functools

import jax
from jax._src import compiler


@functools.cache
def quick_options():
    """Options of XLA that shorten the compilation of tiny models; none if this version lacks them.

    The emitters of fusions that a user's programs have take about half of the time. Splitting a
    program, in order to compile its parts in parallel, saves nothing where each core has a worker.
    """
    chosen = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
    try:
        jax.jit(lambda: 0, compiler_options=chosen).lower().compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return chosen


@contextlib.contextmanager
def compiling_quickly(optimized=False):
    """Compiles without most of XLA's optimizations, which take longer than a tiny model's run.

    ``optimized``: with the optimizations of the code, for programs that run for seconds.
    """
    options, normally = quick_options(), compiler.get_compile_options

    def quickly(*args, env_options_overrides=None, **kwargs):
        chosen = options | (env_options_overrides or {})
        return normally(*args, env_options_overrides=chosen, **kwargs)

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", not optimized)
    compiler.get_compile_options = quickly
    try:
        yield
    finally:
        compiler.get_compile_options = normally
        jax.config.update("jax_disable_most_optimizations", before)
