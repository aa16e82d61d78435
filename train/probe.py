"""Recipe ``probe``: SPRINTER's probe on the last hidden state of a draft model.

    loss = mean of BCE(sigmoid(w · h(x) + b), p(x) >= q(x)),   over tokens x that the drafter wrote

The drafter continues prompts of the corpus; p is the target's law and q the drafter's, both at
temperature 1, and h(x) is the drafter's last hidden state when it has read x. Both models are
frozen. Besides the loss the held-out measures say what the probe is worth at the threshold
``flag``: the share of tokens that it trusts, the total variation ``tv`` of a token that is always
trusted, and ``trusted_tv``, that of a token of which the probe decides: the bias that is left.

References: SPRINTER, arXiv 2502.04557 (Adam, 5e-4, 20 epochs, flags below 0.5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from specjax.drafters import probe as probes
from specjax.models.lm import LM, as_drafter
from specjax.text import drafter_names

from . import checkpoint, chunks, data, own_text, scale, tokenizer
from .config import ConfigError, DataConfig, OptimizerConfig, RunConfig, resolved
from .distill import Pair
from .evaluate import make_evaluate, mean
from .loop import TrainingTask, estimate, fit
from .teacher import load_teacher


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """The settings of a probe."""

    teacher: str = "embedded"  # the frozen target: a name or folder that specjax.load takes
    drafter: str = "embedded-draft"  # the frozen draft model
    prompt_tokens: int = 64  # the length of the prompts that the drafter continues
    flag: float = 0.5  # the threshold of the held-out measures
    chunk: int = chunks.CHUNK  # the number of positions whose logits are in memory at a time
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self):
        if not 1 <= self.prompt_tokens <= self.data.length - 2:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens}; accepted: 1 to data.length - 2 = "
                f"{self.data.length - 2}"
            )
        if not 0 <= self.flag <= 1:
            raise ConfigError(f"flag={self.flag}; accepted: 0 to 1")
        if self.chunk < 1:
            raise ConfigError(f"chunk={self.chunk}; accepted: at least 1")


Config = ProbeConfig


def make_judged(pair: Pair, config: ProbeConfig):
    """Returns ``judged(frozen, tokens [B, T + 1], keys [B]) -> dict``, with arrays ``[B, T - 1]``.

    They are of the tokens that the drafter wrote: ``hidden`` ``[B, T - 1, H]``, ``gap``, which is
    ``log p(x) - log q(x)``, ``log_p``, ``token``, and ``weight``, which is 0 where there is no such
    token.
    """
    length, start = config.data.length, config.prompt_tokens
    write = own_text.make_writer(pair.student, pair.end_of_text, length, start, 1.0)

    def own_log_p(logits, token):
        return jnp.take_along_axis(jax.nn.log_softmax(logits), token[..., None], axis=2)[..., 0]

    def terms(table, states, target_table, pieces):
        hidden, token = pieces
        q = own_log_p(pair.drafter_logits(table, states), token)
        log_p = own_log_p(pair.target_logits(target_table, hidden), token)
        return {"gap": log_p - q, "log_p": log_p}

    def judged(frozen, tokens, keys):
        tokens, weight = write(frozen["drafter"], tokens, keys)
        inputs = tokens[:, :-1]
        own = pair.student_states(frozen["drafter"], inputs)
        pieces = pair.teacher_states(frozen["target"], inputs), tokens[:, 1:]
        tables = pair.drafter_table(frozen["drafter"]), pair.target_table(frozen["target"])
        said = chunks.each(terms, tables[0], own, tables[1], pieces, chunk=config.chunk)
        # a token is predicted at one position and read at the next one
        found = {name: value[:, :-1] for name, value in said.items()}
        found |= {"hidden": own[:, 1:], "token": inputs[:, 1:], "weight": weight[:, :-1]}
        return jax.lax.stop_gradient(found)

    return judged


def losses_of(params, found):
    """Binary cross-entropy ``[B, T - 1]`` of the probe."""
    logit = found["hidden"].astype(jnp.float32) @ params["weight"] + params["bias"]
    return optax.sigmoid_binary_cross_entropy(logit, (found["gap"] >= 0).astype(jnp.float32))


def make_loss(pair: Pair, config: ProbeConfig):
    """Returns the loss for ``loop.TrainingTask``."""
    judged = make_judged(pair, config)

    def loss(params, frozen, batch, keys):
        found = judged(frozen, data.unpacked(batch)[0], keys.rows)
        return {"bce": mean(losses_of(params, found), found["weight"])}

    return loss


def make_measure(pair: Pair, config: ProbeConfig):
    """Returns the held-out measures; the drafter writes the same texts at every call."""
    judged = make_judged(pair, config)

    def measure(params, frozen, tokens, weight):
        keys = jax.random.split(jax.random.key(config.data.seed), len(tokens))
        found = judged(frozen, tokens, keys)
        weight, wrong = found["weight"], jnp.maximum(1 - jnp.exp(found["gap"]), 0)
        trusted = probes.score_of(params, found["hidden"]) > config.flag
        right = trusted == (found["gap"] >= 0)
        return {
            "heldout_loss": mean(losses_of(params, found), weight),
            "accuracy": mean(right.astype(jnp.float32), weight),
            "label": mean((found["gap"] >= 0).astype(jnp.float32), weight),
            "trusted": mean(trusted.astype(jnp.float32), weight),
            "tv": mean(wrong, weight),
            "trusted_tv": mean(wrong * trusted, weight),
        }

    return measure


def run(config: ProbeConfig, *, dry_run: bool = False) -> None:
    """Trains a probe and writes it to ``run.folder/probe.safetensors``."""

    def make(pair: Pair, draft: LM):
        del draft
        return make_loss(pair, config), make_measure(pair, config)

    what = "a probe of one linear layer"
    fit_on_draft(config, make, probes.FILE, probes.save_probe, what, dry_run)


def fit_on_draft(
    config: ProbeConfig,
    make: Callable[[Pair, LM], tuple[Callable, Callable]],
    name: str,
    save: Callable,
    what: str,
    dry_run: bool,
) -> None:
    """Trains a linear layer on a draft model's last hidden state, beside its frozen target.

    Args:
      config: the settings.
      make: makes of both models, and the draft model, the loss and the held-out measures.
      name: the file in ``run.folder``.
      save: writes ``(path, params, draft)``.
      what: what is trained, in words.
      dry_run: whether to print the estimates alone.
    """
    vocabulary = tokenizer.load(config.data.tokenizer)
    teacher = load_teacher(config.teacher, vocabulary, config.data.length)
    draft = drafter_names.named(teacher, config.drafter)
    if not isinstance(draft, LM):
        raise ConfigError(f"drafter={config.drafter!r}; accepted: a draft model, which this is not")
    try:
        draft_model = as_drafter(teacher, draft)
    except ValueError as error:
        raise ConfigError(f"drafter={config.drafter!r}: {error}") from error
    if (most := draft_model.max_positions) is not None and most < config.data.length:
        raise ConfigError(
            f"data.length={config.data.length}; accepted: at most {most}, the context of the draft "
            "model"
        )
    heldout, end_of_text = data.load_stream(config.data, "heldout")
    stream, _ = data.load_stream(config.data, "train")
    print(f"text          {len(stream):,} tokens of prompts, {len(heldout):,} held out")
    pair = Pair(draft.config, teacher.config, end_of_text)
    loss, measure = make(pair, draft)
    cheap = make_evaluate(measure, {"": data.heldout_batches(heldout, config.data)})
    frozen = {"target": teacher.params, "drafter": draft.params}
    params = {"weight": jnp.zeros(draft.config.hidden_size), "bias": jnp.zeros(())}
    shard = scale.shard_of(config.run)
    task = TrainingTask(
        loss=loss,
        params=params,
        batches=data.training_batches(stream, config.data, [], shard=shard),
        evaluate=cheap,
        frozen=frozen,
        measures=lambda: cheap.names(params, frozen),
    )
    if dry_run:
        return estimate(task, config.optimizer, config.run, what)
    params = fit(task, resolved(config), config.optimizer, config.run)
    where = Path(config.run.folder) / name
    save(where, params, draft)
    print(f"exported to {where}")
    checkpoint.mark_finished(where.parent, resolved(config))
