"""A part of the target that drafts: what it computes, what it hands over, what it refuses."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_decoder import GPT2, LATENT, LLAMA, MIXED

import specjax
from specjax import Sampling, trees
from specjax.decoding import prefill, reference, round
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Adaptive, Plain, SelfDraft
from specjax.models.causal_lm import CausalLM
from specjax.models.decoder import Decoder
from specjax.models.seq2seq.target import Seq2SeqLM
from specjax.models.sub_network import DecoderPart, PartialEntries, skipped_sublayers
from specjax.types import Draft

pytestmark = pytest.mark.usefixtures("quick_compilation")
LAYERS = 4
LOCAL = dict(window=6, local_layers=(True, False, True, True), sandwich_norms=True)
OWN = {
    "llama": (LLAMA, {}),
    "gpt2": (GPT2, dict(parallel_residual=True)),
    "experts": (MIXED, {}),
    "latents": (LATENT, {}),
    "windows": (LLAMA, LOCAL),
}
CONFIGS = {
    name: dataclasses.replace(config, num_layers=LAYERS, **own)
    for name, (config, own) in OWN.items()
}
PROMPT = np.random.default_rng(0).integers(0, 67, (2, 11)).astype(np.int32)
LENGTHS = np.asarray([11, 5], np.int32)
TREE = (-1, 0, 0, 1, 1, 2)


@functools.cache
def model(name):
    config = CONFIGS[name]
    params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))[1]
    return CausalLM(config), jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, params)


def begun(target, drafter, params, sampling=Sampling(), num=12):
    """The state after the prompt was read."""
    request, capacity = prepare_inputs(
        target, drafter, PROMPT, LENGTHS, jax.random.key(0), num, sampling, None, ()
    )
    return prefill.start(target, drafter, "auto", capacity, params, request)


def decode(target, drafter, params, **settings):
    settings = dict(key=jax.random.key(0), max_new_tokens=12) | settings
    return specjax.decode(target, drafter, params, PROMPT, LENGTHS, **settings)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_exit_says_what_a_model_of_the_first_layers_says(name):
    target, params = model(name)
    config = target.config
    local = config.local_layers and config.local_layers[:2]
    first = CausalLM(dataclasses.replace(config, num_layers=2, local_layers=local))
    cut = nnx.State(dict(params) | {"blocks": nnx.State({i: params["blocks"][i] for i in (0, 1)})})
    found = part_logits(target, params, exit=2)
    np.testing.assert_allclose(found, reference.logits(first, cut, PROMPT), atol=3e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_sublayer_that_is_left_out_adds_nothing(name):
    """As in a model whose sublayer ends in a product with zeros."""
    target, params = model(name)
    out = {"attention.1": ("attention", "o"), "mlp.2": ("mlp", "down")}
    flat = nnx.to_flat_state(params)
    changed = []
    for path, x in flat:
        words = [str(p) for p in path]
        for sublayer, (kind, last) in out.items():
            layer = sublayer.partition(".")[2]
            if words[:3] == ["blocks", layer, kind] and (last in words or "bias" in words):
                x = jax.tree.map(jnp.zeros_like, x)
        changed.append((path, x))
    silenced = nnx.from_flat_state(changed)
    found = part_logits(target, params, skip=tuple(out))
    wanted = reference.logits(target, silenced, PROMPT)
    np.testing.assert_allclose(found, wanted, atol=3e-4)
    assert np.abs(found - reference.logits(target, params, PROMPT)).max() > 0.1


def part_logits(target, params, **which):
    """Logits of a part of a model over whole texts, without a committed prefix."""
    part = target.sub_network(**which)
    batch, size = PROMPT.shape
    start = jnp.zeros((batch,), jnp.int32)
    draft = Draft(start=start, tokens=PROMPT, topology=trees.chain_parents(size - 1))

    @jax.jit
    def run(params):
        return part.verify(params, target.init(params, batch, size), draft).logits

    return np.asarray(run(params))


# ------------------------------------------------------------------- what is handed over


def shapes(target):
    """Drafters of every shape of draft that hands over, and their narrower rounds."""
    tree, grown = trees.Tree(TREE), trees.Expand(2, 3, 6)
    common = dict(target=target, exit=2)
    return {
        "chain": (SelfDraft(num_draft=3, **common), None),
        "tree": (SelfDraft(topology=tree, sibling_sampling="top", **common), None),
        "grown": (SelfDraft(topology=grown, **common), None),
        "skip": (SelfDraft(num_draft=3, target=target, skip="attention.1,mlp.3"), None),
        "narrow chain": (SelfDraft(num_draft=4, **common), 2),
        "resting chain": (SelfDraft(num_draft=4, **common), 0),
        "narrow tree": (SelfDraft(topology=tree, sibling_sampling="top", **common), 1),
    }


def passes(target, drafter, width, params):
    """The scores of the target's pass over one draft: as it goes on from what was handed over,
    and anew; and which nodes are scored."""
    state = begun(target, drafter, params)

    @jax.jit
    def both(params, state):
        context = round.round_context(params, state)
        if width is not None:
            context = dataclasses.replace(context, width=jnp.int32(width))
        draft, _ = round.draft_step(drafter, params, state.drafter_state, context)
        assert draft.partial is not None
        anew = dataclasses.replace(draft, partial=None)
        scored = jnp.ones(draft.tokens.shape, bool) if draft.scored is None else draft.scored
        runs = [target.verify(params["target"], state.cache, d) for d in (draft, anew)]
        return *runs, scored

    return both(params, state)


def furthest(resumed, anew, scored):
    """The greatest difference of logits and of entries, at nodes that are scored."""
    at = [np.where(scored[..., None], r - a, 0) for r, a in [(resumed.logits, anew.logits)]]
    pairs = zip(jax.tree.leaves(resumed.entries), jax.tree.leaves(anew.entries), strict=True)
    at += [np.where(scored[:, None, :, None], r - a, 0) for r, a in pairs]
    return max(np.abs(x).max() for x in at)


CASES = [("llama", shape) for shape in shapes(CausalLM(CONFIGS["llama"]))]
CASES += [(name, shape) for name in CONFIGS if name != "llama" for shape in ("tree",)]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_the_target_goes_on_from_what_was_handed_over_as_it_would_anew(name, shape):
    target, params = model(name)
    found = passes(target, *shapes(target)[shape], {"target": params})
    assert furthest(*found) < 3e-4


FAULTS = {
    "states that no layer computed": lambda self, own, place: dataclasses.replace(
        own, states=own.states + 0.1 * jnp.roll(own.states, 1, axis=2)
    ),
    "the entries of other nodes": lambda self, own, place: dataclasses.replace(
        own, layers=jax.tree.map(lambda x: jnp.roll(x, 1, axis=2), own.layers)
    ),
    "the states of other nodes": lambda self, own, place: dataclasses.replace(
        own, states=jnp.roll(own.states, 1, axis=1)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_what_is_handed_over_wrongly_is_seen_in_the_pass_and_in_the_text(fault, monkeypatch):
    class Own(CausalLM):
        """Of this test alone, whose programs are wrong."""

    _, params = model("llama")
    target, right = Own(CONFIGS["llama"]), PartialEntries.of_nodes

    def wrong(self, place, num_nodes):
        return FAULTS[fault](self, right(self, place, num_nodes), place)

    monkeypatch.setattr(PartialEntries, "of_nodes", wrong)
    drafter = SelfDraft(num_draft=3, target=target, exit=3)
    params = {"target": params}
    assert furthest(*passes(target, drafter, None, params)) > 1e-2
    assert (np.asarray(decode(target, drafter, params).tokens) != plain_text()).any()


def test_fault_the_states_before_the_last_shared_layer_are_seen(monkeypatch):
    target, params = model("llama")
    right = CausalLM.run

    def wrong(self, params, cache, draft, *, features=(), **settings):
        features = tuple(max(i - 1, 0) for i in features)
        return right(self, params, cache, draft, features=features, **settings)

    monkeypatch.setattr(CausalLM, "run", wrong)
    drafter = SelfDraft(num_draft=2, target=target, exit=3)
    assert furthest(*passes(target, drafter, None, {"target": params})) > 1e-2


# ------------------------------------------------------------------- texts


@functools.cache
def plain_text():
    target, params = model("llama")
    return np.asarray(decode(target, Plain(), {"target": params}).tokens)


PARTS = [dict(exit=3), dict(skip="attention.0,mlp.1-2"), dict(topology=trees.Tree(TREE), exit=2)]


@pytest.mark.parametrize("which", PARTS, ids=["exit", "skip", "tree"])
def test_the_greedy_text_is_that_of_plain_decoding(which):
    target, params = model("llama")
    drafter = SelfDraft(num_draft=3, target=target, **which)
    np.testing.assert_array_equal(decode(target, drafter, {"target": params}).tokens, plain_text())


def test_the_whole_target_agrees_with_itself():
    """All its layers, or none left out but one that is silent, and every token is accepted."""
    target, params = model("llama")
    out = decode(target, SelfDraft(num_draft=3, target=target, exit=LAYERS), {"target": params})
    np.testing.assert_array_equal(out.stats.accepted_at[:, 0], out.stats.drafted_at[:, 0])
    assert (np.asarray(out.stats.rounds) == 3).all()  # of four tokens each


def test_an_early_exit_leaves_the_target_the_missing_layers_alone():
    """Counted in products with a layer's weights: drafting reads E layers a token and once more,
    the target's pass the other ones."""
    target, params = model("llama")
    read = []

    @dataclasses.dataclass(frozen=True)
    class Counting(CausalLM):
        def run(self, params, cache, draft, *, without=None, **settings):
            without = [frozenset()] * LAYERS if without is None else without
            read.append(sum(not left_out for left_out in without))
            return super().run(params, cache, draft, without=without, **settings)

    target = Counting(target.config)
    drafter = SelfDraft(num_draft=3, target=target, exit=1)
    passes(target, drafter, None, {"target": params})
    # the prompt, three drafted tokens, the last node, and both passes of the target
    assert read[-6:] == [1, 1, 1, 1, LAYERS - 1, LAYERS]


