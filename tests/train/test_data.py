"""The corpus is what the manifest says; the stream of batches is the same at every run."""

import dataclasses
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tokenizers
from specjax.train import (
    chunks,
    corpora,
    corpus,
    data,
    decoding,
    model,
    pairs,
    pretrain,
    prompts,
    samples,
    tokenizer,
)
from specjax.train.config import ConfigError, DataConfig
from specjax.train.samples import Samples

from specjax.models.model_folder import EMBEDDED

END = 0


@pytest.fixture
def library(tmp_path):
    """A tiny standard library and its manifest, all of it for training."""
    files = {"a.py": "import b\n", "pkg/b.py": "def f():\n    pass\n", "test/skipped.py": "x\n"}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    manifest = corpus.make_manifest(tmp_path)
    for entry in manifest["files"]:
        entry["split"] = "train"
    return tmp_path, manifest


def test_the_manifest_records_hashes_and_leaves_tests_out(library):
    _, manifest = library
    assert [entry["path"] for entry in manifest["files"]] == ["a.py", "pkg/b.py"]
    first = manifest["files"][0]
    assert first["sha256"] == hashlib.sha256(b"import b\n").hexdigest() and first["bytes"] == 9


def test_documents_come_in_the_order_of_the_manifest(library):
    root, manifest = library
    found = corpus.stdlib_documents("train", manifest=manifest, root=root)
    assert found == [("a.py", "import b\n"), ("pkg/b.py", "def f():\n    pass\n")]


def test_a_changed_or_missing_file_is_refused_unless_asked_for(library):
    root, manifest = library
    (root / "a.py").write_text("import c\n")
    with pytest.raises(ConfigError, match="1 files .* differ .*a.py.*data.strict=false"):
        corpus.stdlib_documents("train", manifest=manifest, root=root)
    loose = corpus.stdlib_documents("train", strict=False, manifest=manifest, root=root)
    assert loose[0] == ("a.py", "import c\n")
    (root / "pkg" / "b.py").unlink()
    with pytest.raises(ConfigError, match="2 files"):
        corpus.stdlib_documents("train", manifest=manifest, root=root)


def test_the_shipped_manifest_splits_by_path_and_holds_out_about_a_thirtieth():
    files = corpus.read_manifest()["files"]
    assert all(entry["split"] == corpus.split_of(entry["path"]) for entry in files)
    heldout = sum(entry["bytes"] for entry in files if entry["split"] == "heldout")
    assert 0.02 < heldout / sum(entry["bytes"] for entry in files) < 0.06


def test_shipped_prompts_are_enough_bounded_and_from_held_out_files_alone():
    import specjax

    folder = Path(specjax.__path__[0]) / "data"
    rows = [json.loads(x) for x in (folder / "heldout_prompts.jsonl").read_text().splitlines()]
    heldout = {e["path"] for e in corpus.read_manifest()["files"] if e["split"] == "heldout"}
    assert len(rows) >= 256 and {row["source"] for row in rows} <= heldout
    encode = tokenizer.load("embedded").encode
    # cut to 24 to 160 tokens of the former embedded tokenizer, whose tokens were shorter
    assert all(16 <= len(encode(row["text"]).ids) <= 160 for row in rows)
    assert all(row["text"] == row["text"].rstrip() for row in rows)


def test_prompts_begin_where_code_begins_and_never_overlap():
    body = "".join(f"    x{i} = compute(x{i}, {i})\n" for i in range(20))
    text = "".join(f"def f{i}(x):\n{body}\n\n" for i in range(10))
    settings = prompts.PromptsConfig(shortest=24, longest=60, rest=8)
    found = prompts.cut(text, lambda t: len(t.split()), np.random.default_rng(0), settings)
    assert len(found) > 3 and all(text.count(prompt) == 1 for prompt in found)
    ends = [text.index(prompt) + len(prompt) for prompt in found]
    assert all(text.index(b) >= end for b, end in zip(found[1:], ends[:-1], strict=True))
    assert all(prompt.startswith("def f") for prompt in found)


