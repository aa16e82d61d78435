"""Heads on a target's features learn by their recipes, load back and draft as they were taught."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feature_runs import BLOCKS, RECIPES, SMALL, make, recipe_of, setting_of
from specjax.train import (
    block,
    block_heads,
    calibrate,
    config,
    dspark,
    eagle3,
    evaluate,
    frozen,
    head_export,
    hydra,
    model,
    mtp_heads,
    report,
    spire,
    unroll,
)
from specjax.train.rows import make_reader
from specjax.train.step import make_keys
from toys import own_params
from training_toys import logits_of

import specjax
from specjax import trees
from specjax.drafters.block import usual_layers
from specjax.models import CausalLM, DecoderConfig
from specjax.models.lm import LM
from specjax.trees import expand
from specjax.types import Context, Draft, Segment


@pytest.mark.parametrize("name", [*RECIPES][1:])
def test_a_recipe_lowers_its_loss_and_what_it_exports_loads_back(place, name):
    root, train, teacher = place
    fields = [teacher, *SMALL, *RECIPES[name], f"run.folder={root / name}"]
    assert train(recipe_of(name), *fields) == 0
    rows = report.read(root / name / "log.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 20 and np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])
    last = rows[-1]
    assert 1 <= last["decoded_tau"] <= 4 and 0 < last["accuracy_1"] <= 1
    lm = specjax.load(teacher.partition("=")[2])
    found = specjax.load_drafter(root / name / "model", lm)
    assert found.drafter.config == make(place, name)[2].drafter.config
    if "parallel=true" in RECIPES[name]:
        assert found.drafter.trained_depth == 2
    if name in BLOCKS:
        assert found.drafter.config.causal is (True if name == "jetspec" else None)


def test_heads_that_no_layout_holds_are_refused_before_they_are_trained(place, capsys):
    root, train, teacher = place
    fields = [teacher, *SMALL, "draft_vocab_size=40", f"run.folder={root / 'refused'}"]
    assert train("eagle3", *fields, "layers=[1, 0]") != 0
    assert "layers=(1, 0): servers concatenate" in capsys.readouterr().err
    assert not (root / "refused").exists()


def test_heads_that_their_authors_layout_cannot_hold_are_exported_in_another(place, tmp_path):
    fields = [*RECIPES["eagle3"], "norm_before_residual=true"]
    made, setting = setting_of(place, eagle3.Config, *fields)
    built = eagle3.make_eagle3(made, setting)
    head_export.export_heads(tmp_path, setting.lm, built.drafter, built.publish(built.params))
    found = specjax.load_drafter(tmp_path / head_export.MODEL, setting.lm)
    assert found.drafter.config == built.drafter.config


@pytest.fixture(scope="module")
def stretched():
    """A target with the rotary scaling ``longrope`` on six of the eight features of a head."""
    scaling = dict(rope_type="longrope", original_max_position_embeddings=64)
    scaling |= dict(short_factor=(1.0, 1.1, 1.3), long_factor=(1.0, 2.0, 3.0))
    sizes = dict(vocab_size=320, hidden_size=16, intermediate_size=32, num_layers=3, num_heads=2)
    sizes |= dict(num_kv_heads=2, head_dim=8, max_positions=256, rotary_fraction=0.75)
    shape = DecoderConfig(
        model_type="phi3",
        **sizes,
        tie_embeddings=False,
        rope_scaling=tuple(sorted(scaling.items())),
    )
    return LM(CausalLM(shape), model.create(shape, 0)[1], None, "long", "")


@pytest.mark.parametrize(
    ("make", "kind", "fields"),
    [
        (eagle3.make_eagle3, eagle3.Config, dict(layers=(0, 1), hidden_size=8, head_dim=4)),
        (block.make_block, block.Config, dict(layers=(1,), num_layers=1)),
        (mtp_heads.make_heads, mtp_heads.Config, dict(copied=False)),
    ],
)
def test_new_layers_for_a_target_with_longrope_have_plain_rotary_positions(
    stretched, tmp_path, make, kind, fields
):
    setting = frozen.Setting(stretched, 0, None, {}, np.arange(320, 0, -1.0) / 1e6, {})
    built = make(kind(num_heads=2, **fields), setting)
    shape = built.drafter.config
    layer = shape.layer if hasattr(shape, "layer") else shape.layers
    assert layer.rope_scaling is None and layer.max_positions == 64
    head_export.export_heads(tmp_path, stretched, built.drafter, built.publish(built.params))
    found = specjax.load_drafter(tmp_path / head_export.MODEL, stretched)
    assert found.drafter.config == shape


@pytest.mark.parametrize(
    ("recipe", "fields", "words"),
    [
        (hydra, ["prefix=true"], "prefix=true: .*'longrope' on 6 of 8 .*; give prefix=false"),
        (spire, ["num_layers=1"], "copies of the target's layers; .* take the recipe eagle3"),
        (mtp_heads, [], "with copied=true .*; give copied=false"),
    ],
)
def test_layers_that_a_target_with_longrope_cannot_give_are_refused_before_text_is_read(
    stretched, monkeypatch, recipe, fields, words
):
    monkeypatch.setattr(frozen, "load_teacher", lambda *given: stretched)
    monkeypatch.setattr(frozen.data, "load_stream", lambda *given: pytest.fail("text is read"))
    with pytest.raises(config.ConfigError, match=words):
        recipe.run(config.load(recipe.Config, None, fields))


def test_weights_that_are_left_out_are_the_authors_of_the_kind_and_move_in_the_run(tmp_path):
    def made(*words):
        found = config.load(block_heads.Config, None, ["run.steps=100", *words])
        return found.teacher_share, *(found.shares(n).tolist() for n in (0, 25, 50, 100))

    assert made() == (0, [0, 1], [0.25, 0.75], [0.5, 0.5], [1, 0])
    assert made("shares_moved=0.5") == (0, [0, 1], [0.5, 0.5], [1, 0], [1, 0])
    assert made("kind=dflash2") == (0, *[[1, 1]] * 4)
    tenths = [1, np.float32(0.6)]
    assert made("kind=xpress") == (0.9, *[tenths] * 4)
    assert made("base_share=0.5", "corrected_share=1") == (0, *[[1, 0.5]] * 4)
    assert made("kind=xpress", "teacher_share=0", "base_share_end=0")[0::4] == (0, [1, 0])
    shown = config.flatten(config.load(block_heads.Config, None, []))
    assert [shown[name] for name in ("teacher_share", "base_share", "base_share_end")] == [0, 1, 0]


def test_the_weights_of_a_step_are_those_of_its_loss(place):
    made, setting, built = make(place, "domino")
    read = make_reader(setting.lm.config, setting.end_of_text, built.layers)
    given, batch = {"target": setting.lm.params}, jnp.asarray(next(setting.batches))
    noise = iter(jax.random.split(jax.random.key(1), 99))
    weights = jax.tree.map(lambda x: x + jax.random.normal(next(noise), x.shape), built.params)

    def losses_of(*words):
        own = setting_of(place, block_heads.Config, *RECIPES["domino"], *words)[0]
        loss = jax.jit(block_heads.make_loss(built, setting.lm.target, read, own))
        keys = jax.random.key(0), jnp.arange(len(batch))
        return [
            float(evaluate.weighed(loss(weights, given, batch, make_keys(*keys, n))))
            for n in (0, 5, 20)
        ]

    base = losses_of("base_share=1", "corrected_share=0", "corrected_share_end=1e-9")[0]
    both = losses_of("base_share=1", "corrected_share=1")[0]
    wanted = [base, 0.75 * base + 0.25 * (both - base), both - base]
    np.testing.assert_allclose(losses_of(), wanted, rtol=1e-5)
    assert abs(both - 2 * base) > 1e-3


@pytest.mark.parametrize("name", ["domino", "xpress", "dflash2", "lilicorr"])
def test_a_gradient_reaches_every_weight_of_a_block_and_its_head(place, name):
    made, setting, built = make(place, name)
    read = make_reader(setting.lm.config, setting.end_of_text, built.layers)
    loss = block_heads.make_loss(built, setting.lm.target, read, made)
    given, batch = {"target": setting.lm.params}, jnp.asarray(next(setting.batches))
    noise = iter(jax.random.split(jax.random.key(1), 99))
    own = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), built.params)

    def value(own):
        middle = made.run.steps // 2  # Domino begins with the block alone
        keys = make_keys(jax.random.key(0), jnp.arange(len(batch)), middle)
        return evaluate.weighed(loss(own, given, batch, keys))

    slopes = jax.jit(jax.grad(value))(own)
    for path, slope in jax.tree_util.tree_leaves_with_path(slopes):
        assert jnp.abs(slope).max() > 1e-7, jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "lilicorr"])
def test_a_head_is_taught_on_the_logits_that_it_drafts_with(place, name, monkeypatch):
    """Below token 6 of every row, after a prompt, with the row's own tokens for drafts."""
    _, setting, built = make(place, name)
    lm, root, said, chances = setting.lm, 6, [], []
    noise = iter(jax.random.split(jax.random.key(1), 99))
    own = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), built.params)
    read = make_reader(lm.config, setting.end_of_text, built.layers)
    rows = read(lm.params, next(setting.batches))
    rows = dataclasses.replace(rows, segments=jnp.zeros_like(rows.segments))  # one document
    if name in BLOCKS:
        outputs = built.outputs(own, lm.params, rows, jnp.full((4, 1), root))
        where = slice(None)
        if name == "specdiff":  # whose second pass is shown the first token
            shown = jnp.broadcast_to(jnp.arange(3) < 2, (4, 1, 3))
            again = built.outputs(own, lm.params, rows, jnp.full((4, 1), root), shown)
            assert jnp.abs(again[1][2] - outputs[1][2]).max() > 0.01
            outputs = [outputs[0], again[1]]
    else:
        outputs = built.outputs(own, lm.params, rows)
        where = slice(root - 1, None, rows.steps(2))  # the pair before the root

    def follow(topology, context, level, carry, **how):
        for depth in range(2):
            tokens = context.tokens[:, root : root + depth + 1]
            chain = trees.chain_parents(depth)
            grown = Draft(start=context.length - 1, tokens=tokens, topology=chain)
            logits, carry = level(carry, grown, depth)
            said.append(logits[:, -1])
        chances.append(getattr(carry, "chances", None))
        return None, carry, None

    monkeypatch.setattr(expand, "expand", follow)
    params = {"target": lm.params, "drafter": built.publish(own)}
    drafter = dataclasses.replace(built.drafter, topology=specjax.trees.chain(2))
    if name == "xpress":  # whose other laws are given guesses, not the text
        drafter = dataclasses.replace(drafter, in_turn=True)
    prompt = Segment(
        tokens=rows.tokens[:, :root],
        next=rows.tokens[:, 1 : root + 1],
        features=jnp.concatenate([rows.layers[i] for i in drafter.features], axis=2)[:, :root],
        start=jnp.zeros(4, jnp.int32),
        num=jnp.full(4, root, jnp.int32),
    )
    context = Context(
        tokens=rows.tokens,
        length=jnp.full(4, root + 1, jnp.int32),
        budget=jnp.full(4, 8, jnp.int32),
        key=None,
        sampling=specjax.Sampling(temperature=0.0),
    )
    state = drafter.observe(*own_params(params), drafter.init(*own_params(params), 4, 24), prompt)
    drafter.draft_step(*own_params(params), state, context)
    for output, logits in zip(outputs, said, strict=True):
        taught = logits_of(output)[:, where].T
        assert jnp.std(taught) > 0.1
        if name == "dflash2":  # which drafts only candidates
            logits, size = np.asarray(logits), setting.lm.target.hidden_size
            assert (np.isfinite(logits).sum(axis=1) == 9).all()
            base = output[0][:, :size] @ output[2][:size]
            candidate = block_heads.candidates_of(base.T, 9)
            np.testing.assert_array_equal(np.isfinite(logits), candidate)
            learned = block_heads.with_token(taught, candidate, jnp.full(4, 5))
            also = np.isfinite(logits) | (np.arange(logits.shape[1]) == 5)
            np.testing.assert_array_equal(also, np.isfinite(learned))
            taught = np.where(np.isfinite(logits), taught, logits)
        np.testing.assert_allclose(logits, taught, rtol=1e-3, atol=1e-4)
    if name == "dspark":
        taught = jnp.stack([state[-1] for _, _, state in outputs], axis=1)
        np.testing.assert_allclose(chances[0], taught, rtol=1e-3, atol=1e-4)
    back = built.unpublish(params["drafter"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), own, back)


