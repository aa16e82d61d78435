"""What a sample says about the law that it should have: chi-squared, bounds on the deviation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ..decoding import loop, prefill
from ..decoding.inputs import prepare_inputs
from ..sampling.distribution import Sampling

LEAST_EXPECTED = 5  # of a cell of chi-squared; rarer ones are one cell


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Counts held against a law.

    Attributes:
      samples: how many there are.
      variation: total variation between the shares and the law; noise is a part of it.
      bound: what noise alone makes of it, with five standard deviations.
      p_value: of chi-squared, in favour of the law; 0 where something impossible was drawn.
      cells: of chi-squared.
      impossible: samples that have probability zero.
      noise: the expected variation of a sound sample, at most.
    """

    samples: int
    variation: float
    bound: float
    p_value: float
    cells: int
    impossible: int
    noise: float

    def fits(self, false_alarm: float) -> bool:
        """Whether chi-squared has nothing against the law at this false-alarm rate."""
        return self.p_value > false_alarm

    def least(self, doubt: float) -> float:
        """A total variation that the true law has at least, but with probability ``doubt``.

        The sample's own variation less the expected noise and McDiarmid's bound on the rest.
        """
        spread = np.sqrt(np.log(1 / doubt) / (2 * self.samples))
        least = max(self.variation - self.noise - spread, self.impossible / self.samples * 0.5)
        return max(0.0, float(least))

    def resolution(self, false_alarm: float, power: float = 0.99) -> float:
        """The total variation above which every deviation is found with probability ``power``.

        A law at total variation t has a noncentrality of at least ``4 n t²``.
        """
        from scipy.optimize import brentq
        from scipy.stats import chi2, ncx2

        edge = chi2.isf(false_alarm, self.cells)
        misses = lambda x: ncx2.cdf(edge, self.cells, x) - (1 - power)  # noqa: E731
        noncentrality = brentq(misses, 1e-9, 10 * edge + 1000)
        return min(1.0, float(np.sqrt(noncentrality / (4 * self.samples))))


def judge(counts: np.ndarray, law: np.ndarray) -> Evidence:
    """Holds ``counts [K]`` against ``law [K]``, probabilities of the same cells."""
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
    )


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
    """Draws ``rows`` texts of ``num`` tokens with the whole loop, at once; traced afresh.

    Args:
      target, drafter, rule, params, sampling: as ``specjax.decode`` takes them.
      prompt: token ids, the same for all rows.
      rounds: how many rounds to run; None: to the end.

    Returns:
      counts ``[V ** num]`` of the texts, and the statistics of the loop. Texts that ended before
      are in no cell: their law gave no token any probability.
    """
    vocab, size = target.vocab_size, len(prompt)
    request, capacity = prepare_inputs(
        target,
        drafter,
        np.tile(np.asarray([prompt], np.int32), (rows, 1)),
        np.full((rows,), size, np.int32),
        jax.random.key(seed),
        num + 1,  # a margin, so that the budget's cut is not what is tested
        sampling,
        None,
        (),
    )

    @jax.jit
    def run(params, request):
        state = prefill.start(target, drafter, rule, capacity, params, request)
        state = loop.burst(target, drafter, rule, rounds, params, state)
        whole = state.length >= size + num if rounds is None else True
        new = jax.lax.dynamic_slice_in_dim(state.tokens, size, num, axis=1)
        cell = jnp.sum(new * vocab ** jnp.arange(num - 1, -1, -1), axis=1)
        cell = jnp.where(whole, cell, vocab**num)  # beyond the last: dropped
        return jnp.bincount(cell, length=vocab**num), state.stats

    counts, stats = run(params, request)
    return np.asarray(counts), stats
