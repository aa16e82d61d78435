"""Lookahead and Jacobi: each against the algorithm in plain Python, which scores linear paths."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import starts
from lookahead_replay import Window
from toys import bag

import specjax
from specjax import trees
from specjax.decoding import reference, round
from specjax.drafters import Adaptive, Jacobi, Lookahead, jacobi, lookahead

pytestmark = pytest.mark.usefixtures("quick_compilation")
VOCAB, NUM, SIZE = 11, 24, 64
MODEL, PARAMS = bag(VOCAB, 3)
PROMPTS = np.asarray([[1, 2, 3, 1, 2], [4, 5, 6, 0, 0], [7, 0, 0, 0, 0]], np.int32)
LENGTHS = np.asarray([5, 3, 1], np.int32)
BUDGETS = np.asarray([NUM, 7, 16], np.int32)  # rows are frozen one after the other


@functools.cache
def said_after(text):
    """The target's most probable token after ``text``, a tuple, by a pass over all of it."""
    tokens = np.zeros((1, SIZE), np.int32)  # one shape; what stands behind is not seen
    tokens[0, : len(text)] = text
    return int(np.argmax(reference.logits(MODEL, PARAMS, tokens)[0, len(text) - 1]))


def agreed(text, guesses):
    """How many leading ``guesses`` greedy decoding says after ``text``."""
    for n, token in enumerate(guesses):
        if said_after((*text, *guesses[:n])) != token:
            return n
    return len(guesses)


def begun(drafter, **settings):
    settings = {"key": jax.random.key(0), "max_new_tokens": BUDGETS, "capacity": SIZE} | settings
    params = {"target": PARAMS, "drafter": None}
    state = starts.begun(MODEL, drafter, params, PROMPTS, LENGTHS, **settings)
    return params, state


@functools.partial(jax.jit, static_argnums=0)
def one_round(drafter, params, state):
    """The state after a round, and the draft of that round."""
    judged = round.draft_and_verify(MODEL, drafter, "auto", params, state)
    return round.commit_round(MODEL, drafter, params, state, judged), judged.draft


def rounds(drafter, most=40):
    """``(draft, state before, state after)`` of each round, rows that have ended included."""
    params, state = begun(drafter)
    while most and int(state.budget.max()):
        before, (state, draft) = state, one_round(drafter, params, state)
        yield jax.device_get((draft, before, state))
        most -= 1


def text_of(state, row):
    return tuple(int(t) for t in state.tokens[row, : state.length[row]])


def state_of(state, row):
    own = state.drafter_state
    return {f.name: getattr(own, f.name)[row].tolist() for f in dataclasses.fields(own)}


def fresh_guesses(text, count):
    """What stands in a window of which nothing is known: the text's end, begun anew if need be."""
    return (list(text) * count)[-count:]


def paths(draft, row):
    """The tokens of all candidates, each with those of its ancestors."""
    parent = np.broadcast_to(trees.parents(draft), draft.tokens.shape)[row]
    found, kept = {0: ()}, draft.candidate[row] & draft.scored[row]
    for node in np.flatnonzero(kept[1:]) + 1:
        found[node] = (*found[parent[node]], int(draft.tokens[row, node]))
    return sorted(list(found.values())[1:])


def wrong_rounds(drafter, like=None):
    """How often draft, window, pool or text differ from the replay of ``like``; and rounds."""
    like, replay, wrong, done = like or drafter, None, 0, 0
    for draft, before, after in rounds(drafter):
        done += 1
        shape = drafter.depth, drafter.window
        if replay is None:
            texts = [text_of(before, row) for row in range(len(LENGTHS))]
            levels = [np.reshape(fresh_guesses(text, np.prod(shape)), shape) for text in texts]
            replay = [Window(like, one.tolist(), said_after) for one in levels]
        for row, mine in enumerate(replay):
            old, new = state_of(before, row), state_of(after, row)
            if not before.budget[row]:
                wrong += old != new  # frozen, bit by bit
                continue
            text, guesses = text_of(before, row), mine.guesses(text_of(before, row))
            every = {gram[: n + 1] for gram in guesses for n in range(like.depth)}
            wrong += paths(draft, row) != sorted(every)
            window = [[text[-1], *mine.levels[0][1:]], *mine.levels[1:]]
            wrong += draft.tokens[row, : np.prod(shape)].reshape(shape).tolist() != window
            kept = max([agreed(text, gram) for gram in guesses], default=0)
            num = min(kept + 1, int(before.budget[row]))
            wrong += text_of(after, row) != (*text, *greedy(row)[len(text) - LENGTHS[row] :][:num])
            mine.step(text)
            wrong += new["window"] != mine.levels
            pool = {
                key: [tuple(gram) for gram in grams[::-1] if gram[0] >= 0]
                for key, grams in enumerate(new["pool"])
            }
            wrong += {key: grams for key, grams in pool.items() if grams} != mine.pool
    return wrong, done


