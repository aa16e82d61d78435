"""Objectives against their formulas in float64, and against what they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.train import losses


def softmax(x):
    x = np.exp(np.asarray(x, np.float64) - np.max(x, axis=-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def kl(a, b):
    return (a * np.log(a / b)).sum(-1)


P_LOGITS, Q_LOGITS = np.random.default_rng(0).normal(size=(2, 3, 5, 11)).astype(np.float32) * 2
P, Q = softmax(P_LOGITS), softmax(Q_LOGITS)
FORMULAS = {
    "fkl": kl(P, Q),
    "rkl": kl(Q, P),
    "jsd": kl(P, (P + Q) / 2) / 2 + kl(Q, (P + Q) / 2) / 2,
    "tvd": np.abs(P - Q).sum(-1) / 2,
    "nla": -np.log(np.minimum(P, Q).sum(-1)),
}


@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_divergence_equals_its_formula(name):
    value = losses.DIVERGENCES[name](P_LOGITS, Q_LOGITS)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, FORMULAS[name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_divergence_is_zero_at_equality_and_finite_between_disjoint_laws(name):
    np.testing.assert_allclose(losses.DIVERGENCES[name](P_LOGITS, P_LOGITS), 0, atol=1e-6)
    apart = jnp.array([40.0, 0.0, 0.0]), jnp.array([0.0, 0.0, 40.0])
    value, slope = jax.value_and_grad(losses.DIVERGENCES[name], argnums=1)(*apart)
    assert np.isfinite(value) and np.isfinite(slope).all()


def test_skewed_jsd_equals_its_formula():
    m = 0.1 * P + 0.9 * Q
    expected = 0.1 * kl(P, m) + 0.9 * kl(Q, m)
    np.testing.assert_allclose(losses.jsd(P_LOGITS, Q_LOGITS, 0.1), expected, rtol=2e-5, atol=1e-6)


def test_cross_entropy_is_minus_log_probability():
    tokens = np.random.default_rng(1).integers(0, 11, (3, 5))
    expected = -np.log(np.take_along_axis(Q, tokens[..., None], -1)[..., 0])
    np.testing.assert_allclose(losses.cross_entropy(Q_LOGITS, tokens), expected, rtol=2e-5)


def test_descending_total_variation_raises_acceptance():
    # a drafter that can't copy its target: one law for two contexts
    q = jnp.zeros(11)

    def loss(q):
        return jnp.mean(losses.tvd(P_LOGITS[0], q[None]))

    before = losses.acceptance(P_LOGITS[0], q[None]).mean()
    for _ in range(200):
        q = q - 2.0 * jax.grad(loss)(q)
    after = losses.acceptance(P_LOGITS[0], q[None]).mean()
    assert after > before + 0.05


def test_bfloat16_logits_are_reduced_in_float32():
    narrow = jnp.asarray(P_LOGITS, jnp.bfloat16), jnp.asarray(Q_LOGITS, jnp.bfloat16)
    wide = tuple(x.astype(jnp.float32) for x in narrow)
    np.testing.assert_array_equal(losses.fkl(*narrow), losses.fkl(*wide))


def test_greedy_match_compares_the_most_likely_tokens():
    expected = P.argmax(-1) == Q.argmax(-1)
    np.testing.assert_array_equal(losses.greedy_match(P_LOGITS, Q_LOGITS), expected)


def test_expected_tau_of_constant_acceptance_is_the_geometric_sum():
    tau, weight = losses.expected_tau(jnp.full((2, 9), 0.8), jnp.ones((2, 9)), 4)
    assert tau.shape == (2, 6)
    np.testing.assert_allclose(tau, (1 - 0.8**5) / (1 - 0.8), rtol=1e-6)
    np.testing.assert_array_equal(weight, 1)


def test_expected_tau_leaves_out_rounds_that_touch_other_positions():
    weight = jnp.array([[0.0, 0.0, 1.0, 1.0, 1.0, 0.0]])
    _, fits = losses.expected_tau(jnp.ones((1, 6)), weight, 2)
    np.testing.assert_array_equal(fits, [[0, 0, 1, 1, 0]])
