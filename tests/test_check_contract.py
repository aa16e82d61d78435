"""``check_target`` and ``check_drafter`` pass what is right and name what is wrong."""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from registry import cases
from stranger import Bag
from toys import BagPart, Readable, bag

import specjax
from specjax import trees
from specjax.analysis.contract_report import run_check
from specjax.analysis.hidden_state_checks import hidden_state_checks, part_checks
from specjax.analysis.target_passes import TargetPasses
from specjax.drafters import DraftModel, Plain
from specjax.drafters.base import ChainDrafter

MODEL, PARAMS = bag(11, 3)
CASES = cases(MODEL, PARAMS)

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_a_right_target_passes_every_check():
    report = specjax.check_target(Bag(11), PARAMS)
    assert report and "all checks passed" in str(report), str(report)
    report.raise_if_wrong()


class SeesSiblings(Bag):
    """Every node sees all nodes before it, as in a chain."""

    def verify(self, params, cache, draft, **settings):
        chain = dataclasses.replace(draft, topology=trees.chain_parents(draft.num_nodes - 1))
        return super().verify(params, cache, chain, **settings)


class ForgetsLast(Bag):
    """The last accepted entry is not written."""

    def commit(self, cache, entries, start, verdict):
        verdict = dataclasses.replace(verdict, count=verdict.count - (verdict.count > 0))
        return super().commit(cache, entries, start, verdict)


class KeepsNothing(Bag):
    def commit(self, cache, entries, start, verdict):
        return cache


class WritesFinishedRows(Bag):
    def commit(self, cache, entries, start, verdict):
        verdict = dataclasses.replace(verdict, count=jnp.maximum(verdict.count, 0))
        return super().commit(cache, entries, start, verdict)


class ClampsStarts(Bag):
    """What begins before the text is written from its beginning on."""

    def commit(self, cache, entries, start, verdict):
        return super().commit(cache, entries, jnp.maximum(start, 0), verdict)


class SeesAll(Bag):
    """The whole cache is seen, not what is committed."""

    def verify(self, params, cache, draft, **settings):
        scores = super().verify(params, cache, draft, **settings)
        if scores.logits is None:
            return scores
        stale = jnp.arange(cache.shape[2]) >= draft.start[:, None]
        stale = jnp.sum(cache[:, 0] * stale[..., None], axis=1)
        return dataclasses.replace(scores, logits=scores.logits + (stale @ params["out"])[:, None])


class IgnoresEntries(Bag):
    def verify(self, params, cache, draft, *, since=0, entries=None, **settings):
        if entries is not None:
            entries = jnp.zeros_like(entries)
        return super().verify(params, cache, draft, since=since, entries=entries, **settings)


class MixesRows(Bag):
    def verify(self, params, cache, draft, **settings):
        scores = super().verify(params, cache, draft, **settings)
        if scores.logits is None:
            return scores
        return dataclasses.replace(scores, logits=scores.logits + jnp.mean(scores.logits, axis=0))


class OneNode(Bag):
    def verify(self, params, cache, draft, **settings):
        scores = super().verify(params, cache, draft, **settings)
        if scores.logits is None:
            return scores
        return dataclasses.replace(scores, logits=scores.logits[:, -1:])


class GivesNaN(Bag):
    def verify(self, params, cache, draft, **settings):
        scores = super().verify(params, cache, draft, **settings)
        if scores.logits is None:
            return scores
        return dataclasses.replace(scores, logits=scores.logits.at[..., 2].set(jnp.nan))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (GivesNaN, "logits are not finite (NaN or +inf)"),
        (SeesSiblings, "WRONG a tree's logits are those of its paths"),
        (KeepsNothing, "one pass over the text: commit returned the cache as it was; the next"),
        (ForgetsLast, "WRONG the cache after a commit"),
        (WritesFinishedRows, "WRONG commit leaves a row with count -1"),
        (ClampsStarts, "WRONG a node at a negative position does not exist: after a commit"),
        (SeesAll, "WRONG entries beyond the committed tokens are not seen"),
        (IgnoresEntries, "WRONG a pass in two parts"),
        (MixesRows, "WRONG a row's logits do not depend"),
        (OneNode, "logits is float32 of shape [3, 1, 11]: expected float32 of shape [3, 7, 11]"),
    ],
)
def test_a_wrong_target_is_named(target, words):
    report = specjax.check_target(target(11), PARAMS)
    assert not report and words in str(report), str(report)
    with pytest.raises(AssertionError, match="WRONG"):
        report.raise_if_wrong()


