"""Draft & Verify's search of skipped sublayers: what it proposes, measures, keeps and resumes."""

import dataclasses
import json
import sys

import numpy as np
import pytest
from test_own_layers import PROMPTS, lm  # noqa: F401

import specjax
from specjax import cli
from specjax.analysis import bayesian_layers
from specjax.analysis.bayesian_layers import BayesianSearch, DraftingSpeed, Trial
from specjax.analysis.timing import timed_run
from specjax.drafters.confidence_stop import ConfidenceStop
from specjax.models.sub_network import usual_sets
from specjax.text.drafter_names import named

pytestmark = pytest.mark.usefixtures("quick_compilation")
WORTH = {"attention.1": 3.0, "mlp.2": 2.0}  # what skipping these adds; others cost


def rate(skip):
    return 10 + sum(WORTH.get(name, -1.5) for name in skip)


@pytest.fixture
def optuna():
    return pytest.importorskip("optuna", reason="pip install 'specjax[search]'")


def search(lm, **settings):  # noqa: F811
    return BayesianSearch(lm, PROMPTS, max_new_tokens=8, measure=rate, **settings)


class Stopped(Exception):
    """The search was stopped."""


def test_a_stopped_search_goes_on_as_if_nothing_had_been(lm, tmp_path, optuna):  # noqa: F811
    whole = search(lm)
    drafter = whole.run(40)
    assert {*WORTH} <= {*whole.best.skip} and whole.best.rate > rate(usual_sets(3)[0])
    assert drafter.skip == whole.best.skip and drafter.stop == ConfidenceStop(threshold=0.8)
    assert all(trial.skip and len(trial.skip) < 6 for trial in whole.trials)

    journal, said = tmp_path / "journal", []

    def stop_at_9(line):
        said.append(line)
        if len(said) == 9:
            raise Stopped

    with pytest.raises(Stopped):
        search(lm, journal=journal).run(40, stop_at_9)
    with journal.open("a") as file:
        file.write('{"skip": ["mlp')  # it was killed while it wrote
    resumed = search(lm, journal=journal)
    assert resumed.trials == whole.trials[:9] and said[8].startswith("9 of 40 sets: ")
    assert resumed.run(40) == drafter and resumed.trials == whole.trials
    again = search(lm, journal=journal)
    assert again.trials == whole.trials and again.run(40) == drafter  # nothing is left to run
    with pytest.raises(ValueError, match="other options"):
        search(lm, journal=journal, num_draft=3)
    journal.write_text("no journal")
    with pytest.raises(ValueError, match="other options"):
        search(lm, journal=journal)
    with pytest.raises(ValueError, match="num_trials=0"):
        search(lm).run(0)


def test_fault_a_search_that_prefers_slow_sets_is_seen(lm, monkeypatch, optuna):  # noqa: F811
    means, ask = [], BayesianSearch._ask

    def wrong(self, count):
        kept = self.trials
        self.trials = [Trial(trial.skip, -trial.rate) for trial in kept]
        try:
            return ask(self, count)
        finally:
            self.trials = kept

    for _ in range(2):
        own = search(lm)
        own.run(30)
        means.append(np.mean([trial.rate for trial in own.trials[15:]]))
        monkeypatch.setattr(BayesianSearch, "_ask", wrong)
    assert means[0] > 10 > means[1] + 1


def test_a_set_that_was_run_again_counts_with_its_mean(lm, optuna):  # noqa: F811
    own = search(lm)
    with pytest.raises(ValueError, match="no set was run"):
        _ = own.best
    own.trials += [Trial(("mlp.0",), 9.0), Trial(("mlp.1",), 8.0), Trial(("mlp.0",), 5.0)]
    assert own.best == Trial(("mlp.1",), 8.0)


def test_without_optuna_the_error_says_how_to_install_it(lm, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"pip install 'specjax\[search\]'"):
        search(lm)
    assert cli.main(["layers", "--trials", "3"]) != 0
    assert "specjax[search]" in capsys.readouterr().err


def test_usual_sets_exist_in_every_model():
    for layers in range(1, 41):
        for skip in usual_sets(layers):
            assert 0 < len({*skip}) == len(skip) < 2 * layers
            assert all(int(name.partition(".")[2]) < layers for name in skip)


@pytest.mark.usefixtures("one_trace")
def test_all_sets_are_measured_by_one_program(lm, monkeypatch):  # noqa: F811
    speed = DraftingSpeed(lm, PROMPTS, 8, 3, ConfidenceStop(threshold=0.8))
    assert all(speed(skip) > 0 for skip in ((), ("attention.1",), ("mlp.0", "mlp.2")))
    monkeypatch.setattr(bayesian_layers, "timed_run", lambda work: (9.0, 0.5, timed_run(work)[2]))
    assert speed(()) == 7 / 0.5  # of 8 tokens the reading of the prompt emits the first
    with pytest.raises(ValueError, match="max_new_tokens=1: give at least 2"):
        DraftingSpeed(lm, PROMPTS, 1, 3, ConfidenceStop(threshold=0.8))


def test_the_command_measures_saves_and_the_drafter_reads_it(tmp_path, capsys, optuna):
    path, journal = tmp_path / "layers.json", tmp_path / "journal"
    words = ["layers", "--trials", "4", "--output", str(path), "--journal", str(journal)]
    assert cli.main([*words, "--limit", "1", "--max-new-tokens", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trials"] == 4 and found["num_draft"] == 8 and found["tokens_per_second"] > 0
    assert len(journal.read_text().splitlines()) == 5
    assert path.exists() == (found["measured_ratio"] > 1)


def test_where_chains_stop_is_saved_with_the_choice(lm, tmp_path):  # noqa: F811
    from specjax.checkpoints.sub_network import save_layers
    from specjax.drafters import SelfDraft

    stop = ConfidenceStop(threshold=0.7, step=0.0)
    drafter = SelfDraft(num_draft=5, target=lm.target, skip="mlp.1", stop=stop)
    path = save_layers(drafter, lm, tmp_path)
    assert named(lm, f"self:from={path}") == drafter and list(tmp_path.iterdir()) == [path]
    softer = dataclasses.replace(drafter, stop=ConfidenceStop(threshold=0.5))
    assert named(lm, f"self:from={path}:stop=0.5") == softer
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"stop": {"thresholds": 1}}))
    with pytest.raises(ValueError, match="stop="):
        specjax.checkpoints.sub_network.load_layers(path, lm)
