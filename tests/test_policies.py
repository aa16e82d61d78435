"""Draft-length policies: their names, and lengths that follow laws and texts but no drawn token."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asking import prepared
from ragged import MODEL, PARAMS, PROMPTS, new_tokens
from test_draft_length import decode
from toys import bag, context, like, unseen

import specjax
from specjax import Sampling, drafters, trees
from specjax.analysis import sampled_law
from specjax.cli.options import drafts
from specjax.drafters import (
    POLICIES,
    Adaptive,
    DraftModel,
    ExLlama,
    HuggingFace,
    NGram,
    SuffixMatch,
)
from specjax.drafters.draft_length import named_policy
from specjax.text import auto_number, round_costs
from specjax.types import Confidence, DrafterWrapper

pytest_plugins = ["pairs"]

# ------------------------------------------------------- a token that is looked at and then dropped

COIN = np.log(np.asarray([0.7, 0.3], np.float32))
ROWS = 20_000


class Coin(specjax.Target):
    """Two tokens, whose law is the same after every text: the weights are its logits."""

    vocab_size = 2

    def init(self, params, batch, capacity, inputs=None):
        return jnp.zeros((batch, 1, capacity, 1))

    def verify(self, params, cache, draft, *, features=(), since=0, entries=None, logits=True):
        shape = (len(cache), draft.num_nodes)
        said = jnp.broadcast_to(params, (*shape, 2))[:, since:] if logits else None
        return specjax.Scores(
            logits=said, features=None, entries=jnp.zeros((len(cache), 1, shape[1], 1))
        )

    def commit(self, cache, entries, start, verdict):
        return specjax.kv_cache.commit(cache, entries, start, verdict)


@dataclasses.dataclass(frozen=True)
class Anticipating(DrafterWrapper):
    """A fault: drafts one token fewer where the last token drawn is one that it does not trust."""

    def draft_step(self, params, target_params, state, context):
        draft, state = self.inner.draft_step(params, target_params, state, context)
        length = jnp.where(draft.tokens[:, 1] == 1, 0, 1)
        return trees.limit_depth(draft, length), state


def shares(drafter, weights, rule="rejection"):
    """The shares of the two first tokens in ``ROWS`` texts, and what the law (.7, .3) says."""
    params = {"target": COIN, "drafter": weights}
    counts, _ = sampled_law.joint_counts(
        Coin(), drafter, rule, params, (0,), 1, Sampling(temperature=1.0), rows=ROWS
    )
    return counts / counts.sum(), sampled_law.judge(counts, np.exp(COIN).astype(float))


UNIFORM, FLIPS = np.zeros(2, np.float32), DraftModel(num_draft=1, model=Coin())


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_fault_a_length_that_looks_at_the_token_it_drops_turns_7_3_into_85_15(rule):
    found, evidence = shares(Anticipating(FLIPS), UNIFORM, rule)
    np.testing.assert_allclose(found, [0.85, 0.15], atol=0.015)
    assert not evidence.fits(1e-7) and evidence.least(1e-7) > 0.1


@pytest.mark.parametrize("threshold", [0.4, 0.6])
def test_a_length_that_looks_at_the_law_leaves_7_3_as_it_is(threshold):
    """The law (1/2, 1/2) is below 0.6 and not below 0.4, whatever is drawn from it."""
    drafter = Adaptive(FLIPS, ExLlama(threshold=threshold))
    found, evidence = shares(drafter, {"inner": UNIFORM})
    assert evidence.fits(1e-7), found


def test_fault_such_a_length_is_named_by_the_check_for_authors():
    params = {"target": COIN, "drafter": UNIFORM}
    report = specjax.check_drafter(Coin(), Anticipating(FLIPS), params)
    assert [check.name for check in report.checks if not check.passed] == [
        "drawn tokens follow the laws that the draft states"
    ]


# ----------------------------------------------------------------------- the threshold of a law

TOY, TOY_PARAMS = bag(5, 3)
OTHER = like(TOY_PARAMS, 1)
ROOTS = jnp.arange(40, dtype=jnp.int32)[:, None] % 5


def drafted(drafter, **settings):
    """One draft after each of several roots."""
    rows = dataclasses.replace(context(len(ROOTS)), tokens=ROOTS, **settings)
    state = drafter.init(OTHER, TOY_PARAMS, len(ROOTS), 9)
    return drafter.draft_step(OTHER, TOY_PARAMS, state, rows)[0]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("shape", [trees.chain(4), trees.Tree((-1, 0, 0, 1, 1, 2, 3))], ids=str)
def test_a_draft_ends_where_its_laws_fall_below_the_threshold(shape):
    """Node by node from the laws that the whole draft states, which at temperature 1 are the
    drafter's softmax."""
    drafter = DraftModel(model=TOY, topology=shape)
    thresholds = [
        Confidence(least, along=along, keeps_last=keeps)
        for least, along, keeps in (
            (0.6, "token", True),
            (0.6, "token", False),
            (0.3, "path", False),
            (0.3, "path", True),
        )
    ]
    one = jax.jit(lambda: [drafted(drafter, confidence=c) for c in (None, *thresholds)])
    full, *cut = one()
    above = np.broadcast_to(np.asarray(trees.parents(full)), full.tokens.shape)
    top = np.asarray(full.laws).max(axis=2)
    seen = set()
    for sure, draft in zip(thresholds, cut, strict=True):
        for row in range(len(ROOTS)):
            going, path, kept = {0: True}, {0: 1.0}, [True]
            for node in range(1, full.num_nodes):
                parent = above[row, node]
                c = float(top[row, full.law[row, node]])
                path[node] = path[parent] * c
                on = (path[node] if sure.along == "path" else c) >= sure.least
                kept.append(bool(going[parent] and (on or sure.keeps_last)))
                going[node] = going[parent] and on
            assert np.asarray(draft.candidate)[row].tolist() == kept
            assert np.asarray(draft.scored)[row].tolist() == kept
            assert (np.asarray(draft.tokens == full.tokens)[row] | ~np.asarray(kept)).all()
            seen.add(sum(kept))
    assert len(seen) > 3  # lengths differ


