"""The texts of the suite ``workloads``."""

import jax.numpy as jnp
import pytest

import specjax
from benchmarks import workloads


def test_workloads_are_the_same_in_every_run_and_of_files_that_the_target_did_not_see():
    for name in workloads.WORKLOADS:
        texts = workloads.prompts(name, 5)
        assert texts == workloads.prompts(name, 5) and len({*texts}) == 5
    for text in workloads.prompts("edits", 5):
        piece, _, given = text.partition("\n# The same with ")
        old, _, rest = given.partition(" renamed to new_")
        assert piece.count(old) >= 3 and not rest.partition(":\n")[2].startswith(piece[:200])
    with pytest.raises(ValueError, match="known are"):
        workloads.prompts("nothing", 1)
    assert not {*workloads.files("heldout")} & {*workloads.files("train")} - {""}


def test_a_target_that_is_made_to_say_true_answers_says_them_with_every_drafter():
    lm = specjax.load("embedded")
    texts, said = workloads.answered(lm, "edits", 2, 16)
    sampling = specjax.Sampling(logits_processor=workloads.GivenText(jnp.asarray(said)))
    for drafter in ("none", "suffix"):
        out = specjax.generate(lm, texts, drafter=drafter, sampling=sampling, max_new_tokens=16)
        assert [row.tolist() for row in out.tokens] == said.tolist()
    with pytest.raises(ValueError, match="answers are known of edits, retrieval"):
        workloads.answered(lm, "open", 1, 4)
