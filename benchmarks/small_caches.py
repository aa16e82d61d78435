"""Drafting over small caches: acceptance by budget, cost and speed in long contexts.

A drafter sees ``entries`` tokens of the text: its first 8, and as ``window`` the last ones alone
(StreamingLLM, MagicDec), as ``chunks`` the last 64 (of fewer than 128 entries half) and chunks that
are retrieved (TriForce), as ``snapkv`` these and what the end of the prompt looked at (MagicDec).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.analysis import replay, timing
from specjax.text.options import Drafting
from specjax.text.prepare import SMALLEST_BUFFER, round_up

from . import pairs, workloads
from .figures import interval, spread
from .jobs import SHORT, made_up, make_job

SINKS, NEAR = 8, 64  # tokens at both ends that retrieval keeps, NEAR or half of all entries
ROUNDS = 8  # whose drafts are timed
CACHES = ("window", "chunks", "snapkv")


def cache_words(cache: str, entries: int) -> str:
    """The settings of a cache with so many entries, as they stand after a drafter's name.

    Raises:
      ValueError: the cache is unknown, or chunks of 8 do not fill it.
    """
    if cache == "window":
        return f"window={entries - SINKS},sinks={SINKS}"
    near = min(NEAR, entries // 2)
    budget = entries - SINKS - near
    if cache not in CACHES or budget < 8 or budget % 8:
        raise ValueError(
            f"cache={cache!r}, entries={entries}: known are {', '.join(CACHES)}, with a multiple "
            "of 16 entries from 32 up to 128, and of 8 from there"
        )
    chosen = "observe=32" if cache == "snapkv" else "chunk=8"
    return f"window={near},sinks={SINKS},budget={budget},{chosen}"


def acceptance_by_budget(
    bench,
    *,
    drafter: str,
    entries: list[int],
    caches: list[str],
    prompts: int = 16,
    tokens: int = 448,
    new: int = 64,
    num_draft: int = 4,
) -> dict:
    """Measures the acceptance of a drafter of the embedded target by the entries that it sees.

    Half of the rows are greedy and half are drawn at temperature 1, in one batch.

    Args:
      bench: see ``rows.Bench``.
      drafter: ``draft`` (the embedded draft model) or ``self`` (the target, all of its layers).
      entries: how many tokens of the text are seen.
      caches: names of ``CACHES``.
      prompts: pieces of held-out files of the standard library.
      tokens: of each piece; with the new ones no more than the target was trained on, 512.
      new: the tokens that are emitted for each prompt.
      num_draft: the number of tokens that are drafted in a round.

    Returns:
      ``{"points": [...]}``: the first is the drafter with its whole cache, then one for each cache
      and number of entries; each with ``first`` (the share of rounds whose first drafted token was
      accepted) and ``tau``, at temperatures ``"0.0"`` and ``"1.0"``; and ``commit``.
    """
    from .runner import commit

    del bench
    lm = specjax.load("embedded")
    pieces = long_pieces(lm, prompts, tokens)
    temperature = np.where(np.arange(prompts) % 2, 1.0, 0.0)
    whole = drafter if drafter != "self" else f"self:exit={lm.target.num_layers}"
    ways = [("whole", None, whole)]
    ways += [(c, n, f"{drafter}:{cache_words(c, n)}") for c in caches for n in entries]
    points, said = [], None
    for cache, count, name in ways:
        out = specjax.generate(
            lm,
            [piece.tolist() for piece in pieces],
            drafter=name,
            drafting=Drafting(num=num_draft),
            sampling=specjax.Sampling(temperature=temperature),
            max_new_tokens=new,
        )
        greedy = [out.tokens[row] for row in np.flatnonzero(temperature == 0)]
        said = greedy if said is None else said
        same = all(np.array_equal(a, b) for a, b in zip(said, greedy, strict=True))
        point = {"cache": cache, "entries": count, "drafter": name, "identical": same}
        for at in (0.0, 1.0):
            rows = temperature == at
            rounds = np.asarray(out.stats.rounds)[rows].sum()
            first = np.asarray(out.stats.accepted_at)[rows, 0].sum() / rounds
            tau = np.asarray(out.stats.emitted)[rows].sum() / rounds
            point[str(at)] = {"first": float(first), "tau": float(tau)}
        points.append(point)
    return {"points": points, "commit": commit()}


def long_pieces(lm: specjax.LM, count: int, tokens: int) -> np.ndarray:
    """Pieces of held-out files, evenly spread, int32 ``[count, tokens]``.

    Raises:
      ValueError: there are fewer.
    """
    pieces = []
    for text in workloads.files("heldout"):
        said = np.asarray(lm.tokenizer.encode(text), np.int32)
        pieces += [said[i : i + tokens] for i in range(0, len(said) - tokens + 1, tokens)]
    if len(pieces) < count:
        raise ValueError(f"prompts={count}: there are {len(pieces)} pieces of {tokens} tokens")
    return np.stack([pieces[i] for i in np.linspace(0, len(pieces) - 1, count).astype(int)])


def drafting_cost(
    bench,
    *,
    pair: str,
    drafters: list[str],
    contexts: list[int],
    agreement: float | None = None,
    num_draft: int = 3,
    repetitions: int = 7,
) -> dict:
    """Measures the time of drafting after contexts of several lengths, which are made up.

    Returns:
      for each drafter the seconds of a draft by context, and the ratio of the last to the first;
      and the seconds of a plain step by context.
    """
    made = bench.pair(pair, agreement)
    limit = made.target.config.context_length
    calls = {}
    for context in contexts:
        shared = None  # the target's cache, with which all drafters begin
        new = (ROUNDS + 2) * (num_draft + 1)
        capacity = round_up(min(context + new, limit), SMALLEST_BUFFER, limit)
        tokens = pairs.prompts(made.target.config, 1, SHORT)
        for name in drafters:
            work = make_job(made, name, num_draft, tokens, new, capacity=capacity)
            state = made_up(work, made, context, new, shared)
            shared = state.cache
            state = replay.without_limits(state, ROUNDS, work.drafter.depth)
            part = replay.replays(work, state, ROUNDS)["draft"]
            calls[name, context] = timing.Call(*part, times=ROUNDS)
        step = timing.pass_call(made.target, 1, length=context, capacity=capacity)
        calls["step", context] = step
    found = timing.alternate(
        {f"{n} {c}": x for (n, c), x in calls.items()}, repetitions=repetitions
    )
    seconds = {(n, c): found[f"{n} {c}"] for n, c in calls}
    first, last = contexts[0], contexts[-1]
    return {
        "pair_found": made.describe(),
        "seconds": {
            name: {str(c): spread(seconds[name, c]) for c in contexts}
            for name in (*drafters, "step")
        },
        "over_first": {
            name: interval(timing.ratio(seconds[name, last], seconds[name, first]))
            for name in (*drafters, "step")
        },
    }


def long_rounds(
    bench,
    *,
    pair: str,
    drafters: list[str],
    context: int,
    agreement: float | None = None,
    batch: int = 1,
    new: int = 32,
    num_draft: int = 3,
    repetitions: int = 6,
) -> dict:
    """Measures plain decoding and several drafters in turn after a long context, which is made up.

    All of them begin with one cache of the target, so that a long context of several rows has
    room: a run needs it and one copy of it.

    Returns:
      for each drafter ``tau`` and the ratio of the rounds to plain decoding; and ``commit``.
    """
    from .runner import commit

    made = bench.pair(pair, agreement)
    limit = made.target.config.context_length
    capacity = round_up(min(context + new, limit), SMALLEST_BUFFER, limit)
    tokens = pairs.prompts(made.target.config, batch, SHORT)
    calls, ends, shared, cost = {}, {}, None, {}
    for name in ("plain", *drafters):
        drafted = 0 if name == "plain" else num_draft
        work = make_job(made, name, drafted, tokens, new, capacity=capacity)
        state = made_up(work, made, context, new, shared)
        shared = state.cache
        begin = functools.partial(jax.tree.map, jnp.copy, state)
        end = work.burst(capacity, begin())
        ends[name] = dataclasses.replace(end, cache=(), drafter_state=())
        cost[name] = int(np.max(end.stats.rounds))
        del end
        calls[name] = timing.Call(functools.partial(_rounds, work), begin)
    seconds = timing.alternate(calls, repetitions=repetitions, warmup=1)
    texts = {n: np.asarray(e.tokens)[:, context : context + new] for n, e in ends.items()}
    plain = seconds["plain"]
    return {
        "synthetic": made.synthetic,
        "pair_found": made.describe(),
        "plain_step": float(np.median(plain) / new),
        "commit": commit(),
        "ways": [
            {
                "drafter": name,
                "tau": ends[name].stats.tau,
                "round": float(np.median(seconds[name]) / cost[name]),
                "ratio_rounds": interval(timing.ratio(plain, seconds[name])),
                "identical": bool(np.array_equal(texts[name], texts["plain"])),
            }
            for name in drafters
        ],
    }


def _rounds(work, state):
    return work.burst(work.capacity, state).length
