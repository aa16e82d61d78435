"""Two approximate rules that judge chains: FLy and SPRINTER's. Exact at the strictest setting."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import acceptance
from specjax.acceptance import RULES
from specjax.acceptance.fly import Fly
from specjax.acceptance.sprinter import Sprinter
from specjax.analysis import exact_law
from specjax.analysis.exact_law import Table, distance, drafts, outcome, with_passengers

CHAIN = (-1, 0, 1, 2)
# from the strictest setting to the widest
WIDER = {
    "entropy": [Fly(entropy=e, window=1) for e in (1.1, 1.0, 0.0)],
    "window": [Fly(entropy=0.0, window=w) for w in (3, 2, 1)],
    "verified": [Sprinter(verified=n) for n in (9, 2, 1)],
}


def judged(rule, masked=False):
    """The law of four tokens, the tokens that are kept, and the law that they should have."""
    p, q = Table(0), Table(100)
    draft, weights = drafts(q, CHAIN, "iid")
    if masked:
        draft, weights = with_passengers(draft, weights)
    return *outcome(rule, draft, weights, p, 3), p


@pytest.mark.parametrize("rules", WIDER.values(), ids=WIDER)
def test_the_strictest_setting_is_rejection_and_a_wider_one_keeps_more(rules):
    law, kept, p = judged(rules[0])
    assert distance(law, p) < 1e-6
    assert kept == pytest.approx(judged(RULES["rejection"])[1], abs=1e-6)
    found = [judged(rule)[:2] for rule in rules[1:]]
    assert kept + 0.02 < found[0][1] < found[1][1] - 0.02
    assert 0.01 < distance(found[0][0], p) < distance(found[1][0], p)


def test_an_entropy_that_only_rounding_reaches_is_rejection_too():
    """Just above log 3, on laws of three tokens that are uniform."""
    rule, uniform = Fly(entropy=1.0986123, window=1), np.full((1, 4, 3), 1 / 3, np.float32)
    assert rule.lossless and not Fly(entropy=1.0986122).lossless
    draft = exact_law.Draft(
        start=jnp.zeros(1, jnp.int32),
        tokens=jnp.asarray([[0, 0, 1, 1]], jnp.int32),
        law=jnp.asarray([[-1, -1, 0, 0]], jnp.int32),
        laws=jnp.asarray(uniform),
        topology=CHAIN,
    )
    tests = jnp.asarray([[0.5, 0.9, 0.5, 0.5]])  # the point mass fails, the others pass
    nodes = [
        exact_law._judge(r, draft, jnp.asarray(uniform), tests)[0] for r in (rule, Fly(1.0, 1))
    ]
    assert [int(node[0]) for node in nodes] == [0, 3]


def test_a_token_that_was_not_drawn_is_not_kept_as_by_rejection():
    q = np.tile(np.float32([0, 0.5, 0.5]), (1, 4, 1))
    draft = exact_law.Draft(
        start=jnp.zeros(1, jnp.int32),
        tokens=jnp.zeros((1, 4), jnp.int32),
        law=jnp.asarray([[-1, 0, 1, 2]], jnp.int32),
        laws=jnp.asarray(q),
        topology=CHAIN,
    )
    p, tests = jnp.full((1, 4, 3), 1 / 3), jnp.full((1, 4), 0.5)
    for rule in (RULES["rejection"], Fly(entropy=2.0), Sprinter(verified=9)):
        assert int(exact_law._judge(rule, draft, p, tests)[0][0]) == 0


@pytest.mark.parametrize("rule", [WIDER["entropy"][0], WIDER["verified"][0]], ids=["fly", "all"])
def test_what_may_not_be_accepted_is_not_kept(rule):
    law, _, p = judged(rule, masked=True)
    assert distance(law, p) < 1e-6


def obvious(rule, tokens, p, q, uniform, size):
    """The last node that is kept of a chain of ``size`` tokens, and the weights after it."""
    own = [None, *(uniform[n] * q[n - 1][tokens[n]] < p[n - 1][tokens[n]] for n in range(1, 4))]
    own = own[: size + 1]
    node = 0
    while node < size:
        after = own[node + 2 : node + 2 + getattr(rule, "window", 0)]
        best = np.sort(p[node])[-3:]
        if isinstance(rule, Fly):
            undecided = -(best * np.log(best)).sum() >= rule.entropy
            kept = own[node + 1] or (undecided and len(after) == rule.window and all(after))
        else:
            kept = own[node + 1] or node < size - rule.verified
        if not kept:
            left = np.maximum(p[node] - q[node], 0)
            return node, left / left.sum()
        node += 1
    return node, p[node]


def differing(rule, seed=0, rows=400):
    """The share of random rounds in which the rule does not decide in the obvious way."""
    random = np.random.default_rng(seed)
    p, q = (random.dirichlet(np.full(5, 0.7), (rows, 4)).astype(np.float32) for _ in range(2))
    tokens, uniform = random.integers(0, 5, (rows, 4)), random.random((rows, 4)).astype(np.float32)
    size = random.integers(0, 4, rows)
    draft = exact_law.Draft(
        start=jnp.zeros(rows, jnp.int32),
        tokens=jnp.asarray(tokens, jnp.int32),
        candidate=jnp.asarray(np.arange(4) <= size[:, None]),
        law=jnp.asarray(np.tile([-1, 0, 1, 2], (rows, 1)), jnp.int32),
        laws=jnp.asarray(q),
        topology=CHAIN,
    )
    node, rest = (
        np.asarray(x) for x in exact_law._judge(rule, draft, jnp.asarray(p), jnp.asarray(uniform))
    )
    wrong = 0
    for row in range(rows):
        last, weights = obvious(rule, tokens[row], p[row], q[row], uniform[row], size[row])
        near = np.abs(rest[row] / exact_law.SCALE - weights).max() < 1e-4
        wrong += node[row] != last or not near
    return wrong / rows


RELAXED = [Fly(entropy=0.5, window=1), Fly(entropy=0.9, window=2), Sprinter(), Sprinter(verified=2)]


@pytest.mark.parametrize("rule", RELAXED, ids=str)
def test_every_round_is_decided_in_the_obvious_way(rule):
    assert differing(rule) == 0


@dataclasses.dataclass(frozen=True)
class AllTrusted(Sprinter):
    """A planted fault: the last token is trusted, too."""

    def passes(self, draft, own, possible, logits):
        return possible


@dataclasses.dataclass(frozen=True)
class OwnLaw(Fly):
    """A planted fault: the entropy is that of the law after the token."""

    def passes(self, draft, own, possible, logits):
        return super().passes(draft, own, possible, jnp.roll(logits, -1, axis=1))


@pytest.mark.parametrize("rule", [AllTrusted(), OwnLaw(entropy=0.9, window=1)], ids=["all", "law"])
def test_fault_a_token_that_is_kept_for_another_reason(rule):
    assert differing(rule) > 0.02


@dataclasses.dataclass(frozen=True)
class FromAllOfP(Sprinter):
    """A planted fault: after a rejection it draws from p."""

    verified: int = 9

    def __call__(self, params, draft, target_law, draft_law, key):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("specjax.acceptance.chain_rule.residual", lambda p, q: p)
            return super().__call__(params, draft, target_law, draft_law, key)


def test_fault_a_rejected_token_that_is_replaced_from_all_of_p():
    law, _, p = judged(FromAllOfP())
    assert distance(law, p) > 1e-3


def test_a_probe_biases_a_token_by_the_share_of_what_it_trusts_wrongly():
    """The law of the first token, for a probe that trusts some tokens, is the closed form."""
    p, q, trusted = Table(3), Table(103), np.asarray([True, False, True])
    draft, weights = drafts(q, (-1, 0, 1), "iid")
    going = trusted[draft.tokens[:, 1]]  # the chain goes on after a trusted token
    candidate = np.stack([np.ones_like(going), np.ones_like(going), going], axis=1)
    draft = dataclasses.replace(draft, candidate=candidate)
    law = outcome(Sprinter(), draft, weights, p, 2)[0].sum(axis=(1, 2))
    p, q = p(()), q(())
    kept = np.where(trusted, q, np.minimum(p, q))
    left = np.maximum(p - q, 0)
    assert np.abs(law - (kept + (1 - kept.sum()) * left / left.sum())).max() < 1e-6
    wrong = np.maximum(q - p, 0)
    share = wrong[trusted].sum() / wrong.sum()  # of the false positives, weighted by q - p
    gap = 0.5 * np.abs(p - q).sum()
    assert 0.5 * np.abs(law - p).sum() == pytest.approx(share * gap, abs=1e-6) and share > 0.1


def test_settings_out_of_range_are_refused():
    for given, words in (
        ("approximate-fly:entropy=-1", "entropy must be at least 0"),
        ("approximate-fly:window=0", "window at least 1"),
        ("approximate-fly:entropy=nan", "entropy must be at least 0"),
        ("approximate-sprinter:verified=0", "verified must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            acceptance.named(given)
