"""SpecDiff: what each pass reads, against slow passes; in which order a law may be stated."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_drafts
from block_oracle import BATCH, LAYERS, MASK, MASKS, SLOTS, TARGET, begun, slow_block, weights_of
from toys import bag, heads, own_params, said_below, small_layer

import specjax
from specjax import Sampling, trees
from specjax.acceptance import RULES
from specjax.analysis import sampled_law
from specjax.analysis.exact_law import Table, distance, outcome, saying
from specjax.checkpoints.loading import holds_heads
from specjax.decoding import reference
from specjax.drafters import SpecDiff
from specjax.drafters.block import BlockConfig
from specjax.drafters.specdiff import filled_in, most_certain
from specjax.sampling import drawing
from specjax.types import Draft

pytestmark = pytest.mark.usefixtures("quick_compilation")
CONFIG = BlockConfig(layers=LAYERS, block_size=MASKS + 1, mask_token=MASK, target_layers=(0, 1, 2))
EXACT, WRONG, FALSE_ALARM, ROWS = 1e-6, 1e-3, 1e-7, 40_000
TOY, PARAMS = bag(3, 0)
TOY_CONFIG = BlockConfig(
    layers=small_layer(3, 6, qk_norm=True), block_size=3, mask_token=0, target_layers=(1,)
)


@pytest.fixture(scope="module")
def lm():
    return specjax.load(TARGET, tokenizer=False, dtype="float32")


# ---------------------------------------------------------------------- which law may be stated

NONE, VOCAB = -1, 3
# laws of two places by a denoiser that was shown the token of the other place, or none
SHOWN = Table(0, VOCAB)


def said_of(place, other):
    return SHOWN((place, other))


def two_places(order):
    """All drafts of two passes that state the law of the pass, and their probabilities."""
    sure = [[max(said_of(place, NONE)) for place in range(2)]]
    first = np.argmax(most_certain(jnp.asarray(sure), jnp.zeros((1, 2), bool), 1))
    first = first if order == "confidence" else 0
    rows, weights = [], []
    for tokens in itertools.product(range(VOCAB), repeat=2):
        laws = [said_of(place, NONE if place == first else tokens[first]) for place in range(2)]
        rows.append(((0, *tokens), laws))
        weights.append(np.prod([laws[place][tokens[place]] for place in range(2)]))
    tokens, laws = (np.asarray(x) for x in zip(*rows, strict=True))
    draft = Draft(
        start=np.zeros(len(rows), np.int32),
        tokens=tokens.astype(np.int32),
        candidate=np.ones(tokens.shape, bool),
        law=np.tile(np.asarray([-1, 0, 1], np.int32), (len(rows), 1)),
        laws=laws.astype(np.float32),
        topology=(-1, 0, 1),
    )
    return draft, np.asarray(weights), int(first)


def stated(draft):
    """What ``test_drafts.reads_ahead`` takes: tokens, one group, and their probabilities."""
    tokens = draft.tokens[:, 1:]
    each = np.take_along_axis(draft.laws, tokens[:, :, None], axis=2)[:, :, 0]
    return tokens, np.zeros(len(tokens), int), each


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_fault_the_law_of_a_place_that_was_shown_a_token_to_its_right_is_no_q(rule):
    """Drafts are as probable as is stated in both orders; the text is the target's in one."""
    p = Table(7, VOCAB)
    draft, weights, first = two_places("left-to-right")
    assert first == 0 and not test_drafts.reads_ahead(*stated(draft))
    assert distance(outcome(RULES[rule], draft, weights, p, 2)[0], p) < EXACT
    draft, weights, first = two_places("confidence")
    assert first == 1 and abs(weights.sum() - 1) < EXACT
    assert test_drafts.reads_ahead(*stated(draft))
    assert distance(outcome(RULES[rule], draft, weights, p, 2)[0], p) > WRONG


def test_in_the_order_of_confidence_a_point_mass_has_the_targets_law():
    p = Table(7, VOCAB)
    last = int(np.argmax(said_of(1, NONE)))
    tokens = [[0, int(np.argmax(said_of(0, last))), last]]
    draft = Draft(start=np.zeros(1, np.int32), tokens=np.asarray(tokens), topology=(-1, 0, 1))
    assert distance(saying(RULES["delta"], draft, np.ones(1), p, 2)[0], p) < EXACT


