"""Adaptive width in the loop: it compiles nothing, copies nothing and leaves the law alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import COSTS, RESTLESS
from compiled import cache_copies, hlo
from ragged import MODEL, PARAMS, PROMPTS, pad, rebuilt
from scipy.special import chdtrc
from test_decoder import LLAMA, SMALL, cache_shape, model, params_of
from test_draft_length import decode
from test_greedy import CASES, run
from toys import bag, like, own_params, unseen

import specjax
from specjax import Sampling, drafters, trees
from specjax.decoding import loop, prefill, reference
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.round import widths
from specjax.drafters import Adaptive, DraftModel, NGram, Plain
from specjax.models.causal_lm import CausalLM
from specjax.text.drafter_names import named, resolve_drafter

DRAFT = DraftModel(num_draft=3, model=MODEL)


# ------------------------------------------------------------------- the mechanics


@pytest.mark.parametrize("name", ["adaptive draft", "adaptive ngram"])
def test_the_widths_of_the_conformance_tests_really_vary(name):
    rounds = run(name, PROMPTS).stats.rounds_by_width
    alone = run(name, PROMPTS[2:3]).stats.rounds_by_width
    assert rounds[0] > 0 and (rounds > 0).sum() >= 3
    assert alone[0] > 0 and (alone > 0).sum() >= 2


@pytest.mark.usefixtures("one_trace")
def test_other_costs_trace_nothing():
    drafter, widths = Adaptive(DraftModel(num_draft=3, model=unseen(MODEL))), set()
    for costs in (drafter.only(0), drafter.only(1), drafter.only(3), COSTS[:3]):
        out = decode(drafter, {"inner": PARAMS, "costs": jnp.asarray(costs)}, 60)
        widths.add(tuple(np.flatnonzero(out.stats.rounds_by_width[:-1] > 20)))
    assert len(widths) > 1


def test_costs_can_pin_a_width():
    drafter = Adaptive(DRAFT)
    for width, tau in ((0, 1), (1, 2), (3, 4)):
        weights = {"inner": PARAMS, "costs": jnp.asarray(drafter.only(width))}
        out = decode(drafter, weights, 13)  # q = p, so every draft is kept: 12 after the first one
        rounds = out.stats.rounds_by_width
        assert rounds[width] == rounds.sum() and out.stats.tau == tau


def steps(drafter, weights, rounds, bursts, prompts=PROMPTS):
    """States after each of several bursts."""
    tokens, lengths = pad(prompts)
    params = {"target": PARAMS, "drafter": weights}
    request, capacity = prepare_inputs(
        MODEL, drafter, tokens, lengths, jax.random.key(0), 60, Sampling(), None, ()
    )
    state = jax.jit(prefill.start, static_argnums=(0, 1, 2, 3))(
        MODEL, drafter, "auto", capacity, params, request
    )
    step = jax.jit(loop.burst, static_argnums=(0, 1, 2))
    for costs in bursts:
        params["drafter"]["costs"] = jnp.asarray(costs)
        state = step(MODEL, drafter, "auto", rounds, params, state)
        yield state


def test_a_draft_model_that_slept_reads_what_it_missed():
    """After 40 plain rounds, more than one chunk, its cache is that of a fresh pass again."""
    drafter, near = Adaptive(DRAFT), like(PARAMS, 1)
    plain, wide = drafter.only(0), drafter.only(3)
    weights = {"inner": near, "costs": plain}
    states = list(steps(drafter, weights, 40, (plain, wide)))
    asleep, awake = states[0].drafter_state.inner, states[1].drafter_state.inner
    lengths = pad(PROMPTS)[1]
    assert (asleep.filled == lengths).all() and (asleep.filled < states[0].length - 2).all()
    assert (awake.filled == states[1].length - 2).all()
    used = (jnp.arange(69) < states[1].length[:, None] - 2)[:, None, :, None]
    expected = jax.jit(rebuilt)(near, states[1].tokens, states[1].length - 2)
    np.testing.assert_allclose(
        jnp.where(used, awake.cache, 0), jnp.where(used, expected, 0), atol=1e-6
    )


def test_a_draft_model_does_not_run_where_nothing_is_wanted():
    """Plain rounds never enter its pass: one that poisons the cache does no harm there."""

    @dataclasses.dataclass(frozen=True)
    class Poison(type(MODEL)):
        def commit(self, cache, entries, start, verdict):
            poison = jnp.where(jnp.any(start > 0), jnp.nan, 0.0)  # the prompt is read without
            return super().commit(cache, entries + poison, start, verdict)

    drafter = Adaptive(DraftModel(num_draft=3, model=Poison(13)))
    for costs, clean in ((drafter.only(0), True), (drafter.only(1), False)):
        weights = {"inner": PARAMS, "costs": costs}
        (state,) = steps(drafter, weights, 5, (costs,), prompts=[[1]])
        assert bool(jnp.isfinite(state.drafter_state.inner.cache).all()) == clean


def test_a_wanted_width_masks_what_is_deeper_and_leaves_the_rest():
    drafter, _, _ = CASES["tree top"]
    tokens, lengths = pad(PROMPTS)
    context = specjax.Context(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray(lengths),
        budget=jnp.full((8,), 9),
        key=jax.random.split(jax.random.key(0), 8),
        sampling=Sampling().rows(8),
    )
    params = {"target": PARAMS, "drafter": like(PARAMS, 1)}
    state = drafter.init(*own_params(params), 8, 9)
    draft_step = jax.jit(drafter.draft_step)
    full, _ = draft_step(*own_params(params), state, context)
    narrow, _ = draft_step(
        *own_params(params), state, dataclasses.replace(context, width=jnp.int32(1))
    )
    assert (full.tokens == narrow.tokens).all()
    shallow = np.broadcast_to(trees.depths(full) <= 1, full.tokens.shape)
    assert (narrow.candidate == shallow).all() and (narrow.scored == shallow).all()


def adaptive_decoders():
    return {
        "draft": Adaptive(DraftModel(num_draft=3, model=CausalLM(SMALL))),
        "ngram": Adaptive(NGram(num_draft=7, shortest=1)),
    }


@pytest.mark.parametrize(
    ("name", "batch", "capacity", "temperature"),
    [("draft", 1, 300, 1.0), ("draft", 3, 100, 0), ("ngram", 1, 300, 0)],
)
def test_the_adaptive_loop_copies_no_cache(name, batch, capacity, temperature):
    drafter = adaptive_decoders()[name]
    inner = params_of(LLAMA)["drafter"] if name == "draft" else None
    weights = {"inner": inner, "costs": jnp.ones(len(drafter.widths))}
    target, params = model(LLAMA)
    params = {"target": params, "drafter": weights}
    text = hlo(target, drafter, params, batch, capacity, temperature)
    assert not cache_copies(text, cache_shape(batch, capacity))
    left_out = 3 if name == "draft" else 0  # passes of the draft model
    assert text.count(" conditional(") >= left_out + 1  # and the switch of widths


# ------------------------------------------------------------------- the law


VOCAB, NUM_LAW, ROWS = 4, 5, 15_000
TOY, TOY_PARAMS = bag(VOCAB, 0)
WARM = Sampling(temperature=0.9)
PROMPT = (1, 0, 2, 1, 0)


def law_of_rows(drafter, weights, rows):
    """p-value of the first tokens' joint law, each row a batch of its own: it decides alone."""
    prompt = jnp.asarray([PROMPT], jnp.int32)
    params = {"target": TOY_PARAMS, "drafter": weights}

    def one(key):
        request, capacity = prepare_inputs(
            TOY, drafter, prompt, np.asarray([5]), key, NUM_LAW + 1, WARM, None, ()
        )
        state = prefill.unanswered(TOY, drafter, "rejection", capacity, params, request)
        state = loop.burst(TOY, drafter, "rejection", None, params, state)
        new = state.tokens[0, 5 : 5 + NUM_LAW]
        return jnp.sum(new * VOCAB ** jnp.arange(NUM_LAW - 1, -1, -1)), state.stats.drafted_at[0]

    cells, drafted_at = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), rows))
    counts = np.bincount(cells, minlength=VOCAB**NUM_LAW)
    exact = reference.joint_law(TOY, TOY_PARAMS, PROMPT, NUM_LAW, WARM).reshape(-1) * rows
    some = exact > 5
    statistic = ((counts[some] - exact[some]) ** 2 / exact[some]).sum()
    return chdtrc(some.sum() - 1, statistic), np.asarray(drafted_at)


