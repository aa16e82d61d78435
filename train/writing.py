"""A target goes on from prompts, in batches, with a drafter; what is finished is kept.

``config`` is everywhere a ``RegenerateConfig``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import specjax
from specjax.text.drafter_names import NO_DRAFTS

from .config import ConfigError

UNFINISHED = "{}.part-{}.jsonl"  # beside the output, what of it is done
SILENCE = 10.0  # seconds between two lines about how far a run is


def temperatures(config, count: int) -> list[float]:
    """Of each row: the first ones are greedy."""
    greedy = round(config.greedy_share * count)
    return [0.0] * greedy + [config.temperature] * (count - greedy)


def write(teacher, prompts: Sequence[dict], config, ends, part: str) -> list:
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


def serve(teacher, prompts, config, ends, drafter: str, **how) -> list:
    """``specjax.serve_offline`` as a configuration wants it."""
    num_draft = None if drafter in NO_DRAFTS else config.num_draft or None
    drafting = specjax.Drafting(num=num_draft)
    how |= dict(batch=config.data.batch, drafter=drafter, drafting=drafting, stop=ends)
    try:
        served = specjax.serve_offline(teacher, prompts, **how)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not served.finished:
        raise KeyboardInterrupt  # what is finished is kept
    return served.rows