@functools.cache
def greedy(row):
    text = PROMPTS[row, : LENGTHS[row]].tolist()
    for _ in range(NUM):
        text.append(said_after(tuple(text)))
    return tuple(text[LENGTHS[row] :])


LOOKAHEADS = {
    "plain": Lookahead(vocab_size=VOCAB, window=4, ngram=4, guesses=3),
    "text": Lookahead(vocab_size=VOCAB, window=2, ngram=3, guesses=2, reads_text=True),
    "pairs": Lookahead(vocab_size=VOCAB, window=5, ngram=2, guesses=2),
}


@pytest.mark.parametrize("name", LOOKAHEADS)
def test_window_pool_and_text_are_those_of_a_replay_that_scores_linear_paths(name):
    wrong, done = wrong_rounds(LOOKAHEADS[name])
    assert wrong == 0 and done < NUM  # something was accepted


@dataclasses.dataclass(frozen=True)
class OneKeyOff(Lookahead):
    """Files a column under the token of the next column."""

    def observe(self, params, target_params, state, segment):
        if segment.round is not None:
            draft, *others = segment.round
            keys = jnp.roll(draft.tokens[:, : self.window], -1, axis=1)
            tokens = draft.tokens.at[:, : self.window].set(keys)
            draft = dataclasses.replace(draft, tokens=tokens)
            segment = dataclasses.replace(segment, round=(draft, *others))
        return super().observe(params, target_params, state, segment)


@dataclasses.dataclass(frozen=True)
class SeesOneMore(Lookahead):
    """Hangs each column of level 1 below the token of level 0 after its own."""

    def draft_step(self, params, target_params, state, context):
        draft, state = super().draft_step(params, target_params, state, context)
        last = jnp.minimum(jnp.arange(self.window) + 1, self.window - 1)
        parent = draft.parent.at[:, self.window : 2 * self.window].set(last)
        return dataclasses.replace(draft, parent=parent), state


@dataclasses.dataclass(frozen=True)
class NeverForgets(Lookahead):
    """Does not freeze rows that have ended."""

    def observe(self, params, target_params, state, segment):
        return super().observe(
            params, target_params, state, dataclasses.replace(segment, num=segment.num + 1)
        )


@pytest.mark.parametrize("kind", [OneKeyOff, SeesOneMore, NeverForgets])
def test_fault_a_window_that_is_read_or_filed_wrongly(kind):
    sound = LOOKAHEADS["plain"]
    settings = {f.name: getattr(sound, f.name) for f in dataclasses.fields(sound)}
    assert wrong_rounds(kind(**settings), like=sound)[0] > 3


@pytest.mark.parametrize(
    "drafter",
    [Lookahead(vocab_size=VOCAB, window=3, ngram=2, guesses=1), Jacobi(num_draft=4)],
    ids=lambda one: one.name,
)
def test_a_row_that_is_shorter_than_the_window_decodes_as_any_other(drafter):
    params = {"target": PARAMS, "drafter": None}
    prompt, length = np.asarray([[7]], np.int32), np.asarray([1])
    out = specjax.decode(
        MODEL, drafter, params, prompt, length, key=jax.random.key(0), max_new_tokens=2
    )
    assert out.tokens[0].tolist() == [7, *greedy(2)[:2]]


# ------------------------------------------------------------------------------- Jacobi


