"""Temperatures of chances, fitted one place after the other, against the definition."""

import numpy as np
import pytest
from specjax.train import calibrate
from specjax.train.calibrate import Chances, expected_error, fit_temperatures, stated

from benchmarks import calibration

BLOCKS, PLACES = 6000, 3


def drawn(temperatures, seed=0):
    """Logits, outcomes whose chances are those at the temperatures, and weights; some places are
    not there."""
    random = np.random.default_rng(seed)
    logits = random.normal(0.5, 1.5, (BLOCKS, PLACES))
    outcome = random.uniform(size=logits.shape) < stated(logits, temperatures)
    weight = np.ones_like(logits)
    weight[:99, 1:] = 0
    return logits, outcome.astype(float), weight


def test_the_error_is_that_of_its_definition():
    random = np.random.default_rng(1)
    say, true, weight = random.uniform(size=(3, 200))
    say[0] = 1.0
    total = 0.0
    for low in range(10):
        here = [i for i in range(200) if min(int(say[i] * 10), 9) == low]
        count = sum(weight[i] for i in here)
        if count:
            means = [sum(weight[i] * x[i] for i in here) / count for x in (say, true)]
            total += count * abs(means[0] - means[1])
    np.testing.assert_allclose(expected_error(say, true, weight), total / weight.sum())


def test_temperatures_of_chances_that_are_wrong_by_temperatures_are_found_again():
    wanted = (0.5, 2.0, 1.0)
    logits, outcome, weight = drawn(wanted)
    found = fit_temperatures(logits, outcome, weight)
    np.testing.assert_allclose(np.log2(found), np.log2(wanted), atol=0.5)
    before, after = (np.cumprod(stated(logits, t), axis=1) for t in ((), found))
    true = np.cumprod(outcome, axis=1)
    for k in range(PLACES):
        assert expected_error(after[:, k], true[:, k], weight[:, k]) < 0.03
    assert expected_error(before[:, 0], true[:, 0], weight[:, 0]) > 0.06


def alone(logits, accepted, weight):
    """A fault: each place is fitted by its own chances, and not by the products."""
    parts = [(x[:, k : k + 1] for x in (logits, accepted, weight)) for k in range(PLACES)]
    return tuple(fit_temperatures(*part)[0] for part in parts)


def test_fault_places_that_are_fitted_alone_leave_products_wrong():
    """A token is accepted more often where the one before it was, which no chance knows."""
    random = np.random.default_rng(2)
    luck = random.normal(0, 2.0, (BLOCKS, 1))
    logits = random.normal(1.5, 0.5, (BLOCKS, PLACES))
    outcome = (random.uniform(size=logits.shape) < stated(logits + luck)).astype(float)
    weight, errors = np.ones_like(logits), {}
    for fit in (fit_temperatures, alone):
        own = np.cumprod(stated(logits, fit(logits, outcome, weight)), axis=1)
        errors[fit] = expected_error(own[:, -1], outcome.prod(axis=1), weight[:, -1])
    assert errors[fit_temperatures] < 0.05 and errors[alone] > 0.1


def test_of_few_blocks_nothing_is_fitted():
    logits, outcome, weight = drawn((2.0, 2.0, 2.0))
    few = calibrate.LEAST - 1
    assert fit_temperatures(logits[:few], outcome[:few], weight[:few]) == ()
    weight[few:, -1] = 0  # so many blocks have a last place
    assert fit_temperatures(logits, outcome, weight) == ()


@pytest.mark.parametrize("temperatures", [(), (0.5, 2.0, 1.0)])
def test_the_page_states_the_errors_of_products_with_and_without_temperatures(temperatures):
    logits, outcome, weight = drawn((0.5, 2.0, 1.0))
    found = Chances(logits, outcome, 1 - outcome, weight)
    page = calibration.report("corpus", found, temperatures)
    assert f"corpus: {weight.sum():,.0f} places" in page
    product = np.cumprod(stated(logits, temperatures), axis=1)[:, 1]
    plain = np.cumprod(stated(logits), axis=1)[:, 1]
    errors = [
        expected_error(own, true[:, 0] * true[:, 1], weight[:, 1])
        for own in (product, plain)
        for true in (outcome, 1 - outcome)
    ]
    assert f"| 2 | {' | '.join(f'{x:.4f}' for x in errors)} |" in page
