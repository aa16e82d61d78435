"""The compiled program of a decode, for tests that read it, and how many programs are compiled."""

import re

import jax
import numpy as np

from specjax import Sampling
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs


def hlo(target, drafter, params, batch, capacity, temperature):
    """The text of the optimized program for ``batch`` prompts of 20 tokens and 30 new tokens."""
    request, capacity = prepare_inputs(
        target,
        drafter,
        np.ones((batch, 20), np.int32),
        np.full(batch, 20, np.int32),
        jax.random.key(0),
        30,
        Sampling(temperature=temperature),
        capacity,
        (),
    )
    lowered = loop._decode.lower(target, drafter, "auto", capacity, params, request)
    return lowered.compile().as_text()


def cache_copies(text, *shapes, kind="f32"):
    """Finds copies, within loops, of buffers of ``shapes`` ``[B, K, S, E]``, of ``kind`` float32.

    Buffers whose first two axes are joined count, too. Before the loops each cache is zeroed once.
    """
    loops = text[: text.index("\nENTRY ")]
    wanted = set()
    for batch, heads, *rest in shapes:
        for shape in ((batch, heads, *rest), (batch * heads, *rest)):
            wanted.add(f"{kind}[{','.join(map(str, shape))}]")
    return [shape for shape in _copied(loops) if shape in wanted]


def table_copies(text, *shapes):
    """Copies, within loops, of int32 buffers of ``shapes``."""
    wanted = {f"s32[{','.join(map(str, shape))}]" for shape in shapes}
    return [shape for shape in _copied(text[: text.index("\nENTRY ")]) if shape in wanted]


def _copied(loops):
    """The shapes that are copied, one by one."""
    return re.findall(r" = (\S+?)\{\S* copy(?:-start)?\(", loops)


def compilations(call) -> int:
    """How many programs XLA compiles during a call."""
    count = []

    def listen(event, seconds, **kwargs):
        if event.endswith("backend_compile_duration"):
            count.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(count)
