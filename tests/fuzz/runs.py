"""Runs of a program: what it said, row by row, and what must hold of every run.

A program is entered by ``decode``, or in bursts by the functions that streams, chats and servers
call, between which rows may be frozen, go on with a second turn, or make room for other prompts.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.decoding import continuous_batching, loop
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.prefill import PREFILL_CHUNK
from specjax.decoding.state import result
from specjax.drafters.draft_model import DraftModel, DraftModelState
from specjax.drafters.translation import LAG, TranslatedDraftModel, TranslatedState
from specjax.types import Draft

from .cases import MORE, Batch, Case
from .draws import between
from .reference_law import RowSettings

jit_insert = jax.jit(continuous_batching.insert, static_argnums=(0, 1, 2, 7), donate_argnums=(4,))
LOOK = 4  # bursts after which caches are looked at, besides at the end
CLOSE = 2e-3  # how far logits of a cached prefix may be from the reference


class Wrong(AssertionError):
    """What must hold does not."""


def check(holds, *words) -> None:
    """Raises ``Wrong`` with ``words`` unless something holds."""
    if not holds:
        raise Wrong(" ".join(map(str, words)))


@dataclasses.dataclass(frozen=True)
class Said:
    """What a row said, and what the reference needs to say the same.

    Attributes:
      prompt, new: token ids.
      ended: why it ended, a name of ``state.ENDED``.
      budget: how many tokens there was room for.
      stops: ids that end it.
      key: of the row.
      settings: of the row.
      logprobs: of the new tokens, or None.
    """

    prompt: list[int]
    new: list[int]
    ended: str
    budget: int
    stops: set[int]
    key: jax.Array
    settings: RowSettings
    logprobs: np.ndarray | None = None


def run(case: Case, index: int) -> list[Said]:
    """Runs the program on its ``index``-th batch, checks the run, and returns what rows said."""
    batch = case.drawn(index)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a buffer that ends rows early is one of the options
        if case.entry == "decode":
            return decoded(case, batch, decode(case, batch))
        return in_bursts(case, batch, index)


def decode(case: Case, batch: Batch):
    """``specjax.decode`` of a batch."""
    return specjax.decode(
        case.model.target,
        case.composition.drafter,
        case.params,
        batch.tokens,
        batch.lengths,
        key=batch.keys,
        max_new_tokens=batch.budgets,
        sampling=batch.sampling,
        rule=case.rule,
        capacity=case.capacity,
        stops=batch.stops,
        logprobs=case.logprobs or False,
        num_samples=case.num_samples,
    )


def decoded(case: Case, batch: Batch, out) -> list[Said]:
    """What the rows of a result said."""
    invariants(case, out, np.repeat(batch.lengths, case.num_samples))
    rows = []
    out = jax.device_get(out)
    for row in range(len(out.tokens)):
        own = row // case.num_samples
        rows.append(said(case, batch, own, row, out, len(batch.prompts[own])))
    return rows


def said(case: Case, batch: Batch, own: int, row: int, out, begin: int, prompt=None) -> Said:
    """What a ``row`` of a result said from ``begin`` on, for the prompt ``own`` of a batch."""
    prompt = batch.prompts[own] if prompt is None else prompt
    end = int(out.lengths[row])
    check(out.tokens[row, :begin].tolist() == prompt, f"row {row}: the prompt has changed")
    return Said(
        prompt=prompt,
        new=out.tokens[row, begin:end].tolist(),
        ended=specjax.decoding.state.ENDED[out.ended[row]],
        budget=min(batch.budget_of(own), case.slots - begin),
        stops=batch.stops_of(own),
        key=batch.keys[row],
        settings=batch.settings[own],
        logprobs=None if out.logprobs is None else np.asarray(out.logprobs[row, begin:end]),
    )


def invariants(case: Case, out, begins) -> None:
    """Raises ``Wrong`` unless statistics, flags and buffers of a result are consistent.

    ``begins``: int32 ``[B]``, where the new tokens of each row begin.
    """
    out = jax.device_get(out)
    stats, index = out.stats, np.arange(out.tokens.shape[1])
    new = (index >= begins[:, None]) & (index < out.lengths[:, None])
    check((out.tokens[index >= out.lengths[:, None]] == 0).all(), "tokens after the end of a row")
    check(not (out.from_draft & ~new).any(), "flags of drafted tokens outside of the new ones")
    later = np.maximum(new.sum(axis=1) - 1, 0)  # the reading of the prompt emits the first token
    check((stats.emitted == later).all(), "emitted:", stats.emitted, later)
    kept = (out.from_draft & new).sum(axis=1)
    check((stats.accepted == kept).all(), "accepted:", stats.accepted, "flags:", kept)
    total = int(np.sum(stats.rounds))
    check(abs(stats.tau * total - later.sum()) < 1e-6 * max(1, total), "τ × rounds is not tokens")
    # a round emits its accepted tokens and one more, unless the last one is cut short
    extra = stats.accepted + stats.rounds - stats.emitted
    most = stats.rounds if case.composition.silent else 1
    check(((extra >= 0) & (extra <= most)).all(), "accepted + rounds - emitted:", extra)
    check((stats.accepted <= stats.drafted).all(), "accepted:", stats.accepted, stats.drafted)
    check((stats.accepted_at.sum(axis=1) == stats.accepted).all(), "accepted_at:", stats)
    check((stats.accepted_at <= stats.drafted_at).all(), "accepted_at, drafted_at:", stats)
    for name in ("accepted_at", "drafted_at"):
        falls = np.diff(getattr(stats, name), axis=1) <= 0
        check(falls.all(), f"{name} rises with the depth:", getattr(stats, name))
    check((stats.drafted_at <= stats.rounds[:, None]).all(), "drafted_at above rounds:", stats)
    check(stats.rounds_by_width.sum() == total, "rounds by width:", stats.rounds_by_width, total)
    if out.logprobs is not None:
        check(not out.logprobs[~new].any(), "log-probabilities outside of the new tokens")


# ----------------------------------------------------------------------------------- in bursts


def in_bursts(case: Case, batch: Batch, index: int) -> list[Said]:
    """The rows of all prompts that came in, in the order in which they ended."""
    objects = case.model.target, case.composition.drafter, case.rule
    request = requested(case, batch)
    chunk = case.chunk or PREFILL_CHUNK
    state = loop.jit_start(*objects, case.slots, case.params, request, chunk)
    state = to_the_end(case, objects, state, index)
    rows = ended(case, batch, state, batch.lengths)
    if case.entry == "extend":
        return rows + second_turn(case, objects, state, rows, index)
    if case.entry == "insert":
        return rows + second_guests(case, objects, state, batch, index, chunk)
    return rows


def requested(case: Case, batch: Batch):
    """The batch in the shapes of the loop."""
    request, _ = prepare_inputs(
        case.model.target,
        case.composition.drafter,
        batch.tokens,
        batch.lengths,
        batch.keys,
        batch.budgets,
        batch.sampling,
        case.slots,
        batch.stops,
        logprobs=case.logprobs or False,
    )
    return request


def to_the_end(case: Case, objects, state, index: int):
    """Bursts of a few rounds until all rows have ended; each burst is checked."""
    rounds = between(case.draws.generator("rounds", index), 1, 3)
    most = case.most * (3 if case.composition.silent else 1)
    for burst in range(1 + most):
        over = not (np.asarray(state.budget) > 0).any()
        if over or burst % LOOK == 1:
            cache_is_that_of_the_tokens(case, state)
        if over:
            return state
        before = public(state)
        state = loop.jit_burst(*objects, rounds, case.params, state)
        after = public(state)
        frozen = before["budget"] == 0
        for name, value in before.items():
            check(
                np.array_equal(value[frozen], after[name][frozen]),
                f"a burst changed {name} of rows that had ended",
            )
        went_on(before, after, rounds)
    raise Wrong(f"rows still run after {most} bursts")


def public(state) -> dict[str, np.ndarray]:
    """All leaves of a state but for the drafter's, as arrays on the host, by name."""
    state = dataclasses.replace(state, drafter_state=(), key=jax.random.key_data(state.key))
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path).lstrip("."): np.array(leaf) for path, leaf in flat}


