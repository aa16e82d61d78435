"""The documentation is true: its code runs, its commands exist, its links lead somewhere."""

import argparse
import dataclasses
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {p.relative_to(ROOT).as_posix(): p.read_text("utf-8") for p in sorted(DOCS.rglob("*.md"))}
ALL = {"README.md": README} | PAGES
# what needs a network, several devices or a model of one's own is marked ```py
RUN = [name for name, text in ALL.items() if "```python\n" in text]


def fences(text, language):
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def write_files(page, folder):
    """Writes the titled blocks of a page as files."""
    for file in re.findall(r'^```python title="(.*?)"', ALL[page], re.MULTILINE):
        (block,) = fences(ALL[page], f'python title="{re.escape(file)}"')
        (folder / file).write_text(block, encoding="utf-8")


@pytest.mark.parametrize("page", RUN)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    from specjax.drafters import registry

    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_ENTRIES", dict(registry._ENTRIES))  # pages register drafters
    write_files(page, tmp_path)
    names = {"__name__": "page"}
    for number, block in enumerate(fences(ALL[page], "python")):
        exec(compile(block, f"{page}, block {number}", "exec"), names)


def subcommands(parser):
    """The parsers of a command's subcommands, by name."""
    action = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


def commands(text):
    """The ``specjax`` commands of a page's shell blocks, as lists of words."""
    for block in fences(text, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.partition(" | ")[2] if " | " in line else line
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words = words[1:]
            if words[:1] == ["specjax"]:
                yield words[1:]


@pytest.mark.parametrize("page", [name for name, text in ALL.items() if any(commands(text))])
def test_the_commands_of_a_page_are_ones_that_the_parser_takes(page):
    from specjax.train import cli as train

    from specjax.cli.commands import parser

    known = subcommands(parser())
    for words in commands(ALL[page]):
        if words[0] == "train":
            assert words[1] in ("--help", *train.RECIPES), words
        elif words[0].startswith("-"):
            continue
        else:
            parser().parse_args(words)
        assert words[0] in known


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("docs/extend/drafter.md", ("drafter", "periodic")),
        ("docs/extend/rule.md", ("rule", "first_only:FirstOnly")),
    ],
)
def test_a_drafter_or_rule_of_ones_own_is_used_by_the_command_of_its_page(
    page, said, tmp_path, monkeypatch, capsys
):
    from specjax.cli import main

    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)  # in which the module is found
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (words,) = [words for words in commands(ALL[page]) if words[0] == "generate"]
    assert main([*words, "--json"]) == 0
    assert said in json.loads(capsys.readouterr().out).items()


def slug(heading):
    """The anchor of a heading, as the site and a repository's page make it."""
    text = re.sub(r"`|\*|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[ ]", "-", re.sub(r"[^\w\- ]", "", text))


