"""The base classes of drafters of chains, and of drafters that are made of several others."""

from __future__ import annotations

import abc
import dataclasses
from types import UnionType

from ..trees.topology import Topology
from ..types import Drafter, PyTree


def check_field(owner: object, field: str, kinds: type | UnionType, accepted: str) -> None:
    """Checks the type of a field where an object is made, before anything is traced.

    Raises:
      TypeError: the value is none of ``kinds``; the error says what is ``accepted``.
    """
    value = getattr(owner, field)
    if not isinstance(value, kinds):
        called = type(owner).__name__
        raise TypeError(f"{called}({field}={value!r:.60}): give {accepted}")


def check_topology(owner: object) -> None:
    """Raises ``TypeError`` where the field ``topology`` is neither a topology nor None."""
    kinds = Topology | None
    check_field(owner, "topology", kinds, 'one of specjax.trees, such as trees.parse("3x2")')


@dataclasses.dataclass(frozen=True)
class ChainDrafter(Drafter):
    """A drafter of chains of ``num_draft`` tokens, with the defaults of ``Drafter``.

    A subclass implements ``draft_step``.

    Raises:
      ValueError: ``num_draft`` is negative.
    """

    num_draft: int = 4

    name = "chain"

    def __post_init__(self):
        if self.num_draft < 0:
            raise ValueError(f"num_draft={self.num_draft} must be at least 0")


class CombinedDrafter(ChainDrafter):
    """A drafter made of others, ``parts``, whose wishes are its own.

    A flag that is not here has the default of ``Drafter``, unless a subclass overrides it.
    """

    @property
    @abc.abstractmethod
    def parts(self) -> tuple[Drafter, ...]:
        """The drafters that it is made of."""

    @property
    def features(self) -> tuple[int, ...]:
        return tuple(i for part in self.parts for i in part.features)

    @property
    def vocab_size(self) -> int | None:
        """The size of the vocabulary that all parts share; None: any.

        Raises:
          ValueError: two parts have vocabularies of different sizes.
        """
        sized = [part for part in self.parts if part.vocab_size is not None]
        for part in sized[1:]:
            if part.vocab_size != sized[0].vocab_size:
                raise ValueError(
                    f"{type(self).__name__}: the vocabulary of its part {sized[0].name!r} has "
                    f"{sized[0].vocab_size} tokens and that of its part {part.name!r} "
                    f"{part.vocab_size}; all parts draft for one target, so give parts with the "
                    "vocabulary of the target"
                )
        return sized[0].vocab_size if sized else None

    @property
    def num_passengers(self) -> int:
        return sum(part.num_passengers for part in self.parts)

    @property
    def reads_nodes(self) -> bool:
        return any(part.reads_nodes for part in self.parts)

    @property
    def can_rewind(self) -> bool:
        return all(part.can_rewind for part in self.parts)


@dataclasses.dataclass(frozen=True)
class SeveralDrafters(CombinedDrafter):
    """A drafter made of several drafters side by side or in turn; ``params["drafter"]`` is a tuple,
    the weights of each.

    Attributes:
      num_draft: follows from the drafters.
      drafters: at least two drafters.

    Raises:
      TypeError: one of them is no drafter.
      ValueError: there are fewer than two.
    """

    num_draft: int = 0
    drafters: tuple[Drafter, ...] = ()

    def __post_init__(self):
        if len(self.drafters) < 2:
            kind, count = type(self).__name__, len(self.drafters)
            raise ValueError(f"{kind} of {count} drafters: give at least two")
        for i, drafter in enumerate(self.drafters):
            if not isinstance(drafter, Drafter):
                raise TypeError(
                    f"{type(self).__name__}(drafters[{i}]={drafter!r:.60}): give objects of "
                    "specjax.Drafter"
                )
        object.__setattr__(self, "num_draft", sum(d.num_draft for d in self.drafters))

    @property
    def parts(self) -> tuple[Drafter, ...]:
        return self.drafters

    def beside(self, num_tokens):
        drafters = tuple(drafter.beside(num_tokens) for drafter in self.drafters)
        return dataclasses.replace(self, drafters=drafters)

    def shard(self, params, mesh):
        """The weights of all drafters on a mesh; see ``sharding.place``."""
        return tuple(d.shard(own, mesh) for d, own in self.with_weights(params))

    def with_weights(self, params) -> list[tuple[Drafter, PyTree]]:
        """Each drafter with its weights.

        Raises:
          ValueError: ``params`` is no tuple of as many.
        """
        if not isinstance(params, tuple | list) or len(params) != len(self.drafters):
            raise ValueError(
                f"params['drafter'] of a {type(self).__name__} must be a tuple of "
                f"{len(self.drafters)}, the weights of each drafter (None for one without)"
            )
        return list(zip(self.drafters, params, strict=True))
