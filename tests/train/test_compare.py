"""The recipe ``compare`` decodes with the proposals that ``specjax.generate`` makes."""

import types

import numpy as np
import pytest
from specjax.train import compare
from toys import bag, heads

import specjax
from specjax.checkpoints.loading import HeadLM
from specjax.drafters.medusa import Medusa, MedusaConfig


@pytest.mark.parametrize(
    ("temperature", "ways"), [(1.0, ["iid", "distinct", "top"]), (0.0, ["top", "top", "top"])]
)
def test_heads_draw_above_temperature_0_as_in_generate(monkeypatch, tmp_path, temperature, ways):
    """In a chain and in a static tree; a tree that is grown holds the most probable tokens."""
    target, params = bag(16, 0)
    lm = types.SimpleNamespace(target=target, params=params, checkpoint="toy", name="toy")
    decoded = []

    def load_drafter(folder, lm, *, topology):
        config = MedusaConfig(hidden_size=6, vocab_size=16, num_heads=2)
        drafter = Medusa(config=config, target=target, topology=topology)
        return HeadLM(drafter, heads(drafter), folder, "", lm.checkpoint)

    def decode_all(lm, drafter, *given, **options):
        decoded.append(drafter.sibling_sampling)
        one = np.ones(2, np.int32)
        return {"rounds": one, "emitted": one, "accepted_at": np.zeros((2, 2), np.int32)}

    monkeypatch.setattr(Medusa, "num_passengers", 1)  # which do not count as drafted
    monkeypatch.setattr(specjax, "load", lambda name: lm)
    monkeypatch.setattr(specjax, "load_drafter", load_drafter)
    monkeypatch.setattr(compare, "read_prompts", lambda lm, count: (np.zeros((2, 3)), np.ones(2)))
    monkeypatch.setattr(compare, "decode_all", decode_all)
    made = compare.CompareConfig(
        heads=("folder",),
        trees=("chain:2", "2x1", "expand:2x2x4"),
        temperature=temperature,
        num_prompts=2,
        batch=2,
        output=str(tmp_path / "table.md"),
    )
    compare.run(made)
    assert decoded == ways
    told = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
    assert [int(line.split("|")[4]) for line in told[4:]] == [1, 3, 3]
    what = f"τ of heads of embedded at temperature {temperature:g}, on the last 2 held-out prompts"
    assert told[0].startswith(what) and told[2].startswith("| drafter |")
