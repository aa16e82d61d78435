"""``specjax audit``: tests whether a rule, or another engine, keeps a model's law."""

from __future__ import annotations

import argparse
from typing import Any

import specjax

from .. import acceptance
from .._internal.named_settings import parse_settings
from ..analysis.audit import audited_rule
from .json_lines import read_json_lines
from .options import DTYPE, add_filters, require, set_up
from .renamed import renamed

BIASED = 1  # exit code
NUM_SAMPLES = 200_000  # texts of a rule, by default
ENGINE = "transformers"  # in place of the name of a rule
ENGINE_SETTINGS = {
    "way": str,
    "num_draft": int,
    "num_tokens": int,
    "temperature": float,
    "assistant_ensemble_weight": float,
}
LAW = ("temperature", "top_k", "top_p", "min_p")  # settings of an engine


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "audit",
        help="test whether a rule, or another engine's samples, keep the target's law",
        description="Holds an acceptance rule against exact laws of toys, by enumeration where "
        "possible and by samples; or samples of another engine against the law of a model that is "
        "run here. Exit code 1: a bias was found.",
    )
    p.add_argument(
        "rule",
        nargs="*",
        help=f"names of rules ({', '.join(acceptance.RULES)}), with settings after a colon, or "
        "module:object for a rule of your own; transformers, with settings after a colon "
        f"({', '.join(ENGINE_SETTINGS)}), audits the generation of Hugging Face transformers with "
        "a small pair of random weights; default without --samples: all lossless rules",
    )
    p.add_argument(
        "--samples",
        metavar="FILE",
        help='a .jsonl file; each line is {"prompt": text or token ids, "tokens": the token ids '
        "that the engine appended}",
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
        help="the probability that samples without a bias are reported as biased, 0.001 by default",
    )
    p.add_argument(
        "--shape",
        action="append",
        metavar="TREE",
        help="a further shape of drafts on which the rule is sampled, of at most 10 tokens: "
        "chain:8 or 3x2x1 (the number of children at each depth); may be repeated",
    )
    p.add_argument(
        "--num-samples",
        type=int,
        help="texts that are drawn with a rule for each shape of draft, 200,000 by default; with "
        "transformers 4,000 by default, in all",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints a report for each rule, or for the samples; returns the exit code."""
    reports = []
    require(arguments, "samples", *LAW, "model", "dtype")
    if arguments.samples:
        if arguments.rule:
            raise ValueError("--samples audits samples of an engine: leave the names of rules out")
        if arguments.num_samples is not None:
            raise ValueError(
                f"--num-samples {arguments.num_samples}: with --samples no text is drawn; leave "
                "--num-samples out"
            )
        if arguments.shape:
            raise ValueError(
                f"--shape {arguments.shape[0]}: with --samples no rule runs; leave --shape out"
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
    names = arguments.rule or ([] if arguments.samples else sound)
    for name in names:  # all of them before the first audit, which takes minutes
        if is_engine(name):
            engine_settings(name, arguments)
        else:
            audited_rule(name)
    for name in names:
        audited = of_transformers if is_engine(name) else of_rule
        with renamed(samples="num_samples", shapes="shape"):  # --samples is another thing
            reports.append(audited(name, arguments))
        print(reports[-1], flush=True)
    return BIASED if any(report.biased for report in reports) else 0


def is_engine(name: str) -> bool:
    """Whether a name stands for another engine, in place of a rule."""
    return name.partition(":")[0] == ENGINE


def of_rule(name: str, arguments: argparse.Namespace):
    """Returns the report of a rule."""
    return specjax.audit_rule(
        name,
        samples=NUM_SAMPLES if arguments.num_samples is None else arguments.num_samples,
        false_alarm=arguments.false_alarm,
        shapes=arguments.shape or (),
    )


def of_transformers(name: str, arguments: argparse.Namespace):
    """Returns the report of ``transformers`` or ``transformers:way=lookup,num_draft=5``.

    Raises:
      ValueError: a setting is unknown or out of range.
    """
    settings = engine_settings(name, arguments)
    if arguments.num_samples is not None:
        settings["samples"] = arguments.num_samples
    law = specjax.Sampling(temperature=settings.pop("temperature", 1.0))
    return specjax.audit_transformers(sampling=law, false_alarm=arguments.false_alarm, **settings)


def engine_settings(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that follow the name of an engine.

    Raises:
      ValueError: a setting is unknown, or is one that only rules have.
    """
    if arguments.shape:
        raise ValueError(
            f"--shape {arguments.shape[0]}: with transformers no rule runs; leave --shape out"
        )
    text = name.partition(":")[2]
    return parse_settings(name, text, ENGINE, ENGINE_SETTINGS) if text else {}


def read_samples(path: str) -> list[tuple]:
    """Returns the prompt and the tokens of each line of a ``.jsonl`` file.

    Raises:
      ValueError: a line has other content.
    """

    def convert(record):
        prompt, tokens = record["prompt"], record["tokens"]
        ids = tokens if isinstance(prompt, str) else [*prompt, *tokens]
        if isinstance(tokens, str) or not all(type(token) is int for token in ids):
            raise TypeError
        return prompt, tokens

    expected = (
        'give {"prompt": text or token ids, "tokens": token ids}; a text in place of token ids '
        "does not tell how it was divided into tokens"
    )
    return list(read_json_lines("--samples", path, convert, expected))
