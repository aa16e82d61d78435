"""The compositions that the fuzzer draws: each line of the registry is drawn in several ways."""

import jax
import numpy as np
import pytest

from . import drafters, targets

NOT_VARIED = {"plain", "merged", "merged chains"}
MODEL = targets.toy(7, 0, 1.5)


@pytest.mark.parametrize("name", MODEL.lines)
def test_every_line_of_the_registry_is_drawn_with_other_settings(name):
    drafter, weights, _ = MODEL.lines.lines[name]
    made = [
        drafters.changed(np.random.default_rng(seed), drafter, weights, MODEL)[0]
        for seed in range(6)
    ]
    assert any(other != drafter for other in made) == (name not in NOT_VARIED)


def test_fault_a_drafter_that_refuses_all_settings_is_not_skipped(monkeypatch):
    monkeypatch.setattr(drafters, "SLEM", ())  # it is taken for any draft model: with siblings
    drafter, weights, _ = MODEL.lines.lines["slem"]
    with pytest.raises(AssertionError, match=f"none of {drafters.TRIES} settings is taken by SLEM"):
        drafters.changed(np.random.default_rng(0), drafter, weights, MODEL)


def test_weights_of_every_line_can_be_drawn_for_a_decoder():
    lines = targets.decoder(np.random.default_rng(0), 5).lines
    for name in ("tli", "tli tree", "slem", "adaptive slem", "hybrid tli"):
        assert jax.tree.leaves(lines[name][1])
