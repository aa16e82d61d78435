"""``specjax tree``: measures how often a drafter's choices are right, and finds the best tree."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jax
import numpy as np

import specjax

from .. import trees
from ..analysis import rank_counts, tree_timing
from ..models.lm import LM
from ..models.seq2seq.encoder_inputs import refuse_encoders
from ..text.drafter_names import AUTO, WithLookup, named, resolve_drafter
from ..text.options import Drafting, Options
from ..text.own_drafters import own_draft_name
from ..text.prepare import end_ids, prepare
from ..trees import MOST_NODES
from .options import DTYPE, set_up
from .outputs import check_file
from .prompts import read_prompts

SIZES = (1, 2, 4, 8, 16, 32)  # numbers of nodes of the timed passes


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "tree",
        help="find the fastest static tree for a drafter on your prompts",
        description="Counts, on the model's own continuations of your prompts, how often the "
        "drafter's best, second, third ... choice is right at each depth, and times passes and "
        "rounds. Then the command finds the tree with the most tokens a second, or reports that "
        "plain decoding is faster than every tree.",
    )
    p.add_argument("--model", default="embedded", help="embedded, a folder, or a hub name")
    p.add_argument(
        "--drafter",
        help="a draft model or heads, see specjax generate; default: the model's own draft model, "
        "else its own heads",
    )
    p.add_argument(
        "--prompts",
        help="a file of prompts, see specjax plan; default, for the embedded model: held-out "
        "prompts that ship with the package",
    )
    p.add_argument(
        "--limit", type=int, default=32, help="the most prompts that are used, 32 by default"
    )
    p.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        help="the most tokens that are generated for a prompt, 64 by default",
    )
    p.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default, is greedy decoding"
    )
    p.add_argument(
        "--depth", type=int, default=4, help="the greatest depth of the tree, 4 by default"
    )
    p.add_argument("--ranks", type=int, default=6, help="the most children of a node, 6 by default")
    p.add_argument(
        "--nodes",
        type=int,
        nargs="+",
        help="the numbers of drafted tokens to consider; default: 1 to 31",
    )
    p.add_argument("--dtype", help=DTYPE)
    p.add_argument(
        "--output", help="the .json file to which the tree is saved, for --tree of generate"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints the counts, the times and the choice; returns the exit code."""
    from rich.console import Console

    if arguments.output:
        if Path(arguments.output).suffix != ".json":
            raise ValueError(
                f"--output {arguments.output}: --tree of generate reads .json files; give a name "
                "that ends with .json"
            )
        check_file("--output", arguments.output)
    if arguments.max_new_tokens < 2:
        raise ValueError(
            f"--max-new-tokens {arguments.max_new_tokens}: the pass over a prompt emits the first "
            "token without a draft; give at least 2"
        )
    sizes = [n + 1 for n in arguments.nodes] if arguments.nodes else SIZES
    if min(sizes) < 2 and arguments.nodes:
        raise ValueError(f"--nodes {arguments.nodes}: each number must be at least 1")
    prompts = read_prompts(arguments.prompts, arguments.model, arguments.limit)
    if max(sizes) > MOST_NODES:
        raise ValueError(f"--nodes {arguments.nodes}: give at most {MOST_NODES - 1}")
    lm = set_up(arguments)
    refuse_encoders(lm, "specjax tree")
    drafter = _drafter(lm, arguments)
    if isinstance(drafter, WithLookup):
        raise ValueError(
            f"--drafter {drafter.name}: the best tree is that of the drafter alone; name it, "
            f"{drafter.name.removeprefix(drafter.lookup)}, and give the tree with the lookup then"
        )
    depth = _depth(lm, drafter, arguments)
    sampling = specjax.Sampling(temperature=arguments.temperature)
    options = Options(
        drafter=drafter,
        drafting=Drafting(tree=trees.chain(depth)),
        sampling=sampling,
        max_new_tokens=arguments.max_new_tokens,
    )
    work = prepare(lm, prompts, options)
    with Console(stderr=True).status("counting which choices are right"):
        request = work.request
        counted = rank_counts.count_ranks(
            lm.target,
            work.drafter,
            work.params,
            request.tokens,
            request.lengths,
            max_new_tokens=arguments.max_new_tokens,
            key=jax.random.key(0),
            sampling=sampling,
            ranks=arguments.ranks,
            capacity=work.capacity,
            stops=end_ids(lm),
        )
    with Console(stderr=True).status("timing") as status:
        found = tree_timing.time_trees(
            lm,
            drafter,
            counted,
            prompts[0],
            sizes=sizes,
            depth=depth,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            tell=status.update,
        )
    choice, plain = found.choice, found.passes[1]
    print(f"how often each choice was right, best first (at temperature {arguments.temperature:g})")
    print(counted)
    if zeros := np.argwhere(counted.hits == 0).tolist():
        shown = (
            f"{rank + 1} at depth {depth + 1} (at most {counted.interval(depth, rank)[1]:.1%})"
            for depth, rank in zeros
        )
        print(f"never right, and so in no tree (95 %): choice {', '.join(shown)}")
    print("time of a pass over N nodes, relative to one node: " + _relative(found.passes))
    print(
        f"time of a round without its pass, relative to a pass over one node: "
        f"{found.level / plain:.2f} for each depth, {found.node / plain:.2f} for each drafted token"
    )
    if choice.shape is None:
        print("plain decoding is faster than any tree of these sizes")
        return 0
    print(
        f"{choice.shape}: {choice.tokens:.2f} tokens a round, {choice.ratio:.2f} times plain "
        f"({found.rounds:.2f} without reading the prompt)"
    )
    print(
        f"(predicted for {arguments.max_new_tokens} tokens from timed rounds; measure it with "
        "generate --compare)"
    )
    if arguments.temperature:
        place = "DraftModel" if isinstance(drafter, LM) else "Drafting"
        print(
            "(the counts are of the drafter's most likely tokens, which rule delta judges; above "
            f"temperature 0 generate draws the children, unless {place}(sibling_sampling='top') "
            "is given)"
        )
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(list(choice.shape.parents)) + "\n")
        print(f"wrote {arguments.output}", file=sys.stderr)
    return 0


def _drafter(lm: LM, arguments: argparse.Namespace):
    """The drafter of ``--drafter``; by default the model's own draft model, else its own heads.

    Raises:
      ValueError: the drafter ranks no choices.
    """
    usual = "draft" if own_draft_name(lm) else AUTO
    name = usual if arguments.drafter in (None, AUTO) else arguments.drafter
    drafter = named(lm, name, dtype=arguments.dtype)
    if isinstance(drafter, str):  # a table, or plain decoding
        lacks = f"{lm.name} has no draft model and no heads of its own, and " * (name == AUTO)
        raise ValueError(
            f"--drafter: {lacks}{drafter!r} has no best, second and third choice that could be "
            "counted; name a draft model or heads"
        )
    return drafter


def _depth(lm, drafter, arguments) -> int:
    """Returns the greatest depth to consider: that of the arguments, or the drafter's if less."""
    if arguments.depth < 1:
        raise ValueError(f"--depth {arguments.depth}: it must be at least 1")
    drafter, _ = resolve_drafter(lm, drafter)
    most = drafter.max_depth
    return arguments.depth if most is None else min(most, arguments.depth)


def _relative(passes) -> str:
    return ", ".join(f"{n}: {s / passes[1]:.2f}" for n, s in sorted(passes.items()))
