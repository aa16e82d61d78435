"""Layers of the target that draft for it: their names, their file, the search for them."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest
from flax import nnx
from test_decoder import LLAMA

import specjax
from specjax import cli
from specjax.analysis import layer_search
from specjax.analysis.layer_search import (
    MOST_DRAFTS,
    Choice,
    LayerSearch,
    PassCosts,
    eliminate,
    predict,
)
from specjax.analysis.plan.propose import judge_exit
from specjax.checkpoints.sub_network import load_layers, save_layers
from specjax.cli import layers as layers_command
from specjax.drafters import Hybrid, SelfDraft
from specjax.drafters.confidence_stop import ConfidenceStop
from specjax.models import Decoder
from specjax.models.causal_lm import CausalLM
from specjax.text.drafter_names import named, resolve_drafter

pytestmark = pytest.mark.usefixtures("quick_compilation")
CONFIG = dataclasses.replace(LLAMA, num_layers=3)
PROMPTS = [[5, 6, 7, 8, 9], [3, 1]]
COSTS = PassCosts({1: 1.0, 2: 1.0, 4: 1.1, 8: 1.2, 16: 1.5}, attention=0.1, mlp=0.2)


def model(seed=0):
    """A model of three layers whose second attention and last MLP add next to nothing."""
    params = nnx.split(Decoder(CONFIG, rngs=nnx.Rngs(seed)))[1]
    params = jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, params)
    for layer, kind, last in ((1, "attention", "o"), (2, "mlp", "down")):
        weight = params["blocks"][layer][kind][last]["weight"]
        weight[...] = 1e-4 * weight[...]
    return specjax.LM.of(CausalLM(CONFIG), params)


@pytest.fixture(scope="module")
def lm():
    return model()


# ------------------------------------------------------------------- names


def test_names_say_which_layers_draft(lm):
    both = dict(target=lm.target, num_draft=3)
    assert named(lm, "self:exit=2") == SelfDraft(exit=2, **both)
    assert named(lm, "self:skip=attention.1,mlp.0-1") == SelfDraft(
        skip=("mlp.0", "attention.1", "mlp.1"), **both
    )
    stopped = named(lm, "self:exit=1:stop=0.5")
    assert stopped.stop == ConfidenceStop(threshold=0.5)
    assert named(lm, stopped.words) == SelfDraft(exit=1, **both)
    longer, _ = resolve_drafter(lm, "self:exit=2", 5)
    assert longer == SelfDraft(target=lm.target, num_draft=5, exit=2)
    tree, _ = resolve_drafter(lm, "self:exit=2", None, None, "2x1", "distinct")
    assert tree.topology.num_nodes == 5 and tree.sibling_sampling == "distinct"
    lookup, _ = resolve_drafter(lm, "ngram+self:exit=2", 6)
    assert isinstance(lookup, Hybrid) and lookup.inner.exit == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("self", "which layers draft"),
        ("self:", "which layers draft"),
        ("self:exit=two", "exit='two' is no whole number of layers from 1 on; give 'self:exit=2'"),
        ("self:exit=0", "exit='0' is no whole number of layers"),
        ("self:exit=1:skip=mlp.1", "which layers draft"),
        (
            "self:layers=1",
            "'layers' is no setting of .* accepted are exit, skip, from, stop, window",
        ),
        ("self:exit=4", "has 3 layers"),
        ("self:skip=mlp.3", "no layer 3"),
        ("self:exit=1:stop=2", "probability"),
        ("selff", "did you mean 'self'"),
    ],
)
def test_names_that_say_nothing_are_refused(lm, name, words):
    with pytest.raises(ValueError, match=words):
        named(lm, name)


def test_where_layers_are_saved_is_checked_before_anything_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(layers_command, "set_up", lambda _: pytest.fail("the model was read"))
    assert cli.main(["layers", "--output", str(tmp_path / "nowhere" / "self.json")]) == 2
    said = capsys.readouterr().err
    assert f"there is no folder {tmp_path / 'nowhere'}; make it" in said


def test_layers_of_another_target_are_refused(lm):
    other = CausalLM(dataclasses.replace(CONFIG, num_layers=2))
    with pytest.raises(ValueError, match="another target"):
        resolve_drafter(lm, SelfDraft(target=other, exit=1))


# ------------------------------------------------------------------- the file


@pytest.mark.parametrize(
    "which", [dict(exit=2), dict(skip="attention.1,mlp.2"), dict(window=16, sinks=1)]
)
def test_a_choice_is_read_as_it_was_saved(lm, tmp_path, which):
    drafter = SelfDraft(num_draft=5, target=lm.target, **which)
    path = save_layers(drafter, lm, tmp_path, {"ratio": 1.5})
    assert path == tmp_path / "self.json"
    assert load_layers(tmp_path, lm) == named(lm, f"self:from={path}") == drafter
    beside = dataclasses.replace(lm, name=str(tmp_path))
    assert named(beside, "self") == drafter


def test_a_choice_for_other_weights_is_refused(lm, tmp_path):
    path = save_layers(SelfDraft(target=lm.target, exit=1), lm, tmp_path)
    with pytest.raises(ValueError, match="other weights"):
        load_layers(path, model(1))
    path.write_text(json.dumps({"skip": []}))
    with pytest.raises(ValueError, match="no file of layers"):
        load_layers(path, lm)
    with pytest.raises(FileNotFoundError, match="no folder"):
        save_layers(SelfDraft(target=lm.target, exit=1), lm, tmp_path / "none" / "self.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_draft", True),
        ("exit", "2"),
        ("skip", {"attention": [1]}),
        ("window", [16]),
        ("window", "16"),
        ("sinks", None),
        ("chunks", None),
        ("chunks", 7),
        ("chunks", {"budget": "8"}),
        ("chunks", {"budget": 7}),
        ("stop", [0.5]),
        ("stop", {"threshold": 2}),
    ],
)
def test_a_file_that_was_damaged_is_refused_by_its_name_and_auto_goes_on(
    lm, tmp_path, caplog, field, value
):
    path = save_layers(SelfDraft(num_draft=3, target=lm.target, window=16), lm, tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=f"self.json: {field}="):
        load_layers(path, lm)
    here = dataclasses.replace(lm, name=str(tmp_path), loaded=True)
    assert named(here, "auto") == "ngram" and field in caplog.text


def test_auto_takes_the_saved_layers_of_a_model_and_none_of_other_weights(lm, tmp_path, caplog):
    drafter = SelfDraft(num_draft=3, target=lm.target, exit=2)
    save_layers(drafter, lm, tmp_path)
    here = dataclasses.replace(lm, name=str(tmp_path), loaded=True)
    assert named(here, "auto") == drafter
    other = dataclasses.replace(here, checkpoint="another")
    assert named(other, "auto") == "ngram" and "other weights" in caplog.text
    assert named(dataclasses.replace(here, loaded=False), "auto") == "ngram"


# ------------------------------------------------------------------- the search


def test_a_prediction_is_tokens_over_seconds():
    right = np.asarray([[1, 1, 0, 1]], bool)
    drafts, ratio = predict(right, COSTS, 5, 1, most=2)
    tokens = {1: 1 + 3 / 4, 2: 1 + (2 + 1 + 0) / 3}
    ratios = {g: tokens[g] / (g * 0.3 + COSTS.whole(g + 1)) for g in (1, 2)}
    assert drafts == max(ratios, key=ratios.get) and ratio == pytest.approx(max(ratios.values()))


def test_an_exit_pays_for_its_layers_and_for_the_rest_of_the_pass():
    names = [f"{kind}.{layer}" for layer in range(3) for kind in ("attention", "mlp")]
    asked = []

    def right(skip):
        asked.append(skip)
        return np.ones((1, 9), bool)

    search = types.SimpleNamespace(names=names, costs=COSTS, right=right)
    choice = judge_exit(search, 2)
    assert asked == [("attention.2", "mlp.2")] == [choice.skip]
    ratios = [(g + 1) / (g * 0.7 + 0.4 * COSTS.whole(g + 1)) for g in range(1, MOST_DRAFTS + 1)]
    assert choice.ratio == pytest.approx(max(ratios))
    assert choice.num_draft == 1 + int(np.argmax(ratios))


def test_a_plan_proposes_layers_of_a_model_of_the_users_own(lm):
    told = []
    found = specjax.plan(
        lm, PROMPTS, drafters="self", num_drafts=[1, 2], max_new_tokens=8, turns=1,
        progress=told.append,
    )  # fmt: skip
    words = {c.drafter for c in found.candidates} - {"plain"}
    assert {word.partition("=")[0] for word in words} == {"self:skip", "self:exit"}
    assert any("skipped: predicted" in line for line in told)
    plain = specjax.generate(lm, PROMPTS, drafter=None, max_new_tokens=8, stop=()).tokens
    for word in words:  # a name of the plan is a name of ``generate``
        text = specjax.generate(lm, PROMPTS, drafter=word, max_new_tokens=8, stop=()).tokens
        assert all((a == b).all() for a, b in zip(text, plain, strict=True))


def test_elimination_finds_the_best_nested_set():
    worth = {"a": 3.0, "b": -1.0, "c": 1.0, "d": -4.0}

    def judge(skip):
        return Choice(tuple(skip), 1, 1.0, 1 + sum(worth[name] for name in skip))

    assert set(eliminate(tuple(worth), judge).skip) == {"a", "c"}


def test_the_search_leaves_out_what_adds_nothing_and_what_it_says_comes_true(
    lm, tmp_path, monkeypatch
):
    journal = tmp_path / "journal"
    search = LayerSearch(lm, PROMPTS, max_new_tokens=16, journal=journal, costs=COSTS)
    assert search.right(()).all()  # the whole target agrees with itself
    silent = ("attention.1", "mlp.2")
    assert search.judge(silent).agreement > search.judge(("mlp.0",)).agreement
    drafter = search.run()
    assert {*silent} <= {*drafter.skip} and search.choice.ratio > 1
    texts = [
        specjax.generate(
            lm, PROMPTS, drafter=own, max_new_tokens=16, stop=(), drafting=specjax.Drafting()
        )
        for own in (None, SelfDraft(num_draft=3, target=lm.target, skip=silent))
    ]
    assert all((a == b).all() for a, b in zip(*(t.tokens for t in texts), strict=True))
    rate = texts[1].stats.accepted.sum() / texts[1].stats.drafted.sum()
    assert rate == pytest.approx(search.judge(silent).agreement, abs=0.1)
    with journal.open("a") as file:
        file.write('{"skip": ["mlp.0"], "ri')  # a search that was stopped
    again = LayerSearch(lm, PROMPTS, max_new_tokens=16, journal=journal, costs=COSTS)
    assert {*again.known} == {*search.known} and again.run() == drafter
    monkeypatch.setattr(layer_search, "measure_costs", lambda _: pytest.fail("it was timed"))
    with pytest.raises(ValueError, match="other prompts"):
        LayerSearch(lm, PROMPTS[:1], max_new_tokens=16, journal=journal)
    journal.write_text("")
    with pytest.raises(ValueError, match="journal=.*: it belongs to another model"):
        LayerSearch(lm, PROMPTS, max_new_tokens=16, journal=journal)
    with pytest.raises(FileNotFoundError, match="journal=.*absent.x: it cannot be written"):
        LayerSearch(lm, PROMPTS, max_new_tokens=16, journal=tmp_path / "absent" / "x")


def test_the_command_searches_saves_and_the_drafter_reads_it(tmp_path, capsys):
    path = tmp_path / "layers.json"
    words = ["layers", "--output", str(path), "--limit", "2", "--max-new-tokens", "8", "--json"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["judged"] > 12 and found["num_draft"] >= 1
    assert path.exists() == (found["predicted_ratio"] > 1)


# ------------------------------------------------------------------- where chains stop


def test_the_threshold_follows_acceptance_as_published():
    """Draft & Verify's rule, once more in numpy, and rows that take no part stay as they are."""
    stop, random = ConfidenceStop(threshold=0.6), np.random.default_rng(0)
    state = stop.init(3)
    threshold, rate = np.full(3, 0.6), np.zeros(3)
    for _ in range(30):
        offered = random.integers(1, 5, 3).astype(np.int32)
        accepted = random.integers(0, offered + 1).astype(np.int32)
        live = random.random(3) < 0.8
        state = dataclasses.replace(state, offered=offered)
        state = stop.update(state, accepted, live, offered >= 4)
        for row in np.flatnonzero(live):
            rate[row] = 0.5 * rate[row] + 0.5 * accepted[row] / offered[row]
            wanted = threshold[row] + 0.01
            if rate[row] >= 0.9:
                wanted = threshold[row] - (0.01 if offered[row] < 4 else 0)
            threshold[row] = 0.9 * threshold[row] + 0.1 * wanted
        np.testing.assert_allclose(state.threshold, threshold, atol=1e-5)
        np.testing.assert_allclose(state.rate, rate, atol=1e-5)


