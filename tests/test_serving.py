"""A file of prompts through a batch: the texts of ``generate``, kept, resumed, never mixed up."""

import functools
import json
import os
import re

import jax
import numpy as np
import pytest
from asking import flat
from compiled import compilations
from toys import bag, like

import specjax
from specjax import acceptance, cli, drafters
from specjax._internal import compile_cache
from specjax.sampling import processors
from specjax.serving import jsonl_input, offline, scheduler
from specjax.serving.identity import described, made_with
from specjax.serving.jsonl_output import OutputFile
from specjax.serving.offline import Progress
from specjax.text import Session
from specjax.text.options import Options

pytest_plugins = ["pairs"]
TEXTS = ["def f(x):", "import os\n\n\nclass A:\n    def", "x", "for i in range(10):", "a = [1, 2]"]
BUDGETS = [3, 20, 9, 1, 14]
RAGGED = [
    {"prompt": text, "max_new_tokens": n, "stop": []}
    for text, n in zip(TEXTS, BUDGETS, strict=True)
]


def drafter_of(name, pair):
    if name == "tree":
        return {"drafter": pair[1], "tree": "2x1"}
    if name == "plain":
        return {"drafter": name}
    return {"drafter": pair[1] if name == "draft" else name, "num_draft": 3}


@pytest.mark.parametrize(
    ("name", "temperature"), [("plain", 0.9), ("draft", 0.9), ("tree", 0.0), ("ngram", 0.0)]
)
def test_ragged_prompts_have_the_texts_that_generate_gives_them(pair, name, temperature):
    common = {"temperature": temperature, "seed": 5, **drafter_of(name, pair)}
    served = specjax.serve_offline(pair[0], RAGGED, **flat(batch=2, **common))
    wanted = specjax.generate(pair[0], TEXTS, **flat(max_new_tokens=BUDGETS, stop=(), **common))
    assert [row.tokens for row in served.rows] == [row.tolist() for row in wanted.tokens]
    assert served.texts == wanted.texts and served.finished
    assert [row.index for row in served.rows] == [0, 1, 2, 3, 4]
    for name in ("rounds", "drafted", "accepted"):
        assert [getattr(row, name) for row in served.rows] == getattr(wanted.stats, name).tolist()


def test_each_prompt_may_have_options_of_its_own(pair):
    own = {"temperature": 0.8, "top_k": 20, "seed": 3, "max_new_tokens": 12, "stop": []}
    cold = {"max_new_tokens": 7, "stop": []}
    prompts = [TEXTS[0], {"text": TEXTS[1], **own}, {"prompt": TEXTS[2], **cold, "id": "c"}]
    served = specjax.serve_offline(pair[0], prompts, batch=2, drafter="ngram", max_new_tokens=10)
    for row, (text, options) in zip(
        served.rows,
        ((TEXTS[0], {"max_new_tokens": 10}), (TEXTS[1], own), (TEXTS[2], cold)),
        strict=True,
    ):
        alone = specjax.generate(pair[0], text, **flat(drafter="ngram", **options))
        assert row.tokens == alone.tokens[0].tolist()
    assert [row.id for row in served.rows] == [None, None, "c"]


def test_a_row_ends_at_its_own_stop_and_at_the_end_of_the_context(pair):
    whole = specjax.generate(pair[0], TEXTS[0], drafter=None, max_new_tokens=10, stop=())
    end = whole.tokens[0].tolist()[4]
    room = pair[0].target.max_positions - 598
    prompts = [{"prompt": TEXTS[0], "stop": [end]}, {"prompt": [5] * 598, "stop": []}]
    served = specjax.serve_offline(pair[0], prompts, drafter="plain", max_new_tokens=10)
    first, second = served.rows
    assert first.finish == "stop" and first.tokens[-1] == end and len(first.tokens) <= 5
    assert second.finish == "context" and len(second.tokens) == room


