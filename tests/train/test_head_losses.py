"""Losses over a vocabulary, taken a few positions at a time: right, and small, in every recipe."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads
from specjax.train import (
    block,
    block_heads,
    chunks,
    dspark,
    eagle,
    eagle3,
    evaluate,
    frozen,
    head_losses,
    heads,
    hydra,
    joint,
    medusa2,
    model,
    mtp,
    mtp_heads,
    pass_embeddings,
    pretrain,
    specdiff,
    speculator,
)
from specjax.train.config import DataConfig
from specjax.train.rows import Rows, make_reader
from specjax.train.step import make_keys
from training_toys import TableTarget, logits_of

from specjax.models import DecoderConfig
from specjax.models.causal_lm import CausalLM
from specjax.models.lm import LM

# ------------------------------------------------------------------- against the whole at once

ROWS, LENGTH, SIZE, VOCAB = 4, 140, 3, TableTarget.vocab_size  # positions of more than one chunk
assert 2 * ROWS * LENGTH > chunks.SEVERAL


def toy_rows():
    keys = jax.random.split(jax.random.key(0), 3)
    tokens = jax.random.randint(keys[0], (ROWS, LENGTH + 1), 0, VOCAB)
    weight = jax.random.uniform(keys[1], (ROWS, LENGTH))
    hidden = jax.random.normal(keys[2], (ROWS, LENGTH, SIZE))
    segments = jnp.cumsum(jnp.arange(LENGTH + 1) % 40 == 39) * jnp.ones_like(tokens)
    return Rows(tokens=tokens, weight=weight, segments=segments, hidden=hidden)


def at_once(outputs, table, rows, share, vocab, capped=True):
    """``head_losses`` with the logits of all positions, written down as it is defined."""
    steps, values = rows.steps(len(outputs)), []
    for k, output in enumerate(outputs):
        q = logits_of(output).T  # the target's own LM head is capped, a head of the drafter is not
        log_q = jax.nn.log_softmax(4.0 * jnp.tanh(q / 4.0) if capped else q)
        law = 4.0 * jnp.tanh(rows.states(1 + k, steps).T @ table.T / 4.0)
        weight = head_losses.inside(rows, k, steps).reshape(-1)
        said = (
            -(1 - share)
            * jnp.take_along_axis(log_q, rows.following(2 + k, steps)[:, None], 1)[:, 0]
            if share < 1
            else 0.0
        )
        if vocab is not None:
            weight = weight * jnp.isin(jnp.argmax(law, axis=1), vocab)
            law = law[:, vocab]
        said -= share * jnp.sum(jax.nn.softmax(law) * log_q, axis=1)
        values.append(jnp.sum(said * weight) / jnp.sum(weight))
    return values


@pytest.mark.parametrize(
    ("share", "vocab", "capped"),
    [(0.0, None, True), (0.25, None, False), (1.0, np.array([1, 2, 5]), True)],
)
def test_values_and_gradients_of_heads_are_those_of_all_positions_at_once(share, vocab, capped):
    rows, keys = toy_rows(), iter(jax.random.split(jax.random.key(1), 9))
    own = VOCAB if vocab is None else len(vocab)
    columns = ROWS * rows.steps(2)
    draw = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731
    table = draw(VOCAB, SIZE)
    outputs = [(draw(own, SIZE), draw(own), draw(SIZE, columns)) for _ in range(2)]
    outputs[1] = (outputs[0][0], None, outputs[1][2])  # one table for both, once without a bias

    def cut(outputs):
        found = head_losses.head_losses(outputs, TableTarget(), table, rows, share, vocab, capped)
        return found[0].value + 0.5 * found[1].value

    def whole(outputs):
        found = at_once(outputs, table, rows, share, vocab, capped)
        return found[0] + 0.5 * found[1]

    for got, expected in zip(
        jax.tree.leaves(jax.jit(jax.value_and_grad(cut))(outputs)),
        jax.tree.leaves(jax.jit(jax.value_and_grad(whole))(outputs)),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-6)


def test_a_table_that_does_not_learn_costs_no_gradient():
    rows, table = toy_rows(), jnp.ones((VOCAB, SIZE))
    states = jnp.ones((SIZE, ROWS * rows.steps(1)))

    def loss(table, states):
        found = head_losses.head_losses([(table, None, states)], TableTarget(), table, rows, 0.0)
        return found[0].value

    def products(*argnums):
        traced = jax.make_jaxpr(jax.grad(loss, argnums))(table, states).jaxpr
        return sum(eqn.primitive.name == "scan" and len(eqn.outvars) for eqn in traced.eqns)

    assert products(1) < products(0, 1)  # fewer sums go round the loop


# ------------------------------------------------------------------- against the definition


def two_rows():
    """Two rows of 7 tokens over 5 ids, in the second of which a document begins (id 0)."""
    tokens = jnp.asarray([[1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 0, 4, 1, 2]])
    hidden = jax.random.normal(jax.random.key(0), (2, 6, 3))
    weight, segments = jnp.ones(hidden.shape[:2]), jnp.cumsum(tokens == 0, axis=1)
    return Rows(tokens=tokens, weight=weight, segments=segments, hidden=hidden)


class Uncapped(TableTarget):
    """The same target without a cap on its logits."""

    class config:  # noqa: N801
        logit_softcap = None


def test_the_loss_is_the_mean_cross_entropy_within_documents_against_text_or_law():
    rows, table = two_rows(), jax.random.normal(jax.random.key(1), (5, 3))
    own = jax.random.normal(jax.random.key(2), (2, 3, 8))  # two heads, 2 rows of 4 positions
    outputs = [(table, None, state) for state in own]
    text = head_losses.head_losses(outputs, Uncapped(), table, rows, 0.0)
    law = head_losses.head_losses(outputs, Uncapped(), table, rows, 1.0)
    for k in range(2):
        sums = np.zeros(3)
        for b in range(2):
            for t in range(4):
                if rows.segments[b, t + 1 + k] != rows.segments[b, t]:
                    continue
                log_q = jax.nn.log_softmax(table @ own[k][:, 4 * b + t])
                p = jax.nn.softmax(table @ rows.hidden[b, t + 1 + k])
                sums += [-log_q[rows.tokens[b, t + 2 + k]], -jnp.sum(p * log_q), 1]
        found = [text[k].value, law[k].value]
        np.testing.assert_allclose(found, sums[:2] / sums[2], rtol=1e-5)
    mixed = head_losses.head_losses(outputs, Uncapped(), table, rows, 0.25)
    both = 0.75 * text[0].value + 0.25 * law[0].value
    np.testing.assert_allclose(mixed[0].value, both, rtol=1e-5)


def test_the_teacher_loss_has_no_gradient_where_head_and_target_agree_and_the_right_one_beside():
    rows, table = two_rows(), jax.random.normal(jax.random.key(1), (5, 3))

    def loss(state):
        found = head_losses.head_losses([(table, None, state)], Uncapped(), table, rows, 1.0)
        return found[0].value

    agreeing = rows.states(1, rows.steps(1))
    np.testing.assert_allclose(jax.grad(loss)(agreeing), 0.0, atol=1e-6)
    beside = agreeing + 0.5
    check_grads(loss, (beside,), order=1, modes=["rev"], rtol=2e-2)
    assert loss(beside) > loss(agreeing)


# ------------------------------------------------------------------- what is in memory

SHAPE = dict(hidden_size=8, intermediate_size=8, num_layers=1, head_dim=8, num_heads=1)
WIDE = DecoderConfig(**SHAPE, num_kv_heads=1, vocab_size=4000, tie_embeddings=False)
DATA = DataConfig(length=128, batch=16)
LATTICE = dict(lattice_heads=2, factor_size=4, num_candidates=4)
RECIPES = {
    "medusa": (heads.make_medusa, heads.Config(data=DATA)),
    "blockwise": (heads.make_blockwise, heads.Config(data=DATA, sample_head=True)),
    "hydra": (hydra.make_hydra, hydra.Config(data=DATA, tied=False, teacher_share=1.0)),
    "medusa2": (heads.make_medusa, medusa2.Config(data=DATA)),
    "mlp": (speculator.make_speculator, speculator.Config(data=DATA, inner_size=8)),
    "redrafter": (speculator.make_redrafter, speculator.Config(data=DATA, kind="redrafter")),
    "hass": (eagle.make_eagle, eagle.Config(data=DATA, num_heads=2, top_k=4)),
    "eagle3": (eagle3.make_eagle3, eagle3.Config(data=DATA, layers=(0, 1), draft_vocab_size=3000)),
    "mtp": (mtp.make_mtp, mtp.Config(data=DATA, teacher_share=0.5)),
    "mtp_heads": (mtp_heads.make_heads, mtp_heads.Config(data=DATA, teacher_share=0.5)),
    "pass": (pass_embeddings.make_pass, pass_embeddings.Config(data=DATA, num_anchors=16)),
    "dspark": (dspark.make_dspark, dspark.Config(data=DATA, num_anchors=16, markov_rank=8)),
    "domino": (
        block_heads.make_block_heads,
        block_heads.Config(data=DATA, num_anchors=16, rank=8, gru_size=8),
    ),
    "xpress": (
        block_heads.make_block_heads,
        block_heads.Config(data=DATA, num_anchors=16, rank=8, kind="xpress", inner_size=8),
    ),
    "dflash2": (
        block_heads.make_block_heads,
        block_heads.Config(data=DATA, num_anchors=16, kind="dflash2", rank=8, conv_group=4),
    ),
    "lilicorr": (
        block_heads.make_block_heads,
        block_heads.Config(data=DATA, num_anchors=16, kind="lilicorr", **LATTICE),
    ),
    "block": (block.make_block, block.Config(data=DATA, num_anchors=16, teacher_share=0.5)),
    "streak": (block.make_block, block.Config(data=DATA, num_anchors=16, weighting="streak")),
    "specdiff": (specdiff.make_specdiff, specdiff.Config(data=DATA, num_anchors=16)),
    "glancing": (
        specdiff.make_specdiff,
        specdiff.Config(data=DATA, num_anchors=16, masking="glancing"),
    ),
    "paced": (
        dspark.make_dspark,
        dspark.Config(data=DATA, num_anchors=16, markov_rank=8, weighting="d-pace", ce_share=1.0),
    ),
}


def task(name):
    """The loss of a recipe, what it is a function of, and its held-out measure's."""
    params = model.create(WIDE, 0)[1]
    if name == "pretrain":
        return pretrain.make_loss(WIDE, 0), params, None, pretrain.make_measure(WIDE, 0)
    target, (make, config) = CausalLM(WIDE), RECIPES[name]
    frequencies = np.arange(WIDE.vocab_size, 0, -1.0)
    made = make(
        config, frozen.Setting(LM(target, params, None, "", ""), 0, None, {}, frequencies, {})
    )
    read = make_reader(WIDE, 0, made.layers, gradient=name == "medusa2")
    how = made, target, read, config
    own, given = made.params, {"target": params}
    if name == "medusa2":
        own, given = {"target": params, "drafter": own}, None
        return joint.make_loss(*how, medusa2.head_terms), own, given, joint.make_measure(*how)
    losses = {
        "blockwise": heads.make_sampled_loss,
        "hass": eagle.make_loss,
        "mtp": mtp.make_loss,
        "mtp_heads": mtp_heads.make_loss,
        "block": block.make_loss,
        "dspark": dspark.make_loss,
        "domino": block_heads.make_loss,
        "xpress": block_heads.make_loss,
        "dflash2": block_heads.make_loss,
        "lilicorr": block_heads.make_loss,
        "pass": block.make_loss,
        "streak": block.make_loss,
        "specdiff": specdiff.make_loss,
        "glancing": specdiff.make_loss,
        "paced": dspark.make_loss,
    }
    blocks = {"block", "dspark", "domino", "xpress", "lilicorr", "pass", "streak", "specdiff"}
    blocks = name in blocks | {"dflash2", "glancing", "paced"}
    measure = block.make_measure if blocks else head_losses.make_measure
    measure = head_losses.make_mean_measure if name.startswith("mtp") else measure
    measure = heads.make_sampled_measure if name == "blockwise" else measure
    return losses.get(name, head_losses.make_loss)(*how), own, given, measure(*how)


