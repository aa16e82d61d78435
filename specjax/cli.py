"""The command: ``specjax generate``, ``specjax plan`` and ``specjax train``."""

from __future__ import annotations

import argparse
import json
import math
import os
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import specjax

from . import job

PROMPT = '''\
import dataclasses


@dataclasses.dataclass
class Stack:
    """A last-in, first-out stack."""

    items: list

    def push(self, item):
        """Add an item on top."""
        self.items.append(item)

    def pop(self):
'''
USAGE_ERROR, INTERRUPTED = 2, 130  # exit codes
DRAFTED = "bold green"  # how accepted draft tokens look on a terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        if argv[:1] == ["train"]:
            return train(argv[1:])
        if sys.stdout is None:  # closed before the start, as by >&-
            raise OSError("stdout is closed: there is nowhere to write to")
        arguments = parser().parse_args(argv)
        return {"generate": generate, "plan": plan}[arguments.command](arguments)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError) as error:
        print(f"specjax: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The arguments of the command."""
    top = argparse.ArgumentParser(
        prog="specjax", description="Speculative decoding in JAX: the same text, faster."
    )
    top.add_argument("--version", action="version", version=f"specjax {specjax.__version__}")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("train", help="train targets and drafters; see specjax train --help")
    p = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues a prompt and streams the text to stdout; figures go to stderr. On "
        "a terminal, accepted draft tokens stand out from the target's own.",
    )
    p.add_argument("prompt", nargs="?", help="default: what is piped in, else a built-in example")
    p.add_argument("--file", help="read the prompt from this file")
    p.add_argument("--model", default="embedded", help="embedded, a folder, or a hub name")
    p.add_argument(
        "--drafter",
        help="draft (the model's own), ngram, none, or the folder or hub name of a draft model; "
        "default: ngram",
    )
    p.add_argument(
        "--num-draft",
        type=_drafts,
        help="tokens drafted a round, 3 by default; auto: as many as pay, from none to 7",
    )
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    p.add_argument("--top-k", type=int)
    p.add_argument("--top-p", type=float)
    p.add_argument("--min-p", type=float)
    p.add_argument("--repetition-penalty", type=float)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--rule", default="auto", help="acceptance rule; auto is lossless")
    p.add_argument("--dtype", help="of the weights: float32, bfloat16, float16")
    p.add_argument("--quantize", help="hold the model's weights as int8 or fp8: approximate")
    p.add_argument("--drafter-quantize", help="the same for the draft model: stays lossless")
    p.add_argument("--json", action="store_true", help="one JSON object instead of text")
    p.add_argument(
        "--compare",
        action="store_true",
        help="run plain and speculative decoding in turn, and report both rates",
    )
    p.add_argument("--repetitions", type=int, default=9, help="of --compare, at least 6")
    p = commands.add_parser(
        "plan",
        help="find the fastest drafter, number of drafts and batch for your prompts",
        description="Decodes your prompts in a few ways, predicts the rate of many, and says which "
        "to take: plain decoding, where no drafter is worth its cost. Ctrl-C ends it with what is "
        "known by then.",
    )
    p.add_argument("--model", default="embedded", help="embedded, a folder, or a hub name")
    p.add_argument(
        "--drafter",
        action="append",
        help="draft (the model's own), ngram, or the folder or hub name of a draft model; may be "
        "repeated; default: ngram, and draft where the model has one",
    )
    p.add_argument(
        "--prompts",
        help='a file of prompts: one a line, or in a .jsonl file one string or {"text": ...} a '
        "line; default, for the embedded model: held-out prompts that ship with it",
    )
    p.add_argument(
        "--limit", type=int, default=8, help="prompts used at most, evenly spread over the file"
    )
    p.add_argument("--num-draft", type=int, nargs="+", default=[1, 3, 7, 15])
    p.add_argument("--batch", type=int, nargs="+", default=[1])
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    p.add_argument("--dtype", help="of the weights: float32, bfloat16, float16")
    p.add_argument("--quantize", help="hold the model's weights as int8 or fp8: approximate")
    p.add_argument(
        "--verify",
        type=int,
        nargs="?",
        const=3,
        default=0,
        metavar="N",
        help="also run the N best (default 3) and plain decoding, and choose by what is measured",
    )
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return top


def _drafts(text: str) -> int | str:
    """What ``--num-draft`` takes."""
    return text if text == job.AUTO else int(text)


def train(argv: Sequence[str]) -> int:
    """``specjax train``: hands over to the training package."""
    try:
        from specjax.train.cli import main as run

        return run(argv)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"training needs {error.name}, which is not installed: pip install 'specjax[train]'"
        ) from None


