"""SpecDec for encoder-decoder targets: texts, laws and caches are what they are without it."""

import dataclasses
import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asking import flat
from encoder_decoders import FOLDER, decode, expected, model, with_tokenizer
from flax import nnx
from toys import bag, heads

import specjax
from specjax import trees
from specjax.drafters.specdec import SpecDec, SpecDecConfig
from specjax.models.hf import abstract
from specjax.models.seq2seq.config import EncoderDecoderConfig
from specjax.types import Context

pytestmark = pytest.mark.usefixtures("quick_compilation")
MASK = 1


@functools.cache
def drafter_of(case, **settings):
    """A SpecDec drafter of a golden target and its weights: the target's own encoder, embedding and
    first decoder layers, as far as it has them, so that some of its tokens are accepted."""
    target, params = model(case)
    network = dataclasses.replace(target.config, num_layers=1)
    shape = SpecDecConfig(network=network, num_heads=4, mask_token=MASK)
    drafter = SpecDec(config=shape, target=target, **settings)
    own, theirs = heads(drafter), dict(nnx.to_flat_state(params))
    taken = {path: theirs.get(path) for path, _ in nnx.to_flat_state(drafter.shapes)}

    def value(path, x):
        found = taken[tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path)]
        return x if found is None else found[...]

    return drafter, jax.tree_util.tree_map_with_path(value, own)


def written(case, drafter, weights, new, inputs, rows=None, **options):
    target, params = model(case)
    batch = rows or len(jax.tree.leaves(inputs)[0])
    begin = np.full((batch, 1), target.config.start_id, np.int32)
    options = dict(key=jax.random.key(0), max_new_tokens=new, inputs=inputs) | options
    params = {"target": params, "drafter": weights}
    return specjax.decode(target, drafter, params, begin, np.ones(batch, np.int32), **options)


@pytest.mark.parametrize("case", ["t5", "t5_gated", "whisper"])
def test_greedy_text_is_the_targets_token_for_token_and_some_drafts_are_accepted(case):
    """Rows of 40, 17 and 1 tokens in one batch."""
    inputs, rest = expected(case)
    wanted = rest["generated"]
    out = written(case, *drafter_of(case), wanted.shape[1], inputs)
    plain = decode(case, "plain", inputs, wanted.shape[1])
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert case == "whisper" or np.array_equal(out.tokens[:, 1:], wanted)
    accepted = float(out.stats.acceptance)
    assert 0 < accepted < 1 or case == "whisper" and accepted == 1  # which repeats one token


def drawn_law(drafter, weights, rows=3000):
    """How far the first two tokens of many rows at T = 1 are from the target's law, in chi-squared
    over its own deviations: about 0, and above 5 once in a million."""
    target, params = model("t5")
    source = {"tokens": np.full((1, 4), 7, np.int32), "lengths": np.asarray([4])}
    inputs = {k: np.repeat(v, rows, axis=0) for k, v in source.items()}
    law = specjax.Sampling(temperature=1.0)
    out = written("t5", drafter, weights, 2, inputs, rows, sampling=law, rule="rejection")
    then = np.stack([np.zeros(64), np.arange(64)], axis=1).astype(np.int32)
    wide = {k: np.repeat(v, 64, axis=0) for k, v in source.items()}
    full = jax.jit(lambda *given: nnx.merge(abstract(target.config)[0], given[0])(*given[1:]))
    logits = np.asarray(full(params, wide, then), np.float64)
    law = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    first, second = law[0, 0], law[0, 0] @ law[:, 1]
    found = []
    for place, law in ((1, first), (2, second)):
        seen = np.bincount(out.tokens[:, place], minlength=64)
        chi = np.sum((seen - rows * law) ** 2 / (rows * law))
        found.append((chi - 63) / (2 * 63) ** 0.5)
    return max(found)


@dataclasses.dataclass(frozen=True)
class Even(SpecDec):
    """A planted fault: tokens are drawn from one law, and an even one is stated."""

    def draft_step(self, params, target_params, state, context):
        draft, state = super().draft_step(params, target_params, state, context)
        laws = jnp.full_like(draft.laws, 1 / draft.laws.shape[2])
        return dataclasses.replace(draft, laws=laws), state


def test_drawn_texts_follow_the_targets_law():
    drafter, weights = drafter_of("t5", sibling_sampling="iid")
    assert drawn_law(drafter, weights) < 5


def test_fault_a_law_that_was_not_drawn_from_is_found():
    drafter, weights = drafter_of("t5", sibling_sampling="iid")
    twin = Even(config=drafter.config, target=drafter.target, sibling_sampling="iid")
    assert drawn_law(twin, weights) > 5


# ------------------------------------------------------------------- the state