def test_a_stop_string_ends_its_row_alone_and_is_cut(pair, monkeypatch):
    options = {"max_new_tokens": 30, "drafter": "ngram"}
    whole = specjax.generate(pair[0], TEXTS, **flat(stop=(), **options))
    end = whole.texts[1][10:14]
    prompts = [{"prompt": text, "stop": []} for text in TEXTS]
    prompts[1] = {"prompt": TEXTS[1], "stop": end}
    monkeypatch.setattr(scheduler, "WATCHFUL", 60.0)  # the row goes on to the end of a burst
    counts = []
    plainly = options | {"drafter": "plain", "progress": counts.append}
    late = [*prompts[:1], {"prompt": TEXTS[1], "stop": whole.texts[1][-12:-8]}, *prompts[2:]]
    specjax.serve_offline(pair[0], late, **flat(batch=2, **plainly))
    last = counts[-1]  # a round emits a token, also after the end of a text
    assert last.tokens - last.firsts == last.rounds
    served = specjax.serve_offline(pair[0], prompts, **flat(batch=2, **options))
    alone = specjax.generate(pair[0], TEXTS[1], **flat(stop_strings=end, **options))
    assert served.texts[1] == alone.text == whole.texts[1][: whole.texts[1].index(end)]
    assert served.rows[1].tokens == alone.tokens[0].tolist() and served.rows[1].finish == "stop"
    for row in (0, 2, 3, 4):
        assert served.texts[row] == whole.texts[row]


def test_over_a_mesh_texts_are_those_of_one_device(pair, folders):
    lm = specjax.load(folders["target"], mesh="data=2,model=2")
    options = {"batch": 4, "gather": 2, "drafter": "ngram", "num_draft": 3}
    alone, spread = (specjax.serve_offline(one, RAGGED, **flat(**options)) for one in (pair[0], lm))
    assert [row.tokens for row in spread.rows] == [row.tokens for row in alone.rows]
    # fewer prompts than the devices of an axis: the other rows stand idle
    few = specjax.serve_offline(lm, RAGGED[:1], **flat(**options))
    assert few.rows[0].tokens == alone.rows[0].tokens
    with pytest.raises(ValueError, match="3 rows cannot be shared by data=2"):
        specjax.serve_offline(lm, RAGGED, batch=3)


def test_other_lengths_and_budgets_compile_nothing(pair):
    def serve(prompts):
        specjax.serve_offline(
            pair[0], prompts, batch=2, drafter="ngram", drafting=specjax.Drafting(num=3)
        )

    serve(RAGGED)
    longer = [{"prompt": [7] * n, "max_new_tokens": n, "stop": []} for n in (90, 2, 40, 5)]
    assert compilations(lambda: serve(longer)) == 0


# ---------------------------------------------------------------- kept, resumed, refused


def stop_after(count):
    """A progress that interrupts as soon as ``count`` prompts are done."""

    def progress(now: Progress):
        if now.done >= count:
            raise KeyboardInterrupt

    return progress


def test_an_interrupted_run_keeps_what_is_finished_and_goes_on(pair, tmp_path):
    output, common = tmp_path / "out.jsonl", {"batch": 2, "drafter": "ngram"}
    whole = specjax.serve_offline(pair[0], RAGGED, **flat(**common))
    first = specjax.serve_offline(
        pair[0], RAGGED, **flat(output=output, progress=stop_after(2), **common)
    )
    lines = output.read_text().splitlines()
    assert not first.finished and 2 <= len(lines) == len(first.rows) < 5
    torn = '{"index": 4, "te' + "\0" * 9
    output.write_text("\n".join(lines) + "\n" + torn)  # cut off while it was written
    rest = specjax.serve_offline(pair[0], RAGGED, **flat(output=output, **common))
    assert rest.finished and rest.earlier == len(lines) and rest.texts == whole.texts
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(line["index"] for line in kept) == [0, 1, 2, 3, 4]
    assert output.read_text().splitlines()[: len(lines)] == lines
    assert {line["index"]: line["tokens"] for line in kept} == {
        row.index: row.tokens for row in whole.rows
    }
    equal = [{**one, "top_k": 0} for one in RAGGED]  # in other words
    again = specjax.serve_offline(pair[0], equal, **flat(output=output, temperature=0, **common))
    assert again.earlier == 5 and again.rows == rest.rows


