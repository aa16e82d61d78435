"""Trees that grow over the laws of a block's places: those of DDTree, by its authors' code."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import context

from specjax.drafters.heads import independent_level
from specjax.trees import expand, parents
from specjax.trees.grown import Expand

pytestmark = pytest.mark.usefixtures("quick_compilation")
GOLDEN = dict(np.load(Path(__file__).parent / "golden" / "ddtree.npz"))
COUNT, DEPTH, _ = GOLDEN["logits"].shape


def paths_of(tokens, above):
    """A tree as the set of its paths of tokens below the root."""
    found = [()]
    for token, parent in zip(tokens, above, strict=True):
        found.append((*found[parent], int(token)))
    return {*found[1:]}


@functools.partial(jax.jit, static_argnums=0)
def grown(shape, logits):
    """The tokens and parents below the root of the trees that a drafter of these laws drafts."""
    draft, *_ = expand.expand(shape, context(COUNT), *independent_level(lambda: logits))
    return draft.tokens[:, 1:], parents(draft)[:, 1:]


def authors_trees(which):
    budget = GOLDEN["budgets"][which]
    tokens, above = GOLDEN["tokens"][:, which, :budget], GOLDEN["parents"][:, which, :budget]
    return [*map(paths_of, tokens, above)]


def own_trees(shape, logits=GOLDEN["logits"]):
    return [*map(paths_of, *map(np.asarray, grown(shape, jnp.asarray(logits))))]


@pytest.mark.parametrize("which", range(len(GOLDEN["budgets"])))
def test_a_tree_over_the_laws_of_places_is_that_of_the_authors_best_first_search(which):
    budget = int(GOLDEN["budgets"][which])
    assert own_trees(Expand(9, DEPTH, budget)) == authors_trees(which)


def test_a_tree_holds_the_greatest_sum_of_products_that_any_tree_can():
    """The sum is the expected number of accepted tokens, were the target's laws the drafter's."""
    laws = np.exp(GOLDEN["logits"]) / np.exp(GOLDEN["logits"]).sum(axis=-1, keepdims=True)
    for law, tree in zip(laws, own_trees(Expand(9, DEPTH, 12)), strict=True):
        products, whole = law[0], []
        for place in range(DEPTH):
            products = products if place == 0 else np.multiply.outer(products, law[place])
            whole.append(products.reshape(-1))
        best = np.sort(np.concatenate(whole))[-12:].sum()
        found = sum(np.prod([law[k][token] for k, token in enumerate(path)]) for path in tree)
        np.testing.assert_allclose(found, best, rtol=1e-5)


def test_fault_too_few_paths_or_laws_of_other_places_give_other_trees():
    wanted = authors_trees(1)
    moved = GOLDEN["logits"] + np.arange(DEPTH)[:, None]  # the same laws, other sums of logits
    assert own_trees(Expand(9, DEPTH, 12), moved) == wanted
    narrow = own_trees(Expand(2, DEPTH, 12))
    shifted = own_trees(Expand(9, DEPTH, 12), np.roll(GOLDEN["logits"], 1, axis=1))
    for wrong in (narrow, shifted):
        assert sum(a != b for a, b in zip(wrong, wanted, strict=True)) > COUNT / 2
