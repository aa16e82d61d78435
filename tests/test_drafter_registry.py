"""One entry makes a drafter known everywhere; a head that is one file and one line is reached."""

import dataclasses
import functools
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pairs import CONFIG, TOKENIZER
from registry import cases
from safetensors.numpy import save_file
from specjax.train import cli as train_cli
from stranger import Bag
from tokenizers import Tokenizer
from toys import bag
from toys import heads as toy_weights

import specjax
from specjax import checkpoints, cli, drafters
from specjax.drafters import registry
from specjax.models import Decoder, save_pretrained
from specjax.text import drafter_names, other_vocabulary, own_drafters

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
    with pytest.raises(ValueError, match=r"formats=\(\) of 'other': a head .*kind='table'"):
        registry.register(registry.Entry("other", "toy_heads:ToyDrafter", "toys"))


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


@functools.cache
def conforming():
    """The classes of the drafters in the registry of the conformance tests."""
    return {type(drafter) for drafter, _, _ in cases(*bag(5, 0)).values()}


@pytest.mark.parametrize("name", ENTRIES)
def test_every_drafter_is_in_the_readme_and_in_the_conformance_tests(name):
    entry = ENTRIES[name]
    words = (
        name
        if entry.kind not in ("wrapper", "object")
        else rf"(specjax\.drafters\.)?{entry.class_name}"
    )
    assert re.search(f"`{words}`", README)
    if name != "synthetic":  # which has no law: test_synthetic.py
        assert ENTRIES[name].load() in conforming()


def test_every_name_that_the_readme_lists_can_be_typed():
    (table,) = re.findall(r"\| drafter \|.*?\n\n", README, flags=re.DOTALL)
    cells = [line.split("|")[1] for line in table.strip().splitlines()[2:]]
    typed = [cell for cell in cells if "specjax." not in cell]
    names = [name for cell in typed for name in re.findall(r"`(.*?)`", cell)]
    assert {"ngram", "draft", "eagle3", "ngram+NAME"} <= {*names}
    for name in names:
        if name in other_vocabulary.METHODS:
            with pytest.raises(ValueError, match=f"write '{name}:NAME'"):
                drafter_names._check_name(name)
        else:
            drafter_names._check_name(name.replace("NAME", "draft"))
    for entry in registry.entries("wrapper"):
        with pytest.raises(ValueError, match=f"no name.*specjax.drafters.{entry.class_name}"):
            drafter_names._check_name(entry.name)
    for entry in registry.entries("object"):
        with pytest.raises(ValueError, match=f"weights that no name.*{entry.class_name}"):
            drafter_names._check_name(entry.name)


@dataclasses.dataclass(frozen=True)
class Copies(specjax.Drafter):
    """A table of one's own on the bare contract: the root, again and again."""

    num_draft: int = 2
    name = "copies"

    def draft_step(self, params, target_params, state, context):
        tokens = jnp.repeat(context.root[:, None], self.num_draft, axis=1)
        return specjax.trees.chain_draft(context, tokens), state


def test_a_table_on_the_bare_contract_is_made_by_its_name(monkeypatch):
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    registry.register(
        registry.Entry("copies", f"{__name__}:Copies", "the last token", kind="table")
    )
    lm = specjax.LM.of(*bag(11, 3))
    assert drafter_names.resolve_drafter(lm, "copies") == (Copies(2), None)
    assert drafter_names.resolve_drafter(lm, "copies", 3) == (Copies(3), None)
    for given in ("copies", Copies()):
        with pytest.raises(ValueError, match="drafts no trees"):
            drafter_names.resolve_drafter(lm, given, tree="2x1")


class Odd(Copies):
    """A drafter whose flags are not the usual ones."""

    num_passengers = 1
    features = (0,)
    vocab_size = 11
    can_rewind = False
    can_rest = True
    takes_sibling_sampling = True


WRAPPERS = {
    "adaptive": drafters.Adaptive,
    "hybrid": lambda inner: drafters.Hybrid(inner=inner),
    "fallback": lambda inner: drafters.Fallback(first=drafters.SAM(num_draft=2), inner=inner),
    "cascade": lambda inner: drafters.Cascade(drafters.DraftModel(2, model=bag(11, 3)[0]), inner),
    "copying": drafters.Copying,
    "drawn-or-top": drafters.DrawnOrTop,
    "horizontal": lambda inner: drafters.Horizontal(drafters=(inner, drafters.NGram(2))),
    "union": lambda inner: drafters.Union(drafters=(drafters.NGram(2), inner)),
    "synthetic": lambda inner: drafters.Synthetic(2, 0.5, inner),
}
# what a wrapper decides by itself: it may have other trees, weights and rounds than what it holds
THEIR_OWN = {"name", "num_draft", "reads_last", "plans", "can_rest", "has_weights", "takes_number"}
THEIR_OWN |= {"takes_topology", "topology", "max_depth", "depth_limit", "depth"}
THEIR_OWN |= {"takes_sibling_sampling", "sibling_sampling"}


@pytest.mark.parametrize("name", [entry.name for entry in registry.entries("wrapper")])
def test_a_wrapper_has_the_wishes_of_the_drafter_within(name):
    flags = {flag for flag in vars(specjax.Drafter) if not callable(getattr(specjax.Drafter, flag))}
    flags = {flag for flag in flags if not flag.startswith("_")} | {"num_draft"}
    asked = {flag: getattr(Odd(), flag) for flag in flags - THEIR_OWN - {"reads_nodes"}}
    assert {*asked} == {"num_passengers", "features", "vocab_size", "can_rewind"}
    if name == "cascade":  # whose target is another model: such a drafter has nothing to read there
        with pytest.raises(ValueError, match="is taken back where the target rejects it"):
            WRAPPERS[name](Odd())
        return
    made = WRAPPERS[name](Odd())
    assert {flag: getattr(made, flag) for flag in asked} == asked
    reads = type("Reads", (Odd,), {"reads_nodes": True})()
    try:
        assert WRAPPERS[name](reads).reads_nodes
    except ValueError as error:
        assert "reads all nodes of a round" in str(error)


