"""The target writes the same whatever drafter, shards or interruptions; answers stay answers."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from chats import PLAIN, TALK, backend, write
from specjax.train import (
    conversations,
    corpora,
    data,
    export,
    features,
    model,
    online,
    regenerate,
    samples,
    sharded,
    sources,
    tokenizer,
)
from specjax.train.config import ConfigError, DataConfig
from specjax.train.request import REQUEST, request_of
from specjax.train.samples import read

import specjax
from specjax.serving import jsonl_output

FIELDS = ["num_rows=8", "new_tokens=12", "shortest=4", "greedy_share=0.0", "drawn_drafter=ngram"]


@pytest.fixture(scope="module")
def whole(place):
    """Rows drawn in one run, as a file."""
    root, train, teacher = place
    assert train("regenerate", *FIELDS, teacher, f"output={root / 'whole.npz'}") == 0
    return root / "whole.npz"


def assert_same(path, other):
    one, two = read(str(path)), read(str(other))
    for name in ("tokens", "start", "stop"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))


def test_shards_together_are_what_one_run_writes(place, whole):
    root, train, teacher = place
    output = f"output={root / 'parts.npz'}"
    for shard in (0, 1):
        if shard:
            with pytest.raises(ConfigError, match=r"parts.1-of-2.npz: run .* shard=1 shards=2"):
                read(str(root / "parts.npz"))
        fields = [f"shard={shard}", "shards=2", output]
        assert train("regenerate", *FIELDS, *fields, teacher) == 0
    assert_same(root / "parts.npz", whole)
    samples = read(str(whole))
    assert (samples.stop - samples.start).max() == 12 and len({*map(bytes, samples.tokens)}) > 1


def test_a_killed_run_goes_on_to_the_same_file(place, whole, monkeypatch):
    root, train, teacher = place
    fields, add, batches = (
        [*FIELDS, teacher, f"output={root / 'killed.npz'}"],
        jsonl_output.OutputFile.add,
        [],
    )

    def killed(self, lines):
        add(self, lines)
        batches.append(lines)
        if len(batches) == 2:
            raise KeyboardInterrupt  # the process is gone: nothing but the file remains

    monkeypatch.setattr(jsonl_output.OutputFile, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        train("regenerate", *fields)
    monkeypatch.undo()
    part = root / "killed.part-drawn.jsonl"
    kept = part.read_bytes()
    assert 0 < kept.count(b"\n") < 8 and not (root / "killed.npz").exists()
    part.write_bytes(kept + b'{"index": 7, "tok')  # killed while it wrote
    assert train("regenerate", *fields) == 0
    assert_same(root / "killed.npz", whole)
    assert not part.exists()


def test_shards_of_features_are_read_as_the_rows_of_one_run(place):
    root, train, teacher = place
    for shard, output in (((0, 1), "one"), ((0, 2), "two"), ((1, 2), "two")):
        fields = ["num_rows=8", f"shard={shard[0]}", f"shards={shard[1]}", teacher]
        assert train("features", *fields, f"output={root / output}") == 0
    one, two = (features.read(str(root / name), {}, 24, [1]) for name in ("one", "two"))
    assert len(one) == len(two) == 8 and (root / "two.1-of-2").is_dir()
    for n in range(8):
        np.testing.assert_array_equal(one[n]["tokens"], two[n]["tokens"])
        hidden = (rows[n]["hidden"][1].astype(np.float32) for rows in (one, two))
        # computed in batches of another size
        np.testing.assert_allclose(*hidden, rtol=1e-2, atol=1e-2)
    with pytest.raises(ConfigError, match="run the recipe `features` first.*or give features="):
        features.read(str(root / "three"), {}, 24, [1])


def test_a_drafter_changes_no_greedy_row(place):
    root, train, teacher = place
    for drafter in ("plain", "ngram"):
        fields = [*FIELDS[:3], "greedy_share=1.0", f"drafter={drafter}", teacher]
        assert train("regenerate", *fields, f"output={root / drafter}.npz") == 0
    assert_same(root / "plain.npz", root / "ngram.npz")


@pytest.mark.parametrize("recipe", ["regenerate", "heads", "features"])
def test_a_tokenizer_unlike_the_targets_is_refused(place, recipe, tmp_path, capsys):
    root, train, teacher = place
    other = tokenizer.train(["a b c"], 320)
    tokenizer.save(other, tmp_path)
    output = [] if recipe == "heads" else ["num_rows=8", f"output={root / 'not.npz'}"]
    fields = FIELDS[1:3] if recipe == "regenerate" else []
    assert train(recipe, *fields, *output, teacher, f"data.tokenizer={tmp_path}") == 2
    assert "has another tokenizer than data.tokenizer" in capsys.readouterr().err
    assert not (root / "not.npz").exists()


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("shard=2 shards=2", "shard from 0 to shards - 1"),
        ("num_rows=1 shards=2", "accepted: at least 2"),
        ("greedy_share=-1", "greedy_share=-1.0; accepted: 0 to 1"),
        ("temperature=-3", "temperature=-3.0; accepted: at least 0"),
        ("temperature=nan", "temperature=nan; accepted: at least 0"),
        ("shortest=0", "shortest=0; accepted: at least 1"),
        ("num_draft=-1", "num_draft=-1; accepted: at least 0"),
        ("split=test", "split='test'; accepted: train or heldout"),
        ("drawn_drafter=nothing", "drafter='nothing' is unknown"),
        ("output=x.jsonl", "what comes of texts is a .npz file"),
    ],
)
def test_what_cannot_be_regenerated_is_refused_with_the_way_out(place, field, words, capsys):
    _, train, teacher = place
    assert train("regenerate", *FIELDS, teacher, *field.split()) == 2
    assert words in capsys.readouterr().err


def test_texts_and_chats_at_once_are_refused_and_chats_alone_are_text_to_who_learns_no_roles(
    place, tmp_path, capsys
):
    _, train, teacher = place
    (tmp_path / "heldout").mkdir()
    write(tmp_path / "b.jsonl", [{"messages": TALK}])
    assert online.documents(str(tmp_path), "train")[0][1].startswith(TALK[0]["content"])
    (tmp_path / "a.txt").write_text("x = f(y)\n" * 20)
    assert train("regenerate", *FIELDS, teacher, f"data.corpus={tmp_path}") == 2
    assert "1 texts and 1 conversations: give one kind at a time" in capsys.readouterr().err


@pytest.fixture
def chat(tmp_path):
    """A target with a chat template, and ``config(talks, **fields)``."""
    made = backend(PLAIN)
    shape = model.ModelConfig(
        hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
    )
    shape = shape.decoder(len(made), 2)
    _, params = model.create(shape, 41)  # drawn so that some answers end and one does not
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, params)
    folder = tmp_path / "model"
    export.export(shape, params, folder, made.backend_tokenizer, with_tokenizer=False)
    made.save_pretrained(folder)

    def config(talks, **fields):
        texts = tmp_path / "texts.jsonl"
        write(texts, [{"messages": talk} for talk in talks])
        sections = dict(
            data=DataConfig(corpus=str(texts), tokenizer=str(folder), length=48, batch=4)
        )
        fields = dict(teacher=str(folder), new_tokens=6, shortest=1, greedy_share=1.0) | fields
        return regenerate.Config(output=str(tmp_path / "out.jsonl"), **sections, **fields)

    return config


def test_every_answer_is_the_targets_after_its_own_earlier_answers(chat, tmp_path, capsys):
    asked = [TALK, TALK[1:3], [{"role": "user", "content": "a b a b " * 12}]]
    settings = chat(asked, split="train")
    regenerate.run(settings)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [[m.get("cut") for m in line["messages"][1:]] for line in lines] == [[None] * 4, [True]]
    lm = specjax.load(settings.teacher)
    assert [line["source"] for line in lines] == [
        "texts.jsonl:1",
        "texts.jsonl:2",
    ]  # one is too long
    for line in lines:
        talk = line["messages"]
        assert sources.record(line) == talk
        for n, message in enumerate(talk):
            if message["role"] != "assistant":
                assert message in TALK
                continue
            ids = lm.chat(talk[:n])
            said = specjax.generate(lm, ids, drafter="plain", max_new_tokens=6)
            assert said.texts == [message["content"]]
            ended = said.tokens[0][-1] == 2
            assert message.get("cut", False) != ended
            # what is learned of it is what was generated
            own = lm.tokenizer, talk[: n + 1]
            found, counts = conversations.encode(*own)
            assert [
                i for i, c in zip(found[len(ids) :], counts[len(ids) :], strict=True) if c
            ] == list(said.tokens[0])
    assert "2 of 3 conversations have an answer, 1 end in a cut one" in capsys.readouterr().out
    regenerate.run(settings)
    assert "out.jsonl is there already" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="new_tokens: 6 -> 5"):
        regenerate.run(dataclasses.replace(settings, new_tokens=5))
    again = DataConfig(corpus=str(tmp_path / "out.jsonl"), tokenizer=settings.teacher, length=48)
    stream, _ = data.load_stream(again, "train")
    assert stream.counts.sum() > 2 and corpora.texts(again, "train")


def test_rows_of_another_target_or_tokenizer_are_refused_by_name(place, whole, tmp_path, capsys):
    root, train, teacher = place
    lm = specjax.load(teacher.partition("=")[2])
    of = samples.fingerprints(lm, tokenizer.load("embedded"))
    assert len(read(str(whole), of).tokens) == 8
    for name in of:
        message = f"of another {name.replace('_', ' ')}.*target '{teacher.partition('=')[2]}'.*run"
        with pytest.raises(ConfigError, match=message):
            read(str(whole), of | {name: "another"})
    # what was written before files said so is read, and whoever reads it is warned
    with np.load(whole) as arrays:
        assert json.loads(str(arrays[samples.RECORD]))["temperature"] == 1.0
        bare = {name: arrays[name] for name in arrays if name != samples.RECORD}
    np.savez(tmp_path / "old.npz", **bare)
    assert_same(tmp_path / "old.npz", whole)
    read(str(tmp_path / "old.npz"), of)
    assert "does not say which target wrote it" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["rows.npz", "chats.jsonl"])
def test_a_finished_file_is_not_taken_for_another_request(tmp_path, name, capsys):
    path = tmp_path / name
    asked = regenerate.Config(output=str(path))
    request = {REQUEST: request_of(asked, regenerate.UNASKED)}
    del request[samples.REQUEST]["greedy_share"]  # as if it had not existed then

    def put(record):
        if name == "rows.npz":
            own = samples.Samples(*np.zeros((3, 1, 1), np.int32))
            return samples.write(path, own, record)
        path.touch()
        return regenerate.record_file(path).write_text(json.dumps(record))

    put(request)
    regenerate.run(dataclasses.replace(asked, drafter="plain", num_draft=3))
    assert capsys.readouterr().out == f"{path} is there already\n"
    with pytest.raises(ConfigError, match=r"temperature: 1.0 -> 0.5\ngive another output, or remo"):
        regenerate.run(dataclasses.replace(asked, temperature=0.5))
    put({})  # by an earlier version
    regenerate.run(asked)
    said = capsys.readouterr().out.splitlines()
    assert "does not say what was asked for" in said[0] and "is there already" in said[1]


def test_shards_written_with_different_settings_are_refused(place, whole, tmp_path):
    own = read(str(whole))
    for shard in range(2):
        path = sharded.shard_of(tmp_path / "rows.npz", shard, 2)
        samples.write(path, own, {"temperature": float(shard)})
    with pytest.raises(ConfigError, match="shards of .* different settings"):
        read(str(tmp_path / "rows.npz"))
