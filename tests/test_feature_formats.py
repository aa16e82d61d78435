"""Published EAGLE, EAGLE-3 and DFlash drafters: the authors' numbers, layouts, bad input."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Sampling, loop, rounds, topology, tree
from specjax.drafters.feature import FeatureDrafter
from specjax.types import Context, Draft

GOLDEN = Path(__file__).parent / "golden" / "features"
GENERATED = ("eagle", "eagle_bare", "eagle3", "eagle3_wide", "dflash")


@pytest.fixture(scope="module")
def target():
    return specjax.load(GOLDEN / "target", tokenizer=False, dtype="float32")


# ------------------------------------------------------------------- numbers of the authors' code


@functools.partial(jax.jit, static_argnums=0)
def said_along(drafter, params, state, path):
    """float32 ``[D, V]``: what the drafter says below each node of a path int32 ``[D]``, given as
    tokens from the root down."""
    context = Context(
        tokens=state.tokens,
        length=state.length,
        budget=state.budget,
        key=state.key,
        sampling=state.sampling,
    )
    learned = (state.drafter,)
    if isinstance(drafter, FeatureDrafter):
        learned = drafter._catch_up(params, state.drafter, context)
    level, carry = drafter.begin(params, learned[0], context, *learned[1:])
    logits = []
    for depth in range(len(path)):
        chain = tree.chain_topology(depth)
        start = context.length - 1
        grown = Draft(start=start, tokens=path[None, : depth + 1], topology=chain)
        row, carry = level(carry, grown, depth)
        logits.append(row[0, 0])
    return jnp.stack(logits)


def generated(heads, lm, expected):
    """Of each round of a greedy generation paths drafted, tokens accepted, logits; the text."""
    prompt, text = expected["prompt"], expected["text"]
    begin = text[: len(prompt) + 1]  # the authors say the first token without a draft
    objects = lm.target, heads.drafter, "greedy"
    params = {"target": lm.params, "drafter": heads.params}
    request = (lm.target, heads.drafter, begin[None], np.asarray([len(begin)]), jax.random.key(0))
    request, capacity = loop.prepare(*request, len(text) + 8, Sampling(), None, ())
    state = loop.jit_start(*objects, capacity, params, request)
    paths, accepted, logits, said = [], [], [], [*begin]
    depth = expected["logits"][0].size // expected["logits"].shape[-1]
    for one, after in rounds.record(*objects, params, state):
        chain = jnp.asarray([one.nodes[0].token] * depth)  # what stands below is not looked at
        logits.append(said_along(heads.drafter, params, state, chain))
        state = after
        paths.append(paths_of([n.token for n in one.nodes], [n.parent for n in one.nodes]))
        accepted.append(len(one.path) - 1)
        said += one.emitted
        if len(paths) == len(expected["accepted"]):
            break
    return paths, accepted, np.stack(logits), said


def paths_of(tokens, parents) -> set:
    """A draft as the set of its paths of tokens."""
    found = [(tokens[0],)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return {tuple(int(t) for t in path) for path in found}


def drafted(expected):
    """The authors' drafts, likewise."""
    drafts = expected["drafts"]
    chain = np.tile(np.arange(drafts.shape[1]) - 1, (len(drafts), 1))
    return list(map(paths_of, drafts, expected["parents"] if "parents" in expected else chain))


@pytest.mark.parametrize("name", GENERATED)
def test_a_generation_drafts_and_accepts_what_the_authors_code_does(name, target):
    expected = np.load(GOLDEN / name / "expected.npz")
    shape = topology.Expand(*expected["shape"].tolist()) if "shape" in expected else None
    heads = specjax.load_drafter(GOLDEN / name, target, topology=shape)
    paths, accepted, logits, text = generated(heads, target, expected)
    assert text[: len(expected["text"])] == expected["text"].tolist()
    assert paths == drafted(expected)
    assert accepted == expected["accepted"].tolist()
    assert max(accepted) > 0  # there was something to catch up with
    np.testing.assert_allclose(
        logits.reshape(expected["logits"].shape), expected["logits"], atol=2e-5
    )
