"""Every family with every drafter: the greedy text is that of plain decoding, token for token.

The models are the golden ones, whose windows the texts outgrow. The draft model is of the same
family, with weights near the target's, so that its own cache has the family's windows too.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import CASES, GOLDEN
from toys import heads, whole

import specjax
from specjax import trees
from specjax.drafters import Adaptive, DraftModel, NGram, Plain, SelfDraft
from specjax.drafters.eagle3 import Eagle3, Eagle3Config, usual_layers
from specjax.drafters.kangaroo import Kangaroo, KangarooConfig
from specjax.drafters.medusa import Medusa, MedusaConfig
from specjax.drafters.mtp import MTP, MTPConfig, module_layer
from specjax.models import DecoderConfig, load_config, load_weights
from specjax.models.causal_lm import CausalLM

NEW = 14
PROMPTS = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)
LENGTHS = np.asarray([12, 1], np.int32)
TREE = (-1, 0, 0, 1, 2)
# of EAGLE-3's own layer, with a window that the texts outgrow
LAYER = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=64,
    window=8,
)
# one case a family, one with windows where there is one
FAMILIES = {load_config(GOLDEN / case).model_type: case for case in CASES}
FAMILIES |= {kind: f"{kind}_window" for kind in FAMILIES if f"{kind}_window" in CASES}


@functools.cache
def model(kind):
    config = load_config(GOLDEN / FAMILIES[kind])
    return CausalLM(config), load_weights(GOLDEN / FAMILIES[kind], config, "float32")


def near(params):
    """Weights that agree with ``params`` about most tokens, not about all."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + 0.3 * np.std(x) * rng.normal(size=x.shape), params)


def drafters(kind):
    """By name, with their weights. ``ngram`` is ``adaptive`` at a width that is held, so that the
    two share one compilation. Trees go through masks and paths of their own."""
    target, params = model(kind)
    tree = DraftModel(model=target, topology=trees.Tree(TREE), sibling_sampling="top")
    adaptive = Adaptive(NGram(num_draft=2, shortest=1), widths=(0, 2))
    costs = np.asarray([1.0, 1.1], np.float32)
    skip = ("mlp.0", "attention.1")[: target.num_layers]  # one golden model has one layer
    layer = dataclasses.replace(LAYER, hidden_size=target.hidden_size)
    adapter = Kangaroo(
        config=KangarooConfig(layer=layer),
        target=target,
        topology=trees.Tree(TREE),
        layer=1,
        threshold=0.1,
    )
    return {
        "plain": (Plain(), None),
        "draft": (DraftModel(num_draft=2, model=target), near(params)),
        "tree": (tree, near(params)),
        "ngram": (adaptive, {"inner": None, "costs": adaptive.only(2)}),
        "adaptive": (adaptive, {"inner": None, "costs": costs}),
        "exit": (SelfDraft(target=target, topology=trees.Tree(TREE), exit=1), None),
        "skip": (SelfDraft(num_draft=2, target=target, skip=skip), None),
        "kangaroo": (adapter, heads(adapter)),
    }


@functools.partial(jax.jit, static_argnums=0)
def states_of(target, params, tokens):
    """One pass over whole texts int32 ``[B, L]``: the logits ``[B, L, V]``, and the hidden states
    ``[B, L, 3 * H]`` that EAGLE-3 reads, the last of which is the one that others read."""
    cache, layers = target.init(params, *tokens.shape), usual_layers(target.config.num_layers)
    scores = target.verify(params, cache, whole(tokens), features=layers)
    return scores.logits, scores.features


@functools.cache
def said(kind):
    """The plain text, int32 ``[B, L]``, checked against one pass over the whole of it, and the
    hidden states of that pass."""
    target, params = model(kind)
    text = np.asarray(run(kind, *drafters(kind)["plain"]).tokens)
    logits, states = map(np.asarray, states_of(target, params, text))
    for row, length in enumerate(LENGTHS):
        new = text[row, length : length + NEW]
        assert (logits.argmax(axis=-1)[row, length - 1 : length - 1 + NEW] == new).all()
    return text, states


def run(kind, drafter, weights, mesh=None):
    target, params = model(kind)
    params = {"target": params, "drafter": jax.tree.map(jnp.asarray, weights)}
    settings = dict(key=jax.random.key(0), max_new_tokens=NEW, mesh=mesh)
    return specjax.decode(target, drafter, params, PROMPTS, LENGTHS, **settings)


# ----------------------------------------------------------- what reads the hidden states