def replayed(drafter):
    """``(rounds that differ from Jacobi decoding in plain Python, rounds, tokens of the row that
    took longest, guesses of each round of row 0)``."""
    wrong, done, widths = 0, 0, []
    guesses = [{} for _ in LENGTHS]  # by position
    ends = [int(n) - 1 + min(drafter.num_draft, drafter.until) for n in LENGTHS]
    for draft, before, after in rounds(drafter):
        done += 1
        for row in np.flatnonzero(before.budget):
            text, known = text_of(before, row), guesses[row]
            last, budget = len(text) - 1, int(before.budget[row])
            end = min(ends[row], last + budget)
            if drafter.mode == "whole":
                end = last + min(drafter.num_draft, budget)
            chain = [int(t) for t in draft.tokens[row, 1 : 1 + end - last]]
            widths += [len(chain)] if row == 0 else []
            wrong += int(draft.scored[row].sum()) != 1 + len(chain)
            first = fresh_guesses(text, drafter.num_draft)
            for n, token in enumerate(chain):
                wrong += known.get(last + 1 + n, first[n]) != token
            for n in range(len(chain) + 1):
                known[last + 1 + n] = said_after((*text, *chain[:n]))
            num = min(agreed(text, chain) + 1, budget)
            wrong += text_of(after, row) != (*text, *greedy(row)[len(text) - LENGTHS[row] :][:num])
            last += num
            if drafter.mode != "whole" and last >= ends[row]:
                begin, room = int(LENGTHS[row]) - 1, drafter.num_draft
                if drafter.mode == "hybrid":
                    room = min(room, max(drafter.until - (last - begin), 0))
                ends[row] = last + room
    return wrong, done, widths


JACOBIS = [
    Jacobi(num_draft=4),
    Jacobi(num_draft=4, mode="blocks"),
    Jacobi(num_draft=3, mode="hybrid", until=8),
]


@pytest.mark.parametrize("drafter", JACOBIS, ids=lambda one: one.mode)
def test_guesses_are_what_the_target_said_after_those_of_the_last_round(drafter):
    wrong, done, widths = replayed(drafter)
    assert wrong == 0 and done <= NUM
    if drafter.mode == "whole":
        assert set(widths[:-4]) == {4}
    else:  # a block is settled before the next one begins
        assert sorted(set(widths)) != [drafter.num_draft]
    if drafter.mode == "hybrid":
        assert widths[-NUM + 9 :] == [0] * (NUM - 9)  # plain decoding after eight tokens


def test_fault_guesses_that_are_moved_one_too_far():
    @dataclasses.dataclass(frozen=True)
    class Late(Jacobi):
        def readout(self, draft, scores):
            return jnp.roll(super().readout(draft, scores), -1, axis=1)

    assert replayed(Late(num_draft=4))[0] > 0


@pytest.mark.parametrize("kind", [jacobi, lookahead], ids=["jacobi", "lookahead"])
def test_fault_first_guesses_that_are_not_the_end_of_the_text(kind, monkeypatch):
    def zeros(context, count):
        return jnp.zeros((len(context.length), count), jnp.int32)

    monkeypatch.setattr(kind, "last_of_text", zeros)
    if kind is jacobi:
        wrong, _, _ = replayed(type("Zeros", (Jacobi,), {})(num_draft=4))
    else:
        settings = dict(vocab_size=VOCAB, window=5, ngram=2, guesses=2)
        wrong, _ = wrong_rounds(type("Zeros", (Lookahead,), {})(**settings))
    assert wrong > 0


def test_guesses_that_are_right_from_the_start_are_settled_in_one_round():
    drafter = Jacobi(num_draft=6)
    params, state = begun(drafter)
    right = np.stack([greedy(row)[:6] for row in range(len(LENGTHS))])
    own = dataclasses.replace(state.drafter_state, guesses=jnp.asarray(right, jnp.int32))
    after, _ = one_round(drafter, params, dataclasses.replace(state, drafter_state=own))
    assert (after.length - state.length).tolist() == [7, 7, 7]


