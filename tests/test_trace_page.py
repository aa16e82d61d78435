"""The page of a trace: it holds the rounds, and nothing of a text leaves its data."""

import dataclasses
import html.parser
import json
import re

import pytest
from asking import flat

import specjax
from specjax.text.token_display import Spelled
from specjax.tracing import html_page

pytest_plugins = ["pairs"]
SETTINGS = {"num_draft": 3, "max_new_tokens": 16, "temperature": 1.0, "seed": 7}


class Reader(html.parser.HTMLParser):
    """Elements of a page with their attributes, and the text of each script."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, attributes))

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] == "script":
            self.scripts.append(data)

    @property
    def data(self):
        return json.loads(self.scripts[0])


EVIL = "</script><script>alert(1)</script><!-- ]]> \u202e\u2066 \ud800 \u2028 {{style}} &lt; \0"


@pytest.fixture
def traced(pair, quick_compilation):
    return specjax.trace(pair[0], "def f(x):", **flat(**SETTINGS, drafter=pair[0]))


def test_the_page_holds_the_rounds(traced):
    data = Reader(html_page.page(traced.page_data())).data
    assert data == json.loads(json.dumps(traced.page_data()))
    assert [one["token"] for one in data["rounds"]] == [
        [node.token for node in one.nodes] for one in traced.rounds
    ]
    assert "".join(sum((one["pieces"] for one in data["rounds"]), [])) == traced.text
    shown = {t for one in data["rounds"] for top in one["top"].values() for t, _ in top}
    assert shown <= {int(token) for token in data["tokens"]}
    assert data["rounds"][0]["p"] == [None]  # the pass over the end of the prompt drafts nothing
    assert data["rounds"][1]["p"][0] is None and 0 <= data["rounds"][1]["p"][1] <= 1


def test_no_text_gets_out_of_the_data(traced):
    evil = dataclasses.replace(
        traced,
        model=EVIL,
        prompt=EVIL,
        settings={"law": EVIL},
        pieces=[[EVIL] * len(pieces) for pieces in traced.pieces],
        spell=lambda token: Spelled(EVIL),
    )
    harmless, page = (
        Reader(html_page.page(traced.page_data())),
        Reader(html_page.page(evil.page_data())),
    )
    assert page.elements == harmless.elements
    assert page.data["model"] == page.data["prompt"] == page.data["settings"]["law"] == EVIL
    assert {tuple(token) for token in page.data["tokens"].values()} == {(EVIL,)}
    html_page.page(evil.page_data()).encode()  # no lone surrogate


def test_the_page_asks_for_nothing_else(traced):
    text = html_page.page(traced.page_data())
    reader = Reader(text)
    policy = dict(reader.elements[[tag for tag, _ in reader.elements].index("meta") + 4][1])
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert policy["content"].startswith("default-src 'none';")
    links = [v for _, a in reader.elements for k, v in a if k in ("src", "href", "action", "data")]
    assert links == ["data:,"]
    assert set(re.findall(r"\w+://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|innerHTML|insertAdjacent|document\.write|eval\(", text)


def test_a_page_is_written_whole_or_not_at_all(traced, tmp_path, monkeypatch):
    file = tmp_path / "page.html"
    assert traced.save(file) == file.stat().st_size
    first = file.read_bytes()
    monkeypatch.setattr(html_page.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        traced.save(file)
    assert file.read_bytes() == first and list(tmp_path.iterdir()) == [file]


def test_the_command_writes_a_page_and_says_how_large(
    folders, tmp_path, capsys, monkeypatch, quick_compilation
):
    from specjax import cli
    from specjax._internal import compile_cache

    monkeypatch.setattr(compile_cache, "enable", lambda: None)
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.chdir(tmp_path)
    target = str(folders["target"])
    arguments = ["trace", "def f(x):", "--model", target, "--drafter", target]
    assert cli.main([*arguments, "--max-new-tokens", "16", "--rounds", "2"]) == 0
    out, err = capsys.readouterr()
    page = tmp_path / "specjax-trace.html"
    assert out.startswith(f"{page.name}: 2 rounds, ") and "--rounds" in out and err == ""
    assert f"{page.stat().st_size / 1000:,.0f} kB" in out
    assert len(Reader(page.read_text()).data["rounds"]) == 3  # and the prompt's pass

    (tmp_path / "other.html").write_text("<p>mine")
    refused = {
        "other.html": "not a trace page",
        "absent/page.html": "there is no folder absent",
        str(tmp_path): "is a folder",
    }
    for output, words in refused.items():  # before anything is loaded
        assert cli.main(["trace", "a", "--model", "./absent", "-o", output]) == 2
        assert words in capsys.readouterr().err
    assert (tmp_path / "other.html").read_text() == "<p>mine"
    assert cli.main([*arguments, "--rounds", "0"]) == 2
    assert "--rounds 0" in capsys.readouterr().err
