"""Weights by accepted streaks against the papers' formulas; masks of a block and their weights."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.train import block, block_heads, chunks, config, dspark, specdiff, streaks
from specjax.train.evaluate import weighed
from specjax.train.rows import Heads, Rows
from specjax.train.step import make_keys

PLACES, ROWS, ANCHORS, SIZE, VOCAB = 4, 2, 3, 5, 6


class Toy:
    """A target whose LM head alone is asked for."""

    class config:  # noqa: N801
        logit_softcap = None


def made_of(*fields, kind=block.Config):
    return config.load(kind, None, [f"num_heads={PLACES}", *fields])


def blocks(seed=0):
    """A head for each place, over all blocks; one block ends early, one misses a place."""
    random = np.random.default_rng(seed)
    table = jnp.asarray(random.normal(size=(VOCAB, SIZE)), jnp.float32)
    fits = np.ones((PLACES, ROWS, ANCHORS), np.float32)
    fits[2:, 0, 1] = fits[1, 1, 2] = fits[:, 1, 0] = 0
    found = []
    for own in fits:
        states = random.normal(size=(ROWS, ANCHORS, SIZE)).astype(np.float32)
        said = {"next": jnp.asarray(random.integers(0, VOCAB, (ROWS, ANCHORS)))}
        found.append(chunks.Head((table, None), jnp.asarray(states), said, jnp.asarray(own)))
    return found


def nats_of(states, heads, temperature=1.0):
    """Cross-entropies ``[K, B, A]`` with a gradient, by all logits at once."""
    found = []
    for state, head in zip(states, heads, strict=True):
        log_q = jax.nn.log_softmax(state @ head.table[0].T / temperature)
        found.append(-jnp.take_along_axis(log_q, head.pieces["next"][..., None], 2)[..., 0])
    return jnp.stack(found)


def fits_of(heads):
    return np.stack([head.weight for head in heads])


def streak(states, heads, temperature=1.0):
    """SpecDiff-2's objective as it is written: minus the mean over blocks of the sum over places
    of the probability of the block up to there."""
    q, fits, total = jnp.exp(-nats_of(states, heads, temperature)), fits_of(heads), 0.0
    for row in range(ROWS):
        for a in range(ANCHORS):
            path = 1.0
            for k in range(PLACES):
                if fits[k, row, a]:
                    path = path * q[k, row, a]
                    total = total - path
    return total / np.sum(fits.max(axis=0) > 0)


def slope_of(heads, *fields):
    """The value and the gradient of the loss of the recipe, over the states of all places."""
    made = made_of(*fields)
    terms = block.make_terms(Toy(), made)

    def loss(states):
        own = [head._replace(states=x) for head, x in zip(heads, states, strict=True)]
        return weighed(streaks.loss_of(own, terms, None, made, None))

    return jax.value_and_grad(loss)([head.states for head in heads])


def close(found, wanted):
    return all(
        np.allclose(a, b, rtol=1e-4, atol=1e-6)
        for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
    )


def test_streak_is_the_expected_streak_and_has_its_gradient():
    heads = blocks()
    wanted = jax.value_and_grad(streak)([head.states for head in heads], heads)
    assert close(slope_of(heads, "weighting=streak"), wanted)


def test_fault_a_streak_at_another_temperature_than_that_of_the_drafts_is_seen():
    """q is taken at the temperature at which the drafter is to draw, as SpecDiff-2 has it."""
    heads, temperature = blocks(4), 0.5
    states = [head.states for head in heads]
    found = slope_of(heads, "weighting=streak", f"streak_temperature={temperature}")
    assert close(found, jax.value_and_grad(streak)(states, heads, temperature))
    assert not close(found, jax.value_and_grad(streak)(states, heads))


@pytest.mark.parametrize("kind", ["ce-streak", "d-pace"])
def test_the_weights_of_a_temperature_are_those_of_its_cross_entropies(kind):
    heads = blocks(5)
    states, fits = [head.states for head in heads], fits_of(heads)
    nats = np.asarray(nats_of(states, heads, 0.5))
    wanted = np.sum(weights_as_written(kind, nats, fits, 0.5) * nats)
    value, _ = slope_of(heads, f"weighting={kind}", "streak_temperature=0.5")
    np.testing.assert_allclose(value, wanted / np.sum(fits.max(axis=0) > 0), rtol=1e-5)


def test_the_streak_of_other_recipes_has_the_same_temperature():
    """The cross-entropies of DSpark and of block_heads, whose corrected logits are all there is."""
    table = jax.random.normal(jax.random.key(0), (VOCAB, SIZE + 3))
    states = jax.random.normal(jax.random.key(1), (ROWS, ANCHORS, SIZE + 3))
    pieces = {"next": jnp.ones((ROWS, ANCHORS), jnp.int32), "hidden": states[..., :SIZE]}
    pieces["shares"] = jnp.broadcast_to(jnp.asarray([1.0, 0.0]), (ROWS, ANCHORS, 2))
    law = jax.random.normal(jax.random.key(2), (VOCAB, SIZE))
    wanted = nats_of([states], [chunks.Head((table, None), states, pieces, None)], 0.5)[0]
    words = ["weighting=streak", "streak_temperature=0.5"]

    class Sized(Toy):
        hidden_size = SIZE

    for kind, more in ((dspark, ["ce_share=1", "confidence_weight=0"]), (block_heads, ["rank=3"])):
        made = made_of(*words, *more, kind=kind.Config)
        terms = kind.make_terms(Sized(), made)
        found = terms((table, None), states, law, pieces)["loss"]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_streak_of_dflash2_is_that_of_its_candidates_as_its_loss_is():
    """Of the tokens that may be drafted, and of the text's own."""

    class Sized(Toy):
        hidden_size = SIZE

    keys = jax.random.split(jax.random.key(3), 2)
    table = jax.random.normal(keys[0], (VOCAB, SIZE + 3))
    states = jax.random.normal(keys[1], (ROWS, ANCHORS, SIZE + 3))
    token = jnp.arange(ROWS * ANCHORS).reshape(ROWS, ANCHORS) % VOCAB
    words = "weighting=streak", "rank=3", "kind=dflash2", "num_candidates=2"
    made = made_of(*words, "streak_temperature=0.5", kind=block_heads.Config)
    pieces = {"next": token, "hidden": states[..., :SIZE]}
    pieces["shares"] = jnp.broadcast_to(jnp.asarray([1.0, 0.0]), (ROWS, ANCHORS, 2))
    nats = block_heads.make_terms(Sized(), made)((table, None), states, None, pieces)["loss"]
    base = states[..., :SIZE] @ table[:, :SIZE].T
    best = np.argsort(np.asarray(-base), axis=-1)[..., :2]
    q = np.full(base.shape, -1e9)  # finite, since it meets zeros
    for among in (best, token[..., None]):
        np.put_along_axis(q, among, np.take_along_axis(states @ table.T, among, 2), 2)
    wanted = nats_of([2 * q], [chunks.Head((jnp.eye(VOCAB), None), None, pieces, None)])[0]
    np.testing.assert_allclose(nats, wanted, rtol=1e-4, atol=1e-5)
    head = chunks.Head((table, None), states, {"next": token}, jnp.ones((ROWS, ANCHORS)))
    how = dict(temperature=0.5, logits_of=block_heads.law_of(made, Sized()))
    np.testing.assert_allclose(streaks.of_text([head], None, **how)[0], nats, rtol=1e-5)
    assert not np.allclose(streaks.of_text([head], None, temperature=0.5)[0], nats, rtol=1e-2)