@pytest.mark.usefixtures("one_trace")
def test_a_second_call_traces_nothing_whatever_the_values():
    target, params = model("llama")
    target = type("Unseen", (CausalLM,), {})(target.config)
    drafter = Adaptive(SelfDraft(num_draft=3, target=target, exit=2), widths=(0, 1, 3))
    for seed in (0, 1):
        costs = jnp.asarray([1.0, 1.1 + seed, 1.2])
        decode(
            target,
            drafter,
            {"target": params, "drafter": {"inner": None, "costs": costs}},
            key=jax.random.key(seed),
            max_new_tokens=12 - seed,
            capacity=40,
            sampling=Sampling(temperature=np.full(2, 0.5 + seed, np.float32)),
        )


# ------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (dict(exit=5), "has 4 layers"),
        (dict(exit=0), "from 1 to 4"),
        (dict(exit=True), "whole number"),
        (dict(), "give one of the two"),
        (dict(exit=2, skip="mlp.1"), "give one of the two"),
        (dict(skip="mlp.4"), "there is no layer 4"),
        (dict(skip="0-3"), "all 8 sublayers"),
        (dict(skip="heads.1"), "'heads.1' is no sublayer"),
        (dict(skip="mlp.3-2"), "'mlp.3-2' is no range of layers"),
        (dict(skip="0-99999999"), "no model has a layer 10000"),
        (dict(skip={"heads": [1]}), "attention and mlp"),
        (dict(exit=2, num_draft=0), "at least one token"),
        (dict(exit=2, sibling_sampling="best"), "unknown"),
    ],
)
def test_a_part_that_cannot_be_is_refused(which, words):
    with pytest.raises(ValueError, match=words):
        SelfDraft(target=model("llama")[0], **which)


