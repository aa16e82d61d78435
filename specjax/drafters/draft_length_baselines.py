"""Draft lengths by published heuristics, to compare ``Goodput`` with: Hugging Face's, ExLlamaV3's.

Lossless: yes, both; the decision is a function of committed tokens.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .._internal.pytree import pytree_dataclass
from .draft_length import DraftLengthPolicy, Outcome


@dataclasses.dataclass(frozen=True)
class HuggingFace(DraftLengthPolicy):
    """Two tokens more after a draft that was accepted whole, else one less, at least one.

    This is the ``heuristic`` schedule of assisted generation. It knows no costs and never stops
    drafting. A batch takes the widest wish among its rows (Hugging Face has batches of one), and no
    wish exceeds the drafter's ``depth``. A round in which nothing was proposed changes nothing.

    Attributes:
      start: tokens of the first round; ``num_assistant_tokens`` of Hugging Face.

    References: Hugging Face transformers 5,
    ``AssistedCandidateGenerator.update_candidate_strategy``.
    """

    start: int = 20
    name = "huggingface"

    def __post_init__(self):
        if self.start < 1:
            raise ValueError(f"HuggingFace(start={self.start}): it drafts at least one token")

    def init(self, batch: int, depth: int) -> jax.Array:
        return jnp.full((batch,), min(self.start, depth), jnp.int32)

    def choose(self, memory, widths, costs, budget):
        memory = jnp.minimum(memory, widths[-1])
        return jnp.max(jnp.where(budget > 0, memory, 1)), memory

    def update(self, memory, outcome: Outcome):
        whole = outcome.accepted >= outcome.offered
        wish = jnp.where(whole, memory + 2, jnp.maximum(memory - 1, 1))
        return jnp.where(outcome.live & (outcome.offered > 0), wish, memory)


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
    """Just above the moving average of accepted tokens; none while it is below a threshold.

    This is the dynamic draft window of ExLlamaV3. It knows no costs. A draft that was accepted
    whole counts as one token more, since the width cuts acceptance off. Below ``skip`` a row asks
    for nothing but two tokens every ``probe`` rounds. A batch takes the widest wish of its rows.

    Attributes:
      up: weight of the last round if it raises the average; above 1 the average overshoots, which
        is how the window widens.
      down: weight of the last round if it lowers the average.
      skip: the threshold, in tokens; 0: always at least one token.
      probe: rounds between probes.

    References: ExLlamaV3, ``Job.draft_target`` and ``Job.update_draft_ema`` in
    ``exllamav3/generator/job.py`` at commit 4f8ad01.
    """

    up: float = 1.3
    down: float = 0.65
    skip: float = 0.3
    probe: int = 16
    name = "exllama"

    def __post_init__(self):
        if not (0 < self.down <= 1 and self.up > 0 and self.skip >= 0 and self.probe >= 1):
            raise ValueError(
                f"ExLlama(up={self.up}, down={self.down}, skip={self.skip}, probe={self.probe}): "
                "need up > 0, 0 < down <= 1, skip >= 0 and probe >= 1"
            )

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
