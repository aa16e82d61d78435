"""Reward-guided speculative decoding: a draft model writes each step that a reward admits.

For each step of a text::

    the draft model writes the step, up to a separator
    the step is kept if reward(prompt, steps) >= threshold, else the target writes it instead

A step of the target is kept without a reward. So the law of a step is ``w p_draft + v p_target``,
where ``w`` is 1 for steps that reach the threshold and ``v`` is the probability that the draft
model's step does not reach it. With ``threshold=-inf`` the text is the draft model's, with ``inf``
it is the target's.

Lossless: no; a result is labelled ``approximate``. The target runs for the steps that it writes
alone. No cache is kept between steps: each step of either model begins with a pass over the whole
text so far, which is cheap beside the step where steps are long. A reward that runs a model costs a
pass of that model over the whole text for each step.

References: Reward-Guided Speculative Decoding, arXiv 2501.19324 (its separator is a blank line, its
threshold 0.7). This is not the recursive rejection of Jeon et al., also called RSD.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..decoding import reference
from ..drafters.probe import load_probe, separator_of
from ..models.lm import LM, check_same_tokenizer
from ..models.seq2seq import encoder_inputs
from ..sampling.distribution import Sampling
from ..types import HeadTarget
from .generation import Generation, generate
from .options import Drafting
from .prepare import end_ids, seed_key

Tokens = Sequence[int] | np.ndarray
Reward = Callable[[Tokens, list[np.ndarray]], float]
WIDTH = 32  # the width of a reward's pass is a multiple of this, so that few programs are compiled


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a text.

    Attributes:
      tokens: int32 ``[n]``, with the separator.
      reward: of the draft model's step, also where the target wrote another one.
      from_draft: whether the draft model's step was kept.
    """

    tokens: np.ndarray
    reward: float
    from_draft: bool


@dataclasses.dataclass(frozen=True)
class RewardGuided:
    """A text that was written step by step.

    Attributes:
      steps: the steps, in order.
      text: the text; empty without a tokenizer.
      draft_tokens: tokens that the draft model wrote, those of rejected steps included.
      target_rounds: passes of the target over drafted tokens, without those over the text so far.
    """

    steps: list[Step]
    text: str
    draft_tokens: int
    target_rounds: int

    approximate = "reward-guided"

    @property
    def tokens(self) -> np.ndarray:
        """int32 ``[n]``, the tokens of all steps."""
        empty = np.zeros((0,), np.int32)
        return np.concatenate([empty, *(step.tokens for step in self.steps)])

    @property
    def kept(self) -> float:
        """The share of steps that the draft model wrote."""
        return sum(step.from_draft for step in self.steps) / max(1, len(self.steps))


