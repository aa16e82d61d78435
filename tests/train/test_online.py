"""A drafter that learns from what it serves: what is kept and learned, and what never changes."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import chex
import jax
import numpy as np
import pytest
from specjax.train import (
    config,
    export,
    learner,
    losses,
    metrics,
    model,
    online,
    recovery,
    report,
    tokenizer,
)
from specjax.train.cli import main
from training_toys import forward

import specjax
from specjax.decoding import loop, prefill
from specjax.drafters import Plain
from specjax.models import DecoderConfig
from specjax.models.causal_lm import CausalLM
from specjax.models.lm import LM

SMALL = DecoderConfig(
    vocab_size=23,
    hidden_size=12,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    tie_embeddings=True,
    eos_ids=(0,),
)
CAPACITY, NEW = 40, 32
PROMPTS = np.random.default_rng(0).integers(1, 23, (4, 8)).astype(np.int32)
LENGTHS = np.full(4, 8, np.int32)
SETTINGS = dict(key=jax.random.key(7), max_new_tokens=NEW)


def near(params, noise):
    """Weights of a drafter that is often, but not always, right."""
    leaves, shape = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    moved = [x + noise * x.std() * rng.normal(size=x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(shape, moved)


PARAMS = jax.tree.map(lambda x: 3 * x, model.create(SMALL, 0)[1])  # far from uniform
TARGET = LM(CausalLM(SMALL), PARAMS, None, "toy", "")
DRAFT = dataclasses.replace(TARGET, params=near(PARAMS, 0.15), name="draft")
FAST = config.OptimizerConfig(name="adamw", adam_rate=0.02, weight_decay=0.0, warmup=1)


def fresh(**fields):
    fields = dict(top_k=5, updates=8, rows=4, optimizer=FAST) | fields
    return learner.Online(
        TARGET, DRAFT, capacity=CAPACITY, learning=learner.LearningConfig(**fields)
    )


def plain(temperature=0.0):
    return specjax.decode(
        TARGET.target,
        Plain(),
        {"target": TARGET.params},
        PROMPTS,
        LENGTHS,
        sampling=specjax.Sampling(temperature=temperature),
        capacity=CAPACITY,
        **SETTINGS,
    )


@pytest.mark.parametrize("keep", ["rejected", "judged"])
def test_the_target_s_laws_are_kept_where_they_are_wanted(keep):
    session = fresh(keep=keep)
    out = session.serve(PROMPTS, LENGTHS, **SETTINGS)
    graph = model.create(TARGET.config, 0)[0]
    tokens = np.asarray(out.tokens)
    logits = forward(graph, TARGET.params, tokens, np.zeros_like(tokens))
    expected = losses.compress(logits, 5)
    assert session.num_laws > 10
    kept = session.state["buffer"]
    for row in range(len(PROMPTS)):
        seen = np.flatnonzero(kept["seen"][row])
        for got, want in zip(jax.tree.leaves(kept["laws"]), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got[row, seen], np.asarray(want)[row, seen], atol=1e-4)
        # every token but the first, which has no draft, is after a position that was judged; no
        # accepted one after a rejected one
        drafted = np.asarray(out.from_draft)[row]
        emitted = np.arange(9, int(out.lengths[row]))
        if keep == "judged":
            np.testing.assert_array_equal(seen, emitted - 1)
        else:
            assert not drafted[seen + 1].any()
            run, bonus = 0, []  # a token of the target's own after three accepted ones is a bonus
            for place in emitted:
                run, own = (run + 1, False) if drafted[place] else (0, True)
                if own and drafted[max(place - 3, 9) : place].sum() == 3:
                    bonus.append(place)
            last = emitted[-1]  # what the budget cut short was not rejected
            rejected = [p for p in emitted if not drafted[p] and p not in bonus and p != last]
            np.testing.assert_array_equal([p for p in seen + 1 if p != last], rejected)


def test_text_is_the_target_s_after_every_swap_and_no_swap_compiles_anything(monkeypatch):
    chex.clear_trace_counter()
    session, expected = fresh(), plain()
    before, once = session.params["drafter"], chex.assert_max_traces(n=1)
    start, burst = jax.jit(once(prefill.start), static_argnums=(0, 1, 2, 3, 6)), once(loop.burst)
    monkeypatch.setattr(loop, "jit_start", start)
    monkeypatch.setattr(loop, "jit_burst", jax.jit(burst, static_argnums=(0, 1, 2)))
    session._step = jax.jit(once(session._make_step(session.drafter.inner.model.config)))
    for _ in range(3):
        out = session.serve(PROMPTS, LENGTHS, **SETTINGS)
        np.testing.assert_array_equal(out.tokens, expected.tokens)
        assert session.learn()["loss"] > 0
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, session.params["drafter"])
    assert min(jax.tree.leaves(moved)) > 0


def test_the_drafter_is_accepted_more_often_for_what_it_has_learned():
    slow = dataclasses.replace(FAST, adam_rate=0.002)
    session, rates, found = fresh(keep="judged", top_k=23, updates=60, optimizer=slow), [], []
    for _ in range(3):
        stats = session.serve(PROMPTS, LENGTHS, **SETTINGS).stats
        rates.append(float(stats.accepted.sum() / stats.drafted.sum()))
        found.append(session.learn()["loss"])
    assert rates[-1] > rates[0] + 0.2
    assert found[-1] < found[0] / 2


def test_recording_changes_nothing_that_is_drawn():
    session = fresh()
    hot = specjax.Sampling(temperature=1.0)
    recorded = session.serve(PROMPTS, LENGTHS, sampling=hot, **SETTINGS)
    bare = specjax.decode(
        TARGET.target,
        session.drafter.inner,
        session.params,
        PROMPTS,
        LENGTHS,
        sampling=hot,
        capacity=CAPACITY,
        **SETTINGS,
    )
    np.testing.assert_array_equal(recorded.tokens, bare.tokens)
    assert (recorded.tokens != plain().tokens).any()


def test_a_loss_that_is_not_finite_leaves_the_weights_alone():
    session = fresh()
    assert session.learn() == {}  # nothing served yet
    session.serve(PROMPTS, LENGTHS, **SETTINGS)
    session.state["buffer"]["laws"].rest[:] = np.nan
    before = session.params["drafter"]
    with pytest.raises(FloatingPointError, match="keeps the weights it had"):
        session.learn()
    assert session.params["drafter"] is before


def test_the_buffer_holds_the_last_rows():
    session, settings = fresh(buffer=6), {**SETTINGS, "sampling": specjax.Sampling(temperature=1.0)}
    written = []
    for number in range(3):
        settings["key"] = jax.random.key(number)
        written += list(np.asarray(session.serve(PROMPTS, LENGTHS, **settings).tokens))
    kept = {tuple(row) for row in session.state["buffer"]["tokens"]}
    assert kept == {tuple(row) for row in written[-6:]} and len(kept) == 6


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(config.ConfigError, match="learning.keep='all'"):
        learner.LearningConfig(keep="all")
    with pytest.raises(config.ConfigError, match="top_k=99; accepted: 1 to 23"):
        fresh(top_k=99)
    with pytest.raises(config.ConfigError, match="a multiple of batch=8"):
        online.OnlineConfig(eval_rows=9)


def test_recovery_is_a_share_of_what_was_lost_with_an_interval_over_prompts():
    assert recovery.recovered(home=0.8, before=0.6, now=0.7) == pytest.approx(0.5)
    assert recovery.recovered(home=0.5, before=0.6, now=0.7) == 0.0
    rng = np.random.default_rng(0)

    def prompts(rate, n=200):
        return np.stack([rng.binomial(50, rate, n), np.full(n, 50)], axis=1).astype(float)

    home, before = prompts(0.8), prompts(0.6)
    now = before + [[5, 0]]  # each prompt gains as much: only the loss is uncertain
    value, low, high = recovery.recovery(home, before, now)
    assert value == pytest.approx(0.1 / (recovery.rate(home) - recovery.rate(before)))
    assert value - 0.05 < low < value < high < value + 0.05
    few = recovery.recovery(home[:20], before[:20], now[:20])
    assert few[2] - few[1] > 2 * (high - low)


def test_a_session_goes_on_from_its_state_as_if_it_had_not_ended():
    def served(session, numbers):
        found = []
        for number in numbers:
            hot = specjax.Sampling(temperature=1.0)
            settings = {**SETTINGS, "key": jax.random.key(number), "sampling": hot}
            found.append(session.serve(PROMPTS, LENGTHS, **settings).tokens)
            found.append(jax.tree.leaves(session.learn()))
        return jax.tree.leaves([found, session.state])

    session, other = fresh(buffer=6), fresh(buffer=6)
    served(session, [0, 1])
    other.state = jax.tree.map(np.array, session.state)
    for one, two in zip(served(session, [2, 3]), served(other, [2, 3]), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.fixture(scope="module")
def command(place):
    """``command(folder, *fields)``: the words of a run of a few requests."""
    root, _, teacher = place
    for kind in recovery.MEASURES:
        (root / f"{kind}.npz").write_bytes((root / "samples.npz").read_bytes())
    target, drafter = str(root / "target" / "model"), root / "without"
    lm = specjax.load(target)
    params, vocabulary = near(lm.params, 0.15), tokenizer.load(target)
    export.export(lm.config, params, drafter, vocabulary, with_tokenizer=False)  # as `distill` does
    settings = root / "online.toml"
    settings.write_text(f"""
{teacher.replace("=", '="')}"
drafter = "{drafter}"
text = "{root / "corpus"}"
home = {[str(root / f"{kind}.npz") for kind in recovery.MEASURES]}
batch = 4
prompt_tokens = 6
new_tokens = 8
eval_rows = 4
[learning]
updates = 1
rows = 4
top_k = 4
buffer = 12
[decoding]
num_prompts = 4
batch = 4
prompt_tokens = 6
new_tokens = 8
[report]
texts = 1
plan_prompts = 0
[run]
steps = 6
eval_every = 3
save_every = 2
""")

    def words(folder, *fields):
        return ["online", "--config", str(settings), f"run.folder={folder}", *fields]

    return words


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("online")
    assert main(command(folder)) == 0
    return folder


def learned(folder):
    """What was measured at each request, times aside; and the weights that were exported."""
    times = {"seconds", "data_wait", "tokens_per_second"}
    rows = [
        {name: value for name, value in row.items() if name not in times}
        for row in metrics.read(folder / metrics.LOG)
    ]
    return rows, (folder / "model" / "model.safetensors").read_bytes()


def test_the_recipe_leaves_a_curve_a_report_and_a_drafter(whole, place):
    home, *curve = metrics.read(whole / "curve.jsonl")
    assert [row["requests"] for row in curve] == [0, 3, 6]
    assert all(0 < value <= 1 for value in home["home"].values())
    assert curve[0]["greedy_recovered"] == 0.0
    assert (whole / "curve.png").stat().st_size > 1000
    page = (whole / report.PAGE).read_text()
    assert "Agreement with the target" in page and "learning.buffer" in page
    lm = specjax.load(place.root / "target" / "model")
    texts = [
        specjax.generate(lm, "x1 = f(", drafter=drafter, max_new_tokens=8).text
        for drafter in (str(whole / "model"), "plain")
    ]
    assert texts[0] == texts[1]
    card = (whole / "model" / "README.md").read_text()
    assert "rows of 14 tokens" in card and "Licence of the data: not stated" in card


def test_killed_it_goes_on_to_serve_and_learn_the_same(command, whole, tmp_path):
    """Killed between two checkpoints, so that requests after the first are served again."""
    words = [sys.executable, "-m", "specjax.train", *command(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    while process.poll() is None and len(metrics.read(tmp_path / metrics.LOG)) < 3:
        time.sleep(0.002)
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    assert main(command(tmp_path)) == 0
    assert learned(tmp_path) == learned(whole)


def test_stopped_it_goes_on_to_serve_and_learn_the_same(command, whole, tmp_path, monkeypatch):
    serve, served = learner.Online.serve, []

    def stopped(self, *args, **kwargs):
        served.append(1)
        if len(served) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return serve(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(learner.Online, "serve", stopped)
        with pytest.raises(SystemExit) as found:
            main(command(tmp_path))
    assert found.value.code == 128 + signal.SIGTERM
    assert main(command(tmp_path)) == 0
    assert learned(tmp_path) == learned(whole)


def test_a_drafter_that_is_never_rejected_serves_on_and_learns_nothing(command, place, tmp_path):
    target = place.root / "target" / "model"
    assert main(command(tmp_path, f"drafter={target}", "run.steps=2")) == 0
    rows, _ = learned(tmp_path)
    assert not any("loss" in row for row in rows)
    assert [row["accepted"] for row in rows if "accepted" in row] == [1.0, 1.0]


def test_heads_are_refused_before_anything_is_served(command, tmp_path, capsys):
    assert main(command(tmp_path / "run", "drafter=ngram")) == 2
    assert "drafter='ngram'; accepted: a draft model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_weights_that_are_no_longer_finite_end_the_run(command, tmp_path, monkeypatch, capsys):
    def poisoned(self):
        raise FloatingPointError

    monkeypatch.setattr(learner.Online, "learn", poisoned)
    assert main(command(tmp_path)) == 1
    assert "step 1: loss nan" in capsys.readouterr().err
