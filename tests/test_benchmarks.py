"""The suites: what they keep, what they say, and that their figures fit together."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import (
    heldout,
    jobs,
    pairs,
    peers,
    plots,
    rows,
    runner,
    suites,
    training,
)
from benchmarks.__main__ import main
from benchmarks.tables import cells

ROOT = Path(__file__).parent.parent
TORCH = importlib.util.find_spec("torch") is not None


# ---------------------------------------------------------------- the smoke suite, really run


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory, cache):
    """The folder of a finished smoke suite. In a process of its own: with one CPU device."""
    folder = tmp_path_factory.mktemp("smoke")
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    command = [sys.executable, "-m", "benchmarks", "smoke", "--out", folder, "--cache", cache]
    subprocess.run([*map(str, command)], cwd=ROOT, env=environment, check=True)
    return folder


@pytest.fixture(scope="module")
def found(smoke):
    """``[(row, figures), ...]`` of it."""
    outcomes = json.loads((smoke / "results.json").read_text())["rows"]
    return [(o["row"], o["figures"]) for o in outcomes if "figures" in o]


def test_the_smoke_suite_measures_every_kind_of_row(smoke, found):
    kinds = set(rows.KINDS) - {"long context", "cpu peers"} - (set() if TORCH else {"peer"})
    assert {row["kind"] for row, _ in found} == kinds
    for name in ("README.md", "results.json", "rows.jsonl", "acceptance.png", "round.png"):
        assert (smoke / name).stat().st_size > 0, name


def test_tokens_rounds_and_acceptance_fit_together(found):
    decoded = [(row, f) for row, f in found if row["kind"] == "decode"]
    assert {f["drafter_name"] for _, f in decoded} > {"plain", "draft", "ngram", "synthetic"}
    for row, f in decoded:
        later = row["new"] - row.get("read", True)  # reading the prompt emits the first token
        assert f["emitted"] == later * row.get("batch", 1)
        if row.get("batch", 1) == 1:
            assert f["tau"] * f["rounds"] == pytest.approx(f["emitted"])
            # the last round may end at the budget, with a drafted token instead of its own
            accepted = sum(f["acceptance_by_position"]) * f["rounds"]
            assert 0 <= accepted - (f["emitted"] - f["rounds"]) < 1.001
        for figure in ("plain_tokens_per_second", "tokens_per_second"):
            assert 0 < f[figure]["q25"] <= f[figure]["median"] <= f[figure]["q75"]
        assert f["ratio_rounds"]["low"] <= f["ratio_rounds"]["median"] <= f["ratio_rounds"]["high"]
        assert f["identical"] is True
        if "memory" in f:
            memory = f["memory"]
            parts = memory["weights"] + memory["cache"] + memory["working_set"]
            assert memory["peak"] == parts and memory["working_set"] > 0


def test_plain_decoding_against_itself_takes_one_token_a_pass(found):
    (plain,) = (f for row, f in found if row.get("drafter") == "plain")
    assert plain["tau"] == 1 and plain["acceptance"] is None


def test_memory_of_the_training_step_grows_with_the_tokens_and_not_with_their_square(found):
    (figures,) = (f for row, f in found if row["kind"] == "training")
    short, long = figures["bytes"]["1024"], figures["bytes"]["4096"]
    assert 1.5 < long / short < 4.4
    seconds = {name: x["median"] for name, x in figures["seconds"].items()}
    assert seconds["step"] > max(seconds["target"], seconds["update"])


def test_a_made_up_context_leaves_the_agreement_as_it_is(found):
    (made_up,) = (f for row, f in found if row.get("read") is False)
    assert made_up["acceptance"] > 0.4


@pytest.mark.skipif(not TORCH, reason="needs PyTorch")
def test_the_peer_writes_the_same_text_in_as_many_rounds(found):
    (peer,) = (f for row, f in found if row["kind"] == "peer")
    methods = peer["methods"]
    assert {m: x["same_text"] for m, x in methods.items()} == dict.fromkeys(methods, 1.0)
    assert methods["hf assisted"]["tau"] == pytest.approx(methods["draft"]["tau"], rel=0.1)
    assert methods["draft"]["tau"] > 1.5
    assert methods["plain"]["tau"] == methods["hf plain"]["tau"] == 1


def test_every_synthetic_row_is_labelled_so(smoke, found):
    page = (smoke / "README.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| tiny |")]
    assert len(lines) == sum(row["kind"] == "decode" for row, _ in found)
    assert all("(synthetic)" in line for line in lines)


def test_a_finished_suite_is_not_measured_again(smoke, cache):
    before = (smoke / "rows.jsonl").read_bytes()
    command = [sys.executable, "-m", "benchmarks", "smoke", "--out", smoke, "--cache", cache]
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    again = subprocess.run(
        [*map(str, command)], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    assert "rows were measured before: continuing" in again.stderr
    if TORCH:
        assert (smoke / "rows.jsonl").read_bytes() == before


def test_the_toy_language_is_followed_but_for_its_noise():
    rng = np.random.default_rng(0)
    table = rng.integers(0, 16, (16, 16))
    for noise, least, most in ((0.0, 1.0, 1.0), (0.5, 0.45, 0.6)):
        text = training.write(rng, table, 4, 500, noise)
        said = training.follow(table, text)[:, :-1]
        assert least <= np.mean(said == text[:, training.LAG :]) <= most


# ---------------------------------------------------------------- keeping rows


@pytest.fixture
def counted(monkeypatch):
    """Suites whose rows measure nothing; returns the list of rows that were run."""
    ran = []

    def run(row, bench):
        ran.append(row)
        return {"best": 1e9, "by_columns": {1: 1e9}, "weights": 1}

    monkeypatch.setattr(rows, "run", run)
    monkeypatch.setattr(runner, "commit", lambda: "abc")
    monkeypatch.setitem(suites.SUITES, "four", lambda pair="tiny": FOUR)
    return ran


FOUR = [{"kind": "bandwidth", "number": n} for n in range(4)]


def run_four(folder, **options):
    return runner.run_suite("four", {}, folder=folder, cache=folder / "pairs", **options)


def test_an_interrupted_suite_goes_on_where_it_stopped(counted, monkeypatch, tmp_path):
    whole = rows.run

    def interrupted(row, bench):
        if row["number"] == 2:
            raise KeyboardInterrupt
        return whole(row, bench)

    monkeypatch.setattr(rows, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_four(tmp_path)
    assert counted == FOUR[:2]
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == 2
    monkeypatch.setattr(rows, "run", whole)
    assert run_four(tmp_path) == 0
    assert counted == FOUR


def test_a_line_that_was_cut_off_costs_that_row_alone(counted, tmp_path):
    run_four(tmp_path)
    kept = tmp_path / "rows.jsonl"
    kept.write_text(kept.read_text()[:-20])
    counted.clear()
    assert run_four(tmp_path) == 0
    assert counted == FOUR[3:]


@pytest.mark.parametrize("way", ["fresh", "commit"])
def test_beginning_anew_sets_the_earlier_rows_aside(counted, monkeypatch, tmp_path, way):
    run_four(tmp_path)
    before = (tmp_path / "rows.jsonl").read_text()
    if way == "commit":
        monkeypatch.setattr(runner, "commit", lambda: "def")
    run_four(tmp_path, fresh=way == "fresh")
    assert counted == FOUR + FOUR
    assert (tmp_path / "rows.before-1.jsonl").read_text() == before


def test_rows_of_one_kind_are_measured_anew_beside_the_others(counted, monkeypatch, tmp_path):
    other = {"kind": "other"}
    monkeypatch.setitem(suites.SUITES, "four", lambda pair="tiny": [*FOUR, other])
    run_four(tmp_path)
    counted.clear()
    monkeypatch.setattr(runner, "commit", lambda: "def")
    run_four(tmp_path, only="other")
    assert counted == [other]
    lines = [json.loads(x) for x in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert lines[0]["commit"] == "abc" and [x["row"] for x in lines[1:]] == [*FOUR, other]
    with pytest.raises(ValueError, match="--only passes: the suite four has bandwidth, other"):
        run_four(tmp_path, only="passes")


def test_a_row_that_fails_costs_no_other_and_is_tried_again(counted, monkeypatch, tmp_path):
    whole = rows.run

    def failing(row, bench):
        if row["number"] == 1:
            raise RuntimeError("out of memory")
        return whole(row, bench)

    monkeypatch.setattr(rows, "run", failing)
    assert run_four(tmp_path) == 1
    assert "out of memory" in (tmp_path / "README.md").read_text()
    monkeypatch.setattr(rows, "run", whole)
    counted.clear()
    assert run_four(tmp_path) == 0
    assert counted == [FOUR[1]]


def test_a_missing_peer_is_named_with_the_way_to_install_it(counted, monkeypatch, tmp_path):
    whole = rows.run

    def lacking(row, bench):
        if row["number"] == 1:
            peers.check_installed()
        return whole(row, bench)

    monkeypatch.setattr(rows, "run", lacking)
    monkeypatch.setattr(peers, "NEEDED", {"no_such_module": "no-such-peer"})
    assert run_four(tmp_path) == 0
    assert "pip install no-such-peer" in (tmp_path / "README.md").read_text()
    assert counted == [FOUR[0], *FOUR[2:]]


def test_no_figure_is_nan_in_json():
    line = runner.plain_numbers({"a": float("nan"), "b": [1.5, float("inf")], 4: 2})
    assert line == {"a": None, "b": [1.5, None], "4": 2}


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["speed"], "embedded, workloads, quality, self-drafting, scaling, peers, cpu-peers"),
        (["smoke", "--batches", "2"], "no such option; it has --pair"),
        (["cpu", "--pair", "70b"], "known: tiny, 100m, 8b"),
        (["scaling", "--contexts", "65536"], "the pair 100m has 32768 positions"),
        (["cpu", "--rehearse"], "--rehearse is for the suites gpu and cpu-peers"),
        (["cpu", "--redraw"], "run the suite first"),
        (["self-drafting", "--target", "no/model"], "no such folder"),
        (["self-drafting", "--twin", "tests"], "give --target too"),
    ],
)
def test_bad_input_is_refused_in_clear_words(arguments, said, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_the_gpu_suite_without_a_gpu_offers_a_rehearsal(tmp_path, capsys):
    assert main(["gpu", "--out", str(tmp_path)]) == 2
    assert "--rehearse" in capsys.readouterr().err


@pytest.mark.parametrize("name", suites.SUITES)
def test_every_row_of_every_suite_has_settings_that_its_kind_takes(name):
    for row in suites.rows_of(name):
        known = inspect.signature(rows.KINDS[row["kind"]]).parameters
        assert set(row) - {"kind"} <= set(known), row
        json.dumps(row)


def test_more_prompts_than_ship_are_refused():
    with pytest.raises(ValueError, match="held-out prompts ship"):
        heldout.prompts(100_000)
    with pytest.raises(ValueError, match="318 held-out prompts ship .* before the last 2"):
        heldout.prompts(319, 2)
    with pytest.raises(ValueError, match="prompts=1: 0 held-out prompts"):
        heldout.prompts(1, 400)
    assert heldout.prompts(3, 2) == heldout.prompts(5)[:3]


# ---------------------------------------------------------------- pairs


@pytest.fixture(scope="module")
def tiny(cache):
    return pairs.pair("tiny", 0.8, cache=cache)


def test_a_pair_agrees_as_often_as_asked(tiny):
    tokens = jnp.asarray(pairs.prompts(tiny.target.config, 8, 24, seed=77))
    again, text = pairs._agreement(tiny.target, tiny.draft, tokens)
    assert abs(tiny.found - 0.8) <= 0.03
    assert abs(again - 0.8) < 0.08  # other prompts
    assert tiny.repeated < 0.2 and text.shape == (8, pairs.NEW)


def test_the_drafter_is_the_first_layers_of_the_target(tiny):
    target, draft = tiny.target.params, tiny.draft.params
    np.testing.assert_array_equal(target["embedding"][...], draft["embedding"][...])
    for early, own in zip(
        jax.tree.leaves(target["blocks"][0]), jax.tree.leaves(draft["blocks"][0]), strict=True
    ):
        np.testing.assert_array_equal(early, own)
    assert len(draft["blocks"]) == pairs.EARLY < len(target["blocks"])


def test_a_pair_depends_on_its_seed_alone():
    first, again, other = (
        jax.tree.leaves(pairs._random(pairs.SHAPES["tiny"], "float32", seed))[0]
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_bisection_finds_the_scale_of_a_falling_agreement():
    scale, *_, found, _ = pairs.bisect(lambda s: (None, None, 1 - s**2, None), 0.64)
    assert found == pytest.approx(0.64, abs=pairs.TOLERANCE)
    assert scale == pytest.approx(0.6, abs=0.02)


def test_what_is_no_pair_is_refused():
    with pytest.raises(ValueError, match="known: tiny, 100m, 8b"):
        pairs.pair("70b")
    with pytest.raises(ValueError, match=r"\[0.05, 1\]"):
        pairs.pair("tiny", 1.5)


@pytest.mark.skipif(not TORCH, reason="needs PyTorch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peer_can_share_arrays_that_were_never_written(dtype):
    target, draft = pairs._lms(
        "tiny", pairs.SHAPES["tiny"], pairs._random(pairs.SHAPES["tiny"], dtype, 0)
    )
    theirs = peers.HuggingFace(pairs.Pair("tiny", target, draft, asked=0.5), dtype)
    ids = pairs.prompts(target.config, 1, 8)
    with theirs.torch.inference_mode():
        logits = theirs.target(theirs.torch.as_tensor(ids, dtype=theirs.torch.long)).logits
    ours = nnx.merge(pairs.graph_definition(target.config), target.params)(jnp.asarray(ids))
    tolerance = 1e-3 if dtype == "float32" else 0.15
    np.testing.assert_allclose(logits.float().numpy(), ours, atol=tolerance)


# ---------------------------------------------------------------- jobs and tables


def test_an_unknown_drafter_is_refused(tiny):
    with pytest.raises(ValueError, match="known: plain, draft, .*ngram, .*adaptive ngram"):
        jobs.make_job(tiny, "medusa", 3, pairs.prompts(tiny.target.config, 1, 8), 8)


def test_an_adaptive_drafter_gets_costs_that_were_measured(tiny):
    tokens = pairs.prompts(tiny.target.config, 1, 16)
    work = jobs.make_job(tiny, "adaptive draft", 3, tokens, 64)
    informed = jobs.informed(work, None, work.start)
    costs = informed.params["drafter"]["costs"]
    assert costs.shape == (len(work.drafter.widths),)
    assert np.all(np.isfinite(costs)) and np.all(costs > 0)


def test_a_ratio_is_put_into_words_by_its_interval():
    assert cells.verdict({"low": 1.1, "high": 1.3}) == "wins"
    assert cells.verdict({"low": 0.8, "high": 0.9}) == "**loses**"
    assert cells.verdict({"low": 0.9, "high": 1.1}) == "no difference shown"


def test_curves_join_rows_that_differ_in_one_setting():
    ratio = {"median": 1.0, "low": 0.9, "high": 1.1}
    settings = [(1, 1), (4, 1), (1, 2)]
    found = [
        (plots.DEFAULTS | dict(drafter="draft", num_draft=n, batch=b), {"ratio_rounds": ratio})
        for n, b in settings
    ]
    assert [[x for x, _ in points] for points in plots.curves(found, "num_draft").values()] == [
        [1, 4]
    ]
    assert [[x for x, _ in points] for points in plots.curves(found, "batch").values()] == [[1, 2]]
    assert not plots.curves(found, "context")


def test_a_suite_of_workloads_says_how_much_of_true_answers_is_copied(found):
    (figures,) = [f["ways"][0] for row, f in found if row["kind"] == "tables"]
    assert figures["tau"] > 1.2 and figures["identical"] == "2 of 2"