OTHER = {
    "model": ({}, None, "other model.*model='.*' then, model='.*, float32' now"),
    "drafter": ({"num_draft": 2}, RAGGED, r"other drafter \(num=None then, num=2 now\)"),
    "kind": ({"drafter": "plain"}, RAGGED, r"\(drafter='ngram' then, drafter='plain' now\)"),
    "seed": ({"seed": 1}, RAGGED, r"other prompt and options \(seed=0 then, seed=1 now\)"),
    "temperature": ({"temperature": 0.5}, RAGGED, r"\(temperature=0.0 then, temperature=0.5 now\)"),
    "budget": (
        {},
        [{**RAGGED[0], "max_new_tokens": 4}, *RAGGED[1:]],
        r"\(max_new_tokens=3 then, max_new_tokens=4 now\)",
    ),
    "prompt": (
        {},
        [{**RAGGED[0], "prompt": "def g(x):"}, *RAGGED[1:]],
        r"other prompt and options \(prompt='\d+ tokens, \w+' then, prompt='",
    ),
    "fewer prompts": ({}, RAGGED[:1], "not among the prompts"),
    "id": ({}, [{**RAGGED[0], "id": ["b"]}, *RAGGED[1:]], r"id=None, and .* id=\['b'\] now"),
}


@pytest.fixture(scope="module")
def begun(pair, tmp_path_factory):
    """The content of a finished output."""
    output = tmp_path_factory.mktemp("begun") / "out.jsonl"
    specjax.serve_offline(pair[0], RAGGED, output=output, batch=2, drafter="ngram")
    return output.read_text()


@pytest.mark.parametrize("what", OTHER)
def test_an_output_made_otherwise_is_refused_and_left_alone(pair, begun, tmp_path, what):
    options, prompts, said = OTHER[what]
    output = tmp_path / "out.jsonl"
    output.write_text(begun)
    lm = pair[1] if what == "model" else pair[0]
    with pytest.raises(ValueError, match=said):
        specjax.serve_offline(
            lm,
            prompts or RAGGED,
            **flat(output=output, batch=2, **({"drafter": "ngram"} | options)),
        )
    assert output.read_text() == begun


class Scaled(processors.LogitsProcessor):
    """A processor without a repr, an order or fields."""

    def __init__(self, factor):
        self._factor = factor

    def __call__(self, logits, prefix):
        return logits * self._factor


def scaled(factor):
    return lambda logits, prefix: logits * factor


TOY, WEIGHTS = bag(7, 3)
# each of them has texts, or a law, of its own
LAWS = [
    lambda: {},
    *(lambda k=k: {"rule": acceptance.Tolerance(top_k=k)} for k in (1, 3)),
    *(lambda e=e: {"drafter": drafters.SelfDraft(2, target=TOY, exit=e)} for e in (2, 4)),
    *(lambda n=n: {"drafter": drafters.NGram(2, longest=n)} for n in (3, 4)),
    *(lambda n=n: {"drafter": Session(TOY_LM, drafters.Suffix(num_draft=n))} for n in (2, 3)),
    *(lambda k=k: {"logits_processor": Scaled(k)} for k in (2, 3)),
    *(lambda k=k: {"logits_processor": scaled(k)} for k in (2, 3)),
    *(lambda k=k: {"logits_processor": jax.jit(scaled(k))} for k in (2, 3)),
    *(lambda k=k: {"logits_processor": functools.partial(scaled, k)} for k in (2, 3)),
    lambda: {"logits_processor": lambda logits, prefix: 2 * logits},
    lambda: {"logits_processor": lambda logits, prefix: 3 * logits},
    lambda: {"logits_processor": processors.Automaton("a", params={"next": np.zeros(2)})},
    lambda: {"logits_processor": processors.Automaton("a", params={"next": np.ones(2)})},
    *(
        lambda k=k: {
            "drafter": drafters.DraftModel(2, model=TOY),
            "drafter_params": like(WEIGHTS, k),
        }
        for k in (1, 2)
    ),
    lambda: {"process_drafts": False},
    lambda: {"num_draft": 2},
    lambda: {"tree": "2x1"},
]
TOY_LM = specjax.LM.of(TOY, WEIGHTS)


def test_what_decides_a_text_or_its_law_is_a_part_of_what_an_output_was_made_with():
    defaults = {**jsonl_input.NEUTRAL, "max_new_tokens": 8, "seed": None, "stop": None}
    prompts, _ = jsonl_input.read(TOY_LM, [[1, 2]], defaults | {"stop_strings": None}, 0)

    def identity(make):
        return json.dumps(made_with(TOY_LM, prompts, Options(**flat(**make()))))

    assert len({identity(make) for make in LAWS}) == len(LAWS)
    assert [identity(make) for make in LAWS] == [identity(make) for make in LAWS]
    assert " at 0x" not in json.dumps([described(make()) for make in LAWS])
    by_name = identity(lambda: {"rule": "approximate-tolerance:top_k=1"})
    assert by_name == identity(LAWS[1])


