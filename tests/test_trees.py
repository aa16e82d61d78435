"""Trees of drafts: scored as each path is, and their depths, ancestors, paths and merges."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import MODEL, PARAMS, rebuilt

import specjax
from specjax import Sampling, trees
from specjax.decoding import reference
from specjax.types import Draft

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_logits_of_a_tree_are_those_of_each_path_read_in_sequence():
    topology = (-1, 0, 0, 1, 1, 2, 5, 3)
    prompt = [3, 1, 4, 1, 5]
    tokens = np.asarray([prompt], np.int32)
    nodes = np.asarray([[prompt[-1], 2, 7, 1, 8, 2, 8, 1]], np.int32)
    draft = Draft(start=jnp.asarray([4]), tokens=jnp.asarray(nodes), topology=topology)
    cache = rebuilt(PARAMS, jnp.asarray(tokens), jnp.asarray([4]))
    parent = jnp.asarray([topology], jnp.int32)
    dynamic = dataclasses.replace(draft, parent=parent, topology=None)
    for shape in (draft, dynamic):
        got = MODEL.verify(PARAMS, cache, shape).logits[0]
        for node in range(8):
            path = [node]
            while topology[path[0]] >= 0:
                path.insert(0, topology[path[0]])
            sequence = prompt[:-1] + nodes[0, path].tolist()
            expected = reference.logits(MODEL, PARAMS, jnp.asarray([sequence]))[0, -1]
            np.testing.assert_allclose(got[node], expected, atol=1e-5)


def test_a_tree_drafted_level_by_level_scores_as_in_one_pass():
    draft = Draft(
        start=jnp.asarray([4]),
        tokens=jnp.asarray([[5, 2, 7, 1, 8]]),
        topology=(-1, 0, 0, 1, 1),
    )
    cache = rebuilt(PARAMS, jnp.asarray([[3, 1, 4, 1, 5]]), jnp.asarray([4]))
    whole = MODEL.verify(PARAMS, cache, draft)
    first = dataclasses.replace(draft, tokens=draft.tokens[:, :3], topology=draft.topology[:3])
    level = MODEL.verify(PARAMS, cache, first)
    rest = MODEL.verify(PARAMS, cache, draft, since=3, entries=level.entries)
    np.testing.assert_allclose(rest.logits, whole.logits[:, 3:], atol=1e-6)
    np.testing.assert_allclose(rest.entries, whole.entries, atol=1e-6)


def test_static_and_dynamic_trees_have_the_same_depths_ancestors_and_paths():
    topology = (-1, 0, 0, 1, 1, 2, 5, 3)
    tokens = jnp.zeros((2, 8), jnp.int32)
    fixed = Draft(start=jnp.zeros(2, jnp.int32), tokens=tokens, topology=topology)
    free = dataclasses.replace(
        fixed, topology=None, parent=jnp.tile(jnp.asarray([topology], jnp.int32), (2, 1))
    )
    assert (trees.ancestors(fixed) == trees.ancestors(free)).all()
    assert (trees.depths(fixed) == trees.depths(free)).all()
    path, depth = trees.path_to(fixed, jnp.asarray([6, 7]))
    assert path[0, :4].tolist() == [0, 2, 5, 6] and path[1, :4].tolist() == [0, 1, 3, 7]
    assert depth.tolist() == [3, 3]
    wide, _ = trees.path_to(free, jnp.asarray([6, 7]))
    assert (wide[:, :4] == path).all()


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 9, 17])
def test_dynamic_ancestors_are_found_at_any_depth_and_by_row(nodes):
    """A chain, a tree that was drawn, and a node that has no parent beside the root."""
    generator = np.random.default_rng(nodes)
    drawn = [-1, *(int(generator.integers(n + 1)) for n in range(nodes - 1))]
    other = [*range(-1, nodes - 2), -1][:nodes] if nodes > 1 else [-1]
    parents = np.asarray([[*range(-1, nodes - 1)], drawn, other], np.int32)
    free = Draft(
        start=jnp.zeros(3, jnp.int32), tokens=jnp.zeros((3, nodes), jnp.int32), parent=parents
    )
    wanted = np.zeros((3, nodes, nodes), bool)
    for row in range(3):
        for node in range(nodes):
            above = node
            while above >= 0:
                wanted[row, above, node] = True
                above = parents[row, above]
    assert (np.asarray(trees.ancestors(free)) == wanted).all()


def test_a_path_is_as_long_as_the_deepest_candidate_of_a_chain_with_passengers():
    chain = Draft(
        start=jnp.zeros(2, jnp.int32),
        tokens=jnp.zeros((2, 5), jnp.int32),
        topology=trees.chain_parents(4),
        deepest=2,
    )
    path, depth = trees.path_to(chain, jnp.asarray([2, 1]))
    assert path.shape == (2, 3) and path[0].tolist() == [0, 1, 2] and depth.tolist() == [2, 1]


def test_merge_joins_equal_prefixes_and_keeps_twins():
    context = specjax.Context(
        tokens=jnp.asarray([[9]]),
        length=jnp.asarray([1]),
        budget=jnp.asarray([5]),
        key=jax.random.split(jax.random.key(0), 1),
        sampling=Sampling().rows(1),
    )
    one = trees.chain_draft(context, jnp.asarray([[4, 5]]))
    two = trees.tree_draft(context, jnp.asarray([[4, 6, 7]]), (-1, 0, 1, 0))
    both = trees.merge_drafts(one, two)
    assert both.tokens.tolist() == [[9, 4, 5, 4, 6, 7]]
    # node 4 (token 6) hangs below the first 4; the second 4 stays, as a draw without children
    assert both.parent.tolist() == [[-1, 0, 1, 0, 1, 0]]


@pytest.mark.parametrize(
    ("topology", "words"),
    [((0, 0), "begin with the root"), ((-1, 0, 2), "node 2 has parent 2"), ((), "begin")],
)
def test_a_malformed_topology_is_refused(topology, words):
    with pytest.raises(ValueError, match=words):
        trees.check_parents(topology)
