"""``plan``: finds the fastest drafter, number of drafts and batch size for the user's prompts.

Few programs are compiled and many choices are compared. For every drafter, the prompts are decoded
with the shortest and the longest draft. Then rounds with the longest draft are tried from every
position of the text, which gives the accepted tokens of every shorter draft. From T(N), the time of
the target's pass over N nodes, and the time of drafting at both lengths follows the predicted rate
of each length between: expected tokens / (T(N) + time of drafting), so that the time spent on
rejected tokens is included. A drafter whose state depends on more than the text before the root
(``Drafter.can_rewind`` is False), such as ``recycling``, ``jacobi`` and ``lookahead``, or whose
shorter drafts are no beginnings of the longer ones (``slem``), runs at every length, and its rates
are measured. ``measure.py`` measures and ``predict.py`` predicts.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ... import sharding
from ..._internal.table_text import table_text
from ...checkpoints import HeadLM
from ...drafters.self_draft import SelfDraft
from ...models.lm import LM
from ...sampling.distribution import Sampling
from ...text import drafter_names, other_vocabulary, own_drafters
from ...text.options import Drafting, Options, Prompts
from ...text.unused_options import draws_siblings
from ...types import Rule
from .candidate import Candidate
from .measure import PLAIN, Survey
from .propose import across_vocabularies, asks_for_layers, propose

MOST_BATCH = 1024  # rows; every buffer has a part for each row
WIDTH = 100  # characters of a printed plan


@dataclasses.dataclass(frozen=True)
class Plan:
    """The candidates that ``plan`` compared, and the choice; prints as a table.

    Attributes:
      model: name of the target.
      candidates: all considered candidates, the best predicted rate first.
      passes: ``{batch: {N: seconds}}`` of the target's pass over N nodes.
      drafting: ``{batch: {drafter: {num_draft: seconds}}}``: seconds of a round without its pass
        and without the overhead of a plain round, at the measured draft lengths.
      prompts: number of prompts.
      max_new_tokens: the budget of each prompt.
      temperature: the sampling temperature.
      seconds: duration of the planning in seconds.
      finished: False if Ctrl-C ended planning; the candidates are then those known until then.
      approximate: why the target only approximates the named model (it is quantized); empty
        otherwise.
      rule: the acceptance rule, as it was given.
      rule_changes: the rule, if it is approximate, so that drafts change the text; empty otherwise.
      sibling_sampling: how draft models, heads and layers of the target chose tokens above
        temperature 0, as it was given.
      without_siblings: names of the drafters to which that does not apply.
    """

    model: str
    candidates: list[Candidate]
    passes: dict[int, dict[int, float]]
    drafting: dict[int, dict[str, dict[int, float]]]
    prompts: int
    max_new_tokens: int
    temperature: float
    seconds: float
    finished: bool = True
    approximate: str = ""
    rule: str | Rule = "auto"
    rule_changes: str = ""
    sibling_sampling: str | None = None
    without_siblings: tuple[str, ...] = ()

    @property
    def choice(self) -> Candidate:
        """The fastest candidate: by measured rates if ``verify`` measured some, else by predicted
        rates."""
        verified = [c for c in self.candidates if c.measured is not None]
        if not self.finished:  # perhaps not all of the best candidates were measured
            verified = []
        return max(verified, key=lambda c: c.measured or 0.0) if verified else self.candidates[0]

    @property
    def options(self) -> dict:
        """The choice as options of ``generate``. A drafter is given by its name; if ``plan`` got a
        loaded object, pass this object as ``drafter=`` instead."""
        best = self.choice
        if best.drafter == PLAIN:
            return {"drafter": PLAIN}
        how = self._chosen_siblings
        drafting = Drafting(num=best.num_draft or None, rule=self.rule, sibling_sampling=how)
        return {"drafter": best.drafter, "drafting": drafting}

    @property
    def _chosen_siblings(self) -> str | None:
        """``sibling_sampling`` of the choice."""
        without = (PLAIN, *self.without_siblings)
        return None if self.choice.drafter in without else self.sibling_sampling

    @property
    def verdict(self) -> str:
        """The choice in one line, and whether speculation is faster than plain decoding."""
        line = self._advice()
        reasons = [self.approximate, "" if self.choice.drafter == PLAIN else self.rule_changes]
        reason = ", ".join(filter(None, reasons))
        return f"{line}; {reason}: approximate" if reason else line

    def _advice(self) -> str:
        best = self.choice
        at = f" at batch {best.batch}" if len({c.batch for c in self.candidates}) > 1 else ""
        partial = "" if self.finished else " (interrupted: some candidates were not considered)"
        if best.drafter == PLAIN:
            return f"plain decoding wins{at}: none of these drafters is faster{partial}"
        if best.measured_ratio is not None:
            return f"use {best}{at}: {best.measured_ratio:.2f} × plain, measured{partial}"
        known = "predicted" if best.predicted else "as it ran"
        line = f"use {best}{at}: {best.ratio:.2f} × plain, {known}"
        if best.interval is not None:
            low, high = best.interval
            line += f" [{low:.2f}, {high:.2f}]"
            line += "" if low > 1 else "; plain decoding may be as fast: --verify measures it"
        return line + partial

    def table(self):
        """Returns the candidates as a ``rich`` table."""
        from rich import box
        from rich.table import Table

        title = f"{self.model}: {self.prompts} prompts, {self.max_new_tokens} new tokens each, "
        title += f"T = {self.temperature:g}\npredicted tokens/s of the rounds alone and whole runs"
        table = Table(
            title=title,
            title_justify="left",
            title_style="",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        names = ["batch", "drafter", "drafts", "τ", "accepted", "rounds", "whole"]
        verified = any(c.measured is not None for c in self.candidates)
        for name in names + ["× plain", "95 %"] + ["measured", "× plain"] * verified:
            if name == "drafter":  # its settings may make a name long
                table.add_column(name, justify="left", overflow="fold")
            else:
                table.add_column(name, justify="right", no_wrap=True)
        shown = other_vocabulary.shortened({c.drafter for c in self.candidates})
        for c in self.candidates:
            accepted = "" if math.isnan(c.acceptance) else f"{100 * c.acceptance:.0f} %"
            low, high = c.interval or (0, 0)
            spread = f"{low:.2f}–{high:.2f}" if high and c.drafter != PLAIN else ""
            cells = [str(c.batch), shown[c.drafter], str(c.num_draft or "")]
            cells += [f"{c.tau:.2f}", accepted]
            cells += [f"{c.rounds_rate:,.0f}", f"{c.rate:,.0f}", f"{c.ratio:.2f}", spread]
            if c.measured is not None:
                cells += [f"{c.measured:,.0f}", f"{c.measured_ratio:.2f}"]
            table.add_row(*cells, style="bold" if c is self.choice else None)
        return table

    def as_json(self) -> dict:
        """Returns the plan as JSON values, with None in place of NaN."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {str(key): plain(v) for key, v in value.items()}
            if isinstance(value, list | tuple):
                return [plain(v) for v in value]
            return None if isinstance(value, float) and math.isnan(value) else value

        rule = self.rule if isinstance(self.rule, str) else self.rule.name
        facts = dataclasses.asdict(dataclasses.replace(self, rule=rule))
        chosen = dataclasses.asdict(self.choice)
        options: dict[str, Any] = {"drafter": self.choice.drafter}
        if self.choice.num_draft:
            options["num_draft"] = self.choice.num_draft
        if self.choice.drafter != PLAIN and rule != "auto":
            options["rule"] = rule
        if self._chosen_siblings is not None:
            options["sibling_sampling"] = self._chosen_siblings
        return plain(facts | {"choice": chosen, "options": options, "verdict": self.verdict})

    def __str__(self) -> str:
        return table_text(self.table(), WIDTH) + self.verdict


