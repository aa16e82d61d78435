"""Refuses options that the drafter would ignore, so that no option is ignored silently."""

from __future__ import annotations

from ..checkpoints import HeadLM
from ..drafters.self_draft import SelfDraft
from ..models.lm import LM
from ..types import Drafter, PyTree
from .auto_number import is_auto
from .drafter_names import NO_DRAFTS, DrafterGiven, WithLookup
from .options import Drafting


def refuse_unused(given, drafter: DrafterGiven, drafting: Drafting, params: PyTree) -> None:
    """Refuses options of ``drafting`` and ``drafter_params`` that ``drafter`` would ignore.

    Args:
      given: the value of ``drafter=``, for the error.
      drafter: ``given``; if ``given`` is a name, the result of ``drafter_names.named``.
      drafting: the value of ``drafting=``.
      params: the value of ``drafter_params=``, or None.

    Raises:
      ValueError: an option would be ignored; the error names it and the way out.
    """
    called = f"drafter={given!r:.60}"
    if isinstance(drafter, str) and drafter != given:
        called += f" (here {drafter!r})"
    plain = drafter is None or isinstance(drafter, str) and drafter in NO_DRAFTS
    own = isinstance(drafter, Drafter)
    number = not (
        drafting.num is None or is_auto(drafting.num)
    )  # with "auto", drafting nothing is allowed
    if number and plain:
        raise ValueError(
            f"num={drafting.num!r}: {called} drafts nothing; leave num out, or give another "
            "drafter, such as 'ngram'"
        )
    if number and own and not isinstance(drafter, SelfDraft):
        how = f"leave num out, or make the object with num_draft={drafting.num!r}"
        if drafter.topology is not None and drafter.takes_topology:
            how = f"leave num out, or give tree='chain:{drafting.num}' in its place"
        raise ValueError(
            f"num={drafting.num!r}: {called} is an object, which drafts {drafter.num_draft} tokens "
            f"a round; {how} (num='auto' is accepted)"
        )
    if drafting.sibling_sampling is not None:
        _refuse_siblings(called, drafter, drafting.sibling_sampling)
    if params is not None and (not own or not drafter.has_weights):
        why = "brings its own weights"
        if plain or own or isinstance(drafter, str):  # a table
            why = "has no weights"
        raise ValueError(
            f"drafter_params: {called} {why}; leave drafter_params out: they are accepted with a "
            "specjax.Drafter object that reads weights (whose class states has_weights = True)"
        )


def draws_siblings(drafter: DrafterGiven, wanted: str) -> bool:
    """Whether ``Drafting.sibling_sampling`` is not ignored with a drafter."""
    try:
        _refuse_siblings("", drafter, wanted)
    except ValueError:
        return False
    return True


def _refuse_siblings(called: str, drafter: DrafterGiven, wanted: str) -> None:
    """Raises ``ValueError`` where ``Drafting.sibling_sampling`` would be ignored."""
    way_out = "leave sibling_sampling out"
    if isinstance(drafter, WithLookup):
        return _refuse_siblings(called, drafter.inner, wanted)
    if isinstance(drafter, SelfDraft) and drafter.sibling_sampling is None:
        return
    if isinstance(drafter, Drafter):
        why = "is an object, which decides by itself how siblings are drawn"
        if drafter.takes_sibling_sampling:
            way_out += f", or make the object with sibling_sampling={wanted!r}"
    elif isinstance(drafter, HeadLM) and not drafter.drafter.takes_sibling_sampling:
        why = "has no choice of how siblings are drawn"
    elif isinstance(drafter, LM | HeadLM):
        return
    else:
        why, way_out = "draws no siblings", f"{way_out}, or give a draft model or heads"
    raise ValueError(f"sibling_sampling={wanted!r}: {called} {why}; {way_out}")
