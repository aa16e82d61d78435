"""Rules that share their noise with drafters: one text for all, and a token with exactly the law p.

A text under ``coupled`` has the target's law for three reasons, each shown here: the rule emits the
beginning of one recursion whatever was drafted (by enumeration of all drafts); a token of the
recursion has the law p (by quadrature); and the noise of two positions is independent (the draws of
``test_sampled.py``).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from registry import cases
from toys import bag

import specjax
from specjax import Sampling, trees
from specjax.acceptance import RULES, walk
from specjax.analysis.audit import BigramTarget
from specjax.analysis.exact_law import Table, drafts, target_of
from specjax.analysis.sampled_law import joint_counts
from specjax.drafters import DraftModel
from specjax.sampling.noise import Noise, least

VOCAB, NUM = 13, 12
MODEL, PARAMS = bag(VOCAB, 3, features=8)
CASES = cases(MODEL, PARAMS)
TREE = (-1, 0, 0, 1, 1, 2)
SIZES = (1, 2, 9, 4, 7, 3, 1, 6, 5)
PROMPTS = [np.random.default_rng(i).integers(0, VOCAB, n) for i, n in enumerate(SIZES)]
WARM = np.asarray([0.0, 0.7, 1.0] * 3, np.float32)
KEYS = jax.random.split(jax.random.key(11), len(PROMPTS))


def texts(drafter, weights, rule="coupled", rows=slice(None), tree=None, **settings):
    """What ``rows`` of the prompts say, each with its own key and temperature, and the result."""
    prompts = PROMPTS[rows]
    lengths = np.asarray([len(p) for p in prompts], np.int32)
    tokens = np.stack([np.pad(p, (0, max(lengths) - len(p))) for p in prompts]).astype(np.int32)
    out = specjax.decode(
        MODEL,
        drafter,
        {"target": PARAMS, "drafter": weights},
        tokens,
        lengths,
        key=KEYS[rows],
        max_new_tokens=NUM,
        sampling=Sampling(temperature=WARM[rows]),
        rule=rule,
        **settings,
    )
    ends = np.asarray(out.lengths)
    return [np.asarray(out.tokens)[i, n : ends[i]].tolist() for i, n in enumerate(lengths)], out


@functools.cache
def plain(rule="coupled"):
    return texts(*CASES["plain"][:2], rule)[0]


@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_every_drafter_has_the_text_of_plain_decoding_seed_by_seed(name):
    drafter, weights, _ = CASES[name]
    assert texts(drafter, weights)[0] == plain()


@pytest.mark.parametrize("name", ["plain", "draft", "adaptive eagle3", "tree per row"])
def test_a_row_alone_has_its_text_in_a_batch(name):
    for row in (1, 2):
        said, _ = texts(*CASES[name][:2], rows=slice(row, row + 1))
        assert said == plain()[row : row + 1]


def test_list_coupling_has_one_text_on_chains_and_others_on_trees():
    assert plain("gls") == texts(*CASES["draft"][:2], "gls")[0] == plain()
    assert texts(*CASES["draft tree iid"][:2], "gls")[0] != plain()


def test_a_state_that_was_made_for_another_rule_is_refused():
    drafter, weights, _ = CASES["draft"]
    params = {"target": PARAMS, "drafter": weights}
    given = dict(key=jax.random.key(0), max_new_tokens=4, sampling=Sampling(temperature=1.0))
    begin = functools.partial(specjax.init_state, MODEL, drafter, tokens=[[1, 2]], lengths=[2])
    state = jax.eval_shape(lambda params: begin(params, **given), params)
    for rule in ("coupled", "gls"):
        with pytest.raises(ValueError, match=f"give init_state .or start. rule='{rule}' too"):
            jax.eval_shape(lambda p, s: specjax.step(MODEL, drafter, p, s, rule), params, state)  # noqa: B023
    with pytest.raises(ValueError, match="a static tree, or rule='coupled'"):
        texts(*CASES["draft expanded"][:2], "gls")
    with pytest.raises(ValueError, match="this draft's tree differs by row"):
        texts(*CASES["tree per row"][:2], "gls")


def test_compare_expects_one_text_of_coupled_decoding():
    drafter, weights, _ = CASES["draft"]
    found = specjax.compare(
        specjax.LM.of(MODEL, PARAMS),
        [p.tolist() for p in PROMPTS[:2]],
        drafter=drafter,
        drafter_params=weights,
        drafting=specjax.Drafting(rule="coupled"),
        sampling=Sampling(temperature=1.0),
        max_new_tokens=8,
        repetitions=6,
    )
    assert found.identical is True and "yes, all 16 tokens" in str(found)


# ------------------------------------------------------------------------- the law of one token


def law_of(choose, p, steps=160):
    """The law of ``choose(weights, noise)`` by quadrature over the noise of all tokens but the
    first, whose threshold is found by halving: ``P(first) = E[P(E_first < threshold)]``."""
    law = np.zeros(len(p))
    grid = (np.arange(steps) + 0.5) / steps
    grid = grid**3 * (10 - 15 * grid + 6 * grid**2)  # fine near both ends
    edges = np.linspace(0, 1, steps + 1)
    share = np.diff(edges**3 * (10 - 15 * edges + 6 * edges**2))
    others = np.stack(np.meshgrid(*[grid] * (len(p) - 1), indexing="ij"), axis=-1)
    weight = functools.reduce(np.multiply.outer, [share] * (len(p) - 1)).reshape(-1)
    others = -np.log1p(-others.reshape(-1, len(p) - 1))

    @jax.jit
    def wins(token, first):
        e = jnp.insert(jnp.asarray(others, jnp.float32), token, 0.0, axis=1)
        e = jnp.where(jnp.arange(len(p)) == token, first[:, None], e)
        return choose(jnp.broadcast_to(jnp.asarray(p, jnp.float32), e.shape), e) == token

    for token in range(len(p)):
        low, high = np.full(len(others), 1e-9), np.full(len(others), 60.0)
        for _ in range(40):
            middle = np.sqrt(low * high)
            won = np.asarray(wins(token, jnp.asarray(middle, jnp.float32)))
            low, high = np.where(won, middle, low), np.where(won, high, middle)
        law[token] = (weight * -np.expm1(-low)).sum()
    return law


LAW = np.asarray([0.55, 0.3, 0.15])


def test_the_token_with_the_least_noise_has_the_law_p():
    assert np.abs(law_of(least, LAW) - LAW).max() < 2e-4


def test_fault_noise_that_is_not_exponential():
    def gaps(weights, noise):  # uniforms in the place of exponential variables
        return least(weights, -jnp.expm1(-noise))

    assert np.abs(law_of(gaps, LAW) - LAW).max() > 1e-2


def test_the_noise_is_exponential_also_where_it_is_small():
    rows = 4000
    keys = jax.random.split(jax.random.key(0), rows)
    drawn = np.asarray(Noise(keys=keys).at(jnp.arange(rows), 256)).reshape(-1)
    assert drawn.min() > 0 and np.isfinite(drawn).all()
    for edge in (1e-6, 1e-4, 1e-2, 1.0, 5.0):  # within 5 standard deviations
        share = -np.expm1(-edge)
        spread = np.sqrt(share * (1 - share) / drawn.size)
        assert abs((drawn < edge).mean() - share) < 5 * spread
    few = drawn[drawn < 1e-4]  # not a few multiples of one step, as those of 23 bits would be
    assert len(np.unique(few)) > 0.99 * len(few)


# ---------------------------------------------------- one recursion, whatever was drafted


def recursion(p, noise):
    """The text by the obvious loop, for noise ``[L, V]`` of its L positions."""
    said = ()
    for step in range(len(noise)):
        said += (int(np.argmin(noise[step] / p(said))),)
    return said


def emitted(rule, draft, laws, noise):
    verdict = rule({}, draft, functools.partial(walk.at_node, laws), None, noise)
    path = jnp.take_along_axis(draft.tokens, verdict.path, axis=1)
    return path, verdict.count, verdict.token


@dataclasses.dataclass(frozen=True)
class ByNode(type(RULES["coupled"])):
    """A planted fault: noise by the node instead of the position."""

    def __call__(self, params, draft, target_law, draft_law, key):
        def say(node):
            p = target_law(node)
            return least(p, key.at(draft.start + 1 + node, p.shape[-1]))

        return walk.verdict(draft, *walk.follow(draft, say))


def begins_the_recursion(rule, seeds=12):
    """Whether ``rule`` emits on ALL drafts over TREE the beginning of the recursion's text."""
    p = Table(0)
    draft, _ = drafts(Table(100), TREE, "iid")
    laws, rows = target_of(p, draft)[1], len(draft.tokens)
    judge = jax.jit(emitted, static_argnums=0)
    for seed in range(seeds):
        key = jax.random.key(seed)
        noise = Noise(keys=jnp.broadcast_to(key, (rows,)))
        first = jnp.zeros((rows,), jnp.int32)
        values = [np.asarray(noise.at(first + 1 + step, 3))[0] for step in range(3)]
        text = recursion(p, values)
        path, count, token = jax.device_get(judge(rule, draft, jnp.asarray(laws), noise))
        for row in range(rows):
            said = (*path[row, 1 : count[row] + 1].tolist(), int(token[row]))
            if said != text[: len(said)]:
                return False
    return True


