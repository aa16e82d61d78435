"""SPIRe: laws of rounds against NumPy, memories, what is kept, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import cache_copies, hlo
from drawn_rounds import drawn_rounds
from masked_decoder import softmax
from shapes import TINY
from toys import decoder_weights, whole

import specjax
from specjax.drafters import Plain, SPIRe
from specjax.drafters.spire import SPIReConfig
from specjax.models import CausalLM

CONFIG = dataclasses.replace(TINY, max_positions=512, num_layers=3)
TARGET, BLOCKS, WINDOW, SINKS, DRAFTED = CausalLM(CONFIG), 2, 5, 2, 3
LAYERS = dataclasses.replace(CONFIG, num_layers=BLOCKS)
LENGTHS = np.asarray([1, 4, 8, 23], np.int32)  # the ring is not full, is just full, has turned
PROMPTS = np.random.default_rng(0).integers(0, 67, (4, 23)).astype(np.int32)


def drafter(**settings):
    config = SPIReConfig(layers=LAYERS, window=WINDOW, sinks=SINKS)
    settings = dict(topology=specjax.trees.chain(DRAFTED), sibling_sampling="iid") | settings
    return SPIRe(**dict(config=config, target=TARGET) | settings)


@functools.cache
def params():
    """Weights of the target, and of a drafter near its last layers."""
    target, random = decoder_weights(CONFIG, 0), np.random.default_rng(1)
    near = lambda x: jnp.asarray(x + 0.1 * random.normal(size=x.shape), jnp.float32)  # noqa: E731
    blocks = {i: target["blocks"][i + 1] for i in range(BLOCKS)}
    own = {"blocks": blocks, "norm": target["norm"]}
    own = jax.tree.map(near, own)
    own["memory"] = jnp.asarray(random.normal(size=(BLOCKS, BLOCKS + 1)), jnp.float32)
    return {"target": target, "drafter": own}


# ------------------------------------------------------------------- the laws, written out


def plain(tree):
    """Arrays in place of parameters, in float64."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def normed(x, weight):
    return x / np.sqrt(np.mean(x**2) + CONFIG.norm_eps) * weight


def rotated(x, position):
    size = CONFIG.head_dim
    turn = position * CONFIG.rope_theta ** (-np.arange(0, size, 2) / size)
    a, b = np.split(x.reshape(-1, size), 2, axis=1)
    cos, sin = np.cos(turn), np.sin(turn)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)


def laws(own, target, states, text, length, fault=None):
    """The laws of a draft after ``length`` tokens of a text, whose tokens it is fed.

    ``states [T, BLOCKS, H]``: what the target's last blocks read of each token.
    """
    window = WINDOW + (fault == "the window is longer")
    shares = softmax(own["memory"][...])
    remembered = [[states[j, layer] for j in range(length - 1)] for layer in range(BLOCKS)]
    said = []
    for t in range(length - 1, length - 1 + DRAFTED):
        x = [target["embedding"][...][text[t]]]
        for layer in range(BLOCKS):
            block = own["blocks"][layer]
            weight = {name: block["attention"][name]["weight"][...] for name in "qkvo"}
            norm = block["attention_norm"]["weight"][...]
            read = normed(x[-1], norm)
            query = rotated(weight["q"] @ read, t).reshape(CONFIG.num_kv_heads, -1, CONFIG.head_dim)
            seen = [j for j in range(t) if j < SINKS or j > t - window]
            past = [(j, normed(remembered[layer][j], norm)) for j in seen] + [(t, read)]
            keys = np.stack([rotated(weight["k"] @ m, j) for j, m in past])
            values = np.stack([(weight["v"] @ m).reshape(CONFIG.num_kv_heads, -1) for _, m in past])
            scores = np.einsum("kge,mke->kgm", query, keys) / np.sqrt(CONFIG.head_dim)
            out = np.einsum("kgm,mke->kge", softmax(scores), values).reshape(-1)
            middle = x[-1] + weight["o"] @ out
            read = normed(middle, block["mlp_norm"]["weight"][...])
            gate, up, down = (block["mlp"][n]["weight"][...] for n in ("gate", "up", "down"))
            gate = gate @ read
            x.append(middle + down @ (gate / (1 + np.exp(-gate)) * (up @ read)))
        for layer in range(BLOCKS):
            memory = np.einsum("k,kh->h", shares[layer], np.stack(x))
            remembered[layer].append(x[layer] if fault == "no feedback" else memory)
        head = target["lm_head"]["weight"][...]
        said.append(softmax(head @ normed(x[-1], own["norm"]["weight"][...])))
    return np.stack(said)


