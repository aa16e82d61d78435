"""Named suites: each returns its rows, ``{"kind": ..., **settings}``, in the order of running.

Rows of one pair stand together, since a pair is made once. The most important rows come first, so
that an interrupted suite has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from .cpu_peers.engine import ADAPTERS, OURS, PRECISIONS
from .pairs import SHAPES
from .small_caches import CACHES
from .text_suites import KEEPS_PROGRAMS as KEEPS_PROGRAMS
from .text_suites import Row, cascades, embedded, quality, self_drafting, workloads


def smoke(pair: str = "tiny", agreement: float = 0.8, repetitions: int = 6) -> list[Row]:
    """Every kind of row once, in miniature: a test of the suites, not of the machine.

    The kind "long context" is left out, since it needs a minute of training first, and the kind
    "cpu peers", which has a rehearsal of its own.
    """
    of = dict(pair=pair, agreement=agreement)
    common = dict(**of, new=24, repetitions=repetitions)
    return [
        {"kind": "bandwidth"},
        {"kind": "passes", **of, "nodes": [1, 4], "repetitions": repetitions},
        {"kind": "buffers", **of, "capacities": [512, 2048], "repetitions": repetitions},
        {"kind": "decode", **common, "drafter": "plain"},
        {"kind": "decode", **common, "drafter": "draft", "num_draft": 3},
        {"kind": "decode", **common, "drafter": "ngram", "num_draft": 3, "parts": False},
        {"kind": "decode", **common, "drafter": "draft", "num_draft": 3, "context": 1024}
        | {"batch": 2, "read": False, "parts": False},
        {"kind": "decode", **common, "drafter": "adaptive ngram", "num_draft": 3, "parts": False},
        {"kind": "decode", **common, "drafter": "synthetic 0.8", "num_draft": 3, "parts": False},
        {"kind": "product", "columns": [1, 4], "outputs": 512, "inputs": 256}
        | {"repetitions": repetitions},
        {"kind": "attention", "lengths": [256], "nodes": [1, 4], "repetitions": repetitions},
        {"kind": "drafters", "ways": [{"drafter": "ngram", "num_draft": 3}], "temperature": 0.0}
        | {"prompts": 3, "new": 16, "repetitions": 2},
        {"kind": "serving", "drafter": "ngram", "num_draft": 3, "prompts": 6, "longest": 12}
        | {"batch": 2, "repetitions": repetitions},
        {"kind": "regeneration", "drafter": "ngram", "num_draft": 3, "rows": 4, "new": 12}
        | {"batch": 2, "split": "heldout", "repetitions": repetitions},
        {"kind": "tables", "ways": [{"drafter": "suffix"}], "temperature": 0.0, "given": True}
        | {"workload": "edits", "prompts": 2, "batch": 2, "new": 16, "repetitions": 2},
        {"kind": "drafting", **of, "drafter": "suffix", "repetitions": repetitions},
        {"kind": "datastore", **of, "tokens": 1 << 14, "searches": 8, "repetitions": repetitions},
        {"kind": "requests", "workload": "open", "prompts": 2, "new": 16},
        {"kind": "quality", "rule": "approximate-top-k", "temperature": 0.0, "prompts": 2}
        | {"new": 8},
        {"kind": "part memory", "drafters": ["self:exit=2"], "size": "embedded"},
        {"kind": "resumed pass", "exits": [2], "nodes": [2], "size": "embedded"}
        | {"repetitions": repetitions},
        {"kind": "skip search", "prompts": 1, "judged": 1, "new": 16, "size": "embedded"},
        {"kind": "early exits", "exits": [2], "drafts": [1], "prompts": 1, "new": 16, "rows": 2}
        | {"twin": "embedded", "size": "embedded"},
        {"kind": "schedules", "ways": [{"layer": 4, "guesses": 2}], "prompts": 1, "new": 8}
        | {"repeats": 2},
        {"kind": "peer", **of, "num_draft": 3, "new": 16, "repetitions": repetitions},
        {"kind": "budgets", "drafter": "draft", "entries": [32], "caches": ["window", "chunks"]}
        | {"prompts": 2, "tokens": 96, "new": 8},
        {"kind": "drafting cost", **of, "drafters": ["draft", "draft:window=60"]}
        | {"contexts": [256, 2048], "repetitions": repetitions},
        {"kind": "long rounds", **of, "drafters": ["draft:window=60"], "context": 2048}
        | {"batch": 2, "new": 8, "repetitions": repetitions},
        {"kind": "training", "target": "small", "lengths": [1024, 4096], "steps": 2}
        | {"timed": 1024, "optimizer": "adamw", "repetitions": repetitions},
    ]


def cpu(
    pair: str = "100m",
    agreement: float = 0.8,
    drafts: Sequence[int] = (3, 7),
    tree: str = "7x4x1",
    repetitions: int = 7,
) -> list[Row]:
    """A CPU: the kernels, and a pair of 100M weights; a tree of 64 nodes too."""
    of = dict(pair=pair, agreement=agreement)
    common = dict(kind="decode", **of, repetitions=repetitions)
    return [
        {"kind": "bandwidth"},
        {"kind": "passes", **of, "nodes": [1, 2, 4, 8, 16, 32]},
        {"kind": "buffers", **of, "capacities": [512, 4096, 32_768]},
        {**common, "drafter": "plain"},
        *({**common, "drafter": "draft", "num_draft": n} for n in drafts),
        {**common, "drafter": "ngram", "num_draft": drafts[0]},
        {**common, "drafter": "adaptive draft", "num_draft": drafts[-1], "parts": False},
        {**common, "drafter": "draft", "tree": tree, "num_draft": 3},
        {"kind": "product", "columns": [1, 4, 8, 16, 32]},
        {"kind": "attention", "lengths": [256, 1024, 4096], "nodes": [1, 8]},
    ]


def scaling(
    pair: str = "100m",
    agreement: float = 0.8,
    batches: Sequence[int] = (1, 4, 16, 64),
    contexts: Sequence[int] = (1024, 4096, 32_704),
    nodes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    repetitions: int = 6,
) -> list[Row]:
    """One pair with batches of 1 to 64, contexts of 256 to 32k tokens, and drafts of 1 to 64 nodes.

    Along the number of nodes the drafter is synthetic and costs nothing, so that the figures show
    the limit that the target's passes set. Contexts of batches and long contexts are made up, see
    ``jobs.made_up``.
    """
    common = dict(kind="decode", pair=pair, agreement=agreement, new=32)
    common |= dict(repetitions=repetitions, parts=False)
    draft, known = dict(drafter="draft", num_draft=3), dict(drafter=f"synthetic {agreement:g}")
    adaptive = dict(drafter="adaptive draft", num_draft=3)
    return [
        {"kind": "bandwidth"},
        {"kind": "passes", "pair": pair, "agreement": agreement, "nodes": list(nodes)},
        *({**common, **known, "num_draft": n - 1} for n in nodes if n > 1),
        *({**common, **draft, "context": c, "read": False} for c in contexts),
        *(
            {**common, **way, "batch": b, "context": 256, "read": False}
            | ({"new": 16} if b > 16 else {})
            for b in batches
            for way in (draft, adaptive)[: 2 if b <= 16 else 1]
        ),
    ]


def peers(
    pair: str = "100m",
    agreement: float = 0.8,
    drafts: Sequence[int] = (3, 7),
    prompts: int = 4,
    repetitions: int = 7,
) -> list[Row]:
    """Hugging Face transformers in the same run: a 100M pair, and the embedded pair."""
    of = dict(kind="peer", pair=pair, agreement=agreement, repetitions=repetitions)
    text = dict(kind="peer", pair="embedded", rows=prompts, repetitions=repetitions)
    return [
        *({**of, "num_draft": n, "lookup": n == drafts[0]} for n in drafts),
        {**text, "num_draft": drafts[0]},
    ]


def cpu_peers(
    pair: str = "100m",
    agreement: float = 0.8,
    drafts: Sequence[int] = (4,),
    nodes: Sequence[int] = (1, 5, 8, 16),
    contexts: Sequence[int] = (64, 512, 4096),
    prompts: int = 4,
    engines: Sequence[str] = tuple(ADAPTERS),
    precisions: Sequence[str] = PRECISIONS,
    checkpoints: Sequence[str] = ("float32", "bfloat16"),
    repetitions: int = 7,
    quiet: bool = True,
) -> list[Row]:
    """The engines that people use on CPUs: a 100M pair and the embedded pair, by precision.

    Installed engines are measured in turn in one row; a row of an engine that is not installed
    says how to install it. In float32, the made pair is also read from checkpoints in bfloat16.
    """
    peers = [name for name in engines if name != OURS]
    installed = [name for name in peers if not ADAPTERS[name].missing]
    missing = [[name] for name in peers if name not in installed]
    common = dict(kind="cpu peers", repetitions=repetitions, nodes=list(nodes))
    common |= dict(reads=list(contexts), quiet=quiet)
    of = {"pair": pair, "agreement": agreement}, {"pair": "embedded", "prompts": prompts}
    return [
        *(
            {**common, **size, "precision": p, **read, "num_draft": n, "engines": installed}
            for size in of
            for p in precisions
            for read in ([{"checkpoint": c} for c in checkpoints] if p == PRECISIONS[0] else [{}])
            for n in drafts
            if installed and (size is of[0] or read.get("checkpoint") != "bfloat16")
        ),
        *({**common, **of[0], "precision": precisions[0], "engines": e} for e in missing),
    ]


def serving(prompts: int = 256, batches: Sequence[int] = (8,), repetitions: int = 7) -> list[Row]:
    """Continuous batching against whole batches: texts of 1 to 128 tokens, the embedded pair."""
    ways = {"drafter": "plain"}, *({"drafter": d, "num_draft": 3} for d in ("ngram", "draft"))
    common = dict(prompts=prompts, longest=128, repetitions=repetitions)
    return [{"kind": "serving", **way, **common, "batch": b} for b in batches for way in ways]


def regeneration(batches: Sequence[int] = (4, 1, 2, 8), repetitions: int = 6) -> list[Row]:
    """The recipe ``regenerate`` with drafters and with plain decoding, 64 rows of 192 tokens."""
    common = dict(kind="regeneration", num_draft=3, repetitions=repetitions)
    ways = [("ngram", b, 0.0) for b in batches]
    ways += [("draft", batches[0], 0.0), ("ngram", batches[0], 1.0)]
    return [
        {**common, "drafter": d, "batch": b, "rows": min(64, 16 * b), "temperature": t}
        for d, b, t in ways
    ]


def eagle(
    contexts: Sequence[int] = (32, 64, 128, 512, 2048, 8192), repetitions: int = 6
) -> list[Row]:
    """EAGLE-3: the time and memory of a training step, and the head in contexts up to 8,192."""
    step = dict(kind="training", target="embedded", repetitions=repetitions)
    return [
        *({**step, "lengths": [256, 512, 1024, 2048], "steps": k} for k in (3, 6)),
        {"kind": "long context", "contexts": list(contexts)},
        *({**step, "lengths": [256], "batch": b, "steps": 5, "timed": 256} for b in (4, 8)),
    ]


def small_caches(
    pair: str = "100m",
    agreement: float = 0.8,
    entries: Sequence[int] = (64, 128, 256),
    contexts: Sequence[int] = (256, 32_704),
    batches: Sequence[int] = (1, 8),
    prompts: int = 16,
    repetitions: int = 6,
) -> list[Row]:
    """Small caches for drafting: acceptance by budget on real text, cost and speed at 32k.

    Windows, retrieved chunks and SnapKV of the embedded draft model and of the target itself; a
    pair of 100M weights after long contexts, which are made up, see ``jobs.made_up``; and one
    whose first layer, the drafter, sees a window alone, so that its drafts are good for what the
    window shows while the target's other layers need the whole context.
    """
    of = dict(pair=pair, agreement=agreement, num_draft=3, repetitions=repetitions)
    window, chunks = "window=508,sinks=4", "window=60,sinks=4,budget=448"
    cost = ["draft", f"draft:{window}", f"draft:{chunks}", f"self:{window}"]
    return [
        *(
            {"kind": "long rounds", **of, "drafters": cost[:1] if b > 1 else cost[:3]}
            # rows of a batch end in different rounds: a longer text weighs that less
            | {"context": contexts[-1], "batch": b, "new": 48 if b > 1 else 32}
            for b in batches
        ),
        *(
            {"kind": "long rounds", **of, "pair": local, "drafters": ["draft"]}
            | {"context": contexts[-1], "batch": b, "new": 48 if b > 1 else 32}
            for local in [f"{pair}-local"]
            if local in SHAPES
            for b in batches
        ),
        {"kind": "drafting cost", **of, "drafters": cost, "contexts": list(contexts)},
        *(
            {"kind": "budgets", "drafter": d, "entries": list(entries), "caches": [cache]}
            | {"prompts": prompts}
            for d in ("self", "draft")
            for cache in CACHES
        ),
    ]


def gpu(
    pair: str = "8b",
    agreement: float = 0.8,
    drafts: Sequence[int] = (3, 7),
    repetitions: int = 7,
) -> list[Row]:
    """A GPU: 8B shapes in bfloat16, batch 1, compared with Hugging Face transformers."""
    of = dict(pair=pair, agreement=agreement)
    common = dict(kind="decode", **of, drafter="draft", new=128, repetitions=repetitions)
    return [
        {"kind": "bandwidth"},
        {"kind": "passes", **of, "nodes": [1, 4, 8, 16]},
        {**common, "num_draft": drafts[0]},
        {"kind": "peer", **of, "num_draft": drafts[0], "new": 128, "lookup": False}
        | {"repetitions": repetitions},
        *({**common, "num_draft": n, "parts": False} for n in drafts[1:]),
        {"kind": "product", "columns": [1, 8, 16], "outputs": 14_336, "inputs": 4096},
    ]


SUITES: dict[str, Callable[..., list[Row]]] = {
    suite.__name__.replace("_", "-"): suite
    for suite in (
        smoke,
        cpu,
        gpu,
        embedded,
        workloads,
        quality,
        self_drafting,
        scaling,
        peers,
        cpu_peers,
        serving,
        regeneration,
        eagle,
        small_caches,
        cascades,
    )
}


BOUNDS = {
    "repetitions": (6, 10_000),
    "prompts": (1, 320),
    "agreement": (0.05, 1.0),
    "drafts": (1, 63),
    "batches": (1, 4096),
    "nodes": (1, 128),
    "contexts": (1, 1 << 20),
    "entries": (24, 504),
}
OPTIONS = {name for suite in SUITES.values() for name in inspect.signature(suite).parameters}


def rows_of(name: str, **options) -> list[Row]:
    """The rows of a suite.

    Raises:
      ValueError: the suite or the pair does not exist, the suite does not have such an option, the
        option is out of its bounds, or the context is longer than the model's.
    """
    if name not in SUITES:
        raise ValueError(f"suite {name!r} does not exist; known: {', '.join(SUITES)}")
    known = inspect.signature(SUITES[name]).parameters
    foreign = [option for option in options if option not in known]
    if foreign:
        raise ValueError(
            f"--{foreign[0]}: the suite {name} has no such option; it has "
            f"{', '.join('--' + option for option in known)}"
        )
    accept = {"engines": tuple(ADAPTERS), "precisions": PRECISIONS, "checkpoints": PRECISIONS[:2]}
    for option, accepted in accept.items():
        if unknown := [name for name in options.get(option, ()) if name not in accepted]:
            raise ValueError(f"--{option} {unknown[0]}: known: {', '.join(accepted)}")
    for option, accepted in BOUNDS.items():
        values = options.get(option, ())
        for value in values if isinstance(values, list | tuple) else [values]:
            if not accepted[0] <= value <= accepted[1]:
                raise ValueError(
                    f"--{option} {value}: give {accepted[0]} to {accepted[1]}"
                    + (", fewer give no honest interval" if option == "repetitions" else "")
                )
    rows = SUITES[name](**options)
    if "pair" not in known:
        return rows
    pair = options.get("pair", known["pair"].default)
    if pair not in SHAPES:
        raise ValueError(f"--pair {pair}: no such shape; known: {', '.join(SHAPES)}")
    limit = SHAPES[pair].context_length
    for row in rows:
        ends = [row.get("context", 0) + row.get("new", 0), *row.get("capacities", ())]
        if row.get("pair") == pair and max(ends) > limit:
            raise ValueError(
                f"the suite {name} asks for a context of {row.get('context', max(ends))} tokens "
                f"and {row.get('new', 0)} new ones; the pair {pair} has {limit} positions: give "
                "smaller --contexts, or another --pair"
            )
    return rows
