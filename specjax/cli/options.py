"""Options that commands share, and the model that they name."""

from __future__ import annotations

import argparse
import os

import specjax

from .. import acceptance
from ..drafters import registry
from ..sampling import processors
from ..text import drafter_names, own_drafters
from ..text.retrieval import Retrieval
from ..text.session import Session

NOTHING_TO_DRAW, USAGE_ERROR, INTERRUPTED = 1, 2, 130  # exit codes

DTYPE = "type of the weights: float32, bfloat16, float16"  # help of --dtype
SESSIONS = ("suffix", "sam")  # drafters that read a session
SESSION_TOKENS = 2**16  # that a session holds at most, by default


def add_decoding(p: argparse.ArgumentParser) -> None:
    """The arguments that say which model decodes, and how; some have the name in vLLM as well."""
    p.add_argument("--model", default="embedded", help="embedded, a folder, or a hub name")
    p.add_argument(
        "--drafter",
        "--speculative-model",
        help="auto (the default: the heads or the small draft model in the model's own folder, "
        "else ngram), "
        f"none, {', '.join(registry.table_names())}, "
        f"draft, self (with --exit or --skip), {', '.join(registry.head_names())} (the embedded "
        "model has eagle3, mtp, speculator, hydra and medusa), or the folder or hub name of a "
        "draft model or of heads; "
        "after ngram+, suffix+ or sam+ (ngram+mtp), the drafter is asked only where there is "
        "nothing to copy from the text so far",
    )
    p.add_argument(
        "--exit", type=int, help="with --drafter self: how many layers run before the head drafts"
    )
    p.add_argument(
        "--skip",
        help="with --drafter self: the sublayers that are left out, such as attention.3-5,mlp.7 (9 "
        "means both of layer 9); layers count from 0",
    )
    p.add_argument(
        "--num-draft",
        "--num-speculative-tokens",
        type=drafts,
        help="tokens drafted a round, 3 by default (suffix: 16; recycling: a tree of 80; of "
        "lookahead its settings say it, as lookahead:window=7,ngram=4,guesses=7); auto: as many as "
        "pay, from none to 7",
    )
    p.add_argument(
        "--tree",
        help="what a draft model or heads draft instead of a chain: 3x2x1 (children at each "
        "depth), expand:8x4x24 (grown by probability: width, depth, nodes), chain:4, or a .json "
        "file of parents or paths",
    )
    p.add_argument("--prompt-lookup-max", type=int, help="longest match of ngram, by default 6")
    p.add_argument("--prompt-lookup-min", type=int, help="shortest match of ngram, by default 2")
    p.add_argument(
        "--session",
        metavar="FILE",
        help="also draft from earlier answers, which this file keeps; it is made where there is "
        "none; with --drafter suffix, the default then, or sam",
    )
    p.add_argument(
        "--datastore",
        metavar="FOLDER",
        help="draft from a datastore too (see specjax datastore build): REST; with --drafter "
        "suffix, the default then, or sam",
    )
    p.add_argument(
        "--session-tokens",
        type=int,
        help="with --session: tokens that the session holds at most, 65536 by default; the oldest "
        "are forgotten first",
    )
    p.add_argument(
        "--max-new-tokens",
        "--max-tokens",
        type=int,
        default=128,
        help="new tokens of a text at most, 128 by default",
    )
    p.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    add_filters(p)
    p.add_argument(
        "--repetition-penalty",
        type=float,
        help="makes tokens that the prompt or the text holds already less probable (above 1) or "
        "more probable (below 1)",
    )
    p.add_argument(
        "--presence-penalty",
        type=float,
        help="is subtracted from the logits of tokens that were generated before",
    )
    p.add_argument(
        "--frequency-penalty",
        type=float,
        help="is subtracted from the logit of a token as often as the token was generated before",
    )
    p.add_argument("--seed", type=int, default=0, help="seed of the random draws, 0 by default")
    p.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="a text before which the output ends; may be repeated",
    )
    p.add_argument("--grammar", choices=["json"], help="allow only texts of this grammar")
    rules = ", ".join(acceptance.RULES)
    p.add_argument("--rule", default="auto", help=f"acceptance rule: auto (lossless), {rules}")
    p.add_argument("--dtype", help=DTYPE)
    add_quantize(p)
    p.add_argument(
        "--drafter-quantize",
        metavar="SCHEME",
        help="hold the draft model's weights as int8, int4 or fp8; the text stays exact",
    )
    add_mesh(p)


