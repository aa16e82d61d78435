"""The suites on real text: all drafters of the embedded target (``embedded``), tables on several
kinds of text (``workloads``), approximate rules (``quality``), and targets that draft for
themselves (``self_drafting``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .quality import EXACT_WHEN_GREEDY, SETTINGS

Row = dict
# suites whose compiled programs stay on disk, as for the command
KEEPS_PROGRAMS = (
    *("embedded", "workloads", "cascades", "quality"),
    *("self-drafting", "small-caches"),
)


def embedded(prompts: int = 60, batches: Sequence[int] = (8,)) -> list[Row]:
    """Every drafter of the embedded target on held-out prompts: chains, trees and combinations.

    All drafters of a row run in turn with plain decoding. One row computes target and drafters in
    eight bits. The last rows are the light heads and ``ngram`` with the target grown to 100M
    float32 weights, which a pass reads from memory.
    """
    chains = {
        0.0: {
            **{"eagle3": (3, 4, 5), "draft": (2, 3, 4)},
            **dict.fromkeys(("mtp", "speculator", "p-eagle"), (1, 3)),
            **{"copy+p-eagle": (3,), "medusa": (1,), "ngram": (3, 7)},
            **dict.fromkeys(("ngram+eagle3", "ngram+draft"), (3,)),
        },
        1.0: {
            **{"draft": (1, 2), "eagle3": (1, 2, 3), "mtp": (1, 2)},
            **dict.fromkeys(("speculator", "p-eagle", "medusa"), (1,)),
            "ngram": (3,),
        },
    }
    rows = []
    for t, drafters in chains.items():
        common = {"kind": "drafters", "temperature": t, "new": 128}
        ways = [{"drafter": d, "num_draft": n} for d, numbers in drafters.items() for n in numbers]
        if not t:
            ways += [{"drafter": d, "tree": "2x1x1"} for d in ("eagle3", "mtp", "speculator")]
            ways += [{"drafter": d, "tree": "3x2x1"} for d in ("eagle3", "mtp")]
        rows.append({**common, "prompts": prompts, "ways": ways})
        rows += [
            {**common, "prompts": prompts // b * b, "batch": b}
            | {"ways": [{"drafter": d, "num_draft": "auto"} for d in ("eagle3", "draft")]}
            for b in batches
        ]
    ways = [{"drafter": "eagle3", "num_draft": n} for n in (3, 4)]
    ways.append({"drafter": "ngram", "num_draft": 3})
    eight = {"kind": "drafters", "temperature": 0.0, "new": 128, "quantize": "int8"}
    rows.append({**eight, "prompts": min(prompts, 24), "ways": ways})
    for t in (0.0, 1.0):
        light = ("speculator", "p-eagle", "medusa")
        ways = [{"drafter": d, "num_draft": n} for d in light for n in (1, 3)]
        ways += [{"drafter": d, "num_draft": 3} for d in ("ngram", "ngram+speculator") if not t]
        size = {"grown": True, "prompts": min(prompts, 16), "new": 64, "repetitions": 2}
        rows.append({"kind": "drafters", "temperature": t, **size, "ways": ways})
    return rows


def workloads(
    pair: str = "100m",
    agreement: float = 0.8,
    prompts: int = 4,
    batches: Sequence[int] = (1, 8),
    contexts: Sequence[int] = (256, 32_256),
    repetitions: int = 7,
) -> list[Row]:
    """Drafters without training on four kinds of text, and what drafting with them costs.

    The first rows are the embedded target, grown to 100M weights and as it is, on the texts of
    ``workloads.py``: its own text, and for the grown target true answers that it is made to say.
    Drafters of a row run in turn with plain decoding, and rows of one size, temperature and batch
    share their programs.
    Batches draft fewer tokens for each row, because their passes are bound by arithmetic; batches
    and repeated requests are measured on two kinds of text only. The other rows are the costs:
    tables of answers that requests fill, a datastore of 1 GB of tokens, and each table beside a
    plain step of the pair of 100M weights.
    """
    kinds, few = ("edits", "retrieval", "completion", "open"), ("edits", "open")
    copies = [{"drafter": "ngram", "num_draft": 7}, *({"drafter": d} for d in ("suffix", "sam"))]
    copies.append({"drafter": "rest"})
    ways = [*copies, {"drafter": "recycling", "tree": "3x2x1"}]
    narrow = [{"drafter": d, "num_draft": 4} for d in ("ngram", "suffix", "sam", "rest")]
    narrow.append({"drafter": "recycling", "tree": "2x1"})
    more = [
        {"drafter": "ngram", "num_draft": 15},
        {"drafter": "suffix+recycling", "tree": "3x2x1"},
        {"drafter": "lookahead:window=3,ngram=3,guesses=2"},
        {"drafter": "jacobi", "num_draft": 3},
    ]
    sizes = {"grown": True, "repetitions": 1, "prompts": prompts}, {"prompts": 2 * prompts}
    rows = []
    for size in sizes:
        common = {"kind": "tables", **size}
        given = {**common, "temperature": 0.0, "batch": 1, "given": True, "ways": copies}
        rows += [{**given, "workload": kind} for kind in kinds[:2] if "grown" in size]
        for b in batches:
            common["prompts"] = max(size["prompts"], 2 * b)
            for t in (0.0, 1.0):
                all_ways = ways if t or "grown" in size else [*ways, *more]
                found = narrow if b > 1 else all_ways
                shared = {**common, "temperature": t, "batch": b, "ways": found}
                rows += [{**shared, "workload": kind} for kind in (few if b > 1 else kinds)]
    rows += [
        {"kind": "requests", "workload": kind, "prompts": 2 * prompts, "temperature": t}
        for t in (0.0, 1.0)
        for kind in few
    ]
    of = dict(pair=pair, agreement=agreement, repetitions=repetitions)
    tables = ("ngram", "suffix", "sam", "recycling", "lookahead", "jacobi")
    rows.append({"kind": "datastore", **of, "tokens": 1 << 28})
    return rows + [
        {"kind": "drafting", **of, "drafter": d, "context": c} for d in tables for c in contexts
    ]


def cascades(prompts: int = 6) -> list[Row]:
    """Three levels against two on edits: a table, the embedded draft model, and the embedded target
    grown to 100M weights, which says its own text; beside each what the planner predicts.

    What makes a target say true answers (``workloads.GivenText``) would make the draft model say
    them too.
    """
    tables = ("ngram", "suffix")
    ways = [{"drafter": "ngram", "num_draft": 7}, {"drafter": "suffix", "num_draft": 16}]
    ways += [{"drafter": "draft", "num_draft": n} for n in (3, 6)]
    ways += [{"drafter": f"{table}+draft", "num_draft": 3} for table in tables]
    ways += [{"drafter": f"cascade:draft:{table}", "num_draft": 6} for table in tables]
    common = {"kind": "tables", "grown": True, "workload": "edits", "temperature": 0.0}
    common |= {"prompts": prompts, "repetitions": 2, "ways": ways}
    return [{**common, "given": False, "planned": 3}]


def quality(prompts: int = 16) -> list[Row]:
    """Each approximate rule from its strictest setting on: quality of the text, and speed."""
    return [
        {"kind": "quality", "rule": rule, "temperature": t, "prompts": prompts}
        for t in (0.0, 1.0)
        for rule in SETTINGS
        if t or rule not in EXACT_WHEN_GREEDY
    ]


def self_drafting(
    prompts: int = 8, target: str | None = None, twin: str | None = None, repetitions: int = 15
) -> list[Row]:
    """Parts of the target that draft: memory, the resumed pass, a searched skip set, early exits,
    and the ticks of PPD and SPEED.

    The embedded target is grown to 100M weights, with its six layers. ``target`` is the folder of a
    model of 6 or 12 layers that was trained for early exits, and ``twin`` that of a model that was
    trained plainly on the same tokens; both are what ``specjax train pretrain`` exports, with the
    configurations ``embedded_early_exit`` and ``deep_early_exit`` and their twins.

    Raises:
      ValueError: a folder does not exist, or there is a twin and no target.
    """
    for option, folder in (("target", target), ("twin", twin)):
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"--{option} {folder}: no such folder; give that of an exported model")
    if twin is not None and target is None:
        raise ValueError(f"--twin {twin}: it is compared with a target; give --target too")
    rows = [
        {"kind": "part memory", "drafters": ["self:exit=2", "self:skip=mlp.2-3"]},
        {"kind": "resumed pass", "exits": [1, 2, 3], "nodes": [2, 4], "repetitions": repetitions},
    ]
    exits = {"kind": "early exits", "prompts": prompts}
    if target is not None:
        own = {"target": target} | ({} if twin is None else {"twin": twin})
        rows.append({**exits, **own, "exits": [1, 2, 3], "drafts": [2, 3, 4]})
    ways = [{"layer": 3, "guesses": k} for k in (1, 3, 8)] + [{"layer": 4, "guesses": 3}]
    return rows + [
        {"kind": "skip search", "prompts": prompts},
        {**exits, "exits": [2], "drafts": [1, 2]},
        {"kind": "schedules", "ways": ways, "repeats": 2, "prompts": 4},
    ]
