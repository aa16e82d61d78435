"""The layouts in which drafters are published: ``FORMATS``, each by its name.

A layout is a module with the members of ``Layout``. It is registered in the entry of its drafter
(``specjax/drafters/registry.py``) and is imported when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import numpy as np

from ..drafters import registry
from ..models.lm import LM
from ..types import Drafter, PyTree


class Layout(Protocol):
    """The contents that a module of a layout must have.

    Attributes:
      DESCRIPTION: how errors describe the layout, with names of tensors that only it has.
      DRAFTER: the class of the drafters that it holds.
      WEIGHTS_FILE: name of the file of weights, without its ending.
    """

    DESCRIPTION: str
    DRAFTER: type
    WEIGHTS_FILE: str

    def matches(self, config: Mapping[str, Any], names: set[str]) -> bool:
        """Whether a folder with this ``config.json`` and tensors of these names is of this layout.

        Only one layout may match a folder: formats are asked in the order of registration.
        """
        ...

    def load(
        self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], target: LM
    ) -> tuple[Drafter, PyTree]:
        """The drafter and its weights, in the dtype of ``target``.

        Raises:
          ValueError: tensors that are missing, misshapen or left over, or another target's heads.
        """
        ...

    def save(
        self, drafter: Drafter, params: PyTree, target: LM | None
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """``(config, tensors)`` of a drafter, which ``load`` reads as the same one.

        Raises:
          ValueError: this layout cannot hold the drafter.
        """
        ...


class _Formats(Mapping[str, Layout]):
    """Names to layouts; reads the registry, so that what is registered later is found too."""

    def __getitem__(self, name: str) -> Layout:
        module = registry.formats()[name]
        return cast(Layout, registry.load_module(module, "specjax.checkpoints"))

    def __iter__(self) -> Iterator[str]:
        return iter(registry.formats())

    def __len__(self) -> int:
        return len(registry.formats())


FORMATS: Mapping[str, Layout] = _Formats()
