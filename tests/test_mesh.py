"""Eight devices say what one says, each holds its part, and none collects another's."""

import dataclasses
import functools
import re
import warnings

import jax
import numpy as np
import pytest
import registry
from flax import nnx
from toys import bag, heads

import specjax
from specjax import Sampling, sharding
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Adaptive, DraftModel, NGram, Plain, SelfDraft
from specjax.drafters.hydra import Hydra, HydraConfig
from specjax.drafters.prefix import prefix_config
from specjax.drafters.speculator import Speculator, SpeculatorConfig
from specjax.models import TopChunks, placement, reading, windowed
from specjax.models.causal_lm import CausalLM
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.hf import load_weights, save_pretrained
from specjax.sampling import drawing
from specjax.sharding import as_mesh

MESHES = ["data=2,model=4", "data=1,model=8", "data=8,model=1"]
BATCH, VOCAB, SLOTS = 8, 1040, 96  # no other array has a dimension of the last two
CONFIG = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=32,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_dim=4,
    max_positions=600,
)
DRAFT = dataclasses.replace(CONFIG, num_layers=1, hidden_size=20)
# heads make all of it
SQUARE = dataclasses.replace(CONFIG, num_layers=1, hidden_size=32, max_positions=64)
ODD = dataclasses.replace(DRAFT, num_heads=3, num_kv_heads=3)  # only to be held whole
EVERYTHING = dict(temperature=0.9, top_k=200, top_p=0.9, min_p=0.01, repetition_penalty=1.1)


@functools.cache
def weights(config, seed=0):
    params = nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))[1]
    return jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, params)


def prompts(vocab):
    random = np.random.default_rng(0)
    lengths = random.integers(1, 7, BATCH).astype(np.int32)
    return random.integers(0, vocab, (BATCH, 6)).astype(np.int32), lengths


def decoded(target, drafter, params, mesh=None, rule="auto", new=10, **settings):
    tokens, lengths = prompts(target.vocab_size)
    options = dict(key=jax.random.key(3), max_new_tokens=new, rule=rule, mesh=mesh)
    sampling = Sampling(**settings)
    out = specjax.decode(target, drafter, params, tokens, lengths, sampling=sampling, **options)
    if mesh is not None:
        assert len(out.tokens.sharding.device_set) == 8
    return np.asarray(out.tokens)


# ------------------------------------------------------------------- the same tokens


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", registry.cases(*bag(16, 0)))
def test_every_drafter_says_on_eight_devices_what_one_says(name):
    target, params = bag(16, 0)
    drafter, own, rules = registry.cases(target, params)[name]
    params = {"target": params, "drafter": own}
    plain = decoded(target, Plain(), {"target": params["target"]})
    np.testing.assert_array_equal(decoded(target, drafter, params, MESHES[0]), plain)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", ["draft", "ngram", "tree distinct"])
def test_the_same_keys_draw_the_same_tokens_on_eight_devices(name):
    target, params = bag(16, 0)
    drafter, own, rules = registry.cases(target, params)[name]
    given = (target, drafter, {"target": params, "drafter": own})
    settings = dict(rule=rules[0], **EVERYTHING)
    np.testing.assert_array_equal(
        decoded(*given, MESHES[0], **settings), decoded(*given, **settings)
    )