def context_of(tokens, length, begin=None):
    batch = len(tokens)
    return Context(
        tokens=tokens,
        length=jnp.asarray(length, jnp.int32),
        budget=jnp.full(batch, 9, jnp.int32),
        key=jax.random.split(jax.random.key(0), batch),
        sampling=specjax.Sampling(temperature=0.0),
        begin=begin,
    )


class Remembering(SpecDec):
    """A planted fault: what a block wrote of its masks is taken for the entries of the text."""

    def _read_text(self, network, state, context):
        there = context.length - 1
        tokens = jnp.where(jnp.arange(context.tokens.shape[1]) < 2, context.tokens, MASK)
        masked = dataclasses.replace(context, tokens=tokens)
        state = super()._read_text(network, state, masked)
        return dataclasses.replace(state, filled=there)


def fresh_and_later(kind):
    """The draft after a text that was read round by round, and after one that was read at once."""
    base, weights = drafter_of("t5")
    drafter = kind(config=base.config, target=base.target)
    inputs, _ = expected("t5")
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, 64, (3, 24)), jnp.int32)
    given = weights, model("t5")[1]
    later = jit_init(drafter, *given, inputs)
    for length in ([1, 1, 1], [3, 1, 6], [8, 4, 9]):
        draft, later = jit_draft_step(drafter, *given, later, context_of(tokens, length))
    fresh = jit_init(base, *given, inputs)
    wanted, fresh = jit_draft_step(base, *given, fresh, context_of(tokens, [8, 4, 9]))
    return draft, wanted, later, fresh


@functools.partial(jax.jit, static_argnums=0)
def jit_init(drafter, weights, target_params, inputs):
    return drafter.init(weights, target_params, 3, 24, inputs)


@functools.partial(jax.jit, static_argnums=0)
def jit_draft_step(drafter, weights, target_params, state, context):
    return drafter.draft_step(weights, target_params, state, context)


def test_a_cache_of_any_rounds_is_that_of_one_pass():
    draft, wanted, later, fresh = fresh_and_later(SpecDec)
    np.testing.assert_array_equal(draft.tokens, wanted.tokens)
    np.testing.assert_array_equal(later.filled, [7, 3, 8])
    for (name, own), other in zip(
        jax.tree_util.tree_leaves_with_path(later), jax.tree.leaves(fresh), strict=True
    ):
        if own.ndim == 4 and own.shape[2] == 24:  # slots; what lies beyond them is not read
            for row, filled in enumerate((7, 3, 8)):
                ours, theirs = own[row, :, :filled], other[row, :, :filled]
                np.testing.assert_allclose(ours, theirs, atol=1e-5, err_msg=str(name))


def test_fault_entries_of_masks_in_the_cache_are_found():
    _, _, later, fresh = fresh_and_later(Remembering)
    assert np.abs(later.cache[0][0][0, :, :7] - fresh.cache[0][0][0, :, :7]).max() > 1e-3


def test_a_place_of_a_block_is_what_a_slow_pass_over_text_and_block_gives():
    """One pass over text and block, under a mask that is written down place by place."""
    drafter, weights = drafter_of("t5_gated")
    inputs, _ = expected("t5_gated")
    tokens = jnp.asarray(np.random.default_rng(1).integers(2, 64, (3, 16)), jnp.int32)
    given, root = (weights, model("t5_gated")[1]), 6
    context = context_of(tokens, [root + 1] * 3)
    state = drafter.init(*given, 3, 16, inputs)
    network = drafter.heads(weights)
    state = drafter._read_text(network, state, context)
    level, carry = drafter.make_level(*given, state, context)
    grown = specjax.Draft(start=context.length - 1, tokens=context.root[:, None], topology=(-1,))
    _, said = level(carry, grown, 0)
    block = jnp.concatenate([tokens[:, : root + 1], jnp.full((3, 4), MASK)], axis=1)
    sees = np.zeros((root + 5, root + 5), bool)
    for query in range(root + 5):
        for key in range(root + 5):
            sees[key, query] = key <= query if query < root else True
    memory, lengths = network.encode(inputs)
    places = jnp.broadcast_to(jnp.arange(root + 5), block.shape)
    hidden, _, _ = network.hidden(block, places, sees[None], network.remember(memory), lengths)
    slow = network.head(hidden, 3)[:, root + 1 :]
    np.testing.assert_allclose(said, slow, rtol=1e-4, atol=1e-4)


def test_a_round_without_a_new_prompt_encodes_none():
    """XLA moves whatever does not depend on a loop's state out of the loop; the encoder's products,
    which are those of the library or XLA's, are to stay inside."""
    target, _ = bag(16, 0)
    sizes = dict(hidden_size=8, intermediate_size=8, num_encoder_layers=1, num_layers=1)
    network = EncoderDecoderConfig(vocab_size=16, num_heads=2, head_dim=4, **sizes)
    shape = SpecDecConfig(network=network, num_heads=2, mask_token=0, source=5)
    drafter = SpecDec(config=shape, target=target)

    def encoded(weights, state, context):
        return drafter._encode_prompt(drafter.heads(weights), state, context)

    tokens = jnp.zeros((2, 24), jnp.int32)
    state = jax.eval_shape(lambda weights: drafter.init(weights, None, 2, 24), drafter.shapes)
    context = context_of(tokens, [4, 4], begin=jnp.ones(2, jnp.int32))
    text = jax.jit(encoded).lower(drafter.shapes, state, context).compile().as_text()
    loops, always = text.split("\nENTRY ")
    products = r" (?:custom-call|dot)\("
    assert re.search(products, loops) and not re.search(products, always)


