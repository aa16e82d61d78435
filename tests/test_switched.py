"""Sublayers that an array leaves out of a draft: what is computed, and that no program changes."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_self_draft import CONFIGS, LAYERS, LENGTHS, PROMPT, decode, model, part_logits

from specjax import trees
from specjax.decoding import reference
from specjax.drafters import SwitchedSelfDraft
from specjax.drafters.confidence_stop import ConfidenceStop
from specjax.models import gates
from specjax.models.causal_lm import CausalLM
from specjax.models.seq2seq.target import Seq2SeqLM
from specjax.models.sub_network import SwitchedPart, skipped_by, switches_of
from specjax.types import Draft

pytestmark = pytest.mark.usefixtures("quick_compilation")
SETS = ((), ("attention.1", "mlp.2"), ("attention.0", "mlp.0", "attention.3"))


def program(target, params):
    """A compiled program that returns a part's logits over whole texts, given its switches."""
    batch, size = PROMPT.shape
    start = jnp.zeros((batch,), jnp.int32)
    draft = Draft(start=start, tokens=PROMPT, topology=trees.chain_parents(size - 1))

    @jax.jit
    def run(params, switches):
        cache = target.init(params, batch, size)
        return SwitchedPart(target).verify((params, switches), cache, draft).logits

    return lambda params, skip: np.asarray(run(params, switches_of(target, skip)))


def broken(params, skip):
    """Weights whose skipped sublayers are not numbers."""
    flat, leaves = nnx.to_flat_state(params), []
    for path, x in flat:
        words = [str(word) for word in path]
        hit = any(words[:1] == ["blocks"] and s == f"{words[2]}.{words[1]}" for s in skip)
        leaves.append((path, jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), x) if hit else x))
    made = nnx.from_flat_state(leaves)
    assert not all(np.isfinite(x).all() for x in jax.tree.leaves(made))
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_switches_leave_out_what_the_part_leaves_out_and_compute_none_of_it(name):
    target, params = model(name)
    run = program(target, params)
    for skip in SETS[1:]:
        found = run(broken(params, skip), skip)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, part_logits(target, params, skip=skip), atol=3e-4)


def test_fault_a_sublayer_that_runs_in_spite_of_its_switch_is_seen(monkeypatch):
    target, params = model("llama")
    skip = SETS[1]
    right = part_logits(target, params, skip=skip)
    np.testing.assert_allclose(
        program(target, params)(broken(params, skip), skip), right, atol=3e-4
    )
    monkeypatch.setattr(gates, "_leave", lambda x, sublayer: gates._run(x, sublayer, None))
    wrong = program(type("Own", (CausalLM,), {})(target.config), params)
    assert np.abs(wrong(params, skip) - right).max() > 0.1


@pytest.mark.usefixtures("one_trace")
def test_one_program_serves_all_sets_and_the_text_is_the_targets_greedy_one():
    target, params = model("llama")
    target = type("Unseen", (CausalLM,), {})(target.config)
    drafter = SwitchedSelfDraft(num_draft=3, target=target, stop=ConfidenceStop(threshold=0.2))
    accepted = []
    for skip in SETS:
        out = decode(target, drafter, {"target": params, "drafter": drafter.params_of(skip)})
        said = np.argmax(reference.logits(target, params, out.tokens), axis=-1)
        for row, (begin, end) in enumerate(zip(LENGTHS, np.asarray(out.lengths), strict=True)):
            text = np.asarray(out.tokens)[row]
            np.testing.assert_array_equal(text[begin:end], said[row, begin - 1 : end - 1])
        accepted.append((np.asarray(out.stats.accepted), np.asarray(out.stats.drafted)))
    assert (accepted[0][0] == accepted[0][1]).all()  # the whole target agrees with itself
    assert (accepted[2][0] < accepted[2][1]).any()


def test_sets_and_switches_stand_for_each_other_and_impossible_ones_are_refused():
    target, _ = model("llama")
    for skip in SETS:
        assert set(skipped_by(switches_of(target, skip))) == set(skip)
    drafter = SwitchedSelfDraft(target=target)
    for skip, words in (("0-3", "all 8 sublayers"), ("mlp.4", "no layer 4"), ("x", "no sublayer")):
        with pytest.raises(ValueError, match=words):
            drafter.params_of(skip)
    assert drafter.params_of()["switches"].shape == (LAYERS, 2)
    with pytest.raises(ValueError, match="needs the target"):
        SwitchedSelfDraft()
    with pytest.raises(ValueError, match="confidence stops chains"):
        SwitchedSelfDraft(target=target, stop=ConfidenceStop(), topology=trees.branching(2, 1))
    with pytest.raises(ValueError, match="cross-attention"):
        SwitchedSelfDraft(target=Seq2SeqLM(SimpleNamespace(model_type="t5")))

    class Older(CausalLM):
        def sub_network(self, *, exit=None, skip=()):
            raise AssertionError

    with pytest.raises(ValueError, match="takes no switches"):
        SwitchedSelfDraft(target=Older(target.config))
    with pytest.raises(ValueError, match="no hidden states"):
        SwitchedPart(target).verify((None, None), None, None, features=(1,))
    assert dataclasses.replace(drafter, num_draft=2, topology=None).num_draft == 2
