"""A trace is what decoding does: same text, and figures that bear out each verdict."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asking import flat
from interruptions import interrupting
from registry import cases
from starts import unanswered
from toys import bag

import specjax
from specjax import Sampling, acceptance
from specjax.decoding import loop, reference
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.state import result
from specjax.drafters import Suffix, text_table
from specjax.drafters.datastore import build
from specjax.text import Retrieval, Session
from specjax.text.session import fingerprint
from specjax.text.token_display import BYTES, SPECIAL, Spelled, speller
from specjax.tracing import explain, html_page, record
from specjax.types import Rule

pytest_plugins = ["pairs"]

VOCAB, NUM, ROWS = 7, 10, 32
MODEL, PARAMS = bag(VOCAB, 3, features=8)
CASES = cases(MODEL, PARAMS)
WARM = Sampling(temperature=np.float32(0.9), repetition_penalty=1.2)
PROMPT = [1, 0, 2, 1, 0]


def begin(name, sampling, rule):
    """What ``record`` takes, of ``ROWS`` equal prompts with keys of their own."""
    drafter, weights, _ = CASES[name]
    params = {"target": PARAMS, "drafter": weights}
    prompts, lengths = np.tile(np.int32(PROMPT), (ROWS, 1)), np.full(ROWS, len(PROMPT))
    request = (MODEL, drafter, prompts, lengths, jax.random.key(5), NUM, sampling, None, ())
    request, capacity = prepare_inputs(*request)
    objects = MODEL, drafter, rule
    return *objects, params, unanswered(*objects, capacity, params, request)


# every shape of draft and every rule; those marked True beside the text of the compiled loop
SHAPES = {
    "plain": ("delta", WARM, False),
    "draft": ("block", WARM, False),
    "ngram": ("delta", WARM, False),
    "adaptive ngram": ("auto", Sampling(), True),
    "draft tree iid": ("kseq", WARM, False),
    "draft tree hub": ("hub", WARM, False),
    "tree iid": ("approximate-typical", WARM, False),
    "tree distinct": ("traversal", WARM, False),
    "tree per row": ("auto", Sampling(), False),
    "passengers": ("rejection", WARM, False),
    "silent": ("rejection", WARM, False),
    "merged": ("rejection", WARM, True),
}
SEEN = {"passengers": "passenger", "silent": "empty", "ngram": "left out"}
SEEN |= {"adaptive ngram": "left out", "plain": "root"}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_of_draft_is_traced_as_it_is_decoded(name, quick_compilation):
    rule, sampling, beside = SHAPES[name]
    given = begin(name, sampling, rule)
    found = [one for one, _ in record.record_rounds(*given)]
    before = list(PROMPT)
    for index, one in enumerate(found):
        agrees_with_the_model(one, before, sampling, laws=index < 2)
        before += one.emitted
    assert len(before) == len(PROMPT) + NUM and found[-1].reason == "length"
    assert SEEN.get(name, "accepted") in {node.status for one in found for node in one.nodes}
    drawn = [node.q for one in found for node in one.nodes if node.q is not None]
    assert bool(drawn) == (sampling is WARM and name not in ("plain", "ngram"))
    if beside:
        decoded = result(loop.jit_burst(*given[:3], None, *given[3:]))
        assert decoded.tokens[0, : len(before)].tolist() == before
        drafted = sum((one.from_draft for one in found), [])
        assert decoded.from_draft[0, len(PROMPT) : len(before)].tolist() == drafted
        assert len(found) == int(decoded.stats.rounds[0])


def agrees_with_the_model(one, before, sampling, laws):
    """The path is what was emitted; ``laws``: probabilities are those of a pass without cache."""
    nodes = one.nodes
    kept = [n for n, node in enumerate(nodes) if node.status in ("accepted", "cut")]
    assert kept == sorted(one.path[1:])
    unseen = [n for n, node in enumerate(nodes) if nodes[node.parent].status == "beyond" and n]
    assert not {nodes[n].status for n in unseen} & {"accepted", "rejected"}
    emitted = [nodes[n].token for n in one.path[1:]] + [one.token] * (one.token >= 0)
    assert one.emitted == emitted[: len(one.emitted)]
    assert [bool(node.top) for node in nodes] == [n in one.path for n in range(len(nodes))]

    def law(node):
        path = []
        while node > 0:
            path.insert(0, nodes[node].token)
            node = nodes[node].parent
        tokens = np.int32([before + path])
        if sampling.greedy:
            return jax.nn.softmax(reference.logits(MODEL, PARAMS, jnp.asarray(tokens))[0, -1])
        return reference.next_law(MODEL, PARAMS, tokens, sampling)[0]

    for node in nodes[1:4] if laws else ():
        if node.p is not None:
            np.testing.assert_allclose(node.p, law(node.parent)[node.token], atol=1e-5)
    for n in one.path[-1:] if laws else ():
        np.testing.assert_allclose([p for _, p in nodes[n].top], np.sort(law(n))[:-6:-1], atol=1e-5)
        np.testing.assert_allclose(one.p, law(n)[one.token], atol=1e-5)


# what the sentences of a rule say: of p, q and evidence, whether a node passes
PASSES = {
    ("merged", "rejection"): lambda p, q, u, left: u * q < left,
    ("draft tree iid", "kseq"): lambda p, q, u, rho: u * rho * q < p,
    ("tree iid", "approximate-typical"): lambda p, q, bound: p > bound,
}


@pytest.mark.parametrize(("name", "rule"), PASSES)
def test_the_numbers_that_a_rule_gives_decide_as_it_did(name, rule, quick_compilation):
    *objects, params, state = begin(name, WARM, rule)
    fates = Counter()
    for _ in range(6):
        live = np.flatnonzero(state.budget > 0)
        state, seen = record.run_recorded_round(*objects, params, state)
        passes = np.asarray(PASSES[name, rule](seen.p, seen.q, **seen.evidence))
        for row in live:
            path = seen.verdict.path[row, : int(seen.verdict.count[row]) + 1].tolist()
            for above in path:
                below = np.flatnonzero(seen.acceptable[row] & (seen.draft.parent[row] == above))
                if rule == "kseq" and len({*seen.draft.tokens[row, below].tolist()}) < len(below):
                    continue  # of equal siblings the one on the path may be another's twin
                for n in below:
                    fates[n in path, bool(passes[row, n])] += 1
                    if n in path:
                        break  # its later siblings were not looked at
    assert fates[True, True] > 2 and not fates[True, False]
    assert fates[False, False] > 2
    # of several that are typical the longest path is kept
    assert rule == "approximate-typical" or not fates[False, True]


def test_a_sibling_drawn_without_replacement_has_the_q_that_was_left(quick_compilation):
    (one, _), *_ = record.record_rounds(*begin("tree distinct", WARM, "traversal"))
    siblings = [node for node in one.nodes if node.parent == 0]
    law = reference.next_law(MODEL, CASES["tree distinct"][1], np.int32([PROMPT]), WARM)[0]
    first, second = (law[node.token] for node in siblings)
    np.testing.assert_allclose(siblings[0].q, first, rtol=1e-4)
    np.testing.assert_allclose(siblings[1].q, second / (1 - first), rtol=1e-4)


def test_a_place_for_which_the_law_had_no_token_is_no_passenger(quick_compilation):
    one_token = dataclasses.replace(WARM, top_k=1)
    (one, _), *_ = record.record_rounds(*begin("tree distinct", one_token, "traversal"))
    absent = [node for node in one.nodes if node.token < 0]
    assert absent and {node.status for node in absent} == {"left out"}
    assert {node.why for node in absent if node.parent == 0} == {
        "the drafter's law had no token left to propose here"
    }
    assert "passenger" not in {node.status for node in one.nodes}


class Plainspoken(Rule):
    """A rule without words of its own."""

    name, lossless = "plainspoken", True

    def __call__(self, params, draft, target_law, draft_law, key):
        raise NotImplementedError


def test_a_rule_that_says_nothing_of_itself_has_general_words():
    fields = {"p": 0.25, "q": 0.5, "said": "x", "share": "p"}
    said = {case: explain.sentence(Plainspoken(), case, **fields) for case in explain.WHY}
    assert said["accepted"] == "the rule kept it (p 0.25, q 0.5)"
    assert len({*said.values()}) == 4
    for rule in acceptance.RULES.values():
        numbers = dict(u=0.5, left=0.5, rho=1.5, bound=0.1, gap=1.0, rank=2.0, loss=3.0)
        assert all(explain.sentence(rule, case, **fields, **numbers) for case in explain.WHY)


# ------------------------------------------------- text


SETTINGS = {
    "draft": {"num_draft": 3},
    "draft, sampled": {"num_draft": 3, "temperature": 1.0, "seed": 7},
}


def settings(what, pair):
    """The draft model is the target itself: greedy drafts are all right."""
    return {"drafter": pair[0], "max_new_tokens": 16} | SETTINGS[what]


@pytest.mark.parametrize("what", SETTINGS)
def test_the_text_is_that_of_generate(what, pair, quick_compilation):
    options = settings(what, pair)
    wanted = specjax.generate(pair[0], "def f(x):", **flat(**options))
    found = specjax.trace(pair[0], "def f(x):", **flat(**options))
    assert found.text == wanted.text and found.tokens == wanted.tokens[0].tolist()
    assert found.tau == wanted.stats.tau and found.reason == wanted.reasons[0]
    assert found.prompt == "def f(x):" and found.lossless and not found.approximate
    assert ("seed" in found.settings) == ("sampled" in what)


def test_a_stop_string_ends_the_trace_where_it_ends_the_text(pair, quick_compilation):
    options = settings("draft", pair)
    whole = specjax.generate(pair[0], "def f(x):", **flat(**options))
    options["stop_strings"] = pair[0].tokenizer.decode(whole.tokens[0][5:6])
    wanted = specjax.generate(pair[0], "def f(x):", **flat(**options))
    found = specjax.trace(pair[0], "def f(x):", **flat(**options))
    assert found.text == wanted.text and found.tokens == wanted.tokens[0].tolist()
    assert found.reason == "stop" and "cut" in [node.status for node in found.rounds[-1].nodes]


def test_rounds_and_ctrl_c_bound_a_trace(pair, monkeypatch, quick_compilation):
    options = settings("draft", pair)
    whole = specjax.trace(pair[0], "def f(x):", **flat(**options))
    found = specjax.trace(pair[0], "def f(x):", **flat(rounds=3, **options))
    assert found.rounds == whole.rounds[:4] and found.reason == "" and not found.interrupted
    advance = interrupting(record.run_recorded_round, 3)
    monkeypatch.setattr(record, "run_recorded_round", advance)
    found = specjax.trace(pair[0], "def f(x):", **flat(**options))
    assert found.rounds == whole.rounds[:3] and found.interrupted


def test_without_a_tokenizer_ids_stand_for_text_and_ctrl_c_may_come_before_a_round_ends(
    monkeypatch, quick_compilation
):
    lm = specjax.LM.of(MODEL, PARAMS)
    session = Session(lm, Suffix(num_draft=2), 256)
    options = dict(drafter=session, max_new_tokens=4)
    found = specjax.trace(lm, PROMPT, **options)
    assert found.prompt == "1 0 2 1 0" and found.reason == "length" and len(found.tokens) == 4
    assert found.text == "".join(f" {token}" for token in found.tokens)
    assert found.page_data()["tokens"][found.tokens[0]] == [str(found.tokens[0]), SPECIAL]
    held = text_table.texts(session.table)
    assert held == [PROMPT[-session.drafter.longest :] + found.tokens]

    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(record, "run_recorded_round", interrupted)
    found = specjax.trace(lm, PROMPT, **options)
    assert found.interrupted and found.lossless and len(found.rounds) == 1  # the prompt's pass
    assert len(text_table.texts(session.table)) == 1
    assert "<title>specjax trace: Readable, suffix" in html_page.page(found.page_data())


def test_a_datastore_is_asked_before_each_round(tmp_path, quick_compilation):
    lm = specjax.LM.of(MODEL, PARAMS)
    plain = specjax.generate(lm, PROMPT, drafter="none", max_new_tokens=NUM)
    text = PROMPT + plain.tokens[0].tolist()
    build(tmp_path / "store", [text], fingerprint(lm))
    store = Retrieval(lm, tmp_path / "store", Suffix(num_draft=2))
    found = specjax.trace(lm, PROMPT, drafter=store, max_new_tokens=NUM)
    assert found.tokens == plain.tokens[0].tolist() and len(found.rounds) < NUM / 2


def test_what_cannot_be_traced_is_refused(pair):
    for rounds_asked in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="rounds=.*at least 1"):
            specjax.trace(pair[0], "a", rounds=rounds_asked)
    with pytest.raises(ValueError, match="2 rows.*one prompt"):
        specjax.trace(pair[0], ["a", "b"], drafter=None)
    with pytest.raises(ValueError, match="2 rows.*num_samples=1"):
        specjax.trace(pair[0], "a", drafter=None, num_samples=2)


def test_tokens_that_are_no_text_are_spelled_in_bytes_and_special_ones_by_name(pair):
    tokenizer = pair[0].tokenizer
    spell = speller(tokenizer)
    ids = tokenizer.encode(" x€\n")
    assert (
        b"".join(
            bytes.fromhex(s.text) if s.kind == BYTES else s.text.encode() for s in map(spell, ids)
        )
        == " x€\n".encode()
    )
    half = next(i for i, data in tokenizer.token_bytes.items() if data == b"\xe2")
    assert spell(half) == Spelled("E2", BYTES) and str(spell(half)) == "‹E2›"
    (special,) = sorted(tokenizer.added)[:1]
    assert spell(special) == Spelled(tokenizer.vocabulary[special], SPECIAL)
    assert spell(10**6).kind == SPECIAL
    assert str(Spelled("\u202e\n")) == "'\\u202e\\n'"