def plan(
    lm: LM,
    prompts: Prompts,
    *,
    drafters: Sequence[str | LM | HeadLM | SelfDraft] | None = None,
    num_drafts: Sequence[int] = (1, 3, 7, 15),
    batches: Sequence[int] = (1,),
    drafting: Drafting = Drafting(),
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 64,
    seed: int = 0,
    stop: Sequence[int] | None = None,
    turns: int = 5,
    seconds: float = 8.0,
    verify: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Measures on prompts, and predicts the rate of every drafter, number of drafts and batch size.

    At temperature 0 the predicted numbers of tokens are exact and the predicted seconds are
    approximate; above temperature 0 both are approximate. See ``predict.py``.

    Args:
      lm: the target, from ``specjax.load``.
      prompts: texts or token ids, see ``generate``; several prompts of the kind that will be
        decoded. All are padded to one shape. For Whisper, features: arrays ``[bins, frames]``,
        names of ``.npy`` files, or mappings, see ``serve_offline``.
      drafters: names, see ``generate`` (``"ngram"``, ``"suffix"``, ``"draft"``, ``"medusa"``,
        ``"self:exit=4"``, the folder or hub name of a draft model or of heads, ``"tli:NAME"`` and
        ``"slem:NAME"`` for a draft model with another tokenizer, whose name alone stands for
        both, ``"ngram+draft"``), draft
        models from ``specjax.load``, heads from ``specjax.load_drafter``, or a ``SelfDraft``.
        ``"self"`` without a choice of layers in the model's folder searches some (see
        ``propose.py``). Default: ``ngram``, ``draft`` if the target has a draft model, and ``self``
        if ``specjax layers`` saved a choice in its folder. Plain decoding is always considered.
      num_drafts: the numbers of drafts to consider. The least and the greatest are run, the others
        are predicted. Heads draft chains, at most as long as their depth.
      batches: the batch sizes to consider. The choice is by tokens a second over all rows, so that
        larger batches often win; give one size if latency matters.
      drafting: only its rule and its ``sibling_sampling`` are used, because the plan determines
        the number of drafts. Above temperature 0, ``sibling_sampling="top"`` plans with the most
        probable tokens, where draft models and heads draw theirs by default, and ``"learned"`` with
        whichever a row's rounds accepted more often; drafters that draw no siblings are planned as
        they are. Which way is accepted more often depends on how sharp the laws are, so compare
        two plans.
      sampling, max_new_tokens, seed, stop: see ``generate``; one value for all prompts.
      turns: the most turns in which everything is timed.
      seconds: after so many seconds no further turn begins, from the third turn on.
      verify: the number of best candidates that are run afterwards, in turn with plain decoding;
        the choice is then by the measured rates.
      progress: a function that is called with a line of text whenever a measurement begins.

    Returns:
      a ``Plan``. Ctrl-C ends the measurements; the candidates that are known then are returned. If
      no candidate is known, ``KeyboardInterrupt`` is raised.

    Raises:
      ValueError: before anything is compiled: an option is wrong. The error names the argument and
        the accepted values.

    Example::

        found = specjax.plan(lm, ["def quicksort(xs):", "import os"])
        print(found)
        specjax.generate(lm, "def mergesort(xs):", **found.options)
    """
    begin = time.perf_counter()
    sharding.check_one_process("plan")
    if drafters is None:
        drafters = ["ngram", *(["draft"] if own_drafters.own_draft_name(lm) else [])]
        drafters += [SelfDraft.name] if own_drafters.saved_layers(lm) else []
    given = _several(drafters)
    searched = [drafter for drafter in given if asks_for_layers(lm, drafter)]
    others = [drafter for drafter in given if drafter not in searched]
    named = _named(lm, others) if others or not searched else {}
    lengths = _whole("num_drafts", num_drafts, 1, drafter_names.MOST_DRAFTS)
    batches = _whole("batches", batches, 1, MOST_BATCH)
    _whole("turns", [turns], 1, 10**6)
    _whole("verify", [verify], 0, 10**6)
    if drafting.num is not None or drafting.tree is not None:
        raise ValueError(
            f"drafting={drafting}: plan finds the number of drafts itself and plans chains; give "
            "num_drafts, and in drafting only the rule and the sibling_sampling"
        )
    common = Options(
        drafting=drafting, sampling=sampling, max_new_tokens=max_new_tokens, seed=seed, stop=stop
    )
    wrong = sampling.per_row() + ["seed"] * (np.ndim(seed) > 0)
    wrong += ["max_new_tokens"] * (np.ndim(max_new_tokens) > 0)
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: plan decodes all prompts alike; give one value instead of one "
            "for each prompt"
        )
    if max_new_tokens < 2:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: reading a prompt emits its first token, so that no "
            "round would be left to plan; give 2 or more"
        )
    tell = progress or (lambda line: None)
    surveys = [Survey(lm, prompts, batch, named, lengths, common) for batch in batches]
    if searched:
        named = propose(lm, prompts, max_new_tokens, tell) | named
        surveys = [Survey(lm, prompts, batch, named, lengths, common) for batch in batches]
    how = drafting.sibling_sampling
    without = tuple(n for n, one in named.items() if how and not draws_siblings(one, how))
    if how and len(without) == len(named):
        raise ValueError(
            f"drafting: sibling_sampling={how!r}: none of drafters={list(named)} draws siblings; "
            "leave sibling_sampling out, or plan a draft model or heads"
        )
    finished = True
    try:
        for survey in surveys:
            survey.prepare(tell)
            survey.read(turns, seconds, tell)
    except KeyboardInterrupt:
        finished = False
    known = [survey for survey in surveys if survey.ready]
    if not known:
        raise KeyboardInterrupt
    found = sorted((c for s in known for c in s.candidates()), key=lambda c: -c.rate)
    if verify and finished:
        best = [c for c in found if c.drafter != PLAIN][:verify]
        try:
            for survey in surveys:
                found = survey.verify(found, best, turns, seconds, tell)
        except KeyboardInterrupt:
            finished = False
    costs = {survey.batch: survey.relative_costs() for survey in known}
    return Plan(
        model=lm.name,
        candidates=found,
        passes={b: {n: c.unit * cost for n, cost in c.passes.items()} for b, c in costs.items()},
        drafting={
            b: {
                name: {n: c.unit * cost for n, cost in known.items()}
                for name, known in c.drafts.items()
                if name != PLAIN
            }
            for b, c in costs.items()
        },
        prompts=surveys[0].num_prompts,
        max_new_tokens=max_new_tokens,
        temperature=float(np.max(sampling.temperature)),
        seconds=time.perf_counter() - begin,
        finished=finished,
        approximate=lm.target.approximate,
        rule=drafting.rule,
        rule_changes=known[0].rule_changes,
        sibling_sampling=how,
        without_siblings=without,
    )


def _whole(name: str, values, least: int, most: int) -> list[int]:
    """Returns the values sorted and without duplicates.

    Raises:
      ValueError: a value is not an integer from ``least`` to ``most``, or there is none.
    """
    values = [values] if isinstance(values, int) else list(values)
    good = [isinstance(v, int | np.integer) and least <= v <= most for v in values]
    if not good or not all(good):
        raise ValueError(f"{name}={values}: give integers from {least} to {most}, at least one")
    return sorted({int(v) for v in values})


def _several(drafters) -> list:
    single = isinstance(drafters, str | os.PathLike | LM | HeadLM | SelfDraft)
    return [drafters] if single else list(drafters)


def _named(lm: LM, drafters) -> dict[str, str | LM | HeadLM | SelfDraft | drafter_names.WithLookup]:
    """Returns the drafters by the names that the plan shows.

    Raises:
      ValueError: a drafter is not accepted, there is none, or one is given twice.
    """
    named, twice = {}, False
    for drafter in _several(drafters):
        if isinstance(drafter, LM | HeadLM | SelfDraft):
            shown = drafter.words if isinstance(drafter, SelfDraft) else drafter.name
            twice |= shown in named
            named[shown] = drafter
            continue
        found = None
        if isinstance(drafter, str | os.PathLike) and drafter not in drafter_names.NO_DRAFTS:
            found = drafter_names.named(lm, drafter)
        if not isinstance(found, str | LM | HeadLM | SelfDraft | drafter_names.WithLookup):
            raise ValueError(
                f"drafters: {drafter!r:.60} cannot be planned with; accepted are the names that "
                "`specjax drafters` lists (except plain decoding, which is always considered), the "
                "folder or hub name (owner/name) of a draft model or of heads, a draft model from "
                "specjax.load, heads from specjax.load_drafter, a SelfDraft"
            )
        shown = found if isinstance(found, str) else os.fspath(drafter)
        own = across_vocabularies(lm, shown, found)
        twice |= not named.keys().isdisjoint(own)
        named |= own
    if twice or not named:
        raise ValueError(f"drafters={list(named)}: give at least one drafter, and each once")
    return named
