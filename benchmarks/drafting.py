"""What drafting itself costs: tables at short and long contexts, datastores, tables of answers."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import specjax
from specjax.analysis import replay, timing
from specjax.drafters import datastore, registry
from specjax.text import Retrieval, Session
from specjax.text.options import Options
from specjax.text.prepare import SMALLEST_BUFFER, prepare_measured, round_up
from specjax.text.session import fingerprint

from . import heldout, pairs, workloads
from .figures import spread
from .jobs import SHORT, made_up, make_job

ROUNDS, WARM = 8, 2  # rounds whose drafts are timed, and rounds before them

# run in a process of its own, so that what it holds is what the datastore takes
MEASURED = """
import json, sys, time
import numpy as np
from specjax.drafters.datastore import Datastore

def resident(name):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))

before = resident("VmRSS")
begin = time.perf_counter()
store = Datastore(sys.argv[1])
opened = time.perf_counter() - begin
random, searches = np.random.default_rng(1), []
texts = []
for place in random.integers(100, store.num_tokens, int(sys.argv[2])):
    texts.append(store.texts_around(np.asarray([place - 60]), 40, 0)[0])
for text in texts:
    begin = time.perf_counter()
    places, matched = store.search(text, 16)
    store.texts_around(places, 24, 48)
    searches.append(time.perf_counter() - begin)
print(json.dumps(dict(opened=opened, searches=searches, matched=int(matched[0]),
    resident=resident("VmRSS") - before, anonymous=resident("RssAnon"))))
