"""Paths and files as users give them: `~`, byte-order marks, and a folder in place of a file."""

import dataclasses
import json
import os

import pytest
from specjax.train import compare, config, sources
from specjax.train.cli import main

MARK = "\ufeff"  # with which some programs begin a file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    data: config.DataConfig = config.DataConfig()
    run: config.RunConfig = config.RunConfig()


def test_the_users_folder_is_meant_by_a_tilde_in_every_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["run.folder=~/runs/x", "data.corpus=~/texts", "data.mixed=['~/more']"]
    found = config.load(Config, None, [*words, "data.end_of_text=~"])
    assert found.run.folder == f"{tmp_path}/runs/x" and found.data.corpus == f"{tmp_path}/texts"
    assert found.data.mixed == (f"{tmp_path}/more",) and found.data.end_of_text == "~"


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_a_byte_order_mark_is_no_part_of_a_corpus(name, tmp_path):
    (tmp_path / "heldout").mkdir()
    entry = json.dumps({"text": "x = 1\n"})
    text = {"a.txt": "x = 1\n", "a.jsonl": entry, "a.json": f"[{entry}]"}[name]
    (tmp_path / name).write_text(MARK + text, encoding="utf-8")
    assert [text for _, text in sources.read(str(tmp_path), "train", 0)] == ["x = 1\n"]


def test_a_byte_order_mark_is_no_part_of_a_configuration(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(f"{MARK}[run]\nsteps = 7\n", encoding="utf-8")
    assert config.load(Config, file).run.steps == 7


def test_a_table_that_could_not_be_written_is_refused_before_anything_is_decoded(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(compare.specjax, "load", lambda *a, **k: pytest.fail("a model was read"))
    assert main(["compare", "heads=['x']", f"output={tmp_path}"]) == 2
    assert f"output={str(tmp_path)!r} is a folder" in capsys.readouterr().err


def test_a_path_that_was_recorded_with_the_users_folder_unexpanded_is_the_same():
    old = {"teacher": "~/m", "data.samples": ["~/a", "b"]}
    new = {"teacher": os.path.expanduser("~/m"), "data.samples": [os.path.expanduser("~/a"), "b"]}
    assert config.differences(old, new) == []
    assert config.differences(old, new | {"teacher": "/other/m"}) != []