def reward_guided(
    lm: LM,
    draft: LM,
    prompt: str | Tokens,
    reward: Reward,
    *,
    threshold: float = 0.7,
    separator: str | Sequence[int] = "\n\n",
    sampling: Sampling = Sampling(),
    drafter="none",
    drafting: Drafting = Drafting(),
    max_new_tokens: int = 256,
    max_steps: int = 100,
    seed: int = 0,
) -> RewardGuided:
    """Continues a prompt step by step, each by the draft model or by the target.

    Args:
      lm: the target.
      draft: the draft model, of the same vocabulary.
      prompt: a text or its token ids.
      reward: ``reward(prompt, steps)``, of the last of ``steps``: the token ids of the prompt, and
        those of each step so far. ``ScalarReward`` and ``LikelihoodReward`` are such functions.
      threshold: the least reward of a step that is kept; with ``inf`` none is, whatever its reward.
      separator: a string that ends a step, or token ids each of which ends a step; with a
        ``ScalarReward`` that names its separator, that one.
      sampling: how tokens are drawn, by both models; without penalties and logits processors,
        which would begin anew in each step.
      drafter, drafting: with which the target decodes its own steps (see ``generate``), losslessly
        unless the rule is approximate; by default it decodes plainly.
      max_new_tokens: the budget of the text.
      max_steps: the most steps.
      seed: of all draws, from 0 to 2^32 - 1. Each step of each model has a seed of its own, since
        what is written after a rejected step must not depend on the noise of that step.

    Returns:
      a ``RewardGuided``.

    Raises:
      ValueError: before anything runs, a number is out of range, the draft model or the model of
        the reward has another vocabulary, the reward was trained with another separator, ``lm`` has
        an encoder, or ``sampling`` has penalties or a
        logits processor; later, a reward is NaN.
    """
    if math.isnan(threshold) or max_new_tokens < 1 or max_steps < 1 or not separator:
        raise ValueError(
            f"threshold={threshold}, max_new_tokens={max_new_tokens}, max_steps={max_steps}, "
            f"separator={separator!r}: threshold must be a number, the others at least 1, and the "
            "separator not empty"
        )
    if sampling.needs_prefix:
        raise ValueError(
            f"sampling={sampling}: penalties and logits processors would begin anew in each step; "
            "leave them out"
        )
    for name, model in (("lm", lm), ("draft", draft)):
        if encoder_inputs.encodes(model):
            raise ValueError(
                f"{name}={model.name}: a step goes on from all text so far, which the "
                "prompt of a model with an encoder is not; give decoders"
            )
    _check_tokens("draft", lm, draft)
    if isinstance(reward, (ScalarReward, LikelihoodReward)):
        _check_tokens("reward", lm, reward.lm)
    if isinstance(reward, ScalarReward) and reward.separator not in (None, separator):
        raise ValueError(
            f"separator={separator!r}: the reward model was trained on steps that end with "
            f"{reward.separator!r}, and says nothing of other steps; give separator="
            f"{reward.separator!r}, or dataclasses.replace(reward, separator=None) to try it anyway"
        )
    if not isinstance(separator, str):
        vocab = lm.target.vocab_size
        if not all(0 <= int(token) < vocab for token in separator):
            raise ValueError(f"separator={separator!r}: give a text or ids from 0 to {vocab - 1}")
    seed_key(seed)
    given = _ids(lm, prompt)
    ends = end_ids(lm)
    stops = (
        {"stop": ends, "stop_strings": separator}
        if isinstance(separator, str)
        else {"stop": (*ends, *(int(token) for token in separator))}
    )
    steps: list[Step] = []
    drafted = rounds = 0

    def write(model: LM, left: int, **options) -> Generation:
        before = [*given, *(int(token) for step in steps for token in step.tokens)]
        return generate(model, [before], max_new_tokens=left, sampling=sampling, **stops, **options)

    while len(steps) < max_steps:
        left = max_new_tokens - sum(len(step.tokens) for step in steps)
        if left < 1:
            break
        seeds = np.random.SeedSequence([seed, len(steps)]).generate_state(2).tolist()
        made = write(draft, left, drafter="none", seed=seeds[0])
        found = float(reward(given, [*(step.tokens for step in steps), made.tokens[0]]))
        if math.isnan(found):
            raise ValueError(
                f"reward: step {len(steps) + 1} has the reward NaN; return a number, or -inf for a "
                "step that must not be kept"
            )
        drafted += len(made.tokens[0])
        kept = threshold < math.inf and found >= threshold
        if not kept:
            made = write(lm, left, drafter=drafter, drafting=drafting, seed=seeds[1])
            rounds += int(np.sum(made.stats.rounds))
        steps.append(Step(made.tokens[0], found, kept))
        if made.reasons[0] != "stop" or int(made.tokens[0][-1]) in ends or not made.finished:
            break
    result = RewardGuided(steps, "", drafted, rounds)
    text = "" if lm.tokenizer is None else lm.tokenizer.decode(result.tokens)
    return dataclasses.replace(result, text=text)