class Counting(type(MODEL)):
    """A model that counts its passes where nothing is traced."""

    passes = 0

    def verify(self, params, cache, draft, **settings):
        if not isinstance(draft.tokens, jax.core.Tracer):
            type(self).passes += 1
        return super().verify(params, cache, draft, **settings)


@pytest.mark.parametrize(
    ("sure", "passes"), [(None, 4), (Confidence(0.0), 4), (Confidence(1.0), 1)], ids=str
)
def test_passes_that_no_row_wants_are_left_out(sure, passes, monkeypatch):
    monkeypatch.setattr(Counting, "passes", 0)
    with jax.disable_jit():
        drafted(DraftModel(num_draft=4, model=Counting(5)), confidence=sure)
    assert Counting.passes == passes


def test_a_tree_that_grows_stops_in_rows_without_a_sure_node():
    shape = trees.Expand(2, 3, 6)
    drafter = DraftModel(model=TOY, topology=shape)
    depth = {}
    for least in (0.0, 0.6, 1.0):
        draft = jax.jit(lambda c=Confidence(least): drafted(drafter, confidence=c))()
        depth[least] = np.asarray(jnp.max(jnp.where(draft.scored, trees.depths(draft), 0), axis=1))
    assert (depth[0.0] == 3).all() and (depth[1.0] == 1).all()
    assert len(np.unique(depth[0.6])) > 1


# ----------------------------------------------------------------------- the length of a match


@pytest.mark.parametrize(("factor", "offset"), [(1.0, 0.0), (0.5, 1.0), (2.0, -1.0)])
def test_the_length_follows_the_longest_end_of_the_text_that_stands_earlier(factor, offset):
    random = np.random.default_rng(0)
    tokens, length = random.integers(0, 3, (30, 40)), random.integers(1, 41, 30)
    tokens[:5] = 1
    policy, depth = SuffixMatch(factor=factor, offset=offset), 7
    found = jax.jit(policy.limit, static_argnums=2)(jnp.asarray(tokens), jnp.asarray(length), depth)
    wanted = []
    for row, size in zip(tokens, length, strict=True):
        text = row[:size].tolist()
        ends = [
            m for m in range(1, size) for at in range(size - m) if text[at : at + m] == text[-m:]
        ]
        wanted.append(min(max(int(np.floor(factor * max(ends, default=0) + offset)), 0), depth))
    assert np.asarray(found).tolist() == wanted and len({*wanted}) > 3


def test_rows_draft_as_deep_as_their_own_match_and_not_further():
    """One row repeats itself and one does not; the pass is as wide as the longer draft."""
    drafter = Adaptive(DraftModel(num_draft=3, model=TOY), SuffixMatch(min_probability=0.0))
    tokens = jnp.asarray([[1, 2, 3, 1, 2, 3], [0, 1, 2, 3, 4, 3]])
    rows = dataclasses.replace(context(2), tokens=tokens, length=jnp.asarray([6, 5]))
    params = {"inner": OTHER}
    state = drafter.init(params, TOY_PARAMS, 2, 9)
    draft, state = jax.jit(drafter.draft_step)(params, TOY_PARAMS, state, rows)
    assert np.asarray(draft.scored).sum(axis=1).tolist() == [4, 1]


# ------------------------------------------------------------------------------------ the loop


