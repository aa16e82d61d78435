"""Recipe ``pretrain``: next-token cross-entropy on a corpus, from random weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from . import card, data, export, losses, model, report, scale, tokenizer
from .config import ConfigError, DataConfig, OptimizerConfig, RunConfig, resolved
from .evaluate import make_evaluate, mean
from .loop import Job, estimate, fit


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """One section each for the model, the data, the optimiser and the run."""

    model: model.ModelConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()
    card: card.CardConfig = card.CardConfig()

    def __post_init__(self):
        if self.data.samples:
            raise ConfigError(
                f"data.samples={list(self.data.samples)}: a target learns from a corpus alone; "
                "leave it out (and data.samples_share), or give the texts as data.corpus"
            )


Config = PretrainConfig


def make_cross_entropy(graphdef, end_of_text: int):
    """``cross_entropy(params, tokens [B, T + 1]) -> nats [B, T]``."""

    def cross_entropy(params, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        logits = model.forward(graphdef, params, inputs, data.segments_of(inputs, end_of_text))
        return losses.cross_entropy(logits, targets)

    return cross_entropy


def run(config: PretrainConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the loss curve, exports to ``run.folder/model`` in Hugging Face layout."""
    stream, end_of_text = data.load_stream(config.data, "train")
    heldout, _ = data.load_stream(config.data, "heldout")
    vocabulary = tokenizer.load(config.data.tokenizer)
    shape = config.model.decoder(vocabulary.get_vocab_size(), end_of_text)
    graphdef, params = model.create(shape, config.run.seed)
    cross_entropy = make_cross_entropy(graphdef, end_of_text)

    def loss(params, frozen, batch, key):
        del frozen, key  # nothing is taught, nothing is drawn
        tokens, weight = data.unpacked(batch)
        return {"loss": mean(cross_entropy(params, tokens), weight)}

    def measure(params, frozen, tokens, weight):
        del frozen
        return {"heldout_loss": mean(cross_entropy(params, tokens), weight)}

    job = Job(
        loss=loss,
        params=params,
        batches=data.training_batches(stream, config.data, shard=scale.shard_of(config.run)),
        evaluate=make_evaluate(measure, {"": data.heldout_batches(heldout, config.data)}),
    )
    print(f"{len(stream):,} tokens to train on, {len(heldout):,} held out")
    if dry_run:
        return estimate(job, config.optimizer, config.run, model.words(shape))
    params = fit(job, resolved(config), config.optimizer, config.run)
    where = Path(config.run.folder) / "model"
    export.export(shape, params, where, vocabulary)
    made = card.Export(where, card.TARGET, "target", resolved(config))
    report.finish(config, made)
