"""``specjax audit``: whether a rule, or another engine's samples, keep a model's law."""

from __future__ import annotations

import argparse
import importlib

import specjax

from .. import acceptance
from .json_lines import read_json_lines
from .options import DTYPE, add_filters, require, set_up

BIASED = 1  # exit code
NUM_SAMPLES = 200_000  # texts of a rule, by default
LAW = ("temperature", "top_k", "top_p", "min_p")  # settings of an engine


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
    settings = p.add_argument_group("with --samples", "the model and the settings of the engine")
    settings.add_argument("--model", help="embedded, the default, a folder, or a hub name")
    settings.add_argument("--temperature", type=float, help="1 by default; 0 is greedy")
    add_filters(settings)
    settings.add_argument("--dtype", help=DTYPE)
    p.add_argument(
        "--false-alarm",
        type=float,
        default=1e-3,
        help="probability that what is sound is called biased, 0.001 by default",
    )
    p.add_argument(
        "--num-samples",
        type=int,
        help="texts that are drawn with a rule that cannot be enumerated, 200,000 by default",
    )


def run(arguments: argparse.Namespace) -> int:
    """``specjax audit``: prints a report for each rule, or for the samples."""
    reports = []
    require(arguments, "samples", *LAW, "model", "dtype")
    if arguments.samples:
        if arguments.rule:
            raise ValueError("--samples audits an engine's samples: leave the rules out")
        if arguments.num_samples is not None:
            raise ValueError(
                f"--num-samples {arguments.num_samples}: with --samples no text is drawn; leave "
                "--num-samples out"
            )
        settings = {name: getattr(arguments, name) for name in LAW}
        settings["temperature"] = 1.0 if arguments.temperature is None else arguments.temperature
        arguments.model = arguments.model or "embedded"
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
                named(name),
                samples=NUM_SAMPLES if arguments.num_samples is None else arguments.num_samples,
                false_alarm=arguments.false_alarm,
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
