"""A run that is killed, stopped or diverges loses nothing."""

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recipe_tables import model_table
from safetensors.numpy import save_file
from specjax.train import (
    checkpoint,
    cli,
    config,
    corpus,
    distill,
    evaluate,
    loop,
    metrics,
    model,
    pretrain,
    report,
    speculator,
)

TINY = f"""
{model_table()}
[data]
length = 16
batch = 4
eval_rows = 4
[optimizer]
warmup = 5
[run]
steps = 60
save_every = 10
eval_every = 30
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """``command(folder)``: the words of a tiny pretraining run into that folder."""
    root = tmp_path_factory.mktemp("corpus")
    for i in range(60):  # enough names that a few fall into the held-out split
        (root / f"{i}.txt").write_text("".join(f"x{j} = f(x{j * i % 7})\n" for j in range(20)))
    file = root / "tiny.toml"
    file.write_text(TINY)

    def words(folder, *extra):
        return [
            *(sys.executable, "-m", "specjax.train", "pretrain", "--config", str(file)),
            *(f"data.corpus={root}", f"run.folder={folder}", *extra),
        ]

    return words


def losses_of(folder):
    rows = report.read(folder / "log.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@contextlib.contextmanager
def interrupted(words, folder, number, after_step):
    """Runs the command, sends the signal once the log has ``after_step``, yields the process."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while process.poll() is None and max(losses_of(folder), default=0) < after_step:
            time.sleep(0.002)
        process.send_signal(number)
        yield process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def whole(command, tmp_path_factory):
    """The losses of a run that nothing disturbed, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    subprocess.run(command(folder), check=True, capture_output=True, timeout=120)
    return folder, losses_of(folder)


def test_a_run_leaves_its_config_log_picture_and_model(whole):
    folder, losses = whole
    assert sorted(losses) == list(range(1, 61)) and losses[60] < losses[1]
    assert json.loads((folder / "config.json").read_text())["run.steps"] == 60
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert (folder / "model" / "model.safetensors").is_file()
    heldout = [row for row in report.read(folder / "log.jsonl") if "heldout_loss" in row]
    assert [row["step"] for row in heldout] == [30, 60]


def test_killed_and_started_again_it_computes_the_same_losses_bit_for_bit(command, whole, tmp_path):
    with interrupted(command(tmp_path), tmp_path, signal.SIGKILL, after_step=15) as process:
        assert process.wait(timeout=60) == -signal.SIGKILL
    assert 15 <= max(losses_of(tmp_path)) < 60
    process = subprocess.Popen(command(tmp_path, "run.save_every=1"), stdout=subprocess.DEVNULL)
    half_written = lambda: any((tmp_path / "checkpoints").glob("*[0-9].*tmp*"))  # noqa: E731
    while process.poll() is None and not (
        max(losses_of(tmp_path), default=0) > 20 and half_written()
    ):
        pass
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL
    subprocess.run(command(tmp_path), check=True, capture_output=True, timeout=120)
    assert losses_of(tmp_path) == whole[1]
    weights = (folder / "model" / "model.safetensors" for folder in (tmp_path, whole[0]))
    assert next(weights).read_bytes() == next(weights).read_bytes()


def test_sigterm_saves_the_step_it_stopped_at(command, whole, tmp_path):
    with interrupted(command(tmp_path), tmp_path, signal.SIGTERM, after_step=12) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    last = max(losses_of(tmp_path))
    assert f"stopped after step {last}" in output and last < 60
    assert (tmp_path / "checkpoints" / str(last)).is_dir()
    assert losses_of(tmp_path) == {step: whole[1][step] for step in range(1, last + 1)}


def test_another_configuration_in_the_same_folder_is_refused_with_the_difference(command, whole):
    done = subprocess.run(command(whole[0], "data.batch=2"), capture_output=True, text=True)
    assert done.returncode == 2 and "data.batch: 4 -> 2" in done.stderr


def make_task(poison=10**6, weights=4, measures=None):
    """Weights drawn to the tokens; the batch that holds ``poison`` makes the loss NaN.

    ``measures``: what is to be said where held-out text would be measured, called."""

    def loss(params, frozen, tokens, key):
        value = (params["w"][:4] - tokens) ** 2 * 1e-3
        value = jnp.where(jnp.any(tokens == poison), jnp.nan, value)
        return {"loss": evaluate.mean(value)}

    rows = grain.MapDataset.source(np.arange(400).reshape(100, 4)).batch(2)
    return loop.TrainingTask(
        loss=loss,
        params={"w": jax.random.normal(jax.random.key(0), (weights,))},
        batches=iter(rows.to_iter_dataset()),
        evaluate=lambda params, frozen: measures() if measures else {"heldout_loss": 0.0},
    )


def settings(folder, **fields):
    usual = dict(folder=str(folder), steps=20, save_every=4, eval_every=100)
    return (
        {"data.batch": 2},
        config.OptimizerConfig(name="adamw", warmup=1),
        config.RunConfig(**usual | fields),
    )


@pytest.mark.parametrize("parts", [1, 2])
def test_nan_stops_the_run_names_the_step_and_keeps_the_last_good_checkpoint(tmp_path, parts):
    poisoned_step = 11  # rows 20 and 21 hold the values 80 to 87
    with pytest.raises(loop.Diverged, match=r"step 11: loss nan.* is step 8;"):
        given = settings(tmp_path, accumulate=parts)
        loop.fit(make_task(poison=8 * (poisoned_step - 1)), *given)
    task = make_task()
    optimizer = loop.make_optimizer(settings(tmp_path)[1], 20)
    with checkpoint.checkpoints(tmp_path, 2) as manager:
        state, step = checkpoint.restore(manager, loop.make_state(task, optimizer, 0), task.batches)
    assert step == 8 and np.isfinite(state["params"]["w"]).all()
    np.testing.assert_array_equal(next(task.batches)[0], [64, 65, 66, 67])


@contextlib.contextmanager
def locked(folder):
    """A context in which a folder is locked as another process would lock it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def test_a_command_holds_its_folder_also_while_it_exports(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "runs" / "one"
    words = ["corpus", f"run.folder={folder}"]

    def run(config, *, dry_run):
        with pytest.raises(BlockingIOError), locked(folder):
            pass
        with checkpoint.alone(folder):  # as the training within
            pass
        with pytest.raises(BlockingIOError), locked(folder):
            pass

    monkeypatch.setattr(corpus, "run", run)
    assert cli.main(words) == 0
    assert not (tmp_path / "runs").exists()  # nothing was written
    folder.mkdir(parents=True)
    with locked(folder):
        assert cli.main(words) == 2
    assert "another run is training there" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["safetensors", "text"])
