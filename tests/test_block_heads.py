"""Heads that correct a block by the tokens before, against slow ones; faults; their shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_heads import (
    DOMINO,
    EXPRESS,
    LATTICE,
    LILICORR,
    sigmoid,
    slow_domino,
    slow_lilicorr,
    slow_xpress,
)
from block_oracle import (
    BATCH,
    MASKS,
    SLOTS,
    TARGET,
    begun,
    slow_block,
    weights_of,
    whole_law,
)
from toys import bag, own_params, said_below, small_layer
from toys import heads as toy_weights

import specjax
from benchmarks import drawn
from specjax.drafters import Domino, LiLiCorr, XPress, lilicorr
from specjax.drafters.candidates import CandidateBlock
from specjax.drafters.corrected import CorrectedBlock
from specjax.drafters.domino import DominoConfig
from specjax.drafters.lilicorr import LiLiCorrConfig, _Matched
from specjax.drafters.xpress import XPressConfig

pytestmark = pytest.mark.usefixtures("quick_compilation")
TOY_SIZE = 6
TOY = bag(5, 0, TOY_SIZE)[0]
TINY = dict(layers=small_layer(5, TOY_SIZE, qk_norm=True), block_size=4, mask_token=0)
TINY |= dict(target_layers=(1,))
HEADS = {
    "domino": (
        Domino,
        DOMINO,
        slow_domino,
        ("reads the token itself", "gates exchanged", "the prefix too"),
    ),
    "xpress in turn": (
        functools.partial(XPress, in_turn=True),
        EXPRESS,
        slow_xpress,
        ("mean without the root", "the root twice", "reads later tokens", "no identity"),
    ),
    "lilicorr": (
        LiLiCorr,
        LILICORR,
        slow_lilicorr,
        (
            "distances turned",
            "ranks reversed",
            "each below the root",
            "logits of the block too",
        ),
    ),
    "xpress": (
        XPress,
        EXPRESS,
        functools.partial(slow_xpress, passes=2),
        ("mean without the root", "the root twice", "reads later tokens", "no identity"),
    ),
}


@pytest.fixture(scope="module")
def lm():
    return specjax.load(TARGET, tokenizer=False, dtype="float32")


def said(drafter, params, state, context, paths):
    return said_below(drafter, *own_params(params), state, context, paths)[0]


@pytest.mark.parametrize("name", HEADS)
def test_logits_are_those_of_a_slow_head_and_its_broken_twins_differ(lm, name):
    """Logits below each token of a path, the head by a loop over the tokens before each place."""
    kind, config, slow, faults = HEADS[name]
    drafter = kind(config=config, target=lm.target)
    tokens = np.random.default_rng(3).integers(0, 72, (BATCH, SLOTS)).astype(np.int32)
    params = {"target": lm.params, "drafter": weights_of(drafter)}
    state, context, features = begun(lm, drafter, params, tokens)
    lengths, given = np.asarray(context.length), []
    table, head = (
        np.asarray(x[...], np.float32)
        for x in (lm.params["embedding"], lm.params["lm_head"]["weight"])
    )
    w = jax.tree.map(np.asarray, params["drafter"])
    for row in range(BATCH):
        behind, root = np.asarray(features[row, : lengths[row] - 1]), tokens[row, lengths[row] - 1]
        hidden = slow_block(config, w, behind, root, table)
        base = hidden @ head.T
        second = np.argsort(-base[1:-1], axis=-1)[:, 1]  # of each place: a candidate
        given.append((w, hidden, base, np.concatenate([[root], second]), table))
    paths = np.stack([path for _, _, _, path, _ in given]).astype(np.int32)
    run_said = jax.jit(said, static_argnums=0)
    found = np.asarray(run_said(drafter, params, state, context, paths))
    alone = np.asarray(run_said(drawn.alone(drafter), params, state, context, paths))
    if isinstance(drafter, CandidateBlock):
        drawing = dataclasses.replace(drafter, sibling_sampling="iid")
        drawn_from = np.asarray(run_said(drawing, params, state, context, paths))
        few = dataclasses.replace(drawing, whole_law=False)
        np.testing.assert_array_equal(run_said(few, params, state, context, paths), found)
    for row in range(BATCH):
        np.testing.assert_allclose(
            alone[row], given[row][2][not config.from_root :][: len(alone[row])], atol=5e-4
        )
        before, feature = tokens[row, lengths[row] - 2], features[row, lengths[row] - 2]
        more = {"xpress": dict(before=before), "lilicorr": dict(feature=np.asarray(feature))}
        run = functools.partial(slow, *given[row], **more.get(name.split()[0], {}))
        np.testing.assert_allclose(found[row], run(), atol=5e-4)
        if isinstance(drafter, CandidateBlock):
            law = whole_law(run(), alone[row])
            np.testing.assert_allclose(np.exp(drawn_from[row]), law, atol=2e-5)
            assert (law.argmax(axis=1) == found[row].argmax(axis=1)).all()
        for fault in faults:
            wrong, right = (np.maximum(x, -1e9) for x in (run(fault=fault), found[row]))
            assert np.abs(wrong - right).max() > 0.01, (fault, np.abs(wrong - right).max())


def test_shapes_that_cannot_be_are_refused(lm):
    for wrong, words in (
        (dict(gru_size=0), "gru_size=0: it must be at least 1"),
        (dict(prefix=MASKS), "prefix=3: .* has 0 to 2"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(DOMINO, **wrong)
    for wrong, words in (
        (dict(rank=0), "rank=0: it must be at least 1"),
        (dict(num_passes=-1), "num_passes=-1: it must be at least 0"),
        (dict(from_root=True), "leave from_root out"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(EXPRESS, **wrong)
    for wrong, words in (
        (dict(lattice_size=0), "lattice_size=0: it must be at least 1"),
        (dict(logit_scale=0.0), "logit_scale=0.0: it must be above 0"),
        (dict(num_candidates=73), "num_candidates=73"),
        (dict(conv_taps=2, conv_group=7), "must divide hidden_size=24"),
        (dict(from_root=True), "leave from_root out"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(LILICORR, **wrong)
    with pytest.raises(ValueError, match="4 children, and each place has 3 candidates"):
        LiLiCorr(config=LILICORR, target=lm.target, topology=specjax.trees.branching(4))


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("siblings", ["top", "iid"])
def test_xpress_draws_in_turn_unless_told_otherwise(monkeypatch, asked, siblings):
    """Its laws are those of all places at once only where nothing is drawn from them."""
    kind = functools.partial(XPress, config=XPressConfig(**TINY, rank=3, inner_size=2))
    drafter = kind(target=TOY, in_turn=asked, sibling_sampling=siblings)
    monkeypatch.setattr(CorrectedBlock, "make_level", lambda *given: "in turn")
    level = drafter.make_level(toy_weights(drafter), None, None, None)
    assert (level == "in turn") == ((siblings == "iid") if asked is None else asked)


# ----------------------------------------------------------------- faults, without compilation


def small(kind, config, seed=0):
    """The module of a head with random weights, none of them zero."""
    drafter = kind(config=config, target=TOY)
    return drafter.heads(toy_weights(drafter, seed))


def test_fault_a_recurrent_state_with_exchanged_gates_is_another():
    config = DominoConfig(**TINY, gru_size=3, rank=2)
    heads, random = small(Domino, config), np.random.default_rng(1)
    memory = random.normal(size=(3, 4)).astype(np.float32)
    read, recall = (np.asarray(x.weight[...]) for x in (heads.read, heads.recall))
    embedded = random.normal(size=(TOY_SIZE, 4)).astype(np.float32)
    found = np.asarray(heads.remember(memory, embedded))
    parts = zip(np.split(read @ embedded, 3), np.split(recall @ memory, 3), strict=True)
    (r, rr), (z, zz), (n, nn) = parts

    def slow(reset, keep):
        return (1 - keep) * np.tanh(n + reset * nn) + keep * memory

    reset, keep = sigmoid(r + rr), sigmoid(z + zz)
    np.testing.assert_allclose(found, slow(reset, keep), atol=1e-6)
    assert np.abs(found - slow(keep, reset)).max() > 0.01


def test_fault_a_mixer_that_reads_later_places_would_read_the_token_that_it_says():
    config = XPressConfig(**TINY, rank=3, inner_size=2)
    mixer = np.asarray(small(XPress, config).refiner.mixer)
    above = np.triu(np.ones(mixer.shape[1:]), 1) > 0
    assert not mixer[:, above].any() and mixer[:, ~above].all()
    raw = np.asarray(small(XPress, config).refiner.mix[...])
    assert raw[:, above].any()  # what the file holds there is not read
    np.testing.assert_allclose(mixer - np.tril(raw), np.broadcast_to(np.eye(4), raw.shape))


def test_fault_a_score_that_is_given_another_candidate_than_the_token_before_is_another():
    config = LiLiCorrConfig(**TINY, **LATTICE)
    random = np.random.default_rng(1)
    tokens = np.stack([random.permutation(5)[:3] for _ in range(6)]).reshape(2, 3, 3)
    start, pairs = (random.normal(size=shape) for shape in ((2, 3), (2, 2, 3, 3)))
    unary = random.normal(size=tokens.shape)
    known = _Matched(tokens=tokens, unary=unary, start=start, pairs=pairs)
    before, drafter = tokens[:, 1, [2, 0]], LiLiCorr(config=config, target=TOY)
    found = drafter.scores(None, known, before, 2)
    np.testing.assert_allclose(found, pairs[:, 1, [2, 0]], rtol=1e-6)
    turned = np.swapaxes(pairs, 2, 3)
    assert np.abs(found - turned[:, 1, [2, 0]]).max() > 0.1
    others = np.stack([np.setdiff1d(np.arange(5), row) for row in tokens[:, 1]])  # no candidates
    below = drafter.scores(None, known, others, 2)
    np.testing.assert_allclose(below, np.stack([unary[:, 2]] * 2, axis=1), rtol=1e-6)
    first = drafter.scores(None, known, before, 0)
    np.testing.assert_allclose(first, np.stack([start, start], axis=1), rtol=1e-6)


def test_a_vector_of_zeros_has_a_finite_derivative_which_its_length_has_not():
    """The context of a root without a token before it is such a vector while biases are zero."""
    zeros = np.zeros((3, 1), np.float32)

    def by_length(x):
        return (x / jnp.maximum(jnp.linalg.norm(x, axis=0), 1e-4))[0, 0]

    assert np.isfinite(jax.grad(lambda x: lilicorr.unit(x, 1e-4)[0, 0])(zeros)).all()
    assert not np.isfinite(jax.grad(by_length)(zeros)).all()


def test_matched_vectors_are_normed_and_who_has_no_token_before_the_root_reads_none(monkeypatch):
    config = LiLiCorrConfig(**TINY, **LATTICE, logit_scale=2.0, lattice_layers=1)
    net, random = small(LiLiCorr, config).lattice, np.random.default_rng(1)
    logs = np.sort(random.normal(size=(2, 3, 3)).astype(np.float32))[..., ::-1] - 3
    embedded, hidden, context = (
        random.normal(size=(TOY_SIZE, *shape)).astype(np.float32) for shape in ((18,), (2, 3), (2,))
    )
    known = np.asarray([True, False])
    found = net(embedded, logs, hidden, context, known)
    assert all(np.abs(x).max() <= 2.00001 for x in found)
    other = net(embedded, logs, hidden, context[:, ::-1], known)
    moved = np.abs(np.asarray(found[0] - other[0])).max(axis=-1)
    assert moved[0] > 1e-3 and moved[1] < 1e-6
    monkeypatch.setattr(lilicorr, "unit", lambda x, eps: 50 * x)  # a fault
    assert np.abs(net(embedded, logs, hidden, context, known)[0]).max() > 2.1
