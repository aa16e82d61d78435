"""Weights of the steps of an unroll by accepted streaks, against the formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.train import chunks, config, eagle3, head_losses, unroll_streaks
from specjax.train.rows import Heads, Rows
from training_toys import TableTarget

STEPS, ROWS, LENGTH, SIZE, VOCAB = 3, 2, 11, 4, TableTarget.vocab_size
OWN = np.array([1, 2, 4, 5])  # the drafter's vocabulary


@dataclasses.dataclass
class How:
    weighting: str
    pace_floor: float = 0.25
    decay: float = 0.8
    teacher_share: float = 1.0


def rows_of(target_params, batch):
    """Rows with two documents each; the target's law has another best token here and there."""
    del target_params, batch
    keys = jax.random.split(jax.random.key(3), 3)
    tokens = jax.random.randint(keys[0], (ROWS, LENGTH + 1), 0, VOCAB)
    weight = jax.random.uniform(keys[1], (ROWS, LENGTH)).at[1, 4].set(0.0)
    segments = jnp.cumsum(jnp.arange(LENGTH + 1) % 7 == 6) * jnp.ones_like(tokens)
    hidden = 2 * jax.random.normal(keys[2], (ROWS, LENGTH, SIZE))
    return Rows(tokens=tokens, weight=weight, segments=segments, hidden=hidden)


def made(seed=0):
    """The target's table, and the tables and states of heads that share one table."""
    keys = iter(jax.random.split(jax.random.key(seed), 2 + STEPS))
    table, own = (jax.random.normal(next(keys), (n, SIZE)) for n in (VOCAB, len(OWN)))
    count = ROWS * (LENGTH - STEPS)
    return table, (own, [jax.random.normal(next(keys), (SIZE, count)) for _ in range(STEPS)])


def heads_of():
    return Heads(
        drafter=None,
        params=None,
        outputs=lambda params, _, rows: [(params[0], None, state) for state in params[1]],
        vocab=OWN,
        capped=False,
    )


def by_definition(params, table, how):
    """The loss, position by position: the cross-entropies may have a gradient, the weights not."""
    rows, steps, total, count = rows_of(None, None), LENGTH - STEPS, 0.0, 0
    for row in range(ROWS):
        for t in range(steps):
            shares, entropies, fits = [], [], []
            for k in range(STEPS):
                q = params[0] @ params[1][k].reshape(SIZE, ROWS, steps)[:, row, t]
                law = 4.0 * jnp.tanh(table @ rows.hidden[row, t + k + 1] / 4.0)
                known = float(jnp.argmax(law)) in OWN
                law = jax.nn.softmax(law[OWN])
                share = jnp.minimum(law, jax.nn.softmax(q)).sum()
                shares.append(known * float(jax.lax.stop_gradient(share)))
                entropies.append(-known * jnp.sum(law * jax.nn.log_softmax(q)))
                same = rows.segments[row, t] == rows.segments[row, t + k + 1]
                fits.append(float(same * rows.weight[row, t + k + 1]))
            floor = how.pace_floor if how.weighting == "d-pace" else 0.0
            alive = np.cumprod(
                [
                    (1 - floor) * a + floor if fit else 1.0
                    for a, fit in zip(shares, fits, strict=True)
                ]
            )
            for k in range(STEPS):
                if not fits[k]:
                    continue
                if how.weighting == "d-pace":
                    weight = sum(fits[m] * alive[m] for m in range(k, STEPS))
                else:
                    weight = fits[k] * (alive[k - 1] if k else 1.0)
                total = total + weight * entropies[k]
            count += fits[0] > 0
    return total / count


@pytest.mark.parametrize("kind", ["d-pace", "ce-streak"])
def test_value_and_gradient_are_those_of_the_formulas(kind, monkeypatch):
    monkeypatch.setattr(chunks, "SEVERAL", 2 * STEPS * ROWS)  # several chunks
    (table, params), how = made(), How(kind)
    loss = unroll_streaks.make_loss(heads_of(), TableTarget(), rows_of, how)

    def value(params):
        return loss(params, {"target": table}, None, None)["loss"].value

    ours = jax.value_and_grad(value)(params)
    theirs = jax.value_and_grad(by_definition)(params, table, how)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-6), ours, theirs)


def test_with_alpha_one_a_step_weighs_as_many_as_are_left():
    table, params = made(1)
    read = rows_of(None, None)
    one = jnp.zeros_like(read.segments)
    read = dataclasses.replace(read, segments=one, weight=jnp.ones_like(read.weight))
    given = heads_of(), TableTarget(), lambda *_: read
    found = unroll_streaks.make_loss(*given, How("d-pace", 1.0))(params, {"target": table}, None, 0)
    plain = head_losses.make_loss(*given, How("decay"))(params, {"target": table}, None, 0)
    expected = sum((STEPS - k) * plain[f"head_{k + 1}"].total for k in range(STEPS))
    np.testing.assert_allclose(found["loss"].total, expected, rtol=1e-5)
    assert found["loss"].count == ROWS * (LENGTH - STEPS)


def test_decay_is_the_loss_of_all_other_recipes():
    table, params = made()
    given = heads_of(), TableTarget(), rows_of, How("decay")
    ours, theirs = (
        make(*given)(params, {"target": table}, None, None)
        for make in (unroll_streaks.make_loss, head_losses.make_loss)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (["weighting=streak"], "d-pace, ce-streak"),
        (["pace_floor=1.5"], "0 to 1"),
        (["weighting=d-pace", "decay=0.5"], "decay=0.5 with weighting='d-pace'.*leave decay out"),
    ],
)
def test_what_the_recipe_does_not_know_is_refused(fields, named):
    with pytest.raises(config.ConfigError, match=named):
        config.load(eagle3.Config, None, fields)