def test_temperatures_of_chances_are_fitted_to_what_the_target_accepts(
    place, monkeypatch, tmp_path
):
    made, setting, built = make(place, "dspark")
    noise = iter(jax.random.split(jax.random.key(1), 99))
    own = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), built.params)
    lm, read = setting.lm, make_reader(setting.lm.config, setting.end_of_text, built.layers)
    (held_out,) = setting.sets.values()
    found = calibrate.measure(built, lm, read, made, own, held_out)
    tokens, weight = held_out[0]
    rows = read(lm.params, {"tokens": tokens, "weight": weight})
    anchors = jnp.broadcast_to(calibrate.anchors_of(rows, made), (4, 6))
    outputs, head = built.outputs(own, lm.params, rows, anchors), lm.target.head_table(lm.params)
    for k, output in enumerate(outputs):
        q, state = logits_of(output).T, output[2]
        p = block.at(rows.hidden, anchors + k).reshape(24, -1) @ head.T
        distance = jnp.abs(jax.nn.softmax(q) - jax.nn.softmax(p)).sum(axis=1) / 2
        same = jnp.argmax(q, axis=1) == jnp.argmax(p, axis=1)
        for part, wanted in zip(found, (state[-1], 1 - distance, same), strict=False):
            np.testing.assert_allclose(part[:24, k], wanted, rtol=1e-3, atol=1e-4)
    assert len(found.weight) > 24 and 0 < found.greedy.mean() < 1

    settle = dspark.make_settle(made, setting)
    assert settle(built, lm, read, own).temperatures == ()  # for want of blocks
    monkeypatch.setattr(calibrate, "LEAST", 1)
    drafter = settle(built, lm, read, own)
    wanted = calibrate.fit_temperatures(found.logits, found.drawn, found.weight)
    assert drafter.temperatures == wanted and len({*wanted}) == 2
    head_export.export_heads(tmp_path, lm, drafter, built.publish(own))
    assert specjax.load_drafter(tmp_path / head_export.MODEL, lm).drafter.temperatures == wanted
    nothing = dataclasses.replace(made, scaled_for="nothing")
    assert dspark.make_settle(nothing, setting)(built, lm, read, own) is built.drafter


