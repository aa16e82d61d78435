"""What a round holds and computes over the vocabulary, read from the compiled program.

The working set of a burst is what ``memory_analysis()`` calls temporary: all that the program needs
beside its arguments (weights) and the donated state (caches, tokens). With a large vocabulary it is

    greedy    one float32 [B, N, V]: the logits
    sampled   the same, the drafter's laws [B, N - 1, V], and a few [B, V]: p, q and the residual
              of the node that is being visited

and a remainder that does not grow with V. A product on XLA's CPU backend leaves the logits as
``[V, B N]`` (see ``kernels.xla_cpu``), and turning them is a second copy; the C++ kernel of
``specjax.kernels`` writes them as they are read, and so do GPUs and TPUs.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend import core

import specjax
from specjax import Sampling, acceptance, kernels, sharding, trees
from specjax.acceptance.node_laws import TargetLaw
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.round import widths
from specjax.drafters import DraftModel, NGram, Plain, SelfDraft
from specjax.kernels.cpu import library
from specjax.kernels.cpu.backend import CpuBackend
from specjax.models import quantize
from specjax.models.causal_lm import CausalLM
from specjax.models.config import DecoderConfig
from specjax.models.decoder import abstract
from specjax.models.placement import place_weights
from specjax.sampling.drawing import argmax
from specjax.types import Context

BATCH, DRAFTED, VOCAB, SLOTS = 3, 7, 4096, 48
NODES = DRAFTED + 1
REST = 0.25  # of one [B, N, V]: all that does not grow with V, in so small a model
FEW = 4  # [B, V] buffers: p, q, the residual, one in flight


def decoder(vocab):
    """A tiny decoder with a large vocabulary."""
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
    )


def lower(name, temperature, vocab=VOCAB, nodes=NODES, rule="auto", logprobs=False, **settings):
    """The burst of a tiny decoder, traced."""
    config = decoder(vocab)
    target = CausalLM(config)
    drafters = {
        "plain": lambda: Plain(),
        "draft": lambda: DraftModel(num_draft=nodes - 1, model=target),
        "ngram": lambda: NGram(num_draft=nodes - 1),
        "self": lambda: SelfDraft(num_draft=nodes - 1, target=target, skip="mlp.0"),
    }
    drafter, weights = drafters[name](), abstract(config)[1]
    params = {"target": weights, "drafter": weights if name == "draft" else None}
    request, capacity = prepare_inputs(
        target,
        drafter,
        np.ones((BATCH, 8), np.int32),
        np.full(BATCH, 8, np.int32),
        jax.random.key(0),
        30,
        Sampling(temperature=temperature, **settings),
        SLOTS,
        (),
        logprobs=logprobs,
    )
    objects = target, drafter, rule
    state = loop.jit_start.eval_shape(*objects, capacity, params, request)
    return loop.jit_burst.trace(*objects, 10, params, state)


def buffers(traced, vocab=VOCAB) -> float:
    """The working set of the compiled program, in float32 ``[B, N, V]``."""
    temp = traced.lower().compile().memory_analysis().temp_size_in_bytes
    return temp / (4 * BATCH * NODES * vocab)


def test_beside_its_working_set_a_burst_holds_the_weights_and_one_copy_of_the_caches():
    memory = lower("draft", 0, 523).lower().compile().memory_analysis()
    weights = jax.tree.leaves(abstract(decoder(523))[1])
    target_and_drafter = 2 * sum(4 * leaf.size for leaf in weights)
    caches = 2 * 2 * 4 * BATCH * 2 * SLOTS * 8  # target and drafter, keys and values
    rest = 4096  # tokens, lengths, counters
    arguments = memory.argument_size_in_bytes
    assert target_and_drafter + caches < arguments < target_and_drafter + caches + rest
    assert memory.alias_size_in_bytes > caches  # given back in the same buffers
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < rest


def test_a_target_that_drafts_for_itself_holds_its_weights_and_one_cache():
    """What a program is given and gives back is that of plain decoding."""
    own, plain = (
        lower(name, 0, 523).lower().compile().memory_analysis() for name in ("self", "plain")
    )
    counters = 8 * BATCH * DRAFTED  # what was drafted and accepted at each depth
    for size in ("argument", "alias", "output"):
        found, least = (getattr(x, f"{size}_size_in_bytes") for x in (own, plain))
        assert least <= found <= least + counters, size


CASES = [("ngram", 0, 1), ("draft", 0, 1), ("ngram", 1.0, 1), ("draft", 1.0, 2 - 1 / NODES)]
IDS = ["ngram, greedy", "draft, greedy", "ngram, sampled", "draft, sampled"]


@pytest.mark.parametrize(("name", "temperature", "wanted"), CASES, ids=IDS)
def test_one_buffer_of_logits_when_greedy_and_the_drafters_laws_when_sampled(
    name, temperature, wanted
):
    turned = 1  # the tests run on several devices, where the kernels are not used
    few = FEW / NODES if temperature else 0
    assert buffers(lower(name, temperature)) < wanted + turned + few + REST


@pytest.mark.skipif(library.register() is not None, reason="no kernels")
@pytest.mark.parametrize(("name", "temperature", "wanted"), CASES, ids=IDS)
def test_with_the_kernels_logits_are_not_turned(name, temperature, wanted, monkeypatch):
    monkeypatch.setattr(kernels, "current", lambda mesh=None: CpuBackend())
    vocab = VOCAB + 64  # so that no other test's trace is taken
    few = FEW / NODES if temperature else 0
    assert buffers(lower(name, temperature, vocab), vocab) < wanted + few + REST


def test_a_softmax_over_all_nodes_is_seen_as_a_further_buffer(monkeypatch):
    def wasteful(law):
        whole = jax.nn.softmax(law.logits) * 2
        return law.logits + jnp.cumsum(whole, axis=-1)[..., ::-1]

    monkeypatch.setattr(TargetLaw, "adjusted", wasteful)
    vocab = VOCAB - 64
    assert buffers(lower("ngram", 0, vocab), vocab) > 2 + REST


# ------------------------------------------------------------------- what is computed over V


def equations(jaxpr):
    """All equations of a program, those of inner ones included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner)