def real(name):
    """A drafter for the decoder, and its weights."""
    draft = DraftModel(num_draft=3, model=CausalLM(DRAFT))
    costs = np.asarray([1.0, 1.1, 1.3], np.float32)
    sizes = dict(hidden_size=24, vocab_size=VOCAB, num_heads=1)
    shape = HydraConfig(tied=True, prefix=prefix_config(CONFIG), **sizes)
    hydra = Hydra(config=shape, target=CausalLM(CONFIG))
    cell = dict(cell="lstm", tied=True, inner_size=12, prefix=prefix_config(CONFIG))
    speculator = Speculator(config=SpeculatorConfig(**cell, **sizes), target=CausalLM(CONFIG))
    return {
        "plain": (Plain(), None),
        "draft": (draft, weights(DRAFT, 1)),
        "whole draft": (
            DraftModel(num_draft=3, model=CausalLM(ODD, axis=None)),
            weights(ODD, 1),
        ),
        "windowed draft": (
            DraftModel(num_draft=3, model=windowed(CausalLM(DRAFT), 4, 1)),
            weights(DRAFT, 1),
        ),
        "windowed self": (SelfDraft(3, target=CausalLM(CONFIG), window=4, sinks=1), None),
        "chunks of self": (SelfDraft(3, target=CausalLM(CONFIG), window=4, chunks=CHUNKS), None),
        "ngram": (NGram(num_draft=5, shortest=1), None),
        "adaptive": (Adaptive(draft), {"inner": weights(DRAFT, 1), "costs": costs}),
        "hydra": (hydra, heads(hydra)),
        "speculator": (speculator, heads(speculator)),
    }[name]


CHUNKS = TopChunks(budget=4, chunk=2, every=2)
ONCE = ("plain", "whole draft", "windowed draft", "windowed self", "ngram", "adaptive", "hydra")
ONCE += ("speculator", "chunks of self")
REAL = [(m, "draft") for m in MESHES] + [(MESHES[0], name) for name in ONCE]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("mesh", "name"), REAL)
def test_a_decoder_whose_heads_are_shared_says_what_one_device_says(mesh, name):
    drafter, own = real(name)
    params, target = {"target": weights(CONFIG), "drafter": own}, CausalLM(CONFIG)
    plain = decoded(target, Plain(), {"target": params["target"]})
    np.testing.assert_array_equal(decoded(target, drafter, params, mesh), plain)


def test_drawing_and_the_argmax_of_parts_are_those_of_the_whole():
    x = np.round(np.random.default_rng(1).normal(size=(BATCH, 3, 64)), 1).astype(np.float32)
    x[0, 0], x[0, 1] = 2.0, -np.inf
    weights = np.where(x[:, 0] > 0, x[:, 0], 0)
    weights[1] = 0
    weights[2, :40] = 0  # whole parts without mass
    level = np.linspace(0, 0.999, BATCH, dtype=np.float32)
    first, one = drawing.argmax(x), drawing.draw(weights, level)
    with sharding.using(as_mesh(MESHES[0])):
        np.testing.assert_array_equal(jax.jit(drawing.argmax)(x), first)
        np.testing.assert_array_equal(jax.jit(drawing.draw)(weights, level), one)
        parts = jax.jit(lambda x: drawing.best(x, 5))(x)
        ill = x.copy()
        ill[1, 0, 50], ill[1, 1, 3] = np.nan, np.inf
        index, said = jax.jit(lambda x: drawing.likeliest(x, 5))(ill)
    np.testing.assert_array_equal(parts, drawing.best(x, 5))  # equal numbers: the first
    wanted, logs = drawing.likeliest(ill, 5)
    np.testing.assert_array_equal(index, wanted)
    np.testing.assert_allclose(said, logs, rtol=2e-6, atol=2e-6)
    assert (wanted[1, :2] == -1).all() and (wanted[0, 1] == -1).all() and (wanted[2] >= 0).all()


# ------------------------------------------------------------------- parts, and nothing more


@functools.cache
def burst(mesh, temperature=0.0, capacity=SLOTS, name="draft"):
    """A compiled burst of the decoder with a shared drafter, its memory and its text."""
    mesh = as_mesh(mesh)
    target, (drafter, own) = CausalLM(CONFIG), real(name)
    settings = Sampling(**(EVERYTHING if temperature else {}))
    tokens, lengths = prompts(VOCAB)
    given = (jax.random.key(0), 20, settings, capacity, ())
    request, capacity = prepare_inputs(target, drafter, tokens, lengths, *given)
    params = {"target": weights(CONFIG), "drafter": own}
    params, request = sharding.place(mesh, target, drafter, params, request)
    with sharding.using(mesh):
        state = loop.jit_start(target, drafter, "auto", capacity, params, request)
        traced = loop.jit_burst.trace(target, drafter, "auto", 5, params, state)
    compiled = traced.lower().compile()
    return state, compiled.memory_analysis(), compiled.as_text()


