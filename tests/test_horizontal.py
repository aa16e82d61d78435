"""Drafters in turn within a chain: what they state, what they know of the text, and the matrix."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_rounds import advanced, assert_greedy_texts
from toys import bag, cache_of, like

import specjax
from specjax import Sampling, trees
from specjax.acceptance.node_laws import DraftLaw
from specjax.analysis import sampled_law
from specjax.decoding import reference
from specjax.drafters import (
    Bigram,
    Cascade,
    DraftModel,
    Horizontal,
    Hybrid,
    Jacobi,
    NGram,
    SelfDraft,
    Suffix,
    SwitchedSelfDraft,
)
from specjax.drafters.cs_drafting import cs_drafting
from specjax.types import Context

pytestmark = pytest.mark.usefixtures("quick_compilation")
VOCAB, ROWS, FALSE_ALARM = 4, 20_000, 1e-7
MODEL, PARAMS = bag(VOCAB, 0)
NEAR, OTHER = like(PARAMS, 1), bag(VOCAB, 99)[1]
WARM = Sampling(temperature=0.9)
COPIES = NGram(num_draft=1, longest=2, shortest=1, stretch=1)


@dataclasses.dataclass(frozen=True)
class FirstLaw(Horizontal):
    """States the law of the first drafter's model for the tokens of the second too."""

    def draft_step(self, params, target_params, state, context):
        draft, state = super().draft_step(params, target_params, state, context)
        cache = cache_of(MODEL, params[0], context.tokens, context.length - 1)
        logits = MODEL.verify(params[0], cache, draft).logits[:, :-1]
        said = jax.vmap(context.sampling.probabilities, in_axes=1, out_axes=1)(logits)
        return dataclasses.replace(draft, laws=said), state


@dataclasses.dataclass(frozen=True)
class OtherPosition(Horizontal):
    """States for each token of the second drafter the law of the other one."""

    def draft_step(self, params, target_params, state, context):
        draft, state = super().draft_step(params, target_params, state, context)
        return dataclasses.replace(draft, law=draft.law[:, jnp.asarray([0, 1, 3, 2])]), state


@pytest.mark.parametrize("kind", [Horizontal, FirstLaw, OtherPosition])
def test_fault_a_law_that_is_stated_and_not_drawn_from_is_seen(kind):
    drafter = kind(drafters=(DraftModel(1, model=MODEL), DraftModel(2, model=MODEL)))
    one = jnp.ones((ROWS,), jnp.int32)

    @jax.jit
    def run(weights, key):
        context = Context(
            tokens=jnp.zeros((ROWS, 4), jnp.int32),
            length=one,
            budget=4 * one,
            key=jax.random.split(key, ROWS),
            sampling=WARM.rows(ROWS),
        )
        state = drafter.init(weights, PARAMS, ROWS, 4)
        draft, _ = drafter.draft_step(weights, PARAMS, state, context)
        law, said = DraftLaw(draft, VOCAB), 1.0
        for node in range(1, draft.num_nodes):
            q = law(jnp.full((ROWS,), node))
            said *= jnp.take_along_axis(q, draft.tokens[:, node, None], axis=1)[:, 0]
        return draft.tokens[:, 1:] @ (VOCAB ** jnp.arange(3)), said

    drafts, said = map(np.asarray, run((NEAR, OTHER), jax.random.key(3)))
    counts, law = np.zeros(VOCAB**3), np.zeros(VOCAB**3)
    np.add.at(counts, drafts, 1)
    law[drafts] = said
    assert sampled_law.judge(counts, law).fits(FALSE_ALARM) == (kind is Horizontal)


def matrix():
    """Two models and copies: the text of the first is served by both others in turn."""
    three = DraftModel(model=MODEL), DraftModel(model=MODEL), COPIES
    return cs_drafting([[2, 1, 1], [0, 1, 1], [0, 0, 1]], three, (NEAR, OTHER, None))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_loop_with_a_matrix_draws_the_targets_law(rule):
    drafter, weights = matrix()
    prompt, num = (1, 0, 2, 1, 0), drafter.depth + 1
    counts, stats = sampled_law.joint_counts(
        MODEL,
        drafter,
        rule,
        {"target": PARAMS, "drafter": weights, "logits_processor": None},
        prompt,
        num,
        WARM,
        rows=50_000,
        seed=0,
        rounds=None,
    )
    law = reference.joint_law(MODEL, PARAMS, prompt, num, WARM).reshape(-1)
    evidence = sampled_law.judge(counts, law)
    assert not evidence.impossible and evidence.fits(FALSE_ALARM)
    assert evidence.variation < evidence.bound
    assert int(stats.accepted.max()) >= drafter.depth


