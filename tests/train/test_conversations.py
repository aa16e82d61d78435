"""Chats: read in both shapes, only the assistant's tokens count, and what is broken is counted."""

import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chats import PLAIN, TALK, backend, write
from specjax.train import conversations, corpora, data, export, model, sources, talks, tokenizer
from specjax.train.config import ConfigError, DataConfig

from specjax.models.hf import abstract
from specjax.models.tokenizer import TransformersTokenizer

MARKED = (
    "{% for m in messages %}<s>{{ m.role }} {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
FORGETFUL = (  # what the assistant said is spelled otherwise once others follow
    "{% for m in messages %}<s>{{ m.role }} {% if m.role == 'assistant' and loop.last %}a {% endif "
    "%}{{ m.content }}{% if not nothing %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
# <s> system a </s> | <s> user b c </s> | <s> assistant d e f </s> | <s> user a </s> | ...
IDS = [1, 3, 6, 2, 1, 4, 7, 8, 2, 1, 5, 9, 10, 11, 2, 1, 4, 6, 2, 1, 5, 12, 2]
COUNTS = [0] * 11 + [1] * 4 + [0] * 6 + [1] * 2


def encode(messages, template, eos="</s>"):
    ids, counts = conversations.encode(TransformersTokenizer(backend(template, eos)), messages)
    return ids, [int(count) for count in counts]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_of_a_conversation_the_assistants_words_and_their_end_count(template):
    assert encode(TALK, template) == (IDS, COUNTS)


def test_without_a_token_that_ends_a_turn_all_of_the_turn_counts():
    ids, counts = encode(TALK, PLAIN.replace("</s>", " ! "), eos="<|endoftext|>")
    assert counts == [int(i in (9, 10, 11, 12)) or int(n in (14, 22)) for n, i in enumerate(ids)]


def test_a_turn_ends_with_any_token_that_the_generation_config_names(tmp_path):
    backend(PLAIN.replace("</s>", "</s> h "), eos="<|endoftext|>").save_pretrained(tmp_path)
    for ends in ([0, 2], 2):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        ids, counts = conversations.encode(tokenizer.load_chat(str(tmp_path)), TALK)
        assert [i for i, own in zip(ids, counts, strict=True) if own] == [9, 10, 11, 2, 12, 2]


@pytest.mark.parametrize(
    "dated",
    [
        "{{ 'a' if strftime_now('%d %b %Y') == '01 Jan 2025' else 'b' }} ",
        "{{ 'a' if strftime_now('%_d|%^a|%02d|%Ey') == ' 1|WED|01|25' else 'b' }} ",
        "{{ 'a' if strftime_now('%Y' ~ '-%m') == '2025-01' else 'b' }} ",
        "{{ 'a' if strftime_now('%d' if messages else '%d %B') == '01' else 'b' }} ",
        "{{ 'a' if strftime_now('%d'|upper) ~ ('x') == '01/01/25x' else 'b' }} ",
        "{{ 'a' if strftime_now('%d\\n%B') == '01\\nJanuary' else 'b' }} ",
        "{% set form = '%_d|%^a|%Ey' %}{{ 'a' if strftime_now(form) == ' 1|WED|25' else 'b' }} ",
        "{% set form = '%-d.%m.%y %%d' %}\n"  # a format that stands in a variable
        "  {% if strftime_now is defined %}{% set today = strftime_now %}{% endif %}"
        "{% macro day() %}{{ today(form) }}{% endmacro %}"
        "{{ 'a' if day() == '1.01.25 %d' and strftime_now(format=form) == day() else 'b' }} ",
    ],
)
def test_the_date_that_a_template_prints_is_the_same_on_any_day(dated):
    assert encode(TALK, dated + PLAIN)[0] == [6, *IDS]
    assert encode(TALK, dated + MARKED)[0] == [6, *IDS]
    teacher = types.SimpleNamespace(tokenizer=TransformersTokenizer(backend(dated + PLAIN)))
    config = types.SimpleNamespace(new_tokens=4, data=DataConfig(length=24))
    asked = talks.Talk("one", 0.0, 0, list(TALK[:2]))
    [(_, prompt)] = talks.turn_prompts(config, teacher, [asked], 0)
    assert prompt["prompt"] == [6, *IDS[:10], 5]


def test_an_exported_target_keeps_the_settings_and_the_template_of_its_tokenizer(tmp_path):
    own, folder = tmp_path / "own", tmp_path / "model"
    backend(PLAIN).save_pretrained(own)
    sizes = dict(hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1)
    shape = model.ModelConfig(**sizes, head_dim=8).decoder(14, 2)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), abstract(shape)[1])
    vocabulary = tokenizer.load(str(own))
    export.export(shape, params, folder, vocabulary, source=str(own))
    assert tokenizer.load_chat(str(folder)).chat(TALK[:2]) == [*IDS[:10], 5]
    settings = [
        json.loads((place / "tokenizer_config.json").read_text()) for place in (own, folder)
    ]
    assert settings[0] == settings[1]
    for name in tokenizer.SETTINGS:
        (own / name).unlink(missing_ok=True)
    export.export(shape, params, tmp_path / "bare", vocabulary, source=str(own))
    settings = json.loads((tmp_path / "bare" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "</s>" and "model_max_length" not in settings


def test_turns_that_are_spelled_anew_count_to_their_end_or_are_refused():
    ids, counts = encode(TALK, FORGETFUL)
    assert ids[:19] == IDS[:19] and counts[:19] == COUNTS[:19]
    assert (ids[19:], counts[19:]) == ([1, 5, 6, 12, 2], [0, 0, 1, 1, 1])
    with pytest.raises(ValueError, match="spells a turn differently if other turns follow"):
        encode(TALK, FORGETFUL.replace("not nothing", "nothing"))


def test_an_answer_that_was_cut_has_no_end_to_learn():
    cut = [*TALK[:-1], TALK[-1] | {"cut": True}]
    for template in (PLAIN, MARKED):
        assert encode(cut, template) == (IDS[:-1], COUNTS[:-1])


def test_both_shapes_of_a_chat_are_one():
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    shared = [{"from": names[m["role"]], "value": m["content"]} for m in TALK]
    assert sources.record({"conversations": shared}) == TALK
    assert sources.record({"messages": TALK, "text": "x"}) == TALK == sources.record(TALK)
    assert sources.record({"text": "a b"}) == "a b" == sources.record("a b")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            TALK[1:2] * 2,
            "roles do not alternate: message 2 has the role 'user'; expected: 'assistant'",
        ),
        (TALK[2:], "roles do not alternate: message 1 has the role 'assistant'; expected: 'user'"),
        ([*TALK[1:3], TALK[0]], "message 3 has the role 'system'; expected: 'user'"),
        ([{"role": "tool", "content": "x"}], "message 1 has the role 'tool'; known: system, user"),
        ([{"role": "user", "content": " "}], "message 1, of the role 'user', has no text"),
        (["x"], "message 1 is 'x'; give an object with role"),
        (TALK[:1], "it has no message of a user"),
        (7, "7 is neither a text nor a list of messages"),
    ],
)
def test_what_is_no_conversation_is_refused_with_the_reason(messages, reason):
    with pytest.raises(ValueError, match=reason):
        sources.record({"messages": messages})


