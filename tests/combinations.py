"""Combinations of drafters for the registry: a policy, tables before others, unions, cascades.

``adaptive``, ``hybrid`` and ``fallback`` wrap any line of the registry.
"""

import functools

import numpy as np
from toys import Merged, TreeDrafter, counted

from specjax import trees
from specjax.drafters import (
    SAM,
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
    Union,
)
from specjax.drafters.confidence_stop import CumulativeStop
from specjax.models import CausalLM

TREE = (-1, 0, 0, 1, 2)
# costs near the value of rounds, and a short memory, so that the width changes all the time
RESTLESS = Goodput(fade_rounds=2, min_pause=1, max_pause=2, probe_share=1.0)
COSTS = np.asarray([1.0, 1.3, 1.6, 1.7], np.float32)
# merged into the index all the time, and never sure of what comes next
RASH = dict(longest=3, occurrences=4, factor=2.0, min_probability=0.0, block=2)
COPIES = NGram(num_draft=3, longest=2, shortest=1, stretch=2)


def adaptive(case):
    """The same drafter with a width that changes all the time."""
    drafter, weights, rules = case
    return Adaptive(drafter, RESTLESS), {"inner": weights, "costs": COSTS[:3]}, rules


def hybrid(num_draft, case):
    """The same drafter in a hybrid whose lookup often finds a match, and the wrong one."""
    drafter, weights, rules = case
    lookup = NGram(longest=2, shortest=1, stretch=1)
    return Hybrid(num_draft, inner=drafter, lookup=lookup), weights, rules


def copying(case):
    """The same with a bonus, which is a malus after some matches."""
    drafter, weights, rules = case
    return Copying(drafter, (1.0, -0.5, 2.0), warm_share=1.0), weights, rules


def learned(case):
    """The same, drawn or with its most probable tokens by what a row's rounds accepted."""
    drafter, weights, rules = case
    return DrawnOrTop(drafter, explore=0.2), weights, rules


def fallback(case):
    """The same behind a table that copies after every match."""
    drafter, weights, rules = case
    table = SAM(num_draft=3, longest=4, shortest_beside=1, occurrences=4, block=2)
    return Fallback(first=table, inner=drafter), weights, rules


