"""The kind of row ``cpu peers``: the engines on the same weights, in turn, and their tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Sequence

import numpy as np

from specjax.analysis import timing

from .. import heldout, pairs
from ..figures import interval, spread
from ..peers import MissingPeerError, same_text
from . import load
from .children import Child, EngineError
from .engine import ADAPTERS, METHODS, OURS, Setting, UnsupportedError

VERSION = 1  # of the files that adapters write; another version makes others
BEFORE = 255  # tokens before a timed pass, as in the kind ``passes``


def cpu_peers(
    bench,
    *,
    pair: str,
    precision: str,
    engines: Sequence[str],
    checkpoint: str = "float32",
    agreement: float | None = None,
    num_draft: int = 4,
    context: int = 64,
    new: int = 64,
    nodes: Sequence[int] = (1, 5, 8, 16),
    reads: Sequence[int] = (64, 512, 4096),
    prompts: int = 1,
    repetitions: int = 7,
    quiet: bool = True,
) -> dict:
    """Measures engines in turn, each in a process of its own that is stopped while others run.

    Args:
      bench: see ``rows.Bench``.
      pair: the name of the pair.
      precision: one of ``engine.PRECISIONS``.
      engines: keys of ``engine.ADAPTERS``; specjax is measured beside them.
      checkpoint: the type of the numbers that a made pair's checkpoints hold. Published ones
        mostly hold bfloat16, whatever type a user computes in.
      agreement: the agreement of a made pair.
      num_draft: the number of tokens that are drafted in a round.
      context: the tokens of a prompt of a made pair; the embedded pair has held-out prompts.
      new: the tokens that are emitted for each prompt.
      nodes: the tokens of the timed passes.
      reads: the tokens of the prompts whose reading is timed; longer ones than the model has
        positions are left out.
      prompts: the number of prompts.
      repetitions: the number of turns.
      quiet: whether turns in which other programs ran are measured again.

    Returns:
      figures of each engine; ``against``: ours against the fastest peer's; ``lacking``: the
      engines that cannot do this row, or fail at their first request, and why.

    Raises:
      MissingPeerError: none of the engines is installed, has the precision and answers.
      DisturbedError: other programs ran all the time.
      EngineError: ours failed, or a peer after its first request.
    """
    absent = {name: _absence(name) for name in engines if ADAPTERS[name].missing}
    if len(absent) == len(engines):
        raise MissingPeerError("; ".join(f"{name}: {why}" for name, why in absent.items()))
    made = dataclasses.replace(bench, dtype=checkpoint).pair(pair, agreement)
    requests = _requests(made, prompts, context)
    limit = made.target.config.context_length
    lengths = [n for n in reads if n < limit]
    ends = [max(map(len, requests)) + new, *(n + 1 for n in lengths), BEFORE + max(nodes)]
    ready, lacking = _prepared(bench, made, precision, [OURS, *engines])
    if list(ready) == [OURS]:
        raise MissingPeerError("; ".join(f"{name}: {why}" for name, why in lacking.items()))
    threads = int(os.environ.get("NPROC", os.cpu_count() or 1))
    common = dict(precision=precision, threads=threads, longest=min(max(ends) + num_draft, limit))

    def start(name, method):
        folders = tuple(map(str, made.folders))
        setting = Setting(folders, str(ready[name]), method=method, **common)
        return _started(name, setting, bench.cache)

    alone = {}
    for name in ready:
        try:
            alone[name] = _alone(start(name, "draft"), requests[0], new, num_draft)
        except EngineError as error:  # a processor or a library that the peer does not work with
            if name == OURS:
                raise
            lacking[name] = " ".join(str(error).split())
    if list(alone) == [OURS]:
        raise MissingPeerError("; ".join(f"{name}: {why}" for name, why in lacking.items()))
    with contextlib.ExitStack() as stack:
        children = {name: stack.enter_context(start(name, "plain")) for name in alone}
        run = _Run(children, repetitions, quiet)
        found = {
            name: {k: child.started[k] for k in ("scheme", "version")}
            | {**alone[name], "methods": {}}
            for name, child in children.items()
        }
        texts = run.texts(found, requests, new, num_draft)
        run.reading(found, [pairs.prompts(made.target.config, 1, n)[0] for n in lengths])
        run.passes(found, nodes, min(BEFORE, limit - max(nodes)))
    for name, figures in found.items():
        for method, own in figures["methods"].items():
            own["same_as_ours"] = same_text(texts[OURS, "plain"], texts[name, method])
            own["same_as_plain"] = same_text(texts[name, "plain"], texts[name, method])
    return {
        "synthetic": made.synthetic,
        "pair_found": made.describe(),
        "engines": found,
        "against": run.against,
        "lacking": lacking,
        "threads": threads,
        "disturbed": run.disturbed,
        "quiet": quiet,
    }


def _started(name: str, setting: Setting, cache) -> Child:
    """An engine in a process of its own, whose messages go to a file in the folder ``cache``."""
    return Child(name, setting, cache / f"cpu-peers-{ADAPTERS[name].module}.log")


def _alone(child: Child, prompt: np.ndarray, new: int, num_draft: int) -> dict:
    """Seconds to load target and draft model, and memory after a request with both; without a
    draft model where the engine takes none."""
    with child:
        method = "draft" if "draft" in child.started["methods"] else "plain"
        child.ask(do="text", method=method, prompt=prompt.tolist(), new=new, num_draft=num_draft)
        return {"load_seconds": child.started["seconds"], "memory": child.ask(do="memory")}


def _requests(made: pairs.Pair, count: int, context: int) -> list[np.ndarray]:
    if made.synthetic:
        return list(pairs.prompts(made.target.config, count, context))
    encoded = (made.target.tokenizer.encode(text) for text in heldout.prompts(count))
    return [np.asarray(ids, np.int32) for ids in encoded]


def _prepared(bench, made: pairs.Pair, precision: str, engines: Sequence[str]):
    """The folders of the engines that have the row, and why others have not."""
    mark = f"{VERSION}-{made.target.fingerprint}-{made.draft.fingerprint}"
    ready, lacking = {}, {}
    for name in dict.fromkeys(engines):
        adapter = ADAPTERS[name]
        if adapter.missing:
            lacking[name] = _absence(name)
            continue
        folder = bench.cache / "cpu-peers" / mark / adapter.module / precision
        try:
            adapter.prepare(made, precision, folder)
        except UnsupportedError as error:
            lacking[name] = str(error)
            continue
        ready[name] = folder
    return ready, lacking


def _absence(name: str) -> str:
    adapter = ADAPTERS[name]
    return f"{', '.join(adapter.missing)} not installed: {adapter.install}"


class _Run:
    """The measurements of one row; ``against`` grows with them."""

    def __init__(self, children: dict[str, Child], repetitions: int, quiet: bool):
        self.children, self.repetitions = children, repetitions
        pids = [os.getpid(), *(child.pid for child in children.values())]
        self.read = functools.partial(load.read, pids) if quiet else None
        self.disturbed, self.against = 0, {}
        if self.read is not None:
            load.wait_until_quiet(self.read)

    def _seconds(self, calls):
        for call in calls.values():
            call()
        found, disturbed = load.in_turn(calls, repetitions=self.repetitions, reading=self.read)
        self.disturbed += disturbed
        return found

    def _compare(self, name: str, seconds: dict[str, np.ndarray]) -> None:
        """Notes how many times as fast as the fastest peer we are."""
        theirs = {k: v for k, v in seconds.items() if k != OURS}
        if OURS in seconds and theirs:
            peer = min(theirs, key=lambda k: np.median(theirs[k]))
            ratio = interval(timing.ratio(theirs[peer], seconds[OURS]))
            self.against[name] = {"peer": peer, "ratio": ratio}

    def texts(self, found, requests, new, num_draft) -> dict[tuple[str, str], list[np.ndarray]]:
        """Whole requests by every method; returns the tokens by engine and method."""
        texts, total = {}, len(requests) * new
        for method in METHODS:
            rounds, calls = {}, {}
            for name, child in self.children.items():
                if method not in child.started["methods"]:
                    continue
                common = dict(do="text", method=method, num_draft=num_draft)
                asked = [common | {"prompt": ids.tolist()} for ids in requests]
                said = [child.ask(**one, new=new) for one in asked]
                texts[name, method] = [np.asarray(x["tokens"], np.int32) for x in said]
                counts = [x["rounds"] for x in said]
                rounds[name] = None if None in counts else sum(counts)
                calls[name] = functools.partial(_total, child, asked, new)
                calls[name, "first"] = functools.partial(_total, child, asked, 1)
            seconds = self._seconds(calls)
            later = {n: seconds[n] - np.median(seconds[n, "first"]) for n in rounds}
            each = {n: later[n] / max(1, rounds[n] - len(requests)) for n in rounds if rounds[n]}
            for name in rounds:
                found[name]["methods"][method] = {
                    "tokens_per_second": spread(total / seconds[name]),
                    "seconds_per_round": spread(each[name]) if name in each else None,
                    "rounds": rounds[name],
                    "tau": total / rounds[name] if rounds[name] else None,
                }
            label = {"plain": "a plain step", "draft": "a round", "lookup": "a round of lookup"}
            self._compare(label[method], each)
            self._compare(f"whole, {method}", {n: seconds[n] for n in rounds})
            if method == "plain":
                firsts = {n: seconds[n, "first"] / len(requests) for n in rounds}
                for name in rounds:
                    found[name]["first_token"] = spread(firsts[name])
                self._compare("first token", firsts)
        return texts

    def reading(self, found, prompts) -> None:
        """Prompts of several lengths, to the first token."""
        for ids in prompts:
            asked = [dict(do="text", method="plain", num_draft=0, prompt=ids.tolist())]
            calls = {n: functools.partial(_total, c, asked, 1) for n, c in self.children.items()}
            seconds = self._seconds(calls)
            for name, values in seconds.items():
                rates = found[name].setdefault("read_tokens_per_second", {})
                rates[len(ids)] = spread(len(ids) / values)
            self._compare(f"reading {len(ids)}", seconds)

    def passes(self, found, nodes, length) -> None:
        """Passes of the target over several tokens."""
        able = {
            name: child
            for name, child in self.children.items()
            if child.ask(do="pass", nodes=1, length=length)["seconds"] is not None
        }
        for n in nodes:
            command = dict(do="pass", nodes=n, length=length)
            calls = {k: functools.partial(_asked_seconds, c, command) for k, c in able.items()}
            seconds = self._seconds(calls)
            for name, values in seconds.items():
                found[name].setdefault("passes", {})[n] = spread(values)
            self._compare(f"T({n})", seconds)


def _asked_seconds(child: Child, command: dict) -> float:
    return child.ask(**command)["seconds"]


def _total(child: Child, asked: list[dict], new: int) -> float:
    return sum(child.ask(**one, new=new)["seconds"] for one in asked)
