"""The command: a first success without arguments, clean streams, one line an error."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from interruptions import interrupt_screen

import specjax
from specjax import cli
from specjax.cli import commands, prompts, screen
from specjax.cli.commands import COMMANDS, parser
from specjax.cli.parsing import with_left_out_values
from specjax.drafters import registry
from specjax.text import round_costs
from specjax.text.generation import Piece

pytest_plugins = ["pairs", "command_line"]


def test_text_goes_to_stdout_and_figures_to_stderr(run, pair):
    code, out, err = run("def f(x):", "--drafter", "ngram")
    wanted = specjax.generate(pair[0], "def f(x):", drafter="ngram", max_new_tokens=24)
    assert code == 0 and out.rstrip("\n") == wanted.text.rstrip("\n")
    assert str(wanted.stats) in err and "24 tokens" in err


def test_json_is_one_object_and_agrees_with_generate(run, pair, folders):
    code, out, err = run("def f(x):", "--json", "--drafter", folders["draft"], "--num-draft", 3)
    found = json.loads(out)
    wanted = specjax.generate(
        pair[0], "def f(x):", drafter=pair[1], max_new_tokens=24, drafting=specjax.Drafting(num=3)
    )
    assert code == 0 and err == ""
    assert found["text"] == wanted.text and found["tokens"] == wanted.tokens[0].tolist()
    assert found["from_draft"] == wanted.from_draft[0].tolist()
    assert found["stats"]["tau"] == wanted.stats.tau
    assert (
        0 < found["seconds"]["ready"] < found["seconds"]["first_text"] < found["seconds"]["total"]
    )


def test_without_drafts_json_has_null_for_the_acceptance(run):
    assert json.loads(run("a", "--json", "--drafter", "none")[1])["stats"]["acceptance"] is None


def test_the_prompt_comes_from_the_argument_the_file_the_pipe_or_the_built_in_one(
    tmp_path, monkeypatch, capsys
):
    file = tmp_path / "prompt"
    file.write_text("from a file")
    assert prompts.read_prompt("given", None) == "given"
    assert prompts.read_prompt(None, str(file)) == "from a file"
    monkeypatch.setattr("sys.stdin", None)  # closed, as under some launchers
    assert prompts.read_prompt(None, None) == prompts.PROMPT
    with file.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert prompts.read_prompt(None, None) == "from a file"
    file.write_bytes("é".encode())
    with file.open(encoding="ascii") as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert prompts.read_prompt(None, None) == "é"
    file.write_bytes(b"\xff")
    with file.open() as stream, pytest.raises(ValueError, match="piped in is not UTF-8"):
        monkeypatch.setattr("sys.stdin", stream)
        prompts.read_prompt(None, None)
    with open(os.devnull) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert prompts.read_prompt(None, None) == prompts.PROMPT
    assert not capsys.readouterr().err
    file.write_bytes(b"")
    with file.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert prompts.read_prompt(None, None) == prompts.PROMPT
    assert "the pipe is empty" in capsys.readouterr().err


def test_a_terminal_shows_accepted_tokens_apart_and_says_which(run, folders, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = run("def f(x):", "--drafter", folders["target"], "--num-draft", 3)
    bold_green, dim, plain = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"
    first = out.removeprefix(f"{dim}def f(x):{plain}")  # the first token is no draft's
    assert first != out and not first.startswith(bold_green)
    assert out.count(bold_green) >= 6 + 1  # six rounds of accepted tokens, and the legend
    assert f"{bold_green}accepted draft tokens{plain}" in out


def test_ctrl_c_prints_what_was_generated(run, monkeypatch):
    whole = run("def f(x):", "--drafter", "ngram")[1]
    shown = interrupt_screen(monkeypatch, 3)
    code, out, err = run("def f(x):", "--drafter", "ngram")
    assert code == 130 and "interrupted" in err
    assert out.startswith("".join(shown)) and whole.startswith(out.rstrip("\n"))
    assert len(out) < len(whole)


def test_ctrl_c_ends_the_process_and_is_heard_in_a_callback_of_the_collector(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", lambda *_: None)
        for code in (0, 2, 130):
            patched.setattr(cli, "main", lambda code=code: code)
            assert cli.command() == code
    assert ended == [130]  # XLA's threads may still compile, and would crash a slower end

    class Collected:
        def __del__(self):
            raise KeyboardInterrupt  # which Python prints and drops

    usual, begin = sys.unraisablehook, time.monotonic()
    # a shell starts what it runs in the background with Ctrl-C ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), cli._heard_interrupts():
            Collected()
            time.sleep(10)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sys.unraisablehook is usual and time.monotonic() - begin < 5


def test_a_pipe_that_cannot_spell_a_character_gets_another(monkeypatch):
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", pipe)
    screen.Screen("").show(Piece("é=1", from_draft=True))
    assert pipe.buffer.getvalue() == b"?=1"


def test_compare_prints_rates_ratio_tau_and_sameness_and_what_was_compared(run, folders):
    code, out, _ = run("def f(x):", "--compare", "--repetitions", 6)
    assert code == 0
    for word in ("plain", "speculative", "ratio", "6 pairs", "τ", "4-grams", "yes, all 24 tokens"):
        assert word in out
    wins, loses, unclear = "speculation wins", "speculation loses", "no difference"
    assert sum(verdict in out for verdict in (wins, loses, unclear)) == 1
    assert out.startswith(
        f"{folders['target']}: plain decoding beside drafter ngram, 3 tokens a round, rule greedy"
    )
    options = ["--temperature", 1, "--drafter", folders["draft"], "--tree", "2x1"]
    _, out, _ = run("a", "--compare", "--json", "--repetitions", 6, *options)
    found = json.loads(out)
    assert found["compare"]["identical"] is None  # tokens are drawn
    assert found["compare"]["price"] is None  # and the rule is lossless
    assert found["rule"] == "rejection"  # which auto stands for where drafts have laws
    assert found["compare"]["drafting"] == (
        "drafter draft, trees of 4 tokens, 2 deep, rule rejection"
    )


REFUSED = {
    "an empty prompt": ([""], "prompt is empty"),
    "an empty prompt by name": (["--prompt", ""], "prompt is empty"),
    "a file that is absent": (["--file", "absent.txt"], "--file absent.txt: No such file"),
    "a file that is no text": (["--file", sys.executable], "not UTF-8"),
    "prompt and file": (["a", "--file", "b"], "give one of the two"),
    "a drafter that is absent": (["a", "--drafter", "./absent"], "./absent"),
    "no draft model of its own": (["a", "--drafter", "draft"], "no draft model of its own"),
    "a negative temperature": (["a", "--temperature", "-1"], "--temperature -1.0 is out"),
    "a seed of too many digits": (["a", "--seed", "9" * 30], "--seed 9+: .*2\\*\\*32"),
    "a number that is out of range": (["a", "--num-draft", "99"], "--num-draft 99: the number"),
    "an argument that is no text": (["a\udcff"], "not UTF-8"),
    "a drafter made of others": (
        ["a", "--drafter", "unon"],
        "did you mean .union.. Accepted",
    ),
    "a folder without a name": (["a", "--drafter", ""], "--drafter '' is unknown"),
    "an unknown dtype": (["a", "--dtype", "int3"], "int3.*bfloat16"),
    "numbers without a place": (["a", "--logprobs"], "give --json as well"),
    "plain against plain": (["a", "--compare", "--drafter", "none"], "give a --drafter"),
    "a number of no drafts": (
        ["a", "--drafter", "none", "--num-draft", "3"],
        "--num-draft 3: --drafter none drafts nothing; leave --num-draft out",
    ),
    "a number of copies beside a tree": (
        ["a", "--prompt-lookup-max", "4", "--num-draft", "5", "--tree", "3x1"],
        "--tree '3x1' and --num-draft 5: give one of the two",
    ),
    "a tree without a name": (["a", "--tree", ""], "--tree '': .*Accepted"),
    "no number of drafts": (["a", "--num-draft", "abc"], "'abc' is no number .*: give 1 to 64, or"),
    "pairs without a comparison": (["a", "--repetitions", "9"], "used with --compare only"),
    "tokens of no session": (["a", "--session-tokens", "512"], "used with --session only"),
    "a whole copier": (["a", "--replicate-drafter", "--mesh", "data=1"], "auto has no weights"),
    "a whole drafter without a mesh": (["a", "--replicate-drafter"], "or give --mesh"),
    "a prompt that was given twice": (["a", "--prompt", "b"], "--prompt and .*: give one of the"),
    "a prompt without quotes": (["def", "f"], "more than one prompt, 'f' among .* in quotes"),
    "a run in place of its export": (
        ["a", "--drafter", "RUN"],
        r"did you mean \S*run/model\? it h",
    ),
    "an unknown option": (["a", "--no-such-option"], "--no-such-option"),
    "a misspelt option": (["a", "--tempature", "1"], "did you mean --temperature"),
    "a seed that is no number": (["a", "--seed", "abc"], "--seed: invalid int value: 'abc'"),
    "a rule that does not exist": (
        ["a", "--rule", "rejecton"],
        "did you mean 'rejection'",
    ),
    "a drafter that does not exist": (["a", "--drafter", "eagle4"], "did you mean 'eagle'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_one_line_and_exit_code_2(what, run, tmp_path):
    arguments, message = REFUSED[what]
    (tmp_path / "run" / "model").mkdir(parents=True)  # as a recipe of specjax.train leaves it
    for folder in (tmp_path / "run", tmp_path / "run" / "model"):
        (folder / "config.json").write_text("{}")
    arguments = [str(tmp_path / "run") if word == "RUN" else word for word in arguments]
    code, out, err = run(*arguments)
    assert code == 2 and out == ""
    assert [line for line in err.splitlines() if "error" in line] == err.splitlines()[-1:]
    assert re.search(message, err)


LLAMA = str(Path(__file__).parents[1] / "benchmarks" / "shapes" / "llama-3.1-70b.json")
IGNORED = {
    "a rule beside rules": ("quality --rules greedy --rule delta", "--rule delta: give one of"),
    "a session of several rules": ("quality --session FILE", "leave --session out"),
    "a temperature of no engine": ("audit delta --temperature 0.5", "with --samples only"),
    "a filter of no engine": ("audit delta --top-k 5", "--top-k 5: .* with --samples only"),
    "a model of no samples": ("audit delta --model TARGET", "with --samples only"),
    "a type of no samples": ("audit --dtype float16", "with --samples only"),
    "samples drawn and given": (
        "audit --samples FILE --num-samples 9",
        "no text is drawn",
    ),
    "weights of no drafter": (
        f"plan-memory --model {LLAMA} --drafter-quantize int8",
        "--drafter-quantize 'int8': there is no draft model; give --drafter, or leave --drafter-q",
    ),
    "a whole drafter that is none": (
        f"plan-memory --model {LLAMA} --replicate-drafter",
        "error: --replicate-drafter: there is no draft model",
    ),
    "a mesh of no divisor": (
        f"plan-memory --model {LLAMA} --mesh model=7",
        "--mesh: model=7 devices .*accepted for model: 1, 2, 4, 8 ",
    ),
    "a command that does not exist": ("genrate a", "unknown command genrate: did you mean gen"),
    "a part of a command": ("serve a", "unknown command serve: did you mean serve-offline"),
    "a recipe that does not exist": ("train egle3", "unknown recipe egle3: did you mean eagle3"),
    "the drafter draft for a recipe": ("train draft", "the recipe distill trains a draft model"),
    "a drafter for a recipe": ("train medusa", "medusa: the recipe heads trains medusa. Known"),
    "a word too many": ("calculator --tau 2 --num-draft 3 4", "error: unknown argument 4 "),
    "a tree of copies": ("tree --model TARGET", "name a draft model or heads"),
    "a tree of a table": (
        "tree --model TARGET --drafter recycling --output tree.json",
        "'recycling' has no best, second and third choice",
    ),
}


@pytest.mark.parametrize("what", IGNORED)
def test_an_option_that_would_be_ignored_is_refused(what, run, folders):
    words, message = IGNORED[what]
    words = words.replace("TARGET", str(folders["target"])).split()
    code, out, err = run(*words[1:], command=words[0])
    assert code == 2 and out == "" and re.search(message, err.splitlines()[-1])


def test_a_warning_is_one_line_without_a_place_in_the_code(monkeypatch, capsys):
    def warn(_):
        warnings.warn("fewer tokens may be accepted", stacklevel=1)
        return 0

    monkeypatch.setattr(commands, "run", warn)

    def show(message, category, file, line, *_):  # as Python does, where pytest keeps it
        sys.stderr.write(warnings.formatwarning(message, category, file, line))

    usual = warnings.formatwarning
    monkeypatch.setattr(warnings, "showwarning", show)
    assert cli.main([]) == 0
    assert capsys.readouterr().err == "specjax: warning: fewer tokens may be accepted\n"
    assert warnings.formatwarning is usual


def test_drafters_are_listed_as_they_are_typed(run):
    code, out, err = run(command="drafters")
    assert code == 0 and not err
    names = {name for line in out.splitlines() for name in line.split("  ")[1:2]}
    listed = {one for name in names for one in name.split(", ")}
    assert {"auto", *registry.table_names(), *registry.head_names(), "none", "draft"} <= listed


@pytest.mark.parametrize(
    ("words", "prompt", "value"),
    [
        ("--json --logprobs a", "a", "raw"),
        ("--logprobs law a --json", "a", "law"),
        ("a --json --logprobs", "a", "raw"),
        ("--logprobs -- law", "law", "raw"),
    ],
)
def test_an_option_whose_value_may_be_left_out_takes_no_prompt(words, prompt, value):
    words = with_left_out_values(["generate", *words.split()], COMMANDS["generate"].add)
    arguments = parser().parse_args(words)
    assert (arguments.prompt, arguments.logprobs) == (prompt, value)


def test_every_option_is_explained_in_words_that_stand_alone():
    waiting = [parser()]
    for one in waiting:
        for action in one._actions:  # noqa: SLF001
            assert not re.match("of |for |the same", action.help or "of "), (one.prog, action)
            waiting += action.choices.values() if isinstance(action.choices, dict) else ()
    assert len(waiting) > 12


def test_a_trace_and_a_comparison_write_their_session(run, folders, tmp_path, monkeypatch):
    ended = SimpleNamespace(rounds=[], tokens=[], tau=0.0, approximate="", reason="length")
    ended.interrupted, ended.save = False, lambda file: 0
    monkeypatch.setattr(specjax, "trace", lambda lm, prompt, **options: ended)
    monkeypatch.setattr(specjax, "compare", lambda lm, prompt, **options: ended)
    monkeypatch.chdir(tmp_path)
    files = "a.session", "b.session"
    trace = ["a", "--model", folders["target"], "--session", files[0]]
    assert run(*trace, command="trace")[0] == 0
    assert run("a", "--compare", "--session", files[1])[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [*files]


def test_a_model_that_is_absent_is_one_line(run):
    code, out, err = run("a", model="./absent")
    assert code == 2 and out == "" and "./absent" in err and len(err.splitlines()) == 1


def test_train_hands_its_arguments_over(run, monkeypatch):
    from specjax.train import cli as training

    monkeypatch.setattr(training, "main", lambda argv: print(*argv) or 7)
    assert run("pretrain", "--config", "x", command="train") == (7, "pretrain --config x\n", "")


def test_without_arguments_there_is_help(run, capsys):
    assert cli.main([]) == 0 and "serve-offline" in capsys.readouterr().out
    assert "RECIPE" in run(command="train")[1]


def test_version_is_that_of_the_package(run):
    assert run(command="--version")[:2] == (0, f"specjax {specjax.__version__}\n")


def test_the_command_starts_without_noise_and_keeps_its_programs(folders, tmp_path):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONWARNINGS": "default"}
    environment["SPECJAX_NATIVE"] = "never"  # a line says where there is no compiler
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-m", "specjax", "generate", "--model", folders["target"]]
    command += ["--drafter", "none", "--json", "--max-new-tokens", "4"]
    done = subprocess.run(
        command, input="def f(x):", capture_output=True, text=True, env=environment, check=True
    )
    assert json.loads(done.stdout)["prompt"] == "def f(x):"
    assert done.stderr == ""
    assert any(path.is_file() for path in tmp_path.rglob("programs-*/*"))


@pytest.mark.parametrize("command", ["generate", "plan"])
def test_a_closed_stdout_is_one_line_and_no_traceback(command, folders):
    closed = f"{sys.executable} -m specjax {command} --model {folders['target']} >&-"
    done = subprocess.run(closed, shell=True, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "stdout is closed" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_stdout_is_named(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert cli.main([]) == 2
    assert capsys.readouterr().err == "specjax: error: stdout: No space left on device\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve-offline absent -o x --model TARGET", "prompts absent: No such file"),
        ("serve-offline FILE -o absent/x --model TARGET", "output absent/x: No such file"),
        ("audit --samples absent", "--samples absent: No such file"),
        ("datastore build *.absent -o x", "files: *.absent: there is no such file"),
    ],
)
def test_a_file_that_is_absent_is_named_with_its_argument(words, said, run, folders, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('"a"\n')
    places = {"TARGET": str(folders["target"]), "FILE": str(tmp_path / "prompts.jsonl")}
    command, *words = [places.get(word, word) for word in words.split()]
    code, out, err = run(*words, command=command)
    assert code == 2 and out == "" and said in err and len(err.splitlines()) == 1


def test_num_draft_is_a_number_or_auto(run, monkeypatch):
    cheap = round_costs.Timed(1, np.asarray([0.0, 1.0, 1.1, 1.2, 1.3]))  # on a slow machine, too
    monkeypatch.setattr(round_costs, "_measured", lambda _: ((cheap,), 0.0))
    monkeypatch.setattr(round_costs, "_KNOWN", {})
    code, out, _ = run("def f(x):", "--num-draft", "auto", "--json")
    found = json.loads(out)
    assert code == 0 and (found["drafter"], found["rule"]) == ("adaptive(ngram)", "greedy")
    code, _, err = run("def f(x):", "--num-draft", "often")
    assert code == 2 and "--num-draft" in err.splitlines()[-1]


def test_the_names_that_vllm_has_for_options_are_understood(run, pair):
    options = ["--speculative-model", "ngram", "--num-speculative-tokens", 2, "--n", 2]
    options += ["--prompt-lookup-max", 3, "--prompt-lookup-min", 1, "--stop", "\0", "--logprobs"]
    code, out, _ = run("def f(x):", "--json", *options)
    found = json.loads(out)
    drafter = specjax.drafters.NGram(num_draft=2, longest=3, shortest=1)
    wanted = specjax.generate(
        pair[0], "def f(x):", drafter=drafter, max_new_tokens=24, logprobs=True
    )
    assert code == 0 and [s["text"] for s in found["samples"]] == 2 * wanted.texts
    assert found["reason"] == wanted.reasons[0] and len(found["logprobs"]) == len(found["tokens"])
    code, _, err = run("a", "--drafter", "none", "--prompt-lookup-max", 3)
    assert code == 2 and "--prompt-lookup-max" in err
