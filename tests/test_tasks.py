"""Tasks: known answers, tests of code and their limits, and what an approximate rule costs."""

import json
import os
import sys
import time

import pytest
from toys import bag, like

import specjax
from specjax.analysis.tasks import Answer, PythonTests, task_of
from specjax.cli import prompts
from specjax.drafters import DraftModel

MODEL, PARAMS = bag(11, 3)
LM = specjax.LM.of(MODEL, PARAMS)
pytest_plugins = ["pairs"]
COMMON = dict(
    drafter=DraftModel(num_draft=3, model=MODEL), drafter_params=like(PARAMS, 1), max_new_tokens=16
)


@pytest.mark.parametrize(
    ("task", "right", "wrong"),
    [
        (Answer("18"), "She has 9 eggs, so $18.", "18 of them, then 19."),
        (Answer("18", "first"), " 18\n5 + 5 = 10", " 17, or 18"),
        (Answer("-1,250.50"), "it is -1250.5", "it is 1250.5"),
        (Answer("3"), "[1,2,3]", "1,003"),
        (Answer("3"), "10-3", "10 -3"),
        (Answer("B"), "B) it is", "Both"),
        (Answer("Paris"), "\n Paris, of course", "It is Paris"),
        (Answer("7"), "7", ""),
    ],
)
def test_an_answer_is_compared_by_value_or_by_its_beginning(task, right, wrong):
    assert task.solved("", right) and not task.solved("", wrong)


def test_code_is_run_with_its_tests_up_to_where_another_thing_begins():
    task = PythonTests("assert double(3) == 6")
    prompt = "def double(x):\n"
    assert task.solved(prompt, "    return 2 * x\n\ndef other(:\n")
    assert not task.solved(prompt, "    return 3 * x\n")
    assert not task.solved(prompt, "    return 2 * x +\n")
    assert not PythonTests("assert double(3) == 6", ends=()).solved(
        prompt, "    return 2 * x\n\ndef other(:\n"
    )


def test_code_that_ends_early_has_passed_no_tests():
    for early in ("    pass\nexit()\n", "    pass\nimport os\nos._exit(0)\n"):
        assert not PythonTests("assert double(3) == 6").solved("def double(x):\n", early)
    assert PythonTests("print('x' * 100)").solved("", "")


def test_what_runs_too_long_or_takes_too_much_is_ended_and_wrong(tmp_path):
    pid = tmp_path / "pid"
    late = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    child = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {late!r}])\n"
    child += "time.sleep(60)"
    assert not PythonTests(child, seconds=4).solved("", "")
    with pytest.raises(ProcessLookupError):  # its child was ended too
        for _ in range(100):
            os.kill(int(pid.read_text()), 0)
            time.sleep(0.05)
    if sys.platform == "linux":
        assert not PythonTests("x = bytearray(1 << 31)", megabytes=256).solved("", "")
    assert PythonTests("import os; assert not os.environ.get('HOME')").solved("", "")
    assert PythonTests("import os; assert os.listdir() == []").solved("", "")
    with pytest.raises(RuntimeError, match="an empty program does not run within seconds=0.001"):
        PythonTests("1", seconds=0.001).solved("", "")


class Even(specjax.analysis.tasks.Task):
    """Right where the text has an even number of tokens that are 3."""

    def solved(self, prompt, text):
        return text.count("3") % 2 == 0


def test_the_share_of_solved_tasks_is_that_of_the_texts(pair):
    lm = pair[0]
    texts, tasks = ["def f(x):", "class A:", "x = 3"], [Even(), None, Even()]
    options = dict(drafter=pair[1], max_new_tokens=12, probes=0)
    found = specjax.quality(lm, texts, rules=["auto"], tasks=tasks, **options)
    plain = specjax.generate(lm, texts, drafter=None, max_new_tokens=12).texts
    wanted = sum(Even().solved("", plain[i]) for i in (0, 2)) / 2
    assert [one.solved for one in found.rules] == [wanted, wanted] and found.num_tasks == 2
    assert str(found).splitlines()[1].endswith("solved")
    assert found.rules[0].speed == 1 and found.rules[1].speed > 0
    stopped = specjax.quality(lm, texts[0], rules=["auto"], stop_strings=["@"], **options)
    assert stopped.rules[1].speed is None and stopped.rules[1].solved is None
    with pytest.raises(ValueError, match="tasks: there are 2 for 3 prompts"):
        specjax.quality(lm, texts, tasks=tasks[:2], **options)


def test_compare_states_the_price_of_an_approximate_rule_alone():
    drafting = specjax.Drafting(rule="approximate-top-k:k=4")
    found = specjax.compare(LM, [1, 2], drafting=drafting, repetitions=6, **COMMON)
    assert found.price.loglik < found.price.plain_loglik and found.price.rank > 0
    assert found.price.best < 1 and "\nprice  " in str(found)
    assert specjax.compare(LM, [1, 2], repetitions=6, **COMMON).price is None


def test_a_file_of_prompts_may_hold_tasks(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"text": "3 + 4 =", "answer": 7, "where": "first"}, "x", {"text": "y", "tests": "1"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    found = prompts.read_tasks(file, 3, run_code=True)
    assert found == [Answer("7", "first"), None, PythonTests("1")]
    assert prompts.read_prompts(file, "x", 2) == ["3 + 4 =", "x"]
    assert prompts.read_tasks(file, 1, run_code=True) == [Answer("7", "first")]
    with pytest.raises(ValueError, match="line 3: its tests run code .* --run-code"):
        prompts.read_tasks(file, 3, run_code=False)
    assert prompts.read_tasks(None, 3, run_code=False) == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Answer(" "), "answer=' ': give a text"),
        (lambda: Answer("1", "middle"), "accepted are 'first' and 'last'"),
        (lambda: PythonTests(""), "give code"),
        (lambda: PythonTests("1", seconds=0), "must be above 0"),
        (lambda: PythonTests("1", seconds=float("inf")), "and finite"),
        (lambda: task_of({"tests": "1", "where": "first"}), 'give "answer" too'),
        (lambda: task_of({"answer": "1", "tests": "1"}), "not both"),
        (lambda: task_of({"answer": True}), "answer=True"),
    ],
)
def test_broken_tasks_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
