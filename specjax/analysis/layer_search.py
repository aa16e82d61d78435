"""Which sublayers of a target to leave out so that the rest drafts best for it.

The target writes greedy texts for a few prompts. One compiled pass then says, of any set of
sublayers, which tokens of these texts the others would have drafted: the sublayers are gated by an
array, so a new set compiles nothing. With the times of passes, attention and MLPs, measured once,
follows what a round costs, and

    predicted ratio = expected tokens of a round with g drafts * T(1) / (g * T(part) + T(g + 1))

for every number of drafts g. The search takes away one sublayer at a time, each time the one whose
loss predicts the best ratio (greedy backward elimination), and returns the best set that it met.

Differs from Draft & Verify, which searches by Bayesian optimization of measured tokens a second:
there each candidate is run, which here would compile a program each. As in SWIFT, a candidate is
judged by agreement in one parallel pass over a window, in which it sees its own entries.

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
from ..drafters.self_draft import SelfDraft
from ..models.causal_lm import CausalLM
from ..models.lm import LM
from ..models.sub_network import KINDS, DecoderPart
from ..text.options import Options, Prompts
from ..text.prepare import prepare
from ..types import Draft
from .timing import pass_seconds

MOST_DRAFTS = 8
PATIENCE = 4  # sublayers that are taken away without a better prediction before the search ends


@dataclasses.dataclass(frozen=True)
class PassCosts:
    """Times of passes over one row, seconds.

    Attributes:
      passes: ``{N: seconds}`` of the whole target over N nodes.
      attention, mlp: seconds that one such sublayer adds to a pass over one node.
    """

    passes: dict[int, float]
    attention: float
    mlp: float

    def part(self, attention: int, mlp: int) -> float:
        """Seconds of a pass over one node without that many sublayers of each kind."""
        saved = attention * self.attention + mlp * self.mlp
        return max(self.passes[1] - saved, 1e-3 * self.passes[1])

    def whole(self, nodes: int) -> float:
        """Seconds of the target's pass over ``nodes``, between measured ones in a line."""
        known = sorted(self.passes)
        return float(np.interp(nodes, known, [self.passes[n] for n in known]))


@dataclasses.dataclass(frozen=True)
class Choice:
    """A set of sublayers to leave out, and what is expected of it.

    Attributes:
      skip: the sublayers.
      num_draft: the number of drafts with the best prediction.
      agreement: share of the tokens that it would have drafted, in [0, 1].
      ratio: predicted tokens a second over those of plain decoding, without prompts.
    """

    skip: tuple[str, ...]
    num_draft: int
    agreement: float
    ratio: float


def predict(right: np.ndarray, costs: PassCosts, attention: int, mlp: int, most: int):
    """The best number of drafts and its predicted ratio.

    Args:
      right: bool ``[P, W]``, whether each token of each text was drafted rightly.
      attention, mlp: how many sublayers of each kind are left out.
      most: the largest number of drafts.
    """
    part, best = costs.part(attention, mlp), (1, 0.0)
    for drafts in range(1, min(most, right.shape[1]) + 1):
        runs = np.lib.stride_tricks.sliding_window_view(right, drafts, axis=1)
        tokens = 1 + np.cumprod(runs, axis=2).sum(axis=2).mean()
        seconds = drafts * part + costs.whole(drafts + 1)
        ratio = tokens * costs.passes[1] / seconds
        if ratio > best[1]:
            best = drafts, float(ratio)
    return best


def eliminate(
    names: tuple[str, ...],
    judge: Callable[[tuple[str, ...]], Choice],
    tell: Callable[[str], None] = lambda _: None,
) -> Choice:
    """Greedy backward elimination: the best choice that was met.

    Args:
      names: all sublayers; at least one is never left out.
      judge: says what is expected of a set.
      tell: called with a line of text after each step.
    """
    best, left_out, since = None, (), 0
    while len(left_out) < len(names) - 1 and since < PATIENCE:
        others = [name for name in names if name not in left_out]
        found = [judge((*left_out, name)) for name in others]
        step = max(found, key=lambda choice: choice.ratio)
        left_out = step.skip
        better = best is None or step.ratio > best.ratio
        best, since = (step, 0) if better else (best, since + 1)
        tell(f"{len(left_out)} of {len(names)} left out: predicted {step.ratio:.2f} x plain")
    return best


