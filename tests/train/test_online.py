"""A drafter that learns from what it serves: what is kept and learned, and what never changes."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from specjax.train import config, learner, losses, metrics, model, online

import specjax
from specjax import loop
from specjax.drafters import Plain
from specjax.models import DecoderConfig
from specjax.models.causal_lm import CausalLM
from specjax.models.lm import LM

SMALL = DecoderConfig(
    vocab_size=23,
    hidden_size=12,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    tie_embeddings=True,
    eos_ids=(0,),
)
CAPACITY, NEW = 40, 32
PROMPTS = np.random.default_rng(0).integers(1, 23, (4, 8)).astype(np.int32)
LENGTHS = np.full(4, 8, np.int32)
SETTINGS = dict(key=jax.random.key(7), max_new_tokens=NEW)


def near(params, noise):
    """Weights of a drafter that is often, but not always, right."""
    leaves, shape = jax.tree.flatten(params)
    rng = np.random.default_rng(1)
    moved = [x + noise * x.std() * rng.normal(size=x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(shape, moved)


PARAMS = jax.tree.map(lambda x: 3 * x, model.create(SMALL, 0)[1])  # far from uniform
TARGET = LM(CausalLM(SMALL), PARAMS, None, "toy", "")
DRAFT = dataclasses.replace(TARGET, params=near(PARAMS, 0.15), name="draft")
FAST = config.OptimizerConfig(name="adamw", adam_rate=0.02, weight_decay=0.0, warmup=1)


def fresh(**fields):
    fields = dict(top_k=5, updates=8, rows=4, optimizer=FAST) | fields
    return learner.Online(
        TARGET, DRAFT, capacity=CAPACITY, learning=learner.LearningConfig(**fields)
    )


def plain(temperature=0.0):
    return specjax.decode(
        TARGET.target,
        Plain(),
        {"target": TARGET.params},
        PROMPTS,
        LENGTHS,
        sampling=specjax.Sampling(temperature=temperature),
        capacity=CAPACITY,
        **SETTINGS,
    )


@pytest.mark.parametrize("keep", ["rejected", "judged"])
def test_the_target_s_laws_are_kept_where_they_are_wanted(keep):
    session = fresh(keep=keep)
    out = session.serve(PROMPTS, LENGTHS, **SETTINGS)
    graph = model.create(TARGET.config, 0)[0]
    tokens = np.asarray(out.tokens)
    logits = model.forward(graph, TARGET.params, tokens, np.zeros_like(tokens))
    expected = losses.compress(logits, 5)
    assert session.num_laws > 10
    for row, kept in enumerate(session._rows):
        seen = np.flatnonzero(kept["seen"])
        for got, want in zip(jax.tree.leaves(kept["laws"]), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(got[seen], np.asarray(want)[row, seen], atol=1e-4)
        # every token is behind a position that was judged; no accepted one behind a rejected one
        drafted = np.asarray(out.from_draft)[row]
        emitted = np.arange(8, int(out.lengths[row]))
        if keep == "judged":
            np.testing.assert_array_equal(seen, emitted - 1)
        else:
            assert not drafted[seen + 1].any()
            run, bonus = 0, []  # a token of the target's own behind three accepted ones is a bonus
            for place in emitted:
                run, own = (run + 1, False) if drafted[place] else (0, True)
                if own and drafted[max(place - 3, 8) : place].sum() == 3:
                    bonus.append(place)
            last = emitted[-1]  # what the budget cut short was not rejected
            rejected = [p for p in emitted if not drafted[p] and p not in bonus and p != last]
            np.testing.assert_array_equal([p for p in seen + 1 if p != last], rejected)


def test_text_is_the_target_s_after_every_swap_and_no_swap_compiles_anything():
    session, expected = fresh(), plain()
    sizes, before = [], session.params["drafter"]
    for _ in range(3):
        out = session.serve(PROMPTS, LENGTHS, **SETTINGS)
        np.testing.assert_array_equal(out.tokens, expected.tokens)
        assert session.learn()["loss"] > 0
        sizes.append((loop.jit_burst._cache_size(), loop.jit_start._cache_size()))
        sizes[-1] += (session._step._cache_size(),)
    assert sizes[0] == sizes[1] == sizes[2] and sizes[0][2] == 1
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before, session.params["drafter"])
    assert min(jax.tree.leaves(moved)) > 0


def test_the_drafter_is_accepted_more_often_for_what_it_has_learned():
    slow = dataclasses.replace(FAST, adam_rate=0.002)
    session, rates, found = fresh(keep="judged", top_k=23, updates=60, optimizer=slow), [], []
    for _ in range(3):
        stats = session.serve(PROMPTS, LENGTHS, **SETTINGS).stats
        rates.append(float(stats.accepted.sum() / stats.drafted.sum()))
        found.append(session.learn()["loss"])
    assert rates[-1] > rates[0] + 0.2
    assert found[-1] < found[0] / 2


def test_recording_changes_nothing_that_is_drawn():
    session = fresh()
    hot = specjax.Sampling(temperature=1.0)
    recorded = session.serve(PROMPTS, LENGTHS, sampling=hot, **SETTINGS)
    bare = specjax.decode(
        TARGET.target,
        session.drafter.inner,
        session.params,
        PROMPTS,
        LENGTHS,
        sampling=hot,
        capacity=CAPACITY,
        **SETTINGS,
    )
    np.testing.assert_array_equal(recorded.tokens, bare.tokens)
    assert (recorded.tokens != plain().tokens).any()


def test_a_loss_that_is_not_finite_leaves_the_weights_alone():
    session = fresh()
    assert session.learn() == {}  # nothing served yet
    session.serve(PROMPTS, LENGTHS, **SETTINGS)
    for row in session._rows:
        row["laws"] = dataclasses.replace(row["laws"], rest=np.full(CAPACITY, np.nan, np.float32))
    before = session.params["drafter"]
    with pytest.raises(FloatingPointError, match="keeps the weights it had"):
        session.learn()
    assert session.params["drafter"] is before


def test_the_buffer_holds_the_last_rows():
    session = fresh(buffer=6)
    for _ in range(2):
        session.serve(PROMPTS, LENGTHS, **SETTINGS)
    assert len(session._rows) == 6


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(config.ConfigError, match="learning.keep='all'"):
        learner.LearningConfig(keep="all")
    with pytest.raises(config.ConfigError, match="top_k=99; accepted: 1 to 23"):
        fresh(top_k=99)
    with pytest.raises(config.ConfigError, match="a multiple of batch=8"):
        online.OnlineConfig(eval_rows=9)


def test_recovery_is_a_share_of_what_was_lost():
    assert online.recovered(home=0.8, before=0.6, now=0.7) == pytest.approx(0.5)
    assert online.recovered(home=0.5, before=0.6, now=0.7) == 0.0


def test_the_recipe_leaves_a_curve(place):
    root, train, teacher = place
    for kind in ("greedy", "sampled"):
        (root / f"{kind}.npz").write_bytes((root / "samples.npz").read_bytes())
    drafter = root / "without"  # as the recipe `distill` exports them
    shutil.copytree(root / "target" / "model", drafter)
    (drafter / "tokenizer.json").unlink()
    settings = root / "online.toml"
    settings.write_text(f"""
{teacher.replace("=", '="')}"
drafter = "{drafter}"
text = "{root / "corpus"}"
home = {[str(root / f"{kind}.npz") for kind in ("greedy", "sampled")]}
num_requests = 2
batch = 4
prompt_tokens = 6
new_tokens = 8
eval_rows = 4
eval_every = 1
output = "{root / "online"}"
[learning]
updates = 1
rows = 4
top_k = 4
""")
    from specjax.train.cli import main

    assert main(["online", "--config", str(settings)]) == 0
    home, *curve = metrics.read(root / "online" / "curve.jsonl")
    assert [row["requests"] for row in curve] == [0, 1, 2]
    assert all(0 < value <= 1 for value in home["home"].values())
    assert (root / "online" / "curve.png").stat().st_size > 1000
