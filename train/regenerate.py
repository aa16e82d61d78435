"""Recipe ``regenerate``: the target writes what its drafter will learn from.

Of texts it goes on from their beginnings: the first tokens of a row come from the corpus, the rest
from the target (``.npz``). Of conversations it writes every answer anew, each behind its own
earlier ones (``.jsonl``, a ``data.corpus`` again). It decodes by ``specjax.serve_offline``, with a
drafter, which changes the speed and not the law. What is finished is kept: a run that was stopped,
however, goes on by the same command, and ends with the same file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from . import corpus, data, model, outlook, sources, tokenizer
from .config import ConfigError, DataConfig, RunConfig
from .conversations import CUT

UNFINISHED = "{}.part-{}.jsonl"  # beside the output, what of it is done
SILENCE = 10.0  # seconds between two lines about how far a run is
TRIAL = 16  # tokens a row that a dry run generates


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """``num_rows`` rows of ``data.length + 1`` tokens, or as many conversations of at most
    ``data.length``, ``data.batch`` at a time.

    ``new_tokens``: how many are generated a row, or an answer, at most. Prompts from texts have
    ``shortest`` tokens to as many as leave room for them. The first ``greedy_share`` of the rows is
    written greedily, the rest at ``temperature``. ``drafter``, ``num_draft``: for greedy rows, as
    ``specjax.generate`` takes them (``plain``, ``ngram``, ``draft``, heads, a folder or a name;
    0: as many drafts as it would). ``drawn_drafter``: for the others, in which tables find little.
    What pays depends on target, machine and ``data.batch`` (the suite ``regeneration``).
    ``shard``, ``shards``: this run writes the rows ``shard::shards`` alone, into a file of its own;
    ``read`` joins them.
    """

    teacher: str = "embedded"
    split: str = "train"
    num_rows: int = 1024
    new_tokens: int = 192
    shortest: int = 16
    greedy_share: float = 0.5
    temperature: float = 1.0
    drafter: str = "ngram"
    drawn_drafter: str = "plain"
    num_draft: int = 0
    shard: int = 0
    shards: int = 1
    output: str = "runs/samples.npz"
    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig()

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
        if self.split not in ("train", "heldout"):
            raise ConfigError(f"split={self.split!r}; accepted: train or heldout")
        if not 0 <= self.greedy_share <= 1:
            raise ConfigError(f"greedy_share={self.greedy_share}; accepted: 0 to 1")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature}; accepted: at least 0, and finite")
        for name, least in (("shortest", 1), ("num_draft", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least {least}")


Config = RegenerateConfig


@dataclasses.dataclass(frozen=True)
class Samples:
    """Attributes:
    tokens: int32 ``[n, length + 1]``, filled up with end-of-text.
    start, stop: int32 ``[n]``; the target wrote ``tokens[start:stop]``.
    """

    tokens: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @functools.cached_property
    def weight(self) -> np.ndarray:
        """float32 ``[n, length]`` to learn from: all but what a row was filled up with counts."""
        predicted = np.arange(1, self.tokens.shape[1])
        return (predicted < self.stop[:, None]).astype(np.float32)

    def batches(self, size: int) -> list[tuple]:
        """``(tokens, weight [size, length])`` whose weights count the generated tokens alone. The
        last batch is filled up with rows that do not count."""
        predicted = np.arange(1, self.tokens.shape[1])
        weight = (predicted >= self.start[:, None]) & (predicted < self.stop[:, None])
        rows = np.arange(-(-len(weight) // size) * size)
        tokens = self.tokens[rows % len(weight)]
        weight = (weight[rows % len(weight)] & (rows < len(weight))[:, None]).astype(np.float32)
        return [(tokens[i : i + size], weight[i : i + size]) for i in rows[::size]]


def read(path: str, vocab_size: int | None = None) -> Samples:
    """Reads a file of this recipe, or its shards.

    Raises:
      ConfigError: one is missing, or holds tokens that a model of ``vocab_size`` does not know: of
        another tokenizer.
    """
    found: dict[str, list] = {"tokens": [], "start": [], "stop": []}
    for file in shards_of(Path(path), "regenerate"):
        with np.load(file) as arrays:
            for name, parts in found.items():
                parts.append(arrays[name])
        largest = found["tokens"][-1].max(initial=0)
        if vocab_size is not None and largest >= vocab_size:
            raise ConfigError(
                f"{file} holds the token {largest}, the target knows those below {vocab_size}: it "
                "was written by another target; run the recipe `regenerate` with this one"
            )
    return Samples(**{name: interleaved(parts) for name, parts in found.items()})


def interleaved(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all shards in their order: shard i has the rows ``i::len(parts)``."""
    if len(parts) == 1:
        return parts[0]
    shape = sum(map(len, parts)), *parts[0].shape[1:]
    joined = np.empty(shape, parts[0].dtype)
    for i, part in enumerate(parts):
        joined[i :: len(parts)] = part
    return joined


