"""Names that do not exist and values of another type: the nearest name, in the user's words."""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest

import specjax
from specjax import acceptance, drafters, trees
from specjax._internal.keywords import checks_arguments
from specjax.cli.commands import COMMANDS
from specjax.cli.typed_names import in_options
from specjax.drafters import registry
from specjax.serving.identity import differing

WRONG = {
    "a setting of Sampling": (
        lambda: specjax.Sampling(temprature=1),
        r"Sampling\(\) has no temprature: did you mean temperature\? It takes temperature, top_k",
    ),
    "a setting of Drafting": (lambda: specjax.Drafting(nun=3), "did you mean num"),
    "a tree of another type": (lambda: specjax.Drafting(tree=3), r"tree=3\. Accepted"),
    "a setting of a drafter": (
        lambda: drafters.NGram(num_drafts=3),
        r"NGram\(\) has no num_drafts: did you mean num_draft\? It takes num_draft, longest",
    ),
    "a setting of a rule": (lambda: acceptance.Tolerance(topk=3), "did you mean top_k"),
    "a setting of a policy": (lambda: drafters.Goodput(min_pauses=3), "did you mean min_pause"),
    "a text for a number": (
        lambda: drafters.NGram(num_draft="3"),
        r"NGram\(num_draft='3'\): give a whole number",
    ),
    "a text in the first place": (lambda: drafters.NGram("3"), r"NGram\(num_draft='3'\)"),
    "half a token": (lambda: drafters.Suffix(num_draft=2.5), r"num_draft=2.5\): give a whole"),
    "a text for a share": (lambda: acceptance.Lenient(scale="1"), r"scale='1'\): give a number"),
    "a number for a choice": (
        lambda: specjax.Sampling(process_drafts=3),
        r"process_drafts=3\): give True or False",
    ),
    "heads after their target": (
        lambda: specjax.load_drafter(specjax.load("embedded"), "eagle3"),
        r"give load_drafter\(path_or_hub_name, target\)",
    ),
    "no model": (lambda: specjax.load(None), "name_or_folder=None: give a folder or a name on"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument_of_a_constructor_is_named(what):
    call, message = WRONG[what]
    with pytest.raises(TypeError, match=message):
        call()


def test_a_tree_is_checked_and_a_file_read_where_it_is_given(tmp_path):
    with pytest.raises(ValueError, match="tree='3x'"):
        specjax.Drafting(tree="3x")
    with pytest.raises(ValueError, match="tree='3x2' and num=2: give one of the two"):
        specjax.Drafting(num=2, tree="3x2")
    assert specjax.Drafting(num="auto", tree="3x2").tree == "3x2"
    for tree, message in (
        ((-1, 0.5, 0), "0.5 is no whole number"),
        ((-1, True, 0), "True is no whole number"),
        ([[0], [0.5]], "0.5 is no whole number"),
        ([[0], [0], [1]], r"\[0\] is given twice"),
        ("100x100x100", "has 1010101 nodes"),
        ("beams:4", "beams: takes 2 sizes, and not 1"),
        ("chain:1x2", "chain: takes 1 size, and not 2"),
    ):
        with pytest.raises(ValueError, match=message):
            specjax.Drafting(tree=tree)
    for num in (-1, 0, 2.5, True, "x"):
        with pytest.raises(ValueError, match=f"num={num!r}: the number of drafts is an integer"):
            specjax.Drafting(num=num)
    with pytest.raises(ValueError, match="policy='x' is unknown"):
        specjax.Drafting(num="auto:x")
    with pytest.raises(ValueError, match=r"Suffix\(num_draft=0\): must be at least 1"):
        drafters.Suffix(num_draft=0)
    with pytest.raises(ValueError, match=r"NGram\(topology=3x2\): matches stand side by side"):
        drafters.NGram(topology=trees.parse("3x2"))
    uneven = trees.Tree((-1, 0, 0, 1))
    words = ["3x2", "3x1x1", "2x1x2"]
    assert [str(trees.parse(x)) for x in words] == words and str(uneven) == repr(uneven)
    file = tmp_path / "tree.json"
    file.write_text("[-1, 0, 0, 1]", encoding="utf-8")
    drafting = specjax.Drafting(tree=str(file))
    file.unlink()
    assert drafting.tree == trees.Tree((-1, 0, 0, 1)) == dataclasses.replace(drafting).tree


def test_a_constructor_that_names_wrong_arguments_is_otherwise_unchanged():
    @dataclasses.dataclass(frozen=True)
    class Plain:
        size: int = 3
        share: float = 0.5
        name: str | None = None

    before = inspect.signature(Plain)
    checked = checks_arguments(Plain)
    assert checked is Plain and checks_arguments(Plain) is Plain
    assert inspect.signature(Plain) == before
    assert Plain(2, share=1) == dataclasses.replace(Plain(2, name="a"), share=1, name=None)
    assert "longest: 'int' = 6" in str(inspect.signature(drafters.NGram))


def test_a_constructor_that_names_wrong_arguments_takes_all_that_it_took_before():
    @dataclasses.dataclass(frozen=True)
    class WithInitVar:
        size: int = 3
        every: dataclasses.InitVar[int] = 1

        def __post_init__(self, every):
            object.__setattr__(self, "size", self.size * every)

    @dataclasses.dataclass(init=False)
    class WithItsOwn:
        size: int

        def __init__(self, text, **others):
            self.size = int(text)

    assert checks_arguments(WithInitVar)(2, every=3).size == 6
    with pytest.raises(TypeError, match=r"has no evry: did you mean every\? It takes size, every"):
        WithInitVar(evry=3)
    assert checks_arguments(WithItsOwn)(text="4", more=1).size == 4


def test_a_class_from_outside_is_not_changed_by_its_registration(monkeypatch, tmp_path):
    (tmp_path / "drafter_from_outside.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Mine:\n    size: int = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = registry.Entry("mine", "drafter_from_outside:Mine", "nothing", kind="table")
    assert entry.load()(size="a text").size == "a text"


@pytest.mark.parametrize("name", registry.head_names())
def test_a_head_that_is_made_by_hand_says_what_it_needs(name):
    kind = registry.find(name).load()
    words = rf"{kind.__name__}\(\) needs config= and target=.*load_drafter"
    if name == "bigram":  # a table: it has no target
        words = r"Bigram\(vocab_size=None\): give the size"
    with pytest.raises(ValueError, match=words):
        kind()


def test_a_wrapper_without_what_it_wraps_names_the_field():
    with pytest.raises(
        TypeError, match=r"^Adaptive\(\) needs inner: it takes inner, policy, widths"
    ):
        drafters.Adaptive()


class Heads:
    """In the place of a target that heads can read."""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("eagle3", "'eagle3': that is the registered name of a method, not of weights: give a "),
        ("eagle3", "`specjax train eagle3 --help` says how to train some"),
        ("dflash", "that holds block heads"),
        ("ngram", "has no heads to load: give drafter='ngram' to specjax.generate"),
    ],
)
def test_the_name_of_a_method_is_no_folder(name, words, monkeypatch):
    from specjax.checkpoints import loading

    monkeypatch.setattr(loading, "LM", Heads)
    monkeypatch.setattr(loading, "HeadTarget", object)
    target = Heads()
    target.target = None
    with pytest.raises(ValueError, match=words):
        loading.load_drafter(name, target)
    with pytest.raises(TypeError, match="path_or_hub_name=None: give a folder"):
        loading.load_drafter(None, target)


@pytest.mark.parametrize(
    ("error", "command", "typed"),
    [
        ("num=99: give 1 to 64", "generate", "--num-draft 99: give 1 to 64"),
        ("use rule='auto', or temperature=0", "chat", "use --rule 'auto', or --temperature 0"),
        ("max_new_tokens has 2 values", "trace", "--max-new-tokens has 2 values"),
        ("give num instead of tree", "generate", "give --num-draft instead of --tree"),
        ("replicate_drafter=True: no", "plan-memory", "--replicate-drafter: no"),
        ("mesh: model=7 devices", "generate", "--mesh: model=7 devices"),
        ("drafter='self:exit=4:stop=2'", "generate", "--drafter 'self:exit=4:stop=2'"),
        ("NGram(num_draft=3) is an object", "generate", "NGram(num_draft=3) is an object"),
        ("is NGram(longest=4, num_draft=3)", "generate", "is NGram(longest=4, num_draft=3)"),
        ("then (num=3 now)", "serve-offline", "then (--num-draft 3 now)"),
        ("its settings: top_k (int)", "generate", "its settings: top_k (int)"),
        ("num_drafts=[0]: give", "plan", "--num-draft [0]: give"),
        ("pass drafter=specjax.load(<a model>)", "generate", "pass --drafter <a model>"),
        ("load it without mesh=", "generate", "load it without --mesh"),
        ("rule='x': did you mean 'y'?", "quantize", "rule='x': did you mean 'y'?"),
        ("the tree of a drafter and its rule", "generate", "the tree of a drafter and its rule"),
        (
            "2 of 3 prompts are broken:\n  line 1: max_new_tokens=0\nmax_broken=2",
            "serve-offline",
            "2 of 3 prompts are broken:\n  line 1: max_new_tokens=0\n--max-broken 2",
        ),
    ],
)
def test_errors_name_options_as_they_are_typed(error, command, typed):
    assert in_options(ValueError(error), COMMANDS[command].add) == typed


def test_settings_that_differ_are_named_with_both_values_and_defaults():
    old, new = {"num": 3, "temperature": 0.5, "drafter": "ngram"}, {"num": 4, "drafter": "ngram"}
    assert differing(old, new) == [("num=3", "num=4"), ("temperature=0.5", "temperature=0.0")]
    assert differing(old, dict(old)) == []


def test_a_dry_run_times_few_calls_that_take_long_and_says_what_it_does(monkeypatch, capsys):
    from specjax.train import outlook

    calls = []
    # each call takes 4 seconds
    clock = SimpleNamespace(monotonic=lambda: outlook.BEGUN + 4.0 * len(calls))
    monkeypatch.setattr(outlook, "time", clock)

    def call():
        calls.append(None)
        return ()

    assert outlook.seconds_of(call, times=9) == 4
    assert len(calls) == 1 + 2
    stages = [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert stages == ["compiling, and running once ...", "timing ..."]
