"""ExLlama: just above the moving average of accepted tokens; none while it is below a threshold.

Reads: how many tokens were proposed and accepted, row by row. It knows no costs.

Lossless: yes; the width is a function of committed tokens, and ``threshold`` compares the most
probable token of a law, never the token that was drawn from it.

Example::

    specjax.generate(lm, "...", drafting=specjax.Drafting(num="auto:exllama:probe=32"))
    drafter = Adaptive(NGram(num_draft=7), policy=ExLlama(probe=32))

References: ExLlamaV3, ``Job.draft_target`` and ``Job.update_draft_ema`` in
``exllamav3/generator/job.py`` at commit 4f8ad01; ExLlamaV2, ``speculative_prob_threshold`` of
``ExLlamaV2StreamingGenerator``.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ..._internal.pytree import pytree_dataclass
from .policy import DraftLengthPolicy, Outcome, check_settings, confidence_at


@pytree_dataclass
class ExLlamaMemory:
    """The state of ``ExLlama``.

    Attributes:
      average: float32 ``[B]``, the moving average of accepted tokens; -1 before the first round.
      skipped: int32 ``[B]``, rounds without a draft.
    """

    average: jax.Array
    skipped: jax.Array


@dataclasses.dataclass(frozen=True)
class ExLlama(DraftLengthPolicy):
    """The dynamic draft window of ExLlamaV3, and on request the threshold of ExLlamaV2.

    A draft that was accepted whole counts as one token more, since the width cuts acceptance off.
    Below ``skip`` a row asks for nothing but two tokens every ``probe`` rounds. A batch takes the
    widest wish of its rows.

    The threshold drops the token from the law that falls below it, which leaves the law of the
    output as it is: there drafts are the most probable tokens, and here, where they may be drawn,
    the law is compared and not the token.

    Attributes:
      up: weight of the last round if it raises the average; above 1 the average overshoots, which
        is how the window widens.
      down: weight of the last round if it lowers the average.
      skip: the threshold for the average, in tokens; 0: always at least one token.
      probe: rounds between probes.
      threshold: in [0, 1]; a row stops drafting before a token from a law whose greatest
        probability is below it. 0, as in ExLlamaV3: no threshold; ExLlamaV2 has 0.25.

    Raises:
      ValueError: a setting is out of range.
    """

    up: float = 1.3
    down: float = 0.65
    skip: float = 0.3
    probe: int = 16
    threshold: float = 0.0
    name = "exllama"

    def __post_init__(self):
        check_settings(self, ("up", "down", "skip"), rounds=("probe",))
        if not (0 < self.down <= 1 and self.up > 0 and self.skip >= 0 and self.probe >= 1):
            raise ValueError(
                f"ExLlama(up={self.up}, down={self.down}, skip={self.skip}, probe={self.probe}): "
                "need up > 0, 0 < down <= 1, skip >= 0 and probe >= 1"
            )
        _ = self.confidence  # refuses a threshold that is no probability

    @property
    def confidence(self):
        return confidence_at(self.threshold, keeps_last=False)

    def init(self, batch: int, depth: int) -> ExLlamaMemory:
        zero = jnp.zeros((batch,))
        return ExLlamaMemory(average=zero - 1, skipped=zero.astype(jnp.int32))

    def choose(self, memory, widths, costs, budget):
        most, average = widths[-1], memory.average
        idle = (average >= 0) & (average < self.skip)
        skipped = jnp.where(idle, memory.skipped + 1, 0)
        due = skipped >= self.probe
        wish = jnp.clip(jnp.ceil(average).astype(jnp.int32), 1, most)
        wish = jnp.where(idle, jnp.where(due, min(2, most), 0), wish)
        wish = jnp.where(average < 0, most, wish)
        skipped = jnp.where(due, 0, skipped)
        width = jnp.max(jnp.where(budget > 0, wish, 0))
        return width, dataclasses.replace(memory, skipped=skipped)

    def update(self, memory, outcome: Outcome):
        kept = outcome.accepted + (outcome.accepted >= outcome.offered)
        old = memory.average
        share = jnp.where(kept > old, self.up, self.down)
        average = jnp.where(old < 0, kept, share * kept + (1 - share) * old)
        learns = outcome.live & (outcome.offered > 0)
        return dataclasses.replace(memory, average=jnp.where(learns, average, old))
