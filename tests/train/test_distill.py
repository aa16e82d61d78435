"""What a drafter is taught: the rows, who wrote them, and what the loss makes of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recipe_tables import model_table
from specjax.train import (
    config,
    distill,
    evaluate,
    features,
    losses,
    metrics,
    model,
    objectives,
    own_text,
    step,
)
from training_toys import forward

from specjax.models import DecoderConfig

SHAPE = dict(hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1)
STUDENT = DecoderConfig(vocab_size=17, head_dim=4, eos_ids=(0,), tie_embeddings=True, **SHAPE)
TEACHER = dataclasses.replace(STUDENT, hidden_size=12, num_layers=2)
PAIR = distill.Pair(STUDENT, TEACHER, end_of_text=0)
PARAMS, FROZEN = model.create(STUDENT, 0)[1], model.create(TEACHER, 1)[1]
TOKENS = np.random.default_rng(0).integers(1, 17, (4, 13)).astype(np.int32)
KEYS = step.make_keys(jax.random.key(3), jnp.arange(4))


def settings(**fields):
    shape = model.ModelConfig(head_dim=4, **SHAPE)
    common = dict(prompt_tokens=5, chunk=16, data=config.DataConfig(length=12, batch=4))
    return distill.DistillConfig(model=shape, **common, **fields)


@jax.jit
def plain_laws(tokens):
    graphs = model.create(TEACHER, 1)[0], model.create(STUDENT, 0)[0]
    inputs = tokens[:, :-1]
    segments = jnp.zeros_like(inputs)
    return [
        forward(graph, own, inputs, segments)
        for graph, own in zip(graphs, (FROZEN, PARAMS), strict=True)
    ]


@pytest.mark.parametrize("stored", [False, True])
def test_the_loss_is_the_weighted_mean_of_its_formula_whoever_computed_the_states(stored):
    weight = np.random.default_rng(1).uniform(size=(4, 12)).astype(np.float32)
    batch = {"tokens": TOKENS, "weight": weight}
    if stored:
        batch["hidden"] = {2: PAIR.teacher_states(FROZEN, TOKENS[:, :-1])}
        frozen = {"embedding": FROZEN["embedding"]}  # the target itself is not run
    else:
        frozen = FROZEN
    loss = distill.make_loss(PAIR, settings(divergence="jsd", beta=0.3, data_share=0.25))
    p, q = plain_laws(TOKENS)
    expected = 0.75 * losses.jsd(p, q, 0.3) + 0.25 * losses.cross_entropy(q, TOKENS[:, 1:])
    value = evaluate.weighed(jax.jit(loss)(PARAMS, frozen, batch, KEYS))
    np.testing.assert_allclose(value, np.sum(expected * weight) / weight.sum(), rtol=2e-5)


def test_cross_entropy_alone_asks_nothing_of_the_target():
    loss = distill.make_loss(PAIR, settings(data_share=1.0))
    _, q = plain_laws(TOKENS)
    expected = jnp.mean(losses.cross_entropy(q, TOKENS[:, 1:]))
    value = evaluate.weighed(jax.jit(loss)(PARAMS, None, TOKENS, KEYS))
    np.testing.assert_allclose(value, expected, rtol=2e-5)


def test_the_drafter_writes_its_share_of_the_rows_after_their_prompts():
    write = jax.jit(own_text.make_writer(STUDENT, 0, 12, 5, 1.0))
    rows, weight = write(PARAMS, TOKENS[:2], KEYS.rows[:2])
    np.testing.assert_array_equal(rows[:, :5], TOKENS[:2, :5])
    assert (np.asarray(rows[:, 5:]) != TOKENS[:2, 5:]).any()
    assert not weight[:, :4].any()  # predictions of the prompt's own tokens
    ended = np.asarray(rows[:, 5:] == 0).cumsum(axis=1)
    before = np.concatenate([np.zeros((2, 1)), ended[:, :-1]], axis=1) == 0
    np.testing.assert_array_equal(weight[:, 4:], before)  # up to its end-of-text, and that

    # in the loss: these rows for half of the batch, the others as they were. What stands after an
    # end-of-text, another document, has no weight, so the plain laws below need not know of it
    loss = distill.make_loss(PAIR, settings(on_policy=0.5))
    value, slope = jax.jit(
        jax.value_and_grad(lambda params: evaluate.weighed(loss(params, FROZEN, TOKENS, KEYS)))
    )(PARAMS)
    rows = np.concatenate([rows, TOKENS[2:]])
    p, q = plain_laws(rows)
    weight = np.concatenate([weight, np.ones((2, 12))])
    np.testing.assert_allclose(value, np.sum(losses.fkl(p, q) * weight) / weight.sum(), rtol=2e-5)
    assert all(np.isfinite(x).all() and np.any(x) for x in jax.tree.leaves(slope))


def test_what_a_drafter_writes_itself_is_the_same_wherever_its_rows_lie():
    loss = jax.jit(distill.make_loss(PAIR, settings(on_policy=0.5)))
    values, key = [], jax.random.key(3)
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        keys = step.make_keys(key, jnp.asarray(order))
        values.append(evaluate.weighed(loss(PARAMS, FROZEN, TOKENS[np.array(order)], keys)))
    np.testing.assert_allclose(values[1], values[0], rtol=1e-6)
    other = step.make_keys(jax.random.key(4), jnp.arange(4))  # it is drawn indeed
    assert abs(evaluate.weighed(loss(PARAMS, FROZEN, TOKENS, other)) / values[0] - 1) > 1e-3


def test_every_row_of_a_batch_is_continued_in_its_turn():
    places = np.array([2, 0, 3, 1])  # of the rows 0 to 3, as another process has them
    for number in range(5):
        keys = step.make_keys(jax.random.key(3), jnp.asarray(places), jnp.int32(number))
        taken = places[np.asarray(own_text.order_of(keys))]
        np.testing.assert_array_equal(taken, (np.arange(4) + number) % 4)


def test_compressed_laws_are_logged_with_their_error():
    loss = distill.make_loss(PAIR, settings(top_k=3))
    p, q = losses.lump(losses.compress(plain_laws(TOKENS)[0], 3), plain_laws(TOKENS)[1])
    terms = jax.jit(loss)(PARAMS, FROZEN, TOKENS, KEYS)
    value = evaluate.weighed(terms)  # the error is seen, not descended
    np.testing.assert_allclose(value, jnp.mean(losses.fkl(p, q)), rtol=2e-5)
    error = jnp.mean(losses.lump_error(p, q))
    np.testing.assert_allclose(terms["top_k_error"].value, error, rtol=2e-5)


def test_stored_laws_teach_what_the_target_itself_would():
    loss = jax.jit(distill.make_loss(PAIR, settings(top_k=3)))
    laws = losses.compress(plain_laws(TOKENS)[0], 3)
    laws = {name: np.asarray(getattr(laws, name)) for name in features.PARTS}
    batch = {"tokens": TOKENS, "weight": np.ones((4, 12), np.float32), "hidden": {}, "laws": laws}
    stored, live = loss(PARAMS, None, batch, KEYS), loss(PARAMS, FROZEN, TOKENS, KEYS)
    for name in ("distance", "top_k_error"):
        np.testing.assert_allclose(stored[name].value, live[name].value, rtol=2e-5)


def test_the_laws_of_a_target_are_stored_and_read_by_distillation(place):
    root, train, teacher = place
    folder, states = root / "laws", root / "states_of_laws"
    common = ["num_rows=8", teacher]
    assert train("features", *common, "top_k=4", f"output={folder}") == 0
    assert train("features", *common, f"output={states}") == 0
    assert not list(folder.glob("hidden*"))
    fields = ["model.hidden_size=8", "model.intermediate_size=16", "model.num_layers=1", teacher]
    fields += ["model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=8", "top_k=4"]
    fields += ["run.steps=1", "decoding.num_prompts=0"]
    found = []
    for name, features_of in (("laws", folder), ("states", states)):
        own = [f"features={features_of}", f"run.folder={root / ('from_' + name)}"]
        assert train("distill", *fields, *own) == 0
        found.append(metrics.read(root / f"from_{name}" / "log.jsonl")[0])
    assert 0 < found[0]["top_k_error"] < 1
    for name in ("loss", "top_k_error"):  # the states are rounded to bfloat16, the laws are not
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=0.02)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(on_policy=0.1), "less than one row"),
        (dict(on_policy=1.5), "on_policy=1.5"),
        (dict(top_k=-1), "top_k=-1"),
        (dict(temperature=0.0), "temperature=0.0"),
        (dict(divergence="jsd", beta=0.0), "beta=0.0"),
        (dict(eval_samples=("a/x.npz", "b/x.npz")), "different names, not a/x.npz and b/x.npz"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, words):
    with pytest.raises(config.ConfigError, match=words):
        settings(**fields)


def test_a_row_of_the_table_of_objectives_is_a_run_of_distill_that_is_not_done_twice(place, capsys):
    root, train, teacher = place
    for kind in ("greedy", "sampled"):
        (root / f"{kind}.npz").write_bytes((root / "samples.npz").read_bytes())
    fields = ["num_rows=8", teacher, f"output={root / 'states'}"]
    assert train("features", *fields) == 0
    settings = root / "objectives.toml"
    paths = [str(root / f"{kind}.npz") for kind in ("greedy", "sampled")]
    settings.write_text(f"""
