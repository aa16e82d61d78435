"""Heads learn from a frozen target, are measured by decoding, and load back as they were."""

import dataclasses
import errno
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.train import (
    block,
    checkpoint,
    compare,
    config,
    data,
    eagle3,
    features,
    frozen,
    head_export,
    head_losses,
    heads,
    hydra,
    joint,
    measured,
    medusa2,
    regenerate,
    report,
    tokenizer,
)
from specjax.train.evaluate import make_evaluate, weighed
from specjax.train.rows import make_reader
from training_toys import logits_of

import specjax

FEW = "new_tokens=4"
SMALL = ["num_heads=2", "optimizer.warmup=2", "optimizer.decay_share=0.0", "run.save_every=5"]
SMALL += ["decoding.num_prompts=4", "decoding.batch=4", "decoding.new_tokens=8"]
SMALL += [
    "decoding.prompt_tokens=8",
    "run.eval_every=10",
    "report.texts=0",
    "report.plan_prompts=0",
]


@pytest.fixture(scope="module")
def stored(place):
    """The field of a folder with the features of 16 rows."""
    root, train, teacher = place
    fields = [teacher, "num_rows=16", f"output={root / 'features'}"]
    fields += [f'data.samples=["{root / "samples.npz"}"]', "data.samples_share=[0.5]"]
    assert train("features", *fields) == 0
    return f"features={root / 'features'}"


@pytest.fixture(scope="module")
def trained(place, stored):
    """The folder of 30 steps of Hydra's recipe on these."""
    root, train, teacher = place
    fields = [teacher, stored, *SMALL, "run.steps=30", f"run.folder={root / 'hydra'}"]
    assert train("hydra", *fields, f'eval_samples=["{root / "samples.npz"}"]') == 0
    return root / "hydra"


def setting_of(place, kind, *fields):
    root, _, teacher = place
    words = [f"data.corpus={root / 'corpus'}", "data.length=24", "data.batch=4", teacher]
    words += ["data.eval_rows=4", *SMALL, *fields]
    made = config.load(kind, root / "empty.toml", words)
    return made, frozen.make_setting(made)


def test_a_token_that_does_not_count_changes_no_loss(place):
    made, setting = setting_of(place, heads.HeadsConfig)
    read = make_reader(setting.lm.config, setting.end_of_text)
    medusa = heads.make_medusa(made, setting)
    loss = jax.jit(head_losses.make_loss(medusa, setting.lm.target, read, made))
    tokens, _ = data.unpacked(next(setting.batches))
    tokens = np.where(tokens == setting.end_of_text, 1, tokens)  # nothing else sets a row apart
    other, given = tokens.copy(), {"target": setting.lm.params}
    other[:, -1] = tokens[:, -1] % 7 + 1  # what no input is, but the last thing predicted
    values = []
    for last in (0.0, 1.0):
        weight = np.ones(tokens[:, 1:].shape, np.float32)
        weight[:, -1] = last
        for own in (tokens, other):
            batch = {"tokens": own, "weight": weight}
            values.append(float(weighed(loss(medusa.params, given, batch, None))))
    assert values[0] == values[1] and values[2] != values[3] and values[0] != values[2]


@pytest.mark.parametrize("kind", [heads, block])
def test_a_held_out_loss_weighs_positions_not_batches(place, kind):
    made, setting = setting_of(place, kind.Config, "data.batch=2")
    module = kind.make_medusa(made, setting) if kind is heads else kind.make_block(made, setting)
    read = make_reader(setting.lm.config, setting.end_of_text, module.layers)
    own = kind if kind is block else head_losses
    measure = own.make_measure(module, setting.lm.target, read, made)
    tokens, _ = data.unpacked(next(setting.batches))
    tokens = np.concatenate([tokens, tokens[::-1]])
    weight = np.ones(tokens[:, 1:].shape, np.float32)
    weight[1:, 8:], weight[2:] = 0, 0  # much of the first row, little of the next, then nothing
    values = []
    for size in (4, 2, 1):
        batches = [(tokens[i : i + size], weight[i : i + size]) for i in range(0, 4, size)]
        evaluate = make_evaluate(measure, {"": batches})
        values.append(evaluate(module.params, {"target": setting.lm.params})["heldout_loss"])
    np.testing.assert_allclose(values, values[0], rtol=1e-5)


