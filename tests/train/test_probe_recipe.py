"""The recipe of a probe: what it learns from is the obvious, and it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file
from specjax.train import config, distill, model, own_text, probe
from toys import whole

from specjax.decoding import reference
from specjax.drafters.probe import load_probe, save_probe, score_of
from specjax.models import DecoderConfig
from specjax.models.causal_lm import CausalLM
from specjax.models.lm import LM

SHAPE = dict(vocab_size=16, num_layers=1, head_dim=4, num_heads=2, num_kv_heads=2)
SMALL = DecoderConfig(hidden_size=8, intermediate_size=16, tie_embeddings=False, **SHAPE)
LARGE = DecoderConfig(hidden_size=16, intermediate_size=32, tie_embeddings=False, **SHAPE)
PAIR = distill.Pair(SMALL, LARGE, end_of_text=0)
CONFIG = probe.ProbeConfig(prompt_tokens=4, data=config.DataConfig(length=16, batch=8))
TOKENS = np.random.default_rng(0).integers(1, 16, (8, 17)).astype(np.int32)


def frozen():
    params = [model.create(shape, seed)[1] for seed, shape in enumerate((SMALL, LARGE))]
    return {"drafter": params[0], "target": jax.tree.map(lambda x: 3 * x, params[1])}


def judged(params=None, seed=0):
    keys = jax.random.split(jax.random.key(seed), 8)
    return probe.make_judged(PAIR, CONFIG)(params or frozen(), jnp.asarray(TOKENS), keys), keys


def test_a_token_is_judged_by_the_laws_before_it_and_read_at_its_own_position():
    params = frozen()
    found, keys = judged(params)
    write = own_text.make_writer(PAIR.student, PAIR.end_of_text, 16, 4, 1.0)
    tokens, weight = write(params["drafter"], jnp.asarray(TOKENS), keys)
    log_p, log_q = (
        jax.nn.log_softmax(reference.logits(CausalLM(shape), params[name], tokens[:, :-1]))
        for shape, name in ((LARGE, "target"), (SMALL, "drafter"))
    )
    lm = CausalLM(SMALL)
    cache = lm.init(params["drafter"], 8, 16)
    drafted = whole(tokens[:, :-1])
    hidden = lm.verify(params["drafter"], cache, drafted, features=(SMALL.num_layers,)).features
    for row in range(8):
        if bool(jnp.any(tokens[row, :-1] == 0)):
            continue  # attention ends at the end of a document
        for place in range(3, 15):
            x = int(tokens[row, place + 1])
            gap = float(log_p[row, place, x] - log_q[row, place, x])
            assert float(found["gap"][row, place]) == pytest.approx(gap, abs=2e-4)
            own = np.asarray(found["hidden"][row, place])
            np.testing.assert_allclose(own, hidden[row, place + 1], atol=1e-4)
    assert (np.asarray(found["weight"]) == np.asarray(weight[:, :-1])).all()
    assert float(found["weight"][:, :3].sum()) == 0 and float(found["weight"].sum()) > 40


def learned(found, steps=200):
    params = {"weight": jnp.zeros(8), "bias": jnp.zeros(())}
    optimizer = optax.adam(0.05)
    state = optimizer.init(params)

    def value(params):
        return jnp.sum(probe.losses_of(params, found) * found["weight"]) / found["weight"].sum()

    @jax.jit
    def step(params, state):
        loss, slope = jax.value_and_grad(value)(params)
        updates, state = optimizer.update(slope, state, params)
        return optax.apply_updates(params, updates), state, loss

    first = None
    for _ in range(steps):
        params, state, loss = step(params, state)
        first = loss if first is None else first
    return params, float(first), float(value(params))


def test_a_probe_learns_from_the_state_that_has_read_the_token():
    found = judged()[0]
    params, first, last = learned(found)
    assert first == pytest.approx(np.log(2), abs=1e-5) and last < first - 0.03
    assert np.ptp(np.asarray(score_of(params, found["hidden"]))) > 0.1


def test_a_probe_is_that_of_one_draft_model(tmp_path):
    params = frozen()["drafter"]
    draft = LM.of(CausalLM(SMALL), params)
    made = {"weight": jnp.arange(8.0), "bias": jnp.asarray(0.5)}
    save_probe(tmp_path / "probe", made, draft)
    for name, value in load_probe(tmp_path / "probe", draft).items():
        np.testing.assert_array_equal(value, made[name])
    other = LM.of(CausalLM(SMALL), jax.tree.map(lambda x: x + 1, params))
    with pytest.raises(ValueError, match="with other weights than"):
        load_probe(tmp_path / "probe", other)
    tensors = load_file(tmp_path / "probe")
    wrong = tensors | {"bias": np.asarray(np.nan, np.float32)}
    save_file(wrong, tmp_path / "nan", metadata={"draft": draft.checkpoint})
    with pytest.raises(ValueError, match="not finite"):
        load_probe(tmp_path / "nan", draft)
    for content, metadata in ((tensors, {}), ({"w": made["weight"]}, {"draft": draft.checkpoint})):
        save_file({k: np.asarray(v) for k, v in content.items()}, tmp_path / "else", metadata)
        with pytest.raises(ValueError, match="and no probe with the fingerprint"):
            load_probe(tmp_path / "else", draft)
    with pytest.raises(config.ConfigError, match="prompt_tokens=15; accepted: 1 to"):
        dataclasses.replace(CONFIG, prompt_tokens=15)
