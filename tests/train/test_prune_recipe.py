"""A draft model of a target's own layers: which layers remain, and that they are unchanged."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from specjax.train import config, distill, evaluate, metrics, model, prune
from specjax.train.journal import Journal

import specjax
from specjax.models import DecoderConfig

SHAPE = dict(hidden_size=8, intermediate_size=16, num_heads=2, num_kv_heads=1, head_dim=4)
WHOLE = DecoderConfig(vocab_size=17, num_layers=3, eos_ids=(0,), tie_embeddings=True, **SHAPE)
# what is lost with each layer, and what two of them lose beside that if both are gone
LOSSES, PAIRS = {0: 5.0, 1: 1.0, 2: 1.5, 3: 3.0}, {(1, 2): 9.0}


def loss_of(kept):
    gone = tuple(layer for layer in LOSSES if layer not in kept)
    return sum(LOSSES[layer] for layer in gone) + PAIRS.get(gone, 0.0)


def test_layers_are_removed_one_by_one_by_the_loss_of_what_remains():
    asked = []
    kept = prune.search(4, 2, lambda rest: asked.append(rest) or loss_of(rest))
    assert kept == (0, 2)  # after layer 1 is gone, layer 2 has become dear
    assert len(asked) == len({*asked}) == prune.num_sets(4, 2) == 7
    with pytest.raises(config.ConfigError, match="cannot express fewer than 3"):
        prune.search(4, 2, loss_of, lambda rest: len(rest) > 2)


def test_fault_of_removing_the_layers_that_are_cheapest_alone_is_seen():
    alone = {layer: loss_of(tuple(x for x in LOSSES if x != layer)) for layer in LOSSES}
    at_once = tuple(sorted(sorted(LOSSES, key=alone.get)[2:]))
    assert at_once != prune.search(4, 2, loss_of) and loss_of(at_once) > loss_of((0, 2))


def test_layers_keep_their_windows_and_experts_are_refused():
    local = dataclasses.replace(
        WHOLE, model_type="gemma2", window=4, local_layers=(True, False, True), norm_plus_one=True,
        sandwich_norms=True, scale_embeddings=True, activation="gelu_tanh", query_scalar=4,
        score_softcap=50.0, logit_softcap=30.0,
    )  # fmt: skip
    assert prune.part_config(local, (1, 2)).local_layers == (False, True)
    assert prune.part_config(local, (0, 2)).local_layers is None  # all of them are
    assert prune.part_config(local, (1,)).window is None
    with pytest.raises(ValueError, match="has experts"):
        prune.part_config(dataclasses.replace(WHOLE, num_experts=2, experts_per_token=1,
                                              expert_size=4), (0,))  # fmt: skip


def test_a_journal_is_read_up_to_its_last_whole_line_and_belongs_to_one_target(tmp_path):
    path = tmp_path / "run" / prune.JOURNAL
    Journal(path, {"target": "a"}).add({"kept": (0, 2)})
    with path.open("a") as file:
        file.write('{"kept": [0, 1], "fou')  # the process was killed here
    again = Journal(path, {"target": "a"})
    assert again.rows == [{"kept": [0, 2]}]
    again.add({"kept": (0, 1)})
    assert len(Journal(path, {"target": "a"}).rows) == 2
    with pytest.raises(config.ConfigError, match="of {'target': 'a'}, and this run is of"):
        Journal(path, {"target": "b"})


def test_what_is_measured_with_gates_is_the_model_that_is_made():
    """And a model of other layers, or of the same in another order, is not."""
    params = model.create(WHOLE, 0)[1]
    tokens = np.random.default_rng(0).integers(1, 17, (2, 13)).astype(np.int32)
    rows = {"": [(tokens, np.ones((2, 12), np.float32))]}

    def measured(pair, own):
        return evaluate.make_evaluate(distill.make_measure(pair), rows)(own, params)

    gates = np.float32([[1, 1], [0, 0], [1, 1]])
    gated = measured(prune.GatedPair(WHOLE, WHOLE, 0), {"weights": params, "gates": gates})
    pair = distill.Pair(prune.part_config(WHOLE, (0, 2)), WHOLE, 0)
    made = measured(pair, prune.part_params(params, (0, 2)))
    np.testing.assert_allclose([*gated.values()], [*made.values()], rtol=1e-4)
    for other in ((0, 1), (2, 0)):
        wrong = measured(pair, prune.part_params(params, other))
        assert abs(wrong[prune.LOSS] / made[prune.LOSS] - 1) > 1e-3, other


@pytest.fixture(scope="module")
def deep(place):
    """A target with three layers."""
    shape = ["model.hidden_size=16", "model.intermediate_size=16", "model.num_layers=3"]
    shape += ["model.num_heads=2", "model.num_kv_heads=1", "model.head_dim=8"]
    fields = [f"run.folder={place.root / 'deep'}", "run.steps=30", "optimizer.warmup=4"]
    assert place.train("pretrain", *shape, *fields, "optimizer.adam_rate=0.05") == 0
    return place.root / "deep" / "model"


def test_a_search_that_was_stopped_goes_on_and_its_model_is_read_by_all(
    place, deep, monkeypatch, capsys
):
    root, train, _ = place
    fields = [f"teacher={deep}", "num_layers=1", "run.steps=4", "run.eval_every=2"]
    fields += ["decoding.num_prompts=4", "decoding.batch=4", "decoding.prompt_tokens=8"]
    fields += ["decoding.new_tokens=8", "report.texts=1", "report.plan_prompts=0"]
    fields += ["optimizer.warmup=1", f"run.folder={root / 'pruned'}"]
    add, seen = Journal.add, []

    def killed(self, row):
        add(self, row)
        seen.append(row["kept"])
        if len(seen) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        train("prune", *fields)
    assert train("prune", *fields) == 0
    said = capsys.readouterr().out
    assert "resumed the search of layers after 4 of 5 sets" in said and "of 5 sets measured" in said
    assert len(seen) == len({*seen}) == 5  # nothing is measured twice
    rows = metrics.read(root / "pruned" / prune.JOURNAL)[1:]
    found = {tuple(row["kept"]): row["found"] for row in rows}
    record = json.loads((root / "pruned" / prune.PRUNED).read_text())
    kept = tuple(record["layers"])
    pairs = {rest: row[prune.LOSS] for rest, row in found.items() if len(rest) == 2}
    best = min(pairs, key=pairs.get)
    assert {*kept} < {*best} and record["before_training"] == found[kept]

    lm = specjax.load(str(deep))
    drafter = specjax.load(root / "pruned" / "model", tokenizer=False)
    assert drafter.config.num_layers == 1
    plain = specjax.generate(lm, "x1 = f", max_new_tokens=12, drafter="plain")
    text = specjax.generate(lm, "x1 = f", max_new_tokens=12, drafter=drafter)
    assert plain.text == text.text
    torch = pytest.importorskip("torch", reason="needs the extra peers")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(root / "pruned" / "model", dtype=torch.float32)
    tokens = np.asarray([[1, 2, 3, 4, 5]], np.int32)
    scores = theirs(torch.from_numpy(tokens.astype(np.int64))).logits.detach().numpy()
    from flax import nnx

    from specjax.models.causal_lm import graph_definition

    own = nnx.merge(graph_definition(drafter.config), jax.tree.map(np.float32, drafter.params))
    np.testing.assert_allclose(own(tokens), scores, rtol=1e-3, atol=1e-3)


def test_what_cannot_be_pruned_is_refused_by_its_field(place, deep, capsys):
    root, train, _ = place
    folder = f"run.folder={root / 'refused'}"
    for given, said in (
        (["num_layers=3"], "num_layers=3; accepted: fewer than the 3 layers"),
        (["num_layers=0"], "num_layers=0; accepted: at least 1"),
        ([], "missing field num_layers"),
    ):
        assert train("prune", f"teacher={deep}", *given, folder) == 2
        assert said in capsys.readouterr().err
