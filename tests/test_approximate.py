"""Approximate rules: what each setting admits, exact at the strictest, and never less for more."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from registry import cases
from toys import bag, context

import specjax
from specjax import Sampling, acceptance, trees
from specjax.acceptance import RULES
from specjax.acceptance.lenience import Lenient
from specjax.acceptance.threshold import Threshold
from specjax.acceptance.tolerance import Tolerance
from specjax.acceptance.top_k import TopK
from specjax.acceptance.typical import Typical
from specjax.analysis.exact_law import Table, distance, drafts, outcome, prefixes
from specjax.decoding import reference

ROWS, NODES, VOCAB = 300, 9, 5
CHAIN, TREE = (-1, 0, 1, 2), (-1, 0, 0, 1, 1, 2)
# from the strictest setting to the widest
WIDER = {
    "tolerance by rank": [Tolerance(top_k=k, gap=9.0) for k in (1, 2, 3, 5)],
    "tolerance by gap": [Tolerance(top_k=9, gap=g) for g in (0.0, 0.4, 1.0, 3.0)],
    "top-k": [TopK(k=k) for k in (1, 2, 3, 5)],
    "distance": [TopK(k=1, distance=d) for d in (0, 1, 2, 4)],
    "block": [TopK(k=1, block=b) for b in (1, 2, 3, 9)],
    "threshold": [Threshold(loss=t) for t in (0.0, 1.2, 2.0, 9.0)],
}


class Logits:
    """A target's law over given logits ``[B, N, V]``."""

    def __init__(self, logits):
        self.logits = logits

    def adjusted(self):
        return self.logits


