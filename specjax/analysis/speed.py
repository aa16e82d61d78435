"""SPEED: tokens in flight through the repeats of a decoder that shares its layers.

A decoder of K layers that run R times, one repeat after the other with the same weights, has the
depth L = R * K. After the first repeat the final norm and the LM head read the hidden state and
guess the next token, which enters the first repeat while its predecessor runs the second one. So up
to R tokens are in flight, each in a repeat of its own, and one read of a layer's weights serves all
of them. A token that leaves the last repeat says what its successor is; if another token had
entered, all younger ones are flushed and the right one enters.

    ticks = L + (T - 1) * (L - (L - K) * p)      p: the share of hits among the first T - 1 tokens

Each repeat has a cache of its own. The repeats are the rows of a batch: row r holds the token in
repeat r and the cache of repeat r, and one pass through the K layers moves all tokens on.

Lossless: yes; greedy decoding of one prompt, the text of the unrolled model.

Differs from the paper, as far as its abstract says: the guesses come from the model's own norm and
head, where SPEED trains heads for them.

References: Hooper et al., SPEED: speculative pipelined execution for efficient decoding, arXiv
2310.12072. The authors published no code; the schedule and the formula are derived.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..models.causal_lm import CausalLM
from ..models.lm import LM
from ..types import Draft
from .pipelined import (
    Counts,
    Pipelined,
    best,
    check_flushed,
    columns,
    embedded,
    one_prompt,
    read_prompt,
    report,
    run_layers,
    step_verdict,
    timed,
    written,
)


def unrolled(lm: LM, repeats: int) -> LM:
    """Returns the model whose layers are those of ``lm``, ``repeats`` times one after the other.

    The repeats have the same arrays as weights. ``specjax.generate`` decodes it plainly.

    Args:
      lm: a decoder-only model, the K layers that are shared.
      repeats: R, at least 2.

    Raises:
      ValueError: the model is of another kind, or its layers differ by more than their window.
    """
    target = lm.target
    if not isinstance(target, CausalLM):
        raise ValueError(f"{lm.name}: SPEED schedules the layers of decoder-only models alone")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 2:
        raise ValueError(f"repeats={repeats!r}: give an integer, at least 2")
    config, layers = target.config, target.num_layers
    local = config.local_layers and config.local_layers * repeats
    whole = dataclasses.replace(config, num_layers=layers * repeats, local_layers=local)
    if any(whole.has_experts(i) != config.has_experts(i % layers) for i in range(whole.num_layers)):
        raise ValueError(
            f"{lm.name}: its first layers have no experts and later ones have, so that they cannot "
            "be shared by repeats"
        )
    blocks = nnx.State({i: lm.params["blocks"][i % layers] for i in range(whole.num_layers)})
    params = nnx.State(dict(lm.params) | {"blocks": blocks})
    name = f"{lm.name}, {repeats} times"
    own = dataclasses.replace(target, config=whole)
    return LM.of(own, params, tokenizer=lm.tokenizer, name=name)


def speed(lm: LM, prompt, *, repeats: int, max_new_tokens: int = 64) -> Pipelined:
    """Generates a text greedily by SPEED's schedule, and counts what it costs.

    Args:
      lm: a decoder-only model, the K layers that are shared.
      prompt: one prompt, see ``generate``.
      repeats: R, how often the layers run, at least 2.
      max_new_tokens: the number of tokens; no end-of-text token ends the text.

    Raises:
      ValueError: see ``unrolled``; the text does not fit, or it is longer than a window of the
        model and there are more than two repeats.

    Example::

        print(speed(shared, "def f(x):", repeats=3))
    """
    whole = unrolled(lm, repeats)
    tokens, capacity = one_prompt(lm, prompt, max_new_tokens, repeats)
    check_flushed(lm, len(tokens) + max_new_tokens, repeats, "repeats")
    layers = len(lm.params["blocks"])

    def run(guess):
        given = whole.target, layers, guess, max_new_tokens, capacity
        return timed(lambda: _decode(*given, whole.params, tokens))

    return report(*run(True), *run(False), layers * repeats, layers)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _decode(
    target: CausalLM, layers: int, guess: bool, num: int, capacity: int, params, tokens
) -> Counts:
    repeats, known, zero = target.num_layers // layers, len(tokens) - 1, jnp.zeros((), jnp.int32)
    read = read_prompt(target, params, tokens)
    rows = [read[i::layers] for i in range(layers)]  # of a layer: its entries in each repeat
    read = tuple(jax.tree.map(lambda *x: jnp.concatenate(x), *of) for of in rows)
    cache = written(target, target.init(params, repeats, capacity)[:layers], read, known)

    def cycle(carry):
        i, cache, held, place, live, states, counts = carry
        draft = Draft(start=place, tokens=held[:, None], topology=(-1,))
        entering = Draft(start=place[:1], tokens=held[:1, None], topology=(-1,))
        states = jnp.concatenate([embedded(target, params, entering), states], axis=1)
        given: dict[str, Any] = dict(states=states, features=(layers,), logits=True)
        scores = run_layers(target, params, cache, draft, range(layers), **given)
        cache = target.commit(cache, scores.entries[:layers], place, step_verdict(live, held))
        said = best(scores)[:, 0]
        done, right = live[-1], live[-2] & (held[-2] == said[-1])
        anew = done & ~right
        entered = live[:1] & guess

        def moved(new, old, other):
            """The rows after all tokens moved on, or after all but the new one were flushed."""
            return jnp.where(anew, other, jnp.concatenate([new, old[:-1]]))

        empty = jnp.zeros((repeats,), jnp.int32)
        found = counts.tokens.at[i].set(jnp.where(done, said[-1], counts.tokens[i]))
        counts = Counts(
            tokens=found,
            ticks=counts.ticks + layers,
            reads=counts.reads + layers,
            hits=counts.hits + (done & right & (i + 1 < num)),
        )
        return (
            i + done,
            cache,
            moved(said[:1], held, empty.at[0].set(said[-1])),
            moved(place[:1] + 1, place, empty.at[0].set(place[-1] + 1)),
            moved(entered, live, empty.at[0].set(1) > 0),
            columns(scores)[:, :-1],
            counts,
        )

    empty = jnp.zeros((repeats,), jnp.int32)
    first = Draft(start=zero[None], tokens=tokens[None, -1:], topology=(-1,))
    states = embedded(target, params, first)
    carry = (
        zero,
        cache,
        empty.at[0].set(tokens[-1]),
        empty.at[0].set(known),
        empty.at[0].set(1) > 0,
        jnp.zeros((len(states), repeats - 1), states.dtype),
        Counts(tokens=jnp.zeros((num,), jnp.int32), ticks=zero, reads=zero, hits=zero),
    )
    return jax.lax.while_loop(lambda carry: carry[0] < num, cycle, carry)[-1]