def test_another_drafter_of_the_same_name_is_seen(pair, tmp_path):
    defaults = {**jsonl_input.NEUTRAL, "max_new_tokens": 8, "seed": None, "stop": None}
    prompts, _ = jsonl_input.read(pair[0], ["a"], defaults | {"stop_strings": None}, 0)
    found = []
    for model in (pair[1], pair[0]):
        specjax.models.save_pretrained(model, tmp_path / "draft")
        options = Options(drafter=str(tmp_path / "draft"))
        found.append(made_with(pair[0], prompts, options)[0]["drafter"])
    assert found[0] != found[1]


def test_a_resumed_run_chooses_children_as_the_whole_run_does(tmp_path):
    """Heads with a static tree draw their tokens where no row is greedy; the first row is."""
    lm, output = specjax.load("embedded"), tmp_path / "out.jsonl"
    prompts = [{"prompt": "import", "temperature": 0.0}, *[{"prompt": "def f(x):"}] * 2]
    common = flat(drafter="medusa", tree="2x2", batch=1, max_new_tokens=12, temperature=1.0)
    whole = specjax.serve_offline(lm, prompts, output=output, **common)
    output.write_text(output.read_text().splitlines()[0] + "\n")
    rest = specjax.serve_offline(lm, prompts, output=output, **common)
    assert rest.earlier == 1 and rest.texts == whole.texts


def test_a_file_of_something_else_and_one_in_use_are_refused(pair, tmp_path):
    output = tmp_path / "notes.txt"
    broken = ('{"index": 0, "made_with": "x"}\n', '{"index": [0], "made_with": {}}\n')
    for content in ("my notes\n", "my notes", '{"index": 0}\n', '{"settings": 1}', *broken):
        output.write_text(content)
        with pytest.raises(ValueError, match="name (a|another) file"):
            specjax.serve_offline(pair[0], RAGGED, output=output)
        assert output.read_text() == content
    output.write_text("a prompt")
    with pytest.raises(ValueError, match="is the file of the prompts"):
        specjax.serve_offline(pair[0], output, output=output)
    output.unlink()
    with pytest.raises(ValueError, match="is no ordinary file"):  # a device may have no end
        specjax.serve_offline(pair[0], RAGGED, output=os.devnull)

    def meanwhile(_):
        with pytest.raises(ValueError, match="another process is writing"):
            specjax.serve_offline(pair[0], RAGGED, output=output, drafter="ngram")
        raise KeyboardInterrupt

    specjax.serve_offline(
        pair[0], RAGGED, batch=2, output=output, drafter="ngram", progress=meanwhile
    )


# ---------------------------------------------------------------- broken prompts


BROKEN = {
    b"{": "not JSON",
    b"\xff": "not UTF-8",
    b"7": "is not a prompt",
    b'{"max_new_tokens": 4}': "give the prompt in one field",
    b'{"prompt": "a", "text": "b"}': "give the prompt in one field",
    b'{"messages": [{"role": "user", "content": "a"}]}': "has no chat template",
    b'{"prompt": ""}': "is empty",
    b'{"prompt": [5, 99999]}': "token ids must be in",
    b'{"prompt": "a", "max_new_tokens": 0}': "max_new_tokens=0",
    b'{"prompt": "a", "temperature": -1}': "temperature",
    b'{"prompt": "a", "temperature": [1, 2]}': "temperature=.* give one number",
    b'{"prompt": "a", "seed": -1}': "seed=-1",
    b'{"prompt": "a", "max_token": 4}': "'max_token' is unknown: did you mean 'max_tokens'",
    b'{"prompt": "a", "max_tokens": 4, "max_new_tokens": 4}': "are names of one field",
    b'{"prompt": "a", "max_tokens": -1}': "max_new_tokens=-1",
    b'{"prompt": "a", "stop": 7}': "stop=7",
    b'{"prompt": "a", "stop": ""}': "an empty string",
    b'{"prompt": "a", "stop": [10000000000]}': "is not a token id",
    b'{"prompt": "a", "top_k": 10000000000000000000000}': "top_k=1",
    b"[" * 100_000: "nested too deep",
    json.dumps({"prompt": [5] * 600}).encode(): "leaves no room",
}


