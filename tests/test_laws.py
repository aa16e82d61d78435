"""Laws of one's own are part of p: exact under speculation, for every shape of draft.

The machinery of ``test_sampled``: the whole jitted loop against the enumerated law.
"""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asking import flat
from registry import cases
from test_sampled import (
    CASES,
    MODEL,
    NUM,
    PARAMS,
    PROMPT,
    ROWS,
    VOCAB,
    WARM,
    judge,
    lawful,
    sample,
)
from toys import bag

import specjax
from specjax import Sampling
from specjax.decoding import reference
from specjax.drafters import NGram, Plain
from specjax.models.causal_lm import IMPOSSIBLE
from specjax.models.contrastive import Contrastive
from specjax.models.tokenizer import FileTokenizer, load_tokenizer
from specjax.sampling import processors
from specjax.sampling.processors import grammar

pytest_plugins = ["pairs"]

# a token may not follow itself, and after 2, 3 nothing comes: order matters, and texts end early
NEXT = np.asarray(
    [
        [0, 0, 0, 0],  # dead
        [2, 3, 4, 5],  # the beginning
        [0, 3, 4, 5],  # after 0
        [2, 0, 4, 5],  # after 1
        [2, 3, 0, 6],  # after 2
        [2, 3, 4, 0],  # after 3
        [0, 0, 0, 0],  # after 2, 3
    ],
    np.int32,
)
ORDERLY = grammar.Automaton("orderly", {"next": NEXT, "kind": np.arange(VOCAB, dtype=np.int32)})
GRAMMAR = dataclasses.replace(WARM, logits_processor=ORDERLY)


def exact(sampling, processor_params=None, target=MODEL, params=PARAMS):
    return reference.joint_law(target, params, PROMPT, NUM, sampling, processor_params).reshape(-1)


def agrees(counts, law, rows=ROWS):
    """``lawful``, of the texts that came to ``NUM`` tokens; and there are as many of ``rows`` as
    there should be, within five standard deviations."""
    whole = law.sum()
    spread = 5 * np.sqrt(rows * whole * (1 - whole)) + 1
    return abs(counts.sum() - rows * whole) < spread and lawful(counts, law / whole)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("plain", "delta"),
        ("draft", "rejection"),
        ("draft", "block"),
        ("ngram", "delta"),
        ("tree distinct", "rejection"),
    ],
)
def test_a_grammar_is_exact_under_speculation_also_where_it_ends_a_text(name, rule):
    drafter, weights, _ = CASES[name]
    counts, _ = sample(drafter, weights, rule, GRAMMAR, law=ORDERLY.params)
    law = exact(GRAMMAR, ORDERLY.params)
    assert 0.5 < law.sum() < 0.99  # some texts end
    assert agrees(counts, law), judge(counts, law / law.sum())


def test_a_grammar_that_the_drafter_does_not_know_is_exact_as_well():
    sampling = dataclasses.replace(GRAMMAR, process_drafts=False)
    drafter, weights, _ = CASES["draft"]
    law = exact(GRAMMAR, ORDERLY.params)
    blind, stats = sample(drafter, weights, "rejection", sampling, law=ORDERLY.params)
    _, seeing = sample(drafter, weights, "rejection", GRAMMAR, law=ORDERLY.params)
    assert agrees(blind, law)
    assert stats.accepted.sum() < seeing.accepted.sum()  # what knowing is worth