def shard_of(path: Path, shard: int, shards: int) -> Path:
    """The file of one shard: ``samples.npz`` -> ``samples.0-of-2.npz``."""
    return path if shards == 1 else path.with_name(f"{path.stem}.{shard}-of-{shards}{path.suffix}")


def shards_of(path: Path, recipe: str, holds: str = "") -> list[Path]:
    """What a recipe wrote to ``path``, or all of its shards. Raises ConfigError where one is
    missing. ``holds``: what a folder must hold to be finished."""
    if (path / holds).is_file():
        return [path]
    named = re.compile(rf"{re.escape(path.stem)}\.\d+-of-(\d+){re.escape(path.suffix)}")
    there = path.parent.iterdir() if path.parent.is_dir() else ()
    counts = {int(found[1]) for file in there if (found := named.fullmatch(file.name))}
    if not counts:
        raise ConfigError(
            f"nothing at {str(path)!r}: run the recipe `{recipe}` first, with output={path}"
        )
    count = max(counts)
    wanted = [shard_of(path, i, count) for i in range(count)]
    missing = [file for file in wanted if not (file / holds).is_file()]
    if missing:
        raise ConfigError(
            f"of the {count} shards of {path} {len(missing)} are missing, the first is "
            f"{missing[0].name}: run the recipe `{recipe}` with shard="
            f"{wanted.index(missing[0])} shards={count}"
        )
    return wanted


def whole_windows(
    stream: np.ndarray, size: int, end_of_text: int, way_out: str = "ask for fewer"
) -> np.ndarray:
    """Where ``size`` tokens lie within one document (they may begin with its end-of-text).

    Raises:
      ConfigError: none is as long; ``way_out``: what the user can do then.
    """
    ends = np.concatenate([[0], np.cumsum(stream == end_of_text)])
    starts = np.arange(len(stream) - size + 1)
    places = starts[ends[starts + size] == ends[starts + 1]]
    if not len(places):
        raise ConfigError(f"no document holds {size} tokens: {way_out}")
    return places


def write(teacher, prompts: Sequence[dict], config: RegenerateConfig, ends, part: str) -> list:
    """What the target goes on to say, a ``specjax.serving.Row`` a prompt, in their order.

    Greedy prompts and drawn ones are programs of their own, so that nothing is drawn for the first.

    Args:
      prompts: as ``specjax.serve_offline`` takes them, each with its temperature.
      ends: ids of the tokens that end a text.
      part: begins the names of the files that keep what is finished.
    """
    rows, said = {}, time.monotonic()

    def tell(state):
        nonlocal said
        if state.done == state.total or time.monotonic() > said + SILENCE:
            print(state, flush=True)
            said = time.monotonic()

    for name, drawn in (("greedy", False), ("drawn", True)):
        chosen = [n for n, prompt in enumerate(prompts) if bool(prompt["temperature"]) == drawn]
        if chosen:
            asked = [prompts[n] for n in chosen]
            how = dict(output=UNFINISHED.format(part, name), progress=tell)
            drafter = config.drawn_drafter if drawn else config.drafter
            rows |= zip(chosen, serve(teacher, asked, config, ends, drafter, **how), strict=True)
    return [rows[n] for n in range(len(prompts))]


def serve(teacher, prompts, config: RegenerateConfig, ends, drafter: str, **how) -> list:
    """``specjax.serve_offline`` as a configuration wants it."""
    import specjax

    num_draft = None if drafter == "plain" else config.num_draft or None
    how |= dict(batch=config.data.batch, drafter=drafter, num_draft=num_draft, stop=ends)
    try:
        served = specjax.serve_offline(teacher, prompts, **how)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not served.finished:
        raise KeyboardInterrupt  # what is finished is kept
    return served.rows