def over_vocabulary(traced, names, vocab):
    """Output shapes of the primitives ``names`` that touch an axis of size ``vocab``."""
    return [
        equation.outvars[0].aval.shape
        for equation in equations(traced.jaxpr.jaxpr)
        if equation.primitive.name in names
        and any(vocab in getattr(v.aval, "shape", ()) for v in equation.invars)
    ]


SOFTMAX = {"exp", "exp2", "log", "log1p", "logistic"}
SORTS = {"sort", "top_k", "approx_top_k"}
V = 523  # no other axis has this size
EVERYTHING = dict(top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1)


@pytest.mark.parametrize("name", ["plain", "draft", "ngram"])
def test_a_greedy_round_forms_no_softmax_over_the_vocabulary(name):
    traced = lower(name, 0, V, repetition_penalty=1.1)
    assert not over_vocabulary(traced, SOFTMAX | SORTS, V)
    assert over_vocabulary(lower(name, 1.0, V), SOFTMAX, V)  # as a sampled one does


@pytest.mark.parametrize(("name", "rule"), [("draft", "rejection"), ("ngram", "delta")])
def test_a_sampled_round_neither_sorts_the_vocabulary_nor_warps_all_nodes_at_once(name, rule):
    traced = lower(name, 1.0, V, rule=rule, **EVERYTHING)
    assert not over_vocabulary(traced, SORTS | {"cumsum"}, V)
    shapes = over_vocabulary(traced, SOFTMAX, V)
    assert shapes and set(shapes) == {(BATCH, V)}


@pytest.mark.parametrize("nodes", [3, 9])
def test_softmaxes_of_a_rule_do_not_multiply_with_the_nodes(nodes):
    """One in the loop over visited nodes, at most one before it; the rest is drafting. An n-gram
    draft has a loop for each width, of which one runs."""
    for name, rule, most in (
        ("draft", "rejection", 2),
        ("draft", "delta", 1),
        ("ngram", "delta", len(widths(nodes))),
    ):
        drafted = nodes - 1 if name == "draft" else 0
        traced = lower(name, 1.0, V, nodes=nodes, rule=rule)
        assert len(over_vocabulary(traced, SOFTMAX, V)) <= drafted + most, (name, rule)


