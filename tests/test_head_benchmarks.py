"""The scripts that measure heads: their rows, their pages, and rows that were stored before."""

import argparse
import json
import pathlib
import re

import numpy as np
import pytest

import specjax
from benchmarks import best_trees, drawn, expected, families, head_rows, heads, heldout, runner
from specjax import trees
from specjax.text import drafter_names


def stored(folder):
    """The header and the lines of a folder of results, and its page."""
    header, *lines = map(json.loads, (folder / runner.KEPT).read_text("utf-8").splitlines())
    return header, lines, (folder / "README.md").read_text("utf-8")


@pytest.mark.parametrize("script", [heads, drawn, best_trees])
def test_rows_that_were_stored_before_give_the_page_that_is_stored(script):
    header, lines, page = stored(script.RESULTS)
    assert script.page(header, lines) == page


def test_stored_results_give_the_expected_gains_that_are_stored():
    page = (expected.RESULTS / "heads-expected" / "README.md").read_text("utf-8")
    rounds = ["heads-100m", "heads-100m-drawn"]
    assert expected.page(["heads"], rounds, ["heads-grown"]) == page


def test_stored_results_give_the_stored_table_of_families():
    page = (families.RESULTS / "families" / "README.md").read_text("utf-8")
    assert families.page(["heads"], ["heads-100m", "heads-100m-drawn"]) == page
    _, lines, _ = stored(heads.RESULTS)
    greedy = lines[0]["figures"]
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0][2:] for row in rows] == sorted(
        greedy, key=lambda name: -greedy[name]["ratio_rounds"]["median"]
    )
    shares = greedy["EAGLE-3"]["acceptance_by_position"]
    given = f"{shares[0]:.0%}, {shares[1] / shares[0]:.0%}, {shares[2] / shares[1]:.0%}"
    assert given.replace("%", " %") in next(row for row in rows if row.startswith("| EAGLE-3 |"))
    with pytest.raises(ValueError, match="heads-100m-drawn: no row at T = 0"):
        families.page(["heads-100m-drawn"], ["heads-100m"])


def asked(*words, **usual):
    parser = argparse.ArgumentParser()
    head_rows.add_shapes(parser, (0.0, 1.0), **usual)
    head_rows.add_policies(parser)
    return head_rows.rows_of(parser.parse_args(words))


def test_shapes_are_measured_at_every_temperature_and_ways_to_draw_above_zero_alone():
    assert asked() == []
    words = "--lengths 2 --trees 3x1 --siblings top iid distinct".split()
    assert asked(*words) == [
        {"temperature": 0.0, "num": 2},
        {"temperature": 0.0, "tree": "3x1"},
        {"temperature": 1.0, "num": 2, "siblings": "top"},
        {"temperature": 1.0, "num": 2, "siblings": "iid"},
        *({"temperature": 1.0, "tree": "3x1", "siblings": x} for x in ("top", "iid", "distinct")),
    ]
    assert asked("--temperatures", "0", "--policies", "auto:schedule") == [
        {"temperature": 0.0, "num": "auto:schedule"},
        {"temperature": 0.0, "num": "auto:schedule", "batch": 8},
    ]


@pytest.mark.parametrize(
    "words",
    [
        "--temperatures 0 1 --lengths 2 5 --trees 3x1 --siblings top iid distinct",
        "--temperatures 0.5 --trees 2x1 3x1",
        "--temperatures 0 1 --lengths 3 --policies auto auto:schedule --batches 1 8",
    ],
)
def test_the_arguments_of_rows_are_found_again(words):
    assert head_rows.words_of(asked(*words.split())) == words.split()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "0"], "'0' is no number above 0"),
        (["--trees", "3y2"], "--trees: "),
        (["--policies", "goodput"], "neither auto nor auto:POLICY"),
        (["--policies", "auto:shedule"], "schedule"),
        (["--siblings", "best"], "invalid choice: 'best'"),
    ],
)
def test_rows_that_cannot_be_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        asked(*words)
    assert message in capsys.readouterr().err


RATIO = {"median": 1.2, "low": 1.1, "high": 1.3, "confidence": 0.95}
FIGURES = {"ratio_rounds": RATIO, "ratio_whole": RATIO, "tau": 2.0, "seconds_per_round": 2.0}
FIGURES |= {"seconds_per_plain_step": 1.0, "acceptance_by_position": [0.5], "identical": None}