def traced(target):
    """Traces ``decode`` with a target, and computes nothing."""
    tokens = jnp.asarray([[1, 2, 3]])
    how = dict(key=jax.random.key(0), max_new_tokens=4)
    jax.eval_shape(
        lambda params: specjax.decode(
            target, Plain(), {"target": params}, tokens, jnp.asarray([3]), **how
        ),
        PARAMS,
    )


class RemembersNothing(Bag):
    """As the bigram model of the documentation: its entries are the cache itself."""

    def verify(self, params, cache, draft, **settings):
        return dataclasses.replace(super().verify(params, cache, draft, **settings), entries=cache)

    def commit(self, cache, entries, start, verdict):
        return cache


def test_decode_warns_of_a_commit_that_keeps_nothing():
    with pytest.warns(UserWarning, match=r"KeepsNothing.commit returned the .*check_target"):
        traced(KeepsNothing(11))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced(Bag(11))
        traced(RemembersNothing(11))


@pytest.mark.parametrize("name", ["draft", "ngram", "tree distinct", "eagle3"])
def test_right_drafters_pass_every_check(name):
    drafter, weights, _ = CASES[name]
    report = specjax.check_drafter(
        MODEL, drafter, {"target": PARAMS, "drafter": weights}, draws=500
    )
    assert report, str(report)


@dataclasses.dataclass(frozen=True)
class WrongLaw(DraftModel):
    """States its law at temperature 1 after drawing at another."""

    def draft_step(self, params, target_params, state, context):
        draft, state = super().draft_step(params, target_params, state, context)
        if draft.laws is None:
            return draft, state
        flat = jax.nn.softmax(0.5 * jnp.log(draft.laws))
        return dataclasses.replace(draft, laws=flat), state


@dataclasses.dataclass(frozen=True)
class ReadsBeyond(ChainDrafter):
    """Drafts what the buffer holds after the last committed token."""

    def draft_step(self, params, target_params, state, context):
        where = context.length[:, None] + jnp.arange(self.num_draft)
        tokens = jnp.take_along_axis(context.tokens, where, axis=1, mode="clip")
        return trees.chain_draft(context, tokens), state


@dataclasses.dataclass(frozen=True)
class MixesDrafts(ChainDrafter):
    """Every row drafts the first row's root."""

    def draft_step(self, params, target_params, state, context):
        tokens = jnp.broadcast_to(context.root[:1, None], (len(context.length), self.num_draft))
        return trees.chain_draft(context, tokens), state


@dataclasses.dataclass(frozen=True)
class DraftsBeyond(ChainDrafter):
    """Drafts an id that the vocabulary lacks."""

    def draft_step(self, params, target_params, state, context):
        return trees.chain_draft(context, jnp.full((len(context.length), 2), 11)), state


@dataclasses.dataclass(frozen=True)
class ShortDrafts(ChainDrafter):
    def draft_step(self, params, target_params, state, context):
        return trees.chain_draft(context, jnp.zeros((len(context.length), 1), jnp.int32)), state


@pytest.mark.parametrize(
    ("drafter", "weights", "words"),
    [
        (WrongLaw(2, model=MODEL), PARAMS, "WRONG drawn tokens follow the laws"),
        (ReadsBeyond(2), None, "WRONG a draft depends on committed tokens alone"),
        (MixesDrafts(2), None, "WRONG a row's draft does not depend on the other rows"),
        (DraftsBeyond(2), None, "row 0, node 1: the token is 11: expected an id from 0 to 10"),
        (ShortDrafts(2), None, "draft.tokens is int32 of shape [3, 2]"),
    ],
)
def test_a_wrong_drafter_is_named(drafter, weights, words):
    params = {"target": PARAMS, "drafter": weights}
    report = specjax.check_drafter(MODEL, drafter, params, draws=1000)
    assert not report and words in str(report), str(report)


