"""The report and the card say what is known of a run, and nothing else."""

import dataclasses
import json

import pytest
import yaml
from specjax.train import card, charts, measured, metrics, report
from specjax.train.cli import main

import specjax

ROWS = [{"step": s, "loss": 3.0 - s / 10, "tokens_per_second": 100.0} for s in (1, 2, 3)]
ROWS += [{"step": 3, "heldout_loss": 2.8, "greedy/heldout_loss": 2.5, "decoded_tau": 1.9}]
ROWS[-1] |= {"decoded_kept_1": 0.6, "decoded_kept_2": 0.3, "greedy/decoded_tau": 2.1}
WAY = {"tau": 1.9, "rate": 20.0, "interval": [1.1, 1.6], "batch": 1}
FACTS = {
    "target": {"name": "owner/target", "fingerprint": "abc"},
    "drafter": {"name": "eagle3", "num_draft": 2},
    "machine": "1 x cpu",
    "new_tokens": 8,
    "domains": {"prose": {"tau": 1.9, "low": 1.5, "high": 2.2, "prompts": 7, "kept": [0.6, 0.3]}},
    "plan": {
        "prompts": 4,
        "verdict": "use it",
        "candidates": [
            {"drafter": "plain", "num_draft": 0, "ratio": 1.0} | WAY,
            {"drafter": "x", "num_draft": 2, "ratio": 1.37} | WAY,
        ],
    },
    "texts": [
        {"domain": "prose", "prompt": "<b>", "tau": 2.0, "pieces": [["a&", True], ["b", False]]}
    ],
}


def test_panels_hold_what_was_measured_where_it_was_measured():
    found = {panel.title: panel.series for panel in charts.panels(ROWS)}
    assert found["Loss"]["held out"] == [(3, 2.8)]
    assert found["Loss"]["held out, greedy"] == [(3, 2.5)]
    assert len(found["Loss"]["training, moving mean"]) == 3
    kept = next(series for title, series in found.items() if "positions kept" in title)
    assert kept == {"draft 1": [(3, 0.6)], "draft 2": [(3, 0.3)]}
    assert found["Tau on held-out text"] == {
        "decoded tau": [(3, 1.9)],
        "decoded tau, greedy": [(3, 2.1)],
    }
    assert not any("Heads" in title for title in found)  # nothing was measured, nothing is drawn
    assert charts.panels([]) == []


@pytest.fixture
def folder(tmp_path):
    """The files of an interrupted run: a log and a configuration."""
    log = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / metrics.LOG).write_text(log + '{"step": 4, "lo')
    (tmp_path / "config.json").write_text(json.dumps({"run.steps": 9, "data.corpus": "<mine>"}))
    return tmp_path


def test_the_report_of_an_interrupted_run_is_drawn_and_says_what_is_missing(folder, capsys):
    assert main(["report", f"folder={folder}"]) == 0
    page = (folder / report.PAGE).read_text()
    assert page.count("Not measured.") == 3 and "of 9 asked for" in page
    assert "&lt;mine&gt;" in page and "<mine>" not in page
    assert main(["report", f"folder={folder / 'nowhere'}"]) == 2
    assert "holds no run" in capsys.readouterr().err
    (folder / "config.json").write_text("{")
    assert main(["report", f"folder={folder}"]) == 2
    assert "config.json is no JSON" in capsys.readouterr().err
    (folder / "config.json").unlink()
    assert main(["report", f"folder={folder}"]) == 0
    (folder / metrics.LOG).write_text('{"step": 1}\n')
    assert main(["report", f"folder={folder}"]) == 2
    assert "has no measure to draw" in capsys.readouterr().err


def test_the_report_shows_domains_the_plan_and_marked_texts(folder):
    (folder / measured.FILE).write_text(json.dumps(FACTS))
    page = report.draw(folder).read_text()
    assert "Not measured." not in page and "1.37 ×" in page and "1.50–2.20" in page
    assert "<i>&lt;b&gt;</i><mark>a&amp;</mark>b</pre>" in page
    for secret in ("<script", "src=", "@import", "url(http"):
        assert secret not in page  # it needs nothing else
    colours = [c for c in charts.COLOURS if page.count(c) > 1]
    assert not colours  # but where the page defines them: pictures follow its light and dark


@pytest.mark.parametrize(
    ("ratio", "interval", "label", "mood"),
    [
        (0.71, [0.6, 0.8], "slower than plain decoding", "bad"),
        (1.05, [0.9, 1.2], "speed-up, not certain", "unclear"),
        (1.37, [1.1, 1.6], "speed-up over plain decoding", ""),
    ],
)
def test_a_drafter_that_loses_looks_like_a_loss(ratio, interval, label, mood):
    one = {"drafter": "x", "num_draft": 2, "ratio": ratio, "interval": interval}
    (tile, *_) = report.tiles([], {}, {"plan": {"candidates": [one]}})
    assert (tile.label, tile.figure, tile.mood) == (label, f"{ratio:.2f} ×", mood)


def test_a_loss_summed_over_heads_says_so(folder):
    assert report.loss_unit({"run.steps": 9}) == "nats per token"
    settings = {"num_heads": 5, "decay": 0.8, "run.steps": 9}
    unit = "a weighted sum of nats, over 5 heads, head k weighted by 0.8^k"
    assert report.loss_unit(settings) == unit
    (folder / "config.json").write_text(json.dumps(settings))
    assert unit in report.draw(folder).read_text()
    assert report.loss_unit(settings | {"sample_head": True}).endswith("all weighted alike")
    joint = settings | {"recipe": "mtp_heads", "with_target": True}
    assert report.loss_unit(joint).startswith("a weighted mean of nats")
    settings |= {"recipe": "spire", "decay": 1.0, "acceptance_share": 0.5}
    unit = "a weighted mean of nats less the accepted share, over 5 heads, all weighted alike"
    assert report.loss_unit(settings) == unit
    settings = {"num_heads": 5, "decay": 0.8, "weighting": "d-pace"}
    (folder / "config.json").write_text(json.dumps(settings))
    drawn = report.draw(folder).read_text()
    assert "loss, a weighted sum of nats; in training by weighting=d-pace" in drawn


