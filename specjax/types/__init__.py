"""The contract between targets, drafters, acceptance rules and the loop.

``data`` holds what flows between them; ``Target``, ``HeadTarget``, ``Drafter`` and ``Rule`` are
the base classes that implementations subclass.
"""

from .._internal.pytree import PyTree, pytree_dataclass, static
from .confidence import Confidence
from .data import (
    DRAWS,
    POINT_MASS,
    ROOT,
    Context,
    Draft,
    Guess,
    NodeVectors,
    PartialPass,
    Scores,
    Segment,
    Verdict,
)
from .drafter import AheadDrafter, Drafter, DrafterWrapper
from .rule import Rule
from .target import HeadTarget, SubNetwork, Target

__all__ = [
    "DRAWS",
    "POINT_MASS",
    "ROOT",
    "AheadDrafter",
    "Confidence",
    "Context",
    "Draft",
    "Drafter",
    "DrafterWrapper",
    "Guess",
    "HeadTarget",
    "NodeVectors",
    "PartialPass",
    "PyTree",
    "Rule",
    "Scores",
    "Segment",
    "SubNetwork",
    "Target",
    "Verdict",
    "pytree_dataclass",
    "static",
]
