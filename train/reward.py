"""Recipe ``reward``: a reward model of steps, a linear head on a draft model's last hidden state.

    loss = mean of BCE(sigmoid(w · h(x) + b), r(x)),   over tokens x that the draft model wrote

The draft model continues prompts of the corpus, and r(x) is what the target says of the step so
far: the geometric mean of its probabilities, at temperature 1, of the tokens from the last
separator up to x. h(x) is the draft model's last hidden state when it has read x. Both models are
frozen. So reward-guided decoding asks the draft model alone what the target would have said
(``specjax.text.ScalarReward.load``), and the target runs for the steps that it writes.

The held-out measures are of the tokens that end a step: ``squared_error`` of the reward beside
``reward`` and ``reward_squares``, the means of r and r² (r² less the square of r is the squared
error of a constant), and the shares of steps that reach the threshold ``flag``, by the head
(``kept``) and by the target (``worth``).

References: reward-guided speculative decoding, arXiv 2501.19324, where the reward model is a
process reward model of billions of weights that was trained on labelled steps.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from specjax.drafters import probe as probes
from specjax.models.lm import LM

from . import data
from .config import ConfigError
from .distill import Pair
from .evaluate import mean
from .probe import ProbeConfig, fit_on_draft, make_judged

FILE = "reward.safetensors"  # in the folder of the run


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardConfig(ProbeConfig):
    """The settings of a reward model."""

    separator: str = "\n"  # the text that ends a step

    def __post_init__(self):
        super().__post_init__()
        if not self.separator:
            raise ConfigError("separator=''; accepted: a text that ends a step")


Config = RewardConfig


def ends_of(lm: LM, separator: str) -> tuple[int, ...]:
    """Returns the ids of the tokens that hold the separator.

    Raises:
      ConfigError: there is none.
    """
    words = range(lm.target.vocab_size)
    found = tuple(i for i in words if separator in lm.tokenizer.decode([i]))
    if not found:
        raise ConfigError(
            f"separator={separator!r}; accepted: a text that one token of {lm.name} holds"
        )
    return found


def rewards_of(found: dict, ends: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the target's reward of the step up to each token, and whether it ends the step.

    Args:
      found: the result of ``probe.make_judged``, arrays ``[B, N]``.
      ends: the tokens that end a step.

    Returns:
      float32 ``[B, N]``, of use where ``weight`` is above 0; bool ``[B, N]``.
    """
    log_p, ended = found["log_p"], jnp.isin(found["token"], jnp.asarray(ends))
    places = jnp.arange(log_p.shape[1])
    before = (ended | (found["weight"] <= 0))[:, :-1]  # the first written token begins a step
    begins = jnp.pad(before, ((0, 0), (1, 0)), constant_values=True)
    first = jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
    total = jnp.cumsum(log_p, axis=1)
    earlier = jnp.take_along_axis(total - log_p, first, axis=1)
    return jnp.exp((total - earlier) / (places - first + 1)), ended


def make_loss(pair: Pair, config: RewardConfig, ends: tuple[int, ...]):
    """Returns the loss for ``loop.TrainingTask``."""
    judged = make_judged(pair, config)

    def loss(params, frozen, batch, keys):
        found = judged(frozen, data.unpacked(batch)[0], keys.rows)
        reward, _ = rewards_of(found, ends)
        logit = found["hidden"].astype(jnp.float32) @ params["weight"] + params["bias"]
        bce = optax.sigmoid_binary_cross_entropy(logit, reward)
        return {"bce": mean(bce, found["weight"])}

    return loss


def make_measure(pair: Pair, config: RewardConfig, ends: tuple[int, ...]):
    """Returns the held-out measures; the draft model writes the same texts at every call."""
    judged = make_judged(pair, config)

    def measure(params, frozen, tokens, weight):
        keys = jax.random.split(jax.random.key(config.data.seed), len(tokens))
        found = judged(frozen, tokens, keys)
        reward, ended = rewards_of(found, ends)
        score, weight = probes.score_of(params, found["hidden"]), found["weight"] * ended
        return {
            "heldout_loss": mean(jnp.square(score - reward), found["weight"]),
            "squared_error": mean(jnp.square(score - reward), weight),
            "reward": mean(reward, weight),
            "reward_squares": mean(jnp.square(reward), weight),
            "kept": mean((score >= config.flag).astype(jnp.float32), weight),
            "worth": mean((reward >= config.flag).astype(jnp.float32), weight),
        }

    return measure


def run(config: RewardConfig, *, dry_run: bool = False) -> None:
    """Trains a reward model and writes it to ``run.folder/reward.safetensors``."""

    def make(pair: Pair, draft: LM):
        ends = ends_of(draft, config.separator)
        return make_loss(pair, config, ends), make_measure(pair, config, ends)

    save = functools.partial(probes.save_probe, kind="reward", separator=config.separator)
    fit_on_draft(config, make, FILE, save, "a reward model of one linear layer", dry_run)
