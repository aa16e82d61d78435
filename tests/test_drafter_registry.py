"""One entry makes a drafter known everywhere; a head that is one file and one line is reached."""

import dataclasses
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx
from pairs import CONFIG, TOKENIZER
from registry import cases
from specjax.train import cli as train_cli
from stranger import Bag
from tokenizers import Tokenizer
from toys import bag
from toys import heads as toy_weights

import specjax
from specjax import checkpoints, cli, drafters
from specjax.drafters import registry
from specjax.models import Decoder, save_pretrained
from specjax.text import drafter_names

ENTRIES = {entry.name: entry for entry in registry.entries()}
README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")

# the whole of a method with weights: heads, drafter, layout and recipe
TOY = '''
"""Toy heads: head k is one matrix on the target's last hidden state."""

import dataclasses
import jax.numpy as jnp
from flax import nnx
from specjax.checkpoints.weights import params_of, tensors_of
from specjax.drafters.heads import HeadDrafter, independent_level


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    hidden_size: int
    vocab_size: int
    num_heads: int = 2


class ToyHeads(nnx.Module):
    def __init__(self, config, *, rngs, param_dtype=jnp.float32):
        shape = config.num_heads, config.hidden_size, config.hidden_size
        self.matrices = nnx.Param(jnp.zeros(shape, param_dtype))

    def logits(self, hidden, target, params):  # [B, H] -> [B, K, V]
        columns = jnp.einsum("kij,bj->ibk", self.matrices[...], hidden)
        return target.head(params, columns.reshape(len(columns), -1), len(hidden))


@dataclasses.dataclass(frozen=True)
class ToyDrafter(HeadDrafter):
    module = ToyHeads
    name = "toy-heads"

    def make_level(self, params, target_params, state, context):
        heads = self.heads(params)
        return independent_level(lambda: heads.logits(state.feature, self.target, target_params))


DESCRIPTION, DRAFTER, WEIGHTS_FILE = "toy heads (matrices)", ToyDrafter, "toy"
NAMES = {"matrices": ("matrices",)}


def matches(config, names):
    return config.get("model_type") == "toy"


def load(config, tensors, target):
    sizes = {name: config[name] for name in ("hidden_size", "vocab_size", "num_heads")}
    drafter = ToyDrafter(config=ToyConfig(**sizes), target=target.target)
    return drafter, params_of(tensors, NAMES, drafter.shapes, target.dtype)


def save(drafter, params, target=None):
    return {"model_type": "toy", **dataclasses.asdict(drafter.config)}, tensors_of(params, NAMES)
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The module of the toy head, on the path and registered by one line."""
    (tmp_path / "toy_heads.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    registry.register(
        registry.Entry("toy-heads", "toy_heads:ToyDrafter", "toys", formats=("toy_heads",))
    )
    yield registry.load_module("toy_heads", __package__)
    sys.modules.pop("toy_heads", None)


def test_a_head_of_one_file_and_one_line_is_saved_loaded_and_named(toy, tmp_path, capsys):
    folder = tmp_path / "target"
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    save_pretrained(model, folder, tokenizer=Tokenizer.from_file(str(TOKENIZER)))
    lm = specjax.load(folder)
    shape = toy.ToyConfig(hidden_size=CONFIG.hidden_size, vocab_size=CONFIG.vocab_size)
    drafter = specjax.drafters.ToyDrafter(config=shape, target=lm.target)
    same = jnp.broadcast_to(jnp.eye(CONFIG.hidden_size), (2,) + (CONFIG.hidden_size,) * 2)
    specjax.save_drafter(drafter, {"matrices": same}, folder / "toy-heads", target=lm)
    loaded = specjax.load_drafter(folder / "toy-heads", lm)
    assert loaded.drafter == drafter and jnp.array_equal(loaded.params["matrices"], same)
    plain = specjax.generate(lm, "def", drafter=None, max_new_tokens=8, stop=())
    for name in ("toy-heads", "ngram+toy-heads"):
        named = specjax.generate(lm, "def", drafter=name, max_new_tokens=8, stop=())
        assert named.tokens[0].tolist() == plain.tokens[0].tolist()
        assert named.stats.drafted.sum() > 0
    words = ["generate", "def", "--model", str(folder), "--drafter", "toy-heads", "--json"]
    assert cli.main([*words, "--max-tokens", "4"]) == 0
    assert '"drafter": "toy-heads"' in capsys.readouterr().out
    assert "toy-heads" in checkpoints.FORMATS
    with pytest.raises(ValueError, match="'toy-heads'"):
        specjax.generate(lm, "def", drafter="toy_head")


def own_heads(folder):
    """A target of one's own, and Medusa heads for it that were saved and loaded."""
    target, weights = bag(11, 3)
    lm = specjax.LM.of(target, weights, max_positions=40)
    config = drafters.medusa.MedusaConfig(hidden_size=6, vocab_size=11, num_heads=2)
    drafter = drafters.Medusa(config=config, target=target)
    specjax.save_drafter(drafter, toy_weights(drafter), folder, target=lm)
    loaded = specjax.load_drafter(folder, lm)
    assert loaded.drafter == drafter
    return lm, loaded


def test_heads_of_a_target_of_ones_own_are_lossless(tmp_path):
    lm, loaded = own_heads(tmp_path)
    outs = [specjax.generate(lm, [1, 2], drafter=d, max_new_tokens=9) for d in (None, loaded)]
    assert outs[0].tokens[0].tolist() == outs[1].tokens[0].tolist()
    assert outs[1].stats.drafted.sum() > 0


def test_heads_of_a_target_of_ones_own_are_loaded_for_what_they_fit(tmp_path):
    lm, _ = own_heads(tmp_path)
    weights = lm.params
    for wrong in (lm.target, specjax.LM.of(Bag(11), weights)):
        with pytest.raises(TypeError, match="where the target is a specjax.HeadTarget"):
            specjax.load_drafter(tmp_path, wrong)
    larger = dataclasses.replace(lm, target=bag(12, 3)[0])
    with pytest.raises(ValueError, match=r"vocab_size=11 \(the target: 12\)"):
        specjax.load_drafter(tmp_path, larger)


def test_a_target_that_states_no_context_may_be_told_one():
    target, weights = bag(11, 3)
    assert specjax.LM.of(target, weights).max_positions is None
    lm = specjax.LM.of(target, weights, max_positions=40)
    with pytest.raises(ValueError, match="36 tokens and 5 new.*40 tokens: ask for at most 4"):
        specjax.generate(lm, [1] * 36, max_new_tokens=5)
    for wrong in (0, -1, 2.5, "40"):
        with pytest.raises(
            ValueError, match=r"max_positions=.*: give an integer of at least 1, or"
        ):
            specjax.LM.of(target, weights, max_positions=wrong)
    own = specjax.load("embedded")
    with pytest.raises(ValueError, match=r"at most the target's own 1024"):
        specjax.LM.of(own.target, own.params, max_positions=1025)


def test_a_name_belongs_to_one_drafter(toy):
    with pytest.raises(ValueError, match="belongs to .medusa:Medusa already"):
        registry.register(registry.Entry("medusa", "toy_heads:ToyDrafter", "toys"))
    with pytest.raises(ValueError, match="must name a class"):
        registry.register(registry.Entry("other", "toy_heads", "toys"))


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_says_of_its_drafter_what_is_so(name):
    entry = ENTRIES[name]
    drafter = getattr(drafters, entry.class_name)
    assert drafter is entry.load() and entry.class_name in drafters.__all__
    if entry.kind != "wrapper":  # these are named after what they hold
        assert drafter.name == name
    for module in entry.formats:
        layout = checkpoints.FORMATS[registry.format_name(module)]
        assert issubclass(drafter, layout.DRAFTER) and layout.DESCRIPTION and layout.WEIGHTS_FILE
    if entry.recipe:
        recipe = train_cli.load_recipe(entry.recipe.removeprefix("."))
        assert callable(recipe.run) and recipe.Config


@pytest.mark.parametrize("name", ENTRIES)
def test_every_drafter_is_in_the_readme_and_in_the_conformance_tests(name):
    assert f"`{name}`" in README
    tested = {type(drafter) for drafter, _, _ in cases(*bag(5, 0)).values()}
    if name != "synthetic":  # which has no law: test_synthetic.py
        assert ENTRIES[name].load() in tested


@pytest.mark.parametrize("name", registry.head_names())
def test_every_head_has_a_name_that_users_type(name, capsys):
    drafter_names._check_name(name)
    drafter_names._check_name(f"ngram+{name}")
    with pytest.raises(ValueError, match=f"'{name}'"):
        drafter_names._check_name("nothing-of-this-name")
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    assert name in capsys.readouterr().out


def test_help_of_generate_names_every_drafter_that_can_be_named():
    named = {name for entry in ENTRIES.values() if entry.kind != "wrapper" for name in names(entry)}
    named |= {f"{lookup}NAME" for lookup in drafter_names.LOOKUPS} | {"auto", "self:exit=E"}
    absent = [name for name in named - {"self"} if f'``"{name}"``' not in specjax.generate.__doc__]
    assert absent == []


def names(entry):
    return entry.name, *entry.aliases


def test_nothing_but_a_head_imports_flax():
    code = """
    import sys, specjax
    specjax.drafters.NGram, specjax.drafters.Union, specjax.drafters.Synthetic
    assert "flax" not in sys.modules
    specjax.drafters.Medusa
    assert "flax" in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
