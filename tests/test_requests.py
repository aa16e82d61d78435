"""Rows that ask for different things: each says what it says alone, whatever its mates ask for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_memory as memory
from registry import cases
from toys import bag, like

import specjax
from specjax import Sampling, kernels
from specjax.decoding import loop, reference, round
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.state import ENDED
from specjax.drafters import DraftModel, Plain
from specjax.kernels.cpu import library
from specjax.kernels.cpu.backend import CpuBackend

VOCAB = 23
MODEL, PARAMS = bag(VOCAB, 3)
PROMPTS = np.asarray([[5, 9, 5, 0], [7, 7, 7, 7], [1, 2, 0, 0]], np.int32)
LENGTHS = np.asarray([3, 4, 2], np.int32)
KEYS = jax.random.split(jax.random.key(4), 3)
BUDGETS = np.asarray([9, 12, 6], np.int32)
DRAFTER = DraftModel(num_draft=3, model=MODEL)
WEIGHTS = {"target": PARAMS, "drafter": like(PARAMS, 1)}
SETTINGS = dict(
    temperature=np.asarray([0.0, 0.8, 1.3], np.float32),
    top_k=np.asarray([0, 9, 4]),
    top_p=np.asarray([1.0, 0.9, 0.5], np.float32),
    min_p=np.asarray([0.0, 0.02, 0.1], np.float32),
    repetition_penalty=np.asarray([1.4, 1.0, 0.8], np.float32),
    presence_penalty=np.asarray([0.0, 0.7, -0.5], np.float32),
    frequency_penalty=np.asarray([0.9, 0.0, 0.4], np.float32),
)


def decode(rows=slice(None), drafter=DRAFTER, params=WEIGHTS, sampling=Sampling(), **options):
    options = {"key": KEYS[rows], "max_new_tokens": BUDGETS[rows], "capacity": 24} | options
    return specjax.decode(
        MODEL, drafter, params, PROMPTS[rows], LENGTHS[rows], sampling=sampling, **options
    )


def new(out, row, prompt=None):
    """The generated tokens of a row."""
    begin = LENGTHS[row if prompt is None else prompt]
    return out.tokens[row, begin : out.lengths[row]].tolist()


def of_row(row, settings):
    return {name: value[row : row + 1] for name, value in settings.items()}


def test_rows_of_differing_settings_and_budgets_say_what_each_says_alone():
    together = decode(sampling=Sampling(**SETTINGS), logprobs=True)
    for row in range(3):
        only = slice(row, row + 1)
        alone = decode(only, sampling=Sampling(**of_row(row, SETTINGS)), logprobs=True)
        assert new(together, row) == new(alone, 0, row) and len(new(alone, 0, row)) == BUDGETS[row]
        np.testing.assert_allclose(together.logprobs[row], alone.logprobs[0], atol=1e-5)


def test_penalties_count_what_was_generated_and_not_the_prompt():
    prefix = specjax.sampling.distribution.Prefix(
        tokens=jnp.asarray([[3, 3, 1, 1, 2, 9]]),
        length=jnp.asarray([5]),
        path=jnp.asarray([[2, -1, 0]]),
        begin=jnp.asarray([3]),  # generated: 1, 2, and on the path 2, 0
    )
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25).rows(1)
    expected = [-0.75, -0.75, -1.0, 0.0, 0.0, 0, 0, 0, 0, 0]
    got = sampling.adjust(jnp.zeros((1, 10)), prefix)
    np.testing.assert_allclose(got[0], expected, atol=1e-6)


# ------------------------------------------------------------------------- log-probabilities


def raw_logprobs(prompt, tokens):
    """From a pass over the whole text, without a cache."""
    text = [*prompt, *tokens]
    law = jax.nn.log_softmax(reference.logits(MODEL, PARAMS, jnp.asarray([text]))[0], axis=-1)
    return [float(law[len(prompt) + i - 1, token]) for i, token in enumerate(tokens)]


@pytest.mark.parametrize(
    ("name", "temperature"), [("ngram", 0), ("tree iid", 0), ("draft", 1.1), ("plain", 1.1)]
)
def test_logprobs_are_those_of_the_raw_logits_at_any_temperature(name, temperature):
    drafter, weights, _ = cases(MODEL, PARAMS)[name]
    params = {"target": PARAMS, "drafter": weights}
    sampling = Sampling(temperature=temperature, top_k=None if temperature == 0 else 5)
    out = decode(drafter=drafter, params=params, sampling=sampling, logprobs=True)
    for row in range(3):
        begin, end = LENGTHS[row], out.lengths[row]
        expected = raw_logprobs(PROMPTS[row, :begin], new(out, row))
        np.testing.assert_allclose(out.logprobs[row, begin:end], expected, atol=1e-4)
        assert not np.any(out.logprobs[row, :begin]) and not np.any(out.logprobs[row, end:])


def test_logprobs_of_the_law_are_those_that_the_tokens_were_drawn_from():
    sampling = Sampling(**SETTINGS)
    out = decode(sampling=sampling, logprobs="law")
    for row in range(3):
        begin, law = int(LENGTHS[row]), Sampling(**of_row(row, SETTINGS)).rows(1)
        text = out.tokens[row : row + 1]
        logits = reference.logits(MODEL, PARAMS, text)[0]
        for i, token in enumerate(new(out, row)):
            prefix = specjax.sampling.distribution.Prefix(
                tokens=text,
                length=jnp.asarray([begin + i]),
                path=jnp.full((1, 1), -1),
                begin=jnp.asarray([begin]),
            )
            p = law.probabilities(logits[begin + i - 1][None], prefix)[0]
            np.testing.assert_allclose(out.logprobs[row, begin + i], np.log(p[token]), atol=1e-4)


@pytest.mark.skipif(library.register() is not None, reason="no kernels")
@pytest.mark.parametrize(("name", "temperature"), [("ngram", 0), ("draft", 1.0)])
def test_logprobs_hold_nothing_over_all_nodes_and_nothing_where_they_are_off(
    name, temperature, monkeypatch
):
    monkeypatch.setattr(
        kernels, "current", lambda mesh=None: CpuBackend()
    )  # XLA's logits would be turned to be read
    vocab = memory.VOCAB + 96  # so that no other test's trace is taken
    off = memory.lower(name, temperature, vocab)
    on = memory.lower(name, temperature, vocab, logprobs=True)
    few = 3 / memory.NODES  # [B, V] at most
    assert memory.buffers(on, vocab) < memory.buffers(off, vocab) + few
    exps = [memory.over_vocabulary(traced, {"exp"}, vocab) for traced in (off, on)]
    widths = len(round.widths(memory.NODES)) if name == "ngram" else 1  # of which one runs
    assert len(exps[1]) == len(exps[0]) + widths
    assert exps[1].count((memory.BATCH, vocab)) == len(exps[1])  # of visited nodes only


# ------------------------------------------------------------------------------- samples


def test_samples_of_a_prompt_are_those_of_the_prompt_given_so_often():
    sampling = Sampling(temperature=0.9, top_p=np.asarray([0.9, 1.0, 0.8], np.float32))
    many = decode(sampling=sampling, num_samples=4, logprobs=True, key=jax.random.key(8))
    repeated = specjax.decode(
        MODEL,
        DRAFTER,
        WEIGHTS,
        np.repeat(PROMPTS, 4, axis=0),
        np.repeat(LENGTHS, 4),
        key=jax.random.key(8),
        max_new_tokens=np.repeat(BUDGETS, 4),
        sampling=Sampling(temperature=0.9, top_p=np.repeat(sampling.top_p, 4)),
        capacity=24,
    )
    np.testing.assert_array_equal(many.tokens, repeated.tokens)
    assert len({tuple(row) for row in np.asarray(many.tokens[:4]).tolist()}) > 1


def test_samples_share_one_prefill():
    passes = []

    @dataclasses.dataclass(frozen=True)
    class Counting(type(MODEL)):
        def commit(self, cache, entries, start, verdict):
            passes.append(len(start))
            return super().commit(cache, entries, start, verdict)

    request, capacity = prepare_inputs(
        Counting(VOCAB), Plain(), PROMPTS, LENGTHS, KEYS[0], 4, Sampling(), None, (), num_samples=5
    )
    state = loop.jit_start(Counting(VOCAB), Plain(), "auto", capacity, WEIGHTS, request)
    assert passes[0] == 3 and state.length.shape == (15,)  # prompts are read in 3 rows, not in 15
    assert passes[1:] == [15]  # the last token of a prompt takes a pass of its own, in all samples


# ------------------------------------------------------------- nothing to draw from


@dataclasses.dataclass(frozen=True)
class Broken(type(MODEL)):
    """A target whose logits are ``what`` after every token 7."""

    what: float = np.nan

    def verify(self, params, cache, draft, **options):
        scores = super().verify(params, cache, draft, **options)
        if scores.logits is None:
            return scores
        tokens = draft.tokens[:, draft.num_nodes - scores.logits.shape[1] :, None]
        logits = jnp.where(tokens == 7, self.what, scores.logits)
        return dataclasses.replace(scores, logits=logits)


@pytest.mark.parametrize(
    ("what", "name", "temperature"),
    [
        (np.nan, "plain", 0),
        (-np.inf, "draft", 0),
        (-np.inf, "plain", 1.0),
        (np.nan, "draft", 1.0),
        (-np.inf, "tree iid", 1.0),
        (np.nan, "ngram", 1.0),
    ],
)
def test_a_row_without_a_law_ends_and_says_so_instead_of_saying_token_0(what, name, temperature):
    model = Broken(VOCAB, what)
    drafter, weights, _ = cases(model, PARAMS)[name]
    params = {"target": PARAMS, "drafter": weights}
    bias = np.zeros(VOCAB, np.float32)
    bias[7] = 1.5  # it comes soon
    out = specjax.decode(
        model,
        drafter,
        params,
        PROMPTS,
        LENGTHS,
        key=KEYS,
        max_new_tokens=40,
        sampling=Sampling(temperature=temperature, logit_bias=bias),
    )
    alone = decode(max_new_tokens=1, drafter=Plain())  # an unbroken row, for its reason
    assert [ENDED[i] for i in alone.ended] == ["length"] * 3
    for row in range(3):
        said = new(out, row)
        if ENDED[out.ended[row]] == "no token":
            assert out.tokens[row, out.lengths[row] - 1] == 7
        else:
            assert 7 not in said[:-1] and len(said) == 40
    assert ENDED[out.ended[1]] == "no token" and new(out, 1) == []  # its prompt ends in 7


# ------------------------------------------------------------------------------ refusals


def forgets_rows(logits, prefix):
    return logits[0]


REFUSED = {
    "a law of another shape": (
        dict(sampling=Sampling(logits_processor=forgets_rows)),
        "logits_processor: forgets_rows",
    ),
    "a law that is none": (
        dict(sampling=Sampling(logits_processor="json")),
        "logits_processor='json'",
    ),
    "no samples": (dict(num_samples=0), "num_samples=0"),
    "unknown log-probabilities": (dict(logprobs="all"), "logprobs='all'"),
    "a penalty without end": (
        dict(sampling=lambda: Sampling(presence_penalty=np.inf)),
        "presence_penalty=inf",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_requests_are_refused_before_anything_compiles(what):
    from compiled import compilations

    options, words = REFUSED[what]

    def call():
        with pytest.raises(ValueError, match=words):
            made = {k: v() if callable(v) else v for k, v in options.items()}
            decode(**made)

    # what brings arrays into shape before is compiled once a process
    prepare_inputs(MODEL, DRAFTER, PROMPTS, LENGTHS, KEYS, BUDGETS, Sampling(), 24, ())
    assert compilations(call) == 0
