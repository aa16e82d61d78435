"""What targets, drafters and rules return is checked while it is traced, and named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stranger import Bag
from toys import bag

import specjax
from specjax import Rule, Scores, Verdict, trees
from specjax.acceptance import walk
from specjax.drafters import DraftModel, Medusa, Plain
from specjax.drafters.base import ChainDrafter
from specjax.drafters.medusa import MedusaConfig

MODEL, PARAMS = bag(11, 3)
TOKENS, LENGTHS = np.asarray([[1, 2, 3], [4, 5, 0]], np.int32), np.asarray([3, 2])


def traced(target=MODEL, drafter=None, rule="auto", params=None, **settings):
    """Traces ``decode``; nothing is compiled, so what is wrong must be seen before."""
    params = {"target": PARAMS, "drafter": None} if params is None else params
    settings = dict(max_new_tokens=6, key=jax.random.key(0), capacity=12) | settings

    def run(params):
        return specjax.decode(
            target, drafter or Copies(2), params, TOKENS, LENGTHS, rule=rule, **settings
        )

    return jax.eval_shape(run, params)


def target_with(**changes):
    """A target of which some hooks return something else: ``hook(result)``."""

    class Changed(Bag):
        def init(self, *args, **kwargs):
            return changes.get("init", lambda x: x)(super().init(*args, **kwargs))

        def verify(self, *args, **kwargs):
            return changes.get("verify", lambda x: x)(super().verify(*args, **kwargs))

        def commit(self, *args, **kwargs):
            return changes.get("commit", lambda x: x)(super().commit(*args, **kwargs))

    return Changed(11)


def scores_with(change, **fields):
    """Changes fields of the scores, where they are there."""

    def changed(scores):
        values = {name: getattr(scores, name) for name in fields}
        if any(value is None for value in values.values()):
            return scores
        return dataclasses.replace(scores, **{name: f(values[name]) for name, f in fields.items()})

    return changed


TARGETS = {
    "logits of one node": (
        dict(verify=scores_with(None, logits=lambda x: x[:, -1:])),
        r"Changed.verify: logits is float32 of shape \[2, 1, 11\]: expected float32 of shape "
        r"\[2, 3, 11\]",
    ),
    "half logits": (
        dict(verify=scores_with(None, logits=lambda x: x.astype(jnp.bfloat16))),
        r"verify: logits is bfloat16 of shape \[2, 1, 11\]: expected float32",
    ),
    "logits of other tokens": (
        dict(verify=scores_with(None, logits=lambda x: x[..., :7])),
        r"expected float32 of shape \[2, 1, 11\]",
    ),
    "entries that lead with nodes": (
        dict(verify=scores_with(None, entries=lambda x: jnp.moveaxis(x, 0, 2))),
        "verify: entries.*every leaf must lead with the batch, 2 rows",
    ),
    "entries of one node": (
        dict(verify=scores_with(None, entries=lambda x: x[:, :, -1:])),
        "the entries are those of 1 nodes, and a path has up to 3: verify returns the entries of",
    ),
    "no Scores": (dict(verify=lambda scores: scores.entries), "expected specjax.Scores"),
    "a cache without rows": (
        dict(init=lambda x: x[0]),
        "init: the cache.*every leaf must lead with the batch",
    ),
    "a cache of another dtype": (
        dict(commit=lambda x: x.astype(jnp.bfloat16)),
        "commit: the cache is bfloat16 of shape .*expected what it was before, float32",
    ),
    "a cache of another structure": (
        dict(commit=lambda x: (x, x)),
        "commit: the cache has the structure",
    ),
}


@pytest.mark.parametrize("case", TARGETS)
def test_what_a_target_returns_is_checked_when_it_is_traced(case):
    changes, words = TARGETS[case]
    with pytest.raises(ValueError, match=words):
        traced(target_with(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        dict(verify=scores_with(None, entries=lambda x: x.astype(jnp.bfloat16))),
        dict(
            init=lambda x: x.astype(jnp.bfloat16),
            verify=scores_with(None, entries=lambda x: x.astype(jnp.float32)),
        ),
        dict(verify=scores_with(None, entries=lambda x: jnp.concatenate([x, x], axis=2))),
    ],
    ids=["of fewer bits", "of more bits than the cache", "two for each node"],
)
def test_entries_are_the_targets_own_affair(changes):
    assert traced(target_with(**changes)).tokens.shape == (2, 12)


def test_features_that_a_drafter_reads_are_checked():
    drafter = Medusa(
        config=MedusaConfig(hidden_size=6, vocab_size=11, num_heads=2, num_layers=1), target=MODEL
    )
    weights = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), drafter.shapes)

    class Featureless(type(MODEL)):
        def verify(self, *args, **kwargs):
            return dataclasses.replace(super().verify(*args, **kwargs), features=None)

    with pytest.raises(ValueError, match=r"verify: features is None: expected a floating dtype"):
        traced(Featureless(11), drafter, params={"target": PARAMS, "drafter": weights})


@dataclasses.dataclass(frozen=True)
class Copies(ChainDrafter):
    """Drafts the root again; what it returns can be changed."""

    change: object = None

    def init(self, params, target_params, batch, capacity, inputs=None):
        return jnp.zeros((batch,), jnp.int32)

    def draft_step(self, params, target_params, state, context):
        tokens = jnp.repeat(context.root[:, None], self.num_draft, axis=1)
        made = trees.chain_draft(context, tokens), state
        return made if self.change is None else self.change(*made)


def draft_with(**fields):
    return lambda draft, state: (
        dataclasses.replace(draft, **{name: f(draft) for name, f in fields.items()}),
        state,
    )


DRAFTS = {
    "two tokens for three": (
        lambda draft, state: (trees.narrow(draft, 2), state),
        r"Copies.draft_step: draft.tokens is int32 of shape \[2, 2\]: expected int32 of shape "
        r"\[2, 3\] \(the root and num_draft=2 tokens\)",
    ),
    "float tokens": (
        draft_with(tokens=lambda d: d.tokens.astype(jnp.float32)),
        "draft.tokens is float32",
    ),
    "a draft alone": (lambda draft, state: draft, r"expected \(draft, state\)"),
    "no draft": (
        lambda draft, state: (None, state),
        r"returned a tuple of 2 \(None, int32 of shape \[2\]\): expected \(draft, state\)",
    ),
    "candidates as numbers": (
        draft_with(candidate=lambda d: jnp.ones(d.tokens.shape, jnp.int32)),
        "draft.candidate is int32 of shape .*expected bool",
    ),
    "scores of other nodes": (
        draft_with(scored=lambda d: jnp.ones((2, 2), bool)),
        r"draft.scored is bool of shape \[2, 2\]",
    ),
    "laws without their rows": (
        draft_with(laws=lambda d: jnp.ones((2, 2, 11))),
        "draft.law is None, draft.laws is float32",
    ),
    "laws of another vocabulary": (
        draft_with(
            laws=lambda d: jnp.ones((2, 2, 7)), law=lambda d: jnp.zeros(d.tokens.shape, jnp.int32)
        ),
        r"draft.laws is float32 of shape \[2, 2, 7\]: expected float32 of shape \[2, any, 11\]",
    ),
    "draws of no kind": (draft_with(draws=lambda d: "some"), "draft.draws='some'"),
    "a topology of other nodes": (
        draft_with(topology=lambda d: (-1, 0)),
        "give one of them, for 3 nodes",
    ),
}


@pytest.mark.parametrize("case", DRAFTS)
def test_what_a_drafter_drafts_is_checked_when_it_is_traced(case):
    change, words = DRAFTS[case]
    with pytest.raises(ValueError, match=words):
        traced(drafter=Copies(2, change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.astype(jnp.float32), r"float32 of shape \[2, 2\]: expected int32"),
        (lambda x: x.astype(jnp.int16), "int16 of shape"),
        (lambda x: x[:, 0], r"int32 of shape \[2\]: expected int32 of shape \[2, N - 1\]"),
    ],
)
def test_drafted_tokens_of_another_shape_or_dtype_are_refused(change, words):
    class Changes(ChainDrafter):
        def draft_step(self, params, target_params, state, context):
            tokens = jnp.repeat(context.root[:, None], self.num_draft, axis=1)
            return trees.chain_draft(context, change(tokens)), state

    with pytest.raises(ValueError, match=f"chain_draft: tokens is {words}"):
        traced(drafter=Changes(2))


def test_objects_that_no_program_can_be_made_of_are_refused():
    class Endless(specjax.Drafter):
        draft_step = Copies.draft_step

    @dataclasses.dataclass
    class Thawed(Endless):
        num_draft: int = 2

    with pytest.raises(TypeError, match="drafter: its type Thawed cannot be hashed .*frozen=True"):
        traced(drafter=Thawed())

    @dataclasses.dataclass
    class Molten(Rule):
        least: float = 0.5
        name, lossless, __call__ = "molten", True, lambda *given: None

    with pytest.raises(TypeError, match="rule: its type Molten cannot be hashed .*frozen=True"):
        traced(rule=Molten())
    with pytest.raises(TypeError, match="Endless.num_draft is None: state how many"):
        traced(drafter=Endless())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_may_end_in_passengers_that_are_deeper_than_its_candidates(temperature):
    class Rides(Copies):
        depth, num_passengers, reads_nodes = 2, 1, True

        def draft_step(self, params, target_params, state, context):
            tokens = jnp.repeat(context.root[:, None], 3, axis=1)
            able = jnp.broadcast_to(jnp.arange(3) < 2, tokens.shape)
            parents = trees.chain_parents(3)
            return trees.tree_draft(context, tokens, parents, candidate=able, deepest=2), state

    sampling = specjax.Sampling(temperature=temperature)
    assert traced(drafter=Rides(3), sampling=sampling).tokens.shape == (2, 12)


def test_a_draft_deeper_than_its_drafter_says_is_refused():
    class Shallow(Copies):
        depth = 1

    with pytest.raises(ValueError, match="the draft is 2 deep, and Shallow.depth is 1"):
        traced(drafter=Shallow(2))


def test_a_drafters_state_keeps_its_structure():
    class Grows(Copies):
        def observe(self, params, target_params, state, segment):
            return state if segment.round is None else (state, state)

    class Widens(Copies):
        def observe(self, params, target_params, state, segment):
            return state.astype(jnp.float32)

    with pytest.raises(ValueError, match="Grows.observe: the state has the structure"):
        traced(drafter=Grows(2))
    with pytest.raises(ValueError, match="Widens.observe: the state is float32"):
        traced(drafter=Widens(2))


@dataclasses.dataclass(frozen=True)
class Odd(Rule):
    """Accepts nothing, in verdicts of another shape."""

    change: object = None
    name, lossless = "approximate-odd", False

    def __call__(self, params, draft, target_law, draft_law, key):
        batch = draft.tokens.shape[0]
        zeros = jnp.zeros((batch,), jnp.int32)
        path = jnp.zeros((batch, trees.max_depth(draft) + 1), jnp.int32)
        return self.change(Verdict(path=path, count=zeros, token=zeros))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: dataclasses.replace(v, path=v.path[:, :1]), r"Odd.__call__: path is int32"),
        (lambda v: dataclasses.replace(v, token=v.token + 0.5), "token is float32"),
        (lambda v: dataclasses.replace(v, count=v.count[0]), r"count is int32 of shape \[\]"),
        (lambda v: v.path, "expected specjax.Verdict"),
    ],
)
def test_what_a_rule_returns_is_checked_when_it_is_traced(change, words):
    with pytest.raises(ValueError, match=words):
        traced(rule=Odd(change))


class FloatToken(Odd):
    def __call__(self, params, draft, target_law, draft_law, key):
        zeros = jnp.zeros((draft.tokens.shape[0],), jnp.int32)
        return walk.verdict(draft, zeros, zeros + 0.5)


class Unnamed(Odd):
    name = "odd"


def test_a_token_of_another_dtype_and_an_approximation_without_the_name_are_refused():
    with pytest.raises(ValueError, match="walk.verdict: token is float32: expected int32"):
        traced(rule=FloatToken())
    with pytest.raises(ValueError, match="rule='odd' has lossless=False.*'approximate' into"):
        traced(rule=Unnamed(lambda verdict: verdict))


def test_an_object_without_its_base_class_is_refused_by_name():
    class Lookalike:
        vocab_size = 11

    with pytest.raises(
        TypeError, match="target has the type Lookalike, .*no subclass of specjax.Target"
    ):
        traced(Lookalike())
    with pytest.raises(TypeError, match="drafter has the type Lookalike, .*specjax.Drafter"):
        traced(drafter=Lookalike())
    loaded = specjax.LM.of(MODEL, PARAMS)
    with pytest.raises(
        TypeError, match=r"target has the type LM, .*give lm.target.*specjax.generate"
    ):
        traced(loaded)
    with pytest.raises(TypeError, match=r"'ngram' is a name.*specjax.drafters.NGram\(\)"):
        traced(drafter="ngram")
    with pytest.raises(TypeError, match="drafter=Plain is a class"):
        traced(drafter=Plain)
    with pytest.raises(TypeError, match="rule=.*specjax.Rule"):
        traced(rule=object())
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (specjax.Target,), {"init": lambda self: None})()


def test_missing_weights_are_named():
    with pytest.raises(ValueError, match="is missing, and the drafter 'draft'"):
        traced(drafter=DraftModel(2, model=MODEL), params={"target": PARAMS})
    with pytest.raises(ValueError, match=r"params\['target'\] is None, and the target Readable"):
        traced(params={"target": None})
    with pytest.raises(ValueError, match="give a dict with 'target'"):
        traced(params={"drafter": None})
    traced(drafter=Copies(2), params={"target": PARAMS})  # which has none


def test_too_many_new_tokens_are_refused():
    with pytest.raises(ValueError, match=r"must be below 2\*\*31"):
        traced(max_new_tokens=2**40)


def test_a_buffer_that_ends_rows_early_is_said():
    with pytest.warns(UserWarning, match="capacity=5 .* give at least 9"):
        traced(capacity=5)


def test_right_scores_pass():
    assert isinstance(traced(), specjax.Decoded) and Scores is specjax.Scores
