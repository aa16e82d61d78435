"""The pass over the end of a prompt emits the first token: the root is read with the tokens before
it where the target gives logits of single nodes, and alone elsewhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pairs import CONFIG
from registry import cases
from toys import bag

import specjax
from specjax import Sampling
from specjax.analysis import sampled_law
from specjax.decoding import loop, prefill, reference, round
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.state import ENDED
from specjax.drafters.medusa import Medusa, MedusaConfig
from specjax.models import Decoder
from specjax.models.causal_lm import CausalLM

pytestmark = pytest.mark.usefixtures("quick_compilation")
SHAPE = dataclasses.replace(CONFIG, vocab_size=64, num_layers=2, window=6)
LENGTHS = np.asarray([1, 2, 4, 5, 6, 11])
BUDGETS = np.asarray([5, 5, 1, 0, 5, 5])
TOKENS = np.random.default_rng(0).integers(1, 64, (6, 11), np.int32)
MORE = np.random.default_rng(1).integers(1, 64, (6, 5), np.int32)
WEIGHTS = nnx.to_pure_dict(nnx.state(Decoder(SHAPE, rngs=nnx.Rngs(0))))


class Alone(CausalLM):
    """Reads the last token of a prompt in a pass of its own."""

    picks_logits = False


class Earlier(CausalLM):
    """A fault: gives the logits of the node before the one that was asked for."""

    def verify(self, params, cache, draft, *, logits=True, **more):
        logits = logits if isinstance(logits, bool) else jnp.maximum(logits - 1, 0)
        return super().verify(params, cache, draft, logits=logits, **more)


class Shown(Medusa):
    """Sees all of a prompt."""

    reads_last = False


@functools.cache
def read(kind, head=Medusa, temperature=0.0):
    """The states after the prompts, read four tokens at a time, and after ``MORE`` tokens."""
    target = kind(SHAPE)
    sizes = dict(hidden_size=SHAPE.hidden_size, vocab_size=SHAPE.vocab_size, num_heads=1)
    drafter = head(config=MedusaConfig(**sizes), target=target)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), nnx.to_pure_dict(drafter.shapes))
    params = {"target": WEIGHTS, "drafter": zeros}

    def request(tokens, lengths, budget):
        key, sampling = jax.random.key(0), Sampling(temperature=temperature)
        given = target, drafter, tokens, lengths, key, 9, sampling, 24, ()
        made = prepare_inputs(*given, logprobs="raw")[0]
        return dataclasses.replace(made, budget=jnp.asarray(budget, jnp.int32))

    objects = target, drafter, "auto"
    start = jax.jit(functools.partial(prefill.start, *objects, 24, chunk=4))
    state = start(params, request(TOKENS, LENGTHS, BUDGETS))
    again = jax.jit(functools.partial(prefill.extend, *objects))
    lengths = np.asarray([5, 1, 2, 3, 4, 5])
    return state, again(params, state, request(MORE, lengths, [3] * 6))


def same(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.allclose(x, y, atol=2e-5) for x, y in pairs)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_state_after_a_prompt_is_the_same_however_its_root_is_read(temperature):
    for one, other in zip(
        read(CausalLM, temperature=temperature), read(Alone, temperature=temperature), strict=True
    ):
        for name in ("tokens", "length", "budget", "ended", "logprobs", "cache", "drafter_state"):
            assert same(getattr(one, name), getattr(other, name)), name
    begun, _ = read(CausalLM, temperature=temperature)
    assert (begun.length - LENGTHS).tolist() == (BUDGETS > 0).tolist()
    assert begun.budget.tolist() == np.maximum(BUDGETS - 1, 0).tolist()
    assert int(begun.stats.rounds.sum()) == int(begun.stats.emitted.sum()) == 0


def test_the_first_token_is_that_of_a_pass_over_the_whole_prompt():
    begun, _ = read(CausalLM)
    for row, size in enumerate(LENGTHS):
        if BUDGETS[row]:
            text = TOKENS[row : row + 1, :size]
            logits = np.asarray(reference.logits(CausalLM(SHAPE), WEIGHTS, text))[0, -1]
            assert int(begun.tokens[row, size]) == logits.argmax()
            said = logits.max() - np.logaddexp.reduce(logits)
            assert float(begun.logprobs[row, size]) == pytest.approx(said, abs=1e-4)


def test_fault_logits_of_the_node_before_the_root_are_seen():
    assert not same(read(Earlier)[0].tokens, read(CausalLM)[0].tokens)


def test_who_reads_the_last_token_alone_remembers_what_is_shown_all():
    mine, all_of_it = read(CausalLM), read(CausalLM, Shown)
    for one, other in zip(mine, all_of_it, strict=True):
        live = BUDGETS > 0 if one is mine[0] else np.ones(6, bool)  # the others draft nothing
        kept, whole = one.drafter_state.feature[live], other.drafter_state.feature[live]
        assert np.allclose(kept, whole, atol=2e-5) and np.abs(whole).max() > 0.1
        assert same(one.cache, other.cache)


MODEL, PARAMS = bag(4, 0)
PROMPT, WARM, NUM, ROWS = (1, 0, 2, 1, 0), Sampling(temperature=0.9), 3, 20_000


def drawn(name, rows=ROWS):
    """The evidence that the first tokens of ``decode``, prompt's and rounds', follow the law."""
    drafter, weights, _ = cases(MODEL, PARAMS)[name]
    tokens = np.tile(np.asarray([PROMPT], np.int32), (rows, 1))
    params = {"target": PARAMS, "drafter": weights}
    settings = dict(key=jax.random.key(0), max_new_tokens=NUM + 1, sampling=WARM)
    out = loop.decode(MODEL, drafter, params, tokens, np.full(rows, len(PROMPT)), **settings)
    new = np.asarray(out.tokens)[:, len(PROMPT) :][:, :NUM]
    counts = np.bincount(new @ 4 ** np.arange(NUM)[::-1], minlength=4**NUM)
    law = reference.joint_law(MODEL, PARAMS, PROMPT, NUM, WARM).reshape(-1)
    return sampled_law.judge(counts, law)


@pytest.mark.parametrize("name", ["draft", "eagle3", "tree distinct", "ngram"])
def test_the_first_token_and_the_rounds_after_it_draw_the_targets_law(name):
    assert drawn(name).fits(1e-7)


def test_fault_a_first_token_that_meets_the_noise_of_the_second_is_seen(monkeypatch):
    class Faulty:
        def __getattr__(self, name):
            return getattr(round, name)

        def judged(self, rule, params, state, *rest):
            later = dataclasses.replace(state, length=state.length + 1)
            return round.judged(rule, params, later, *rest)

    monkeypatch.setattr(prefill, "rounds", Faulty())
    jax.clear_caches()
    assert not drawn("plain").fits(1e-7)
    jax.clear_caches()


def test_samples_of_one_prompt_have_first_tokens_of_their_own():
    drafter, weights, _ = cases(MODEL, PARAMS)["draft"]
    settings = dict(max_new_tokens=4, sampling=WARM, key=jax.random.split(jax.random.key(1), 12))
    params, prompts = {"target": PARAMS, "drafter": weights}, np.asarray([[1, 0, 2], [3, 3, 0]])
    lengths = np.asarray([3, 2])
    many = specjax.decode(MODEL, drafter, params, prompts, lengths, num_samples=6, **settings)
    each = specjax.decode(
        MODEL, drafter, params, prompts.repeat(6, axis=0), lengths.repeat(6), **settings
    )
    assert np.array_equal(many.tokens, each.tokens)
    assert len({int(many.tokens[row, 3]) for row in range(6)}) > 1


def test_a_first_token_that_stops_a_row_ends_it_without_a_round():
    drafter, weights, _ = cases(MODEL, PARAMS)["draft"]
    params, prompts = {"target": PARAMS, "drafter": weights}, np.asarray([PROMPT, PROMPT[::-1]])
    settings = dict(key=jax.random.key(0), max_new_tokens=4)
    free = specjax.decode(MODEL, drafter, params, prompts, np.asarray([5, 5]), **settings)
    stop = int(free.tokens[0, 5])
    out = specjax.decode(
        MODEL, drafter, params, prompts, np.asarray([5, 5]), stops=[stop], **settings
    )
    assert int(out.lengths[0]) == 6 and ENDED[int(out.ended[0])] == "stop"
    assert int(out.stats.rounds[0]) == 0 and int(out.stats.emitted[0]) == 0
    one = specjax.decode(
        MODEL, drafter, params, prompts, np.asarray([5, 5]), **settings | {"max_new_tokens": 1}
    )
    assert one.lengths.tolist() == [6, 6] and one.stats.tau == 1.0


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_text_of_shared_noise_goes_on_from_its_first_token(rule):
    """Noise that depends on the position alone: a prompt with the first token has the same rest."""
    drafter, weights, _ = cases(MODEL, PARAMS)["draft"]
    params, keys = {"target": PARAMS, "drafter": weights}, jax.random.split(jax.random.key(3), 40)
    settings = dict(key=keys, sampling=WARM, rule=rule, capacity=16)
    prompts = np.tile(np.asarray([PROMPT], np.int32), (40, 1))
    out = specjax.decode(
        MODEL, drafter, params, prompts, np.full(40, 5), max_new_tokens=6, **settings
    )
    longer = np.asarray(out.tokens)[:, :6]
    again = specjax.decode(
        MODEL, drafter, params, longer, np.full(40, 6), max_new_tokens=5, **settings
    )
    assert np.array_equal(out.tokens, again.tokens) == (rule == "coupled")