def test_greedy_texts_with_a_matrix_are_those_of_plain_decoding():
    drafter, weights = matrix()
    assert_greedy_texts(MODEL, drafter, {"target": PARAMS, "drafter": weights}, VOCAB)


def known(drafter, weights, state):
    """The draft models at all places: their weights and their states."""
    if isinstance(drafter, DraftModel):
        return [(weights, state)]
    if isinstance(drafter, Hybrid):
        return known(drafter.inner, weights, state.inner)
    if isinstance(drafter, Cascade):
        below = known(drafter.inner, weights["inner"], state.inner)
        return known(drafter.outer, weights["outer"], state.outer) + below
    if isinstance(drafter, Horizontal):
        parts = zip(drafter.drafters, weights, state.inner, strict=True)
        return [found for part in parts for found in known(*part)]
    return []


@pytest.mark.parametrize("kind", ["alone", "stopped by copies"])
def test_after_any_round_a_model_knows_what_a_fresh_pass_over_the_text_knows(kind):
    drafter, weights = matrix()
    if kind != "alone":  # rows in which a later drafter is not asked, in rounds in which it is
        drafter = Hybrid(5, inner=drafter, lookup=NGram(longest=2, shortest=2, stretch=1))
    params, rows = {"target": PARAMS, "drafter": weights}, 32
    prompts = np.random.default_rng(0).integers(0, VOCAB, (rows, 5)).astype(np.int32)
    settings = dict(key=jax.random.key(0), max_new_tokens=40, sampling=WARM, rule="rejection")
    lengths = np.arange(rows, dtype=np.int32) % 5 + 1
    state = specjax.init_state(MODEL, drafter, params, prompts, lengths, **settings)
    rebuilt = jax.jit(lambda own, tokens, count: cache_of(MODEL, own, tokens, count))
    counts = set()
    for _ in range(5):
        judged, state = advanced(MODEL, drafter, "rejection", params, state)
        counts |= {*np.asarray(judged.verdict.count).tolist()}
        assert len(found := known(drafter, weights, state.drafter_state)) == 3
        for own, kept in found:
            assert (kept.filled < state.length).all()
            used = (jnp.arange(state.tokens.shape[1]) < kept.filled[:, None])[:, None, :, None]
            fresh = rebuilt(own, state.tokens, kept.filled)
            here = kept.cache[:, :, : fresh.shape[2]]
            np.testing.assert_allclose(
                jnp.where(used, here, 0), jnp.where(used, fresh, 0), atol=1e-5
            )
    assert counts >= {*range(5)}


def test_the_tokens_of_each_drafter_begin_where_those_before_it_end():
    drafter = Horizontal(drafters=(COPIES, DraftModel(2, model=MODEL)))
    context = Context(
        tokens=jnp.asarray([[1, 2, 1, 0, 0, 0], [1, 2, 3, 0, 0, 0]]),
        length=jnp.asarray([3, 3]),
        budget=jnp.asarray([9, 9]),
        key=jax.random.split(jax.random.key(0), 2),
        sampling=Sampling().rows(2),
    )
    state = drafter.init((None, NEAR), PARAMS, 2, 6)
    draft, _ = drafter.draft_step((None, NEAR), PARAMS, state, context)
    assert draft.candidate.tolist() == [[True] * 4, [True] * 3 + [False]]
    text = np.asarray(context.tokens)
    assert draft.tokens[0, 1] == 2  # the copy
    for row, copied in ((0, 1), (1, 0)):
        said = [*text[row, :3], *np.asarray(draft.tokens)[row, 1 : 1 + copied]]
        for step in range(2):
            logits = reference.logits(MODEL, NEAR, jnp.asarray([said]))
            said.append(int(logits[0, -1].argmax()))
            assert draft.tokens[row, 1 + copied + step] == said[-1]


