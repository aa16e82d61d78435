"""The acceptance that a drafter loses by a shift of domain, and the share that it recovers.

    recovered = (now - before) / (home - before)

``home`` is the acceptance on text like the training text, ``before`` and ``now`` are those on the
same prompts of the new domain. The 95 % interval comes from resampling the prompts of both domains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from . import chunks, distill, losses
from .decoding import RESAMPLES

# The measure for each kind of continuations by the target.
MEASURES = {"greedy": "greedy_match", "sampled": "acceptance"}


def make_rates(pair: distill.Pair, sets: Mapping[str, Sequence[tuple]]):
    """Returns ``rates(params, frozen) -> {kind: float [n, 2]}``.

    A row holds the sum of the measure (see ``MEASURES``) over the continuation of a prompt, and the
    number of its tokens. ``sets`` holds batches ``(tokens [B, T + 1], weight [B, T])`` by kind.
    """

    def terms(table, states, target_table, pieces):
        p, q = pair.target_logits(target_table, pieces), pair.drafter_logits(table, states)
        return {"greedy_match": losses.greedy_match(p, q), "acceptance": losses.acceptance(p, q)}

    @jax.jit
    def compiled(params, frozen, tokens, weight):
        inputs = tokens[:, :-1]
        target = pair.target_table(frozen), pair.teacher_states(frozen, inputs)
        own = pair.drafter_table(params), pair.student_states(params, inputs)
        found, count = chunks.each(terms, *own, *target), jnp.sum(weight, axis=1)
        sums = {name: jnp.sum(value * weight, axis=1) for name, value in found.items()}
        return {name: jnp.stack([total, count], axis=1) for name, total in sums.items()}

    def rates(params, frozen) -> dict[str, np.ndarray]:
        return {
            kind: np.concatenate(
                [np.asarray(compiled(params, frozen, *batch)[MEASURES[kind]]) for batch in batches]
            )
            for kind, batches in sets.items()
        }

    return rates


def rate(rows: np.ndarray):
    """Returns the mean over all tokens, ``[...]``, of rows ``[..., n, 2]`` of sums and counts."""
    total = rows.sum(axis=-2)
    return total[..., 0] / np.maximum(total[..., 1], 1)


def recovered(home, before, now):
    """Returns the share of the lost acceptance that was recovered; 0 if none was lost."""
    lost = np.subtract(home, before)
    return np.where(lost > 0, np.subtract(now, before) / np.where(lost > 0, lost, 1.0), 0.0)


def recovery(home: np.ndarray, before: np.ndarray, now: np.ndarray) -> tuple[float, float, float]:
    """Returns ``recovered`` for rows ``[n, 2]`` of ``make_rates``, and the ends of its interval."""
    rng = np.random.default_rng(0)
    own, new = (rng.integers(0, len(rows), (RESAMPLES, len(rows))) for rows in (home, now))
    resampled = recovered(rate(home[own]), rate(before[new]), rate(now[new]))
    value = recovered(rate(home), rate(before), rate(now))
    return (float(value), *(float(x) for x in np.quantile(resampled, [0.025, 0.975])))


def draw(picture: Path, home: Mapping[str, float], curve: Sequence[Mapping]) -> None:
    """Draws acceptance on held-out prompts over requests, and below it the recovered share.

    Rows of ``curve`` have ``requests`` and, by kind, ``greedy``, ``greedy_recovered``,
    ``greedy_low`` and ``greedy_high``.
    """
    from matplotlib.figure import Figure  # not pyplot, whose state is the user's (notebooks)

    figure = Figure(figsize=(8, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps = [row["requests"] for row in curve]
    names = {"greedy": "T = 0: argmaxes agree", "sampled": "drawn: sum of min(p, q)"}
    for i, (kind, label) in enumerate(names.items()):
        columns = (kind, f"{kind}_recovered", f"{kind}_low", f"{kind}_high")
        rates, shares, low, high = ([row[name] for row in curve] for name in columns)
        above.plot(steps, rates, "o-", color=f"C{i}", markersize=4, label=label)
        above.axhline(home[kind], color=f"C{i}", linestyle="--", linewidth=1)
        below.plot(steps, shares, "o-", color=f"C{i}", markersize=4, label=label)
        below.fill_between(steps, low, high, color=f"C{i}", alpha=0.15, linewidth=0)
    above.plot([], [], "k--", linewidth=1, label="where it was trained")
    above.set_ylabel("acceptance, held out")
    below.set(xlabel="requests served", ylabel="recovered, with 95 % over prompts")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(picture, dpi=110)
