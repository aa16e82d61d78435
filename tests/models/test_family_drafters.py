"""Every family with every drafter: the greedy text is that of plain decoding, token for token.

The models are the golden ones, whose windows the texts outgrow. The draft model is of the same
family, with weights near the target's, so that its own cache has the family's windows too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import CASES, GOLDEN
from toys import heads

import specjax
from specjax import reference, topology
from specjax.drafters import Adaptive, DraftModel, NGram, Plain
from specjax.drafters.medusa import Medusa, MedusaConfig
from specjax.models import load_config, load_weights
from specjax.models.causal_lm import CausalLM

NEW = 14
PROMPTS = np.random.default_rng(0).integers(0, 64, (2, 12)).astype(np.int32)
LENGTHS = np.asarray([12, 1], np.int32)
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
    two share one compilation. Trees go through masks and paths of their own, heads read what the
    target's layers say: what distinguishes all further drafters for a target."""
    target, params = model(kind)
    tree = topology.Tree((-1, 0, 0, 1, 2))
    shape = dict(hidden_size=target.config.hidden_size, vocab_size=target.vocab_size)
    medusa = Medusa(config=MedusaConfig(**shape, num_heads=2), target=target, topology=tree)
    adaptive = Adaptive(NGram(num_draft=2, shortest=1), widths=(0, 2))
    costs = np.asarray([1.0, 1.1], np.float32)
    return {
        "plain": (Plain(), None),
        "draft": (DraftModel(num_draft=2, model=target), near(params)),
        "tree": (DraftModel(model=target, topology=tree, how="top"), near(params)),
        "heads": (medusa, heads(medusa)),
        "ngram": (adaptive, {"inner": None, "costs": adaptive.only(2)}),
        "adaptive": (adaptive, {"inner": None, "costs": costs}),
    }


@functools.cache
def said(kind):
    """The plain text, int32 ``[B, L]``, checked against one pass over the whole of it."""
    target, params = model(kind)
    text = run(kind, "plain").tokens
    best = np.asarray(reference.logits(target, params, text)).argmax(axis=-1)
    for row, length in enumerate(LENGTHS):
        new = np.asarray(text)[row, length : length + NEW]
        assert (best[row, length - 1 : length - 1 + NEW] == new).all()
    return np.asarray(text)


def run(kind, name, mesh=None):
    target, params = model(kind)
    drafter, weights = drafters(kind)[name]
    params = {"target": params, "drafter": jax.tree.map(jnp.asarray, weights)}
    settings = dict(key=jax.random.key(0), max_new_tokens=NEW, mesh=mesh)
    return specjax.decode(target, drafter, params, PROMPTS, LENGTHS, **settings)


CASES_OF = [(k, name) for k in FAMILIES for name in ("plain", "tree", "ngram", "adaptive")]
# layers of which the most are of a kind of their own
CASES_OF += [(kind, "heads") for kind in ("gemma2", "deepseek_v3")]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("kind", "name"), CASES_OF)
def test_the_greedy_text_of_a_family_is_the_same_with_every_drafter(kind, name):
    out = run(kind, name)
    np.testing.assert_array_equal(out.tokens, said(kind))
    if name == "tree":
        assert out.stats.accepted.sum() > 0  # entries of accepted tokens have been committed


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_greedy_text_of_a_family_is_the_same_on_a_mesh(kind):
    np.testing.assert_array_equal(run(kind, "draft", mesh="data=2,model=2").tokens, said(kind))