def collectives(text, *kinds):
    """Shapes of the results of the operations ``kinds`` in a compiled program, with their names."""
    found = []
    for line in text.splitlines():
        if match := re.search(rf" = (.*?) ({'|'.join(kinds)})(-start)?\(", line):
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            name = re.search(r'op_name="([^"]*)"', line)
            found += [
                (tuple(map(int, filter(None, s.split(",")))), name and name[1]) for s in shapes
            ]
    return found


MOVES = ("all-gather", "all-to-all", "collective-permute")


def large(text):
    """Moves between devices of what has the size of the vocabulary, or a part of it, or a
    cache's slots and the size of a head."""
    vocabulary = {VOCAB, VOCAB // 4}
    moves = collectives(text, *MOVES)
    return [m for m in moves if vocabulary & {*m[0]} or {SLOTS, CONFIG.head_dim} <= {*m[0]}]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_no_device_collects_a_cache_or_logits(temperature):
    text = burst(MESHES[0], temperature)[2]
    assert collectives(text, *MOVES)  # small ones there are
    assert not large(text)


def test_fault_an_argmax_over_the_whole_vocabulary_is_seen_to_collect_logits(monkeypatch):
    monkeypatch.setattr(drawing, "argmax", lambda x: jax.numpy.argsort(x, axis=-1)[..., -1])
    assert large(burst.__wrapped__(MESHES[0], capacity=SLOTS + 1, name="plain")[2])


@pytest.mark.parametrize("mesh", MESHES)
def test_a_device_holds_its_share_of_weights_and_caches(mesh):
    state, memory, _ = burst(mesh)
    sizes = sharding.axis_sizes(mesh)
    plan = specjax.plan_memory(
        CONFIG, DRAFT, mesh=mesh, batch=BATCH, context=SLOTS, num_draft=3, dtype="float32"
    )
    each = sum(m.weights_each + m.cache_each for m in plan.models)
    rest = 8192  # tokens, lengths, counters
    assert each < memory.argument_size_in_bytes < each + rest
    whole = sum(m.whole for m in plan.models)  # norms
    total = sum(m.weights for m in plan.models) - whole
    caches = sum(SLOTS * BATCH * m.cache_token for m in plan.models)
    stated = total / sizes["model"] + caches / 8 + whole
    assert each == stated
    for leaf in jax.tree.leaves((state.cache, state.drafter_state.cache)):
        assert leaf.addressable_shards[0].data.size == leaf.size / 8


def test_all_reduces_of_a_round_are_those_that_the_plan_counts():
    plan = specjax.plan_memory(
        CONFIG, DRAFT, mesh=MESHES[0], batch=BATCH, context=SLOTS, num_draft=3, dtype="float32"
    )
    shapes = [shape for shape, _ in collectives(burst(MESHES[0])[2], "all-reduce")]
    for model, config in zip(plan.models, (CONFIG, DRAFT), strict=True):
        streams = [s for s in shapes if len(s) == 2 and config.hidden_size in s]
        assert len(streams) == model.reduces
        assert sum(4 * np.prod(s) for s in streams) == model.reduced


# ------------------------------------------------------------------- reading


LAYOUTS = ["llama", "gpt2", "gpt_neox", "mixtral"]


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_parts_are_read_one_by_one_whatever_the_layout_of_the_file(
    model_type, tmp_path, monkeypatch
):
    config = {
        "llama": CONFIG,
        "gpt2": dict(
            norm="layer", positions="learned", gated_mlp=False, activation="gelu_tanh",
            qkv_bias=True, o_bias=True, mlp_bias=True, tie_embeddings=True,
        ),
        "gpt_neox": dict(
            norm="layer", gated_mlp=False, activation="gelu", parallel_residual=True,
            qkv_bias=True, o_bias=True, mlp_bias=True,
        ),
        "mixtral": dict(
            num_experts=3, experts_per_token=2, expert_size=32, norm_expert_weights=True
        ),
    }[model_type]  # fmt: skip
    if model_type != "llama":
        config = dataclasses.replace(SQUARE, model_type=model_type, **config)
    save_pretrained(Decoder(config, rngs=nnx.Rngs(5)), tmp_path)
    one, read, read_slice = load_weights(tmp_path, config), [], reading.read_slice

    def counted(*given):
        piece = read_slice(*given)
        read.append(piece.nbytes)
        return piece

    monkeypatch.setattr(reading, "read_slice", counted)
    many = load_weights(tmp_path, config, mesh=as_mesh(MESHES[0]))
    jax.tree.map(np.testing.assert_array_equal, one, many)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(one))
    largest = 4 * VOCAB * config.hidden_size
    assert sum(read) == total  # though two devices hold each part
    assert max(read) <= largest / 4  # and never a whole one
    split = {len({str(s.index) for s in x.addressable_shards}) for x in jax.tree.leaves(many)}
    assert split == {1, 4}