def test_what_is_expected_is_tau_by_the_time_of_a_round_of_the_same_shape(monkeypatch, tmp_path):
    def write(name, **figures):
        rows = [{"temperature": 0.0, "num": 3}, {"temperature": 0.0, "tree": "3x2x1"}]
        lines = [{"prompts": 9, "processor": "P"}, *({"row": r, "figures": figures} for r in rows)]
        (tmp_path / name).mkdir()
        lines = lines[:-1] if name == "rounds" else lines
        (tmp_path / name / runner.KEPT).write_text("\n".join(map(json.dumps, lines)), "utf-8")

    monkeypatch.setattr(expected, "RESULTS", tmp_path)
    shipped, round_time = {"A, shipped": FIGURES}, {"seconds_per_round": 3.0}
    wide = {"A, 256 wide": FIGURES, "Other": FIGURES}
    write("trained", **shipped, A=FIGURES | {"tau": 3.0}, **wide)
    write("later", A=FIGURES | {"tau": 9.0}, B=FIGURES | {"tau": 6.0})  # A is known already
    write("rounds", **dict.fromkeys("AB", {"seconds_per_plain_step": 2.0} | round_time))
    write("grown", **shipped)
    words = ["--trained", "trained", "later", "--rounds", "rounds", "--measured", "grown"]
    assert expected.main([*words, "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "README.md").read_text("utf-8")
    rows = ["| B | 6.00 | 1.50 | 4.00 |  |", "| A | 3.00 | 1.50 | 2.00 |  |"]
    assert "\n".join([*rows, "| A, shipped | 2.00 | 1.50 | 1.33 | 1.20 [1.10"]) in page
    for unmeasured in ("Other", "256 wide", "3x2x1"):  # whose rounds were not
        assert unmeasured not in page
    for place in ("trained", "later", "rounds", "grown"):
        assert f"[{place}](../{place}/README.md) (9 prompts, P)" in page
    (tmp_path / "rounds" / runner.KEPT).write_text('{"prompts": 9, "processor": "P"}', "utf-8")
    with pytest.raises(ValueError, match="no row of trained, later has the shape"):
        expected.main(words)


@pytest.fixture
def measured(monkeypatch):
    """What is measured: the drafters, the number of prompts and the batch of each call."""
    calls = []

    def measure(lm, ways, texts, samplings, new, repetitions):
        calls.append(([name for name, _ in ways], len(texts), len(texts) // len(samplings)))
        return [FIGURES for _ in ways]

    monkeypatch.setattr(heldout, "measure_model", measure)
    monkeypatch.setattr(heads.compile_cache, "enable", lambda: None)  # it holds for the process
    return calls


def test_heads_are_measured_together_and_one_that_a_shape_does_not_suit_is_left_out(
    measured, tmp_path
):
    words = ["Own=eagle3", "medusa", "--prompts", "9", "--temperatures", "0", "--out"]
    assert heads.main([*words, str(tmp_path), "--lengths", "9"]) == 0
    assert measured.pop() == (["eagle3"], 9, 1)
    page = (tmp_path / "README.md").read_text("utf-8")
    assert re.search(r"## T = 0, 9 tokens a round\n\n\| head .*\n\|[-|]*\n\| Own \|", page)
    assert re.search(
        r"Without medusa: drafter='medusa' has .* heads, and .* is 9 tokens deep", page
    )
    policies = ["--policies", "auto", "--batches", "8"]
    assert heads.main([*words, str(tmp_path), *policies]) == 0
    assert measured.pop() == (["eagle3", "medusa"], 8, 8)
    assert heads.main([*words, str(tmp_path), *policies]) == 0 and not measured
    page = (tmp_path / "README.md").read_text("utf-8")
    assert "9 tokens a round" in page and "## T = 0, `auto`, batch 8\n" in page
    assert "The least ratio of rounds is that of medusa: 1.20 [1.10, 1.30]." in page
    with pytest.raises(SystemExit):
        heads.main([*words, str(tmp_path), "--policies", "auto", "--batches", "16"])
    elsewhere = [*words[:-1], "--before", "3", "--lengths", "2", "--out", str(tmp_path / "before")]
    assert heads.main(elsewhere) == 0
    page = (tmp_path / "before" / "README.md").read_text("utf-8")
    assert " --prompts 9 --before 3 --" in page and "The last 3 prompts are not among" in page
    with pytest.raises(ValueError, match="'medusas' is unknown"):
        heads.main(["medusas", *words[2:], str(tmp_path)])


def test_rows_of_one_temperature_are_measured_in_turn_if_that_is_asked_for(measured, tmp_path):
    words = ["Own=eagle3", "medusa", "--prompts", "9", "--temperatures", "0", "1"]
    shapes = ["--lengths", "3", "9", "--trees", "2x1"]
    assert heads.main([*words, *shapes, "--in-turn", "--out", str(tmp_path)]) == 0
    together = ["eagle3", "medusa", "eagle3", "eagle3", "medusa"]  # Medusa has no nine heads
    assert measured == [(together, 9, 1)] * 2
    page = (tmp_path / "README.md").read_text("utf-8")
    assert f"{' '.join(words[-3:] + shapes)} --in-turn\n" in page
    assert "Rows of one temperature were measured in turn." in page
    for title, count in (("3 tokens a round", 2), ("9 tokens a round", 1), ("tree 2x1", 2)):
        for section in page.split("\n## ")[1:]:
            if title in section:
                assert section.count("| 2.00 | 1.20 [") == count


def test_heads_may_have_a_target_of_their_own(measured, monkeypatch, tmp_path):
    loaded, load = [], specjax.load

    def loading(name, **options):
        loaded.append(name)
        return load(name, **options)

    monkeypatch.setattr(specjax, "load", loading)
    folder = pathlib.Path(specjax.__file__).parent / "models" / "embedded"
    words = [f"Own={folder / 'eagle3'}", "--prompts", "2", "--temperatures", "0", "--lengths", "2"]
    words += ["--out", str(tmp_path), "--target", str(folder / "target")]
    assert heads.main(words) == 0 and len(measured) == 1
    assert loaded == [str(folder / "target")]
    page = (tmp_path / "README.md").read_text("utf-8")
    assert f" --target {folder / 'target'} --" in page and "Heads of a target of" in page
    with pytest.raises(SystemExit):
        heads.main([*words, "--grown"])


def test_the_best_tree_of_a_head_is_chosen_by_prompts_that_are_not_measured(monkeypatch, tmp_path):
    chosen, measured = [], {}

    def counted(lm, head, prompts, depth, new):
        if "eagle3" in head.name:
            raise ValueError("no choices")
        chosen.extend(prompts)
        return np.asarray([[0.5, 0.3, 0.1], [0.6, 0.1, 0.0], [0.2, 0.1, 0.0]])[:depth]

    def tau(lm, head, shape, prompts, new):
        measured[shape] = prompts
        return {"tau": 3.0 if "eagle3" in head.name else 2.0, "low": 1.5, "high": 2.5}

    monkeypatch.setattr(best_trees, "counted", counted)
    monkeypatch.setattr(best_trees, "tau", tau)
    words = [
        "Own=medusa",
        "eagle3",
        "--prompts",
        "3",
        "--chosen-by",
        "2",
        "--nodes",
        "3",
        "4",
        "--trees",
    ]
    assert best_trees.main([*words, "3x1", "chain:9", "--out", str(tmp_path)]) == 0
    assert [*chosen, *heldout.prompts(3)] == heldout.prompts(5)
    assert all(prompts == heldout.prompts(3) for prompts in measured.values())
    # 0.5, 0.3 and 0.5 * 0.6 are the best three; then 0.3 * 0.6
    best = [trees.Tree((-1, 0, 1, 0)), trees.Tree((-1, 0, 1, 0, 3))]
    # Medusa has three heads, so that the other one alone drafts the chain
    assert list(measured) == [trees.parse("3x1"), *best, trees.chain(9)]
    page = (tmp_path / "README.md").read_text("utf-8")
    assert "| head | τ, 3x1 | τ, chain:9 | τ, best of 3 | τ, best of 4 |" in page
    assert "| Own | 2 (2), 1 (1) | 2.10 | 2 (2), 2 (1) | 2.28 |" in page
    assert "| eagle3 | 3.000 [" in page and "| eagle3 |  |  |  |  |" in page  # the first row
    assert "Without trees for eagle3: no choices." in page
    assert "--chosen-by 2 --trees 3x1 chain:9\n" in page
    assert best_trees.main([*words, "3x1", "chain:9", "--out", str(tmp_path)]) == 0
    assert len(chosen) == 2  # a finished row is kept


def test_a_page_of_best_trees_has_heads_of_which_nothing_was_measured():
    header, lines, _ = stored(best_trees.RESULTS)
    pass_alone = [line for line in lines if line["row"]["head"] == "PaSS"]
    line = {**pass_alone[0], "figures": pass_alone[0]["figures"] | {"tau": {}}}
    header |= {"target": "my target"}
    page = best_trees.page(header, [*lines, line])
    assert "--target 'my target'\n" in page and page.count("\n| PaSS |") == 4
    assert page.index("| MTP, shipped |") < page.index("| PaSS |")


def test_drafters_that_are_measured_on_many_prompts_are_read_once(monkeypatch):
    asked = []
    monkeypatch.setattr(heldout, "named", lambda lm, name: (name, object()))
    monkeypatch.setattr(heldout, "prepare_fastest", lambda lm, text, how, **_: asked.append(how))

    def run(work):
        raise InterruptedError("all are prepared")

    monkeypatch.setattr(heldout, "run", run)
    folder = pathlib.Path("folder")
    ways = [(folder, specjax.Drafting(num=2)), ("eagle3", specjax.Drafting(num=3))]
    sampling = [specjax.Sampling(temperature=0)] * 3
    with pytest.raises(InterruptedError, match="all are prepared"):
        heldout.measure_model(None, ways, ["a", "b", "c"], sampling, 8, 1)
    drafters = [how.drafter for how in asked]
    assert len(drafters) == 9 and drafters[:3] == drafters[3:6] == drafters[6:]
    assert [one and one[0] for one in drafters[:3]] == [None, folder, "eagle3"]


def test_heads_in_folders_are_drawn_beside_each_other(monkeypatch, tmp_path):
    calls = []

    def tau(lm, prompts, drafter, drafting, temperature, new):
        calls.append((drafter, drafting, temperature))
        return {"tau": 2.0, "low": 1.5, "high": 2.5}

    monkeypatch.setattr(drawn, "tau", tau)
    words = ["Own=medusa", "--prompts", "2", "--temperatures", "1", "--lengths", "2", "9"]
    assert drawn.main([*words, "--trees", "3x1", "--out", str(tmp_path)]) == 0
    ways = [*(dict(num=2, sibling_sampling=how) for how in ("top", "iid"))]
    ways += [dict(tree="3x1", sibling_sampling=how) for how in ("top", "iid", "distinct")]
    assert calls == [("medusa", specjax.Drafting(**way), 1.0) for way in ways]
    page = (tmp_path / "README.md").read_text("utf-8")
    assert "`python -m benchmarks.drawn Own=medusa`" in page
    assert "| 1 | Own, 3x1 | 2.00 [1.50, 2.50] | 2.00 [1.50, 2.50] | 2.00 [1.50, 2.50] |" in page
    assert "| 1 | Own, 9 | – | – |  |" in page and re.search(r"\nOwn, 9, `top`: .* deep", page)
    for wrong in (["--trees", "3x1"], ["Own=medusa", "--temperatures", "0"], ["--alone"]):
        with pytest.raises(SystemExit):
            drawn.main([*wrong, "--out", str(tmp_path)])


def test_heads_that_correct_a_block_are_also_drawn_from_the_block_alone(
    monkeypatch, tmp_path, capsys
):
    calls = []

    def tau(lm, prompts, drafter, drafting, temperature, new):
        calls.append((getattr(drafter, "name", drafter), drafting))
        return {"tau": 2.0, "low": 1.5, "high": 2.5}

    words = ["Own=medusa", "--prompts", "2", "--temperatures", "1", "--lengths", "2", "--trees"]
    words += ["3x1", "--siblings", "iid", "--alone", "--out", str(tmp_path)]
    monkeypatch.setattr(drawn, "tau", tau)
    with pytest.raises(SystemExit):
        drawn.main(words)
    assert "--alone: Own=medusa does not correct the laws of a block" in capsys.readouterr().err
    monkeypatch.setattr(drawn, "corrects", lambda heads: True)
    monkeypatch.setattr(drawn, "alone", lambda drafter: drafter)
    assert drawn.main(words) == 0
    own = drafter_names.named(specjax.load("embedded"), "medusa").name
    chain = specjax.Drafting(num=2, sibling_sampling="iid")
    assert calls == [
        ("medusa", chain),
        (own, chain),  # the drafter alone, and not its name
        ("medusa", specjax.Drafting(tree="3x1", sibling_sampling="iid")),
    ]
    page = (tmp_path / "README.md").read_text("utf-8")
    assert "Own=medusa --alone`" in page and "`alone`: drawn independently" in page
    assert "| 1 | Own, 2 |  | 2.00 [1.50, 2.50] |  | 2.00 [1.50, 2.50] |" in page


def test_batches_that_are_decoded_plainly_have_accepted_nothing_at_any_position():
    assert heldout._sum([np.array([3, 1]), np.array([], int), np.array([2, 2])]).tolist() == [5, 3]
    assert heldout._sum([np.array([], int)]).tolist() == []
