"""What ``generate`` and its like refuse: with one clear error, before anything compiles."""

import inspect

import jax
import numpy as np
import pytest
from asking import flat
from compiled import compilations
from pairs import VOCABULARY

import specjax
from specjax import trees

pytest_plugins = ["pairs"]
REFUSED = {
    "an empty prompt": (dict(prompts=""), "the prompt is empty"),
    "an empty prompt in a batch": (dict(prompts=["a", ""]), "prompt 1 is empty"),
    "no ids": (dict(prompts=[[]]), "the prompt is empty"),
    "an empty batch": (dict(prompts=[]), "batch is empty"),
    "a prompt beyond the context": (dict(prompts=[9] * 700), "context of .*600.*shorten"),
    "an id beyond the vocabulary": (dict(prompts=[9999]), f"9999.*vocabulary has {VOCABULARY}"),
    "an id of more than 32 bits": (dict(prompts=[2**40]), "prompts: ids from 1099511627776"),
    "nothing to generate": (dict(max_new_tokens=0), "max_new_tokens=0"),
    "half a token": (dict(max_new_tokens=1.5), "max_new_tokens=1.5"),
    "budgets of another batch": (dict(max_new_tokens=[3, 4]), "2 values for 1 prompts"),
    "a negative temperature": (dict(temperature=-1.0), "temperature=-1.0"),
    "top_p out of range": (dict(temperature=1.0, top_p=1.1), "top_p=1.1.*0, 1"),
    "a bias beyond the vocabulary": (dict(logit_bias={9999: 1.0}), "9999"),
    "a bias that is no number": (dict(logit_bias={4: 1.0, 3: np.nan}), "{3: nan}: a bias must be"),
    "a bias without bound": (dict(logit_bias={3: np.inf}), "{3: inf}: a bias must be"),
    "an unknown drafter": (dict(drafter="medusa9"), "medusa9.*specjax.load"),
    "no draft model of its own": (dict(drafter="draft"), "drafter=specjax.load"),
    "a drafter that is none": (dict(drafter=3), "drafter=3"),
    "a number of drafts in quotes": (dict(drafter="ngram", num_draft="3"), "num='3': "),
    "a budget in quotes": (dict(max_new_tokens="5"), "max_new_tokens='5': it must be an int"),
    "a negative number of drafts": (dict(drafter="ngram", num_draft=-1), "num=-1"),
    "bytes, which are integers": (dict(prompts=b"def f"), "b'def f' is no prompt"),
    "a number as a prompt": (dict(prompts=3), "3 is no prompt: give a text, a list"),
    "halves of ids": (dict(prompts=[[1.5, 2.0]]), "is no prompt.*integers"),
    "a temperature in quotes": (dict(temperature="1"), "temperature='1' is a text"),
    "half a candidate": (dict(temperature=1.0, top_k=2.5), "top_k=2.5.*whole number"),
    "candidates without end": (dict(temperature=1.0, top_k=2**40), "top_k=1099511627776"),
    "half a stop": (dict(stop=[1.5]), "stop has dtype float"),
    "a stop that is no list": (dict(stop=5), "stop has shape"),
    "a stop that is a text": (dict(stop="x"), "stop='x': .*texts as stop_strings"),
    "stops that are texts": (dict(stop=["x", "yz"]), "stop=.*: .*texts as stop_strings"),
    "stops of no one length": (dict(stop=[[1], [2, 3]]), "stop: its rows differ in length"),
    "a stop that JAX would wrap": (dict(stop=[2**32 + 5]), "stop: ids from 4294967301"),
    "a rule that is none": (dict(rule=3), "rule=3: give a name"),
    "a drafter's class": (dict(drafter=specjax.drafters.NGram), "NGram.*accepted are"),
    "drafts without end": (dict(drafter="ngram", num_draft=100000), "num=100000.*1 to 64"),
    "half a draft": (dict(drafter="ngram", num_draft=1.5), "num=1.5.*integer"),
    "a seed that JAX would wrap": (dict(seed=2**32), "seed=4294967296"),
    "a text that is none": (dict(prompts="a\udcff"), "not UTF-8"),
    "an unknown rule": (dict(rule="nonsense"), "nonsense.*rejection"),
}