def add_filters(p) -> None:
    """The arguments that leave improbable tokens out."""
    p.add_argument("--top-k", type=int, help="draw from the K most probable tokens only")
    p.add_argument(
        "--top-p",
        type=float,
        help="draw from the fewest most probable tokens whose probabilities add up to P only",
    )
    p.add_argument(
        "--min-p",
        type=float,
        help="draw only from tokens at least P times as probable as the most probable one",
    )


def add_quantize(p: argparse.ArgumentParser, required: bool = False) -> None:
    """The arguments of ``quantization_of``."""
    schemes = "int8, int4 or fp8"
    p.add_argument(
        "--quantize",
        required=required,
        metavar="SCHEME",
        help=f"hold the model's weights as {schemes}: a law of its own, approximate to the model's",
    )
    p.add_argument(
        "--group-size",
        type=int,
        help="inputs that share a scale, a multiple of 32; default: all of an output with int8, 32 "
        "with int4",
    )
    p.add_argument(
        "--quantize-head",
        metavar="SCHEME",
        help="how the LM head and the embedding are held: int8 (the default with int4), float, or "
        "the scheme of the other weights",
    )


def quantization_of(arguments: argparse.Namespace):
    """How the weights are to be held, as ``specjax.load`` takes it."""
    require(arguments, "quantize", "group_size", "quantize_head")
    if arguments.quantize is None:
        return None
    size, head = arguments.group_size, arguments.quantize_head
    return specjax.Quantization(arguments.quantize, group_size=size, lm_head=head)


def require(arguments: argparse.Namespace, needed: str, *names: str) -> None:
    """Raises ``ValueError`` for an option of ``names`` without ``needed``, which it belongs to."""
    given = [name for name in names if getattr(arguments, name) is not None]
    if given and not getattr(arguments, needed):
        option, needed = (f"--{name.replace('_', '-')}" for name in (given[0], needed))
        raise ValueError(
            f"{option} {getattr(arguments, given[0])}: it is used with {needed} only; give "
            f"{needed} as well, or leave {option} out"
        )


def drafts(text: str) -> int | str:
    """Parses the value of ``--num-draft``."""
    if text == drafter_names.AUTO:
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of tokens: give 1 to {drafter_names.MOST_DRAFTS}, or auto"
        )
    return int(text)


def add_mesh(p: argparse.ArgumentParser) -> None:
    """The arguments that name devices."""
    p.add_argument("--mesh", help="devices that share the model and the rows: data=2,model=4")
    p.add_argument(
        "--replicate-drafter",
        action="store_true",
        help="with --mesh: every device holds the whole draft model",
    )
    p.add_argument(
        "--processes",
        nargs=3,
        metavar=("ADDRESS", "COUNT", "INDEX"),
        help="this is one of several processes that share the mesh: host:port of the first, how "
        "many there are, which one this is (the first, 0, prints)",
    )