class Unordered(SpecDiff):
    """A fault: draws in the order of confidence, and states for each token the law of its pass."""

    def draft_step(self, params, target_params, state, context):
        loaded, uniform = self.heads(params), drawing.uniforms(context.key, self.depth)
        tokens = jnp.full((len(uniform), self.depth), self.config.mask_token, jnp.int32)
        known, laws = jnp.zeros(tokens.shape, bool), jnp.zeros((*tokens.shape, self.vocab_size))
        for _ in range(self.depth):
            block = jnp.concatenate([context.root[:, None], tokens], axis=1)[:, None]
            hidden = self.read_blocks(loaded, target_params, state, context, block)[:, :, 0, 1:]
            flat = hidden.reshape(len(hidden), -1)
            logits = self.target.head(target_params, flat, len(tokens))
            q = jax.vmap(lambda x: context.sampling.probabilities(x, None), 1, 1)(logits)
            chosen = most_certain(jnp.max(q, axis=-1), known, 1)
            tokens = jnp.where(chosen, jax.vmap(drawing.draw, 1, 1)(q, uniform), tokens)
            known, laws = known | chosen, jnp.where(chosen[:, :, None], q, laws)
        law = jnp.broadcast_to(jnp.arange(self.depth), tokens.shape)
        parents = trees.chain_parents(self.depth)
        return trees.tree_draft(context, tokens, parents, law=law, laws=laws), state


@pytest.mark.parametrize(("kind", "wrong"), [(SpecDiff, False), (Unordered, True)])
def test_the_loop_draws_the_targets_law_unless_a_law_was_shown_what_is_to_its_right(kind, wrong):
    drafter = kind(config=TOY_CONFIG, target=TOY, steps=2, sibling_sampling="iid")
    weights = jax.tree.map(lambda x: 3 * x, heads(drafter, 7))  # the last place is the surer one
    params, warm = {"target": PARAMS, "drafter": weights}, Sampling(temperature=0.9)
    counts, _ = sampled_law.joint_counts(
        TOY, drafter, "rejection", params, (1, 0), 3, warm, rows=ROWS
    )
    law = reference.joint_law(TOY, PARAMS, (1, 0), 3, warm).reshape(-1)
    found = sampled_law.judge(counts, law)
    assert found.fits(FALSE_ALARM) != wrong, found


# --------------------------------------------------------------------------- what a pass reads


def test_every_pass_fills_in_a_place_and_all_of_them_are_filled_in():
    assert filled_in("even", 7, 3) == (2, 3, 2) and filled_in("even", 4, 1) == (4,)
    assert filled_in("cosine", 8, 4) == (1, 1, 3, 3) and filled_in("cosine", 2, 5) == (1, 1)
    for depth, steps, schedule in itertools.product(range(1, 17), range(1, 17), ("even", "cosine")):
        counts = filled_in(schedule, depth, steps)
        assert sum(counts) == depth and len(counts) == min(steps, depth) and min(counts) > 0


def test_the_most_certain_unknown_places_are_chosen_the_first_of_equals():
    certainty = jnp.asarray([[0.9, 0.5, 0.7, 0.7], [0.1, 0.1, 0.1, 0.1]])
    known = jnp.asarray([[True, False, False, False], [False, True, False, False]])
    found = most_certain(certainty, known, 2)
    assert found.tolist() == [[False, False, True, True], [True, False, True, False]]


def twins(lm, drafter):
    """A function ``slow(row, shown) -> [D, V]``, of passes over whole texts; and the setting."""
    tokens = np.random.default_rng(3).integers(0, 72, (BATCH, SLOTS)).astype(np.int32)
    params = {"target": lm.params, "drafter": weights_of(drafter)}
    state, context, features = begun(lm, drafter, params, tokens)
    lengths, w = np.asarray(context.length), jax.tree.map(np.asarray, params["drafter"])
    table, head = (
        np.asarray(x[...], np.float32)
        for x in (lm.params["embedding"], lm.params["lm_head"]["weight"])
    )

    def slow(row, shown):
        masked = np.where(np.asarray(shown) < 0, MASK, shown)
        before, root = np.asarray(features[row, : lengths[row] - 1]), tokens[row, lengths[row] - 1]
        states = slow_block(drafter.config, w, before, root, table, shown=masked)
        return states[not drafter.config.from_root :] @ head.T

    roots = tokens[np.arange(BATCH), lengths - 1]
    return slow, own_params(params), state, context, roots


