"""``trace``: decodes a text round by round and records every draft, law and verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from .. import acceptance, sharding
from ..decoding.state import ENDED, STOPPED, State
from ..models.lm import LM
from ..models.seq2seq.encoder_inputs import encodes
from ..sampling import processors
from ..text.options import Options, takes
from ..text.prepare import prepare_measured
from ..text.stop_strings import RowText
from ..text.task import GenerationTask
from ..text.token_display import speller
from ..types import PyTree
from .record import record_rounds
from .result import Trace

ROUNDS = 128  # recorded at most, by default
_NOT_SHOWN = ("process_drafts", "greedy")  # sampling settings that do not change the text


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceOptions(Options):
    """The options of ``trace``; its docstring explains them."""

    rounds: int = ROUNDS


@takes(TraceOptions)
def trace(lm: LM, prompt: str | Sequence[int] | None = None, *, options: TraceOptions) -> Trace:
    """Continues one prompt as ``specjax.generate`` does, and records every round.

    The rounds are those of ``generate``, with the same functions and the same keys, so the text is
    the same. The first one recorded is the pass over the end of the prompt, which emits the first
    token without a draft. Rounds are run one by one, and the laws are computed at every node, so
    the time of a trace says nothing about the speed of decoding.

    Args:
      lm: the target, from ``specjax.load``.
      prompt: a text or its token ids, as for ``generate``.
      rounds: the most rounds that are run after the prompt's pass; default 128.
      drafter, drafting, sampling, ...: the options of ``specjax.generate``, for one row. A
        ``Session`` takes in the text if it ended within the rounds; a ``Retrieval`` is searched
        before each round.

    Returns:
      a ``Trace``; ``Trace.save(file)`` writes it as a page for a browser. Ctrl-C ends the trace,
      but raises nothing: the rounds recorded until then are returned.

    Raises:
      ValueError: before anything is compiled: an option is wrong, or there is more than one row.
        The error names the argument and the accepted values.

    Example::

        traced = specjax.trace(lm, "def f(x):", sampling=specjax.Sampling(temperature=1.0))
        print(traced.rounds[1].nodes[1])  # Node(token=..., p=0.31, q=0.42, status='rejected', ...)
        traced.save("trace.html")
    """
    rounds = options.rounds
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
        raise ValueError(f"rounds={rounds!r}: it must be an integer, at least 1")
    work = prepare_measured(lm, prompt, options)
    if len(work.prompts) != 1:
        raise ValueError(
            f"trace: there are {len(work.prompts)} rows, and a trace shows one row: give one "
            "prompt and num_samples=1"
        )
    spell = speller(lm.tokenizer)
    text = RowText(lm.tokenizer, work.prompts[0], work.stop_strings[0])
    recorded, pieces, interrupted = [], [], False
    with sharding.using(lm.mesh, lm.params), sharding.peers():
        state, before = work.start(), work.unanswered()
        objects = lm.target, work.drafter, work.rule
        try:
            rounds_of_row = record_rounds(
                *objects,
                work.params,
                state,
                spell,
                refreshed=lambda now: _refreshed(work, now),
                before=before,
            )
            for one, _ in rounds_of_row:
                fresh = _pieces(lm, text, one.emitted)
                recorded.append(one.cut(len(fresh), ENDED[STOPPED]) if text.over else one)
                pieces.append(fresh)
                if text.over or len(recorded) > rounds:
                    break
        except KeyboardInterrupt:
            interrupted = True
    if pieces and pieces[-1]:
        pieces[-1][-1] += text.flush()
    if work.session is not None and recorded and recorded[-1].reason:
        work.session.add(work.prompts[0], [token for one in recorded for token in one.emitted])
    rule = acceptance.named(work.rule)
    return Trace(
        model=lm.name,
        drafter=state.stats.drafter,
        rule=work.rule_name if rule else recorded[-1].rule if recorded else "",
        lossless=rule is None or acceptance.exact(rule, state.sampling.greedy),
        approximate=state.stats.approximate,
        settings=_settings(options),
        greedy=state.sampling.greedy,
        prompt=_text_of(lm, work.prompts[0]),
        source=prompt if isinstance(prompt, str) and encodes(lm) else None,
        rounds=recorded,
        pieces=pieces,
        reason=recorded[-1].reason if recorded else ENDED[int(sharding.gather(state.ended)[0])],
        interrupted=interrupted,
        spell=spell,
    )


def _refreshed(work: GenerationTask, state: State) -> PyTree:
    """Returns ``work.params`` with the content of the session after row 0 of ``state``."""

    def texts() -> list[np.ndarray]:
        tokens, length = sharding.gather((state.tokens, state.length))
        return [np.asarray(tokens[0, : length[0]])]

    return work.refreshed(texts).params


def _text_of(lm: LM, ids: Iterable[int]) -> str:
    """Returns a prompt as text; without a tokenizer, its token ids."""
    return " ".join(map(str, ids)) if lm.tokenizer is None else lm.tokenizer.decode(ids)


def _pieces(lm: LM, text: RowText, emitted: list[int]) -> list[str]:
    """Returns the text of each emitted token, up to the token that completes a stop string; without
    a tokenizer, a space and the token's id."""
    if lm.tokenizer is None:
        return [f" {token}" for token in emitted]
    pieces = []
    for token in emitted:
        if text.over:
            break
        pieces.append(text.push([token]))
    return pieces


def _settings(options: Options) -> dict[str, str]:
    """Returns the options that determine the law of the text, as texts by name."""
    sampling = options.sampling
    fields = [f.name for f in dataclasses.fields(sampling) if f.name not in _NOT_SHOWN]
    shown = {name: getattr(sampling, name) for name in fields}
    shown |= {name: getattr(options, name) for name in ("seed", "stop", "stop_strings")}
    shown = {name: value for name, value in shown.items() if value is not None}
    if "logits_processor" in shown:
        name = processors.processor_name(shown["logits_processor"])
        shown["logits_processor"] = name
    if not shown["temperature"]:
        shown.pop("seed", None)
    return {n: value if isinstance(value, str) else repr(value) for n, value in shown.items()}
