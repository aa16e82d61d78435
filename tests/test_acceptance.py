"""Acceptance rules, held against enumeration: what they say, how much they keep, what they refuse.

Laws here are exact up to float32 (1e-6); the planted faults are off by more than 1e-3.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import context

from specjax import acceptance, trees
from specjax.acceptance import RULES, walk
from specjax.acceptance.typical import Typical
from specjax.analysis.exact_law import Table, distance, drafts, outcome, prefixes, product, saying
from specjax.sampling import drawing
from specjax.types import Draft, Rule

CHAIN, PAIR, THREE, TREE = (-1, 0, 1, 2), (-1, 0, 0), (-1, 0, 0, 0), (-1, 0, 0, 1, 1, 2)
EXACT, WRONG = 1e-6, 1e-3
GUESS = Draft(
    start=np.zeros(1, np.int32), tokens=np.asarray([[0, 1, 2, 0, 1]]), topology=(-1, 0, 0, 1, 1)
)
merge = jax.jit(trees.merge_drafts, static_argnames="one_law")


@functools.cache
def judged(rule, draws, topology, seed, vocab=3):
    """``(total variation to the target, expected accepted tokens)`` on one random instance."""
    p, q = Table(seed, vocab), Table(seed + 100, vocab)
    draft, weights = drafts(q, topology, draws)
    depth = trees.max_depth(draft)
    law, accepted = outcome(RULES[rule], draft, weights, p, depth)
    return distance(law, p), accepted


@pytest.mark.parametrize(
    ("rule", "draws", "topology"),
    [(r, d, TREE) for r in ("rejection", "traversal") for d in ("iid", "distinct", "hub")]
    + [(r, "iid", CHAIN) for r in ("rejection", "traversal", "block", "kseq")]
    + [("kseq", "iid", TREE), ("hub", "hub", TREE)],
)
def test_what_is_said_has_the_targets_law_exactly(rule, draws, topology):
    for seed in range(3):
        assert judged(rule, draws, topology, seed)[0] < EXACT


def several(seed, topology, one_law):
    """Two drafters' independent drafts, merged: ``(Draft, probabilities, p)``."""
    p, q = Table(seed), Table(seed + 100)
    other = q if one_law else Table(seed + 200)
    one, two = (drafts(law, topology, "iid") for law in (q, other))
    one, two, weights = product(one, two)
    return one, two, weights, p


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_siblings_of_several_drafters_are_judged_each_by_its_own_law(rule):
    for seed in range(3):
        one, two, weights, p = several(seed, (-1, 0, 1), one_law=False)
        draft = merge(one, two)
        assert draft.draws == "mixed"
        assert distance(outcome(RULES[rule], draft, weights, p, 2)[0], p) < EXACT


def test_k_seq_goes_on_with_every_chain_of_one_drafter_that_begins_as_the_text_does():
    for seed in range(3):
        one, two, weights, p = several(seed, (-1, 0, 1), one_law=True)
        law, merged = outcome(RULES["kseq"], merge(one, two, one_law=True), weights, p, 2)
        off, beside = judged("kseq", "iid", (-1, 0, 0, 1, 2), seed)
        assert distance(law, p) < EXACT and off < EXACT and abs(merged - beside) < EXACT


def test_a_draft_without_laws_is_judged_as_point_masses():
    p, q = Table(0), Table(100)
    best = [np.argsort(-q(prefix)) for prefix in ((), (0,), (1,), (2,))]
    tokens = [0, best[0][0], best[0][1], best[1 + best[0][0]][0], best[1 + best[0][0]][1]]
    draft = dataclasses.replace(GUESS, tokens=np.asarray([tokens]))
    kept = {}
    for rule in ("rejection", "traversal", "delta"):
        law = saying if rule == "delta" else outcome
        law, kept[rule] = law(RULES[rule], draft, np.ones(1), p, 2)
        assert distance(law, p) < EXACT
    # with point masses there is nothing to gain from looking further
    np.testing.assert_allclose(list(kept.values()), kept["delta"], atol=1e-6)


def test_delta_on_a_sampled_tree_has_the_targets_law_exactly():
    p = Table(0)
    draft, weights = drafts(Table(100), (-1, 0, 0, 1), "iid")
    law, accepted = saying(RULES["delta"], draft, weights, p, 2)
    assert distance(law, p) < EXACT
    assert accepted < judged("rejection", "iid", (-1, 0, 0, 1), 0)[1]


