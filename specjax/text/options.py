"""The options of ``generate`` and of the other functions that decode, declared once.

``Options`` declares the name, the type and the default of each option. A function that is decorated
by ``takes`` has these options as keyword arguments: ``help()`` shows them with their defaults, the
error for an unknown option names the nearest known one, and the function receives one checked
object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from .. import acceptance, trees
from .._internal.keywords import checks_arguments, nearest, takes_fields
from ..checkpoints import HeadLM
from ..drafters.drawn_or_top import LEARNED
from ..models.lm import LM
from ..sampling.distribution import Sampling
from ..trees import expand
from ..trees.topology import names_file
from ..types import Drafter, PyTree, Rule
from .auto_number import auto_policy, check_one_shape, is_auto, number_of
from .session import Session

NUM_DRAFT = 3  # the default; on CPU a pass takes the same time over 2 to 4 tokens
Prompt = str | Sequence[int] | Mapping[str, Any]
Prompts = Prompt | Sequence[Prompt]
DrafterLike = str | LM | HeadLM | Session | Drafter | None
P = ParamSpec("P")
R = TypeVar("R")


@checks_arguments
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """The number of drafted tokens, the shape of the draft, and the acceptance rule.

    Attributes:
      num: the number of tokens drafted in a round. None: 3, or the number that heads were saved
        with. ``"auto"``: the number with the highest speed, from 0 to 7, which follows from the
        measured acceptance and the measured costs of rounds (see ``drafters.Adaptive``); before the
        first text these costs are measured and the programs of all widths compiled. Where by
        these costs no number can pay, whatever is accepted, decoding is plain. Heads that
        cannot draft 7 tokens, or whose file says that they were trained for fewer, draft at most
        what they can or were trained for, and heads that are set to draft more, or a tree, keep
        that. ``"auto:NAME"``: the number that another policy wants, one of
        ``specjax.drafters.POLICIES``, with or without settings, such as
        ``"auto:huggingface:start=5"``; costs are measured for those that read them (``goodput``,
        ``schedule``). A number is refused with a
        drafter object, which has its own number, and for plain decoding.
      tree: the shape of the draft instead of a chain (see ``specjax.trees``): a ``Tree`` or
        ``Expand``, parents ``(-1, 0, 0, 1)``, or a text such as ``"3x2x1"`` or
        ``"expand:8x4x24"``; a text that names a ``.json`` file is read here, and the field holds
        the file's tree. Give ``num`` or ``tree``, not both; only ``num="auto"``, with or without
        a policy, can be combined with a tree.
      rule: the acceptance rule, a name in ``specjax.acceptance.RULES`` or a ``specjax.Rule``.
        ``"auto"`` selects a lossless rule that fits the draft.
      sibling_sampling: how the children of a node are chosen above temperature 0: ``"top"``,
        ``"iid"``, ``"distinct"`` or ``"hub"`` (see the glossary), or of chains ``"learned"``:
        each row draws its tokens or takes the most probable ones, whichever was accepted more
        often in its earlier rounds (see ``drafters.DrawnOrTop``). None: the way that the rule
        needs; under the rule ``"auto"`` heads draw, ``"iid"`` in a chain and, unless a row is
        greedy, ``"distinct"`` in a static tree. Only draft models, heads and the target's own
        layers draw siblings; a drafter object has its own setting.

    Raises:
      ValueError: the rule or the way of sampling siblings is unknown, ``num`` is no number of
        drafts or names no policy, ``tree`` describes no tree, or there are both a number and a
        tree.
      TypeError: the rule is neither a name nor a ``specjax.Rule``; ``tree`` is of another type; or
        there is no such setting, and the error names the nearest one.

    Example::

        specjax.generate(lm, "def f(x):", drafting=specjax.Drafting(num=5))
    """

    num: int | str | None = None
    tree: trees.Topology | str | Sequence[int] | None = None
    rule: str | Rule = "auto"
    sibling_sampling: str | None = None

    def __post_init__(self):
        acceptance.named(self.rule)
        if self.num is not None:
            auto_policy(self.num) if is_auto(self.num) else number_of(self.num)
        if self.tree is not None:
            check_one_shape(self.num, self.tree)
            shape = trees.as_topology(self.tree)
            if isinstance(self.tree, str) and names_file(self.tree):
                object.__setattr__(self, "tree", shape)
        known = *expand.HOW, LEARNED
        if self.sibling_sampling not in (None, *known):
            raise ValueError(
                f"sibling_sampling={self.sibling_sampling!r} is unknown; known: None, "
                f"{', '.join(known)}"
            )

    def __repr__(self) -> str:
        return short_repr(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """The options of every function that decodes; the docstring of ``generate`` explains them."""

    drafter: DrafterLike = "auto"
    drafting: Drafting = Drafting()
    sampling: Sampling = Sampling()
    max_new_tokens: int | Sequence[int] = 128
    seed: int | Sequence[int] = 0
    stop: Sequence[int] | None = None
    stop_strings: str | Sequence[str] | Sequence[Sequence[str]] | None = None
    drafter_params: PyTree = None

    def __post_init__(self):
        for name, kind in (("drafting", Drafting), ("sampling", Sampling)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                several = kind is Sampling and isinstance(value, list | tuple)
                rows = ", whose fields take a value for each row, such as temperature=[0.0, 0.7]"
                shown = f"a {type(value).__name__} of {len(value)}" if several else f"{value!r:.60}"
                raise TypeError(
                    f"{name}={shown}: give one specjax.{kind.__name__}(...){rows * several}, or "
                    "leave it out"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """The options of ``generate``; its docstring explains them."""

    num_samples: int = 1
    logprobs: bool | str = False
    inputs: PyTree = None


def short_repr(one) -> str:
    """Returns the call that makes a dataclass, with the fields that are not the default."""
    given = []
    for field in dataclasses.fields(one):
        value = getattr(one, field.name)
        if not (value is field.default or (type(value) in (int, str) and value == field.default)):
            given.append(f"{field.name}={value!r}")
    return f"{type(one).__name__}({', '.join(given)})"


def options_from(given: SharedOptions, **changes) -> Options:
    """Returns ``Options`` with the fields that ``given`` shares with them, and ``changes``."""
    shared = {field.name for field in dataclasses.fields(given)}
    names = [field.name for field in dataclasses.fields(Options) if field.name in shared]
    return Options(**{name: getattr(given, name) for name in names} | changes)


def takes(
    options: Callable[P, SharedOptions],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, Any, P], R]]:
    """Returns a decorator for ``f(lm, prompts, *, options)``, which makes the fields of ``options``
    keyword arguments of ``f``."""
    return takes_fields(options, _instead)


def _instead(name: str, known: Sequence[str]) -> str:
    """Returns the text that names what to give in place of an unknown option."""
    drafting = {f.name: f.name for f in dataclasses.fields(Drafting)} | {"num_draft": "num"}
    if name in drafting and "drafting" in known:
        return f"give drafting=specjax.Drafting({drafting[name]}=...)"
    if name in {f.name for f in dataclasses.fields(Sampling)} and "sampling" in known:
        return f"give sampling=specjax.Sampling({name}=...)"
    return nearest(name, known)
