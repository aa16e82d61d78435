"""A drafter whose own drafting is speculative: what it says, what it states and what it costs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_drafts
from drawn_rounds import advanced
from ragged import MODEL, NUM, PARAMS, PROMPTS, VOCAB, pad, rebuilt, start
from registry import cases
from toys import bag, cache_of, like, unseen

import specjax
from specjax import Sampling, trees
from specjax.acceptance import RULES
from specjax.decoding import round
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import (
    TLI,
    Adaptive,
    Bigram,
    Cascade,
    DraftModel,
    Hybrid,
    Jacobi,
    NGram,
    Plain,
    ProbedDraftModel,
    SelfDraft,
    Suffix,
    Synthetic,
    Union,
    bigram,
    context_index,
)
from specjax.drafters.confidence_stop import ConfidenceStop, CumulativeStop
from specjax.text import drafter_names
from specjax.types import Context

CASES = cases(MODEL, PARAMS)
NAMES = ["cascade", "cascade draft", "cascade suffix", "cascade of cascades"]
WARM = Sampling(temperature=1.1)
COPIES = NGram(num_draft=3, longest=2, shortest=1, stretch=2)


def begun(drafter, weights, rule="auto", sampling=WARM):
    tokens, lengths = pad(PROMPTS)
    request, capacity = prepare_inputs(
        MODEL, drafter, tokens, lengths, jax.random.key(0), NUM, sampling, None, ()
    )
    params = {"target": PARAMS, "drafter": weights}
    return params, start(MODEL, drafter, rule, capacity, params, request)


def rounds_of(drafter, weights, rule="auto", sampling=WARM, most=6):
    """The state before each round, and what was drafted and judged in it."""
    params, state = begun(drafter, weights, rule, sampling)
    for _ in range(most):
        if not int(state.budget.max()):
            return
        judged, after = advanced(MODEL, drafter, rule, params, state)
        yield jax.device_get((state, judged))
        state = after


@functools.partial(jax.jit, static_argnums=3)
def law_of(weights, state, drafted, sampling):
    """The law below each node of a chain, by a pass of the model over its text from scratch."""
    cache = cache_of(MODEL, weights, state.tokens, state.length - 1)
    context = round.round_context({}, state)
    logits = MODEL.verify(weights, cache, trees.chain_draft(context, drafted)).logits
    return jax.vmap(state.sampling.probabilities, in_axes=1, out_axes=1)(logits[:, :-1])


@pytest.mark.parametrize("name", NAMES)
def test_the_law_that_is_stated_is_that_of_the_outer_model_in_every_round(name):
    drafter, weights, _ = CASES[name]
    seen = 0
    for state, judged in rounds_of(drafter, weights):
        live = np.asarray(state.budget) > 0
        law = law_of(weights["outer"], state, judged.draft.tokens[:, 1:], WARM)
        np.testing.assert_allclose(judged.draft.laws[live], law[live], atol=2e-6)
        seen += live.sum()
    assert seen > 10


@pytest.mark.parametrize(("rule", "sampling"), [("auto", Sampling()), ("coupled", WARM)])
def test_a_draft_without_chance_is_that_of_the_outer_model_alone(rule, sampling):
    drafter, weights, _ = CASES["cascade of cascades"]
    alone = rounds_of(drafter.outer, weights["outer"], rule, sampling)
    together = rounds_of(drafter, weights, rule, sampling)
    for (state, one), (_, other) in zip(alone, together, strict=True):
        live = np.asarray(state.budget) > 0
        assert (np.asarray(one.draft.tokens)[live] == np.asarray(other.draft.tokens)[live]).all()


def caches(drafter, weights, state):
    """The draft models of all levels: their weights and their states."""
    if isinstance(drafter, DraftModel):
        return [(weights, state)]
    if isinstance(drafter, Hybrid):
        return caches(drafter.inner, weights, state.inner)
    if not isinstance(drafter, Cascade):
        return []
    below = caches(drafter.inner, weights["inner"], state.inner)
    return [(weights["outer"], state.outer), *below]


def behind_copies():
    """A cascade in a hybrid, whose copies are often what is committed and never what it drafts."""
    drafter, _, _ = CASES["cascade draft"]
    near = like(PARAMS, 1)
    lookup = NGram(longest=2, shortest=1, stretch=1)
    return Hybrid(4, inner=drafter, lookup=lookup), {"outer": near, "inner": near}


@pytest.mark.parametrize("name", ["cascade draft", "cascade of cascades", "behind copies"])
def test_after_any_round_what_a_level_knows_of_the_text_is_what_a_fresh_pass_knows(name):
    drafter, weights = behind_copies() if name == "behind copies" else CASES[name][:2]
    jit_sync = jax.jit(functools.partial(drafter.sync, before="draft"))
    for state, _ in rounds_of(drafter, weights):
        context = round.round_context({}, state)
        caught = jit_sync(weights, PARAMS, state.drafter_state, context)
        live = np.asarray(state.budget) > 0
        for own, known in caches(drafter, weights, caught):
            filled = known.filled
            assert (np.asarray(filled)[live] >= np.asarray(state.length)[live] - 2).all()
            assert (np.asarray(filled)[live] < np.asarray(state.length)[live]).all()
            used = (jnp.arange(state.tokens.shape[1]) < filled[:, None])[:, None, :, None]
            expected = rebuilt(own, state.tokens, filled)
            kept = known.cache[:, :, : expected.shape[2]]
            difference = jnp.where(used, kept - expected, 0)[live]
            assert float(jnp.abs(difference).max()) < 1e-5


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "warm"])
def test_where_the_inner_drafter_is_always_right_the_outer_model_runs_as_few_passes_as_can_be(
    sampling,
):
    near = like(PARAMS, 1)
    inner = Cascade(DraftModel(2, model=MODEL), COPIES)
    drafter = Cascade(DraftModel(6, model=MODEL), inner)
    weights = {"outer": near, "inner": {"outer": near, "inner": None}}
    rounds = 0
    for state, _ in rounds_of(drafter, weights, sampling=sampling):
        stats = state.drafter_state.stats
        assert (np.asarray(stats.rounds) == 2 * np.asarray(state.stats.rounds)).all()
        rounds += int(np.asarray(stats.rounds).sum())
    assert rounds > 20


@dataclasses.dataclass(frozen=True)
class InnermostLaw(Cascade):
    """States the law of the inner drafter's model in place of the outer model's."""

    def draft_step(self, params, target_params, state, context):
        draft, state = super().draft_step(params, target_params, state, context)
        model, own = self.inner.model, params["inner"]
        cache = cache_of(model, own, context.tokens, context.length - 1)
        logits = model.verify(own, cache, draft).logits[:, :-1]
        said = jax.vmap(context.sampling.probabilities, in_axes=1, out_axes=1)(logits)
        return dataclasses.replace(draft, laws=said), state


@dataclasses.dataclass(frozen=True)
class TakesFromP(type(RULES["rejection"])):
    """Draws from p where it rejects, as TriForce was released, instead of from the residual."""

    def __call__(self, params, draft, target_law, draft_law, key):
        verdict = super().__call__(params, draft, target_law, draft_law, key)
        last = jnp.take_along_axis(verdict.path, verdict.count[:, None], axis=1)[:, 0]
        uniform = jax.vmap(jax.random.uniform)(jax.vmap(jax.random.fold_in)(key, last + 77))
        p = target_law(last)
        drawn = jnp.sum(jnp.cumsum(p, axis=1) <= uniform[:, None], axis=1).astype(jnp.int32)
        return dataclasses.replace(verdict, token=jnp.minimum(drawn, p.shape[1] - 1))


def two_levels(fault, outermost):
    """A cascade whose outer level is a draft model, or the target over a window."""
    model, params = bag(test_drafts.VOCAB, 0)
    outer, inner = DraftModel(2, model=model), DraftModel(1, model=model)
    weights = {"outer": like(params, 1), "inner": bag(test_drafts.VOCAB, 99)[1]}
    if outermost == "self":
        outer, weights["outer"] = SelfDraft(2, target=model, window=3, sinks=1), None
    if fault == "innermost law":
        return InnermostLaw(outer, inner), weights, params
    rule = TakesFromP() if fault == "released TriForce" else "auto"
    return Cascade(outer, inner, rule=rule), weights, params


FAULTS = [("innermost law", "draft"), ("released TriForce", "draft"), ("released TriForce", "self")]


@pytest.mark.parametrize(("fault", "outermost"), [*FAULTS, (None, "draft"), (None, "self")])
def test_fault_a_law_that_is_stated_and_not_drawn_from_is_seen(fault, outermost):
    drafter, weights, params = two_levels(fault, outermost)
    rows = test_drafts.FEWER
    one = jnp.ones((rows,), jnp.int32)

    @jax.jit
    def run(weights, params, key):
        tokens = jnp.zeros((rows, 4), jnp.int32)
        context = Context(
            tokens=tokens,
            length=one,
            budget=3 * one,
            key=jax.random.split(key, rows),
            sampling=test_drafts.WARM.rows(rows),
            cache=jnp.zeros((rows, 1, 4, params["embed"].shape[1])),
        )
        state = drafter.init(weights, params, rows, 4)
        draft, _ = drafter.draft_step(weights, params, state, context)
        said = jnp.take_along_axis(draft.laws, draft.tokens[:, 1:, None], axis=2)
        return draft.tokens[:, 1:] @ jnp.asarray([test_drafts.VOCAB, 1]), said.prod(axis=(1, 2))

    drafts, probability = map(np.asarray, run(weights, params, jax.random.key(3)))
    p_value = test_drafts.p_value(drafts, np.zeros_like(drafts), probability)
    assert (p_value < test_drafts.FALSE_ALARM) == (fault is not None)


def test_a_draft_ends_where_the_product_of_the_greatest_probabilities_is_below_the_threshold():
    drafter, weights, _ = CASES["cascade stop"]
    ended = whole = 0
    for state, judged in rounds_of(drafter, weights):
        bare = dataclasses.replace(state, sampling=Sampling(temperature=1.0).rows(len(PROMPTS)))
        law = law_of(weights["outer"], bare, judged.draft.tokens[:, 1:], None)
        product = np.cumprod(np.asarray(law).max(axis=2), axis=1)
        least = np.asarray(state.drafter_state.threshold)
        for row in np.flatnonzero(np.asarray(state.budget) > 0):
            below = np.flatnonzero(product[row] < least[row])
            count = 1 + below[0] if len(below) else drafter.num_draft
            assert np.asarray(judged.draft.candidate)[row, 1:].sum() == count
            ended += count < drafter.num_draft
            whole += count == drafter.num_draft
    assert ended > 3 and whole > 0


def test_the_threshold_follows_equation_3_of_llmcad():
    stop = CumulativeStop(threshold=0.2)
    offered, accepted = jnp.asarray([4, 4, 0, 2]), jnp.asarray([4, 1, 0, 0])
    after = stop.update(stop.init(4), offered, accepted)
    np.testing.assert_allclose(after, [0.1, 0.75, 0.2, 1 - stop.lowest])
    with pytest.raises(ValueError, match="threshold=1"):
        CumulativeStop(threshold=1.0)


def test_an_index_forgets_what_was_taken_back():
    random = np.random.default_rng(0)
    texts = random.integers(0, 3, (2, 40)).astype(np.int32)
    length, live, depth = jnp.asarray([33, 21]), jnp.ones(2, bool), 4
    whole = jnp.asarray([40, 40])
    grown = context_index.extend(context_index.empty(2, 40, 2), texts, whole, live, depth)
    known = context_index.forget(grown, length)
    texts = np.where(np.arange(40) < length[:, None], texts, random.integers(0, 3, (2, 40)))
    fresh = context_index.extend(context_index.empty(2, 40, 2), texts, length, live, depth)
    known = context_index.extend(known, texts, length, live, depth)
    for row in range(2):
        both = min(int(known.count[row]), int(fresh.count[row]))
        assert both >= int(length[row]) - 3
        kept = [set(np.asarray(x.order[row, : x.count[row]]).tolist()) for x in (known, fresh)]
        assert kept[0] <= set(range(int(length[row]) - 1))
        assert all(place >= both for place in kept[1] - kept[0])  # those that are merged later
    ends = context_index.contexts(texts, (length - 1)[:, None], depth)[:, 0]
    found = [context_index.nearest(x, texts, ends, length, 4) for x in (known, fresh)]
    assert (np.asarray(found[0][1]) == np.asarray(found[1][1])).all()


@pytest.mark.usefixtures("one_trace")
@pytest.mark.parametrize("name", ["cascade draft", "cascade comb"])
def test_a_second_call_traces_nothing_whatever_the_values(name):
    drafter, weights, _ = CASES[name]
    model, (tokens, lengths) = unseen(MODEL), pad(PROMPTS)
    for seed in range(2):
        specjax.decode(
            model,
            drafter,
            {"target": PARAMS, "drafter": weights},
            tokens,
            lengths,
            key=jax.random.key(seed),
            max_new_tokens=NUM - seed,
            capacity=30,
            sampling=Sampling(temperature=np.full(8, 0.5 + seed, np.float32)),
        )


def test_what_cannot_be_a_level_is_refused_before_anything_is_compiled():
    outer = DraftModel(3, model=MODEL)
    small = bag(VOCAB - 2, 0)[0]
    with pytest.raises(TypeError, match="outer=NGram.*DraftModel"):
        Cascade(COPIES, COPIES)
    with pytest.raises(TypeError, match="inner=None.*Drafter"):
        Cascade(outer)
    with pytest.raises(ValueError, match="which is a chain"):
        Cascade(DraftModel(model=MODEL, topology=trees.branching(2, 1)), COPIES)
    with pytest.raises(ValueError, match="which is a chain"):
        Cascade(outer, COPIES).with_topology(trees.branching(2, 1))
    with pytest.raises(ValueError, match="no siblings"):
        Cascade(DraftModel(3, model=MODEL, sibling_sampling="distinct"), COPIES)
    with pytest.raises(ValueError, match=f"has {VOCAB - 2} tokens.*{VOCAB}; all levels"):
        Cascade(outer, DraftModel(2, model=small))
    mixed = Union(drafters=(DraftModel(2, model=MODEL), DraftModel(2, model=small)))
    differ = f"'draft' has {VOCAB} tokens and that of its part 'draft' {VOCAB - 2}; all parts"
    for inner in (mixed, Synthetic(4, 0.5, mixed), Union(drafters=(COPIES, mixed))):
        with pytest.raises(ValueError, match=differ):
            Cascade(outer, inner)
    with pytest.raises(ValueError, match=differ):
        begun(mixed, (PARAMS, PARAMS))
    with pytest.raises(ValueError, match="drafts nothing"):
        Cascade(outer, Plain())
    with pytest.raises(ValueError, match="wrap the cascade in Adaptive"):
        Cascade(outer, Adaptive(COPIES))
    for inner in (Jacobi(3), CASES["medusa"][0], CASES["hybrid mtp"][0]):
        with pytest.raises(ValueError, match="is taken back where the target"):
            Cascade(outer, inner)
    other = TLI(num_draft=2, model=MODEL)
    with pytest.raises(ValueError, match="must share one vocabulary"):
        Cascade(other, COPIES)
    with pytest.raises(ValueError, match="drafts in a way of its own"):
        Cascade(ProbedDraftModel(2, model=MODEL), COPIES)
    for inner in (other, Hybrid(inner=other), Synthetic(2, 0.5, other)):
        with pytest.raises(ValueError, match="that tli spells.*cannot be taken back"):
            Cascade(outer, inner)
    with pytest.raises(ValueError, match="unknown"):
        Cascade(outer, COPIES, rule="best")
    lossy = Cascade(outer, COPIES, rule="approximate-typical")
    weights = {"outer": PARAMS, "inner": None}
    with pytest.raises(ValueError, match="would not have the outer model's law"):
        next(rounds_of(lossy, weights))
    with pytest.raises(ValueError, match="shares its noise with the draft"):
        settings = dict(key=jax.random.key(0), max_new_tokens=4, rule="coupled")
        settings["sampling"] = specjax.Sampling(temperature=1.0)
        params = {"target": PARAMS, "drafter": weights}
        tokens = jnp.ones((1, 2), jnp.int32)
        strict = Cascade(outer, COPIES, rule="rejection")
        specjax.decode(MODEL, strict, params, tokens, jnp.asarray([2]), **settings)
    with pytest.raises(ValueError, match="a dict with 'outer'"):
        begun(Cascade(outer, COPIES), PARAMS)
    own = functools.partial(SelfDraft, 3, target=MODEL)
    with pytest.raises(ValueError, match="reads the whole cache of its target.*window=512"):
        Cascade(own(exit=1), COPIES)
    with pytest.raises(ValueError, match="stop=CumulativeStop"):
        Cascade(own(window=5, stop=ConfidenceStop(threshold=0.4)), COPIES)
    with pytest.raises(ValueError, match="let only the first child of a node have children"):
        Cascade(own(window=5), COPIES).with_topology(trees.branching(2, 1))
    over_itself = Cascade(own(window=5), COPIES)
    assert Cascade(outer, over_itself).inner == over_itself
    stranger = Cascade(SelfDraft(3, target=type(MODEL)(VOCAB + 1), window=5), COPIES)
    for inner in (Hybrid(inner=CASES["self"][0]), over_itself):
        with pytest.raises(ValueError, match="layers of another model than the outer one"):
            Cascade(own(window=5), inner)
    with pytest.raises(ValueError, match="layers of another model than the outer one"):
        Cascade(outer, stranger)


def save_bigrams(folder, lm, text):
    """Writes the bigrams of a text."""
    size = lm.target.vocab_size
    tables = bigram.count([text], vocab_size=size)
    specjax.save_drafter(Bigram(vocab_size=size), tables, folder, overwrite=True)


def test_its_name_makes_it_and_says_what_is_missing(tmp_path):
    lm = specjax.load("embedded")
    drafter, params = drafter_names.resolve_drafter(lm, "cascade:draft:suffix:longest=9")
    assert isinstance(drafter.inner, Suffix) and drafter.inner.longest == 9
    assert drafter.num_draft == 6 and params["inner"] is None
    drafter, params = drafter_names.resolve_drafter(lm, "cascade:draft:cascade:draft:ngram", 4)
    assert drafter.num_draft == 4 and isinstance(drafter.inner.inner, NGram)
    assert params["outer"] is params["inner"]["outer"]
    drafter, params = drafter_names.resolve_drafter(lm, "cascade:draft:ngram+draft")
    assert isinstance(drafter.inner, Hybrid) and params["inner"] is params["outer"]
    drafter, _ = drafter_names.resolve_drafter(lm, "ngram+cascade:draft:ngram", 7)
    assert isinstance(drafter, Hybrid) and isinstance(drafter.inner, Cascade)
    held = tmp_path / "bigrams"
    for text in ([1, 2, 3], [1, 5, 6]):  # a folder that was written again is read again
        save_bigrams(held, lm, text)
        found = drafter_names.named(lm, f"cascade:draft:ngram+{held}")
        assert found.params["inner"]["after.1"][1] == text[1]
        told = found.fingerprint
    save_bigrams(held, lm, [1, 2, 3])
    assert drafter_names.named(lm, f"cascade:draft:ngram+{held}").fingerprint != told
    for wrong in ("cascade:draft", "cascade:draft:", "ngram+cascade::ngram"):
        with pytest.raises(ValueError, match="write 'cascade:OUTER:INNER'"):
            drafter_names.resolve_drafter(lm, wrong)
    with pytest.raises(ValueError, match="which is a chain"):
        drafter_names.resolve_drafter(lm, "cascade:draft:ngram", tree="2x1")
    with pytest.raises(ValueError, match="no draft model"):
        drafter_names.resolve_drafter(lm, "cascade:mtp:ngram")
