"""``specjax plan-memory``: the memory of a model on a mesh, from its ``config.json`` alone."""

from __future__ import annotations

import argparse
import json

import specjax

from .options import add_quantize, quantization_of


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "plan-memory",
        help="compute the memory of a model on a mesh of devices before anything is loaded",
        description="Computes weights, cache, working set and all-reduces of a target and a draft "
        "model on each device of a mesh from the config.json of both. The command reads no weights "
        "and needs no devices.",
    )
    p.add_argument("--model", required=True, help="a config.json, a folder, or a hub name")
    p.add_argument("--drafter", help="a config.json, a folder, or a hub name of a draft model")
    p.add_argument(
        "--mesh", default="data=1,model=1", help="the devices, such as data=2,model=4; default: one"
    )
    p.add_argument(
        "--replicate-drafter",
        action="store_true",
        help="with --drafter: every device holds the whole draft model",
    )
    p.add_argument(
        "--batch",
        type=int,
        default=1,
        help="the number of rows that are decoded together, 1 by default",
    )
    p.add_argument(
        "--context",
        type=int,
        help="the number of tokens in a row, prompt and text together; default: 8192, or the "
        "model's context if that is shorter",
    )
    p.add_argument(
        "--source",
        type=int,
        help="the number of positions that an encoder reads; default: 512, or the encoder's window",
    )
    p.add_argument(
        "--num-draft",
        type=int,
        default=3,
        help="the number of tokens drafted a round, 3 by default",
    )
    p.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0 by default; above 0 a round also stores laws over the vocabulary",
    )
    p.add_argument(
        "--dtype",
        default="bfloat16",
        help="dtype of weights and caches: bfloat16 (the default), float32, float16",
    )
    add_quantize(p)
    p.add_argument(
        "--drafter-quantize",
        metavar="SCHEME",
        help="with --drafter: hold the draft model's weights as int8, int4 or fp8",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Computes and prints the memory plan; returns the exit code."""
    options = vars(arguments) | {}
    options["quantize"] = quantization_of(arguments)
    for name in ("command", "model", "drafter", "json", "group_size", "quantize_head"):
        options.pop(name)
    plan = specjax.plan_memory(arguments.model, arguments.drafter, **options)
    print(json.dumps(plan.as_json()) if arguments.json else plan)
    return 0
