"""The references of the fuzzer, held against logits of PyTorch and against laws that are known."""

import collections
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.models import load_config, load_weights

from . import law_check
from .draws import Draws
from .reference_law import RowSettings, law, shared_noise
from .reference_model import decoder_logits
from .runs import Wrong
from .targets import plain_weights

GOLDEN = Path(__file__).parents[1] / "golden"
# every family's own way, but for scalings of rotary embedding that the random decoders lack
CASES = (
    "llama llama_linear gemma2 gemma3 gpt2 gpt_neox gpt_neox_sequential opt mixtral qwen3_moe "
    "qwen3_window deepseek_v2"
).split()


@pytest.mark.parametrize("case", CASES)
def test_the_reference_has_the_logits_of_pytorch(case):
    config = load_config(GOLDEN / case)
    weights = plain_weights(load_weights(GOLDEN / case, config, "float32"))
    expected = np.load(GOLDEN / case / "expected.npz")
    logits, sure = decoder_logits(config, weights, expected["tokens"][0])
    np.testing.assert_allclose(logits, expected["logits"][0], rtol=0, atol=1e-4)
    assert sure.all()


def test_the_law_is_that_of_its_definition():
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert law(logits, RowSettings(temperature=1.0, top_k=2))[0] == pytest.approx(
        [4 / 7, 3 / 7, 0, 0]
    )
    found, sure = law(logits, RowSettings(temperature=1.0, top_p=0.75))
    assert sure and found == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0])
    assert not law(logits, RowSettings(temperature=1.0, top_p=0.9))[1]  # 0.4 + 0.3 + 0.2
    found, sure = law(logits, RowSettings(temperature=0.5, min_p=0.3))
    assert sure and found == pytest.approx(np.asarray([16, 9, 0, 0]) / 25)
    assert law(logits, RowSettings())[0].tolist() == [1, 0, 0, 0]
    assert not law(np.full(3, -np.inf), RowSettings(temperature=1.0))[0].any()


def test_the_noise_is_that_of_the_loop():
    from specjax.decoding.round import NOISE
    from specjax.sampling.noise import Noise

    keys = jax.random.split(jax.random.key(3), 2)
    folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, np.uint32(NOISE))
    wanted = Noise(keys=folded).at(np.asarray([5, 5], np.int32), 7)
    np.testing.assert_allclose(shared_noise(keys, 9, 7)[:, 5], wanted, rtol=1e-6)


class Sampled:
    """A case whose texts are drawn from a law by NumPy, in place of a program."""

    def __init__(self, shares, number=0, rows=4000):
        self.shares, self.rows = np.asarray(shares), rows
        self.draws = Draws(0, number)
        self.model = None

    def drawn(self, index):
        return types.SimpleNamespace(
            prompts=[[0]], settings=[RowSettings()], stops_of=lambda row: set()
        )


P = np.asarray([0.3, 0.25, 0.2, 0.15, 0.08, 0.02])


@pytest.fixture
def drawn_by_numpy(monkeypatch):
    """Replaces the program by draws, and the enumeration by ``P``."""

    def counted(case, batch, tokens, repeat):
        generator = case.draws.generator("texts", repeat)
        counts = generator.multinomial(case.rows, case.shares)
        return [collections.Counter({(x,): int(n) for x, n in enumerate(counts) if n})]

    monkeypatch.setattr(law_check, "counted", counted)
    monkeypatch.setattr(law_check, "joint", lambda *_: {(x,): p for x, p in enumerate(P)})


def test_texts_of_the_law_are_believed_and_few_of_them_need_a_second_stage(drawn_by_numpy):
    check = law_check.texts_have_the_targets_law
    found = [check(Sampled(P, number), 1) for number in range(300)]
    assert sum(words == "one stage" for words in found) > 270
    assert any(words.startswith("two stages") for words in found)


def test_fault_texts_of_another_law_are_seen_by_a_little_more_than_their_noise(drawn_by_numpy):
    other = P + [0.03, -0.03, 0.01, -0.01, 0, 0]  # total variation 0.04; noise of 4000 rows: 0.014
    seen = 0
    for number in range(40):
        try:
            law_check.texts_have_the_targets_law(Sampled(other, number), 1)
        except Wrong:
            seen += 1
    assert seen > 36


def test_fault_a_text_that_has_no_probability_is_seen(drawn_by_numpy, monkeypatch):
    monkeypatch.setattr(law_check, "joint", lambda *_: {(x,): 0.2 for x in range(5)})
    with pytest.raises(Wrong, match="no probability"):
        law_check.texts_have_the_targets_law(Sampled(P), 1)
