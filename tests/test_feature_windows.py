"""Windows of the layers of published EAGLE, EAGLE-3 and DFlash drafters: read and written."""

import dataclasses
import json
import shutil

import pytest
from published_heads import GOLDEN, edited

import specjax


@pytest.fixture(scope="module")
def target():
    return specjax.load(GOLDEN / "target", tokenizer=False, dtype="float32")


@pytest.mark.parametrize(
    ("name", "layout"),
    [("eagle_bare", "eagle"), ("eagle3", "eagle3"), ("speculators", "eagle3-speculators")],
)
def test_a_window_is_kept_though_the_layouts_have_none(name, layout, target, tmp_path):
    heads = specjax.load_drafter(GOLDEN / name, target)
    config = heads.drafter.config
    layer = dataclasses.replace(config.layer, window=9)
    drafter = dataclasses.replace(heads.drafter, config=dataclasses.replace(config, layer=layer))
    specjax.save_drafter(drafter, heads.params, tmp_path, format=layout, target=target)
    assert specjax.load_drafter(tmp_path, target).drafter.config.layer.window == 9


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9}


@pytest.mark.parametrize(
    ("own", "config", "window", "causal"),
    [
        ({"use_swa": True, "swa_window_size": 6}, {}, 6, False),
        ({"use_swa": True}, SLIDING, 9, False),
        ({"use_swa": True, "causal": True}, {"is_causal": None, "sliding_window": 9}, 9, True),
        ({"swa_window_size": 6}, {"use_sliding_window": True, "sliding_window": 9}, 6, None),
        ({"causal": False, "causal_head": False}, {"is_causal": False}, None, False),
    ],
)
def test_windows_are_those_of_dflashs_own_keys(own, config, window, causal, target, tmp_path):
    kinds = ["sliding_attention" if "use_sliding_window" in config else "full_attention"] * 2
    common = {"mask_token_id": 23, "target_layer_ids": [1, 3, 5]}
    config = {"layer_types": kinds, "dflash_config": common | own} | config
    shutil.copytree(GOLDEN / "dflash", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = specjax.load_drafter(tmp_path, target).drafter.config
    assert (found.layers.window, found.causal) == (window, causal)


@pytest.mark.parametrize(
    ("name", "local"), [("peagle", True), ("speculators", True), ("peagle", (True, False))]
)
def test_layers_of_speculators_have_windows_by_their_types_alone(name, local, target, tmp_path):
    layer = json.loads((GOLDEN / name / "config.json").read_text())["transformer_layer_config"]
    own = ["sliding_attention", "sliding_attention" if local is True else "full_attention"]
    own = {"layer_types": own[: layer["num_hidden_layers"]], "sliding_window": 4}
    layer |= own | {"use_sliding_window": False}
    heads = specjax.load_drafter(
        edited(tmp_path / "a", name, {"transformer_layer_config": layer}), target
    )
    found = heads.drafter.config.layer
    assert (found.window, found.local_layers) == (4, None if local is True else local)
    given = dict(format="eagle3-speculators", target=target)
    specjax.save_drafter(heads.drafter, heads.params, tmp_path / "b", **given)
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    assert own.items() <= written["transformer_layer_config"].items()
    assert specjax.load_drafter(tmp_path / "b", target).drafter == heads.drafter