def ways():
    """Options that a drafter would ignore, by the drafter: given by name, as an object, whole."""
    from specjax import Drafting
    from specjax.drafters import DraftModel, Fallback, Jacobi, Lookahead, NGram, Recycling

    def model(pair):
        return DraftModel(num_draft=2, model=pair[1].target)

    def draft(pair):
        return pair[1]

    num, siblings = dict(drafting=Drafting(num=5)), dict(drafting=Drafting(sibling_sampling="iid"))
    weights = dict(drafter_params={})
    return {
        "a number of a name that drafts nothing": ("none", num, "num=5: drafter='none' drafts no"),
        "a number without a drafter": (None, num, "num=5: drafter=None drafts nothing; leave num"),
        "a number of an object": (NGram(num_draft=3), num, r"NGram.*3 tokens.*with num_draft=5"),
        "a number of trees": (model, num | dict(drafter_params={}), "give tree='chain:5'"),
        "siblings of copies": ("ngram", siblings, "drafter='ngram' draws no siblings; leave"),
        "siblings of nothing": ("none", siblings, "drafter='none' draws no siblings"),
        "siblings of what auto is": ("auto", siblings, r"'auto' \(here 'ngram'\) draws no sib"),
        "siblings of an object": (model, siblings, "make the object with sibling_sampling='iid'"),
        "siblings of a copier": (NGram(num_draft=3), siblings, "by itself.*leave sibling_sampling"),
        "siblings of matches": (
            NGram(topology=trees.chains(2, 3)),
            siblings,
            "leave sibling_sampling out$",
        ),
        "siblings after a lookup": (
            "ngram+recycling",
            siblings,
            "'ngram.recycling' draws no siblings",
        ),
        "weights of copies and a table": (
            Fallback(first=NGram(), inner=Recycling(vocab_size=99)),
            weights,
            "Fallback.* has no weights",
        ),
        "weights of a name": ("ngram", weights, "drafter_params: drafter='ngram' has no weights"),
        "weights of nothing": (None, weights, "drafter=None has no weights"),
        "weights of a copier": (NGram(num_draft=3), weights, "NGram.* has no weights; leave"),
        "weights of a table": (Recycling(vocab_size=99), weights, "Recycling.* has no weights"),
        "weights of guesses": (Jacobi(), weights, "Jacobi.* has no weights.*states has_weights"),
        "weights of a window": (Lookahead(vocab_size=99), weights, "Lookahead.* has no weights"),
        "weights of a model": (draft, weights, "drafter=LM.* brings its own weights; leave"),
    }


@pytest.mark.parametrize("what", ways())
def test_an_option_that_the_drafter_would_ignore_is_refused_before_anything_compiles(what, pair):
    drafter, options, message = ways()[what]
    drafter = drafter(pair) if inspect.isfunction(drafter) else drafter

    def call():
        with pytest.raises(ValueError, match=message):
            specjax.generate(pair[0], "def f(x):", drafter=drafter, **options)

    jax.random.key(0)
    assert compilations(call) == 0


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_refused_before_anything_compiles(what, pair):
    options, message = REFUSED[what]
    options = {"prompts": "def f(x):", "drafter": "ngram", "max_new_tokens": 33} | options

    def call():
        with pytest.raises((ValueError, TypeError), match=message):
            specjax.generate(pair[0], **flat(**options))

    jax.random.key(0)  # which itself compiles, in a process that has made no key or has dropped it
    assert compilations(call) == 0


@pytest.mark.parametrize(
    ("function", "own"),
    [("generate", ""), ("stream_text", ""), ("compare", "repetitions"), ("trace", "rounds")]
    + [("Chat", "system")],
)
def test_an_option_that_a_function_lacks_is_named_with_the_nearest_it_has(function, own, pair):
    given = [pair[0]] if function == "Chat" else [pair[0], "a"]
    said = (
        rf"^{function}\(\) has no max_tokens: did you mean max_new_tokens\? It takes .*seed.*{own}"
    )
    with pytest.raises(TypeError, match=said):
        getattr(specjax, function)(*given, max_tokens=3)
    with pytest.raises(TypeError, match="has no zzz: It takes"):
        getattr(specjax, function)(*given, zzz=3)


def test_a_name_in_place_of_a_model_is_sent_to_load():
    with pytest.raises(
        TypeError, match="lm='embedded' is no language model: give a model from specjax.load"
    ):
        specjax.generate("embedded", "def f(x):")


def test_a_drafter_with_another_tokenizer_is_refused(pair, folders):
    with pytest.raises(ValueError, match="tokenizer"):
        specjax.generate(pair[0], "a", drafter=specjax.load(folders["stranger"]))


def test_options_that_moved_into_objects_are_named_with_their_place(pair):
    for option, place in (
        (dict(temperature=1.0), r"sampling=specjax.Sampling\(temperature=...\)"),
        (dict(num_draft=3), r"drafting=specjax.Drafting\(num=...\)"),
    ):
        with pytest.raises(TypeError, match=place):
            specjax.generate(pair[0], "a", **option)
    shown = str(inspect.signature(specjax.generate))
    for default in ("drafter: 'DrafterLike' = 'auto'", "= Drafting()", "= Sampling()", "= 128"):
        assert default in shown


class Weighted(specjax.drafters.NGram):
    """A drafter whose state begins with its weights."""

    def init(self, params, *given, **named):
        params["weights"]
        return super().init(params, *given, **named)


def test_a_drafter_without_its_weights_is_told_what_to_bring(pair):
    with pytest.raises(ValueError, match="needs weights: give them as drafter_params"):
        specjax.generate(pair[0], "a", drafter=Weighted(num_draft=2))


def test_a_bare_target_is_refused_in_a_short_error(pair):
    with pytest.raises(TypeError, match="specjax.LM.of") as error:
        specjax.generate(pair[0].target, "a")
    assert len(str(error.value)) < 300
