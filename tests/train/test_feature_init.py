"""Heads at the start of a run: the text that is counted, what is kept of other heads, and added."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feature_runs import RECIPES, make, setting_of
from specjax.train import block, config, eagle3, frozen, head_export, head_losses, mtp_heads
from specjax.train.rows import make_reader
from specjax.train.vocabulary_map import widened
from training_toys import logits_of

import specjax


def test_heads_that_are_gone_on_with_keep_their_vocabulary_and_hidden_states(place, tmp_path):
    _, setting, built = make(place, "eagle3")
    head_export.export_heads(tmp_path, setting.lm, built.drafter, built.publish(built.params))
    own = [*RECIPES["eagle3"], f"init={tmp_path / head_export.MODEL}"]
    made, other = setting_of(place, eagle3.Config, *own)
    other = dataclasses.replace(other, frequencies=other.frequencies[::-1])  # another text
    again = eagle3.make_eagle3(made, other)
    assert np.array_equal(again.vocab, built.vocab)
    begun = again.publish(frozen.starting_params(made, other.lm, again))
    assert np.array_equal(begun["vocab"], built.vocab)

    made, setting = setting_of(place, eagle3.Config, *own, "layers=[1, 0]")
    with pytest.raises(config.ConfigError, match=r"hidden states \(0, 1\), this run gives it"):
        frozen.starting_params(made, setting.lm, eagle3.make_eagle3(made, setting))


def test_what_is_added_to_a_head_changes_nothing_of_the_first_token_at_first(place, tmp_path):
    _, setting, built = make(place, "eagle3")
    head_export.export_heads(tmp_path, setting.lm, built.drafter, built.publish(built.params))
    init = f"init={tmp_path / head_export.MODEL}"
    rows = make_reader(setting.lm.config, setting.end_of_text, built.layers)
    rows = rows(setting.lm.params, next(setting.batches))
    said = {}
    plain = "dependent", "dependency_size=0"
    for name, *own in (("eagle3",), ("p-eagle",), plain, ("dependent",)):
        fields = *RECIPES[name], *own, init, "num_heads=3"
        made, setting = setting_of(place, eagle3.Config, *fields)
        grown = eagle3.make_eagle3(made, setting)
        begun = frozen.starting_params(made, setting.lm, grown)
        outputs = grown.outputs(begun, setting.lm.params, rows)
        said[name, *own] = [logits_of(output) for output in outputs]
        assert jax.tree.structure(begun) == jax.tree.structure(grown.params)
    first, *others = (logits[0] for logits in said.values())
    assert np.std(first) > 0.1
    for other in others:
        np.testing.assert_array_equal(first, other)
    # nor of the further ones, where but a dependency is added
    np.testing.assert_array_equal(said[plain], said["dependent",])
    assert np.abs(said["dependent",][1] - said["eagle3",][1]).max() > 0.1

    made, setting = setting_of(place, eagle3.Config, *RECIPES["p-eagle"], init, "head_dim=4")
    with pytest.raises(config.ConfigError, match=r"another shape .*layer.head_dim: 8 -> 4"):
        frozen.starting_params(made, setting.lm, eagle3.make_eagle3(made, setting))


def test_a_narrow_head_begins_with_the_directions_in_which_the_targets_tables_are_largest(place):
    _, setting, built = make(place, "narrow")
    table = setting.lm.target.head_table(setting.lm.params)
    for own in (built.params["lm_head"]["weight"], built.params["embedding"]):
        assert own.shape == (len(table), 8)
        values = jnp.linalg.svd(table, compute_uv=False)
        np.testing.assert_allclose(jnp.linalg.svd(own, compute_uv=False), values[:8], rtol=1e-3)
    with pytest.raises(config.ConfigError, match="hidden_size=10 with head_dim=4: heads must fill"):
        eagle3.layer_config(setting.lm.target.config, hidden_size=10, head_dim=4)


def test_a_head_with_a_larger_vocabulary_says_of_its_own_tokens_what_it_said(place, tmp_path):
    _, setting, built = make(place, "dependent")
    head_export.export_heads(tmp_path, setting.lm, built.drafter, built.publish(built.params))
    lm, init = setting.lm, f"init={tmp_path / head_export.MODEL}"
    rows = make_reader(lm.config, setting.end_of_text, built.layers)
    rows, known = rows(lm.params, next(setting.batches)), lm.target.vocab_size
    table, seen = np.float32(lm.target.head_table(lm.params)), setting.frequencies[::-1]

    def larger(size):
        words = *RECIPES["dependent"], init, f"draft_vocab_size={size}"
        made, other = setting_of(place, eagle3.Config, *words)
        other = dataclasses.replace(other, frequencies=seen)  # another text
        heads = eagle3.make_eagle3(made, other)
        begun = frozen.starting_params(made, lm, heads)
        assert jax.tree.structure(begun) == jax.tree.structure(heads.params)
        assert ("vocab" in heads.publish(begun)) == bool(size)
        return heads.vocab, [logits_of(x) for x in heads.outputs(begun, lm.params, rows)]

    own, said = larger(40)
    for size in (50, 0):  # a part of the target's vocabulary, and the whole of it
        vocab, says = larger(size)
        assert len(vocab) == (size or known) and {*own} < {*vocab}
        others = seen[np.setdiff1d(np.arange(known), vocab)]
        assert seen[np.setdiff1d(vocab, own)].min() >= others.max(initial=0)
        for was, now in zip(said, says, strict=True):
            np.testing.assert_allclose(was, now[np.searchsorted(vocab, own)], rtol=1e-4, atol=1e-5)
            assert np.std(now) > 0.1
        # where own rows are an image of the target's, further rows are of that image as well
        random = np.random.default_rng(0)
        turn = random.normal(size=(table.shape[1], 5))
        rows_of = widened(table[own] @ turn, own, vocab, table)
        np.testing.assert_allclose(rows_of, table[vocab] @ turn, rtol=1e-3, atol=1e-3)
        rows_of = random.normal(size=(len(own), 5))  # which are no image, and are kept
        kept = widened(rows_of, own, vocab, table)[np.searchsorted(vocab, own)]
        np.testing.assert_array_equal(kept, np.float32(rows_of))
    with pytest.raises(config.ConfigError, match="draft_vocab_size: 40 -> 30"):
        larger(30)


def test_a_draft_vocabulary_counts_the_mixed_corpora(place, tmp_path):
    root, (_, _, teacher) = tmp_path / "other", place
    root.mkdir()
    for i in range(60):  # in no text of the other corpus
        (root / f"{i}.txt").write_text("~~ @@ ~~ @@ $$ " * 20)
    lm = specjax.load(teacher.partition("=")[2])
    tokens = np.unique([x for text in "~@$" for x in lm.tokenizer.encode(text)])
    alone = setting_of(place, eagle3.Config)[1].frequencies
    words = f'data.mixed=["{root}"]', "data.mixed_share=[0.5]"
    mixed = setting_of(place, eagle3.Config, *words)[1].frequencies
    assert alone[tokens].sum() == 0 and mixed[tokens].sum() > 0.1
    assert mixed.sum() == pytest.approx(1)


@pytest.mark.parametrize("kind", [block, mtp_heads])
def test_a_held_out_loss_is_a_mean_where_the_loss_of_the_training_is_one(place, kind):
    layers = ["layers=[1]", "num_layers=1", "num_anchors=6"] if kind is block else []
    made, setting = setting_of(place, kind.Config, *layers)
    make_heads = kind.make_block if kind is block else kind.make_heads
    heads, lm, (held_out,) = make_heads(made, setting), setting.lm, setting.sets.values()
    read = make_reader(lm.config, setting.end_of_text, heads.layers)
    own = head_losses.make_mean_measure if kind is mtp_heads else kind.make_measure
    measure = own(heads, lm.target, read, made)
    terms = measure(heads.params, {"target": lm.params}, *held_out[0])["heldout_loss"]
    assert len(terms) == 2 and sum(x.share for x in terms.values()) == pytest.approx(1)
