"""Heads that lag over rounds without a draft: what they draft, and what they have read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import cache_copies, hlo
from registry import cases
from toys import bag

from specjax import Sampling
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.round import round_context
from specjax.drafters import Adaptive, DraftLengthPolicy, adaptive, feature_cache, resting

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODEL, PARAMS = bag(13, 3, features=8)
CASES = cases(MODEL, PARAMS)
PROMPTS, LENGTHS = np.asarray([[1, 2, 3], [4, 5, 0]], np.int32), np.asarray([3, 2])
HEADS = ("eagle3", "mtp distinct", "p-eagle dependent", "kangaroo", "block", "dspark", "lilicorr")
WINDOW = " over a window"
RESTS, NEW = 9, 34  # more rests than are read in one pass, or than there is room for


@dataclasses.dataclass(frozen=True)
class Seldom(DraftLengthPolicy):
    """Drafts in the first two of every ``RESTS + 2`` rounds."""

    name = "seldom"
    learns_from_rests = True

    def init(self, batch, depth):
        return jnp.zeros((batch,), jnp.int32)

    def choose(self, memory, widths, costs, budget):
        return jnp.where(jnp.max(memory) % (RESTS + 2) < 2, widths[-1], 0), memory

    def update(self, memory, outcome):
        return memory + 1


def decoded(name, monkeypatch, lag, chunk=4, rounds=None):
    """The state after some rounds with room for ``lag`` tokens, and everything that made it."""
    monkeypatch.setattr(adaptive, "LAG", lag)
    monkeypatch.setattr(resting, "CHUNK", chunk)
    inner, weights, _ = CASES[name.removesuffix(WINDOW)]
    if name.endswith(WINDOW):
        layer = dataclasses.replace(inner.config.layer, window=3)
        inner = dataclasses.replace(inner, config=dataclasses.replace(inner.config, layer=layer))
    drafter = Adaptive(inner, Seldom())
    given = PROMPTS, LENGTHS, jax.random.key(0), NEW, Sampling(), None, ()
    request, capacity = prepare_inputs(MODEL, drafter, *given)
    params = {"target": PARAMS, "drafter": {"inner": weights}}
    state = loop.jit_start(MODEL, drafter, "auto", capacity, params, request)
    state = loop.jit_burst(MODEL, drafter, "auto", rounds, params, state)
    return drafter, params, state


@pytest.mark.parametrize("name", (*HEADS, "eagle3" + WINDOW, "mtp distinct" + WINDOW))
def test_what_is_drafted_does_not_depend_on_how_far_a_head_may_lag(name, monkeypatch):
    found = [decoded(name, monkeypatch, lag)[2] for lag in (0, 3, 128)]
    assert int(jnp.sum(found[0].stats.drafted)) > 0
    for other in found[1:]:
        for field in ("rounds", "drafted_at", "accepted_at"):
            same = getattr(found[0].stats, field), getattr(other.stats, field)
            assert np.array_equal(*same), field
        assert found[0].tokens.tolist() == other.tokens.tolist()


@pytest.mark.parametrize("name", HEADS)
def test_what_was_left_unread_is_read_before_a_prompt_goes_on(name, monkeypatch):
    caches = []
    for lag in (0, 3, 128):
        drafter, params, state = decoded(name, monkeypatch, lag, rounds=RESTS)
        assert int(state.budget.min()) > 0 and int(state.stats.drafted.max()) > 0
        context = round_context(params, state)
        own = params["drafter"], PARAMS
        caches.append(drafter.sync(*own, state.drafter_state, context).inner.cache)
    end = int(state.length.min()) - 2
    for other in caches[1:]:
        for a, b in zip(jax.tree.leaves(caches[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a[:, :, :end], b[:, :, :end], atol=1e-5)


def test_a_head_reads_nothing_while_it_rests_and_there_is_room(monkeypatch):
    """Twice the room, and the cache is as it was before the rests."""
    _, _, state = decoded("dspark", monkeypatch, 128, rounds=RESTS)
    assert state.drafter_state.inner.count.tolist() == [RESTS - 2] * 2
    _, _, state = decoded("eagle3", monkeypatch, 128, rounds=RESTS)
    assert int(state.drafter_state.inner.count.min()) >= RESTS - 2


def test_fault_a_pending_token_that_is_never_read_is_seen(monkeypatch):
    read = resting.read_by_chunks

    def short(run, state, pending, count, **settings):
        cache, after = read(run, state, pending, jnp.maximum(count - 1, 0), **settings)
        return cache, after + (count > 0)

    right = decoded("dspark", monkeypatch, 128)[2]
    monkeypatch.setattr(resting, "read_by_chunks", short)
    wrong = decoded("dspark", monkeypatch, 127)[2]
    assert right.tokens.tolist() == wrong.tokens.tolist()  # it is lossless still
    assert not np.allclose(
        *(jax.tree.leaves(one.drafter_state.inner.cache)[0] for one in (right, wrong)), atol=1e-5
    )


def copied_pending(name, batch):
    """The copies of pending features in a compiled loop of adaptive heads."""
    inner, weights, _ = CASES[name]
    drafter = Adaptive(inner)
    costs = jnp.ones(len(drafter.widths))
    params = {"target": PARAMS, "drafter": {"inner": weights, "costs": costs}}
    shape = drafter.init(params["drafter"], PARAMS, batch, 64).inner.features.shape
    text = hlo(MODEL, drafter, params, batch, 64, 0)
    assert shape[1] >= resting.LAG and f"f32[{','.join(map(str, shape))}]" in text
    return cache_copies(text, shape)


@pytest.mark.parametrize(("name", "batch"), [("eagle3", 1), ("p-eagle dependent", 3)])
def test_rounds_that_draft_copy_nothing_that_is_pending(name, batch):
    assert not copied_pending(name, batch)


def test_fault_columns_that_are_written_alone_are_seen_as_copies(monkeypatch):
    def alone(new, old, some):
        """Writes ``stages`` columns alone, and leaves the others as they were."""
        where = jnp.where(some[:, None], jnp.arange(1), old.shape[1])
        return old.at[jnp.arange(len(old))[:, None], where].set(new[:, :1], mode="drop")

    monkeypatch.setattr(feature_cache, "_put_first", alone)
    assert copied_pending("eagle3", 1)
