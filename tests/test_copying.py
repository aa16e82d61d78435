"""The bonus for what stood in the text before: where it falls, what it is called, and a fault."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import starts
from drawn_rounds import advanced
from test_sampled import CASES, MODEL, PARAMS, ROWS, WARM, exact, lawful, sample

import specjax
from benchmarks import heldout
from specjax import trees
from specjax.drafters import Copying, Hybrid, Medusa, NGram
from specjax.text import drafter_names
from specjax.trees import copies
from specjax.trees.levels import Words
from specjax.types import Context, Draft

BONUS = (0.25, -1.0, 2.0)
VOCAB = 5


def followed(text, end, longest):
    """The tokens of ``text`` that stand after the most of ``end``, newest first, of equal ones the
    last, with how much that is: a loop over the places, as the module's docstring says it."""
    best = {}
    for place in range(len(text) - 1):
        size = 0
        while size < min(longest, len(end), place + 1) and text[place - size] == end[size]:
            size += 1
        if size:
            token = text[place + 1]
            best[token] = max(best.get(token, (0, 0)), (size, place))
    order = sorted(best, key=best.get, reverse=True)
    return {token: best[token][0] for token in order[: copies.COPIES]}


@pytest.mark.parametrize(
    ("parents", "part", "by_row"),
    [
        ((-1,), False, False),
        ((-1, 0, 0, 1, 1, 3), False, False),
        ((-1, 0, 0, 1, 1, 3), True, False),
        ((-1, 0, 0, 1, 2, 3, 4), False, True),
    ],
)
def test_two_tokens_after_the_latest_of_the_longest_matches_have_a_bonus(parents, part, by_row):
    """At every depth of a tree, static or grown row by row, over the whole vocabulary and a part of
    it; what stands beyond the end of a text is not read."""
    rng = np.random.default_rng(len(parents))
    batch, size = 24, 20
    tokens = rng.integers(0, VOCAB, (batch, size)).astype(np.int32)
    lengths = rng.integers(1, size + 1, batch).astype(np.int32)
    drafted = rng.integers(0, VOCAB, (batch, len(parents) - 1)).astype(np.int32)
    above = np.tile(np.asarray(parents, np.int32), (batch, 1))
    if by_row:  # two nodes a depth, each below any of the depth before
        above[:, 3:5] = rng.integers(1, 3, (batch, 2))
        above[:, 5:7] = rng.integers(3, 5, (batch, 2))
    rows = rng.uniform(0.5, 2, batch).astype(np.float32)
    ids = np.asarray([3, 0, 4]) if part else np.arange(VOCAB)
    words = Words(jnp.asarray(ids, jnp.int32), VOCAB) if part else None
    logits = rng.normal(size=(batch, 1, len(ids))).astype(np.float32)

    def bonuses(tokens):
        context = Context(
            tokens=jnp.asarray(tokens),
            length=jnp.asarray(lengths),
            budget=jnp.ones(batch, jnp.int32),
            key=jax.random.split(jax.random.key(0), batch),
            sampling=specjax.Sampling(),
            copy_bonus=jnp.asarray(BONUS) * rows[:, None],
        )
        level = copies.with_copies(lambda carry, *_: (logits, carry), context, words)
        nodes = jnp.concatenate([context.root[:, None], drafted], axis=1)
        depths = np.asarray(trees.Tree(parents).depths)
        found = []
        for depth in range(depths.max() + 1):
            known = (depths <= depth).sum()
            shape: dict = dict(topology=parents[:known])
            if by_row:
                shape = dict(parent=jnp.asarray(above[:, :known]))
            grown = Draft(start=lengths - 1, tokens=nodes[:, :known], **shape)
            out, carry = level("kept", grown, int((depths < depth).sum()))
            assert carry == "kept" and out.shape == (batch, (depths == depth).sum(), len(ids))
            found.append(np.asarray(out) - logits)
        return np.concatenate(found, axis=1)

    found, hits = bonuses(tokens), np.zeros(copies.COPIES + 1, int)
    for row in range(batch):
        text = tokens[row, : lengths[row]].tolist()
        for node in range(len(parents)):
            path, at = [], node
            while at > 0:
                path, at = [*path, int(drafted[row, at - 1])], int(above[row, at])
            wanted = np.zeros(VOCAB)
            for token, matched in followed(text, path + text[::-1], len(BONUS)).items():
                wanted[token] = rows[row] * BONUS[matched - 1]
            np.testing.assert_allclose(found[row, node], wanted[ids], atol=1e-6)
            hits[np.count_nonzero(wanted[ids])] += 1
    assert (hits[1:] > 2 * len(parents)).all()
    beyond = np.where(np.arange(size) < lengths[:, None], tokens, (tokens + 1) % VOCAB)
    np.testing.assert_array_equal(bonuses(beyond), found)


@dataclasses.dataclass(frozen=True)
class Unstated(Copying):
    """Draws with the bonus, and states the laws without it."""

    def draft_step(self, params, target_params, state, context):
        draft, after = super().draft_step(params, target_params, state, context)
        plain, _ = self.inner.draft_step(params, target_params, state, context)
        return dataclasses.replace(draft, laws=plain.laws), after


