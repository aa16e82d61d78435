"""Continuous rows: a prompt that comes into a running batch, and those that run on beside it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from registry import cases
from toys import bag

from specjax import Sampling
from specjax.decoding import continuous_batching, loop
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.state import STOPPED
from specjax.drafters import NGram
from specjax.models.causal_lm import CausalLM
from specjax.models.config import DecoderConfig
from specjax.models.decoder import abstract

VOCAB, CAPACITY, CHUNK = 11, 40, 4
insert = jax.jit(continuous_batching.insert, static_argnums=(0, 1, 2, 7), donate_argnums=(4,))
MODEL, PARAMS = bag(VOCAB, 0)
CASES = cases(MODEL, PARAMS)
LENGTHS, BUDGETS = [3, 9, 1, 14, 2], [6, 20, 9, 17, 11]  # of five prompts
WARM = np.asarray([0.0, 1.0, 0.8, 0.0, 1.0], np.float32)


def request(pick, temperature=WARM):
    """The rows ``pick`` of five ragged prompts with a key and a temperature each."""
    pick = np.asarray(pick)
    prompts = np.random.default_rng(0).integers(0, VOCAB, (5, 16)).astype(np.int32)
    sampling = Sampling(temperature=0.0 if temperature is None else temperature[pick])
    keys = jax.random.split(jax.random.key(0), 5)[pick]
    lengths, budgets = np.asarray(LENGTHS, np.int32)[pick], np.asarray(BUDGETS, np.int32)[pick]
    common = sampling, CAPACITY, ()
    return prepare_inputs(MODEL, NGram(), prompts[pick], lengths, keys, budgets, *common)[0]


def plain(tree):
    """A pytree in NumPy, keys as their data."""

    def value(x):
        key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if key else x)

    return jax.tree.map(value, tree)


def texts(state):
    """What each row has generated."""
    return [row[:n].tolist() for row, n in zip(state.tokens, state.length, strict=True)]


@pytest.mark.parametrize("name", ["plain", "draft", "ngram", "adaptive draft"])
def test_an_inserted_prompt_has_the_text_that_it_has_alone(name):
    drafter, weights, _ = CASES[name]
    warm = None if name.startswith("adaptive") else WARM  # sampled, it depends on the batch
    objects, params = (MODEL, drafter, "auto"), {"target": PARAMS, "drafter": weights}
    alone = []
    for row in range(5):
        state = loop.jit_start(*objects, CAPACITY, params, request([row], warm))
        alone += texts(loop.jit_burst(*objects, CAPACITY, params, state))

    state = loop.jit_start(*objects, CAPACITY, params, request([0, 1, 2], warm))
    state = loop.jit_burst(*objects, CAPACITY, params, state, 3)  # until one is done: the first
    assert state.budget.tolist().index(0) == 0 and jnp.sum(state.budget > 0) == 2
    found = {0: texts(state)[0]}
    waiting, owners = [3, 4], [None, 1, 2]
    while True:
        if waiting and None in owners:
            row, new = owners.index(None), waiting.pop(0)
            where, more = np.asarray([row, 3], np.int32), request([new, 0], warm)
            state = insert(*objects, params, state, where, more, CHUNK)
            owners[row] = new
        running = sum(owner is not None for owner in owners)
        if not running:
            break
        state = loop.jit_burst(*objects, CAPACITY, params, state, running)
        for row in np.flatnonzero(np.asarray(state.budget) == 0):
            if owners[row] is not None:
                found[owners[row]], owners[row] = texts(state)[row], None
    assert [found[i] for i in range(5)] == alone


@pytest.mark.usefixtures("quick_compilation")
def test_the_other_rows_are_left_alone_bit_by_bit():
    drafter, weights, _ = CASES["draft"]
    objects, params = (MODEL, drafter, "auto"), {"target": PARAMS, "drafter": weights}
    state = loop.jit_start(*objects, CAPACITY, params, request([1, 0, 3]))
    state = loop.jit_burst(*objects, CAPACITY, params, state, 3)
    before, kept = plain(state), jax.tree.map(jnp.copy, state)
    where = np.asarray([1], np.int32)
    after = insert(*objects, params, state, where, request([4]), CHUNK)
    changed = jax.tree.map(lambda a, b: np.array_equal(a[[0, 2]], b[[0, 2]]), before, plain(after))
    assert all(jax.tree.leaves(changed))
    fresh = plain(loop.jit_start(*objects, CAPACITY, params, request([4])))
    same = jax.tree.map(lambda a, b: np.allclose(a[1], b[0], atol=1e-6), plain(after), fresh)
    assert all(jax.tree.leaves(same))

    # and run on as if nothing had come
    ends = [plain(loop.jit_burst(*objects, CAPACITY, params, s)) for s in (kept, after)]
    ran_on = jax.tree.map(lambda a, b: np.array_equal(a[[0, 2]], b[[0, 2]]), *ends)
    assert all(jax.tree.leaves(ran_on))


TABLES = [
    "ngram",
    "suffix tree",
    "suffix and table",
    "sam",
    "recycling",
    "jacobi",
    "lookahead text",
]


STATELESS = ("ngram",)  # which reads the text alone


@pytest.mark.parametrize("name", [*TABLES, "fallback draft"])
def test_a_row_that_is_done_is_frozen_bit_by_bit(name):
    """Its text, its cache, and what its drafter has learnt; the others run on."""
    drafter, weights, _ = CASES[name]
    objects, params = (MODEL, drafter, "auto"), {"target": PARAMS, "drafter": weights}
    state = loop.jit_start(*objects, CAPACITY, params, request([1, 0, 3]))
    state = loop.jit_burst(*objects, CAPACITY, params, state, 3)  # until one is done
    done = np.asarray(state.budget) == 0
    assert done.sum() == 1
    before = plain(state)
    after = plain(loop.jit_burst(*objects, CAPACITY, params, state))

    def frozen(one, other):
        rows = one.ndim > 0 and len(one) == len(done)
        return not rows or np.array_equal(one[done], other[done], equal_nan=one.dtype.kind == "f")

    same = jax.tree.map(frozen, before, after)
    assert all(jax.tree.leaves(same)), same
    learnt = jax.tree.leaves(before.drafter_state)
    assert name in STATELESS or any(x.ndim and len(x) == len(done) for x in learnt)
    assert not np.array_equal(before.tokens[~done], after.tokens[~done])


def test_a_turn_ends_rows_lets_prompts_in_and_runs_on_as_the_three_do_apart():
    drafter, weights, _ = CASES["draft"]
    objects, params = (MODEL, drafter, "auto"), {"target": PARAMS, "drafter": weights}
    begun = loop.jit_burst(
        *objects, 2, params, loop.jit_start(*objects, CAPACITY, params, request([1, 0, 3]))
    )
    over, more = np.asarray([False, False, True]), request([4, 2])
    apart = loop.jit_end(jax.tree.map(jnp.copy, begun), over)
    apart = insert(*objects, params, apart, np.asarray([1], np.int32), request([4]), CHUNK)
    apart = loop.jit_burst(*objects, 3, params, apart, 2)
    bare = dataclasses.replace(more, key=jax.random.key_data(more.key))
    coming = np.asarray([1, 3], np.int32), bare  # the second finds no row
    state, report = continuous_batching.jit_turn(*objects, params, begun, over, coming, 3, 2, CHUNK)
    assert texts(state) == texts(apart)
    same = jax.tree.map(lambda a, b: np.allclose(a, b, atol=1e-6), plain(state), plain(apart))
    assert all(jax.tree.leaves(same))
    columns = dict(zip(continuous_batching.REPORT, np.asarray(report).T.tolist(), strict=True))
    assert columns["length"] == state.length.tolist()
    assert columns["ended"] == state.ended.tolist() and columns["ended"][2] == STOPPED
    for name in ("rounds", "drafted", "accepted"):
        assert columns[name] == getattr(state.stats, name).tolist()


def test_a_burst_ends_as_soon_as_fewer_rows_run_than_was_asked_for():
    objects, params = (MODEL, CASES["plain"][0], "auto"), {"target": PARAMS, "drafter": None}
    state = loop.jit_start(*objects, CAPACITY, params, request([0, 1, 2]))  # 6, 20, 9 tokens
    for live, rounds in ((3, 5), (2, 8), (1, 19)):  # the prompt gives the first token
        state = loop.jit_burst(*objects, CAPACITY, params, state, live)
        assert int(jnp.max(state.stats.rounds)) == rounds


@pytest.mark.usefixtures("quick_compilation")
def test_settings_of_another_kind_are_refused():
    objects, params = (MODEL, NGram(), "auto"), {"target": PARAMS, "drafter": None}
    state = loop.jit_start(*objects, CAPACITY, params, request([0, 1]))
    with pytest.raises(ValueError, match="of another kind than the batch"):
        continuous_batching.insert(*objects, params, state, [0], request([2], None), CHUNK)


# ---------------------------------------------------------------- what it costs


CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
)


def decoder_insert(batch, num, capacity=256, place=lambda x: x, turn=False):
    """The insertion of ``num`` prompts into a batch of a tiny decoder, compiled, alone or as a part
    of ``rows.turn``; its state's bytes, a row."""
    target, weights = CausalLM(CONFIG), abstract(CONFIG)[1]

    def asked(count):
        tokens, lengths = np.ones((count, 8), np.int32), np.full(count, 8, np.int32)
        key, sampling = jax.random.key(0), Sampling()
        return prepare_inputs(target, NGram(), tokens, lengths, key, 30, sampling, capacity, ())[0]

    objects, params = (target, NGram(), "auto"), {"target": weights, "drafter": None}
    state = loop.jit_start.eval_shape(*objects, capacity, params, asked(batch))
    state = jax.tree.map(place, state)
    where = np.arange(num, dtype=np.int32)
    if turn:
        bare = dataclasses.replace(asked(num), key=np.zeros((num, 2), np.uint32))
        over, coming = np.zeros(batch, bool), (where, bare)
        lowered = continuous_batching.jit_turn.lower(*objects, params, state, over, coming, 9, 1, 8)
    else:
        lowered = insert.lower(*objects, params, state, where, asked(num), 8)
    cache = sum(4 * leaf.size for leaf in jax.tree.leaves(state.cache))
    return lowered.compile(), cache // batch


@pytest.mark.parametrize("turn", [False, True])
def test_inserting_writes_into_the_batch_in_place_and_holds_the_new_rows_alone(turn):
    batch = 64
    compiled, row = decoder_insert(batch, 2, turn=turn)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes > batch * row
    # two rows, and what reads them, not 64; a round of all rows besides
    assert memory.temp_size_in_bytes < (32 if turn else 8) * row


def test_rows_over_a_mesh_are_replaced_where_they_lie():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over)

    compiled, _ = decoder_insert(8, 2, place=place)
    program = compiled.as_text()
    for moved in ("all-gather", "all-to-all", "collective-permute"):
        assert f" {moved}" not in program
    caches = jax.tree.leaves(compiled.output_shardings.cache)
    assert all(spec.is_equivalent_to(over, 4) for spec in caches)