def combinations(model, near, other, small, of_small):
    """The lines of combinations without heads; the first arguments are those of ``registry.cases``,
    and ``small`` is a decoder with a small cache, whose weights ``of_small`` makes."""
    words = dict(vocab_size=model.vocab_size)
    two = {"near": near, "other": other}

    def tree(**settings):
        return TreeDrafter(model=model, **settings)

    def cascade(num_draft, inner, weights, **settings):
        """A draft model that ``inner`` drafts for."""
        made = Cascade(DraftModel(num_draft, model=model), inner, **settings)
        return made, {"outer": near, "inner": weights}, ("rejection", "block")

    def comb(tree, inner, weights, **settings):
        """A draft model that ``inner`` drafts for, with branches beside its text."""
        made = Cascade(DraftModel(tree.depth, model=model), inner, tree=tree, **settings)
        return made, {"outer": near, "inner": weights}, ("rejection", "traversal", "coupled")

    def horizontal(*cases, rules=("rejection", "block")):
        """Several lines in turn."""
        drafters, weights = zip(*(case[:2] for case in cases), strict=True)
        return Horizontal(drafters=drafters), weights, rules

    one = DraftModel(1, model=model), near, ()
    copies = NGram(num_draft=2, longest=2, shortest=1, stretch=1), None, ()
    two_models = horizontal(one, (DraftModel(2, model=model), other, ()))
    lines = {}
    if not isinstance(model, CausalLM) or not all(map(model.config.is_local, range(2))):
        over_window = SelfDraft(3, target=model, window=4, sinks=1)
        weights = {"outer": None, "inner": of_small}
        three = Cascade(over_window, DraftModel(2, model=small)), weights, ("rejection", "block")
        lines = {"cascade self": three}
    return lines | {
        "adaptive self": (
            Adaptive(SelfDraft(num_draft=3, target=model, exit=1), RESTLESS),
            {"inner": None, "costs": COSTS[:3]},
            ("block",),
        ),
        "adaptive self tree": (
            Adaptive(SelfDraft(target=model, topology=trees.Tree(TREE), exit=1), RESTLESS),
            {"inner": None, "costs": COSTS[:3]},
            ("rejection",),
        ),
        "hybrid self": hybrid(
            4, (SelfDraft(num_draft=2, target=model, exit=1), None, ("rejection",))
        ),
        "union of draft models": (
            Union(
                drafters=(
                    DraftModel(model=model, topology=trees.Tree((-1, 0, 0, 1))),
                    DraftModel(num_draft=2, model=model),
                )
            ),
            (near, other),
            ("rejection", "traversal"),
        ),
        "adaptive suffix": (
            Adaptive(Suffix(num_draft=5, **RASH), RESTLESS),
            {"inner": None, "costs": COSTS},
            ("delta",),
        ),
        "adaptive jacobi": (
            Adaptive(Jacobi(num_draft=5), RESTLESS),
            {"inner": None, "costs": COSTS},
            ("delta",),
        ),
        "adaptive lookahead": (
            Adaptive(Lookahead(window=3, ngram=4, guesses=2, **words), RESTLESS),
            {"inner": None, "costs": COSTS[:3]},
            ("delta",),
        ),
        "adaptive recycling": (
            Adaptive(Recycling(topology=trees.branching(2, 2, 1), **words), RESTLESS),
            {"inner": None, "costs": COSTS[:3]},
            ("delta",),
        ),
        "adaptive draft": (
            Adaptive(DraftModel(num_draft=3, model=model), RESTLESS),
            {"inner": near, "costs": COSTS[:3]},
            ("block",),
        ),
        "adaptive ngram": (
            Adaptive(NGram(num_draft=5, longest=2, shortest=1, stretch=2), RESTLESS),
            {"inner": None, "costs": COSTS},
            ("delta",),
        ),
        # lengths that follow the drafter's laws or the text, row by row
        "unsure draft": (
            Adaptive(DraftModel(num_draft=3, model=model), ExLlama(skip=0, threshold=0.55)),
            {"inner": near},
            ("rejection", "block"),
        ),
        "unsure self": (
            Adaptive(
                SelfDraft(num_draft=3, target=model, exit=1), HuggingFace(start=3, threshold=0.6)
            ),
            {"inner": None},
            ("block",),
        ),
        "unsure self tree": (
            Adaptive(
                SelfDraft(target=model, topology=trees.Tree(TREE), exit=1),
                SuffixMatch(offset=1.0, min_probability=0.3),
            ),
            {"inner": None},
            ("rejection", "traversal"),
        ),
        "unsure draft expanded": (
            Adaptive(
                DraftModel(model=model, topology=trees.Expand(2, 3, 6)),
                HuggingFace(start=3, threshold=0.55),
            ),
            {"inner": near},
            ("delta",),
        ),
        "hybrid draft": hybrid(4, (DraftModel(num_draft=2, model=model), near, ("block",))),
        "copying draft": copying((DraftModel(3, model=model), near, ("block", "coupled"))),
        "copying self": copying((SelfDraft(2, target=model, exit=1), None, ("rejection",))),
        "hybrid copying": hybrid(4, copying((DraftModel(2, model=model), near, ("rejection",)))),
        "learned draft": learned((DraftModel(1, model=model), near, ("rejection",))),
        "adaptive learned": adaptive(learned((DraftModel(2, model=model), near, ("block",)))),
        "cascade": cascade(3, COPIES, None),
        "cascade draft": cascade(3, DraftModel(2, model=model), other),
        "cascade suffix": cascade(3, Suffix(num_draft=3, **RASH), None),
        "cascade stop": cascade(4, COPIES, None, stop=CumulativeStop(threshold=0.3)),
        "cascade bigram": cascade(
            3,
            Hybrid(
                3,
                inner=Bigram(2, **words),
                lookup=NGram(longest=2, shortest=2, stretch=1, choice="earliest"),
            ),
            functools.partial(counted, model.vocab_size),
        ),
        "cascade comb": comb(trees.comb(2, 3), COPIES, None),
        "cascade draft comb": comb(trees.comb(3, 2), DraftModel(2, model=model), other),
        "cascade comb stop": comb(
            trees.Tree((-1, 0, 0, 0, 1, 4, 4)),
            COPIES,
            None,
            stop=CumulativeStop(threshold=0.3),
        ),
        "cascade over a comb": cascade(
            3,
            Cascade(DraftModel(2, model=model), COPIES, tree=trees.comb(2, 2)),
            {"outer": other, "inner": None},
        ),
        "adaptive comb": adaptive(comb(trees.comb(2, 3), COPIES, None)),
        "fallback comb": fallback(comb(trees.comb(2, 3), DraftModel(2, model=model), other)),
        "cascade of cascades": cascade(
            4,
            Cascade(DraftModel(2, model=model), COPIES),
            {"outer": other, "inner": None},
        ),
        "hybrid cascade": hybrid(4, cascade(3, COPIES, None)),
        "adaptive cascade": adaptive(cascade(3, COPIES, None)),
        "horizontal": two_models,
        # the text of one model is served by two drafters in turn, and the other one drafts on
        "horizontal cascade": horizontal(
            cascade(2, *horizontal((DraftModel(1, model=model), other, ()), copies)[:2]),
            (Cascade(DraftModel(2, model=model), COPIES), {"outer": other, "inner": None}, ()),
        ),
        "horizontal copies": horizontal(copies, one, copies, rules=("rejection", "coupled")),
        "hybrid horizontal": hybrid(4, two_models),
        "adaptive horizontal": adaptive(two_models),
        "fallback draft": (
            Fallback(
                first=Suffix(num_draft=4, **RASH), inner=DraftModel(2, model=model), least=1.5
            ),
            near,
            ("rejection", "block"),
        ),
        # tables before tables and models, chains and trees; what reads all nodes sees its own
        "hybrid recycling": (
            Hybrid(
                4,
                inner=Recycling(num_draft=3, **words),
                lookup=NGram(longest=4, shortest=3, stretch=1),
            ),
            None,
            ("delta",),
        ),
        "fallback recycling": (
            Fallback(
                first=SAM(num_draft=3, longest=4, shortest_beside=3, occurrences=4, block=2),
                inner=Recycling(topology=trees.branching(2, 2, 1), **words),
            ),
            None,
            ("delta", "traversal"),
        ),
        "fallback lookahead": (
            Fallback(
                first=NGram(topology=trees.chains(2, 3), longest=2, shortest=2, stretch=3),
                inner=Lookahead(window=3, ngram=3, guesses=2, **words),
            ),
            None,
            ("delta",),
        ),
        "fallback trees": (
            Fallback(
                first=Suffix(topology=trees.Expand(2, 3, 6), **RASH),
                inner=DraftModel(
                    model=model, topology=trees.Tree(TREE), sibling_sampling="distinct"
                ),
                least=1.0,
            ),
            near,
            ("rejection",),
        ),
        # as many tokens in the table's chain as nodes in the tree
        "tables before a tree": fallback(
            (
                Fallback(
                    first=NGram(4, longest=2, shortest=2, stretch=1),
                    inner=DraftModel(
                        model=model, topology=trees.branching(2, 1), sibling_sampling="distinct"
                    ),
                ),
                near,
                ("rejection",),
            )
        ),
        "table model table": fallback(hybrid(3, (DraftModel(2, model=model), near, ("block",)))),
        "union of tables": (
            Union(
                drafters=(
                    NGram(num_draft=3, longest=2, shortest=1, stretch=2),
                    Recycling(topology=trees.branching(2, 1), **words),
                    Lookahead(window=2, ngram=3, guesses=2, **words),
                )
            ),
            (None, None, None),
            ("delta", "traversal"),
        ),
        "union with recycling": (
            Union(
                drafters=(
                    DraftModel(model=model, topology=trees.Tree((-1, 0, 0, 1))),
                    Recycling(topology=trees.branching(2, 2), **words),
                )
            ),
            (near, None),
            ("rejection",),
        ),
        "merged": (
            Merged(
                drafters=(
                    tree(sibling_sampling="iid", topology=(-1, 0, 1), weights="near"),
                    tree(sibling_sampling="iid", topology=(-1, 0, 0), weights="other"),
                )
            ),
            two,
            ("rejection",),
        ),
        "merged chains": (
            Merged(drafters=(tree(sibling_sampling="iid", topology=(-1, 0, 1)),) * 2, one_law=True),
            near,
            ("kseq",),
        ),
    }
