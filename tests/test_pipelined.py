"""Schedules over layers, PPD and SPEED: greedy texts, and ticks by the formula in every run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_pipeline import one_for_all  # noqa: F401
from test_self_draft import CONFIGS, LAYERS, model

import specjax
from specjax import sharding
from specjax.analysis import ppd as ppd_module
from specjax.analysis import speed as speed_module
from specjax.analysis import staged_ppd
from specjax.analysis.ppd import ppd
from specjax.analysis.speed import speed, unrolled
from specjax.analysis.staged import on_stages, repeats_on
from specjax.analysis.staged_ppd import ppd_on_stages
from specjax.decoding import reference
from specjax.models import Decoder, PipelinedLM, stage_weights
from specjax.models.causal_lm import CausalLM

pytestmark = pytest.mark.usefixtures("quick_compilation")
PROMPT = [5, 6, 7, 8, 9]
NUM = 24


def lm_of(name):
    return specjax.LM.of(*model(name))


def shared(config=CONFIGS["llama"], layers=2, scale=1.6, seed=0):
    """The layers of a decoder that repeats them, with weights by which guesses are often right."""
    local = config.local_layers and config.local_layers[:layers]
    config = dataclasses.replace(config, num_layers=layers, local_layers=local)
    params = nnx.split(Decoder(config, rngs=nnx.Rngs(seed)))[1]
    params = jax.tree.map(lambda x: scale * x if x.ndim > 1 else x, params)
    return specjax.LM.of(CausalLM(config), params)


def is_greedy(tokens, lm):
    text = np.concatenate([PROMPT, tokens])[None].astype(np.int32)
    said = np.argmax(reference.logits(lm.target, lm.params, jnp.asarray(text)), axis=-1)
    return (tokens == said[0, len(PROMPT) - 1 : -1]).all()


def check(found, lm):
    """The text is the greedy one, and the counts are those of the formulas."""
    assert is_greedy(found.tokens, lm) and (found.tokens == found.plain_tokens).all()
    assert found.ticks == found.expected_ticks
    layers, d, count = found.layers, found.layer, len(found.tokens)
    formula = layers + (count - 1) * (layers - (layers - d) * found.hit_rate)
    assert found.ticks == pytest.approx(formula)
    assert found.plain_ticks == layers * count


@pytest.mark.parametrize("name", CONFIGS)
def test_predictive_pipelined_decoding_is_greedy_and_takes_the_ticks_of_the_formula(name):
    lm = lm_of(name)
    found = ppd(lm, PROMPT, layer=LAYERS - 1, guesses=8, max_new_tokens=NUM)
    check(found, lm)
    assert 0 < found.hits < NUM - 1  # both kinds of tokens were run
    assert found.reads == found.ticks + NUM * (LAYERS - found.layer)


def test_guesses_of_all_tokens_are_always_right_and_the_hit_rate_is_that_of_the_layer():
    lm = lm_of("llama")
    every = ppd(lm, PROMPT, layer=2, guesses=lm.target.vocab_size, max_new_tokens=NUM)
    check(every, lm)
    assert every.hits == NUM - 1 and every.ticks == LAYERS + (NUM - 1) * 2
    some = ppd(lm, PROMPT, layer=2, guesses=5, max_new_tokens=NUM)
    check(some, lm)
    text = jnp.asarray([[*PROMPT, *some.tokens]], jnp.int32)
    early = np.asarray(exit_logits(lm, 2, text))[0, len(PROMPT) - 1 : -2]
    best = np.argsort(-early, axis=-1)[:, :5]
    assert some.hits == (best == some.tokens[:-1, None]).any(axis=1).sum()


def exit_logits(lm, layer, text):
    part = lm.target.sub_network(exit=layer)
    draft = reference._whole(text)
    cache = lm.target.init(lm.params, *text.shape)
    return jax.jit(lambda params: part.verify(params, cache, draft).logits)(lm.params)


@pytest.mark.parametrize("repeats", [2, 3])
def test_speed_is_the_unrolled_model_and_takes_the_ticks_of_the_formula(repeats):
    lm = shared()
    found = speed(lm, PROMPT, repeats=repeats, max_new_tokens=NUM)
    check(found, unrolled(lm, repeats))
    assert 0 < found.hits < NUM - 1
    assert found.reads == found.ticks < found.plain_ticks


def test_speed_reads_the_shared_layers_once_a_token_where_every_guess_is_right():
    """Layers that add nothing: the first repeat says what the last one does."""
    lm = shared(scale=0.0)
    found = speed(lm, PROMPT, repeats=4, max_new_tokens=NUM)
    assert found.hits == NUM - 1 and found.reads == 8 + (NUM - 1) * 2


def test_fault_a_wrong_guess_that_goes_on_and_an_entry_that_is_not_kept_are_seen(monkeypatch):
    lm = shared(layers=1)
    whole, tokens = unrolled(lm, 2), np.asarray(PROMPT, np.int32)
    own, right = whole.target, ppd_module._from_guess

    def other_guess(done, fresh, one):
        return right(done, fresh, 1 - one)

    monkeypatch.setattr(ppd_module, "_from_guess", other_guess)
    found = ppd_module._decode(own, 1, 2, 8, 64, whole.params, tokens)
    assert not is_greedy(np.asarray(found.tokens), whole)

    verdict = speed_module.step_verdict
    monkeypatch.setattr(
        speed_module, "step_verdict", lambda live, held: verdict(live.at[1].set(False), held)
    )
    found = speed_module._decode(own, 1, True, 8, 64, whole.params, tokens)
    assert not is_greedy(np.asarray(found.tokens), whole)


def test_speed_in_layers_with_windows():
    """A ring has one slot to spare, and a text that is shorter than the window needs none."""
    lm = shared(CONFIGS["windows"])
    check(speed(lm, PROMPT, repeats=2, max_new_tokens=NUM), unrolled(lm, 2))
    check(speed(lm, PROMPT, repeats=3, max_new_tokens=1), unrolled(lm, 3))


@pytest.mark.usefixtures("one_for_all")
def test_fault_a_wrong_guess_that_ran_beside_its_token_is_seen(monkeypatch):
    """Two devices of an axis ``stage``, which one device computes in turn."""
    lm = unrolled(shared(layers=1), 2)
    target, right = PipelinedLM(lm.target, 2), staged_ppd._of_guess
    params = stage_weights.divided(lm.params, lm.target.config, 2)

    def text(num):
        found = staged_ppd._decode(target, 1, 2, num, 64, params, np.asarray(PROMPT, np.int32))
        assert found.hits > 0
        return np.asarray(found.tokens)

    assert is_greedy(text(8), lm)
    monkeypatch.setattr(staged_ppd, "_of_guess", lambda held, x, one: right(held, x, 1 - one))
    assert not is_greedy(text(9), lm)


def test_impossible_schedules_are_refused():
    lm = lm_of("llama")
    for settings, words in (
        (dict(layer=1), "from 2 to 3"),
        (dict(layer=4), "from 2 to 3"),
        (dict(layer=2, guesses=0), "guesses=0"),
        (dict(layer=2, guesses=68), "give 1 to 67"),
        (dict(layer=2, max_new_tokens=0), "at least"),
        (dict(layer=2, max_new_tokens=10**6), "context"),
    ):
        with pytest.raises(ValueError, match=words):
            ppd(lm, PROMPT, **settings)
    with pytest.raises(ValueError, match="2 prompts"):
        speed(lm, [PROMPT, PROMPT], repeats=2)
    with pytest.raises(ValueError, match="repeats=1"):
        speed(lm, PROMPT, repeats=1)
    windows = shared(CONFIGS["windows"])
    with pytest.raises(ValueError, match="with repeats=3 a token that is flushed"):
        speed(windows, PROMPT, repeats=3)


# ------------------------------------------------------------------- on several devices


def in_stages(name, stages, lines=1):
    lm = lm_of(name)
    target = PipelinedLM(lm.target, stages)
    mesh = sharding.as_mesh({"data": lines, "stage": stages})
    return lm, specjax.LM.of(target, target.shard(lm.params, mesh), mesh=mesh)


@pytest.mark.parametrize(
    ("name", "stages"),
    [("llama", 2), ("llama", 4), ("gpt2", 2), ("latents", 4), ("windows", 2)],
)
def test_on_a_mesh_each_device_has_a_token_in_flight(name, stages):
    lm, divided = in_stages(name, stages)
    found = on_stages(divided, PROMPT, max_new_tokens=NUM)
    check(found, lm)
    assert found.layer == LAYERS // stages
    if stages == 2:  # PPD with one guess
        assert found.hits == ppd(lm, PROMPT, layer=2, guesses=1, max_new_tokens=NUM).hits


SEVERAL = [
    ("llama", 2, 1, 5, None),
    ("llama", 2, 2, 4, None),
    ("llama", 4, 1, 5, 2),
    ("llama", 4, 2, 4, 3),
    ("gpt2", 2, 1, 3, None),
    ("latents", 4, 1, 8, 3),
    ("windows", 4, 1, 8, 2),
    ("experts", 2, 4, 4, None),
]


@pytest.mark.parametrize(("name", "stages", "lines", "guesses", "layer"), SEVERAL)
def test_on_a_mesh_several_guesses_run_beside_their_token(name, stages, lines, guesses, layer):
    lm, divided = in_stages(name, stages, lines)
    found = ppd_on_stages(divided, PROMPT, guesses=guesses, layer=layer, max_new_tokens=NUM)
    check(found, lm)
    assert found.layer == (layer or LAYERS // 2)
    one = ppd(lm, PROMPT, layer=found.layer, guesses=guesses, max_new_tokens=NUM)
    assert found.hits == one.hits and 0 < found.hits < NUM - 1
    assert found.reads == lines * (found.ticks + NUM * (LAYERS - found.layer))


def test_on_a_mesh_every_token_is_right_where_all_are_guessed():
    lm, divided = in_stages("llama", 4)
    every = lm.target.vocab_size
    found = ppd_on_stages(divided, PROMPT, guesses=every, layer=3, max_new_tokens=NUM)
    check(found, lm)
    assert found.hits == NUM - 1 and found.ticks == LAYERS + (NUM - 1) * 3


@pytest.mark.parametrize("repeats", [2, 4])
def test_on_a_mesh_each_device_has_a_repeat(repeats):
    lm = shared()
    found = on_stages(repeats_on(lm, repeats), PROMPT, max_new_tokens=NUM)
    check(found, unrolled(lm, repeats))
    one = speed(lm, PROMPT, repeats=repeats, max_new_tokens=NUM)
    assert (found.tokens == one.tokens).all()
    assert (found.ticks, found.hits) == (one.ticks, one.hits) and found.hits > 0


def test_tokens_in_flight_are_refused_where_there_are_no_stages():
    for run in (on_stages, ppd_on_stages):
        with pytest.raises(ValueError, match="load the model with mesh='stage=2'"):
            run(lm_of("llama"), PROMPT)


def test_on_a_mesh_windows_and_rows_are_refused():
    _, divided = in_stages("windows", 4)
    with pytest.raises(ValueError, match="windows are shorter than the text"):
        on_stages(divided, PROMPT, max_new_tokens=NUM)
    rows = dataclasses.replace(divided, mesh=sharding.as_mesh("data=2,stage=4"))
    with pytest.raises(ValueError, match="no rows for the axis data"):
        on_stages(rows, PROMPT, max_new_tokens=NUM)


def test_on_a_mesh_guesses_that_cannot_run_are_refused():
    _, divided = in_stages("llama", 4, 2)
    for settings, words in (
        (dict(guesses=3), "guesses=3: give 1 to 67, and a multiple of data=2"),
        (dict(guesses=0), "guesses=0"),
        (dict(guesses=68), "guesses=68"),
        (dict(guesses=2, layer=1), "layer=1: each of 4 devices runs 1 of 4 layers; give 2, 3"),
        (dict(guesses=2, layer=4), "give 2, 3"),
        (dict(guesses=2, max_new_tokens=10**6), "context"),
    ):
        with pytest.raises(ValueError, match=words):
            ppd_on_stages(divided, PROMPT, **settings)