def _check_tokens(what: str, lm: LM, other: LM) -> None:
    try:
        check_same_tokenizer(lm, other)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _ids(lm: LM, prompt: str | Tokens) -> list[int]:
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    if lm.tokenizer is None:
        raise ValueError(f"prompt: {lm.name} has no tokenizer; give token ids")
    return [int(token) for token in lm.tokenizer.encode(prompt)]


# ------------------------------------------------------------------------------- rewards


@dataclasses.dataclass(frozen=True)
class ScalarReward:
    """A reward model with a scalar head: ``sigmoid(w · h + b)`` at the last token of the step.

    ``h`` is the model's last hidden state, normed.

    Attributes:
      lm: a model with hidden states (a ``HeadTarget``), of the same vocabulary as the text.
      weight: float ``[H]``.
      bias: a number.
      separator: the text that ended a step in training, which ``reward_guided`` then wants too;
        None: not known, so any separator is taken.

    Raises:
      ValueError: the model has no hidden states, or ``weight`` has another size or numbers that are
        not finite.
    """

    lm: LM
    weight: np.ndarray
    bias: float = 0.0
    separator: str | None = None

    def __post_init__(self):
        target, shape = self.lm.target, np.shape(self.weight)
        if not isinstance(target, HeadTarget):
            raise ValueError(f"ScalarReward(lm={self.lm.name}): the model has no hidden states")
        if len(shape) != 1 or target.hidden_size not in (None, *shape):
            raise ValueError(
                f"ScalarReward(weight of shape {list(shape)}): the hidden states of {self.lm.name} "
                f"have {target.hidden_size} numbers: the head is that of another model"
            )
        if not (np.isfinite(self.weight).all() and math.isfinite(self.bias)):
            raise ValueError("ScalarReward: weight or bias hold numbers that are not finite")

    @classmethod
    def load(cls, path: str | os.PathLike, lm: LM) -> ScalarReward:
        """Returns the reward model that the recipe ``reward`` trained on the draft model ``lm``.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file holds no reward model, or that of another draft model.
        """
        head = load_probe(os.fspath(path), lm, "reward")
        separator = separator_of(os.fspath(path))
        return cls(lm, np.asarray(head["weight"]), float(head["bias"]), separator)

    def __call__(self, prompt: Tokens, steps: list[np.ndarray]) -> float:
        tokens, size = _padded(self.lm, prompt, steps)
        hidden = reference.last_hidden(self.lm.target, self.lm.params, tokens)[0, size - 1]
        score = float(np.asarray(hidden, np.float64) @ np.asarray(self.weight) + self.bias)
        return float(jax.nn.sigmoid(score))


@dataclasses.dataclass(frozen=True)
class LikelihoodReward:
    """The geometric mean of the probabilities of the step's tokens by a model, at temperature 1.

    Attributes:
      lm: a model of the same vocabulary as the text.
    """

    lm: LM

    def __call__(self, prompt: Tokens, steps: list[np.ndarray]) -> float:
        tokens, size = _padded(self.lm, prompt, steps)
        logits = reference.logits(self.lm.target, self.lm.params, tokens)
        said = jax.nn.log_softmax(logits, axis=-1)[0, :-1]
        own = np.asarray(jnp.take_along_axis(said, tokens[0, 1:, None], axis=1))[:, 0]
        return float(np.exp(own[size - 1 - len(steps[-1]) : size - 1].mean()))


def _padded(lm: LM, prompt: Tokens, steps: list[np.ndarray]) -> tuple[jax.Array, int]:
    """Returns all tokens, padded, int32 ``[1, T]``, and their number."""
    ids = [*prompt, *(token for step in steps for token in step)]
    wide = min(-(-len(ids) // WIDTH) * WIDTH, lm.target.max_positions or len(ids) + WIDTH)
    if len(ids) > wide:
        raise ValueError(f"reward: the text has {len(ids)} tokens, and {lm.name} reads {wide}")
    return jnp.asarray([ids + [0] * (wide - len(ids))], jnp.int32), len(ids)
