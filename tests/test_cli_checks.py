"""What commands check before they begin, and that what they print is what was generated."""

import argparse
import io
import itertools
import json
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import specjax
from specjax import cli
from specjax.analysis.rule_quality import Quality, RuleQuality
from specjax.cli import (
    audit,
    commands,
    generate,
    layers,
    prompts,
    quantize,
    screen,
    sessions,
    text_files,
    tree,
)
from specjax.models.model_folder import name_of
from specjax.text.generation import Piece
from specjax.text.other_vocabulary import shortened
from specjax.text.own_drafters import folder_stamp

pytest_plugins = ["pairs", "command_line"]


@pytest.fixture
def unloaded(monkeypatch, tmp_path):
    """A folder to work in, where no command may read a model."""
    for one in (layers, tree):
        monkeypatch.setattr(one, "set_up", lambda _: pytest.fail("a model was read"))
    monkeypatch.setattr(specjax, "load", lambda *a, **k: pytest.fail("a model was read"))
    monkeypatch.chdir(tmp_path)
    for name, file in (("model", "config.json"), ("shards", "model-00001-of-00002.safetensors")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    (tmp_path / "file").touch()
    (tmp_path / "folder.json").mkdir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("quantize --quantize int8 -o model", "--output model: the folder holds a model already"),
        ("quantize --quantize int8 -o shards", "or --overwrite to replace the model that is there"),
        ("quantize --quantize int8 -o file", "--output file: no folder can be made there"),
        ("quantize --quantize int8 -o file/x", "--output file/x: no folder can be made there"),
        ("quantize --quantize int8 --overwrite", "--overwrite: it is used with --output only"),
        ("tree --output folder.json", "--output folder.json: no file can be written there"),
        ("tree --output absent/x.json", "--output absent/x.json: no file can be written there"),
        ("tree --output best", "--output best: --tree of generate reads .json files"),
        ("layers --journal absent/x", "--journal absent/x: no file can be written there"),
        ("layers --journal model", "--journal model: no file can be written there"),
        ("layers --output absent/x", "there is no folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_a_model_is_read(
    words, said, unloaded, capsys
):
    assert cli.main(words.split()) == 2
    assert said in capsys.readouterr().err


def test_a_model_is_replaced_where_that_is_asked_for(unloaded, monkeypatch):
    def read(*_, **__):
        raise ValueError("a model was read")

    monkeypatch.setattr(specjax, "load", read)
    command = ["quantize", "--quantize", "int8", "--limit", "1", "-o", "model"]
    arguments = cli_arguments(*command, "--overwrite")
    with pytest.raises(ValueError, match="a model was read"):
        quantize.run(arguments)


def cli_arguments(*words):
    return commands.parser().parse_args(words)


@pytest.fixture
def search(monkeypatch, tmp_path):
    """``search(ratio, *words)`` runs ``layers`` with a set of that measured ratio, and returns the
    names of the files in its folder."""
    monkeypatch.setattr(layers, "set_up", lambda _: SimpleNamespace(name=str(tmp_path)))
    part = SimpleNamespace(skip=("mlp.0",), num_draft=2)
    monkeypatch.setattr(layers, "_predicted", lambda *_: (part, {"predicted_ratio": 1.5}, "a set"))
    saved = []
    monkeypatch.setattr(layers, "save_layers", lambda *given: saved.append(given) or given[2])

    def run(ratio, *words):
        pairs = SimpleNamespace(ratio=ratio, interval=(ratio, ratio))
        monkeypatch.setattr(specjax, "compare", lambda *a, **k: pairs)
        assert layers.run(cli_arguments("layers", *words)) == 0
        return [given[2] for given in saved]

    return run


def test_a_set_that_was_measured_to_be_slower_is_not_saved(search, tmp_path, capsys):
    assert search(0.9, "--measure") == []
    assert "plain decoding is faster; the best set was a set, measured 0.90" in (
        capsys.readouterr().out
    )
    assert search(1.2, "--measure") == [tmp_path / "self.json"]


def test_the_usual_place_of_a_set_is_checked_before_the_search(search, monkeypatch):
    monkeypatch.setattr(layers, "_predicted", lambda *_: pytest.fail("it was searched"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="--output .*self.json: no file can be written there"):
        search(1.2)


def test_an_early_ctrl_c_leaves_the_page_of_an_earlier_trace(run, folders, tmp_path, monkeypatch):
    found = SimpleNamespace(rounds=[], interrupted=True, save=lambda _: pytest.fail("it was saved"))
    monkeypatch.setattr(specjax, "trace", lambda *a, **k: found)
    words = ["a", "--model", folders["target"], "-o", tmp_path / "page.html"]
    code, out, err = run(*words, command="trace")
    assert (code, out, err) == (130, "", "interrupted\n")


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_a_screen_shows_each_character_and_colours_on_terminals_alone(terminal, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as many runners of commands set it
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = (Terminal if terminal else io.TextIOWrapper)(io.BytesIO(), encoding="utf-8", newline="")
    monkeypatch.setattr(sys, "stdout", out)
    text = "x[1:b:2]\t:smile: [bold]\x0c\r\n" + "y" * 300
    screen.Screen("").show(Piece(text, from_draft=True))
    shown = out.buffer.getvalue().decode()
    assert shown == (f"\x1b[1;32m{text}\x1b[0m" if terminal else text)


def test_a_table_is_as_wide_as_the_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal(io.BytesIO(), encoding="utf-8"))
    monkeypatch.setenv("COLUMNS", "80")
    law = (0.1234, 0.2345)
    figures = ("approximate-tolerance:top_k=3,gap=1.5", "", 2.5, -1.2, 0.9, 12.3, None, law, law)
    rules = (RuleQuality(*figures, speed=1.5, solved=0.5),)
    found = Quality("embedded", "eagle3 drafts", 0, 256, rules, 1)
    calculation = specjax.analysis.calculate(0.8, num_draft=2, prompt=9)
    for one, last in ((found, "50%"), (calculation, "tokens a")):
        lines = screen.in_width(one).splitlines()
        assert max(map(len, lines)) <= 80 and any(line.rstrip().endswith(last) for line in lines)
        assert not any("…" in line for line in lines)


def test_names_of_rules_are_checked_before_the_first_audit(monkeypatch, capsys):
    monkeypatch.setattr(specjax, "audit_rule", lambda *a, **k: pytest.fail("a rule was audited"))
    for names, said in (
        (["delta", "nonsense"], "'nonsense' is unknown"),
        (["delta", "auto"], "stands for other rules"),
        (["delta", "transformers:size=3"], "'size=3' is no setting of 'transformers'"),
    ):
        assert cli.main(["audit", *names]) == 2
        assert said in capsys.readouterr().err
    assert audit.is_engine("transformers:way=lookup") and not audit.is_engine("delta")


MARK = "\ufeff".encode()  # with which some programs begin a file


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, monkeypatch):
    file, lines = tmp_path / "text.py", tmp_path / "texts.jsonl"
    file.write_bytes(MARK + b"x = 1")
    lines.write_bytes(MARK + b'"a"\n{"text": "b"}\n')
    assert prompts.read_prompt(None, str(file)) == "x = 1"
    with file.open(encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert prompts.read_prompt(None, None) == "x = 1"
    assert list(text_files._texts([str(file), str(lines)])) == ["x = 1", "a", "b"]


def test_errors_of_sessions_and_datastores_name_the_options(pair, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="session_tokens=10: give 256 to"):
        sessions.session_of(pair[0], "suffix", str(tmp_path / "x"), 10)
    asked = argparse.Namespace(drafter=None, session=None, datastore="x", batch=10**6)
    with pytest.raises(ValueError, match="batch=1000000: give a whole number from 1"):
        sessions.retrieval_of(pair[0], asked)

    def refused(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "load", refused)
    (tmp_path / "x").touch()
    with pytest.raises(PermissionError, match="x: the session may not be read .*permissions"):
        sessions.session_of(pair[0], "suffix", str(tmp_path / "x"), None)


def test_a_comparison_names_no_value_that_stop_does_not_take(run):
    code, _, err = run("a", "--compare", "--stop", "X")
    assert code == 2 and "--stop: stop strings are found" in err and "--stop <" not in err


def test_the_time_of_a_text_does_not_hold_that_of_saving_a_session(run, monkeypatch):
    clock, waited = itertools.count(), []
    now = lambda: next(clock) + sum(waited)  # noqa: E731
    monkeypatch.setattr(generate, "time", SimpleNamespace(perf_counter=now))
    monkeypatch.setattr(generate, "save_session", lambda *_: waited.append(1000))
    found = json.loads(run("a", "--json", "--drafter", "none")[1])
    assert waited and found["seconds"]["total"] < 1000 and found["rate"] > 1e-2


def test_a_tilde_stands_for_the_users_folder(monkeypatch, tmp_path, pair, folders):
    monkeypatch.setenv("HOME", str(folders["target"].parent))
    assert name_of("model", "~/target") == str(folders["target"])
    assert name_of("model", "owner/~name") == "owner/~name"
    assert folder_stamp("~/target") == folder_stamp(str(folders["target"])) != ()
    assert specjax.load("~/target").name == pair[0].name


def test_drafters_of_a_plan_have_different_names():
    names = {"runs/a/model", "runs/b/model", "tli:hub/small", "ngram"}
    shown = shortened(names)
    assert shown == {name: name for name in names} | {"tli:hub/small": "tli:small"}
