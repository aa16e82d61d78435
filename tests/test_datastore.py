"""Datastores: what is found is what a scan of the whole corpus finds, and drafts never lie."""

import json

import numpy as np
import pytest
from test_tables import CHAIN, jit_shared

import specjax
from specjax.cli import main as command
from specjax.drafters import context_index, datastore
from specjax.drafters.datastore import Datastore, build
from specjax.text import Retrieval, Session, retrieval
from specjax.text.session import fingerprint

PROMPT, NUM = "def area(r):", 24


@pytest.fixture(scope="module")
def lm():
    return specjax.load("embedded")


def corpus(rows=9, letters=3, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, letters, int(random.integers(1, 60))) for _ in range(rows)]


@pytest.fixture(params=[4, 50, 1000])
def store(tmp_path, request):
    """A datastore whose places are sorted in several parts, or in one."""
    return build(tmp_path / "store", corpus(), "words", chunk=request.param, depth=6)


def scanned(corpus, text, most, depth=6):
    """``(matched, place)`` of every place, the longest match first."""
    found = []
    for place in range(len(corpus)):
        size, limit = 0, min(depth, place + 1, len(text))
        while size < limit and corpus[place - size] == text[-1 - size]:
            size += 1
        found += [(size, place)] if size else []
    return sorted(found, reverse=True)[:most]


def wrong_answers(store, texts=corpus(30, seed=1)):
    """The number of texts of which all places, or the lengths of the longest matches, are wrong."""
    whole = np.concatenate([np.append(text, -1) for text in corpus()]).tolist()
    wrong = 0
    for text in texts:
        places, matched = store.search(text, 1000)
        wanted = scanned(whole, text.tolist(), 1000)
        right = sorted(zip(matched.tolist(), places.tolist(), strict=True)) == sorted(wanted)
        for most in (1, 5):  # here the order of the places decides
            found = store.search(text, most)[1].tolist()
            right &= found == [size for size, _ in wanted[:most]]
        wrong += not right
    return wrong


def test_a_search_finds_what_a_scan_of_the_whole_corpus_finds(store):
    assert wrong_answers(store) == 0
    assert store.search(np.asarray([9]), 4)[0].size == 0


def test_fault_parts_in_another_order(tmp_path, monkeypatch):
    divided = datastore._divided

    def wrong(*given):
        keys, files = divided(*given)
        return keys, files[::-1]

    monkeypatch.setattr(datastore, "_divided", wrong)
    assert wrong_answers(build(tmp_path / "other", corpus(), "words", chunk=50, depth=6)) > 5


def test_places_of_one_context_are_sorted_in_parts_too(tmp_path):
    whole = np.asarray([*[1] * 300, 2, *[1] * 300, 3, -1], np.int32)
    pieces = list(datastore._sorted(whole, None, tmp_path / "part", 0, 20, 8))
    assert max(map(len, pieces)) <= 20 and not [*tmp_path.iterdir()]
    padded = [-1] * 8 + whole.tolist()
    keys = [tuple(padded[p + 8 : p : -1]) for p in np.concatenate(pieces).tolist()]
    assert keys == sorted(keys) and len(keys) == len(whole)


def test_what_follows_a_place_ends_with_its_text(store):
    whole = np.concatenate([np.append(text, -1) for text in corpus()])
    ends = np.flatnonzero(whole == -1)
    for place in (0, int(ends[0]) - 1, int(ends[2]) - 3, len(whole) - 2):
        (around,) = store.texts_around(np.asarray([place]), 4, 8)
        begin = max(place - 3, int(max([0, *(ends[ends < place] + 1)])))
        end = min(place + 9, int(ends[ends > place][0]))
        assert around.tolist() == whole[begin:end].tolist()


def test_tokens_whose_bytes_look_like_an_end_are_none(tmp_path):
    texts = [[7, 65535], [255, 65535, 3], [65535, 255]]
    found = build(tmp_path / "bytes", texts, "words").texts_around(np.asarray([4, 3, 0, 8]), 4, 4)
    assert [around.tolist() for around in found] == [texts[1], texts[1], texts[0], texts[2]]


