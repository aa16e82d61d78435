"""Drafters that are tables: each against its structure in plain Python, token by token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling, trees, types
from specjax.drafters import (
    SAM,
    NGram,
    Recycling,
    Suffix,
    context_index,
    continuations,
    text_table,
)

VOCAB, SIZE, STEPS = 13, 96, 5
WHOLE = dict(longest=5, occurrences=SIZE, factor=1.5, offset=-0.5, min_probability=0.15, block=8)
CHAIN = Suffix(num_draft=STEPS, **WHOLE)
TREE = Suffix(topology=trees.Expand(4, STEPS, 9), **WHOLE)


def texts(rows, letters, size=SIZE, seed=0):
    """Random texts of a few letters, of all lengths, and two that repeat themselves."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, letters, (rows, size)).astype(np.int32)
    tokens[0], tokens[1] = 1, np.arange(size) % 3
    return tokens, np.linspace(size, 1, rows).astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter, tokens, length):
    index = context_index.empty(*tokens.shape, drafter.block)
    live = jnp.ones(length.shape, bool)
    index = context_index.extend(index, tokens, length, live, drafter.longest)
    end = context_index.contexts(tokens, length[:, None] - 1, drafter.longest)[:, 0]
    found = context_index.nearest(index, tokens, end, length, drafter.occurrences)
    return index, found, drafter.propose(index, tokens, length, end)