@dataclasses.dataclass
class Counting:
    """A law that counts, when the program runs, how often it is asked."""

    law: TargetLaw
    asked: list

    def __call__(self, node):
        jax.debug.callback(lambda: self.asked.append(1))
        return self.law(node)


@functools.cache
def jit_judge(rule):
    """A program that judges a chain int32 ``[1, 12]`` below token 1, which the target says for
    certain everywhere, and a list that grows whenever the program asks the law."""
    asked = []
    return jax.jit(functools.partial(judged, rule, asked)), asked


def judged(rule, asked, tokens):
    context = Context(
        tokens=jnp.ones((1, 4), jnp.int32),
        length=jnp.asarray([1]),
        budget=jnp.asarray([20]),
        key=jax.random.split(jax.random.key(0), 1),
        sampling=Sampling(temperature=1.0).rows(1),
    )
    draft = trees.chain_draft(context, tokens)
    logits = jnp.full((1, 13, 5), -1e30).at[..., 1].set(0.0)
    law = Counting(TargetLaw(draft, logits, context), asked)
    q = acceptance.node_laws.DraftLaw(draft, 5)
    return acceptance.RULES[rule]({}, draft, law, q, context.key).count


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", ["rejection", "delta"])
def test_the_law_is_asked_at_visited_nodes_only(rule, kept):
    """A chain of 12 of which ``kept`` can be accepted."""
    tokens = np.full((1, 12), 1, np.int32)
    tokens[0, kept:] = 2
    run, asked = jit_judge(rule)
    asked.clear()
    count = int(run(tokens)[0])
    jax.effects_barrier()
    assert count == kept and asked
    assert len(asked) <= kept + 2


# ------------------------------------------------------------------- the argmax of greedy rounds


@pytest.mark.parametrize("size", [1, 7, 64, 523, 1000])
def test_argmax_is_the_first_maximum(size):
    x = np.round(np.random.default_rng(size).normal(size=(4, 3, size)), 1).astype(np.float32)
    x[0, 0] = 2.0  # all alike
    np.testing.assert_array_equal(jax.jit(argmax)(x), x.argmax(axis=-1))
    x[0, 1], x[1, 1] = -np.inf, np.nan
    assert np.asarray(argmax(x))[[0, 1], 1].tolist() == [-1, -1]


def test_argmax_holds_nothing_of_the_size_of_its_argument():
    x = jax.ShapeDtypeStruct((8, 32_000), jnp.float32)
    temp = jax.jit(argmax).lower(x).compile().memory_analysis().temp_size_in_bytes
    assert temp < 4 * 8 * 32_000 / 20


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_the_plan_of_a_quantized_model_counts_the_bytes_that_quantization_leaves(scheme):
    pytest.importorskip("qwix")
    config = decoder(523)
    flat = nnx.to_flat_state(abstract(config)[1])
    stored = [
        quantize.encode(".".join(map(str, path)), jnp.zeros(x.shape), scheme, jnp.float32)
        for path, x in flat
    ]
    there = sum(leaf.nbytes for leaf in jax.tree.leaves(stored))
    plan = specjax.plan_memory(config, dtype="float32", quantize=scheme)
    assert plan.context == config.max_positions  # the default is 8,192, but no model reads beyond
    with pytest.raises(ValueError, match=f"reads at most {config.max_positions} tokens"):
        specjax.plan_memory(config, context=config.max_positions + 1)
    assert plan.models[0].weights == there
    mesh = sharding.as_mesh("model=2")
    paths = [path for path, _ in flat]
    spread = place_weights(
        nnx.from_flat_state([(p, nnx.Param(x)) for p, x in zip(paths, stored, strict=True)]),
        config,
        mesh,
        "model",
    )
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(spread))
    shared = specjax.plan_memory(config, dtype="float32", quantize=scheme, mesh="model=2")
    assert shared.models[0].weights_each == held
