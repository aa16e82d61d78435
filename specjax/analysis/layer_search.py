"""Searches the set of sublayers that a target should skip to draft for itself.

The target writes greedy texts for a few prompts. For each set of skipped sublayers, one pass finds
the tokens of these texts that the other sublayers would have drafted. An array gates the sublayers,
so one compiled program serves all sets. The times of passes, attention and MLPs are measured once;
they determine the time of a round, and for every number of drafts g

    predicted ratio = expected tokens of a round with g drafts * T(1) / (g * T(part) + T(g + 1)).

Each step of the search removes the sublayer without which the predicted ratio is best (greedy
backward elimination). The result is the best set of all steps.

Draft & Verify searches by Bayesian optimization of measured tokens a second, as
``bayesian_layers`` does. Here, as in SWIFT, a candidate is judged by its agreement in one parallel
pass over a window, in which it sees its own entries.

References: Draft & Verify, arXiv 2309.08168, section 3.2; SWIFT, arXiv 2410.06916, section 4.2.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from .. import trees
from .._internal.optional import required
from ..drafters.self_draft import SelfDraft
from ..models.causal_lm import CausalLM
from ..models.lm import LM
from ..models.sub_network import KINDS
from ..text.options import Options, Prompts
from ..text.prepare import prepare
from ..types import Draft, SubNetwork
from .timing import alternate, pass_call

MOST_DRAFTS = 8
PATIENCE = 4  # the search ends after so many steps without a better prediction


@dataclasses.dataclass(frozen=True)
class PassCosts:
    """Times of passes over one row, in seconds.

    Attributes:
      passes: ``{N: seconds}`` of a pass of the whole target over N nodes.
      attention: seconds that one attention sublayer adds to a pass over one node.
      mlp: seconds that one MLP sublayer adds to a pass over one node.
    """

    passes: dict[int, float]
    attention: float
    mlp: float

    def part(self, attention: int, mlp: int) -> float:
        """Returns the seconds of a pass over one node without some sublayers.

        Args:
          attention: the number of skipped attention sublayers.
          mlp: the number of skipped MLP sublayers.
        """
        saved = attention * self.attention + mlp * self.mlp
        return max(self.passes[1] - saved, 1e-3 * self.passes[1])

    def whole(self, nodes: int) -> float:
        """Returns the seconds of the target's pass over ``nodes``, interpolated linearly."""
        known = sorted(self.passes)
        return float(np.interp(nodes, known, [self.passes[n] for n in known]))


@dataclasses.dataclass(frozen=True)
class Choice:
    """A set of skipped sublayers and its predicted speed.

    Attributes:
      skip: the skipped sublayers.
      num_draft: the number of drafts with the best prediction.
      agreement: the share of the texts' tokens that the other sublayers would have drafted, in
        [0, 1].
      ratio: the predicted tokens a second divided by those of plain decoding, without the time to
        read prompts.
    """

    skip: tuple[str, ...]
    num_draft: int
    agreement: float
    ratio: float


def predict(
    right: np.ndarray,
    costs: PassCosts,
    attention: int,
    mlp: int,
    most: int,
    verified: float = 1.0,
):
    """Returns the number of drafts with the best predicted ratio, and the ratio.

    Args:
      right: bool ``[P, W]``, whether each of W tokens of each of P texts was drafted correctly.
      costs: times of passes.
      attention, mlp: the numbers of skipped sublayers of each kind.
      most: the greatest number of drafts.
      verified: the share of the target's pass that a round runs, where the part hands over the
        layers that it has run.
    """
    part, best = costs.part(attention, mlp), (1, 0.0)
    for drafts in range(1, min(most, right.shape[1]) + 1):
        runs = np.lib.stride_tricks.sliding_window_view(right, drafts, axis=1)
        tokens = 1 + np.cumprod(runs, axis=2).sum(axis=2).mean()
        seconds = drafts * part + verified * costs.whole(drafts + 1)
        ratio = tokens * costs.passes[1] / seconds
        if ratio > best[1]:
            best = drafts, float(ratio)
    return best