def test_packing_begins_each_document_and_ends_the_last_with_end_of_text():
    np.testing.assert_array_equal(data.pack([[5, 6], [7]], END), [0, 5, 6, 0, 7, 0])


def test_segments_change_where_a_document_begins():
    rows = np.array([[5, 6, 0, 7, 8, 0, 9]])
    np.testing.assert_array_equal(data.segments_of(rows, END), [[0, 0, 1, 1, 1, 2, 2]])


def test_a_documents_loss_depends_neither_on_its_neighbours_nor_on_its_place():
    shape = model.ModelConfig(
        hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
    )
    shape = shape.decoder(32, END)
    _, params = model.create(shape, 0)
    # as drawn, a layer hardly changes what it reads: nothing could be told from another text
    params = jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, params)
    nats = pretrain.make_nats(shape, END)
    entropy = jax.jit(lambda params, tokens: chunks.each(*nats(params, tokens))["loss"])
    rng = np.random.default_rng(0)
    own, (one, other) = rng.integers(1, 32, 6), rng.integers(1, 32, (2, 5))
    rows = [
        [0, *one, 0, *own, 0, *other],
        [0, *other, 0, *own, 0, *one],
        [0, *own, 0, *one, 0, *other],
    ]
    of_rows = entropy(params, np.asarray([[*row, 0] for row in rows], np.int32))
    of_own = [of_rows[0, 6:12], of_rows[1, 6:12], of_rows[2, :6]]
    for values in of_own[1:]:
        np.testing.assert_allclose(values, of_own[0], rtol=1e-4, atol=1e-4)
    text = [*one, 3, *own, 0, *other, 0, 0]  # the same without a border before it
    joined = entropy(params, np.asarray([text], np.int32))[0, 6:11]
    assert np.abs(joined - of_own[0][1:]).max() > 0.1


def batches(shard=(0, 1), **fields):
    config = DataConfig(**{"length": 8, "batch": 4} | fields)
    return data.training_batches(data.Stream(np.arange(1000, dtype=np.int32)), config, shard=shard)


def test_batches_are_the_same_at_every_run_and_differ_by_seed():
    first, again, other = batches(), batches(), batches(seed=1)
    for _ in range(40):
        row = next(first)
        assert row.shape == (4, 9) and row.dtype == np.int32
        assert (np.diff(row, axis=1) == 1).all()  # contiguous pieces of the stream
        np.testing.assert_array_equal(row, next(again))
    assert (next(first) != next(other)).any()


def test_the_position_restores_in_the_middle_of_a_later_epoch():
    # 123 rows an epoch, four a batch: 40 batches end within the second epoch
    iterator = batches()
    for _ in range(40):
        next(iterator)
    position = iterator.get_state()
    expected = [next(iterator) for _ in range(5)]
    fresh = batches()
    fresh.set_state(position)
    for row in expected:
        np.testing.assert_array_equal(next(fresh), row)


