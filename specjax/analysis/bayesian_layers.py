"""Draft & Verify's search of skipped sublayers: Bayesian optimization of measured tokens a second.

Each trial proposes a set of skipped sublayers, lets the other sublayers draft for the target on a
few prompts, one after the other, and measures

    tokens a second = tokens of all rounds / seconds of all rounds.

The prompts are read before, and the first token of a text comes from that reading.

The sublayers are switched by an array (``drafters.SwitchedSelfDraft``), so that one compiled
program runs all sets. The first trials run a few usual sets; each later one asks optuna's
tree-structured Parzen estimator, which models the sublayers that fast sets skip. A set that is
proposed again is measured again, and counts with its mean.

Differs from Draft & Verify: its Gaussian process over a box of real numbers is here an estimator
over yes and no, and the drafter that comes out of the search also hands its leading whole layers to
the target's pass, which no trial does; so it is a little faster than its trials.

References: Draft & Verify, arXiv 2309.08168, section 3.2.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import sharding
from .._internal.bayesian import optuna, suggest
from ..drafters.confidence_stop import ConfidenceStop
from ..drafters.self_draft import SelfDraft
from ..drafters.switched_self import SwitchedSelfDraft
from ..models.lm import LM
from ..models.sub_network import KINDS, usual_sets
from ..text.options import Options, Prompts
from ..text.prepare import SMALLEST_BUFFER, SMALLEST_WIDTH, prepare, round_up
from ..text.prompts import prompt_ids
from .layer_search import decoder_of, resumed
from .timing import timed_run

NUM_DRAFT, THRESHOLD = 8, 0.8  # of Draft & Verify's code: the most drafts, and where they end


@dataclasses.dataclass(frozen=True)
class Trial:
    """A set that was run.

    Attributes:
      skip: the skipped sublayers.
      rate: the measured tokens a second.
    """

    skip: tuple[str, ...]
    rate: float


class DraftingSpeed:
    """Measures tokens a second of self-drafting, with one compiled program for all sets.

    Args:
      lm: a decoder-only model from ``specjax.load``.
      prompts: see ``generate``; they are decoded one after the other.
      max_new_tokens: the length of each text in tokens, at least 2.
      num_draft: the most tokens that a round drafts.
      stop: where a chain ends, or None.

    Raises:
      ValueError: the model has no such parts, or an option is wrong.
    """

    def __init__(
        self, lm: LM, prompts: Prompts, max_new_tokens: int, num_draft: int, stop: ConfidenceStop
    ):
        target = decoder_of(lm)
        if max_new_tokens < 2:
            raise ValueError(f"max_new_tokens={max_new_tokens}: give at least 2")
        self.drafter = SwitchedSelfDraft(num_draft=num_draft, target=target, stop=stop)
        self.lm, self.prompts = lm, prompt_ids(lm, prompts)
        longest = max(map(len, self.prompts))
        sizes: dict[str, Any] = dict(
            least_width=round_up(longest, SMALLEST_WIDTH, lm.max_positions),
            least_buffer=round_up(longest + max_new_tokens, SMALLEST_BUFFER, lm.max_positions),
        )
        options = Options(
            drafter=self.drafter,
            drafter_params=self.drafter.params_of(),
            max_new_tokens=max_new_tokens,
            stop=(),
        )
        self.works = [prepare(lm, [prompt], options, **sizes) for prompt in self.prompts]
        self._ready = False

    def __call__(self, skip: tuple[str, ...]) -> float:
        """Returns the measured tokens a second of a set of skipped sublayers."""
        if not self._ready:  # compiles
            timed_run(self.works[0])
            self._ready = True
        own = self.drafter.params_of(skip)
        if self.lm.mesh is not None:
            own = jax.tree.map(functools.partial(sharding.put, mesh=self.lm.mesh), own)
        tokens, seconds = 0, 0.0
        for work in self.works:
            work = dataclasses.replace(work, params=work.params | {"drafter": own})
            _, spent, state = timed_run(work)
            begun = len(work.prompts[0]) + 1  # the reading of the prompt emitted one token
            tokens += int(np.sum(sharding.gather(state.length))) - begun
            seconds += spent
        return tokens / seconds


class BayesianSearch:
    """The search of skipped sublayers by Bayesian optimization, for one model and its prompts.

    Args:
      lm: a decoder-only model from ``specjax.load``.
      prompts: see ``generate``; several prompts of the kind that will be decoded.
      max_new_tokens: the length of each text in tokens.
      num_draft: the most tokens that a round drafts.
      stop: where a chain ends; None: Draft & Verify's rule.
      journal: a file with all trials so far, which is read first and then extended, so that the
        same call resumes a search that was stopped; None: no file is written.
      seed: of the proposals. A search that was resumed proposes what it would have proposed
        without a break, given equal measurements.
      measure: a function from skipped sublayers to tokens a second; None: they are measured.

    Attributes:
      trials: what was run, in order.

    Raises:
      ValueError: optuna is not installed, the model has no such parts, an option is wrong, or the
        journal belongs to another model, other prompts or other options.
    """

    def __init__(
        self,
        lm: LM,
        prompts: Prompts,
        *,
        max_new_tokens: int = 32,
        num_draft: int = NUM_DRAFT,
        stop: ConfidenceStop | None = None,
        journal: str | Path | None = None,
        seed: int = 0,
        measure: Callable[[tuple[str, ...]], float] | None = None,
    ):
        optuna()
        self.stop = ConfidenceStop(threshold=THRESHOLD) if stop is None else stop
        self.target = decoder_of(lm)
        self.lm, self.num_draft, self.seed = lm, num_draft, seed
        self.measure = measure or DraftingSpeed(lm, prompts, max_new_tokens, num_draft, self.stop)
        layers = self.target.num_layers
        self.names = tuple(f"{kind}.{layer}" for layer in range(layers) for kind in KINDS)
        self.trials: list[Trial] = []
        self.journal = None if journal is None else Path(journal)
        texts = json.dumps([list(map(int, prompt)) for prompt in prompt_ids(lm, prompts)])
        self._about = {
            "search": "bayesian, tokens of rounds",  # journals that counted one more say less
            "fingerprint": lm.fingerprint,  # with the quantization, which decides the speed
            "dtype": str(lm.dtype),
            "mesh": None if lm.mesh is None else dict(lm.mesh.shape),
            "device": jax.devices()[0].device_kind,
            "seed": seed,
            "prompts": hashlib.sha256(texts.encode()).hexdigest(),
            "max_new_tokens": max_new_tokens,
            "num_draft": num_draft,
            "stop": dataclasses.asdict(self.stop),
        }
        if self.journal is not None:
            self._resume(self.journal)

    def _resume(self, journal: Path) -> None:
        """Reads the journal, or creates it."""
        other = "another model, other prompts or other options"
        for one in resumed(journal, self._about, other):
            self.trials.append(Trial(tuple(one["skip"]), one["rate"]))

    def run(self, num_trials: int, tell: Callable[[str], None] = lambda _: None) -> SelfDraft:
        """Runs trials until there are ``num_trials`` of them, those in the journal included.

        Args:
          num_trials: the number of trials, at least 1.
          tell: a function that is called with a line of text after each trial.

        Returns:
          the drafter of the best set.

        Raises:
          ValueError: ``num_trials`` is less than 1.
        """
        if num_trials < 1:
            raise ValueError(f"num_trials={num_trials}: give at least 1")
        while len(self.trials) < num_trials:
            skip = self._propose()
            trial = Trial(skip, self.measure(skip))
            self.trials.append(trial)
            if self.journal is not None:
                line = {"skip": trial.skip, "rate": trial.rate}
                with self.journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            tell(
                f"{len(self.trials)} of {num_trials} sets: {trial.rate:.1f} tokens/s, best "
                f"{self.best.rate:.1f} without {len(self.best.skip)} of {len(self.names)} sublayers"
            )
        return SelfDraft(
            num_draft=self.num_draft, target=self.target, skip=self.best.skip, stop=self.stop
        )

    @property
    def best(self) -> Trial:
        """The set that skips something and has the highest mean rate, which is its ``rate``."""
        rates: dict[tuple[str, ...], list[float]] = {}
        for trial in self.trials:
            rates.setdefault(trial.skip, []).append(trial.rate)
        means = [Trial(skip, float(np.mean(all_of))) for skip, all_of in rates.items() if skip]
        if not means:
            raise ValueError("best: no set was run yet; call run()")
        return max(means, key=lambda trial: trial.rate)

    def _propose(self) -> tuple[str, ...]:
        """Returns the next set: never empty, and never all sublayers."""
        usual, count = usual_sets(self.target.num_layers), len(self.trials)
        if count < len(usual):
            return usual[count]
        asked = self._ask(count)
        skip = tuple(name for name in self.names if asked[name])
        if 0 < len(skip) < len(self.names):
            return skip
        flipped = self.names[count % len(self.names)]  # nothing to run: a neighbour of the best
        near = {*self.best.skip} ^ {flipped}
        near = near if len(near) < len(self.names) else {flipped}
        return tuple(name for name in self.names if name in near) or (flipped,)

    def _ask(self, count: int) -> dict[str, bool]:
        """Returns what the estimator proposes: whether each sublayer is skipped."""
        known = [
            ({name: name in trial.skip for name in self.names}, trial.rate) for trial in self.trials
        ]
        return suggest(self.names, known, self.seed + count)
