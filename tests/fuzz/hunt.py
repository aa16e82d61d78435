"""The hunt: case after case until the time is up; what fails is made smaller and printed."""

from __future__ import annotations

import collections
import dataclasses
import gc
import linecache
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import jax

import specjax
from specjax.decoding import loop

from .cases import KINDS, LOSSLESS, Case, drawn_case, law_tokens
from .drafters import Refused
from .draws import Draws, pick
from .law_check import texts_have_the_targets_law
from .mates import rows_do_not_depend_on_their_mates
from .runs import Wrong, check, run
from .text_checks import texts_are_the_references

PACKAGE = str(Path(specjax.__file__).parent)
RUNS = {"toy": 6, "decoder": 4, "shipped": 2}  # batches of each program whose texts are compared
SHRINK_SECONDS = 90  # spent on making one failing case smaller
FORGET = 40  # cases after which compiled programs are dropped: each maps memory
COMMAND = "python -m pytest tests/fuzz/test_fuzz.py -s --fuzz-seed {} --fuzz-case {}"


@dataclasses.dataclass
class Failure:
    """A case that fails: its draws, the words of the case, and the error."""

    draws: Draws
    words: str
    error: Exception

    def __str__(self) -> str:
        command = COMMAND.format(self.draws.seed, self.draws.number)
        if self.draws.dropped:
            command += f" --fuzz-drop {','.join(self.draws.dropped)}"
        return f"{type(self.error).__name__}: {self.error}\n  {self.words}\n  {command}"


@dataclasses.dataclass
class Report:
    """What a hunt did.

    Attributes:
      counts: cases by kind and outcome.
      refusals: the messages with which compositions were refused, and how often.
      compared: tokens that were held against the reference.
      failures: in the order in which they were found.
    """

    counts: collections.Counter
    refusals: collections.Counter
    compared: int
    failures: list[Failure]

    @property
    def tried(self) -> int:
        """Cases that were run."""
        return sum(n for outcome, n in self.counts.items() if not outcome.startswith("refused"))

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {outcome}" for outcome, n in sorted(self.counts.items()))
        lines = [f"{self.tried} cases, {self.compared} tokens compared: {counts}"]
        lines += [f"  refused {n} times: {text}" for text, n in self.refusals.most_common()]
        return "\n".join([*lines, *map(str, self.failures)])


def hunt(
    seed: int,
    seconds: float,
    *,
    most: int = 1_000_000,
    kinds=KINDS,
    rules=LOSSLESS,
    failures: int = 3,
    say: Callable[[str], None] = print,
    follow: bool = False,
) -> Report:
    """Tries the cases of a seed, one after the other, and reports what failed.

    Args:
      seconds: no case is begun after so long; the first is always tried.
      most: no more cases than these.
      kinds, rules: of the cases, see ``cases``.
      failures: that end the hunt.
      say: is told of each failure when it is found.
      follow: whether ``say`` is told of each case.
    """
    end = time.monotonic() + seconds
    report = Report(collections.Counter(), collections.Counter(), 0, [])
    for number in range(most):
        if number and (time.monotonic() > end or len(report.failures) == failures):
            break
        before, begin = report.counts.copy(), time.monotonic()
        draws = Draws(seed, number)
        failure = tried(draws, report, kinds, rules)
        if follow:
            (outcome,) = report.counts - before
            say(f"case {number}, {time.monotonic() - begin:.1f} s: {outcome}; {draws.taken}")
        if failure is not None:
            failure = smaller(failure, kinds, rules)
            report.failures.append(failure)
            say(f"FAILED {failure}")
        if number % FORGET == FORGET - 1:
            jax.clear_caches()
            gc.collect()
    return report


def tried(draws: Draws, report: Report, kinds=KINDS, rules=LOSSLESS) -> Failure | None:
    """Runs a case; what came of it is counted in ``report``."""
    words = "(the case could not be made)"
    try:
        case = drawn_case(draws, kinds, rules)
        words = described(case)
        outcome, compared = checked(case, rules)
        report.compared += compared
        report.counts[f"{case.kind} {outcome}".strip()] += 1
    except Refused as refusal:
        report.counts["refused"] += 1
        report.refusals[f"{str(refusal)[:100]!r}"] += 1
    except Exception as error:  # noqa: BLE001, whatever is raised is a finding
        report.counts["failed"] += 1
        return Failure(draws, f"{words}\n  {last_line(error)}", error)
    return None