def test_broken_and_empty_lines_are_counted_and_named_and_too_many_refused(tmp_path, capsys):
    lines = [{"text": f"line {i}"} for i in range(20)]
    lines[2:2] = ["", "{", {"text": "  "}, {"other": 1}]
    file = write(tmp_path / "some.jsonl", lines)
    found = [d for split in ("train", "heldout") for d in sources.read(file, split, 0.2)]
    assert sorted(text for _, text in found) == sorted(f"line {i}" for i in range(20))
    assert capsys.readouterr().out.splitlines() == [
        "some.jsonl: 4 of 24 cannot be used, the first is line 3: it is empty; they are left out"
    ]
    with pytest.raises(ConfigError, match=r"4 of 24 .*data.broken_share=0.16.*broken_share=0.1667"):
        sources.read(file, "train", 0.16)
    assert sources.read(file, "train", 0.1667)


def test_documents_come_from_files_lists_folders_and_the_hub(tmp_path, monkeypatch):
    texts = [{"text": f"t{i}"} for i in range(200)]
    names = {f"all.jsonl:{i + 1}" for i in range(200)}
    file = write(tmp_path / "all.jsonl", texts)
    train, heldout = (dict(sources.read(file, split, 0)) for split in ("train", "heldout"))
    assert train.keys() | heldout.keys() == names and not train.keys() & heldout.keys()
    assert 0 < len(heldout) < 20 and train["all.jsonl:1"] == "t0"

    (tmp_path / "all.json").write_text(json.dumps(texts))
    assert len(sources.read(str(tmp_path / "all.json"), "train", 0)) > 180
    (tmp_path / "all.txt").write_text("".join(f"{i}\n" for i in range(1000)))
    parts = [sources.read(str(tmp_path / "all.txt"), s, 0)[0][1] for s in ("train", "heldout")]
    assert "".join(parts) == (tmp_path / "all.txt").read_text() and 100 < len(parts[1]) < 200

    shards = [write(tmp_path / f"chats.{i}-of-2.jsonl", texts[i::2]) for i in range(2)]
    found = corpora.documents(str(tmp_path / "chats.jsonl"), "train")
    assert found == [own for shard in shards for own in sources.read(shard, "train", 0)]
    Path(shards[1]).unlink()
    with pytest.raises(ConfigError, match="run the recipe `regenerate` with shard=1 shards=2"):
        corpora.documents(str(tmp_path / "chats.jsonl"), "train")

    write(tmp_path / "folder" / "heldout" / "one.jsonl", texts[:2])
    write(tmp_path / "folder" / "two.jsonl", texts[2:7])
    folder = str(tmp_path / "folder")
    assert [len(sources.read(folder, s, 0)) for s in ("train", "heldout")] == [5, 2]

    class Rows(list):
        column_names = ["chat"]

    def load_dataset(name, split):
        assert (name, split) == ("owner/name", "test")
        return Rows({"chat": TALK[1:]} for _ in range(100))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = sources.read("hf:owner/name:test:chat", "train", 0)
    assert 80 < len(found) < 100 and found[0][1] == TALK[1:]
    with pytest.raises(ConfigError, match="no column 'talk'; it has chat"):
        sources.read("hf:owner/name:test:talk", "train", 0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'specjax\[datasets\]'"):
        sources.read("hf:owner/name", "train", 0)


@pytest.fixture
def chat(tmp_path):
    """``config(records, **fields)`` of a folder with a tokenizer with a template."""
    backend(PLAIN).save_pretrained(tmp_path / "model")

    def config(records, **fields):
        write(tmp_path / "texts" / "train.jsonl", records)
        (tmp_path / "texts" / "heldout").mkdir(exist_ok=True)
        fields = {"length": 24, "batch": 1, "broken_share": 0.5} | fields
        corpus, model = str(tmp_path / "texts"), str(tmp_path / "model")
        return DataConfig(corpus=corpus, tokenizer=model, **fields)

    return config


def test_conversations_stay_whole_and_batches_weigh_what_the_assistant_says(chat):
    short = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    config = chat([{"messages": TALK}, {"messages": short}, {"messages": short}])
    stream, end = data.load_stream(config, "train")
    ids, counts = [1, 4, 7, 2, 1, 5, 8, 2], [0] * 6 + [1] * 2
    rows = stream.tokens[:-1].reshape(-1, 24)
    assert end == 0 and rows.tolist() == [[0, *IDS], [0, *ids, 0, *ids] + [0] * 6]
    assert stream.counts[:24].tolist() == [False, *map(bool, COUNTS)]
    iterator = data.training_batches(stream, config)
    for _ in range(4):
        batch = next(iterator)
        first = batch["tokens"][0, 1:] if batch["tokens"][0, 3] == 6 else None
        expected = COUNTS if first is not None else [*counts, 0, *counts, *[0] * 6]
        np.testing.assert_array_equal(batch["weight"][0, :23], expected)
        assert batch["weight"][0, 23] == 0  # the token that begins the next row


def test_conversations_that_are_too_long_are_cut_and_counted(chat, capsys):
    long = [{"role": "user", "content": "b " * 30}, {"role": "assistant", "content": "c"}]
    stream, _ = data.load_stream(chat([{"messages": TALK}, {"messages": long}], length=16), "train")
    assert stream.tokens.tolist() == [0, *IDS[:15], 0]
    said = capsys.readouterr().out
    assert "2 of 2 conversations are longer than data.length=16" in said and "1 of them bef" in said
    with pytest.raises(ConfigError, match="in no conversation .* that early; give a greater"):
        data.load_stream(chat([{"messages": long}], length=16), "train")


def test_conversations_that_cannot_be_learned_from_are_refused(chat, tmp_path):
    asked = {"messages": TALK[:2]}
    with pytest.raises(ConfigError, match="2 of 3 cannot be used, .*the assistant says nothing"):
        data.load_stream(chat([asked, asked, {"messages": TALK}]), "train")
    with pytest.raises(ConfigError, match="1 texts and 1 conversations: give one kind"):
        data.load_stream(chat([{"text": "a"}, {"messages": TALK}]), "train")
    for token in ("</s>", "<s>"):
        config = chat([{"messages": TALK}], end_of_text=token)
        with pytest.raises(ConfigError, match=rf"{token}.* stands within .*endoftext"):
            data.load_stream(config, "train")
    with pytest.raises(ConfigError, match="data.end_of_text='x' is no token of .*<s>, </s>"):
        data.load_stream(chat([{"messages": TALK}], end_of_text="x"), "train")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template, and data.corpus holds conv"):
        data.load_stream(chat([{"messages": TALK}]), "train")
