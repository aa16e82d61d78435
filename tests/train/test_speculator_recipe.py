"""Speculators and ReDrafters learn in two phases from a frozen target, and load back."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from specjax.train import checkpoint, cli, config, frozen, report, speculator
from specjax.train.rows import make_reader
from training_toys import logits_of

import specjax
from specjax.models import CausalLM, Decoder

KINDS = speculator.KINDS
SMALL = ["num_heads=2", "inner_size=8", "optimizer.warmup=2"]
SMALL += ["optimizer.decay_share=0.0", "run.save_every=5", "run.eval_every=6"]
SMALL += ["decoding.num_prompts=0"]  # measured in the tests of the other recipes


def losses_of(folder):
    return [row["loss"] for row in report.read(folder / "log.jsonl") if "loss" in row]


def test_the_second_phase_goes_on_with_the_targets_own_text_where_the_first_ended(place):
    root, train, teacher = place
    own = [f'data.samples=["{root / "samples.npz"}"]', "data.samples_share=[0.9]"]
    folder = root / "lstm"
    fields = ["kind=lstm", *SMALL, teacher, *own, f"run.folder={folder}"]
    assert train("speculator", *fields, "text.steps=10", "run.steps=10") == 0
    first, second = losses_of(folder / "text"), losses_of(folder)
    assert len(first) == len(second) == 10
    assert np.mean(second[:3]) < np.mean(first[:3])
    for place, samples in ((folder / "text", []), (folder, [str(root / "samples.npz")])):
        assert json.loads((place / "config.json").read_text())["data.samples"] == samples
    target = specjax.load(teacher.partition("=")[2])
    loaded = specjax.load_drafter(folder / "model", target)
    assert loaded.drafter.config.cell == "lstm" and loaded.drafter.config.num_heads == 2


def test_a_finished_run_knows_the_heads_from_which_its_first_phase_began(tmp_path, monkeypatch):
    ran, run = [], speculator.run
    monkeypatch.setattr(speculator, "run", lambda settings, dry_run=False: ran.append(settings))
    words = ["speculator", f"run.folder={tmp_path / 'run'}", "run.steps=2", "text.steps=2"]
    assert cli.main([*words, "init=heads"]) == 0
    first, second = speculator.phases(*ran)
    assert (first.init, second.init) == ("heads", "")
    for phase in (first, second):
        checkpoint.record_config(Path(phase.run.folder), config.resolved(phase))
    (tmp_path / "run" / "checkpoints" / "2").mkdir(parents=True)
    checkpoint.mark_finished(tmp_path / "run", config.resolved(second))
    assert cli.main([*words, "init=heads"]) == 0 and len(ran) == 1
    assert cli.main([*words, "init=others"]) == 2 and len(ran) == 1
    assert speculator.phases(dataclasses.replace(ran[0], text=speculator.TextConfig(steps=0))) == [
        dataclasses.replace(ran[0], text=speculator.TextConfig(steps=0))
    ]

    def begun(phase):
        raise InterruptedError(phase.run.folder)

    monkeypatch.setattr(frozen, "make_setting", begun)
    with pytest.raises(InterruptedError, match="run/text$"):
        run(ran[0])
    (tmp_path / "run" / "text" / "checkpoints" / "2").mkdir(parents=True)
    checkpoint.mark_finished(tmp_path / "run" / "text", config.resolved(first))
    with pytest.raises(InterruptedError, match="run$"):  # the first phase is not exported again
        run(ran[0])
    with pytest.raises(InterruptedError, match="run/text$"):
        run(ran[0], dry_run=True)


@pytest.fixture(scope="module")
def rows(place):
    """A configuration, what it stands for, and a batch with the target's features."""
    root, _, teacher = place
    words = [f"data.corpus={root / 'corpus'}", "data.length=24", "data.batch=4", teacher]
    made = config.load(speculator.Config, root / "empty.toml", [*words, "data.eval_rows=4", *SMALL])
    setting = frozen.make_setting(made)
    read = make_reader(setting.lm.config, setting.end_of_text)
    return made, setting, read(setting.lm.params, next(setting.batches))


LAYER = speculator.PrefixConfig(hidden_size=16, head_dim=8, intermediate_size=12)


