"""Small caches: drafts and entries against a masked pass from scratch, and what a step reads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import cache_copies, hlo
from drawn_rounds import drawn_rounds
from masked_decoder import from_scratch, masked, softmax
from shapes import TINY
from toys import decoder_weights

import specjax
from specjax import Sampling, kernels, trees
from specjax.decoding import reference
from specjax.drafters import DraftModel, Plain, SelfDraft
from specjax.kernels import attention
from specjax.models import CausalLM, decoder, kv_cache, windowed
from specjax.types import Verdict

WINDOW, SINKS, DRAFTED, LAYERS = 5, 2, 3, 2
CONFIG = dataclasses.replace(TINY, max_positions=512, num_layers=LAYERS)
TARGET = CausalLM(CONFIG)
SMALL = windowed(TARGET, WINDOW, SINKS)
LENGTHS = np.asarray([1, 4, 8, 23], np.int32)  # the ring is not full, is just full, has turned
PROMPTS = np.random.default_rng(0).integers(0, 67, (4, 23)).astype(np.int32)
WARM = Sampling(temperature=1.0)


@functools.cache
def params():
    """Weights of the target, with laws far from uniform, and of a draft model near it."""
    target, noise = decoder_weights(CONFIG, 0), decoder_weights(CONFIG, 1)
    return {"target": target, "drafter": jax.tree.map(lambda x, y: x + 0.1 * y, target, noise)}


def drafter(name, window=WINDOW, **shape):
    shape = shape or dict(num_draft=DRAFTED)
    if name == "self":
        return SelfDraft(target=TARGET, window=window, sinks=SINKS, **shape)
    return DraftModel(model=windowed(TARGET, window, SINKS), **shape)


# ------------------------------------------------------------------- drafts and caches


def rounds(drafter, num):
    """``(state before the round, draft)`` of ``num`` rounds, at temperature 1."""
    return drawn_rounds(TARGET, drafter, params(), PROMPTS, LENGTHS, num)


def furthest(name, found, window=WINDOW):
    """The greatest difference of a state's small cache and of a draft's laws from the reference."""
    state, draft = found
    own = params()["target" if name == "self" else "drafter"]
    most = 0.0
    for row, length in enumerate(state.length):
        text = [*state.tokens[row, :length], *draft.tokens[row, 1:]]
        # the target's own entries of committed tokens are those of a cache that is whole
        begin = length - 1 if name == "self" else 0
        logits, entries = from_scratch(CONFIG, own, text, masked(len(text), window, SINKS, begin))
        laws = softmax(logits[length - 1 : length - 1 + DRAFTED])
        most = max(most, np.abs(draft.laws[row] - laws).max())
        if name != "self":
            kept = state.drafter_state
            for slots, made in zip(kept.cache, entries, strict=True):
                for slot, position in ring(kept.filled[row], WINDOW).items():
                    for a, b in zip(slots, made, strict=True):
                        most = max(most, np.abs(a[row, :, slot] - b[position]).max())
    return most


def ring(filled, window):
    """The slots of a ring after sinks that hold a token, and which: the last one written there."""
    at = lambda i: i if i < SINKS else SINKS + (i - SINKS) % window  # noqa: E731
    return {at(i): i for i in range(filled)}


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", ["draft", "self"])
def test_after_any_number_of_rounds_laws_and_caches_are_those_of_a_masked_pass_from_scratch(name):
    seen = list(rounds(drafter(name), 7))
    for found in seen:
        assert furthest(name, found) < 2e-4
    assert max(furthest(name, found, WINDOW + 1) for found in seen) > 1e-2  # it tells them apart
    lengths = np.stack([state.length for state, _ in seen])
    assert (np.diff(lengths, axis=0) > 1).any() and lengths[-1].min() > SINKS + WINDOW


def one_too_long(monkeypatch):
    right = kernels.current().__class__.attend

    def wrong(self, *args, window=None, **settings):
        return right(self, *args, window=window and window + 1, **settings)

    monkeypatch.setattr(kernels.current().__class__, "attend", wrong)


def overwritten(monkeypatch):
    right = kv_cache.slots_of

    def wrong(position, behind, slots, ring, sinks=0):
        return right(position, behind, slots, ring)  # the ring turns over the sinks

    monkeypatch.setattr(kv_cache, "slots_of", wrong)


def uncounted(monkeypatch):
    def wrong(mask, positions, here, window, sinks=0):
        return mask  # within a draft, or a chunk of the prompt, every token sees every earlier one

    monkeypatch.setattr(decoder, "within", wrong)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("fault", [one_too_long, overwritten, uncounted])
def test_scratch_tells_a_wrong_window_and_lost_sinks(fault, monkeypatch):
    class Own(CausalLM):
        """Of this test alone, whose programs are wrong."""

    fault(monkeypatch)
    wrong = DraftModel(num_draft=DRAFTED, model=Own(SMALL.config))
    assert max(furthest("draft", found) for found in rounds(wrong, 4)) > 1e-2


# ------------------------------------------------------------------- slots


def held_after(writes, slots, sinks, ring=True):
    """What the slots hold after commits of ``(start, count)``; entries are their positions."""
    cache = ((jnp.full((1, 1, slots, 1), -9.0),),)
    commit = jax.jit(functools.partial(kv_cache.commit, rings=(ring,), sinks=(sinks,)))
    for start, count in writes:
        steps = jnp.arange(count + 2, dtype=jnp.int32)[None]  # the last one is not accepted
        entries = (((start + steps)[:, None, :, None].astype(jnp.float32),),)
        count = jnp.asarray([count - 1])
        verdict = Verdict(path=steps, count=count, token=count)
        cache = commit(cache, entries, jnp.asarray([start]), verdict)
    return np.asarray(cache[0][0])[0, 0, :, 0]


ONE_BY_ONE = [(i, 1) for i in range(17)]
CHUNKS = [(0, 9), (9, 2), (11, 6)]  # the first is longer than the ring


@pytest.mark.parametrize("writes", [ONE_BY_ONE, CHUNKS], ids=["one by one", "in chunks"])
def test_the_slots_of_sinks_are_never_written_again(writes):
    expected = np.full(SINKS + WINDOW, -9.0)
    for slot, position in ring(17, WINDOW).items():
        expected[slot] = position
    np.testing.assert_array_equal(held_after(writes, SINKS + WINDOW, SINKS), expected)
    said = kv_cache.held(SINKS + WINDOW, jnp.asarray([17]), SINKS)
    np.testing.assert_array_equal(said[0], expected)


def test_fault_sinks_in_the_slots_of_the_ring_are_overwritten(monkeypatch):
    overwritten(monkeypatch)
    assert (held_after(CHUNKS, SINKS + WINDOW, SINKS)[:SINKS] != np.arange(SINKS)).all()


@functools.partial(jax.jit, static_argnames="window")
def attend(*given, window, positions):
    return kernels.current().attend(*given, window=window, sinks=SINKS, positions=positions)


def attended(window, taken, length=14, nodes=2):
    """How far attention over a small cache is from a softmax over the positions it may see, where
    the backend is told ``window``; with the cache of a target, the small one is ``taken`` first."""
    random, size = np.random.default_rng(0), 4
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
    query, own, past = draw(1, 1, size, 1, nodes), draw(2, 1, 1, nodes, size), draw(2, 40, size)
    cache = np.zeros((2, 1, 1, 40 if taken else SINKS + WINDOW, size), np.float32)
    for slot, position in (
        {i: i for i in range(length)} if taken else ring(length, WINDOW)
    ).items():
        cache[:, 0, 0, slot] = past[:, position]
    lengths = jnp.asarray([length])
    prefix = tuple(map(jnp.asarray, cache))
    if taken:
        (prefix,) = kv_cache.recent((prefix,), lengths, [(WINDOW, SINKS)])
        assert prefix[0].shape[2] == SINKS + WINDOW
    found = attend(
        *map(jnp.asarray, (query, *own)),
        jnp.triu(jnp.ones((nodes, nodes), bool))[None],
        prefix,
        lengths,
        attention.choice_of(SINKS + WINDOW, lengths),
        window=window,
        positions=lengths[:, None] + jnp.arange(nodes),
    )
    most = 0.0
    keys, values = (np.concatenate([x[:length], y[0, 0]]) for x, y in zip(past, own, strict=True))
    for node, sees in enumerate(masked(length + nodes, WINDOW, SINKS)[length:]):
        weights = np.exp(keys @ query[0, 0, :, 0, node] / 2) * sees
        expected = weights @ values / weights.sum()
        most = max(most, np.abs(found[0, 0, :, 0, node] - expected).max())
    return most


@pytest.mark.parametrize("taken", [False, True], ids=["own cache", "cache of the target"])
def test_attention_sees_sinks_and_window_and_fault_a_window_that_is_one_too_long_is_seen(taken):
    for length in (1, 4, 7, 14):
        assert attended(WINDOW, taken, length) < 1e-5
    assert attended(WINDOW + 1, taken) > 1e-2


# ------------------------------------------------------------------- what a draft step costs


def equations(jaxpr):
    """All equations of a program, those of its inner programs in place of the calls."""
    for equation in jaxpr.eqns:
        inner = [x for x in jax.tree.leaves(equation.params, is_leaf=is_program) if is_program(x)]
        for program in inner:
            yield from equations(getattr(program, "jaxpr", program))
        if not inner:
            yield equation


def is_program(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def step_cost(drafter, capacity):
    """The numbers that the operations of a draft step read and write, where a ``gather`` reads as
    many as it writes; and which operations read a whole cache, with the slots that each writes."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params())

    def begun(params):
        return specjax.init_state(
            TARGET, drafter, params, PROMPTS, LENGTHS, capacity=capacity, **begin
        )

    def draft(params, state):
        context = specjax.round_context(params, state)
        return specjax.draft_step(drafter, params, state.drafter_state, context)[0]

    begin = dict(key=jax.random.key(0), max_new_tokens=9, sampling=WARM)
    program = jax.make_jaxpr(draft)(shapes, jax.eval_shape(begun, shapes))
    moved, readers = 0, set()
    for equation in equations(program.jaxpr):
        ins, outs = (
            [x.aval for x in xs if jnp.issubdtype(x.aval.dtype, jnp.floating)]
            for xs in (equation.invars, equation.outvars)
        )
        gathers = equation.primitive.name == "gather"
        moved += sum(x.size for x in (outs if gathers else ins) + outs)
        if any(capacity in x.shape for x in ins):
            readers |= {(equation.primitive.name, x.shape[2:3]) for x in outs}
    return moved, readers


