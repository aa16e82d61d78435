"""SpecDec learns from what its target writes, loads back, and drafts as it was taught."""

import dataclasses
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.train import chunks, config, evaluate, pairs, report, specdec
from specjax.train.cli import main
from specjax.train.step import make_keys

import specjax
from specjax.serving import offline
from specjax.serving.scheduler import Row
from specjax.types import Context, Draft

sys.path.append(str(Path(__file__).parents[1] / "models"))
from encoder_decoders import FOLDER, with_tokenizer

SMALL = ["num_heads=3", "num_anchors=4", "optimizer.warmup=2", "run.steps=20", "run.save_every=20"]
SMALL += [
    "run.eval_every=20",
    "decode_rows=4",
    "data.length=12",
    "data.batch=4",
    "data.eval_rows=4",
]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A tiny T5 with a tokenizer, and a file of sources."""
    root = tmp_path_factory.mktemp("specdec")
    with_tokenizer(shutil.copytree(FOLDER / "t5", root / "t5"))
    random = np.random.default_rng(0)
    lines = ["".join(random.choice(list(LETTERS), 5)) for _ in range(12)]
    (root / "sources.txt").write_text("\n".join(lines) + "\n")
    return root


def made_of(texts, *words):
    given = [f"teacher={texts / 't5'}", f"sources={texts / 'sources.txt'}", *SMALL, *words]
    made = config.load(specdec.Config, None, [*given, f"run.folder={texts / 'made'}"])
    return made, specjax.load(texts / "t5")


def test_a_drafter_of_an_encoder_decoder_target_learns_its_texts_and_loads_back(texts):
    words = [f"teacher={texts / 't5'}", f"sources={texts / 'sources.txt'}", *SMALL]
    assert main(["specdec", *words, f"run.folder={texts / 'run'}"]) == 0
    rows = report.read(texts / "run" / "log.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 20 and np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])
    assert 1 <= rows[-1]["decoded_tau"] <= 4 and 0 <= rows[-1]["accuracy_1"] <= 1
    lm = specjax.load(texts / "t5")
    found = specjax.load_drafter(texts / "run" / "model", lm)
    greedy = dict(sampling=specjax.Sampling(temperature=0.0), max_new_tokens=8, stop=())
    plain = specjax.generate(lm, "ABCDE", drafter=None, **greedy)
    assert specjax.generate(lm, "ABCDE", drafter=found, **greedy).text == plain.text
    with np.load(texts / "run" / pairs.PAIRS) as kept:
        assert kept["text"].shape == (12, 13) and (kept["text"][:, 0] == 0).all()


def test_a_drafter_of_a_decoder_only_target_encodes_the_prompt(place):
    root, _, teacher = place
    words = [teacher, *SMALL, "source=6", f'data.samples=["{root / "samples.npz"}"]']
    words += ["num_encoder_layers=2", f"run.folder={root / 'specdec'}"]
    assert main(["specdec", *words]) == 0
    losses = [r["loss"] for r in report.read(root / "specdec" / "log.jsonl") if "loss" in r]
    assert len(losses) == 20 and np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])
    lm = specjax.load(teacher.partition("=")[2])
    found = specjax.load_drafter(root / "specdec" / "model", lm)
    greedy = dict(sampling=specjax.Sampling(temperature=0.0), max_new_tokens=8, stop=())
    plain = specjax.generate(lm, "x1 = f(x2)", drafter=None, **greedy)
    assert specjax.generate(lm, "x1 = f(x2)", drafter=found, **greedy).text == plain.text


def another_folder(made, folder):
    return dataclasses.replace(made, run=dataclasses.replace(made.run, folder=str(folder)))


@pytest.fixture
def writer(monkeypatch):
    """``serve_offline`` without its model: ``writer.numbers`` are those of the sources that each
    call writes, and the call that comes to the source ``writer.until`` is interrupted there."""
    calls = SimpleNamespace(numbers=[], until=None)

    class Continuous:
        tokens = rounds = firsts = 0

        def __init__(self, lm, found, waiting, *options):
            self.waiting = waiting

        def run(self):
            calls.numbers.append([])
            for one in self.waiting:
                if one.index == calls.until:
                    calls.until = None
                    raise KeyboardInterrupt
                calls.numbers[-1].append(one.index)
                tokens = [int(token) for token in one.source[: 2 + one.index % 3]]
                yield [Row(one.index, one.id, "", tokens, "stop", 0, 0, 0)]

    monkeypatch.setattr(offline, "Continuous", Continuous)
    return calls


def test_a_dry_run_has_the_texts_of_one_batch_written_and_writes_no_file(
    texts, writer, monkeypatch, tmp_path
):
    made, batches = another_folder(made_of(texts)[0], tmp_path / "run"), []
    estimated = lambda task, *how: batches.append(next(task.batches))  # noqa: E731
    monkeypatch.setattr(specdec, "estimate", estimated)
    specdec.run(made, dry_run=True)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    kept = tmp_path / "run" / pairs.PAIRS
    np.savez(kept, text=np.zeros((1, 1)), length=np.ones(1), fingerprint="of another target")
    before = kept.read_bytes()
    specdec.run(made, dry_run=True)
    assert kept.read_bytes() == before and [*kept.parent.iterdir()] == [kept]
    assert writer.numbers == [[0, 1, 2, 3]] * 2
    for batch in batches:
        assert batch["tokens"].shape == (4, 13) and sorted(batch["length"]) == [3, 3, 4, 5]


def test_texts_that_were_interrupted_go_on_from_those_that_are_finished(
    texts, writer, tmp_path, capsys
):
    made, lm = made_of(texts)
    whole = pairs.written_pairs(another_folder(made, tmp_path / "whole"), lm)
    made, writer.until = another_folder(made, tmp_path / "run"), 5
    with pytest.raises(KeyboardInterrupt):
        pairs.written_pairs(made, lm)
    assert not (tmp_path / "run" / pairs.PAIRS).exists()
    lines = (texts / "sources.txt").read_text().splitlines()
    (tmp_path / "others.txt").write_text("\n".join(line[::-1] for line in lines))
    others = dataclasses.replace(made, sources=str(tmp_path / "others.txt"))
    longer = dataclasses.replace(made, data=dataclasses.replace(made.data, length=13))
    for other in (others, longer):
        with pytest.raises(config.ConfigError, match="made with another prompt and opt.*anew"):
            pairs.written_pairs(other, lm)
    capsys.readouterr()
    found = pairs.written_pairs(made, lm)
    assert capsys.readouterr().out.startswith("12 of 12 prompts")  # how far it is
    assert writer.numbers[1:] == [[*range(5)], [*range(5, 12)]]
    np.testing.assert_array_equal(found.text, whole.text)
    np.testing.assert_array_equal(found.length, whole.length)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [pairs.PAIRS]


def test_several_processes_read_the_texts_that_one_has_written(
    texts, writer, monkeypatch, tmp_path
):
    made, lm = made_of(texts)
    made = another_folder(made, tmp_path)
    with monkeypatch.context() as several:
        several.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(config.ConfigError, match="--processes: .*first give the same comma"):
            pairs.written_pairs(made, lm)
    one = pairs.written_pairs(made, lm)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    np.testing.assert_array_equal(pairs.written_pairs(made, lm).text, one.text)
    assert writer.numbers == [[*range(12)]]


def batch_of(made, lm):
    found = pairs.written_pairs(made, lm)
    rows = [found.row(n) for n in range(4)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def noised(params):
    noise = iter(jax.random.split(jax.random.key(1), 99))
    return jax.tree.map(lambda x: x + 0.2 * jax.random.normal(next(noise), x.shape), params)


@pytest.fixture(scope="module")
def taught(texts):
    """What is learned at token 3 of each text, with masks alone, and what is drafted below it."""
    made, lm = made_of(texts)
    drafter, params = specdec.make_specdec(made, lm)
    own, batch, root = noised(params), batch_of(made, lm), 3
    rows = specdec.read(batch, made.num_heads)
    shown = jnp.zeros((4, 1, 4), bool).at[:, :, 0].set(True)
    heads = specdec.heads_of(drafter, own, batch, rows, jnp.full((4, 1), root), shown)
    learned = [chunks.logits_of(head.table[0], head.states)[:, 0] for head in heads]
    context = Context(
        tokens=rows.tokens,
        length=jnp.full(4, root + 1, jnp.int32),
        budget=jnp.full(4, 8, jnp.int32),
        key=None,
        sampling=specjax.Sampling(temperature=0.0),
    )
    inputs = {"tokens": batch["source"], "lengths": batch["source_length"]}
    given = own, lm.params
    state = drafter.init(*given, 4, 24, inputs)
    state = drafter._read_text(drafter.heads(own), state, context)
    level, carry = drafter.make_level(*given, state, context)
    grown = Draft(start=context.length - 1, tokens=context.root[:, None], topology=(-1,))
    return learned, level(carry, grown, 0)[1], heads, batch


def test_a_drafter_is_taught_on_the_logits_that_it_drafts_with(taught):
    learned, drafted, heads, _ = taught
    for k, (logits, head) in enumerate(zip(learned, heads, strict=True)):
        goes_on = head.weight[:, 0] > 0  # the other texts have ended before
        assert jnp.std(logits) > 0.1 and 1 < goes_on.sum() < len(goes_on)
        np.testing.assert_allclose(logits[goes_on], drafted[goes_on, k], rtol=1e-5, atol=1e-5)


def test_places_after_the_end_of_a_text_are_not_learned(taught):
    _, _, heads, batch = taught
    for k, head in enumerate(heads):
        np.testing.assert_array_equal(head.weight[:, 0] > 0, 4 + k < batch["length"])


def test_without_glancing_and_smoothing_the_loss_is_the_mean_of_what_each_place_says(texts):
    words = ["glance_start=0", "glance_end=0", "label_smoothing=0", "num_anchors=1"]
    made, lm = made_of(texts, *words)
    drafter, params = specdec.make_specdec(made, lm)
    batch, keys = batch_of(made, lm), make_keys(jax.random.key(0), jnp.arange(4))
    terms = specdec.make_loss(drafter, made)(params, None, batch, keys)
    drawn = jax.vmap(lambda key: jax.random.uniform(key, (1,)))(keys.rows)
    room = jnp.asarray(batch["length"] - 1)[:, None]
    anchors = (drawn * room).astype(jnp.int32)
    rows = specdec.read(batch, 3)
    shown = jnp.zeros((4, 1, 4), bool).at[:, :, 0].set(True)
    total = count = 0.0
    for head in specdec.heads_of(drafter, params, batch, rows, anchors, shown):
        logs = jax.nn.log_softmax(chunks.logits_of(head.table[0], head.states))
        said = jnp.take_along_axis(logs, head.pieces["next"][..., None], axis=2)[..., 0]
        total, count = total - jnp.sum(head.weight * said), count + jnp.sum(head.weight)
    np.testing.assert_allclose(evaluate.weighed(terms), total / count, rtol=1e-5)


def test_glancing_learns_fewer_places_and_a_gradient_reaches_every_weight(texts):
    counts = []
    for start in (0.0, 1.0):
        made, lm = made_of(texts, f"glance_start={start}", f"glance_end={start}")
        drafter, params = specdec.make_specdec(made, lm)
        batch, keys = batch_of(made, lm), make_keys(jax.random.key(0), jnp.arange(4))
        loss, own = specdec.make_loss(drafter, made), noised(params)
        counts.append(float(loss(own, None, batch, keys)["loss"].count))
    assert 0 < counts[1] < counts[0]
    made, _ = made_of(texts)
    loss = specdec.make_loss(drafter, made)
    slopes = jax.grad(lambda own: evaluate.weighed(loss(own, None, batch, keys)))(own)
    for path, slope in jax.tree_util.tree_leaves_with_path(slopes):
        assert jnp.abs(slope).max() > 1e-9, jax.tree_util.keystr(path)


def test_the_encoder_and_the_embeddings_begin_as_the_targets(texts):
    made, lm = made_of(texts)
    _, params = specdec.make_specdec(made, lm)
    np.testing.assert_array_equal(params["embedding"], lm.params["embedding"][...])
    ours = params["encoder"]["blocks"][0]["attention"]["q"]["weight"]
    np.testing.assert_array_equal(
        ours, lm.params["encoder"]["blocks"][0]["attention"]["q"]["weight"]
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("num_heads=0", "num_heads=0; accepted: at least 1"),
        ("glance_start=2", "glance_start=2.0; accepted: 0 to 1"),
        ("mask_token=999", "mask_token=999: the drafter's embedding table has 64 rows"),
        ("mask_token=0", "mask_token=0: .*% of the texts are this token"),
        ("source=4", "targets that read a prompt alone"),
        ("start_ids=[1]", r"start_ids=\[1\]: .* has its own, which every text begins with"),
        ("sources=nowhere.txt", "sources='nowhere.txt': give a file of the texts"),
        ("data.eval_rows=12", "there are 12 texts, and 12 are held out"),
    ],
)
def test_what_cannot_be_trained_is_refused(texts, word, message):
    with pytest.raises(config.ConfigError, match=message):
        made, _ = made_of(texts, word)
        specdec.run(made)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ('data.samples=["a.npz"]', r"data.samples=\['a.npz'\]: .*; leave it out \(and data.sam"),
        ("data.corpus=packages", "data.corpus='packages': .*; leave it out, or give what the tar"),
        ('data.mixed=["packages"]', r"data.mixed=\['packages'\]: .* learns from sources alone"),
        ("data.tokenizer=other", "data.tokenizer='other': .* learns from sources alone"),
        ("data.strict=false", "data.strict=false: .* learns from sources alone"),
    ],
)
def test_texts_that_are_not_read_beside_sources_are_refused(texts, word, message):
    with pytest.raises(config.ConfigError, match=message):
        specdec.run(made_of(texts, word)[0])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sources=a.txt", "sources='a.txt': 'embedded' is a decoder-only target.*; leave it out"),
        ("data.corpus=packages", "data.corpus='packages': .*; leave it out, or give other files"),
        ('data.mixed=["packages"]', r"data.mixed=\['packages'\]: .* learns from data.samples alo"),
        ("data.broken_share=0.5", "data.broken_share=0.5: .* learns from data.samples alone"),
        ("data.end_of_text=x", "data.end_of_text='x': .* learns from data.samples alone"),
        ("data.samples_share=[0.8]", r"data.samples_share=\[0.8\]: .* from each text as often"),
    ],
)
def test_what_is_not_read_beside_samples_is_refused(word, message):
    words = [*SMALL, "source=4", 'data.samples=["a.npz"]']
    pairs.check_sampled(config.load(specdec.Config, None, words))  # equal shares are not refused
    with pytest.raises(config.ConfigError, match=message):
        specdec.run(config.load(specdec.Config, None, [*words, word]))


def test_a_decoder_only_target_needs_texts_of_its_own(place):
    _, _, teacher = place
    made = config.load(specdec.Config, None, [teacher, *SMALL])
    with pytest.raises(config.ConfigError, match=r"source=0, data.samples=\[\].*give source=64"):
        specdec.run(made)
    made = config.load(specdec.Config, None, [teacher, *SMALL, "start_ids=[1]"])
    with pytest.raises(config.ConfigError, match=r"start_ids=\[1\]: .* is a decoder-only target"):
        specdec.run(made)


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """A tiny Whisper, and a folder of windows of features, one ``.npy`` file each."""
    root = tmp_path_factory.mktemp("specdec")
    lm = specjax.load(with_tokenizer(shutil.copytree(FOLDER / "whisper", root / "whisper")))
    shape, random = (lm.config.num_features, 2 * lm.config.max_source), np.random.default_rng(0)
    (root / "windows").mkdir()
    for n in range(12):
        window = random.standard_normal(shape).astype(np.float32)
        np.save(root / "windows" / f"{n}.npy", window)
    return lm, root


def words_of(heard, *words):
    root = heard[1]
    given = [f"teacher={root / 'whisper'}", f"sources={root / 'windows'}", *SMALL]
    return [*given, f"run.folder={root / 'made'}", *words]


def test_a_drafter_of_whisper_learns_what_the_target_writes_of_windows(heard):
    lm, root = heard
    assert main(["specdec", *words_of(heard, "start_ids=[3, 7]")]) == 0
    rows = report.read(root / "made" / "log.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 20 and np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])
    with np.load(root / "made" / pairs.PAIRS) as kept:
        assert (kept["text"][:, :2] == [3, 7]).all()
    found = specjax.load_drafter(root / "made" / "model", lm)
    given = dict(inputs=np.load(root / "windows" / "3.npy"), max_new_tokens=8, stop=())
    given["sampling"] = specjax.Sampling(temperature=0.0)
    plain = specjax.generate(lm, drafter=None, **given)
    drafted = specjax.generate(lm, drafter=found, **given)
    assert drafted.texts == plain.texts


def test_the_tokens_that_begin_every_text_are_not_learned():
    text = np.asarray([[7, 8, 9, 1, 2, 0]])
    one = np.ones(1, np.int32)
    written = pairs.Pairs(one[None], one, text, 5 * one, num_given=3).row(0)
    np.testing.assert_array_equal(written["weight"], [0, 0, 1, 1, 0])


def test_what_begins_in_a_drafter_of_whisper_is_the_targets(heard):
    lm, _ = heard
    _, params = specdec.make_specdec(config.load(specdec.Config, None, words_of(heard)), lm)
    for name in ("embedding", "position_embedding"):
        np.testing.assert_array_equal(params[name], lm.params[name][...])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sources=nowhere", "sources='nowhere': give a folder of .npy files"),
        ("data.length=99", "data.length=99: .* 1 given tokens, and .* has 48 positions"),
    ],
)
def test_what_whisper_cannot_be_taught_on_is_refused(heard, word, message):
    with pytest.raises(config.ConfigError, match=message):
        specdec.run(config.load(specdec.Config, None, words_of(heard, word)))


def test_windows_of_another_shape_and_a_target_without_a_prompt_are_refused(heard, tmp_path):
    lm, _ = heard
    np.save(tmp_path / "short.npy", np.zeros((2, 3), np.float32))
    made = config.load(specdec.Config, None, words_of(heard, f"sources={tmp_path}"))
    with pytest.raises(config.ConfigError, match="short.npy: features: the shape is"):
        pairs.written_pairs(made, lm)
    made = dataclasses.replace(made, start_ids=(1,) * made.data.length)
    with pytest.raises(config.ConfigError, match=f"accepted: {made.data.length + 1} to 47"):
        pairs._check_begin(made, lm, list(made.start_ids))
    config_of_several = dataclasses.replace(lm.config, start_ids=())
    target = dataclasses.replace(lm.target, config=config_of_several)
    several = dataclasses.replace(lm, target=target)
    made = config.load(specdec.Config, None, words_of(heard))
    with pytest.raises(config.ConfigError, match="knows several languages.*give the tokens"):
        pairs.written_pairs(made, several)
