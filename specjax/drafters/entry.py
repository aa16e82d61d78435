"""The entry of a drafter in the table of ``registry.py``."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Literal

from .._internal.keywords import checks_arguments
from .._internal.own_objects import imported

Kind = Literal["basic", "table", "head", "wrapper", "object"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A drafter as the project lists it, before it is imported.

    A module whose name begins with a dot is one of this package: ``.medusa`` is
    ``specjax.drafters.medusa`` in ``path``, ``specjax.checkpoints.medusa`` in ``formats``, and
    ``specjax.train.medusa`` in ``recipe``.

    Attributes:
      name: what users type; equal to the ``name`` of the drafter.
      path: ``module:Class`` of the drafter.
      summary: what it proposes, one phrase that is understood without those of other drafters.
      formats: modules of the layouts that hold its weights; ``save_drafter`` writes the first
        unless told otherwise. A format is named after its module (``medusa-vllm``).
      recipe: module of the recipe that trains it; empty: there is none.
      kind: ``basic``: no drafts, or a model of its own; a ``table`` needs neither weights nor a
        model, and is made by its name (``Drafter.for_target``); a ``head``
        has its weights in ``formats``, and reads the target's hidden states or, as ``bigram``, the
        text alone; a ``wrapper`` is made
        of other drafters and has no name that users type; an ``object`` has none either, because
        no folder and no flag gives it its weights.
      aliases: other names that users may type.
      priority: which of several drafters in a model's own folder ``drafter="auto"`` takes: that of
        the highest priority, and of equal ones the first registered. By and large, heads that
        decoded faster in the benchmarks at temperatures 0 and 1 stand above slower ones; where
        training or temperature changes their order, the number is a judgement. Heads that no
        benchmark compares, or that lose to all others there, have 0. None: never, as of a base for
        other drafters.
      raised: ``(key, priority)``, the priority of heads whose ``config.json`` gives that key
        another value than zero or none.
    """

    name: str
    path: str
    summary: str
    formats: tuple[str, ...] = ()
    recipe: str = ""
    kind: Kind = "head"
    aliases: tuple[str, ...] = ()
    priority: int | None = 0
    raised: tuple[str, int] | None = None

    def priority_of(self, config: Mapping) -> int | None:
        """The priority of heads with this ``config.json``."""
        if self.raised is not None and config.get(self.raised[0]):
            return self.raised[1]
        return self.priority

    @property
    def class_name(self) -> str:
        """The class, without its module."""
        return self.path.partition(":")[2]

    def load(self) -> type:
        """Imports the drafter's class; the constructor of one of this package then names wrong
        arguments.

        Raises:
          ValueError: ``path`` leads outside of this package, to no module or no class.
        """
        module, _, name = self.path.partition(":")
        if not module.startswith("."):
            said = f"the drafter {self.name!r} is registered as {self.path!r}"
            return imported(said, module, name)
        return checks_arguments(getattr(importlib.import_module(module, __package__), name))
