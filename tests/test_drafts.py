"""The law that a draft states is the law that it was drawn from, drafter by drafter.

A rule that is exact for every draft that says the truth (``test_acceptance.py`` enumerates that)
and drafters that say the truth make up a loop that is exact. So here no rule has a part: of one
round of many rows with the same prompt, how often each draft occurred is held against the product
of the laws that its nodes state, each given its ancestors and the siblings drawn before it. And
what is stated of a token may not depend on tokens after it: such laws may have the right product
and bias every rule that trusts them (``test_specdiff.py`` plants that fault).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from registry import cases
from scipy.special import chdtrc
from toys import bag

from specjax import Sampling
from specjax.acceptance import walk
from specjax.acceptance.node_laws import DraftLaw
from specjax.decoding import prefill, round
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Adaptive, Cascade, Fallback, Horizontal, LLMCad, registry
from specjax.drafters.heads import HeadDrafter
from specjax.trees import Tree

pytestmark = pytest.mark.usefixtures("quick_compilation")
ROWS, FEWER, VOCAB = 60_000, 20_000, 4  # the merge tier draws fewer
FALSE_ALARM = 1e-7
PROMPT = (1, 0, 2, 1, 3)  # whose last token is new: a lookup finds nothing
MODEL, PARAMS = bag(VOCAB, 0)
CASES = cases(MODEL, PARAMS)
WARM = Sampling(temperature=0.9)
# an independent draw decides who is whose parent there, and not the tokens
GROUPED = ("tree per row",)
SHORTER = (Adaptive, Cascade, Fallback, Horizontal, LLMCad)  # which leave nodes out, or empty
WEAK = ("lstm speculator",)  # fewer rows do not tell it from a slightly flatter law
GUESSES = (
    "tree worst",
    "fallback recycling",
    "union of tables",
    "specdiff confidence",
    "bigram",
)  # drafts without laws, under a rule that could take them
# whose first round of a text proposes nothing: test_sampled.py draws with them
LATER = ("pass", "pearl", "adaptive pearl")
TABLES = {entry.class_name for entry in registry.entries("table")}  # the same


def drafters():
    """``name: (name in the registry, settings)`` of what states laws; heads with siblings drawn
    in both ways, whatever the registry's line has."""
    found = {}
    for name in CASES:
        drafter, _, rules = CASES.lines[name]
        if type(drafter).__name__ in TABLES or name in GUESSES + LATER:
            continue
        if {*rules} - {"delta", "coupled"}:
            found[name] = name, {}
        elif isinstance(drafter, HeadDrafter) and isinstance(drafter.topology, Tree):
            for picks in ("iid", "distinct"):
                found[f"{name} {picks}"] = name, {"sibling_sampling": picks}
    return found


DRAFTERS = drafters()


def drawn(drafter, weights, rows=ROWS):
    """``(drafts as numbers [B], who is whose parent as numbers [B], the probability of each draft
    by the laws that it states [B], the same by laws that are a little too flat [B], tokens [B, N],
    the probability of each of them [B, N])``."""
    request, capacity = prepare_inputs(
        MODEL,
        drafter,
        np.tile(np.asarray([PROMPT], np.int32), (rows, 1)),
        np.full((rows,), len(PROMPT), np.int32),
        jax.random.key(3),
        9,
        WARM,
        None,
        (),
    )

    @jax.jit
    def run(params, request):
        state = prefill.unanswered(MODEL, drafter, "rejection", capacity, params, request)
        plan = None
        if drafter.plans:
            own = params["drafter"], params["target"], state.drafter_state, state.budget
            plan = drafter.plan(*own)
        draft = round.draft_and_verify(MODEL, drafter, "rejection", params, state, plan).draft

        def stated(draft):
            law, found = DraftLaw(draft, VOCAB), []
            for node in range(1, draft.num_nodes):
                q = law(jnp.full((rows,), node))
                q = jnp.take_along_axis(q, draft.tokens[:, node, None], axis=1)[:, 0]
                found.append(jnp.where(able[:, node], q, 1.0))
            return jnp.stack(found, axis=1)

        able = jnp.ones(draft.tokens.shape, bool)
        if isinstance(drafter, SHORTER):
            able = walk.eligible(draft)

        def number(x, base):
            return jnp.sum(x * base ** jnp.arange(x.shape[1]), axis=1)

        parents = jnp.zeros((rows, 1), int)
        if draft.topology is None:
            parents = draft.parent[:, 1:]
        flat = draft.laws**0.8
        flat = dataclasses.replace(draft, laws=flat / flat.sum(axis=-1, keepdims=True))
        tokens, each = jnp.where(able, draft.tokens, 0)[:, 1:], stated(draft)
        parents = number(parents, draft.num_nodes)
        totals = (jnp.prod(x, axis=1) for x in (each, stated(flat)))
        return number(tokens, VOCAB), parents, *totals, tokens, each

    return tuple(map(np.asarray, run({"target": PARAMS, "drafter": weights}, request)))


def p_value(drafts, groups, probability):
    """Chi-squared of how often each draft occurred against its probability, group by group."""
    statistic, cells = 0.0, 0
    for group in np.unique(groups):
        ours = groups == group
        _, first, each, counts = np.unique(
            drafts[ours], return_index=True, return_inverse=True, return_counts=True
        )
        law = probability[ours][first]
        # nothing but the tokens decides what is stated
        np.testing.assert_allclose(probability[ours], law[each], rtol=1e-4)
        expected = law * counts.sum()
        some = expected > 5
        rest, others = counts.sum() - counts[some].sum(), counts.sum() - expected[some].sum()
        statistic += ((counts[some] - expected[some]) ** 2 / expected[some]).sum()
        statistic += (rest - others) ** 2 / max(others, 5)
        cells += some.sum()
    return chdtrc(cells, statistic)


def reads_ahead(tokens, groups, each):
    """Whether what is stated of a token depends on tokens that come after it in the draft, for
    ``tokens`` and their probabilities ``each``, both ``[B, N]``."""
    so_far = groups
    for said, law in zip(tokens.T, each.T, strict=True):
        so_far = np.unique(np.stack([so_far, said]), axis=1, return_inverse=True)[1].reshape(-1)
        first = np.unique(so_far, return_index=True)[1]
        if not np.allclose(law, law[first][so_far], rtol=1e-4):
            return True
    return False


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_law_that_is_stated_is_the_law_that_was_drawn_from_and_another_is_told_apart(
    name, hurried
):
    line, settings = DRAFTERS[name]
    drafter, weights, _ = CASES[line]
    drafter = dataclasses.replace(drafter, **settings) if settings else drafter
    rows = FEWER if hurried and line not in WEAK else ROWS
    drafts, groups, probability, flat, tokens, each = drawn(drafter, weights, rows)
    assert not reads_ahead(tokens, groups, each)
    groups = groups if line in GROUPED else np.zeros_like(groups)
    assert p_value(drafts, groups, probability) > FALSE_ALARM
    assert p_value(drafts, groups, flat) < FALSE_ALARM


def test_every_kind_of_head_that_draws_is_among_them():
    seen = {type(CASES.lines[line][0]).__name__ for line, _ in DRAFTERS.values()}
    heads = {registry.find(name).class_name for name in registry.head_names()}
    # ReDrafter searches and draws nothing, and a table of bigrams has no law
    assert heads - seen <= {"ReDrafter", "PaSS", "Bigram"}, heads - seen
