"""Lets a target write all answers of conversations anew, each after its own earlier answers.

In all functions ``config`` is a ``RegenerateConfig``.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from . import sources, writing
from .conversations import CUT, rendered


@dataclasses.dataclass
class Talk:
    """A conversation that is being written.

    Attributes:
      source: its name.
      temperature, seed: the temperature and the seed of its answers.
      waiting: the messages that the assistant has not yet got.
      said: all messages so far.
      answered: all messages up to the last answer.
    """

    source: str
    temperature: float
    seed: int
    waiting: list[dict]
    said: list[dict] = dataclasses.field(default_factory=list)
    answered: list[dict] = dataclasses.field(default_factory=list)

    def ask(self) -> list[dict]:
        """Returns the conversation up to the next message to the assistant."""
        while True:
            self.said.append(self.waiting.pop(0))
            if self.said[-1]["role"] == "user":
                return self.said

    def take(self, text: str, cut: bool) -> None:
        """Adds an answer, after which the conversation may end."""
        if text.strip():
            self.said.append({"role": "assistant", "content": text} | ({CUT: True} if cut else {}))
            self.answered = list(self.said)
        if cut or not text.strip():
            self.waiting.clear()


def conversations_of(config, documents) -> list[Talk]:
    """Returns the conversations of this shard, without their answers."""
    chosen = documents[: config.num_rows]
    seeds = np.random.default_rng(config.data.seed).integers(2**32, size=len(chosen))
    warmth, talks = writing.temperatures(config, len(chosen)), []
    for n in range(config.shard, len(chosen), config.shards):
        name, messages = chosen[n]
        asked = [message for message in messages if message["role"] != "assistant"]
        talks.append(Talk(name, warmth[n], int(seeds[n]), asked))
    return talks


def turn_prompts(config, teacher, talks, turn: int) -> list[tuple[Talk, dict]]:
    """Returns the conversations that continue in a turn, with prompts for ``serve_offline``."""
    found, refused, full = [], [], 0
    for talk in talks:
        if not talk.waiting:
            continue
        try:
            ids = list(rendered(teacher.tokenizer, talk.ask(), return_dict=False))
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
    """Writes the answers of conversations anew to ``path`` (.jsonl), one turn of all at a time.

    A conversation ends when it has ``data.length`` tokens, after an answer that was cut at its
    budget (which is marked, see ``conversations``), and after an empty answer. A conversation
    without any answer is left out.
    """
    talks, turn = conversations_of(config, documents), 0
    ends = sorted({*teacher.tokenizer.eos_ids, *teacher.config.eos_ids})
    while asking := turn_prompts(config, teacher, talks, turn):
        part = f"{path.with_suffix('')}.turn-{turn}"
        rows = writing.write(teacher, [prompt for _, prompt in asking], config, ends, part)
        for (talk, _), row in zip(asking, rows, strict=True):
            talk.take(row.text, cut=row.finish in ("length", "context"))
        turn += 1
    told = [talk for talk in talks if talk.answered]
    temporary = path.with_suffix(".tmp")
    lines = ({"messages": talk.answered, "source": talk.source} for talk in told)
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    temporary.replace(path)
    cut = sum(CUT in talk.answered[-1] for talk in told)
    print(f"{len(told):,} of {len(talks):,} conversations have an answer, {cut:,} end in a cut one")
