"""SWIFT: sets of skipped sublayers that are searched between requests."""

import json
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from test_self_draft import LAYERS, model

import specjax
from specjax.drafters import SelfDraft
from specjax.drafters.confidence_stop import ConfidenceStop
from specjax.text import Swift
from specjax.text.drafter_names import named

pytestmark = pytest.mark.usefixtures("quick_compilation")
PROMPTS = [[5, 6, 7, 8, 9], [3, 1], [60, 2, 2]]
SETTINGS = dict(num_draft=3, window=8, context=16, tries=3, bayesian_every=None)


@pytest.fixture(scope="module")
def lm():
    """A model whose third layer adds next to nothing."""
    target, params = model("llama")

    flat = []
    for path, x in nnx.to_flat_state(params):
        words = [str(word) for word in path]
        silent = words[:2] == ["blocks", "2"] and words[3] in ("o", "down")
        flat.append((path, jax.tree.map(lambda a: 1e-4 * a, x) if silent else x))
    params = nnx.from_flat_state(flat)
    return specjax.LM.of(type("Unseen", (type(target),), {})(target.config), params)


def answers(lm, drafter, **settings):
    return [
        specjax.generate(lm, prompt, drafter=drafter, max_new_tokens=12, stop=(), **settings)
        for prompt in PROMPTS
    ]


@pytest.mark.usefixtures("one_trace")
def test_the_set_changes_between_requests_and_neither_texts_nor_programs_do(lm):
    session = Swift(lm, share=0.5, enough=1.0, **SETTINGS)
    start, seen = session.skip, []
    for one in answers(lm, session):
        text = np.concatenate([one.prompts[0], one.tokens[0]])[None]
        said = np.argmax(specjax.decoding.reference.logits(lm.target, lm.params, text), axis=-1)
        np.testing.assert_array_equal(one.tokens[0], said[0, len(one.prompts[0]) - 1 : -1])
        seen.append(one)
    assert len(session.tried) == 9 and session.skip != start
    scores = [score for _, score in session.tried]
    assert session.score == max(scores) > 0
    assert session.skip == session.tried[int(np.argmax(scores))][0]
    assert all(len({*skip}) == session.size == 2 for skip, _ in session.tried)
    assert all(name.endswith((".1", ".2")) for skip, _ in session.tried for name in skip)
    prompt, tokens = seen[0].prompts[0], seen[0].tokens[0]
    assert session.matchness(prompt, tokens, ()) == 1  # the whole target agrees with itself
    silent = session.matchness(prompt, tokens, ("attention.2", "mlp.2"))
    assert silent == 1 > session.matchness(prompt, tokens, ("attention.0", "mlp.1"))


def test_matchness_is_what_the_set_really_drafts(lm):
    """With one drafted token a round, whose prefix is the target's; the last of a window's."""
    session, skip = Swift(lm, **(SETTINGS | dict(window=1))), ("mlp.1",)
    drafter = SelfDraft(num_draft=1, target=lm.target, skip=skip)
    out = answers(lm, drafter)[0]
    prompt, tokens = out.prompts[0], out.tokens[0]
    right = [
        session.matchness(np.concatenate([prompt, tokens[:i]]), tokens[i:], skip)
        for i in range(len(tokens) - 1)
    ]
    # a round whose draft is right skips the next position
    place = accepted = 0
    while place < len(tokens) - 1:
        accepted += right[place] == 1
        place += 1 + int(right[place])
    assert accepted == int(np.sum(out.stats.accepted))


def test_fault_a_candidate_that_is_kept_though_it_is_worse_is_seen(lm, monkeypatch):
    def run(**wrong):
        scores = iter([0.5, 0.2, 0.9, 0.3, 0.1, 0.4])
        monkeypatch.setattr(Swift, "_judge", lambda *_: lambda skip: next(scores))
        for name, value in wrong.items():
            monkeypatch.setattr(Swift, name, value, raising=False)
        session = Swift(lm, **SETTINGS)
        for _ in range(2):
            session.add([1], list(range(8)))
        return session.skip == session.tried[2][0]

    assert run()
    fixed = property(lambda self: 0.0, lambda self, value: None)
    assert not run(score=fixed)


def test_the_search_ends_and_short_answers_are_left_out(lm, monkeypatch):
    scores = iter([0.5, 0.95] + [0.1] * 30)
    monkeypatch.setattr(Swift, "_judge", lambda *_: lambda skip: next(scores))
    enough = Swift(lm, **SETTINGS)
    enough.add([1], list(range(7)))
    assert not enough.tried
    for _ in range(2):
        enough.add([1], list(range(8)))
    assert enough.finished and len(enough.tried) == 2
    tired = Swift(lm, patience=4, **SETTINGS)
    bounded = Swift(lm, most=4, **SETTINGS)
    for _ in range(3):
        tired.add([1], list(range(8)))
        bounded.add([1], list(range(8)))
    assert len(tired.tried) == 6 and len(bounded.tried) == 4


def test_bayesian_proposals_come_every_so_often_and_follow_what_was_good(lm, monkeypatch):
    pytest.importorskip("optuna", reason="pip install 'specjax[search]'")
    worth = {"attention.2": 0.4, "mlp.2": 0.4}
    monkeypatch.setattr(
        Swift, "_judge", lambda *_: lambda skip: 0.1 + sum(worth.get(one, 0) for one in skip)
    )
    sessions = [
        Swift(lm, share=0.5, enough=1.0, **(SETTINGS | dict(tries=40, bayesian_every=every)))
        for every in (2, None)
    ]
    for session in sessions:
        session.add([1], list(range(8)))
    proposed, drawn = ([score for _, score in s.tried[21::2]] for s in sessions)
    assert np.mean(proposed) > np.mean(drawn) + 0.2
    same = [skip for skip, _ in sessions[1].tried[::2]]
    assert [skip for skip, _ in sessions[0].tried[::2]] == same


def test_the_set_is_saved_and_impossible_settings_are_refused(lm, tmp_path, monkeypatch):
    session = Swift(lm, skip="mlp.1", **SETTINGS)
    session.save(tmp_path)
    content = json.loads((tmp_path / "self.json").read_text())
    assert content["skip"] == ["mlp.1"] and content["found"] == {"matchness": 0.0, "tried": 0}
    saved = named(lm, f"self:from={tmp_path}")
    assert saved.skip == ("mlp.1",) and saved.stop == ConfidenceStop(threshold=0.8, step=0.0)
    for settings, words in (
        (dict(share=0.0), "share=0.0"),
        (dict(share=1.0), "share=1.0"),
        (dict(window=0), "window=0"),
        (dict(tries=True), "tries=True"),
        (dict(skip="mlp.4"), f"has {LAYERS}"),
    ):
        with pytest.raises(ValueError, match=words):
            Swift(lm, **(SETTINGS | settings))
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match="bayesian_every=None"):
        Swift(lm, **(SETTINGS | dict(bayesian_every=25)))
