"""Objectives against their formulas in float64, and against what they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.train import chunks, losses
from specjax.train.config import ConfigError


def softmax(x):
    x = np.exp(np.asarray(x, np.float64) - np.max(x, axis=-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def kl(a, b):
    return (a * np.log(a / b)).sum(-1)


P_LOGITS, Q_LOGITS = np.random.default_rng(0).normal(size=(2, 3, 5, 11)).astype(np.float32) * 2
P, Q = softmax(P_LOGITS), softmax(Q_LOGITS)


def tv(p, q):
    return np.abs(p - q).sum(-1) / 2


FORMULAS_OF = {  # of laws in float64, and the weight that the mixture ``lk`` holds fast
    "fkl": lambda p, q, w: kl(p, q),
    "rkl": lambda p, q, w: kl(q, p),
    "jsd": lambda p, q, w: kl(p, (p + q) / 2) / 2 + kl(q, (p + q) / 2) / 2,
    "tvd": lambda p, q, w: tv(p, q),
    "nla": lambda p, q, w: -np.log(np.minimum(p, q).sum(-1)),
    "kl_tv": lambda p, q, w: kl(p, q) / 2 + tv(p, q) / 2,
    "lk": lambda p, q, w: w * kl(p, q) + (1 - w) * tv(p, q),
}
FORMULAS = {
    name: formula(P, Q, np.exp(-3 * np.minimum(P, Q).sum(-1)))
    for name, formula in FORMULAS_OF.items()
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


# ------------------------------------------------------------------- every objective


def slope(name, p, q):
    return jax.grad(lambda q: jnp.sum(losses.DIVERGENCES[name](p, q)))(q)


@pytest.mark.parametrize("name", losses.DIVERGENCES)
def test_gradient_equals_finite_differences_in_float64(name):
    p, q = P_LOGITS[0, 0].astype(np.float64), Q_LOGITS[0, 0].astype(np.float64)
    formula = FORMULAS_OF[name]
    weight = np.exp(-3 * np.minimum(softmax(p), softmax(q)).sum())  # of lk, held fast
    step, expected = 1e-6, np.zeros_like(q)
    for i in range(len(q)):
        up, down = q.copy(), q.copy()
        up[i] += step
        down[i] -= step
        ends = [formula(softmax(p), softmax(x), weight) for x in (up, down)]
        expected[i] = (ends[0] - ends[1]) / (2 * step)
    got = slope(name, P_LOGITS[0, 0], Q_LOGITS[0, 0])
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", losses.DIVERGENCES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_and_masked_logits_give_finite_values_and_slopes(name, dtype):
    extremes = jnp.array([1e4, -1e4, 0.0, 1.0, -jnp.inf, 3.0], dtype)
    for p in (extremes, extremes[::-1], jnp.zeros(6, dtype)):
        for q in (extremes, extremes[::-1], jnp.zeros(6, dtype)):
            value, gradient = jax.value_and_grad(losses.DIVERGENCES[name], argnums=1)(p, q)
            assert np.isfinite(value) and value > -1e-5
            assert np.isfinite(np.asarray(gradient, np.float32)).all()


@pytest.mark.parametrize("name", ["fkl", "rkl"])
def test_an_objective_with_its_laws_swapped_is_told_apart(name):
    # two modes, a drafter that can have one: forward KL spreads over both, reverse KL takes one
    p = jnp.log(jnp.array([0.49, 0.02, 0.49]))

    def best(distance):
        def q(place):  # a bump of fixed width
            return -((jnp.arange(3.0) - place) ** 2) * 4

        places = jnp.linspace(-0.5, 2.5, 61)
        found = jax.vmap(lambda place: distance(p, q(place)))(places)
        return abs(float(places[jnp.argmin(found)]) - 1.0)

    between = best(losses.DIVERGENCES[name])
    swapped = best(lambda p, q: losses.DIVERGENCES[name](q, p))
    assert (between < 0.1 and swapped > 0.5) == (name == "fkl")
    assert (between > 0.5 and swapped < 0.1) == (name == "rkl")


def test_mixtures_meet_their_ends_and_settings_are_checked():
    for mix, end in ((0.0, "tvd"), (1.0, "fkl")):
        mixed = losses.divergence("kl_tv", mix=mix)(P_LOGITS, Q_LOGITS)
        np.testing.assert_allclose(mixed, losses.DIVERGENCES[end](P_LOGITS, Q_LOGITS), rtol=1e-6)
    adaptive = losses.divergence("lk", eta=0.0)(P_LOGITS, Q_LOGITS)
    np.testing.assert_allclose(adaptive, losses.fkl(P_LOGITS, Q_LOGITS), rtol=1e-6)
    for how, words in (({"beta": 1.0}, "beta=1.0"), ({"mix": -1.0}, "mix"), ({"eta": -1.0}, "eta")):
        with pytest.raises(ConfigError, match=words):
            losses.divergence("jsd", **how)


def test_negative_log_acceptance_still_pulls_where_total_variation_no_longer_does():
    p, q = jnp.array([60.0, 0.0]), jnp.array([0.0, 60.0])
    assert np.abs(slope("tvd", p, q)).max() < 1e-20
    np.testing.assert_allclose(slope("nla", p, q), [-0.5, 0.5], atol=1e-3)  # q's half of the sum


# ------------------------------------------------------------------- compressed laws


@pytest.mark.parametrize("name", ["fkl", "rkl", "jsd", "tvd", "nla", "kl_tv"])
def test_compressed_laws_understate_a_divergence_and_are_exact_with_all_tokens(name):
    whole = losses.DIVERGENCES[name](P_LOGITS, Q_LOGITS)
    before = None
    for k in (1, 4, 8, 11):
        p, q = losses.lump(losses.compress(P_LOGITS, k), Q_LOGITS)
        value = losses.DIVERGENCES[name](p, q)
        assert (value <= 1.00001 * whole + 1e-6).all()
        assert before is None or (value >= 0.99999 * before - 1e-6).all()
        before = value
    np.testing.assert_allclose(before, whole, rtol=1e-5, atol=1e-6)


def test_the_stated_error_bounds_what_compression_adds_to_acceptance():
    true = losses.acceptance(P_LOGITS, Q_LOGITS)
    for k in (1, 3, 6, 11):
        p, q = losses.lump(losses.compress(P_LOGITS, k), Q_LOGITS)
        excess = losses.acceptance(p, q) - true
        assert (excess >= -1e-6).all() and (excess <= losses.lump_error(p, q) + 1e-6).all()
    assert (losses.lump_error(p, q) < 1e-6).all()  # k = V: nothing is left out


def test_compressed_laws_of_extreme_logits_stay_finite():
    p = jnp.array([1e4, -1e4, -jnp.inf, 0.0])
    for k in (1, 2, 4):
        for q in (p[::-1], jnp.zeros(4)):

            def loss(q, k=k):
                return losses.fkl(*losses.lump(losses.compress(p, k), q))

            value, gradient = jax.value_and_grad(loss)(q)
            assert np.isfinite(value) and np.isfinite(gradient).all()


# ------------------------------------------------------------------- chunks


def pair_of_heads(batch, steps, vocab, size=8):
    keys = jax.random.split(jax.random.key(0), 5)
    draw = jax.random.normal
    table, target = draw(keys[0], (vocab, size)), draw(keys[1], (vocab, size))
    states, p = draw(keys[2], (batch, steps, size)), draw(keys[3], (batch, steps, size))
    return table, states, target, p, jax.random.uniform(keys[4], (batch, steps))


def terms(table, states, target, p):
    p, q = chunks.logits_of(target, p), chunks.logits_of(table, states)
    return {"loss": losses.jsd(p, q), "acceptance": losses.acceptance(p, q)}


@pytest.mark.parametrize("chunk", [3, 8, 1000])
def test_chunks_give_the_values_and_gradients_of_the_whole(chunk):
    table, states, target, p, weight = pair_of_heads(2, 11, 13)

    def whole(table, states):
        found = terms(table, states, target, p)
        return jnp.sum(found["loss"] * weight), jnp.sum(found["acceptance"] * weight)

    def cut(table, states):
        loss, others = chunks.total(terms, table, states, target, p, weight, chunk=chunk)
        return loss, others["acceptance"]

    for expected, got in zip(
        jax.tree.leaves(jax.value_and_grad(whole, (0, 1), has_aux=True)(table, states)),
        jax.tree.leaves(jax.jit(jax.value_and_grad(cut, (0, 1), has_aux=True))(table, states)),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-6)
    each = chunks.each(terms, table, states, target, p, chunk=chunk)
    np.testing.assert_allclose(each["loss"], terms(table, states, target, p)["loss"], rtol=2e-5)


def test_no_buffer_of_a_chunked_loss_holds_the_logits_of_all_positions():
    batch, steps, vocab, chunk = 2, 256, 32_000, 32
    table, states, target, p, weight = pair_of_heads(batch, steps, vocab)

    def whole(table, states):
        return jnp.sum(terms(table, states, target, p)["loss"] * weight)

    def cut(table, states):
        return chunks.total(terms, table, states, target, p, weight, chunk=chunk)[0]

    def compiled(loss):
        return jax.jit(jax.grad(loss, (0, 1))).lower(table, states).compile()

    logits = 4 * batch * steps * vocab  # bytes
    sizes = [compiled(loss).memory_analysis().temp_size_in_bytes for loss in (whole, cut)]
    assert sizes[0] >= 2 * logits
    assert sizes[1] < logits / 2
    assert f"f32[{batch},{steps},{vocab}]" not in compiled(cut).as_text()
