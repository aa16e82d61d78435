"""The Flax decoder as a target: trees, caches longer than one prefix, and the compiled loop."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
from compiled import cache_copies, hlo, table_copies
from flax import nnx
from toys import heads

import specjax
from specjax import kernels
from specjax.decoding import reference
from specjax.drafters import (
    Adaptive,
    Cascade,
    DraftModel,
    Lookahead,
    NGram,
    Plain,
    Recycling,
    SelfDraft,
    Suffix,
)
from specjax.drafters.hydra import Hydra, HydraConfig
from specjax.drafters.prefix import PENDING, prefix_config
from specjax.drafters.speculator import Speculator, SpeculatorConfig
from specjax.kernels.attention import BLOCK, prefix_sizes
from specjax.models.causal_lm import CausalLM
from specjax.models.decoder import Decoder
from specjax.trees import branching, comb
from specjax.types import Draft

LLAMA = dataclasses.replace(shapes.TINY, max_positions=4096, qk_norm=True)
GPT2 = dataclasses.replace(
    LLAMA,
    model_type="gpt2",
    norm="layer",
    positions="learned",
    gated_mlp=False,
    activation="gelu_tanh",
    qkv_bias=True,
    qk_norm=False,
    tie_embeddings=True,
)
MIXED = dataclasses.replace(LLAMA, plain_first=1, **shapes.EXPERTS)
LATENT = dataclasses.replace(LLAMA, qk_norm=False, **shapes.LATENT)
SMALL = dataclasses.replace(LLAMA, hidden_size=16, num_layers=1, num_heads=2, qk_norm=False)


@functools.cache
def model(config, seed=0):
    """A decoder with random weights, large enough for its laws to be far from uniform."""
    params = nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))[1]
    return CausalLM(config), jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, params)


CASCADES = ("cascade", "comb")


def drafters():
    sizes = dict(hidden_size=LLAMA.hidden_size, vocab_size=LLAMA.vocab_size, num_heads=1)
    shape = HydraConfig(tied=True, prefix=prefix_config(LLAMA), **sizes)
    hydra = Hydra(config=shape, target=CausalLM(LLAMA))
    own = dict(cell="lstm", tied=True, inner_size=12, prefix=prefix_config(LLAMA))
    recurrent = SpeculatorConfig(**own, **sizes)
    return {
        "plain": Plain(),
        "draft": DraftModel(num_draft=3, model=CausalLM(SMALL)),
        "cascade": Cascade(
            DraftModel(num_draft=3, model=CausalLM(SMALL)),
            DraftModel(num_draft=2, model=CausalLM(SMALL)),
        ),
        "comb": Cascade(
            DraftModel(num_draft=3, model=CausalLM(SMALL)),
            DraftModel(num_draft=2, model=CausalLM(SMALL)),
            tree=comb(2, 3),
        ),
        "ngram": NGram(num_draft=7, shortest=1),
        "suffix": Suffix(),
        "recycling": Recycling(vocab_size=LLAMA.vocab_size, topology=branching(3, 2, 1)),
        "lookahead": Lookahead(vocab_size=LLAMA.vocab_size, window=3, ngram=3, guesses=2),
        "self": SelfDraft(num_draft=3, target=CausalLM(LLAMA), exit=1),
        "hydra": hydra,
        "speculator": Speculator(config=recurrent, target=CausalLM(LLAMA)),
        "adaptive": Adaptive(Speculator(config=recurrent, target=CausalLM(LLAMA))),
    }


def params_of(config, name="draft"):
    reads = name in ("hydra", "speculator")
    own = heads(drafters()[name]) if reads else model(SMALL, 1)[1]
    if name in CASCADES:
        own = {"outer": own, "inner": own}
    if name == "adaptive":
        own = {"inner": heads(drafters()["speculator"]), "costs": jnp.asarray([1.0, 1.2])}
    return {"target": model(config)[1], "drafter": None if name == "suffix" else own}


@pytest.mark.parametrize(
    "config", [LLAMA, GPT2, MIXED, LATENT], ids=["llama", "gpt2", "experts", "latents"]
)
def test_logits_of_a_tree_are_those_of_each_path(config):
    target, params = model(config)
    topology = (-1, 0, 0, 1, 1, 2)
    prompt, nodes = [5, 6, 7, 8], [9, 1, 2, 3, 4, 1]
    cache = target.init(params, 1, 16)
    sequence = jnp.asarray([prompt])
    read = Draft(start=jnp.asarray([0]), tokens=sequence, topology=(-1, 0, 1, 2))
    entries = target.verify(params, cache, read).entries
    every = specjax.Verdict(
        path=jnp.arange(4)[None], count=jnp.asarray([3]), token=jnp.asarray([0])
    )
    cache = target.commit(cache, entries, read.start, every)
    draft = Draft(start=jnp.asarray([4]), tokens=jnp.asarray([nodes]), topology=topology)
    scores = target.verify(params, cache, draft, features=(0, 1, 2))
    assert scores.features.shape == (1, 6, 3 * config.hidden_size)
    for node in range(6):
        path = [node]
        while topology[path[0]] >= 0:
            path.insert(0, topology[path[0]])
        alone = jnp.asarray([prompt + [nodes[n] for n in path]])
        expected = reference.logits(target, params, alone)[0, -1]
        np.testing.assert_allclose(scores.logits[0, node], expected, atol=2e-5)


@pytest.mark.parametrize(
    ("config", "longest"),
    [(LLAMA, 240), (LLAMA, BLOCK + 30), (LATENT, 240)],
    ids=["llama", "llama-blocks", "latents"],
)
def test_greedy_text_across_prefix_sizes_equals_one_pass_over_the_whole(config, longest):
    """Every token is the argmax of a cacheless pass over the finished text: from 256 slots into
    the next size, and within a second block of a prefix that is read block by block."""
    target, params = model(config)
    prompts = np.random.default_rng(0).integers(0, 67, (3, longest)).astype(np.int32)
    lengths = np.asarray([longest, 3, 101], np.int32)
    texts = {}
    for name, drafter in drafters().items():
        if longest > BLOCK and name == "draft":  # its own cache, of a model that ends before
            continue
        if name in ("hydra", "self") and config != LLAMA:  # whose heads or layers they are
            continue
        out = specjax.decode(
            target,
            drafter,
            params_of(config, name),
            prompts,
            lengths,
            key=jax.random.key(0),
            max_new_tokens=60,
        )
        texts[name] = np.asarray(out.tokens)
    whole = np.asarray(reference.logits(target, params, jnp.asarray(texts["plain"])))
    said = whole.argmax(axis=-1)
    for row, length in enumerate(lengths):
        new = slice(length, length + 60)
        assert (said[row, length - 1 : length + 59] == texts["plain"][row, new]).all()
    for name, text in texts.items():
        assert (text == texts["plain"]).all(), name


def test_a_cost_that_follows_the_tokens_in_use():
    assert prefix_sizes(100) == (100,)
    assert prefix_sizes(256) == (256,)
    assert prefix_sizes(1000) == (256, 512, 1000)
    assert prefix_sizes(3 * BLOCK) == (256, 512, 1024, BLOCK, 3 * BLOCK)
    key = jax.random.key(0)
    query = jax.random.normal(key, (2, 2, 8, 2, 3))
    fresh = jax.random.normal(key, (2, 2, 3, 8))
    slots = jax.random.normal(key, (2, 2, 600, 8))
    mask = jnp.triu(jnp.ones((3, 3), bool))[None]
    length = jnp.asarray([200, 31])
    attend = kernels.current().attend
    results = [
        attend(query, fresh, fresh, mask, (slots, slots), length, jnp.int32(choice))
        for choice in range(3)
    ]
    for other in results[1:]:
        np.testing.assert_allclose(results[0], other, atol=1e-6)


# ------------------------------------------------------------------- the compiled program


def cache_shape(batch, capacity):
    return batch, LLAMA.num_kv_heads, capacity, LLAMA.head_dim


PROGRAMS = [
    ("plain", 1, 300, 0),
    ("plain", 3, 300, 1.0),
    ("plain", 1, BLOCK + 256, 0),
    ("ngram", 3, BLOCK + 256, 0),
    ("draft", 1, 300, 1.0),
    ("draft", 3, 100, 0),
    ("cascade", 1, 300, 0),
    ("cascade", 3, 300, 1.0),
    ("comb", 3, 300, 1.0),
    ("self", 1, 300, 0),
    ("self", 3, 300, 1.0),
    ("ngram", 1, 300, 0),
    ("ngram", 3, 300, 1.0),
    ("suffix", 1, 300, 1.0),
    ("recycling", 3, 300, 0),
    ("lookahead", 3, 300, 1.0),
    ("hydra", 1, 300, 0),
    ("speculator", 3, 300, 1.0),
    ("adaptive", 1, 300, 0),
    ("adaptive", 3, 300, 1.0),
]


@pytest.mark.parametrize(("name", "batch", "capacity", "temperature"), PROGRAMS)
def test_the_loop_copies_no_cache_and_never_leaves_the_device(name, batch, capacity, temperature):
    target = model(LLAMA)[0]
    text = hlo(target, drafters()[name], params_of(LLAMA, name), batch, capacity, temperature)
    pending = batch, 1, PENDING, LLAMA.hidden_size
    longer = cache_shape(batch, capacity + 3)  # of the levels of a cascade
    assert not cache_copies(text, cache_shape(batch, capacity), longer, pending)
    assert (f"f32[{','.join(map(str, longer))}]" in text) == (name in CASCADES)
    # of recycling and lookahead; the text, and its index
    tables = (batch, LLAMA.vocab_size, 3), (batch, LLAMA.vocab_size, 2, 2), (batch, capacity)
    assert not table_copies(text, *tables)
    assert not re.search(r"\b(infeed|outfeed|send|recv)\(|callback", text)
    if capacity > 256 or name == "ngram":  # the switches are there, not folded away
        kernels = text.count("specjax_attention")  # which need no switch
        assert text.count(" conditional(") + kernels >= LLAMA.num_layers


@dataclasses.dataclass(frozen=True)
class WritesWhileScoring(CausalLM):
    """A fault: the cache is written within the pass, so it goes through the switch of widths."""

    def verify(self, params, cache, draft, **settings):
        scores = super().verify(params, cache, draft, **settings)
        nodes = draft.num_nodes
        path = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), draft.tokens.shape)
        every = specjax.Verdict(path=path, count=path[:, -1], token=path[:, 0])
        written = super().commit(cache, scores.entries, draft.start, every)
        return dataclasses.replace(scores, entries=written)

    def commit(self, cache, entries, start, verdict):
        return entries


def test_a_cache_written_inside_the_pass_is_seen_as_copies():
    text = hlo(WritesWhileScoring(LLAMA), drafters()["ngram"], params_of(LLAMA), 1, 300, 0)
    assert len(cache_copies(text, cache_shape(1, 300))) >= LLAMA.num_layers


# ------------------------------------------------------------------- many devices


def test_decode_within_a_mesh_gives_the_tokens_of_one_device():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    target, _ = model(LLAMA)
    prompts = np.random.default_rng(1).integers(0, 67, (4, 9)).astype(np.int32)
    lengths = np.asarray([9, 2, 5, 7], np.int32)
    spread = jax.NamedSharding(mesh, jax.P("data"))

    def place(x):
        divides = x.ndim == 2 and x.shape[0] % 2 == 0
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P("model") if divides else jax.P()))

    for name, drafter in drafters().items():
        settings = dict(key=jax.random.key(0), max_new_tokens=12)
        params = params_of(LLAMA, name)
        one = specjax.decode(target, drafter, params, prompts, lengths, **settings)
        with jax.set_mesh(mesh):
            many = specjax.decode(
                target,
                drafter,
                jax.tree.map(place, params),
                jax.device_put(prompts, spread),
                jax.device_put(lengths, spread),
                **settings,
            )
        assert len(many.tokens.sharding.device_set) == 8
        assert (np.asarray(one.tokens) == np.asarray(many.tokens)).all(), name


def test_a_mesh_that_wants_explicit_shardings_is_refused_with_the_way_out():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    settings = dict(key=jax.random.key(0), max_new_tokens=1)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="AxisType.Auto"):
        specjax.decode(
            model(LLAMA)[0],
            Plain(),
            params_of(LLAMA),
            np.asarray([[1]]),
            np.asarray([1]),
            **settings,
        )