def test_a_disk_that_is_full_while_a_run_exports_is_said_in_words(
    tmp_path, monkeypatch, capsys, way
):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def run(config, *, dry_run):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            if way == "safetensors":
                save_file({"w": np.zeros(1000)}, tmp_path / "model.safetensors")
            (tmp_path / "config.json").write_text(" " * 2000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(corpus, "run", run)
    assert cli.main(["corpus", f"run.folder={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert "could not be written to: File too large. Of the checkpoints, there is none yet" in said


def test_two_runs_in_one_folder_are_refused_and_a_damaged_folder_is_named(tmp_path):
    with locked(tmp_path), pytest.raises(config.ConfigError, match="another run is training there"):
        loop.fit(make_task(), *settings(tmp_path))
    assert not list(tmp_path.iterdir())
    given = settings(tmp_path, steps=8)
    done = loop.fit(make_task(), *given)
    last = tmp_path / "checkpoints" / "8"
    for file in (last / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(
        config.ConfigError, match=r"/8 cannot be read .*move that .*goes on from step 4;"
    ):
        loop.fit(make_task(), *given)
    shutil.rmtree(last)
    np.testing.assert_array_equal(loop.fit(make_task(), *given)["w"], done["w"])
    for text, message in (("{", "is no JSON"), ("[]", "holds no configuration")):
        (tmp_path / checkpoint.CONFIG).write_text(text)
        with pytest.raises(config.ConfigError, match=f"{message}.*: give another run.folder"):
            loop.fit(make_task(), *given)


def test_holding_a_folder_starts_no_devices(tmp_path, monkeypatch):
    def started():
        raise AssertionError("counting processes starts the devices")

    monkeypatch.setattr(jax, "process_count", started)
    with checkpoint.alone(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "run").exists()


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path):
    flat, optimizer, run = settings(tmp_path)
    loop.fit(make_task(), flat, optimizer, run)
    loop.fit(make_task(), *settings(tmp_path, steps=24))
    assert sorted(losses_of(tmp_path)) == list(range(1, 25))


def test_a_run_that_is_further_than_it_shall_go_or_just_there_says_so(tmp_path, capsys):
    done = loop.fit(make_task(), *settings(tmp_path))
    checkpoint.mark_finished(tmp_path, settings(tmp_path)[0])
    with pytest.raises(config.ConfigError, match="run.steps=12, but .* at step 20 already: give"):
        loop.fit(make_task(), {"data.batch": 2, "run.steps": 12}, *settings(tmp_path, steps=12)[1:])
    assert checkpoint.recorded(tmp_path) == settings(tmp_path)[0]
    assert (tmp_path / checkpoint.FINISHED).is_file()
    again = loop.fit(make_task(), *settings(tmp_path))
    assert "is at step 20 already, its last" in capsys.readouterr().out
    np.testing.assert_array_equal(again["w"], done["w"])


def test_a_full_disk_is_said_in_words_and_the_last_checkpoint_goes_on(tmp_path):
    whole = loop.fit(make_task(weights=200_000), *settings(tmp_path / "whole"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        """From here on no file may have more bytes than half of the weights'."""
        while not (folder / "checkpoints" / "4").is_dir():
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, limits[1]))
        return {"heldout_loss": 0.0}

    folder = tmp_path / "run"
    try:
        with pytest.raises(checkpoint.NotWritten, match=r"too large. Of .* step 4 is whole; make"):
            task = make_task(weights=200_000, measures=fill)
            loop.fit(task, *settings(folder, eval_every=6))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = [path.name for path in (folder / "checkpoints").iterdir() if path.name.isdigit()]
    assert left == ["4"]
    resumed = loop.fit(make_task(weights=200_000), *settings(folder))
    np.testing.assert_array_equal(resumed["w"], whole["w"])
    assert losses_of(folder) == losses_of(tmp_path / "whole")


@pytest.mark.parametrize(("minutes", "saved"), [(1e-9, [7, 8, 9]), (1e9, [9]), (0.0, [9])])
def test_a_run_of_slow_steps_is_saved_by_the_clock_as_well(tmp_path, minutes, saved):
    given = settings(tmp_path, steps=9, save_every=100, save_minutes=minutes, keep=3)
    loop.fit(make_task(), *given)
    folders = (tmp_path / "checkpoints").iterdir()
    assert sorted(int(folder.name) for folder in folders if folder.name.isdigit()) == saved


@pytest.mark.parametrize(("best", "step"), [("tau", 10), ("heldout_loss", 15), ("last", 20)])
def test_the_weights_that_are_kept_are_the_best_by_the_measure_asked_for(tmp_path, best, step):
    measured = iter([(1.5, 0.3), (2.5, 0.2), (2.0, 0.1), (1.0, 0.4)])  # at steps 5, 10, 15, 20
    measures = lambda: dict(zip(("tau", "heldout_loss"), next(measured), strict=True))  # noqa: E731
    given = settings(tmp_path / "run", eval_every=5, best=best)
    kept = loop.fit(make_task(measures=measures), *given)
    loop.fit(make_task(), *settings(tmp_path / "all", save_every=5, keep=9))
    at = make_task()
    with checkpoint.checkpoints(tmp_path / "all", 9) as manager:
        state = loop.make_state(at, loop.make_optimizer(given[1], 20), 0)
        wanted = manager.load_checkpointables(step, {"state": state})["state"]["params"]
    np.testing.assert_array_equal(kept["w"], wanted["w"])


def test_the_best_of_what_a_killed_run_goes_on_from_is_kept_until_it_is_passed(tmp_path):
    best = checkpoint.Best(tmp_path, "tau", [])
    for step, saved in ((10, 10), (20, 10), (30, 10), (40, 30)):
        (tmp_path / "checkpoints" / str(saved)).mkdir(parents=True, exist_ok=True)
        best.offer(step, {"tau": step / 10}, {"w": jnp.full(2, step)})
        goes_on_from = checkpoint.Best(tmp_path, "tau", [{"step": saved, "tau": saved / 10}])
        assert goes_on_from.load({"w": jnp.zeros(2, int)})["w"][0] == saved
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["30", "40"]
    with pytest.raises(config.ConfigError, match="run.best='tau' is not measured; .* loss"):
        best.offer(50, {"loss": 1.0}, {})


@pytest.mark.parametrize(
    ("measure", "step"),
    [
        ("heldout_bits_per_byte", 20),
        ("heldout_repeated", 20),
        ("notes_heldout_bits_per_byte", 20),
        ("squared_error", 20),
        ("trusted_tv", 20),
        ("tv", 20),
        ("notes/decoded_tau", 30),
        ("greedy_tau", 30),
    ],
)
def test_of_errors_and_losses_the_least_is_the_best(tmp_path, measure, step):
    rows = [{"step": step, measure: value} for step, value in ((10, 0.2), (20, 0.1), (30, 0.3))]
    for row in rows:
        (tmp_path / "best" / str(row["step"])).mkdir(parents=True)
    assert checkpoint.Best(tmp_path, measure, rows).step == step


def test_a_measure_that_there_is_not_costs_no_step(tmp_path):
    with pytest.raises(config.ConfigError, match="run.best='tow' is not measured; .* heldout_loss"):
        loop.fit(make_task(), *settings(tmp_path, eval_every=5, save_every=9, best="tow"))
    assert (tmp_path / "checkpoints" / "5").is_dir()
    loop.fit(make_task(), *settings(tmp_path, eval_every=5, best="heldout_loss"))
    assert sorted(losses_of(tmp_path)) == list(range(1, 21))


def test_a_measure_that_is_known_not_to_be_is_refused_before_anything_is_compiled(tmp_path):
    def loss(*_):
        raise AssertionError("traced")

    sets = {"a/": [(jnp.ones(2),)]}
    measure = evaluate.make_evaluate(lambda *x: {"loss": evaluate.mean(x[2])}, sets)
    names = functools.partial(measure.names, None, None)
    task = dataclasses.replace(make_task(), loss=loss, evaluate=measure, measures=names)
    with pytest.raises(config.ConfigError, match="'tow' is not measured; measured are a/loss: the"):
        loop.fit(task, *settings(tmp_path / "run", best="tow"))
    assert not (tmp_path / "run").exists()
    assert list(measure(None, None)) == ["a/loss"]


def test_of_a_measure_asked_for_late_only_kept_weights_are_the_best(tmp_path, capsys):
    measures = lambda: next(measured)  # noqa: E731
    measured = iter([{"tau": 1.0, "loss": 1.0}, {"tau": 3.0, "loss": 2.0}])
    loop.fit(make_task(measures=measures), *settings(tmp_path, steps=8, eval_every=4, best="loss"))
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["4"]
    measured = iter([{"tau": 2.0, "loss": 3.0}, {"tau": 1.0, "loss": 3.0}])
    capsys.readouterr()
    loop.fit(make_task(measures=measures), *settings(tmp_path, steps=16, eval_every=4, best="tau"))
    said = capsys.readouterr().out
    assert "tau was 3.0000 at step 8, but no weights" in said
    assert "the best tau, 2.0000, was at step 12" in said


def test_another_number_of_processes_is_refused_before_anything_is_read(tmp_path):
    loop.fit(make_task(), *settings(tmp_path, steps=4))
    (place,) = (tmp_path / "checkpoints" / "4" / "data").glob("process_*")
    place.rename(place.with_name("process_0-of-2.json"))
    with pytest.raises(config.ConfigError, match="saved by 2 processes, .* and here are 1: go on"):
        loop.fit(make_task(), *settings(tmp_path))


def test_a_folder_of_another_recipe_is_refused_by_its_name(tmp_path):
    checkpoint.record_config(tmp_path, {"recipe": "eagle3", "run.steps": 4})
    with pytest.raises(config.ConfigError, match="a run of the recipe 'eagle3', this one .*mtp"):
        checkpoint.record_config(tmp_path, {"recipe": "mtp", "run.steps": 4})
    checkpoint.record_config(tmp_path, {"recipe": "eagle3", "run.steps": 8})


def test_a_recipe_from_outside_is_resumed_too(tmp_path):
    for _ in range(2):
        checkpoint.record_config(tmp_path, {"recipe": "__main__", "run.steps": 4})


def test_a_run_of_a_version_without_a_field_meant_its_default(tmp_path):
    assert pretrain.Config  # a recipe whose module is loaded
    checkpoint.record_config(tmp_path, {"recipe": "pretrain", "data.batch": 4})
    checkpoint.record_config(tmp_path, {"recipe": "pretrain", "data.batch": 4, "init": ""})
    (tmp_path / checkpoint.CONFIG).write_text('{"recipe": "pretrain", "data.batch": 4}')
    with pytest.raises(config.ConfigError, match="init: '' -> 'other'"):
        checkpoint.record_config(tmp_path, {"recipe": "pretrain", "data.batch": 4, "init": "other"})


def test_a_run_that_was_begun_with_a_setting_without_effect_goes_on_without_it(tmp_path):
    now = config.resolved(speculator.Config(kind="redrafter"))
    begun = now | {"inner_size": 8, "tied": False}  # which an earlier version took
    (tmp_path / checkpoint.CONFIG).write_text(json.dumps(begun))
    checkpoint.record_config(tmp_path, now)
    assert checkpoint.recorded(tmp_path) == now
    (tmp_path / checkpoint.CONFIG).write_text(json.dumps(begun | {"num_layers": 3}))
    with pytest.raises(config.ConfigError, match=r"configuration:\n  num_layers: 3 -> 2\n"):
        checkpoint.record_config(tmp_path, now)
    sizes = dict(hidden_size=8, intermediate_size=8, num_layers=1, head_dim=8)
    sizes |= dict(num_heads=1, num_kv_heads=1)
    now = config.resolved(distill.Config(model=model.ModelConfig(**sizes)))
    begun = now | {"temperature": 2.0, "beta": 0.1}
    (tmp_path / checkpoint.CONFIG).write_text(json.dumps(begun))
    checkpoint.check_config(tmp_path, begun)  # the same command, which is refused by name later
    checkpoint.record_config(tmp_path, now)


def test_a_request_to_stop_while_the_last_step_is_measured_is_heard(tmp_path, capsys):
    def asked():
        signal.raise_signal(signal.SIGTERM)
        return {"heldout_loss": 0.0}

    given = settings(tmp_path, steps=4)
    with pytest.raises(loop.Interrupted) as stopped:
        loop.fit(make_task(measures=asked), *given)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert "stopped after step 4, saved" in capsys.readouterr().out
    again = loop.fit(make_task(), *given)
    whole = loop.fit(make_task(), *settings(tmp_path / "whole", steps=4))
    np.testing.assert_array_equal(again["w"], whole["w"])


def test_a_log_line_cut_short_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / metrics.LOG
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    log = metrics.Log(tmp_path, 1)
    log.write(2, loss=1.5)
    log.close()
    assert report.read(path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5}]


def test_a_run_that_has_ended_or_is_another_one_loads_nothing(tmp_path, monkeypatch, capsys):
    from specjax.train import cli, heads

    folder, ran = tmp_path / "run", []
    monkeypatch.setattr(heads, "run", lambda settings, dry_run=False: ran.append(settings))

    def command(*words):
        return cli.main(["heads", f"run.folder={folder}", *words])

    assert command("run.steps=2") == 0 and len(ran) == 1
    checkpoint.record_config(folder, config.resolved(ran[0]))
    (folder / "checkpoints" / "2").mkdir(parents=True)
    assert command("run.steps=2") == 0 and len(ran) == 2
    (folder / "report.html").touch()  # which the recipe report writes, and an unfinished run
    assert command("run.steps=2") == 0 and len(ran) == 3
    checkpoint.mark_finished(folder, config.resolved(ran[0]))
    assert command("run.steps=2") == 0 and len(ran) == 3
    assert "is at step 2 already, its last, and was exported" in capsys.readouterr().out
    assert command("run.steps=2", "data.batch=8") == 2 and len(ran) == 3
    assert "data.batch: 16 -> 8" in capsys.readouterr().err
    assert command("run.steps=2", "init=other") == 2 and len(ran) == 3
    assert "init: '' -> 'other'" in capsys.readouterr().err
    assert command("run.steps=2", "data.batch=8", "--dry-run") == 0 and len(ran) == 4
    assert command("run.steps=4") == 0 and len(ran) == 5
    checkpoint.record_config(folder, config.resolved(ran[0]))  # as a run does when it goes on
    assert command("run.steps=2") == 0 and len(ran) == 6