def generate(arguments: argparse.Namespace) -> int:
    """``specjax generate``: loads, streams or compares, reports."""
    begin = time.perf_counter()
    prompt = read_prompt(arguments.prompt, arguments.file)
    lm = set_up(arguments)
    options = options_of(arguments)
    if arguments.compare:
        return compare(lm, prompt, options, arguments)
    stream = specjax.stream_text(lm, prompt, **options)
    seconds = {"ready": time.perf_counter() - begin}
    screen = None if arguments.json else Screen(prompt)
    before = 0  # tokens when the first text came
    try:
        for piece in stream:
            if "first_text" not in seconds:
                seconds["first_text"] = time.perf_counter() - begin
                before = stream.num_tokens
            if screen:
                screen.show(piece)
    except KeyboardInterrupt:
        if not stream.num_tokens:
            raise
    seconds["total"] = time.perf_counter() - begin
    result = stream.generation
    after = seconds["total"] - seconds.get("first_text", 0)
    rate = (stream.num_tokens - before) / after if stream.num_tokens > before else None
    if screen:
        screen.end(result, rate)
    else:
        print(json.dumps(describe(result, prompt, lm) | {"seconds": seconds, "rate": rate}))
    return 0 if result.finished else INTERRUPTED


def set_up(arguments: argparse.Namespace):
    """What every command does before it decodes; returns the model."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from . import compile_cache

    compile_cache.enable()
    return specjax.load(arguments.model, dtype=arguments.dtype, quantize=arguments.quantize)


def read_prompt(argument: str | None, file: str | None) -> str:
    """The prompt from the argument, the file, the pipe, or the built-in one."""
    if argument is not None and file is not None:
        raise ValueError("a prompt and --file: give one of them")
    if argument is None and file is None:
        return _piped() or PROMPT  # an empty pipe is how many launchers spell "no input"
    if file is not None:
        try:
            argument = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"--file {file} is not UTF-8 text") from None
        except OSError as error:
            raise ValueError(f"--file {file}: {error.strerror}") from None
    if not argument:
        raise ValueError(
            "the prompt is empty: give at least one character, or none at all for "
            "the built-in example"
        )
    return argument


def _piped() -> str:
    """What a pipe or a redirected file holds; nothing where stdin is a terminal or absent."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or no file behind it
        return ""
    piped = stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind)
    if not piped:
        return ""
    sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # as --file, whatever the locale
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ValueError("the prompt that was piped in is not UTF-8 text") from None


