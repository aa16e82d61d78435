"""Token recycling against a replay of its table in NumPy, round by round, alone and with others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_rounds import advanced
from registry import cases
from starts import unanswered
from toys import bag

from specjax import Sampling
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Adaptive, Recycling, SuffixMatch, recycling, shared_round, union

VOCAB = 13
MODEL, PARAMS = bag(VOCAB, 3)
CASES = cases(MODEL, PARAMS)
PROMPTS = np.asarray([[1, 2, 3, 1, 2], [4, 5, 6, 0, 0]], np.int32)
LENGTHS = np.asarray([5, 3], np.int32)


def begun(drafter, weights=None):
    request, capacity = prepare_inputs(
        MODEL, drafter, PROMPTS, LENGTHS, jax.random.key(0), 24, Sampling(), 64, ()
    )
    params = {"target": PARAMS, "drafter": weights}
    return params, unanswered(MODEL, drafter, "auto", capacity, params, request)


def replayed(drafter, most=8):
    """Rounds in which the table or the draft is not that of a replay in NumPy."""
    params, state = begun(drafter)
    table = np.full((2, VOCAB, drafter.width), -1)
    for row in range(2 if drafter.reads_prompt else 0):
        text = PROMPTS[row, : LENGTHS[row]].tolist()
        for token, follower in zip(text, text[1:], strict=False):
            said = [follower, *(t for t in table[row, token] if t != follower)]
            table[row, token] = said[: drafter.width]
    wrong = int((table != np.asarray(state.drafter_state)).any())
    for _ in range(most):
        live = np.asarray(state.budget) > 0
        judged, state = advanced(MODEL, drafter, "auto", params, state)
        tokens, scored = np.asarray(judged.draft.tokens), np.asarray(judged.draft.scored)
        tree = drafter.topology
        for row in np.flatnonzero(live):
            for node in range(1, tree.num_nodes):
                above = tree.parents[node]
                said = table[row, tokens[row, above], tree.ranks[node]]
                said = said if scored[row, above] else -1
                wrong += (said >= 0) != scored[row, node]
                wrong += said >= 0 and said != tokens[row, node]
        logits = np.asarray(judged.scores.logits)
        for row in np.flatnonzero(live):
            for node in np.flatnonzero(scored[row]):  # the last of a token is kept
                best = np.argsort(-logits[row, node], kind="stable")[: drafter.width]
                table[row, tokens[row, node]] = best
        wrong += (np.asarray(state.drafter_state) != table).any()
    return wrong


def test_recycling_keeps_the_best_successors_of_every_verified_node():
    assert replayed(CASES["recycling"][0]) == 0
    assert replayed(CASES["recycling chain"][0]) == 0


def among_others(name, cut=None, most=8):
    """Rounds in which the table of ``recycling`` in a combinator is not that of a replay of its own
    nodes in NumPy; how many of its nodes went through the target, and how many were left out.
    ``cut``: the policy of an ``Adaptive`` around the combinator."""
    whole, weights, _ = CASES[name]
    drafter, of = whole, lambda held: held
    if cut:
        whole, weights, of = Adaptive(drafter, cut), {"inner": weights}, lambda held: held.inner
    params, state = begun(whole, weights)
    if isinstance(drafter, union.Union):
        place = [type(d) for d in drafter.drafters].index(Recycling)
        part, pick = drafter.drafters[place], lambda held: held[place]
        first = 1 + sum(d.num_draft for d in drafter.drafters[:place])
        own = lambda proposed: proposed.drafts[place]  # noqa: E731
    else:
        part, pick, first = drafter.inner, lambda held: held, 1
        own = lambda proposed: proposed.draft  # noqa: E731
    nodes = [0, *range(first, first + part.num_draft)]
    table = np.array(pick(of(state.drafter_state).inner))
    wrong = seen = left_out = 0
    for _ in range(most):
        live = np.asarray(state.budget) > 0
        judged, state = advanced(MODEL, whole, "auto", params, state)
        tokens = np.asarray(own(of(judged.proposed)).tokens)
        scored = np.asarray(judged.draft.scored)[:, nodes] & (tokens >= 0)
        inside = np.asarray(judged.draft.tokens)[:, nodes] == tokens
        logits = np.asarray(judged.scores.logits)[:, nodes]
        for row in np.flatnonzero(live):
            wrong += (scored[row] & ~inside[row]).any()
            seen, left_out = seen + scored[row, 1:].sum(), left_out + (~scored[row, 1:]).sum()
            for node in np.flatnonzero(scored[row]):
                best = np.argsort(-logits[row, node], kind="stable")[: part.width]
                table[row, tokens[row, node]] = best
        wrong += (np.asarray(pick(of(state.drafter_state).inner)) != table).any()
    return wrong, seen, left_out


@pytest.mark.parametrize("name", ["fallback recycling", "union of tables", "hybrid recycling"])
def test_with_other_drafters_recycling_keeps_what_the_target_said_of_its_own_nodes(name):
    wrong, seen, left_out = among_others(name)
    assert wrong == 0 and seen > 5 and left_out > 0


@pytest.mark.parametrize("name", ["fallback recycling", "union of tables"])
def test_what_a_policy_cuts_off_the_whole_is_not_taken_for_seen(name):
    wrong, seen, left_out = among_others(name, SuffixMatch(offset=1.0))
    assert wrong == 0 and seen > 2 and left_out > 5


def test_fault_the_scores_of_other_drafters_nodes(monkeypatch):
    def first(scores, nodes, features=None):
        return shared_round.scores_of(scores, np.arange(len(nodes)), features)

    monkeypatch.setattr(union, "scores_of", first)
    advanced.clear_cache()
    assert among_others("union of tables")[0] > 0
    advanced.clear_cache()


def test_fault_a_table_of_accepted_tokens_alone():
    @dataclasses.dataclass(frozen=True)
    class Accepted(Recycling):
        def observe(self, params, target_params, state, segment):
            if segment.round is not None:
                draft, verdict, best = segment.round
                index = jnp.arange(draft.num_nodes)
                steps = jnp.arange(verdict.path.shape[1]) <= verdict.count[:, None]
                kept = (verdict.path[:, :, None] == index) & steps[:, :, None]
                kept = draft.scored & jnp.any(kept, axis=1)
                draft = dataclasses.replace(draft, scored=kept)
                segment = dataclasses.replace(segment, round=(draft, verdict, best))
            return super().observe(params, target_params, state, segment)

    drafter = CASES["recycling"][0]
    assert replayed(Accepted(vocab_size=VOCAB, topology=drafter.topology)) > 0


def test_the_published_tree_has_its_published_levels():
    tree = recycling.published_tree()
    assert [tree.depths.count(d) for d in range(7)] == [1, 8, 21, 25, 15, 8, 3]
    assert tree.depth == 6 and max(tree.ranks) == 7
