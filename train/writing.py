"""Lets a target continue prompts, in batches and with a drafter, and keeps finished texts.

In all functions ``config`` is a ``RegenerateConfig``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import specjax
from specjax.text.drafter_names import NO_DRAFTS

from .config import ConfigError

UNFINISHED = "{}.part-{}.jsonl"  # the file of finished texts, beside the output
SILENCE = 10.0  # seconds between two lines about the progress of a run


def temperatures(config, count: int) -> list[float]:
    """Returns the temperature of each row; the first rows are greedy."""
    greedy = round(config.greedy_share * count)
    return [0.0] * greedy + [config.temperature] * (count - greedy)


def teller() -> Callable[[object], None]:
    """Returns what ``specjax.serve_offline`` takes as ``progress``: it prints a line at the end,
    and before it at most one in ``SILENCE`` seconds."""
    said = time.monotonic()

    def tell(state):
        nonlocal said
        if state.done == state.total or time.monotonic() > said + SILENCE:
            print(state, flush=True)
            said = time.monotonic()

    return tell


def write(teacher, prompts: Sequence[dict], config, ends, part: str) -> list:
    """Returns the target's continuation of each prompt, a ``specjax.serving.Row``, in order.

    Greedy and sampled prompts are decoded by programs of their own, so that the former draw
    nothing.

    Args:
      teacher: the target.
      prompts: as ``specjax.serve_offline`` takes them, each with its temperature.
      config: the configuration of the recipe.
      ends: the ids of the tokens that end a text.
      part: the beginning of the names of the files that keep finished texts.
    """
    rows, tell = {}, teller()
    for name, drawn in (("greedy", False), ("drawn", True)):
        chosen = [n for n, prompt in enumerate(prompts) if bool(prompt["temperature"]) == drawn]
        if chosen:
            asked = [prompts[n] for n in chosen]
            how = dict(output=UNFINISHED.format(part, name), progress=tell)
            drafter = config.drawn_drafter if drawn else config.drafter
            rows |= zip(chosen, serve(teacher, asked, config, ends, drafter, **how), strict=True)
    return [rows[n] for n in range(len(prompts))]


def serve(teacher, prompts, config, ends, drafter: str, **how) -> list:
    """Calls ``specjax.serve_offline`` with the settings of a configuration."""
    num_draft = None if drafter in NO_DRAFTS else config.num_draft or None
    drafting = specjax.Drafting(num=num_draft)
    how |= dict(batch=config.data.batch, drafter=drafter, drafting=drafting, stop=ends)
    try:
        served = specjax.serve_offline(teacher, prompts, **how)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not served.finished:
        raise KeyboardInterrupt  # finished texts are kept
    return served.rows
