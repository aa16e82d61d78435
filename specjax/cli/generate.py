"""``specjax generate``: continues a prompt, or compares speculative with plain decoding."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

import jax

import specjax

from .options import (
    INTERRUPTED,
    NOTHING_TO_DRAW,
    add_decoding,
    options_of,
    require,
    set_up,
)
from .prompts import add_prompt, asked
from .screen import Screen, describe
from .sessions import save_session


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues a prompt and streams the text to stdout; figures go to stderr. On "
        "a terminal, accepted draft tokens have another colour than the target's own tokens. The "
        "exit code is 1 if the law gave no token any probability.",
    )
    add_prompt(p)
    add_decoding(p)
    p.add_argument(
        "--num-samples",
        "--n",
        type=int,
        default=1,
        help="the number of texts for the prompt, which is read once; 1 by default",
    )
    p.add_argument(
        "--logprobs",
        nargs="?",
        const="raw",
        choices=("raw", "law"),
        help="with --json: also the log-probability of each token, by the model itself (raw, the "
        "default) or under the law from which the token was drawn (law)",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    p.add_argument(
        "--compare",
        action="store_true",
        help="run plain and speculative decoding in turn, and report both rates",
    )
    p.add_argument(
        "--repetitions", type=int, help="with --compare: pairs of runs, 9 by default, at least 6"
    )


def run(arguments: argparse.Namespace) -> int:
    """Continues the prompt or compares, and prints figures; returns the exit code."""
    begin = time.perf_counter()
    if arguments.logprobs and not arguments.json:
        raise ValueError("--logprobs prints a number for each token: give --json as well")
    require(arguments, "compare", "repetitions")
    prompt, heard = asked(arguments)
    lm = set_up(arguments)
    options = options_of(arguments, lm)
    options |= {"num_samples": arguments.num_samples, "logprobs": arguments.logprobs or False}
    options["inputs"] = heard
    if arguments.compare:
        return compare(lm, prompt, options, arguments)
    stream = specjax.stream_text(lm, prompt, **options)
    seconds = {"ready": time.perf_counter() - begin}
    prints = jax.process_index() == 0  # every process has the text, and only the first prints it
    screen = Screen(prompt if heard is None else "") if prints and not arguments.json else None
    # tokens and time after the prompt and after the first rounds, whose programs are made meanwhile
    marks: list[tuple[int, float]] = []
    try:
        for piece in stream:
            if "first_text" not in seconds:
                seconds["first_text"] = time.perf_counter() - begin
            if len(marks) < 2 and stream.num_tokens > (marks[-1][0] if marks else 0):
                marks.append((stream.num_tokens, time.perf_counter() - begin))
            if screen and arguments.num_samples == 1:  # pieces of several texts would mix
                screen.show(piece)
    except KeyboardInterrupt:
        if not stream.num_tokens:
            raise
    seconds["total"] = time.perf_counter() - begin
    save_session(arguments, options)
    result = stream.generation
    before, since = marks[1] if len(marks) == 2 else (stream.num_tokens, 0.0)
    later = stream.num_tokens - before
    rate = later / (seconds["total"] - since) if later else None
    if screen:
        if arguments.num_samples > 1:
            screen.samples(result)
        screen.end(result, rate)
    elif prints:
        print(
            json.dumps(
                describe(result, prompt, lm, stream.rule) | {"seconds": seconds, "rate": rate}
            )
        )
    if "no token" in result.reasons:
        return NOTHING_TO_DRAW
    return 0 if result.finished else INTERRUPTED


def compare(lm, prompt: str | list[int], options: dict, arguments: argparse.Namespace) -> int:
    """Prints the comparison of speculative with plain decoding; returns the exit code."""
    if options["drafter"] in (None, "none", "plain"):
        raise ValueError("--compare compares a drafter with plain decoding: give a --drafter")
    if arguments.repetitions is not None:
        options["repetitions"] = arguments.repetitions
    result = specjax.compare(lm, prompt, **options)
    save_session(arguments, options)
    if not arguments.json:
        print(result)
        return 0
    figures = {
        "drafting": result.drafting,
        "plain_rate": result.plain_rate,
        "speculative_rate": result.speculative_rate,
        "ratio": result.ratio,
        "interval": list(result.interval),
        "confidence": result.confidence,
        "repetitions": result.repetitions,
        "identical": result.identical,
        "differing": result.differing,
        "margins": list(result.margins),
        "price": None if result.price is None else dataclasses.asdict(result.price),
        "repeated_4grams": result.repeated,
    }
    said = describe(result.speculative, prompt, lm, result.rule)
    print(json.dumps(said | {"compare": figures}))
    return 0
