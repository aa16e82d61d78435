"""Conversations whose every answer a target writes anew, each behind its own earlier ones.

``config`` is everywhere a ``RegenerateConfig``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from . import sources, writing
from .conversations import CUT


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


def conversations_of(config, documents) -> list[Talk]:
    """The conversations of this shard, without their answers."""
    chosen = documents[: config.num_rows]
    seeds = np.random.default_rng(config.data.seed).integers(2**32, size=len(chosen))
    warmth, talks = writing.temperatures(config, len(chosen)), []
    for n in range(config.shard, len(chosen), config.shards):
        name, messages = chosen[n]
        asked = [message for message in messages if message["role"] != "assistant"]
        talks.append(Talk(name, warmth[n], int(seeds[n]), asked))
    return talks


def turn_prompts(config, teacher, talks, turn: int) -> list[tuple[Talk, dict]]:
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


def write_conversations(config, teacher, path: Path, documents) -> None:
    """Writes the answers of conversations anew, a turn of all at a time; writes ``path`` (.jsonl).

    A conversation ends where it has come to ``data.length`` tokens, where an answer was cut for
    want of room (it is marked as that, see ``conversations``) and where one is empty. Without any
    answer it is left out.
    """
    talks, turn = conversations_of(config, documents), 0
    ends = sorted({*teacher.tokenizer.eos_ids, *teacher.config.eos_ids})
    while asking := turn_prompts(config, teacher, talks, turn):
        part = f"{path.with_suffix('')}.turn-{turn}"
        rows = writing.write(teacher, [prompt for _, prompt in asking], config, ends, part)
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
