"""What the commands share: options, and the model that they name."""

from __future__ import annotations

import argparse
import os

import specjax

from .. import job

USAGE_ERROR, INTERRUPTED = 2, 130  # exit codes


def drafts(text: str) -> int | str:
    """What ``--num-draft`` takes."""
    return text if text == job.AUTO else int(text)


def set_up(arguments: argparse.Namespace):
    """What every command does before it decodes; returns the model."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from .. import compile_cache

    compile_cache.enable()
    return specjax.load(arguments.model, dtype=arguments.dtype, quantize=arguments.quantize)


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
