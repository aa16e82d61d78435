"""Branches beside the text of a cascade's outer model: StagedSpec's tree."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_drafts
from ragged import MODEL, PARAMS
from test_cascade import CASES, COPIES, WARM, caches, law_of, rounds_of

import specjax
from specjax import Sampling, trees
from specjax.decoding import round
from specjax.drafters import Cascade, DraftModel, cascade_tree
from specjax.text import drafter_names

COMBS = ["cascade comb", "cascade draft comb", "cascade comb stop"]


@pytest.mark.parametrize("name", COMBS)
def test_the_law_of_each_branch_is_the_outer_models_without_the_siblings_before_it(name):
    """The stated rows are the outer model's laws; ``DraftLaw`` leaves earlier siblings out, and no
    two siblings are the same token."""
    drafter, weights, _ = CASES[name]
    on = cascade_tree.spine(drafter.tree)
    depth = np.asarray(drafter.tree.depths)
    seen = 0
    for state, judged in rounds_of(drafter, weights):
        draft = judged.draft
        law = law_of(weights["outer"], state, draft.tokens[:, on][:, 1:], WARM)
        able = np.asarray(draft.candidate)
        assert draft.draws == "distinct" and (np.asarray(draft.law)[:, 1:] == depth[1:] - 1).all()
        for row in np.flatnonzero(np.asarray(state.budget) > 0):
            count = able[row, on].sum() - 1
            np.testing.assert_allclose(draft.laws[row, :count], law[row, :count], atol=2e-6)
            for level in range(1, count + 1):
                tokens = np.asarray(draft.tokens)[row, depth == level]
                assert len({*tokens.tolist()}) == len(tokens)
                assert able[row, depth == level].all()
            assert not able[row, depth > count].any()
            seen += count
    assert seen > 20


@pytest.mark.parametrize(("rule", "sampling"), [("auto", Sampling()), ("coupled", WARM)])
def test_a_tree_without_chance_is_that_of_the_outer_model_alone(rule, sampling):
    drafter, weights, _ = CASES["cascade draft comb"]
    outer = DraftModel(model=MODEL, topology=drafter.tree)
    alone = rounds_of(outer, weights["outer"], rule, sampling)
    together = rounds_of(drafter, weights, rule, sampling)
    passes = 0
    for (state, one), (cascade, other) in zip(alone, together, strict=True):
        live = np.asarray(state.budget) > 0
        assert one.draft.topology == other.draft.topology
        assert (np.asarray(one.draft.tokens)[live] == np.asarray(other.draft.tokens)[live]).all()
        passes = np.asarray(cascade.drafter_state.stats.rounds)
    assert passes.sum() > 0


@pytest.mark.parametrize("name", ["cascade draft comb", "cascade over a comb"])
def test_a_branch_that_is_accepted_leaves_what_a_fresh_pass_knows(name):
    assert wrong_entries(*CASES[name][:2]) < 1e-5


def wrong_entries(drafter, weights):
    """The greatest difference between what the levels know of the text after a round and what a
    fresh pass knows."""
    from ragged import rebuilt

    @jax.jit
    def caught(weights, state):
        context = round.round_context({}, state)
        return drafter.sync(weights, PARAMS, state.drafter_state, context, before="draft")

    @jax.jit
    def left_the_spine(verdict):
        spine = cascade_tree.accepted_spine(drafter.tree, verdict.path, verdict.count)
        return jnp.sum(spine < verdict.count)

    worst, beside = 0.0, 0
    for state, judged in rounds_of(drafter, weights, most=8):
        known_by = jax.device_get(caught(weights, state))
        live = state.budget > 0
        for own, known in caches(drafter, weights, known_by):
            used = (np.arange(state.tokens.shape[1]) < known.filled[:, None])[:, None, :, None]
            expected = np.asarray(rebuilt(own, state.tokens, known.filled))
            kept = known.cache[:, :, : expected.shape[2]]
            worst = max(worst, float(np.abs(np.where(used, kept - expected, 0)[live]).max()))
        if drafter.tree is not None:
            beside += int(left_the_spine(judged.verdict))
    assert drafter.tree is None or beside > 3
    return worst


def test_fault_a_branch_that_is_taken_for_the_text(monkeypatch):
    monkeypatch.setattr("specjax.drafters.cascade.accepted_spine", lambda tree, path, count: count)
    drafter, weights, _ = CASES["cascade draft comb"]
    drafter = dataclasses.replace(drafter, inner=COPIES)  # compiled anew
    assert wrong_entries(drafter, weights | {"inner": None}) > 1e-3


def _drawn_again(context, tokens, laws, width):
    """Branches drawn with the text's own token among the tokens that may be drawn."""
    nothing = jnp.full_like(tokens, -1)
    return cascade_tree.DRAWN(context, nothing, laws, width)