@pytest.mark.parametrize(("kind", "prefix"), [*((kind, 0) for kind in KINDS), ("lstm", LAYER)])
def test_a_speculator_is_trained_on_the_logits_that_it_drafts_with(rows, kind, prefix):
    made, setting, rows = rows
    rows = dataclasses.replace(rows, segments=(jnp.arange(25) > 9) + jnp.zeros_like(rows.segments))
    size = speculator.Config.inner_size if kind == "redrafter" else made.inner_size
    made = dataclasses.replace(made, kind=kind, prefix=prefix or made.prefix, inner_size=size)
    heads = speculator.MAKERS[kind](made, setting)
    target, params = setting.lm.target, setting.lm.params
    noise = iter(jax.random.split(jax.random.key(1), 99))
    own = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(noise), x.shape), heads.params)
    model = heads.drafter.heads(own)
    more = (target, params, 2) if kind == "redrafter" else (rows.segments[:, :-1],)
    expected = model.logits(rows.hidden, rows.tokens[:, :-1], *more)  # [B, T, n, V]
    steps = rows.steps(2)
    for k, output in enumerate(heads.outputs(own, params, rows)):
        logits = logits_of(output).T.reshape(4, steps, -1)
        np.testing.assert_allclose(logits, expected[:, :steps, k], rtol=1e-3, atol=1e-4)


def test_a_kind_that_is_not_known_is_refused():
    with pytest.raises(config.ConfigError, match="known: mlp, lstm, redrafter"):
        speculator.Config(kind="eagle")
    with pytest.raises(config.ConfigError, match="one set of weights"):
        speculator.Config(kind="lstm", tied=False)
    with pytest.raises(config.ConfigError, match="a redrafter has no prefix layer"):
        speculator.Config(kind="redrafter", prefix=LAYER)
    with pytest.raises(config.ConfigError, match="prefix.head_dim=-1; accepted: at least 0"):
        speculator.PrefixConfig(head_dim=-1)
    with pytest.raises(config.ConfigError, match="prefix.head_dim=8 without prefix.hidden_size"):
        speculator.PrefixConfig(head_dim=8)
    with pytest.raises(config.ConfigError, match="prefix.window=9; accepted: 0, or at least"):
        speculator.Config(prefix=dataclasses.replace(LAYER, window=9))


@pytest.mark.parametrize(
    ("layer", "changes", "words"),
    [
        (dict(hidden_size=20, head_dim=8), {}, "prefix: hidden_size=20 with head_dim=8"),
        (dict(hidden_size=16), dict(positions="learned"), "prefix.hidden_size=0: no such layer"),
    ],
)
def test_a_prefix_layer_that_cannot_be_is_refused(rows, layer, changes, words):
    target = dataclasses.replace(rows[1].lm.config, **changes)
    with pytest.raises(config.ConfigError, match=words):
        speculator.PrefixConfig(**layer).shape(target)


def test_a_prefix_layer_may_see_a_window(rows):
    shape = dataclasses.replace(LAYER, window=256).shape(rows[1].lm.config)
    assert (shape.hidden_size, shape.intermediate_size, shape.window) == (16, 12, 256)
    assert LAYER.shape(rows[1].lm.config).window is None


def test_embeddings_and_lm_heads_begin_as_the_targets(rows):
    made, setting, _ = rows
    shape = dataclasses.replace(setting.lm.config, tie_embeddings=False)
    target, params = CausalLM(shape), nnx.state(Decoder(shape, rngs=nnx.Rngs(5)))
    lm = dataclasses.replace(setting.lm, target=target, params=params)
    setting = dataclasses.replace(setting, lm=lm)
    heads = speculator.MAKERS["lstm"](dataclasses.replace(made, kind="lstm"), setting)
    read, said = params["embedding"][...], params["lm_head"]["weight"][...]
    begun = heads.params["embeddings"][0][0], heads.params["lm_heads"][0]["weight"]
    for own, table in zip(begun, (read, said), strict=True):
        near = own @ own.T, table @ table.T
        assert np.corrcoef(*(x.reshape(-1) for x in near))[0, 1] > 0.5
        assert 0.1 < np.std(own) * own.shape[1] ** 0.5 < 1.5