@dataclasses.dataclass(frozen=True)
class Peeking(Adaptive):
    """A fault: it drafts first and then asks only for tokens that the draft model was sure of."""

    def draft_step(self, params, target_params, state, context):
        draft, state = super().draft_step(params, target_params, state, context)
        sure = jnp.take_along_axis(draft.laws, draft.tokens[:, 1:, None], axis=2)[..., 0] > 0.3
        kept = jnp.cumprod(sure, axis=1).astype(bool)
        scored = draft.scored & jnp.pad(kept, ((0, 0), (1, 0)), constant_values=True)
        return dataclasses.replace(draft, scored=scored, candidate=scored), state


def law_case(kind, rows=ROWS):
    weights = {"inner": like(TOY_PARAMS, 1), "costs": jnp.asarray([1.0, 1.5, 2.2])}
    return law_of_rows(kind(DraftModel(num_draft=3, model=TOY), RESTLESS), weights, rows)


def test_rows_that_decide_each_for_itself_draw_the_targets_law():
    p_value, drafted_at = law_case(Adaptive)
    assert p_value > 1e-7
    assert len(np.unique(drafted_at, axis=0)) > 3  # the decisions do depend on what was accepted


def test_fault_a_width_that_peeks_at_the_drafted_tokens():
    assert law_case(Peeking, ROWS // 3)[0] < 1e-7


# ------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Adaptive(DRAFT, widths=(1, 3)), "increase from 0"),
        (lambda: Adaptive(DRAFT, widths=(0, 3, 1)), "increase from 0"),
        (lambda: Adaptive(DRAFT, widths=(0, 4)), "from 1 to 3"),
        (lambda: Adaptive(Plain()), "plain drafts 0 deep"),
        (lambda: Adaptive(DRAFT).only(2), r"the widths are \(0, 1, 3\)"),
        (lambda: drafters.Goodput(prior_acceptance=2), "0 <= prior_acceptance <= 1"),
        (lambda: drafters.Goodput(min_pause=9, max_pause=8), "1 <= min_pause <= max_pause"),
        (lambda: drafters.Goodput(min_gain=-0.1), "min_gain must be at least 0"),
        (lambda: drafters.HuggingFace(start=0), "at least one token"),
        (lambda: drafters.ExLlama(down=0), "0 < down <= 1"),
        (lambda: decode(Adaptive(DRAFT), PARAMS), "'inner'"),
        (
            lambda: decode(Adaptive(DRAFT), {"inner": PARAMS, "costs": jnp.ones(4)}),
            r"one cost for each of the widths \(0, 1, 3\)",
        ),
    ],
)
def test_what_makes_no_adaptive_drafter_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_the_usual_widths_with_the_root_fill_compiled_passes():
    assert Adaptive(DRAFT).widths == (0, 1, 3)
    assert Adaptive(NGram(num_draft=15)).widths == (0, 1, 3, 7, 15)
    assert Adaptive(NGram(num_draft=5)).widths == (0, 1, 3, 5)
    assert Adaptive(NGram(num_draft=1)).widths == (0, 1)
    for width in Adaptive(NGram(num_draft=15)).widths:
        assert width + 1 in widths(16)


