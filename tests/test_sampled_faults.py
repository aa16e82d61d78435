"""Planted faults in the compiled loop: the proof of ``test_sampled.py`` sees each of them."""

import dataclasses

import jax
import jax.numpy as jnp
from combinations import TREE
from test_sampled import (
    CASES,
    MODEL,
    PARAMS,
    PROMPT,
    ROWS,
    VOCAB,
    WARM,
    beginnings,
    exact,
    lawful,
    sample,
    tokens_of,
)
from toys import Merged, TreeDrafter, like

from specjax.acceptance import RULES
from specjax.decoding import contract_checks, reference, round
from specjax.drafters import DraftModel


def faulty(drafter, weights, rule, rows=ROWS // 16, **settings):
    """The counts of so many texts: most faults are seen in a sixteenth of the proof's rows, where
    their statistic is 100 to 16,000 above its expectation; the others ask for more."""
    return sample(drafter, weights, rule, WARM, rows=rows, **settings)[0]


@dataclasses.dataclass(frozen=True)
class WrongTemperature(DraftModel):
    """States its law at temperature 1 after drawing at another."""

    def draft_step(self, params, target_params, state, context):
        draft, state = super().draft_step(params, target_params, state, context)
        return dataclasses.replace(draft, laws=jax.nn.softmax(0.9 * jnp.log(draft.laws))), state


@dataclasses.dataclass(frozen=True)
class ForgetsLast(type(MODEL)):
    """After full acceptance of three tokens the last entry does not reach the cache."""

    def commit(self, cache, entries, start, verdict):
        full = verdict.count == verdict.path.shape[1] - 1
        late = full & (verdict.path.shape[1] == 4)
        verdict = dataclasses.replace(verdict, count=verdict.count - late)
        return super().commit(cache, entries, start, verdict)


def test_fault_wrong_q_after_temperature():
    drafter = WrongTemperature(num_draft=3, model=MODEL)
    counts = faulty(drafter, CASES["draft"][1], "rejection", rows=ROWS // 4)
    assert not lawful(counts, exact("warm"))


def test_fault_noise_shared_between_draft_and_acceptance(monkeypatch):
    monkeypatch.setattr(round, "ACCEPT", round.DRAFT)
    counts = faulty(*CASES["draft"][:2], "rejection")
    assert not lawful(counts, exact("warm"))


def test_fault_keys_by_absolute_position_under_a_rule_that_redraws(monkeypatch):
    def absolute(keys, count):
        """Column n belongs to position root + n, in every round."""
        keys, root = keys
        at = lambda key, n: jax.random.uniform(jax.random.fold_in(key, n))  # noqa: E731
        steps = root[:, None] + jnp.arange(count)
        return jax.vmap(jax.vmap(at, in_axes=(None, 0)))(keys, steps)

    class Keys(tuple):
        """A row key that remembers the root instead of being folded with it."""

    # (with the keys of the loop this very case passes: it is in the registry as "draft")
    monkeypatch.setattr(
        round,
        "round_keys",
        lambda state, role: Keys(
            (jax.vmap(jax.random.fold_in, in_axes=(0, None))(state.key, role), state.length)
        ),
    )
    monkeypatch.setattr("specjax.sampling.drawing.uniforms", absolute)
    monkeypatch.setattr(contract_checks, "check_keys", lambda *_: None)  # which sees such keys
    counts = faulty(*CASES["draft"][:2], "block", rows=ROWS // 4)
    assert not lawful(counts, exact("warm"))


def test_fault_cache_one_short_after_full_acceptance(monkeypatch):
    # the bonus token is still right; what follows it misses an entry of the cache
    monkeypatch.setattr("test_sampled.MODEL", ForgetsLast(VOCAB))
    counts = faulty(CASES["draft"][0], PARAMS, "rejection", num=5)
    assert not lawful(counts, reference.joint_law(MODEL, PARAMS, PROMPT, 5, WARM).reshape(-1))


def test_fault_dropped_twins():
    parts = (TreeDrafter(model=MODEL, sibling_sampling="iid", topology=(-1, 0, 0, 0)),)
    weights = like(PARAMS, 5, noise=1.5)
    # (the registry's "merged" keeps the twins, and has the law); the law that is drawn is so close
    # to the target's that a quarter of the rows, for which the statistic is 1.4 of each thousand
    # rows above its expectation, are too few
    dropped = faulty(Merged(drafters=parts, drop_twins=True), weights, "rejection", rows=ROWS // 2)
    assert not lawful(dropped, exact("warm"))


def test_fault_siblings_without_replacement_judged_as_if_independent():
    @dataclasses.dataclass(frozen=True)
    class Mislabelled(TreeDrafter):
        def draft_step(self, params, target_params, state, context):
            draft, state = super().draft_step(params, target_params, state, context)
            return dataclasses.replace(draft, draws="iid"), state

    drafter = Mislabelled(model=MODEL, sibling_sampling="distinct", topology=TREE)
    counts = faulty(drafter, CASES["tree distinct"][1], "rejection")
    assert not lawful(counts, exact("warm"))


@dataclasses.dataclass(frozen=True)
class DeltaAtAnotherTemperature(type(RULES["delta"])):
    """Draws from the target's law after it was made a little too flat."""

    def __call__(self, params, draft, target_law, draft_law, key):
        def flat(node):
            law = target_law(node) ** 0.9
            return law / jnp.sum(law, axis=-1, keepdims=True)

        return super().__call__(params, draft, flat, draft_law, key)


def test_fault_delta_that_reads_another_law():
    counts = faulty(*CASES["draft"][:2], DeltaAtAnotherTemperature())
    assert not lawful(counts, exact("warm"))


@dataclasses.dataclass(frozen=True)
class WrongBonus(type(RULES["rejection"])):
    """Says token 0 after a draft that was accepted whole."""

    def __call__(self, params, draft, target_law, draft_law, key):
        found = super().__call__(params, draft, target_law, draft_law, key)
        token = jnp.where(found.count == draft.num_nodes - 1, 0, found.token)
        return dataclasses.replace(found, token=token)


def test_fault_wrong_token_after_a_chain_that_was_accepted_whole():
    drafter, weights, _ = CASES["draft"]
    num = tokens_of(drafter)
    counts = faulty(drafter, weights, WrongBonus(), num=num)
    assert not lawful(counts, exact("warm", num))
    assert lawful(beginnings(counts), exact("warm"))  # fewer tokens than that do not show it
