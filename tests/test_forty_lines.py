"""One round in forty lines: the page's code has the target's law, and is that of the rule."""

import itertools

import numpy as np
import pytest
from test_docs import PAGES, fences


class Branches:
    """In the place of a random generator: follows given choices, and notes how likely they were."""

    def __init__(self, choices):
        self.choices, self.taken, self.weight = list(choices), [], 1.0

    def choice(self, size, p):
        """The next given choice, or else the first possible one; others are left for later."""
        index = len(self.taken)
        taken = (
            self.choices[index] if index < len(self.choices) else int(np.argmax(np.array(p) > 0))
        )
        self.taken.append((taken, [i for i in range(size) if p[i] > 0]))
        self.weight *= p[taken]
        return taken


def every_outcome(run):
    """``(result, probability)`` for each way that the choices of ``run(rng)`` can fall."""
    open_paths = [[]]
    while open_paths:
        path = open_paths.pop()
        rng = Branches(path)
        yield run(rng), rng.weight
        said = [taken for taken, _ in rng.taken]
        for index in range(len(path), len(said)):
            for other in rng.taken[index][1]:
                if other != said[index]:
                    open_paths.append([*said[:index], other])


@pytest.fixture(scope="module")
def speculate():
    """The function that the page prints."""
    names = {}
    exec(fences(PAGES["docs/concepts/forty_lines.md"], "python")[0], names)
    return names["speculate"]


@pytest.fixture(scope="module")
def tables():
    """Laws of a target and a drafter over three tokens, one row for each token before."""
    random = np.random.default_rng(3)
    return random.dirichlet(np.ones(3), size=3), random.dirichlet(np.ones(3), size=3)


def test_forty_lines_are_forty():
    first = fences(PAGES["docs/concepts/forty_lines.md"], "python")[0]
    assert len(first.splitlines()) <= 42
    assert "One round in forty lines" in PAGES["docs/concepts/forty_lines.md"]


@pytest.mark.parametrize("num_draft", [0, 1, 2, 3])
def test_the_forty_lines_have_the_targets_law_exactly(speculate, tables, num_draft):
    p, q = tables

    def run(rng):
        return tuple(speculate(lambda t: p[t[-1]], lambda t: q[t[-1]], [0], 2, num_draft, rng)[1:])

    law = np.zeros((3, 3))
    for tokens, weight in every_outcome(run):
        law[tokens] += weight
    np.testing.assert_allclose(law, p[0][:, None] * p, atol=1e-12)


def test_a_fault_in_the_forty_lines_is_seen(tables):
    source = fences(PAGES["docs/concepts/forty_lines.md"], "python")[0]
    assert "np.maximum(p[count] - q[count], 0)" in source
    names = {}
    exec(source.replace("np.maximum(p[count] - q[count], 0)", "p[count]"), names)
    p, q = tables
    law = np.zeros(3)
    for tokens, weight in every_outcome(
        lambda rng: names["speculate"](lambda t: p[t[-1]], lambda t: q[t[-1]], [0], 1, 1, rng)
    ):
        law[tokens[1]] += weight
    assert np.abs(law - p[0]).max() > 1e-2


def test_one_round_of_the_forty_lines_is_one_of_the_rule_rejection(speculate, tables):
    from specjax.acceptance import RULES
    from specjax.analysis import exact_law
    from specjax.trees import chain_parents

    p_table, q_table = tables
    size = 2

    def table(rows):
        law = exact_law.Table(vocab=3)
        for length in range(size + 2):
            for prefix in itertools.product(range(3), repeat=length):
                law.laws[prefix] = rows[(0, *prefix)[-1]]
        return law

    draft, weights = exact_law.drafts(table(q_table), chain_parents(size), "iid")
    law, accepted = exact_law.outcome(
        RULES["rejection"], draft, weights, table(p_table), depth=size
    )

    def one_round(rng):
        # one token more than the prompt is asked for, so that exactly one round is run
        said = speculate(lambda t: p_table[t[-1]], lambda t: q_table[t[-1]], [0], 1, size, rng)
        kept = [choice for choice, among in rng.taken[size:-1]]
        return tuple(said), sum(kept)

    found, expected = np.zeros(3), 0.0
    for (said, kept), weight in every_outcome(one_round):
        found[said[1]] += weight
        expected += weight * kept
    np.testing.assert_allclose(law.sum(axis=tuple(range(1, law.ndim))), found, atol=1e-6)
    np.testing.assert_allclose(accepted, expected, atol=1e-5)


def test_the_forty_lines_and_decode_have_one_law(speculate):
    import jax
    import jax.numpy as jnp
    import toys

    import specjax
    from specjax.decoding import reference

    model, weights = toys.bag(3, seed=0)
    other = toys.like(weights, seed=1)
    sampling, rows = specjax.Sampling(temperature=1.0), 8192

    def law_of(params):
        laws = {}

        def law(tokens):
            if tuple(tokens) not in laws:
                p = reference.next_law(model, params, np.asarray([tokens]), sampling)[0]
                laws[tuple(tokens)] = p.astype(np.float64) / p.sum(dtype=np.float64)
            return laws[tuple(tokens)]

        return law

    p, q = law_of(weights), law_of(other)
    exact = np.zeros((3, 3))
    for tokens, weight in every_outcome(lambda rng: speculate(p, q, [0], 2, 2, rng)):
        exact[tuple(tokens[1:])] += weight
    np.testing.assert_allclose(
        exact, reference.joint_law(model, weights, [0], 2, sampling), atol=1e-5
    )
    out = specjax.decode(
        model,
        specjax.drafters.DraftModel(2, model=model),
        {"target": weights, "drafter": other},
        jnp.zeros((rows, 1), jnp.int32),
        jnp.ones((rows,), jnp.int32),
        key=jax.random.key(0),
        max_new_tokens=5,
        sampling=sampling,
    )
    counts = np.zeros((3, 3))
    np.add.at(counts, tuple(np.asarray(out.tokens[:, 1:3]).T), 1)
    assert 0.5 * np.abs(counts / rows - exact).sum() < 0.02  # 0.012 is the 99.9th percentile
    assert 1.1 < float(out.stats.tau) < 3