def test_without_a_floor_d_pace_has_the_gradient_of_the_streak():
    heads = blocks(1)
    wanted = jax.grad(streak)([head.states for head in heads], heads)
    assert close(slope_of(heads, "weighting=d-pace", "pace_floor=0.0")[1], wanted)
    assert not close(slope_of(heads, "weighting=d-pace", "pace_floor=0.1")[1], wanted)


def weights_as_written(kind, nats, fits, floor):
    """The papers' formulas, number by number."""
    found = np.zeros_like(nats)
    for row, a in np.ndindex(*nats.shape[1:]):
        own = [k for k in range(PLACES) if fits[k, row, a]]
        s = {k: (1 - floor) * np.exp(-nats[k, row, a]) + floor for k in own}
        for j in own:
            if kind == "ce-streak":
                found[j, row, a] = np.prod([np.exp(-nats[i, row, a]) for i in own if i < j])
            else:
                found[j, row, a] = sum(
                    np.prod([s[i] for i in own if i <= m]) for m in own if m >= j
                )
    return found


@pytest.mark.parametrize(("kind", "floor"), [("d-pace", 0.5), ("d-pace", 1.0), ("ce-streak", 0.5)])
def test_weights_are_those_of_the_formulas(kind, floor):
    heads = blocks()
    nats, fits = np.asarray(nats_of([head.states for head in heads], heads)), fits_of(heads)
    found = streaks.weights_of(kind, jnp.asarray(nats), jnp.asarray(fits), floor)
    np.testing.assert_allclose(found, weights_as_written(kind, nats, fits, floor), rtol=1e-5)
    if floor == 1:
        assert found[:, 0, 0].tolist() == [4, 3, 2, 1]
    value, _ = slope_of(heads, f"weighting={kind}", f"pace_floor={floor}")
    blocks_there = np.sum(fits.max(axis=0) > 0)
    np.testing.assert_allclose(value, np.sum(found * nats) / blocks_there, rtol=1e-5)


