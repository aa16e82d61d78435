"""Tests whether samples follow a law: a chi-squared test, and bounds of the deviation."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from ..acceptance import walk
from ..acceptance.node_laws import DraftLaw
from ..decoding import loop, prefill
from ..decoding.inputs import prepare_inputs
from ..sampling.distribution import Sampling
from . import exact_law

LEAST_EXPECTED = 5  # the least expectation of a cell; rarer outcomes share one cell


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The comparison of counts with a law.

    Attributes:
      samples: the number of samples.
      variation: total variation between the shares of the counts and the law, including noise.
      bound: the expected variation of noise alone, plus five standard deviations.
      p_value: the p-value of the chi-squared test; 0 if an outcome of probability 0 was drawn.
      cells: the number of cells of the chi-squared test.
      impossible: the number of samples with probability 0 under the law.
      noise: an upper bound of the expected variation of samples that follow the law.
    """

    samples: int
    variation: float
    bound: float
    p_value: float
    cells: int
    impossible: int
    noise: float
    pooled: float

    def fits(self, false_alarm: float) -> bool:
        """Returns whether the chi-squared test accepts the law at a false-alarm rate."""
        return self.p_value > false_alarm

    def least(self, doubt: float) -> float:
        """Returns a lower bound of the total variation between the true law and the tested one.

        The bound is the variation of the sample, minus the expected noise, minus McDiarmid's bound
        of the deviation of the noise.

        Args:
          doubt: the probability with which the bound may be wrong.
        """
        spread = np.sqrt(np.log(1 / doubt) / (2 * self.samples))
        least = max(self.variation - self.noise - spread, self.impossible / self.samples * 0.5)
        return max(0.0, float(least))

    def resolution(self, false_alarm: float, power: float = 0.99) -> float:
        """Returns the total variation above which every deviation would be found.

        A law at total variation t of the cells has a noncentrality of at least ``4 n t²`` for n
        samples. What differs between the outcomes that share one cell is not seen: at most their
        probability, which is added.

        Args:
          false_alarm: the false-alarm rate of the test.
          power: the probability with which a deviation is found.
        """
        from scipy.optimize import root_scalar
        from scipy.stats import chi2, ncx2

        edge = chi2.isf(false_alarm, self.cells)
        misses = lambda x: ncx2.cdf(edge, self.cells, x) - (1 - power)  # noqa: E731
        noncentrality = root_scalar(misses, bracket=(1e-9, 10 * edge + 1000), method="brentq").root
        return min(1.0, float(np.sqrt(noncentrality / (4 * self.samples))) + self.pooled)


def judge(counts: np.ndarray, law: np.ndarray) -> Evidence:
    """Compares counts with a law.

    Args:
      counts: int ``[K]``, how often each of K outcomes occurred.
      law: float ``[K]``, the probabilities of these outcomes.
    """
    from scipy.stats import chi2

    counts, law = np.asarray(counts, np.float64), np.asarray(law, np.float64)
    total = counts.sum()
    expected = law * total
    variation = 0.5 * np.abs(counts / total - law).sum()
    spread = np.sqrt(law * (1 - law) / total)
    bound = 0.5 * np.sqrt(2 / np.pi) * spread.sum() + 5 * 0.5 * np.sqrt((spread**2).sum())
    some = expected > LEAST_EXPECTED
    rest, rest_expected = counts[~some].sum(), expected[~some].sum()
    statistic = ((counts[some] - expected[some]) ** 2 / expected[some]).sum()
    statistic += (rest - rest_expected) ** 2 / max(rest_expected, LEAST_EXPECTED)
    impossible = int(counts[law == 0].sum())
    cells = max(1, int(some.sum()))
    return Evidence(
        samples=int(total),
        variation=float(variation),
        bound=float(bound),
        p_value=0.0 if impossible else float(chi2.sf(statistic, cells)),
        cells=cells,
        impossible=impossible,
        noise=float(0.5 * spread.sum()),
        pooled=float(law[~some].sum()) if np.sum(~some) > 1 else 0.0,
    )


