"""Hugging Face: two tokens more after a draft that was accepted whole, else one less.

This is the schedule ``heuristic`` of assisted generation with its confidence threshold. The length
starts anew in each request, as in Hugging Face with ``heuristic_transient``.

Reads: how many tokens were proposed and accepted, row by row, and the greatest probability of the
drafter's laws. It knows no costs and never stops drafting.

Lossless: yes; the width is a function of committed tokens, and the threshold does not look at the
token that was drawn.

Differs from the reference in the threshold. There it is compared with the probability of the
drafted token, by the law after all logits processors; here with the greatest probability of the
drafter's softmax before temperature and filters. At temperature 0 without processors the two are
equal. As there, the token from the law below the threshold is still proposed. The threshold is not
fitted during the run (there it is, if scikit-learn is installed). A batch takes the widest wish
among its rows (there batches have one row).

Example::

    drafting = specjax.Drafting(num="auto:huggingface:start=5")
    specjax.generate(lm, "...", drafter="draft", drafting=drafting)
    drafter = Adaptive(DraftModel(7, model=small), policy=HuggingFace(start=5, threshold=0.0))

References: Hugging Face transformers 5, ``AssistedCandidateGenerator.update_candidate_strategy``,
``ConfidenceCriteria`` and ``num_assistant_tokens_schedule`` of ``GenerationConfig``.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from .policy import DraftLengthPolicy, Outcome, confidence_at


@dataclasses.dataclass(frozen=True)
class HuggingFace(DraftLengthPolicy):
    """The schedule and the threshold of assisted generation.

    No wish exceeds the drafter's ``depth``. A round in which nothing was proposed changes nothing.

    Attributes:
      start: tokens of the first round; ``num_assistant_tokens`` of Hugging Face.
      schedule: ``"heuristic"``, or ``"constant"``: every round asks for ``start`` tokens.
      threshold: in [0, 1]; a row drafts nothing more after a token from a law whose greatest
        probability is below it. 0: no threshold. ``assistant_confidence_threshold`` there.

    Raises:
      ValueError: a setting is out of range, or the schedule is unknown.
    """

    start: int = 20
    schedule: Literal["heuristic", "constant"] = "heuristic"
    threshold: float = 0.4
    name = "huggingface"

    def __post_init__(self):
        if self.start < 1:
            raise ValueError(f"HuggingFace(start={self.start}): it drafts at least one token")
        if self.schedule not in ("heuristic", "constant"):
            raise ValueError(
                f"HuggingFace(schedule={self.schedule!r}): give 'heuristic' or 'constant'"
            )
        _ = self.confidence  # refuses a threshold that is no probability

    @property
    def can_rest(self) -> bool:
        return False

    @property
    def confidence(self):
        return confidence_at(self.threshold, keeps_last=True)

    def init(self, batch: int, depth: int) -> jax.Array:
        return jnp.full((batch,), min(self.start, depth), jnp.int32)

    def choose(self, memory, widths, costs, budget):
        memory = jnp.minimum(memory, widths[-1])
        return jnp.max(jnp.where(budget > 0, memory, 1)), memory

    def update(self, memory, outcome: Outcome):
        if self.schedule == "constant":
            return memory
        whole = outcome.accepted >= outcome.offered
        wish = jnp.where(whole, memory + 2, jnp.maximum(memory - 1, 1))
        return jnp.where(outcome.live & (outcome.offered > 0), wish, memory)
