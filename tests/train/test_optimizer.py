"""The schedule ends where the run ends; each parameter meets the optimiser meant for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.train.config import OptimizerConfig
from specjax.train.optimizer import make_optimizer, schedule


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0])
def test_the_rate_rises_stays_and_reaches_zero_at_the_last_step(share):
    rate = schedule(0.5, OptimizerConfig(warmup=10, decay_share=share), 100)
    values = np.array([rate(step) for step in range(101)])
    assert values[0] == 0 and values.max() == values[10] == 0.5
    assert (np.diff(values[:11]) > 0).all() and (np.diff(values[10:]) <= 0).all()
    assert values[99] > 0 and values[100] == pytest.approx(0, abs=1e-7)


def test_without_decay_the_rate_stays():
    rate = schedule(0.5, OptimizerConfig(warmup=10, decay_share=0.0), 100)
    assert rate(10) == rate(100) == 0.5


@pytest.mark.parametrize("shape", [(8, 16), (16, 8)])
def test_muon_orthogonalises_hidden_matrices_and_leaves_the_embedding_to_adam(shape):
    config = OptimizerConfig(rate=1.0, adam_rate=1.0, weight_decay=0.0, warmup=0, decay_share=0.0)
    params = {"embedding": jnp.ones(shape), "blocks": {0: {"weight": jnp.ones(shape)}}}
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), shape) * 1e-3, params)
    optimizer = make_optimizer(config, 10)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    spectrum = np.linalg.svd(updates["blocks"][0]["weight"], compute_uv=False)
    # all singular values near sqrt(max(1, out / in)); the Newton-Schulz iteration is approximate
    scale = max(1.0, shape[0] / shape[1]) ** 0.5
    assert 0.6 * scale < spectrum.min() and spectrum.max() < 1.3 * scale
    sizes = np.abs(updates["embedding"])  # Adam's first step is the sign of the gradient
    np.testing.assert_allclose(sizes, sizes.mean(), rtol=0.01)
