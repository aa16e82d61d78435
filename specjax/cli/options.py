"""The options that several commands have, and the loading of the model that they name."""

from __future__ import annotations

import argparse
import os
import re

import specjax

from .. import acceptance
from ..drafters import POLICIES, registry
from ..sampling import processors
from ..text import auto_number, drafter_names, other_vocabulary, own_drafters
from . import sessions

NOTHING_TO_DRAW, USAGE_ERROR, INTERRUPTED = 1, 2, 130  # exit codes

DTYPE = "dtype of the weights: float32, bfloat16, float16"  # help of --dtype


def add_decoding(p: argparse.ArgumentParser) -> None:
    """Adds the arguments of a command that decodes; some also have their name in vLLM."""
    p.add_argument("--model", default="embedded", help="embedded, a folder, or a hub name")
    p.add_argument(
        "--drafter",
        "--speculative-model",
        help="auto (the default: heads, a small draft model or saved layers in the model's folder, "
        f"else ngram), none, {', '.join(registry.table_names())}, draft, draft:window=512, self "
        f"(with --exit or --skip), self:window=512, {', '.join(registry.head_names())} (the "
        "embedded model has eagle3, mtp, speculator, p-eagle, medusa), or the folder or hub name "
        "of a draft model or of heads; with tli: or slem: before the name, a draft model with "
        "another tokenizer; cascade:OUTER:INNER, a draft model for which another drafter drafts; "
        "MODULE:CLASS, with settings as MODULE:CLASS:period=3, a drafter of your own in MODULE.py; "
        "with ngram+, suffix+ or sam+ before the name (ngram+mtp), the drafter runs only where "
        "nothing can be copied from the text so far; with copy+ before the name (copy+medusa), "
        "heads or a draft model get, at temperature 0, a bonus for what stood in the text; specjax "
        "drafters describes each",
    )
    p.add_argument(
        "--exit",
        type=int,
        help="with --drafter self: the number of first layers that run before the LM head drafts",
    )
    p.add_argument(
        "--skip",
        help="with --drafter self: the sublayers that are skipped, such as attention.3-5,mlp.7 (9 "
        "names both sublayers of layer 9); layers count from 0",
    )
    p.add_argument(
        "--num-draft",
        "--num-speculative-tokens",
        type=drafts,
        help="the number of tokens drafted a round, 3 by default (suffix: 16; sam: 15; cascade: 6; "
        "recycling: a tree of 80; heads: what their file says; lookahead has settings of its own, "
        "such as lookahead:window=7,ngram=4,guesses=7); "
        "auto: the number with the highest speed, from 0 to 7 (fewer if heads were trained for "
        "fewer), chosen during the run; auto:NAME, "
        f"auto:NAME:SETTINGS: by another policy, one of {', '.join(POLICIES)}, as in "
        "auto:exllama:skip=0",
    )
    p.add_argument(
        "--tree",
        help="the shape of the draft instead of a chain: 3x2x1 (the number of children at each "
        "depth), expand:8x4x24 (a tree that the drafter grows: width, depth, nodes), "
        "expand:8x4x24:sharpness=2 (by sharper laws at temperature 0), "
        "jetspec:7x15x62 (children, depth, nodes), chain:4, "
        "comb:3x6 (a chain of 6 tokens with 2 more beside each, for a cascade), or a "
        ".json file of parents or paths",
    )
    p.add_argument(
        "--prompt-lookup-max",
        type=int,
        help="with --drafter ngram: the longest match in tokens, 6 by default",
    )
    p.add_argument(
        "--prompt-lookup-min",
        type=int,
        help="with --drafter ngram: the shortest match in tokens, 2 by default",
    )
    p.add_argument(
        "--session",
        metavar="FILE",
        help="also draft from earlier answers, which are kept in this file; the file is created if "
        "it does not exist; with --drafter suffix (then the default) or sam",
    )
    p.add_argument(
        "--datastore",
        metavar="FOLDER",
        help="also draft from a datastore (REST; see specjax datastore build); with --drafter "
        "suffix (then the default) or sam, and with --session as well",
    )
    p.add_argument(
        "--session-tokens",
        type=int,
        help="with --session: the most tokens that the session holds, 65536 by default; the oldest "
        "answers are dropped first",
    )
    p.add_argument(
        "--max-new-tokens",
        "--max-tokens",
        type=int,
        default=128,
        help="the most tokens that are generated, 128 by default; a number that the context has no "
        "room for is refused, but serve-offline ends such a text where the context is full",
    )
    p.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default, is greedy decoding"
    )
    add_filters(p)
    p.add_argument(
        "--repetition-penalty",
        type=float,
        help="makes tokens of the prompt and of the generated text less probable (above 1) or more "
        "probable (below 1)",
    )
    p.add_argument(
        "--presence-penalty",
        type=float,
        help="subtracted from the logits of tokens that were generated before",
    )
    p.add_argument(
        "--frequency-penalty",
        type=float,
        help="subtracted from a token's logit for each time that it was generated before",
    )
    p.add_argument("--seed", type=int, default=0, help="the seed of the random draws, 0 by default")
    p.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the text before this string; may be repeated",
    )
    p.add_argument("--grammar", choices=["json"], help="allow only texts of this grammar")
    rules = ", ".join(acceptance.RULES)
    p.add_argument(
        "--rule",
        default="auto",
        help=f"the acceptance rule: auto (the default, lossless), {rules}, or MODULE:CLASS for a "
        "rule of your own in MODULE.py; settings follow as NAME:k=3",
    )
    p.add_argument("--dtype", help=DTYPE)
    add_quantize(p)
    p.add_argument(
        "--drafter-quantize",
        metavar="SCHEME",
        help="hold the draft model's weights as int8, int4 or fp8; the output stays lossless",
    )
    add_mesh(p)