def round_counts(rule, draft, weights, p, depth: int, *, rows: int, seed: int = 0) -> np.ndarray:
    """Counts texts of ``depth + 1`` tokens: one round of a rule each, with its own random numbers.

    Tokens that the round leaves open are drawn from the target's law.

    Args:
      rule: a rule object that shares no noise with drafters.
      draft, weights: all drafts, with the probability of each.
      p: the target's law, an ``exact_law.Table``.
      depth: of the deepest node.
      rows: how many rounds are run, at once.

    Returns:
      ``[V ** (depth + 1) + 1]``; the last count is that of rounds whose token is none of V.
    """
    random = np.random.default_rng(seed)
    paths, laws = exact_law.target_of(p, draft)
    row = random.choice(len(weights), rows, p=weights / weights.sum())
    many = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[row]), (draft, laws))

    @jax.jit
    def run(draft, laws, key):
        q, keys = DraftLaw(draft, p.vocab), jax.random.split(key, rows)
        verdict = rule(None, draft, exact_law.NodeLaw(laws), q, keys)
        return walk.at_node(verdict.path, verdict.count), verdict.token

    node, token = (np.asarray(x) for x in run(*many, jax.random.key(seed)))
    cells, times = np.unique(np.stack([row, node, token], axis=1), axis=0, return_counts=True)
    counts, lost = np.zeros((p.vocab,) * (depth + 1)), 0
    for (draft_row, last, said), count in zip(cells.tolist(), times.tolist(), strict=True):
        if not 0 <= said < p.vocab:
            lost += count
            continue
        begin = (*paths[draft_row][last], said)
        rests = list(itertools.product(range(p.vocab), repeat=depth + 1 - len(begin)))
        shares = [np.prod([p(begin + rest[:i])[x] for i, x in enumerate(rest)]) for rest in rests]
        drawn = random.multinomial(count, np.asarray(shares) / np.sum(shares))
        for rest, number in zip(rests, drawn, strict=True):
            counts[begin + rest] += number
    return np.append(counts.reshape(-1), lost)


def joint_counts(
    target,
    drafter,
    rule,
    params,
    prompt,
    num: int,
    sampling: Sampling,
    *,
    rows: int,
    seed: int = 0,
    rounds: int | None = None,
):
    """Draws texts with the rounds of the loop, in one batch, and counts them; traces them anew. The
    first token is drafted and judged as well, see ``prefill.unanswered``.

    Args:
      target, drafter, rule, params, sampling: see ``specjax.decode``.
      prompt: token ids, the same for all rows.
      num: the number of tokens of a text.
      rows: the number of texts.
      seed: the seed of the draws.
      rounds: the number of rounds; None: until all rows end.

    Returns:
      counts int ``[V ** num]`` of the texts, and the statistics of the loop. Texts with fewer
      tokens, whose law gave no token any probability, are not counted.
    """
    vocab, size = target.vocab_size, len(prompt)
    request, capacity = prepare_inputs(
        target,
        drafter,
        np.tile(np.asarray([prompt], np.int32), (rows, 1)),
        np.full((rows,), size, np.int32),
        jax.random.key(seed),
        num + 1,  # one more, so that the budget does not cut the tested tokens
        sampling,
        None,
        (),
    )

    @jax.jit
    def run(params, request):
        state = prefill.unanswered(target, drafter, rule, capacity, params, request)
        state = loop.burst(target, drafter, rule, rounds, params, state)
        whole = state.length >= size + num if rounds is None else True
        new = jax.lax.dynamic_slice_in_dim(state.tokens, size, num, axis=1)
        cell = jnp.sum(new * vocab ** jnp.arange(num - 1, -1, -1), axis=1)
        cell = jnp.where(whole, cell, vocab**num)  # an index beyond the last is dropped
        return jnp.bincount(cell, length=vocab**num), state.stats

    counts, stats = run(params, request)
    return np.asarray(counts), stats
