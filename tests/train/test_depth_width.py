"""Draft models of one size over depth and width: shapes, pairs of turns, the recipe on toys."""

import dataclasses
import itertools
import json

import jax
import pytest
from specjax.train import (
    config,
    depth_width,
    depth_width_report,
    equal_size,
    metrics,
    model,
    outlook,
)

import specjax

LIKE = model.ModelConfig(
    hidden_size=112, intermediate_size=224, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=56
)
VOCABULARY = 2048


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_of_all_depths_have_as_many_parameters(tied):
    like = dataclasses.replace(LIKE, tie_embeddings=tied)
    size = equal_size.num_weights(like, VOCABULARY)
    widths = []
    for depth in (1, 2, 4, 8):
        shape = equal_size.of_depth(like, depth, size, VOCABULARY)
        made = jax.eval_shape(lambda s=shape: model.create(s.decoder(VOCABULARY, 0), 0)[1])
        assert outlook.num_parameters(made) == equal_size.num_weights(shape, VOCABULARY)
        assert abs(outlook.num_parameters(made) / size - 1) <= 0.01
        assert shape.num_layers == depth
        widths.append(shape.hidden_size)
    assert widths == sorted(widths, reverse=True) and len({*widths}) == 4
    assert equal_size.of_depth(like, 2, size, VOCABULARY) == like  # its own shape is the nearest


def test_a_depth_without_a_shape_is_refused():
    with pytest.raises(config.ConfigError, match="no decoder of 9 layers has 20,000 parameters"):
        equal_size.of_depth(LIKE, 9, 20_000, VOCABULARY)


RATES = [0.8, 0.7]
FACTS = [
    {"model": f"{depth}-{seed}", "size": 1.0, "seed": seed, "depth": depth, "width": 8,
     "inner": 16, "parameters": 100, "rates": RATES}
    for depth, seed in itertools.product((1, 4), (0, 1))
]  # fmt: skip
SPEEDUP, COST = {1: 2.0, 4: 1.25}, {1: 0.1, 4: 0.4}
SLOW = [1.0, 1.0, 8.0, 1.0, 8.0]  # how slow the machine is in each turn


def times():
    """Rows of a study on a machine that is slow for whole turns; some models were timed in those
    alone, since a stopped study goes on."""
    rows = []
    for turn, slow in enumerate(SLOW):
        passes = {"1": 0.01 * slow, "3": 0.011 * slow}
        rows.append({"turn": turn, "model": "plain", "drafts": 0, "run": slow, "start": 0.0,
                     "tokens": 100, "rounds": 100, "passes": passes})  # fmt: skip
        for one in FACTS:
            if one["depth"] == 4 and slow == 1.0:
                continue
            run = slow / SPEEDUP[one["depth"]]
            passes = {"1": COST[one["depth"]] * 0.01 * slow}
            rows.append({"turn": turn, "model": one["model"], "drafts": 2, "run": run,
                         "start": 0.0, "tokens": 100, "rounds": 44, "passes": passes})  # fmt: skip
    return rows


def test_speeds_are_those_of_pairs_in_one_turn_and_the_calculator_stands_beside():
    found = depth_width_report.outcomes(FACTS, times())
    assert len(found) == 4
    for one in found:
        depth = one.facts["depth"]
        assert (one.speedup, one.cost) == pytest.approx((SPEEDUP[depth], COST[depth]))
        wanted = (1 + 0.8 + 0.56) / (1.1 + 2 * COST[depth])
        assert one.computed == pytest.approx(wanted)
    said = depth_width_report.findings(found)
    assert "a depth of 1 with width 8 is 1.60 [1.60, 1.60] times as fast as a depth of 4" in said
    assert depth_width_report.interval([1.0, 2.0, 3.0]) == pytest.approx(
        (2, -0.484, 4.484), abs=1e-3
    )
    lines = depth_width_report.table(FACTS, found).splitlines()
    assert len(lines) == 4 and "2.00 [2.00, 2.00]" in lines[2] and "| 2 |" in lines[2]