def test_an_epoch_visits_each_place_once_and_the_next_epoch_cuts_elsewhere():
    config = DataConfig(length=8, batch=1)
    iterator = data.training_batches(data.Stream(np.arange(8 * 12, dtype=np.int32)), config)
    first = [int(next(iterator)[0, 0]) for _ in range(10)]
    second = [int(next(iterator)[0, 0]) for _ in range(10)]
    for epoch in (first, second):
        assert sorted(start // 8 for start in epoch) == list(range(10))
    assert set(first) != set(second)


def written(tokens, stop):
    """Samples of which ``stop`` tokens a row are no filling."""
    ends = np.full(len(tokens), stop)
    return Samples(np.asarray(tokens, np.int32), 0 * ends, ends)


def test_hosts_read_disjoint_rows_that_make_up_the_batch_of_one():
    samples = [written(np.full((50, 9), -1) - np.arange(50)[:, None], 9)]
    fields = dict(batch=6, samples=("one",), samples_share=(0.5,))
    config = DataConfig(length=8, **fields)
    stream = data.Stream(np.arange(1000, dtype=np.int32))
    whole = data.training_batches(stream, config, samples)
    parts = [data.training_batches(stream, config, samples, shard=(i, 3)) for i in range(3)]
    for _ in range(50):  # some epochs of the samples
        batch, own = next(whole), [next(part) for part in parts]
        assert all(rows.shape == (2, 9) for rows in own)
        np.testing.assert_array_equal(np.stack(own, axis=1).reshape(6, 9), batch)
    position = parts[1].get_state()
    other = data.training_batches(stream, config, samples, shard=(2, 3))
    other.set_state(position)  # a position is that of all hosts
    np.testing.assert_array_equal(next(other), next(parts[2]))


def test_a_batch_that_hosts_cannot_share_is_refused():
    with pytest.raises(
        ConfigError, match="data.batch=4 cannot be shared evenly by 3 processes .or shards"
    ):
        batches(shard=(0, 3))


def test_what_rows_are_filled_up_with_does_not_count():
    samples = [written(np.full((5, 9), -1), 6)]
    config = DataConfig(length=8, batch=4, samples=("one",), samples_share=(0.5,))
    stream = data.Stream(np.arange(1000, dtype=np.int32))
    batch = next(data.training_batches(stream, config, samples))
    own = batch["tokens"][:, 0] < 0
    assert 0 < own.sum() < 4
    np.testing.assert_array_equal(batch["weight"][~own], np.ones((4 - own.sum(), 8)))
    np.testing.assert_array_equal(batch["weight"][own], [[1] * 5 + [0] * 3] * own.sum())


def test_samples_take_their_share_of_the_rows():
    samples = [written(np.full((50, 9), -1), 9), written(np.full((20, 9), -2), 9)]
    config = DataConfig(length=8, batch=4, samples=("one", "two"), samples_share=(0.5, 0.25))
    stream = data.Stream(np.arange(1000, dtype=np.int32))
    iterator = data.training_batches(stream, config, samples)
    firsts = np.concatenate([next(iterator)[:, 0] for _ in range(50)])
    assert abs(np.mean(firsts == -1) - 0.5) < 0.02
    assert abs(np.mean(firsts == -2) - 0.25) < 0.02


def test_a_share_of_one_leaves_the_corpus_no_row():
    config = DataConfig(length=8, batch=4, samples=("one",), samples_share=(1.0,))
    stream = data.Stream(np.arange(1000, dtype=np.int32))
    iterator = data.training_batches(stream, config, [written(np.full((50, 9), -1), 9)])
    assert all((next(iterator) == -1).all() for _ in range(50))


def test_seeds_of_all_sources_follow_that_of_the_corpus_past_the_greatest():
    stream = data.Stream(np.arange(1000, dtype=np.int32))
    stream = dataclasses.replace(stream, mixed=(stream,))
    shares = dict(samples=("one",), mixed=("two",), length=8, batch=4)
    own = [written(np.full((50, 9), -1), 9)]
    config = DataConfig(seed=2**32 - 1, **shares)
    assert next(data.training_batches(stream, config, own)).shape == (4, 9)


def test_samples_of_another_length_are_refused():
    with pytest.raises(ConfigError, match=r"shape \(5, 4\), data.length=8 needs"):
        own = written(np.zeros((5, 4)), 4)
        data.training_batches(data.Stream(np.arange(99)), DataConfig(length=8), [own])


def test_a_corpus_too_small_for_a_row_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text("x = 1\n")
    split = corpus.split_of("one.txt")
    with pytest.raises(ConfigError, match=f"data.length=256, .* of '{tmp_path}' holds"):
        data.load_stream(DataConfig(corpus=str(tmp_path)), split)
    with pytest.raises(ConfigError, match="neither 'stdlib' nor 'packages', nor a file"):
        data.load_stream(DataConfig(corpus=str(tmp_path / "nothing")), "train")


def test_what_lies_in_a_folder_heldout_is_held_out_and_nothing_else(tmp_path):
    for path in ("a.txt", "b.py/heldout.py", "heldout/c.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(path)
    for split, paths in (("train", ["a.txt", "b.py/heldout.py"]), ("heldout", ["heldout/c.txt"])):
        found = corpora.documents(str(tmp_path), split)
        assert found == [(path, path) for path in paths]
    (tmp_path / "heldout" / "c.txt").unlink()
    empty = next(s for s in ("train", "heldout") if s != corpus.split_of("a.txt"))
    (tmp_path / "b.py" / "heldout.py").unlink()
    with pytest.raises(ConfigError, match=f"no documents in the split '{empty}'.*heldout"):
        corpora.documents(str(tmp_path), empty)


def test_a_binary_file_is_refused_as_a_corpus(tmp_path):
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)) * 40)
    with pytest.raises(ConfigError, match="weights.bin.*binary file or not in UTF-8"):
        corpora.documents(str(tmp_path / "weights.bin"), "train")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 500)
    with pytest.raises(ConfigError, match="1 of 1 cannot be used.*latin.txt"):
        corpora.documents(str(tmp_path), "train")
    (tmp_path / "latin.txt").write_bytes("une tasse de café\n".encode("latin-1") * 500)
    assert corpora.documents(str(tmp_path / "latin.txt"), "train")


