"""PPD and SPEED on several devices: a token in flight on each device of the mesh axis ``stage``.

The layers of a target are divided over S devices (``models/pipeline.py``). One token alone keeps
one of them busy. Here the first device's hidden state, read by the target's own norm and LM head,
guesses the next token, which enters the first device while its predecessor is on the second one; so
up to S tokens are in flight. A token that leaves the last device says what its successor is: if
another token had entered, all younger ones are flushed and the right one enters.

With two devices this is PPD with one guess and d = L / 2. With the layers of ``speed.unrolled``, of
which each device holds one repeat, it is SPEED. In ticks of one layer, with d = L / S layers a
device and p the share of hits among the first T - 1 tokens, both take

    ticks = L + (T - 1) * (L - (L - d) * p)

What runs: every device works on its own token in each cycle, and what crosses between devices is a
hidden state and the few numbers by which all of them decide the same. What is modelled: the latency
of ``Pipelined.modelled_seconds``, in which LM head and communication cost nothing.

Lossless: yes; greedy decoding of one prompt.

Differs from the papers: PPD runs k guesses of the next token (here one; ``staged_ppd.py`` runs
several), and SPEED trains heads for its guesses.

References: PPD, arXiv 2307.05908; SPEED, arXiv 2310.12072.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .. import sharding
from .._internal.optional import required
from ..models import kv_cache
from ..models.lm import LM
from ..models.pipeline import PipelinedLM
from ..models.stage_weights import ENDS, LAYERS
from ..sharding import STAGE
from .layer_search import decoder_of
from .pipelined import (
    Counts,
    Pipelined,
    check_flushed,
    one_prompt,
    read_prompt,
    report,
    step_verdict,
    timed,
    written,
)
from .speed import unrolled


def on_stages(lm: LM, prompt, *, max_new_tokens: int = 64) -> Pipelined:
    """Generates a text greedily with a token in flight on each device, and counts what it costs.

    Args:
      lm: a model that ``specjax.load(..., mesh="stage=2")`` returns, or that of ``repeats_on``.
      prompt: one prompt, see ``generate``.
      max_new_tokens: the number of tokens; no end-of-text token ends the text.

    Returns:
      ``Pipelined``; ``reads`` counts the layers that any device ran, and ``seconds`` is the time of
      all devices at work at once.

    Raises:
      ValueError: the layers of the model are not divided over an axis ``stage``, the mesh has
        another axis of several devices, the text does not fit, or it is longer than a window of the
        model and there are more than two devices.

    Example::

        print(on_stages(specjax.load(folder, mesh="stage=2"), "def f(x):"))
    """
    target, mesh = in_stages(lm)
    if mesh.size > target.stages:
        raise ValueError(
            f"mesh={dict(mesh.shape)}: one prompt has no rows for the axis data; give stage alone"
        )
    tokens, capacity = one_prompt(lm, prompt, max_new_tokens, target.stages)
    check_flushed(lm, len(tokens) + max_new_tokens, target.stages, "stage")

    def run(guess):
        given = target, guess, max_new_tokens, capacity
        return timed(lambda: _decode(*given, lm.params, tokens))

    with sharding.using(mesh):
        return report(*run(True), *run(False), target.num_layers, target.each)


def in_stages(lm: LM) -> tuple[PipelinedLM, Mesh]:
    """Returns the target whose layers are divided over several devices, and their mesh.

    Raises:
      ValueError: they are not divided.
    """
    target = lm.target
    if not isinstance(target, PipelinedLM):
        raise ValueError(
            f"{lm.name}: tokens in flight need layers that are divided over several devices; load "
            "the model with mesh='stage=2', or take specjax.analysis.ppd and speed, which count on "
            "one device"
        )
    return target, required(lm.mesh, "lm.mesh")


def repeats_on(lm: LM, repeats: int, mesh=None) -> LM:
    """Returns the model of ``speed.unrolled``, divided so that each device holds one repeat.

    Args:
      lm: a decoder-only model on one device, the layers that are shared.
      repeats: R, the number of devices and of repeats, at least 2.
      mesh: with ``stage=R``; default: the first R devices.

    Raises:
      ValueError: see ``unrolled``, or there are fewer devices.
    """
    whole = unrolled(lm, repeats)
    mesh = required(sharding.as_mesh({STAGE: repeats} if mesh is None else mesh), "mesh")
    target = PipelinedLM(decoder_of(whole), repeats)
    params = target.shard(whole.params, mesh)
    return LM.of(target, params, tokenizer=lm.tokenizer, name=whole.name, mesh=mesh)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _decode(target: PipelinedLM, guess: bool, num: int, capacity: int, params, tokens) -> Counts:
    read = read_prompt(target, params, tokens)
    cache = written(target, target.init(params, 1, capacity), read, len(tokens) - 1)
    run = functools.partial(_on_each, target, guess, num, len(tokens) - 1)
    run = sharding.locally(run, [(), (STAGE,), (None, STAGE), ()], ())
    return run(params[ENDS], params[LAYERS], cache, tokens[-1])


def _on_each(target: PipelinedLM, guess: bool, num: int, known: int, ends, layers, cache, token):
    """On each device: cycles, in each of which it runs its layers for the token that it holds.

    What all devices know, arrays ``[S]`` with one entry for each device: the token that it holds,
    its position, and whether there is one.
    """
    here, stages, each = jax.lax.axis_index(STAGE), target.stages, target.each
    model, blocks, rings = target.ends({ENDS: ends}), target.blocks(layers), target.rings(cache)
    sees, zero = jnp.ones((1, 1, 1), bool), jnp.zeros((), jnp.int32)
    onwards = [(stage, stage + 1) for stage in range(stages - 1)]

    def cycle(carry):
        i, cache, held, place, live, received, counts = carry
        mine, where, busy = held[here], place[here], live[here]
        state = jnp.where(here == 0, model.embed(mine[None, None], where[None, None]), received)

        def run(stage):
            seen, made = target.run_stage(
                stage, blocks, state, where[None, None], sees, cache, batch=1, length=where[None]
            )
            return seen[-1], made

        runs = [functools.partial(run, stage) for stage in range(stages)]
        made = jax.eval_shape(runs[0])
        idle = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)  # noqa: E731
        state, entries = jax.lax.switch(jnp.where(busy, here, stages), [*runs, idle])
        verdict = step_verdict(busy[None], mine[None])
        cache = kv_cache.commit(cache, entries, where[None], verdict, rings)
        own = jnp.argmax(model.head(model.norm(state), 1)[0, 0]).astype(jnp.int32)
        said = jax.lax.all_gather(own, STAGE)

        done, right = live[-1], live[-2] & (held[-2] == said[-1])
        anew = done & ~right

        def moved(new, old, first):
            """What the devices hold after all tokens moved on, or after all but a new one were
            flushed."""
            alone = jnp.zeros_like(old).at[0].set(first)
            return jnp.where(anew, alone, jnp.concatenate([new[None], old[:-1]]))

        counts = Counts(
            tokens=counts.tokens.at[i].set(jnp.where(done, said[-1], counts.tokens[i])),
            ticks=counts.ticks + each,
            reads=counts.reads + each * jnp.sum(live, dtype=jnp.int32),
            hits=counts.hits + (done & right & (i + 1 < num)),
        )
        return (
            i + done,
            cache,
            moved(said[0], held, said[-1]),
            moved(place[0] + 1, place, place[-1] + 1),
            moved(live[0] & guess, live, True),
            jax.lax.ppermute(state, STAGE, onwards),
            counts,
        )

    empty = jnp.zeros((stages,), jnp.int32)
    held = empty.at[0].set(token)
    nothing = jnp.zeros_like(model.embed(held[:1, None], empty[:1, None]))
    counts = Counts(tokens=jnp.zeros((num,), jnp.int32), ticks=zero, reads=zero, hits=zero)
    carry = zero, cache, held, empty.at[0].set(known), empty.at[0].set(1) > 0, nothing, counts
    return jax.lax.while_loop(lambda carry: carry[0] < num, cycle, carry)[-1]
