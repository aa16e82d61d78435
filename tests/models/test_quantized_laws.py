"""The law of a quantized target is that of its own weights; a quantized drafter changes no law."""

import dataclasses

import jax
import numpy as np
import pytest
from checkpoints import SMALL, encoded, random_params
from test_sampled import judge

import specjax
from specjax import Sampling
from specjax.decoding import reference
from specjax.drafters import DraftModel
from specjax.models.causal_lm import CausalLM

pytest_plugins = ["pairs"]
TOY = dataclasses.replace(
    SMALL, vocab_size=4, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, head_dim=8
)
ROWS, NUM, PROMPT, SAMPLING = 4_000, 2, (1, 0, 2), Sampling(temperature=0.9)


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_with_a_quantized_drafter_greedy_text_is_that_of_plain_decoding(folders, pair, scheme):
    prompts = ["def f(x):", "import os\n\n\nclass A"]
    drafter = specjax.load(folders["draft"], quantize=scheme)
    itself = specjax.load(folders["target"], quantize=scheme)  # which is nearly always right
    plain = specjax.generate(pair[0], prompts, drafter=None, max_new_tokens=40)
    for model in (drafter, itself):
        out = specjax.generate(
            pair[0], prompts, drafter=model, max_new_tokens=40, drafting=specjax.Drafting(num=3)
        )
        assert out.texts == plain.texts
    assert out.stats.acceptance > 0.8


def counted(target, model, params, rule):
    """How often each text of ``NUM`` tokens follows ``PROMPT``, int64 ``[4**NUM]``."""
    out = specjax.decode(
        target,
        DraftModel(num_draft=2, model=model),
        params,
        np.tile(np.asarray([PROMPT], np.int32), (ROWS, 1)),
        np.full(ROWS, len(PROMPT), np.int32),
        key=jax.random.key(0),
        max_new_tokens=NUM + 1,
        sampling=SAMPLING,
        rule=rule,
    )
    new = np.asarray(out.tokens)[:, len(PROMPT) : len(PROMPT) + NUM]
    return np.bincount(new @ 4 ** np.arange(NUM - 1, -1, -1), minlength=4**NUM)


def law_of(target, params):
    """The law of these texts by enumeration, float64 ``[4**NUM]``."""
    return reference.joint_law(target, params, PROMPT, NUM, SAMPLING).reshape(-1)


def test_the_sampled_law_of_a_quantized_target_is_its_own():
    """Against exact enumeration of that law, which is far from the float model's: large weights
    make a sharp law, of which quantization changes much."""
    config = dataclasses.replace(TOY, hidden_size=32, intermediate_size=32, head_dim=16)
    target = CausalLM(config, quantized="int4")
    plain = jax.tree.map(lambda x: 8 * x if x.ndim == 2 else x, random_params(config))
    held = encoded(plain, specjax.Quantization("int4", lm_head="int4"))
    params = {"target": held, "drafter": plain}
    law = law_of(target, held)
    variation, bound, p_value = judge(counted(target, CausalLM(config), params, "rejection"), law)
    assert variation < bound and p_value > 1e-7, (variation, bound, p_value)
    assert np.abs(law_of(target, plain) - law).sum() / 2 > bound


@pytest.mark.parametrize("rule", ["rejection", "block", "delta"])
def test_with_a_quantized_drafter_the_sampled_law_is_the_targets(rule):
    """The suite of ``test_sampled`` in small: 4,000 rows of a decoder with four tokens."""
    target, model = CausalLM(TOY), CausalLM(TOY, quantized="int8")
    params = {"target": random_params(TOY), "drafter": encoded(random_params(TOY, 1), "int8")}
    law = law_of(target, params["target"])
    variation, bound, p_value = judge(counted(target, model, params, rule), law)
    assert variation < bound and p_value > 1e-7, (variation, bound, p_value)