@pytest.mark.usefixtures("one_trace")
def test_other_texts_and_lengths_trace_nothing():
    """A policy with a limit, a threshold and a memory of its own is one program."""

    @dataclasses.dataclass(frozen=True)
    class Everything(HuggingFace):
        def limit(self, tokens, length, depth):
            return SuffixMatch(offset=1.0).limit(tokens, length, depth)

    drafter = Adaptive(
        DraftModel(num_draft=3, model=unseen(MODEL)), Everything(start=1, threshold=0.5)
    )
    seen, texts = set(), []
    for weights in (PARAMS, like(PARAMS, 1), like(PARAMS, 2)):
        out = decode(drafter, {"inner": weights})
        seen.add(tuple(out.stats.rounds_by_width.tolist()))
        texts.append(new_tokens(out, PROMPTS))
    assert len(seen) == 3 and all((np.asarray(rounds) > 0).sum() > 1 for rounds in seen)
    assert texts[0] == texts[1] == texts[2]


def test_costs_that_no_one_reads_are_not_measured(pair, monkeypatch):
    monkeypatch.setattr(round_costs, "_measured", lambda *_: pytest.fail("measured"))
    work = prepared(
        pair[0], "def f(x):", drafter="ngram", num_draft="auto:exllama:probe=8", max_new_tokens=8
    )
    assert work.drafter == Adaptive(NGram(num_draft=7), ExLlama(probe=8))
    assert "as exllama wants" in work.words
    with pytest.raises(pytest.fail.Exception):
        prepared(pair[0], "def f(x):", drafter="ngram", num_draft="auto", max_new_tokens=8)


# ----------------------------------------------------------------------------------- the names


def test_every_policy_is_known_by_its_name_in_python_and_on_the_command_line():
    assert {"goodput", "huggingface", "exllama", "suffix"} <= {*POLICIES}
    for name, kind in POLICIES.items():
        assert named_policy(name) == kind() and kind.name == name
        assert Adaptive(NGram(num_draft=3), name) == Adaptive(NGram(num_draft=3), kind())
        assert drafts(f"auto:{name}") == f"auto:{name}"
        assert auto_number.auto_policy(f"auto:{name}") == kind()
    assert auto_number.auto_policy("auto") == drafters.Goodput()
    given = "huggingface:start=5,schedule=constant,threshold=0.5"
    assert named_policy(given) == HuggingFace(start=5, schedule="constant", threshold=0.5)
    assert named_policy("suffix:offset=2") == SuffixMatch(offset=2.0)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Adaptive(NGram(), "exlama"), ValueError, "did you mean 'exllama'.*known: goodput"),
        (lambda: Adaptive(NGram(), "exllama:stop=1"), ValueError, "settings.*skip \\(float\\)"),
        (lambda: Adaptive(NGram(), 3), TypeError, "policy=3"),
        (lambda: auto_number.auto_policy("auto:often"), ValueError, "num='auto:often'"),
        (lambda: auto_number.auto_policy("auto:"), ValueError, "num='auto:'.*give 'auto'"),
        (lambda: drafts("auto:often"), Exception, "'often' is unknown"),
        (lambda: HuggingFace(threshold=2.0), ValueError, "least=2.0"),
        (lambda: HuggingFace(schedule="often"), ValueError, "'heuristic' or 'constant'"),
        (lambda: ExLlama(threshold=-1.0), ValueError, "least=-1.0"),
        (lambda: SuffixMatch(factor=0.0), ValueError, "above 0"),
        (lambda: SuffixMatch(factor=math.nan), ValueError, "factor=nan.*finite"),
        (lambda: SuffixMatch(offset=-math.inf), ValueError, "offset=-inf.*finite"),
        (lambda: ExLlama(up=math.inf), ValueError, "up=inf.*finite"),
        (lambda: drafters.Goodput(prior_tries=math.inf), ValueError, "prior_tries=inf.*finite"),
        (lambda: drafters.Goodput(min_gain=math.nan), ValueError, "min_gain=nan.*finite"),
        (lambda: drafters.Goodput(min_gain=1e300), ValueError, "min_gain=1e.300.*finite"),
        (lambda: drafters.Goodput(fade_rounds=math.inf), ValueError, "fade_rounds=inf.*finite"),
        (lambda: named_policy("goodput:probe_share=inf"), ValueError, "probe_share=inf.*finite"),
        (lambda: named_policy("schedule:min_gain=inf"), ValueError, "Schedule.min_gain=inf.*fin"),
        (lambda: named_policy("goodput:max_pause=9999999999"), ValueError, "max_pause=9.*fewer"),
        (lambda: ExLlama(skip=math.nan), ValueError, "skip=nan.*finite"),
        (lambda: ExLlama(probe=2**40), ValueError, "probe=1099511627776.*fewer"),
        (lambda: Confidence(0.5, along="tree"), ValueError, "'token' or 'path'"),
    ],
)
def test_what_names_no_policy_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_policy_from_outside_is_registered_by_one_line(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Two(HuggingFace):
        start: int = 2
        name = "two"

    monkeypatch.setitem(POLICIES, Two.name, Two)
    assert named_policy("two:threshold=0.0") == Two(threshold=0.0)
    assert drafts("auto:two") == "auto:two"
