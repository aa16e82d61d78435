"""The audit of engines: any callable that draws texts, and Hugging Face transformers."""

import itertools

import numpy as np
import pytest

import specjax
from specjax.analysis import transformers_audit
from specjax.cli import audit as command
from specjax.cli.commands import parser

VOCAB = 3
P = np.random.default_rng(0).dirichlet(np.ones(VOCAB), (VOCAB, VOCAB))  # by the last two tokens
PROMPT = (0, 1)


def law(texts):
    whole = np.concatenate([np.tile(PROMPT, (len(texts), 1)), texts], axis=1)
    return P[whole[:, :-2], whole[:, 1:-1]]


def engine(mistake=None):
    """An engine that draws from P, or makes a mistake."""
    random = np.random.default_rng(1)

    def draw(num):
        for _ in range(num):
            text = list(PROMPT)
            while len(text) < 8:
                p = P[text[-2], text[-1]]
                if mistake == "from the fourth token on sharper" and len(text) > 4:
                    p = p**1.5 / (p**1.5).sum()
                if mistake == "the second token forgets the first" and len(text) == 3:
                    p = P[:, text[-1]].mean(axis=0)
                text.append(int(random.choice(VOCAB, p=p)))
            yield text[2:]

    return draw


def audited(mistake=None):
    return specjax.audit_callable(
        engine(mistake), law, vocab_size=VOCAB, num_tokens=6, samples=1500, subject="mine"
    )


def test_a_sound_engine_is_found_to_be_nothing_else():
    report = audited()
    assert not report.biased and len(report.findings) == 4
    assert str(report).startswith("mine\n  texts of 3 tokens: no deviation above TV 0.")


@pytest.mark.parametrize(
    ("mistake", "seen"),
    [("from the fourth token on sharper", 1), ("the second token forgets the first", 0)],
)
def test_fault_of_an_engine_is_found_by_the_test_that_sees_it(mistake, seen):
    report = audited(mistake)
    assert report.findings[seen].biased and not audited().findings[seen].biased


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: audit(lambda n: [(0, 1)] * n), "at least 6 tokens"),
        (lambda: audit(lambda n: [(0, 1, 2, 3, 0, 0)] * n), "from 0 to 2"),
        (lambda: audit(lambda n: [(0,) * 6]), r"draw\(1500\) returned 1 texts"),
        (lambda: audit(lambda n: itertools.repeat((0,) * 6)), "returned more texts"),
        (lambda: audit(engine(), law=lambda x: np.full((*x.shape, 3), np.nan)), "finite"),
        (lambda: audit(engine(), law=lambda x: np.log(law(x))), "not negative"),
        (lambda: audit(engine(), law=lambda x: law(x) / 2), "sum to 1"),
        (lambda: audit(engine(), law=lambda x: law(x)[:, :, :2]), r"\[27, 3, 2\]"),
        (lambda: audit(engine(), samples=3), "at least 200 tokens"),
        (lambda: audit(engine(), enumerated=7), "enumerated from 1 to num_tokens"),
        (lambda: specjax.audit_transformers("beam"), "way='beam': give one of assistant"),
        (
            lambda: specjax.audit_transformers(sampling=specjax.Sampling(temperature=0.0)),
            "temperature must be above 0",
        ),
        (
            lambda: command.run(parser().parse_args(["audit", "transformers:seed=3"])),
            "'seed=3' is no setting of 'transformers'",
        ),
    ],
)
def test_what_cannot_be_audited_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def audit(draw, **changed):
    settings = {"law": law, "vocab_size": VOCAB, "num_tokens": 6, "samples": 1500} | changed
    return specjax.audit_callable(draw, **settings)


# ------------------------------------------------------------------------- transformers


def test_what_is_not_asked_for_is_refused_and_an_assistant_stays_as_it_is(monkeypatch):
    torch = pytest.importorskip("torch")
    model, assistant = (transformers_audit._toy(torch, seed, 8, 1) for seed in (0, 1))
    pair = dict(model=model, assistant=assistant, num_tokens=4, samples=50)
    with pytest.raises(ValueError, match="temperature=0.5: it is set by sampling"):
        specjax.audit_transformers(**pair, temperature=0.5)
    for prompt in ((), (1, 4)):
        with pytest.raises(ValueError, match="give token ids from 0 to 3, at least one"):
            specjax.audit_transformers(**pair, prompt=prompt)
    with pytest.raises(ValueError, match="assistant_confidence_threshold=0.4: it is set by"):
        specjax.audit_transformers(**pair, assistant_confidence_threshold=0.4)
    from transformers.generation import utils

    lengths, sound = [], utils._speculative_sampling

    def counted(ids, logits, length, scores, **settings):
        lengths.append(length)
        return sound(ids, logits, length, scores, **settings)

    monkeypatch.setattr(utils, "_speculative_sampling", counted)
    kept, threads = assistant.generation_config.num_assistant_tokens, torch.get_num_threads()
    specjax.audit_transformers(**pair, num_draft=2)
    assert np.mean(np.asarray(lengths) == 2) > 0.7  # not at the end of a text
    model.generation_config.eos_token_id = 0
    with pytest.raises(ValueError) as refused:  # its traceback keeps all frames alive
        specjax.audit_transformers(**pair)
    assert "text" in str(refused.value) and not torch.is_inference_mode_enabled()
    assert torch.get_num_threads() == threads
    assert assistant.generation_config.num_assistant_tokens == kept
    assistant.config.vocab_size = 5
    with pytest.raises(ValueError, match="it has 5 tokens and the model 4"):
        specjax.audit_transformers(**pair)


def test_assisted_generation_that_draws_from_all_of_p_is_found(monkeypatch):
    torch = pytest.importorskip("torch")
    from transformers.generation import utils

    sound = utils._speculative_sampling

    def from_all_of_p(ids, logits, length, scores, **settings):
        tokens, matches = sound(ids, logits, length, scores, **settings)
        p = scores.softmax(dim=-1)[:, matches]
        return torch.cat([tokens[:, :-1], torch.multinomial(p, 1)], dim=1), matches

    monkeypatch.setattr(utils, "_speculative_sampling", from_all_of_p)
    report = specjax.audit_transformers(samples=200, num_tokens=4)
    assert report.biased and "transformers 5" in str(report)


def test_assisted_generation_of_transformers_is_found_to_be_nothing_else(capsys):
    pytest.importorskip("torch")
    words = ["audit", "transformers:num_tokens=4", "--num-samples", "150"]
    assert command.run(parser().parse_args(words)) == 0
    assert "assistant: 150 texts of 4 tokens" in capsys.readouterr().out