def anchors(text):
    """The anchors of a page."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = {slug(h) for h in re.findall(r"^#+ (.*)$", plain, re.MULTILINE)}
    return found | set(re.findall(r'<a id="([^"]+)"', plain))


@pytest.mark.parametrize("page", ALL)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", ALL[page], flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        place = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert place.exists(), target
        if anchor and place.suffix == ".md":
            assert anchor in anchors(place.read_text("utf-8")), target


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    results = [page.parent.name for page in ROOT.glob("benchmarks/results/*/README.md")]
    pages = [page.removeprefix("docs/") for page in PAGES]
    for page in pages + [f"mounted/results/{name}/README.md" for name in results]:
        assert page in config, page


def test_the_site_builds_strictly(tmp_path):
    mkdocs = pytest.importorskip("mkdocs.commands.build", reason="needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    mkdocs.build(config)  # raises Abort for any warning
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:  # fonts, scripts and style sheets come from the site itself
        html = page.read_text("utf-8")
        assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"https?://", html), page.name


def test_the_site_lists_every_drafter_and_rule():
    from specjax.acceptance import RULES
    from specjax.drafters import POLICIES, registry

    methods = PAGES["docs/methods/index.md"]
    for name in [entry.name for entry in registry.entries()] + list(RULES):
        assert f"`{name}`" in methods or f"`{name.replace('-', '_')}`" in methods, name
    for name in POLICIES:
        assert f"| `{name}`" in PAGES["docs/methods/combinators.md"], name
    for name in RULES:  # of drafters: test_drafter_registry.py
        assert f"`{name}`" in README or f"`{name.replace('-', '_')}`" in README, name


def test_the_site_prices_a_70b_pair_as_the_command_does(capsys):
    from specjax.cli import plan_memory
    from specjax.cli.commands import parser

    page = PAGES["docs/howto/devices.md"]
    (words,) = [w for w in commands(page) if w[0] == "plan-memory"]
    words = [w.replace("benchmarks/", f"{ROOT}/benchmarks/") for w in words]
    assert plan_memory.run(parser().parse_args(words)) == 0
    assert capsys.readouterr().out.strip() in page


def test_the_changelog_says_where_modules_are():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    table = text.partition("### Modules that moved")[2].partition("###")[0]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| `")]
    named = [x for row in rows for x in re.findall(r"`(specjax\.[\w.]+)`", row)]
    assert len(named) > 30
    for name in named:
        module, _, last = name.rpartition(".")
        found = importlib.util.find_spec(name)
        assert found or hasattr(importlib.import_module(module), last), name


def test_the_site_shows_the_strangers_target_as_it_is_tested():
    source = (ROOT / "tests" / "stranger.py").read_text("utf-8")
    assert f"```python\n{source}```" in PAGES["docs/extend/target.md"]


# the path from an own model to a faster one

SMALL = {  # what the test gives after the page's own fields and options, to be quick
    "generate": ["--max-new-tokens", "8"],
    "--compare": ["--repetitions", "6"],
    "plan": ["--max-new-tokens", "8", "--num-draft", "1"],
    "serve-offline": ["--max-new-tokens", "8"],
    "regenerate": ["data.length=32", "data.batch=2", "num_rows=4", "new_tokens=8"],
    "eagle3": [
        "data.length=32",
        "data.batch=2",
        "data.eval_rows=2",
        "num_heads=2",
        "optimizer.warmup=1",
        "run.steps=2",
        "run.eval_every=2",
        "decoding.num_prompts=2",
        "decoding.batch=2",
        "decoding.prompt_tokens=8",
        "decoding.new_tokens=8",
    ],
}


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    """A folder with what the page asks for: a tiny random model, texts, prompts."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "models"))
    import checkpoints

    from specjax.models import save_pretrained

    monkeypatch.chdir(tmp_path)
    random = checkpoints.random_model(dataclasses.replace(checkpoints.SMALL, num_layers=6))
    save_pretrained(random, "models/mine", tokenizer=checkpoints.byte_tokenizer())
    for name in ("texts/a.txt", "texts/b.txt", "texts/heldout/c.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("def f(x):\n    return x + 1\n" * 40)
    Path("prompts.txt").write_text("def f(x):\nclass A:\n")
    Path("prompts.jsonl").write_text('"def f(x):"\n{"prompt": "class A:"}\n')
    return tmp_path


def test_the_commands_from_a_model_to_a_faster_one_run_in_their_order(own_model, capfd):
    from specjax.cli import main

    ran = []
    for words in commands(PAGES["docs/howto/faster.md"]):
        name = words[1] if words[0] == "train" else words[0]
        small = SMALL[name] + SMALL["--compare"] * ("--compare" in words)
        assert main([*words, *small]) == 0, capfd.readouterr().err
        ran.append(name)
    assert ran == [
        *("generate", "generate", "plan", "regenerate"),
        *("eagle3", "generate", "plan", "serve-offline"),
    ]
    assert (own_model / "runs/head/model/config.json").is_file()
    assert len((own_model / "out.jsonl").read_text().splitlines()) == 2
