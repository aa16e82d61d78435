"""The tiny T5s and Whisper of ``tests/golden``, for their tests."""

import dataclasses
import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import GOLDEN, byte_tokenizer
from flax import nnx

import specjax
from specjax import drafters, trees
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.prefill import PREFILL_CHUNK
from specjax.models import Seq2SeqLM, load_config, load_weights, save_pretrained
from specjax.models.hf import abstract
from specjax.models.tokenizer import wrap_tokenizer

FOLDER = GOLDEN / "encoder_decoder"
TOLERANCE = 1e-4  # on logits of size 1 to 10


def golden_maker():
    """``tests/golden/make_encoder_decoder.py`` as a module; importing it needs no torch."""
    path = GOLDEN / "make_encoder_decoder.py"
    spec = importlib.util.spec_from_file_location("golden_make_encoder_decoder", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected(case):
    """``(inputs, the rest)`` of a golden file."""
    found = dict(np.load(FOLDER / case / "expected.npz"))
    inputs = {k: found.pop(k) for k in ("tokens", "lengths", "features") if k in found}
    return inputs, found


@functools.cache
def _forward(config):
    graph = abstract(config)[0]
    return jax.jit(lambda params, *given: nnx.merge(graph, params)(*given))


def logits_of(folder, inputs, tokens):
    """Float32 logits of the checkpoint in ``folder``."""
    config = load_config(folder)
    return _forward(config)(load_weights(folder, config, "float32"), inputs, jnp.asarray(tokens))


@functools.cache
def model(case):
    """A golden checkpoint as a target, and its weights."""
    config = load_config(FOLDER / case)
    return Seq2SeqLM(config), load_weights(FOLDER / case, config, "float32")


def shorter(case, **layers):
    """A golden checkpoint without its last layers, as a module."""
    target, params = model(case)
    config = dataclasses.replace(target.config, **layers)
    graph, state = abstract(config)
    kept = {path for path, _ in nnx.to_flat_state(state)}
    flat = [(path, value) for path, value in nnx.to_flat_state(params) if path in kept]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def check_both_directions(case, kind, folder):
    """Asserts that a random model of transformers' class ``kind`` has the same logits here, and
    again there after it was saved from here."""
    maker = golden_maker()
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs, inputs = maker.random_model(case, seed=1000), maker.sources(case, seed=1000)
    theirs.save_pretrained(folder / "theirs", max_shard_size="30KB")
    tokens = np.random.default_rng(7).integers(64, size=(3, 30))
    wanted = maker.logits_of(theirs, inputs, tokens)
    found = logits_of(folder / "theirs", inputs, tokens)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)

    config = load_config(folder / "theirs")
    ours = nnx.merge(abstract(config)[0], load_weights(folder / "theirs", config))
    save_pretrained(ours, folder / "ours")
    assert load_config(folder / "ours") == config
    again, report = getattr(transformers, kind).from_pretrained(
        folder / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    np.testing.assert_allclose(maker.logits_of(again, inputs, tokens), wanted, rtol=0, atol=1e-5)


def near(params):
    """Weights of a drafter whose tokens sometimes agree with those of ``params``."""
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda x: x * (1 + 0.1 * rng.normal(size=x.shape).astype("f")), params)


def drafters_of(case):
    """Name -> (drafter, weights), for a golden target."""
    target, params = model(case)
    draft = drafters.DraftModel(num_draft=3, model=target)
    tree = drafters.DraftModel(
        model=target, topology=trees.branching(2, 2, 1), sibling_sampling="top"
    )
    return {
        "plain": (drafters.Plain(), None),
        "ngram": (drafters.NGram(num_draft=4), None),
        "draft": (draft, near(params)),
        "tree": (tree, near(params)),
        "adaptive": (
            drafters.Adaptive(draft),
            {"inner": near(params), "costs": np.asarray([1.0, 1.3, 1.6], np.float32)},
        ),
    }


def decode(case, name, inputs, new, **options):
    """Greedy decoding after the decoder's start: ``Decoded``."""
    (target, params), (drafter, weights) = model(case), drafters_of(case)[name]
    batch = len(jax.tree.leaves(inputs)[0])
    return specjax.decode(
        target,
        drafter,
        {"target": params, "drafter": weights},
        np.full((batch, 1), target.config.start_id, np.int32),
        np.ones(batch, np.int32),
        key=jax.random.key(0),
        max_new_tokens=new,
        inputs=inputs,
        **options,
    )


def copies(case, name, inputs, new, shapes):
    """Returns copies of buffers of ``shapes`` in the compiled rounds, and the program's text."""
    (target, params), (drafter, weights) = model(case), drafters_of(case)[name]
    batch = len(jax.tree.leaves(inputs)[0])
    start, ones = np.zeros((batch, 1), np.int32), np.ones(batch, np.int32)
    key, law = jax.random.key(0), specjax.Sampling()
    request, capacity = prepare_inputs(
        target, drafter, start, ones, key, new, law, None, (), inputs
    )
    objects, params = (target, drafter, "auto"), {"target": params, "drafter": weights}
    state = loop.jit_start.eval_shape(*objects, capacity, params, request, PREFILL_CHUNK)
    text = loop.jit_burst.lower(*objects, 10, params, state, 1).compile().as_text()
    found = re.findall(r" = f32\[([\d,]+)\]\{\S* copy(?:-start)?\(", text)
    return [shape for shape in found if tuple(map(int, shape.split(","))) in shapes], text


def with_tokenizer(folder):
    """Gives a copied checkpoint a tokenizer of its 64 ids: punctuation, digits, capitals."""
    wrap_tokenizer(byte_tokenizer(size=64)).save_pretrained(folder)
    return folder