@pytest.mark.parametrize("name", ["draft", "self"])
def test_what_a_draft_step_reads_and_writes_does_not_grow_with_the_buffer(name):
    small, large = (step_cost(drafter(name), capacity) for capacity in (101, 499))
    assert small == large
    # of the target's cache sinks and window are taken, and nothing else is read of it
    assert small[1] == ({("gather", (SINKS + WINDOW,))} if name == "self" else set())


def test_fault_a_draft_step_over_the_whole_cache_is_seen_to_grow():
    whole = DraftModel(num_draft=DRAFTED, model=TARGET)
    small, large = (step_cost(whole, capacity) for capacity in (101, 499))
    assert small[0] < large[0] and small[1]


def test_the_cache_of_a_draft_model_does_not_grow():
    state = jax.eval_shape(lambda p: drafter("draft").init(p, None, 3, 400), params()["drafter"])
    assert {x.shape for x in jax.tree.leaves(state.cache)} == {(3, 2, SINKS + WINDOW, 8)}
    short = jax.eval_shape(lambda p: SMALL.init(p, 3, 4), params()["drafter"])
    assert {x.shape[2] for x in jax.tree.leaves(short)} == {4}


@pytest.mark.parametrize("name", ["draft", "self"])
def test_the_loop_copies_no_cache(name):
    """What is taken from the target's cache is copied once a round at most, and not in each
    pass."""
    text = hlo(TARGET, drafter(name, 11), params(), 3, 300, 1.0)
    assert f"f32[6,{11 + SINKS},8]" in text
    assert not cache_copies(text, (3, 2, 300, 8))
    most = 2 * LAYERS if name == "self" else 0
    assert len(cache_copies(text, (3, 2, 11 + SINKS, 8))) <= most


