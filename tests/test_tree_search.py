"""The search for a static tree: the best of all trees, by rates, by passes and by whole rounds."""

from types import SimpleNamespace

import numpy as np
import pytest

from specjax import trees
from specjax.analysis import rank_counts, tree_search, tree_timing
from specjax.trees.topology import Tree


def every_tree(nodes):
    """All static trees of a size, by parents."""
    grown = {(-1,)}
    for _ in range(nodes):
        grown = {(*p, a) for p in grown for a in range(len(p))}
    return {Tree(p) for p in grown}


@pytest.mark.parametrize("seed", range(3))
def test_grown_trees_are_the_best_of_all_trees(seed):
    rng = np.random.default_rng(seed)
    rates = -np.sort(-rng.dirichlet(np.full(5, 0.5), size=4)[:, :4], axis=1)
    for nodes in (1, 3, 5, 6):
        best = max(tree_search.expected_tokens(t, rates) for t in every_tree(nodes))
        greedy = tree_search.grow_greedy(rates, nodes)
        optimal = tree_search.grow_optimal(rates, nodes)
        assert tree_search.expected_tokens(greedy, rates) == pytest.approx(best)
        assert tree_search.expected_tokens(optimal, rates) == pytest.approx(best)
    flat = tree_search.grow_optimal(rates, 6, depth=2, siblings=3)
    allowed = [t for t in every_tree(6) if t.depth <= 2 and max(t.ranks) < 3]
    best = max(tree_search.expected_tokens(t, rates) for t in allowed)
    assert tree_search.expected_tokens(flat, rates) == pytest.approx(best)
    chains = tree_search.expected_tokens(trees.chain(4), rates)
    assert tree_search.expected_tokens(tree_search.grow_optimal(rates, 4), rates) >= chains


def test_the_fastest_tree_weighs_tokens_against_passes():
    rates = np.asarray([[0.6, 0.2, 0.1], [0.5, 0.2, 0.1]])
    free = tree_search.grow_fastest(rates, {1: 1.0, 4: 1.0, 8: 1.0})
    assert free.shape.num_nodes == 8 and free.ratio == pytest.approx(free.tokens)
    dear = tree_search.grow_fastest(rates, {1: 1.0, 4: 2.5, 8: 5.0})
    assert dear.shape is None and dear.ratio == 1  # plain decoding is faster than any tree
    between = tree_search.grow_fastest(rates, {1: 1.0, 2: 1.05, 4: 1.3, 8: 2.2}, level=0.1)
    assert between.shape.num_nodes in (2, 4) and between.ratio > 1


@pytest.mark.parametrize(
    ("level", "node"), [(0.1, 0.0), (0.0, 0.1), (0.1, 0.05), (0.2, 0.02), (2.0, 0.5)]
)
def test_the_tree_chosen_is_the_best_of_all_by_what_rounds_cost_in_the_loop(
    level, node, monkeypatch
):
    passes = {n: 0.9 + 0.1 * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)}
    rates, rest, start, new = np.asarray([[0.8, 0.1], [0.6, 0.2], [0.5, 0.2]]), 0.3, 2.0, 50

    def whole(shape):
        """Seconds of ``new`` tokens, by the law that the clock follows."""
        if shape is None:
            return start + (new - 1) * (passes[1] + rest)
        one = np.interp(shape.num_nodes, [*passes], [*passes.values()]) + rest
        one += level * shape.depth + node * (shape.num_nodes - 1)
        return start + (new - 1) / tree_search.expected_tokens(shape, rates) * one

    def run_once(shape):
        rounds = SimpleNamespace(stats=SimpleNamespace(rounds=np.asarray([10])))
        each = 1.0 if shape is None else tree_search.expected_tokens(shape, rates)
        return start, (whole(shape) - start) / (new - 1) * each * 10, rounds

    monkeypatch.setattr(tree_timing.timing, "timed_run", run_once)
    monkeypatch.setattr(tree_timing, "prepare", lambda lm, prompt, options: options.drafting.tree)
    timed = {n: [seconds] for n, seconds in passes.items()}
    monkeypatch.setattr(tree_timing.timing, "pass_seconds", lambda *_: timed)
    counted = rank_counts.RankCounts((rates * 1000).astype(int), np.full(3, 1000))
    found = tree_timing.time_trees(
        None, "heads", counted, "", sizes=[*passes], depth=3, max_new_tokens=new
    )
    trees = [tree_search.grow_optimal(rates, n - 1, depth=d) for n in passes for d in (1, 2, 3)]
    best = min(whole(shape) for shape in [None, *trees] if shape is None or shape.depth)
    np.testing.assert_allclose(found.choice.ratio, whole(None) / best, rtol=1e-6)
    assert (found.choice.shape is None) == (level == 2.0)
    if found.choice.shape is not None:
        np.testing.assert_allclose([found.level, found.node], [level, node], atol=1e-6)


def test_a_tree_larger_than_what_was_counted_is_refused_with_the_interval():
    few = rank_counts.RankCounts(np.asarray([[6, 1, 0]]), np.asarray([10]))
    assert tree_search.grow_greedy(few, 2) == Tree((-1, 0, 0))
    low, high = few.interval(0, 0)
    assert low < 0.6 < high and high - low > 0.4  # ten trials say little
    with pytest.raises(ValueError, match=r"none of these choices was right in 10 trials.*0\.27"):
        tree_search.grow_greedy(few, 3)
    with pytest.raises(ValueError, match="have only 3"):
        tree_search.grow_greedy(few, 4)


def test_the_fastest_tree_has_no_choice_that_was_never_right():
    """Here the third choice at depth 1 was not, and the fourth was."""
    hits = np.asarray([[50, 10, 0, 3], [20, 8, 5, 2]])
    counted = rank_counts.RankCounts(hits, np.asarray([100, 90]))
    flat = dict.fromkeys((1, 2, 4, 8, 16), 1.0)
    best = tree_search.grow_fastest(counted, flat)
    assert best.shape is not None and best.ratio > 1.5
    assert not tree_search.never_right(best.shape, counted)
    wide = tree_search.grow_optimal(counted.rates, 15, depth=2)
    assert tree_search.never_right(wide, counted) == [(1, 2)]