def test_documents_are_parted_by_the_token_that_a_models_own_tokenizer_names(tmp_path):
    words = {"x": 0, "</s>": 1, "y": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="x"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder, texts = tmp_path / "model", tmp_path / "texts"
    folder.mkdir()
    for split in ("train", "heldout"):
        (texts / split).mkdir(parents=True)
        (texts / split / "one.txt").write_text("y x " * 20)
    config = DataConfig(corpus=str(texts), tokenizer=str(folder), length=8)
    with pytest.raises(ConfigError, match="a tokenizer.json, or a model that has one"):
        data.load_stream(config, "train")
    made.enable_truncation(3)
    made.enable_padding(length=64)  # texts to learn from are read whole
    made.save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match="nothing to part documents with"):
        data.load_stream(config, "train")
    for eos in ("</s>", {"content": "</s>"}):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        stream, end = data.load_stream(config, "train")
        assert end == 1 and list(stream.tokens) == [1] + [2, 0] * 20 + [1]
    with pytest.raises(ConfigError, match="data.tokenizer='/nowhere/else'.*neither a folder"):
        tokenizer.load("/nowhere/else")


def test_only_generated_tokens_count_in_a_measure_on_samples():
    samples = Samples(
        tokens=np.zeros((2, 6), np.int32), start=np.array([2, 4]), stop=np.array([5, 6])
    )
    [(tokens, weight)] = samples.batches(2)
    # weight[t] belongs to the prediction of token t + 1
    np.testing.assert_array_equal(weight, [[0, 1, 1, 1, 0], [0, 0, 0, 1, 1]])


@pytest.mark.parametrize("size", [2, 4])
def test_every_row_is_measured_once_whatever_the_batch(size):
    numbered = np.arange(3, dtype=np.int32)
    tokens = np.repeat(numbered[:, None], 5, 1)
    samples = Samples(tokens, start=np.full(3, 1), stop=np.full(3, 4))
    batches = samples.batches(size)
    assert {own.shape[0] for batch in batches for own in batch} == {size}
    counted = sum(np.bincount(t[:, 0], w.sum(1), minlength=3) for t, w in batches)
    np.testing.assert_array_equal(counted, [3, 3, 3])