# ------------------------------------------------------------------- texts


TREE = trees.Tree((-1, 0, 0, 1, 2))


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", ["draft", "self", "draft tree", "self tree"])
def test_greedy_texts_are_those_of_plain_decoding(name):
    """One prompt is longer than a chunk of the prefill."""
    shape = dict(topology=TREE) if name.endswith("tree") else {}
    prompts = np.random.default_rng(1).integers(0, 67, (3, 300)).astype(np.int32)
    run = functools.partial(
        specjax.decode,
        TARGET,
        params=params(),
        tokens=prompts,
        lengths=np.asarray([300, 1, 40], np.int32),
        key=jax.random.key(0),
        max_new_tokens=30,
    )
    out, plain = run(drafter(name.split()[0], **shape)), run(Plain())
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert not out.stats.approximate


@pytest.mark.usefixtures("quick_compilation")
def test_texts_within_the_window_are_drafted_as_the_whole_target_would():
    """Then every draft is accepted: it is the target that drafts."""
    for name in ("draft", "self"):
        run = dict(params() | {"drafter": params()["target"]})
        settings = dict(key=jax.random.key(0), max_new_tokens=8)
        out = specjax.decode(TARGET, drafter(name, 40), run, PROMPTS, LENGTHS, **settings)
        np.testing.assert_array_equal(out.stats.accepted_at, out.stats.drafted_at)


def test_texts_of_a_target_with_a_small_cache_are_called_approximate():
    logits = reference.logits(SMALL, params()["target"], jnp.asarray(PROMPTS[:1]))[0]
    expected, _ = from_scratch(CONFIG, params()["target"], PROMPTS[0], masked(23, WINDOW, SINKS))
    np.testing.assert_allclose(logits, expected, atol=2e-4)
    assert SMALL.approximate == "attention to 2 sinks and a window of 5" and not TARGET.approximate
