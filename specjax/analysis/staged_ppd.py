"""PPD on several devices: guesses of the next token run on the first devices of the axis ``stage``.

The layers of a target are divided over S devices (``models/pipeline.py``), each of which runs L / S
layers in one cycle. After the first m devices (``d = m * L / S`` layers, at least half of them) the
target's own norm and LM head read the token's hidden state and take the k most likely next tokens.
While the token goes on through the devices m to S - 1, the k guesses run together through the
devices 0 to S - m - 1, which would otherwise be idle::

    cycle            0     1     2     3          S = 4, m = 2; after a hit the next token
    the token        d0    d1    d2    d3         goes on in its cycle 2, otherwise in 0
    its k guesses    -     -     d0    d1

With an axis ``data`` of D devices beside ``stage`` there are D such lines of devices, and each runs
k / D of the guesses: with D = k each guess has devices of its own, as in the paper. The token is
then run by every line, so that each line has its keys and values. In ticks of one layer, with p the
share of hits among the first T - 1 tokens:

    ticks = L + (T - 1) * (L - (L - d) * p)

What runs, what is modelled: see ``staged.py``, whose ``on_stages`` has one guess of each token and,
with more than two devices, guesses after guesses.

Lossless: yes; greedy decoding of one prompt.

References: Yang et al., Predictive pipelined decoding, arXiv 2307.05908. The authors published no
code; the formula is derived for this schedule.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .. import sharding
from ..models import kv_cache
from ..models.lm import LM
from ..models.pipeline import PipelinedLM
from ..models.stage_weights import ENDS, LAYERS
from ..sharding import DATA, STAGE
from .pipelined import (
    Counts,
    Pipelined,
    one_prompt,
    read_prompt,
    report,
    step_verdict,
    timed,
    written,
)
from .staged import in_stages


def ppd_on_stages(
    lm: LM, prompt, *, guesses: int = 3, layer: int | None = None, max_new_tokens: int = 64
) -> Pipelined:
    """Generates a text greedily by predictive pipelined decoding on a mesh with an axis ``stage``.

    Args:
      lm: a model that ``specjax.load(..., mesh="stage=2")`` returns; with ``"data=3,stage=2"``
        three guesses have devices of their own.
      prompt: one prompt, see ``generate``.
      guesses: k, the number of guesses of each token, a multiple of the axis ``data``.
      layer: d, the number of layers after which the next token is guessed: those of whole devices,
        and at least half of L; None: the fewest such layers.
      max_new_tokens: the number of tokens; no end-of-text token ends the text.

    Returns:
      ``Pipelined``; ``reads`` counts the layers that any device ran, and ``seconds`` is the time of
      all devices at work at once.

    Raises:
      ValueError: the layers of the model are not divided over an axis ``stage``, no device ends
        with layer ``layer``, it is too early, the guesses cannot be shared by the axis ``data``, or
        the text does not fit.

    Example::

        lm = specjax.load(folder, mesh="data=3,stage=2")
        print(ppd_on_stages(lm, "def f(x):", guesses=3))
    """
    target, mesh = in_stages(lm)
    layers, each = target.num_layers, target.each
    accepted = [d for d in range(each, layers, each) if layers <= 2 * d]
    layer = accepted[0] if layer is None else layer
    if layer not in accepted:
        raise ValueError(
            f"layer={layer}: each of {target.stages} devices runs {each} of {layers} layers; give "
            f"{', '.join(map(str, accepted))}, the layers of whole devices from half of them on"
        )
    lines = mesh.shape.get(DATA, 1)
    if not 1 <= guesses <= target.vocab_size or guesses % lines:
        raise ValueError(
            f"guesses={guesses}: give 1 to {target.vocab_size}, and a multiple of data={lines}, "
            "since the devices of that axis share the guesses equally"
        )
    tokens, capacity = one_prompt(lm, prompt, max_new_tokens, 0)

    def run(guesses):
        given = target, layer // each, guesses, max_new_tokens, capacity
        return timed(lambda: _decode(*given, lm.params, tokens))

    with sharding.using(mesh):
        return report(*run(guesses), *run(0), layers, layer)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _decode(
    target: PipelinedLM, before: int, guesses: int, num: int, capacity: int, params, tokens
) -> Counts:
    read = read_prompt(target, params, tokens)
    cache = written(target, target.init(params, 1, capacity), read, len(tokens) - 1)
    lines = sharding.size(DATA)
    run = functools.partial(_on_each, target, before, guesses, lines, num, len(tokens) - 1)
    run = sharding.locally(run, [(), (STAGE,), (None, STAGE), ()], ())
    return run(params[ENDS], params[LAYERS], cache, tokens[-1])


def _on_each(
    target: PipelinedLM, before, guesses, lines, num, known, ends, layers, cache, token
) -> Counts:
    """On each device: the tokens one after the other, and the cycles of each token.

    Args:
      target: the model.
      before: m, the number of devices after which the next token is guessed.
      guesses: k; 0: the schedule without guesses.
      lines: D, the number of devices along ``data``.
      num: the number of tokens to generate.
      known: the number of tokens of the prompt before ``token``.
      ends, layers, cache: of this device, see ``PipelinedLM``.
      token: int32, the last token of the prompt.

    All devices hold the same token, place and guesses. The states ``[H, k / D]`` are a device's
    own: those of the guesses that it ran last, or in the first column that of the token.
    """
    here, stages, each = jax.lax.axis_index(STAGE), target.stages, target.each
    model, blocks, rings = target.ends({ENDS: ends}), target.blocks(layers), target.rings(cache)
    own, ahead = guesses // lines, stages - before  # a guess runs ahead through so many devices
    onwards = [(stage, stage + 1) for stage in range(stages - 1)]
    zero = jnp.zeros((), jnp.int32)

    def likely(device, states, count):
        """The ``count`` most likely next tokens, int32, of the token that ``device`` ran last."""

        def read():
            logits = model.head(model.norm(states[:, :1]), 1)[0, 0]
            return jax.lax.top_k(logits, count)[1].astype(jnp.int32)

        nothing = lambda: jnp.zeros((count,), jnp.int32)  # noqa: E731
        return jax.lax.psum(jax.lax.cond(here == device, read, nothing), STAGE)

    def passed(device, cache, tokens, place, received):
        """What ``device`` computes of tokens at ``place`` that do not see each other: the states
        and the entries of its layers; zeros on all other devices."""
        nodes = len(tokens)
        where, sees = jnp.broadcast_to(place, (1, nodes)), jnp.eye(nodes, dtype=bool)[None]
        states = jnp.where(here == 0, model.embed(tokens[None], where), received[:, :nodes])

        def run(stage):
            given: dict[str, Any] = dict(batch=1, length=place[None])
            seen, made = target.run_stage(stage, blocks, states, where, sees, cache, **given)
            return seen[-1], made

        runs = [functools.partial(run, stage) for stage in range(stages)]
        made = jax.eval_shape(runs[0])
        idle = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)  # noqa: E731
        return jax.lax.switch(jnp.where(here == device, here, stages), [*runs, idle])

    def cycle(device, carry, token, place, ahead_of=None):
        """The token runs through ``device``; the guesses ``ahead_of`` it, if any, do so through the
        device that stands ``before`` devices earlier."""
        cache, states, held = carry
        received, busy = jax.lax.ppermute(states, STAGE, onwards), here == device
        now, made = passed(device, cache, token[None], place, received)
        verdict = step_verdict(busy[None], token[None])
        cache = kv_cache.commit(cache, made, place[None], verdict, rings)
        states = jnp.where(busy, states.at[:, :1].set(now), states)
        if ahead_of is not None:
            early = device - before
            found = passed(early, cache, ahead_of, place + 1, received)
            states, held = jax.tree.map(
                lambda new, old: jnp.where(here == early, new.astype(old.dtype), old),
                found,
                (states, held),
            )
        return cache, states, held

    def of_all(tree, mine):
        """The arrays of the line of devices where ``mine``, for all of them."""
        if lines == 1:
            return tree
        return jax.lax.psum(jax.tree.map(lambda x: jnp.where(mine, x, 0), tree), DATA)

    def step(carry):
        i, cache, token, begin, states, counts = carry
        place, guess = known + i, None
        run = functools.partial(cycle, token=token, place=place)
        held = jax.tree.map(lambda x: jnp.zeros((1, x.shape[1], own, x.shape[3]), x.dtype), cache)
        now = jax.lax.fori_loop(begin, before, run, (cache, states, held))
        if guesses:
            top, line = likely(before - 1, now[1], guesses), 0
            if lines > 1:
                line = jax.lax.axis_index(DATA)
            guess = jax.lax.dynamic_slice_in_dim(top, line * own, own)
        run = functools.partial(run, ahead_of=guess)
        cache, states, held = jax.lax.fori_loop(before, stages, run, now)
        said, right = likely(stages - 1, states, 1)[0], jnp.zeros((), bool)
        if guess is not None:
            one = jnp.argmax(guess == said)
            mine = guess[one] == said
            right = of_all(mine.astype(jnp.int32), mine) > 0
            entries, state = of_all(_of_guess(held, states, one), mine)
            kept = step_verdict((right & (here < ahead))[None], said[None])
            cache = kv_cache.commit(cache, entries, (place + 1)[None], kept, rings)
            states = states.at[:, :1].set(state)
        cycles = stages - begin
        counts = Counts(
            tokens=counts.tokens.at[i].set(said),
            ticks=counts.ticks + each * cycles,
            reads=counts.reads + each * lines * (cycles + (ahead if guesses else 0)),
            hits=counts.hits + (right & (i + 1 < num)),
        )
        return i + 1, cache, said, jnp.where(right, ahead, 0), states, counts

    like = model.embed(token[None, None], zero[None, None])
    nothing = jnp.zeros((len(like), max(own, 1)), like.dtype)
    counts = Counts(tokens=jnp.zeros((num,), jnp.int32), ticks=zero, reads=zero, hits=zero)
    carry = zero, cache, token, zero, nothing, counts
    return jax.lax.while_loop(lambda carry: carry[0] < num, step, carry)[-1]


def _of_guess(held, states: jax.Array, one: jax.Array):
    """The entries ``[1, K, 1, E]`` and the state ``[H, 1]`` of guess ``one`` of a device."""
    take = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=one, slice_size=1)
    return jax.tree.map(lambda x: take(x, axis=2), held), take(states, axis=1)