@pytest.mark.parametrize("fault", ["through the weights", "prefix only"])
def test_fault_weights_that_are_not_those_of_the_streak_are_seen(fault):
    """The gradient through the weights as well, and weights by the streak before a place alone."""
    heads = blocks(2)
    states, fits = [head.states for head in heads], jnp.asarray(fits_of(heads))
    count = np.sum(np.asarray(fits).max(axis=0) > 0)

    def loss(states, kind="d-pace"):
        nats = nats_of(states, heads)
        weights = streaks.weights_of(kind, nats, fits, 0.0)
        weights = weights if fault == "through the weights" else jax.lax.stop_gradient(weights)
        return jnp.sum(weights * nats) / count

    wanted, stopped = jax.grad(streak)(states, heads), fault == "prefix only"
    assert not close(jax.grad(loss)(states, "ce-streak" if stopped else "d-pace"), wanted)
    assert close(jax.grad(loss)(states), wanted) == stopped


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        (block, ["weighting=pace"], "weighting='pace'; known: decay, d-pace, streak, ce-streak"),
        (block, ["weighting=d-pace", "pace_floor=2"], "pace_floor=2.0; accepted: 0 to 1"),
        (block, ["pace_floor=0.2"], "weighting='decay', which does not read it"),
        (block, ["weighting=streak", "pace_floor=0.2"], "pace_floor=0.2 with weighting='streak'"),
        (block, ["streak_temperature=0.5"], "weighting='decay', which has no streaks: leave it"),
        (block, ["weighting=streak", "streak_temperature=0"], "accepted: above 0, and finite"),
        (block, ["weighting=streak", "teacher_share=1"], "teacher_share=1.0: .* teacher_share=0"),
        (dspark, ["weighting=streak"], "ce_share=0.1: .* give ce_share=1, or weighting=decay"),
        (specdiff, ["masking=none"], "masking='none'; known: random, suffix, glancing, all"),
        (specdiff, ["weighting=streak"], "masking='random': .* give masking=all"),
        (specdiff, ["steps=9"], "steps=9: a block drafts 4 tokens"),
        (block, ["decay=0.5"], "decay=0.5: places of blocks are weighted by decay_length"),
    ],
)
def test_settings_of_a_loss_that_cannot_be_are_refused(kind, words, message):
    with pytest.raises(config.ConfigError, match=message):
        made_of(*words, kind=kind.Config)
    made_of("weighting=streak", "ce_share=1", kind=dspark.Config)
    made_of("weighting=streak", "masking=all", kind=specdiff.Config)


def test_blocks_begin_where_a_token_counts_and_end_where_one_does_not():
    """As in a conversation, of which only the answers are learned."""
    weight = np.ones((3, 20), np.float32)
    weight[0, :7] = weight[0, 12:14] = weight[1] = 0
    tokens = jax.random.randint(jax.random.key(0), (3, 21), 1, VOCAB)
    hidden = jnp.zeros((3, 20, SIZE))
    rows = dict(tokens=tokens, weight=jnp.asarray(weight), segments=jnp.zeros((3, 21), jnp.int32))
    rows = SimpleNamespace(**rows, hidden=hidden)
    made, keys = made_of("num_anchors=200"), make_keys(jax.random.key(1), jnp.arange(3))
    anchors = block.drawn_anchors(keys, rows, made)
    room = 20 - PLACES
    assert [sorted({*map(int, row)}) for row in anchors] == [
        [at for at in range(room) if weight[0, at]],
        *[list(range(room))] * 2,
    ]
    states = jnp.zeros((SIZE, 3 * 200))
    heads = block.laid([(None, None, states)] * PLACES, rows, anchors)
    for k, head in enumerate(heads):
        after = np.asarray(anchors)[..., None] + np.arange(k + 1)
        wanted = [weight[row][after[row]].prod(axis=-1) for row in range(3)]
        np.testing.assert_array_equal(head.weight, wanted)
    assert heads[-1].weight[0].sum() < heads[0].weight[0].sum() == 200


# --------------------------------------------------------------------------- masks of a block