def test_a_new_turn_of_a_chat_begins_with_new_guesses_and_a_whole_window():
    drafter = Jacobi(num_draft=3, mode="hybrid", until=4)
    state = jacobi.JacobiState(
        guesses=jnp.ones((2, 3), jnp.int32), left=jnp.asarray([0, 0]), emitted=jnp.asarray([4, 9])
    )
    tokens = jnp.ones((2, 5), jnp.int32)
    prompt = specjax.Segment(
        tokens=tokens, next=tokens, features=None, start=jnp.ones(2), num=jnp.asarray([5, 0])
    )
    after = drafter.observe(None, None, state, prompt)
    assert after.guesses.tolist() == [[-1] * 3, [1] * 3]
    assert after.left.tolist() == [3, 0] and after.emitted.tolist() == [0, 9]


# --------------------------------------------------------------------------- passengers


def test_passengers_are_counted_beside_the_drafts_and_leave_tau_alone():
    drafter = LOOKAHEADS["plain"]
    params, state = begun(drafter)
    while int(state.budget.max()):
        state, _ = one_round(drafter, params, state)
    stats = jax.device_get(state.stats)
    assert drafter.num_passengers == 4 * 3 - 1 and drafter.num_draft == 11 + 9
    assert stats.passengers.tolist() == (11 * stats.rounds).tolist()
    assert stats.drafted_at.shape == (3, drafter.depth)  # of candidates alone
    assert stats.drafted.sum() <= 9 * stats.rounds.sum()
    assert stats.tau == stats.emitted.sum() / stats.rounds.sum() > 1
    assert "11.0 passengers a round" in str(stats)


@pytest.mark.parametrize(("dear", "drafts"), [(4.1, False), (1.1, True)])
def test_a_window_is_left_out_where_a_pass_over_it_costs_what_arithmetic_costs(dear, drafts):
    """A pass of twenty nodes that costs more than the four tokens it can give is never run."""
    drafter = Adaptive(LOOKAHEADS["plain"])
    costs = jnp.asarray([1.0, dear, dear], jnp.float32)
    params = {"target": PARAMS, "drafter": {"inner": None, "costs": costs}}
    out = specjax.decode(
        MODEL, drafter, params, PROMPTS, LENGTHS, key=jax.random.key(0), max_new_tokens=NUM
    )
    assert bool(out.stats.passengers.any()) == drafts
    assert [out.tokens[row, n : n + NUM].tolist() for row, n in enumerate(LENGTHS)] == [
        list(greedy(row)) for row in range(3)
    ]


def test_fewer_candidates_are_asked_for_and_passengers_stay():
    context = round.round_context(*begun(LOOKAHEADS["plain"]))
    context = dataclasses.replace(context, width=jnp.int32(1))
    tokens, yes = jnp.ones((3, 4), jnp.int32), jnp.ones((3, 4), bool)
    candidate = yes.at[:, 3].set(False)
    draft = trees.tree_draft(
        context, tokens, (-1, 0, 1, 1, 3), candidate=candidate, scored=yes, deepest=2
    )
    assert draft.scored[0].tolist() == [True, True, False, False, True]
    assert draft.candidate[0].tolist() == [True, True, False, False, False]
    assert trees.max_depth(draft) == 2
    with pytest.raises(ValueError, match="a candidate has the depth 3"):
        trees.tree_draft(context, tokens, (-1, 0, 1, 1, 3), deepest=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Lookahead(), "vocabulary"),
        (lambda: Lookahead(vocab_size=9, window=0), "at least 1, 2 and 1"),
        (lambda: Lookahead(vocab_size=9, ngram=1), "at least 1, 2 and 1"),
        (lambda: Lookahead(vocab_size=9, ngram=9999), "at most 64 tokens"),
        (lambda: Jacobi(mode="rows"), "whole, blocks, hybrid"),
        (lambda: Jacobi(num_draft=0), "at least 1"),
        (lambda: begun(Lookahead(vocab_size=VOCAB + 1)), "its vocabulary has 12 tokens"),
        (
            lambda: begun(Lookahead(vocab_size=VOCAB, guesses=10**12)),
            r"guesses=10+, ngram=4\) .* bytes, and the devices have .*; give fewer",
        ),
        (
            lambda: begun(Lookahead(vocab_size=VOCAB, window=2000)),
            r"window=2000\): the buffer of the text has .* slots; give a window of at most",
        ),
    ],
)
def test_windows_that_cannot_be_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