def test_fault_a_state_that_forgets_the_path_through_the_draft_is_seen(monkeypatch):
    kept = processors.base.advance_processor

    def forgetful(law, params, state, path):  # the last token alone, as if drafts had no order
        return kept(law, params, state, path[:, ::-1])

    monkeypatch.setattr(processors.base, "advance_processor", forgetful)
    counts, _ = sample(
        *CASES["draft"][:2], "rejection", GRAMMAR, law=ORDERLY.params, rows=ROWS // 8
    )
    assert not agrees(counts, exact(GRAMMAR, ORDERLY.params), ROWS // 8)


def parity(logits, prefix):
    """A law without a state: leans to even tokens after an even number of zeros and ones."""
    valid = jnp.arange(prefix.tokens.shape[1]) < prefix.length[:, None]
    low = jnp.sum((prefix.tokens < 2) & valid, axis=1)
    low += jnp.sum((prefix.path >= 0) & (prefix.path < 2), axis=1)
    lean = jnp.where(jnp.arange(logits.shape[1]) % 2 == 0, 1.0, -1.0)
    return logits + lean * (1 - low % 2)[:, None]


@pytest.mark.parametrize("name", ["draft"])
def test_a_function_of_logits_and_prefix_is_a_law(name):
    sampling = dataclasses.replace(WARM, logits_processor=parity)
    counts, _ = sample(*CASES[name][:2], "rejection", sampling)
    assert lawful(counts, exact(sampling)), judge(counts, exact(sampling))
    assert not lawful(counts, exact(WARM))


# ------------------------------------------------------------------------- contrastive decoding

AMATEUR, AMATEUR_PARAMS = bag(VOCAB, 7)
PAIR = Contrastive(MODEL, AMATEUR, strength=0.7, plausible=0.15)
PAIR_PARAMS = {"expert": PARAMS, "amateur": AMATEUR_PARAMS}


def contrasted():
    """The joint law from the two models' own, by the formula of the paper."""
    law, texts = np.ones(1), np.asarray([PROMPT], np.int32)
    for _ in range(NUM):
        logp = [
            np.log(reference.next_law(model, params, texts, Sampling(temperature=1.0)))
            for model, params in ((MODEL, PARAMS), (AMATEUR, AMATEUR_PARAMS))
        ]
        said = 1.7 * logp[0] - 0.7 * logp[1]
        least = logp[0].max(axis=1, keepdims=True) + np.log(0.15)
        p = np.where(logp[0] >= least, np.exp(said / WARM.temperature), 0)
        law = (law[:, None] * p / p.sum(axis=1, keepdims=True)).reshape(-1)
        ahead = np.tile(np.arange(VOCAB, dtype=np.int32), len(texts))[:, None]
        texts = np.concatenate([np.repeat(texts, VOCAB, axis=0), ahead], axis=1)
    return law


@pytest.mark.parametrize("name", ["draft", "tree iid"])
def test_contrastive_decoding_is_exact_under_speculation(name):
    drafter, weights, _ = CASES[name]
    counts, _ = sample(drafter, weights, "auto", WARM, target=PAIR, weights_of=PAIR_PARAMS)
    assert lawful(counts, contrasted()), judge(counts, contrasted())


@dataclasses.dataclass(frozen=True)
class Stale(Contrastive):
    """The amateur's cache stays that of the prompt."""

    def commit(self, cache, entries, start, verdict):
        done = super().commit(cache, entries, start, verdict)
        begun = start[0] >= len(PROMPT) - 1
        old = jax.tree.map(lambda a, b: jnp.where(begun, a, b), cache["amateur"], done["amateur"])
        return {"expert": done["expert"], "amateur": old}


def test_fault_an_amateur_whose_cache_is_not_written_is_seen():
    target = Stale(MODEL, AMATEUR, strength=0.7, plausible=0.15)
    given = dict(target=target, weights_of=PAIR_PARAMS, rows=ROWS // 8)
    counts, _ = sample(*CASES["draft"][:2], "auto", WARM, **given)
    assert not lawful(counts, contrasted())


# --------------------------------------------------------------------------- greedy, and refusals


@pytest.mark.parametrize(
    ("name", "law"), [("draft", ORDERLY), ("tree per row", ORDERLY), ("ngram", parity)]
)
def test_greedy_with_a_law_is_greedy_over_what_the_law_leaves(name, law):
    drafter, weights, _ = cases(MODEL, PARAMS)[name]
    prompts = np.asarray([[1, 0, 2, 1], [3, 3, 0, 0], [2, 1, 0, 3]], np.int32)
    lengths, sampling = np.asarray([4, 2, 4], np.int32), Sampling(logits_processor=law)
    given = getattr(law, "params", None)
    outs = [
        specjax.decode(
            MODEL,
            which,
            {"target": PARAMS, "drafter": its, "logits_processor": given},
            prompts,
            lengths,
            key=jax.random.key(0),
            max_new_tokens=10,
            sampling=sampling,
        )
        for which, its in ((drafter, weights), (Plain(), None))
    ]
    np.testing.assert_array_equal(outs[0].tokens, outs[1].tokens)
    np.testing.assert_array_equal(outs[0].ended, outs[1].ended)
    for row in range(3):
        text = prompts[row, : lengths[row]].tolist()
        while len(text) < outs[1].lengths[row]:
            p = reference.next_law(
                MODEL, PARAMS, np.asarray([text]), sampling, int(lengths[row]), given
            )
            text.append(int(p[0].argmax()))
        assert outs[1].tokens[row, : len(text)].tolist() == text


@dataclasses.dataclass(frozen=True)
class Bad(processors.LogitsProcessor):
    what: str

    def init(self, params, tokens, lengths):
        return jnp.zeros((3,) if self.what == "init" else lengths.shape)

    def step(self, params, state, token):
        return token if self.what == "step" else state

    def __call__(self, logits, prefix):
        return logits.astype(int) if self.what == "integers" else logits


class Unnamed(processors.LogitsProcessor):
    """Without a state."""

    def __call__(self, logits, prefix):
        return -logits


class Lookalike:
    """Has the methods of a processor with a state, but not the base class."""

    init, step = Bad.init, Bad.step

    def __call__(self, logits, prefix):
        return logits


def test_a_processor_is_a_function_or_has_the_base_class():
    logits = jnp.ones((1, VOCAB))
    tokens, path = jnp.ones((1, 2), jnp.int32), jnp.ones((1, 0), jnp.int32)
    prefix = specjax.sampling.Prefix(tokens=tokens, length=jnp.asarray([2]), path=path)
    for one, name in (
        (no_repeat, "no_repeat"),
        (functools.partial(no_repeat), "no_repeat"),
        (jax.jit(no_repeat), "no_repeat"),
        (Unnamed(), "Unnamed"),
        (ORDERLY, "orderly"),
    ):
        Sampling(logits_processor=one).check()
        assert processors.processor_name(one) == name
    assert processors.initial_processor_state(Unnamed(), None, prefix.tokens, prefix.length) is None
    np.testing.assert_array_equal(processors.apply_processor(Unnamed(), logits, prefix), -logits)
    for wrong in (Lookalike(), Lookalike, Bad, "json"):
        with pytest.raises(ValueError, match="logits_processor=.*: give|a class: give an instance"):
            Sampling(logits_processor=wrong).check()
    with pytest.raises(ValueError, match="lambda.* returns a NoneType for logits float32"):
        processors.apply_processor(lambda logits, prefix: None, logits, prefix)


@pytest.mark.parametrize(
    ("what", "words"),
    [("init", "must lead with the batch"), ("step", "Bad.step"), ("integers", "returns int32")],
)
def test_laws_that_do_not_fit_are_refused_by_name(what, words):
    with pytest.raises(ValueError, match=f"logits_processor: .*{words}"):
        specjax.decode(
            MODEL,
            NGram(num_draft=2),
            {"target": PARAMS},
            np.asarray([PROMPT]),
            np.asarray([len(PROMPT)]),
            key=jax.random.key(0),
            max_new_tokens=3,
            sampling=Sampling(logits_processor=Bad(what)),
        )


# ------------------------------------------------------------------------------------ JSON

GOOD = ['{"a": [1, -2.5e-3, true, null], "b\\u00e9\\n": {}}', '"é😀"', "0", "12", "[[[[]]]]"]
GOOD += ["[ ]"]
BAD = ["[1,]", '{"a" 1}', "01", "-", "{1:2}", "[1}", "[[[[[]]]]]", "[]]", '"a', "nul", "[  ]"]
BAD += ["[] "]


@pytest.fixture(scope="module")
def embedded():
    from specjax.models.model_folder import EMBEDDED

    tokenizer = load_tokenizer(EMBEDDED["embedded"], (0,))
    target = types.SimpleNamespace(vocab_size=tokenizer.vocab_size)
    return types.SimpleNamespace(tokenizer=tokenizer, target=target)


def admitted(law, ids, eos=0):
    """Whether the tokens are a whole text of the grammar."""
    state = grammar.START
    for token in [*ids, eos]:
        state = law.params["next"][state, law.params["kind"][token]]
    return state != grammar.DEAD


def test_the_automaton_admits_json_and_nothing_else(embedded):
    law = processors.json_text(embedded)
    for text in GOOD + BAD:
        assert admitted(law, embedded.tokenizer.encode(text)) == (text in GOOD), text
    things = processors.json_text(embedded, top="object", depth=2)
    assert admitted(things, embedded.tokenizer.encode('{"a": [1]}'))
    assert not admitted(things, embedded.tokenizer.encode("[1]"))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_generated_text_is_json_and_speculation_does_not_change_it(pair, temperature):
    lm, draft = pair
    law = processors.json_text(lm, depth=2)
    options = {
        "logits_processor": law,
        "max_new_tokens": 60,
        "temperature": temperature,
        "num_samples": 6,
    }
    texts = specjax.generate(lm, "x = ", **flat(drafter=draft, num_draft=2, **options))
    whole = [text for text, why in zip(texts.texts, texts.reasons, strict=True) if why == "stop"]
    assert "no token" not in texts.reasons
    for text in whole:
        json.loads(text)
    if temperature:
        assert whole  # the toy's logits are flat: most strings close
    else:
        plain = specjax.generate(lm, "x = ", **flat(drafter=None, **options))
        assert plain.texts == texts.texts
    for ids, why in zip(texts.tokens, texts.reasons, strict=True):
        state = grammar.START
        for token in ids:
            state = law.params["next"][state, law.params["kind"][token]]
        assert state != grammar.DEAD, why


def test_a_grammar_without_an_end_is_refused(embedded):
    tokenizer = FileTokenizer(embedded.tokenizer.backend, ())
    endless = types.SimpleNamespace(tokenizer=tokenizer, target=embedded.target)
    with pytest.raises(ValueError, match="end-of-text"):
        processors.json_text(endless)
    with pytest.raises(ValueError, match="depth=9"):
        processors.json_text(embedded, depth=9)


def test_contrastive_decoding_gives_no_row_that_only_pads_the_experts_vocabulary():
    narrow = jnp.asarray([[[0.0, 1.0, IMPOSSIBLE]]])  # as `as_drafter` answers in wider rows
    contrast = dataclasses.replace(PAIR, plausible=0.0)._contrast(jnp.zeros((1, 1, 3)), narrow)
    assert not jnp.isfinite(contrast[0, 0, 2]) and jnp.all(jnp.isfinite(contrast[0, 0, :2]))


def no_repeat(logits, prefix):
    """The example of the package's docstring."""
    repeats = jnp.arange(logits.shape[-1]) == prefix.last()[:, None]
    return jnp.where(repeats, -jnp.inf, logits)


def test_a_law_that_knows_the_last_token_says_the_same_with_drafts():
    drafter, own, _ = cases(MODEL, PARAMS)["draft"]
    said = []
    for how, weights in ((Plain(), None), (drafter, own)):
        out = specjax.decode(
            MODEL,
            how,
            {"target": PARAMS, "drafter": weights},
            np.asarray([[1, 2], [3, 0]], np.int32),
            np.asarray([2, 1], np.int32),
            key=jax.random.key(0),
            max_new_tokens=20,
            sampling=Sampling(logits_processor=no_repeat),
        )
        said.append(np.asarray(out.tokens))
    np.testing.assert_array_equal(*said)
    row = said[0][0, : int(out.lengths[0])]
    assert (row[2:] != row[1:-1]).all()