# ------------------------------------------------------------------------ how much they keep


@pytest.mark.parametrize("draws", ["iid", "distinct", "hub"])
def test_traversal_keeps_at_least_as_much_as_rejection_on_trees(draws):
    kept = np.asarray(
        [[judged(rule, draws, TREE, s)[1] for rule in ("traversal", "rejection")] for s in range(8)]
    )
    assert (kept[:, 0] > kept[:, 1] - EXACT).all() and kept[:, 0].mean() > kept[:, 1].mean() + 0.01


def test_on_chains_traversal_is_block_verification_and_both_keep_more_than_one_by_one():
    for seed in range(6):
        traversal, block, rejection = (
            judged(rule, "iid", CHAIN, seed)[1] for rule in ("traversal", "block", "rejection")
        )
        assert abs(traversal - block) < EXACT and block > rejection - EXACT


def test_k_seq_with_one_draft_is_speculative_sampling_and_with_more_near_the_best_there_is():
    for seed in range(6):
        one, alone = (judged(rule, "iid", CHAIN, seed)[1] for rule in ("kseq", "rejection"))
        assert abs(one - alone) < 1e-5
        p, q = Table(seed, 4)(()), Table(seed + 100, 4)(())
        best = np.minimum(p, 1 - (1 - q) ** 3).sum()  # no rule for three such drafts keeps more
        kept = judged("kseq", "iid", THREE, seed, 4)[1]
        assert (1 - (2 / 3) ** 3) * best - 1e-5 < kept < best + 1e-5


def test_a_hub_of_half_the_mass_keeps_at_least_as_much_as_independent_pairs():
    gains = []
    for seed in range(40):
        if Table(seed + 100)(()).max() >= 0.5:
            kept = [judged(*case, PAIR, seed)[1] for case in (("hub", "hub"), ("rejection", "iid"))]
            gains.append(kept[0] - kept[1])
    assert len(gains) > 10 and min(gains) > -EXACT and np.mean(gains) > 0.05


@pytest.mark.parametrize(
    ("rule", "draws"), [("traversal", "distinct"), ("kseq", "iid"), ("hub", "hub")]
)
def test_a_drafter_equal_to_the_target_is_always_right_and_one_beside_it_never(rule, draws):
    p = Table(0)
    draft, weights = drafts(p, TREE, draws)
    law, accepted = outcome(RULES[rule], draft, weights, p, 2)
    # 1 - 2^-24 passes for 1 where a ratio rounds down
    assert distance(law, p) < EXACT and abs(accepted - 2) < 1e-5

    p = Table(law=[0.0, 0.0, 1.0])
    draft, weights = drafts(Table(law=[0.6, 0.4, 0.0]), TREE, draws)
    law, accepted = outcome(RULES[rule], draft, weights, p, 2)
    assert distance(law, p) < EXACT and accepted == 0


@pytest.mark.parametrize(
    ("rule", "draws", "topology"),
    [
        ("rejection", "iid", TREE),
        ("traversal", "iid", TREE),
        ("block", "iid", CHAIN),
        ("kseq", "iid", TREE),
        ("hub", "hub", TREE),
    ],
)
def test_a_text_may_end_after_a_drafted_token(rule, draws, topology):
    p, q = Table(0), Table(100)
    p.laws[(0,)] = np.zeros(3)  # no token has a probability there
    draft, weights = drafts(q, topology, draws)
    law, _ = outcome(RULES[rule], draft, weights, p, trees.max_depth(draft))
    # texts that do not go on have ended after token 0, as often as p gives that token
    assert distance(law, p) < EXACT and abs(1 - law.sum() - p(())[0]) < EXACT


# ------------------------------------------------- planted faults: the same test must see them


@dataclasses.dataclass(frozen=True)
class AfreshForEveryPath(Rule):
    """Draws of the target for each path by itself, and again where none agrees."""

    name, lossless = "approximate-afresh", False

    def __call__(self, params, draft, target_law, draft_law, key):
        uniform = drawing.uniforms(key, draft.num_nodes)

        def visit(node):
            p = target_law(node)
            said = uniform < jnp.take_along_axis(p, draft.tokens, axis=1)
            said &= trees.parents(draft) == node[:, None]
            said &= jnp.arange(draft.num_nodes) > 0
            return jnp.argmax(said, axis=1).astype(jnp.int32), jnp.any(said, axis=1), p

        node, rest = walk.descend(draft, visit)
        return walk.verdict(draft, node, drawing.draw(rest, uniform[:, 0]))