def test_fault_a_law_that_is_stated_without_the_bonus_is_seen():
    """As a chain of one token, whose law depends on nothing that is drafted. (With the law of the
    bonus this is the line "copying medusa" of the registry.)"""
    drafter, weights, _ = CASES["copying medusa"]
    one = drafter.inner.with_topology(trees.chain(1))
    for made, is_lawful in ((Copying(one, (2.0,), 1.0), True), (Unstated(one, (2.0,), 1.0), False)):
        counts, _ = sample(made, weights, "rejection", WARM, rows=ROWS // 8)
        assert lawful(counts, exact("warm")) == is_lawful


def test_a_name_says_what_the_bonus_is_for():
    lm = specjax.load("embedded")
    made, params = drafter_names.resolve_drafter(lm, "copy+medusa", 2)
    assert isinstance(made, Copying) and isinstance(made.inner, Medusa) and made.num_draft == 2
    assert (made.name, made.bonus) == ("copy+medusa", copies.BONUS) and params is not None
    adaptive, _ = drafter_names.resolve_drafter(lm, "copy+medusa", "auto")
    assert isinstance(adaptive.inner, Copying) and adaptive.depth == made.inner.max_depth
    hybrid, _ = drafter_names.resolve_drafter(lm, "ngram+copy+medusa", 7)
    assert isinstance(hybrid, Hybrid) and isinstance(hybrid.inner, Copying)
    assert hybrid.inner.depth == made.inner.max_depth
    draft, _ = drafter_names.resolve_drafter(lm, "copy+draft", tree="2x1")
    assert draft.topology == trees.branching(2, 1) and draft.name == "copy+draft"


def test_what_copying_cannot_be_is_refused():
    heads = drafter_names.named(specjax.load("embedded"), "medusa")
    with pytest.raises(TypeError, match=r"of heads from .* it is heads.drafter"):
        Copying(heads)
    for share in (-0.1, 1.5):
        with pytest.raises(ValueError, match="warm_share=.*: accepted is a number from 0"):
            Copying(heads.drafter, warm_share=share)
    for name in ("copy+", "copy", "ngram+"):
        with pytest.raises(ValueError, match=r"does not say which drafter: write .*\+draft'"):
            drafter_names._check_name(name)
    with pytest.raises(ValueError, match="the drafter that 'auto' takes, such as 'eagle3'"):
        drafter_names._check_name("copy+auto")
    with pytest.raises(ValueError, match="is unknown .'medusas' in it.: did you mean 'medusa'"):
        drafter_names._check_name("copy+medusas")


@pytest.mark.parametrize("name", ["copy+ngram", "copy+none", "copy+suffix:longest=9"])
def test_what_has_no_logits_is_refused_by_its_name(name):
    with pytest.raises(
        ValueError, match=f"'{re.escape(name)}'.*no logits.*heads, draft models, and layers"
    ):
        drafter_names._check_name(name)


@pytest.mark.parametrize("after", ["ngram+draft", "copy+medusa", "cascade:draft:ngram", "slem:x"])
def test_what_has_no_logits_of_its_own_is_refused_before_anything_is_loaded(after):
    with pytest.raises(ValueError, match=f"'{re.escape(after)}' does not draft by logits of its"):
        drafter_names._check_name(f"copy+{after}")


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"Copying\(inner=NGram\): it does not draft by logits"):
        Copying(NGram(2))
    heads = CASES["copying medusa"][0].inner
    assert Copying(heads).has_weights and not CASES["copying self"][0].has_weights
    for bonus in ((), [1.0], (float("nan"),), ("1",), 2.0, (True,)):
        with pytest.raises(ValueError, match="a tuple of finite numbers, in nats"):
            Copying(heads, bonus)
    with pytest.raises(ValueError, match="from 0, for no bonus above temperature 0, to 1"):
        Copying(heads, warm_share=float("inf"))


def test_above_temperature_0_the_bonus_is_for_those_who_ask():
    """By default sampled rows are drafted as without it; a greedy row beside them is not."""
    copying, weights, _ = CASES["copying medusa"]
    begun = dict(rule="rejection", max_new_tokens=12, capacity=24)
    prompt = jnp.asarray([[1, 0, 2, 1, 0, 2, 1]] * 2, jnp.int32)
    sampling = specjax.Sampling(temperature=jnp.asarray([1.0, 0.0]))
    drafts = []
    for one in (copying.inner, Copying(copying.inner, (9.0,)), Copying(copying.inner, (9.0,), 1.0)):
        params = {"target": PARAMS, "drafter": weights}
        key = jax.random.key(0)
        request = dict(key=key, sampling=sampling, **begun)
        state = starts.begun(MODEL, one, params, prompt, jnp.asarray([7, 7]), **request)
        judged, _ = advanced(MODEL, one, "rejection", params, state)
        drafts.append(np.asarray(judged.draft.tokens))
    alone, usual, whole = drafts
    np.testing.assert_array_equal(usual[0], alone[0])
    assert (usual[1] != alone[1]).any() and (whole[0] != alone[0]).any()


def test_held_out_texts_are_drafted_better_and_stay_the_same():
    """Medusa's heads see nothing of their draft: a tenth more tokens a round at least."""
    lm, prompts = specjax.load("embedded"), heldout.prompts(8)
    texts, rounds = {}, {}
    for drafter in ("none", "medusa", "copy+medusa"):
        out = specjax.generate(lm, prompts, drafter=drafter, max_new_tokens=96)
        texts[drafter], rounds[drafter] = out.texts, int(np.sum(out.stats.rounds))
    assert texts["none"] == texts["medusa"] == texts["copy+medusa"]
    assert rounds["copy+medusa"] < 0.9 * rounds["medusa"] < 0.9 * rounds["none"]