@pytest.mark.parametrize("masking", ["random", "suffix"])
def test_masks_are_drawn_as_stated_and_every_place_counts_as_much(masking):
    keys = jax.random.split(jax.random.key(0), 400)
    masks, weight = map(np.asarray, specdiff.masked(keys, 32, PLACES, masking))
    assert masks.shape == weight.shape == (400, 32, PLACES) and (weight[~masks] == 0).all()
    np.testing.assert_allclose(weight.mean(axis=(0, 1)), 1, atol=0.05)
    share = masks.mean(axis=(0, 1))
    if masking == "suffix":
        np.testing.assert_allclose(share, np.arange(1, PLACES + 1) / PLACES, atol=0.02)
        assert (np.diff(masks.astype(int), axis=2) >= 0).all()
        return
    np.testing.assert_allclose(share, 0.5, atol=0.02)
    ratio = np.divide(1, weight.max(axis=2), where=masks.any(axis=2), out=np.zeros((400, 32)))
    for low in (0.2, 0.5, 0.8):  # a mask is as probable as its block's ratio, of which 1 / t tells
        near = np.abs(ratio - low) < 0.05
        more = masks[near].sum() - near.sum()  # blocks without any mask tell no ratio
        assert abs(more / near.sum() - (low * PLACES / (1 - (1 - low) ** PLACES) - 1)) < 0.1
    many, weight = specdiff.masked(keys[:3], 8, 900, masking)
    assert many.any(axis=2).all()  # so that the ratio of every block is known
    spread = np.sort(1 / np.asarray(weight).max(axis=2), axis=1)
    np.testing.assert_allclose(np.diff(spread, axis=1), 1 / 8, rtol=0.01)


class OneHead(Toy):
    """The same target, whose weights are its LM head."""

    def head_table(self, params):
        return params


def test_the_loss_of_random_masks_is_mdlms_sum_over_masks_by_one_over_t():
    """Of blocks whose states know what they are shown; a document ends within a row."""
    made = made_of("num_anchors=6", "decay_length=1e6", kind=specdiff.Config)
    keys = make_keys(jax.random.key(0), jnp.arange(ROWS))
    draw = jax.random.split(jax.random.key(1), 3)
    tokens = jax.random.randint(draw[0], (ROWS, 21), 1, VOCAB).at[:, 5::5].set(0)
    hidden, table = (
        jax.random.normal(draw[1], (ROWS, 20, SIZE)),
        jax.random.normal(draw[2], (VOCAB, SIZE)),
    )
    rows = Rows(
        tokens=tokens,
        weight=jnp.ones((ROWS, 20)),
        segments=jnp.cumsum(tokens == 0, axis=1),
        hidden=hidden,
    )

    def outputs(params, target_params, rows, anchors, shown):
        states = [
            block.at(rows.hidden, anchors + k) + shown.sum(axis=2)[..., None] for k in range(4)
        ]
        return [(params, None, x.transpose(2, 0, 1).reshape(SIZE, -1)) for x in states]

    heads = Heads(None, None, outputs)
    loss = specdiff.make_loss(heads, OneHead(), lambda params, batch: rows, made)
    found = jax.jit(lambda table: weighed(loss(table, {"target": table}, None, keys)))(table)
    anchors = np.asarray(block.drawn_anchors(keys, rows, made))
    others = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys.rows)
    masks, weight = map(np.asarray, specdiff.masked(others, 6, PLACES, "random"))
    tokens, hidden, table, document = map(np.asarray, (tokens, hidden, table, rows.segments))
    total, count, crossed = 0.0, 0, 0
    for row, a in np.ndindex(ROWS, 6):
        here = anchors[row, a] + np.arange(PLACES + 1)
        within = document[row, here] == document[row, here[0]]
        shown = 1 + np.sum(within[1:] & ~masks[row, a])
        for k in range(PLACES):
            logits = table @ (hidden[row, here[k]] + shown)
            nats = np.log(np.sum(np.exp(logits))) - logits[tokens[row, here[k] + 1]]
            total += within[k] * weight[row, a, k] * nats  # places count as in the recipe block
            count += within[k]
            crossed += not within[k]
    np.testing.assert_allclose(found, total / count, rtol=1e-4)
    assert crossed > 0


def test_a_glance_shows_half_as_many_random_places_as_are_wrong():
    heads = blocks(3)
    fits = np.moveaxis(fits_of(heads), 0, 2) > 0
    hit = [np.argmax(h.states @ h.table[0].T, axis=2) == h.pieces["next"] for h in heads]
    wrong = np.sum(fits & ~np.moveaxis(np.asarray(hit), 0, 2), axis=2)
    places, glance = [], jax.jit(lambda keys, heads: specdiff.glanced(keys, heads, 0.5, None))
    for seed in range(40):
        keys = jax.random.split(jax.random.key(seed), ROWS)
        masks, weight = map(np.asarray, glance(keys, heads))
        assert (weight == masks).all() and masks[~fits].all()  # what is not learned is not shown
        np.testing.assert_array_equal(np.sum(~masks, axis=2), wrong // 2)
        places.append(~masks)
    share = np.mean(places, axis=0)
    wanted = np.where(fits, (wrong // 2 / np.maximum(fits.sum(axis=2), 1))[..., None], 0)
    assert len({*wrong.ravel().tolist()}) > 2 and np.abs(share - wanted).max() < 0.3
