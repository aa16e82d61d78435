"""What is seen of a run: operations, pace, and the same measures in every place they go to."""

import csv
import re
import struct
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from specjax.train import config, evaluate, flops, loop, metrics, progress
from specjax.train.cli import RECIPES, main
from specjax.train.step import rounded

SIZES = "intermediate_size=16 num_layers=1 num_heads=2 num_kv_heads=1 head_dim=8 hidden_size=16"


def test_products_are_counted_forward_backward_in_loops_and_by_type():
    x, w = jnp.ones((3, 5)), jnp.ones((5, 5))
    one = 2 * 3 * 5 * 5

    def loss(w, x):
        y, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=7)
        return jnp.sum(y)

    assert flops.products(loss, w, x) == {"float32": 7 * one}
    # backward: the gradient of each product by the weight and by what it read
    assert flops.products(jax.value_and_grad(loss), w, x) == {"float32": 3 * 7 * one}
    half = w.astype(jnp.bfloat16)
    both = flops.products(lambda: (x @ w, jax.jit(jnp.matmul)(half, half)))
    assert both == {"float32": one, "bfloat16": 2 * 5**3}
    dear = flops.products(lambda i: jax.lax.cond(i, lambda: x @ w, lambda: (x @ w) @ w), True)
    assert dear == {"float32": 2 * one}


def test_utilisation_is_the_time_at_the_best_rate_over_the_time_taken(monkeypatch):
    monkeypatch.setattr(flops, "peak", {"float32": 100.0, "bfloat16": 400.0}.get)
    assert flops.ideal_seconds({"float32": 50, "bfloat16": 400}) == 1.5
    watch = progress.Watch("run", config.RunConfig(steps=10, eval_every=4), 0)
    watch.tokens, watch.ideal = 30, 1.5
    watch.pace._recent.append(3.0)
    assert watch.rates() == {"tokens_per_second": 10.0, "utilisation": 0.5}
    assert watch.words(4) == ["10 tokens/s", "50 % of peak", "18 s left"]
    assert progress.Watch("run", config.RunConfig(), 0).rates() == {}  # not zero: not known


def test_what_is_frozen_is_counted_in_the_numbers_that_a_step_computes_in(monkeypatch):
    counted = []
    monkeypatch.setattr(flops, "peak", lambda dtype: counted.append(dtype) or 1.0)

    def loss(params, frozen, tokens, key):
        return {"loss": evaluate.mean(params * (frozen @ frozen))}

    batches = iter([jnp.zeros((1, 2), jnp.int32)])
    task = loop.TrainingTask(loss, jnp.ones((2, 2)), batches, None, frozen=jnp.ones((2, 2)))
    run = config.RunConfig(precision="bfloat16")
    loop.estimate(task, config.OptimizerConfig(name="adamw"), run, "a toy")
    assert counted == ["bfloat16"]


def test_the_bias_of_a_router_is_not_rounded():
    router = {"weight": jnp.ones(3), "bias": jnp.ones(3)}
    run = config.RunConfig(precision="bfloat16")
    found = rounded({"target": {"blocks": [{"mlp": {"router": router}}]}}, run)
    kinds = jax.tree.map(lambda x: x.dtype.name, found["target"]["blocks"][0]["mlp"]["router"])
    assert kinds == {"weight": "bfloat16", "bias": "float32"}


def test_the_best_rate_of_a_device_is_measured():
    assert flops.peak("float32") > 1e6