def _best(context, tokens, laws, width):
    """The most probable other tokens, as if they had been drawn."""
    best = jax.lax.top_k(laws, width)[1].astype(jnp.int32)
    return cascade_tree._others(tokens, best)


@pytest.mark.parametrize("fault", [_drawn_again, _best])
def test_fault_branches_that_are_not_drawn_from_the_law_that_is_stated(fault, monkeypatch):
    drafter, weights, _ = test_drafts.CASES["cascade comb"]
    monkeypatch.setattr(cascade_tree, "DRAWN", cascade_tree._drawn, raising=False)
    monkeypatch.setattr(cascade_tree, "_drawn", fault)
    assert stated(drafter, weights) < test_drafts.FALSE_ALARM


def stated(drafter, weights):
    """The p-value of the laws that are stated of one round of many rows."""
    drafts, _, probability, *_ = test_drafts.drawn(drafter, weights, test_drafts.FEWER)
    return test_drafts.p_value(drafts, np.zeros_like(drafts), probability)


def test_branches_cost_no_pass_of_the_outer_model():
    """A comb has as many rounds of the inner loop as its spine alone in the first round."""
    drafter, weights, _ = CASES["cascade comb"]
    chain = dataclasses.replace(drafter, tree=None)
    passes = []
    for one in (drafter, chain):
        states = [state for state, _ in rounds_of(one, weights, sampling=Sampling(), most=2)]
        passes.append(np.asarray(states[1].drafter_state.stats.rounds).tolist())
    assert passes[0] == passes[1] and sum(passes[0]) > 0


def test_trees_that_need_laws_beside_the_text_are_refused():
    outer = DraftModel(3, model=MODEL)
    drafter = Cascade(outer, COPIES, tree=trees.comb(2, 3))
    assert (drafter.num_draft, drafter.depth, drafter.topology) == (6, 3, trees.comb(2, 3))
    assert Cascade(outer, COPIES, tree=trees.chain(3)) == Cascade(outer, COPIES)
    assert drafter.with_topology(trees.chain(4)) == Cascade(DraftModel(4, model=MODEL), COPIES)
    assert drafter.with_topology(trees.comb(3, 2)).outer.depth == 2
    for tree in (trees.branching(2, 1, 1), trees.Tree((-1, 0, 0, 2, 3))):
        with pytest.raises(ValueError, match=r"no law below.*trees.comb\(3, 3\)"):
            Cascade(outer, COPIES, tree=tree)
    with pytest.raises(ValueError, match="2 tokens deep, and the outer drafter drafts 3"):
        Cascade(outer, COPIES, tree=trees.comb(2, 2))
    with pytest.raises(ValueError, match="give a static tree"):
        drafter.with_topology(trees.Expand(2, 3, 5))
    weights = {"outer": PARAMS, "inner": None}
    with pytest.raises(ValueError, match="'gls' with Cascade.*give rule='coupled'"):
        next(rounds_of(drafter, weights, "gls"))


def test_a_comb_has_a_name():
    assert trees.parse("comb:3x2") == trees.comb(3, 2) == trees.Tree((-1, 0, 0, 0, 1, 1, 1))
    assert trees.comb(1, 4) == trees.chain(4)
    with pytest.raises(ValueError, match=r"comb\(0, 2\)"):
        trees.comb(0, 2)
    lm = specjax.load("embedded")
    found, _ = drafter_names.resolve_drafter(lm, "cascade:draft:ngram", tree="comb:2x4")
    assert found.tree == trees.comb(2, 4) and found.outer.depth == 4
