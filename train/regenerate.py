"""Recipe ``regenerate``: the target writes the text from which its drafter will learn.

The target continues the beginnings of texts: the first tokens of a row come from the corpus, the
rest from the target (``.npz``). In conversations the target writes every answer anew, each after
its own earlier answers (``.jsonl``, which is a ``data.corpus`` again). The recipe decodes by
``specjax.serve_offline`` with a drafter, which changes the speed and not the law. Finished texts
are kept: the same command resumes a run that was stopped, and ends with the same file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from . import corpora, data, model, outlook, samples, sharded, talks, tokenizer, writing
from .config import ConfigError, DataConfig, check_split, check_unread
from .request import REQUEST, check_request, request_of
from .teacher import load_teacher

TRIAL = 16  # tokens of each row that a dry run generates
# fields that are in the file's name, or on which what is written does not depend
UNASKED = ("output", "shard", "shards", "drafter", "drawn_drafter", "num_draft")
UNASKED += ("data.batch", "data.eval_rows")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """The rows of ``data.length + 1`` tokens, or the conversations, that the target writes.

    ``data.batch`` of them are decoded at a time. Which drafter is fastest depends on target,
    machine and batch (see the benchmark suite ``regeneration``).
    """

    teacher: str = "embedded"  # the target that writes: a name or folder that specjax.load takes
    split: str = "train"  # the split of the corpus with the beginnings: train or heldout
    num_rows: int = 1024  # rows, or conversations of at most data.length tokens
    new_tokens: int = 192  # tokens that are generated for a row, or an answer, at most
    shortest: int = 16  # tokens of the shortest prompt; the longest leaves room for new_tokens
    greedy_share: float = 0.5  # the share of the rows, the first ones, that are written greedily
    temperature: float = 1.0  # of the other rows
    drafter: str = "ngram"  # for greedy rows, as specjax.generate takes it
    drawn_drafter: str = "plain"  # for the other rows, in which lookup finds little
    num_draft: int = 0  # tokens that are drafted per round; 0: the drafter's default
    shard: int = 0  # the number of this run among shards
    shards: int = 1  # runs that share the rows; run i writes rows i::shards to a file of its own
    output: str = "runs/samples.npz"  # the file, .npz for texts and .jsonl for conversations
    data: DataConfig = DataConfig()

    def __post_init__(self):
        room = self.data.length + 1 - self.shortest
        if not 0 < self.new_tokens <= room:
            raise ConfigError(f"new_tokens={self.new_tokens}; accepted: 1 to {room}")
        if not 0 <= self.shard < self.shards:
            raise ConfigError(
                f"shard={self.shard}, shards={self.shards}; accepted: shard from 0 to shards - 1"
            )
        if self.num_rows < self.shards:
            raise ConfigError(f"num_rows={self.num_rows}; accepted: at least {self.shards}")
        check_split(self.split)
        reason = "the target continues or answers what data.corpus holds, and reads no other text"
        way_out = "give that text as data.corpus, in a run of its own with another output"
        check_unread(self.data, ("mixed", "samples"), reason, way_out)
        if not 0 <= self.greedy_share <= 1:
            raise ConfigError(f"greedy_share={self.greedy_share}; accepted: 0 to 1")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature}; accepted: at least 0, and finite")
        for name, least in (("shortest", 1), ("num_draft", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least {least}")


Config = RegenerateConfig


def estimate(teacher, prompts: Sequence[dict], config: RegenerateConfig, count: int) -> None:
    """Prints the time and memory of a run, estimated from one batch and a few tokens.

    ``count`` is the number of texts or answers that the run would write.
    """
    import specjax

    batch, trial = min(config.data.batch, len(prompts)), min(TRIAL, config.new_tokens)
    drafter = config.drafter if config.greedy_share else config.drawn_drafter
    few = [prompt | {"max_new_tokens": trial} for prompt in prompts[:batch]]
    seconds = outlook.seconds_of(
        lambda: writing.serve(teacher, few, config, [], drafter) and (), times=1
    )
    kind, length = str(teacher.dtype), config.data.length + 1
    plan = specjax.plan_memory(teacher.config, batch=batch, context=length, dtype=kind)
    outlook.show(
        model=f"{teacher.name}: {model.words(teacher.config)}",
        shapes=f"{batch} rows at a time, of at most {length} tokens; drafter {drafter}",
        parameters=f"{plan.models[0].parameters:,}, none to train",
        memory={
            "parameters": plan.models[0].weights,
            "caches": plan.models[0].cache_each,
            "work space": plan.working_each,
        },
        steps=f"{count:,} times at most {config.new_tokens} new tokens",
        seconds=seconds / trial * config.new_tokens * count / batch,
    )


def row_prompts(config: RegenerateConfig, stream: data.Stream, end_of_text: int) -> list[dict]:
    """Returns prompts for ``specjax.serve_offline``: windows of a stream, for this shard."""
    longest = config.data.length + 1 - config.new_tokens
    way_out = "raise new_tokens, for shorter prompts"
    places = data.whole_windows(stream.tokens, longest, end_of_text, way_out)
    rng, count = np.random.default_rng(config.data.seed), config.num_rows
    lengths = rng.integers(config.shortest, longest + 1, count)
    starts, seeds = rng.choice(places, count), rng.integers(2**32, size=count)
    warmth = writing.temperatures(config, count)
    return [
        {
            "prompt": stream.tokens[starts[n] : starts[n] + lengths[n]].tolist(),
            "max_new_tokens": config.new_tokens,
            "temperature": warmth[n],
            "seed": int(seeds[n]),
        }
        for n in range(config.shard, count, config.shards)
    ]


def record_of(config: RegenerateConfig, teacher, vocabulary) -> dict:
    """The record of an output: who wrote it, and what was asked for."""
    record = {"teacher": config.teacher, **samples.fingerprints(teacher, vocabulary)}
    record |= {name: getattr(config, name) for name in ("temperature", "greedy_share", "split")}
    return record | {REQUEST: request_of(config, UNASKED)}


def record_file(path: Path) -> Path:
    """The file with the record of conversations; its name is not that of a corpus."""
    return path.with_name(f"{path.name}.{samples.RECORD}")


def is_finished(path: Path, config: RegenerateConfig) -> bool:
    """Whether an output is there already, which is printed.

    Raises:
      ConfigError: it is, and holds something else than the configuration asks for.
    """
    if not path.is_file():
        return False
    beside = record_file(path)
    if path.suffix == ".npz":
        record = samples.record_of(path)
    else:
        record = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    check_request(path, record, config, request_of(config, UNASKED))
    print(f"{path} is there already")
    return True


def write_rows(config: RegenerateConfig, teacher, path: Path, prompts, end_of_text: int, record):
    """Continues ``row_prompts`` and writes ``path`` (.npz) with its ``record``."""
    ends = sorted({end_of_text, *teacher.config.eos_ids})
    rows = writing.write(teacher, prompts, config, ends, str(path.with_suffix("")))
    tokens = np.full((len(rows), config.data.length + 1), end_of_text, np.int32)
    start = np.asarray([len(prompt["prompt"]) for prompt in prompts], np.int32)
    stop = start + np.asarray([len(row.tokens) for row in rows], np.int32)
    for n, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        tokens[n, : stop[n]] = prompt["prompt"] + row.tokens
    samples.write(path, samples.Samples(tokens, start, stop), record)


def run(config: RegenerateConfig, *, dry_run: bool = False) -> None:
    """Writes ``output``; a file that is there already is left alone.

    Raises:
      ConfigError: the file that is there holds something else.
    """
    path = sharded.shard_of(Path(config.output), config.shard, config.shards)
    if is_finished(path, config):
        return
    vocabulary = tokenizer.load(config.data.tokenizer)
    teacher = load_teacher(config.teacher, vocabulary, config.data.length)
    how = dict(strict=config.data.strict, broken_share=config.data.broken_share)
    documents = corpora.documents(config.data.corpus, config.split, **how)
    chats = not corpora.are_texts(config.data.corpus, documents)
    kind = ".jsonl" if chats else ".npz"
    if path.suffix != kind:
        what = "conversations" if chats else "texts"
        raise ConfigError(f"output={config.output!r}: what comes of {what} is a {kind} file")
    record = record_of(config, teacher, vocabulary)
    if chats:
        if not teacher.tokenizer.has_template:
            tokenizer.load_chat(config.teacher, "teacher")  # which raises
        if dry_run:
            asked = talks.conversations_of(config, documents)
            count = sum(message["role"] == "user" for talk in asked for message in talk.waiting)
            asking = [prompt for _, prompt in talks.turn_prompts(config, teacher, asked, 0)]
            return estimate(teacher, asking, config, count)
        path.parent.mkdir(parents=True, exist_ok=True)
        record_file(path).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        talks.write_conversations(config, teacher, path, documents)
    else:
        stream, end_of_text = data.load_stream(config.data, config.split)
        prompts = row_prompts(config, stream, end_of_text)
        if dry_run:
            return estimate(teacher, prompts, config, len(prompts))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(config, teacher, path, prompts, end_of_text, record)
    unfinished = re.compile(rf"{re.escape(path.stem)}(\.turn-\d+)?\.part-\w+\.jsonl")
    for part in list(path.parent.iterdir()):
        if unfinished.fullmatch(part.name):
            part.unlink()
    print(f"wrote {path}")
