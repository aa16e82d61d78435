"""The unroll of a drafting layer is what it computes when it drafts, token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from specjax.train import unroll

from specjax.drafters import eagle, eagle3
from specjax.models.config import DecoderConfig

SIZE, ROWS, LENGTH, STEPS = 8, 2, 7, 3
LAYER = DecoderConfig(
    vocab_size=16,
    hidden_size=SIZE,
    intermediate_size=12,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)
SEGMENTS = np.asarray([[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1]], np.int32)
RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(ROWS, LENGTH, SIZE)).astype(np.float32)
EMBEDDED = RNG.normal(size=(STEPS, ROWS, LENGTH, SIZE)).astype(np.float32)


@functools.cache
def one_head(name):
    if name == "eagle":
        return eagle.EagleHead(eagle.EagleConfig(layer=LAYER), rngs=nnx.Rngs(0))
    config = eagle3.Eagle3Config(layer=LAYER, normed_output=True)
    return eagle3.Eagle3Head(config, rngs=nnx.Rngs(0))


class Staged(eagle.EagleHead):
    """A head whose steps have layers of their own, as DeepSeek's modules."""

    def __init__(self, rngs):
        super().__init__(eagle.EagleConfig(layer=LAYER), rngs=rngs)
        self.stages = nnx.List([eagle.EagleHead(self.config, rngs=rngs) for _ in range(STEPS)])

    def stage_blocks(self, stage):
        return self.stages[stage].blocks


def unrolled(head, hidden=HIDDEN, stages=1):
    """``[S, B, T, H]``."""
    return _unrolled(head, unroll.BLOCK, stages, hidden)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _unrolled(head, block, stages, hidden):
    read = [x.reshape(-1, SIZE).T for x in EMBEDDED]
    outs = unroll.unroll(head, hidden.reshape(-1, SIZE).T, read, SEGMENTS, stages)
    return jnp.stack([out.T.reshape(hidden.shape) for out in outs])


@functools.cache
def stepper(head):
    @jax.jit
    def one(embedded, hidden, position, cache):
        seen = 1 if cache is None else cache[0][0].shape[2] + 1
        positions, sees = jnp.full((1, seen), position), jnp.ones((1, seen, 1), bool)
        x = head.enter(embedded[:, None], hidden[:, None])
        out, cache = head.run(x, positions, sees, batch=1, earlier=cache)
        return out[:, 0], head.passed(out)[:, 0], cache

    return one


def drafted(head, row, place, forget=False):
    """``[S, H]``: the outputs of drafting below one position, a pass a token over a cache that
    grows by its entry; ``forget``: the broken twin, which keeps nothing of what it drafts."""
    cache, outs, one = None, [], stepper(head)
    first = int(np.argmax(SEGMENTS[row] == SEGMENTS[row, place]))
    for t in range(first, place + 1):  # the pairs of true features
        out, hidden, cache = one(EMBEDDED[0, row, t], HIDDEN[row, t], t, cache)
    outs.append(out)
    for step in range(1, STEPS):  # and the own outputs, one after the other
        out, hidden, after = one(EMBEDDED[step, row, place], hidden, place + step, cache)
        cache = cache if forget else after
        outs.append(out)
    return jnp.stack(outs)


@pytest.mark.parametrize(("name", "block"), [("eagle", 512), ("eagle3", 3)])
def test_every_step_at_every_position_is_that_of_drafting_there(name, block, monkeypatch):
    monkeypatch.setattr(unroll, "BLOCK", block)
    head = one_head(name)
    found = unrolled(head)
    for row, place in [(0, 0), (0, 4), (1, 2), (1, 3), (1, 6)]:
        np.testing.assert_allclose(found[:, row, place], drafted(head, row, place), atol=2e-5)


def test_fault_a_drafter_that_forgets_its_own_tokens():
    head = one_head("eagle3")
    found, twin = unrolled(head)[:, 0, 4], drafted(head, 0, 4, forget=True)
    np.testing.assert_allclose(found[:2], twin[:2], atol=2e-5)  # nothing was forgotten yet
    assert np.abs(found[2] - twin[2]).max() > 1e-3


def test_stages_have_caches_of_their_own_of_true_tokens_alone():
    """So what a step says follows from one pass a stage over the whole row, each causal."""
    head = Staged(nnx.Rngs(0))
    hidden, index = HIDDEN.reshape(-1, SIZE).T, jnp.arange(LENGTH)[None]
    sees = jnp.triu(jnp.ones((LENGTH, LENGTH), bool))[None]
    sees = sees & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
    for stage, found in enumerate(unrolled(head, stages=STEPS)):
        x = head.enter(EMBEDDED[stage].reshape(-1, SIZE).T, hidden, stage)
        hidden, _ = head.run(x, index, sees, batch=ROWS, stage=stage)
        np.testing.assert_allclose(found.reshape(-1, SIZE).T, hidden, atol=2e-5)


def test_blocks_of_queries_change_neither_outputs_nor_gradients(monkeypatch):
    def loss(hidden):
        return jnp.sum(jnp.sin(unrolled(one_head("eagle3"), hidden)))

    whole = jax.value_and_grad(loss)(HIDDEN)
    monkeypatch.setattr(unroll, "BLOCK", 3)  # 7 positions: two of the last block are spare
    for one, other in zip(whole, jax.value_and_grad(loss)(HIDDEN), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_gradients_flow_through_all_steps():
    def last(hidden):
        return unrolled(one_head("eagle3"), hidden)[-1, :, :3]

    check_grads(last, (HIDDEN,), order=1, modes=["rev"], rtol=2e-2)


def attended(window):
    """The sum of the sines of what queries of step 2 attend to, and its derivatives."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)  # noqa: E731
    steps = 23
    query = draw(2, 2, 4, 3, steps)  # [B, K, E, G, T]
    entries = [(draw(2, 2, steps, 4), draw(2, 2, steps, 4)) for _ in range(3)]
    segments = jnp.asarray(np.arange(steps) >= np.asarray([[9], [30]]), jnp.int32)
    sinks = jnp.zeros((2, steps), bool).at[:, 0].set(True)
    seen = None if window is None else (window, sinks)

    def loss(query, entries):
        return jnp.sum(jnp.sin(unroll.attend(query, entries, segments, seen)))

    return jax.value_and_grad(loss, argnums=(0, 1))(query, entries)


@pytest.mark.parametrize("window", [None, 6])
def test_spans_of_queries_attend_to_the_same_as_all_at_once(window, monkeypatch):
    whole = attended(window)
    monkeypatch.setattr(unroll, "SPAN", 5)
    for got, wanted in zip(jax.tree.leaves(attended(window)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
