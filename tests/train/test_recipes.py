"""From text to a target to a drafter, on toys, by the commands that a user types."""

import numpy as np
import pytest
from specjax.train import config, measured, report, tokenizer
from specjax.train.samples import read
from specjax.train.teacher import load_teacher

SHAPE = ["model.intermediate_size=16", "model.num_layers=1", "model.num_heads=2"]
SHAPE += ["model.num_kv_heads=1", "model.head_dim=8"]


def test_the_target_writes_greedy_and_drawn_rows_after_prompts_of_the_corpus(place):
    root, _, _ = place
    samples = read(str(root / "samples.npz"))
    assert samples.tokens.shape == (8, 25) and samples.tokens.dtype == np.int32
    assert ((samples.start >= 4) & (samples.start <= 13)).all()
    assert ((samples.stop > samples.start) & (samples.stop <= samples.start + 12)).all()
    # greedy text is what the target itself finds most likely at each step
    import specjax.models.lm as lm

    teacher = lm.load(str(root / "target" / "model"))
    from flax import nnx

    from specjax.models.causal_lm import graph_definition

    logits = nnx.merge(graph_definition(teacher.config), teacher.params)(samples.tokens[:4, :-1])
    for row in range(4):
        written = slice(samples.start[row], samples.stop[row])
        best = np.asarray(logits)[row].argmax(-1)[written.start - 1 : written.stop - 1]
        np.testing.assert_array_equal(best, samples.tokens[row, written])


def test_distillation_raises_acceptance_on_what_the_target_writes(place):
    root, train, teacher = place
    fields = [f'data.samples=["{root / "samples.npz"}"]', "data.samples_share=[0.5]", teacher]
    fields += [f'eval_samples=["{root / "samples.npz"}"]', "model.hidden_size=8"]
    fields += ["run.steps=60", "run.eval_every=5", f"run.folder={root / 'draft'}"]
    fields += ["decoding.num_prompts=8", "decoding.prompt_tokens=8", "decoding.new_tokens=8"]
    fields += ["report.texts=1", "report.plan_prompts=0"]
    assert train("distill", *SHAPE, *fields, "optimizer.warmup=4", "optimizer.adam_rate=0.03") == 0
    rows = [row for row in report.read(root / "draft" / "log.jsonl") if "acceptance" in row]
    first, last = rows[0], rows[-1]
    for name in ("acceptance", "samples/acceptance", "samples/greedy_match"):
        assert 0 <= first[name] < last[name] <= 1
    assert last["samples/acceptance"] > first["samples/acceptance"] + 0.02
    assert 1 <= last["samples/tau"] <= 5
    names = {path.name for path in (root / "draft" / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "fingerprint.json", "README.md"}
    (text,) = measured.read(root / "draft")["texts"]  # drafted by what was exported
    assert len(text["pieces"]) == 8 and text["domain"] == measured.MAIN


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(place, capsys):
    root, train, _ = place
    fields = ["model.hidden_size=16", *SHAPE, f"run.folder={root / 'dry'}", "--dry-run"]
    assert train("pretrain", *fields) == 0
    words, progress = capsys.readouterr()
    stages = [line.rpartition(": ")[2] for line in progress.splitlines() if "dry run" in line]
    assert stages[:3] == [
        "reading the models and the text ...",
        "compiling a step of training ...",
        "running once ...",
    ]
    for word in ("width 16", "parameters", "work space", "steps", "tokens/s"):
        assert word in words
    assert not (root / "dry").exists()


def test_a_teacher_with_another_tokenizer_or_a_shorter_context_is_refused(place):
    other = tokenizer.train(["x = 1\n"], 320)
    teacher = str(place.root / "target" / "model")
    with pytest.raises(config.ConfigError, match="another tokenizer"):
        load_teacher(teacher, other, 8)
    with pytest.raises(config.ConfigError, match="data.length=9999: .* reads up to"):
        load_teacher("embedded", tokenizer.load("embedded"), 9999)


def test_the_context_of_a_target_with_longrope_is_its_original_one(place, monkeypatch):
    import dataclasses

    from specjax.train import teacher as teachers

    found = teachers.lm.load(str(place.root / "target" / "model"))
    shape = found.config
    scaling = dict(rope_type="longrope", original_max_position_embeddings=32)
    scaling["short_factor"] = (1.0,) * (shape.head_dim // 2)
    shape = dataclasses.replace(shape, rope_scaling=tuple(sorted(scaling.items())))
    assert shape.max_positions > 64
    target = dataclasses.replace(found.target, config=shape)
    long = dataclasses.replace(found, target=target)
    monkeypatch.setattr(teachers.lm, "load", lambda *given, **how: long)
    assert load_teacher("long", tokenizer.load("embedded"), 32) is long
    with pytest.raises(config.ConfigError, match="data.length=33: .* up to 32 tokens"):
        load_teacher("long", tokenizer.load("embedded"), 33)


@pytest.mark.parametrize(
    ("recipe", "field"),
    [(name, "data.samples") for name in ("distill", "heads", "features")]
    + [(name, "eval_samples") for name in ("distill", "heads")],
)
def test_rows_of_another_vocabulary_are_refused(place, recipe, field, tmp_path, capsys):
    root, train, teacher = place
    with np.load(root / "samples.npz") as arrays:
        own = dict(arrays)
    own["tokens"][3, 5] = 9999
    np.savez(tmp_path / "other.npz", **own)
    fields = [f'{field}=["{tmp_path / "other.npz"}"]', teacher]
    fields += ["data.samples_share=[0.5]"] if field == "data.samples" else []
    fields += ["model.hidden_size=8", *SHAPE] if recipe == "distill" else []
    folder = "output" if recipe == "features" else "run.folder"
    assert train(recipe, *fields, f"{folder}={tmp_path / 'out'}") == 2
    words = capsys.readouterr().err
    assert "other.npz holds the token 9999, the target knows those below" in words


def test_samples_are_asked_for_where_there_are_none():
    with pytest.raises(config.ConfigError, match="run the recipe `regenerate` first"):
        read("nowhere.npz")