def reader(kind, name):
    """``medusa`` reads the last hidden state, at the root; ``eagle3`` several, into a layer with a
    cache of its own; ``mtp`` the last one, into two modules with layers of the family's own kind.

    Their LM heads are fitted to the plain text: from the target's hidden states after it they say
    what stands there, and from states of other tokens, or out of order, they do not.
    """
    target, _ = model(kind)
    common = dict(target=target, topology=trees.Tree(TREE))
    size = target.config.hidden_size
    if name == "medusa":
        shape = dict(hidden_size=size, vocab_size=target.vocab_size)
        drafter = Medusa(config=MedusaConfig(**shape, num_heads=2, num_layers=0), **common)
        weights, states = heads(drafter), said(kind)[1][:, :, -size:]
        for ahead, head in weights["lm_heads"].items():
            head["weight"] = fitted(kind, states, 2 + ahead)
        return drafter, weights
    if name == "eagle3":
        drafter = Eagle3(config=Eagle3Config(layer=LAYER, feature_size=size), **common)
    else:
        config = MTPConfig(layer=module_layer(target.config), num_modules=2, own_head=True)
        drafter = MTP(config=config, **common)
    weights = heads(drafter)
    weights["lm_head"]["weight"] = jnp.eye(*weights["lm_head"]["weight"].shape)
    weights["lm_head"]["weight"] = fitted(kind, outputs(kind, drafter, weights), 2)
    return drafter, weights


def fitted(kind, states, ahead):
    """An LM head ``[V, H]`` that says of ``states`` ``[B, L, H]`` the tokens so far ``ahead``."""
    text = said(kind)[0]
    found = [
        (states[row, i], text[row, i + ahead])
        for row, length in enumerate(LENGTHS)
        for i in range(max(length - 2, 0), length + NEW - ahead)
    ]
    read, tokens = map(np.stack, zip(*found, strict=True))
    head, *_ = np.linalg.lstsq(read, np.eye(model(kind)[0].vocab_size)[tokens], rcond=1e-4)
    return head.T.astype(np.float32)


def outputs(kind, drafter, weights):
    """``[B, L - 1, H]``, of the first step of ``drafter`` over all pairs of the plain text, where
    its LM head says what it is given."""
    target, params = model(kind)
    (text, states), head = said(kind), drafter.heads(weights)
    batch, pairs = text.shape[0], text.shape[1] - 1
    features = states[:, :-1, -drafter.feature_size :].reshape(batch * pairs, -1).T

    @jax.jit
    def step():
        embedded = head.embed(jnp.asarray(text[:, 1:]), target, params)
        sees = jnp.broadcast_to(jnp.tri(pairs, dtype=bool).T, (batch, pairs, pairs))
        positions = jnp.broadcast_to(jnp.arange(pairs), (batch, pairs))
        hidden = head.read(jnp.asarray(features))
        out, _ = head.run(head.enter(embedded, hidden), positions, sees, batch=batch)
        return head.logits(out, batch, target, params)

    return np.asarray(step())[:, :, : drafter.config.hidden_size]


CASES_OF = [(k, name) for k in FAMILIES for name in ("plain", "tree", "ngram", "adaptive")]
CASES_OF += [(k, name) for k in FAMILIES for name in ("exit", "skip")]
CASES_OF += [(k, "kangaroo") for k, case in FAMILIES.items() if case != "deepseek_v2_lite"]
# tokens that a round says at least, but for the first, where a row of one token has no hidden state
# to read, and the last, which the budget may cut off
READERS = {"medusa": 3, "eagle3": 2, "mtp": 2}
READERS_OF = [(k, name) for k in FAMILIES for name in ("medusa", "eagle3")]
READERS_OF += [("deepseek_v3", "mtp")]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("kind", "name"), CASES_OF)
def test_the_greedy_text_of_a_family_is_the_same_with_every_drafter(kind, name):
    out = run(kind, *drafters(kind)[name])
    np.testing.assert_array_equal(out.tokens, said(kind)[0])
    if name == "tree":
        assert out.stats.accepted.sum() > 0  # entries of accepted tokens have been committed


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("kind", "name"), READERS_OF)
def test_the_greedy_text_is_the_same_with_heads_and_they_read_the_right_states(kind, name):
    out = run(kind, *reader(kind, name))
    np.testing.assert_array_equal(out.tokens, said(kind)[0])
    assert (out.stats.rounds <= 1 + np.ceil((NEW - 1) / READERS[name])).all()


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_greedy_text_of_a_family_is_the_same_on_a_mesh(kind):
    out = run(kind, *drafters(kind)["draft"], mesh="data=2,model=2")
    np.testing.assert_array_equal(out.tokens, said(kind)[0])
