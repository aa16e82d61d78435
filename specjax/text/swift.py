"""A session whose drafter is a part of the target, searched between requests (SWIFT)."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from .. import sharding, trees
from .._internal.bayesian import optuna, suggest
from .._internal.optional import required
from ..checkpoints.sub_network import save_layers
from ..drafters.confidence_stop import ConfidenceStop
from ..drafters.self_draft import SelfDraft
from ..drafters.switched_self import SwitchedSelfDraft
from ..models.causal_lm import CausalLM
from ..models.lm import LM
from ..models.sub_network import KINDS, SwitchedPart, skipped_sublayers, usual_sets
from ..types import Draft, Drafter, Verdict
from .session import Session


class Swift(Session):
    """Self-drafting whose set of skipped sublayers is searched while requests are served (SWIFT).

    Pass it in place of a drafter. After each answer, some candidates are judged: one pass of a
    candidate's sublayers over the first tokens of the answer says which of them it would have
    drafted. The share of these is its *matchness*; the prompt's entries are the target's, those of
    the answer the candidate's own. A candidate that is better than all before it drafts from the
    next request on (in a batch that is being served, from the next burst). Each candidate skips the
    same number of sublayers, none of them in the first or the last layer. Most candidates are
    drawn at random, and every so often Bayesian optimization proposes one.

    An array says which sublayers run, so no program is compiled when the set changes. The set
    changes the speed; it changes neither greedy texts nor the distribution of others.

    Differs from SWIFT: candidates are judged between requests and not between the rounds of one;
    drafts are chains; and of the optimizer, a Gaussian process there, see ``_internal.bayesian``.

    Args:
      lm: a decoder-only model from ``specjax.load``.
      num_draft: the most tokens that a round drafts.
      stop: where a chain ends; by default, below a token of probability less than 0.8.
      skip: the set before the first answer; by default every second layer.
      share: the share of the inner layers' sublayers that candidates skip.
      window: the number of tokens of an answer on which candidates are judged; shorter answers
        are not used.
      context: the most tokens of a prompt that are read for it, its last ones.
      tries: the number of candidates that are judged after an answer.
      bayesian_every: how often Bayesian optimization proposes a candidate, once in so many; None:
        never. It needs optuna: ``pip install 'specjax[search]'``.
      enough: the search ends when the matchness is greater than this.
      patience: the search ends after so many candidates without a better one.
      most: the search ends after so many candidates.
      seed: of the candidates.

    Attributes:
      drafter: the drafter.
      skip: the skipped sublayers now.
      score: the greatest matchness so far, in [0, 1]; 0 before the first answer.
      tried: the sets that were judged, with their matchness.

    Raises:
      ValueError: the model has no such parts or no inner layers, a setting is out of range, or
        optuna is missing.

    Example::

        swift = specjax.text.Swift(lm)
        for prompt in prompts:
            print(specjax.generate(lm, prompt, drafter=swift).text)
        swift.save("self.json")  # --drafter self:from=self.json

    References: SWIFT, arXiv 2410.06916, section 4; the numbers are those of its code.
    """

    def __init__(
        self,
        lm: LM,
        *,
        num_draft: int = 8,
        stop: ConfidenceStop | None = None,
        skip: str | tuple[str, ...] = (),
        share: float = 0.45,
        window: int = 50,
        context: int = 256,
        tries: int = 8,
        bayesian_every: int | None = 25,
        enough: float = 0.93,
        patience: int = 300,
        most: int = 1000,
        seed: int = 0,
    ):
        stop = ConfidenceStop(threshold=0.8, step=0.0) if stop is None else stop
        target = lm.target
        if not isinstance(target, CausalLM):
            target.sub_network(exit=1)  # raises the reason, if there are no sub-networks
            raise ValueError(f"{lm.name}: the search supports decoder-only models of specjax.load")
        self.target, layers = target, target.num_layers
        self.drafter = SwitchedSelfDraft(num_draft=num_draft, target=target, stop=stop)
        self.names = tuple(f"{kind}.{layer}" for layer in range(1, layers - 1) for kind in KINDS)
        self.size = int(len(self.names) * share)
        if not 0 < self.size < len(self.names):
            raise ValueError(
                f"share={share}: {self.size} of the {len(self.names)} sublayers of inner layers "
                "would be skipped; SWIFT skips some of them, so the model needs 3 layers or more "
                f"(it has {layers})"
            )
        counts = dict(window=window, context=context, tries=tries, patience=patience, most=most)
        counts |= {} if bayesian_every is None else {"bayesian_every": bayesian_every}
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: give an integer, at least 1")
        if bayesian_every is not None:
            optuna(", or give bayesian_every=None")
        self.lm, self.seed = lm, seed
        self.skip = skipped_sublayers(skip) or usual_sets(layers)[0]
        self.drafter.params_of(self.skip)  # refuses what does not exist
        self.window, self.context, self.tries = window, context, tries
        self.bayesian_every, self.enough = bayesian_every, enough
        self.patience, self.most, self.failures = patience, most, 0
        self.score, self.tried = 0.0, list[tuple[tuple[str, ...], float]]()

    @property
    def params(self):
        """What the drafter reads as ``params["drafter"]``: the switches."""
        return self.drafter.params_of(self.skip)

    @property
    def capacity(self) -> int:
        """0: no answers are kept."""
        return 0

    @property
    def num_tokens(self) -> int:
        """0: no answers are kept."""
        return 0

    @property
    def finished(self) -> bool:
        """Whether the search has ended."""
        over = self.failures > self.patience or len(self.tried) >= self.most
        return self.score > self.enough or over

    def add(self, prompt, tokens) -> None:
        """Judges some candidates on an answer, unless it is too short or the search has ended.

        Args:
          prompt: the token ids of the prompt.
          tokens: the token ids of the answer.
        """
        if self.finished or len(tokens) < self.window:
            return
        judge = self._judge(np.asarray(prompt, np.int32), np.asarray(tokens, np.int32))
        for _ in range(self.tries):
            skip = self._candidate()
            score = judge(skip)
            self.tried.append((skip, score))
            better = score > self.score
            self.failures = 0 if better else self.failures + 1
            if better:
                self.skip, self.score = skip, score
            if self.finished:
                return

    def matchness(self, prompt, tokens, skip: tuple[str, ...]) -> float:
        """Returns the share of an answer's first tokens that a set would have drafted, in [0, 1].

        Args:
          prompt: the token ids of the prompt.
          tokens: the token ids of the answer, at least ``window`` of them.
          skip: the skipped sublayers.
        """
        return self._judge(np.asarray(prompt, np.int32), np.asarray(tokens, np.int32))(skip)

    def _judge(self, prompt, tokens):
        """Returns a function from a set to its matchness on one answer."""
        prompt, answer = prompt[-self.context :], tokens[: self.window]
        known = len(prompt) - 1
        before = np.zeros((1, self.context), np.int32)
        before[0, : len(prompt)] = prompt
        fed = np.concatenate([prompt[-1:], answer[:-1]])[None]
        target, params = self.target, self.lm.params
        with sharding.using(self.lm.mesh, params):
            cache = _read(target, self.window, params, before, np.int32(known))

        def judge(skip):
            switches = self.drafter.params_of(skip)["switches"]
            with sharding.using(self.lm.mesh, params):
                said = _said(target, (params, switches), cache, fed, np.int32(known))
            return float(np.mean(np.asarray(said)[0] == answer))

        return judge

    def _candidate(self) -> tuple[str, ...]:
        """Returns the next set to judge."""
        count = len(self.tried)
        if self.bayesian_every is None or (count + 1) % self.bayesian_every:
            worth = np.random.default_rng((self.seed, count)).random(len(self.names))
        else:
            known = [({name: name in skip for name in self.names}, s) for skip, s in self.tried]
            asked = suggest(self.names, known, self.seed + count, real=True)
            worth = np.asarray([asked[name] for name in self.names])
        chosen = np.sort(np.argsort(-worth, kind="stable")[: self.size])
        return tuple(self.names[i] for i in chosen)

    def drafter_for(self, lm: LM) -> Drafter:
        """The drafter for requests to ``lm``, which must be the model whose parts were judged."""
        if lm.target != self.lm.target or lm.checkpoint != self.lm.checkpoint:
            raise ValueError(
                f"drafter=Swift of {self.lm.name}, and the model is {lm.name}: the searched "
                "sublayers are those of one model; make a Swift for the model that decodes"
            )
        return self.drafter

    @classmethod
    def load(cls, lm: LM, path: str | os.PathLike, drafter="", capacity: int = 0) -> Session:
        """Raises ValueError: the file of a Swift is read by ``drafter="self:from=FILE"``."""
        raise ValueError(f"Swift.load({path}): give the file as drafter='self:from={path}'")

    def save(self, path: str | os.PathLike) -> None:
        """Writes the set to a file, which ``"self:from=FILE"`` reads; see ``save_layers``."""
        own = self.drafter
        drafter = SelfDraft(
            num_draft=own.num_draft, target=self.target, skip=self.skip, stop=own.stop
        )
        found = {"matchness": self.score, "tried": len(self.tried)}
        save_layers(drafter, self.lm, path, found)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read(target: CausalLM, window: int, params, tokens, num):
    """Returns a cache with the entries of the first ``num`` of the tokens ``[1, P]``."""
    size = tokens.shape[1]
    start = jnp.zeros((1,), jnp.int32)
    draft = Draft(start=start, tokens=tokens, topology=trees.chain_parents(size - 1))
    cache = target.init(params, 1, size + window)
    entries = target.verify(params, cache, draft, logits=False).entries
    path = jnp.arange(size, dtype=jnp.int32)[None]
    return target.commit(
        cache, entries, start, Verdict(path=path, count=(num - 1)[None], token=start)
    )


@functools.partial(jax.jit, static_argnums=0)
def _said(target: CausalLM, params, cache, tokens, start):
    """Returns int32 ``[1, W]``: the most likely next token after each token, by some sublayers."""
    chain = trees.chain_parents(tokens.shape[1] - 1)
    draft = Draft(start=start[None], tokens=tokens, topology=chain)
    scores = SwitchedPart(target).verify(params, cache, draft)
    return jnp.argmax(required(scores.logits, "logits"), axis=-1).astype(jnp.int32)
