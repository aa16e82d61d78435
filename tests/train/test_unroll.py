"""Attention of an unroll, in spans of queries and whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.train import unroll


def attended(window):
    """The sum of the sines of what queries of step 2 attend to, and its derivatives."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)  # noqa: E731
    steps = 23
    query = draw(2, 2, 4, 3, steps)  # [B, K, E, G, T]
    entries = [(draw(2, 2, steps, 4), draw(2, 2, steps, 4)) for _ in range(3)]
    segments = jnp.asarray(np.arange(steps) >= np.asarray([[9], [30]]), jnp.int32)
    sinks = jnp.zeros((2, steps), bool).at[:, 0].set(True)
    seen = None if window is None else (window, sinks)

    def loss(query, entries):
        return jnp.sum(jnp.sin(unroll.attend(query, entries, segments, seen)))

    return jax.value_and_grad(loss, argnums=(0, 1))(query, entries)


@pytest.mark.parametrize("window", [None, 6])
def test_spans_of_queries_attend_to_the_same_as_all_at_once(window, monkeypatch):
    whole = attended(window)
    monkeypatch.setattr(unroll, "SPAN", 5)
    for got, wanted in zip(jax.tree.leaves(attended(window)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