def test_a_quantized_model_is_shared_too(tmp_path):
    pytest.importorskip("qwix")
    save_pretrained(Decoder(CONFIG, rngs=nnx.Rngs(5)), tmp_path)
    one = load_weights(tmp_path, CONFIG, quantize="int8")
    many = load_weights(tmp_path, CONFIG, quantize="int8", mesh=as_mesh(MESHES[0]))
    jax.tree.map(np.testing.assert_array_equal, one, many)
    values = many["blocks"][0]["mlp"]["up"]["weight"].get_value().qvalue
    assert values.addressable_shards[0].data.shape == (8, 24)


# ------------------------------------------------------------------- refusals


def test_meshes_that_cannot_be_are_refused_with_the_way_out(tmp_path):
    save_pretrained(Decoder(ODD, rngs=nnx.Rngs(0)), tmp_path)
    read = dict(tokenizer=False)
    for mesh, message in (
        ("data=2,model=2", "cannot share num_heads=3, num_kv_heads=3.*accepted for model: 1 "),
        ("rows=2", "axes .'rows'.*'data'.*'model'"),
        ("data=64", "needs 64 devices, there are 8"),
        ("data:2", "such as 'data=2,model=4'"),
        ("data=2,data=2", "twice"),
        ({"data": 0}, "no positive whole number"),
        (jax.make_mesh((8,), ("x",)), "axes .'x'."),
    ):
        with pytest.raises(ValueError, match=message):
            specjax.load(tmp_path, mesh=mesh, **read)
    target, params = bag(16, 0)
    tokens = np.zeros((3, 2), np.int32)
    with pytest.raises(ValueError, match="3 rows cannot be shared by data=2 devices"):
        specjax.decode(
            target, Plain(), {"target": params}, tokens, np.full(3, 2), key=jax.random.key(0),
            max_new_tokens=2, mesh=MESHES[0],
        )  # fmt: skip


def test_virtual_devices_that_share_few_threads_are_warned_of(monkeypatch):
    monkeypatch.setenv("NPROC", "32")
    with warnings.catch_warnings(action="error"):
        mesh = as_mesh(MESHES[0])
    monkeypatch.setenv("NPROC", "31")
    for given in (mesh, MESHES[0]):
        with pytest.warns(UserWarning, match="8 virtual CPU devices share 31 .* set NPROC=32 "):
            as_mesh(given)
    monkeypatch.setenv("NPROC", "1")
    with warnings.catch_warnings(action="error"):  # one device waits for no other
        as_mesh("data=1,model=1")


def test_experts_that_do_not_divide_are_refused():
    config = dataclasses.replace(CONFIG, num_experts=4, experts_per_token=2, expert_size=12)
    with pytest.raises(ValueError, match="cannot share expert_size=12"):
        placement.check_divides(config, 8)
    placement.check_divides(config, 4)
