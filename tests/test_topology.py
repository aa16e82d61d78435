"""Topologies: what is a tree, and what a drafter grows is what its definition says."""

import dataclasses
import heapq
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import bag, like, own_params, read

import specjax
from specjax import Sampling, trees
from specjax.analysis import rank_counts
from specjax.drafters import DraftModel, NGram, Suffix
from specjax.drafters.slem import SLEM
from specjax.trees import expand
from specjax.trees.grown import Expand, Follow
from specjax.trees.topology import Tree
from specjax.types import Context

VOCAB = 11
MODEL, PARAMS = bag(VOCAB, 3)
WEIGHTS = like(PARAMS, 4)
PROMPTS = [[1, 4, 2], [7, 3, 3, 9, 0], [5, 6]]


def context(**more):
    lengths = np.asarray([len(p) for p in PROMPTS], np.int32)
    tokens = np.zeros((len(PROMPTS), 12), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    key = jax.random.split(jax.random.key(0), len(PROMPTS))
    fields = dict(budget=jnp.full(len(PROMPTS), 9), key=key, sampling=Sampling()) | more
    return Context(tokens=jnp.asarray(tokens), length=jnp.asarray(lengths), **fields)


def said(row, path=()):
    """The drafter's log-probabilities after a prompt and a path, NumPy."""
    ids = np.asarray([*PROMPTS[row], *path])
    wave = 1 + 0.5 * np.cos(np.arange(len(ids)))
    state = (np.asarray(WEIGHTS["embed"], np.float64)[ids] * wave[:, None]).sum(axis=0)
    logits = np.tanh(state) @ np.asarray(WEIGHTS["out"], np.float64)
    return logits - np.log(np.exp(logits).sum())


def drafted(drafter, where):
    """The draft of one round of a draft model."""
    params = {"drafter": WEIGHTS}

    def step(where):
        state = drafter.init(*own_params(params), *where.tokens.shape)
        filled = dataclasses.replace(state, cache=read(MODEL, WEIGHTS, where), filled=where.length)
        return drafter.draft_step(*own_params(params), filled, where)[0]

    return jax.jit(step)(where)


def model(**settings):
    return DraftModel(model=MODEL, **settings)


def paths(draft, row):
    """``{path of tokens}`` of the nodes that may be accepted, in order."""
    above = np.broadcast_to(np.asarray(trees.parents(draft)), draft.tokens.shape)[row]
    tokens = np.asarray(draft.tokens)[row]
    full = {0: ()}
    for node in range(1, len(tokens)):
        full[node] = (*full[above[node]], int(tokens[node]))
    real = np.ones(len(tokens), bool)
    if draft.candidate is not None:
        real = np.asarray(draft.candidate)[row]
    return [full[n] for n in range(1, len(tokens)) if real[n]]


def test_a_static_tree_holds_the_choices_that_its_ranks_name():
    shape = Tree((-1, 0, 0, 1, 1, 2, 3))
    draft = drafted(DraftModel(model=MODEL, topology=shape, sibling_sampling="top"), context())
    for row in range(len(PROMPTS)):
        found = [()]
        for node in range(1, shape.num_nodes):
            above = found[shape.parents[node]]
            best = np.argsort(-said(row, above), kind="stable")
            found.append((*above, int(best[shape.ranks[node]])))
        assert paths(draft, row) == found[1:]


def expanded(row, width, depth, nodes, gain=0.0, sharpened=1.0):
    """``topology.Expand`` in the slow, obvious way."""
    looked, front, kept = {}, [((), 0.0)], 0.0
    for _ in range(depth):
        fresh = {}
        for path, value in front:
            law = sharpened * said(row, path)
            law -= np.log(np.exp(law).sum())
            for token in np.argsort(-law, kind="stable")[:width]:
                fresh[(*path, int(token))] = value + law[token]
        looked |= fresh
        front = sorted(fresh.items(), key=lambda item: -item[1])[:width]
        best = sorted(looked.values(), reverse=True)[:nodes]
        if gain and np.exp(best).sum() - kept < gain:
            break
        kept = np.exp(best).sum()
    return {path for path, _ in sorted(looked.items(), key=lambda item: -item[1])[:nodes]}


@pytest.mark.parametrize(
    "shape", [Expand(3, 3, 8), Expand(2, 4, 6, gain=0.35)], ids=["eagle2", "opt"]
)
def test_an_expanded_tree_holds_the_most_probable_paths(shape):
    draft = drafted(DraftModel(model=MODEL, topology=shape), context())
    sizes = set()
    for row in range(len(PROMPTS)):
        fields = shape.width, shape.depth, shape.nodes, shape.gain
        assert {*paths(draft, row)} == expanded(row, *fields)
        sizes.add(max(map(len, paths(draft, row))))
    assert shape.gain == 0 or min(sizes) < shape.depth  # the gain has ended some row


def test_a_sharpened_tree_holds_the_most_probable_paths_by_sharpened_laws():
    """In rows at temperature 0 alone, whether all rows are or some."""
    shape = Expand(3, 4, 7, sharpness=4.0)
    drafter = DraftModel(model=MODEL, topology=shape, sibling_sampling="top")
    rows = range(len(PROMPTS))
    mixed = Sampling(temperature=jnp.asarray([0.0, 0.5, 2.0]))
    for sampling, factors in ((Sampling(temperature=0.0), (4, 4, 4)), (mixed, (4, 1, 1))):
        draft = drafted(drafter, context(sampling=sampling))
        for row in rows:
            assert {*paths(draft, row)} == expanded(row, 3, 4, 7, sharpened=factors[row])
    assert all(expanded(row, 3, 4, 7, sharpened=4) != expanded(row, 3, 4, 7) for row in rows)


def test_a_tree_that_lacks_no_nodes_is_verified_in_one_width():
    """``scored`` is None then, and the pass needs no branches for fewer nodes."""
    bias = np.where(np.arange(VOCAB) == 2, 0.0, -np.inf).astype(np.float32)
    banned = Sampling(temperature=0.0, logit_bias=bias).rows(len(PROMPTS))
    for shape, how, lacks in (
        (Expand(3, 3, 8), {}, False),
        (Expand(3, 3, 8, gain=0.1), {}, True),
        (Expand(3, 3, 8), {"sampling": banned}, True),
    ):
        draft = drafted(DraftModel(model=MODEL, topology=shape), context(**how))
        assert (draft.scored is not None) == lacks
        if how:  # one token may be drafted
            for row in range(len(PROMPTS)):
                assert {*paths(draft, row)} == {(2,), (2, 2), (2, 2, 2)}
                there = np.asarray(draft.tokens)[row, 1:] == 2
                assert there.tolist() == draft.scored[row, 1:].tolist()
                assert there.sum() == 3 and (np.asarray(draft.tokens)[row, 1:][~there] == -1).all()


def test_nothing_is_drafted_below_a_node_with_a_logit_that_is_no_number():
    shape, wide = Expand(2, 3, 5), jnp.zeros((len(PROMPTS), 1, VOCAB)).at[:, :, 3].set(1.0)

    def level(carry, grown, since):
        ill = jnp.where(grown.tokens[:, since:] == 3, jnp.nan, 0.0)  # below token 3, one logit
        said = jnp.broadcast_to(wide, (*ill.shape, VOCAB))
        return said.at[:, :, 0].add(ill), carry

    draft, *_ = expand.expand(shape, context(), level, None)
    for row, prompt in enumerate(PROMPTS):
        found = [path for path in paths(draft, row) if -1 not in path]
        assert found and not [path for path in found if 3 in (prompt[-1], *path[:-1])]


def families(row, siblings, depth, nodes):
    """``topology.whole_families`` by the best-first search of its authors."""
    waiting, found = [(0.0, 0, ())], []
    while waiting and len(found) < nodes:
        value, _, path = heapq.heappop(waiting)
        if len(path) == depth:
            continue
        law = said(row, path)
        for token in np.argsort(-law, kind="stable")[:siblings][: nodes - len(found)]:
            found.append((*path, int(token)))
            heapq.heappush(waiting, (value - law[token], len(found), found[-1]))
    return {*found}


@pytest.mark.parametrize(
    "sizes",
    [(3, 3, 8), (2, 4, 9), (5, 9, 22), (2, 9, 40), (VOCAB, 2, 30), (1, 4, 3), (4, 6, 3)],
)
def test_whole_families_hang_below_the_most_probable_nodes(sizes):
    """Also more than there are tokens, fewer than a node has children, and a chain."""
    draft = drafted(DraftModel(model=MODEL, topology=trees.whole_families(*sizes)), context())
    others = 0
    for row in range(len(PROMPTS)):
        wanted = families(row, *sizes)
        assert {*paths(draft, row)} == wanted and len(wanted) == sizes[2]
        others += wanted != expanded(row, VOCAB, *sizes[1:])
    assert others or sizes[0] == 1 or sizes[2] < 4  # the most probable paths are not these
    draft = drafted(
        DraftModel(model=MODEL, topology=trees.whole_families(2, 4, 9)),
        context(width=jnp.int32(2)),
    )
    assert {*paths(draft, 0)} == families(0, 2, 2, 9)  # a round of less depth


def test_a_round_of_less_depth_leaves_out_deeper_nodes_alone():
    shape = Expand(3, 3, 8)
    drafter = DraftModel(model=MODEL, topology=shape)
    narrow = drafted(drafter, context(width=jnp.int32(2)))
    for row in range(len(PROMPTS)):
        assert {*paths(narrow, row)} == expanded(row, 3, 2, 8)


def test_distinct_siblings_differ_and_laws_are_those_drawn_from():
    shape = trees.branching(4, 1)
    warm = context(sampling=Sampling(temperature=jnp.full(len(PROMPTS), 0.7)))
    draft = drafted(DraftModel(model=MODEL, topology=shape, sibling_sampling="distinct"), warm)
    for row in range(len(PROMPTS)):
        first = np.asarray(draft.tokens)[row, 1:5]
        assert len({*first.tolist()}) == 4
        for node, path in enumerate(((), *((t,) for t in first.tolist()))):
            law = np.exp(said(row, path) / 0.7)
            np.testing.assert_allclose(draft.laws[row, node], law / law.sum(), rtol=2e-5)
    assert np.asarray(draft.law)[0].tolist() == [-1, 0, 0, 0, 0, 1, 2, 3, 4]


def test_a_draft_model_picks_children_as_its_present_tree_wants_them():
    drawn = DraftModel(num_draft=3, model=MODEL)
    grown = dataclasses.replace(drawn, topology=Expand(2, 2, 3))
    assert (drawn.picks, grown.picks) == ("iid", "top")
    assert dataclasses.replace(grown, topology=trees.branching(2)).picks == "iid"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tree((0, 0)), "begin with the root"),
        (lambda: Tree((-1, 2, 1)), "node 1 has parent 2"),  # a cycle
        (lambda: Tree((-1, 0, 7)), "node 2 has parent 7"),
        (lambda: trees.from_paths([[0], [0, 1]]), "without [0, 0]"),
        (lambda: trees.from_paths([[0, 0]]), "without [0]"),
        (lambda: trees.parse("3y2"), "Accepted"),
        (lambda: trees.parse("3xx2"), "whole numbers with one x between"),
        (lambda: trees.parse("grow:3"), "is unknown"),
        (lambda: trees.parse("nowhere.json"), "nowhere.json"),
        (lambda: Expand(2, 2, 7), "nodes must be from"),
        (lambda: Expand(2, 0, 7), "at least 1"),
        (lambda: Expand(2, 2, 3, siblings=-1), "siblings must be at least 0"),
        (lambda: Expand(2, 2, 3, siblings=1, gain=0.1), "0 where gain is above 0"),
        (lambda: trees.parse("jetspec:7x2x62"), "must be from 2, the depth, to 56"),
        (lambda: trees.parse("jetspec:1x15x62"), "to 15, the number of paths"),
        (lambda: trees.parse("jetspec:0x3x4"), "children, depth and nodes must be at least 1"),
        (lambda: trees.parse("jetspec:3x3"), "takes 3 sizes"),
        (lambda: Expand(2, 2, 3, sharpness=0.5), "sharpness is a number from 1 to 1000"),
        (lambda: Expand(2, 2, 3, sharpness=1e9), "sharpness is a number from 1 to 1000"),
        (lambda: Expand(2, 2, 3, sharpness=float("nan")), "sharpness is a number from 1 to 1000"),
        (lambda: trees.parse("expand:2x2x3:gain=nan"), "gain at least 0. Accepted"),
        (lambda: trees.parse("expand:2x2x3:sharp=2"), "did you mean 'sharpness'?"),
        (lambda: trees.parse("expand:2x2x3:gain=much"), "gain='much' is not a number. Accepted"),
        (lambda: trees.parse("expand:2x2x3:gain=0.1:branch=0.3"), "is not a number. Accepted"),
        (lambda: trees.parse("expand:2x2x3:"), "'' is no setting of 'expand'"),
        (lambda: trees.parse("expand:2x2x3,gain=0.1"), "expand and jetspec alone, after a colon"),
        (lambda: trees.parse("exapnd:2x2x3:gain=0.1"), "expand and jetspec alone, after a colon"),
        (lambda: trees.parse("chain:3:gain=1"), "sizes of expand and jetspec alone, after"),
        (lambda: trees.parse("jetspec:3x5x20:gain=1"), "0 where gain is above 0"),
        (lambda: Suffix(topology=Expand(2, 2, 3, gain=0.1)), "without further settings"),
        (lambda: trees.chain(0), "at least one token"),
        (lambda: trees.parse("64x64x64x64"), "at most 1024"),  # before it is built
        (lambda: trees.parse("chain:100000000"), "at most 1024"),
        (lambda: trees.parse("expand:10000x4x24"), "at most 1024"),
        (lambda: trees.parse("expand:1000x2x1000000"), "has 1000001 nodes; at most 1024"),
        (lambda: trees.parse("expand:1000000x1x3"), "has 1000001 nodes; at most 1024"),
        (lambda: Expand(2, 2, 3, siblings=2000), "has 2001 nodes; at most 1024"),
        (lambda: Expand(2.5, 7, 7), "Expand, width: 2.5 is no whole number"),
        (lambda: Expand(2, "3", 4), "Expand, depth: '3' is no whole number"),
        (lambda: Expand(2, 3, 4.0), "Expand, nodes: 4.0 is no whole number"),
        (lambda: Expand(2, 3, 4, siblings=True), "Expand, siblings: True is no whole number"),
        (lambda: Expand(2, 3, 4, sharpness="2"), "Expand, sharpness: '2' is no number"),
        (lambda: Expand(2, 3, 4, gain=10**400), "Expand, gain: 1000"),
        (lambda: trees.whole_families(3, 5, 20.0), "nodes: 20.0 is no whole number"),
        (lambda: trees.Beams("2", 3), "Beams, width: '2' is no whole number"),
        (lambda: Follow(2.5, 3), "Follow, depth: 2.5 is no whole number"),
        (
            lambda: DraftModel(model=MODEL, topology=Expand(2, 2, 3), sibling_sampling="iid"),
            "would bias",
        ),
        (
            lambda: DraftModel(model=MODEL, topology=Tree((-1, 0)), sibling_sampling="best"),
            "unknown",
        ),
    ],
)
def test_what_is_no_tree_is_refused_in_words(make, words):
    with pytest.raises(ValueError) as refusal:
        make()
    assert words in str(refusal.value)


