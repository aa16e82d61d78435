"""Caches in eight bits: codes, attention over them, drafts and entries against NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from compiled import cache_copies, hlo
from masked_decoder import from_scratch, masked, softmax
from test_small_cache import CONFIG, DRAFTED, PROMPTS, SINKS, TARGET, WINDOW, params, rounds

import specjax
from specjax import kernels
from specjax.drafters import DraftModel, Plain, SelfDraft
from specjax.kernels.attention import choice_of
from specjax.models import low_bit_cache, low_bits, windowed
from specjax.text.drafter_names import named

KINDS = ("int8", "fp8")


def stored(x, kind):
    """What codes stand for, in NumPy."""
    if kind == "fp8":
        return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scale = np.abs(x).max(axis=-1, keepdims=True) / 127
    return np.round(x / np.where(scale > 0, scale, 1)) * scale


# ------------------------------------------------------------------- codes and attention


@functools.partial(jax.jit, static_argnums=0)
def attended(kind, query, keys, values, fault=0):
    """Attention of two nodes to codes; ``fault`` turns the heads of all codes or scales."""
    prefix = low_bits.encoded(kind, (keys, values))
    last = jnp.roll(prefix[-1], fault, axis=1)
    prefix = (*prefix[:-1], last)
    own = jnp.zeros((*keys.shape[:2], 2, keys.shape[3]))
    length = jnp.asarray([keys.shape[2]])
    mask, choice = jnp.eye(2, dtype=bool)[None], choice_of(keys.shape[2], length)
    out = kernels.current().attend(query, own, own, mask, prefix, length, choice)
    return out, low_bits.decoded(kind, low_bits.encoded(kind, (keys, values)), jnp.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_fault_attention_to_codes_is_that_to_what_they_stand_for_and_other_scales_are_seen(kind):
    random = np.random.default_rng(0)
    size, slots, heads = 4, 9, 2
    wide = np.asarray([1e-3, 1.0, 30.0, 0.0])[:, None]  # tokens of different size, and none
    keys, values = random.normal(size=(2, 1, heads, slots, size)).astype(np.float32)
    keys[0, 0, :4] *= wide
    values[0, 1, :4] *= wide
    query = random.normal(size=(1, heads, size, 1, 2)).astype(np.float32)
    out, kept = attended(kind, query, keys, values)
    for x, found in zip((keys, values), kept, strict=True):
        np.testing.assert_allclose(found, stored(x, kind), rtol=1e-5, atol=1e-9)
    most = other = 0.0
    wrong, _ = attended(kind, query, keys, values, 1)
    for head in range(heads):
        for node in range(2):
            k, v = (
                np.concatenate([stored(x[0, head], kind), np.zeros((1, size))])
                for x in (keys, values)
            )
            expected = softmax(k @ query[0, head, :, 0, node] / 2) @ v
            most = max(most, np.abs(out[0, head, :, 0, node] - expected).max())
            other = max(other, np.abs(wrong[0, head, :, 0, node] - expected).max())
    assert most < 1e-5 and other > 1e-2


# ------------------------------------------------------------------- drafts and caches


def drafter(kind):
    return DraftModel(DRAFTED, model=low_bit_cache(windowed(TARGET, WINDOW, SINKS), kind))


def furthest(kind, found, told):
    """The greatest difference of the laws of a draft, and of what the cache stands for, from a
    masked pass whose entries are stored as ``told`` says."""
    state, draft = found
    law = entry = 0.0
    for row, length in enumerate(state.length):
        text = [*state.tokens[row, :length], *draft.tokens[row, 1:]]
        sees = masked(len(text), WINDOW, SINKS)
        logits, entries = from_scratch(CONFIG, params()["drafter"], text, sees, stored=told)
        said = softmax(logits[length - 1 : length - 1 + DRAFTED])
        law = max(law, np.abs(draft.laws[row] - said).max())
        filled = int(state.drafter_state.filled[row])
        for leaves, made in zip(state.drafter_state.cache, entries, strict=True):
            kept = low_bits.decoded(kind, tuple(map(jnp.asarray, leaves)), jnp.float32)
            for position in range(max(filled - WINDOW, 0), filled):
                slot = position
                if position >= SINKS:
                    slot = SINKS + (position - SINKS) % WINDOW
                for a, b in zip(kept, made, strict=True):
                    entry = max(entry, np.abs(a[row, :, slot] - b[position]).max())
    return law, entry


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("kind", KINDS)
def test_after_any_number_of_rounds_laws_and_codes_are_those_of_a_rounded_pass_from_scratch(kind):
    seen = list(rounds(drafter(kind), 6))
    right = np.max([furthest(kind, found, lambda x: stored(x, kind)) for found in seen], axis=0)
    exact = np.max([furthest(kind, found, None) for found in seen], axis=0)
    # NumPy computes in float64: a number between two codes may go to the other one
    assert (right < exact / 4).all(), (right, exact)
    lengths = np.stack([state.length for state, _ in seen])
    assert (np.diff(lengths, axis=0) > 1).any() and lengths[-1].min() > SINKS


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("kind", KINDS)
def test_a_target_with_such_a_cache_says_so_and_its_greedy_text_does_not_depend_on_the_drafter(
    kind,
):
    target = low_bit_cache(TARGET, kind)
    run = functools.partial(
        specjax.decode,
        target,
        tokens=PROMPTS,
        lengths=np.asarray([1, 4, 8, 23], np.int32),
        key=jax.random.key(0),
        max_new_tokens=24,
    )
    plain = run(Plain(), params())
    assert plain.stats.approximate == f"a cache in {kind}"
    for own in (DraftModel(3, model=TARGET), SelfDraft(3, target=target, window=WINDOW)):
        weights = params() if isinstance(own, DraftModel) else {"target": params()["target"]}
        np.testing.assert_array_equal(run(own, weights).tokens, plain.tokens)
    out = specjax.decode(
        TARGET,
        drafter(kind),
        params(),
        PROMPTS,
        np.asarray([1, 4, 8, 23], np.int32),
        key=jax.random.key(0),
        max_new_tokens=4,
    )
    assert not out.stats.approximate


@pytest.mark.parametrize(("kind", "word"), [("int8", "s8"), ("fp8", "u8")])
def test_the_loop_copies_no_cache(kind, word):
    text = hlo(TARGET, DraftModel(3, model=low_bit_cache(TARGET, kind)), params(), 3, 300, 1.0)
    shapes = ("3,2,300,8", "6,300,8")  # as the kernels write entries, and as XLA scatters them
    assert any(f"{word}[{shape}]" in text for shape in shapes)
    assert not cache_copies(text, (3, 2, 300, 8), kind=word)


# ------------------------------------------------------------------- names, refusals


def test_a_draft_model_with_such_a_cache_is_named_so():
    lm = specjax.load("embedded")
    found = named(lm, "draft:cache=int8")
    assert found.target.config.cache_bits == "int8" and found.name.endswith(":cache=int8")
    found = named(lm, "draft:window=64,cache=fp8").target.config
    assert (found.cache_bits, found.cache_window, found.sinks) == ("fp8", 64, 4)
    both = windowed(low_bit_cache(lm, "int8"), 64)
    assert both.target.approximate == "attention to 4 sinks and a window of 64, a cache in int8"
    leaves = jax.eval_shape(lambda: both.target.init(lm.params, 2, 100))[0]
    assert [x.dtype.name for x in leaves] == ["int8", "int8", "float32", "float32"]
    assert [x.shape[2:] for x in leaves] == [(68, leaves[0].shape[3])] * 2 + [(68, 1)] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("draft:cache=int4", "accepted are 'int8' and 'fp8'"),
        ("draft:sinks=4,cache=int8", "write 'draft:window=512,sinks=4,cache=int8'"),
        ("eagle3:cache=int8", "this cache is for draft models"),
        ("self:cache=int8", "'cache' is no setting of the target's own layers"),
        ("self:window=64:cache=int8", "'cache' is no setting of the target's own layers"),
    ],
)
def test_names_of_no_such_cache_are_refused(name, words):
    with pytest.raises(ValueError, match=words):
        named(specjax.load("embedded"), name)


def test_models_that_can_have_no_such_cache_are_refused():
    with pytest.raises(TypeError, match=r"low_bit_cache\(Bigram\): only decoder-only models"):
        low_bit_cache(Bigram(), "int8")
    with pytest.raises(ValueError, match="cache='int4'.*'int8' and 'fp8'"):
        low_bit_cache(TARGET, "int4")


class Bigram(specjax.Target):
    vocab_size = 3
    init = verify = commit = None
