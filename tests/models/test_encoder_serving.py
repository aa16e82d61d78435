"""Files of prompts, and plans, for T5 and Whisper: the texts of ``generate``, row by row."""

import json
import re

import numpy as np
import pytest
from asking import flat
from compiled import compilations
from encoder_decoders import expected, shorter, with_tokenizer
from test_serving import stop_after

import specjax
from specjax.analysis.plan import measure
from specjax.models import save_pretrained
from specjax.serving import jsonl_input

pytestmark = pytest.mark.usefixtures("quick_compilation")
# of 9, 26, 1, 40 and 5 tokens
TEXTS = ["TRANSLATE", "SUMMARIZE:THIS-TEXT,PLEASE", "A", "0123456789" * 4, "(B+C)"]
OTHERS = ["B" * 50, "C", "DEF", "G" * 33, "HI"]
BUDGETS = [3, 20, 9, 1, 14]
ROWS = [
    {"prompt": text, "max_new_tokens": n, "stop": []}
    for text, n in zip(TEXTS, BUDGETS, strict=True)
]


@pytest.fixture(scope="module")
def lms(tmp_path_factory):
    """T5 1.1 with 1.0 as its draft model; Whisper with its first decoder layer as its own."""
    root, one = tmp_path_factory.mktemp("encoders"), dict(num_layers=1, num_encoder_layers=1)
    models = {
        "t5": shorter("t5", **one),
        "t5_gated": shorter("t5_gated", **one),
        "whisper": shorter("whisper"),
        "distilled": shorter("whisper", num_layers=1),
    }
    for name, module in models.items():
        save_pretrained(module, root / name)
        with_tokenizer(root / name)
    return {name: specjax.load(root / name) for name in models}


def test_texts_of_other_lengths_join_a_batch_without_a_compilation_and_are_those_of_generate(lms):
    """Over four devices; the texts are those of one."""
    seeds, common = list(range(5)), dict(num_draft=3, temperature=0.9)
    rows = [row | {"seed": seed} for row, seed in zip(ROWS, seeds, strict=True)]
    shared = specjax.load(lms["t5_gated"].name, mesh="data=2,model=2")
    draft = specjax.load(lms["t5"].name, mesh=shared.mesh)

    def serve(rows):
        return specjax.serve_offline(shared, rows, **flat(batch=2, drafter=draft, **common))

    served, own = serve(rows), dict(max_new_tokens=BUDGETS, seed=seeds, stop=())
    wanted = specjax.generate(lms["t5_gated"], TEXTS, **flat(drafter=lms["t5"], **own, **common))
    assert [row.tokens for row in served.rows] == [row.tolist() for row in wanted.tokens]
    others = [row | {"prompt": text} for row, text in zip(rows, OTHERS, strict=True)]
    assert compilations(lambda: serve(others)) == 0


# ---------------------------------------------------------------- what is heard


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """A folder with a prompt file, three windows beside it."""
    folder = tmp_path_factory.mktemp("heard")
    for i, window in enumerate(expected("whisper")[0]["features"]):
        np.save(folder / f"{i}.npy", window)
    lines = [
        {"features": "0.npy", "max_new_tokens": 12},
        "1.npy",
        {"features": "2.npy", "prompt": [3, 20, 21], "max_new_tokens": 7, "id": "begun"},
        {"features": "1.npy", "max_new_tokens": 3},
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_windows_are_heard_as_alone_by_a_drafter_with_the_same_ears_and_a_run_goes_on(
    lms, heard, tmp_path
):
    lm, options = lms["whisper"], dict(batch=2, stop=(), drafter=lms["distilled"])
    windows = expected("whisper")[0]["features"]
    output, file = tmp_path / "out.jsonl", heard / "prompts.jsonl"
    given = dict(output=output, max_new_tokens=10, **options)
    first = specjax.serve_offline(lm, file, **flat(progress=stop_after(1), **given))
    served = specjax.serve_offline(lm, file, **flat(**given))
    assert 1 <= served.earlier == len(first.rows) < 4 and served.finished
    cases = [(0, [3], 12), (1, [3], 10), (2, [3, 20, 21], 7), (1, [3], 3)]
    which, begun, budgets = zip(*cases, strict=True)
    own = dict(inputs=windows[list(which)], max_new_tokens=budgets, stop=(), drafter="ngram")
    wanted = specjax.generate(lm, list(begun), **flat(**own))
    assert [row.tokens for row in served.rows] == [row.tolist() for row in wanted.tokens]
    assert len({tuple(row.tokens[:3]) for row in served.rows}) == 3  # of as many windows
    assert served.rows[2].id == "begun"
    # lists of arrays are the same prompts as the files, other ones are not
    with_arrays = [{"features": windows[i], "prompt": p, "max_new_tokens": n} for i, p, n in cases]
    with_arrays[2]["id"] = "begun"
    assert specjax.serve_offline(lm, with_arrays, **flat(**given)).earlier == 4
    with_arrays[0]["features"] = windows[0] + 1
    with pytest.raises(ValueError, match="other prompt and options"):
        specjax.serve_offline(lm, with_arrays, **flat(**given))


def test_what_cannot_be_heard_is_named_with_its_line(lms, heard):
    np.save(heard / "short.npy", np.zeros((8, 30)))
    np.save(heard / "nan.npy", np.full((8, 40), np.nan))
    np.save(heard / "text.npy", np.asarray(["a"]))
    (heard / "no.npy").write_text("no array")
    broken = {
        '{"prompt": [3]}': "reads features: give them in a field 'features'",
        '"absent.npy"': "absent.npy holds no array .*No such file",
        '"no.npy"': "no.npy holds no array",
        '"short.npy"': r"shape is \[8, 30\], expected \[8, 40\]",
        '"nan.npy"': "not all of them are finite",
        '"text.npy"': "one array of numbers",
        '{"features": "0.npy", "prompt": "A"}': "token ids that the decoder begins with",
        '{"features": "0.npy", "prompt": [3, 99]}': r"token ids must be in \[0, 64\)",
        '{"features": [[1, 2], [3]]}': "features: a list is no array",
        "7": r"shape is \[\], expected",
    }
    file = heard / "broken.jsonl"
    file.write_text("\n".join([*broken, '"0.npy"']))
    defaults = jsonl_input.NEUTRAL | dict(max_new_tokens=8, seed=None, stop=None, stop_strings=None)
    found, bad = jsonl_input.read(lms["whisper"], file, defaults, len(broken))
    assert len(found) == 1 and [one.line for one in bad] == list(range(1, len(broken) + 1))
    for one, said in zip(bad, broken.values(), strict=True):
        assert re.search(said, one.reason), one.reason
    with pytest.raises(ValueError, match="10 of 11 prompts are broken"):
        specjax.serve_offline(lms["whisper"], file, max_broken=9)


# ---------------------------------------------------------------- plans


def test_a_plan_reports_the_rounds_after_the_encoder(lms, heard, monkeypatch):
    monkeypatch.setattr(measure, "A_PASS", 0)  # one pass a call
    windows, options = [heard / "0.npy", heard / "2.npy"], dict(max_new_tokens=12, stop=())
    how = dict(drafters="ngram", num_drafts=[2], turns=2, seconds=0, batches=[2])
    found = specjax.plan(lms["whisper"], windows, **how, **options)
    (drafted,) = [c for c in found.candidates if c.drafter == "ngram"]
    out = specjax.generate(
        lms["whisper"],
        **flat(
            inputs=np.stack([np.load(window) for window in windows]),
            drafter="ngram",
            num_draft=2,
            **options,
        ),
    )
    assert drafted.tau == pytest.approx(out.stats.tau)
