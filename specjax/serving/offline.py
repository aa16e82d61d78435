"""``serve_offline``: decodes a file of prompts by continuous batching.

Static batches wait for their longest row. Here the compiled loop runs until a few rows are free,
the next prompts take their place, and the loop continues (``continuous_batching.turn``). A few
compiled programs serve all prompts, whatever the lengths of prompts and texts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence

from .. import sharding
from ..models.lm import LM
from ..sampling.distribution import Sampling
from ..text.options import Options, SharedOptions, options_from, takes
from ..text.prepare import seed_key
from . import jsonl_input
from .identity import made_with
from .jsonl_input import NEUTRAL, Broken, Prompt
from .jsonl_output import OutputFile, as_written
from .scheduler import Continuous, Row


@dataclasses.dataclass(frozen=True)
class Served:
    """The result of ``serve_offline``.

    Attributes:
      rows: the finished prompts in the order of their indices, including those of earlier runs.
      broken: the prompts that were left out.
      earlier: the number of rows that earlier runs finished.
      seconds: the duration of this run in seconds, including compilation and output.
      finished: False if Ctrl-C ended the run.
    """

    rows: list[Row]
    broken: list[Broken]
    earlier: int
    seconds: float
    finished: bool

    @property
    def texts(self) -> list[str]:
        """The texts of the finished prompts in the order of their indices."""
        return [row.text for row in self.rows]


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Attributes:
      done: the number of finished prompts, including those of earlier runs.
      total: the number of prompts that are not broken.
      tokens: the number of tokens that this run has emitted.
      rounds: the number of rounds of this run, summed over rows.
      firsts: how many of the tokens were the first of their row, which no round emits.
      seconds: seconds since the run began.
      earlier: the number of finished prompts that are from earlier runs.
    """

    done: int
    total: int
    tokens: int
    rounds: int
    seconds: float
    earlier: int = 0
    firsts: int = 0

    @property
    def tau(self) -> float:
        """τ, the mean number of tokens that a row emits per round."""
        return (self.tokens - self.firsts) / self.rounds if self.rounds else 1.0

    @property
    def rate(self) -> float:
        """Emitted tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        before = f" ({self.earlier:,} from before)" if self.earlier else ""
        where = " in this run" if self.earlier else ""
        return (
            f"{self.done} of {self.total} prompts{before} · {self.tokens:,} tokens{where} · "
            f"{self.rate:,.0f} tokens/s · τ {self.tau:.2f}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions(SharedOptions):
    """The options of ``serve_offline``; its docstring explains them."""

    output: str | os.PathLike | None = None
    batch: int = 8
    gather: int | None = None
    max_broken: int = 0
    progress: Callable[[Progress], None] | None = None


@takes(ServeOptions)
def serve_offline(
    lm: LM, prompts: str | os.PathLike | Sequence, *, options: ServeOptions
) -> Served:
    """Continues many prompts by continuous batching.

    ``batch`` prompts are decoded together; when rows have finished, the next prompts take their
    places.

    Args:
      lm: the target, from ``specjax.load``.
      prompts: the name of a file of JSON lines (a ``.txt`` file: of texts), or a list. A prompt is
        a text, token ids, or an object with the field ``"prompt"`` (or ``"text"``), or with a
        conversation in ``"messages"`` (see ``generate``). An object may also have the fields
        ``max_new_tokens``, ``temperature``, ``top_k``, ``top_p``, ``min_p``,
        ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``, ``seed`` and ``stop``
        (token ids or texts; texts replace ``stop_strings``), which replace the arguments of this
        call, and ``"id"``, which is copied to the output. An unknown field is refused. T5's encoder
        reads the prompt. Whisper's encoder reads ``"features"``, a ``.npy`` file or an array
        ``[bins, frames]``; the field ``"prompt"`` then holds the token ids with which the decoder
        begins and may be left out.
      output: the name of a file to which each finished prompt is appended at once, as one JSON line
        with the fields of ``Row``, in the order of finishing. Prompts whose lines are in the file
        are not decoded again, so that the same call resumes an interrupted run.
      batch: the number of rows that are decoded together.
      gather: the number of rows that must be free before prompts are inserted; default: an eighth
        of the batch. ``gather=batch`` waits for whole batches.
      max_broken: the most broken prompts (not JSON, no prompt, longer than the context ...) that
        are left out; if there are more, nothing is decoded.
      progress: a function that is called with a ``Progress`` after every burst of rounds.
      drafter, drafting, drafter_params: see ``specjax.generate``.
      sampling, stop, stop_strings: see ``specjax.generate``; one value each, for prompts that do
        not set their own.
      max_new_tokens: the most tokens of a text, for prompts that do not set their own. A greater
        number than the context has room for is accepted, here and in a prompt's own field: the text
        then ends where the context is full, and its ``Row.finish`` is ``"context"``. (``generate``
        refuses such a number.) A prompt that leaves no room for one token is broken.
      seed: the seed of the random draws. The text of a prompt is that of row ``index`` in
        ``specjax.generate`` with this seed, whatever the rest of the batch is; a prompt with a seed
        of its own has the text that ``specjax.generate`` gives for it alone with that seed. Above
        temperature 0 texts depend on measured times with ``Drafting(num="auto")``, and on whether
        any row is greedy where heads draft a static tree.

    Returns:
      a ``Served``. Ctrl-C ends the run, but raises nothing: the finished prompts are returned, and
      are kept in the output file.

    Raises:
      ValueError: before anything is compiled: too many prompts are broken, an option is wrong,
        or the output was made with another model, other prompts, other ids or other options, or
        another process writes to it.

    Example::

        lm = specjax.load("embedded")
        done = specjax.serve_offline(lm, ["def f(x):", {"prompt": "import", "max_new_tokens": 9}])
        print(done.texts)
    """
    sharding.check_one_process("serve_offline")
    batch, gather = options.batch, options.gather
    for name, value in (("batch", batch), ("gather", 1 if gather is None else gather)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: it must be an integer, at least 1")
    if gather is not None and gather > batch:
        raise ValueError(f"gather={gather!r}: it must be at most batch={batch}")
    sampling = options.sampling
    if sampling.logit_bias is not None:
        raise ValueError("sampling: serve_offline does not support logit_bias")
    defaults = {name: getattr(sampling, name) for name in NEUTRAL} | {
        "max_new_tokens": options.max_new_tokens,
        "seed": None,
        "stop": options.stop,
        "stop_strings": options.stop_strings,
    }
    found, broken = jsonl_input.read(lm, prompts, defaults, options.max_broken)
    seed_key(options.seed)
    asked = options_from(
        options,
        # the settings of each prompt come from its line
        sampling=Sampling(
            logits_processor=sampling.logits_processor, process_drafts=sampling.process_drafts
        ),
    )
    common = batch, gather, options.progress, asked
    if options.output is None:
        return _serve(lm, found, broken, None, *common)
    if isinstance(prompts, str | os.PathLike) and _are_one(prompts, options.output):
        raise ValueError(f"output {os.fspath(options.output)} is the file of the prompts")
    with OutputFile(options.output, made_with(lm, found, asked)) as file:
        _check_ids(file, found)
        return _serve(lm, found, broken, file, *common)


def _check_ids(file: OutputFile, prompts: list[Prompt]) -> None:
    """Raises ValueError where a line of an earlier run has another ``"id"`` than its prompt has:
    whoever joins the lines by their ids would give that text to another prompt."""
    for prompt in prompts:
        old, own = file.there.get(prompt.index, {}).get("id"), as_written(prompt.id)
        texts = [json.dumps(value) for value in (old, own)]  # NaN is not itself
        if prompt.index in file.there and old != own and texts[0] != texts[1]:
            raise ValueError(
                f"output {file.name} has the text of prompt {prompt.index} with id={old!r}, and "
                f"that prompt has id={prompt.id!r} now: give the same ids as before, or name "
                "another output"
            )


def _are_one(*files: str | os.PathLike) -> bool:
    return all(map(os.path.exists, files)) and os.path.samefile(*files)


def _serve(lm, found, broken, file, batch, gather, progress, options: Options) -> Served:
    begin = time.perf_counter()
    there = {} if file is None else file.there
    names = [field.name for field in dataclasses.fields(Row)]
    done = {index: Row(**{n: line.get(n) for n in names}) for index, line in there.items()}
    waiting = [prompt for prompt in found if prompt.index not in done]
    finished = True
    try:
        if waiting:
            work = Continuous(lm, found, waiting, batch, gather, options)
            for fresh in work.run():
                if file is not None and fresh:
                    file.add(vars(row) for row in fresh)
                done |= {row.index: row for row in fresh}
                if progress is not None:
                    spent = time.perf_counter() - begin
                    counts = work.tokens, work.rounds
                    rest = spent, len(there), work.firsts
                    progress(Progress(len(done), len(found), *counts, *rest))
    except KeyboardInterrupt:
        finished = False
    return Served(
        rows=[done[index] for index in sorted(done)],
        broken=broken,
        earlier=len(there),
        seconds=time.perf_counter() - begin,
        finished=finished,
    )