@pytest.mark.parametrize(
    ("kind", "make", "words"),
    [
        (block, block.make_block, ["layers=[1]"]),
        (eagle3, eagle3.make_eagle3, ["layers=[0, 1]", "parallel=true"]),
    ],
)
def test_a_mask_token_that_the_text_uses_is_refused(place, kind, make, words):
    made, setting = setting_of(place, kind.Config, *words)
    used = int(np.argmax(setting.frequencies))
    never = int(np.flatnonzero(setting.frequencies == 0)[0])
    for token, message in (
        (used, rf"mask_token={used}: .*% of the text are this token; give one that no text"),
        (99_999, "mask_token=99999; accepted: -1, or 0 to"),
    ):
        with pytest.raises(config.ConfigError, match=message):
            make(dataclasses.replace(made, mask_token=token), setting)
    assert frozen.mask_of(never, setting) == never
    assert frozen.mask_of(-1, setting) == setting.end_of_text


def test_a_block_reads_layers_of_all_depths_unless_they_are_named(place):
    made, setting = setting_of(place, block.Config)
    count = setting.lm.config.num_layers
    built = block.make_block(made, setting)
    assert built.layers == built.drafter.features == usual_layers(count)
    assert [usual_layers(n) for n in (1, 2, 3, 4, 6)] == [(1,), (1,), (2,), (2,), (2, 3, 4)]
    assert usual_layers(32) == (2, 9, 16, 23, 30)


