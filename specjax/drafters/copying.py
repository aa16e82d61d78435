"""Drafts as another drafter does, with more weight on what the text said before (at temperature 0).

    logits'[x] = logits[x] + bonus(m)

``logits`` are those of the inner drafter below a node, and x followed in the text before the draft
where the last m tokens of the path to the node stand, for the two x with the greatest m
(``trees/copies.py``). Texts repeat names, lines and phrases. A head that drafts all depths at once,
or from one hidden state, cannot look at the text after each drafted token, as the target does.
``Hybrid`` and ``Fallback`` copy a whole draft instead of what the inner drafter knows; here both
have a say at each token.

Lossless: yes, wherever the inner drafter is. The bonus depends on the committed text and on the
tokens above a node, and is added before the law of the draft is made, which is stated as drawn.

Example::

    specjax.generate(lm, "def f(x):", drafter="copy+p-eagle")

References: none for this way to draft. Grave et al., 1612.04426, and Khandelwal et al., 1911.00172,
mix the law of a model with that of what followed in a text; prompt lookup (``ngram.py``) and
CopySpec, 2502.08923, draft copies of the text alone.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from ..sampling.distribution import COLDEST
from ..trees.copies import BONUS
from ..types import Drafter, DrafterWrapper


@dataclasses.dataclass(frozen=True)
class Copying(DrafterWrapper):
    """Drafts with ``inner``, whose weights are ``params["drafter"]``.

    Attributes:
      inner: heads, a draft model or a part of the target: a drafter that ranks tokens by logits.
      bonus: nats by the number of tokens that match, from one on; the last is for more, too.
      warm_share: the share of the bonus in rows above temperature 0, whose texts repeat less:
        there it gained nothing where it was measured.

    Raises:
      ValueError: ``inner`` has no logits, ``bonus`` is no tuple of finite numbers, or
        ``warm_share`` is no number from 0 to 1.
      TypeError: ``inner`` is no drafter.
    """

    bonus: tuple[float, ...] = BONUS
    warm_share: float = 0.0

    def __post_init__(self):
        if not isinstance(self.inner, Drafter):
            raise TypeError(
                f"Copying(inner={self.inner!r:.60}): give an instance of specjax.Drafter; of heads "
                "from specjax.load_drafter it is heads.drafter, with heads.params as drafter_params"
            )
        if not self.inner.takes_sibling_sampling:
            raise ValueError(
                f"Copying(inner={type(self.inner).__name__}): it does not draft by logits of "
                "its own, to which a bonus could be added; accepted are heads, draft models, and "
                "layers of the target"
            )
        given = self.bonus
        if not (isinstance(given, tuple) and given and all(map(_is_finite, given))):
            raise ValueError(
                f"Copying(bonus={given!r}): accepted is a tuple of finite numbers, in nats: for a "
                f"match of one token, of two and so on, such as {BONUS}"
            )
        if not (_is_finite(self.warm_share) and 0 <= self.warm_share <= 1):
            raise ValueError(
                f"Copying(warm_share={self.warm_share!r}): accepted is a number from 0, for no "
                "bonus above temperature 0, to 1, for the whole one"
            )

    @property
    def has_weights(self) -> bool:
        return self.inner.has_weights

    @property
    def name(self) -> str:
        return f"copy+{self.inner.name}"

    def draft_step(self, params, target_params, state, context):
        bonus = jnp.asarray(self.bonus, jnp.float32)
        if not context.sampling.greedy:
            share = jnp.where(context.sampling.temperature >= COLDEST, self.warm_share, 1.0)
            bonus = bonus * share[:, None]
        bonus = jnp.broadcast_to(bonus, (len(context.length), len(self.bonus)))
        context = dataclasses.replace(context, copy_bonus=bonus)
        return self.inner.draft_step(params, target_params, state, context)


def _is_finite(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