def test_on_every_draft_the_rule_emits_the_beginning_of_one_text():
    assert begins_the_recursion(RULES["coupled"])


def test_fault_noise_by_the_node_gives_a_text_that_depends_on_the_draft():
    assert not begins_the_recursion(ByNode())


def test_fault_noise_by_the_round_gives_other_drafters_another_text(monkeypatch):
    drafter, weights, _ = CASES["draft one"]
    before = plain()
    monkeypatch.setattr(
        specjax.decoding.round,
        "shared_noise",
        lambda state: Noise(keys=specjax.decoding.round.round_keys(state, 0)),
    )
    assert texts(drafter, dict(weights), capacity=40)[0] != before


# -------------------------------------------------------------------------- how much is kept

ROWS, P, Q = 20_000, np.asarray([0.5, 0.3, 0.15, 0.05]), np.asarray([0.3, 0.4, 0.1, 0.2])
OVERLAP = np.minimum(P, Q).sum()  # 1 - TV


@dataclasses.dataclass(frozen=True)
class OtherNoise(DraftModel):
    """A planted fault: a drafter with noise of its own."""

    def draft_step(self, params, target_params, state, context):
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(context.noise.keys, 1)
        noise = dataclasses.replace(context.noise, keys=keys)
        return super().draft_step(
            params, target_params, state, dataclasses.replace(context, noise=noise)
        )


