"""The shipped pair on 208 held-out prompts: the same words as plain decoding, whatever drafts."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.decoding import reference
from specjax.drafters import DraftModel, NGram, Plain

COUNT, WIDTH, NEW = 208, 64, 24
DATA = pathlib.Path(specjax.__file__).parent / "data" / "heldout_prompts.jsonl"


@functools.cache
def setting():
    """Target, drafters, params, prompts padded to one width, their lengths."""
    lm, draft = specjax.load("embedded"), specjax.load("embedded-draft")
    lines = DATA.read_text(encoding="utf-8").splitlines()[:COUNT]
    tokens, lengths = np.zeros((COUNT, WIDTH), np.int32), np.zeros(COUNT, np.int32)
    for row, line in enumerate(lines):
        ids = lm.tokenizer.encode(json.loads(line)["text"])[:WIDTH]
        tokens[row, : len(ids)], lengths[row] = ids, len(ids)
    drafters = {
        "plain": Plain(),
        "draft": DraftModel(num_draft=3, model=draft.target),
        "ngram": NGram(num_draft=7),
    }
    return lm, drafters, {"target": lm.params, "drafter": draft.params}, tokens, lengths


@functools.cache
def texts(name: str, batch: int) -> np.ndarray:
    """Greedy continuations of all prompts, decoded ``batch`` at a time, int32 ``[COUNT, L]``."""
    lm, drafters, params, tokens, lengths = setting()
    outs = [
        specjax.decode(
            lm.target,
            drafters[name],
            params,
            tokens[at : at + batch],
            lengths[at : at + batch],
            key=jax.random.key(0),
            max_new_tokens=NEW,
            stops=lm.tokenizer.eos_ids,
        )
        for at in range(0, COUNT, batch)
    ]
    return np.concatenate([out.tokens for out in outs])


def differing(a: np.ndarray, b: np.ndarray) -> list[int]:
    return np.flatnonzero((a != b).any(axis=1)).tolist()


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ["draft", "ngram"])
def test_greedy_text_is_that_of_plain_decoding_alone_and_in_ragged_batches(name, batch):
    assert differing(texts(name, batch), texts("plain", 1)) == []


def test_plain_decoding_says_the_argmax_of_one_pass_over_the_whole_text():
    lm, _, _, _, lengths = setting()
    got = texts("plain", 1)
    for at in range(0, COUNT, 16):
        rows = slice(at, at + 16)
        said = np.asarray(reference.logits(lm.target, lm.params, jnp.asarray(got[rows])))
        for text, length, logits in zip(got[rows], lengths[rows], said, strict=True):
            ends = np.flatnonzero(np.isin(text[length : length + NEW], lm.tokenizer.eos_ids))
            new = slice(length, length + (ends[0] + 1 if ends.size else NEW))
            assert (logits.argmax(axis=-1)[new.start - 1 : new.stop - 1] == text[new]).all()


def test_the_draft_model_is_right_often_enough_to_be_worth_its_name():
    lm, drafters, params, tokens, lengths = setting()
    out = specjax.decode(
        lm.target,
        drafters["draft"],
        params,
        tokens[:8],
        lengths[:8],
        key=jax.random.key(0),
        max_new_tokens=NEW,
        stops=lm.tokenizer.eos_ids,
    )
    assert out.stats.tau > 1.8, out.stats
