"""The target drafts for itself: memory, the resumed pass, a searched skip set, PPD and SPEED.

The embedded target is grown to 100M weights without further layers (``grown.wide``), because layers
that were added would change nothing and could all be skipped. A target that was trained for early
exits is measured in the same way, beside a plainly trained twin, where their folders are given.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import trees
from specjax.analysis import layer_search, round_timing, timing
from specjax.analysis.pipelined import Pipelined
from specjax.analysis.ppd import ppd
from specjax.analysis.speed import speed, unrolled
from specjax.text.options import Drafting, Options
from specjax.text.prepare import prepare
from specjax.types import Draft, PartialPass

from . import heldout, workloads
from .figures import interval, spread
from .grown import wide

LENGTH, CAPACITY = 255, 512  # committed tokens, and slots, of timed passes
PROMPT = 32  # tokens of a prompt for PPD and SPEED, which compile for each length
ROW = 512  # tokens of a row on which a loss is measured
SEARCHED = 48  # tokens of a text on which a skip set is judged


def part_memory(bench, *, drafters: list[str], num_draft: int = 3, size: str = "wide") -> dict:
    """Compares the memory of the decoding program with that of plain decoding.

    Args:
      bench: see ``rows.Bench``.
      drafters: as ``specjax.generate`` takes them.
      num_draft: the tokens that are drafted in a round.
      size: ``wide``: grown to 100M weights; ``embedded``: as it ships.

    Returns:
      bytes for each drafter, ``plain`` among them (``round_timing.ProgramMemory``), and ``over``,
      the ratio of its peak to that of plain decoding.
    """
    del bench
    lm, text, found = _sized(size), heldout.prompts(1), {}
    for name in ("plain", *drafters):
        drafting = Drafting() if name == "plain" else Drafting(num=num_draft)
        options = Options(drafter=name, drafting=drafting, max_new_tokens=64)
        memory = round_timing.program_memory(prepare(lm, text, options))
        found[name] = {k: getattr(memory, k) for k in ("peak", "weights", "cache", "working_set")}
    plain = found["plain"]["peak"]
    return {"bytes": found, "over": {name: found[name]["peak"] / plain for name in drafters}}


def resumed_pass(
    bench, *, exits: list[int], nodes: list[int], size: str = "wide", repetitions: int = 15
) -> dict:
    """Times the target's pass that goes on at layer E, against the share of the missing layers.

    The share is that of the weights: those of the layers from E on, the last norm and the LM head,
    divided by those of all layers, norm and head.

    Returns:
      for each E (``"exit"``) and each number of nodes the seconds of the whole pass, of the resumed
      one and of the first E layers; the share; and ``over_share``, the ratio of the resumed to the
      whole pass, divided by the share.
    """
    del bench
    lm = _sized(size)
    target, params = lm.target, lm.params
    cache = target.init(params, 1, CAPACITY)
    random, start = np.random.default_rng(0), jnp.asarray([LENGTH], jnp.int32)
    # arguments, since a program would take its constants as known
    verify = jax.jit(lambda params, cache, draft: target.verify(params, cache, draft).logits)
    calls, points = {}, []
    for n in nodes:
        tokens = random.integers(0, target.vocab_size, (1, n)).astype(np.int32)
        draft = Draft(start=start, tokens=jnp.asarray(tokens), topology=trees.chain_parents(n - 1))
        calls[f"whole {n}"] = timing.Call(functools.partial(verify, params, cache, draft))
        for exit in exits:
            part = target.sub_network(exit=exit)

            @jax.jit
            def first(params, cache, draft, part=part):
                return part.verify(params, cache, draft, logits=False).entries

            partial = PartialPass(entries=first(params, cache, draft))
            resumed = dataclasses.replace(draft, partial=partial)
            name = f"{exit} {n}"
            calls[f"resumed {name}"] = timing.Call(
                functools.partial(verify, params, cache, resumed)
            )
            calls[f"first {name}"] = timing.Call(functools.partial(first, params, cache, draft))
    seconds = timing.alternate(calls, repetitions=repetitions)
    shares = {exit: _share(lm, exit) for exit in exits}
    for exit in exits:
        for n in nodes:
            whole, resumed = seconds[f"whole {n}"], seconds[f"resumed {exit} {n}"]
            points.append(
                {
                    "exit": exit,
                    "nodes": n,
                    "share": shares[exit],
                    "whole": spread(whole),
                    "resumed": spread(resumed),
                    "first": spread(seconds[f"first {exit} {n}"]),
                    "over_share": interval(timing.ratio(resumed, shares[exit] * whole)),
                }
            )
    return {"layers": target.num_layers, "points": points}


def skip_search(bench, *, prompts: int, judged: int = 4, new: int = 64, size: str = "wide") -> dict:
    """Searches the sublayers to skip on some prompts, and measures the best set on others.

    Args:
      bench: see ``rows.Bench``.
      prompts: the number of held-out prompts on which the set is measured.
      judged: the number of other prompts, on whose texts sets are judged.
      new: the tokens that are emitted for each prompt.
      size: see ``part_memory``.

    Returns:
      the set, its predicted ratio, and the measured figures of ``heldout.measure_ways``. A set is
      measured too where plain decoding is predicted to be faster.
    """
    del bench
    lm, texts = _sized(size), heldout.prompts(prompts + judged)
    search = layer_search.LayerSearch(lm, texts[:judged], max_new_tokens=SEARCHED)
    search.run()
    best = search.choice
    way = f"self:skip={','.join(best.skip)}", Drafting(num=best.num_draft)
    (found,) = _ways(lm, [way], texts[judged:], new)
    return {
        "skip": best.skip,
        "num_draft": best.num_draft,
        "agreement": best.agreement,
        "predicted": best.ratio,
        "judged": len(search.known),
        "measured": found,
    }


def early_exits(
    bench,
    *,
    exits: list[int],
    drafts: list[int],
    prompts: int,
    target: str = "embedded",
    twin: str | None = None,
    new: int = 64,
    rows: int = 64,
    size: str = "wide",
) -> dict:
    """Measures a target whose first layers draft, grown to 100M weights.

    Args:
      bench: see ``rows.Bench``.
      exits: E, the numbers of layers that draft.
      drafts: the tokens that are drafted in a round.
      prompts: the number of held-out prompts.
      target: the folder of a model of the embedded shape, or ``embedded``.
      twin: the folder of a model that was trained plainly on the same tokens; None: its loss is
        not measured.
      new: the tokens that are emitted for each prompt.
      rows: how many rows of 512 tokens of held-out files give the losses.
      size: see ``part_memory``.

    Returns:
      ``ways``, the figures of ``heldout.measure_ways`` for each exit and number of drafts; the
      held-out losses in nats a token.
    """
    del bench
    pairs = [(exit, n) for exit in exits for n in drafts]
    ways = [(f"self:exit={exit}", Drafting(num=n)) for exit, n in pairs]
    found = _ways(_sized(size, target), ways, heldout.prompts(prompts), new)
    named = [{"exit": e, "num_draft": n, **f} for (e, n), f in zip(pairs, found, strict=True)]
    losses = {"target": heldout_loss(target, rows)}
    if twin is not None:
        losses["twin"] = heldout_loss(twin, rows)
        losses["over_twin"] = losses["target"] / losses["twin"]
    return {"ways": named, "losses": losses}


def schedules(
    bench, *, ways: list[dict], prompts: int, repeats: int | None = None, new: int = 48
) -> dict:
    """Runs PPD and SPEED on the embedded target, and counts ticks, reads and guesses.

    Args:
      bench: see ``rows.Bench``.
      ways: settings of PPD, ``{"layer": d, "guesses": k}``.
      prompts: the number of held-out prompts.
      repeats: of SPEED, whose model runs the embedded target's layers so many times; it was not
        trained for it, so its text means nothing. None: SPEED is left out.
      new: the tokens of each text.

    Returns:
      ``points``, the sums over the prompts; ``exact`` says whether in each run the ticks were those
      of the formula, and ``identical`` whether the text was that of plain decoding.
    """
    del bench
    lm = specjax.load("embedded", quantize="float")
    ids = [lm.tokenizer.encode(text)[:PROMPT] for text in workloads.prompts("completion", prompts)]
    if short := [one for one in ids if len(one) < PROMPT]:
        raise ValueError(f"prompts={prompts}: {len(short)} have fewer than {PROMPT} tokens")
    plain = functools.partial(_plain, ids, new)
    points, greedy = [], plain(lm)
    for way in ways:
        found = [ppd(lm, one, **way, max_new_tokens=new) for one in ids]
        points.append({"method": "PPD", **way, **_counts(found, greedy)})
    if repeats is not None:
        found = [speed(lm, one, repeats=repeats, max_new_tokens=new) for one in ids]
        counts = _counts(found, plain(unrolled(lm, repeats)))
        points.append({"method": "SPEED", "repeats": repeats, **counts})
    return {"points": points}


def _counts(found: list[Pipelined], greedy: list[np.ndarray]) -> dict:
    sums = {k: sum(getattr(x, k) for x in found) for k in ("ticks", "reads", "hits")}
    texts = zip(found, greedy, strict=True)
    return sums | {
        "layers": found[0].layers,
        "layer": found[0].layer,
        "tokens": sum(len(x.tokens) for x in found),
        "plain_ticks": sum(x.plain_ticks for x in found),
        "expected_ticks": sum(x.expected_ticks for x in found),
        "hit_rate": float(np.mean([x.hit_rate for x in found])),
        "seconds": sum(x.seconds for x in found),
        "plain_seconds": sum(x.plain_seconds for x in found),
        "exact": all(x.ticks == x.expected_ticks for x in found),
        "identical": all(np.array_equal(x.tokens, text) for x, text in texts),
    }


def _plain(ids, new: int, lm) -> list[np.ndarray]:
    """The greedy continuations of token ids by plain decoding."""
    out = specjax.generate(lm, ids, drafter="plain", max_new_tokens=new, stop=())
    return [np.asarray(row) for row in out.tokens]


def _ways(lm, ways, texts, new: int) -> list[dict]:
    """Greedy figures of each of ``ways``, a drafter and a ``Drafting``; one prompt at a time."""
    sampling = [specjax.Sampling(temperature=0.0)] * len(texts)
    return heldout.measure_model(lm, ways, texts, sampling, new, repetitions=2)


def _sized(size: str, name: str = "embedded") -> specjax.LM:
    """The model ``name`` in float32, grown where ``size`` is ``wide``."""
    return wide(name) if size == "wide" else specjax.load(name, quantize="float")


def _share(lm, exit: int) -> float:
    """The weights from layer ``exit`` on, the norm and the LM head, divided by those of all layers,
    the norm and the head."""
    blocks = [timing.tree_bytes(lm.params["blocks"][i]) for i in range(lm.target.num_layers)]
    ends = timing.tree_bytes((lm.params["norm"], lm.target.head_table(lm.params)))
    return (sum(blocks[exit:]) + ends) / (sum(blocks) + ends)


def heldout_loss(name: str, rows: int) -> float:
    """The cross-entropy of a model, in nats a token, over rows of the held-out files of the
    standard library."""
    from specjax.train import pretrain

    lm = specjax.load(name, quantize="float")
    config = lm.config
    ids = np.concatenate(
        [[*lm.tokenizer.encode(text), config.eos_ids[0]] for text in workloads.files("heldout")]
    )
    if len(ids) < rows * ROW + 1:
        raise ValueError(f"rows={rows}: the held-out files have {len(ids)} tokens")
    measure = jax.jit(pretrain.make_measure(config, config.eos_ids[0]))
    total, weight = 0.0, jnp.ones((1, ROW), jnp.float32)
    for row in range(rows):
        tokens = jnp.asarray(ids[None, row * ROW : (row + 1) * ROW + 1], jnp.int32)
        total += float(measure(lm.params, None, tokens, weight)["heldout_loss"].value)
    return total / rows
