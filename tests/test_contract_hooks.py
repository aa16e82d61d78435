"""What the less frequent hooks return is checked while it is traced, too, and named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_contract import MODEL, PARAMS, TOKENS, Copies, scores_with, target_with, traced
from toys import Readable

import specjax
from specjax.acceptance.rejection import Rejection
from specjax.decoding import contract_checks, prefill
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Adaptive, DraftModel, Hybrid, Medusa, SelfDraft, Synthetic, Union
from specjax.drafters.medusa import MedusaConfig
from specjax.tracing import record
from specjax.types import SubNetwork

BOTH = {"target": PARAMS, "drafter": PARAMS}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(verify=scores_with(None, logits=lambda x: x.astype(jnp.bfloat16))),
            r"Changed.verify: logits is bfloat16 of shape \[2, 2, 11\]: expected float32",
        ),
        (dict(verify=lambda scores: scores.logits), "Changed.verify returned .*specjax.Scores"),
        (
            dict(commit=lambda x: x.astype(jnp.bfloat16)),
            "Changed.commit: the cache is bfloat16 .*expected what it was before, float32",
        ),
    ],
)
def test_the_passes_of_a_draft_model_are_checked(changes, words):
    with pytest.raises(ValueError, match=words):
        traced(drafter=DraftModel(2, model=target_with(**changes)), params=BOTH)


@dataclasses.dataclass(frozen=True)
class ChangedPart(SubNetwork):
    """A part of which ``verify`` returns something else."""

    part: object
    change: object
    hands_over: bool = True

    def verify(self, *args, **settings):
        return self.change(self.part.verify(*args, **settings))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            scores_with(None, logits=lambda x: x[..., :7]),
            r"ChangedPart.verify: logits is float32 of shape \[2, 1, 7\]: expected float32 of "
            r"shape \[2, 1, 11\]",
        ),
        (
            scores_with(None, entries=lambda x: jax.tree.map(lambda leaf: leaf[:1], x)),
            "ChangedPart.verify: entries.*must lead with the batch, 2 rows",
        ),
    ],
)
def test_the_passes_of_a_sub_network_are_checked(change, words):
    class Whole(Readable):
        def sub_network(self, **which):
            return ChangedPart(super().sub_network(**which), change)

    with pytest.raises(ValueError, match=words):
        traced(Whole(11), SelfDraft(2, target=Whole(11), exit=1), params={"target": PARAMS})


def medusa(target):
    config = MedusaConfig(hidden_size=6, vocab_size=11, num_heads=2, num_layers=1)
    drafter = Medusa(config=config, target=target)
    weights = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), drafter.shapes)
    return drafter, {"target": PARAMS, "drafter": weights}


@pytest.mark.parametrize(
    ("hook", "change", "words"),
    [
        ("embed", lambda x: x.T, r"Changed.embed is float32 .*\(hidden_size, batch \* nodes\)"),
        ("head", lambda x: x[..., :7], r"Changed.head is float32 of shape \[2, 2, 7\]: expected"),
        ("head", lambda x: x.astype(jnp.float16), "Changed.head is float16.*expected float32"),
        ("head_table", lambda x: x.T, r"Changed.head_table is .*\[6, 11\].*expected .*\[11, 6\]"),
        (
            "verify",
            scores_with(None, features=lambda x: x[..., :3]),
            r"Changed.verify: features is .*\[2, \d, 3\]: expected a floating dtype of shape "
            r"\[2, \d, 6\] \(of the hidden states \(1,\)",
        ),
    ],
)
def test_what_heads_read_of_a_target_is_checked(hook, change, words):
    class Whole(Readable):
        hidden_size = 6

        def head_table(self, params):
            return params["out"].T

    def changed(self, *args, **settings):
        return change(getattr(Whole, hook)(self, *args, **settings))

    drafter, params = medusa(Whole(11))
    traced(Whole(11), drafter, params=params)
    wrong = type("Changed", (Whole,), {hook: changed})(11)
    with pytest.raises(ValueError, match=words):
        traced(wrong, medusa(wrong)[0], params=params)


class Plans(Copies):
    """Drafts in every round, and may be told to return something else."""

    plans = can_rest = True

    def plan(self, params, target_params, state, budget):
        return jnp.float32(1)

    def rests(self, plan):
        return plan < 0


class OtherPlans(Plans):
    """Every plan has one number more than the plan before."""

    sizes = iter(range(1, 9))

    def plan(self, params, target_params, state, budget):
        return jnp.zeros(next(self.sizes))

    def rests(self, plan):
        return jnp.all(plan < 0)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (type("Rows", (Plans,), {"rests": lambda self, plan: jnp.zeros(2, bool)}), r"Rows.rests"),
        (type("Counts", (Plans,), {"rests": lambda self, plan: plan}), "rests is float32"),
        (OtherPlans, r"OtherPlans.plan is float32 of shape \[2\]: expected what it was before"),
        (
            type("Silent", (Copies,), {"readout": lambda self, draft, scores: scores.logits}),
            "Silent.readout returned float32 .*reads_nodes is False.*states reads_nodes = True",
        ),
        (
            type(
                "Flat",
                (Copies,),
                {"reads_nodes": True, "readout": lambda self, draft, scores: scores.logits[0]},
            ),
            "Flat.readout.*every leaf must lead with the batch, 2 rows",
        ),
    ],
)
def test_plans_and_readouts_are_checked(drafter, words):
    with pytest.raises(ValueError, match=words):
        traced(drafter=drafter(2))
    traced(drafter=Plans(2))


def test_a_state_that_catches_up_keeps_its_structure():
    class Widens(Copies):
        def sync(self, params, target_params, state, context, *, before="prompt"):
            return state.astype(jnp.float32)

    drafter, params = Widens(2), {"target": PARAMS, "drafter": None}
    request, size = prepare_inputs(
        MODEL, drafter, TOKENS, [3, 2], jax.random.key(0), 4, specjax.Sampling(), 20, ()
    )

    def run(params):
        state = prefill.start(MODEL, drafter, "auto", size, params, request)
        return prefill.extend(MODEL, drafter, "auto", params, state, request)

    with pytest.raises(ValueError, match="Widens.sync: the state is float32"):
        jax.eval_shape(run, params)


def test_the_evidence_of_a_rule_is_checked():
    class Odd(Rejection):
        def evidence(self, params, draft, target_law, draft_law, key):
            return {"u": jnp.zeros(draft.tokens.shape[0])}

    drafter, params = Copies(2), {"target": PARAMS, "drafter": None}
    drawn = specjax.Sampling(temperature=1.0)
    request, size = prepare_inputs(
        MODEL, drafter, TOKENS, [3, 2], jax.random.key(0), 4, drawn, 20, ()
    )

    def run(rule, params):
        state = prefill.start(MODEL, drafter, rule, size, params, request)
        return record.run_recorded_round(MODEL, drafter, rule, params, state)

    jax.eval_shape(lambda params: run(Rejection(), params), params)
    words = r"Odd.evidence: u is float32 of shape \[2\]: expected float32 of shape \[2, 3\]"
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(lambda params: run(Odd(), params), params)


class Placed(Copies):
    """Says of its weights on which mesh they were placed."""

    can_rest = True

    def shard(self, params, mesh):
        return (params, mesh)


@pytest.mark.parametrize(
    "drafter, given, expected",
    [
        (Union(drafters=(Placed(2), Placed(2))), (1, 2), ((1, "mesh"), (2, "mesh"))),
        (
            Synthetic(2, inner=Placed(2)),
            {"truth": 0, "inner": 1},
            {"truth": 0, "inner": (1, "mesh")},
        ),
        (Synthetic(2), {"truth": 0}, {"truth": 0}),
        (Hybrid(inner=Placed(2)), 1, (1, "mesh")),
        (Adaptive(Placed(2)), {"inner": 1}, {"inner": (1, "mesh")}),
    ],
)
def test_the_parts_of_a_drafter_place_their_own_weights(drafter, given, expected):
    assert drafter.shard(given, "mesh") == expected


def test_lacking_weights_are_told_from_other_errors_by_their_class():
    class Breaks(Copies):
        def draft_step(self, params, target_params, state, context):
            raise RuntimeError("NoneType is named here, and has nothing to do with it")

    class Reads(Copies):
        def draft_step(self, params, target_params, state, context):
            return params["weights"], state

    without = {"target": PARAMS, "drafter": None}
    with pytest.raises(RuntimeError, match="nothing to do with it"):
        traced(drafter=Breaks(2), params=without)
    with pytest.raises(contract_checks.MissingWeightsError, match="give params="):
        traced(drafter=Reads(2), params=without)
    with pytest.raises(TypeError):
        traced(drafter=Reads(2), params={"target": PARAMS, "drafter": np.ones(1)[0]})
