"""Measures the quality of the texts of approximate rules, and their acceptance length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from .. import acceptance, sharding
from .._internal.table_text import table_text
from ..models.lm import LM
from ..text.auto_number import MOST_DRAFTS, is_auto
from ..text.generation import TextStream
from ..text.options import Drafting, Options, Prompts, options_from, takes
from ..text.prepare import prepare_measured, with_bias
from ..text.prompts import prompt_ids
from ..text.session import Session
from ..text.task import GenerationTask
from ..types import Rule
from .comparison import check_texts, whole_rate
from .rescoring import rated, scores_of_new
from .tasks import Task

TURNS = 3  # runs of plain decoding and of each rule in turn, whose median rate counts
REPEATS = 40  # samples of the target's own law, which measure the part of noise


@dataclasses.dataclass(frozen=True)
class RuleQuality:
    """Figures of the texts that one rule emitted, by the target's own probabilities.

    Attributes:
      rule: the name of the rule; ``plain`` for plain decoding, the baseline.
      approximate: why the law is not the target's law; empty if it is.
      tau: tokens emitted per round.
      loglik: mean ``log p`` (nats) of the emitted tokens, by the target at temperature 1.
      best: share of emitted tokens that are the target's most probable one, in [0, 1].
      rank: mean number of tokens that are more probable than the emitted one.
      same: at temperature 0, share of texts that are identical to plain decoding, in [0, 1];
        otherwise None.
      variation: mean total variation between the emitted law and the target's law over the probes,
        and the same of samples of the target's law, which is noise alone. At temperature 0, the
        share of tokens that are not the most probable one, and 0; None without probes.
      divergence: mean KL divergence of the emitted law from the target's law (nats), and that of
        noise alone; None at temperature 0, and if a token of probability 0 was emitted.
      speed: emitted tokens a second of whole runs, in relation to plain decoding in the same turn,
        the median of ``TURNS`` turns; None where a datastore or stop strings ask the host.
      solved: the share of tasks that the texts solve, in [0, 1]; None without tasks.
    """

    rule: str
    approximate: str
    tau: float
    loglik: float
    best: float
    rank: float
    same: float | None
    variation: tuple[float, float] | None
    divergence: tuple[float, float] | None
    speed: float | None = None
    solved: float | None = None


@dataclasses.dataclass(frozen=True)
class Quality:
    """The comparison of rules with plain decoding, from ``quality``; prints as a table.

    Attributes:
      model: name of the target.
      drafting: the drafter, as a text.
      num_probes: the number of positions at which emitted laws were counted.
      probe_samples: the number of draws at each of these positions.
      rules: the figures of plain decoding, then those of each rule.
      num_tasks: the number of prompts with a task.
    """

    model: str
    drafting: str
    num_probes: int
    probe_samples: int
    rules: tuple[RuleQuality, ...]
    num_tasks: int = 0

    def table(self):
        """Returns the figures of the rules as a ``rich`` table."""
        from rich.table import Table

        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("rule", overflow="fold", min_width=9)
        names = ["τ", "speed", "log p", "best", "rank", "same", "TV", "(noise)", "KL", "(noise)"]
        for name in names + ["solved"] * (self.num_tasks > 0):
            table.add_column(name, justify="right", no_wrap=True)
        for one in self.rules:
            same = "-" if one.same is None else f"{one.same:.0%}"
            speed = "-" if one.speed is None else f"{one.speed:.2f}"
            kl, floor, tv, noise = "----"
            if one.variation is not None:
                tv, noise = (f"{x:.3f}" for x in one.variation)
            if one.divergence is not None:
                kl, floor = (f"{x:.4f}" for x in one.divergence)
            cells = [one.rule, f"{one.tau:.2f}", speed, f"{one.loglik:.3f}", f"{one.best:.0%}"]
            cells += [f"{one.rank:.2f}", same, tv, noise, kl, floor]
            table.add_row(*cells, *([] if one.solved is None else [f"{one.solved:.0%}"]))
        return table

    def text(self, width: int = 120) -> str:
        """Returns the table, in lines of at most ``width`` characters, and what it shows."""
        lines = [f"{self.model}, {self.drafting}", table_text(self.table(), width).rstrip("\n")]
        if self.num_probes:
            lines.append(
                f"TV and KL of the next token's law at {self.num_probes} positions, "
                f"{self.probe_samples} draws each; (noise): those of as many draws from the target"
            )
        if self.num_tasks:
            lines.append(f"solved: the share of {self.num_tasks} tasks whose text is right")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


@dataclasses.dataclass(frozen=True, kw_only=True)
class QualityOptions(Options):
    """The options of ``quality``; its docstring explains them."""

    rules: str | Rule | Sequence[str | Rule] = (
        "auto",
        "approximate-typical",
        "approximate-lenience",
    )
    probes: int = 2
    probe_samples: int = 256
    tasks: Sequence[Task | None] = ()


@takes(QualityOptions)
def quality(lm: LM, prompts: Prompts, *, options: QualityOptions) -> Quality:
    """Decodes the same prompts with each rule and plainly, and scores the texts by the target.

    Above temperature 0, the law that a rule emits is compared with the target's law: after each
    prompt, and at further positions of its plain text, the next token is drawn ``probe_samples``
    times and counted. The counted law is that of the first token of a round; where the number of
    drafts is automatic, of a round with the drafter's usual number.

    Args:
      lm, prompts, drafter, drafting, sampling, ...: see ``generate``; each of ``rules`` takes the
        place of ``drafting.rule``.
      rules: names, with settings after a colon (``approximate-lenience:scale=0.3``), or objects;
        or one of these.
      probes: the number of positions in each text at which the emitted law is counted; 0: none.
      probe_samples: the number of draws at each position.
      tasks: for each prompt what says whether its text is right (``specjax.analysis.tasks``), or
        None.

    Returns:
      a ``Quality``, with plain decoding first.

    Raises:
      ValueError: before anything is compiled: there are no rules, a number is out of range, a
        setting depends on earlier tokens, a seed or a setting differs by prompt, the drafter is a
        session, or there are not as many tasks as prompts.

    Example::

        print(specjax.quality(lm, "def f(x):", rules=["approximate-top-k:k=3"]))
    """
    sampling, rules = options.sampling, options.rules
    if isinstance(rules, str | Rule):
        rules = (rules,)
    if not rules or options.probes < 0 or options.probe_samples < 2:
        raise ValueError(
            f"rules={rules!r}, probes={options.probes}, probe_samples="
            f"{options.probe_samples}: give at least one rule, at least 0 probes, and at least 2 "
            "samples"
        )
    if sampling.needs_prefix or options.num_samples != 1 or options.inputs is not None:
        raise ValueError(
            "quality scores texts by the target's own law: give no penalties, no logits processor, "
            "no inputs, and num_samples=1"
        )
    _refuse_unfair(options)
    tasks = _tasks_of(lm, prompts, options.tasks)
    plain = dataclasses.replace(options, drafter="none", drafter_params=None, drafting=Drafting())
    runs = [("plain", plain)]
    for rule in rules:
        acceptance.named(rule)
        drafting = dataclasses.replace(options.drafting, rule=rule)
        name = rule if isinstance(rule, str) else repr(rule)
        runs.append((name, dataclasses.replace(options, drafting=drafting)))
    works = {name: prepare_measured(lm, prompts, options_from(one)) for name, one in runs}
    written = {name: TextStream(work).finish() for name, work in works.items()}
    if not all(text.finished for text in written.values()):  # Ctrl-C
        raise KeyboardInterrupt
    check_texts(written["plain"])
    speeds = _speeds(works, options)
    first = written["plain"]
    places = [] if sampling.greedy else _places(first, options.probes)
    laws = _target_laws(lm, places, with_bias(lm, sampling))
    found = []
    for name, one in runs:
        out = written[name]
        logp, rank = rated(lm, out.prompts, out.tokens)
        same = None
        if sampling.greedy:
            pairs = zip(out.tokens, first.tokens, strict=True)
            same = float(np.mean([np.array_equal(a, b) for a, b in pairs]))
            variation, divergence = (float((rank > 0).mean()), 0.0), None
        else:
            variation, divergence = _probed(lm, places, laws, one)
        found.append(
            RuleQuality(
                rule=name,
                approximate=out.stats.approximate,
                tau=out.stats.tau,
                loglik=float(logp.mean()),
                best=float((rank == 0).mean()),
                rank=float(rank.mean()),
                same=same,
                variation=variation,
                divergence=divergence,
                speed=speeds.get(name),
                solved=_solved(lm, tasks, prompts, out),
            )
        )
    return Quality(
        model=lm.name,
        drafting=f"{written[runs[-1][0]].stats.drafter} drafts",
        num_probes=len(places),
        probe_samples=options.probe_samples,
        rules=tuple(found),
        num_tasks=sum(task is not None for task in tasks),
    )


def _refuse_unfair(options: QualityOptions) -> None:
    """Raises ``ValueError`` if prompts have different laws, or if the drafter is a session."""
    wrong = options.sampling.per_row() + ["seed"] * (np.ndim(options.seed) > 0)
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)}: quality compares one law over all prompts; give one value "
            "instead of one for each prompt"
        )
    if isinstance(options.drafter, Session) and not options.drafter.asks:
        raise ValueError(
            "drafter: a session keeps the texts of one rule, from which the next rule would draft; "
            "give its drafter alone, such as 'suffix'"
        )


def _speeds(works: dict[str, GenerationTask], options: QualityOptions) -> dict[str, float]:
    """Returns the rate of each rule in relation to plain decoding, run in turn."""
    if options.stop_strings or any(work.session is not None for work in works.values()):
        return {}
    for work in works.values():  # compiles what follows
        whole_rate(work)
    rates = np.asarray([[whole_rate(work) for work in works.values()] for _ in range(TURNS)])
    return dict(zip(works, np.median(rates / rates[:, :1], axis=0).tolist(), strict=True))


def _tasks_of(lm: LM, prompts: Prompts, tasks: Sequence[Task | None]) -> list[Task | None]:
    """Returns ``tasks`` as a list; raises ``ValueError`` unless there is one for each prompt."""
    if not len(tasks):
        return []
    count = len(prompt_ids(lm, prompts))
    if len(tasks) != count:
        raise ValueError(f"tasks: there are {len(tasks)} for {count} prompts; give one for each")
    if lm.tokenizer is None:
        raise ValueError("tasks: they judge texts, and this model has no tokenizer")
    return list(tasks)


def _solved(lm: LM, tasks: Sequence[Task | None], prompts: Prompts, out) -> float | None:
    """Returns the share of tasks that the texts of a ``Generation`` solve; None without tasks."""
    tokenizer = lm.tokenizer
    if not tasks or tokenizer is None:
        return None
    given = [prompts] if isinstance(prompts, str | Mapping) else prompts
    texts = [  # as they were given: a tokenizer may not spell them the same
        own if isinstance(own, str) else "" if isinstance(own, Mapping) else tokenizer.decode(ids)
        for own, ids in zip(given, out.prompts, strict=False)
    ]
    right = [
        task.solved(prompt, text)
        for task, prompt, text in zip(tasks, texts, out.texts, strict=False)
        if task is not None
    ]
    return float(np.mean(right)) if right else None


def _places(out, probes: int) -> list[list[int]]:
    """Returns token ids of prompts with beginnings of their texts, evenly spread."""
    places = []
    for prompt, new in zip(out.prompts, out.tokens, strict=True):
        ends = {len(new) * i // max(probes, 1) for i in range(probes)}
        places += [[*prompt.tolist(), *new[:end].tolist()] for end in sorted(ends)]
    return places


def _target_laws(lm: LM, places, sampling) -> list[np.ndarray]:
    """Returns the law of the token after each of ``places``, float64 ``[V]`` each."""
    law = jax.jit(lambda logits: sampling.rows(1).probabilities(logits))
    scores = scores_of_new(lm, [(place, [0]) for place in places])
    laws = [np.asarray(law(logits), np.float64)[0] for logits in scores]
    return [p / p.sum() for p in laws]


def _probed(lm: LM, places, laws, options: QualityOptions):
    """Returns ``(TV, TV of noise)`` and ``(KL, KL of noise)`` of the emitted law, means over the
    positions ``places``."""
    if not places:
        return None, None
    count, random = options.probe_samples, np.random.default_rng(0)
    sizes = np.asarray([len(place) for place in places])
    room = np.full(len(places), MOST_DRAFTS + 1)  # so that no budget cuts a draft
    if lm.max_positions is not None:
        room = np.minimum(room, lm.max_positions - sizes)
    drafting = options.drafting
    if is_auto(drafting.num):  # which may draft nothing for a batch of so many rows
        drafting = dataclasses.replace(drafting, num=None)
    one = dict(num_samples=count, max_new_tokens=room, stop=(), stop_strings=None)
    options = dataclasses.replace(options, drafting=drafting, **one)
    work = prepare_measured(lm, places, options_from(options))
    work = work.refreshed(lambda: [np.asarray(place, np.int32) for place in places])
    state = work.burst(1, work.unanswered())  # the first token, too, is drafted and judged
    tokens, lengths = sharding.gather((state.tokens, state.length))
    begin = np.repeat(sizes, count)
    first = np.take_along_axis(tokens, begin[:, None], axis=1)[:, 0]
    first = np.where(lengths > begin, first, -1).reshape(len(places), count)
    found, noise = [], []
    for p, own in zip(laws, first, strict=True):
        shares = np.bincount(own[own >= 0], minlength=len(p)) / count
        found.append(_distances(shares, p))
        drawn = random.multinomial(count, p, REPEATS) / count
        noise.append(np.mean([_distances(x, p) for x in drawn], axis=0))
    (tv, kl), (tv_noise, kl_noise) = np.mean(found, axis=0), np.mean(noise, axis=0)
    finite = np.isfinite(kl)
    return (float(tv), float(tv_noise)), (float(kl), float(kl_noise)) if finite else None


def _distances(shares: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    """Returns the total variation between ``shares`` and ``p``, and the KL divergence of ``shares``
    from ``p`` (nats)."""
    some = shares > 0
    with np.errstate(divide="ignore"):
        ratio = np.log(shares[some]) - np.log(p[some])
    return 0.5 * float(np.abs(shares - p).sum()), float((shares[some] * ratio).sum())
