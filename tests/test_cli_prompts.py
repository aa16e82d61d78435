"""Commands that read a file of prompts: what they print, and what they say of a wrong file."""

import json

import pytest

from specjax.cli import prompts

pytest_plugins = ["pairs", "command_line"]


def test_plan_prints_a_table_and_a_verdict_or_json(run, folders, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"def f(x):"\n\n{"text": "import os"}\n{"text": "class A"}\n')
    options = ["--model", folders["target"], "--prompts", prompts, "--num-draft", 1, 2]
    options += ["--max-new-tokens", 8]
    code, out, err = run(*options, command="plan")
    assert code == 0 and "3 prompts" in out and "ngram" in out
    assert ("plain decoding wins" in out) != ("use ngram" in out) and "planned in" in err
    code, out, err = run(*options, "--json", "--limit", 2, "--drafter", "ngram", command="plan")
    found = json.loads(out)
    assert code == 0 and err == "" and found["prompts"] == 2 and found["finished"]
    assert found["choice"] in found["candidates"] and len(found["candidates"]) == 3


def test_tree_counts_choices_and_writes_a_tree_that_generate_takes(run, folders, tmp_path):
    prompts, tree = tmp_path / "prompts.txt", tmp_path / "tree.json"
    prompts.write_text("def f(x):\nimport os\n")
    options = ["--model", folders["target"], "--drafter", folders["target"], "--depth", 2]
    options += ["--prompts", prompts, "--max-new-tokens", 8, "--ranks", 2, "--nodes", 1, 2]
    code, out, _ = run(*options, "--output", tree, command="tree")
    assert code == 0 and "depth 1: 100.0%" in out  # a target guesses its own tokens
    assert tree.exists() == ("plain decoding is faster" not in out)
    if tree.exists():
        assert json.loads(tree.read_text()) in ([-1, 0], [-1, 0, 1])
    code, _, err = run(*options, "--output", tmp_path / "no" / "x.json", command="tree")
    assert code == 2 and "no file can be written there" in err


def test_prompts_are_spread_evenly_over_the_file(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"prompt {i}\n\n" for i in range(10)))
    assert prompts.read_prompts(str(file), "m", 3) == ["prompt 0", "prompt 3", "prompt 6"]
    assert len(prompts.read_prompts(str(file), "m", 99)) == 10
    assert len(prompts.read_prompts(None, "embedded", 8)) == 8  # those that ship


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_prompt_ends_where_its_line_ends(name, tmp_path):
    """Other characters at which Python divides lines belong to it."""
    texts = ["a\u2028b\u0085c", "d\x0ce\x1cf" if name.endswith("txt") else "d", "g"]
    lines = [texts[0], {"text": texts[1]}, {"prompt": texts[2]}]
    said = texts if name.endswith("txt") else [json.dumps(x, ensure_ascii=False) for x in lines]
    content = "\ufeff" + "\r\n".join(said)  # a byte-order mark is no part of a prompt
    (tmp_path / name).write_bytes(content.encode())
    assert prompts.read_prompts(str(tmp_path / name), "m", 9) == texts


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("absent", None, "No such file"),
        ("empty", "\n \n", "it holds no prompt"),
        ("broken.jsonl", '"a"\n{"text": \n', "line 2: it is not JSON"),
        ("both.jsonl", '{"prompt": "a", "text": "b"}\n', "line 1: give a string"),
        ("other.jsonl", '{"words": "a"}\n', "line 1: give a string"),
    ],
)
def test_a_file_without_prompts_is_one_line(name, text, said, run, folders, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    options = ["--model", folders["target"], "--prompts", tmp_path / name]
    code, out, err = run(*options, command="plan")
    assert code == 2 and out == "" and said in err and len(err.splitlines()) == 1


def test_plan_takes_the_built_in_prompt_where_none_is_given(run, folders):
    code, out, _ = run("--model", folders["target"], command="plan")
    assert code == 0 and "plain" in out
