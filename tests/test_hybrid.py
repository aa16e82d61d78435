"""Copying and another drafter in one: who says what, and what the other one knows of it."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_rounds import advanced
from registry import cases
from test_self_draft import model
from toys import bag, own_params

import specjax
from specjax import Sampling, types
from specjax.decoding import loop, round
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import (
    PEARL,
    SAM,
    SSD,
    Adaptive,
    Bigram,
    DraftModel,
    Fallback,
    Hybrid,
    LLMCad,
    NGram,
    SelfDraft,
    Synthetic,
    Union,
    context_index,
)
from specjax.drafters.confidence_stop import ConfidenceStop
from specjax.text import drafter_names, round_costs
from specjax.trees import chains
from specjax.trees.topology import branching, chain

MODEL, PARAMS = bag(17, 5)
SMALL, SMALL_PARAMS = model("llama")
CASES = cases(MODEL, PARAMS)
LOOKUP = NGram(longest=3, shortest=2, stretch=1)
SIZE = 64
PROMPTS = np.asarray([[1, 2, 3, 1, 2], [4, 5, 6, 0, 0]], np.int32)
LENGTHS = np.asarray([5, 3], np.int32)

jit_judge = jax.jit(round.draft_and_verify, static_argnums=(0, 1, 2))


def begun(drafter, weights, tokens=PROMPTS, lengths=LENGTHS):
    request, _ = prepare_inputs(
        MODEL, drafter, tokens, lengths, jax.random.key(0), 24, Sampling(), SIZE, ()
    )
    params = {"target": PARAMS, "drafter": weights}
    return params, loop.jit_start(MODEL, drafter, "auto", SIZE, params, request)


def rounds_of(drafter, weights):
    """Returns for each round the state before it, the proposal and the verdict."""
    params, state = begun(drafter, weights)
    while int(state.budget.max()):
        judged, after = advanced(MODEL, drafter, "auto", params, state)
        yield jax.device_get((state, judged))
        state = after


def matches_of(text):
    """The longest earlier match of the last tokens of a list, and the last place where it ends."""
    best, where = 0, -1
    for end in range(len(text) - 1):
        size = 0
        while size < min(LOOKUP.longest, end + 1) and text[end - size] == text[-1 - size]:
            size += 1
        if size and size >= best:
            best, where = size, end
    return best, where


@pytest.mark.parametrize("name", ["hybrid draft", "hybrid mtp", "adaptive hybrid"])
def test_after_any_copies_the_inner_drafter_says_what_it_says_of_that_text_alone(name):
    hybrid, weights, _ = CASES[name]
    if isinstance(hybrid, Adaptive):  # adaptive eagle3: here its width is left alone
        hybrid, weights = hybrid.inner, weights["inner"]
    hybrid = Hybrid(hybrid.num_draft, inner=hybrid.inner, lookup=LOOKUP)
    inner = hybrid.inner
    if inner.sibling_sampling:
        inner = dataclasses.replace(inner, sibling_sampling="top")
        hybrid = dataclasses.replace(hybrid, inner=inner)
    compared = copied = 0
    for state, judged in rounds_of(hybrid, weights):
        own = np.asarray(judged.proposed.draft.tokens)
        live = np.asarray(state.budget) > 0
        before = np.asarray(state.length) - 1  # to start adds the target's next token
        _, alone = begun(inner, weights, np.asarray(state.tokens), before)
        params = {"target": PARAMS, "drafter": weights}
        alone = np.asarray(jit_judge(MODEL, inner, "auto", params, alone).draft.tokens)
        said = (own >= 0) & live[:, None]
        assert (own[said] == alone[said]).all()
        compared += said[:, 1:].sum()
        copied += (~said[:, 1] & live).sum()
    assert compared > 6 and copied > 3  # both happened


def test_a_row_copies_after_the_first_of_its_own_tokens_that_makes_a_match():
    hybrid = Hybrid(5, inner=DraftModel(num_draft=3, model=MODEL), lookup=LOOKUP)
    at = set()
    for state, judged in rounds_of(hybrid, CASES["draft"][1]):
        tokens = np.asarray(judged.draft.tokens)
        candidate = np.asarray(judged.draft.candidate)
        own = np.asarray(judged.proposed.draft.tokens)
        for row in np.flatnonzero(np.asarray(state.budget) > 0):
            text = np.asarray(state.tokens[row, : state.length[row]]).tolist()
            k = 0
            while k < 3 and matches_of(text)[0] < LOOKUP.shortest:
                k += 1
                text.append(int(tokens[row, k]))
                assert own[row, k] == tokens[row, k]
            assert (own[row, 1 + k :] == -1).all()
            size, end = matches_of(text)
            count = min(size * LOOKUP.stretch if size >= LOOKUP.shortest else 0, 5 - k)
            period = len(text) - 1 - end
            expected = [text[end + 1 + i % period] for i in range(count)]
            assert tokens[row, 1 + k : 1 + k + count].tolist() == expected
            assert candidate[row].tolist() == [True] * (1 + k + count) + [False] * (5 - k - count)
            at.add((k, count > 0))
    assert {(0, True), (3, False)} <= at and any(k in (1, 2) for k, _ in at)


def test_nothing_is_proposed_after_the_end_of_a_chain_that_the_inner_drafter_stopped():
    drafter, weights, _ = CASES["self stop"]
    shorter = 0
    for _, judged in rounds_of(Hybrid(6, inner=drafter, lookup=LOOKUP), weights):
        assert (np.diff(np.asarray(judged.draft.candidate).astype(int), axis=1) <= 0).all()
        offered = np.asarray(judged.proposed.inner.offered)
        shorter += ((offered > 0) & (offered < drafter.depth)).sum()
    assert shorter > 2


@pytest.mark.parametrize("name", ["fallback draft", "fallback mtp"])
def test_a_row_drafts_with_the_table_where_its_score_is_high_and_else_with_the_other(name):
    drafter, weights, _ = CASES[name]
    table = drafter.first
    least = table.score_beside(drafter.inner.depth) if drafter.least is None else drafter.least
    copied = asked = 0
    for state, judged in rounds_of(drafter, weights):
        context = round.round_context({"target": PARAMS, "drafter": weights}, state)
        made, _ = jit_look_up(table, state.drafter_state.index, context)
        tokens, own = np.asarray(judged.draft.tokens), np.asarray(judged.proposed.draft.tokens)
        candidate = np.asarray(judged.draft.candidate)
        for row in np.flatnonzero(np.asarray(state.budget) > 0):
            count = int(made.count[row])
            if made.score[row] >= least and count:
                assert tokens[row, 1 : 1 + count].tolist() == made.tokens[row, :count].tolist()
                assert candidate[row].sum() == 1 + count and (own[row, 1:] == -1).all()
                copied += 1
            else:
                depth = drafter.inner.depth
                assert tokens[row, 1 : 1 + depth].tolist() == own[row, 1:].tolist()
                assert not candidate[row, 1 + depth :].any()
                asked += 1
    assert copied > 2 and asked > 2  # both happened


@functools.partial(jax.jit, static_argnums=0)
def jit_look_up(table, index, context):
    return table.look_up(None, index, context)


def test_sam_follows_every_match_alone_and_long_ones_before_another_drafter():
    table = SAM(num_draft=2, longest=8)
    text = jnp.asarray([[1, 2, 3, 4, 5, 1, 2, 3, 0, 0]])
    end = context_index.contexts(text, jnp.asarray([[7]]), table.longest)[:, 0]
    index = context_index.empty(1, text.shape[1], table.block)
    made = table.propose(index, text, jnp.asarray([8]), end)
    assert made.tokens.tolist() == [[4, 5]] and made.count.tolist() == [2]
    assert made.score.tolist() == [3.0] and table.score_beside(depth=2) == 5.0


def test_what_a_finished_row_has_not_read_asks_for_no_pass():
    hybrid, weights, _ = CASES["hybrid mtp"]
    drafter = hybrid.inner
    params, state = begun(drafter, weights)
    most = jnp.full((2,), drafter.num_pending, jnp.int32)
    pending = dataclasses.replace(state.drafter_state, count=most)

    def reads(budget):
        context = types.Context(
            tokens=state.tokens,
            length=state.length,
            budget=jnp.asarray(budget),
            key=state.key,
            sampling=Sampling(),
            width=jnp.int32(0),
        )
        return bool(drafter._catch_up(*own_params(params), pending, context)[0].ran[0])

    assert reads([3, 0]) and not reads([0, 0])


@pytest.mark.parametrize("name", ["hybrid draft", "adaptive draft"])
def test_rounds_in_which_the_inner_drafter_is_asked_are_priced_too(name, monkeypatch):
    drafter = CASES[name][0]
    drafter = drafter if isinstance(drafter, Adaptive) else Adaptive(drafter)
    work = SimpleNamespace(drafter=drafter)
    given = {round_costs._repeated: [1.0, 1.1, 1.2], round_costs._different: [0.9, 2.0, 2.1]}
    monkeypatch.setattr(
        round_costs,
        "_timed_after",
        lambda text, *_: (round_costs.Timed(1, np.asarray([0, *given[text]])), 1),
    )
    wanted = [1.0, 2.0, 2.1] if name == "hybrid draft" else [1.0, 1.1, 1.2]
    assert round_costs.round_costs(work) == pytest.approx(wanted)


def test_drafters_that_a_lookup_cannot_go_before_are_named():
    tree = DraftModel(model=MODEL, topology=branching(2, 1))
    chain = DraftModel(num_draft=3, model=MODEL)
    for inner in (tree, Union(drafters=(chain, chain))):
        with pytest.raises(ValueError, match="Fallback"):
            Hybrid(inner=inner)
    with pytest.raises(ValueError, match="wrap the hybrid in Adaptive"):
        Hybrid(inner=Adaptive(chain))
    with pytest.raises(ValueError, match="asked to draft nothing"):
        Fallback(first=NGram(), inner=Union(drafters=(chain, CASES["silent"][0])))
    with pytest.raises(ValueError, match="drafts nothing"):
        Fallback(first=NGram(), inner=NGram(0))
    with pytest.raises(ValueError, match="hub"):
        Fallback(first=NGram(), inner=CASES["draft tree hub"][0])
    with pytest.raises(TypeError, match="SAM or NGram"):
        Fallback(first=chain, inner=chain)
    with pytest.raises(ValueError, match="at least as many"):
        Hybrid(2, inner=chain)
    with pytest.raises(ValueError, match="a lookup without a topology"):
        Hybrid(inner=chain, lookup=NGram(topology=chains(2, 2)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DraftModel(4, model=specjax.load("embedded")), "model=.*give its .target"),
        (lambda: SelfDraft(target=specjax.load("embedded"), exit=2), "target=.*give its .target"),
        (lambda: DraftModel(model=MODEL, topology="3x2"), "topology='3x2'.*trees.parse"),
        (lambda: NGram(topology="3x1x1"), "topology='3x1x1'.*trees.parse"),
        (lambda: SelfDraft(3, target=MODEL, exit=1, stop=0.6), "stop=0.6.*ConfidenceStop"),
        (lambda: LLMCad(model=MODEL, stop=0.01), "stop=0.01.*CumulativeStop"),
        (lambda: Adaptive("ngram"), "inner='ngram'.*specjax.Drafter"),
        (lambda: Union(drafters=("ngram", NGram())), r"drafters\[0\]='ngram'.*specjax.Drafter"),
        (lambda: Synthetic(4, 0.8, "ngram"), "inner='ngram'.*specjax.Drafter"),
        (lambda: Hybrid(5, inner=NGram(3), lookup=SAM()), r"lookup=SAM\(.*an NGram"),
        (lambda: Fallback(first=NGram(), inner=NGram(3), least="3"), "least='3'.*a number"),
    ],
)
def test_fields_of_another_type_are_named_where_an_object_is_made(make, words):
    with pytest.raises(TypeError, match=words):
        make()


def test_where_the_lookup_copies_nothing_the_inner_drafter_is_asked():
    """The earliest match must be followed by as many tokens as are drafted, and here is none."""
    text = np.asarray([[5, 6, 7, 8, 5, 6]], np.int32)
    table = {"after.1": jnp.arange(1, 18, dtype=jnp.int32) % 17}
    inner, lookup = Bigram(10, vocab_size=17), NGram(choice="earliest", shortest=2)
    hybrid = Hybrid(10, inner=inner, lookup=lookup)
    judged = jit_judge(MODEL, hybrid, "auto", *begun(hybrid, table, text, np.asarray([6])))
    root = int(judged.draft.tokens[0, 0])
    assert judged.draft.tokens[0, 1:4].tolist() == [root + 1, root + 2, root + 3]
    assert np.asarray(judged.draft.candidate)[0, 1:].all()


@pytest.mark.parametrize("kind", ["stop", "ssd", "pearl", "draft"])
def test_what_a_row_drafts_does_not_depend_on_a_row_that_asks_when_it_does_not(kind):
    """The first row repeats itself, and so copies where the second asks."""
    stop = ConfidenceStop(0.4, step=0.3, target_rate=0.5, threshold_decay=0.0)
    inner = {
        "stop": SelfDraft(3, target=SMALL, exit=1, stop=stop),
        "ssd": SSD(3, model=SMALL, fan_out=3),
        "pearl": PEARL(3, model=SMALL),
        "draft": DraftModel(3, model=SMALL),
    }
    lookup = NGram(longest=3, shortest=1, stretch=1)
    hybrid, own = Hybrid(4, inner=inner[kind], lookup=lookup), SMALL_PARAMS
    params = {"target": own, "drafter": None if kind == "stop" else own}
    tokens = np.asarray([[1, 2, 1, 2, 1, 2, 1], [9, 4, 11, 7, 3, 12, 6]], np.int32)
    lengths, warm = np.asarray([7, 7], np.int32), Sampling(temperature=0.6)
    for seed in range(6):
        keys, drafted = jax.random.split(jax.random.key(seed), 2), []
        for rows in (1, 2):
            given = tokens[:rows], lengths[:rows], keys[:rows]
            request, _ = prepare_inputs(SMALL, hybrid, *given, 40, warm, SIZE, ())
            state = loop.jit_start(SMALL, hybrid, "auto", SIZE, params, request)
            seen = []
            while int(state.budget[0]):
                judged, state = advanced(SMALL, hybrid, "auto", params, state)
                kept = np.asarray(judged.draft.candidate)[0]
                seen.append(np.where(kept, np.asarray(judged.draft.tokens)[0], -1)[1:].tolist())
            drafted.append(seen)
        assert drafted[0] == drafted[1], seed


def test_a_name_after_ngram_is_any_that_stands_alone():
    lm = specjax.load("embedded")
    drafter, _ = drafter_names.resolve_drafter(lm, "ngram+draft", 5)
    assert (drafter.num_draft, drafter.inner.num_draft) == (5, 3)
    drafter, _ = drafter_names.resolve_drafter(lm, "ngram+mtp")
    assert drafter.name == "ngram+mtp" and drafter.num_draft == drafter.inner.depth == 3
    heads = drafter_names.named(lm, "medusa")
    own = heads.drafter
    two = dataclasses.replace(own.config, num_heads=2)
    own = dataclasses.replace(own, config=two, topology=chain(2))
    shallow = drafter_names.WithLookup(dataclasses.replace(heads, drafter=own))
    drafter, _ = drafter_names.resolve_drafter(lm, shallow, 7)
    assert (drafter.num_draft, drafter.inner.depth) == (7, 2)
    drafter, _ = drafter_names.resolve_drafter(lm, "suffix+draft")
    assert drafter.name == "suffix+draft" and (drafter.num_draft, drafter.inner.depth) == (16, 3)
    drafter, _ = drafter_names.resolve_drafter(lm, "sam+mtp", 7)
    assert drafter.name == "sam+mtp" and drafter.num_draft == drafter.first.num_draft == 7
    drafter, _ = drafter_names.resolve_drafter(lm, "suffix+ngram+draft")
    assert drafter.name == "suffix+ngram+draft" and drafter.inner.inner.depth == 3
    drafter, _ = drafter_names.resolve_drafter(lm, "suffix+ngram+eagle3")
    assert drafter.inner.inner.others == drafter.depth + 1  # what it may have missed in a round
    drafter, _ = drafter_names.resolve_drafter(lm, "ngram+recycling", tree="2x1")
    assert (drafter.name, drafter.num_draft, drafter.depth) == ("ngram+recycling", 4, 3)
    drafter, _ = drafter_names.resolve_drafter(lm, "sam+lookahead:window=2,ngram=3", 5)
    assert (drafter.inner.window, drafter.first.num_draft) == (2, 5)
    drafter, _ = drafter_names.resolve_drafter(lm, "suffix+draft", tree="2x1")
    assert drafter.inner.topology == branching(2, 1)
    for wrong in ("suffix+none", "ngram+nothing", "ngram+"):
        with pytest.raises(ValueError, match="Accepted are|accepted"):
            drafter_names.resolve_drafter(lm, wrong)
    with pytest.raises(ValueError, match="after 'ngram.' give the name of the drafter that 'auto'"):
        drafter_names.resolve_drafter(lm, "ngram+auto")
