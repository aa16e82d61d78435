"""Parallel heads learn in turn what they would learn at once, alone or with their target."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.train import config, frozen, head_losses, joint, mtp_heads, report
from specjax.train.evaluate import weighed
from specjax.train.in_turn import in_turn
from specjax.train.rows import make_reader

import specjax

SMALL = ["num_heads=2", "optimizer.warmup=2", "optimizer.decay_share=0.0", "run.save_every=5"]
SMALL += ["decoding.num_prompts=0", "run.eval_every=10", "report.texts=0"]
SMALL += ["report.plan_prompts=0"]

# ---------------------------------------------------------------------------- one after another


def loss_of(own, shared, each, fixed):
    inner = jnp.tanh(shared @ own["in"])
    return each * jnp.sum((inner @ own["out"] - fixed) ** 2) / fixed.size, jnp.sum(inner)


def at_once(own, shared, each, fixed):
    """The losses of all heads as one sum."""
    found = [
        loss_of(jax.tree.map(lambda x, k=k: x[k], own), shared, each[k], fixed)
        for k in range(len(each))
    ]
    return sum(value for value, _ in found), jnp.stack([other for _, other in found])


def last_alone(own, shared, each, fixed):
    """A fault: the input has the gradient of the last head alone."""
    before = in_turn(loss_of, own, jax.lax.stop_gradient(shared), each, fixed)
    last = jax.tree.map(lambda x: x[-1:], (own, each))
    value, _ = in_turn(loss_of, jax.lax.stop_gradient(last[0]), shared, last[1], fixed)
    return before[0] + value - jax.lax.stop_gradient(value), before[1]


def several(count, wide=5, length=7):
    random = np.random.default_rng(0)
    own = {"in": (count, 3, wide), "out": (count, wide, 3)}
    own = {name: jnp.asarray(random.normal(size=x), jnp.float32) for name, x in own.items()}
    shared = jnp.asarray(random.normal(size=(length, 3)), jnp.float32)
    return own, shared, 1.0 + jnp.arange(count), shared[::-1] * 2


def slopes(way, count=4):
    own, shared, *rest = several(count)

    def loss(own, shared):
        total, others = way(own, shared, *rest)
        return 3.0 * total, others

    found = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(own, shared)
    return jax.tree.leaves(found)


def turned(*given):
    return in_turn(loss_of, *given)


def test_heads_in_turn_have_the_gradients_of_their_sum():
    for ours, theirs in zip(slopes(turned), slopes(at_once), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_gradient_of_one_head_alone_is_told_apart():
    worst = [np.abs(a - b).max() for a, b in zip(slopes(last_alone), slopes(at_once), strict=True)]
    assert max(worst) > 0.1


def test_activations_of_one_head_are_in_memory_at_a_time():
    """As a sum, each further head adds an array of its own."""
    wide, length, grown = 64, 4096, []
    for way in (turned, at_once):
        sizes = []
        for count in (2, 6):
            own, shared, *rest = several(count, wide, length)
            slope = jax.grad(lambda *x, way=way, rest=rest: way(*x, *rest)[0], argnums=(0, 1))
            compiled = jax.jit(slope).lower(own, shared).compile()
            sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        grown.append((sizes[1] - sizes[0]) / (4 * 4 * wide * length))
    assert grown[0] < 0.1 and grown[1] > 0.9


# ---------------------------------------------------------------------------------- the recipe


def setting_of(place, *fields):
    root, _, teacher = place
    words = [f"data.corpus={root / 'corpus'}", "data.length=24", "data.batch=4", teacher]
    made = config.load(mtp_heads.Config, root / "empty.toml", [*words, *SMALL, *fields])
    return made, frozen.make_setting(made, lambda count: (count - 1,))


@pytest.mark.parametrize("fields", [[], ["teacher_share=0.5", "decay=0.5"]])
def test_the_loss_is_that_of_all_heads_at_once(place, fields):
    made, setting = setting_of(place, *fields)
    built, target = mtp_heads.make_heads(made, setting), setting.lm.target
    read = make_reader(setting.lm.config, setting.end_of_text, built.layers)
    given, batch = {"target": setting.lm.params}, next(setting.batches)
    noise = iter(jax.random.split(jax.random.key(1), 99))
    own = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(noise), x.shape), built.params)
    ours = mtp_heads.make_loss(built, target, read, made)
    theirs = head_losses.make_loss(built, target, read, made)
    decays = [made.decay ** (k + 1) for k in range(made.num_heads)]

    def of(loss, factor):
        return lambda params: weighed(loss(params, given, batch, None)) * factor

    found = jax.jit(jax.value_and_grad(of(ours, 1.0)))(own)
    wanted = jax.jit(jax.value_and_grad(of(theirs, 1 / sum(decays))))(own)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5)


def test_with_the_target_gradients_of_all_heads_reach_its_trunk(place):
    made, setting = setting_of(place, "with_target=true")
    built, target = mtp_heads.make_heads(made, setting), setting.lm.target
    read = make_reader(setting.lm.config, setting.end_of_text, built.layers, gradient=True)
    batch = next(setting.batches)
    params = {"target": jax.tree.map(jnp.asarray, setting.lm.params), "drafter": built.params}

    def plain(made_heads, target, params, target_params, rows, config):
        outputs = made_heads.outputs(params, target_params, rows)
        means = head_losses.head_losses(outputs, target, target_params, rows, 0.0)
        return head_losses.shared(means, 1.0, 1 / len(means))

    def slope(terms):
        loss = joint.make_loss(built, target, read, made, terms)
        return jax.jit(jax.grad(lambda own: weighed(loss(own, None, batch, None))))(params)

    found, wanted = slope(mtp_heads.head_terms), slope(plain)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=1e-5)
    alone = slope(lambda *_: {})
    table = [np.asarray(jax.tree.leaves(x["target"]["embedding"])[0]) for x in (found, alone)]
    assert np.abs(table[0] - table[1]).max() > 1e-4  # the heads have a part in it


def test_heads_are_trained_exported_and_drafted_with(place):
    root, train, teacher = place
    fields = [teacher, *SMALL, "run.steps=30", f"run.folder={root / 'parallel'}"]
    assert train("mtp_heads", *fields) == 0
    rows = [row for row in report.read(root / "parallel" / "log.jsonl") if "head_2" in row]
    assert rows[-1]["head_2"] < rows[0]["head_2"]
    lm = specjax.load(teacher.partition("=")[2])
    found = specjax.load_drafter(root / "parallel" / "model", lm)
    assert found.drafter.name == "mtp_heads" and found.drafter.layer == lm.config.num_layers - 1
    texts = [
        specjax.generate(lm, [1, 2, 3], drafter=own, max_new_tokens=12).tokens[0].tolist()
        for own in (None, str(root / "parallel" / "model"))
    ]
    assert texts[0] == texts[1]


def test_target_and_heads_are_exported_together(place):
    root, train, teacher = place
    fields = [teacher, *SMALL, "with_target=true", "head_warmup=2", "run.steps=6"]
    assert train("mtp_heads", *fields, f"run.folder={root / 'both'}") == 0
    learned, held = (
        [row[name] for row in report.read(root / "both" / "log.jsonl") if name in row][-1]
        for name in ("heads", "heldout_loss")
    )
    assert 0.7 < held / learned < 1.3  # both are means over the heads
    before = specjax.load(teacher.partition("=")[2])
    after = specjax.load(root / "both" / "target")
    assert after.fingerprint != before.fingerprint
    assert specjax.load_drafter(root / "both" / "model", after).drafter.max_depth == 2


def test_what_cannot_be_trained_is_refused(place):
    for fields, words in (
        (["with_target=true", "teacher_share=1"], "is no teacher"),
        (["with_target=true", "features=some"], "other hidden states"),
        (["with_target=true", "target_share=0"], "target_share=0.0; accepted: above 0"),
        (["head_warmup=5"], "head_warmup=5: the target stays as it is; leave head_warmup out"),
        (["intermediate_size=-1"], "intermediate_size=-1; accepted: at least 0"),
    ):
        with pytest.raises(config.ConfigError, match=words):
            setting_of(place, *fields)
    made, setting = setting_of(place, "intermediate_size=12")
    with pytest.raises(config.ConfigError, match="give copied=false"):
        mtp_heads.make_heads(made, setting)
    shape = setting.lm.config
    for changes, words in (
        (dict(rotary_fraction=0.5), "has rotary_fraction=0.5; give copied=false"),
        (dict(norm_plus_one=True, window=16), "has norm_plus_one=True, window=16;"),
        (dict(query_scalar=2.0, score_softcap=9.0), "has query_scalar=2.0, score_softcap=9.0;"),
        (dict(window=24, local_rope_theta=99.0), "has local_rope_theta=99.0;"),
    ):
        with pytest.raises(config.ConfigError, match=words):
            mtp_heads.check_target(made, dataclasses.replace(shape, **changes))
    same = dict(window=24, local_rope_theta=shape.rope_theta, query_scalar=float(shape.head_dim))
    mtp_heads.check_target(made, dataclasses.replace(shape, **same))  # over rows of 24 tokens
    fresh = mtp_heads.make_heads(dataclasses.replace(made, copied=False), setting)
    assert fresh.drafter.config.layers.intermediate_size == 12
