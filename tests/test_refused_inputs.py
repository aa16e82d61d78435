"""What ``decode`` and ``Sampling`` refuse, before anything compiles."""

import jax
import numpy as np
import pytest
from ragged import MODEL, PARAMS, VOCAB
from toys import TreeDrafter, like

import specjax
from specjax import Sampling
from specjax.drafters import Plain

pytestmark = pytest.mark.usefixtures("quick_compilation")
SIBLINGS = TreeDrafter(model=MODEL, sibling_sampling="iid")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(tokens=np.zeros((0, 3), np.int32), lengths=np.zeros(0, np.int32)), "batch is empty"),
        (dict(lengths=np.asarray([0])), "empty prompt"),
        (dict(lengths=np.asarray([4])), "4 tokens in a row of 3"),
        (dict(tokens=np.asarray([1, 2, 3])), "must be .batch, tokens."),
        (dict(tokens=np.asarray([[1.0, 2.0, 3.0]])), "token ids are integers"),
        (dict(tokens=np.asarray([[1, 2, VOCAB]])), "another tokenizer"),
        (dict(max_new_tokens=0), "at least 1"),
        (dict(max_new_tokens=-3), "at least 1"),
        (dict(capacity=2), "does not fit"),
        (dict(capacity="64"), "capacity='64': it must be an integer"),
        (dict(max_new_tokens=2**31 - 1), "a buffer of 2.*31 tokens or more"),
        (dict(tokens=[[1, 2, 3], [1]], lengths=[3, 1]), "tokens: its rows differ in length"),
        (dict(stops=[[1], [2, 3]]), "stops: its rows differ in length: .* padded with -1"),
        (dict(stops=np.asarray([2**32 + 1])), "stops: ids from 4294967297 to 4294967297"),
        (dict(rule="nonsense"), "known are auto, approximate-fly, .*, block, coupled, delta"),
        (dict(rule="greedy", sampling=Sampling(temperature=1.0)), "temperature above 0"),
        (dict(drafter=SIBLINGS, rule="block"), "judges chains"),
        (dict(sampling=Sampling(top_p=np.ones(3))), "top_p has 3 rows, the batch has 1"),
        (dict(sampling=Sampling(min_p=np.ones((1, 1)))), "min_p has shape .1, 1.: give a scalar"),
        (dict(sampling=Sampling(logit_bias={5: 1.0})), "a mapping, which specjax.generate takes"),
        (dict(sampling=Sampling(logit_bias=np.zeros(5))), "logit_bias has 5 entries"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_bad_requests_are_refused_before_anything_compiles(change, words):
    settings = dict(
        drafter=Plain(),
        tokens=np.asarray([[1, 2, 3]]),
        lengths=np.asarray([3]),
        max_new_tokens=4,
        key=jax.random.key(0),
    )
    settings.update(change)
    drafter, tokens, lengths = (settings.pop(name) for name in ("drafter", "tokens", "lengths"))
    if "sampling" not in settings and settings.get("rule") == "block":
        settings["sampling"] = Sampling(temperature=1.0)
    params = {"target": PARAMS, "drafter": like(PARAMS, 1)}
    with pytest.raises(ValueError, match=words):
        specjax.decode(MODEL, drafter, params, tokens, lengths, **settings)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(tokens=np.asarray([[1.7, 2.2, 3.0]])), "tokens has dtype float32: token ids are"),
        (dict(tokens=np.asarray([[True, False, True]])), "tokens has dtype bool"),
        (dict(lengths=np.asarray([3.0])), "lengths has dtype float32: lengths are integers"),
        (dict(max_new_tokens=np.asarray([2.5])), "max_new_tokens has dtype float32"),
        (dict(max_new_tokens=np.asarray([4, 4])), r"max_new_tokens has shape \(2,\)"),
        (dict(capacity=np.asarray(8)), "capacity is traced: .* static_argnames"),
        (dict(stops=np.asarray([1.5])), "stops has dtype float32"),
    ],
    ids=lambda x: x if isinstance(x, str) else None,
)
def test_the_shapes_and_dtypes_of_a_traced_request_are_checked(change, words):
    """Within a jit of one's own, values are unknown, but truncating 1.7 to an id helps no one."""
    settings = dict(
        tokens=np.asarray([[1, 2, 3]]),
        lengths=np.asarray([3]),
        max_new_tokens=np.asarray([4]),
        stops=np.asarray([0]),
    )

    def decode(tokens, lengths, **more):
        how = dict(key=jax.random.key(0)) | dict(capacity=8) | more
        return specjax.decode(MODEL, Plain(), {"target": PARAMS}, tokens, lengths, **how)

    with pytest.raises(ValueError, match=words):
        jax.eval_shape(decode, **settings | change)


def test_one_traced_budget_in_an_array_is_not_spread_over_the_rows():
    def decode(budget):
        given = MODEL, Plain(), {"target": PARAMS}, np.ones((2, 3), int), np.asarray([3, 3])
        return specjax.decode(*given, key=jax.random.key(0), max_new_tokens=budget, capacity=8)

    with pytest.raises(ValueError, match=r"max_new_tokens has shape \(1,\)"):
        jax.eval_shape(decode, np.asarray([4]))


@pytest.mark.parametrize("sampling", [0.8, {"temperature": 0.8}, None])
def test_settings_that_are_no_sampling_are_refused(sampling):
    given = MODEL, Plain(), {"target": PARAMS}, np.asarray([[1, 2, 3]]), np.asarray([3])
    with pytest.raises(TypeError, match="sampling=.*: give specjax.Sampling"):
        specjax.decode(*given, key=jax.random.key(0), max_new_tokens=4, sampling=sampling)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(temperature=["1.0"]), "temperature=.* is out of range"),
        (dict(temperature=1j), "temperature=1j is out of range"),
        (dict(temperature=-1), "temperature=-1 is out of range"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(top_p=0), "top_p=0 is out of range"),
        (dict(top_p=1.5), "in .0, 1."),
        (dict(top_k=-1), "top_k"),
        (dict(min_p=2), "min_p"),
        (dict(repetition_penalty=0), "repetition_penalty"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**settings)
