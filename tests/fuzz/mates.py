"""A row's text depends on its key, prompt and settings alone, not on its mates or its place."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from specjax.drafters import Adaptive

from .cases import Batch, Case
from .drafters import parts_of
from .runs import Said, check, decode, decoded

OTHER = 5000  # added to the number of a batch: the batch of other mates


def rows_do_not_depend_on_their_mates(case: Case, index: int, rows: list[Said]) -> None:
    """Runs the program again with one of the rows at another place among other rows.

    The rule draws with keys of its own, so its texts are compared with each other. An adaptive
    drafter decides for the whole batch, so its sampled texts do depend on it.
    """
    adaptive = any(isinstance(d, Adaptive) for d in parts_of(case.composition.drafter))
    if case.entry != "decode" or case.batch < 2 or adaptive:
        return
    generator = case.draws.generator("mates", index)
    here, there = generator.permutation(case.batch)[:2]
    batch = moved(case, case.drawn(index), case.drawn(OTHER + index), here, there)
    again = decoded(case, batch, decode(case, batch))
    for sample in range(case.num_samples):
        own, other = (
            rows_of[at * case.num_samples + sample]
            for rows_of, at in ((rows, here), (again, there))
        )
        check(
            own.new == other.new,
            f"row {here} of prompt {own.prompt} said {own.new}, and as row {there} of another",
            f"batch {other.new}",
        )


def moved(case: Case, batch: Batch, mates: Batch, here: int, there: int) -> Batch:
    """``mates`` with the row ``here`` of ``batch`` in place of its row ``there``, and with what one
    value says for all rows as in ``batch``."""
    rows = case.batch

    def with_row(old, new):
        old, new = np.array(old), np.asarray(new)
        old[there] = new[here]
        return old

    prompts, settings = list(mates.prompts), list(mates.settings)
    prompts[there], settings[there] = batch.prompts[here], batch.settings[here]
    budgets = batch.budgets
    if case.budgets_by_row:
        budgets = with_row(mates.budgets, batch.budgets)
        budgets[there - 1] = case.most  # the greatest decides about the buffer
    keys = jax.random.key_data(mates.keys).reshape(rows, case.num_samples, -1)
    own = jax.random.key_data(batch.keys).reshape(rows, case.num_samples, -1)
    keys = with_row(keys, own).reshape(rows * case.num_samples, -1)
    return dataclasses.replace(
        batch,
        prompts=prompts,
        tokens=with_row(mates.tokens, batch.tokens),
        lengths=with_row(mates.lengths, batch.lengths),
        budgets=budgets,
        stops=with_row(mates.stops, batch.stops) if case.stops_by_row else batch.stops,
        keys=jax.random.wrap_key_data(keys),
        sampling=case.settings.joined(batch.sampling, mates.sampling, with_row),
        settings=settings,
    )
