"""Recipe ``prompts``: cuts prompts from held-out files, at places where a person might stop.

A prompt begins after a blank line, at an unindented line or at a statement. It ends at the end of a
line, without the newline, as most prompts of users do.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path

import numpy as np

from . import corpora, outlook, tokenizer
from .config import ConfigError, DataConfig, RunConfig

BEGINNING = re.compile(r"\s*(async def|def|class|import|from|@|if|for|while|with|try)\b|\S")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """The prompts to choose from the held-out files."""

    num_prompts: int = 320  # how many prompts are written
    shortest: int = 24  # the least length of a prompt in tokens
    longest: int = 160  # the greatest length of a prompt in tokens
    rest: int = 64  # tokens that must follow a prompt in its file
    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig(folder="runs/prompts")


Config = PromptsConfig


def cut(text: str, count, rng: np.random.Generator, config: PromptsConfig) -> list[str]:
    """Returns prompts of one document that do not overlap; ``count(text)`` counts tokens."""
    lines, prompts, first = text.splitlines(keepends=True), [], 0
    while first < len(lines):
        after_blank = first == 0 or not lines[first - 1].strip()
        if not (after_blank and lines[first].strip()) and not BEGINNING.match(lines[first]):
            first += 1
            continue
        wanted, last, size = rng.integers(config.shortest, config.longest + 1), first, 0
        while last < len(lines) and size < wanted:
            last += 1
            size = count("".join(lines[first:last]).rstrip())
        prompt = "".join(lines[first:last]).rstrip()
        if (
            config.shortest <= size <= config.longest
            and count("".join(lines[last : last + config.rest])) >= config.rest
        ):
            prompts.append(prompt)
        first = last
    return prompts


def make_prompts(documents, count, config: PromptsConfig) -> list[dict]:
    """Returns ``num_prompts`` objects ``{"text", "source"}``, spread over the documents."""
    found = [
        {"text": prompt, "source": path}
        for path, text in documents
        for prompt in cut(text, count, np.random.default_rng(config.data.seed), config)
    ]
    if len(found) < config.num_prompts:
        raise ConfigError(
            f"num_prompts={config.num_prompts}, but the held-out files give {len(found)}"
        )
    return [found[i * len(found) // config.num_prompts] for i in range(config.num_prompts)]


def run(config: PromptsConfig, *, dry_run: bool = False) -> None:
    """Writes ``heldout_prompts.jsonl``."""
    begin, vocabulary = time.monotonic(), tokenizer.load(config.data.tokenizer)

    def count(text: str) -> int:
        return len(vocabulary.encode(text).ids)

    documents = corpora.texts(config.data, "heldout")
    prompts = make_prompts(documents, count, config)
    sizes = [count(prompt["text"]) for prompt in prompts]
    print(f"{len(prompts)} prompts of {min(sizes)} to {max(sizes)} tokens")
    if dry_run:
        return outlook.show(
            model="none: prompts are cut out of texts",
            shapes=f"prompts of {config.shortest} to {config.longest} tokens",
            parameters="0",
            memory={"texts": sum(len(text.encode()) for _, text in documents)},
            steps=f"{len(documents):,} documents",
            seconds=time.monotonic() - begin,
        )
    path = Path(config.run.folder) / "heldout_prompts.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    print(f"wrote {path}")