def went_on(before, after, rounds: int) -> None:
    """Checks that a burst only appended to the rows."""
    at = np.arange(before["tokens"].shape[1]) < before["length"][:, None]
    check((before["tokens"] == after["tokens"])[at].all(), "a burst changed committed tokens")
    done = after["stats.rounds"] - before["stats.rounds"]
    check(((done >= 0) & (done <= rounds)).all(), f"{done} rounds in a burst of {rounds}")
    check((done[before["budget"] > 0] > 0).all(), "a row that runs had no round")
    grown = after["length"] - before["length"]
    check((grown >= 0).all(), "rows became shorter:", grown)
    spent = before["budget"] - after["budget"]
    running = after["budget"] > 0
    check((spent[running] == grown[running]).all(), "budgets:", spent, "lengths:", grown)


def cache_is_that_of_the_tokens(case: Case, state) -> None:
    """Holds the logits that the target reads at each root, from its cache, against the reference;
    and how far a draft model has read."""
    length = np.asarray(state.length)
    roots = np.asarray(state.tokens)[np.arange(len(length)), length - 1]
    found = logits_at(case.model.target, case.params["target"], state.cache, length - 1, roots)
    for row, (text, size) in enumerate(zip(np.asarray(state.tokens), length, strict=True)):
        wanted, sure = case.model.logits(text[:size].tolist())
        off = np.abs(np.asarray(found[row]) - wanted[-1]).max()
        scale = max(1.0, np.abs(wanted[-1]).max())
        check(
            off < CLOSE * scale or not sure[-1],
            f"row {row}: logits from the cache of {size - 1} tokens are off by {off:.3g}",
        )
    models = DraftModelState, TranslatedState
    for own in jax.tree.leaves(state.drafter_state, is_leaf=lambda x: isinstance(x, models)):
        if not isinstance(own, models):
            continue
        size, filled, least = length, own, 0
        if isinstance(own, TranslatedState):  # its text is another, in tokens of its own
            size = np.take_along_axis(np.asarray(own.ends), length[:, None], axis=1)[:, 0]
            filled = own.model
            least = np.minimum(size - LAG, 0)  # what it reads again may begin before the text
        read = np.asarray(filled.filled)
        check(((read >= least) & (read <= size)).all(), "a draft model has read", read, size)
        drafter = case.composition.drafter
        if isinstance(drafter, DraftModel) and not isinstance(drafter, TranslatedDraftModel):
            check((read >= length - 2).all(), "a draft model lags by more than two tokens")