def test_broken_lines_are_named_by_their_numbers_with_the_reason(pair, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'"first"\n\n' + b"\n".join(BROKEN) + b'\n{"prompt": "last"}')
    defaults = {**jsonl_input.NEUTRAL, "max_new_tokens": 8, "seed": None, "stop": None}
    defaults |= {"stop_strings": None}
    found, broken = jsonl_input.read(pair[0], file, defaults, len(BROKEN))
    assert [prompt.index for prompt in found] == [0, 2 + len(BROKEN)]
    assert [one.line for one in broken] == list(range(3, 3 + len(BROKEN)))
    for one, said in zip(broken, BROKEN.values(), strict=True):
        assert re.search(said, one.reason)
    with pytest.raises(
        ValueError, match=rf"{len(BROKEN)} of {len(BROKEN) + 2} prompts are broken:\n  line 3"
    ):
        jsonl_input.read(pair[0], file, defaults, len(BROKEN) - 1)


def test_prompts_may_be_device_arrays_and_budgets_without_a_context_have_a_bound():
    defaults = {**jsonl_input.NEUTRAL, "max_new_tokens": 8, "seed": None, "stop": None}
    defaults |= {"stop_strings": None}
    lines = [jax.numpy.asarray([1, 2]), {"prompt": [1], "max_new_tokens": 2**40}]
    found, broken = jsonl_input.read(TOY_LM, lines, defaults, 1)
    assert [prompt.tokens for prompt in found] == [(1, 2)]
    assert "below 2**31" in broken[0].reason


@pytest.mark.parametrize("name", [float("nan"), "\udc80", {1: "a"}])
def test_an_id_that_json_or_utf8_changes_is_that_of_the_line_that_was_written(name, tmp_path):
    defaults = {**jsonl_input.NEUTRAL, "max_new_tokens": 8, "seed": None, "stop": None}
    defaults |= {"stop_strings": None}
    found, _ = jsonl_input.read(TOY_LM, [{"prompt": [1, 2], "id": name}], defaults, 0)
    for _ in range(2):
        with OutputFile(tmp_path / "out.jsonl", {0: {}}) as file:
            offline._check_ids(file, found)
            if not file.there:
                file.add([{"index": 0, "id": name}])
    assert file.there
    with OutputFile(tmp_path / "out.jsonl", {0: {}}) as file:
        found, _ = jsonl_input.read(TOY_LM, [{"prompt": [1, 2], "id": "b"}], defaults, 0)
        with pytest.raises(ValueError, match="has id='b' now"):
            offline._check_ids(file, found)


def test_equal_ids_are_the_same_in_whatever_order_their_keys_were_written(tmp_path):
    defaults = {**jsonl_input.NEUTRAL, "max_new_tokens": 8, "seed": None, "stop": None}
    defaults |= {"stop_strings": None}
    nan = float("nan")  # which is not itself, so that ids with it are compared as they are written
    lines = [{"prompt": [1, 2], "id": {"a": 1, "b": nan}}, {"prompt": [1, 2], "id": 1}]
    found, _ = jsonl_input.read(TOY_LM, lines, defaults, 0)
    with OutputFile(tmp_path / "out.jsonl", {0: {}, 1: {}}) as file:
        file.add([{"index": 0, "id": {"b": nan, "a": 1}}, {"index": 1, "id": 1.0}])
    with OutputFile(tmp_path / "out.jsonl", {0: {}, 1: {}}) as file:
        offline._check_ids(file, found)
        file.there[0]["id"]["a"] = 2
        with pytest.raises(ValueError, match="the text of prompt 0 with id="):
            offline._check_ids(file, found)


def test_the_texts_that_end_a_line_replace_those_of_the_run(pair):
    defaults = {**jsonl_input.NEUTRAL, "max_new_tokens": 8, "seed": None, "stop": None}
    lines = [{}, {"stop": "a"}, {"stop": ["a", "b"]}, {"stop": [5]}, {"stop_strings": ["a"]}]
    lines = [line | {"prompt": "def f(x):"} for line in lines]
    found, _ = jsonl_input.read(pair[0], lines, defaults | {"stop_strings": ["END"]}, 0)
    strings = [prompt.stop_strings for prompt in found]
    assert strings == [("END",), ("a",), ("a", "b"), ("END",), ("a",)]