def test_the_order_of_the_disk_is_that_of_the_device():
    tokens = np.concatenate([np.append(text, -1) for text in corpus(4)]).astype(np.int32)
    table = retrieval.table_of(corpus(4), 256, CHAIN)
    order = np.asarray(table.index.order[0, : len(tokens)])
    padded = [-1] * CHAIN.longest + tokens.tolist()
    keys = [tuple(padded[p + CHAIN.longest : p : -1]) for p in order.tolist()]
    assert keys == sorted(keys) and sorted(order.tolist()) == list(range(len(tokens)))
    end = np.asarray([corpus(4)[1][: -CHAIN.longest - 1 : -1]], np.int32)
    every = len(tokens)
    _, matched = context_index.nearest(table.index, table.tokens, end, table.length, every)
    wanted = scanned(tokens.tolist(), end[0, ::-1].tolist(), every, CHAIN.longest)
    assert matched[0].tolist()[: len(wanted)] == [size for size, _ in wanted]
    assert int(jit_shared(CHAIN, table, end).count[0]) > 0
    few = retrieval.table_of(corpus(4), 64, CHAIN)
    assert int(few.length[0]) <= 64


def test_drafts_from_a_datastore_leave_the_text_as_it_is(lm, tmp_path):
    plain = specjax.generate(lm, PROMPT, drafter="none", max_new_tokens=NUM)
    ids = np.concatenate([plain.prompts[0], plain.tokens[0]])
    build(tmp_path / "own", [[5, 6, 7], ids], fingerprint(lm))
    build(tmp_path / "other", [ids[::-1]], fingerprint(lm))
    rounds = {}
    for name in ("own", "other"):
        asked = Retrieval(lm, tmp_path / name)
        out = specjax.generate(lm, PROMPT, drafter=asked, max_new_tokens=NUM)
        assert out.text == plain.text
        rounds[name] = int(out.stats.rounds.sum())
    assert rounds["own"] < 0.5 * NUM and rounds["own"] < rounds["other"]
    served = specjax.serve_offline(lm, [PROMPT] * 3, drafter=asked, batch=2, max_new_tokens=NUM)
    assert served.texts == [plain.text] * 3
    # a session beside it holds what the datastore does not
    both = Retrieval(lm, tmp_path / "other", session=Session(lm, retrieval.USUAL, 512))
    again = []
    for _ in range(2):
        out = specjax.generate(lm, PROMPT, drafter=both, max_new_tokens=NUM)
        again.append(int(out.stats.rounds.sum()))
        assert out.text == plain.text
    assert again[0] == rounds["other"] and again[1] < 0.6 * again[0]
    both.save(tmp_path / "answers")
    assert Session.load(lm, tmp_path / "answers").num_tokens == both.session.num_tokens > NUM
    with pytest.raises(ValueError, match="no session"):
        asked.save(tmp_path / "nothing")


def test_a_table_grows_where_more_rows_find_more_than_it_holds(lm, tmp_path):
    rows = np.arange(40)
    build(tmp_path / "many", [np.tile(np.arange(20) + 30 * r, 40) for r in rows], fingerprint(lm))
    asked = Retrieval(lm, tmp_path / "many", rows=2)
    small = asked.capacity
    asked.ask([np.arange(10) + 30 * r for r in rows[:2]])
    assert asked.capacity == small
    asked.ask([np.arange(10) + 30 * r for r in rows])
    assert np.isin(30 * rows + 12, asked.table.tokens).all()
    grown = asked.capacity
    asked.ask([np.arange(10)])
    assert asked.capacity == grown > small  # nothing is compiled once more
    for wrong in (0, 2.0, "8", 10**9):
        with pytest.raises(ValueError, match=f"rows={wrong!r}: give a whole number from 1"):
            Retrieval(lm, tmp_path / "many", rows=wrong)
    with pytest.raises(TypeError, match="drafter='suffix': give an object"):
        Retrieval(lm, tmp_path / "many", "suffix")


def test_runs_that_are_timed_search_the_datastore(lm, tmp_path, monkeypatch):
    plain = specjax.generate(lm, PROMPT, drafter="none", max_new_tokens=NUM)
    build(tmp_path / "own", [np.concatenate([plain.prompts[0], plain.tokens[0]])], fingerprint(lm))
    asked, searches, ask = Retrieval(lm, tmp_path / "own"), [], Retrieval.ask
    monkeypatch.setattr(Retrieval, "ask", lambda *given: searches.append(ask(*given)))
    specjax.compare(lm, PROMPT, drafter=asked, max_new_tokens=NUM, repetitions=6)
    assert len(searches) >= 8  # of the text, of a run that does not count, and of six runs
    session = Retrieval(lm, tmp_path / "own", session=Session(lm, retrieval.USUAL, 512))
    with pytest.raises(ValueError, match="this Retrieval has a session, which learns the answer"):
        specjax.compare(lm, PROMPT, drafter=session, max_new_tokens=NUM)


