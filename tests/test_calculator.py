"""The closed-form calculator: its formulas, errors and command, and its page in the browser."""

import importlib
import itertools
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import specjax
from benchmarks import calculated, heldout, runner
from benchmarks import calculator as measured
from specjax import cli, trees
from specjax.analysis import calculate, calculator_inputs
from specjax.analysis.plan.predict import AcceptanceRecord, Costs, rounds

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "howto" / "calculator.md"
NODE = shutil.which("node")


@pytest.fixture
def golden(monkeypatch):
    """The module that makes the golden values."""
    monkeypatch.syspath_prepend(str(HERE / "golden"))
    return importlib.import_module("make_calculator")


def stored(golden):
    return json.loads(golden.GOLDEN.read_text("utf-8"))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 1.0])
def test_a_chain_has_the_formula_of_the_field(alpha):
    for gamma, c in itertools.product((1, 3, 9), (0.0, 0.07, 0.5)):
        found = calculate(alpha, draft_cost=c, num_draft=gamma).asked
        tau = gamma + 1 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)
        assert found.tokens == pytest.approx(tau)
        assert found.speedup == pytest.approx(tau / (1 + gamma * c))
        assert calculator_inputs.rate_of(tau, gamma) == pytest.approx(alpha, abs=1e-9)


def test_the_planner_predicts_the_same_of_such_a_text():
    rng, alpha, gamma = np.random.default_rng(0), 0.8, 4
    run = np.minimum(rng.geometric(1 - alpha, size=40_000) - 1, gamma)
    taken = rounds(AcceptanceRecord([np.full(len(run), gamma)], [run]), gamma)
    costs = Costs(unit=1.0, passes={1: 0.9, 5: 1.3}, drafts={"draft": {4: 0.4}})
    planned = len(run) / costs.of(taken, "draft", gamma)
    # in passes over one token: a plain round is 1 / 0.9, and so is every other part of a round
    passes, overhead = {1: 1.0, 5: 1.3 / 0.9}, 0.1 / 0.9
    found = calculate(
        alpha, num_draft=gamma, draft_cost=0.1 / 0.9, passes=passes, overhead=overhead
    )
    assert found.asked.speedup == pytest.approx(planned, rel=0.02)
    assert len(found.chains) == 5  # no pass is wider than the widest with a known cost