def test_words_and_files_name_trees(tmp_path):
    assert trees.parse("2x2") == Tree((-1, 0, 0, 1, 1, 2, 2)) == trees.branching(2, 2)
    assert trees.parse("chain:2") == Tree((-1, 0, 1)) and trees.chain(2).is_chain
    assert trees.parse("expand:3x2x4") == Expand(3, 2, 4)
    assert trees.parse("jetspec:3x5x20") == Expand(6, 5, 20, siblings=3)
    assert trees.parse("jetspec:7x15x500").depth == 15  # 72 families, of which one is the root's
    assert trees.parse("jetspec:7x15x10") == Expand(1, 2, 10, siblings=7)
    for text in ("expand:3x2x4", "jetspec:7x9x62", "jetspec:1x3x3", "jetspec:7x1x5"):
        assert str(trees.parse(text)) == text
    text = "expand:3x2x4:gain=0.1,branch=0.25,sharpness=2"
    assert trees.parse(text) == Expand(3, 2, 4, gain=0.1, branch=0.25, sharpness=2.0)
    assert trees.parse("jetspec:3x5x20:sharpness=1.5") == Expand(
        6, 5, 20, siblings=3, sharpness=1.5
    )
    for shape in (
        trees.parse(text),
        trees.parse("jetspec:3x5x20:sharpness=1.5"),
        Expand(3, 2, 4, gain=1e-5, sharpness=np.float32(2)),
    ):
        assert trees.parse(str(shape)) == shape
    unwritten = Expand(5, 2, 6, siblings=3)
    assert str(unwritten) == repr(unwritten)
    assert trees.chains(2, 2) == Tree((-1, 0, 0, 1, 2))
    file = tmp_path / "tree.json"
    for given in ([-1, 0, 0, 1], [[0], [1], [0, 0]]):
        file.write_text(json.dumps(given))
        assert trees.parse(str(file)) == Tree((-1, 0, 0, 1))
    file.write_text('{"parents": [-1, 0]}')
    with pytest.raises(ValueError, match="no list"):
        trees.parse(str(file))
    # whatever the order, nodes are renumbered level by level, siblings side by side
    assert Tree((-1, 0, 1, 0, 3)) == Tree((-1, 0, 0, 1, 2))


