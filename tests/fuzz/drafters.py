"""Compositions: any line of the registry or shipped drafter, with other trees, in combinators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from toys import TreeDrafter

from specjax import trees
from specjax.drafters import (
    PEARL,
    SAM,
    SLEM,
    SSD,
    Adaptive,
    Bigram,
    Cascade,
    Copying,
    DraftModel,
    DrawnOrTop,
    ExLlama,
    Fallback,
    Goodput,
    Horizontal,
    HuggingFace,
    Hybrid,
    Jacobi,
    Lookahead,
    NGram,
    Recycling,
    SelfDraft,
    Suffix,
    SuffixMatch,
    SwitchedSelfDraft,
    Synthetic,
    Union,
    jacobi,
)
from specjax.drafters.confidence_stop import ConfidenceStop, CumulativeStop
from specjax.drafters.heads import HeadDrafter
from specjax.drafters.hybrid import TableBefore
from specjax.drafters.redrafter import ReDrafter
from specjax.text.drafter_names import resolve_drafter
from specjax.types import Drafter

from .draws import Draws, between, pick
from .targets import Model

SHIPPED = (
    "none draft eagle3 p-eagle medusa mtp speculator ngram suffix sam recycling self:exit=2 "
    "self:skip=attention.3,mlp.4 self:exit=3:stop=0.4 ngram+draft suffix+mtp sam+eagle3 "
    "ngram+speculator suffix+p-eagle ngram+self:exit=1 jacobi jacobi:mode=blocks "
    "jacobi:mode=hybrid,until=5 lookahead lookahead:window=3,ngram=3,guesses=2,reads_text=true "
    "tli:embedded-draft slem:embedded-draft ngram+tli:embedded-draft draft:window=24,sinks=2 "
    "self:window=24"
).split(" ")
CHAINS = ("ngram", "sam", "jacobi", "slem")  # names of drafters that take a number and no tree
WISHES = 4  # combinators that are tried until one takes the drafter
TRIES = 60  # settings that are tried until a drafter takes them
TRUTH = 128  # slots of the text that a synthetic drafter is told; any text will do


class Refused(Exception):
    """The package refuses the composition, with a message that says why."""


@dataclasses.dataclass(frozen=True)
class Composition:
    """A drafter and its weights. ``silent``: there are rounds that emit nothing. ``greedy_only``:
    it refuses to draft for sampled text."""

    drafter: Drafter
    weights: object
    silent: bool = False
    greedy_only: bool = False


def random_tree(generator, most: int, deepest: int) -> trees.Tree:
    """A static tree of at most ``most`` nodes below the root."""
    parents, depth = [-1], [0]
    for node in range(1, between(generator, 1, most) + 1):
        above = [n for n in range(node) if depth[n] < deepest]
        parents.append(pick(generator, above))
        depth.append(depth[parents[-1]] + 1)
    return trees.Tree(tuple(parents))


def random_topology(generator, deepest: int = 4, grown: bool = True) -> trees.Topology:
    """Any topology no deeper than ``deepest``; ``grown``: also one that the drafter grows."""
    kind = pick(generator, ("chain", "tree", "chains", "branching", "expand", "beams"))
    depth = between(generator, 1, deepest)
    if kind == "tree" or kind in ("expand", "beams") and not grown:
        return random_tree(generator, 6, deepest)
    if kind == "chain":
        return trees.chain(depth)
    if kind == "chains":
        return trees.chains(between(generator, 2, 3), depth)
    if kind == "branching":
        return trees.branching(*(between(generator, 1, 2) for _ in range(min(depth, 3))))
    width = between(generator, 1, 3)
    if kind == "beams":
        return trees.Beams(width, depth)
    nodes = between(generator, depth, min(width + (depth - 1) * width**2, 9))
    return trees.Expand(width, depth, nodes, gain=pick(generator, (0.0, 0.0, 0.3)))


def siblings_for(generator, topology) -> str:
    """A way to pick siblings that the topology admits."""
    if not isinstance(topology, trees.Tree):
        return "top"
    hub = ("hub",) if max(topology.ranks) < 2 else ()
    return pick(generator, ("top", "iid", "iid", "distinct", *hub))


def random_lookup(generator) -> NGram:
    longest = between(generator, 1, 4)
    return NGram(
        num_draft=between(generator, 1, 5),
        longest=longest,
        shortest=between(generator, 1, longest),
        stretch=between(generator, 1, 3),
        choice=pick(generator, ("latest", "earliest")),
    )


def random_table(generator) -> Suffix | SAM:
    """A table of chains; merged into its index often."""
    common = dict(
        num_draft=between(generator, 1, 5),
        longest=between(generator, 1, 5),
        occurrences=between(generator, 1, 4),
        block=between(generator, 1, 4),
    )
    if generator.random() < 0.5:
        return SAM(shortest_beside=1, stretch=between(generator, 1, 3), **common)
    factor, least = pick(generator, (0.5, 1.0, 2.0)), pick(generator, (0.0, 0.1, 0.5))
    return Suffix(factor=factor, min_probability=least, **common)


def random_policy(generator):
    restless = Goodput(fade_rounds=2, min_pause=1, max_pause=2, probe_share=1.0)
    least = pick(generator, (0.0, 0.3, 0.6))
    factor, offset = pick(generator, (0.5, 1.0)), pick(generator, (0.0, 1.0, 2.5))
    return pick(
        generator,
        (
            restless,
            Goodput(),
            HuggingFace(start=2, threshold=least),
            ExLlama(skip=0.5, probe=2, threshold=least),
            SuffixMatch(factor=factor, offset=offset, min_probability=least),
        ),
    )


def changed(generator, drafter: Drafter, weights, model: Model):
    """``with_settings``, tried again where the drafter refuses what was drawn.

    Raises:
      AssertionError: the drafter refuses whatever is drawn, so that no case would have another one.
    """
    for _ in range(TRIES):
        try:
            return with_settings(generator, drafter, weights, model)
        except (ValueError, TypeError) as error:
            refusal = f"{type(error).__name__}: {error}"
    raise AssertionError(f"none of {TRIES} settings is taken by {drafter!r:.200}: {refusal}")


def with_settings(generator, drafter: Drafter, weights, model: Model, chains: bool = False):
    """The same drafter with another tree, number of drafts or other settings, and its weights.

    ``chains``: trees are left out.
    """
    if isinstance(drafter, Adaptive):
        inner, own = with_settings(generator, drafter.inner, weights["inner"], model)
        return adaptive(generator, inner, own)
    if isinstance(drafter, Copying):
        inner, own = with_settings(generator, drafter.inner, weights, model, chains)
        return copying(generator, inner), own
    if isinstance(drafter, DrawnOrTop):
        inner, own = with_settings(generator, drafter.inner, weights, model, chains)
        return learned(generator, inner), own
    if isinstance(drafter, TableBefore):
        chains = bool(generator.random() < 0.5)
        inner, own = with_settings(generator, drafter.inner, weights, model, chains)
        if isinstance(drafter, Hybrid):
            return hybrid(generator, inner), own
        return Fallback(first=random_table(generator), inner=inner), own
    if isinstance(drafter, Union):
        pairs = zip(drafter.drafters, weights, strict=True)
        made = [with_settings(generator, one, own, model) for one, own in pairs]
        return Union(drafters=tuple(d for d, _ in made)), tuple(w for _, w in made)
    if isinstance(drafter, Horizontal):
        pairs = zip(drafter.drafters, weights, strict=True)
        made = [with_settings(generator, one, own, model, chains=True) for one, own in pairs]
        return Horizontal(drafters=tuple(d for d, _ in made)), tuple(w for _, w in made)
    if isinstance(drafter, Cascade):
        inner, below = with_settings(generator, drafter.inner, weights["inner"], model)
        depth = between(generator, 1, 5)
        outer = drafter.outer.with_topology(trees.chain(depth))
        settings = dict(
            stop=pick(generator, (None, None, CumulativeStop(threshold=0.3))),
            tree=pick(generator, (None, None, trees.comb(2, depth))),
        )
        made = dataclasses.replace(drafter, outer=outer, inner=inner, **settings)
        return made, weights | {"inner": below}
    if isinstance(drafter, NGram):
        table = random_lookup(generator)
        if generator.random() < 0.4:
            shape = trees.chains(between(generator, 2, 3), between(generator, 1, 3))
            table = dataclasses.replace(table, topology=shape)
        return table, weights
    if isinstance(drafter, Suffix | SAM):
        table = random_table(generator)
        if isinstance(table, Suffix) and generator.random() < 0.4:
            table = dataclasses.replace(table, topology=trees.Expand(2, 3, 5))
        return table, weights
    if isinstance(drafter, Bigram):
        return dataclasses.replace(drafter, topology=trees.chain(between(generator, 1, 6))), weights
    if isinstance(drafter, Recycling):
        shape = random_topology(generator, grown=False)
        reads = bool(generator.random() < 0.5)
        return Recycling(vocab_size=model.vocab, topology=shape, reads_prompt=reads), weights
    if isinstance(drafter, TreeDrafter):
        shape = random_tree(generator, 5, 3).parents
        picks = pick(generator, ("top", "worst", "iid", "distinct"))
        if drafter.random_parents:
            picks = "iid"
        leaves = [n for n in range(1, len(shape)) if n not in shape]  # nothing hangs below others
        passengers = tuple(leaves[-1:]) if drafter.passengers else ()
        settings = dict(topology=shape, sibling_sampling=picks, passengers=passengers)
        return dataclasses.replace(drafter, **settings), weights
    if isinstance(drafter, SelfDraft) and drafter.stop is not None:
        stop = ConfidenceStop(threshold=pick(generator, (0.2, 0.5)), step=0.3, target_rate=0.5)
        depth = between(generator, 1, 5)
        return dataclasses.replace(drafter, topology=trees.chain(depth), stop=stop), weights
    if isinstance(drafter, Jacobi):
        mode, until = pick(generator, jacobi.MODES), between(generator, 1, 9)
        return Jacobi(between(generator, 1, 5), mode=mode, until=until), weights
    if isinstance(drafter, Lookahead):
        settings = dict(window=between(generator, 1, 4), ngram=between(generator, 2, 4))
        settings |= dict(guesses=between(generator, 1, 3), reads_text=generator.random() < 0.5)
        return Lookahead(vocab_size=model.vocab, **settings), weights
    if isinstance(drafter, SLEM):
        depth, passes = between(generator, 1, 4), pick(generator, (0, 0, 1, 2, 5))
        return dataclasses.replace(drafter, topology=trees.chain(depth), passes=passes), weights
    if isinstance(drafter, PEARL):
        return PEARL(between(generator, 1, 4), model=drafter.model), weights
    if isinstance(drafter, SSD):
        each = between(generator, 1, 3)
        return SSD(between(generator, 1, 4), model=drafter.model, fan_out=each), weights
    if isinstance(drafter, ReDrafter):
        shape = trees.Beams(between(generator, 1, 3), between(generator, 1, 4))
        return dataclasses.replace(drafter, topology=shape), weights
    if isinstance(drafter, DraftModel | SelfDraft | SwitchedSelfDraft | HeadDrafter):
        deepest = drafter.max_depth or 4
        shape = random_topology(generator, deepest)
        if chains:
            shape = trees.chain(between(generator, 1, deepest))
        picks = siblings_for(generator, shape)
        changed = dataclasses.replace(drafter, topology=shape, sibling_sampling=picks)
        return changed, weights
    return drafter, weights


def adaptive(generator, inner: Drafter, weights):
    """``inner`` at a width that changes; costs near the value of rounds, so that it does."""
    drafter = Adaptive(inner, random_policy(generator))
    if generator.random() < 0.3 and inner.depth > 1:
        drafter = dataclasses.replace(drafter, widths=(0, between(generator, 1, inner.depth)))
    costs = 1 + np.sort(generator.random(len(drafter.widths))) * pick(generator, (0.3, 1.0, 2.0))
    return drafter, {"inner": weights, "costs": costs.astype(np.float32)}


def copying(generator, inner: Drafter) -> Copying:
    bonus = tuple(generator.uniform(-2, 4, between(generator, 1, 4)).tolist())
    return Copying(inner, bonus, pick(generator, (0.0, 0.5, 1.0)))


def learned(generator, inner: Drafter) -> DrawnOrTop:
    return DrawnOrTop(inner, pick(generator, (0.0, 0.5, 2.0)))


def hybrid(generator, inner: Drafter) -> Hybrid:
    num = pick(generator, (0, inner.depth, inner.depth + 2))
    return Hybrid(num, inner=inner, lookup=random_lookup(generator))


def fallback(generator, inner: Drafter) -> Fallback:
    least = pick(generator, (None, 0.5, 1.5))
    return Fallback(first=random_table(generator), inner=inner, least=least)


WRAPPERS = (
    "adaptive",
    "hybrid",
    "fallback",
    "copying",
    "learned",
    "union",
    "union",
    "adaptive hybrid",
    "adaptive fallback",
    "adaptive union",
    "hybrid in union",
    "union of three",
    "synthetic",
)


def wrapped(generator, kind: str, drafter, weights, another: Callable):
    """The drafter in a combinator; ``another(generator)`` returns one more drafter with weights."""
    if kind.startswith("adaptive "):
        inner = wrapped(generator, kind.removeprefix("adaptive "), drafter, weights, another)
        return adaptive(generator, *inner)
    if kind == "adaptive":
        return adaptive(generator, drafter, weights)
    if kind == "hybrid":
        return hybrid(generator, drafter), weights
    if kind == "fallback":
        return fallback(generator, drafter), weights
    if kind == "copying":
        return copying(generator, drafter), weights
    if kind == "learned":
        return learned(generator, drafter), weights
    if kind == "synthetic":
        if drafter.depth < drafter.num_draft:
            raise ValueError("it replaces the tokens of chains")
        accuracy = float(generator.random())
        return Synthetic(drafter.num_draft, accuracy, drafter), {"truth": None, "inner": weights}
    if kind == "hybrid in union":
        drafter = hybrid(generator, drafter)
    parts = [(drafter, weights)] + [another(generator) for _ in range(1 + (kind[-1] == "e"))]
    return Union(drafters=tuple(d for d, _ in parts)), tuple(w for _, w in parts)


def shipped_drafter(generator, model: Model, name: str):
    """A drafter that users of the shipped model name, with a tree or number of drafts."""
    num, tree = None, None
    fixed = "+" in name or "stop" in name or name.partition(":")[0] in CHAINS
    if name != "none" and "lookahead" not in name and generator.random() < 0.7:
        if fixed or generator.random() < 0.4:
            num = between(generator, 1, 3)
        elif name == "suffix":
            tree = trees.Expand(2, 3, 5)
        else:
            tree = random_topology(generator, 3, grown=name != "recycling")
    return resolve_drafter(model.lm, name, num, None, tree)


def composed(draws: Draws, model: Model, turn: int) -> tuple[str, Composition]:
    """The composition of a case, in words and as objects; ``turn`` goes round all lines.

    Raises:
      AssertionError: a drafter refuses every setting, see ``changed``.
    """
    names = SHIPPED if model.lines is None else [*model.lines]
    order = np.random.default_rng([draws.seed, len(names)]).permutation(len(names))
    name = names[order[turn % len(names)]]

    def line(generator, name):
        if model.lines is None:
            return shipped_drafter(generator, model, name)
        return model.lines[name][:2]

    def another(generator):
        return line(generator, pick(generator, names))

    words, generator, kind = name, draws.generator("shape"), None
    drafter, weights = line(generator, name)
    if model.lines is not None and draws.option("settings", False, 0.5, lambda g: True):
        drafter, weights = changed(generator, drafter, weights, model)
    for kind in draws.option("wrapper", (), 0.5, lambda g: g.permutation(WRAPPERS)[:WISHES]):
        try:
            made = wrapped(draws.generator("wrap"), kind, drafter, weights, another)
        except (ValueError, TypeError):  # of chains alone, say
            continue
        (drafter, weights), words = made, f"{kind} of {words}"
        break
    else:
        kind = None
    return words, Composition(
        drafter=drafter,
        weights=with_truth(weights, draws, model.vocab) if kind == "synthetic" else weights,
        silent=any(getattr(d, "silent_every", 0) for d in parts_of(drafter)),
        greedy_only=kind == "synthetic",
    )


def with_truth(weights, draws: Draws, vocab: int):
    """The weights of a synthetic drafter with a text for as many rows as a case may have."""
    text = draws.generator("truth").integers(0, vocab, (8, TRUTH)).astype(np.int32)
    return weights | {"truth": text}


def parts_of(drafter: Drafter) -> list[Drafter]:
    """A drafter and all that it is made of."""
    inner = [getattr(drafter, name, None) for name in ("inner", "first")]
    inner += getattr(drafter, "drafters", ())
    return [drafter, *(part for d in inner if d is not None for part in parts_of(d))]
