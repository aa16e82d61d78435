"""Recipe ``compare``: the held-out τ of several heads on the same trees, measured by decoding.

Nothing is timed, so a busy machine gives the same table. The prompts are the last ones that ship
with the package, from files on which nothing was trained. Heads propose as in ``specjax.generate``:
above temperature 0 they draw their tokens, except in trees that they grow by their own
probabilities.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np

import specjax
from specjax.text import sibling_sampling
from specjax.text.drafter_names import resolve_drafter

from . import outlook
from .config import ConfigError
from .decoding import decode_all, tau_of
from .measured import num_candidates


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """The heads to compare, and how they are decoded."""

    teacher: str = "embedded"  # the target of the heads
    heads: tuple[str, ...] = ()  # folders of trained heads
    trees: tuple[str, ...] = ("chain:3",)  # as specjax generate --tree takes them
    temperature: float = 0.0  # 0 is greedy decoding
    num_prompts: int = 64  # a multiple of batch
    new_tokens: int = 64  # tokens decoded per prompt
    batch: int = 16  # prompts that are decoded together
    output: str = "runs/compare.md"  # the table, in Markdown

    def __post_init__(self):
        if not self.heads or not self.trees:
            raise ConfigError(
                f"heads={self.heads}, trees={self.trees}; accepted: at least one each"
            )
        if self.batch < 1 or self.num_prompts < 1 or self.num_prompts % self.batch:
            raise ConfigError(
                f"num_prompts={self.num_prompts}; accepted: a multiple of batch={self.batch}"
            )


Config = CompareConfig


def read_prompts(lm, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The last ``count`` shipped prompts, int32 ``[count, T]`` padded with 0, and their lengths."""
    file = Path(specjax.__path__[0]) / "data" / "heldout_prompts.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    if count > len(lines):
        raise ConfigError(f"num_prompts={count}; accepted: 1 to {len(lines)}")
    ids = [lm.tokenizer.encode(json.loads(line)["text"]) for line in lines[-count:]]
    lengths = np.asarray([len(row) for row in ids], np.int32)
    tokens = np.zeros((count, lengths.max()), np.int32)
    for row, own in enumerate(ids):
        tokens[row, : len(own)] = own
    return tokens, lengths


def drafter_of(lm, heads, temperature: float) -> specjax.types.Drafter:
    """The drafter of loaded heads with the proposals that ``specjax.generate`` makes by default."""
    sampling = specjax.Sampling(temperature=temperature)
    how = sibling_sampling.wanted(specjax.Drafting(), sampling)
    return resolve_drafter(lm, heads, how=how)[0]


def run(config: CompareConfig, *, dry_run: bool = False) -> None:
    """Prints the table and writes it to ``output``."""
    if Path(config.output).is_dir():
        raise ConfigError(f"output={config.output!r} is a folder; accepted: the name of a file")
    lm = specjax.load(config.teacher)
    prompts = read_prompts(lm, config.num_prompts)
    loaded = [
        specjax.load_drafter(folder, lm, topology=specjax.trees.parse(tree))
        for tree in config.trees
        for folder in config.heads
    ]
    drafters = [drafter_of(lm, heads, config.temperature) for heads in loaded]
    print(f"{len(loaded)} rows, {config.num_prompts} prompts each")
    how = {name: getattr(config, name) for name in ("batch", "new_tokens", "temperature")}
    if dry_run:
        first = [x[: config.batch] for x in prompts]
        both = {"target": lm.params, "drafter": loaded[0].params}
        seconds = outlook.seconds_of(lambda: decode_all(lm, drafters[0], both, *first, **how))
        slots = first[0].shape[1] + config.new_tokens
        cache = jax.eval_shape(lambda: lm.target.init(lm.params, config.batch, slots))
        batches = len(loaded) * config.num_prompts // config.batch
        return outlook.show(
            model=f"{lm.name} and {len(config.heads)} drafters",
            shapes=f"{config.batch} rows of {slots} tokens, trees {', '.join(config.trees)}",
            parameters=f"{outlook.num_parameters(lm.params):,}, none to train",
            memory={
                "target": outlook.num_bytes(lm.params),
                "drafters": sum(outlook.num_bytes(heads.params) for heads in loaded),
                "cache": outlook.num_bytes(cache),
            },
            steps=f"{batches:,} batches, {config.new_tokens} tokens a row",
            seconds=batches * seconds,
            beside="compiling left out",
        )
    lines = [
        f"τ of heads of {config.teacher} at temperature {config.temperature:g}, on the last "
        f"{config.num_prompts} held-out prompts, {config.new_tokens} new tokens each, with "
        "intervals of 95 % over the prompts (`specjax train compare`).",
        "",
        "| drafter | weights | tree | drafted | τ | accepted at depth 1, 2, ... |",
        "|---|---|---|---|---|---|",
    ]
    trees = [tree for tree in config.trees for _ in config.heads]
    for heads, drafter, tree in zip(loaded, drafters, trees, strict=True):
        both = {"target": lm.params, "drafter": heads.params}
        found = decode_all(lm, drafter, both, *prompts, **how)
        tau, low, high = tau_of(found)
        shares = found["accepted_at"].sum(axis=0) / max(found["rounds"].sum(), 1)
        weights = sum(x.size for x in jax.tree.leaves(heads.params))
        lines.append(
            f"| {drafter.name} | {weights:,} | {tree} | {num_candidates(drafter)} "
            f"| {tau:.3f} [{low:.3f}, {high:.3f}] | {', '.join(f'{s:.0%}' for s in shares)} |"
        )
        print(lines[-1], flush=True)
    path = Path(config.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {path}")