class LayerSearch:
    """The search over one model and its prompts.

    Args:
      lm: a decoder-only model from ``specjax.load``.
      prompts: as ``generate`` takes them; several of the kind that is meant.
      max_new_tokens: length of the texts by which sets are judged.
      journal: a file of the sets that were judged so far, which is read first and added to, so
        that a search that was stopped goes on; None: nothing is kept.
      costs: times of passes; None: measured.

    Raises:
      ValueError: the model has no sub-networks, or the journal is of another model or prompts.
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
        if not isinstance(lm.target, CausalLM):
            lm.target.sub_network(exit=1)  # says why
            raise ValueError(f"{lm.name}: sets of sublayers are searched of decoder-only models")
        if max_new_tokens < 2:
            raise ValueError(f"max_new_tokens={max_new_tokens}: give at least 2")
        self.lm, layers = lm, range(lm.target.num_layers)
        self.names = tuple(f"{kind}.{layer}" for layer in layers for kind in KINDS)
        self.costs = costs or measure_costs(lm)
        work = prepare(lm, prompts, Options(drafter=None, max_new_tokens=max_new_tokens, stop=()))
        self.read = work.start().cache  # of the prompts without their last tokens
        self.tokens = np.asarray(work.burst(work.capacity, work.start()).tokens)
        self.begin, self.size = np.asarray(work.request.lengths), max_new_tokens
        self.known: dict[tuple[str, ...], np.ndarray] = {}
        self.journal = None if journal is None else Path(journal)
        if self.journal is not None:
            self._resume()

    def _resume(self):
        """Reads the journal, or begins one."""
        about = {"fingerprint": self.lm.checkpoint, "tokens": self._texts().tolist()}
        if not self.journal.exists():
            self.journal.write_text(json.dumps(about) + "\n", encoding="utf-8")
            return
        first, *lines = self.journal.read_text(encoding="utf-8").splitlines()
        if json.loads(first) != about:
            raise ValueError(
                f"journal={self.journal}: it is of another model or of other prompts; give another "
                "file, or delete it"
            )
        for line in lines:
            one = json.loads(line)
            self.known[tuple(one["skip"])] = np.asarray(one["right"], bool)

    def _texts(self) -> np.ndarray:
        """int32 ``[P, W]``, the new tokens."""
        where = self.begin[:, None] + np.arange(self.size)
        return np.take_along_axis(self.tokens, where, axis=1)

    def right(self, skip: tuple[str, ...]) -> np.ndarray:
        """bool ``[P, W]``, which tokens of the texts the others would have drafted."""
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
        """What is expected of a set of skipped sublayers."""
        skip = tuple(name for name in self.names if name in skip)
        counts = [sum(name.startswith(kind) for name in skip) for kind in KINDS]
        right = self.right(skip)
        drafts, ratio = predict(right, self.costs, *counts, most)
        return Choice(skip, drafts, float(right.mean()), ratio)

    def run(self, tell: Callable[[str], None] = lambda _: None) -> SelfDraft | None:
        """Searches.

        Returns:
          the drafter with the best prediction, or None where no set is predicted to be faster than
          plain decoding. Its figures are in ``choice``.
        """
        self.choice = eliminate(self.names, self.judge, tell)
        if self.choice.ratio <= 1:
            return None
        return SelfDraft(
            num_draft=self.choice.num_draft, target=self.lm.target, skip=self.choice.skip
        )


@functools.partial(jax.jit, static_argnums=0)
def _said(target, params, cache, tokens, start, gates):
    """int32 ``[P, W]``: the best next token at each of a window's, by the gated sublayers."""
    chain = trees.chain_parents(tokens.shape[1] - 1)
    draft = Draft(start=jnp.asarray(start, jnp.int32), tokens=tokens, topology=chain)
    scores = target.run(params, cache, draft, gates=gates)
    return jnp.argmax(scores.logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Alone:
    """A part as ``timing`` takes a target: with the cache of the whole."""

    part: DecoderPart

    @property
    def max_positions(self):
        return self.part.whole.max_positions

    def init(self, params, batch, capacity, inputs=None):
        return self.part.whole.init(params, batch, capacity, inputs)

    def verify(self, params, cache, draft):
        return self.part.verify(params, cache, draft)


def measure_costs(lm: LM, most: int = MOST_DRAFTS, **options) -> PassCosts:
    """Times passes of the target and of its two halves, each of which lacks one kind of sublayer.

    ``options`` are those of ``timing.pass_seconds``.
    """
    sizes = [n for n in (1, 2, 4, 8, 16) if n < 2 * (most + 1)]
    seconds = pass_seconds(lm, sizes, **options)
    passes = {n: float(np.min(s)) for n, s in seconds.items()}
    layers = lm.target.num_layers
    adds = []
    for kind in KINDS:
        skip = tuple(f"{kind}.{layer}" for layer in range(layers))
        part = _Alone(lm.target.sub_network(skip=skip))
        alone = float(np.min(pass_seconds((part, lm.params), 1, **options)[1]))
        adds.append(max(passes[1] - alone, 0.0) / layers)
    return PassCosts(passes, *adds)
