"""Published drafters that read hidden states do what their authors' code does."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from starts import unanswered
from toys import own_params, said_below

import specjax
from specjax import Sampling, trees
from specjax.acceptance import walk
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.round import commit_round, draft_and_verify
from specjax.drafters.feature import FeatureDrafter
from specjax.types import Context

GOLDEN = Path(__file__).parent / "golden" / "features"
GENERATED = (
    "eagle",
    "eagle3",
    "eagle3_wide",
    "eagle3_deepspec",
    "dflash",
    "domino",
    "domino_masks",
    "xpress",
    "lilicorr",
    "dflash2",
    "dflash2_window",
    "jetspec",
)
SPECULATORS = (
    "dflash_speculators",
    "dspark_speculators",
    "dspark_speculators_gated",
    "dspark_speculators_rnn",
    "dflash2_speculators",
    "dflash_speculators_window",
    "dflash2_speculators_window",
    "xpress_speculators",
)
TRAINED = ("speculators", "speculators_norms", "peagle")  # speculators' EAGLE-3 and P-EAGLE
SPARKS = ("dspark", "dspark_gated", "dspark_rnn", "dspark_bare")
SPARKS += ("dspark_specforge", "dspark_specforge_rnn")

CLOSE = {  # where float32 itself is not closer: a cosine of short vectors, times 8; convolutions
    # with random kernels, for which the authors' code differs by 1e-4 in float32 and float64; heads
    # of speculators and of JetSpec, for which one differs by 2.6e-5 where there is AVX2 alone, and
    # one of EAGLE-3's by 7e-5 in float32 and float64
    "lilicorr": 2e-4,
    "jetspec": 5e-5,
    "speculators": 2e-4,
    "dflash2": 2e-4,
    "dflash2_window": 2e-4,
    "dflash2_speculators": 2e-4,
    "dflash2_speculators_window": 2e-4,
    "dflash_speculators": 5e-5,
    "dspark_speculators": 5e-5,
    "dflash_speculators_window": 5e-5,
}


@pytest.fixture(scope="module")
def target():
    return specjax.load(GOLDEN / "target", tokenizer=False, dtype="float32")


def said_along(drafter, params, state, context, paths):
    """float32 ``[B, D, V]``, what the drafter says below each node of paths int32 ``[B, D]`` that
    are given as tokens from the root down; and the carry of the last level."""
    learned = (state.drafter_state,)
    if isinstance(drafter, FeatureDrafter):
        learned = drafter._catch_up(*own_params(params), state.drafter_state, context)
    first, *more = learned
    return said_below(drafter, *own_params(params), first, context, paths, *more)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def one_round(target, drafter, depth, params, state):
    """The state after a round, its draft and verdict, the drafter's logits ``[B, depth, V]`` below
    the root and, of a chain, below what it drafted; and of DSpark the chances of its tokens."""
    judged = draft_and_verify(target, drafter, "greedy", params, state)
    draft = judged.draft
    path = draft.tokens[:, :depth]
    logits, carry = said_along(drafter, params, state, judged.context, path)
    after = commit_round(target, drafter, params, state, judged)
    parents = jnp.broadcast_to(trees.parents(draft), draft.tokens.shape)
    proposed = jnp.sum(walk.eligible(draft), axis=1)
    chances = jax.nn.sigmoid(getattr(carry, "chances", jnp.zeros((1, depth))))
    return after, (draft.tokens, parents, judged.verdict.count, logits, proposed, chances)


def begun(heads, lm, tokens, lengths, num, start=unanswered):
    """Parameters, and the state after reading rows of these lengths."""
    params = {"target": lm.params, "drafter": heads.params}
    given = (lm.target, heads.drafter, np.asarray(tokens), np.asarray(lengths), jax.random.key(0))
    request, capacity = prepare_inputs(*given, num, Sampling(), None, ())
    return params, start(lm.target, heads.drafter, "greedy", capacity, params, request)


def generated(heads, lm, expected):
    """Returns drafted paths and, of each greedy round, what ``one_round`` saw; and the text."""
    prompt, text = expected["prompt"], expected["text"]
    rows = text[None, : len(prompt)], [len(prompt)]
    params, state = begun(heads, lm, *rows, len(text) + 9, loop.jit_start)
    depth = expected["logits"][0].size // expected["logits"].shape[-1]
    paths, rounds = [], []
    for _ in expected["accepted"]:
        state, seen = one_round(lm.target, heads.drafter, depth, params, state)
        tokens, parents, *rest = (np.asarray(x[0]) for x in seen)
        paths.append(paths_of(tokens, parents))
        rounds.append(rest)
    return paths, [*map(np.stack, zip(*rounds, strict=True))], state.tokens[0, : state.length[0]]


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


@pytest.mark.parametrize("name", GENERATED + SPARKS + SPECULATORS + TRAINED)
def test_a_generation_drafts_and_accepts_what_the_authors_code_does(name, target):
    expected = np.load(GOLDEN / name / ("generated.npz" if name in TRAINED else "expected.npz"))
    depth = expected["drafts"].shape[1] - 1
    shape = trees.Expand(*expected["shape"].tolist()) if "shape" in expected else trees.chain(depth)
    heads = specjax.load_drafter(GOLDEN / name, target, topology=shape)
    if "chances" in expected:
        drafter = dataclasses.replace(heads.drafter, least=float(expected["least"][0]))
        heads = dataclasses.replace(heads, drafter=drafter)
    paths, (accepted, logits, proposed, chances), text = generated(heads, target, expected)
    assert text.tolist()[: len(expected["text"])] == expected["text"].tolist()
    assert paths == drafted(expected)
    assert accepted.tolist() == expected["accepted"].tolist()
    assert max(accepted) > 0  # there was something to catch up with
    close = CLOSE.get(name, 5e-5 if name in SPARKS else 2e-5)
    np.testing.assert_allclose(
        logits.reshape(expected["logits"].shape), expected["logits"], atol=close
    )
    if "proposed" in expected:
        assert proposed.tolist() == expected["proposed"].tolist()
    if "chances" in expected:
        np.testing.assert_allclose(chances, expected["chances"], atol=1e-5)


@pytest.mark.parametrize("name", TRAINED)
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
    said = jax.jit(functools.partial(said_along, heads.drafter))
    found, _ = said(params, state, context, paths)
    np.testing.assert_allclose(found, logits[:, lengths - 2].swapaxes(0, 1), atol=2e-5)
