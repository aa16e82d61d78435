"""LayerSkip's recipe: its constants, and the loss against the plain one and against a slow one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from specjax.train import early_exit, model, pretrain
from specjax.train.config import ConfigError
from specjax.train.early_exit import EarlyExitConfig
from specjax.train.step import make_keys

from specjax.models import DecoderConfig
from specjax.models.causal_lm import graph_definition

LAYERS, STEPS, END = 5, 40, 0
CONFIG = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=LAYERS,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)
PARAMS = model.create(CONFIG, 0)[1]
TOKENS = np.random.default_rng(0).integers(0, 32, (3, 13)).astype(np.int32)


def keys(step):
    return make_keys(jax.random.key(step), jnp.arange(len(TOKENS)), jnp.int32(step))


def loss(config, step, params=PARAMS):
    found = pretrain.make_early_exit_loss(CONFIG, END, config, STEPS)(
        params, None, TOKENS, keys(step)
    )
    return {name: float(mean.value) for name, mean in found.items()}


def test_dropout_grows_with_depth_and_with_time():
    config = EarlyExitConfig(dropout=0.2)
    last = np.asarray(early_exit.dropped(config, LAYERS, STEPS - 1, STEPS))
    np.testing.assert_allclose(last[[0, -1]], [0, 0.2], atol=1e-6)
    assert (np.diff(last) > 0).all()
    assert not np.asarray(early_exit.dropped(config, LAYERS, 0, STEPS)).any()
    held = dataclasses.replace(config, growing=False)
    np.testing.assert_allclose(early_exit.dropped(held, LAYERS, 0, STEPS), last, atol=1e-6)


def test_the_weights_of_exits_are_the_papers():
    np.testing.assert_allclose(early_exit.scales(5, 0.2), [0, 0.2, 0.6, 1.2, 4 + 0.2 * 6])
    config = EarlyExitConfig(scale=0.2, curriculum="all")
    chosen, shares = early_exit.exits(config, 5, 0, STEPS)
    assert chosen.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(shares, early_exit.scales(5, 0.2) / 7.2, rtol=1e-6)


def test_other_weights_and_chosen_exits():
    np.testing.assert_allclose(early_exit.scales(4, 0.5, "linear"), [0.5, 1, 1.5, 4])
    np.testing.assert_allclose(early_exit.scales(4, 0.5, "equal"), [0.5, 0.5, 0.5, 1])
    config = EarlyExitConfig(scale=0.5, weights="equal", exits=(3, 1))
    seen = [early_exit.exits(config, LAYERS, step, STEPS) for step in range(3)]
    assert [chosen.tolist() for chosen, _ in seen] == [[0], [2], [0]]  # layers count from 0
    for _, shares in seen:
        np.testing.assert_allclose(shares, [1 / 3, 2 / 3], rtol=1e-6)
    every = dataclasses.replace(config, curriculum="all", weights="linear")
    chosen, shares = early_exit.exits(every, LAYERS, 0, STEPS)
    assert chosen.tolist() == [0, 2]
    np.testing.assert_allclose(shares, np.asarray([0.5, 1.5, 5]) / 7, rtol=1e-6)


@pytest.mark.parametrize("rotation", [0, 1, 2, 3])
def test_a_rotation_lets_each_exit_take_part_once(rotation):
    config = EarlyExitConfig(scale=0.5, rotation=rotation)
    seen = []
    for step in range(rotation or LAYERS - 1):
        chosen, shares = early_exit.exits(config, LAYERS, step, STEPS)
        assert float(shares.sum()) == pytest.approx(1) and shares[-1] > 0
        there = np.arange(len(chosen)) * (rotation or LAYERS - 1) + step < LAYERS - 1
        assert not np.asarray(shares[:-1])[~there].any()
        seen += np.asarray(chosen)[there].tolist()
    assert sorted(seen) == list(range(LAYERS - 1))


def test_gradually_exits_join_from_the_last_layer_down():
    config = EarlyExitConfig(scale=1.0, curriculum="gradual")
    before = 0
    for step in range(STEPS):
        chosen, shares = early_exit.exits(config, LAYERS, step, STEPS)
        there = np.asarray(shares[:-1]) > 0
        assert (np.diff(there[1:].astype(int)) >= 0).all() and there.sum() >= before
        before = there.sum()
    assert there[1:].all()  # that of the first layer has weight 0


def test_without_dropout_and_exits_the_loss_is_the_plain_one():
    plain = pretrain.make_loss(CONFIG, END)(PARAMS, None, TOKENS, keys(3))["loss"].value
    found = loss(EarlyExitConfig(), 3)
    assert found["loss"] == pytest.approx(float(plain), rel=1e-5)
    assert found["last_loss"] == pytest.approx(found["loss"], rel=1e-6)


def test_the_loss_is_that_of_models_of_the_first_layers():
    """Each exit's loss is the plain loss of a model that ends there."""
    config, shape = EarlyExitConfig(scale=0.5, curriculum="all"), CONFIG
    each = []
    for last in range(1, LAYERS + 1):
        cut = dict(PARAMS) | {"blocks": {i: PARAMS["blocks"][i] for i in range(last)}}
        shape = dataclasses.replace(CONFIG, num_layers=last)
        each.append(pretrain.make_loss(shape, END)(cut, None, TOKENS, keys(0))["loss"].value)
    _, shares = early_exit.exits(config, LAYERS, 0, STEPS)
    assert loss(config, 0)["loss"] == pytest.approx(float(np.dot(shares, each)), rel=1e-5)