@functools.cache
def instances():
    """Random trees of random tokens, each row its own, with logits: ``(draft, tokens, parent)``."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, (ROWS, NODES))
    parent = np.stack(
        [[-1, *(random.integers(0, n) for n in range(1, NODES))] for _ in range(ROWS)]
    )
    logits = random.normal(size=(ROWS, NODES, VOCAB)).astype(np.float32)
    draft = trees.tree_draft(context(ROWS), jnp.asarray(tokens[:, 1:]), jnp.asarray(parent))
    tokens[:, 0] = 0
    return draft, tokens, parent, logits


@functools.partial(jax.jit, static_argnums=0)
def verdict_of(rule, draft, logits):
    verdict = rule({}, draft, Logits(logits), None, None)
    last = jnp.take_along_axis(verdict.path, verdict.count[:, None], axis=1)[:, 0]
    return last, verdict.count, verdict.token


def judged(rule):
    draft, _, _, logits = instances()
    return tuple(np.asarray(x) for x in verdict_of(rule, draft, logits))


def admits(rule, row, token, depth):
    """The obvious way: whether the token may follow where the logits are ``row``."""
    order = np.argsort(-row, kind="stable").tolist()
    if token == order[0]:
        return True
    if isinstance(rule, Tolerance):
        return order.index(token) < rule.top_k and row[order[0]] - row[token] <= rule.gap
    if isinstance(rule, Threshold):
        return np.log(np.exp(row).sum()) - row[token] <= rule.loss
    near = abs(token - order[0]) <= rule.distance
    return order.index(token) < rule.k or near or depth < rule.block


def obvious(rule):
    """What the rule should keep and say, row by row."""
    _, tokens, parent, logits = instances()
    for tokens, parent, logits in zip(tokens, parent, logits, strict=True):  # noqa: B020
        depth = [len(path) for path in prefixes(tokens, parent)]
        paths = {0: 0.0}
        for node in range(1, NODES):
            row, above = logits[parent[node]], parent[node]
            if above in paths and admits(rule, row, tokens[node], depth[node]):
                paths[node] = paths[above] + row[tokens[node]] - row.max()
        node = max(paths, key=lambda n: (depth[n], round(float(paths[n]), 4), -n))  # noqa: B023
        yield node, depth[node], int(np.argmax(logits[node]))


MIDDLE = [rules[2] for rules in WIDER.values()]


@pytest.mark.parametrize("rule", MIDDLE, ids=WIDER)
def test_a_relaxed_rule_keeps_what_the_obvious_way_keeps(rule):
    assert list(zip(*judged(rule), strict=True)) == list(obvious(rule))


@pytest.mark.parametrize("rules", WIDER.values(), ids=WIDER)
def test_the_strictest_setting_is_greedy_and_a_wider_one_keeps_no_less(rules):
    greedy = judged(RULES["greedy"])
    found = [judged(rule) for rule in rules]
    assert [(a == b).all() for a, b in zip(found[0], greedy, strict=True)] == [True] * 3
    kept = np.asarray([count for _, count, _ in found])
    assert (np.diff(kept, axis=0) >= 0).all() and (np.diff(kept.mean(axis=1)) > 0.02).all()
    assert [rule.strictest for rule in rules] == [True, False, False, False]
    draft = instances()[0]
    assert acceptance.choose(rules[0], draft, greedy=True) is RULES["greedy"]
    assert acceptance.choose(rules[1], draft, greedy=True) is rules[1]


@dataclasses.dataclass(frozen=True)
class OneRankMore(Tolerance):
    """A planted fault: the best token is counted as none of the ``top_k``."""

    def passes(self, draft, found):
        return (found.rank <= self.top_k) & (found.gap <= self.gap)


def test_fault_a_rank_that_is_off_by_one():
    rule = OneRankMore(top_k=2, gap=9.0)
    assert list(zip(*judged(rule), strict=True)) != list(obvious(rule))


@dataclasses.dataclass(frozen=True)
class OwnRow(Threshold):
    """A planted fault: a token is judged by the scores after itself."""

    def __call__(self, params, draft, target_law, draft_law, key):
        shifted = jnp.roll(target_law.adjusted(), -1, axis=1)
        return super().__call__(params, draft, Logits(shifted), draft_law, key)


def test_fault_a_token_judged_by_another_nodes_scores():
    rule = OwnRow(loss=1.5)
    assert list(zip(*judged(rule), strict=True)) != list(obvious(rule))


# ---------------------------------------------------------------------------------- typical


class Laws(Logits):
    """The law after a node, too."""

    def __call__(self, node):
        rows = jnp.take_along_axis(self.logits, node[:, None, None], axis=1)[:, 0]
        return jax.nn.softmax(rows)


@functools.partial(jax.jit, static_argnums=0)
def typical_count(rule, draft, logits):
    return rule({}, draft, Laws(logits), None, None).count


@pytest.mark.parametrize("name", ["epsilon", "delta"])
def test_typical_acceptance_keeps_no_less_at_a_lower_threshold(name):
    strictest = Typical(epsilon=1.0, delta=1e9)  # no probability is above 1
    found = [strictest] + [dataclasses.replace(strictest, **{name: x}) for x in (0.5, 0.2, 0.02)]
    draft, _, _, logits = instances()
    kept = np.asarray([typical_count(rule, draft, logits) for rule in found])
    assert (kept[0] == 0).all()
    assert (np.diff(kept, axis=0) >= 0).all() and (np.diff(kept.mean(axis=1)) > 0.02).all()


# --------------------------------------------------------------------------------- lenience


def lenient(rule, topology, seed, draws="iid"):
    p, q = Table(seed), Table(seed + 100)
    draft, weights = drafts(q, topology, draws)
    law, accepted = outcome(rule, draft, weights, p, trees.max_depth(draft))
    return law, accepted, p


@pytest.mark.parametrize(("topology", "draws"), [(CHAIN, "iid"), (TREE, "distinct")])
def test_lenience_of_one_is_rejection_and_less_keeps_more(topology, draws):
    law, kept, p = lenient(Lenient(scale=1.0), topology, 0, draws)
    assert distance(law, p) < 1e-6
    assert kept == lenient(RULES["rejection"], topology, 0, draws)[1]
    more = [kept] + [lenient(Lenient(scale=s), topology, 0, draws)[1] for s in (0.7, 0.3)]
    assert more[0] + 0.02 < more[1] < more[2] - 0.02


def off(rule, scale):
    """How far the first token's law is from the closed form, the greatest of many laws."""
    found = []
    for seed in range(8):
        law, _, p = lenient(rule, (-1, 0), seed)
        p, q = p(()), Table(seed + 100)(())
        kept = np.minimum(q, p / scale)
        left = np.maximum(p - q, 0)
        wanted = kept + (1 - kept.sum()) * left / left.sum()
        assert (wanted <= p / scale + 1e-9).all() and 0.5 * np.abs(wanted - p).sum() > 1e-3
        found.append(np.abs(law.sum(axis=1) - wanted).max())
    return max(found)