# ----------------------------------------------------------------------- how often ranks are right


@pytest.mark.parametrize(
    "drafter",
    [NGram(num_draft=2), NGram(topology=trees.chains(2, 3)), SLEM(num_draft=2, model=MODEL)],
    ids=lambda drafter: f"{drafter.name}-{drafter.num_draft}",
)
def test_ranks_of_a_drafter_that_ranks_nothing_are_refused(drafter):
    with pytest.raises(ValueError, match=f"{drafter.name} has no choices to rank"):
        rank_counts.count_ranks(MODEL, drafter, {}, context().tokens, context().length)


def test_measured_ranks_are_those_of_the_true_tokens():
    drafter = DraftModel(num_draft=2, model=MODEL)
    where = context()
    found = rank_counts.count_ranks(
        MODEL,
        drafter,
        {"target": PARAMS, "drafter": WEIGHTS},
        where.tokens,
        where.length,
        max_new_tokens=5,
        depth=2,
        ranks=VOCAB,
    )
    out = specjax.decode(
        MODEL,
        specjax.drafters.Plain(),
        {"target": PARAMS, "drafter": None},
        where.tokens,
        where.length,
        key=jax.random.key(0),
        max_new_tokens=5,
    )
    hits, trials = np.zeros((2, VOCAB), int), np.zeros(2, int)
    for row, prompt in enumerate(PROMPTS):
        text = np.asarray(out.tokens)[row, len(prompt) : len(prompt) + 5].tolist()
        for at in range(1, 5):  # the first token is no round's
            for depth in range(2):
                if at + depth < 5:
                    order = np.argsort(-said(row, text[: at + depth]), kind="stable")
                    hits[depth, order.tolist().index(text[at + depth])] += 1
                    trials[depth] += 1
    assert (found.trials == trials).all() and (found.hits == hits).all()
    assert isinstance(trees.Follow(2, 3), Follow) and found.hits.sum() == trials.sum()