def add_filters(p) -> None:
    """Adds the arguments that exclude improbable tokens."""
    p.add_argument("--top-k", type=int, help="draw only from the K most probable tokens")
    p.add_argument(
        "--top-p",
        type=float,
        help="draw only from the smallest set of most probable tokens whose probabilities sum to "
        "at least P",
    )
    p.add_argument(
        "--min-p",
        type=float,
        help="draw only from tokens at least P times as probable as the most probable token",
    )


def add_quantize(p: argparse.ArgumentParser, required: bool = False) -> None:
    """Adds the arguments that ``quantization_of`` reads."""
    p.add_argument(
        "--quantize",
        required=required,
        metavar="SCHEME",
        help="hold the model's weights as int8, int4 or fp8; the output then follows the quantized "
        "model's law, which only approximates the model's law; float: compute with floats where "
        "the files hold few bits: in float32 the same law",
    )
    p.add_argument(
        "--group-size",
        type=int,
        help="the number of inputs that share a scale, a multiple of 32; default: all inputs of an "
        "output with int8, 32 inputs with int4",
    )
    p.add_argument(
        "--quantize-head",
        metavar="SCHEME",
        help="the scheme of the LM head and the embedding: int8 (the default with int4), float, or "
        "the scheme of the other weights",
    )


def quantization_of(arguments: argparse.Namespace):
    """Returns the value of ``quantize=`` for ``specjax.load``.

    Raises:
      ValueError: a detail of the quantization is given without ``--quantize``, or is out of range.
    """
    require(arguments, "quantize", "group_size", "quantize_head")
    size, head = arguments.group_size, arguments.quantize_head
    if arguments.quantize in (None, "float") and size is None and head is None:
        return arguments.quantize
    return specjax.Quantization(arguments.quantize, group_size=size, lm_head=head)


def require(arguments: argparse.Namespace, needed: str, *names: str) -> None:
    """Raises ``ValueError`` if an option of ``names`` is given without the option ``needed``."""
    given = [name for name in names if getattr(arguments, name) is not None]
    if given and not getattr(arguments, needed):
        option, needed = (f"--{name.replace('_', '-')}" for name in (given[0], needed))
        value = getattr(arguments, given[0])
        shown = option if value is True else f"{option} {value}"
        raise ValueError(
            f"{shown}: it is used with {needed} only; give {needed} as well, or leave {option} out"
        )


def drafts(text: str) -> int | str:
    """Returns the parsed value of ``--num-draft``: a number or ``auto...``."""
    if auto_number.is_auto(text):
        try:
            auto_number.auto_policy(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of tokens: give 1 to {drafter_names.MOST_DRAFTS}, or auto, or "
            f"auto:NAME with one of {', '.join(POLICIES)}"
        )
    return int(text)


def add_mesh(p: argparse.ArgumentParser) -> None:
    """Adds the arguments that name devices."""
    p.add_argument(
        "--mesh", help="the devices that share model and rows: data=2,model=4 or data=2,stage=4"
    )
    p.add_argument(
        "--replicate-drafter",
        action="store_true",
        help="with --mesh: every device holds the whole draft model",
    )
    p.add_argument(
        "--processes",
        nargs=3,
        metavar=("ADDRESS", "COUNT", "INDEX"),
        help="run as one of several processes that share the mesh: host:port of the first process, "
        "the number of processes, and the index of this process; process 0 prints",
    )