def test_rows_to_measure_on_have_the_length_of_those_to_train_on(tmp_path):
    held = Samples(np.zeros((3, 10), np.int32), start=np.full(3, 1), stop=np.full(3, 4))
    samples.write(tmp_path / "greedy.npz", held, {})
    given = [str(tmp_path / "greedy.npz")], {}, 8
    sets = samples.heldout_batches(*given, DataConfig(length=9, batch=2))
    assert [len(batches) for batches in sets.values()] == [2] and list(sets) == ["greedy/"]
    with pytest.raises(ConfigError, match=r"eval_samples: .*/greedy.npz' holds rows of 9 tokens"):
        samples.heldout_batches(*given, DataConfig(length=8, batch=2))


def test_prompts_for_the_target_never_cross_documents():
    stream = np.array([0, 5, 6, 7, 0, 8, 9, 0], np.int32)
    np.testing.assert_array_equal(data.whole_windows(stream, 3, END), [0, 1, 4])
    with pytest.raises(ConfigError, match="no document holds 5 tokens"):
        data.whole_windows(stream, 5, END)


def test_held_out_prompts_that_cannot_be_decoded_are_refused_before_training(tmp_path):
    texts, lm = ["a\u2028b\x85c", "", 7], SimpleNamespace(name="it", max_positions=12)
    lm.tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
    stream, file = data.Stream(np.arange(1, 99, dtype=np.int32)), tmp_path / "asked.jsonl"

    def sets(count, **given):
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts[:count]]
        file.write_text("\ufeff" + "\n\n".join(lines), "utf-8", "surrogateescape")
        usual = dict(num_prompts=1, batch=1, prompt_tokens=8, new_tokens=4, files=(str(file),))
        asked = decoding.DecodingConfig(**usual | given)
        return decoding.prompt_sets(lm, stream, asked, END)

    assert bytes(sets(1)["asked/"][0][0].tolist()) == texts[0].encode()
    with pytest.raises(ConfigError, match="new_tokens=5: .* 13 tokens a prompt, and it reads up"):
        sets(1, new_tokens=5)
    for count, shown in ((2, '""'), (3, "7")):
        texts[1] = texts[count - 1]
        with pytest.raises(ConfigError, match=f'asked.jsonl.* has a line with "text": {shown};'):
            sets(count)
    texts[0] = "\udcff"
    with pytest.raises(ConfigError, match="no file of prompts.* it is not UTF-8 text"):
        sets(1)


def test_a_line_of_sources_ends_at_the_end_of_its_line_alone(tmp_path):
    file, tokenizer = tmp_path / "sources.txt", SimpleNamespace(encode=lambda text: [len(text)])
    asked = SimpleNamespace(sources=str(file), start_ids=(), teacher="t5")
    file.write_bytes("\ufeffA\u2028B\x85C\r\n \nDE\n".encode())
    lm = SimpleNamespace(tokenizer=tokenizer)
    assert pairs._texts(asked, lm)[0] == [{"prompt": [5]}, {"prompt": [2]}]
    file.write_bytes(b"A\xff\n")
    with pytest.raises(ConfigError, match="sources=.*it is not UTF-8 text; give a file"):
        pairs._texts(asked, lm)


def test_the_tokenizer_gives_back_every_byte_and_keeps_colons_and_newlines_apart():
    made = tokenizer.train(["def f(x):\n        return x + 10\n"] * 3, 320)
    text = "def g(y):\n\n\t  return 'döc' + \"\x00\"\n"
    assert made.decode(made.encode(text).ids) == text
    shipped = tokenizer.load("embedded")
    shape = json.loads((EMBEDDED["embedded"] / "config.json").read_text())
    assert shipped.get_vocab_size() == shape["vocab_size"]
    assert shipped.encode("def f(x):\n        return").tokens[-4:] == [
        "):",
        "Ċ",
        "ĠĠĠĠĠĠĠ",
        "Ġreturn",
    ]
