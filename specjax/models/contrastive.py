"""Targets made of other targets."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from ..sampling.distribution import IMPOSSIBLE
from ..types import Draft, PyTree, Scores, Target, Verdict


@dataclasses.dataclass(frozen=True)
class Contrastive(Target):
    """Contrastive decoding as one target: an expert's logits against those of an amateur.

    Both read the same text, each with its own cache. At a node with logits ``e`` and ``a``::

        (1 + strength) e - strength a    where p_e >= plausible * max p_e,  else -inf

    The law p of this target is defined by these logits, so every drafter and rule is exact for it.
    ``params["target"] = {"expert": ..., "amateur": ...}``.

    Attributes:
      strength: at least 0; with 0 the law is the expert's, over the plausible tokens.
      plausible: in [0, 1]: the least probability of a token by the expert, as a share of the
        probability of the expert's best token.

    Raises:
      ValueError: settings out of range, models of different vocabularies.

    Example::

        lm = specjax.contrastive(specjax.load(large), specjax.load(small))
        specjax.generate(lm, "Once upon a time", drafter="ngram")

    References: Li et al., Contrastive Decoding, arXiv 2210.15097; O'Brien and Lewis, arXiv
    2309.09117, whose parametrisation this is (α is ``plausible``, β is ``strength``).
    """

    expert: Target
    amateur: Target
    strength: float = 0.5
    plausible: float = 0.1

    def __post_init__(self):
        if not (0 <= self.strength < math.inf and 0 <= self.plausible <= 1):
            raise ValueError(
                f"Contrastive(strength={self.strength}, plausible={self.plausible}): give a "
                "strength of at least 0, and plausible in [0, 1]"
            )
        if max(self.expert.stages, self.amateur.stages) > 1:
            raise ValueError(
                "Contrastive: a model whose layers are divided over the mesh axis stage is neither "
                "expert nor amateur; load both on the axes data and model"
            )
        sizes = self.expert.vocab_size, self.amateur.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"Contrastive: the expert has a vocabulary of {sizes[0]}, the amateur of "
                f"{sizes[1]}; they must share one"
            )

    @property
    def vocab_size(self) -> int:
        return self.expert.vocab_size

    @property
    def max_positions(self) -> int | None:
        """The shorter of the two contexts, or None."""
        given = [model.max_positions for model in (self.expert, self.amateur)]
        return min((size for size in given if size is not None), default=None)

    @property
    def parts(self) -> tuple[Target, Target]:
        return self.expert, self.amateur

    @property
    def quantized(self) -> str | None:
        return self.expert.quantized or self.amateur.quantized

    @property
    def approximate(self) -> str:
        given = [model.approximate for model in (self.expert, self.amateur)]
        return ", ".join(filter(None, given))

    def rewindable(self, num_tokens: int) -> Contrastive:
        models = (model.rewindable(num_tokens) for model in self.parts)
        return dataclasses.replace(self, **dict(zip(("expert", "amateur"), models, strict=True)))

    def activation_dtype(self, params) -> np.dtype:
        return self.expert.activation_dtype(params["expert"])

    @property
    def picks_logits(self) -> bool:
        return self.expert.picks_logits and self.amateur.picks_logits

    def init(self, params, batch: int, capacity: int, inputs=None) -> PyTree:
        return {
            "expert": self.expert.init(params["expert"], batch, capacity, inputs),
            "amateur": self.amateur.init(params["amateur"], batch, capacity, inputs),
        }

    def verify(
        self, params, cache, draft: Draft, *, features=(), since=0, entries=None, logits=True
    ) -> Scores:
        entries = {} if entries is None else entries

        def scores(name, model, features):
            return model.verify(
                params[name],
                cache[name],
                draft,
                features=features,
                since=since,
                entries=entries.get(name),
                logits=logits,
            )

        expert = scores("expert", self.expert, features)
        amateur = scores("amateur", self.amateur, ())
        return Scores(
            logits=None if logits is False else self._contrast(expert.logits, amateur.logits),
            features=expert.features,
            entries={"expert": expert.entries, "amateur": amateur.entries},
        )

    def commit(self, cache, entries, start, verdict: Verdict) -> PyTree:
        return {
            "expert": self.expert.commit(cache["expert"], entries["expert"], start, verdict),
            "amateur": self.amateur.commit(cache["amateur"], entries["amateur"], start, verdict),
        }

    def _contrast(self, expert, amateur):
        # logits may stand for log-probabilities: both differ by one number for each node
        said = (1 + self.strength) * expert - self.strength * amateur
        # rows that only the expert has pad its vocabulary
        said = jnp.where(amateur > IMPOSSIBLE / 2, said, -jnp.inf)
        if not self.plausible:
            return said
        least = jnp.max(expert, axis=-1, keepdims=True) + math.log(self.plausible)
        return jnp.where(expert >= least, said, -jnp.inf)


def contrastive(expert, amateur, *, strength: float = 0.5, plausible: float = 0.1):
    """Makes a model for ``generate`` from two models with one tokenizer; see ``Contrastive``.

    Args:
      expert: a model from ``specjax.load``.
      amateur: a smaller model with the same tokenizer.
      strength: as of ``Contrastive``.
      plausible: as of ``Contrastive``.

    Returns:
      ``LM`` whose target is a ``Contrastive``, with the tokenizer and the mesh of ``expert``.

    Raises:
      ValueError: the tokenizers differ, or a setting is out of range.
    """
    from .lm import as_drafter
    from .seq2seq.encoder_inputs import refuse_encoders

    refuse_encoders(expert, "contrastive")
    refuse_encoders(amateur, "contrastive")
    target = Contrastive(expert.target, as_drafter(expert, amateur), strength, plausible)
    return dataclasses.replace(
        expert,
        target=target,
        params={"expert": expert.params, "amateur": amateur.params},
        name=f"{expert.name} against {amateur.name}",
        fingerprint=f"{expert.fingerprint}-{amateur.fingerprint}-{strength}-{plausible}",
    )
