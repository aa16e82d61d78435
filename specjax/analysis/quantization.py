"""Measures how far the law of a quantized model is from the law of the float model, on texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import kernels
from ..decoding import reference
from ..models.lm import LM, check_same_tokenizer

BATCH = 4  # the number of texts in a pass


@dataclasses.dataclass(frozen=True)
class QuantizationError:
    """The result of ``quantization_error``, with means over all positions.

    Attributes:
      kl: Kullback-Leibler divergence of the quantized law from the float law, in nats a token.
      variation: total variation of the two laws, 0 to 1.
      agreement: share of positions at which both have the same most probable token.
      positions: number of positions.
    """

    kl: float
    variation: float
    agreement: float
    positions: int

    def __str__(self) -> str:
        return (
            f"KL to the original model {self.kl:.2g} nats a token, total variation "
            f"{self.variation:.2g}, same most probable token {self.agreement:.2%} "
            f"({self.positions:,} positions)"
        )

    def as_json(self) -> dict:
        """The fields by name."""
        return dataclasses.asdict(self)


def quantization_error(
    model: LM, quantized: LM, texts: Sequence[str], *, max_tokens: int = 128
) -> QuantizationError:
    """Compares the next-token laws of a float model and of the same model quantized.

    Both read the same texts; after every token the laws at temperature 1 are compared,
    ``KL = sum_v p(v) (log p(v) - log q(v))`` with the float law ``p`` and the quantized law ``q``.

    Args:
      model: the float model, or one whose files hold few bits: then that law is the original.
      quantized: the same model, loaded with ``quantize=`` or from quantized weights.
      texts: texts on which neither model was trained.
      max_tokens: the most tokens that are read of each text.

    Returns:
      a ``QuantizationError`` with the divergence in nats per token, the total variation, and the
      share of positions at which both models agree.

    Raises:
      ValueError: the models differ in their tokenizers, ``model`` is quantized, there is no text,
        or ``max_tokens`` is below 1.

    Example::

        lm = specjax.load("embedded")
        small = specjax.load("embedded", quantize="int4")
        print(specjax.quantization_error(lm, small, ["def f(x):"]))
    """
    if model.target.quantized and model.target.approximate:  # files in few bits are their own law
        raise ValueError(f"model: {model!r} is quantized; give the float model as first argument")
    if model.tokenizer is None or quantized.tokenizer is None:
        raise ValueError("model, quantized: both need a tokenizer to read texts; load it with them")
    check_same_tokenizer(model, quantized)
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: it must be at least 1")
    rows = [model.tokenizer.encode(text)[:max_tokens] for text in texts]
    rows = [row for row in rows if row]
    if not rows:
        raise ValueError("texts: they hold no token; give at least one text")
    width = max(map(len, rows))
    sums, positions = np.zeros(3), 0
    with kernels.following(model.params):
        for begin in range(0, len(rows), BATCH):
            part = rows[begin : begin + BATCH]
            part += [[]] * (BATCH - len(part))  # rows without tokens do not count
            tokens = np.zeros((BATCH, width), np.int32)
            seen = np.zeros((BATCH, width), bool)
            for i, row in enumerate(part):
                tokens[i, : len(row)], seen[i, : len(row)] = row, True
            logits = (reference.logits(m.target, m.params, tokens) for m in (model, quantized))
            sums += np.asarray(_distances(*logits, seen), np.float64)
            positions += int(seen.sum())
    kl, variation, agreement = (sums / positions).tolist()
    return QuantizationError(kl, variation, agreement, positions)


@jax.jit
def _distances(ours: jax.Array, theirs: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns the sums over positions of divergence, variation and agreement, float32 ``[3]``."""
    p, q = jax.nn.log_softmax(ours), jax.nn.log_softmax(theirs)
    law = jnp.exp(p)
    kl = jnp.sum(jnp.where(law > 0, law * (p - q), 0), axis=-1)
    variation = jnp.sum(jnp.abs(law - jnp.exp(q)), axis=-1) / 2
    same = jnp.argmax(ours, axis=-1) == jnp.argmax(theirs, axis=-1)
    return jnp.stack([jnp.sum(x, where=seen) for x in (kl, variation, same)])