# ------------------------------------------------------------------- files, text, refusals


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """T5 with a tokenizer, and a folder with a SpecDec drafter for it."""
    root = tmp_path_factory.mktemp("specdec")
    lm = specjax.load(with_tokenizer(shutil.copytree(FOLDER / "t5", root / "t5")))
    drafter, weights = drafter_of("t5")
    specjax.save_drafter(drafter, weights, root / "specdec", target=lm, dtype="float32")
    return lm, root / "specdec"


def test_a_saved_drafter_loads_back_and_generates_what_the_target_writes(saved):
    lm, folder = saved
    found, (drafter, weights) = specjax.load_drafter(folder, lm), drafter_of("t5")
    assert found.drafter.config == drafter.config
    own = jax.tree.map(lambda x: x.astype(jnp.float32), found.params)
    jax.tree.map(np.testing.assert_array_equal, own, weights)
    options = dict(max_new_tokens=12, stop=())
    plain = specjax.generate(lm, ["TRANSLATE", "A"], **flat(drafter=None, **options))
    both = specjax.generate(lm, ["TRANSLATE", "A"], **flat(drafter=found, **options))
    named = specjax.generate(lm, ["TRANSLATE", "A"], **flat(drafter=str(folder), **options))
    assert plain.texts == both.texts == named.texts


def test_the_papers_verification_keeps_more_tokens_and_is_called_approximate(saved):
    lm, folder = saved
    options = dict(max_new_tokens=12, stop=(), drafter=specjax.load_drafter(folder, lm))
    exact = specjax.generate(lm, "TRANSLATE", **flat(rule="greedy", **options))
    rule = "approximate-tolerance:top_k=5,gap=3.0"
    loose = specjax.generate(lm, "TRANSLATE", **flat(rule=rule, **options))
    strict = "approximate-tolerance:top_k=1,gap=0.0"
    tight = specjax.generate(lm, "TRANSLATE", **flat(rule=strict, **options))
    assert tight.text == exact.text and loose.stats.approximate and not exact.stats.approximate
    assert int(loose.stats.rounds.sum()) < int(exact.stats.rounds.sum())


def test_drafters_and_targets_that_do_not_fit_are_refused(saved):
    lm, folder = saved
    drafter, weights = drafter_of("t5")
    target = model("t5")[0]
    with pytest.raises(ValueError, match="targets that read a prompt alone.*this target reads tok"):
        SpecDec(config=dataclasses.replace(drafter.config, source=8), target=target)
    with pytest.raises(ValueError, match="mask_token=64: the drafter's embedding table has 64"):
        dataclasses.replace(drafter.config, mask_token=64)
    with pytest.raises(ValueError, match="the tree is 5 deep, and the drafter has 4 heads"):
        drafter.with_topology(trees.chain(5))
    memory = {"memory": np.zeros((1, 4, 32), np.float32), "lengths": np.asarray([4])}
    with pytest.raises(ValueError, match="has an encoder of its own.*give inputs with"):
        written("t5", drafter, weights, 3, memory, 1)
    gated = dataclasses.replace(lm, target=dataclasses.replace(target, rows=70))
    with pytest.raises(ValueError, match="made for another target.*vocab_size=64"):
        specjax.load_drafter(folder, gated)


def test_a_config_that_is_not_understood_is_refused_by_the_fields_name(saved, tmp_path):
    from specjax.models.files import read_json, write_json

    lm, folder = saved
    there = shutil.copytree(folder, tmp_path / "other")
    config = read_json(folder, "config.json")
    for change, message in (
        ({"num_heads": "4"}, "num_heads='4'.*whole number"),
        ({"network": {"depth": 3}}, "it has depth that is not known, and lacks vocab_size"),
        ({"network": 7}, "network=7: it must be an object"),
    ):
        own = config["specdec_config"] | change
        write_json(there / "config.json", config | {"specdec_config": own})
        with pytest.raises(ValueError, match=message):
            specjax.load_drafter(there, lm)
    medusa = {"model_type": "medusa", "medusa_num_heads": 2, "medusa_num_layers": 1}
    write_json(there / "config.json", medusa)
    with pytest.raises(
        ValueError, match="in no layout of heads|reads the hidden states of a decoder"
    ):
        specjax.load_drafter(there, lm)