def chains_of(rests, rows=1):
    """What the calculator says of chains of 1, 2 and 4 tokens whose rounds cost so much beside
    their parts, decoded ``rows`` together, of 60 tokens each after the first. Parts were timed
    twice as slow as they were in the runs."""
    draft, verify, every, step = 0.25, (1.5, 1.6, 2.0), 0.25, 2.0  # in passes; a pass: 2 seconds
    seconds = [{"pass": 4.0, "round": 5.0}]
    # the rounds of two rows, and the shares of rounds in which positions were accepted
    rounds = {1: (45, 35), 2: (35, 25), 4: (28, 20)}
    accepted = {1: [40], 2: [40, 20], 4: [30, 20, 12, 10]}
    chains = []
    for num, rest, cost in zip((1, 2, 4), rests, verify, strict=True):
        seconds.append({"draft": 4 * draft * num, "pass": 4 * cost})
        mine = rounds[num] if rows == 2 else (sum(rounds[num]) // 2,)
        stats = [[sum(mine), 60 * rows, num * sum(mine), 0, 60 * rows, max(mine)]]
        at = np.asarray(accepted[num]) * rows // 2
        same, said = [[True] * rows], [[[1] * 60] * rows]
        counts = heldout._Counts(stats, [rows], [at], same, said)
        spent = max(mine) * step * (num * draft + cost + every + rest)
        times = np.asarray([[[1.0, 60 * step * (1 + every)], [1.0, spent]]])
        chains.append({"run": counts.figures(times, True)})
    return calculated.computed({"seconds": seconds, "chains": chains}, rows)


@pytest.mark.parametrize("rows", [1, 2])
def test_where_all_rests_are_alike_speedups_and_delays_are_those_of_the_runs(rows):
    """Of one request, and of a batch that waits for its slowest row."""
    found = chains_of((0.4, 0.4, 0.4), rows)
    assert [one["rest"] for one in found] == pytest.approx([0.4, 0.4, 0.4])
    assert [calculated.error(one, "others") for one in found] == pytest.approx([0] * 3, abs=1e-9)
    assert all(abs(calculated.error(one, "passes")) > 0.02 for one in found)
    for one in calculated.latencies(found, rows, 61, rows):
        assert one["tpot"][0] == pytest.approx(one["tpot"][1])
    formula = calculate(0.6, num_draft=2, draft_cost=0.25).asked.speedup  # 60 of 100
    assert found[1]["formula"] == pytest.approx(formula)


def test_the_rest_of_a_run_is_not_used_for_its_own_speedup():
    found = chains_of((0.2, 9.0, 0.5))
    assert [one["rest"] for one in found] == pytest.approx([0.2, 9.0, 0.5])
    lines, means = np.array([9 + 8.5 / 2, 0.3, 0.2 + 3 * 8.8]), np.array([4.75, 0.35, 4.6])
    said = [one["inputs"]["draft_overhead"] for one in found]
    assert said == pytest.approx((lines + means) / 2)
    assert found[1]["others"] == pytest.approx(2 * 1.25 / (1.6 + 2 * 0.25 + 0.25 + 0.325))


def test_each_half_of_the_prompts_is_computed_with_the_rest_of_the_other(monkeypatch):
    """Of two batches, the second of which spends longer on rounds that accept more."""
    monkeypatch.setattr(calculated, "beside_others", lambda chains: chains)
    rounds, accepted, rests = (30, 24), ([20, 10], [20, 16]), (0.4, 1.4)
    counts = heldout._Counts([], [], [], [], [])
    times = []
    for number, at, rest in zip(rounds, accepted, rests, strict=True):
        counts.stats.append([number, 60, 2 * number, sum(at), 60, number])
        counts.sizes.append(1)
        counts.accepted_at.append(np.asarray(at))
        counts.same.append([True])
        counts.rows.append([[1] * 60])
        times.append([[1.0, 60 * 2.0 * 1.25], [1.0, number * 2.0 * (1.6 + 0.5 + 0.25 + rest)]])
    runs = [counts.of([half]).figures(np.asarray(times)[[half]], True) for half in range(2)]
    run = counts.figures(np.asarray(times), True) | {"parts": runs}
    seconds = [{"pass": 4.0, "round": 5.0}, {"draft": 2.0, "pass": 6.4}]
    found = calculated.computed({"seconds": seconds, "chains": [{"run": run}]}, 1)[0]["halves"]
    assert [one["rest"] for one in found] == pytest.approx(rests)
    for one, at, number, rest in zip(found, accepted, rounds, reversed(rests), strict=True):
        tau = 1 + sum(at) / number
        cost = (1.6 + 0.5 + 0.25 + rest) / 1.25
        assert one["others"] == pytest.approx(tau / cost)
        assert calculated.speedup(one, "others") == pytest.approx(tau / cost)


def test_figures_of_parts_are_those_of_their_batches():
    """``measure_model`` hands every second batch to one part, and all to the whole."""
    lm, texts = specjax.load("embedded"), heldout.prompts(3)
    ways = [("ngram", specjax.Drafting(num=2))]
    asked = [specjax.Sampling(temperature=0)] * 3
    found = heldout.measure_model(lm, ways, texts, asked, 8, 1, parts=2)[0]
    even, odd = found["parts"]
    assert (even["identical"], odd["identical"]) == ("2 of 2", "1 of 1")
    assert found["identical"] == "3 of 3"
    alone = heldout.measure_model(lm, ways, texts[1:2], asked[:1], 8, 1)[0]
    assert odd["tau"] == alone["tau"] and odd["repeated_4grams"] == alone["repeated_4grams"]


def test_a_line_that_falls_below_zero_stands_for_no_rest():
    def chain(num, rest):
        known = dict(acceptance=[0.5] * num, draft_cost=0.1, passes={1: 1.0, num + 1: 1.2})
        return {"run": {}, "inputs": {"rate": 0.5, **known, "overhead": 0.25}, "rest": rest}

    last = calculated.beside_others([chain(1, 9.0), chain(2, 1.0), chain(4, 0.3)])[2]
    assert last["others"] == pytest.approx(1.9375 * 1.25 / (1.2 + 4 * 0.1 + 0.25))


def test_delays_are_those_of_reading_and_of_rounds_and_a_batch_waits_for_its_slowest_row():
    rate = dict(acceptance=[0.5], draft_cost=0.25, passes={1: 1.0, 2: 1.5}, overhead=0.5)
    inputs = {"rate": 0.5, **rate, "draft_overhead": 0.5}
    # 4 requests of 3 tokens, 2 together: plain reads for 4 s a batch, and its rounds take 2 s
    plain = dict(plain_tokens_per_second_rounds=1.0, plain_tokens_per_second_whole=12 / 16)
    own, others = 12 / 16, (12 / 15, 12 / 12)  # reading takes 6 s, and 5.5 and 4 s a batch
    runs = [
        plain | dict(tokens_per_second_rounds=2.0, tokens_per_second_whole=whole, slowest=1.5)
        for whole in (own, *others)
    ]
    chains = [{"run": run, "inputs": inputs, "pass_seconds": 2.0} for run in runs]
    found = calculated.latencies(chains, 4, 3, 2)
    assert found[0]["ttft"] == pytest.approx((6.0, 4.0 * (1 + (1.5 / 4 + 0.0) / 2)))
    assert found[2]["ttft"] == pytest.approx((4.0, 4.0 * (1 + (2.0 / 4 + 1.5 / 4) / 2)))
    assert found[0]["tpot"] == pytest.approx((1.0, 1.5 * 2.0 * (1.5 + 0.25 + 0.5 + 0.5) / 1.5))
    quicker = calculated.latencies(
        [chains[0], {**chains[2], "run": runs[2] | {"tokens_per_second_whole": 12 / 10}}], 4, 3, 2
    )
    assert quicker[0]["ttft"] == pytest.approx((6.0, 4.0))  # no reading costs less than none


def test_a_part_is_timed_without_the_cost_of_a_call():
    told = iter([9.0, 2.0 + 3.0 / 5])  # the first call is slower, and does not count
    many = SimpleNamespace(times=5, seconds=lambda: next(told))
    part = measured.Part(many, SimpleNamespace(times=1, seconds=lambda: 2.0 + 3.0))
    assert part.calls() == pytest.approx((5 * 2.0 + 3.0, 2.0 + 3.0))
    disturbed = [(5 * 2.0 + 3.0 + late, 5.0 + 2 * late) for late in range(11)]
    assert part.seconds(disturbed) == pytest.approx((13.0 + 5 - (5.0 + 10)) / 4)


def test_runs_and_the_parts_of_their_rounds_are_timed_in_turn(monkeypatch):
    asked = []
    monkeypatch.setattr(heldout, "run", lambda work: (1.0, asked.append(work) or 2.0, work))

    def part(name):
        return SimpleNamespace(calls=lambda: asked.append(name) or (0.5, 0.25))

    parts = [{"pass": part("a"), "draft": part("b")}, {"pass": part("c")}]
    spent = [{"pass": [], "draft": []}, {"pass": []}]
    runs = measured.in_turn(parts, spent, np.random.default_rng(0))
    monkeypatch.setattr(measured, "PARTS", 2)
    orders = set()
    for turn in range(12):
        asked.clear()
        seconds, outs = runs(["plain", "draft"], [0, 1])
        orders.add(tuple(asked))
        assert {"draft", "plain"} < set(asked)
        assert len(asked) == (4 if turn % 2 == 0 else 3)  # each part once in two turns
        assert outs == ["plain", "draft"] and seconds.tolist() == [[1.0, 2.0]] * 2
    assert [calls for one in spent for calls in one.values()] == [[(0.5, 0.25)] * 6] * 3
    assert len(orders) > 3


@pytest.mark.parametrize(
    "words, message",
    [
        ("--repetitions 0", "--repetitions 0: it must be at least 1"),
        ("--batch 8 --prompts 8", "--batch 8: .* divide --prompts 8 into 2 batches or more"),
        ("--batch 3", "--batch 3: .* divide --prompts 16"),
        ("--prompts 2 --repetitions 1", "in 2 turns not all 12 parts are timed"),
    ],
)
def test_runs_of_which_nothing_could_be_said_are_refused(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        measured.main([*words.split(), "--out", str(tmp_path)])
    assert re.search(message, capsys.readouterr().err) and not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["calculator", "calculator-batches"])
def test_the_stored_runs_give_the_stored_page(name):
    folder = measured.RESULTS.with_name(name)
    header, *rows = map(json.loads, (folder / runner.KEPT).read_text("utf-8").splitlines())
    page = measured.page(header, rows)
    assert page == (folder / "README.md").read_text("utf-8")
    assert page != measured.page(header, rows[:-1])


def test_arrays_are_taken_as_lists_are():
    assert calculate(np.array([0.8, 0.7])) == calculate([0.8, 0.7])


def test_a_tree_is_paid_by_level_and_by_node():
    rates = [[0.6, 0.2], [0.5, 0.1]]
    found = calculate(rates, tree="2x1", draft_cost=0.1, knee=2, batch=3).asked
    assert found.tokens == pytest.approx(1 + 0.8 + 0.8 * 0.5)
    # passes over 3 rows cost 1.5; five nodes a row cost 7.5; the second level feeds two nodes
    assert found.cost == pytest.approx((7.5 + 0.1 * (1.5 + 3.0)) / 1.5)
    own = calculate(rates, tree=trees.Tree((-1, 0, 0, 1)), parallel=True, draft_cost=0.1).asked
    assert own.cost == pytest.approx(1.1) and own.tokens == pytest.approx(1 + 0.8 + 0.6 * 0.5)


def test_a_round_that_drafts_has_an_overhead_of_its_own():
    given = dict(num_draft=2, draft_cost=0.1, passes={1: 1.0, 3: 1.2}, overhead=0.25)
    found = calculate(0.5, **given, draft_overhead=0.35)
    assert found.asked.cost == pytest.approx((1.2 + 2 * 0.1 + 0.25 + 0.35) / 1.25)
    assert found.plain == calculate(0.5, **given).plain  # plain rounds do not have it


def test_requests_are_the_prompt_and_the_rounds():
    found = calculate(
        0.5, num_draft=1, draft_cost=0.2, knee=10, batch=2, prompt=25, new_tokens=30, pass_seconds=2
    )
    one, plain = found.asked, found.plain
    assert (one.cost, one.tokens, one.tpot) == pytest.approx((1.2, 1.5, 1.6))
    assert (one.ttft, plain.ttft) == pytest.approx((2 * 5 * 1.2, 2 * 5))
    slow = calculate(0.5, num_draft=1, knee=10, batch=2, prompt=25, pass_seconds=2, read_cost=0.7)
    assert (slow.asked.ttft, slow.plain.ttft) == pytest.approx((2 * 5 * 1.7, 2 * 5))
    assert (one.seconds, plain.seconds) == pytest.approx((12 + 29 / 1.5 * 2.4, 10 + 29 * 2))
    assert one.throughput == pytest.approx(60 / one.seconds)
    assert one.whole_speedup == pytest.approx(plain.seconds / one.seconds)


def test_the_best_length_is_that_of_the_greatest_speed_up_and_may_be_none():
    found = calculate(0.8, draft_cost=0.05)
    assert found.best.num_draft == 8
    assert found.best.speedup == max(one.speedup for one in found.chains)
    none = calculate(0.3, draft_cost=0.4)
    assert none.best is none.plain and "no chain is faster" in str(none)
    assert calculate(0.8, knee=32, batch=16).best.num_draft == 1  # wide passes cost arithmetic


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give one of the two"),
        ({"acceptance": 0.5, "tau": 2}, "give one of the two"),
        ({"acceptance": 1.2}, "from 0 to 1"),
        ({"acceptance": []}, "chain"),
        ({"acceptance": [0.5], "num_draft": 2}, "a rate for each"),
        ({"acceptance": 0.5, "tree": "2x1"}, "a rate for each"),
        ({"acceptance": [[0.7, 0.4]], "tree": "2"}, "sum to more than 1"),
        ({"acceptance": 0.5, "tree": "expand:2x2x4"}, "static tree"),
        ({"acceptance": 0.5, "tree": "2x1", "num_draft": 2}, "give one of the two"),
        ({"tau": 5, "num_draft": 3}, "from 1 to 4"),
        ({"acceptance": 0.5, "draft_cost": -1}, "draft_cost=-1"),
        ({"acceptance": 0.5, "draft_overhead": -0.1}, "draft_overhead=-0.1"),
        ({"acceptance": 0.5, "read_cost": -0.1}, "read_cost=-0.1"),
        ({"acceptance": 0.5, "knee": 0}, "knee=0"),
        ({"acceptance": 0.5, "num_draft": True}, "num_draft=True: give a whole number"),
        ({"acceptance": 0.5, "num_draft": 2.5}, "num_draft=2.5: give a whole number"),
        ({"acceptance": True}, "acceptance=True"),
        ({"acceptance": 0.5, "knee": True}, "knee=True"),
        ({"acceptance": 0.5, "batch": True}, "batch=True"),
        ({"acceptance": 0.5, "batch": float("nan")}, "batch=nan"),
        ({"acceptance": 0.5, "pass_seconds": 0}, "pass_seconds=0"),
        ({"acceptance": 0.5, "pass_seconds": 1e-320}, "at least 1e-12"),
        ({"acceptance": 0.5, "most": 10**9}, "give a whole number from 1 to 1023"),
        ({"acceptance": 0.5, "passes": {2: 1.0}}, "relative to"),
        ({"acceptance": 0.5, "passes": {1: 1.0, 4: float("inf")}}, "relative to"),
        ({"acceptance": 0.5, "passes": [1.0]}, "relative to"),
        ({"acceptance": "0.8"}, "acceptance='0.8': give a number from 0 to 1, a list"),
        ({"acceptance": [[0.5], "0.5"]}, "give a number from 0 to 1, a list"),
        ({"acceptance": [[0.5], []]}, "at least one rate for each depth"),
        ({"acceptance": [[0.7, 0.12, 0.05], [0.6]], "tree": "3x2"}, "has 1 rate for depth 2, at"),
        ({"tau": "2"}, "tau='2': give a number"),
        ({"acceptance": 0.5, "batch": 1.5}, "batch=1.5: give a whole number from 1 to 1e+15"),
        ({"acceptance": 0.5, "knee": "8"}, "knee='8': give a number of tokens"),
        ({"acceptance": 0.5, "draft_cost": 1e308}, "draft_cost=1e+308: give a number from 0 to"),
        ({"acceptance": 0.5, "new_tokens": 10**400}, "new_tokens=1000"),
        ({"acceptance": 0.5, "pass_seconds": 1e300}, "pass_seconds=1e+300: give seconds, at"),
        ({"acceptance": 0.5, "passes": {1: 1.0, 4: 1.2}, "num_draft": 4}, "sizes up to 4"),
    ],
)
def test_bad_numbers_are_refused_by_their_name(given, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        calculate(**given)


def test_the_command_prints_tables_and_draws(tmp_path, capsys):
    words = "calculator --acceptance 0.8 --num-draft 4 --batch 1 8 --knee 64 --pass-ms 20".split()
    assert cli.main([*words, "--picture", str(tmp_path / "speed.svg")]) == 0
    said = capsys.readouterr().out
    assert "chain(4): 3.36 tokens a round, 2.80 × plain; the best chain has 8: 3.09 × plain" in said
    drawn = xml.etree.ElementTree.parse(tmp_path / "speed.svg")
    lines = list(drawn.iter("{http://www.w3.org/2000/svg}polyline"))
    assert len(lines) == 4 and all(len(line.get("points").split()) == 17 for line in lines)
    tree = "calculator --tree 2x1 --acceptance 0.6,0.2 0.5 --passes 1:1 8:1.5 --json".split()
    assert cli.main(tree) == 0
    (found,) = json.loads(capsys.readouterr().out)["calculations"]
    assert found["asked"]["tokens"] == pytest.approx(1.0 + 0.8 + 0.4)
    beside = "calculator --acceptance 0.5 --num-draft 1 --draft-cost 0 --draft-overhead 0.5 --json"
    assert cli.main([*beside.split(), *"--prompt 9 --read-cost 0.25".split()]) == 0
    (found,) = json.loads(capsys.readouterr().out)["calculations"]
    assert found["asked"]["cost"] == pytest.approx(1.5) and found["asked"]["ttft"] == 1.25
    assert cli.main(["calculator", "--acceptance", "0.5", "x"]) == 2
    assert cli.main(["calculator", "--acceptance", "0.5", "--knee", "0"]) == 2
    assert "--knee" in capsys.readouterr().err
    beside = ["--picture", str(tmp_path / "many.svg"), "--batch", *"1234567"]
    assert cli.main(["calculator", "--acceptance", "0.5", *beside]) == 2
    assert "--batch 1 2 3 4 5 6 7: a picture has colours for 6" in capsys.readouterr().err
    widest = "--draft-cost 1e15 --overhead 1e15 --knee 1 --prompt 999999999999999 --pass-ms 1e18"
    assert cli.main(["calculator", "--acceptance", "0.5", "--json", *widest.split()]) == 0
    assert not re.search("Infinity|NaN", capsys.readouterr().out)
    for words in (
        "--passes 1:1 4:inf",
        "--pass-ms 1e19",
        "--pass-ms -1",
        "--pass-ms 1e-320",
        "--passes 1:1 1:2",
    ):
        assert cli.main(["calculator", "--acceptance", "0.5", *words.split()]) == 2
        assert f"error: {words[:9]}" in capsys.readouterr().err


# ------------------------------------------------------------------ the page in the browser


def test_python_gives_the_stored_values(golden):
    assert not golden.differences(stored(golden)["expected"], golden.python_values())


def test_the_browsers_code_gives_the_stored_values(golden):
    """Without Node.js: the code is the one that gave them when they were stored."""
    assert stored(golden)["script"] == golden.digest()
    if NODE:
        assert not golden.differences(stored(golden)["expected"], golden.browser_values(NODE))


@pytest.mark.skipif(not NODE, reason="needs Node.js")
def test_fault_in_the_browsers_code_is_seen(golden, tmp_path):
    """Also where drafting is paid once a round, the batch is forgotten, or a rank is left out."""
    code = golden.SCRIPT.read_text("utf-8")
    for right, wrong in (
        ("drafting += pass(batch * level)", "drafting = pass(batch * level)"),
        ("pass(batch * nodes)", "pass(nodes)"),
        ("children.length ? draft_overhead : 0", "0"),
        ("1 + read_cost", "1 + draft_cost"),
        ("return less + ", "return cost + "),
        ("slice(0, count)", "slice(0, 1)"),
    ):
        assert right in code
        (tmp_path / "planted.js").write_text(code.replace(right, wrong), encoding="utf-8")
        found = golden.browser_values(NODE, tmp_path / "planted.js")
        assert golden.differences(stored(golden)["expected"], found), wrong


@pytest.mark.skipif(not NODE, reason="needs Node.js")
def test_the_form_of_the_page_is_computed(golden):
    page = PAGE.read_text("utf-8")
    fields = re.findall(r'<input name="(\w+)"(?: type="checkbox")?(?: value="([^"]*)")?', page)
    elements = {name: {"value": value, "checked": False} for name, value in fields}
    measured = elements | {"passes": {"value": "1:1 3:1.5 5:2"}, "draft_overhead": {"value": "0.8"}}
    code = (
        f"const {{ show }} = require({json.dumps(str(golden.SCRIPT))}); const place = {{}};"
        f"for (const elements of {json.dumps([elements, measured])}) {{"
        "show({elements}, place); console.log(JSON.stringify(place)); }"
    )
    done = subprocess.run([NODE, "-e", code], capture_output=True, text=True, check=True)
    shown, other = (json.loads(line)["innerHTML"] for line in done.stdout.splitlines())
    assert "3.36 tokens a round, 1.12 × plain" in other and other.count("<tr>") == 6
    assert "3.36 tokens a round, 2.80 × plain" in shown and shown.count("<tr>") == 18
    xml.etree.ElementTree.fromstring(re.search("<svg.*</svg>", shown)[0])
    assert 'id="calculator"' in page and 'id="calculated"' in page
    assert '<script src="../assets/calculator.js"></script>' in page
