"""Recipe ``pretrain``: next-token cross-entropy on a corpus."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.models.causal_lm import CausalLM, graph_definition
from specjax.models.config import DecoderConfig

from . import (
    card,
    checkpoint,
    chunks,
    data,
    early_exit,
    export,
    features,
    losses,
    model,
    report,
    scale,
    tokenizer,
)
from .config import ConfigError, DataConfig, OptimizerConfig, RunConfig, check_stems, resolved
from .evaluate import Mean, make_evaluate, mean
from .loop import TrainingTask, estimate, fit


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """One section each for the model, the data, the optimiser and the run."""

    model: model.ModelConfig
    init: str = ""  # a model of this shape to go on from, a folder or "embedded"; "": random
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()
    card: card.CardConfig = card.CardConfig()
    early_exit: early_exit.EarlyExitConfig = early_exit.EarlyExitConfig()

    def __post_init__(self):
        self.early_exit.check(self.model.num_layers)
        self.model.check_length(self.data.length)
        check_stems("data.mixed", self.data.mixed)
        if self.data.samples:
            raise ConfigError(
                f"data.samples={list(self.data.samples)}: a target learns from a corpus alone; "
                "leave it out (and data.samples_share), or give the texts as data.corpus"
            )


Config = PretrainConfig


def make_nats(shape: DecoderConfig, end_of_text: int):
    """Returns ``nats(params, tokens [B, T + 1])``, the arguments of ``chunks`` for the loss.

    Its term ``loss`` is ``-log p(next token)`` at each position, with attention within documents.
    """
    graphdef, last = graph_definition(shape), (shape.num_layers,)

    def terms(table, states, _, tokens):
        logits = chunks.logits_of(table, states, shape.logit_softcap)
        return {"loss": losses.cross_entropy(logits, tokens)}

    def nats(params, tokens):
        inputs = tokens[:, :-1]
        segments = data.segments_of(inputs, end_of_text)
        (states,) = features.hidden_states(graphdef, params, inputs, segments, last)
        return terms, CausalLM(shape).head_table(params), states, None, tokens[:, 1:]

    return nats


def make_loss(shape: DecoderConfig, end_of_text: int):
    """Returns the next-token cross-entropy of a decoder for ``loop.TrainingTask``."""
    nats = make_nats(shape, end_of_text)

    def loss(params, frozen, batch, keys):
        del frozen, keys  # there are no frozen parameters and no draws
        tokens, weight = data.unpacked(batch)
        summed, _ = chunks.total(*nats(params, tokens), weight)
        return {"loss": Mean(summed, jnp.sum(weight))}

    return loss


def make_early_exit_loss(
    shape: DecoderConfig, end_of_text: int, config: early_exit.EarlyExitConfig, steps: int
):
    """The same with LayerSkip's layer dropout and early exits; ``last_loss`` is the cross-entropy
    of the last layer, with dropout."""
    graphdef, layers = graph_definition(shape), shape.num_layers

    def terms(table, states, _, tokens):
        logits = chunks.logits_of(table, states, shape.logit_softcap)
        return {"loss": losses.cross_entropy(logits, tokens)}

    def loss(params, frozen, batch, keys):
        del frozen
        tokens, weight = data.unpacked(batch)
        inputs, following = tokens[:, :-1], tokens[:, 1:]
        segments = data.segments_of(inputs, end_of_text)
        step = keys.number
        gates = early_exit.gates(config, layers, step, steps, keys.rows)
        taps = tuple(range(1, layers + 1))
        *before, last = features.hidden_states(graphdef, params, inputs, segments, taps, gates)
        chosen, shares = early_exit.exits(config, layers, step, steps)
        norm, early = nnx.merge(graphdef, params).norm, jnp.stack(before)
        states = [
            jnp.moveaxis(norm(jnp.moveaxis(early[chosen[i]], 2, 0)), 0, 2)
            for i in range(len(chosen))
        ]
        table = CausalLM(shape).head_table(params)
        heads = [chunks.Head(table, x, following, jnp.asarray(weight)) for x in (*states, last)]
        sums = [found for found, _ in chunks.totals(terms, heads, None)]
        count = jnp.sum(weight)
        whole = jnp.dot(shares, jnp.stack(sums))
        return {"loss": Mean(whole, count), "last_loss": Mean(sums[-1], count, share=0.0)}

    return loss


def make_measure(shape: DecoderConfig, end_of_text: int, sizes: np.ndarray | None = None):
    """Returns the same loss on held-out rows, for ``evaluate.make_evaluate``.

    Args:
      shape: the shape of the decoder.
      end_of_text: the id of the token between documents.
      sizes: int ``[V]``, the number of bytes of each token (``tokenizer.byte_sizes``). With them
        the loss is also measured in bits per byte, by which models with different tokenizers can be
        compared.
    """
    nats = make_nats(shape, end_of_text)

    def measure(params, frozen, tokens, weight):
        del frozen
        loss = chunks.each(*nats(params, tokens))["loss"]
        found = {"heldout_loss": mean(loss, weight)}
        if sizes is not None:
            bytes_read = jnp.sum(jnp.asarray(sizes)[tokens[:, 1:]] * weight)
            bits = jnp.sum(loss * weight) / math.log(2)
            found["heldout_bits_per_byte"] = Mean(bits, bytes_read)
        return found

    return measure


def heldout_sets(config: DataConfig) -> dict:
    """Returns held-out rows of the corpus and, by name, of each corpus of ``data.mixed``."""
    alone = dataclasses.replace(config, mixed=(), mixed_share=())
    names = {"": config.corpus, **{f"{Path(name).stem}_": name for name in config.mixed}}
    streams = {
        prefix: data.load_stream(dataclasses.replace(alone, corpus=name), "heldout")[0]
        for prefix, name in names.items()
    }
    return {prefix: data.heldout_batches(stream, config) for prefix, stream in streams.items()}


def train_target(
    config,
    task: TrainingTask,
    shape: DecoderConfig,
    vocabulary,
    dry_run: bool = False,
    exported: Callable = lambda params: params,
) -> None:
    """Trains a target, draws the curves, and exports to ``run.folder/model`` in Hugging Face
    layout; ``dry_run``: prints what the run would take. ``exported(params)`` are the parameters
    that are exported after a run that ended with ``params``."""
    if dry_run:
        return estimate(task, config.optimizer, config.run, model.words(shape))
    params = fit(task, resolved(config), config.optimizer, config.run)
    where = Path(config.run.folder) / "model"
    source = config.data.tokenizer
    export.export(shape, exported(params), where, vocabulary, source=source)
    made = card.Export(where, card.TARGET, "target", resolved(config))
    report.finish(config, made)
    checkpoint.mark_finished(Path(config.run.folder), resolved(config))


def run(config: PretrainConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the loss curve, exports to ``run.folder/model`` in Hugging Face layout."""
    stream, end_of_text = data.load_stream(config.data, "train")
    vocabulary = tokenizer.load(config.data.tokenizer)
    shape = config.model.decoder(vocabulary.get_vocab_size(), end_of_text)
    params = model.starting_params(shape, config.run.seed, config.init)
    measure = make_measure(shape, end_of_text, tokenizer.byte_sizes(vocabulary))
    evaluate = make_evaluate(measure, heldout_sets(config.data))
    loss = make_loss(shape, end_of_text)
    if config.early_exit.used:
        loss = make_early_exit_loss(shape, end_of_text, config.early_exit, config.run.steps)
    task = TrainingTask(
        loss=loss,
        params=params,
        batches=data.training_batches(stream, config.data, shard=scale.shard_of(config.run)),
        evaluate=evaluate,
        measures=lambda: evaluate.names(params, None),
    )
    print(" + ".join(f"{len(own):,}" for own in (stream, *stream.mixed)), "tokens to train on")
    train_target(config, task, shape, vocabulary, dry_run)
