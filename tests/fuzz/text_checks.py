"""What a row said against passes without a cache: token for token, greedy or by shared noise.

The reference reads the whole text at once, and at each position names the token that had to come.
Where two tokens are too close for float32 to tell, either may; the text is followed as it is.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from .reference_law import adjusted, coupled, greatest, law, shared_noise
from .runs import Said, check
from .targets import Model

LOGPROB = 2e-3  # how far log-probabilities may be from the reference


def texts_are_the_references(model: Model, kind: str, rows: list[Said], logprobs) -> int:
    """Raises ``Wrong`` at the first token that the reference would not say; see ``cases.KINDS``.

    Returns:
      How many tokens were compared.
    """
    noise, compared = None, 0
    if kind == "coupled":
        size = max(len(row.prompt) + len(row.new) for row in rows) + 1
        noise = shared_noise(jnp.stack([row.key for row in rows]), size, model.vocab)
    for index, row in enumerate(rows):
        own = None if noise is None else noise[index]
        compared += text_is_the_references(model, kind, row, own, logprobs, f"row {index}")
    return compared


def text_is_the_references(model: Model, kind: str, row: Said, noise, logprobs, where: str) -> int:
    """``texts_are_the_references`` of one row."""
    logits, sure = model.logits(row.prompt + row.new)
    begin, compared = len(row.prompt), 0
    for i in range(len(row.new) + (row.ended == "no token")):
        at = begin + i
        wanted = adjusted(logits[at - 1], row.settings, row.prompt, row.new[:i])
        tokens, p, certain = possible(kind, wanted, row, None if noise is None else noise[at])
        if not (certain and sure[at - 1]):
            continue
        if i == len(row.new):
            check(not tokens, f"{where}: it ended without a token, the reference says {tokens}")
            break
        check(
            row.new[i] in tokens,
            f"{where}: new token {i} is {row.new[i]}, the reference says {tokens};",
            f"prompt {row.prompt}, new {row.new}, {row.settings}",
        )
        compared += 1
        if logprobs:
            said = logprob_of(logprobs, logits[at - 1], p, row.new[i])
            off = abs(said - row.logprobs[i])
            check(off < LOGPROB, f"{where}: log-probability {i} is {row.logprobs[i]}, not {said}")
    end_is_right(row, where)
    return compared


def possible(kind: str, wanted, row: Said, noise):
    """The tokens that may follow adjusted logits ``wanted``: one, none, or where a rule draws with
    keys of its own all that have a probability; the law, None for greedy; whether this is sure."""
    if kind == "greedy":
        token, certain = greatest(wanted)
        return [token] * (token >= 0), None, certain
    p, certain = law(wanted, row.settings)
    if kind == "sampled":
        return np.flatnonzero(p).tolist(), p, certain
    token, close = coupled(p, noise)
    return [token] * (token >= 0), p, certain and close


def logprob_of(which: str, logits, p, token: int) -> float:
    """``raw``: of the model itself; ``law``: of the law p, None at temperature 0."""
    if which == "law":
        return 0.0 if p is None else float(np.log(p[token]))
    top = logits.max()
    return float(logits[token] - top - np.log(np.exp(logits - top).sum()))


def end_is_right(row: Said, where: str) -> None:
    """Checks that a row ended where it had to, and says why."""
    words = f"{where}: {len(row.new)} of {row.budget} tokens, stops {row.stops}, {row.new}:"
    check(row.ended, words, "the row still runs")
    check(len(row.new) <= row.budget, words, "more than the budget")
    check(not row.stops & {*row.new[:-1]}, words, "it went on after a stop")
    stopped = bool(row.new) and row.new[-1] in row.stops
    check((row.ended == "stop") == stopped, words, f"it ended by {row.ended!r}")
    if row.ended == "length":
        check(len(row.new) == row.budget, words, "it ended early")
    if row.ended == "no token":
        check(len(row.new) < row.budget, words, "there was no room for a token")