@pytest.mark.parametrize(
    ("num_unused", "in_text", "zeros", "taken", "words"),
    [
        (0, [], [], None, "token 0, that between texts"),
        (3, [], [], -3, "an unused row"),
        (3, [-3], [-2], -1, "an unused row"),
        (2, [-2], [-1], None, "that between texts"),
    ],
)
def test_the_default_mask_is_a_row_that_is_no_token(
    place, num_unused, in_text, zeros, taken, words, capsys
):
    _, setting = setting_of(place, block.Config, "layers=[1]")
    known, shares = setting.lm.target.vocab_size, np.zeros_like(setting.frequencies)
    assert setting.num_tokens == known  # the shipped target's too: its recipes mask as before
    shares[in_text] = 1.0
    table = np.array(setting.lm.params["embedding"])
    table[zeros] = 0
    lm = dataclasses.replace(setting.lm, params=setting.lm.params | {"embedding": table})
    given = dict(lm=lm, frequencies=shares, num_tokens=known - num_unused)
    mask = frozen.mask_of(-1, dataclasses.replace(setting, **given))
    assert mask == (setting.end_of_text if taken is None else known + taken)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("conv_group=7", "conv_group=7; accepted: a divisor of 16"),
        ("num_candidates=9999", "num_candidates=9999; accepted: at most"),
        ("kind=lilicorr num_candidates=9999", "num_candidates=9999; accepted: at most"),
        ("kind=lilicorr lattice_heads=7", "lattice"),
    ],
)
def test_candidates_and_convolutions_that_the_target_does_not_admit_are_refused(
    place, word, message
):
    words = "kind=dflash2", "layers=[1]", *word.split()
    made, setting = setting_of(place, block_heads.Config, *words)
    with pytest.raises(config.ConfigError, match=message):
        block_heads.make_block_heads(made, setting)


