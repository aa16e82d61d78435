"""Tables that requests fill: they make later requests faster, and never change a text."""

import functools
import json

import jax
import numpy as np
import pytest

import specjax
from specjax._internal import host
from specjax.cli import main as command
from specjax.drafters import SAM, NGram, Suffix, text_table
from specjax.text import Session

PROMPTS = ["def area(r):", "import os\n\nclass ", "for index in range("]
NUM = 24


@functools.cache
def lm():
    return specjax.load("embedded")


def rounds_of(drafter, prompts=PROMPTS):
    """Greedy texts, and the rounds that they took."""
    outs = [specjax.generate(lm(), one, drafter=drafter, max_new_tokens=NUM) for one in prompts]
    return [out.text for out in outs], sum(int(out.stats.rounds.sum()) for out in outs)


@pytest.fixture(scope="module")
def plain():
    return rounds_of("none")[0]


@pytest.mark.parametrize("drafter", ["suffix", "sam"])
def test_a_request_that_was_made_before_takes_fewer_rounds_and_says_the_same(drafter, plain):
    session = Session(lm(), drafter, 512)
    first, slow = rounds_of(session)
    second, fast = rounds_of(session)
    assert first == second == plain
    assert fast < 0.6 * slow


def test_a_text_does_not_depend_on_what_others_said(plain):
    session = Session(lm(), Suffix(num_draft=7), 512)
    random = np.random.default_rng(0)
    for _ in range(40):  # the oldest are forgotten
        session.add([1, 2, 3], random.integers(0, lm().target.vocab_size, 30))
    assert session.num_tokens <= session.capacity == 512
    assert rounds_of(session)[0] == plain


def test_a_file_of_prompts_fills_the_table_as_it_goes(plain):
    session = Session(lm(), Suffix(num_draft=7), 512)
    again = PROMPTS * 2
    options = dict(batch=2, max_new_tokens=NUM)
    served = specjax.serve_offline(lm(), again, drafter=session, **options)
    assert served.texts == plain * 2
    assert sum(row.rounds for row in served.rows[3:]) < sum(row.rounds for row in served.rows[:3])


def test_a_conversation_reads_and_fills_the_table():
    session = Session(lm(), Suffix(num_draft=7), 512)
    rounds = []
    for _ in range(2):
        chat = specjax.Chat(lm(), drafter=session, max_new_tokens=NUM)
        text = "".join(piece.text for piece in chat.say(PROMPTS[0]))
        rounds.append(int(chat.generation.stats.rounds.sum()))
    assert text and rounds[1] < rounds[0]


def test_a_session_is_saved_and_loaded_whole_and_the_latest_of_it_where_it_is_larger(tmp_path):
    session = Session(lm(), "suffix", 512)
    for begin in range(0, 60, 30):
        session.add([7, 8], range(begin, begin + 30))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):  # of the program around it
        session.add([7, 8], range(60, 90))
    session.save(tmp_path / "a.session")
    assert [path.name for path in tmp_path.iterdir()] == ["a.session"]
    found = Session.load(lm(), tmp_path / "a.session", SAM(), 512)
    assert text_table.texts(found.table) == text_table.texts(session.table)
    assert found.num_tokens == session.num_tokens == 3 * 33
    many = Session(lm(), "suffix", 4096)
    for begin in range(300):
        many.add([7], [begin])
    many.save(tmp_path / "b.session")
    less = Session.load(lm(), tmp_path / "b.session", "suffix", 256)
    kept = text_table.texts(less.table)
    assert kept == text_table.texts(many.table)[-len(kept) :] and kept[-1] == [7, 299]


def broken(change, path):
    """A session's file with something wrong about it."""
    Session(lm(), "suffix", 512).save(path)
    if change == "truncated":
        path.write_bytes(path.read_bytes()[:-40])
    elif change == "other":
        path.write_text("no session")
    else:
        held = dict(np.load(path))
        held |= {"version": np.int32(9)} if change == "version" else {"tokenizer": np.array("x")}
        with open(path, "wb") as file:
            np.savez(file, **held)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("truncated", "is truncated"),
        ("other", "no session"),
        ("version", "reads version 1"),
        ("tokenizer", "another tokenizer"),
    ],
)
def test_files_that_are_no_session_of_the_model_are_refused(change, words, tmp_path):
    broken(change, tmp_path / "a.session")
    with pytest.raises(ValueError, match=words) as error:
        Session.load(lm(), tmp_path / "a.session")
    assert "pickle" not in str(error.value)  # what NumPy advises


def test_sessions_that_cannot_be_are_refused():
    with pytest.raises(TypeError, match="suffix"):
        Session(lm(), NGram())
    with pytest.raises(ValueError, match="capacity"):
        Session(lm(), "suffix", 3)
    with pytest.raises(FileNotFoundError):
        Session.load(lm(), "nowhere.session")
    with pytest.raises(ValueError, match="drafts no trees"):
        specjax.generate(
            lm(), "a", drafter=Session(lm(), "sam"), drafting=specjax.Drafting(tree="2x1")
        )
    with pytest.raises(ValueError, match="TextTable"):
        specjax.generate(lm(), "a", drafter=Suffix(), drafter_params={})


@pytest.mark.parametrize("path", ["nowhere/a.session", "."])
def test_a_session_that_cannot_be_written_is_refused_before_anything_is_decoded(path, capsys):
    assert command(["generate", PROMPTS[0], "--session", path]) == 2
    said = capsys.readouterr()
    assert said.out == "" and f"--session {path}: no file can be written there" in said.err


def test_the_command_keeps_a_session(tmp_path, capsys):
    path = str(tmp_path / "a.session")
    call = ["generate", PROMPTS[0], "--drafter", "suffix", "--session", path, "--json"]
    call += ["--max-new-tokens", str(NUM), "--session-tokens", "512"]
    said = []
    for _ in range(2):
        assert command(call) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["text"] == said[1]["text"]
    assert said[1]["stats"]["rounds"] < said[0]["stats"]["rounds"]


def test_a_table_that_is_larger_than_the_memory_is_refused(monkeypatch):
    monkeypatch.setattr(host, "device_memory", lambda: 1000)
    with pytest.raises(ValueError, match="capacity=512: its table takes 4,096 bytes, and the"):
        Session(lm(), "suffix", 512)


def test_a_table_whose_places_and_matches_exceed_a_number_of_32_bits_is_refused(monkeypatch):
    monkeypatch.setattr(host, "device_memory", lambda: None)
    with pytest.raises(ValueError, match="matches of up to 32 tokens a table holds at most 650752"):
        Session(lm(), "sam", 2**26)
