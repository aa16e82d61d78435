"""Which rule judges which draft, and what a result says about the rule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import bag, context

from specjax import Sampling, acceptance, trees
from specjax.acceptance import RULES
from specjax.decoding import prefill
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Plain
from specjax.types import DRAWS, Draft

CHAIN, PAIR, THREE = (-1, 0, 1, 2), (-1, 0, 0), (-1, 0, 0, 0)
# approximate at temperature 0 too
RELAXED = (
    "approximate-top-k",
    "approximate-tolerance",
    "approximate-threshold",
    "approximate-fly",
    "approximate-sprinter",
)
CHAINS = ("block", "approximate-fly", "approximate-sprinter")
APPROXIMATE = ("approximate-typical", "approximate-lenience", *RELAXED)
COUNTS = "rounds", "emitted", "drafted", "accepted", "passengers"
ZERO = {name: np.zeros(1, int) for name in (*COUNTS, "hidden")}


def any_draft(draws, lawful, topology):
    nodes = len(topology)
    law = dict(law=np.zeros((1, nodes), np.int32), laws=np.full((1, 1, 3), 1 / 3, np.float32))
    tokens = np.zeros((1, nodes), np.int32)
    start = np.zeros(1, np.int32)
    return Draft(
        start=start, tokens=tokens, topology=topology, draws=draws, **(law if lawful else {})
    )


@pytest.mark.parametrize("name", RULES)
def test_every_pairing_of_a_rule_and_a_draft_is_lawful_or_refused_before_anything_compiles(name):
    for draws in DRAWS:
        for lawful in (True, False):
            for topology in (CHAIN, PAIR, THREE):
                draft = any_draft(draws, lawful, topology)
                refused = {
                    "kseq": draws != "iid" or not lawful,
                    "hub": draws != "hub" or not lawful or topology == THREE,
                    "greedy": True,
                }.get(name, name in CHAINS and topology != CHAIN)
                if refused:
                    with pytest.raises(ValueError, match=f"rule='{name}'"):
                        acceptance.choose(name, draft, greedy=False)
                else:
                    assert acceptance.choose(name, draft, greedy=False) is RULES[name]
                if name not in CHAINS or topology == CHAIN:
                    cold = acceptance.exact(RULES[name], True)
                    wanted = RULES["greedy" if cold else name]
                    assert acceptance.choose(name, draft, greedy=True) is wanted
                    assert cold == (name not in RELAXED)


def test_merge_says_how_the_siblings_of_the_union_were_drawn():
    one, distinct = any_draft("iid", True, PAIR), any_draft("distinct", True, PAIR)
    hub, guess = any_draft("hub", True, PAIR), any_draft("iid", False, PAIR)

    def union(*drafts, one_law=False):  # nothing is compiled
        return jax.eval_shape(functools.partial(trees.merge_drafts, one_law=one_law), *drafts)

    assert union(one, one).draws == union(one, guess).draws == "mixed"
    assert union(one, one, one_law=True).draws == union(one).draws == "iid"
    assert union(distinct, distinct, guess).draws == "distinct"
    for drafts_, words in (((one, distinct), "'iid', 'distinct'"), ((hub, hub), "'hub', 'hub'")):
        with pytest.raises(ValueError, match=words):
            union(*drafts_)
    for drafts_ in ((distinct, distinct), (one, guess)):
        with pytest.raises(ValueError, match="one_law=True is about"):
            union(*drafts_, one_law=True)
    with pytest.raises(ValueError, match="draws='sorted' is unknown"):
        trees.tree_draft(context(1), jnp.zeros((1, 2), jnp.int32), PAIR, draws="sorted")


@pytest.mark.parametrize("name", RULES)
def test_a_result_says_that_a_rule_is_approximate_unless_it_is_greedy(name):
    model, params = bag(5, 0)
    for temperature in (0.0, 1.0, np.zeros(1)):  # an array of zeros is known to nobody
        sample = Sampling(temperature=temperature)
        request, capacity = prepare_inputs(
            model, Plain(), [[1, 2]], [2], jax.random.key(0), 4, sample, None, ()
        )
        start = functools.partial(prefill.start, model, Plain(), name, capacity)
        stats = jax.eval_shape(start, {"target": params, "drafter": None}, request).stats
        cold = sample.greedy and name not in RELAXED
        changed = name in APPROXIMATE and not cold
        assert stats.approximate == (f"rule {name}" if changed else "")
        assert acceptance.exact(RULES[name], sample.greedy) != changed
        assert ("approximate" in str(dataclasses.replace(stats, **ZERO))) == changed
