"""What is written for vLLM and SGLang, see ``specjax/checkpoints/README.md``, and their quirks."""

import json
import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import specjax
from specjax.drafters.peagle import PEagle

GOLDEN = Path(__file__).parent / "golden"
README = (Path(specjax.__file__).parent / "checkpoints" / "README.md").read_text()


@pytest.fixture(scope="module")
def target():
    return specjax.load(GOLDEN / "features" / "target", tokenizer=False, dtype="float32")


def written(name, layout, target, folder):
    """Config and tensors of a golden drafter in a layout."""
    heads = specjax.load_drafter(GOLDEN / name, target, topology="chain:2")
    given = dict(format=layout, target=target, dtype="bfloat16")
    specjax.save_drafter(heads.drafter, heads.params, folder, **given)
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


def table(section):
    """``name: (dtype, shapes)`` of the first table of a section; a name with ``{i}`` as it is."""
    text, found = README.split(f"\n## {section}")[1].split("\n\n")[1], {}
    for names, shapes in (line.split("|")[1:3] for line in text.splitlines()[2:]):
        kind = next((kind for kind in ("int64", "bool") if kind in shapes), "bfloat16")
        shapes = [tuple(shape.split(", ")) for shape in re.findall(r"\[(.*?)\]", shapes)]
        for name in re.findall(r"`(.*?)`", names):
            choice = re.search(r"\{([^{}]*,[^{}]*)\}", name)  # {q,k,v}: several, a shape for each
            own = choice[1].split(",") if choice else [""]
            each = [[x] for x in shapes] if len(own) == len(shapes) else [shapes] * len(own)
            for x, shape in zip(own, each, strict=True):
                found[name.replace(choice[0], x) if choice else name] = kind, shape
    return found


SECTIONS = {
    "eagle": "EAGLE, EAGLE-2, HASS",
    "eagle_bare": "EAGLE, EAGLE-2, HASS",
    "eagle3": "EAGLE-3",
    "eagle3_wide": "EAGLE-3",
    "speculators": "EAGLE-3",
    "speculators_norms": "EAGLE-3",
    "peagle": "EAGLE-3",
    "dflash": "DFlash",
}
LAYOUTS = {"eagle": ["eagle", "eagle-sglang"], "eagle_bare": ["eagle", "eagle-sglang"]}
LAYOUTS |= {"eagle3": ["eagle3", "eagle3-speculators"], "eagle3_wide": ["eagle3"]}
LAYOUTS |= {"dflash": ["dflash"]}
CASES = [(n, way) for n in SECTIONS for way in LAYOUTS.get(n, ["eagle3-speculators"])]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_names_shapes_and_types_are_those_of_the_written_table(name, layout, target, tmp_path):
    _, tensors = written(f"features/{name}", layout, target, tmp_path)
    drafter = specjax.load_drafter(tmp_path, target).drafter
    config = drafter.config
    layer = getattr(config, "layer", None) or config.layers
    reads = getattr(drafter, "layers", None) or getattr(config, "target_layers", (0,))
    sizes = dict(H=layer.hidden_size, F=target.config.hidden_size, V=target.target.vocab_size)
    sizes |= dict(I=layer.intermediate_size, h=layer.head_dim, m=len(reads))
    sizes |= dict(q=layer.num_heads * layer.head_dim, k=layer.num_kv_heads * layer.head_dim)
    sizes |= {"1": 1, "2H": 2 * sizes["H"], "mF": sizes["m"] * sizes["F"]}
    sizes |= {"Vd": getattr(config, "draft_vocab_size", 0)}
    rows = table(SECTIONS["eagle"]) | table(SECTIONS[name])
    if SECTIONS[name] == "EAGLE-3":
        rows |= {n.replace("midlayer.", "layers.0."): row for n, row in rows.items() if "mid" in n}
    for tensor, x in tensors.items():
        any_layer = re.sub(r"(layers|fc_norm)\.\d+\.", r"\1.{i}.", tensor)
        kind, shapes = rows[tensor] if tensor in rows else rows[any_layer]
        assert x.dtype.name == kind, tensor
        assert x.shape in [tuple(sizes[dim] for dim in shape) for shape in shapes], tensor


def test_each_server_is_told_the_architecture_that_it_knows(target, tmp_path):
    config, tensors = written("features/eagle_bare", "eagle", target, tmp_path / "vllm")
    assert config["architectures"] == ["EagleLlamaForCausalLM"] and "fc.bias" not in tensors
    config, tensors = written("features/eagle", "eagle-sglang", target, tmp_path / "sglang")
    assert config["architectures"] == ["LlamaForCausalLMEagle"] and "fc.bias" in tensors
    assert not config["bias"]  # true: attention with biases, which no file has


def test_norms_of_features_of_p_eagle_stand_where_vllm_looks(target, tmp_path):
    for kind in ("peagle", "speculators_norms"):
        config, _ = written(f"features/{kind}", "eagle3-speculators", target, tmp_path / kind)
        assert config["fc_norm"] is True
        assert ("fc_norm" in config["transformer_layer_config"]) == (kind == "peagle")
    assert isinstance(specjax.load_drafter(tmp_path / "peagle", target).drafter, PEagle)


def test_an_lm_head_that_steps_share_stands_under_each_name(tmp_path):
    """vLLM holds one a step, and leaves those that the file lacks as they were allocated."""
    lm = specjax.load(GOLDEN / "heads" / "target", tokenizer=False, dtype="float32")
    config, tensors = written("recurrent/mlp_tied", "speculator", lm, tmp_path)
    heads = [name for name in tensors if ".head." in name]
    assert config["tie_weights"] and len(heads) == config["n_predict"] > 1
    assert all((tensors[name] == tensors[heads[0]]).all() for name in heads)
    assert sum(".emb." in name for name in tensors) == 1
