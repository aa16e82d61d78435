"""Toy vocabularies that differ: a target's, a drafter's, and a drafter that speaks across them."""

import functools

import jax.numpy as jnp
from toys import Readable, bag

from specjax import trees
from specjax.drafters import SLEM, TLI
from specjax.drafters.slem import SLEMTables
from specjax.drafters.strings import string_tables
from specjax.drafters.translation import vocabulary_tables
from specjax.models.tokenizer import wrap_tokenizer


class Words:
    """A tokenizer whose tokens are these words; it cuts a text by the longest match."""

    eos_ids = ()

    def __init__(self, words):
        self.words = list(words)

    def encode(self, text):
        found = []
        while text:
            known = [word for word in self.words if text.startswith(word)]
            if known:
                found.append(self.words.index(max(known, key=len)))
            text = text[len(max(known, key=len, default=" ")) :]
        return found

    def decode(self, ids):
        return "".join(self.words[i] for i in ids)


def tokenizer(words):
    return wrap_tokenizer(Words(words), vocab_size=len(words))


def tables(target, draft):
    """All tables between two lists of words."""
    both = tokenizer(target), tokenizer(draft), len(target), len(draft)
    return SLEMTables(**vars(vocabulary_tables(*both)), strings=string_tables(*both))


def vocabularies(size):
    """A target's words, ``size`` of them, and a drafter's. They share some; some words of either
    are two of the other's, and the last letter of the target the drafter cannot spell."""
    letters = "abcdefghijkl"[: (2 * size + 2) // 3]
    pairs = [a + b for a, b in zip(letters, letters[1:], strict=False)]
    return [*letters, *pairs][:size], [*letters[-2::-1], "bc", "aa", "fg", "abc"][:size]


def named_as(names, target, params):
    """Weights of a toy model that speaks the words ``names``: those of the token of ``target`` with
    that name, else of any other."""
    ids = jnp.asarray([target.index(x) if x in target else i for i, x in enumerate(names)])
    return {"embed": params["embed"][ids], "out": params["out"][:, ids]}


def lines(size, params):
    """Lines of the registry: a drafter, its weights and the rules that are tried with it.

    ``params`` are weights near those of the target. If the target is no toy, the drafter is one
    that has nothing to do with it.
    """
    if not isinstance(params, dict) or set(params) != {"embed", "out"}:
        params = bag(size, 1)[1]
    target, draft = vocabularies(size)
    model, both = Readable(len(draft)), tables(target, draft)
    weights = {"model": functools.partial(named_as, draft, target, params), "tables": both}
    here = dict(model=model, ratio=both.ratio)
    pair = TLI(topology=trees.Tree((-1, 0, 0, 1, 2)), sibling_sampling="distinct", **here)
    return {
        "tli": (TLI(num_draft=3, **here), weights, ("rejection", "block", "delta")),
        "tli tree": (pair, weights, ("rejection",)),
        "slem": (SLEM(num_draft=3, **here), weights, ("delta", "coupled")),
    }