def test_a_text_file_holds_one_prompt_a_line_and_plain_lines_elsewhere_are_named(pair, tmp_path):
    defaults = {**jsonl_input.NEUTRAL, "max_new_tokens": 8, "seed": None, "stop": None}
    defaults |= {"stop_strings": None}
    for name in ("prompts.txt", "prompts.jsonl"):
        (tmp_path / name).write_bytes(b'def f(x):\r\n\n"quoted"\n')
    found, broken = jsonl_input.read(pair[0], tmp_path / "prompts.txt", defaults, 0)
    assert not broken and [prompt.index for prompt in found] == [0, 2]
    texts = [pair[0].tokenizer.decode(prompt.tokens) for prompt in found]
    assert texts == ["def f(x):", '"quoted"']
    (tmp_path / "prompts.jsonl").write_text("def f(x):\nclass A:\n")
    with pytest.raises(ValueError, match="seem to be plain text: .* ends with .txt") as caught:
        jsonl_input.read(pair[0], tmp_path / "prompts.jsonl", defaults, 0)
    assert "max_broken" not in str(caught.value)
    (tmp_path / "prompts.txt").write_text('{"prompt": "def f(x):"}\n{"prompt": "class A:"}\n')
    with pytest.raises(ValueError, match="each line is a JSON object .* ends with .jsonl"):
        jsonl_input.read(pair[0], tmp_path / "prompts.txt", defaults, 0)


def test_the_progress_of_a_resumed_run_tells_its_own_tokens_apart():
    said = str(Progress(done=600, total=600, tokens=1000, rounds=500, seconds=2, earlier=56))
    assert said.startswith("600 of 600 prompts (56 from before) · 1,000 tokens in this run · 500 ")
    assert "before" not in str(Progress(done=6, total=6, tokens=10, rounds=5, seconds=2))


def test_wrong_arguments_are_refused_before_anything_compiles(pair, tmp_path):
    def refused(match, prompts=RAGGED, error=ValueError, **options):
        with pytest.raises(error, match=match):
            specjax.serve_offline(pair[0], prompts, **flat(**options))

    def all_refused():
        refused("batch=0", batch=0)
        refused("gather=9", gather=9)
        refused("max_broken=-1", max_broken=-1)
        refused("max_new_tokens=0", max_new_tokens=0)
        refused("seed=-1", seed=-1)
        refused("drafter='no'", drafter="no")
        refused("it holds no prompt", prompts=[])
        refused("give a list of them", prompts={"prompt": "a"}, error=TypeError)
        refused("reads text, and no features", prompts=[{"prompt": "a", "features": "x.npy"}])
        refused("stop=.*an empty string", stop=[""])
        refused("id=.* cannot be written as JSON", prompts=[{"prompt": "a", "id": object()}])
        refused("absent", prompts=tmp_path / "absent", error=FileNotFoundError)

    assert compilations(all_refused) == 0


# ---------------------------------------------------------------- the command


def test_the_command_serves_a_file_reports_and_goes_on(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compile_cache, "enable", lambda: None)
    file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(map(json.dumps, RAGGED)) + "\nbroken\n")
    command = ["serve-offline", str(file), "-o", str(output), "--batch", "2"]
    command += ["--model", str(folders["target"])]
    assert cli.main(command) == 2
    assert "1 of 6 prompts are broken:\n  line 6: it is not JSON" in capsys.readouterr().err
    assert not output.exists()
    assert cli.main([*command, "--max-broken", "1"]) == 0
    out, err = capsys.readouterr()
    assert "5 of 5 prompts · 47 tokens" in out and "line 6: it is not JSON" in err
    assert len(output.read_text().splitlines()) == 5
    assert cli.main([*command, "--max-broken", "1", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["earlier"] == summary["prompts"] == 5 and summary["tokens"] == 0


def test_grammars_that_differ_have_different_names(pair):
    named = {
        processors.processor_name(processors.json_text(pair[0], top=top))
        for top in ("any", "array")
    }
    assert (
        len(named | {processors.processor_name(None), processors.processor_name(drafter_of)}) == 4
    )
