"""The base class of drafters that run a model once for each depth of what they draft."""

from __future__ import annotations

from .. import trees
from ..trees import expand
from ..types import Target
from .base import ChainDrafter, check_field, check_topology


class ModelPassDrafter(ChainDrafter):
    """A drafter of chains and trees by passes of a draft model or of a part of the target.

    A subclass is a dataclass with the fields ``topology`` and ``sibling_sampling``, and calls
    ``_complete`` in its ``__post_init__``.
    """

    topology: trees.Topology
    sibling_sampling: str | None
    can_rest = True
    takes_topology = True
    takes_sibling_sampling = True

    def _complete(self, model: object, field: str, words: str) -> None:
        """Sets the topology and ``num_draft``, each of which follows from the other.

        Args:
          model: what drafts; None: it is missing.
          field: the name of the field that holds ``model``.
          words: what an error calls ``model``.

        Raises:
          TypeError: the model is no ``Target``, or the topology none of ``specjax.trees``.
          ValueError: there is no model or nothing to draft, or ``sibling_sampling`` is unknown or
            does not fit the topology.
        """
        check_topology(self)
        kind = "a specjax.Target; of what specjax.load returns, give its .target"
        check_field(self, field, Target | None, kind)
        if model is None or (self.topology is None and self.num_draft < 1):
            raise ValueError(
                f"{type(self).__name__}(num_draft={self.num_draft}, "
                f"{field}={type(model).__name__}): it needs {words} and at least one token to "
                "draft; for plain decoding use Plain()"
            )
        topology = self.topology or trees.chain(self.num_draft)
        object.__setattr__(self, "topology", topology)
        object.__setattr__(self, "num_draft", topology.num_nodes - 1)
        expand.check_sibling_sampling(self.picks, topology)

    def _check_window(self, window: int | None) -> None:
        """Raises ValueError for the window of a small cache that cannot hold the draft."""
        if window is not None and window < self.topology.num_nodes:
            raise ValueError(
                f"{type(self).__name__}: a window of {window} tokens is smaller than the draft, "
                f"which has {self.topology.num_nodes} nodes with its root; give window="
                f"{self.topology.num_nodes} or more, or draft fewer tokens"
            )

    @property
    def picks(self) -> str:
        """``sibling_sampling``, or the default of the topology where it is None."""
        return self.sibling_sampling or ("iid" if isinstance(self.topology, trees.Tree) else "top")

    @property
    def depth(self) -> int:
        return self.topology.depth