def estimate(teacher, prompts: Sequence[dict], config: RegenerateConfig, count: int) -> None:
    """Prints what a run would take, from one batch of its first prompts and a few tokens.

    ``count``: texts or answers that it would write.
    """
    import specjax

    batch, trial = min(config.data.batch, len(prompts)), min(TRIAL, config.new_tokens)
    drafter = config.drafter if config.greedy_share else config.drawn_drafter
    few = [prompt | {"max_new_tokens": trial} for prompt in prompts[:batch]]
    seconds = outlook.seconds_of(lambda: serve(teacher, few, config, [], drafter) and (), times=1)
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


def temperatures(config: RegenerateConfig, count: int) -> list[float]:
    """Of each row: the first ones are greedy."""
    greedy = round(config.greedy_share * count)
    return [0.0] * greedy + [config.temperature] * (count - greedy)


def row_prompts(config: RegenerateConfig, stream: data.Stream, end_of_text: int) -> list[dict]:
    """Windows of the texts of a stream, for this shard, as ``specjax.serve_offline`` takes them."""
    longest = config.data.length + 1 - config.new_tokens
    way_out = "raise new_tokens, for shorter prompts"
    places = whole_windows(stream.tokens, longest, end_of_text, way_out)
    rng, count = np.random.default_rng(config.data.seed), config.num_rows
    lengths = rng.integers(config.shortest, longest + 1, count)
    starts, seeds = rng.choice(places, count), rng.integers(2**32, size=count)
    warmth = temperatures(config, count)
    return [
        {
            "prompt": stream.tokens[starts[n] : starts[n] + lengths[n]].tolist(),
            "max_new_tokens": config.new_tokens,
            "temperature": warmth[n],
            "seed": int(seeds[n]),
        }
        for n in range(config.shard, count, config.shards)
    ]


def write_rows(config: RegenerateConfig, teacher, path: Path, prompts, end_of_text: int) -> None:
    """Goes on from ``row_prompts``; writes ``path`` (.npz)."""
    ends = sorted({end_of_text, *teacher.config.eos_ids})
    rows = write(teacher, prompts, config, ends, str(path.with_suffix("")))
    tokens = np.full((len(rows), config.data.length + 1), end_of_text, np.int32)
    start = np.asarray([len(prompt["prompt"]) for prompt in prompts], np.int32)
    stop = start + np.asarray([len(row.tokens) for row in rows], np.int32)
    for n, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        tokens[n, : stop[n]] = prompt["prompt"] + row.tokens
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez(file, tokens=tokens, start=start, stop=stop)
    temporary.replace(path)


@dataclasses.dataclass
class Talk:
    """A conversation under way.

    Attributes:
      source: its name. ``temperature``, ``seed``: of its answers.
      waiting: what is still to be said to the assistant.
      said: all that was, up to an answer; ``answered``: the same, where there is one.
    """

    source: str
    temperature: float
    seed: int
    waiting: list[dict]
    said: list[dict] = dataclasses.field(default_factory=list)
    answered: list[dict] = dataclasses.field(default_factory=list)

    def ask(self) -> list[dict]:
        """The conversation up to the next thing said to the assistant."""
        while True:
            self.said.append(self.waiting.pop(0))
            if self.said[-1]["role"] == "user":
                return self.said

    def take(self, text: str, cut: bool) -> None:
        """Takes an answer, with which the conversation may end."""
        if text.strip():
            self.said.append({"role": "assistant", "content": text} | ({CUT: True} if cut else {}))
            self.answered = list(self.said)
        if cut or not text.strip():
            self.waiting.clear()


def conversations_of(config: RegenerateConfig, documents) -> list[Talk]:
    """The conversations of this shard, without their answers."""
    chosen = documents[: config.num_rows]
    seeds = np.random.default_rng(config.data.seed).integers(2**32, size=len(chosen))
    warmth, talks = temperatures(config, len(chosen)), []
    for n in range(config.shard, len(chosen), config.shards):
        name, messages = chosen[n]
        asked = [message for message in messages if message["role"] != "assistant"]
        talks.append(Talk(name, warmth[n], int(seeds[n]), asked))
    return talks


