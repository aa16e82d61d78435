"""Proposes what drafts where the user of ``plan`` has not chosen it: layers, or a method.

A draft model with another tokenizer is proposed once by each method across vocabularies, ``tli``
and ``slem``. Of a model's own layers two drafters are proposed: all layers but for a set of
sublayers, which ``LayerSearch`` finds, and the first E layers with the LM head, whose E has the
best prediction of the same search. ``plan`` then measures all of them beside the other drafters.

References: Draft & Verify, arXiv 2309.08168 (skipped sublayers); LayerSkip, arXiv 2404.16710 (early
exit, and the pass that runs the other layers alone).
"""

from __future__ import annotations

from collections.abc import Callable

from ...checkpoints import HeadLM
from ...checkpoints.sub_network import default_path
from ...drafters.self_draft import SelfDraft
from ...models.lm import LM, as_drafter
from ...models.sub_network import KINDS
from ...models.vocabularies import OtherTokenizer
from ...text.drafter_names import COPYING, WithLookup
from ...text.options import Prompts
from ...text.other_vocabulary import METHODS, translated
from ..layer_search import MOST_DRAFTS, Choice, LayerSearch, decoder_of, predict


def asks_for_layers(lm: LM, drafter) -> bool:
    """Whether ``drafter`` is the name ``self`` for a model whose layers were not chosen yet.

    Raises:
      ValueError: the model has no parts that could draft.
    """
    if drafter != SelfDraft.name:
        return False
    path = default_path(lm)
    if path is not None and path.is_file():
        return False
    decoder_of(lm)
    return True


def across_vocabularies(
    lm: LM, name: str, found: str | LM | HeadLM | SelfDraft | WithLookup
) -> dict[str, str | LM | HeadLM | SelfDraft | WithLookup]:
    """Returns the drafters that a name stands for in a plan, by their names.

    A draft model with another tokenizer becomes two, ``tli:NAME`` and ``slem:NAME``, or the one of
    them that can draft; any other drafter stays as it is.

    Args:
      lm: the target.
      name: what the user wrote.
      found: what ``generate`` finds by that name.

    Raises:
      ValueError: the draft model has another tokenizer, and neither method can draft with it.
    """
    if isinstance(found, WithLookup):
        own = across_vocabularies(lm, name.removeprefix(found.lookup), found.inner)
        if found.lookup == COPYING:  # strings have no logits
            own = {n: d for n, d in own.items() if not n.startswith("slem:")}
        return {f"{found.lookup}{n}": WithLookup(d, found.lookup) for n, d in own.items()}
    if not isinstance(found, LM) or not found.loaded:
        return {name: found}
    try:
        as_drafter(lm, found)
    except OtherTokenizer as error:
        made: dict[str, str | LM | HeadLM | SelfDraft | WithLookup] = {}
        refused: ValueError = error
        for method in METHODS if error.across else ():
            try:
                made[f"{method}:{found.name}"] = translated(lm, found, method)
            except ValueError as why:
                refused = why
        if not made:
            raise refused from None
        return made
    except ValueError:  # refused as `generate` refuses it, beside all other drafters
        pass
    return {name: found}


def propose(
    lm: LM, prompts: Prompts, max_new_tokens: int, tell: Callable[[str], None] = lambda _: None
) -> dict[str, SelfDraft]:
    """Returns drafters that are parts of the target, by the names under which ``generate`` knows
    them.

    Args:
      lm: a decoder-only model from ``specjax.load``.
      prompts: see ``generate``; the sets are judged on texts that the target writes for them.
      max_new_tokens: the length of these texts in tokens; at least 2 are written.
      tell: a function that is called with a line of text after each step.
    """
    tell("timing passes of layers")
    search = LayerSearch(lm, prompts, max_new_tokens=max(2, max_new_tokens))
    search.run(tell)
    found = [SelfDraft(search.choice.num_draft, target=lm.target, skip=search.choice.skip)]
    exits = {exit: judge_exit(search, exit) for exit in range(1, decoder_of(lm).num_layers)}
    if exits:
        exit = max(exits, key=lambda exit: exits[exit].ratio)
        found.append(SelfDraft(exits[exit].num_draft, target=lm.target, exit=exit))
    return {drafter.words: drafter for drafter in found}


def judge_exit(search: LayerSearch, exit: int) -> Choice:
    """Returns the predicted speed of the first ``exit`` layers as a drafter.

    The target's pass runs the other layers alone, so of ``T(g + 1)`` it takes the share that these
    have of a pass over one token.
    """
    layers, costs = len(search.names) // len(KINDS), search.costs
    later = tuple(f"{kind}.{layer}" for layer in range(exit, layers) for kind in KINDS)
    right = search.right(later)
    share = costs.part(exit, exit) / costs.passes[1]
    skipped = layers - exit
    drafts, ratio = predict(right, costs, skipped, skipped, MOST_DRAFTS, verified=share)
    return Choice(later, drafts, float(right.mean()), ratio)
