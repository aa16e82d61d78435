"""What ``specjax.plan`` predicts for drafters whose speed a suite measures."""

from __future__ import annotations

import specjax
from specjax.analysis.plan.measure import PLAIN


def predicted(lm, ways: list[dict], texts: list[str], new: int) -> list[dict]:
    """Plans for each of ``ways`` at temperature 0.

    Args:
      lm: the embedded target, grown to 100M weights.
      ways: for each drafter ``{"drafter": name, "num_draft": n}``; ``draft`` is the embedded draft
        model, also within the name of a cascade or of a lookup beside it.
      texts: the prompts on which the plan measures.
      new: the tokens that are emitted for each prompt.

    Returns:
      for each way ``tau``, ``ratio_rounds`` (the predicted rate of the rounds, divided by that of
      plain decoding), ``ratio_whole``, and ``predicted``: False where the planner ran the drafter
      instead.
    """
    found = []
    for way in ways:
        name = way["drafter"].replace("draft", "embedded-draft")
        options = dict(drafters=[name], num_drafts=[way["num_draft"]], max_new_tokens=new)
        plan = specjax.plan(lm, texts, **options)
        plain = next(one for one in plan.candidates if one.drafter == PLAIN)
        best = next(one for one in plan.candidates if one.drafter != PLAIN)
        figures = {"tau": best.tau, "ratio_whole": best.ratio, "predicted": best.predicted}
        found.append(figures | {"ratio_rounds": best.rounds_rate / plain.rounds_rate})
    return found