@jax.jit
def read(target, tokens):
    """What the target's last blocks read of whole texts ``[B, T]``: ``[B, T, BLOCKS, H]``."""
    cache = TARGET.init(target, len(tokens), tokens.shape[1])
    found = TARGET.verify(target, cache, whole(tokens), features=drafter().features).features
    return found.reshape(*tokens.shape, BLOCKS, -1)


@functools.cache
def rounds(num=6):
    """``(length, text, laws, what the target read)`` of each row, round by round."""
    found = []
    for state, draft in drawn_rounds(TARGET, drafter(), params(), PROMPTS, LENGTHS, num):
        known = jax.device_get(read(params()["target"], state.tokens))
        lengths = state.length.tolist()
        rows = zip(state.tokens, lengths, draft.tokens, draft.laws, known, strict=True)
        found.append([(n, [*text[:n], *new[1:]], law, y) for text, n, new, law, y in rows])
    return found


def furthest(fault=None):
    """The greatest difference of the laws of all rounds from those of NumPy."""
    own, target, most = plain(params()["drafter"]), plain(params()["target"]), 0.0
    for found in rounds():
        for length, text, stated, states in found:
            said = laws(own, target, np.asarray(states, np.float64), text, length, fault)
            most = max(most, np.abs(stated - said).max())
    return most


@pytest.mark.usefixtures("quick_compilation")
def test_after_any_number_of_rounds_laws_are_those_of_numpy():
    """Drafted tokens see memories, committed ones what the target read, over sinks and window."""
    assert furthest() < 2e-4
    lengths = np.asarray([[length for length, *_ in found] for found in rounds()])
    assert (np.diff(lengths, axis=0) > 1).any() and lengths[-1].min() > 5
    for fault in ("the window is longer", "no feedback"):
        assert furthest(fault) > 1e-2, fault


# ------------------------------------------------------------------- texts, caches, refusals


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("tree", [None, "2x1"])
def test_greedy_texts_are_those_of_plain_decoding(tree):
    prompts = np.random.default_rng(1).integers(0, 67, (3, 300)).astype(np.int32)
    shape = {} if tree is None else {"topology": specjax.trees.parse(tree)}
    run = functools.partial(
        specjax.decode,
        TARGET,
        params=params(),
        tokens=prompts,
        lengths=np.asarray([300, 1, 40], np.int32),
        key=jax.random.key(0),
        max_new_tokens=30,
    )
    out, none = run(drafter(sibling_sampling="top", **shape)), run(Plain())
    np.testing.assert_array_equal(out.tokens, none.tokens)
    assert not out.stats.approximate and np.asarray(out.stats.accepted).sum() > 1


def test_the_cache_has_a_size_of_its_own_and_the_loop_copies_none():
    state = jax.eval_shape(lambda p: drafter().init(p["drafter"], p["target"], 3, 300), params())
    assert {x.shape for x in jax.tree.leaves(state)} == {(3, 2, SINKS + WINDOW, 8)}
    text = hlo(TARGET, drafter(), params(), 3, 300, 1.0)
    assert not cache_copies(text, (3, CONFIG.num_kv_heads, 300, CONFIG.head_dim))


def test_shapes_that_cannot_be_are_refused():
    make = functools.partial(SPIReConfig, layers=LAYERS)
    assert make().window == 64 and make().sinks == 1
    with pytest.raises(ValueError, match="window of 3 tokens is smaller than the draft"):
        drafter(config=make(window=3))
    with pytest.raises(ValueError, match="would hold all of it"):
        make(window=512)
    with pytest.raises(ValueError, match="give the number"):
        make(window=None)
    with pytest.raises(ValueError, match="give kv_rank=0"):
        make(layers=dataclasses.replace(LAYERS, window=4))
    deep = dataclasses.replace(LAYERS, num_layers=4)
    with pytest.raises(ValueError, match="its 4 blocks .* 3 layers"):
        drafter(config=make(layers=deep, window=WINDOW))