@functools.partial(jax.jit, static_argnums=0)
def logits_at(target, params, cache, start, roots):
    """float32 ``[B, V]``, after the tokens ``roots`` at positions ``start``, int32 ``[B]`` each."""
    draft = Draft(start=start, tokens=roots[:, None], topology=(-1,))
    return target.verify(params, cache, draft).logits[:, 0]


def ended(case: Case, batch: Batch, state, begins, prompts=None) -> list[Said]:
    """What the rows of a state said that began at ``begins``."""
    out = jax.device_get(result(state))
    invariants(case, out, np.asarray(begins))
    return [
        said(case, batch, row, row, out, int(begin), None if prompts is None else prompts[row])
        for row, begin in enumerate(begins)
    ]


def second_turn(case: Case, objects, state, rows: list[Said], index: int) -> list[Said]:
    """Appends a few tokens to each text and goes on, as a chat does."""
    generator = case.draws.generator("second turn", index)
    more = [
        generator.integers(0, case.model.vocab, between(generator, 1, MORE)).tolist() for _ in rows
    ]
    batch = case.with_prompts(more, 1000 + index, MORE)
    request = requested(case, batch)
    state = loop.jit_extend(*objects, case.params, state, request)
    state = to_the_end(case, objects, state, 1000 + index)
    whole = [r.prompt + r.new + own for r, own in zip(rows, more, strict=True)]
    return ended(case, batch, state, [len(text) for text in whole], whole)


def second_guests(case: Case, objects, state, first: Batch, index: int, chunk) -> list[Said]:
    """Other prompts come into the rows, but for the first row, which stays as it is."""
    batch = case.drawn(1000 + index)
    rows = np.arange(case.batch, dtype=np.int32)
    rows[0] = case.batch  # out of range: it is left out
    before = {name: value[0].copy() for name, value in public(state).items()}
    state = jit_insert(
        *objects, case.params, state, jnp.asarray(rows), requested(case, batch), chunk
    )
    state = to_the_end(case, objects, state, 1000 + index)
    after = public(state)
    for name, value in before.items():
        check(np.array_equal(value, after[name][0]), f"insert changed {name} of another row")
    prompts = [first.prompts[0], *batch.prompts[1:]]
    return ended(case, batch, state, [len(prompt) for prompt in prompts], prompts)[1:]