def test_targets_without_parts_say_why():
    with pytest.raises(ValueError, match="needs the target"):
        SelfDraft(exit=1)

    class Other(specjax.Target):
        vocab_size = 3
        init = verify = commit = None

    with pytest.raises(ValueError, match="Other has no sub-networks"):
        SelfDraft(target=Other(), exit=1)
    with pytest.raises(ValueError, match="cross-attention"):
        SelfDraft(target=Seq2SeqLM(SimpleNamespace(model_type="t5")), exit=1)


def test_sublayers_are_written_in_several_ways():
    wanted = ("attention.1", "mlp.1", "attention.2", "mlp.4")
    assert skipped_sublayers("1, attention.2,mlp.4") == wanted
    assert skipped_sublayers(["attention.1-2", "mlp:1", "mlp.4"]) == wanted
    assert skipped_sublayers({"attention": [1, 2], "mlp": [4, 1]}) == wanted
    assert skipped_sublayers(()) == ()


def test_a_part_hands_over_its_leading_whole_layers():
    target = model("llama")[0]
    for which, shared in (({"exit": 2}, 2), ({"exit": 4}, 3), ({"skip": "mlp.0"}, 0)):
        part = target.sub_network(**which)
        assert isinstance(part, DecoderPart)
        assert part.shared == shared and part.hands_over == (shared > 0)