variants = ["ce", "lk"]
seeds = [0, 1]
corpus = "{root / "states"}"
target = "{root / "states"}"
output = "{root / "objectives"}"
[distill]
{teacher.replace("=", '="')}"
eval_samples = {paths}
{model_table("distill.model", 8)}[distill.data]
corpus = "{root / "corpus"}"
length = 24
batch = 4
eval_rows = 4
[distill.run]
steps = 2
[distill.optimizer]
warmup = 1
""")
    from specjax.train.cli import main

    for _ in range(2):
        assert main(["objectives", "--config", str(settings)]) == 0
    words = capsys.readouterr().out
    assert words.count("seed 1") == 2  # of the first time
    assert main(["objectives", "--config", str(settings), "distill.data.batch=2"]) == 2
    assert "data.batch: 4 -> 2" in capsys.readouterr().err  # no row of another configuration
    rows = metrics.read(root / "objectives" / "rows.jsonl")
    assert [(row["variant"], row["seed"]) for row in rows] == [
        (name, seed) for seed in (0, 1) for name in ("ce", "lk")
    ]
    table = (root / "objectives" / "table.md").read_text().splitlines()
    assert len(table) == 4 and table[3].startswith("| lk | corpus |")


def test_gains_are_over_the_baseline_of_the_same_seed():
    def row(variant, seed, value):
        names = [name for pair in objectives.MEASURES.values() for name in pair]
        return {"variant": variant, "seed": seed, **dict.fromkeys(names, value)}

    rows = [row("ce", 0, 0.2), row("ce", 1, 0.4)]
    rows += [row("fkl", 0, 0.3), row("fkl", 1, 0.5)]
    line = objectives.table(rows).splitlines()[-1]
    assert "0.400 [0.300, 0.500] | +37.5% |" in line
