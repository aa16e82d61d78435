"""LLMCad's tree against a replay in NumPy: which branches open, where it stops, its threshold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import MODEL, PARAMS, VOCAB
from test_cascade import CASES, WARM, rounds_of
from test_sampled_faults import faulty
from toys import cache_of

from specjax import Sampling, trees
from specjax.acceptance.walk import eligible
from specjax.drafters import Cascade, DraftModel, LLMCad, NGram
from specjax.drafters.confidence_stop import CumulativeStop

GREEDY = Sampling()


@jax.jit
def law_below(weights, tokens, length, path):
    """The draft model's softmax below a path, int32 ``[B, K]`` after the root, from scratch."""
    cache = cache_of(MODEL, weights, tokens, length - 1)
    draft = trees.ops.Draft(
        start=length - 1,
        tokens=path,
        topology=trees.chain_parents(path.shape[1] - 1),
    )
    return jax.nn.softmax(MODEL.verify(weights, cache, draft).logits[:, -1])


def replayed(weights, state, row, shape, threshold):
    """The paths of the tree of a row to their confidences, by the paper's rules."""
    tokens, length = state.tokens[row : row + 1], state.length[row : row + 1]
    root = int(state.tokens[row, int(length[0]) - 1])
    found, beams = {}, {(): 1.0}
    for _ in range(shape.depth):
        fresh = {}
        for path, sure in beams.items():
            given = np.asarray([[root, *path]], np.int32)
            law = np.asarray(law_below(weights, tokens, length, given))[0]
            order = np.argsort(-law, kind="stable")[: shape.width]
            for rank, token in enumerate(order):
                if rank == 0 or law[token] >= shape.branch:
                    fresh[*path, int(token)] = sure * law[token]
        found |= fresh
        if max(fresh.values()) < threshold:
            break
        best = sorted(fresh, key=lambda path: -fresh[path])[: shape.width]
        beams = {path: fresh[path] for path in best}
    best = sorted(found, key=lambda path: -found[path])[: shape.nodes]
    return {path: found[path] for path in best}


def paths_of(draft, row):
    """The paths of the candidates of a row."""
    able = np.asarray(eligible(draft))[row]
    parents, tokens = np.asarray(draft.parent)[row], np.asarray(draft.tokens)[row]
    paths = {0: ()}
    for node in np.flatnonzero(able):
        paths[node] = (*paths[parents[node]], int(tokens[node]))
    return {*paths.values()} - {()}


def test_the_tree_opens_branches_by_confidence_and_stops_where_no_branch_is_sure():
    drafter, weights, _ = CASES["llmcad"]
    stopped = whole = several = 0
    for state, judged in rounds_of(drafter, weights, sampling=GREEDY, most=4):
        for row in np.flatnonzero(np.asarray(state.budget) > 0):
            least = float(state.drafter_state.threshold[row])
            wanted = replayed(weights, state, row, drafter.topology, least)
            assert paths_of(judged.draft, row) == {*wanted}
            deepest = max(map(len, wanted))
            stopped += deepest < drafter.depth
            whole += deepest == drafter.depth
            several += len({path[0] for path in wanted}) > 1
    assert stopped > 3 and whole > 3 and several > 3


def test_the_threshold_follows_the_deepest_branch_and_what_was_accepted():
    drafter, weights, _ = CASES["llmcad"]
    before, changed = None, 0
    for state, judged in rounds_of(drafter, weights, sampling=GREEDY):
        if before is not None:
            np.testing.assert_allclose(state.drafter_state.threshold, before, rtol=1e-6)
        depths = np.asarray(trees.depths(judged.draft))
        offered = np.where(np.asarray(eligible(judged.draft)), depths, 0).max(axis=1)
        live = np.asarray(state.budget) > 0
        # the budget may cut what is committed
        accepted = np.minimum(np.asarray(judged.verdict.count), np.asarray(state.budget) - 1)
        old = np.asarray(state.drafter_state.threshold)
        right = accepted == offered
        new = np.where(right, old / 2, (offered - accepted) / np.maximum(offered, 1))
        low = drafter.stop.lowest
        before = np.where(live & (offered > 0), np.clip(new, low, 1 - low), old)
        changed += (before != old).sum()
    assert changed > 20


@pytest.mark.parametrize("name", ["llmcad chain", "llmcad tree"])
def test_in_a_static_tree_nothing_hangs_below_a_node_that_is_unsure(name):
    drafter, weights, _ = CASES[name]
    ended = 0
    for state, judged in rounds_of(drafter, weights, sampling=WARM, most=4):
        draft, parents = judged.draft, drafter.topology.parents
        able, root = np.asarray(eligible(draft)), np.asarray(state.length) - 1
        for row in np.flatnonzero(np.asarray(state.budget) > 0):
            given = state.tokens[row : row + 1], state.length[row : row + 1]
            least = float(state.drafter_state.threshold[row])
            sure, paths = {}, {0: [int(state.tokens[row, root[row]])]}
            for node in range(draft.num_nodes):
                above = parents[node]
                if above >= 0:
                    kept = able[row, above] if above else True
                    known = kept and (above == 0 or sure[parents[above]] >= least)
                    assert able[row, node] == known
                    ended += not known
                    paths[node] = [*paths[above], int(draft.tokens[row, node])]
                law = law_below(weights, *given, np.asarray([paths[node]], np.int32))
                sure[node] = float(law.max()) * (sure[above] if above >= 0 else 1.0)
    assert ended > 3


@dataclasses.dataclass(frozen=True)
class DropsWhatItDrew(LLMCad):
    """Ends a chain before the first token whose own probability is below the threshold."""

    def draft_step(self, params, target_params, state, context):
        draft, state = super().draft_step(params, target_params, state, context)
        said = jnp.take_along_axis(draft.laws, draft.tokens[:, 1:, None], axis=2)[..., 0]
        sure = jnp.cumsum(said < 0.3, axis=1) == 0
        return trees.limit_depth(draft, jnp.sum(sure, axis=1)), state


def test_fault_a_draft_that_leaves_out_a_token_because_of_what_it_is():
    from test_sampled import CASES as SAMPLED
    from test_sampled import MODEL as SMALL
    from test_sampled import exact, lawful

    drafter = DropsWhatItDrew(model=SMALL, topology=trees.chain(2))
    assert not lawful(faulty(drafter, SAMPLED["draft"][1], "rejection"), exact("warm"))


def test_settings_that_no_tree_has_are_refused():
    assert LLMCad(model=MODEL).topology.branch == 0.3 and LLMCad(model=MODEL).depth == 8
    with pytest.raises(ValueError, match="branch is a probability"):
        trees.Expand(2, 3, 5, branch=1.5)
    with pytest.raises(ValueError, match="drafts in a way of its own"):
        Cascade(LLMCad(model=MODEL, topology=trees.chain(3)), NGram())
    with pytest.raises(ValueError, match="threshold=0"):
        LLMCad(model=MODEL, stop=CumulativeStop(threshold=0.0))
    assert isinstance(LLMCad(model=MODEL), DraftModel) and PARAMS["embed"].shape[0] == VOCAB