def test_the_pace_leaves_out_compiling_and_what_stands_between_steps(monkeypatch):
    now = iter([100.0, 102.0, 103.0, 113.0, 115.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    pace = progress.Pace()
    pace.tick()  # whatever came before: the compiler
    assert pace.seconds is None and pace.left(5, 1) is None
    pace.tick()
    with pace.apart():  # 10 s of measuring, in an interval of 13
        pass
    pace.tick()
    assert pace.seconds == (2 + 3) / 2
    assert pace.left(4, 2) == 4 * 2.5 + 2 * 10
    assert [progress.clock(s) for s in (41, 720, 12_000)] == ["41 s", "12 min", "3 h 20 min"]


def test_a_log_that_is_no_terminal_gets_lines(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    with progress.Watch("run", config.RunConfig(steps=40), 20) as watch:
        watch.loss = 2.5
        watch.step(21)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["resumed from step 20 of 40", "step 21 of 40: loss 2.500"]


def rows_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_what_the_log_has_and_nothing_where_nothing_was_measured(tmp_path):
    log = metrics.Log(tmp_path, 0, ["csv"])
    log.write(1, loss=2.0)
    log.write(2, loss=1.5)
    log.write(2, heldout_loss=1.75)
    expected = [("1", "2.0", ""), ("2", "1.5", ""), ("2", "", "1.75")]  # before it is closed
    assert [tuple(row.values()) for row in rows_of(tmp_path)] == expected
    again = metrics.Log(tmp_path, 1, ["csv"])  # killed, and gone on with from step 1
    again.write(2, loss=1.25)
    assert [row["loss"] for row in rows_of(tmp_path)] == ["2.0", "1.25"]
    for opened in (log, again):
        opened.close()


def scalars(folder):
    """``[(step, name, value)]`` of all event files."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    return found


def test_tensorboard_gets_the_same(tmp_path):
    pytest.importorskip("tensorboardX")
    log = metrics.Log(tmp_path, 0, ["tensorboard"])
    log.write(1, loss=2.0)
    log.write(2, loss=1.5, heldout_loss=1.75)
    log.close()
    expected = [(1, "loss", 2.0), (2, "loss", 1.5), (2, "heldout_loss", 1.75)]
    assert scalars(tmp_path / "tensorboard") == expected


def test_wandb_gets_the_same_and_a_resumed_run_keeps_its_id(tmp_path, monkeypatch):
    begun, logged = [], []

    class Run:
        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            logged.append("finished")

    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: begun.append(settings) or Run()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in (0, 1):
        log = metrics.Log(tmp_path, step, ["wandb"], {"run.steps": 2})
        log.write(step + 1, loss=2.0)
        log.close()
    assert logged == [(1, {"loss": 2.0}), "finished", (2, {"loss": 2.0}), "finished"]
    assert begun[0] == begun[1] and begun[0]["resume"] == "allow"
    assert begun[0]["config"] == {"run.steps": 2} and begun[0]["name"] == tmp_path.name


@pytest.mark.parametrize(("sink", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_sink_whose_library_is_missing_is_refused_before_anything_is_written(
    sink, module, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(config.ConfigError, match=f"{module}, which is not installed: pip install"):
        metrics.Log(tmp_path, 0, [sink])
    assert not list(tmp_path.iterdir())
    with pytest.raises(config.ConfigError, match="accepted: a list of csv, tensorboard, wandb"):
        config.RunConfig(metrics=("excel",))


def test_every_sink_that_a_configuration_may_name_exists():
    assert config.SINKS == tuple(metrics.SINKS)


def test_a_recipe_lists_its_fields_with_defaults_and_words(capsys):
    out = ""
    for recipe in RECIPES:
        assert main([recipe, "--help"]) == 0
        text = capsys.readouterr().out
        fields = re.findall(r"^    [\w.]+ = .*$", text.partition("Fields, given")[2], re.M)
        assert fields and not [line for line in fields if not re.search(r"\S  +\S", line[4:])]
        out += text
    assert "data.samples_share = []               the share of the rows of each; []" in out
    assert "model.hidden_size = (int, must be given)" in out and 'divergence = "fkl"' in out
    start = out.index("specjax train eagle3 ")
    heads = out[start : out.find("specjax train ", start + 1)]
    assert heads.count("    num_heads = 7") == 1  # redeclared by the recipe, shown once


LABELS = ["model", "shapes", "parameters", "memory", "steps", "time"]


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        ("tokenizer", ["vocab_size=320"]),
        ("prompts", ["num_prompts=1", "shortest=4", "longest=8", "rest=8"]),
        ("pretrain", [f"model.{size}" for size in SIZES.split()]),
        ("regenerate", ["TEACHER", "num_rows=8", "new_tokens=8"]),
        ("features", ["TEACHER", "num_rows=4"]),
        ("heads", ["TEACHER", "num_heads=2", "decoding.num_prompts=0"]),
    ],
)
def test_every_dry_run_prints_the_same_lines_and_writes_nothing(place, recipe, fields, capsys):
    root, train, teacher = place
    capsys.readouterr()
    fields = [teacher if field == "TEACHER" else field for field in fields]
    made = root / "dry"
    where = f"run.folder={made}"
    where = f"output={made}/rows.npz" if recipe in ("regenerate", "features") else where
    assert train(recipe, *fields, where, "--dry-run") == 0
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [word for word in words if word in LABELS] == LABELS
    assert not made.exists()
