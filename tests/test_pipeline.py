"""A decoder whose layers are divided over devices says what it says on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
from compiled import cache_copies, hlo
from flax import nnx
from toys import heads

import specjax
from specjax import Sampling, kernels, sharding, trees
from specjax.drafters import DraftModel, NGram, Plain, SelfDraft
from specjax.drafters.hydra import Hydra, HydraConfig
from specjax.drafters.prefix import prefix_config
from specjax.kernels.xla_cpu import XlaCpuBackend
from specjax.models import PipelinedLM, reading, stage_weights, windowed
from specjax.models.causal_lm import CausalLM
from specjax.models.decoder import Decoder, abstract
from specjax.models.hf import save_pretrained
from specjax.models.pipeline import StageSchedule
from specjax.sharding import DATA, STAGE
from specjax.types import Draft, Verdict

LLAMA = dataclasses.replace(shapes.TINY, num_layers=4, max_positions=512)
WINDOW = dict(window=6, sandwich_norms=True)
CONFIGS = {
    "llama": LLAMA,
    "gpt2": dataclasses.replace(
        LLAMA, norm="layer", positions="learned", gated_mlp=False, activation="gelu_tanh",
        qkv_bias=True, tie_embeddings=True,
    ),
    "windows": dataclasses.replace(LLAMA, local_layers=(True, False, True, False), **WINDOW),
    "mixed windows": dataclasses.replace(LLAMA, local_layers=(True, False, False, True), **WINDOW),
    "experts": dataclasses.replace(LLAMA, **shapes.EXPERTS),
    "latents": dataclasses.replace(LLAMA, **shapes.LATENT),
}  # fmt: skip
MESHES = ["stage=2", "stage=4", "data=2,stage=2", "data=2,stage=4"]
SMALL = dataclasses.replace(LLAMA, hidden_size=16, num_layers=1, num_heads=2)
BATCH, NEW = 4, 10


@functools.cache
def weights(config, seed=0):
    params = nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))[1]
    return jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, params)


def divided(config, mesh, microbatches=1):
    return PipelinedLM(CausalLM(config), dict(sharding.as_mesh(mesh).shape)[STAGE], microbatches)


def decoded(target, drafter, params, mesh=None, **settings):
    random = np.random.default_rng(0)
    lengths = random.integers(1, 13, BATCH).astype(np.int32)
    tokens = random.integers(0, target.vocab_size, (BATCH, 12)).astype(np.int32)
    options = dict(key=jax.random.key(3), max_new_tokens=NEW, mesh=mesh)
    out = specjax.decode(
        target, drafter, params, tokens, lengths, sampling=Sampling(**settings), **options
    )
    return np.asarray(out.tokens)


def drafted(name, target):
    """A drafter, and its weights."""
    hydra = HydraConfig(
        tied=True, prefix=prefix_config(LLAMA), hidden_size=32, vocab_size=67, num_heads=1
    )
    return {
        "plain": lambda: (Plain(), None),
        "ngram": lambda: (NGram(num_draft=5, shortest=1), None),
        "draft": lambda: (DraftModel(3, model=CausalLM(SMALL)), weights(SMALL, 1)),
        "divided draft": lambda: (DraftModel(3, model=target), weights(LLAMA, 2)),
        "hydra": lambda: (own := Hydra(config=hydra, target=target), heads(own)),
    }[name]()


# ------------------------------------------------------------------- the same text


SOME = [("data=2,stage=4", "draft"), ("stage=2", "hydra"), ("data=2,stage=2", "divided draft")]
SOME += [(mesh, name) for mesh in MESHES for name in ("plain", "ngram")]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("mesh", "name"), SOME)
def test_on_a_mesh_a_divided_decoder_says_what_one_device_says(mesh, name):
    plain = decoded(CausalLM(LLAMA), Plain(), {"target": weights(LLAMA)})
    target = divided(LLAMA, mesh)
    drafter, own = drafted(name, target)
    params = {"target": weights(LLAMA), "drafter": own}
    np.testing.assert_array_equal(decoded(target, drafter, params, mesh), plain)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("mesh", ["stage=2", "data=2,stage=4"])
def test_on_a_mesh_every_family_is_divided(mesh, config):
    config = CONFIGS[config]
    params = {"target": weights(config)}
    plain = decoded(CausalLM(config), Plain(), params)
    found = decoded(divided(config, mesh, 2), NGram(num_draft=4, shortest=1), params, mesh)
    np.testing.assert_array_equal(found, plain)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("microbatches", [2, 3, 4])
def test_on_a_mesh_rows_follow_each_other_through_the_devices(microbatches):
    params = {"target": weights(LLAMA), "drafter": weights(SMALL, 1)}
    drafter = DraftModel(3, model=CausalLM(SMALL))
    settings = dict(temperature=0.9, top_p=0.9)
    one = decoded(CausalLM(LLAMA), drafter, params, **settings)
    found = decoded(divided(LLAMA, "stage=2", microbatches), drafter, params, "stage=2", **settings)
    np.testing.assert_array_equal(found, one)


# ------------------------------------------------------------------- one pass


def tree(config):
    """A tree of six nodes in each of four rows, whose prefixes differ in length."""
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (BATCH, 6))
    start, parents = jnp.asarray([9, 4, 0, 7], jnp.int32), (-1, 0, 0, 1, 2, 3)
    return Draft(start=start, tokens=jnp.asarray(tokens, jnp.int32), topology=parents)


def passes(target, params, cache, draft):
    """Logits and hidden states of a pass, and those of the same pass in two parts."""
    asked = tuple(range(target.num_layers + 1))
    whole = target.verify(params, cache, draft, features=asked)
    first = trees.narrow(draft, 2)
    entries = target.verify(params, cache, first, logits=False).entries
    rest = target.verify(params, cache, draft, features=asked, since=2, entries=entries)
    return whole.logits, whole.features, rest.logits, rest.features


def read(target, params, draft):
    """A cache of nine tokens, read in one chain."""
    tokens = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (BATCH, 9))
    chain = Draft(start=0 * draft.start, tokens=tokens, topology=trees.chain_parents(8))
    entries = target.verify(params, target.init(params, BATCH, 32), chain).entries
    kept = Verdict(path=tokens, count=draft.start - 1, token=draft.start)
    return target.commit(target.init(params, BATCH, 32), entries, chain.start, kept)


def both(target, params, draft):
    return passes(target, params, read(target, params, draft), draft)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("config", CONFIGS)
def test_on_a_mesh_a_pass_has_the_same_hidden_states_also_in_two_parts(config):
    config = CONFIGS[config]
    draft, one = tree(config), CausalLM(config)
    wanted = jax.jit(functools.partial(both, one))(weights(config), draft)
    mesh = sharding.as_mesh("data=2,stage=2")
    target = divided(config, mesh, 2)
    with sharding.using(mesh):
        params = target.shard(weights(config), mesh)
        found = jax.jit(functools.partial(both, target))(params, draft)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def in_turn(function, in_specs, out_specs):
    """``sharding.locally`` for the only device, which computes for all: ``vmap`` names the axis."""
    if not any(STAGE in spec for spec in in_specs):
        return function
    several = isinstance(out_specs, list)
    results = out_specs if several else [out_specs]

    def axis(spec):
        return spec.index(STAGE) if STAGE in spec else None

    def apart(tree, spec):
        """Leaves whose axis ``stage`` is two, the devices and what each has."""
        if STAGE not in spec:
            return tree
        at = axis(spec)
        return jax.tree.map(lambda x: x.reshape(*x.shape[:at], 2, -1, *x.shape[at + 1 :]), tree)

    def together(tree, spec):
        if STAGE not in spec:
            return tree
        at = axis(spec)
        return jax.tree.map(lambda x: x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :]), tree)

    def run(*args):
        args = [apart(tree, spec) for tree, spec in zip(args, in_specs, strict=True)]
        outs = tuple(axis(spec) for spec in results)
        axes = dict(in_axes=[axis(spec) for spec in in_specs], axis_name=STAGE)
        mapped = jax.vmap(function, out_axes=outs if several else outs[0], **axes)
        found = mapped(*args)
        found = [
            together(*pair) for pair in zip(found if several else [found], results, strict=True)
        ]
        return found if several else found[0]

    return run


@pytest.fixture
def one_for_all(monkeypatch):
    """Two devices of the axis ``stage`` are the only device, by turns."""
    send = jax.lax.ppermute  # under ``vmap`` it wants every device to receive something

    def from_all(x, axis, pairs):
        return send(x, axis, [*pairs, (len(pairs), 0)])

    monkeypatch.setattr(jax.lax, "ppermute", from_all)
    monkeypatch.setattr(sharding, "locally", in_turn)
    monkeypatch.setattr(sharding, "size", lambda axis: 2 if axis == STAGE else 1)
    monkeypatch.setattr(sharding, "spread", lambda x, *axes: x)
    monkeypatch.setattr(kernels, "current", lambda mesh=None: XlaCpuBackend())


TWO = dataclasses.replace(LLAMA, num_layers=2)


def in_parts():
    """Logits of a divided decoder over a random cache by its weights, those of the whole decoder,
    and the divided weights."""
    random = np.random.default_rng(2)

    def some(*shape):
        return random.normal(size=shape).astype(np.float32)

    params = jax.tree.map(lambda x: 0.3 * some(*x.shape), abstract(TWO)[1])  # compiles nothing
    draft, past = tree(TWO), [some(BATCH, 2, 12, 8) for _ in range(4)]
    keys, values = (np.concatenate(past[i::2], axis=1) for i in range(2))
    whole = (past[0], past[1]), (past[2], past[3])
    target = PipelinedLM(CausalLM(TWO), 2, microbatches=2)
    found = jax.jit(lambda params: target.verify(params, ((keys, values),), draft).logits)
    wanted = jax.jit(lambda params: CausalLM(TWO).verify(params, whole, draft).logits)(params)
    return found, wanted, stage_weights.divided(params, TWO, 2)


@pytest.mark.usefixtures("one_for_all", "quick_compilation")
def test_fault_of_devices_in_another_order_is_seen():
    found, wanted, params = in_parts()
    np.testing.assert_allclose(found(params), wanted, rtol=1e-4, atol=1e-4)
    layers = jax.tree.map(lambda x: x[::-1], params[stage_weights.LAYERS])
    other = found(params | {stage_weights.LAYERS: layers})
    assert np.max(np.abs(other - wanted)) > 0.1


@pytest.mark.usefixtures("one_for_all", "quick_compilation")
def test_a_device_that_sends_nothing_would_be_seen(monkeypatch):
    monkeypatch.setattr(jax.lax, "ppermute", lambda x, axis, pairs: jnp.zeros_like(x))
    found, wanted, params = in_parts()
    assert np.max(np.abs(found(params) - wanted)) > 0.1


# ------------------------------------------------------------------- parts, and nothing more


@pytest.mark.parametrize("mesh", MESHES)
def test_on_a_mesh_a_device_holds_its_layers_and_their_cache(mesh, tmp_path, monkeypatch):
    save_pretrained(Decoder(LLAMA, rngs=nnx.Rngs(5)), tmp_path)
    read, read_slice = [], reading.read_slice

    def counted(*given):
        piece = read_slice(*given)
        read.append(piece.nbytes)
        return piece

    monkeypatch.setattr(reading, "read_slice", counted)
    lm = specjax.load(tmp_path, mesh=mesh, tokenizer=False)
    total = (tmp_path / "model.safetensors").stat().st_size
    assert 0.9 * total < sum(read) < total  # though several devices hold each layer
    sizes = dict(lm.mesh.shape)
    layers = jax.tree.leaves(lm.params[stage_weights.LAYERS])
    with sharding.using(lm.mesh):
        cache = jax.jit(lambda: lm.target.init(lm.params, BATCH, 64))()
    for leaf in layers:
        assert leaf.addressable_shards[0].data.size == leaf.size / sizes[STAGE]
    for leaf in jax.tree.leaves(cache):
        assert leaf.addressable_shards[0].data.size == leaf.size / sizes[STAGE] / sizes[DATA]
    one = stage_weights.divided(specjax.load(tmp_path, tokenizer=False).params, LLAMA, sizes[STAGE])
    jax.tree.map(np.testing.assert_array_equal, lm.params, one)


def test_on_a_mesh_weights_in_few_bits_are_divided_as_floats(tmp_path):
    save_pretrained(Decoder(LLAMA, rngs=nnx.Rngs(5)), tmp_path / "floats")
    small = specjax.load(tmp_path / "floats", tokenizer=False, quantize="int8")
    save_pretrained(small, tmp_path / "bits")
    of = dict(tokenizer=False, quantize="float")
    lm = specjax.load(tmp_path / "bits", mesh="stage=2", **of)
    one = stage_weights.divided(specjax.load(tmp_path / "bits", **of).params, LLAMA, 2)
    jax.tree.map(np.testing.assert_array_equal, lm.params, one)
    with pytest.raises(ValueError, match="few bits"):
        specjax.load(tmp_path / "bits", mesh="stage=2", tokenizer=False)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_on_a_mesh_a_round_copies_no_cache(microbatches):
    target, mesh = (
        divided(LLAMA, "data=2,stage=2", microbatches),
        sharding.as_mesh("data=2,stage=2"),
    )
    params = {"target": target.shard(weights(LLAMA), mesh), "drafter": weights(SMALL, 1)}
    with sharding.using(mesh):
        text = hlo(target, DraftModel(3, model=CausalLM(SMALL)), params, BATCH, 208, 0.0)
    rows, own = BATCH // 2, (2, 208, 8)
    assert not cache_copies(text, (rows, *own))
    assert "collective-permute" in text


# ------------------------------------------------------------------- costs and refusals


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 1), (4, 1), (4, 4), (3, 8)])
def test_a_schedule_counts_the_ticks_of_its_table(stages, microbatches):
    schedule = StageSchedule(stages, microbatches)
    pairs = [(part + stage, stage) for part in range(microbatches) for stage in range(stages)]
    assert schedule.ticks == 1 + max(tick for tick, _ in pairs)
    assert len(set(pairs)) == len(pairs) == stages * microbatches  # a device does one at a time
    assert schedule.bubble == pytest.approx(1 - len(pairs) / (schedule.ticks * stages))


def test_rows_that_microbatches_do_not_divide_are_passed_on_in_fewer():
    target = PipelinedLM(CausalLM(LLAMA), 2, microbatches=4)
    assert [target.schedule(rows).microbatches for rows in (1, 2, 6, 8)] == [1, 2, 2, 4]


def test_what_cannot_be_divided_is_refused_with_the_way_out():
    whole = CausalLM(LLAMA)
    mixed = dataclasses.replace(LLAMA, **shapes.EXPERTS, plain_first=1)
    for make, message in (
        (lambda: PipelinedLM(whole, 3), "stage=3 .*share the 4 layers .*stage: 1, 2, 4"),
        (lambda: PipelinedLM(CausalLM(mixed), 2), "those with experts.*accepted for stage: 1"),
        (lambda: PipelinedLM(windowed(whole, 8, 1), 2), "window=8: a small cache"),
        (lambda: PipelinedLM(dataclasses.replace(whole, quantized="int8"), 2), "quantize=int8"),
        (lambda: PipelinedLM(whole, 2, microbatches=0), "microbatches=0"),
        (lambda: sharding.axis_sizes("model=2,stage=2"), "model=2 and stage=2 at once"),
        (lambda: sharding.check_divided(1, 2), "stage=2, .*into 1 parts: load the target on"),
        (lambda: PipelinedLM(whole, 2).init(None, 1, 8), "stage=1, .*into 2 parts"),
        (lambda: SelfDraft(3, target=PipelinedLM(whole, 2), exit=2), "its parts do not draft"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_on_a_mesh_a_target_that_is_not_divided_is_refused(tmp_path):
    params = {"target": weights(LLAMA)}
    with pytest.raises(ValueError, match="stage=2, .*into 1 parts"):
        decoded(CausalLM(LLAMA), Plain(), params, "stage=2")
    with pytest.raises(ValueError, match="stage=1, .*into 2 parts"):
        decoded(divided(LLAMA, "stage=2"), Plain(), params, "data=2")
    save_pretrained(Decoder(LLAMA, rngs=nnx.Rngs(5)), tmp_path)
    with pytest.raises(ValueError, match="stage=3 devices cannot share the 4 layers"):
        specjax.load(tmp_path, mesh="stage=3", tokenizer=False)
    with pytest.raises(ValueError, match="quantize=int8: the weights are in few bits"):
        specjax.load(tmp_path, mesh="stage=2", tokenizer=False, quantize="int8")