def set_up(arguments: argparse.Namespace):
    """Prepares a command that decodes, and returns the model.

    Raises:
      ValueError: ``--processes`` is wrong, or ``specjax.load`` refuses the model.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from .._internal import compile_cache

    compile_cache.enable()
    names = ("dtype", "mesh")
    if place := getattr(arguments, "processes", None):
        if not (place[1].isdigit() and place[2].isdigit()):
            raise ValueError(
                f"--processes {' '.join(place)}: COUNT and INDEX must be whole numbers"
            )
        specjax.sharding.join(place[0], int(place[1]), int(place[2]))
    wish = quantization_of(arguments) if hasattr(arguments, "quantize") else None
    given = {n: getattr(arguments, n, None) for n in names}
    return specjax.load(arguments.model, quantize=wish, **given)


def options_of(arguments: argparse.Namespace, lm) -> dict:
    """Returns the options of ``specjax.generate`` for the arguments of a command.

    Args:
      arguments: those of ``add_decoding``.
      lm: the target.

    Raises:
      ValueError: options contradict each other, or a drafter cannot be loaded.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    names += ("presence_penalty", "frequency_penalty")
    settings = {name: getattr(arguments, name) for name in names}
    if arguments.grammar:
        settings["logits_processor"] = processors.json_text(lm)
    num, tree = arguments.num_draft, arguments.tree
    lookup = {"longest": arguments.prompt_lookup_max, "shortest": arguments.prompt_lookup_min}
    lookup = {name: value for name, value in lookup.items() if value is not None}
    layers = {name: getattr(arguments, name) for name in ("exit", "skip")}
    layers = {name: value for name, value in layers.items() if value is not None}
    usual = "ngram" if lookup else drafter_names.SELF if layers else drafter_names.AUTO
    usual = "suffix" if arguments.session or arguments.datastore else usual
    drafter = usual if arguments.drafter is None else arguments.drafter
    if layers:
        drafter = _self(drafter, layers)
    whole = arguments.replicate_drafter
    if whole and not arguments.mesh:
        raise ValueError(
            "--replicate-drafter: without --mesh there is one device; leave it out, or give --mesh"
        )
    of_weights = ["--drafter-quantize"] * bool(arguments.drafter_quantize)
    of_weights += ["--replicate-drafter"] * whole
    if of_weights and drafter_names.is_simple(drafter):
        raise ValueError(
            f"{of_weights[0]}: --drafter {drafter} has no weights; give --drafter draft, or the "
            "folder or hub name of a draft model"
        )
    before = (*drafter_names.LOOKUPS, drafter_names.COPYING)
    lookups = "|".join(map(re.escape, before))
    if arguments.drafter_quantize and re.fullmatch(f"({lookups})*draft", drafter):
        drafter = drafter.removesuffix("draft") + (own_drafters.own_draft_name(lm) or "draft")
    if num is not None and not auto_number.is_auto(num) and drafter in drafter_names.NO_DRAFTS:
        raise ValueError(
            f"--num-draft {num}: --drafter {drafter} drafts nothing; leave --num-draft out, or "
            "give another drafter"
        )
    if drafter not in ("draft", *registry.table_names(), *drafter_names.NO_DRAFTS):
        drafter = drafter_names.named(
            lm,
            drafter,
            dtype=arguments.dtype,
            quantize=arguments.drafter_quantize,
            mesh=None if whole else arguments.mesh,
        )
        inner = drafter
        while isinstance(inner, drafter_names.WithLookup):
            inner = inner.inner
        if of_weights and not other_vocabulary.is_draft_model(inner):
            raise ValueError(
                f"{of_weights[0]}: {drafter!r} is not one draft model; heads and cascades have the "
                "dtype and the devices of their target's weights"
            )
    require(arguments, "session", "session_tokens")
    if arguments.datastore:
        drafter = sessions.retrieval_of(lm, arguments)
    elif arguments.session:
        drafter = sessions.session_of(lm, drafter, arguments.session, arguments.session_tokens)
    if lookup:
        auto_number.check_one_shape(num, tree)  # the number becomes a setting of the drafter
        drafter, num = _lookup(drafter, num, lookup), None
    return {
        "drafter": drafter,
        "drafting": specjax.Drafting(num=num, tree=tree, rule=arguments.rule),
        "sampling": specjax.Sampling(**settings),
        "max_new_tokens": arguments.max_new_tokens,
        "seed": arguments.seed,
        "stop_strings": arguments.stop,
    }


def _self(drafter: str, layers: dict) -> str:
    """Returns the name of the drafter ``self`` with its choice of layers."""
    if drafter.removeprefix(drafter_names.lookup_of(drafter)) != drafter_names.SELF:
        raise ValueError(f"--exit and --skip are for --drafter self, not {drafter}")
    if len(layers) > 1:
        raise ValueError("--exit and --skip: give one of the two")
    ((name, value),) = layers.items()
    return f"{drafter}:{name}={value}"


def _lookup(drafter, num_draft, lengths: dict):
    """Returns an ngram drafter with the given lengths of matches."""
    if drafter != "ngram":
        raise ValueError("--prompt-lookup-max and --prompt-lookup-min are for --drafter ngram")
    if auto_number.is_auto(num_draft):
        raise ValueError(
            "--num-draft auto has its own lengths of matches: leave --prompt-lookup-max and "
            "--prompt-lookup-min out"
        )
    if "longest" in lengths:
        lengths = {"shortest": min(2, lengths["longest"])} | lengths
    num_draft = drafter_names.NUM_DRAFT if num_draft is None else num_draft
    if not 1 <= num_draft <= drafter_names.MOST_DRAFTS:
        raise ValueError(f"--num-draft {num_draft}: give 1 to {drafter_names.MOST_DRAFTS}, or auto")
    return specjax.drafters.NGram(num_draft=num_draft, **lengths)