def test_fault_a_sample_of_the_target_for_every_path():
    p = Table(0)
    assert distance(outcome(RULES["rejection"], GUESS, np.ones(1), p, 2)[0], p) < EXACT
    assert distance(outcome(AfreshForEveryPath(), GUESS, np.ones(1), p, 2)[0], p) > WRONG


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_fault_the_law_not_updated_after_a_draw_without_replacement(rule):
    p, (draft, weights) = Table(0), drafts(Table(100), TREE, "distinct")
    law, _ = outcome(RULES[rule], dataclasses.replace(draft, draws="iid"), weights, p, 2)
    assert distance(law, p) > WRONG


@pytest.mark.parametrize("rule", ["rejection", "traversal", "kseq"])
def test_fault_samples_ranked_before_they_are_judged(rule):
    p, q = Table(1, 4), Table(101, 4)
    draft, weights = drafts(q, THREE, "iid")
    order = np.argsort(-q(())[draft.tokens[:, 1:]], axis=1, kind="stable")
    tokens = np.take_along_axis(draft.tokens[:, 1:], order, axis=1)
    ranked = dataclasses.replace(draft, tokens=np.insert(tokens, 0, 0, axis=1))
    assert distance(outcome(RULES[rule], ranked, weights, p, 1)[0], p) > WRONG


@pytest.mark.parametrize("rule", ["rejection", "traversal", "kseq"])
def test_fault_a_token_drawn_twice_is_judged_once(rule):
    p, (draft, weights) = Table(1, 4), drafts(Table(101, 4), THREE, "iid")
    again = np.asarray([[x in row[1:n] for n, x in enumerate(row)] for row in draft.tokens])
    dropped = dataclasses.replace(draft, candidate=~again)
    assert distance(outcome(RULES[rule], dropped, weights, p, 1)[0], p) > WRONG


def test_fault_k_seq_told_that_two_drafters_are_one():
    one, two, weights, p = several(0, (-1, 0), one_law=False)
    law, _ = outcome(RULES["kseq"], merge(one, two, one_law=True), weights, p, 1)
    assert distance(law, p) > WRONG


def test_fault_a_pair_drawn_twice_from_the_same_law_is_no_hub():
    p, (draft, weights) = Table(0), drafts(Table(100), PAIR, "iid")
    law, _ = outcome(RULES["hub"], dataclasses.replace(draft, draws="hub"), weights, p, 1)
    assert distance(law, p) > WRONG


@dataclasses.dataclass(frozen=True)
class Misread:
    """A rule that reads a law of the target, or of the draft, that is a little too flat."""

    rule: object
    whose: str

    def __call__(self, params, draft, target_law, draft_law, key):
        def flat(law):
            law = law**0.8
            return law / jnp.sum(law, axis=-1, keepdims=True)

        if self.whose == "target":
            return self.rule(params, draft, lambda node: flat(target_law(node)), draft_law, key)
        draft = dataclasses.replace(draft, laws=flat(draft.laws))
        draft_law = acceptance.node_laws.DraftLaw(draft, draft.laws.shape[-1])
        return self.rule(params, draft, target_law, draft_law, key)


LAWFUL = [("rejection", PAIR), ("traversal", PAIR), ("block", CHAIN), ("kseq", PAIR), ("hub", PAIR)]


@pytest.mark.parametrize("whose", ["target", "draft"])
@pytest.mark.parametrize(("rule", "topology"), LAWFUL)
def test_fault_a_rule_that_reads_another_law(rule, topology, whose):
    p, draws = Table(0), "hub" if rule == "hub" else "iid"
    draft, weights = drafts(Table(100), topology, draws)
    law, _ = outcome(Misread(RULES[rule], whose), draft, weights, p, trees.max_depth(draft))
    assert distance(law, p) > WRONG


# --------------------------------------------------------------------------- pairs with a hub