@pytest.mark.parametrize("from_root", [False, True])
def test_from_left_to_right_a_pass_reads_the_tokens_of_earlier_passes_and_no_others(lm, from_root):
    shape = dataclasses.replace(CONFIG, from_root=from_root)
    drafter = SpecDiff(config=shape, target=lm.target, steps=2)
    slow, params, state, context, roots = twins(lm, drafter)
    depth = drafter.depth
    assert drafter.counts == ((2, 2) if from_root else (2, 1))
    drawn = np.random.default_rng(4).integers(0, 72, (BATCH, depth - 1))
    paths = np.concatenate([roots[:, None], drawn], axis=1)
    said = jax.jit(lambda *given: said_below(drafter, *params, state, context, *given)[0])
    found = np.asarray(said(paths))
    for row in range(BATCH):
        first = slow(row, [-1] * MASKS)
        second = slow(row, ([*drawn[row, :2], -1])[:MASKS])
        np.testing.assert_allclose(found[row], [*first[:2], *second[2:]], atol=5e-4)
        assert np.abs(first[2:] - second[2:]).max() > 0.01  # a pass that reads masks alone differs
    other = paths.copy()
    other[:, 1] += 1  # of the first pass: the second reads it, the first does not
    again = np.asarray(said(other % 72))
    np.testing.assert_array_equal(again[:, :2], found[:, :2])
    assert np.abs(again[:, 2:] - found[:, 2:]).max() > 0.01


def test_in_the_order_of_confidence_places_are_filled_in_as_a_replay_says(lm):
    drafter = SpecDiff(config=CONFIG, target=lm.target, steps=3, order="confidence")
    slow, params, state, context, _ = twins(lm, drafter)
    found = np.asarray(jax.jit(lambda: drafter.draft_step(*params, state, context)[0].tokens)())
    orders = []
    for row in range(BATCH):
        shown, order = [-1] * MASKS, []
        for _ in range(MASKS):
            q = np.asarray(jax.nn.softmax(slow(row, shown), axis=-1))
            sure = np.where(np.asarray(shown) < 0, q.max(axis=1), -1)
            order.append(int(np.argmax(sure)))
            shown[order[-1]] = int(np.argmax(q[order[-1]]))
        assert found[row, 1:].tolist() == shown
        orders.append(order)
    assert any(order != sorted(order) for order in orders)


# ----------------------------------------------------------------------------------- its layout


def test_what_is_saved_is_loaded_again_with_its_passes(lm, tmp_path):
    layers = dataclasses.replace(LAYERS, model_type="qwen3")
    config = dataclasses.replace(CONFIG, layers=layers, target_layers=(1, 2))
    drafter = SpecDiff(
        config=config, target=lm.target, steps=2, order="confidence", schedule="cosine"
    )
    params = weights_of(drafter)
    specjax.save_drafter(drafter, params, tmp_path, target=lm)
    again = specjax.load_drafter(tmp_path, lm)
    assert again.drafter == drafter
    for ours, theirs in zip(*map(jax.tree.leaves, (again.params, params)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    written = json.loads((tmp_path / "config.json").read_text())
    assert holds_heads(tmp_path, written)
    for wrong, words in (
        ({"steps": 9}, "steps=9: a block drafts 3 tokens"),
        ({"steps": "two"}, "steps='two': it must be a whole number"),
        ({"steps": True}, "steps=True: it must be a whole number"),
        ({"order": "any"}, "order='any': accepted are left-to-right, confidence"),
        ({"tempo": 2}, "specdiff_config: tempo=2 is not understood"),
        (7, "specdiff_config=7: it must be an object"),
    ):
        own = written["specdiff_config"] | wrong if isinstance(wrong, dict) else wrong
        (tmp_path / "config.json").write_text(json.dumps(written | {"specdiff_config": own}))
        with pytest.raises(ValueError, match=words):
            specjax.load_drafter(tmp_path, lm)


def test_settings_that_do_not_fit_are_named():
    for wrong, words in (
        (dict(steps=0), "steps=0: a block drafts 2 tokens.*accepted are 1 to 2"),
        (dict(steps=3), "steps=3"),
        (dict(order="random"), "order='random': accepted are left-to-right, confidence"),
        (dict(schedule="linear"), "schedule='linear': accepted are even, cosine"),
        (
            dict(order="confidence", sibling_sampling="iid"),
            "sibling_sampling='iid' with order='confidence': .* take sibling_sampling='top'",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            SpecDiff(config=TOY_CONFIG, target=TOY, **wrong)
