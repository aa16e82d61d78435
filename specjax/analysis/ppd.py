"""PPD: the next token starts from guesses that an intermediate layer makes of it.

After d of the L layers of a token, the LM head reads the hidden state and takes the k most likely
next tokens. Each of them starts at the first layer while the token goes on at layer d + 1: one
worker runs the token, k workers run a guess each, in lock step. When the token has passed layer L,
the head says the next token. If that was guessed (a *hit*), it goes on from layer L - d + 1;
otherwise it starts at the first layer. With d >= L / 2 no guess passes layer d before it is known
to be right, so that one token of lookahead is all there is.

    ticks = L + (T - 1) * (L - (L - d) * p)      p: the share of hits among the first T - 1 tokens

Here one device runs all workers, so nothing becomes faster: the schedule runs tick by tick, as the
workers would, and says what they would need. A guess reads the target's cache of committed tokens,
and the entries of the one token that is under way, which has always run the layer before.

Lossless: yes; greedy decoding of one prompt.

References: Yang et al., Predictive pipelined decoding, arXiv 2307.05908. The authors published no
code; the formula is derived for this schedule.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..models.causal_lm import CausalLM
from ..models.lm import LM
from ..types import Draft
from .pipelined import (
    Counts,
    Pipelined,
    best,
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


def ppd(lm: LM, prompt, *, layer: int, guesses: int = 3, max_new_tokens: int = 64) -> Pipelined:
    """Generates a text greedily by predictive pipelined decoding, and counts what it costs.

    Args:
      lm: a decoder-only model from ``specjax.load`` or ``LM.of``.
      prompt: one prompt, see ``generate``.
      layer: d, the number of layers after which the next token is guessed; at least half of L.
      guesses: k, the number of guesses.
      max_new_tokens: the number of tokens; no end-of-text token ends the text.

    Raises:
      ValueError: the model has no such layer or is of another kind, there are no guesses, or the
        text does not fit.

    Example::

        print(ppd(lm, "def f(x):", layer=6, guesses=3))
    """
    target = lm.target
    if not isinstance(target, CausalLM):
        raise ValueError(f"{lm.name}: PPD schedules the layers of decoder-only models alone")
    layers = target.num_layers
    if not layers <= 2 * layer or not layer < layers:
        raise ValueError(
            f"layer={layer}: the model has {layers} layers, so give one from {-(-layers // 2)} to "
            f"{layers - 1}: before that a guess would itself have to be guessed after"
        )
    if not 1 <= guesses <= target.vocab_size:
        raise ValueError(f"guesses={guesses}: give 1 to {target.vocab_size}")
    tokens, capacity = one_prompt(lm, prompt, max_new_tokens, 0)

    def run(guesses):
        given = target, layer, guesses, max_new_tokens, capacity
        return timed(lambda: _decode(*given, lm.params, tokens))

    return report(*run(guesses), *run(0), layers, layer)


@pytree_dataclass
class Token:
    """A token under way, and the guesses of the next one.

    Attributes:
      tokens: int32 ``[1, 1 + k]``, the token and the guesses.
      layer: int32, the layers that the token has passed.
      state: ``[H, 1]`` after these layers.
      entries: of the token, for each layer; zeros for those to come.
      states: ``[H, k]`` of the guesses.
      guessed: entries of the guesses in the first L - d layers; zeros for those to come.
      said: int32, the next token; 0 as long as it is not known.
      ticks, reads: int32, see ``Counts``.
    """

    tokens: jax.Array
    layer: jax.Array
    state: jax.Array
    entries: tuple[Any, ...]
    states: jax.Array
    guessed: tuple[Any, ...]
    said: jax.Array
    ticks: jax.Array
    reads: jax.Array


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _decode(
    target: CausalLM, layer: int, guesses: int, num: int, capacity: int, params, tokens
) -> Counts:
    layers, known, zero = target.num_layers, len(tokens) - 1, jnp.zeros((), jnp.int32)
    read = read_prompt(target, params, tokens)
    cache = written(target, target.init(params, 1, capacity), read, known)

    def none(nodes):
        """Entries of zeros for each layer."""
        return jax.tree.map(lambda x: jnp.zeros_like(x, shape=_nodes(x, nodes)), tuple(read))

    def begun(token, start, ticks, reads) -> Token:
        """A token that starts at the first layer."""
        own = jnp.concatenate([token[None, None], jnp.zeros((1, guesses), jnp.int32)], axis=1)
        state = embedded(target, params, _draft(start, own[:, :1]))
        return Token(
            tokens=own,
            layer=zero,
            state=state,
            entries=none(1),
            states=jnp.zeros((len(state), guesses), state.dtype),
            guessed=none(guesses)[: layers - layer],
            said=zero,
            ticks=ticks,
            reads=reads,
        )

    def step(carry):
        i, cache, now, hits, said = carry
        start = (known + i)[None]
        given = target, params, cache, start, layer
        ticks = [functools.partial(_tick, *given, j) for j in range(layers)]
        done = jax.lax.while_loop(
            lambda now: now.layer < layers, lambda now: jax.lax.switch(now.layer, ticks, now), now
        )
        kept = step_verdict(jnp.ones((1,), bool), done.said[None])
        cache = target.commit(cache, done.entries, start, kept)
        fresh = begun(done.said, start + 1, done.ticks, done.reads)
        if guesses:
            right = done.tokens[0, 1:] == done.said
            early = _from_guess(done, fresh, jnp.argmax(right))
            fresh = jax.tree.map(lambda a, b: jnp.where(jnp.any(right), a, b), early, fresh)
            hits = hits + (jnp.any(right) & (i + 1 < num))
        return i + 1, cache, fresh, hits, said.at[i].set(done.said)

    first = begun(tokens[-1], jnp.asarray([known], jnp.int32), zero, zero)
    carry = zero, cache, first, zero, jnp.zeros((num,), jnp.int32)
    _, _, last, hits, said = jax.lax.while_loop(lambda carry: carry[0] < num, step, carry)
    return Counts(tokens=said, ticks=last.ticks, reads=last.reads, hits=hits)


def _tick(target, params, cache, start, layer, j, now: Token) -> Token:
    """What the workers do in the tick in which the token runs layer ``j``, counted from 0."""
    guesses, last = now.tokens.shape[1] - 1, j + 1 == target.num_layers
    token = _draft(start, now.tokens[:, :1])
    run = functools.partial(run_layers, target, params, cache)
    if guesses and j == layer:  # before this layer, since a guess may have come thus far
        said = run(token, range(0), states=now.state, logits=True).logits
        top = jax.lax.top_k(required(said, "logits")[0, 0], guesses)[1]
        tokens = now.tokens.at[0, 1:].set(top.astype(jnp.int32))
        states = embedded(target, params, _draft(start, tokens), since=1)
        now = dataclasses.replace(now, tokens=tokens, states=states)
    features = () if last else (j + 1,)
    scores = run(token, range(j, j + 1), states=now.state, logits=last, features=features)
    entries = (*now.entries[:j], scores.entries[j], *now.entries[j + 1 :])
    reads = now.reads + 1
    changed: dict[str, Any] = dict(entries=entries, layer=now.layer + 1, ticks=now.ticks + 1)
    if last:
        changed |= dict(said=best(scores)[0, 0])
    else:
        changed |= dict(state=columns(scores))
    if guesses and j >= layer:
        early, tree = j - layer, _draft(start, now.tokens)
        which, features = range(early, early + 1), (early + 1,)
        given: dict[str, Any] = dict(since=1, entries=entries, features=features)
        scores = run(tree, which, states=now.states, **given)
        fresh = jax.tree.map(lambda x: x[:, :, 1:], scores.entries[early])
        guessed = (*now.guessed[:early], fresh, *now.guessed[early + 1 :])
        changed |= dict(guessed=guessed, states=columns(scores))
        reads = reads + 1
    return dataclasses.replace(now, reads=reads, **changed)


def _from_guess(done: Token, fresh: Token, one: jax.Array) -> Token:
    """``fresh`` as it goes on from what was computed of guess ``one`` of the token before."""

    def take(x):
        return jax.lax.dynamic_slice_in_dim(x, one, 1, axis=2)

    early = len(done.guessed)
    entries = (*(jax.tree.map(take, layer) for layer in done.guessed), *fresh.entries[early:])
    state = jax.lax.dynamic_slice_in_dim(done.states, one, 1, axis=1)
    layer = jnp.full_like(fresh.layer, early)
    return dataclasses.replace(fresh, layer=layer, state=state, entries=entries)


def _draft(start, tokens) -> Draft:
    """The token that is under way, and below it the guesses of the next one."""
    return Draft(start=start, tokens=tokens, topology=(-1, *[0] * (tokens.shape[1] - 1)))


def _nodes(x, nodes: int) -> tuple[int, ...]:
    return (*x.shape[:2], nodes, *x.shape[3:])