def test_long_rows_attend_in_blocks_to_the_same_features(place, monkeypatch):
    _, setting = setting_of(place, eagle3.Config)
    read = make_reader(setting.lm.config, setting.end_of_text)
    tokens = jnp.asarray(next(setting.batches)).at[0, 9].set(setting.end_of_text)
    whole = read(setting.lm.params, tokens)
    assert len(np.unique(whole.segments[0])) > 1
    monkeypatch.setattr(unroll, "BLOCK", 7)
    monkeypatch.setattr(jnp, "triu", None)  # the mask of all pairs is not made
    blocks = read(setting.lm.params, tokens)
    np.testing.assert_allclose(blocks.hidden, whole.hidden, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "word", "message"),
    [
        (block, "num_layers=0", "num_layers=0; accepted: at least 1"),
        (block, "decay_length=0", "decay_length=0.0; accepted: above 0, and finite"),
        (block, "layers=[1, 1]", "each layer is read once"),
        (dspark, "markov=lstm", "markov='lstm'; known: vanilla, gated, rnn"),
        (dspark, "teacher_share=0", "DSpark learns the target's law"),
        (block_heads, "kind=dflash", "kind='dflash'; known: domino, xpress, dflash2, lilicorr"),
        (block_heads, "prefix=7", "prefix=7; accepted: 0 to 6"),
        (block_heads, "rounds=-1", "rounds=-1; accepted: at least 0"),
        (block_heads, "conv_taps=0", "conv_taps=0; accepted: at least 1"),
        (block_heads, "base_share_end=-1", "base_share_end=-1.0; accepted: at least 0"),
        (block_heads, "shares_moved=0", "shares_moved=0.0; accepted: above 0, at most 1"),
        (block_heads, "corrected_share=0", "corrected_share=0 at the start and the end"),
        (dspark, "ce_share=2", "ce_share=2.0"),
        (dspark, "scaled_for=all", "scaled_for='all'; known: drawn, greedy, nothing"),
        (eagle3, "window=99", "window=99; accepted: 0, or at least data.length=256"),
        (eagle3, "mask_token=3", "mask_token=3 without parallel: an EAGLE-3 head has no masks"),
        (eagle3, "num_layers=0", "num_layers=0; accepted: at least 1"),
    ],
)
def test_heads_that_cannot_be_are_refused(tmp_path, kind, word, message):
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(config.ConfigError, match=message):
        config.load(kind.Config, tmp_path / "empty.toml", [word])