"""


def table_cost(
    bench,
    *,
    pair: str,
    drafter: str,
    agreement: float | None = None,
    context: int = 256,
    repetitions: int = 7,
) -> dict:
    """Measures drafting and observing as shares of a plain step.

    The rounds whose parts are timed are those of a target with few layers, the draft model of the
    pair: a table takes the same time for any target with the same vocabulary.

    Args:
      bench: see ``rows.Bench``.
      pair, agreement: of whose target a plain step is timed.
      drafter: the name of a table.
      context: the tokens of the text, which are random.
      repetitions: how often each part is timed.
    """
    made = bench.pair(pair, agreement)
    small = dataclasses.replace(made, target=made.draft)
    limit = made.target.config.context_length
    deepest = registry.drafter_class(drafter).for_target(made.target.target).depth
    new = (ROUNDS + WARM) * (deepest + 1)
    capacity = round_up(min(context + new, limit), SMALLEST_BUFFER, limit)
    tokens = pairs.prompts(made.target.config, 1, SHORT)
    work = make_job(small, drafter, 0, tokens, new, capacity=capacity)
    # the first rounds read the text that was made up
    state, _ = replay.record_inputs(work, made_up(work, small, context, new), WARM)
    state = replay.without_limits(state, ROUNDS, work.drafter.depth)
    parts = replay.replays(work, state, ROUNDS)
    calls = {name: timing.Call(*parts[name], times=ROUNDS) for name in ("draft", "observe")}
    calls["step"] = timing.pass_call(made.target, 1, length=context, capacity=capacity)
    seconds = timing.alternate(calls, repetitions=repetitions)
    draft, observe, step = (
        float(np.median(seconds[name])) for name in ("draft", "observe", "step")
    )
    return {
        "pair_found": made.describe(),
        "plain_step": step,
        "draft": draft,
        "observe": observe,
        "share": draft / step,
        "share_observed": (draft + observe) / step,
    }


def made_datastore(
    bench,
    *,
    tokens: int,
    pair: str = "100m",
    agreement: float | None = None,
    searches: int = 200,
    repetitions: int = 7,
) -> dict:
    """Measures a datastore of random texts: opening, resident memory, and a draft's time.

    Args:
      bench: see ``rows.Bench``.
      tokens: how many tokens it has, 4 bytes each and as many of the index; whole chunks.
      pair: of whose target a plain step is timed.
      agreement: of the pair.
      searches: how many texts are searched.
      repetitions: of the pass that is timed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        chunk = min(datastore.CHUNK, tokens)
        lm = specjax.load("embedded")
        _write_made(path, tokens // chunk, chunk, fingerprint(lm))
        said = subprocess.run(
            [sys.executable, "-c", MEASURED, str(path), str(searches)],
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(said.stdout.splitlines()[-1])
        asked, random = Retrieval(lm, path, rows=1), np.random.default_rng(2)
        texts = [random.integers(0, lm.target.vocab_size, 200) for _ in range(searches)]
        asks = []
        for text in texts:
            begin = time.perf_counter()
            asked.ask([text])
            asked.table.tokens.block_until_ready()
            asks.append(time.perf_counter() - begin)
        del asked
    call = timing.pass_call(bench.pair(pair, agreement).target, 1, length=255, capacity=512)
    step = float(np.median(timing.alternate({"one": call}, repetitions=repetitions)["one"]))
    return {
        "tokens": tokens,
        "opened": found["opened"],
        "resident": found["resident"],
        "anonymous": found["anonymous"],
        "search": spread(np.asarray(found["searches"])),
        "ask": spread(np.asarray(asks)),
        "plain_step": step,
        "share": float(np.median(found["searches"])) / step,
        "share_asked": float(np.median(asks)) / step,
    }


def _write_made(path: Path, chunks: int, chunk: int, tokenizer: str) -> None:
    """A datastore whose chunks are all alike, so that one of them is sorted: all have the same
    contexts in the same order, and what they share most with is their twins."""
    random = np.random.default_rng(0)
    tokens = random.zipf(1.3, chunk).clip(1, 2047).astype(np.int32)
    tokens[999::1000] = datastore.END
    tokens[-1] = datastore.END
    before = tokens[-datastore.DEPTH :]  # of all chunks but the first, whose places hardly differ
    order = datastore.sorted_places(np.concatenate([before, tokens]), datastore.DEPTH)
    order = order[order >= len(before)] - len(before)
    path.mkdir()
    with open(path / "tokens.bin", "wb") as file:
        for _ in range(chunks):
            file.write(tokens.tobytes())
    with open(path / "order.bin", "wb") as file:
        begins = chunk * np.arange(chunks, dtype=np.uint32)
        for part in np.array_split(order.astype(np.uint32), chunks):
            file.write((part[:, None] + begins).tobytes())
    meta = dict(version=datastore.VERSION, num_tokens=chunks * chunk, depth=datastore.DEPTH)
    (path / "meta.json").write_text(json.dumps(meta | {"tokenizer": tokenizer}))


def repeated_requests(
    bench,
    *,
    workload: str,
    prompts: int,
    drafter: str = "suffix",
    temperature: float = 0.0,
    new: int = 64,
    grown: bool = False,
) -> dict:
    """Measures requests twice, with a table that the first pass fills.

    Args:
      bench: see ``rows.Bench``.
      workload: see ``workloads.prompts``.
      prompts: the number of requests, which are decoded one after the other.
      drafter: ``suffix`` or ``sam``.
      temperature: 0 is greedy; above it the second pass has other seeds.
      new: the tokens that are emitted for each prompt.
      grown: see ``heldout.measure_ways``.
    """
    del bench
    lm = heldout.grown_embedded() if grown else specjax.load("embedded")
    session, texts = Session(lm, drafter), workloads.prompts(workload, prompts)
    alone = Session(lm, drafter)
    sampling = specjax.Sampling(temperature=temperature)
    figures, plain, said = {}, [], {}
    for name in ("plain", "alone", "first", "second"):
        spent = rounds = emitted = 0
        for index, text in enumerate(texts):
            given = {"plain": None, "alone": alone}.get(name, session)
            seed = index + (len(texts) if name == "second" else 0)
            options = Options(drafter=given, sampling=sampling, max_new_tokens=new, seed=seed)
            work = prepare_measured(lm, [text], options)
            heldout.run(work)  # compiles what prompts of this length need
            _, seconds, out = heldout.run(work)
            begin, end = len(work.prompts[0]), int(out.lengths[0])
            tokens = np.asarray(out.tokens)[0, begin:end]
            said.setdefault(name, []).append(tokens.tolist())
            if given is session:
                session.add(work.prompts[0], tokens)
            spent, rounds = spent + seconds, rounds + int(np.sum(out.stats.rounds))
            emitted += int(np.sum(out.stats.emitted))
        rate = emitted / spent
        figures[name] = {"tau": emitted / rounds, "tokens_per_second": rate}
        plain.append(rate)
    for name in ("alone", "first", "second"):
        figures[name]["ratio"] = figures[name]["tokens_per_second"] / plain[0]
    same = temperature == 0 and all(said[name] == said["plain"] for name in said)
    return figures | {"identical": same if temperature == 0 else None, "held": session.num_tokens}