def largest(jaxpr) -> int:
    """Numbers in the largest array that a program writes, loops and functions within included."""
    sizes = [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars]
    inner = [largest(sub) for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)]
    return max(sizes + inner, default=0)


@pytest.mark.parametrize("name", ["pretrain", *RECIPES])
def test_no_recipe_writes_the_logits_of_all_positions(name):
    loss, params, given, measure = task(name)
    tokens = np.ones((DATA.batch, DATA.length + 1), np.int32)
    weight = np.ones((DATA.batch, DATA.length), np.float32)
    chunk = chunks.SEVERAL * WIDE.vocab_size  # of more positions than that are all of them

    def value(params, given, tokens, keys):
        return evaluate.weighed(loss(params, given, tokens, keys))

    keys = make_keys(jax.random.key(0), jnp.arange(DATA.batch))
    step = jax.make_jaxpr(jax.value_and_grad(value))(params, given, tokens, keys)
    held = jax.make_jaxpr(measure)(params, given, tokens, weight)
    for program in (step, held):
        assert 0.05 * chunk < largest(program.jaxpr) <= chunk


@pytest.mark.parametrize("name", ["mtp", "mtp_heads", "blockwise"])
def test_the_held_out_loss_is_on_the_scale_of_that_of_a_step(name):
    loss, params, given, measure = task(name)
    shape = DATA.batch, DATA.length + 1
    tokens = np.random.default_rng(0).integers(1, WIDE.vocab_size, shape).astype(np.int32)
    batch = tokens, np.ones((DATA.batch, DATA.length), np.float32)
    keys = make_keys(jax.random.key(0), jnp.arange(DATA.batch))
    terms = jax.jit(loss)(params, given, tokens, keys)
    if name == "blockwise":  # one head is drawn, each as often, and weighs as many as there are
        drawn = sorted(float(term.share) for term in terms.values())
        assert drawn == [0.0] * (len(terms) - 1) + [len(terms)]
        terms = {own: term._replace(share=1.0) for own, term in terms.items()}
    learned = float(evaluate.weighed(terms))
    held = evaluate.make_evaluate(measure, {"": [batch]})(params, given)["heldout_loss"]
    np.testing.assert_allclose(held, learned, rtol=1e-4)


