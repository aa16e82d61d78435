"""T5 and Whisper on eight devices: the texts of one, each device with its part of all there is."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoder_decoders import FOLDER
from flax import nnx
from test_mesh import MESHES, MOVES, collectives

import specjax
from specjax import drafters, sharding
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.models import Seq2SeqLM, load_config, load_weights, reading, save_pretrained
from specjax.models.hf import abstract
from specjax.sharding import as_mesh

BATCH, VOCAB, SLOTS, SOURCE, NEW = 8, 1040, 48, 20, 9
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=32,
    num_encoder_layers=1,
    num_layers=2,
    num_heads=8,
    head_dim=4,
)
T5 = dataclasses.replace(load_config(FOLDER / "t5_gated"), **SIZES)
WHISPER = dataclasses.replace(
    load_config(FOLDER / "whisper"),
    **SIZES | dict(hidden_size=32),
    begin_suppress_ids=(220, 7),
)
CONFIGS = {"t5": T5, "whisper": WHISPER}


@functools.cache
def weights(config, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.4), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, abstract(config)[1])


def inputs_of(config, batch=BATCH):
    rng, begin = np.random.default_rng(1), np.full(batch, 1, np.int32)
    if config.reads == "features":
        features = rng.normal(size=(batch, config.num_features, 2 * config.max_source))
        return {"features": features.astype("f"), "begin": begin}
    lengths = rng.integers(1, SOURCE + 1, batch).astype(np.int32)
    tokens = rng.integers(0, VOCAB, (batch, SOURCE)).astype(np.int32)
    return {"tokens": tokens, "lengths": lengths, "begin": begin}


def real(name, config):
    """A drafter and its weights."""
    small = dataclasses.replace(config, num_layers=1)
    odd = dataclasses.replace(small, hidden_size=12, num_heads=3)  # only to be held whole
    draft = drafters.DraftModel(num_draft=3, model=Seq2SeqLM(small))
    whole = drafters.DraftModel(num_draft=3, model=Seq2SeqLM(odd, axis=None))
    return {
        "plain": (drafters.Plain(), None),
        "ngram": (drafters.NGram(num_draft=4, shortest=1), None),
        "draft": (draft, like(config, small)),
        "whole draft": (whole, weights(odd, 1)),
    }[name]


def like(config, small):
    """The weights of a model without its last layers: a drafter that is right now and then."""
    kept = {path for path, _ in nnx.to_flat_state(abstract(small)[1])}
    flat = [(path, x) for path, x in nnx.to_flat_state(weights(config)) if path in kept]
    return nnx.from_flat_state(flat)


def decoded(config, name, mesh=None, **sampling):
    drafter, own = real(name, config)
    out = specjax.decode(
        Seq2SeqLM(config),
        drafter,
        {"target": weights(config), "drafter": own},
        np.full((BATCH, 1), config.start_id, np.int32),
        np.ones(BATCH, np.int32),
        key=jax.random.key(3),
        max_new_tokens=NEW,
        sampling=specjax.Sampling(**sampling),
        inputs=inputs_of(config),
        mesh=mesh,
    )
    return out


SHARED = [
    ("t5", MESHES[1], "draft"),
    ("t5", MESHES[2], "ngram"),
    ("t5", MESHES[0], "whole draft"),
]


@functools.cache
def plain(case):
    return decoded(CONFIGS[case], "plain").tokens


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("case", "mesh", "name"), SHARED)
def test_eight_devices_say_what_one_says(case, mesh, name):
    shared = decoded(CONFIGS[case], name, mesh)
    assert len(shared.tokens.sharding.device_set) == 8
    np.testing.assert_array_equal(shared.tokens, plain(case))


@functools.cache
def burst(case, mesh):
    """The state before the first round, what comes of it, the compiled rounds: memory, text."""
    config, mesh = CONFIGS[case], as_mesh(mesh)
    objects = Seq2SeqLM(config), *real("draft", config)[:1], "auto"
    start, ones = np.zeros((BATCH, 1), np.int32), np.ones(BATCH, np.int32)
    start += config.start_id
    given = jax.random.key(0), NEW, specjax.Sampling(), SLOTS, (), inputs_of(config)
    request, capacity = prepare_inputs(*objects[:2], start, ones, *given)
    params = {"target": weights(config), "drafter": real("draft", config)[1]}
    params, request = sharding.place(mesh, *objects[:2], params, request)
    with sharding.using(mesh):
        state = loop.jit_start(*objects, capacity, params, request)
        compiled = loop.jit_burst.lower(*objects, NEW, params, state).compile()
        out = compiled(NEW, params, jax.tree.map(jnp.copy, state))
    return state, out, compiled.memory_analysis(), compiled.as_text()


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("case", CONFIGS)
def test_rows_and_heads_over_eight_devices_say_what_one_device_says(case):
    out = burst(case, MESHES[0])[1]
    np.testing.assert_array_equal(out.tokens[:, : NEW + 1], plain(case))
    assert 0 < np.sum(out.stats.accepted) < np.sum(out.stats.drafted)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("case", CONFIGS)
def test_no_device_collects_a_cache_a_memory_a_bias_or_logits(case):
    """Nothing larger than the residual stream of the widest pass goes between devices."""
    moves = collectives(burst(case, MESHES[0])[-1], "all-reduce", *MOVES)
    stream = CONFIGS[case].hidden_size * BATCH // 2 * (3 + 1)
    assert max(np.prod(shape) for shape, _ in moves) == stream
    head = min(SOURCE, SLOTS) * CONFIGS[case].head_dim  # of one row's memory
    assert stream < 8 * head * BATCH // 2


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("case", CONFIGS)
def test_a_device_holds_what_the_plan_says_it_holds(case):
    state, _, memory, text = burst(case, MESHES[0])
    config, small = CONFIGS[case], dataclasses.replace(CONFIGS[case], num_layers=1)
    plan = specjax.plan_memory(
        config,
        small,
        mesh=MESHES[0],
        batch=BATCH,
        context=SLOTS,
        source=SOURCE,
        dtype="float32",
    )
    caches = [state.cache, state.drafter_state.cache]
    reduced = [shape for shape, _ in collectives(text, "all-reduce")]
    streams = [shape for shape in reduced if len(shape) == 2 and config.hidden_size in shape]
    assert len(streams) == sum(model.reduces for model in plan.models)
    assert sum(4 * np.prod(s) for s in streams) == sum(model.reduced for model in plan.models)
    idle = 0  # on each device: what reads, which the rounds do not take
    for model, cache, kind in zip(plan.models, caches, (config, small), strict=True):
        held = jax.tree.leaves((cache.slots, cache.memory))
        assert {leaf.nbytes / leaf.addressable_shards[0].data.nbytes for leaf in held} == {8}
        assert sum(leaf.nbytes for leaf in held) / 8 == model.cache_each
        assert (
            sum(leaf.nbytes for leaf in jax.tree.leaves(cache.memory)) == BATCH * model.memory_row
        )
        placed = nnx.to_flat_state(Seq2SeqLM(kind).shard(weights(kind), as_mesh(MESHES[0])))
        sizes = {".".join(map(str, path)): x.get_value() for path, x in placed}
        each = {name: x.addressable_shards[0].data.nbytes for name, x in sizes.items()}
        assert sum(each.values()) == model.weights_each
        assert sum(x.nbytes for x in sizes.values()) == model.weights
        reads = re.compile(r"encoder\..*|.*\.cross\.[kv]\..*")
        idle += sum(size for name, size in each.items() if reads.fullmatch(name))
    needed = sum(m.weights_each + m.cache_each for m in plan.models) - idle
    rest = 8192  # tokens, lengths, counters
    assert needed < memory.argument_size_in_bytes < needed + rest


@pytest.mark.parametrize("case", CONFIGS)
def test_each_device_reads_its_own_parts_of_the_files(case, tmp_path, monkeypatch):
    config, read, read_slice = CONFIGS[case], [], reading.read_slice
    save_pretrained(nnx.merge(abstract(config)[0], weights(config)), tmp_path)
    one = load_weights(tmp_path, config, "float32")

    def counted(*given):
        piece = read_slice(*given)
        read.append(piece.nbytes)
        return piece

    monkeypatch.setattr(reading, "read_slice", counted)
    many = load_weights(tmp_path, config, "float32", mesh=as_mesh(MESHES[0]))
    jax.tree.map(np.testing.assert_array_equal, one, many)
    assert sum(read) == sum(leaf.nbytes for leaf in jax.tree.leaves(one))  # each part once
    assert max(read) <= VOCAB // 4 * config.hidden_size * 4  # and no table whole
