"""``specjax generate --features``: a Whisper from the shell, and what is refused before."""

import json
import re
import shutil

import numpy as np
import pytest
from checkpoints import GOLDEN
from encoder_decoders import FOLDER, expected, with_tokenizer

import specjax
from specjax import cli
from specjax._internal import compile_cache

pytestmark = pytest.mark.usefixtures("quick_compilation")
NEW = 9
WINDOWS = expected("whisper")[0]["features"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with models, a window and files that hold none."""
    place = tmp_path_factory.mktemp("heard")
    for case in ("whisper", "t5"):
        with_tokenizer(shutil.copytree(FOLDER / case, place / case))
    shutil.copytree(GOLDEN / "gpt2", place / "gpt2")
    tongues = shutil.copytree(place / "whisper", place / "tongues")
    file = tongues / "generation_config.json"
    said = json.loads(file.read_text()) | dict(lang_to_id={"<|en|>": 10, "<|de|>": 11})
    file.write_text(json.dumps(said))
    np.save(place / "one.npy", WINDOWS[1])
    np.save(place / "short.npy", WINDOWS[1, :, :30])
    (place / "none.npy").write_text("no array")
    return place


@pytest.fixture
def run(place, capsys, monkeypatch):
    """``run(*arguments) -> (exit code, stdout, stderr)`` with names in ``place``."""
    monkeypatch.setattr(compile_cache, "enable", lambda: None)
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.chdir(place)

    def call(*arguments, command="generate", model="whisper"):
        options = ["--model", f"./{model}", "--max-new-tokens", str(NEW)]
        return cli.main([command, *arguments, *options]), *capsys.readouterr()

    return call


@pytest.mark.parametrize("begin", [None, "[3, 20, 21]"])
def test_a_window_is_heard_from_where_the_model_or_the_prompt_begins(run, place, begin):
    arguments = [] if begin is None else [begin]
    code, out, err = run(*arguments, "--features", "one.npy", "--json")
    found, ids = json.loads(out), None if begin is None else json.loads(begin)
    options = dict(inputs=WINDOWS[1], drafter="ngram", max_new_tokens=NEW)
    wanted = specjax.generate(specjax.load(place / "whisper"), ids, **options)
    assert code == 0 and err == ""
    assert found["tokens"] == wanted.tokens[0].tolist()
    assert found["prompt"] == found["prompt_tokens"] == wanted.prompts[0].tolist() == (ids or [3])
    code, out, _ = run(*arguments, "--features", "one.npy")
    assert code == 0 and out.rstrip("\n") == wanted.text.rstrip("\n")


def test_a_trace_hears_too(run, place):
    code, out, _ = run("--features", "one.npy", "--rounds", "2", "-o", "a.html", command="trace")
    assert code == 0 and "2 rounds" in out and (place / "a.html").is_file()


REFUSED = {
    "no such file": (
        ["--features", "absent.npy"],
        "whisper",
        "absent.npy holds no .*No such",
    ),
    "no array": (["--features", "none.npy"], "whisper", "none.npy holds no array"),
    "another shape": (["--features", "short.npy"], "whisper", r"\[8, 30\], expected \[8, 40\]"),
    "a model that reads text": (["--features", "one.npy"], "t5", "t5 reads a text"),
    "a model without an encoder": (["--features", "one.npy"], "gpt2", "gpt2 reads a text"),
    "nothing to hear": (["A"], "whisper", r"--features is missing: .* one array \[8, 40\]"),
    "a text to begin with": (["A", "--features", "one.npy"], "whisper", "prompt 'A': .*token ids"),
    "no language": (["--features", "one.npy"], "tongues", "several languages.*give token ids"),
    "no model": (["--features", "one.npy"], "absent", "absent' is neither a folder"),
}


@pytest.mark.parametrize("command", ["generate", "trace"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_heard_is_one_line_and_nothing_is_loaded(what, command, run, monkeypatch):
    def loaded(*_, **__):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(specjax, "load", loaded)
    arguments, model, message = REFUSED[what]
    code, out, err = run(*arguments, command=command, model=model)
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert re.search(message, err), err
