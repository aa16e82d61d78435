"""Latent attention: the compressed cache, and the sums that it stands for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import SMALL, random_params
from flax import nnx
from shapes import LATENT

from specjax.kernels.xla_cpu import XlaCpuBackend
from specjax.models.causal_lm import CausalLM, graph_definition
from specjax.models.layers import rope_frequencies
from specjax.models.mla import LatentAttention

CONFIG = dataclasses.replace(
    SMALL,
    **LATENT,
    rope_scaling=(("factor", 4.0), ("mscale_all_dim", 0.7), ("rope_type", "yarn")),
)
BATCH, NODES = 2, 5


def test_the_cache_holds_one_latent_and_one_rotated_key_a_token():
    target = CausalLM(CONFIG)
    cache = target.init(random_params(CONFIG), 3, 7)
    sizes = {leaf.shape for leaf in jax.tree.leaves(cache)}
    assert sizes == {(3, 1, 7, CONFIG.kv_rank + CONFIG.rope_dim)}
    assert len(jax.tree.leaves(cache)) == CONFIG.num_layers


def attention_of(config):
    return LatentAttention(config, rngs=nnx.Rngs(0), param_dtype=jnp.float32)


def expanded(module, x, angle):
    """The definition, in float64: every head's own keys and values, made of the latents.
    ``x [H, N]``, ``angle [P / 2, N]``."""
    c = module.config
    weight = {
        k: np.asarray(getattr(module, k).weight[...], np.float64)
        for k in vars(module)
        if k[0] in "qko"
    }

    def normed(y):
        return y / np.sqrt((y * y).mean(axis=0) + 1e-6)

    def turned(y):
        """Neighbours ``[P, N]`` turned as complex numbers."""
        pairs = (y[0::2] + 1j * y[1::2]) * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag])

    queries = weight["q_b"] @ normed(weight["q_a"] @ x)
    latent, shared = np.split(weight["kv_a"] @ x, [c.kv_rank])
    made = (weight["kv_b"] @ normed(latent)).reshape(c.num_heads, -1, x.shape[1])
    heads = []
    for query, own in zip(queries.reshape(c.num_heads, -1, x.shape[1]), made, strict=True):
        plain, rotated = np.split(query, [c.nope_dim])
        key, value = np.split(own, [c.nope_dim])
        scores = (plain.T @ key + turned(rotated).T @ turned(shared)) / np.sqrt(len(query))
        scores = scores * (0.1 * 0.7 * np.log(4.0) + 1) ** 2
        scores = np.where(np.tri(len(scores), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        heads.append(value @ (weights / weights.sum(axis=1, keepdims=True)).T)
    return weight["o"] @ np.concatenate(heads)


def test_absorbed_projections_give_what_every_heads_own_keys_and_values_give():
    module, rng = attention_of(CONFIG), np.random.default_rng(0)
    x = rng.normal(size=(CONFIG.hidden_size, BATCH, NODES))
    inverse, _ = rope_frequencies(4, 10_000.0, None, 64)
    angle = inverse[:, None] * (3 + np.arange(NODES))
    rope = [jnp.tile(turn(angle)[:, None], (1, BATCH, 1)) for turn in (np.cos, np.sin)]
    mask = jnp.triu(jnp.ones((NODES, NODES), bool))[None]
    graph, params = nnx.split(module)

    @jax.jit
    def run(params, x, rope):
        own = lambda q, k: (XlaCpuBackend().attend(q, k, k, mask), (k,))  # noqa: E731
        return nnx.merge(graph, params)(x, rope, BATCH, own)

    arrays = x.reshape(CONFIG.hidden_size, -1), rope
    found, (entry,) = run(params, *jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), arrays))
    assert entry.shape == (BATCH, 1, NODES, CONFIG.head_dim)
    found = found.reshape(-1, BATCH, NODES)
    for row in range(BATCH):
        np.testing.assert_allclose(found[:, row], expanded(module, x[:, row], angle), atol=1e-5)


def test_neighbours_and_halves_are_two_ways_to_write_the_same_rotation():
    """Rows of the weights sorted into halves: the layout that ``rope_interleaved=False`` means."""
    params = random_params(CONFIG)
    halves = dataclasses.replace(CONFIG, rope_interleaved=False)
    heads, size = CONFIG.num_heads, CONFIG.nope_dim + CONFIG.rope_dim
    order = np.asarray([0, 2, 1, 3])

    def sort(path, param):
        value = param[...]
        if path[-2:] == ("kv_a", "weight"):
            value = value.at[CONFIG.kv_rank :].set(value[CONFIG.kv_rank :][order])
        if path[-2:] == ("q_b", "weight"):
            each = value.reshape(heads, size, -1)
            turned = each[:, CONFIG.nope_dim :][:, order]
            value = each.at[:, CONFIG.nope_dim :].set(turned).reshape(value.shape)
        return param.replace(value)

    flat = nnx.to_flat_state(params)
    sorted_ = nnx.from_flat_state([(path, sort(path, param)) for path, param in flat])
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6]])
    found = [
        jax.jit(lambda p, c=config: nnx.merge(graph_definition(c), p)(tokens))(weights)
        for config, weights in ((CONFIG, params), (halves, sorted_), (halves, params))
    ]
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert np.abs(found[0] - found[2]).max() > 1e-3


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_kv_heads=4), "num_kv_heads=4, head_dim=20"),
        (dict(head_dim=16), "head_dim=16.*kv_rank \\+ rope_dim = 20"),
        (dict(value_dim=0), "value_dim=0: it must be at least 1"),
        (dict(rope_dim=3, head_dim=19), "3 features are odd"),
    ],
)
def test_latents_of_senseless_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