def export(folder, layout, target="owner/target", **fields):
    settings = {"data.corpus": "texts", "data.length": 64, "run.folder": "runs/mine", "x": None}
    settings |= {"recipe": "eagle3", **fields}
    return card.Export(folder, layout, "eagle3", settings, target, "abc")


def test_a_card_has_a_front_for_the_hub_and_says_what_nobody_stated(tmp_path):
    stated = card.CardConfig(name="me/head", license="mit", data="Letters.", data_license="cc0")
    text = card.write(export(tmp_path, "eagle3"), stated, FACTS).read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front["license"] == "mit" and front["base_model"] == "owner/target"
    assert front["library_name"] == "specjax" and "speculative-decoding" in front["tags"]
    for words in ("Letters. Licence of the data: cc0", "| prose | 7 | 1.90 | 1.50 to 2.20 |"):
        assert words in text
    for words in ("vllm serve owner/target", '"method": "eagle3"', "EAGLE3", "use it", "`abc`"):
        assert words in text
    assert 'specjax.load_drafter("me/head", lm)' in text and "x = " not in text
    own = dataclasses.replace(export(tmp_path, "eagle3"), served=False)  # which no server reads
    text = card.write(own, stated, FACTS).read_text()
    assert "vllm" not in text and "sglang" not in text and "specjax.load_drafter" in text
    bare = card.write(export(tmp_path, "hydra"), card.CardConfig(), {}).read_text()
    for words in ("Not measured.", "folder `texts`", "Licence of the data: not stated"):
        assert words in bare
    assert "vllm" not in bare and "license" not in yaml.safe_load(bare.split("---")[1])
    model = card.write(export(tmp_path, card.TARGET, ""), card.CardConfig(), {}).read_text()
    assert (
        "It belongs to" not in model
        and "base_model" not in model
        and 'specjax.load("THIS_FOLDER")' in model
    )


def test_a_card_names_no_folder_of_this_machine(tmp_path):
    target = tmp_path / "my-target"
    target.mkdir()
    fields = {"teacher": str(target), "data.corpus": str(tmp_path / "notes")}
    made = export(tmp_path, "eagle3", target=str(target), **fields)
    text = card.write(made, card.CardConfig(), FACTS).read_text()
    assert str(tmp_path) not in text and "folder `notes`" in text
    assert yaml.safe_load(text.split("---")[1])["base_model"] == "my-target"
    assert 'specjax.load("PATH_TO/my-target")' in text
    stated = card.CardConfig(base_model="owner/name")
    assert "base_model: owner/name" in card.write(made, stated, {}).read_text()
    (target / "config.json").write_text(json.dumps({"_name_or_path": "some/model"}))
    assert card.base_model(str(target), card.CardConfig()) == "some/model"
    cached = tmp_path / "models--me--head" / "snapshots" / "1"
    cached.mkdir(parents=True)
    assert card.base_model(str(cached), card.CardConfig()) == "me/head"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "Python's standard library. Licence of the data: PSF-2.0."),
        ({"features": "runs/f"}, '`features = "runs/f"`. Licence of the data: not stated.'),
        ({"init": "runs/d"}, "not stated."),
        ({"data.samples": ["s.npz"], "data.samples_share": [0.5]}, "not stated. 50% of the rows"),
    ],
)
@pytest.mark.parametrize("section", ["", "distill."])
def test_the_licence_of_a_corpus_is_said_of_what_read_that_alone(tmp_path, fields, said, section):
    fields = {f"{section}{name}": value for name, value in fields.items()}
    made = export(tmp_path, "hydra", **{f"{section}data.corpus": "stdlib", **fields})
    if section:
        made.settings.pop("data.corpus")
    text = card.write(made, card.CardConfig(), {}).read_text()
    assert said in text and ("PSF" in text) == (not fields)


@pytest.mark.parametrize(
    ("mixed", "said"),
    [
        (
            ["packages"],
            "permissive licences, as `packages.json` has them. Licence of the data: PSF",
        ),
        (["notes"], 'Mixed into them: `["notes"]`. Licence of the data: not stated.'),
    ],
)
def test_a_card_names_the_corpora_that_were_mixed_in(tmp_path, mixed, said):
    fields = {"data.corpus": "stdlib", "data.mixed": mixed}
    made = export(tmp_path, card.TARGET, "", **fields)
    assert said in card.write(made, card.CardConfig(), {}).read_text()


@pytest.mark.parametrize(("layout", "heads", "count"), [("medusa-vllm", 2, 2), ("eagle", 1, 3)])
def test_a_server_is_told_to_draft_no_more_than_there_are_heads(tmp_path, layout, heads, count):
    made = export(tmp_path, layout, num_heads=heads)
    text = card.write(made, card.CardConfig(), {}).read_text()
    assert f'"num_speculative_tokens": {count}' in text


def test_every_layout_with_readers_is_one_that_is_written():
    known = {*specjax.checkpoints.FORMATS, card.DRAFT}
    assert {*card.VLLM, *card.SGLANG} <= known