def losses_of(folder):
    rows = report.read(folder / "log.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_stored_features_are_what_the_target_says_anew(place, stored):
    made, setting = setting_of(place, heads.HeadsConfig, stored)
    batch = next(setting.batches)
    read = make_reader(setting.lm.config, setting.end_of_text)
    fresh, kept = read(setting.lm.params, batch["tokens"]).hidden, batch["hidden"][1]
    assert fresh.shape == (4, 24, 16) and kept.dtype == jnp.bfloat16
    np.testing.assert_allclose(kept.astype(np.float32), fresh, rtol=1e-2, atol=1e-3)
    # and the step of a head is the same on either
    loss = head_losses.make_loss(heads.make_medusa(made, setting), setting.lm.target, read, made)
    params = heads.make_medusa(made, setting).params
    given = {"target": setting.lm.params}
    bare = {name: batch[name] for name in ("tokens", "weight")}
    values = [weighed(loss(params, given, either, None)) for either in (batch, bare)]
    np.testing.assert_allclose(*values, rtol=2e-3)


def test_features_of_another_target_tokenizer_version_or_length_are_refused(place, stored):
    folder = stored.partition("=")[2]
    record = json.loads((Path(folder) / features.RECORD).read_text())
    of = {name: record[name] for name in ("version", "target_fingerprint", "tokenizer_fingerprint")}
    assert len(features.read(folder, of, 24, [1])) == 16
    for name in of:
        with pytest.raises(config.ConfigError, match=f"{name.replace('_', ' ')}.*compute them"):
            features.read(folder, of | {name: "another"}, 24, [1])
    with pytest.raises(config.ConfigError, match="rows of 24 tokens, data.length=32"):
        setting_of(place, heads.HeadsConfig, stored, "data.length=32")
    own = f'eval_samples=["{place.root / "samples.npz"}"]'
    with pytest.raises(config.ConfigError, match="eval_samples: .* of 24 tokens, data.length=32"):
        setting_of(place, heads.HeadsConfig, own, "data.length=32")
    with pytest.raises(config.ConfigError, match="run the recipe `features` first"):
        setting_of(place, heads.HeadsConfig, "features=nowhere")
    with pytest.raises(
        config.ConfigError, match="data.mixed=.*rows to learn from are those stored"
    ):
        setting_of(place, heads.HeadsConfig, stored, 'data.mixed=["stdlib"]')


def test_features_without_room_are_refused_before_they_are_computed(place, monkeypatch, capsys):
    root, train, teacher = place

    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words = [teacher, "num_rows=8", f"output={root / 'none'}"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert train("features", *words) == 1
    said = capsys.readouterr().err
    assert "No space left on device: the rows take 0.0 MB; make room, give another output" in said
    assert not list((root / "none").iterdir())
    write = Path.write_text
    with monkeypatch.context() as patch:  # nor is a record that was cut short taken for the end
        patch.setattr(Path, "write_text", lambda path, text: [write(path, text[:9]), full()])
        with pytest.raises(OSError, match="No space left"):
            train("features", *words)
    assert train("features", *words) == 0 and (root / "none" / features.RECORD).is_file()


def test_layers_that_are_not_stored_are_computed_in_each_step_over_the_same_rows(place, stored):
    made, setting = setting_of(place, heads.HeadsConfig, stored)
    other = frozen.make_setting(made, lambda count: (0, count))
    batch, bare = next(setting.batches), next(other.batches)
    np.testing.assert_array_equal(batch["tokens"], bare["tokens"])
    assert bare["hidden"] == {}
    read = make_reader(setting.lm.config, setting.end_of_text, layers=(0, 1))
    found = read(setting.lm.params, bare).layers
    embedded = setting.lm.target.embed(setting.lm.params, bare["tokens"][:, :-1])
    np.testing.assert_allclose(found[0], embedded.T.reshape(4, 24, -1), rtol=1e-6)
    np.testing.assert_allclose(found[1], batch["hidden"][1].astype(np.float32), atol=2e-2)
    with pytest.raises(config.ConfigError, match=r"layers=\[7\]; accepted: different ones"):
        frozen.make_setting(made, lambda count: (7,))


@pytest.mark.parametrize(("kind", "make"), [(heads, heads.make_medusa), (hydra, hydra.make_hydra)])
def test_a_head_is_trained_on_the_logits_that_it_drafts_with(place, kind, make):
    """Position by position, from weights as they are trained to weights as they are published."""
    deep = ["num_layers=3"] if kind is hydra else []  # the last two share their weights
    made, setting = setting_of(place, kind.Config, *deep)
    built = make(made, setting)
    target, params = setting.lm.target, setting.lm.params
    noise = iter(jax.random.split(jax.random.key(1), 99))
    own = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(noise), x.shape), built.params)
    rows = make_reader(setting.lm.config, setting.end_of_text)(params, next(setting.batches))
    tokens = rows.tokens[:, :-1]
    drafting = built.drafter.heads(built.publish(own))
    more = (tokens,) if kind is hydra else ()
    expected = drafting.logits(rows.hidden, *more, target, params)  # [B, T, K, V]
    steps = rows.steps(2)
    for k, output in enumerate(built.outputs(own, params, rows)):
        logits = logits_of(output).T.reshape(4, steps, -1)
        np.testing.assert_allclose(logits, expected[:, :steps, k], rtol=1e-3, atol=1e-4)
    back = built.unpublish(built.publish(own))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), own, back)