def test_a_pair_holds_the_hub_and_each_other_token_as_often_as_it_should():
    q, grid = np.asarray([0.25, 0.5, 0.125, 0.125], np.float32), (np.arange(64) + 0.5) / 64
    uniform = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
    drawn = drawing.draw_hub(jnp.broadcast_to(q, (len(uniform), 4)), jnp.asarray(uniform))
    share = np.zeros((4, 4))
    np.add.at(share, tuple(np.asarray(drawn).T), 1 / len(uniform))
    expected = np.zeros((4, 4))
    expected[:, 1] = q
    expected[1] = 0.5 * q / 0.5
    expected[1, 1] = 0
    np.testing.assert_array_equal(share, expected)


def test_a_law_with_one_token_or_none_draws_no_more_than_there_is():
    q, half = jnp.asarray([[0.0, 1.0], [0.0, 0.0]]), jnp.full((2, 2), 0.5)
    assert drawing.draw_hub(q, half).tolist() == [[1, -1], [-1, -1]]


def test_the_hub_of_a_smaller_vocabulary_is_the_drafts_own():
    # a tie, which the target's order of tokens would break otherwise
    laws, ids = jnp.asarray([[[0.4, 0.4, 0.2]]]), jnp.asarray([2, 0, 1])
    draft = trees.tree_draft(
        context(1),
        ids[jnp.asarray([[1, 0]])],
        PAIR,
        law=jnp.zeros((1, 2), jnp.int32),
        laws=laws,
        vocab=ids,
        draws="hub",
    )
    q = acceptance.node_laws.DraftLaw(draft, 3)
    assert q.hub(jnp.asarray([1])).tolist() == [2]
    np.testing.assert_allclose(q(jnp.asarray([1])), [[0.4, 0.2, 0.4]], atol=1e-6)
    np.testing.assert_allclose(q(jnp.asarray([2])), [[0.0, 0.0, 1.0]])


# ------------------------------------------------------------------------------- approximate


def plausible(tokens, parent, p, epsilon, delta):
    """The obvious way: every path that passes; the longest, the most probable, the first."""
    paths = {0: 0.0}
    for node in range(1, len(tokens)):
        above = p[parent[node]]
        entropy = -np.sum(above[above > 0] * np.log(above[above > 0]))
        said = above[tokens[node]]
        if parent[node] in paths and said > min(epsilon, delta * np.exp(-entropy)):
            paths[node] = paths[parent[node]] + np.log(said)
    depth = [len(path) for path in prefixes(tokens, parent)]
    node = max(paths, key=lambda n: (depth[n], round(paths[n], 4), -n))
    return node, int(np.argmax(p[node]))


def test_typical_acceptance_keeps_the_longest_plausible_path_and_says_the_likeliest_token():
    random, rows, nodes = np.random.default_rng(0), 300, 9
    tokens = random.integers(0, 4, (rows, nodes))
    parent = np.stack(
        [[-1, *(random.integers(0, n) for n in range(1, nodes))] for _ in range(rows)]
    )
    p = random.dirichlet(np.full(4, 0.6), (rows, nodes)).astype(np.float32)
    draft = trees.tree_draft(context(rows), jnp.asarray(tokens[:, 1:]), jnp.asarray(parent))
    tokens[:, 0] = 0
    rule, visits = Typical(epsilon=0.3, delta=0.6), []

    @jax.jit
    def judge(draft, p):
        def law(node):
            jax.debug.callback(lambda: visits.append(1))
            return walk.at_node(p, node)

        return rule({}, draft, law, None, None)

    verdict = jax.device_get(judge(draft, p))
    jax.effects_barrier()
    assert len(visits) <= nodes  # a row that is through stays so while others are looked at
    last = np.take_along_axis(verdict.path, verdict.count[:, None], axis=1)
    for row in range(rows):
        expected = plausible(tokens[row], parent[row], p[row], rule.epsilon, rule.delta)
        assert (last[row, 0], verdict.token[row]) == expected
    assert len({*verdict.count.tolist()}) > 3


def test_typical_acceptance_is_refused_thresholds_out_of_range():
    for settings in ({"epsilon": 0}, {"epsilon": 1.5}, {"delta": -1}, {"delta": float("inf")}):
        with pytest.raises(ValueError, match="epsilon must be in"):
            Typical(**settings)
