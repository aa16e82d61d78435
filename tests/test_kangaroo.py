"""Kangaroo against the authors' adapter, written out in NumPy over the tensors of a saved file."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from toys import Anything, heads, whole

import specjax
from specjax import Sampling, trees
from specjax.checkpoints import FORMATS, holds_heads
from specjax.decoding import prefill, round
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters.kangaroo import Kangaroo, KangarooConfig
from specjax.models import DecoderConfig
from specjax.models.causal_lm import CausalLM

pytestmark = pytest.mark.usefixtures("quick_compilation")
GOLDEN = Path(__file__).parent / "golden" / "features" / "target"  # a Llama of seven layers
EXIT, THRESHOLD, WARM, DRAFTS, ROUNDS, SIZE = 2, 0.5, 0.9, 4, 6, 40
LAYER = DecoderConfig(
    vocab_size=24,
    hidden_size=16,
    intermediate_size=20,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_positions=64,
    norm_eps=1e-3,
)
PROMPTS = np.random.default_rng(0).integers(3, 24, (4, 9)).astype(np.int32)
LENGTHS = np.asarray([9, 1, 2, 6], np.int32)
Q, K, V, O = (f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo")  # noqa: E741
FIRST_NORM, LAST_NORM = "layers.0.input_layernorm.weight", "norm.weight"


@functools.cache
def target():
    return specjax.load(GOLDEN, tokenizer=False, dtype="float32")


def adapter(**settings):
    """A drafter of the golden target, and random weights for it."""
    own = dict(layer=EXIT, threshold=THRESHOLD, topology=trees.chain(DRAFTS)) | settings
    drafter = Kangaroo(config=KangarooConfig(layer=LAYER), target=target().target, **own)
    weights = heads(drafter)
    weights["norm"]["weight"] *= 6  # so that the laws are sure of some tokens
    return drafter, weights


# ------------------------------------------------------------------- the slow adapter


def rms(x, weight, eps=LAYER.norm_eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotated(x):
    """Rotary embedding of ``x [T, heads, E]`` at positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] / LAYER.rope_theta ** (np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def authors(tensors, states, fault=None):
    """The output ``[H]`` of the authors' adapter at the last of ``states [T, H]``."""
    x = states if fault == "no first norm" else rms(states, tensors[FIRST_NORM])
    q, k, v = (np.reshape(x @ tensors[n].T, (len(x), -1, LAYER.head_dim)) for n in (Q, K, V))
    if fault != "no positions":
        q, k = rotated(q), rotated(k)
    k, v = (np.repeat(y, LAYER.num_groups, axis=1) for y in (k, v))
    scores = np.einsum("he,the->ht", q[-1], k) / np.sqrt(LAYER.head_dim)
    if fault == "the token before the last is not seen":
        scores[:, -2:-1] = -np.inf
    share = np.exp(scores - scores.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    out = np.einsum("ht,the->he", share, v).reshape(-1) @ tensors[O].T
    out = out if fault == "no residual" else states[-1] + out
    return out if fault == "no last norm" else rms(out, tensors[LAST_NORM])


@jax.jit
def states_of(params, text):
    """Hidden states 1 and 2, ``[2, T, H]``, by a pass over the whole text int32 ``[T]``."""
    model = target().target
    cache, draft = model.init(params, 1, SIZE), whole(text[None])
    found = model.verify(params, cache, draft, features=(EXIT - 1, EXIT), logits=False)
    return jnp.stack(jnp.split(found.features[0], 2, axis=-1))


def law_after(tensors, text, fault):
    """The law at ``WARM`` and the greatest probability at temperature 1, after a text."""
    padded = np.pad(np.asarray(text, np.int32), (0, SIZE - len(text)))
    states = np.asarray(states_of(target().params, padded), np.float64)
    states = states[0 if fault == "the states of the layer before" else 1, : len(text)]
    table = np.asarray(target().target.head_table(target().params), np.float64)
    logits = table @ authors(tensors, states, fault)

    def softmax(x):
        x = np.exp(x - x.max())
        return x / x.sum()

    return softmax(logits / WARM), softmax(logits).max()


def wrong_drafts(rounds, tensors, fault=None):
    """How many drafts have another law or another length than by the slow adapter."""
    wrong = 0
    for text, tokens, laws, scored in rounds:
        sure, length, path, same = True, 0, 1.0, True
        for depth in range(int(scored.sum()) + 1):
            if not sure or depth == DRAFTS:
                break
            law, top = law_after(tensors, [*text, *tokens[:depth]], fault)
            same &= depth >= scored.sum() or np.abs(law - laws[depth]).max() < 1e-4
            path, length = path * top, length + 1
            sure = (path if fault == "a product of probabilities" else top) >= THRESHOLD
            if fault == "the token below the threshold is dropped":
                length -= not sure
        wrong += not (same and length == scored.sum())
    return wrong


# ------------------------------------------------------------------- rounds of the loop


@functools.cache
def rounds():
    """Of each round and row ``(text, tokens [D], laws [D, V], scored [D])``; and how far the
    target's pass that goes on from the first layers is from one that begins anew."""
    lm, (drafter, weights) = target(), adapter(sibling_sampling="iid")
    params, rule = (
        {"target": lm.params, "drafter": weights},
        Anything(deepest=DRAFTS, first=3, size=20),
    )
    request, capacity = prepare_inputs(
        lm.target,
        drafter,
        PROMPTS,
        LENGTHS,
        jax.random.key(0),
        30,
        Sampling(temperature=WARM),
        None,
        (),
    )

    @jax.jit
    def begin(params, request):
        return prefill.unanswered(lm.target, drafter, rule, capacity, params, request, 4)

    @jax.jit
    def step(params, state):
        context = round.round_context(params, state)
        draft, proposed = round.draft_step(drafter, params, state.drafter_state, context)
        drafts = draft, dataclasses.replace(draft, partial=None)
        passes = [
            round.verify(lm.target, params, state.cache, d, features=drafter.features)
            for d in drafts
        ]
        keys = round.acceptance_keys(state)
        verdict = round.accept(rule, params, draft, passes[0], context, keys)
        judged = round.VerifiedRound(
            context=context, draft=draft, proposed=proposed, scores=passes[0], verdict=verdict
        )
        apart = jax.tree.map(lambda a, b: jnp.abs(a - b), *passes)
        seen = draft.scored
        most = [apart.logits * seen[..., None], apart.features * seen[..., None]]
        most += [x * seen[:, None, :, None] for x in jax.tree.leaves(apart.entries)]
        most = jnp.max(jnp.stack([jnp.max(x) for x in most]))
        return draft, most, round.commit_round(lm.target, drafter, params, state, judged)

    state, found, furthest = begin(params, request), [], []
    for _ in range(ROUNDS):
        draft, most, after = step(params, state)
        read, lengths, draft = jax.device_get((state.tokens, state.length, draft))
        assert draft.partial is not None
        furthest.append(float(most))
        for row in range(len(LENGTHS)):
            text = read[row, : lengths[row]].tolist()
            own = (x[row] for x in (draft.tokens[:, 1:], draft.laws, draft.scored[:, 1:]))
            found.append((text, *own))
        state = after
    return found, max(furthest)


def tensors_of(folder):
    drafter, weights = adapter()
    specjax.save_drafter(drafter, weights, folder, target=target())
    tensors = load_file(folder / "model.safetensors")
    return {name: x.astype(np.float64) for name, x in tensors.items()}


def test_laws_and_lengths_are_those_of_the_authors_adapter(tmp_path):
    found, _ = rounds()
    lengths = np.reshape([int(scored.sum()) for *_, scored in found], (ROUNDS, -1))
    assert len({*lengths.flat}) > 2 and lengths.max(axis=1).min() < DRAFTS  # all rows stop
    assert len({len(text) for text, *_ in found}) > 8
    assert wrong_drafts(found, tensors_of(tmp_path)) == 0


FAULTS = (
    "no first norm",
    "no last norm",
    "no residual",
    "no positions",
    "the token before the last is not seen",
    "the states of the layer before",
    "the token below the threshold is dropped",
    "a product of probabilities",
)


def test_fault_an_adapter_that_is_not_the_authors_is_seen(tmp_path):
    found, tensors = rounds()[0], tensors_of(tmp_path)
    for fault in FAULTS:  # in one test, so that one process compiles the rounds
        assert wrong_drafts(found, tensors, fault) > 2, fault


def test_the_target_goes_on_from_the_first_layers_as_it_would_anew():
    assert rounds()[1] < 1e-4


def passes_of_a_round(monkeypatch, **settings):
    """The target's passes of a round: the whole layers, and the first and the last node of each. (A
    pass is traced more than once by ``lax.cond``.)"""
    lm, (drafter, weights) = target(), adapter(**settings)
    params, read, right = {"target": lm.params, "drafter": weights}, set(), CausalLM.run
    every = lm.target.num_layers

    def counting(self, params, cache, draft, *, without=None, since=0, **settings):
        left_out = [()] * every if without is None else without
        layers = tuple(i for i, sublayers in enumerate(left_out) if not sublayers)
        read.add(((layers[0], layers[-1]), (since, draft.num_nodes - 1)))
        return right(self, params, cache, draft, without=without, since=since, **settings)

    monkeypatch.setattr(CausalLM, "run", counting)
    request, capacity = prepare_inputs(
        lm.target, drafter, PROMPTS, LENGTHS, jax.random.key(0), 24, Sampling(), None, ()
    )

    def one(params, request):
        state = prefill.start(lm.target, drafter, "auto", capacity, params, request)
        read.clear()
        context = round.round_context(params, state)
        draft, _ = round.draft_step(drafter, params, state.drafter_state, context)
        return round.verify(lm.target, params, state.cache, draft, features=drafter.features)

    jax.eval_shape(one, params, request)
    return read, ((0, EXIT - 1), (EXIT, every - 1))


def test_no_layer_runs_twice_for_a_token_of_a_chain(monkeypatch):
    read, (first, others) = passes_of_a_round(monkeypatch)
    assert read == {(first, (i, i)) for i in range(DRAFTS + 1)} | {(others, (0, DRAFTS))}


def test_fault_a_pass_that_begins_anew_is_counted(monkeypatch):
    """In a tree the first layers read all nodes once more."""
    read, (first, others) = passes_of_a_round(monkeypatch, topology=trees.as_topology("2x1"))
    assert (first, (0, 4)) in read and (others, (0, 4)) in read


@pytest.mark.parametrize("topology", ["chain:4", "2x2x1", "expand:2x3x6"])
def test_the_greedy_text_is_that_of_plain_decoding(topology):
    lm, (drafter, weights) = target(), adapter()
    drafter = drafter.with_topology(trees.as_topology(topology))
    settings = dict(key=jax.random.key(0), max_new_tokens=20)
    texts = []
    for own, params in ((drafter, weights), (specjax.drafters.Plain(), None)):
        given = {"target": lm.params, "drafter": params}
        out = specjax.decode(lm.target, own, given, PROMPTS, LENGTHS, **settings)
        texts.append(np.asarray(out.tokens))
    np.testing.assert_array_equal(*texts)


# ------------------------------------------------------------------- on disk, and what is refused


def test_what_is_saved_has_the_authors_names_and_is_loaded_again(tmp_path):
    drafter, weights = adapter(threshold=0.5)
    specjax.save_drafter(drafter, weights, tmp_path, target=target())
    shapes = {n: x.shape for n, x in load_file(tmp_path / "model.safetensors").items()}
    projections = {Q: (16, 16), K: (8, 16), V: (8, 16), O: (16, 16)}
    assert shapes == projections | {FIRST_NORM: (16,), LAST_NORM: (16,)}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] == 1 and config["model_type"] == "llama"
    assert [name for name, f in FORMATS.items() if f.matches(config, {*shapes})] == ["kangaroo"]
    assert holds_heads(tmp_path, config)
    again = specjax.load_drafter(tmp_path, target())
    assert again.drafter == drafter
    jax.tree.map(np.testing.assert_array_equal, again.params, weights)


def test_a_file_that_does_not_say_its_exit_is_read_for_the_authors_targets_alone(tmp_path):
    drafter, weights = adapter()
    specjax.save_drafter(drafter, weights, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["specjax"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="how many of the 7 layers .* run before the adapter"):
        specjax.load_drafter(tmp_path, target())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)  # of old files
    save_file(tensors, tmp_path / "model.safetensors")
    deep = dataclasses.replace(target().target.config, num_layers=32)
    lm = dataclasses.replace(target(), target=CausalLM(deep))
    found = specjax.load_drafter(tmp_path, lm).drafter
    assert (found.layer, found.threshold) == (2, 0.6)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (dict(exit="2"), "exit='2': it must be a whole number"),
        (dict(exit=7), "from 1 to 6"),
        (dict(exit=2, threshold="0.5"), "threshold='0.5': it must be a number"),
    ],
)
def test_a_file_whose_settings_no_adapter_has_is_refused(own, words, tmp_path):
    specjax.save_drafter(*adapter(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"specjax": own}))
    with pytest.raises(ValueError, match=words):
        specjax.load_drafter(tmp_path, target())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(layer=None), "give layer=E alone.* from 1 to 6"),
        (dict(layer=0), "from 1 to 6"),
        (dict(layer=7), "from 1 to 6"),
        (dict(layers=(1, 2)), "give layer=E alone"),
        (dict(threshold=1.5), "threshold=1.5.*from 0 to 1"),
        (dict(topology=trees.Expand(2, 3, 6), sibling_sampling="iid"), "would bias"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        adapter(**settings)


def test_an_adapter_of_several_layers_is_refused():
    with pytest.raises(ValueError, match="num_layers=2.*one plain attention"):
        KangarooConfig(layer=dataclasses.replace(LAYER, num_layers=2))


def test_hidden_states_that_a_part_computes_otherwise_are_refused():
    lm = target()
    part, draft = lm.target.sub_network(exit=EXIT), whole(jnp.zeros((1, 3), jnp.int32))
    cache = lm.target.init(lm.params, 1, 4)
    with pytest.raises(ValueError, match="the hidden states 0 to 2 as the target does"):
        part.verify(lm.params, cache, draft, features=(EXIT + 1,))