def kept(rule, siblings, drafter=DraftModel, sibling_sampling="distinct"):
    """Share of rounds in which one of so many siblings is kept, where all laws are P and Q."""
    target = BigramTarget(len(P))
    made = drafter(
        model=target,
        topology=trees.Tree((-1, *(0,) * siblings)),
        sibling_sampling=sibling_sampling,
    )
    params = {"target": jnp.log(jnp.tile(P, (4, 1))), "drafter": jnp.log(jnp.tile(Q, (4, 1)))}
    warm = Sampling(temperature=1.0)
    stats = joint_counts(target, made, rule, params, (1,), 1, warm, rows=ROWS, rounds=1)[1]
    return float(np.asarray(stats.accepted).mean())


SPREAD = 5 * 0.5 / np.sqrt(ROWS)  # five standard deviations at most


def test_a_coupled_chain_keeps_what_the_bounds_say():
    share = kept("coupled", 1)
    # the chance of both least tokens being x, for each x (Daliri et al., section 3)
    exact = sum(1 / np.maximum(P / P[x], Q / Q[x]).sum() for x in range(len(P)))
    assert abs(share - exact) < SPREAD
    assert OVERLAP / (2 - OVERLAP) - SPREAD < share < OVERLAP + SPREAD


def test_fault_a_drafter_with_noise_of_its_own_keeps_less_than_the_bound():
    share = kept("coupled", 1, OtherNoise)
    assert abs(share - (P * Q).sum()) < SPREAD and share < OVERLAP / (2 - OVERLAP) - SPREAD


def test_more_siblings_keep_more_and_paths_of_their_own_what_list_matching_promises():
    shares = [kept("coupled", siblings) for siblings in (1, 2, 3)]
    assert min(np.diff(shares)) > SPREAD
    for siblings, coupled in zip((2, 3), shares[1:], strict=True):
        listed = kept("gls", siblings)
        promised = sum(
            siblings / (np.maximum(P / P[x], Q / Q[x]).sum() + (siblings - 1) / P[x])
            for x in range(len(P))
        )
        assert promised - SPREAD < listed < coupled - SPREAD
