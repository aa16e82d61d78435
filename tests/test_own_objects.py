"""Drafters and rules of one's own by a name: ``module:Object``, with or without settings."""

import sys

import pytest
from toys import bag

import specjax
from specjax import acceptance
from specjax.cli import main
from specjax.drafters import registry
from specjax.text.drafter_names import named, resolve_drafter

MODULE = """
import dataclasses
import specjax
from specjax.acceptance import RULES
from specjax.drafters.base import ChainDrafter

@dataclasses.dataclass(frozen=True)
class Echo(ChainDrafter):
    back: int = 1
    name = "echo"
    def draft_step(self, params, target_params, state, context):
        raise NotImplementedError

@dataclasses.dataclass(frozen=True)
class Needs(Echo):
    k: int = dataclasses.field(kw_only=True)

@dataclasses.dataclass(frozen=True)
class Fixed(specjax.Drafter):
    num_draft = 2
    back: int = 1
    draft_step = Echo.draft_step

echo = Echo(back=5)

@dataclasses.dataclass(frozen=True, eq=False)
class ComparesByIdentity(Echo):
    pass

@dataclasses.dataclass(frozen=True)
class Half(type(RULES["rejection"])):
    share: float = 0.5

class Unlabelled(type(RULES["rejection"])):
    lossless = False
"""
LM = specjax.LM.of(*bag(11, 3))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with a module that Python's path does not have."""
    (tmp_path / "own_objects_here.py").write_text(MODULE)
    (tmp_path / "broken_module_here.py").write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "own_objects_here", raising=False)


def drafter(name, *given):
    assert named(LM, name) == name  # accepted, and made when the number of drafts is known
    return resolve_drafter(LM, name, *given)[0]


def test_a_drafter_of_ones_own_is_named_by_its_module():
    made = drafter("own_objects_here:Echo")
    assert type(made).__name__ == "Echo" and (made.num_draft, made.back) == (
        type(made)().num_draft,
        1,
    )
    made = drafter("own_objects_here:Echo:back=3", 4)
    assert (made.num_draft, made.back) == (4, 3)
    assert drafter("own_objects_here:echo").back == 5
    assert drafter("own_objects_here:echo:back=2", 6) == type(made)(num_draft=6, back=2)
    assert drafter("own_objects_here:Fixed:back=2").num_draft == 2
    assert drafter("specjax.drafters.ngram:NGram", 5) == specjax.drafters.NGram(num_draft=5)


def test_a_name_stands_for_one_object_so_that_nothing_is_compiled_twice():
    name = "own_objects_here:ComparesByIdentity:back=2"
    assert drafter(name) is drafter(name)


def test_a_rule_of_ones_own_is_named_by_its_module():
    one, again = (acceptance.named("own_objects_here:Half:share=0.25") for _ in range(2))
    assert one == again and hash(one) == hash(again) and one.share == 0.25
    plain = acceptance.named("own_objects_here:Half")
    assert plain is acceptance.named("own_objects_here:Half")  # compiled programs are found again
    assert isinstance(acceptance.named("specjax.acceptance.delta:Delta"), acceptance.Delta)
    assert specjax.Drafting(rule="own_objects_here:Half").rule == "own_objects_here:Half"


DRAFTERS = {
    "nofile:Echo": "drafter='nofile:Echo': there is no module 'nofile', neither in the current",
    "slm:draft": "did you mean 'slem'",
    "broken_module_here:Echo": "cannot be imported .ModuleNotFoundError: No module named 'no_such",
    "own_objects_here:Ecko": "has no 'Ecko'; did you mean 'Echo'",
    "own_objects_here:RULES": "'RULES' is a dict, and neither a subclass nor .* specjax.Drafter",
    "own_objects_here:Half": "'Half' is a class, and neither",
    "own_objects_here:Needs": "the field 'k' of Needs has no default",
    "own_objects_here:Echo:bak=3": "'bak=3' is no setting of .*did you mean 'back'",
    "own_objects_here:Echo:back=x": "back='x' is not a whole number",
    "own_objects_here:Echo:back=1,back=2": "'back' is given twice",
    "lokahead:window=3": "is unknown: did you mean 'lookahead'",
}
RULES = {
    "nofile:Half": "rule='nofile:Half': there is no module 'nofile'",
    "own_objects_here:Halff": "has no 'Halff'; did you mean 'Half'",
    "own_objects_here:Echo": "'Echo' is a class, and neither .* specjax.Rule",
    "own_objects_here:Half:shore=1": "did you mean 'share'",
    "own_objects_here:Unlabelled": "has lossless=False",
    "typical": "did you mean 'approximate-typical'",
    "typicl": "did you mean 'approximate-typical'",
    "top-k": "did you mean 'approximate-top-k'",
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_error_of_a_drafter_of_ones_own_says_what_is_wrong(name):
    with pytest.raises(ValueError, match=DRAFTERS[name]):
        drafter(name)


@pytest.mark.parametrize("name", RULES)
def test_the_error_of_a_rule_of_ones_own_says_what_is_wrong(name):
    with pytest.raises(ValueError, match=RULES[name]):
        acceptance.named(name)


def test_the_command_names_its_options_in_these_errors(capsys):
    for option, name in (("--drafter", "nofile:Echo"), ("--rule", "nofile:Half")):
        assert main(["generate", "x", option, name]) == 2
        assert f"{option} 'nofile:" in capsys.readouterr().err


def test_a_number_is_refused_where_the_class_has_no_field_for_it():
    with pytest.raises(ValueError, match="leave num out, and give .*'own_objects_here:Fixed:back="):
        drafter("own_objects_here:Fixed", 3)


def test_a_folder_comes_before_a_module(tmp_path):
    (tmp_path / "own_objects_here:Echo").mkdir()
    with pytest.raises((ValueError, OSError), match=r"config\.json|has no"):
        named(LM, "own_objects_here:Echo")


def test_a_registered_name_says_what_its_path_lacks(monkeypatch):
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))
    for name, path, words in (
        ("absent", "nofile:Echo", "the drafter 'absent' is registered as 'nofile:Echo': there is"),
        ("needs", "own_objects_here:Needs", "the field 'k' of Needs has no default"),
    ):
        registry.register(registry.Entry(name, path, "nothing", kind="table"))
        with pytest.raises(ValueError, match=words):
            drafter(name)
