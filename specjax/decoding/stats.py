"""The counters of decoding, row by row, on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .._internal.pytree import pytree_dataclass, static


@pytree_dataclass
class Stats:
    """Counters of the rounds, each int32 with a leading row axis. Tokens after a stop are not
    counted, nor is the first new token of a row, which the pass over the end of its prompt emits.

    Attributes:
      rounds: ``[B]``, passes of the target over the row, those that emit nothing included.
      emitted: ``[B]``, tokens of these rounds.
      drafted: ``[B]``, tokens that could have been accepted.
      accepted: ``[B]``, drafted tokens that were kept.
      passengers: ``[B]``, nodes that went through the passes and could not have been accepted: what
        a drafter costs the target beside its drafts.
      drafted_at: ``[B, D]``, rounds in which the draft's position ``d`` could have been kept.
      accepted_at: ``[B, D]``, rounds in which it was.
      hidden: ``[B]``, rounds whose draft was complete before they began: drafting went on while the
        target verified the draft of the round before. Only drafters that draft ahead have any.
      drafter, rule: what decoded, for the record.
      approximate: why the output law is not the model's own (a quantized target, a rule that
        changes it); empty where it is.
    """

    rounds: jax.Array
    emitted: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    passengers: jax.Array
    drafted_at: jax.Array
    accepted_at: jax.Array
    hidden: jax.Array
    drafter: str = static(default="")
    rule: str = static(default="")
    approximate: str = static(default="")

    @property
    def tau(self) -> float:
        """Mean tokens emitted by a round, bonus or correction included; 1 where there was none."""
        return tau_of(self.emitted, self.rounds)

    @property
    def acceptance(self) -> float:
        """Accepted over drafted tokens, in [0, 1]; NaN where nothing was drafted."""
        drafted = int(np.sum(self.drafted))
        return float(np.sum(self.accepted) / drafted) if drafted else float("nan")

    @property
    def acceptance_by_position(self) -> np.ndarray:
        """float ``[D]``: share of rounds in which the draft's position ``d`` was kept."""
        return np.sum(self.accepted_at, axis=0) / max(1, int(np.sum(self.rounds)))

    @property
    def rounds_by_width(self) -> np.ndarray:
        """int ``[D + 1]``: rounds of a row in which exactly ``w`` positions were drafted."""
        at_least = np.concatenate([[np.sum(self.rounds)], np.sum(self.drafted_at, axis=0), [0]])
        return at_least[:-1] - at_least[1:]

    def __str__(self) -> str:
        rounds, passengers = int(np.sum(self.rounds)), int(np.sum(self.passengers))
        parts = [f"τ {self.tau:.1f}"]
        if np.sum(self.drafted):
            parts.append(f"accepted {self.acceptance:.0%}".replace("%", " %"))
        parts.append(f"{rounds} round{'s' * (rounds != 1)}")
        if passengers:
            parts.append(f"{passengers / rounds:.1f} passengers a round")
        if hidden := int(np.sum(self.hidden)):
            parts.append(f"drafting hidden in {hidden}")
        if "synthetic" in self.drafter:
            parts.append("SYNTHETIC acceptance")
        if self.approximate:
            parts.append(f"{self.approximate}: approximate")
        return " · ".join(parts)


def tau_of(emitted, rounds) -> float:
    """``Stats.tau`` of the counters of some rows."""
    total = int(np.sum(rounds))
    return float(np.sum(emitted) / total) if total else 1.0


def start(batch: int, depth: int, **names) -> Stats:
    """All counters at zero."""
    zero = jnp.zeros((batch,), jnp.int32)
    return Stats(
        rounds=zero,
        emitted=zero,
        drafted=zero,
        accepted=zero,
        passengers=zero,
        drafted_at=jnp.zeros((batch, depth), jnp.int32),
        accepted_at=jnp.zeros((batch, depth), jnp.int32),
        hidden=zero,
        **names,
    )