@pytest.mark.parametrize(("threshold", "drafted"), [(0.0, 3), (1.0, 1)])
def test_a_threshold_of_nothing_never_stops_and_one_of_certainty_always(lm, threshold, drafted):
    stop = ConfidenceStop(threshold=threshold, step=0.0)
    drafter = SelfDraft(num_draft=3, target=lm.target, exit=1, stop=stop)
    out = specjax.generate(lm, PROMPTS, drafter=drafter, max_new_tokens=13, stop=())
    plain = specjax.generate(lm, PROMPTS, drafter=None, max_new_tokens=13, stop=())
    assert all((a == b).all() for a, b in zip(out.tokens, plain.tokens, strict=True))
    assert (np.asarray(out.stats.drafted_at)[:, :drafted] > 0).all()
    assert (np.asarray(out.stats.drafted_at)[:, drafted:] == 0).all()


def test_settings_that_are_no_probabilities_are_refused(lm):
    with pytest.raises(ValueError, match="rate_decay=1.5"):
        ConfidenceStop(rate_decay=1.5)
    with pytest.raises(ValueError, match="step=-1"):
        ConfidenceStop(step=-1)
    with pytest.raises(ValueError, match="confidence stops chains"):
        SelfDraft(
            target=lm.target,
            exit=1,
            stop=ConfidenceStop(),
            topology=specjax.trees.branching(2, 1),
        )