def test_missing_weights_are_a_finding():
    report = specjax.check_drafter(MODEL, DraftModel(2, model=MODEL), {"target": PARAMS})
    assert "is missing" in str(report) and not report


def test_what_lacks_its_base_class_is_refused():
    with pytest.raises(TypeError, match="specjax.Target"):
        specjax.check_target(np, PARAMS)


class Layered(Readable):
    """A toy whose hidden states differ: the first is half of the last."""

    hidden_size = 6

    def verify(self, params, cache, draft, *, features=(), **settings):
        scores = super().verify(params, cache, draft, features=features[:1], **settings)
        states = [scores.features * (1 + i) / 2 for i in features]
        return dataclasses.replace(
            scores, features=jnp.concatenate(states, axis=-1) if states else None
        )

    def head_table(self, params):
        return params["out"].T


def state_checks(target, only):
    """The report on the hidden states and sub-networks of a target, on some of the properties."""
    base = TargetPasses(target, PARAMS, None, 1e-3, 0)
    named = *hidden_state_checks(base, target), *part_checks(base)
    return [run_check(name, run) for name, run in named if re.search(only, name)]


def test_right_hidden_states_and_sub_networks_pass_every_check():
    report = specjax.check_target(Layered(11), PARAMS)
    assert report, str(report)
    words = str(report)
    assert "sub_network(exit=1): the target's pass continues" in words
    assert "sub_network(skip=('mlp.0',)): a pass in two parts" in words


class Swapped(Layered):
    """Hidden states stand in the order of the layers, whatever the order asked for."""

    def verify(self, params, cache, draft, *, features=(), **settings):
        return super().verify(params, cache, draft, features=tuple(sorted(features)), **settings)


class StatesOfTheRoot(Layered):
    def verify(self, *args, **settings):
        scores = super().verify(*args, **settings)
        if scores.features is None:
            return scores
        first = jnp.broadcast_to(scores.features[:, :1], scores.features.shape)
        return dataclasses.replace(scores, features=first)


class OtherHead(Layered):
    def head(self, params, hidden, batch):
        return super().head(params, hidden + 1, batch)


class MixedColumns(Layered):
    def embed(self, params, tokens):
        return super().embed(params, tokens.T)


class PartOfSiblings(Layered):
    """The sub-network's nodes see all nodes before them, as in a chain."""

    def sub_network(self, **which):
        class Part(BagPart):
            def verify(self, params, cache, draft, **settings):
                topology = trees.chain_parents(draft.num_nodes - 1)
                chain = dataclasses.replace(draft, topology=topology)
                return super().verify(params, cache, chain, **settings)

        return Part(self, hands_over=True)


class HandsOverOther(Layered):
    def sub_network(self, **which):
        class Part(BagPart):
            def verify(self, params, cache, draft, **settings):
                scores = super().verify(params, cache, draft, **settings)
                own, state = scores.entries
                return dataclasses.replace(scores, entries=(own, state + 1))

        return Part(self, hands_over=True)


@pytest.mark.parametrize(
    ("target", "only"),
    [
        (Swapped, "side by side"),
        (StatesOfTheRoot, "hidden states are those of its paths"),
        (OtherHead, "head gives the logits"),
        (MixedColumns, "embed returns"),
        (PartOfSiblings, "exit=1.*logits are those of its paths"),
        (HandsOverOther, "exit=1.*partial pass"),
    ],
)
def test_fault_in_hidden_states_or_a_sub_network_is_named(target, only):
    (check,) = state_checks(target(11), only)
    assert not check.passed and "differ by" in check.found, check