def checked(case: Case, rules=LOSSLESS) -> tuple[str, int]:
    """Runs a case under the first rule that admits its drafts, and checks what it said.

    Returns:
      The outcome in words, and how many tokens were compared.

    Raises:
      Wrong: what was said is wrong, a program was traced twice, or the package refuses a drafter
        that has the settings of its line and is in no combinator.
      Refused: the package refuses the composition under every rule.
    """
    refusal = None
    for rule in rules_of(case, rules):
        case = dataclasses.replace(case, rule=rule)
        programs = {name: own._cache_size() for name, own in PROGRAMS.items()}
        try:
            if case.kind == "law":
                tokens = law_tokens(case.model, case.composition.drafter)
                found = texts_have_the_targets_law(case, tokens), 0
            else:
                found = "", sum(compared(case, index) for index in range(RUNS[case.model.kind]))
        except (ValueError, NotImplementedError) as error:
            if not refused(error):
                raise
            refusal = Refused(f"{type(error).__name__}: {error}")
            continue
        for name, own in PROGRAMS.items():
            check(own._cache_size() - programs[name] <= 1, f"{name} was traced more than once")
        return found
    if refusal is None:
        raise Wrong("no rule to try")
    own = case.rule == "auto" and {"settings", "wrapper"}.isdisjoint(case.draws.taken)
    check(not own, "a drafter is refused as it is, under every rule:", refusal)
    raise refusal


PROGRAMS = {"decode": loop._decode, "start": loop.jit_start, "burst": loop.jit_burst}


def rules_of(case: Case, rules) -> list[str]:
    """The rules to try in turn: where one refuses the drafts, the next."""
    if case.kind in ("greedy", "coupled"):
        return [case.rule] if case.rule in ("auto", "coupled") else [case.rule, "auto"]
    generator = case.draws.generator("rules")
    others = [pick(generator, [r for r in rules if r != "greedy"]) for _ in range(2)]
    return [*dict.fromkeys([r for r in (case.rule, *others) if r != "greedy"]), "auto"]


def compared(case: Case, index: int) -> int:
    """Runs a case on one batch, and compares its texts with the reference."""
    rows = run(case, index)
    if case.kind == "sampled":
        rows_do_not_depend_on_their_mates(case, index, rows)
    return texts_are_the_references(case.model, case.kind, rows, case.logprobs)


def refused(error: Exception) -> bool:
    """Whether the package raised an error on purpose: by a line of its own that raises, and not
    because a drafter, a rule or a target broke its contract."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
    if not own or own[-1] != frames[-1] or own[-1].filename.endswith("contract_checks.py"):
        return False
    return linecache.getline(own[-1].filename, own[-1].lineno).strip().startswith("raise")


def smaller(failure: Failure, kinds=KINDS, rules=LOSSLESS) -> Failure:
    """The same failure with fewer choices: each is dropped in turn, as long as the case fails."""
    end = time.monotonic() + SHRINK_SECONDS
    unused = Report(collections.Counter(), collections.Counter(), 0, [])
    for name in [*failure.draws.taken, "ragged"]:
        if time.monotonic() > end:
            break
        dropped = (*failure.draws.dropped, name)
        draws = Draws(failure.draws.seed, failure.draws.number, dropped)
        found = tried(draws, unused, kinds, rules)
        if found is not None and type(found.error) is type(failure.error):
            failure = found
    return failure


def described(case: Case) -> str:
    """A case in words: its kind, composition and options."""
    options = ", ".join(case.draws.taken) or "none"
    return f"{case.kind} under {case.rule}, {case.entry}: {case.words}; options: {options}"


def last_line(error: Exception) -> str:
    """Where an error was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"raised at {Path(frame.filename).name}:{frame.lineno}, {frame.line}"
