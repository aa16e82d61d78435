"""``specjax plan-memory``: what a model needs on a mesh, from its ``config.json`` alone."""

from __future__ import annotations

import argparse
import json

import specjax

from .options import add_quantize, quantization_of


def add(commands) -> None:
    """The arguments of the command."""
    p = commands.add_parser(
        "plan-memory",
        help="price a model on a mesh of devices before anything is loaded",
        description="Weights, cache, working set and all-reduces of a target and a draft model on "
        "each device of a mesh, from their config.json; no weight is read, no device is needed.",
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
    p.add_argument("--batch", type=int, default=1, help="rows decoded together, 1 by default")
    p.add_argument(
        "--context",
        type=int,
        help="tokens a row, prompt and text; default: 8192, or as many as the model reads",
    )
    p.add_argument(
        "--source",
        type=int,
        help="positions that an encoder reads; default: 512, or its window",
    )
    p.add_argument("--num-draft", type=int, default=3, help="tokens drafted a round, 3 by default")
    p.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0 by default; above 0 a round also holds laws over the vocabulary",
    )
    p.add_argument(
        "--dtype",
        default="bfloat16",
        help="type of weights and caches: bfloat16, the default, float32, or float16",
    )
    add_quantize(p)
    p.add_argument(
        "--drafter-quantize",
        metavar="SCHEME",
        help="with --drafter: hold the draft model's weights as int8, int4 or fp8",
    )
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """``specjax plan-memory``: computes and prints."""
    options = vars(arguments) | {}
    options["quantize"] = quantization_of(arguments)
    for name in ("command", "model", "drafter", "json", "group_size", "quantize_head"):
        options.pop(name)
    plan = specjax.plan_memory(arguments.model, arguments.drafter, **options)
    print(json.dumps(plan.as_json()) if arguments.json else plan)
    return 0