@dataclasses.dataclass(frozen=True)
class FromAllOfP(Lenient):
    """A planted fault: after a rejection it draws from p."""

    def __call__(self, params, draft, target_law, draft_law, key):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("specjax.acceptance.rejection.residual", lambda p, q: p)
            return super().__call__(params, draft, target_law, draft_law, key)


def test_lenience_has_the_law_of_its_closed_form():
    assert off(Lenient(scale=0.6), 0.6) < 1e-6


def test_fault_lenience_that_draws_from_all_of_p():
    assert off(FromAllOfP(scale=0.6), 0.6) > 1e-3


# ---------------------------------------------------------------------------------- the loop

MODEL, PARAMS = bag(13, 3, features=8)
NAME = "draft tree iid"


def text(rule, temperature=0.0, num=24):
    drafter, weights, _ = cases(MODEL, PARAMS)[NAME]
    out = specjax.decode(
        MODEL,
        drafter,
        {"target": PARAMS, "drafter": weights},
        np.asarray([[1, 2, 3]] * 4, np.int32) + np.arange(4, dtype=np.int32)[:, None],
        np.full(4, 3, np.int32),
        key=jax.random.key(0),
        max_new_tokens=num,
        sampling=Sampling(temperature=temperature),
        rule=rule,
    )
    return np.asarray(out.tokens)[:, : 3 + num], out.stats


@pytest.mark.parametrize("rule", ["approximate-tolerance:top_k=3,gap=1.5", "approximate-top-k"])
def test_every_token_of_a_relaxed_text_is_within_the_bounds_by_its_own_row(rule):
    tokens, stats = text(rule)
    rule = acceptance.named(rule)
    logits = np.asarray(reference.logits(MODEL, PARAMS, jnp.asarray(tokens)))[:, 2:-1]
    said = tokens[:, 3:]
    own = np.take_along_axis(logits, said[:, :, None], axis=2)
    rank = (logits > own + 1e-5).sum(axis=2)
    gap = logits.max(axis=2) - own[:, :, 0]
    top_k, most = (rule.top_k, rule.gap) if isinstance(rule, Tolerance) else (rule.k, np.inf)
    assert 0 < rank.max() < top_k and gap.max() <= most + 1e-5
    assert stats.approximate == f"rule {rule.name}" and "approximate" in rule.name
    strict, plain = text("approximate-top-k:k=1")[1], text("greedy")[0]
    assert strict.approximate == "" and (tokens != plain).any()


def test_typical_acceptance_at_the_strictest_setting_writes_greedy_text_at_every_temperature():
    """Of a probability above a half there is one, the most likely token's."""
    tokens, _ = text("approximate-typical:epsilon=0.5,delta=1e9", temperature=1.0)
    assert (tokens == text("greedy")[0]).all()


def test_settings_after_the_name_of_a_rule():
    assert acceptance.named("approximate-tolerance:top_k=3,gap=1.5") == Tolerance(top_k=3, gap=1.5)
    assert acceptance.named("approximate-lenience:scale=1") == Lenient(scale=1.0)
    for given, words in (
        ("approximate-top-k:n=3", "its settings, .*: k .int., distance .int., block .int."),
        ("approximate-top-k:k=x", "k='x' is not a whole number"),
        ("approximate-lenience:scale=0", r"scale must be in \(0, 1\]"),
        ("approximate-threshold:loss=-1", "loss must be at least 0"),
        ("approximate-tolerance:gap=nan", "gap at least 0"),
        ("delta:u=1", "each once: none"),
        ("nonsense:k=1", "is unknown: known are auto"),
    ):
        with pytest.raises(ValueError, match=words):
            acceptance.named(given)