def test_auto_drafts_seven_deep_at_most_and_what_heads_were_trained_for_or_have_as_a_tree():
    lm = specjax.load("embedded")

    def depth(drafter, tree=None):
        return resolve_drafter(lm, drafter, "auto", tree=tree)[0].depth

    heads = named(lm, "eagle3")

    def shaped(tree, **training):
        own = dataclasses.replace(heads.drafter.with_topology(trees.as_topology(tree)), **training)
        return dataclasses.replace(heads, drafter=own)

    assert {depth(name) for name in ("ngram", "draft", "eagle3")} == {7}
    assert depth("medusa") == 3 and depth("speculator") == depth("mtp") == 4
    assert named(lm, "p-eagle").drafter.trained_depth == depth("p-eagle") == 5
    assert depth("eagle3", "2x1") == 2 and depth(shaped("2x1x1x1")) == 4
    chains = ("chain:2", None), ("chain:3", None), ("chain:3", 4), ("chain:3", 2), ("chain:12", 12)
    assert [depth(shaped(x, trained_depth=n)) for x, n in chains] == [7, 7, 4, 3, 12]
    after = resolve_drafter(lm, "suffix+eagle3", "auto")[0].inner
    assert after.depth == 7 and after.inner.depth == 3
    beams = dataclasses.replace(CASES["redrafter"][0], topology=None)
    assert depth(dataclasses.replace(heads, drafter=beams)) == beams.depth == 5