def test_a_layer_that_is_dropped_is_passed_unchanged_row_by_row():
    graph = nnx.merge(graph_definition(CONFIG), PARAMS)
    rows, nodes = TOKENS[:2, :-1].shape
    positions = jnp.broadcast_to(jnp.arange(nodes), (rows, nodes))
    mask = jnp.triu(jnp.ones((nodes, nodes), bool))[None]
    gates = np.ones((LAYERS, 2, rows), np.float32)
    gates[2, :, 1] = 0
    run = lambda gates, taps: graph.hidden(TOKENS[:2, :-1], positions, mask, taps=taps, gates=gates)  # noqa: E731
    found = run(gates, (2, 3))[1].reshape(rows, nodes, 2, -1)
    np.testing.assert_array_equal(found[1, :, 0], found[1, :, 1])
    whole = run(None, (3,))[1]
    np.testing.assert_allclose(found[0, :, 1], whole[0], atol=1e-5)
    assert np.abs(found[1, :, 1] - whole[1]).max() > 1e-2


def test_the_recipe_trains_and_dropout_changes_what_it_sees():
    config = EarlyExitConfig(scale=0.5, dropout=0.9, growing=False)
    made = pretrain.make_early_exit_loss(CONFIG, END, config, STEPS)

    def total(params, step):
        return made(params, None, TOKENS, keys(step))["loss"].value

    value, slopes = jax.jit(jax.value_and_grad(total))(PARAMS, 1)
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))
    lower = jax.tree.map(lambda x, g: x - 0.1 * g, PARAMS, slopes)
    assert total(lower, 1) < value
    assert value != pytest.approx(loss(dataclasses.replace(config, dropout=0.0), 1)["loss"])


@pytest.mark.parametrize(
    "field",
    [
        dict(scale=-1.0),
        dict(dropout=1.0),
        dict(curriculum="random"),
        dict(rotation=-2),
        dict(weights="cubic"),
        dict(exits=(2,)),
    ],
)
def test_a_field_that_cannot_be_is_refused(field):
    with pytest.raises(ConfigError, match=f"early_exit.{next(iter(field))}"):
        EarlyExitConfig(**field)
    with pytest.raises(ConfigError, match="at least 2 layers"):
        EarlyExitConfig(scale=1.0).check(1)


@pytest.mark.parametrize(
    ("exits", "weights", "words"),
    [
        ((5,), "equal", "from 1 to 4, each once"),
        ((0, 2), "equal", "from 1 to 4"),
        ((2, 2), "equal", "each once"),
        ((1, 2), "sum", "no weight under"),
    ],
)
def test_exits_that_cannot_be_trained_are_refused(exits, weights, words):
    config = EarlyExitConfig(scale=1.0, exits=exits, weights=weights)
    with pytest.raises(ConfigError, match=words):
        config.check(LAYERS)
