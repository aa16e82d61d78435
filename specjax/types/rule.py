"""The base class of acceptance rules."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax

from .data import Draft, PyTree, Verdict

Law = Callable[[jax.Array], jax.Array]


class Rule(abc.ABC):
    """Decides which drafted tokens are kept, and draws the token that follows them.

    A rule is hashable and holds no arrays (a frozen dataclass is the usual form).

    Attributes:
      name: what results call the rule; it says ``approximate`` where ``lossless`` is False.
      lossless: whether the output follows the target's law p exactly, on every draft that
        ``check`` admits.
      exact_at_zero: whether it does so at temperature 0, for a rule that is not lossless.
      sibling_sampling: how drafters must draw siblings for this rule (see ``Draft.draws``); None:
        any way.
      noise: whether drafters share the rule's noise: ``"position"``, by row and position;
        ``"path"``, also by the path to each leaf of a static tree; None: not at all.
      why: sentences for ``specjax.trace`` by what became of a node: ``accepted``, ``rejected``,
        ``later`` (after the accepted sibling), ``beyond`` (below a node that was not accepted). A
        sentence for ``later`` or ``beyond`` says that the rule judges such nodes; without one they
        were not looked at. Sentences may name the fields of ``tracing.explain.sentence`` and the
        numbers of ``evidence``.

    Example::

        @dataclasses.dataclass(frozen=True)
        class Nothing(specjax.Rule):
            name = "nothing"
            lossless = True

            def __call__(self, params, draft, target_law, draft_law, key):
                root = jnp.zeros((draft.tokens.shape[0],), jnp.int32)
                return walk.verdict(draft, root, drawing.draw(target_law(root), uniforms))
    """

    name: str
    lossless: bool
    exact_at_zero: bool = False
    sibling_sampling: str | None = None
    noise: str | None = None
    why: ClassVar[Mapping[str, str]] = {}

    def check(self, draft: Draft, greedy: bool) -> None:  # noqa: B027
        """Raises ``ValueError`` for a draft on which the rule does not keep what it promises.

        It is called while tracing. Default: every draft is admitted.

        Args:
          draft: its static facts (``topology``, ``draws``, whether there are ``laws``) are known.
          greedy: whether the temperature is the number 0.
        """

    @abc.abstractmethod
    def __call__(
        self,
        params: PyTree,
        draft: Draft,
        target_law: Law,
        draft_law: Law,
        key: Any,
    ) -> Verdict:
        """Returns the longest accepted path and one more token.

        Args:
          params: ``params["rule"]`` of ``decode``, or None.
          target_law: node int32 ``[B]`` -> p, probabilities float32 ``[B, V]`` of the token after
            the node; ``target_law.adjusted()`` gives logits ``[B, N, V]``.
          draft_law: node int32 ``[B]`` -> q, probabilities float32 ``[B, V]`` of the law from which
            the node was drawn, given its earlier siblings; a point mass where there was none.
          key: random keys ``[B]``, to be consumed by ``sampling.drawing.uniforms``; for a rule with
            ``noise``, the ``sampling.noise.Noise`` that drafters were shown in ``Context.noise``.
        """

    def evidence(
        self,
        params: PyTree,
        draft: Draft,
        target_law: Law,
        draft_law: Law,
        key: Any,
    ) -> dict[str, jax.Array]:
        """Returns numbers float32 ``[B, N]`` by name that ``why`` may use. Default: none. It takes
        what ``__call__`` takes."""
        return {}
