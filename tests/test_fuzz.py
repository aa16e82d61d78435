"""Whatever may be combined: greedy text against passes without a cache, for as long as is given.

    python -m pytest tests/test_fuzz.py --fuzz-seconds 600 --fuzz-seed 7 -s

draws targets, drafters, trees, rules, batches, budgets and stops, and decodes at the optimizations
that a user's program is compiled with. The seed is printed; the same seed draws the same cases.
"""

import contextlib
import time

import jax
import numpy as np
from flax import nnx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from registry import cases
from toys import bag, like

import specjax
from specjax import trees
from specjax.decoding import reference
from specjax.drafters import DraftModel, Hybrid, NGram
from specjax.models import Decoder, DecoderConfig
from specjax.models.causal_lm import CausalLM

VOCAB = 13
MODEL, PARAMS = bag(VOCAB, 3, features=8)
CASES = cases(MODEL, PARAMS)
TREES = [(-1, 0), (-1, 0, 1, 2), (-1, 0, 0, 1, 2), (-1, 0, 0, 0, 1, 1, 4)]
WINDOW = dict(window=4, local_layers=(True, False), local_rope_theta=500.0)


class Over(Exception):
    """The time is up."""


@st.composite
def decoders(draw):
    """A tiny decoder, its weights, and a drafter for it with its own."""
    shape = dict(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=12,
        num_layers=2,
        num_heads=4,
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=4,
        max_positions=64,
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        **(WINDOW if draw(st.booleans()) else {}),
    )
    config = DecoderConfig(**shape)
    number = draw(st.integers(0, 99))
    params = nnx.to_pure_dict(nnx.split(Decoder(config, rngs=nnx.Rngs(number)))[1])
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, params)
    near = jax.tree.map(lambda x: x * (1 + 0.1 * np.sign(x)), params)
    target = CausalLM(config)
    model = DraftModel(model=target, topology=trees.Tree(draw(st.sampled_from(TREES))))
    ngram = NGram(num_draft=draw(st.integers(1, 4)), longest=2, shortest=1)
    chain = DraftModel(model=target, num_draft=2)
    drafter, weights = draw(
        st.sampled_from(
            [(model, near), (ngram, None), (Hybrid(3, inner=chain, lookup=ngram), near)]
        )
    )
    return f"{config} {drafter}", target, params, drafter, weights


@st.composite
def compositions(draw):
    """``(words, target, its weights, drafter, its weights)``."""
    if draw(st.booleans()):
        return draw(decoders())
    name = draw(st.sampled_from(sorted(CASES)))
    drafter, weights, _ = CASES[name]
    if name == "draft":
        weights = like(PARAMS, draw(st.integers(0, 9)))
    return name, MODEL, PARAMS, drafter, weights


def test_whatever_is_combined_greedy_text_is_that_of_passes_without_a_cache(pytestconfig):
    number = pytestconfig.getoption("--fuzz-seed")
    end = time.monotonic() + pytestconfig.getoption("--fuzz-seconds")
    print(f"--fuzz-seed {number}")
    tried = 0

    @seed(number)
    @settings(
        max_examples=10_000,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=compositions(),
        lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
        budget=st.integers(1, 10),
        stop=st.integers(-1, VOCAB - 1),
        number=st.integers(0, 2**31 - 1),
    )
    def holds(case, lengths, budget, stop, number):
        nonlocal tried
        if tried and time.monotonic() > end:
            raise Over
        tried += 1
        words, target, params, drafter, weights = case
        random = np.random.default_rng(number)
        prompts = [random.integers(0, VOCAB, n).tolist() for n in lengths]
        tokens = np.zeros((len(prompts), max(lengths)), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        out = specjax.decode(
            target,
            drafter,
            {"target": params, "drafter": weights},
            tokens,
            np.asarray(lengths, np.int32),
            max_new_tokens=budget,
            stops=[stop] if stop >= 0 else [],
            key=jax.random.key(number),
        )
        for row, prompt in enumerate(prompts):
            expected = reference.greedy(target, params, prompt, budget)
            if stop in expected:
                expected = expected[: expected.index(stop) + 1]
            got = np.asarray(out.tokens)[row, len(prompt) : int(out.lengths[row])].tolist()
            assert got == expected, (words, prompt, budget, stop)

    with contextlib.suppress(Over):
        holds()
    print(f"{tried} compositions")
    assert tried
