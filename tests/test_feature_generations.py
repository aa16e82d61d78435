"""Published EAGLE, EAGLE-3 and DFlash drafters draft and accept what the authors' code does."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import own_params

import specjax
from specjax import Sampling, trees
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.round import commit_round, draft_and_verify
from specjax.drafters.feature import FeatureDrafter
from specjax.types import Context, Draft

GOLDEN = Path(__file__).parent / "golden" / "features"
GENERATED = ("eagle", "eagle3", "eagle3_wide", "dflash")


@pytest.fixture(scope="module")
def target():
    return specjax.load(GOLDEN / "target", tokenizer=False, dtype="float32")


def said_along(drafter, params, state, context, paths):
    """float32 ``[B, D, V]``: what the drafter says below each node of paths int32 ``[B, D]``,
    given as tokens from the root down."""
    learned = (state.drafter_state,)
    if isinstance(drafter, FeatureDrafter):
        learned = drafter._catch_up(*own_params(params), state.drafter_state, context)
    level, carry = drafter.make_level(*own_params(params), learned[0], context, *learned[1:])
    logits = []
    for depth in range(paths.shape[1]):
        chain = trees.chain_parents(depth)
        grown = Draft(start=context.length - 1, tokens=paths[:, : depth + 1], topology=chain)
        row, carry = level(carry, grown, depth)
        logits.append(row[:, 0])
    return jnp.stack(logits, axis=1)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def one_round(target, drafter, depth, params, state):
    """The state after a round, its draft and verdict, and the drafter's logits ``[B, depth, V]``
    below the root and, of a block, below what is not looked at."""
    judged = draft_and_verify(target, drafter, "greedy", params, state)
    path = jnp.broadcast_to(judged.context.root[:, None], (len(state.length), depth))
    logits = said_along(drafter, params, state, judged.context, path)
    after = commit_round(target, drafter, params, state, judged)
    parents = jnp.broadcast_to(trees.parents(judged.draft), judged.draft.tokens.shape)
    return after, (judged.draft.tokens, parents, judged.verdict.count, logits)


def begun(heads, lm, tokens, lengths, num):
    """Parameters, and the state before the first round of rows of these lengths."""
    params = {"target": lm.params, "drafter": heads.params}
    given = (lm.target, heads.drafter, np.asarray(tokens), np.asarray(lengths), jax.random.key(0))
    request, capacity = prepare_inputs(*given, num, Sampling(), None, ())
    return params, loop.jit_start(lm.target, heads.drafter, "greedy", capacity, params, request)


def generated(heads, lm, expected):
    """Returns drafted paths, accepted tokens and logits of each greedy round; and the text."""
    prompt, text = expected["prompt"], expected["text"]
    begin = text[: len(prompt) + 1]  # the authors say the first token without a draft
    params, state = begun(heads, lm, begin[None], [len(begin)], len(text) + 8)
    depth = expected["logits"][0].size // expected["logits"].shape[-1]
    paths, accepted, logits = [], [], []
    for _ in expected["accepted"]:
        state, seen = one_round(lm.target, heads.drafter, depth, params, state)
        tokens, parents, count, said = (np.asarray(x[0]) for x in seen)
        paths.append(paths_of(tokens, parents))
        accepted.append(int(count))
        logits.append(said)
    return paths, accepted, np.stack(logits), state.tokens[0, : int(state.length[0])]


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
    shape = trees.Expand(*expected["shape"].tolist()) if "shape" in expected else None
    heads = specjax.load_drafter(GOLDEN / name, target, topology=shape)
    paths, accepted, logits, text = generated(heads, target, expected)
    assert text.tolist()[: len(expected["text"])] == expected["text"].tolist()
    assert paths == drafted(expected)
    assert accepted == expected["accepted"].tolist()
    assert max(accepted) > 0  # there was something to catch up with
    np.testing.assert_allclose(
        logits.reshape(expected["logits"].shape), expected["logits"], atol=2e-5
    )


@pytest.mark.parametrize("name", ["speculators", "speculators_norms", "peagle"])
def test_every_step_of_speculators_training_is_a_depth_of_a_draft(name, target):
    expected = np.load(GOLDEN / name / "expected.npz")
    tokens, logits = expected["tokens"], expected["logits"]
    steps = len(logits)
    heads = specjax.load_drafter(GOLDEN / name, target, topology=f"chain:{steps}")
    lengths = np.asarray([2, 5, len(tokens) - steps + 1])  # tokens up to the root
    params, state = begun(heads, target, np.tile(tokens, (3, 1)), lengths, 8)
    paths = tokens[lengths[:, None] - 1 + np.arange(steps)]
    shown = ("tokens", "length", "budget", "key", "sampling")
    context = Context(**{name: getattr(state, name) for name in shown})
    found = jax.jit(functools.partial(said_along, heads.drafter))(params, state, context, paths)
    np.testing.assert_allclose(found, logits[:, lengths - 2].swapaxes(0, 1), atol=2e-5)