def test_memory_does_not_grow_with_heads_times_positions_times_vocabulary():
    config = WIDE.__class__(**SHAPE, num_kv_heads=1, vocab_size=16_000)
    target, sizes = CausalLM(config), {}
    table = jax.ShapeDtypeStruct((config.vocab_size, 8), jnp.float32)
    for count, length in ((1, 256), (1, 512), (6, 512)):
        tokens = jnp.zeros((4, length + 1), jnp.int32)
        weight = jnp.ones((4, length))
        hidden = jnp.zeros((4, length, 8))
        rows = Rows(tokens=tokens, weight=weight, segments=tokens, hidden=hidden)
        states = [jax.ShapeDtypeStruct((8, 4 * rows.steps(count)), jnp.float32)] * count

        def loss(states, table, rows=rows):
            outputs = [(table, None, state) for state in states]
            params = {"lm_head": {"weight": table}, "embedding": table}
            found = head_losses.head_losses(outputs, target, params, rows, 0.5)
            return sum(mean.value for mean in found)

        compiled = jax.jit(jax.grad(loss)).lower(states, table).compile()
        sizes[count, length] = compiled.memory_analysis().temp_size_in_bytes
    logits = 4 * chunks.SEVERAL * config.vocab_size  # bytes of one chunk's
    assert sizes[1, 256] > logits
    assert sizes[1, 512] < 1.1 * sizes[1, 256] and sizes[6, 512] < 1.1 * sizes[1, 512], sizes