def eliminate(
    names: tuple[str, ...],
    judge: Callable[[tuple[str, ...]], Choice],
    tell: Callable[[str], None] = lambda _: None,
) -> Choice:
    """Returns the best set of greedy backward elimination.

    Args:
      names: all sublayers; at least one is never skipped.
      judge: a function that returns the ``Choice`` of a set of skipped sublayers.
      tell: a function that is called with a line of text after each step.
    """
    best, left_out, since = None, (), 0
    while len(left_out) < len(names) - 1 and since < PATIENCE:
        others = [name for name in names if name not in left_out]
        found = [judge((*left_out, name)) for name in others]
        step = max(found, key=lambda choice: choice.ratio)
        left_out = step.skip
        better = best is None or step.ratio > best.ratio
        best, since = (step, 0) if better else (best, since + 1)
        tell(f"{len(left_out)} of {len(names)} skipped: predicted {step.ratio:.2f} x plain")
    return required(best, "the best set")  # there are two sublayers and more


def resumed(journal: Path, about: dict, other: str) -> list[dict]:
    """The lines of a journal after its first one, or none of a journal that it makes. A last line
    that was not written to its end is cut off.

    Args:
      journal: the file, of JSON objects, one a line.
      about: the first line, what the others belong to.
      other: what the others belong to where the first line differs, for the error.

    Raises:
      ValueError: the first line differs.
      OSError: the journal cannot be written.
    """
    if not journal.exists():
        try:
            journal.write_text(json.dumps(about) + "\n", encoding="utf-8")
        except OSError as error:
            raise type(error)(
                f"journal={journal}: it cannot be written ({error.strerror}); name a file in a "
                "folder that exists"
            ) from None
        return []
    text = journal.read_text(encoding="utf-8")
    first, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]
    try:
        known = json.loads(first)
    except json.JSONDecodeError:
        known = None
    if known != about:
        raise ValueError(
            f"journal={journal}: it belongs to {other}; give another file, or delete it"
        )
    if not text.endswith("\n"):
        journal.write_text("\n".join([first, *lines]) + "\n", encoding="utf-8")
    return [json.loads(line) for line in lines]


class LayerSearch:
    """The search of skipped sublayers for one model and its prompts.

    Args:
      lm: a decoder-only model from ``specjax.load``.
      prompts: see ``generate``; several prompts of the kind that will be decoded.
      max_new_tokens: the length in tokens of the texts on which sets are judged.
      journal: a file with the sets that were judged so far, which is read first and then extended,
        so that the same call resumes a search that was stopped; None: no file is written.
      costs: times of passes; None: they are measured.

    Attributes:
      choice: the best set, after ``run``.
      known: for each judged set bool ``[P, W]``, see ``right``.

    Raises:
      ValueError: the model has no sub-networks, ``max_new_tokens`` is less than 2, or the journal
        belongs to another model or other prompts.
    """

    def __init__(
        self,
        lm: LM,
        prompts: Prompts,
        *,
        max_new_tokens: int = 48,
        journal: str | Path | None = None,
        costs: PassCosts | None = None,
    ):
        target = decoder_of(lm)
        if max_new_tokens < 2:
            raise ValueError(f"max_new_tokens={max_new_tokens}: give at least 2")
        self.lm, layers = lm, range(target.num_layers)
        self.names = tuple(f"{kind}.{layer}" for layer in layers for kind in KINDS)
        work = prepare(lm, prompts, Options(drafter=None, max_new_tokens=max_new_tokens, stop=()))
        begun = work.start()
        self.read = jax.tree.map(jnp.copy, begun.cache)  # the entries of the prompts
        self.tokens = np.asarray(work.burst(work.capacity, begun).tokens)
        self.begin, self.size = np.asarray(work.request.lengths), max_new_tokens
        self.known: dict[tuple[str, ...], np.ndarray] = {}
        self.journal = None if journal is None else Path(journal)
        if self.journal is not None:
            self._resume(self.journal)
        self.costs = costs or measure_costs(lm)  # last, since it takes the longest

    def _resume(self, journal: Path):
        """Reads the journal, or creates it."""
        about = {"fingerprint": self.lm.checkpoint, "tokens": self._texts().tolist()}
        for one in resumed(journal, about, "another model or other prompts"):
            self.known[tuple(one["skip"])] = np.asarray(one["right"], bool)

    def _texts(self) -> np.ndarray:
        """Returns int32 ``[P, W]``, the generated tokens."""
        where = self.begin[:, None] + np.arange(self.size)
        return np.take_along_axis(self.tokens, where, axis=1)

    def right(self, skip: tuple[str, ...]) -> np.ndarray:
        """Returns which tokens of the texts a part of the target would have drafted.

        Args:
          skip: the skipped sublayers.

        Returns:
          bool ``[P, W]``.
        """
        skip = tuple(name for name in self.names if name in skip)
        if skip not in self.known:
            gates = np.asarray([name not in skip for name in self.names], np.float32)
            texts = self._texts()
            roots = np.take_along_axis(self.tokens, self.begin[:, None] - 1, axis=1)
            fed = np.concatenate([roots, texts[:, :-1]], axis=1)
            said = _said(
                self.lm.target, self.lm.params, self.read, fed, self.begin - 1, gates.reshape(-1, 2)
            )
            self.known[skip] = np.asarray(said) == texts
            if self.journal is not None:
                line = {"skip": skip, "right": self.known[skip].astype(int).tolist()}
                with self.journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        return self.known[skip]

    def judge(self, skip: tuple[str, ...], most: int = MOST_DRAFTS) -> Choice:
        """Returns the predicted speed of a set of skipped sublayers.

        Args:
          skip: the skipped sublayers.
          most: the greatest number of drafts.
        """
        skip = tuple(name for name in self.names if name in skip)
        attention, mlp = (sum(name.startswith(kind) for name in skip) for kind in KINDS)
        right = self.right(skip)
        drafts, ratio = predict(right, self.costs, attention, mlp, most)
        return Choice(skip, drafts, float(right.mean()), ratio)

    def run(self, tell: Callable[[str], None] = lambda _: None) -> SelfDraft | None:
        """Searches, and sets ``choice`` to the best set.

        Args:
          tell: a function that is called with a line of text after each step.

        Returns:
          the drafter of the best set, or None if no set is predicted to be faster than plain
          decoding.
        """
        self.choice = eliminate(self.names, self.judge, tell)
        if self.choice.ratio <= 1:
            return None
        return SelfDraft(
            num_draft=self.choice.num_draft, target=self.lm.target, skip=self.choice.skip
        )


