"""PaSS's vectors are trained on what they draft with, and the target stays as it is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from specjax.train import block, config, frozen, measured, pass_embeddings, report
from specjax.train.evaluate import weighed
from specjax.train.rows import make_reader
from specjax.train.step import make_keys

import specjax
from specjax.checkpoints import HeadLM
from specjax.models.causal_lm import graph_definition

SMALL = ["num_heads=2", "num_anchors=6", "optimizer.warmup=2", "optimizer.decay_share=0.0"]
SMALL += ["decoding.num_prompts=0", "run.eval_every=10", "run.save_every=10", "report.texts=0"]
SMALL += ["report.plan_prompts=0"]


def made_for(place):
    root, _, teacher = place
    words = [f"data.corpus={root / 'corpus'}", "data.length=24", "data.batch=4", teacher]
    made = config.load(pass_embeddings.Config, root / "empty.toml", [*words, *SMALL])
    setting = frozen.make_setting(made)
    return made, setting, pass_embeddings.make_pass(made, setting)


def test_states_are_those_of_a_text_that_ends_in_the_vectors(place):
    """Against passes over the text before an anchor and then the vectors, without anchors."""
    made, setting, built = made_for(place)
    lm = setting.lm
    rows = make_reader(lm.config, setting.end_of_text)(lm.params, next(setting.batches))
    anchors = jnp.asarray([[1, 5, 9]] * 4)
    states = built.outputs(built.params, lm.params, rows, anchors)
    model = nnx.merge(graph_definition(lm.config), lm.params)
    vectors, seen = built.params["embeddings"], 0
    for row in range(4):
        for i, anchor in enumerate(anchors[row].tolist()):
            document = rows.segments[row, anchor]
            text = [
                int(rows.tokens[row, t]) for t in range(anchor) if rows.segments[row, t] == document
            ]
            if len(text) < anchor:
                continue  # its positions would begin with the document
            size = anchor + 2
            tokens = jnp.asarray([[*text, 0, 0]], jnp.int32)
            index = jnp.asarray([[-1] * anchor + [0, 1]])
            sees = jnp.triu(jnp.ones((size, size), bool))[None]
            hidden, _, _ = model.hidden(
                tokens, jnp.arange(size)[None], sees, vectors=(vectors, index)
            )
            for k in range(2):
                own = states[k][2].reshape(-1, 4, 3)[:, row, i]
                np.testing.assert_allclose(own, hidden[:, anchor + k], rtol=1e-3, atol=1e-4)
                seen += 1
    assert seen > 8


def test_vectors_begin_near_the_mean_of_what_the_target_reads(place):
    made, setting, built = made_for(place)
    before = np.mean(built.params["embeddings"], axis=0)
    shape = dataclasses.replace(setting.lm.config, scale_embeddings=True)
    lm = dataclasses.replace(
        setting.lm, target=dataclasses.replace(setting.lm.target, config=shape)
    )
    scaled = pass_embeddings.make_pass(made, dataclasses.replace(setting, lm=lm))
    table = np.mean(
        np.asarray(lm.target.embed(lm.params, jnp.arange(lm.target.vocab_size)[None])), 1
    )
    more = np.mean(scaled.params["embeddings"], axis=0) - before
    np.testing.assert_allclose(more, (shape.hidden_size**0.5 - 1) * table, atol=1e-5)


def test_the_loss_has_a_gradient_for_every_vector(place):
    made, setting, built = made_for(place)
    lm, batch = setting.lm, next(setting.batches)
    loss = block.make_loss(built, lm.target, make_reader(lm.config, setting.end_of_text), made)
    keys = make_keys(jax.random.key(0), jnp.arange(4))

    def value(params):
        return weighed(loss(params, {"target": lm.params}, batch, keys))

    slope = jax.jit(jax.grad(value))(built.params)
    assert (np.abs(np.asarray(slope["embeddings"])).max(axis=1) > 1e-6).all()


def test_passengers_do_not_count_as_drafted_tokens(place, tmp_path):
    made, setting, built = made_for(place)
    loaded = HeadLM(built.drafter, built.params, "pass", "", setting.lm.checkpoint)
    facts = measured.measure(tmp_path, setting.lm, loaded, {}, made.decoding, made.report)
    assert built.drafter.num_passengers > 0
    assert facts["drafter"]["num_draft"] == built.drafter.tree.num_nodes - 1
    assert measured.read(tmp_path) == facts


def test_vectors_are_trained_exported_and_drafted_with(place):
    root, train, teacher = place
    fields = [teacher, *SMALL, "run.steps=40", "optimizer.rate=0.05"]
    assert train("pass_embeddings", *fields, f"run.folder={root / 'pass'}") == 0
    rows = [row for row in report.read(root / "pass" / "log.jsonl") if "mask_1" in row]
    assert rows[-1]["mask_1"] < rows[0]["mask_1"]
    lm = specjax.load(teacher.partition("=")[2])
    found = specjax.load_drafter(root / "pass" / "model", lm)
    assert found.drafter.name == "pass" and found.drafter.depth == 2
    outs = [
        specjax.generate(lm, [1, 2, 3], drafter=own, max_new_tokens=12)
        for own in (None, str(root / "pass" / "model"))
    ]
    assert outs[0].tokens[0].tolist() == outs[1].tokens[0].tolist()
    assert outs[1].stats.drafted.sum() > 0 and outs[1].stats.passengers.sum() > 0