def test_the_matrix_of_the_paper_is_built():
    three = DraftModel(1, model=MODEL), DraftModel(1, model=MODEL), NGram(3)
    drafter, weights = cs_drafting(
        [[5, 14, 10], [0, 1, 10], [0, 0, 10]], three, (NEAR, OTHER, None)
    )
    first, second, third = drafter.drafters
    assert [part.num_draft for part in drafter.drafters] == [5, 14, 10]
    assert [part.num_draft for part in first.inner.drafters] == [1, 10]
    assert isinstance(first.inner.drafters[0], DraftModel)
    assert second.inner.num_draft == third.num_draft == 10
    of_second = {"outer": OTHER, "inner": None}
    assert weights == ({"outer": NEAR, "inner": (OTHER, None)}, of_second, None)
    two, _ = cs_drafting([[13, 10], [0, 10]], three[1:], (OTHER, None))
    assert [part.num_draft for part in two.drafters] == [13, 10]
    for last in (Bigram(vocab_size=VOCAB), Suffix()):  # which state their topology
        pair, _ = cs_drafting([[5, 10], [0, 9]], (three[0], last), (NEAR, None))
        assert [part.num_draft for part in pair.drafters] == [5, 10]
        assert pair.drafters[0].inner.num_draft == 9


def test_what_cannot_be_built_is_refused_before_anything_is_compiled():
    model = DraftModel(2, model=MODEL)
    with pytest.raises(ValueError, match="give at least two"):
        Horizontal(drafters=(model,))
    with pytest.raises(TypeError, match=r"drafters\[1\]=None"):
        Horizontal(drafters=(model, None))
    with pytest.raises(ValueError, match="drafts nothing"):
        Horizontal(drafters=(model, NGram(0)))
    with pytest.raises(ValueError, match="the end of a chain"):
        Horizontal(drafters=(DraftModel(model=MODEL, topology=trees.branching(2, 1)), COPIES))
    with pytest.raises(ValueError, match="it remembers what a model computed"):
        Horizontal(drafters=(model, Jacobi(3)))
    own = SelfDraft(2, target=MODEL, window=3, sinks=1)
    switched = SwitchedSelfDraft(2, target=MODEL)
    for last in (own, switched):
        with pytest.raises(ValueError, match="reads the target's cache"):
            Horizontal(drafters=(model, last))
    with pytest.raises(ValueError, match="its layers are those of a target"):
        Cascade(model, switched)
    for wrong, said in (
        ([[1, 1]], "a row and a column for each"),
        ([[2, 1], [1, 1]], "below the diagonal"),
        ([[2, -1], [0, 1]], "integers of at least 0"),
        ([[2, 1.5], [0, 1]], "integers of at least 0"),
        ([[0, 0], [0, 1]], "row 0 drafts nothing for the target"),
        ([[2, 1], [0, 0]], "row 1 drafts nothing for drafter 0"),
    ):
        with pytest.raises(ValueError, match=said):
            cs_drafting(wrong, (model, COPIES), (NEAR, None))
    with pytest.raises(TypeError, match="give a specjax.drafters.DraftModel"):
        cs_drafting([[1, 1], [0, 1]], (COPIES, COPIES), (None, None))
    drafter, weights = matrix()
    with pytest.raises(ValueError, match="a tuple of 3"):
        drafter.init(weights[:2], PARAMS, 1, 4)


@dataclasses.dataclass(frozen=True)
class Once(specjax.processors.LogitsProcessor):
    """Allows token 2 once."""

    def init(self, params, tokens, lengths):
        return jnp.zeros(lengths.shape, jnp.int32)

    def step(self, params, state, token):
        return state + (token == 2)

    def __call__(self, logits, prefix):
        banned = (prefix.state > 0)[:, None] & (jnp.arange(logits.shape[-1]) == 2)
        return jnp.where(banned, -jnp.inf, logits)


def test_a_processor_with_a_state_may_leave_drafts_alone():
    drafter, weights = matrix()
    params = {"target": PARAMS, "drafter": weights, "logits_processor": None}
    texts = []
    for process_drafts in (True, False):
        sampling = Sampling(logits_processor=Once(), process_drafts=process_drafts)
        tokens, lengths = jnp.asarray([[1, 0, 3, 1, 0]]), jnp.asarray([5])
        how = dict(max_new_tokens=12, key=jax.random.key(0), sampling=sampling)
        texts.append(specjax.decode(MODEL, drafter, params, tokens, lengths, **how).tokens.tolist())
    assert texts[0] == texts[1] and texts[0][0][5:].count(2) <= 1
