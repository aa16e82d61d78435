"""Sliding windows: caches bounded by the window, and the same text and logits as without a bound.

The reference is one pass over the whole text, which reads no cache; what a window hides there is
compared with transformers in ``models/test_parity.py``.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import cache_copies, hlo
from flax import nnx
from shapes import TINY

import specjax
from specjax import kernels, trees
from specjax.decoding import reference
from specjax.drafters import Adaptive, DraftModel, NGram, Plain
from specjax.kernels import attention
from specjax.models import kv_cache
from specjax.models.causal_lm import CausalLM
from specjax.models.decoder import Decoder
from specjax.types import Draft, Verdict

WINDOW = 6
MIXED = dataclasses.replace(  # a local layer, whose cache is a ring, and a global one
    TINY,
    max_positions=512,
    window=WINDOW,
    local_layers=(True, False),
    local_rope_theta=500.0,
    score_softcap=8.0,
    logit_softcap=20.0,
)
LOCAL = dataclasses.replace(
    MIXED, hidden_size=16, num_layers=1, num_heads=2, window=4, local_layers=None
)


@functools.cache
def model(config, seed=0):
    """A decoder with random weights, large enough for its laws to be far from uniform."""
    params = nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))[1]
    return CausalLM(config), jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, params)


def drafters():
    """With their weights. The draft model has a window of its own."""
    draft = DraftModel(num_draft=3, model=CausalLM(LOCAL))
    small = model(LOCAL, 1)[1]
    costs = np.asarray([1.0, 1.2, 1.3], np.float32)
    return {
        "plain": (Plain(), None),
        "draft": (draft, small),
        "ngram": (NGram(num_draft=7, shortest=1), None),
        "adaptive": (Adaptive(draft), {"inner": small, "costs": costs}),
    }


@functools.partial(jax.jit, static_argnums=0)
def verify(target, params, cache, draft):
    return target.verify(params, cache, draft)


@functools.partial(jax.jit, static_argnums=0)
def read(target, params, cache, tokens, begin=0):
    """Commits ``tokens`` ``[B, T]`` of all rows at positions ``begin ...``, in one pass."""
    batch, size = tokens.shape
    at = jnp.full((batch,), begin, jnp.int32)
    draft = Draft(start=at, tokens=jnp.asarray(tokens), topology=trees.chain_parents(size - 1))
    entries = target.verify(params, cache, draft, logits=False).entries
    path = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), tokens.shape)
    return target.commit(cache, entries, at, Verdict(path=path, count=path[:, -1], token=at))


def text(num, batch=1, seed=0):
    return np.random.default_rng(seed).integers(0, 67, (batch, num)).astype(np.int32)


# ------------------------------------------------------------------- memory


def test_the_cache_of_a_local_layer_does_not_grow_with_the_text():
    target, params = model(MIXED)
    for capacity, local in ((4, 4), (WINDOW, WINDOW), (100, WINDOW), (500, WINDOW)):
        cache = jax.eval_shape(lambda c=capacity: target.init(params, 3, c))
        sizes = [{leaf.shape for leaf in layer} for layer in cache]
        assert sizes == [{(3, 2, local, 8)}, {(3, 2, capacity, 8)}]
    drafter, weights = drafters()["draft"]
    state = jax.eval_shape(lambda: drafter.init(weights, params, 3, 100))
    assert {leaf.shape[2] for leaf in jax.tree.leaves(state.cache)} == {4}


# ------------------------------------------------------------------- the same text


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", drafters())
def test_greedy_text_far_beyond_the_window_equals_one_pass_over_the_whole(name):
    """Prompts of a ragged batch: shorter than the window, of one token, and longer than a chunk of
    the prefill, which itself is many times the ring."""
    target, params = model(MIXED)
    prompts, lengths = text(270, batch=4), np.asarray([270, 1, 5, 131], np.int32)
    drafter, weights = drafters()[name]
    params = {"target": params, "drafter": weights}
    settings = dict(key=jax.random.key(0), max_new_tokens=24)
    out = specjax.decode(target, drafter, params, prompts, lengths, **settings)
    said = np.asarray(reference.logits(target, params["target"], out.tokens)).argmax(axis=-1)
    for row, length in enumerate(lengths):
        new = np.asarray(out.tokens)[row, length : length + 24]
        assert (said[row, length - 1 : length + 23] == new).all()
    assert len(np.unique(np.asarray(out.tokens)[0, 270:])) > 3  # a text that could go wrong


def test_logits_of_a_tree_beyond_the_window_are_those_of_each_path():
    """Its deep nodes no longer see what the root still sees, nor their own first ancestors."""
    target, params = model(MIXED)
    topology = (-1, 0, 0, 1, 1, 3, 5, 6, 7, 8)  # the last node is 8 deep, the window is 6
    prompt, nodes = text(15), text(10, seed=1)
    cache = read(target, params, target.init(params, 1, 40), prompt)
    draft = Draft(start=jnp.asarray([15]), tokens=jnp.asarray(nodes), topology=topology)
    found = verify(target, params, cache, draft).logits[0]

    @jax.jit
    def in_two_passes(params, cache):
        first = target.verify(params, cache, trees.narrow(draft, 4))
        rest = target.verify(params, cache, draft, since=4, entries=first.entries)
        return jnp.concatenate([first.logits, rest.logits], axis=1)[0]

    np.testing.assert_allclose(in_two_passes(params, cache), found, atol=5e-5)
    paths = [np.flatnonzero(above) for above in np.asarray(trees.ancestors(draft))[0].T]
    alone = np.zeros((10, 15 + 9), np.int32)
    for row, path in enumerate(paths):
        alone[row, : 15 + len(path)] = [*prompt[0], *nodes[0, path]]
    expected = np.asarray(reference.logits(target, params, jnp.asarray(alone)))
    ends = [14 + len(path) for path in paths]
    np.testing.assert_allclose(found, expected[np.arange(10), ends], atol=5e-5)


# ------------------------------------------------------------------- the ring


def test_a_ring_holds_the_last_tokens_however_they_were_read():
    target, params = model(LOCAL)
    tokens = text(21, batch=2)
    at_once = read(target, params, target.init(params, 2, 40), tokens)
    one_by_one = target.init(params, 2, 40)
    for i in range(21):
        one_by_one = read(target, params, one_by_one, tokens[:, i : i + 1], begin=i)
    for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(one_by_one), strict=True):
        assert a.shape[2] == 4
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(("slots", "steps"), [(1, 5), (4, 9), (6, 6), (8, 3)])
def test_no_slot_of_a_ring_is_given_to_two_entries_and_the_last_ones_get_theirs(slots, steps):
    start, count = np.arange(-1, 12)[:, None], steps - 2
    position = start + np.arange(steps)
    found = np.asarray(kv_cache.slots_of(position, count - np.arange(steps), slots, True))
    for row, (first, given) in enumerate(zip(start[:, 0], found, strict=True)):
        kept = given[given < slots]
        assert len(set(kept)) == len(kept)
        wanted = range(max(0, first, first + count + 1 - slots), first + count + 1)
        assert kept.tolist() == [p % slots for p in wanted], row


@pytest.mark.parametrize("ring", [False, True])
def test_slots_hold_the_positions_that_belong_there_and_rows_that_do_nothing_stay_as_they_are(ring):
    """Entries are their positions: slot ``s`` must hold the last position that belongs there."""
    slots, steps = 4, 7
    start, count = jnp.asarray([-1, 2, 5, 3, 9]), jnp.asarray([6, 0, 6, -1, 3])
    before = jnp.full((5, 2, slots, 1), -9.0)
    where = start[:, None] + jnp.arange(steps)
    entries = jnp.broadcast_to(where[:, None, :, None].astype(jnp.float32), (5, 2, steps, 1))
    path = jnp.broadcast_to(jnp.arange(steps, dtype=jnp.int32), (5, steps))
    verdict = Verdict(path=path, count=count, token=count)
    rings = (ring,) if ring else None
    after = kv_cache.commit((before,), (entries,), start, verdict, rings)[0]
    for row in range(5):
        expected = np.full(slots, -9.0)
        for position in range(int(start[row]), int(start[row] + count[row]) + 1):
            if position >= 0 and (ring or position < slots):
                expected[position % slots] = position
        np.testing.assert_array_equal(after[row, 0, :, 0], expected)
        np.testing.assert_array_equal(after[row, 1, :, 0], expected)


def test_what_an_earlier_text_left_in_the_slots_is_not_seen():
    target, params = model(MIXED)
    prompt = text(3)
    draft = Draft(start=jnp.asarray([3]), tokens=jnp.asarray([[7, 8]]), topology=(-1, 0))
    clean = read(target, params, target.init(params, 1, 40), prompt)
    used = jax.tree.map(lambda x: x + 100.0, target.init(params, 1, 40))
    used = read(target, params, used, prompt)
    expected = verify(target, params, clean, draft).logits
    np.testing.assert_array_equal(verify(target, params, used, draft).logits, expected)


@pytest.mark.parametrize("slots", [16, 24, 100])
def test_attention_over_a_ring_of_any_size_is_that_of_the_positions_it_holds(slots, monkeypatch):
    """One prefix, several sizes of it, and blocks; against a softmax written out by position."""
    monkeypatch.setattr(attention, "SMALLEST_PREFIX", 8)
    monkeypatch.setattr(attention, "BLOCK", 32)
    rng, window = np.random.default_rng(0), slots - 2
    batch, nodes = 3, 2
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    query, own = draw(batch, 1, 4, 1, nodes), draw(2, batch, 1, nodes, 4)
    length = np.asarray([5, slots, 3 * slots + 7], np.int32)
    past = draw(2, batch, 1, length.max(), 4)
    ring = np.zeros((2, batch, 1, slots, 4), np.float32)
    for row in range(batch):
        for position in range(length[row]):
            ring[:, row, :, position % slots] = past[:, row, :, position]
    mask = jnp.triu(jnp.ones((nodes, nodes), bool))[None]
    found = kernels.current().attend(
        *map(jnp.asarray, (query, *own)),
        mask,
        tuple(ring),
        jnp.asarray(length),
        attention.choice_of(slots, jnp.asarray(length)),
        window=window,
        positions=jnp.asarray(length)[:, None] + jnp.arange(nodes),
    )
    for row in range(batch):
        for node in range(nodes):
            position = length[row] + node
            first = max(0, position - window + 1)
            keys, values = (
                np.concatenate([past[i, row, 0, first : length[row]], own[i, row, 0, : node + 1]])
                for i in range(2)
            )
            weights = np.exp(keys @ query[row, 0, :, 0, node] / 2)
            expected = weights @ values / weights.sum()
            np.testing.assert_allclose(found[row, 0, :, 0, node], expected, atol=1e-5)


# ------------------------------------------------------------------- the compiled program


@pytest.mark.parametrize(("name", "batch"), [("plain", 1), ("draft", 3), ("ngram", 1)])
def test_the_loop_copies_no_ring(name, batch):
    drafter, weights = drafters()[name]
    windows = 11, 13  # no draft has as many nodes, whose entries would have the same shape
    wide = [dataclasses.replace(c, window=w) for c, w in zip((MIXED, LOCAL), windows, strict=True)]
    if name == "draft":
        drafter = dataclasses.replace(drafter, model=CausalLM(wide[1]))
    params = {"target": model(MIXED)[1], "drafter": weights}
    text = hlo(CausalLM(wide[0]), drafter, params, batch, 300, 0)
    assert f"f32[{2 * batch},11,8]" in text
    assert not cache_copies(text, *((batch, 2, size, 8) for size in (300, *windows)))