def turn_prompts(config: RegenerateConfig, teacher, talks, turn: int) -> list[tuple[Talk, dict]]:
    """The conversations that go on in a turn, each with its prompt for ``serve_offline``."""
    found, refused, full = [], [], 0
    for talk in talks:
        if not talk.waiting:
            continue
        try:
            ids = teacher.tokenizer.chat(talk.ask())
        except ValueError as error:
            refused.append(f"{talk.source}: {error}")
            talk.waiting.clear()
            continue
        room = min(config.new_tokens, config.data.length - len(ids))
        if room < 1:
            talk.waiting.clear()
            full += 1
            continue
        prompt = dict(prompt=ids, max_new_tokens=room, temperature=talk.temperature)
        found.append((talk, prompt | {"seed": (talk.seed + turn) % 2**32}))
    sources.judge("conversations", refused, len(talks), config.data.broken_share)
    if full:
        print(f"turn {turn + 1}: {full:,} conversations fill data.length={config.data.length}")
    return found


def write_conversations(config: RegenerateConfig, teacher, path: Path, documents) -> None:
    """Writes the answers of conversations anew, a turn of all at a time; writes ``path`` (.jsonl).

    A conversation ends where it has come to ``data.length`` tokens, where an answer was cut for
    want of room (it is marked as that, see ``conversations``) and where one is empty. Without any
    answer it is left out.
    """
    talks, turn = conversations_of(config, documents), 0
    ends = sorted({*teacher.tokenizer.eos_ids, *teacher.config.eos_ids})
    while asking := turn_prompts(config, teacher, talks, turn):
        part = f"{path.with_suffix('')}.turn-{turn}"
        rows = write(teacher, [prompt for _, prompt in asking], config, ends, part)
        for (talk, _), row in zip(asking, rows, strict=True):
            talk.take(row.text, cut=row.finish == "length")
        turn += 1
    told = [talk for talk in talks if talk.answered]
    temporary = path.with_suffix(".tmp")
    lines = ({"messages": talk.answered, "source": talk.source} for talk in told)
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    temporary.replace(path)
    cut = sum(CUT in talk.answered[-1] for talk in told)
    print(f"{len(told):,} of {len(talks):,} conversations have an answer, {cut:,} end in a cut one")


def run(config: RegenerateConfig, *, dry_run: bool = False) -> None:
    """Writes ``output``; a file that is there already is left alone."""
    from .distill import load_teacher

    path = shard_of(Path(config.output), config.shard, config.shards)
    if path.is_file():
        print(f"{path} is there already")
        return
    vocabulary = tokenizer.load(config.data.tokenizer)
    teacher = load_teacher(config.teacher, vocabulary, config.data.length)
    how = dict(strict=config.data.strict, broken_share=config.data.broken_share)
    documents = corpus.documents(config.data.corpus, config.split, **how)
    chats = not corpus.are_texts(config.data.corpus, documents)
    kind = ".jsonl" if chats else ".npz"
    if path.suffix != kind:
        what = "conversations" if chats else "texts"
        raise ConfigError(f"output={config.output!r}: what comes of {what} is a {kind} file")
    if chats:
        if not teacher.tokenizer.has_template:
            tokenizer.load_chat(config.data.tokenizer)  # says what is missing
        if dry_run:
            talks = conversations_of(config, documents)
            count = sum(message["role"] == "user" for talk in talks for message in talk.waiting)
            asking = [prompt for _, prompt in turn_prompts(config, teacher, talks, 0)]
            return estimate(teacher, asking, config, count)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_conversations(config, teacher, path, documents)
    else:
        stream, end_of_text = data.load_stream(config.data, config.split)
        prompts = row_prompts(config, stream, end_of_text)
        if dry_run:
            return estimate(teacher, prompts, config, len(prompts))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(config, teacher, path, prompts, end_of_text)
    unfinished = re.compile(rf"{re.escape(path.stem)}(\.turn-\d+)?\.part-\w+\.jsonl")
    for part in list(path.parent.iterdir()):
        if unfinished.fullmatch(part.name):
            part.unlink()
    print(f"wrote {path}")
