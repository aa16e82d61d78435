"""Recipe ``distill``: a drafter taught by a frozen target, ``D(p, q)`` mixed with cross-entropy.

    loss = (1 - data_share) * D(p, q) + data_share * -log q(next token),   mean over positions

Text written by the target itself (recipe ``regenerate``, ``data.samples``) is what the drafter
will meet when it drafts; acceptance is therefore also measured on held-out continuations.

References: DistillSpec, 2310.08461.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

import specjax
from specjax.models.causal_lm import CausalLM, graph_definition
from specjax.models.hf import load_weights

from . import data, decoding, export, losses, model, regenerate, report, scale, tokenizer
from .config import ConfigError, DataConfig, OptimizerConfig, RunConfig, flatten
from .evaluate import make_evaluate, mean
from .loop import Job, estimate, fit


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """``teacher``: what ``specjax.load`` takes. ``divergence``: a key of ``losses.DIVERGENCES``.

    ``init``: the folder of a drafter of this shape to go on from; empty: random weights.
    ``eval_samples``: files of ``regenerate`` made from held-out prompts, each measured apart.
    """

    model: model.ModelConfig
    teacher: str = "embedded"
    init: str = ""
    divergence: str = "fkl"
    data_share: float = 0.0
    eval_samples: tuple[str, ...] = ()
    decoding: decoding.DecodingConfig = decoding.DecodingConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self):
        if self.divergence not in losses.DIVERGENCES:
            known = ", ".join(losses.DIVERGENCES)
            raise ConfigError(f"divergence={self.divergence!r}; known: {known}")
        if not 0 <= self.data_share <= 1:
            raise ConfigError(f"data_share={self.data_share}; accepted: 0 to 1")


Config = DistillConfig
NUM_DRAFT = 4  # tokens a round, for what is measured


def make_laws(student, teacher, end_of_text: int):
    """``laws(params, frozen, inputs [B, T]) -> (p, q)``: logits float32 ``[B, T, V]`` of both."""

    def laws(params, frozen, inputs):
        segments = data.segments_of(inputs, end_of_text)
        p = model.forward(teacher, frozen, inputs, segments)
        return p, model.forward(student, params, inputs, segments)

    return laws


def make_loss(laws, divergence: str, data_share: float):
    """The loss of the module's head, as ``loop.Job`` takes it."""
    distance = losses.DIVERGENCES[divergence]

    def loss(params, frozen, batch, key):
        del key  # nothing is drawn
        tokens, weight = data.unpacked(batch)
        p, q = laws(params, frozen, tokens[:, :-1])
        terms = {"distance": mean(distance(p, q), weight, 1 - data_share)}
        if data_share:
            nats = losses.cross_entropy(q, tokens[:, 1:])
            terms["text"] = mean(nats, weight, data_share)
        return terms

    return loss


def make_measure(laws, num_draft: int = NUM_DRAFT):
    """Held-out forward KL, acceptance ``sum min(p, q)``, agreement of the argmaxes, and the
    expected tokens a round with ``num_draft`` drafts, drawn (``tau``) or greedy."""

    def measure(params, frozen, tokens, weight):
        p, q = laws(params, frozen, tokens[:, :-1])
        accepted, matched = losses.acceptance(p, q), losses.greedy_match(p, q)
        return {
            "heldout_loss": mean(losses.fkl(p, q), weight),
            "acceptance": mean(accepted, weight),
            "greedy_match": mean(matched, weight),
            "tau": mean(*losses.expected_tau(accepted, weight, num_draft)),
            "greedy_tau": mean(*losses.expected_tau(matched, weight, num_draft)),
        }

    return measure


def load_teacher(name: str, vocabulary, length: int):
    """The target as an ``LM``, checked against the tokenizer and the length that cut the data."""
    import specjax.models.lm as lm

    teacher = lm.load(name)
    if teacher.tokenizer.vocabulary != {i: t for t, i in vocabulary.get_vocab().items()}:
        raise ConfigError(
            f"teacher={name!r} has another tokenizer than data.tokenizer: give "
            f"data.tokenizer={name!r}, the teacher's own"
        )
    if length > teacher.config.max_positions:
        raise ConfigError(
            f"data.length={length}: teacher={name!r} reads up to {teacher.config.max_positions} "
            "tokens; give no more"
        )
    return teacher


def run(config: DistillConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model`` without a tokenizer of its own."""
    vocabulary = tokenizer.load(config.data.tokenizer)
    teacher = load_teacher(config.teacher, vocabulary, config.data.length)
    stream, end_of_text = data.load_stream(config.data, "train")
    heldout, _ = data.load_stream(config.data, "heldout")
    samples = [regenerate.read(path) for path in config.data.samples]
    shape = config.model.decoder(teacher.config.vocab_size, end_of_text)
    graphdef, params = model.create(shape, config.run.seed)
    if config.init:
        params = nnx.to_pure_dict(load_weights(config.init, shape, jnp.float32))
    laws = make_laws(graphdef, graph_definition(teacher.config), end_of_text)
    sets = {"": data.heldout_batches(heldout, config.data)}
    for path in config.eval_samples:
        sets[f"{Path(path).stem}/"] = regenerate.read(path).batches(config.data.batch)
    cheap = make_evaluate(make_measure(laws), sets)
    prompts = decoding.prompt_sets(teacher, heldout, config.decoding, end_of_text)
    own = CausalLM(shape, axis=None)  # of a mesh every device drafts with the whole of it
    drafter = specjax.drafters.DraftModel(model=own, num_draft=NUM_DRAFT)
    mesh = scale.layout_of(config.run).mesh
    decoded = decoding.make_decoded(teacher, drafter, prompts, config.decoding, mesh)
    job = Job(
        loss=make_loss(laws, config.divergence, config.data_share),
        params=params,
        batches=data.training_batches(
            stream, config.data, samples, shard=scale.shard_of(config.run)
        ),
        evaluate=lambda params, frozen: cheap(params, frozen) | decoded(frozen, params),
        frozen=teacher.params,
        best="decoded_tau" if prompts else "",
    )
    written = sum(own.tokens.size for own in samples)
    print(f"tokens: {len(stream):,} of text, {written:,} by the target, {len(heldout):,} held out")
    if dry_run:
        print(f"target        {teacher.name}: {model.words(teacher.config)}")
        return estimate(job, config.optimizer, config.run, model.words(shape))
    params = fit(job, flatten(config), config.optimizer, config.run)
    folder = Path(config.run.folder)
    report.draw_curves(folder / "log.jsonl", folder / "loss.png", folder.name)
    export.export(shape, params, folder / "model", vocabulary, with_tokenizer=False)
