"""SPRINTER's rule, approximate: all tokens of a chain but the last ones are kept unverified."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from .chain_rule import ChainRule
from .walk import eligible


@dataclasses.dataclass(frozen=True)
class Sprinter(ChainRule):
    """Tests the last ``verified`` tokens of a chain by speculative sampling, and trusts the others.

    The rule belongs to a drafter that ends its chains where it expects a rejection: the last token
    is the one that a probe flagged (see ``drafters.probe``). With other drafters, too, the tokens
    before the last one follow the drafter's law. A token that bias, penalties or the logits
    processor forbid is tested, and fails; one that only the target's top-k, top-p or min-p leave
    out is trusted.

    The target still reads the whole chain in its pass, because its cache needs every token. So the
    rule saves no work in a round; it saves rounds, because fewer tokens are rejected.

    Lossless: no; every result carries the label ``approximate``. Where ``verified`` is at least the
    length of every chain, the rule decides as ``rejection`` does; so it does if the probe flags
    every token. The law of a chain's first token has the total variation ``Σ (q(x) - p(x))+`` to
    p, summed over the tokens x after which the chain goes on.

    Attributes:
      verified: how many tokens at the end of a chain are tested, at least 1 (1 in the paper).

    References: SPRINTER, arXiv 2502.04557.

    Raises:
      ValueError: ``verified`` is out of range.
    """

    verified: int = 1

    name = "approximate-sprinter"
    lossless = False

    def __post_init__(self):
        if self.verified < 1:
            raise ValueError(f"Sprinter(verified={self.verified}): verified must be at least 1")

    def passes(self, draft, own, possible, logits):
        able = eligible(draft)[:, 1:]
        size = jnp.sum(jnp.cumprod(able.astype(jnp.int32), axis=1), axis=1, keepdims=True)
        trusted = jnp.arange(draft.num_nodes) <= size - self.verified
        return own | (trusted & possible)