def test_training_lowers_the_loss_and_logs_tau_beside_accuracy(trained):
    rows = report.read(trained / "log.jsonl")
    losses = losses_of(trained)
    assert sorted(losses) == list(range(1, 31)) and losses[30] < 0.8 * losses[1]
    measured = [row for row in rows if "decoded_tau" in row]
    assert [row["step"] for row in measured] == [10, 20, 30]
    last = measured[-1]
    assert last["samples/accuracy_1"] > 0.3 and 1 <= last["decoded_tau"] <= 3
    assert 1 < last["samples/greedy_tau"] <= 3


def test_a_run_of_heads_leaves_a_report_and_a_card_that_say_what_was_measured(trained):
    facts = measured.read(trained)
    (domain,) = facts["domains"].values()
    assert domain["prompts"] == 4 and len(domain["kept"]) == 2
    best = max(row.get("decoded_tau", 0) for row in report.read(trained / "log.jsonl"))
    assert domain["tau"] == pytest.approx(best, abs=0.2)  # of the weights kept, in bfloat16
    page = (trained / "report.html").read_text()
    text = (trained / "model" / "README.md").read_text()
    assert f"{domain['tau']:.2f}" in page and f"| 4 | {domain['tau']:.2f} |" in text
    assert page.count("Not measured.") == 2  # neither texts nor the planner were asked for
    assert "Speed-up: not predicted." in text and "hydra" in text
    assert page.count("<svg") == 6  # the bars of tau and five curves


def test_exported_heads_load_back_bit_for_bit_and_are_the_best_ones(place, trained):
    made, setting = setting_of(place, hydra.Config)
    built = hydra.make_hydra(made, setting)
    kept = checkpoint.Best(trained, "decoded_tau", report.read(trained / "log.jsonl"))
    taus = {
        r["step"]: r["decoded_tau"]
        for r in report.read(trained / "log.jsonl")
        if "decoded_tau" in r
    }
    assert kept.value == max(taus.values()) == taus[kept.step]
    expected = built.publish(kept.load(built.params))
    found = specjax.load_drafter(trained / "model", setting.lm)
    assert found.drafter.config == built.drafter.config
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a.astype(jnp.bfloat16), b),
        expected,
        found.params,
    )
    record = json.loads((trained / "model" / "config.json").read_text())
    assert record["specjax"]["target_fingerprint"] == setting.lm.checkpoint


def test_heads_of_another_kind_or_shape_are_no_beginning_and_what_differs_is_named(place, trained):
    for kind, words, message in (
        (hydra, ["num_layers=2"], r"another shape \(theirs -> this run's\): num_layers: 1 -> 2"),
        (heads, [], "holds a drafter 'hydra', this recipe trains 'medusa'"),
    ):
        make = kind.make_hydra if kind is hydra else kind.make_medusa
        made, setting = setting_of(place, kind.Config, f"init={trained / 'model'}", *words)
        with pytest.raises(config.ConfigError, match=message):
            frozen.starting_params(made, setting.lm, make(made, setting))