def test_fault_of_comparing_medians_of_different_turns_is_seen():
    rows = times()
    rate = {
        name: sorted(row["tokens"] / row["run"] for row in rows if row["model"] == name)
        for name in ("plain", "4-0")
    }
    middle = {name: values[len(values) // 2] for name, values in rate.items()}
    (right,) = {round(o.speedup, 6) for o in depth_width_report.outcomes(FACTS, rows)
                if o.facts["depth"] == 4}  # fmt: skip
    assert abs(middle["4-0"] / middle["plain"] / right - 1) > 0.5


def test_a_study_that_is_stopped_goes_on_and_ends_with_table_picture_and_findings(
    place, monkeypatch, capsys
):
    root, train, teacher = place
    shape = ["hidden_size=16", "intermediate_size=32", "num_layers=1", "num_heads=2"]
    shape += ["num_kv_heads=1", "head_dim=8"]
    fields = [f"distill.model.{one}" for one in shape] + [f"distill.{teacher}"]
    fields += [f"distill.data.corpus={root / 'corpus'}", "distill.data.length=24"]
    fields += ["distill.data.batch=4", "distill.data.eval_rows=4", "distill.run.steps=3"]
    fields += ["distill.run.eval_every=3", "distill.optimizer.warmup=1", "distill.report.texts=0"]
    fields += ["distill.decoding.num_prompts=2", "distill.decoding.batch=2"]
    fields += ["distill.decoding.prompt_tokens=8", "distill.decoding.new_tokens=12"]
    fields += ["depths=[1, 2]", "seeds=[0]", "num_drafts=[2]", "timed_prompts=1", "turns=2"]
    fields += [f"output={root / 'study'}", "tolerance=0.05"]
    add, seen = depth_width.Journal.add, []

    def killed(self, row):
        add(self, row)
        seen.append((row["turn"], row["model"], row["drafts"]))
        if len(seen) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(depth_width.Journal, "add", killed)
    command = ["depth_width", "--config", str(root / "empty.toml"), *fields]
    from specjax.train.cli import main

    with pytest.raises(KeyboardInterrupt):
        main(command)
    first = capsys.readouterr().out
    assert first.count("--- ") == 2
    assert main(command) == 0
    again = capsys.readouterr().out
    assert "--- " not in again and "the calculator" not in first
    assert len(seen) == len({*seen}) == 2 * (1 + 2)
    study = root / "study"
    assert (study / "picture.png").stat().st_size > 5_000
    assert (study / "table.md").read_text() in again
    assert (study / "table.md").read_text().count("\n") == 4
    assert "The calculator's speed-up differs" in (study / "findings.md").read_text()
    rows = metrics.read(study / "rows.jsonl")
    assert len(rows) == 2 and {row["facts"]["depth"] for row in rows} == {1, 2}
    assert all(1 <= row["tau"] <= row["drafts"] + 1 for row in rows)
    (folder,) = {row["facts"]["model"] for row in rows if row["facts"]["depth"] == 2}
    assert specjax.load(study / folder / "model", tokenizer=False).config.num_layers == 2
    other = [word.replace("timed_prompts=1", "timed_prompts=2") for word in command]
    assert main(other) == 2 and "this run is of" in capsys.readouterr().err
    stored = json.loads((study / "times.jsonl").read_text().splitlines()[0])
    assert stored["new_tokens"] == 12


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("depths=[]", "depths=[]; accepted: at least one"),
        ("depths=[0]", "depths=[0]; accepted: numbers above 0"),
        ("seeds=[1, 1]", "each once"),
        ("num_drafts=[5]", "up to 4"),
        ("turns=-1", "turns=-1; accepted"),
        ("timed_prompts=0", "timed_prompts=0; accepted: 1 to"),
        ("distill.init=folder", "leave it out"),
        ("distill.run.seed=3", "distill.run.seed=3: in a study seeds says that"),
        ("distill.run.folder=x", "distill.run.folder='x': in a study output says that"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused(field, said, place, capsys):
    from specjax.train.cli import main

    assert main(["depth_width", "--config", "embedded_depth_width", field]) == 2
    assert said in capsys.readouterr().err
