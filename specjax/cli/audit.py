"""``specjax audit``: whether a rule, or another engine's samples, keep a model's law."""

from __future__ import annotations

import argparse
import importlib

import specjax

from .. import acceptance
from .json_lines import read_json_lines
from .options import set_up

BIASED = 1  # exit code


def add(commands) -> None:
    """The arguments of the command."""
    p = commands.add_parser(
        "audit",
        help="test whether a rule, or another engine's samples, keep the target's law",
        description="Holds an acceptance rule against exact laws of toys, by enumeration where "
        "possible; or samples of another engine against the law of a model that is run here. "
        "Exit code 1: a bias was found.",
    )
    p.add_argument(
        "rule",
        nargs="*",
        help=f"names ({', '.join(acceptance.RULES)}), with settings after a colon, or "
        "module:object, a rule of your own; default without --samples: all lossless rules",
    )
    p.add_argument(
        "--samples",
        metavar="FILE",
        help='a .jsonl file with {"prompt": text or token ids, "tokens": the token ids that the '
        "engine appended} a line",
    )
    p.add_argument("--model", default="embedded", help="with --samples: whose law they should have")
    p.add_argument("--temperature", type=float, default=1.0, help="of the engine; 0 is greedy")
    p.add_argument("--top-k", type=int)
    p.add_argument("--top-p", type=float)
    p.add_argument("--min-p", type=float)
    p.add_argument("--dtype", help="of the weights: float32, bfloat16, float16")
    p.add_argument(
        "--false-alarm",
        type=float,
        default=1e-3,
        help="probability that what is sound is called biased, 0.001 by default",
    )
    p.add_argument(
        "--num-samples",
        type=int,
        default=200_000,
        help="texts that are drawn of a rule that cannot be enumerated",
    )


def run(arguments: argparse.Namespace) -> int:
    """``specjax audit``: prints a report for each rule, or for the samples."""
    reports = []
    if arguments.samples:
        if arguments.rule:
            raise ValueError("--samples audits an engine's samples: leave the rules out")
        settings = {n: getattr(arguments, n) for n in ("temperature", "top_k", "top_p", "min_p")}
        samples = read_samples(arguments.samples)
        reports.append(
            specjax.audit_samples(
                set_up(arguments),
                samples,
                sampling=specjax.Sampling(**settings),
                false_alarm=arguments.false_alarm,
            )
        )
        print(reports[-1])
    sound = [name for name, rule in acceptance.RULES.items() if rule.lossless and name != "greedy"]
    for name in arguments.rule or ([] if arguments.samples else sound):
        reports.append(
            specjax.audit_rule(
                named(name), samples=arguments.num_samples, false_alarm=arguments.false_alarm
            )
        )
        print(reports[-1], flush=True)
    return BIASED if any(report.biased for report in reports) else 0


def named(name: str):
    """A rule by its name, or an object of a module."""
    module, _, attribute = name.partition(":")
    if module in acceptance.RULES or not attribute:
        return name
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name!r}: {error}; give the name of a rule, or module:object of one that can be "
            "imported from here"
        ) from None
    return found() if isinstance(found, type) else found


def read_samples(path: str) -> list[tuple]:
    """The prompts and tokens of a ``.jsonl`` file."""

    def convert(record):
        return record["prompt"], [int(token) for token in record["tokens"]]

    expected = (
        'give {"prompt": text or token ids, "tokens": token ids}; a text in place of tokens has '
        "lost how it was divided"
    )
    return list(read_json_lines(path, convert, expected))
