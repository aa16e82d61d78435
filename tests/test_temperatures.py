"""Every temperature gives a law: near zero the greedy one, near infinity the uniform one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import bag

import specjax
from specjax import Sampling
from specjax.drafters import Plain

COLD = [0.0, 1e-45, 1e-38, 1e-37, 1e-31, 1e-30, 1e-25, 1e-20, 1e-15, 1e-12, 1e-10, 1e-9, 1e-8]
HOT = [1e8, 1e20, 1e30, 1e38]
LOGITS = 5 * np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32)


@jax.jit
def law(temperature, logits, top_p=None):
    sampling = Sampling(temperature=temperature, top_p=top_p, greedy=False)
    return sampling.rows(len(logits)).probabilities(logits)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("top_p", [None, 0.9])
def test_near_zero_the_law_is_the_greedy_token_under_jit(scale, top_p):
    for temperature in COLD:
        p = np.asarray(law(jnp.float32(temperature), scale * LOGITS, top_p))
        assert (p.argmax(axis=1) == LOGITS.argmax(axis=1)).all(), temperature
        np.testing.assert_allclose(p.max(axis=1), 1, atol=2e-3, err_msg=str(temperature))


def test_near_infinity_the_law_is_uniform_under_jit():
    for temperature in HOT:
        p = np.asarray(law(jnp.float32(temperature), LOGITS))
        np.testing.assert_allclose(p, 1 / LOGITS.shape[1], rtol=1e-5, err_msg=str(temperature))


def test_between_them_it_is_the_softmax():
    for temperature in (1e-3, 0.1, 0.7, 1.0, 30.0):
        wanted = LOGITS.astype(np.float64) / temperature
        wanted = np.exp(wanted - wanted.max(axis=1, keepdims=True))
        wanted /= wanted.sum(axis=1, keepdims=True)
        p = np.asarray(law(jnp.float32(temperature), LOGITS))
        np.testing.assert_allclose(p, wanted, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("logits", [[-np.inf] * 4, [np.nan] * 4, [0.0, np.inf, 1.0, 2.0]])
def test_a_law_without_probabilities_is_zero_at_every_temperature(logits):
    for temperature in (*COLD, 1.0, *HOT):
        assert not np.asarray(law(jnp.float32(temperature), jnp.asarray([logits]))).any()


@pytest.mark.usefixtures("quick_compilation")
def test_rows_at_every_temperature_are_decoded_to_their_end():
    model, params = bag(11, 3)
    temperatures = np.asarray([*COLD, 1.0, *HOT], np.float32)
    prompts = np.full((len(temperatures), 2), 3, np.int32)
    out = specjax.decode(
        model,
        Plain(),
        {"target": params},
        prompts,
        np.full(len(prompts), 2),
        key=jax.random.key(0),
        max_new_tokens=5,
        sampling=Sampling(temperature=temperatures),
    )
    assert (np.asarray(out.lengths) == 7).all()
    assert (np.asarray(out.tokens)[1 : len(COLD)] == np.asarray(out.tokens)[0]).all()