def options_of(arguments: argparse.Namespace) -> dict:
    """The options of ``specjax.generate`` that the arguments ask for."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    options = {name: getattr(arguments, name) for name in (*names, "seed", "rule")}
    if arguments.num_draft is not None:
        options["num_draft"] = arguments.num_draft
    drafter = "ngram" if arguments.drafter is None else arguments.drafter
    if arguments.drafter_quantize:
        if drafter in ("ngram", "none", "plain"):
            raise ValueError(
                f"--drafter-quantize: --drafter {drafter} has no weights; give --drafter draft, or "
                "the folder or hub name of a draft model"
            )
        if drafter == "draft":
            drafter = job.DEFAULT_DRAFTS.get(arguments.model, drafter)
    if drafter not in ("draft", "ngram", "none", "plain"):
        drafter = specjax.load(drafter, dtype=arguments.dtype, quantize=arguments.drafter_quantize)
    return options | {"drafter": None if drafter == "none" else drafter}


class Screen:
    """Text to stdout as it comes, figures to stderr; colours only on a terminal."""

    def __init__(self, prompt: str):
        from rich.console import Console

        if hasattr(sys.stdout, "reconfigure"):  # some pipes cannot spell every character
            sys.stdout.reconfigure(errors="replace")
        # rich only colours: it must not wrap, mark up or highlight the text
        self.out = Console(file=sys.stdout, soft_wrap=True, markup=False, highlight=False)
        self.shown, self.ended = 0, True
        if self.out.is_terminal:  # at once: the first text may have to be compiled for
            self.out.print(prompt, style="dim", end="")

    def show(self, piece) -> None:
        if not self.out.is_terminal:
            sys.stdout.write(piece.text)
        else:
            self.out.print(piece.text, style=DRAFTED if piece.from_draft else None, end="")
        sys.stdout.flush()
        self.shown += len(piece.text)
        self.ended = piece.text.endswith("\n")

    def end(self, result, rate: float | None) -> None:
        rest = result.text[self.shown :]  # committed when Ctrl-C came, but not shown yet
        ended = rest.endswith("\n") if rest else self.ended
        print(rest, end="" if ended else "\n", flush=True)
        line = f"{result.stats} · {len(result.tokens[0])} tokens"
        line += f" · {rate:,.0f} tokens/s" if rate else ""
        line += "" if result.finished else " · interrupted"
        print(f"\n{line}", file=sys.stderr)
        if self.out.is_terminal:
            from rich.text import Text

            drafted = ("accepted draft tokens", DRAFTED)
            self.out.print(Text.assemble(("prompt", "dim"), " · ", drafted, " · the target's own"))


def describe(result, prompt: str, lm) -> dict:
    """A generation as plain data."""
    stats = result.stats
    acceptance = stats.acceptance
    return {
        "model": lm.name,
        "drafter": stats.drafter,
        "rule": stats.rule,
        "prompt": prompt,
        "text": result.text,
        "finished": result.finished,
        "tokens": result.tokens[0].tolist(),
        "from_draft": result.from_draft[0].tolist(),
        "prompt_tokens": result.prompts[0].tolist(),
        "stats": {
            "rounds": int(stats.rounds.sum()),
            "drafted": int(stats.drafted.sum()),
            "accepted": int(stats.accepted.sum()),
            "tau": stats.tau,
            "acceptance": None if math.isnan(acceptance) else acceptance,
            "acceptance_by_position": stats.acceptance_by_position.tolist(),
            "approximate": bool(stats.approximate),
            "approximation": stats.approximate or None,
        },
    }


def compare(lm, prompt: str, options: dict, arguments: argparse.Namespace) -> int:
    """``specjax generate --compare``."""
    if options["drafter"] in (None, "plain"):
        raise ValueError("--compare sets a drafter beside plain decoding: give a --drafter")
    result = specjax.compare(lm, prompt, repetitions=arguments.repetitions, **options)
    if not arguments.json:
        print(result)
        return 0
    figures = {
        "plain_rate": result.plain_rate,
        "speculative_rate": result.speculative_rate,
        "ratio": result.ratio,
        "interval": list(result.interval),
        "confidence": result.confidence,
        "repetitions": result.repetitions,
        "identical": result.identical,
        "repeated_4grams": result.repeated,
    }
    print(json.dumps(describe(result.speculative, prompt, lm) | {"compare": figures}))
    return 0


def plan(arguments: argparse.Namespace) -> int:
    """``specjax plan``: measures, and prints the candidates and the choice."""
    from rich.console import Console

    prompts = read_prompts(arguments.prompts, arguments.model, arguments.limit)
    lm = set_up(arguments)
    names = arguments.drafter
    if names is not None:
        own = ("draft", "ngram")
        names = [n if n in own else specjax.load(n, dtype=arguments.dtype) for n in names]
    with Console(stderr=True).status("planning") as status:  # shown on terminals only
        found = specjax.plan(
            lm,
            prompts,
            drafters=names,
            num_drafts=arguments.num_draft,
            batches=arguments.batch,
            temperature=arguments.temperature,
            max_new_tokens=arguments.max_new_tokens,
            verify=arguments.verify,
            progress=status.update,
        )
    if arguments.json:
        print(json.dumps(found.as_json()))
    else:
        if sys.stdout.isatty():
            Console().print(found.table())
            print(found.verdict)
        else:
            print(found)
        print(f"planned in {found.seconds:.0f} s", file=sys.stderr)
    return 0 if found.finished else INTERRUPTED


def read_prompts(file: str | None, model: str, limit: int) -> list[str]:
    """At most ``limit`` prompts of a file, evenly spread; the shipped ones for ``embedded``."""
    if limit < 1:
        raise ValueError(f"--limit {limit}: give at least 1")
    if file is None:
        if model != "embedded":
            raise ValueError(
                "--prompts: name a file of prompts of the kind that you will decode; only the "
                "embedded model has some of its own"
            )
        file = Path(__file__).parent / "data" / "heldout_prompts.jsonl"
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"--prompts {file} is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"--prompts {file}: {error.strerror}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if Path(file).suffix == ".jsonl":
            line = _prompt_of(line, f"--prompts {file}, line {number}")
        prompts.append(line)
    if not prompts:
        raise ValueError(f"--prompts {file}: there is no prompt in it")
    count = min(limit, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _prompt_of(line: str, where: str) -> str:
    """The prompt in a line of a .jsonl file."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON: {error}") from None
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise ValueError(f'{where}: give a string that is not empty, or {{"text": "..."}}')
    return text