def count_of(text, part):
    """How often ``part`` stands in ``text``: the count of a node of its suffix tree."""
    return sum(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


def matches_of(text, longest):
    """``(matched, place)`` of every earlier place, the longest match first, then the latest."""
    found = []
    for place in range(len(text) - 1):
        size = 0
        while size < min(longest, place + 1) and text[place - size] == text[-1 - size]:
            size += 1
        found += [(size, place)] if size else []
    return sorted(found, reverse=True)


def best_of(drafter, grow, text):
    """The paths of the best length by ``grow(text, size, budget)``, and their score."""
    best, score = [], 0.0
    for size in range(1, min(drafter.longest, len(text)) + 1):
        budget = int(np.floor(size * drafter.factor + drafter.offset + 1e-6))
        paths = grow(drafter, text, size, min(max(budget, 0), drafter.num_draft))
        total = sum(count_of(text, text[-size:] + path) for path in paths)
        total /= count_of(text, text[-size:])
        if total >= score:
            best, score = paths, total
    return best, score


def children_of(drafter, text, path, size):
    """``(count, -rank, token)`` of what follows ``path`` after the last ``size`` tokens."""
    found = {}
    for rank, (matched, place) in enumerate(matches_of(text, drafter.longest)):
        end = place + 1 + len(path)
        if matched >= size and end < len(text) and text[place + 1 : end] == path:
            found.setdefault(text[end], -rank)
    whole = text[-size:] + path
    return sorted(((count_of(text, [*whole, t]), r, t) for t, r in found.items()), reverse=True)


def grow_chain(drafter, text, size, budget):
    paths = []
    while len(paths) < budget:
        path = paths[-1] if paths else []
        said = children_of(drafter, text, path, size)
        least = drafter.min_probability * count_of(text, text[-size:])
        if not said or said[0][0] < least:
            break
        paths.append([*path, said[0][2]])
    return paths


def grow_tree(drafter, text, size, budget):
    least = drafter.min_probability * count_of(text, text[-size:])
    found, open_ = [], [[]]
    while open_:
        path = open_.pop()
        for count, rank, token in children_of(drafter, text, path, size):
            if count >= least and len(path) < drafter.depth:
                found.append((-count, len(path), -rank, [*path, token]))
                open_.append([*path, token])
    return [path for *_, path in sorted(found)[:budget]]


def paths_of(made, row):
    """The paths that a proposal holds."""
    tokens, count = np.asarray(made.tokens[row]).tolist(), int(made.count[row])
    if made.parent is None:
        return [tokens[: n + 1] for n in range(count)]
    parent, paths = np.asarray(made.parent[row]).tolist(), [[]]
    for node in range(count):
        paths.append([*paths[parent[1 + node]], tokens[node]])
    return paths[1:]


GROW = {CHAIN: grow_chain, TREE: grow_tree}


def wrong_rows(drafter, tokens, length, grow):
    """Rows in which the drafter does not propose what ``grow`` finds in the text."""
    _, _, made = propose(drafter, tokens, length)
    wrong = 0
    for row in range(len(tokens)):
        text = tokens[row, : length[row]].tolist()
        paths, score = best_of(drafter, grow, text)
        same = paths_of(made, row) == paths and np.isclose(made.score[row], score, atol=1e-5)
        wrong += not same
    return wrong


@pytest.mark.parametrize("drafter", GROW, ids=["chain", "tree"])
def test_suffix_proposes_what_a_suffix_tree_of_the_text_counts(drafter):
    tokens, length = texts(24, 3)
    assert wrong_rows(drafter, tokens, length, GROW[drafter]) == 0


def test_fault_a_suffix_tree_that_forgets_the_latest_tokens(monkeypatch):
    tokens, length = texts(24, 3)
    kept = context_index.nearest

    def forgets(index, tokens, end, length, most):
        return kept(index, tokens, end, jnp.minimum(length, index.count + 1), most)

    monkeypatch.setattr(context_index, "nearest", forgets)
    forgetful = dataclasses.replace(CHAIN, longest=4)  # another program
    assert wrong_rows(forgetful, tokens, length, grow_chain) > 3


def test_fault_a_suffix_tree_that_trusts_the_longest_match_alone():
    def longest_only(drafter, text, size, budget):
        matched = matches_of(text, drafter.longest)
        return grow_chain(drafter, text, size, budget) if matched and size == matched[0][0] else []

    tokens, length = texts(24, 3)
    assert wrong_rows(CHAIN, tokens, length, longest_only) > 3


def test_of_many_matches_the_longest_are_found_and_the_index_is_sorted():
    few = dataclasses.replace(CHAIN, occurrences=6)
    tokens, length = texts(24, 2)
    index, (places, matched), _ = propose(few, tokens, length)
    for row in range(len(tokens)):
        text = tokens[row, : length[row]].tolist()
        wanted = [size for size, _ in matches_of(text, few.longest)][:6]
        assert matched[row].tolist() == wanted + [0] * (6 - len(wanted))
        said = dict(map(reversed, matches_of(text, few.longest)))
        for size, place in zip(matched[row].tolist(), places[row].tolist(), strict=True):
            assert size == 0 or said[place] == size
        order = np.asarray(index.order[row, : index.count[row]]).tolist()
        assert sorted(order) == list(range(len(order))) and len(text) - 1 - len(order) < 8
        keys = [tuple(([-1] * few.longest + text[: p + 1])[: -few.longest - 1 : -1]) for p in order]
        assert keys == sorted(keys)


# ------------------------------------------------------------------- automaton and lookup


class Automaton:
    """The suffix automaton of a text, built online; ``last`` is the state of all of it."""

    def __init__(self):
        self.next, self.link, self.size, self.end, self.last = [{}], [-1], [0], [0], 0

    def _state(self, following, size, end):
        self.next.append(following)
        self.link.append(0)
        self.size.append(size)
        self.end.append(end)
        return len(self.next) - 1

    def add(self, token):
        here, state = self._state({}, self.size[self.last] + 1, self.size[self.last]), self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = here
            state = self.link[state]
        if state >= 0:
            there = self.next[state][token]
            if self.size[there] != self.size[state] + 1:
                clone = self._state(dict(self.next[there]), self.size[state] + 1, self.end[there])
                self.link[clone] = self.link[there]
                while state >= 0 and self.next[state].get(token) == there:
                    self.next[state][token] = clone
                    state = self.link[state]
                self.link[there] = there = clone
            self.link[here] = there
        self.last = here

    def longest(self):
        """The longest end of the text that occurred before, and where that first ended."""
        state = self.link[self.last]
        return self.size[state], self.end[state]


def test_sam_finds_what_a_suffix_automaton_finds():
    sam = SAM(num_draft=1, longest=SIZE, shortest=1, occurrences=SIZE, block=8)
    tokens, length = texts(24, 3)
    _, _, made = propose(sam, tokens, length)
    for row in range(len(tokens)):
        text, automaton = tokens[row, : length[row]].tolist(), Automaton()
        for token in text:
            automaton.add(token)
        size, end = automaton.longest()
        assert int(made.score[row]) == size
        assert made.count[row] == (size > 0) and (not size or made.tokens[row, 0] == text[end + 1])
    _, _, other = propose(dataclasses.replace(sam, shortest=4), tokens, length)
    few = np.asarray(made.score) < 4  # below the shortest match nothing is proposed
    assert (np.asarray(other.count)[few] == 0).all() and few.any() and not few.all()


def drafted(drafter, text):
    """The paths that a drafter proposes after one text."""
    tokens = np.zeros((1, 40), np.int32)
    tokens[0, : len(text)] = text
    context = types.Context(
        tokens=jnp.asarray(tokens),
        length=jnp.asarray([len(text)]),
        budget=jnp.asarray([9]),
        key=jax.random.split(jax.random.key(0), 1),
        sampling=Sampling(),
    )
    draft, _ = drafter.draft_step(None, None, (), context)
    keep, parent = np.asarray(draft.candidate[0]), np.asarray(trees.parents(draft)[0])
    paths = {0: []}
    for node in np.flatnonzero(keep[1:]) + 1:
        paths[node] = [*paths[parent[node]], int(draft.tokens[0, node])]
    return list(paths.values())[1:]


def test_prompt_lookup_takes_the_earliest_whole_match_as_the_reference_does():
    first = NGram(num_draft=2, longest=2, shortest=1, stretch=2, choice="earliest")
    assert drafted(first, [1, 2, 3, 4, 9, 1, 2, 5, 6, 7, 1, 2])[-1] == [3, 4]
    assert drafted(first, [9, 2, 8, 8, 1, 2, 5, 6, 7, 1, 2])[-1] == [5, 6]  # the longer match
    overlapping = [7, 1, 2, 1, 2]  # a match of one token does not reach into what follows it
    assert drafted(first, overlapping)[-1] == [1, 2]
    assert drafted(dataclasses.replace(first, shortest=2), overlapping) == []
    latest = dataclasses.replace(first, choice="latest")
    assert drafted(latest, [1, 2, 3, 4, 9, 1, 2, 5, 6, 7, 1, 2])[-1] == [5, 6]


def test_prompt_lookup_drafts_several_matches_and_what_they_share_once():
    tree = NGram(topology=trees.chains(3, 3), longest=2, shortest=1, stretch=9)
    text = [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 2, 8, 9, 1, 2]
    paths = drafted(tree, text)
    assert sorted(paths) == [[3], [3, 4], [3, 4, 5], [3, 6], [3, 6, 7], [8], [8, 9], [8, 9, 1]]
    assert drafted(tree, [1, 2, 3]) == []


def test_several_texts_of_a_table_do_not_run_into_each_other_and_the_oldest_go_first():
    table, said = text_table.empty(64, block=4), []
    random = np.random.default_rng(3)
    for _ in range(12):
        said.append(random.integers(0, 3, int(random.integers(1, 14))).tolist())
        table = text_table.add(table, said[-1], WHOLE["longest"])
        kept = text_table.texts(table)
        assert kept == said[-len(kept) :] and sum(map(len, kept)) + len(kept) <= 64
        assert int(table.length[0]) - 1 - int(table.index.count[0]) < 4
        assert table_is_searched(table, kept, random.integers(0, 3, 9).tolist())
    assert len(kept) < len(said)
    alone = text_table.add(table, list(range(100)), WHOLE["longest"])
    assert text_table.texts(alone) == [list(range(53, 100))]


def table_is_searched(table, kept, text):
    """Whether what a table proposes is what its texts count, for one length of the match."""
    end = np.full((1, WHOLE["longest"]), -1, np.int32)
    tail = text[: -WHOLE["longest"] - 1 : -1]
    end[0, : len(tail)] = tail
    made = jit_shared(dataclasses.replace(CHAIN, occurrences=64), table, end)
    path, score = made.tokens[0, : made.count[0]].tolist(), float(made.score[0])

    def count(part):
        return sum(count_of(one, part) for one in kept)

    if not path:
        return all(not count([text[-1], token]) for token in range(3)) and score == 0
    for size in range(1, WHOLE["longest"] + 1):
        before = text[-size:]
        counts = [count([*before, *path[: n + 1]]) for n in range(len(path))]
        most = [max(count([*before, *path[:n], t]) for t in range(3)) for n in range(len(path))]
        if counts == most and np.isclose(sum(counts) / (1 + count(before)), score, atol=1e-5):
            return True
    return False


@functools.partial(jax.jit, static_argnums=0)
def jit_shared(drafter, table, end):
    return drafter.propose(table.index, table.tokens, table.length, end, shared=True)


def test_fault_a_table_whose_texts_run_into_each_other(monkeypatch):
    table = text_table.empty(64, block=4)
    for one in ([1, 2], [0, 0]):
        table = text_table.add(table, one, WHOLE["longest"])
    end = np.asarray([[2, 1, -1, -1, -1]], np.int32)
    assert int(jit_shared(CHAIN, table, end).count[0]) == 0  # nothing follows in its text
    whole = continuations.following
    monkeypatch.setattr(
        continuations, "following", lambda tokens, *rest: whole(jnp.maximum(tokens, 0), *rest)
    )
    wrong = dataclasses.replace(CHAIN, num_draft=4, topology=None)  # another program
    assert int(jit_shared(wrong, table, end).count[0]) > 0


def test_tables_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="trees.Expand"):
        Suffix(topology=trees.branching(2, 2))
    with pytest.raises(ValueError, match="without further settings"):
        Suffix(topology=trees.whole_families(2, 2, 3))
    with pytest.raises(ValueError, match="at least 1"):
        Suffix(longest=0)
    with pytest.raises(ValueError, match="from 0 to 1"):
        Suffix(min_probability=1.5)
    with pytest.raises(ValueError, match="factor at least 0"):
        Suffix(factor=float("nan"))
    with pytest.raises(ValueError, match="shortest"):
        SAM(shortest=0)
    with pytest.raises(ValueError, match="shortest_beside=0"):
        SAM(shortest_beside=0)
    with pytest.raises(ValueError, match="side by side"):
        NGram(topology=trees.branching(2, 2))
    with pytest.raises(ValueError, match="earliest"):
        NGram(choice="first")
    with pytest.raises(ValueError, match="static tree"):
        Recycling(vocab_size=VOCAB, topology=trees.Expand(2, 2, 4))
    with pytest.raises(ValueError, match="vocabulary"):
        Recycling()