def test_a_dry_run_names_target_layers_vocabulary_and_shape_and_writes_nothing(place, capsys):
    root, train, teacher = place
    vocabulary = tokenizer.load("embedded").get_vocab_size()
    fields = [teacher, *SMALL, "layers=[0, 1]", "decoding.num_prompts=0"]
    fields.append(f"draft_vocab_size={vocabulary}")
    assert train("eagle3", "--dry-run", *fields, f"run.folder={root / 'dry'}") == 0
    printed = capsys.readouterr().out
    size = sum(x.size for x in jax.tree.leaves(specjax.load(teacher.partition("=")[2]).params))
    for line in (
        f"{size:,} parameters, llama, 1 layers of width 16",
        "reads         its hidden states 0, 1",
        f"vocabulary    {vocabulary:,} tokens, 100.0% of the text",
        "layer.hidden_size=16",
        "none by the target",
    ):
        assert line in printed
    assert "norm_plus_one" not in printed  # what nobody set says nothing
    assert not (root / "dry").exists()


def test_heads_of_several_blocks_are_exported_as_they_are(place, tmp_path):
    made, setting = setting_of(place, heads.HeadsConfig, "num_layers=2")
    built, lm = heads.make_medusa(made, setting), setting.lm
    noise = iter(jax.random.split(jax.random.key(1), 99))
    own = jax.tree.map(lambda x: x + jax.random.normal(next(noise), x.shape), built.params)
    head_export.export_heads(tmp_path, lm, built.drafter, built.publish(own))
    found = specjax.load_drafter(tmp_path / "model", lm)
    assert found.drafter.config == built.drafter.config and made.num_layers == 2
    for ours, theirs in zip(jax.tree.leaves(own), jax.tree.leaves(found.params), strict=True):
        np.testing.assert_array_equal(ours.astype(jnp.bfloat16), theirs)


def test_comparison_counts_tokens_a_round_of_each_head_on_each_tree(place, trained):
    root, _, teacher = place
    made = compare.CompareConfig(
        teacher=teacher.partition("=")[2],
        heads=(str(trained / "model"),),
        trees=("chain:2", "2x1"),
        num_prompts=4,
        new_tokens=8,
        batch=4,
        output=str(root / "table.md"),
    )
    compare.run(made)
    said, _, *table = (root / "table.md").read_text().splitlines()
    assert "4 held-out prompts" in said
    rows = [line.split("|") for line in table[2:]]
    assert [(row[1], row[3], row[4]) for row in rows] == [
        (" hydra ", " chain:2 ", " 2 "),
        (" hydra ", " 2x1 ", " 4 "),
    ]
    found = {"rounds": np.array([8, 2]), "emitted": np.array([8, 8])}
    assert compare.tau_of(found) == (1.6, 1.0, 4.0)  # 16 tokens in 10 rounds; each prompt alone
    with pytest.raises(config.ConfigError, match="num_prompts=5; accepted: a multiple of batch=4"):
        dataclasses.replace(made, num_prompts=5)


@pytest.mark.parametrize(
    ("kind", "make", "words"),
    [
        (eagle3, eagle3.make_eagle3, ["layers=[0, 1]"]),
        (heads, heads.make_medusa, ["tied=false"]),
        (hydra, hydra.make_hydra, []),
    ],
)
def test_heads_of_a_target_in_bfloat16_are_trained_in_float32(place, tmp_path, kind, make, words):
    made, setting = setting_of(place, kind.Config, *words)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), setting.lm.params)
    setting = dataclasses.replace(setting, lm=dataclasses.replace(setting.lm, params=params))
    built = make(made, setting)
    head_export.export_heads(tmp_path, setting.lm, built.drafter, built.publish(built.params))
    again = dataclasses.replace(made, init=str(tmp_path / head_export.MODEL))
    loaded = frozen.starting_params(again, setting.lm, make(again, setting))
    for params in (built.params, loaded):
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}


def test_a_run_that_goes_on_computes_what_it_would_have_computed(place, stored):
    root, train, teacher = place
    fields = [teacher, stored, *SMALL, "sample_head=true", "kind=medusa", "run.eval_every=4"]
    for steps in (7, 12):
        assert train("heads", *fields, f"run.steps={steps}", f"run.folder={root / 'parts'}") == 0
    assert train("heads", *fields, "run.steps=12", f"run.folder={root / 'whole'}") == 0
    assert losses_of(root / "parts") == losses_of(root / "whole")
    found = [root / name / "model" / "medusa_lm_head.safetensors" for name in ("parts", "whole")]
    assert found[0].read_bytes() == found[1].read_bytes()


