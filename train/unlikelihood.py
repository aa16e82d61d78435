"""Recipe ``unlikelihood``: teaches a target not to repeat itself.

A small model that is trained on next tokens alone repeats what it wrote when it writes greedily.
Here it goes on learning from the corpus, and beside it from its own greedy text: a share of each
batch is continued by the model with the weights of the current step, and the tokens of n-grams that
it wrote before in the same text are made less likely::

    loss = mean of -log p(next token), over the corpus
         + scale * mean of [the token is part of a repeated n-gram] * -log(1 - p(token)),
           over the text that the model wrote

What it learns is another law, whose bits per byte are measured beside the share of repetitions.
``start_share`` sets a point between both: the exported weights are a mean of those at the start and
those at the end of the run, and ``exported.json`` in the run's folder has their held-out figures.

References: Neural Text Generation with Unlikelihood Training, arXiv 1908.04319, equation 7
(sequence-level); weights between two models, arXiv 2109.01903, equation 1. Differs from the first:
both terms are in each step, and both are means over positions, so that the second term vanishes
together with the repetitions.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.models.config import DecoderConfig

from . import (
    card,
    chunks,
    data,
    losses,
    own_text,
    pretrain,
    scale,
    tokenizer,
)
from .config import ConfigError, DataConfig, OptimizerConfig, RunConfig, check_stems
from .evaluate import Mean, make_evaluate
from .loop import TrainingTask
from .teacher import load_teacher

EXPORTED = "exported.json"  # the held-out figures of weights that are a mean, in the run's folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnlikelihoodConfig:
    """The settings of unlikelihood training."""

    target: str = "embedded"  # the model to go on from: a name or folder that specjax.load takes
    scale: float = 1.0  # the weight of the unlikelihood of repeated tokens
    ngram: int = 4  # the length of what counts as repeated
    start_share: float = 0.0  # the share of the starting weights in those that are exported
    own_share: float = 0.5  # the share of a batch's rows that the model writes itself
    prompt_tokens: int = 64  # the length of the prompts that the model continues
    new_tokens: int = 0  # how many tokens it writes after a prompt; 0: to the end of the row
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()
    card: card.CardConfig = card.CardConfig()

    def __post_init__(self):
        part = self.data.batch // self.run.accumulate
        if not 0 <= self.scale < math.inf:
            raise ConfigError(f"scale={self.scale}; accepted: at least 0, and finite")
        if not 0 <= self.start_share < 1:
            raise ConfigError(f"start_share={self.start_share}; accepted: at least 0, below 1")
        if self.ngram < 1:
            raise ConfigError(f"ngram={self.ngram}; accepted: at least 1")
        if not 0 < self.own_rows(part) < part:
            raise ConfigError(
                f"own_share={self.own_share} of {part} rows (data.batch over run.accumulate); "
                "accepted: a share that leaves at least one row to the model and one to the corpus"
            )
        most = self.data.length + 1 - max(self.ngram, self.new_tokens)
        if self.new_tokens and not self.ngram <= self.new_tokens <= self.data.length:
            raise ConfigError(
                f"new_tokens={self.new_tokens}; accepted: ngram={self.ngram} to "
                f"data.length={self.data.length}, or 0"
            )
        if not 1 <= self.prompt_tokens <= most:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens}; accepted: 1 to {most} (data.length + 1 - "
                "ngram, or - new_tokens)"
            )
        check_stems("data.mixed", self.data.mixed)
        if self.data.samples:
            raise ConfigError(
                f"data.samples={list(self.data.samples)}: a target learns from a corpus and from "
                "what it writes in the run; leave it out (and data.samples_share)"
            )

    @property
    def own_length(self) -> int:
        """The tokens of context of a row that the model writes."""
        return self.prompt_tokens + self.new_tokens - 1 if self.new_tokens else self.data.length

    def own_rows(self, rows: int) -> int:
        """The number of rows of a batch, or of a part of it, that the model writes itself."""
        return round(self.own_share * rows)


Config = UnlikelihoodConfig


def repetitions(tokens: jax.Array, written: jax.Array, ngram: int) -> tuple[jax.Array, jax.Array]:
    """Finds n-grams that occurred in the written part of the same row before.

    Args:
      tokens: int32 ``[B, T]``.
      written: bool ``[B, T]``, the tokens that count; others are in no n-gram.
      ngram: the length of an n-gram.

    Returns:
      ``(ends, member)``, bool ``[B, T]``: the n-gram that ends at a token occurred before, and the
      token is part of such an n-gram.
    """
    length = tokens.shape[1]
    both = written[:, :, None] & written[:, None, :]
    same = both & (tokens[:, :, None] == tokens[:, None, :])
    equal = same  # [t, s]: the n-grams that end at t and at s are equal
    for i in range(1, ngram):
        equal &= jnp.pad(same, ((0, 0), (i, 0), (i, 0)))[:, :length, :length]
    ends = jnp.any(jnp.tril(equal, -1), axis=2)
    padded = jnp.pad(ends, ((0, 0), (0, ngram - 1)))
    member = jnp.stack([padded[:, i : i + length] for i in range(ngram)]).any(0)
    return ends, member


def repeated_share(tokens, weight, ngram: int) -> tuple[Mean, jax.Array]:
    """Returns the share of repeated n-grams among those of tokens with a weight, and the tokens
    that are part of one, bool ``[B, T]``; the arguments are of this shape too."""
    ends, member = repetitions(tokens, weight > 0, ngram)
    grams = jnp.maximum(jnp.sum(weight, axis=1) - (ngram - 1), 0.0)
    return Mean(jnp.sum(ends * 1.0), jnp.sum(grams)), member


def make_loss(shape: DecoderConfig, end_of_text: int, config: UnlikelihoodConfig):
    """Returns the loss for ``loop.TrainingTask``; ``repeated`` is the share of repeated n-grams."""
    nats = pretrain.make_nats(shape, end_of_text)
    length, start = config.own_length, config.prompt_tokens
    write = own_text.make_writer(shape, end_of_text, length, start, 0.0)

    def unlikely(table, states, _, tokens):
        logits = chunks.logits_of(table, states, shape.logit_softcap)
        return {"loss": losses.unlikelihood(logits, tokens)}

    def loss(params, frozen, batch, keys):
        del frozen
        order = own_text.order_of(keys)
        read = (*data.unpacked(batch), keys.rows)
        tokens, weight, rows = jax.tree.map(lambda x: jnp.asarray(x)[order], read)
        own = config.own_rows(len(tokens))
        likely, table, states, _, following = nats(params, tokens[own:])
        summed, _ = chunks.total(likely, table, states, None, following, weight[own:])
        written, written_weight = write(params, tokens[:own, : length + 1], rows[:own])
        _, table, states, _, following = nats(params, written)
        share, member = repeated_share(following, written_weight, config.ngram)
        repeated, _ = chunks.total(unlikely, table, states, None, following, member * 1.0)
        count = jnp.sum(written_weight)
        return {
            "loss": Mean(summed, jnp.sum(weight[own:])),
            "unlikelihood": Mean(repeated, count, config.scale),
            "repeated": share._replace(share=0.0),
        }

    return loss


def make_measure(shape: DecoderConfig, end_of_text: int, sizes, config: UnlikelihoodConfig):
    """Returns the held-out measures: those of ``pretrain``, and the share of repeated n-grams in
    what the model writes greedily after the first ``prompt_tokens`` of the held-out rows."""
    known = pretrain.make_measure(shape, end_of_text, sizes)
    length, start = config.own_length, config.prompt_tokens
    write = own_text.make_writer(shape, end_of_text, length, start, 0.0)

    def measure(params, frozen, tokens, weight):
        keys = jax.random.split(jax.random.key(0), len(tokens))
        written, own = write(params, tokens[:, : length + 1], keys)
        share, _ = repeated_share(written[:, 1:], own, config.ngram)
        found = known(params, frozen, tokens, weight)
        return found | {"heldout_repeated": share}

    return measure


def mix(start, end, share: float):
    """Returns the mean of two sets of parameters, with the weight ``share`` for ``start``."""
    return jax.tree.map(lambda a, b: share * a + (1 - share) * b, start, end)


def run(config: UnlikelihoodConfig, *, dry_run: bool = False) -> None:
    """Trains, and exports to ``run.folder/model`` in Hugging Face layout."""
    vocabulary = tokenizer.load(config.data.tokenizer)
    target = load_teacher(config.target, vocabulary, config.data.length)
    stream, end_of_text = data.load_stream(config.data, "train")
    shape, sizes = target.config, tokenizer.byte_sizes(vocabulary)
    params = jax.tree.map(lambda x: x.astype(jnp.float32), target.params)
    start = jax.device_get(params) if config.start_share else None  # a run takes its parameters
    measure = make_measure(shape, end_of_text, sizes, config)
    evaluate = make_evaluate(measure, pretrain.heldout_sets(config.data))
    task = TrainingTask(
        loss=make_loss(shape, end_of_text, config),
        params=params,
        batches=data.training_batches(stream, config.data, shard=scale.shard_of(config.run)),
        evaluate=evaluate,
        measures=lambda: evaluate.names(params, None),
    )

    def exported(trained):
        if start is None:
            return trained
        mixed = mix(start, trained, config.start_share)
        found = evaluate(mixed, None)
        if scale.is_first():
            said = {"start_share": config.start_share} | found
            place = Path(config.run.folder) / EXPORTED
            place.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
            print(f"exported weights: {said}")
        return mixed

    pretrain.train_target(config, task, shape, vocabulary, dry_run, exported)