def test_the_command_builds_a_datastore_and_drafts_from_it(tmp_path, capsys):
    (tmp_path / "a.py").write_text("def area(r):\n    return 3.14 * r * r\n")
    (tmp_path / "b.jsonl").write_text('"one"\n\n{"text": "two"}\n')
    files = [str(tmp_path / name) for name in ("a.py", "b.jsonl")]
    folder = str(tmp_path / "store")
    assert command(["datastore", "build", *files, "-o", folder]) == 0
    assert "tokens, of which one ends each text" in capsys.readouterr().out
    call = ["generate", PROMPT, "--max-new-tokens", "8", "--json"]
    said = []
    kept = tmp_path / "answers"
    both = ["--datastore", folder, "--session", str(kept), "--session-tokens", "512"]
    for more in (both, ["--drafter", "none"]):
        assert command([*call, *more]) == 0
        said.append(json.loads(capsys.readouterr().out)["text"])
    assert said[0] == said[1] and kept.exists()
    assert command(["datastore", "build", *files, "-o", folder]) == 2
    assert "is there already" in capsys.readouterr().err
    (tmp_path / "c.jsonl").write_text("3\n")
    assert command(["datastore", "build", str(tmp_path / "c.jsonl"), "-o", folder + "2"]) == 2
    assert "line 1" in capsys.readouterr().err
    (tmp_path / "d.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "e.py").write_bytes(b"x = '\xff'")
    (tmp_path / "f.py").write_text("")
    for name, words in (
        ("d.jsonl", "d.jsonl, line 1"),
        ("e.py", "byte 5 is not UTF-8; name files of texts"),
        ("f.py", "no texts"),
    ):
        assert command(["datastore", "build", str(tmp_path / name), "-o", folder + "2"]) == 2
        assert words in capsys.readouterr().err
    assert command(["datastore", "build", *files, "-o", f"{files[0]}/store2"]) == 2
    assert "take another place" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".", "store2"))]


def test_what_is_no_datastore_of_the_model_is_refused(lm, store, tmp_path):
    with pytest.raises(ValueError, match="another tokenizer"):
        Retrieval(lm, store.path)
    tokens = store.path / "tokens.bin"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-40])
    with pytest.raises(ValueError, match="cut short"):
        store.texts_around(np.asarray([store.num_tokens - 2]), 4, 8)
    tokens.write_bytes(whole)
    with pytest.raises(FileNotFoundError, match="datastore build"):
        Datastore(tmp_path / "nothing")
    with pytest.raises(FileExistsError):
        build(store.path, corpus(), "words")
    with pytest.raises(FileNotFoundError, match="datastore build"):
        Datastore(store.path / "meta.json")  # a file, not a folder
    for texts, words in (([], "no texts"), ([[]], "no texts"), ([[-3]], "ids are")):
        with pytest.raises(ValueError, match=words):
            build(tmp_path / "empty", texts, "words")
    meta = store.path / "meta.json"
    held = json.loads(meta.read_text())
    for wrong, words in (
        (held | {"version": 9}, "its version is 9, this installation reads 2; build .* again"),
        ({"version": 9}, "its version is 9"),
        ({"version": 2}, "it has no 'num_tokens'; build the datastore again with specjax"),
        ([2], "is not that of a datastore"),
    ):
        meta.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=words):
            Datastore(store.path)
    meta.write_text(json.dumps(held))
    order = store.path / "order.bin"
    right = order.read_bytes()
    order.write_bytes(b"\xff" * len(right))
    with pytest.raises(ValueError, match="order.bin names the place"):
        Datastore(store.path).search([1, 2], 4)
    order.write_bytes(right)
    order.write_bytes(order.read_bytes()[:-4])
    with pytest.raises(ValueError, match="truncated"):
        Datastore(store.path)
    meta.write_text("{")
    with pytest.raises(ValueError, match="build it again"):
        Datastore(store.path)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]  # nothing half-written


def test_places_are_packed_as_they_are_compared():
    tokens = np.asarray([2**21 - 3, 0, -1, 5, 0, -1, 7, 0], np.int32)
    for depth in (1, 2, 3, 5):
        order = datastore.sorted_places(tokens, depth)
        padded = [-1] * depth + tokens.tolist()
        keys = [tuple(padded[p + depth : p : -1]) for p in order.tolist()]
        assert keys == sorted(keys)