def test_medusa_2_moves_the_target_after_the_heads_warm_up_and_exports_both(place, monkeypatch):
    def stop(*given):
        raise KeyboardInterrupt

    root, train, teacher = place
    fields = [teacher, *SMALL, "head_warmup=10", "run.steps=16", "optimizer.rate=0.05"]
    fields += ["decoding.num_prompts=0", "run.save_every=10"]
    with monkeypatch.context() as patch:  # stopped between the target's report and the heads
        patch.setattr(head_export, "export_heads", stop)
        with pytest.raises(KeyboardInterrupt):
            train("medusa2", *fields, f"run.folder={root / 'two'}")
    assert (root / "two" / report.PAGE).is_file()
    assert not (root / "two" / checkpoint.FINISHED).exists()
    assert train("medusa2", *fields, f"run.folder={root / 'two'}") == 0
    assert (root / "two" / checkpoint.FINISHED).is_file()
    before = specjax.load(teacher.partition("=")[2])
    after = specjax.load(root / "two" / "target")
    assert after.fingerprint != before.fingerprint
    assert specjax.load_drafter(root / "two" / "model", after).drafter.max_depth == 2
    with pytest.raises(ValueError, match="trained for a target with the fingerprint"):
        specjax.load_drafter(root / "two" / "model", before)
    rows = report.read(root / "two" / "log.jsonl")
    losses = [row["head_1"] for row in rows if "head_1" in row]
    assert losses[-1] < losses[0]
    assert [row["step"] for row in rows if "heldout_loss" in row] == [10, 16]


def test_while_heads_warm_up_the_target_stands_still():
    import optax

    optimizer = joint.slowed(optax.sgd(1.0), 0.5, 2)
    params = {"target": {"w": jnp.ones(2)}, "drafter": {"w": jnp.ones(2)}}
    state, moved = optimizer.init(params), []
    for _ in range(3):
        updates, state = optimizer.update(params, state, params)
        moved.append((float(updates["target"]["w"][0]), float(updates["drafter"]["w"][0])))
    assert moved == [(0.0, -1.0), (0.0, -1.0), (-0.5, -1.0)]


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        (heads.HeadsConfig, ["kind=eagle"], "kind='eagle'; known: "),
        (heads.HeadsConfig, ["decay=0"], "decay=0.0; accepted: above 0, at most 1"),
        (heads.HeadsConfig, ["num_heads=30"], "data.length=24 leaves too little of a row"),
        (hydra.HydraTrainingConfig, ["num_layers=0"], "num_layers=0; accepted: at least 1"),
        (hydra.HydraTrainingConfig, ["teacher_share=2"], "teacher_share=2.0; accepted: 0 to 1"),
        (hydra.HydraTrainingConfig, ["decoding.num_prompts=3"], "a multiple of decoding.batch=8"),
        (medusa2.Medusa2Config, ["features=some"], "other hidden states at each step"),
        (medusa2.Medusa2Config, ["teacher_share=0.5"], "a target that learns is no teacher"),
        (medusa2.Medusa2Config, ["kind=blockwise"], "this recipe is Medusa-2's"),
        (medusa2.Medusa2Config, ["target_share=0"], "target_share=0.0; accepted: above 0"),
        (features.FeaturesConfig, ["num_rows=10"], "a multiple of data.batch=16"),
        (features.FeaturesConfig, ["output="], "output=''; accepted: a name that is not empty"),
        (features.FeaturesConfig, ["split=test"], "split='test'; accepted: train or heldout"),
        (regenerate.Config, ["split=test", FEW], "split='test'; accepted: train or heldout"),
        (regenerate.Config, [FEW, 'data.mixed=["packages"]'], "data.mixed=.*give that text as"),
        (regenerate.Config, [FEW, 'data.samples=["a"]'], "data.samples=.*and data.samples_share"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_way_out(tmp_path, kind, words, message):
    (tmp_path / "empty.toml").write_text("[data]\nlength = 24\n")
    with pytest.raises(config.ConfigError, match=message):
        config.load(kind, tmp_path / "empty.toml", words)