@functools.partial(jax.jit, static_argnums=0)
def _said(target, params, cache, tokens, start, gates):
    """Returns int32 ``[P, W]``: the most likely next token after each token of a window, by the
    sublayers whose gate is 1."""
    chain = trees.chain_parents(tokens.shape[1] - 1)
    draft = Draft(start=jnp.asarray(start, jnp.int32), tokens=tokens, topology=chain)
    scores = target.run(params, cache, draft, gates=gates)
    return jnp.argmax(scores.logits, axis=-1).astype(jnp.int32)


def decoder_of(lm: LM) -> CausalLM:
    """Returns the target of a model. Raises ValueError where the search does not support it."""
    if not isinstance(lm.target, CausalLM):
        lm.target.sub_network(exit=1)  # raises the reason, if there are no sub-networks
        raise ValueError(f"{lm.name}: the search supports decoder-only models of specjax.load")
    return lm.target


@dataclasses.dataclass(frozen=True)
class _Alone:
    """A part of a target in the form of a target for ``timing``, with the cache of the whole."""

    whole: CausalLM
    part: SubNetwork

    @property
    def max_positions(self):
        return self.whole.max_positions

    def init(self, params, batch, capacity, inputs=None):
        return self.whole.init(params, batch, capacity, inputs)

    def verify(self, params, cache, draft):
        return self.part.verify(params, cache, draft)


def measure_costs(
    lm: LM, most: int = MOST_DRAFTS, *, repetitions: int = 15, **options
) -> PassCosts:
    """Times passes of the target, and passes without attention and without MLPs, in turn.

    Args:
      lm: the target.
      most: the greatest number of drafts that will be predicted.
      repetitions: the number of timed turns.
      options: options of ``timing.pass_call``.
    """
    target = decoder_of(lm)
    sizes = [n for n in (1, 2, 4, 8, 16) if n < 2 * (most + 1)]
    calls = {str(n): pass_call(lm, n, **options) for n in sizes}
    for kind in KINDS:
        skip = tuple(f"{kind}.{layer}" for layer in range(target.num_layers))
        part = _Alone(target, target.sub_network(skip=skip))
        calls[kind] = pass_call((part, lm.params), 1, **options)
    spent = alternate(calls, repetitions=repetitions)
    least = {name: float(np.min(seconds)) for name, seconds in spent.items()}
    attention, mlp = (max(least["1"] - least[kind], 0.0) / target.num_layers for kind in KINDS)
    return PassCosts({n: least[str(n)] for n in sizes}, attention, mlp)