def set_up(arguments: argparse.Namespace):
    """Prepares a command that decodes; returns the model."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from .._internal import compile_cache

    compile_cache.enable()
    names = ("dtype", "mesh")
    if place := getattr(arguments, "processes", None):
        if not (place[1].isdigit() and place[2].isdigit()):
            raise ValueError(f"--processes {' '.join(place)}: COUNT and INDEX are whole numbers")
        specjax.sharding.join(place[0], int(place[1]), int(place[2]))
    wish = quantization_of(arguments) if hasattr(arguments, "quantize") else None
    given = {n: getattr(arguments, n, None) for n in names}
    return specjax.load(arguments.model, quantize=wish, **given)


def options_of(arguments: argparse.Namespace, lm) -> dict:
    """The options of ``specjax.generate`` that the arguments ask for."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    names += ("presence_penalty", "frequency_penalty")
    settings = {name: getattr(arguments, name) for name in names}
    if arguments.grammar:
        settings["logits_processor"] = processors.json_text(lm)
    num, tree = arguments.num_draft, arguments.tree or None
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
    if arguments.drafter_quantize:
        if drafter in ("draft", *(lookup + "draft" for lookup in drafter_names.LOOKUPS)):
            own = own_drafters.own_draft_name(lm) or "draft"
            drafter = drafter.removesuffix("draft") + own
    if num not in (None, drafter_names.AUTO) and drafter in drafter_names.NO_DRAFTS:
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
        inner = drafter.inner if isinstance(drafter, drafter_names.WithLookup) else drafter
        if of_weights and not isinstance(inner, specjax.LM):
            raise ValueError(
                f"{of_weights[0]}: {drafter!r} is no draft model; heads have the type and the "
                "devices of their target's weights"
            )
    require(arguments, "session", "session_tokens")
    if arguments.datastore:
        drafter = _retrieval(lm, arguments)
    elif arguments.session:
        drafter = _session(lm, drafter, arguments.session, arguments.session_tokens)
    if lookup:
        drafter, num = _lookup(drafter, num, lookup), None
    return {
        "drafter": drafter,
        "drafting": specjax.Drafting(num=num, tree=tree, rule=arguments.rule),
        "sampling": specjax.Sampling(**settings),
        "max_new_tokens": arguments.max_new_tokens,
        "seed": arguments.seed,
        "stop_strings": arguments.stop,
    }


def _session(lm, drafter, path: str, capacity: int | None) -> Session:
    """The session of a file, or a new one."""
    capacity = SESSION_TOKENS if capacity is None else capacity
    if drafter not in SESSIONS:
        raise ValueError(f"--session: give --drafter {' or '.join(SESSIONS)} with it")
    if os.path.exists(path):
        return Session.load(lm, path, drafter, capacity)
    return Session(lm, drafter, capacity)


def _retrieval(lm, arguments: argparse.Namespace) -> Retrieval:
    """What drafts from the datastore of the arguments."""
    if arguments.session:
        raise ValueError("--datastore and --session: give one of the two")
    if arguments.drafter not in (None, *SESSIONS):
        raise ValueError(f"--datastore: leave --drafter out, or give {' or '.join(SESSIONS)}")
    drafter = registry.drafter_class(arguments.drafter)() if arguments.drafter else None
    return Retrieval(lm, arguments.datastore, drafter, getattr(arguments, "batch", 8))


def save_session(arguments: argparse.Namespace, options: dict) -> None:
    """Writes the session of ``options_of`` back to its file."""
    if arguments.session:
        options["drafter"].save(arguments.session)


def _self(drafter: str, layers: dict) -> str:
    """The name of a drafter of the target's own layers, with what says which."""
    if drafter.removeprefix(drafter_names.lookup_of(drafter)) != drafter_names.SELF:
        raise ValueError(f"--exit and --skip are for --drafter self, not {drafter}")
    if len(layers) > 1:
        raise ValueError("--exit and --skip: give one of the two")
    ((name, value),) = layers.items()
    return f"{drafter}:{name}={value}"


def _lookup(drafter, num_draft, lengths: dict):
    """An ngram drafter with lengths of its own."""
    if drafter != "ngram":
        raise ValueError("--prompt-lookup-max and -min are for --drafter ngram")
    if num_draft == drafter_names.AUTO:
        raise ValueError("--num-draft auto has its own lookup: leave --prompt-lookup-... out")
    if "longest" in lengths:
        lengths = {"shortest": min(2, lengths["longest"])} | lengths
    num_draft = drafter_names.NUM_DRAFT if num_draft is None else num_draft
    if not 1 <= num_draft <= drafter_names.MOST_DRAFTS:
        raise ValueError(f"--num-draft {num_draft}: give 1 to {drafter_names.MOST_DRAFTS}, or auto")
    return specjax.drafters.NGram(num_draft=num_draft, **lengths)