def test_an_object_takes_a_tree_if_its_class_does():
    lm, shape = specjax.LM.of(*bag(11, 3)), specjax.trees.as_topology("3x1x1x1")
    for given in ("ngram", drafters.NGram(longest=5), drafters.Adaptive(drafters.NGram())):
        made, _ = drafter_names.resolve_drafter(lm, given, tree="3x1x1x1")
        assert made.topology == shape and made.depth == 4
        assert not isinstance(made, drafters.Adaptive) or made.widths == (0, 1, 3, 4)
    with pytest.raises(ValueError, match="'sam' drafts no trees"):
        drafter_names.resolve_drafter(lm, drafters.SAM(), tree="3x1x1x1")


def test_auto_finds_every_head_and_a_small_draft_model_in_the_models_folder(toy, tmp_path):
    """The order is that of the registry; what is registered later is found, too."""
    lm = dataclasses.replace(specjax.LM.of(*bag(11, 3)), name=str(tmp_path), loaded=True)
    names = (*registry.head_names(), "draft")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(800))
    (tmp_path / "draft" / "model.safetensors").write_bytes(bytes(100))
    found = own_drafters.own_names(lm)
    assert {*found} == {*names} - {"bigram"} and "toy-heads" in found
    measured = ["eagle3", "mtp", "dspark", "p-eagle", "eagle", "speculator", "hydra", "redrafter"]
    measured += ["domino", "xpress", "block", "medusa"]
    assert [name for name in found if name in measured] == measured
    assert found[0] == "eagle3" and found[-1] == "draft"
    (tmp_path / "p-eagle" / "config.json").write_text('{"dependency_size": 256}')
    (tmp_path / "medusa" / "config.json").write_text("{")  # only that one cannot be used
    reads = [name for name in own_drafters.own_names(lm) if name in measured]
    assert reads == ["eagle3", "mtp", "p-eagle", "dspark", *measured[4:]]
    (tmp_path / "draft" / "model.safetensors").write_bytes(bytes(101))
    assert "draft" not in own_drafters.own_names(lm)
    assert own_drafters.auto_drafter(lm) == "ngram"  # all of them are broken


def test_a_model_that_was_not_loaded_asks_neither_the_hub_nor_a_folder(tmp_path, monkeypatch):
    def asked(*names):
        raise AssertionError(names)

    monkeypatch.setattr(own_drafters, "holds_modules", asked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2" / "eagle3").mkdir(parents=True)
    (tmp_path / "gpt2" / "eagle3" / "config.json").write_text("{}")
    for name in (None, "gpt2", "embedded"):
        lm = specjax.LM.of(*bag(11, 3), name=name)
        assert own_drafters.own_names(lm) == () and own_drafters.auto_drafter(lm) == "ngram"
        assert own_drafters.own_draft_name(lm) is None
        for given in ("mtp", "eagle3", "draft"):
            with pytest.raises(ValueError, match="of its own"):
                drafter_names.named(lm, given)


def test_a_draft_model_in_the_models_folder_is_its_own(tmp_path):
    target, draft = tmp_path / "target", tmp_path / "target" / "draft"
    save_pretrained(
        Decoder(CONFIG, rngs=nnx.Rngs(0)), target, tokenizer=Tokenizer.from_file(str(TOKENIZER))
    )
    lm = specjax.load(target)
    with pytest.raises(ValueError, match="has no draft model of its own"):
        drafter_names.named(lm, "draft")
    save_pretrained(Decoder(CONFIG, rngs=nnx.Rngs(1)), draft)
    own = drafter_names.named(lm, "draft")
    assert own.tokenizer is lm.tokenizer and own.name == str(draft)
    assert drafter_names.named(lm, "auto") == "ngram"  # the draft model is as large as the target
    size = (target / "model.safetensors").stat().st_size
    save_file({"unused": np.zeros(2 * size, np.float32)}, target / "more.safetensors")
    again = dataclasses.replace(lm)  # what was found for a model is remembered
    assert drafter_names.named(again, "auto").name == str(draft)


@pytest.mark.parametrize("name", registry.head_names())
def test_every_head_has_a_name_that_users_type(name, capsys):
    drafter_names._check_name(name)
    drafter_names._check_name(f"ngram+{name}")
    with pytest.raises(ValueError, match=f"did you mean '{name}'.*`specjax drafters` lists"):
        drafter_names._check_name(f"{name}x")
    assert cli.main(["drafters"]) == 0 and name in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    assert name in capsys.readouterr().out


def test_every_name_in_the_help_of_generate_can_be_typed():
    drafters_part = specjax.generate.__doc__.partition("drafter: ")[2].partition("drafting: ")[0]
    named = re.findall(r'``"(.*?)"``', drafters_part)
    assert {"auto", "none", "ngram", "lookahead", "eagle3", "self:exit=E", "sam+NAME"} <= {*named}
    for name in named:
        drafter_names._check_name(name.replace("NAME", "draft"))


def test_nothing_but_a_head_imports_flax():
    code = """
    import sys, specjax
    specjax.drafters.NGram, specjax.drafters.Union, specjax.drafters.Synthetic
    assert "flax" not in sys.modules
    specjax.drafters.Medusa
    assert "flax" in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
