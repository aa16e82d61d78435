"""Traps that a review found: each of these was wrong once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import bag

import specjax
from specjax import Sampling, acceptance, loop, tree
from specjax.drafters import Plain
from specjax.sampling import Prefix, draw
from specjax.types import Scores

MODEL, PARAMS = bag(13, 3, features=8)


def context(batch, sampling=Sampling(temperature=1.0), length=1):
    return specjax.Context(
        tokens=jnp.zeros((batch, length), jnp.int32),
        length=jnp.full((batch,), length, jnp.int32),
        budget=jnp.full((batch,), 9, jnp.int32),
        key=jax.random.split(jax.random.key(0), batch),
        sampling=sampling.rows(batch),
    )


def test_a_distinct_sibling_beyond_the_support_of_its_law_is_never_accepted():
    batch, p = 20_000, jnp.asarray([0.5, 0.2, 0.3])
    around = context(batch)
    # q knows one token; the second sibling is what is drawn from nothing: token 0
    draft = tree.tree(
        around,
        jnp.broadcast_to(jnp.asarray([1, 0]), (batch, 2)),
        (-1, 0, 0),
        law=jnp.zeros((batch, 2), jnp.int32),
        laws=jnp.broadcast_to(jnp.asarray([0.0, 1.0, 0.0]), (batch, 1, 3)),
        draws="distinct",
    )
    logits = jnp.broadcast_to(jnp.log(p), (batch, 3, 3))
    scores = Scores(logits=logits, features=None, entries=None)
    verdict = loop.accept("rejection", {}, draft, scores, around, around.key)
    first = jnp.where(
        verdict.count > 0, draft.tokens[jnp.arange(batch), verdict.path[:, 1]], verdict.token
    )
    share = np.bincount(np.asarray(first), minlength=3) / batch
    np.testing.assert_allclose(share, p, atol=0.02)


def test_a_node_that_was_not_scored_is_never_accepted():
    around = context(2, Sampling())
    draft = tree.chain(around, jnp.zeros((2, 1), jnp.int32), scored=jnp.asarray([[True], [False]]))
    scores = Scores(logits=jnp.zeros((2, 2, 5)), features=None, entries=None)
    verdict = loop.accept("auto", {}, draft, scores, around, around.key)
    assert verdict.count.tolist() == [1, 0]


def test_a_token_without_mass_is_never_drawn_where_the_cumulative_sum_steps_down():
    rng = np.random.default_rng(0)
    weights = rng.random((400, 8)) * (rng.random((400, 8)) < 0.5)
    weights = jnp.asarray(weights / np.maximum(weights.sum(1, keepdims=True), 1e-9), jnp.float32)
    total = jnp.cumsum(weights, axis=-1)  # of one block, as `draw` takes it
    for slot in range(8):
        level = total[:, slot] / jnp.sum(weights, axis=-1)
        for uniform in (level, jnp.nextafter(level, 0.0), jnp.nextafter(level, 1.0)):
            token = draw(weights, jnp.clip(uniform, 0.0, 1 - 2**-24))
            drawn = jnp.take_along_axis(weights, token[:, None], axis=1)[:, 0]
            assert (np.asarray(drawn)[np.asarray(jnp.sum(weights, axis=1)) > 0] > 0).all()


def test_bias_is_added_before_the_repetition_penalty_as_in_transformers():
    sampling = Sampling(repetition_penalty=2.0, logit_bias=np.asarray([3.0, 3.0])).rows(1)
    prefix = Prefix(
        tokens=jnp.asarray([[0]]), length=jnp.asarray([1]), path=jnp.full((1, 1), -1, jnp.int32)
    )
    assert sampling.adjust(jnp.asarray([[1.0, 1.0]]), prefix).tolist() == [[2.0, 4.0]]
