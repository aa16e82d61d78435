"""Recipe ``distill``: trains a draft model from a frozen target.

    loss = (1 - data_share) * D(p, q) + data_share * -log q(next token),   mean over positions

Here p is the target's law and q the drafter's. A row is text of the corpus, text that the target
wrote (``data.samples``, by the recipe ``regenerate``), or text that the drafter writes itself:
``on_policy`` is the share of each batch that the drafter continues from prompts of the corpus, with
the weights of the current step. With ``data_share=1`` the loss is cross-entropy, which on the
target's text is Seq-KD. Acceptance is measured on the target's continuations of held-out prompts.

References: DistillSpec, 2310.08461; Seq-KD, 1606.07947.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import specjax
from specjax.models import DecoderConfig
from specjax.models.causal_lm import CausalLM, graph_definition
from specjax.models.lm import LM

from . import (
    card,
    checkpoint,
    chunks,
    data,
    decoding,
    export,
    features,
    losses,
    measured,
    model,
    own_text,
    report,
    samples,
    scale,
    tokenizer,
)
from .config import (
    ConfigError,
    DataConfig,
    OptimizerConfig,
    RunConfig,
    check_stems,
    check_unused,
    resolved,
)
from .evaluate import Mean, make_evaluate, mean
from .loop import TrainingTask, estimate, fit
from .teacher import load_teacher


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningFromTarget:
    """How a draft model learns from its target.

    With ``top_k`` the target's laws are reduced to their most likely tokens and the sum of the
    others. The largest error in acceptance that follows is logged as ``top_k_error``.
    """

    teacher: str = "embedded"  # the frozen target: a name or folder that specjax.load takes
    features: str = ""  # a folder of the recipe `features`; "": the target runs in each step
    divergence: str = "fkl"  # or rkl, jsd, tvd, nla, kl_tv, lk: see train/losses.py
    beta: float = 0.5  # of jsd
    mix: float = 0.5  # of kl_tv
    eta: float = 3.0  # of lk
    top_k: int = 0  # how many of the target's most likely tokens are compared; 0: all
    data_share: float = 0.0  # the share of cross-entropy in the loss
    on_policy: float = 0.0  # the share of a batch's rows that the drafter writes itself
    prompt_tokens: int = 64  # the length of the prompts that the drafter continues
    temperature: float = 1.0  # at which the drafter writes
    chunk: int = chunks.CHUNK  # the number of positions whose logits are in memory at a time
    eval_samples: tuple[str, ...] = ()  # files of `regenerate` from held-out prompts, to measure on
    decoding: decoding.DecodingConfig = decoding.DecodingConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()
    report: measured.ReportConfig = measured.ReportConfig()
    card: card.CardConfig = card.CardConfig()

    def __post_init__(self):
        self.distance()  # raises
        check_stems("eval_samples", self.eval_samples)
        for name in ("data_share", "on_policy"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: 0 to 1")
        for name, least in (("top_k", 0), ("chunk", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}; accepted: at least {least}")
        if not self.temperature > 0:
            raise ConfigError(f"temperature={self.temperature}; accepted: above 0")
        if self.on_policy and not 1 <= self.prompt_tokens <= self.data.length:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens}; accepted: 1 to data.length={self.data.length}"
            )
        part = self.data.batch // self.run.accumulate
        if self.on_policy and not self.own_rows(part):
            raise ConfigError(
                f"on_policy={self.on_policy} of {part} rows (data.batch over run.accumulate) is "
                "less than one row: give a larger share or batch, or 0"
            )

    def check_used(self) -> None:
        """Raises ConfigError for settings that this run does not read. A section of which several
        runs are made is not asked, since another one of them may."""
        if not self.on_policy:
            reason = "with on_policy=0 the drafter writes no text"
            check_unused(
                self, ("prompt_tokens", "temperature"), reason, "give an on_policy above 0"
            )
        for name, kind in (("beta", "jsd"), ("mix", "kl_tv"), ("eta", "lk")):
            if self.divergence != kind:
                reason = f"divergence={self.divergence} does not read it"
                check_unused(self, (name,), reason, f"give divergence={kind}")

    def distance(self):
        """Returns the divergence ``D(p_logits, q_logits)``."""
        how = {name: getattr(self, name) for name in ("beta", "mix", "eta")}
        return losses.divergence(self.divergence, **how)

    def own_rows(self, rows: int) -> int:
        """The number of rows of a batch, or of a part of it, that the drafter writes itself."""
        return round(self.on_policy * rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(LearningFromTarget):
    """The draft model that is trained."""

    model: model.ModelConfig
    init: str = ""  # the folder of a drafter of this shape to start from; "": random weights

    def __post_init__(self):
        super().__post_init__()
        self.model.check_length(self.data.length)


Config = DistillConfig
NUM_DRAFT = 4  # drafted tokens per round in the measures


@dataclasses.dataclass(frozen=True)
class Pair:
    """The configurations of a drafter and its target, and the token between documents."""

    student: DecoderConfig
    teacher: DecoderConfig
    end_of_text: int

    def student_states(self, params, inputs):
        """The drafter's last hidden states ``[B, T, E]`` over ``inputs`` int32 ``[B, T]``."""
        return self._states(self.student, params, inputs)

    def teacher_states(self, params, inputs):
        """The target's last hidden states ``[B, T, F]``."""
        return self._states(self.teacher, params, inputs)

    def _states(self, config, params, inputs):
        segments = data.segments_of(inputs, self.end_of_text)
        last = (config.num_layers,)
        return features.hidden_states(graph_definition(config), params, inputs, segments, last)[0]

    def drafter_logits(self, table, states):
        return chunks.logits_of(table, states, self.student.logit_softcap)

    def target_logits(self, table, states):
        return chunks.logits_of(table, states, self.teacher.logit_softcap)

    def drafter_table(self, params):
        return CausalLM(self.student).head_table(params)

    def target_table(self, params):
        return CausalLM(self.teacher).head_table(params)


def unpacked(pair: Pair, batch):
    """Unpacks a batch of ``data`` or ``features``, without stored laws.

    Returns:
      ``(tokens [B, T + 1], weight [B, T], hidden [B, T, F])``, where ``hidden`` are the target's
      last hidden states; None if they are not stored.
    """
    tokens, weight = data.unpacked(batch)
    hidden = batch.get("hidden") if isinstance(batch, dict) else None
    return tokens, weight, hidden[pair.teacher.num_layers].astype(jnp.float32) if hidden else None


def make_loss(pair: Pair, config: LearningFromTarget):
    """Returns the loss for ``loop.TrainingTask``.

    A batch is one of ``data``, or a dictionary that also holds the target's stored ``hidden``
    states by layer.
    """
    distance, share = config.distance(), config.data_share
    write = own_text.make_writer(
        pair.student,
        pair.end_of_text,
        config.data.length,
        config.prompt_tokens,
        config.temperature,
    )

    def terms(table, states, target_table, pieces):
        q, value, found = pair.drafter_logits(table, states), 0.0, {}
        if share:
            value += share * losses.cross_entropy(q, pieces["next"])
        if share < 1:
            if "laws" in pieces:
                p = losses.TopLaws(**pieces["laws"])
            else:
                p = pair.target_logits(target_table, pieces["target"])
                p = losses.compress(p, config.top_k) if config.top_k else p
            if config.top_k:
                p, q = losses.lump(p, q)
                found["top_k_error"] = losses.lump_error(p, q)
            value += (1 - share) * distance(p, q)
        return {"loss": value, **found}

    def loss(params, frozen, batch, keys):
        tokens, weight, hidden = unpacked(pair, batch)
        own_rows = config.own_rows(len(tokens))
        if own_rows:
            order = own_text.order_of(keys)
            read = tokens, weight, hidden, keys.rows
            tokens, weight, hidden, drawn = jax.tree.map(lambda x: jnp.asarray(x)[order], read)
            written, own = write(params, tokens[:own_rows], drawn[:own_rows])
            tokens = jnp.concatenate([written, tokens[own_rows:]])
            weight = jnp.concatenate([own, weight[own_rows:]])
        inputs, pieces = tokens[:, :-1], {"next": tokens[:, 1:]}
        stored = isinstance(batch, dict) and bool(batch.get("laws"))
        if share < 1 and stored:
            pieces["laws"] = batch["laws"]
        elif share < 1:
            lacking = inputs if hidden is None else inputs[:own_rows]
            parts = [pair.teacher_states(frozen, lacking)] if len(lacking) else []
            if hidden is not None:
                parts.append(hidden[own_rows:])
            pieces["target"] = jax.lax.stop_gradient(jnp.concatenate(parts))
        summed, others = chunks.total(
            terms,
            pair.drafter_table(params),
            pair.student_states(params, inputs),
            pair.target_table(frozen) if share < 1 and not stored else None,
            pieces,
            weight,
            chunk=config.chunk,
        )
        count = jnp.sum(weight)
        found = {name: Mean(value, count, 0.0) for name, value in others.items()}
        return {"distance": Mean(summed, count)} | found

    return loss


def make_measure(pair: Pair, num_draft: int = NUM_DRAFT, chunk: int = chunks.CHUNK):
    """Returns the held-out measures.

    They are the forward KL in nats, the acceptance ``sum min(p, q)``, the agreement of the most
    likely tokens, and the expected tokens per round with ``num_draft`` drafts, sampled (``tau``) or
    greedy. ``hidden`` of the returned function are the target's last hidden states, if known.
    """

    def terms(table, states, target_table, pieces):
        p, q = pair.target_logits(target_table, pieces), pair.drafter_logits(table, states)
        return {
            "heldout_loss": losses.fkl(p, q),
            "acceptance": losses.acceptance(p, q),
            "greedy_match": losses.greedy_match(p, q),
        }

    def measure(params, frozen, tokens, weight, hidden=None):
        inputs = tokens[:, :-1]
        hidden = pair.teacher_states(frozen, inputs) if hidden is None else hidden
        target = pair.target_table(frozen), hidden
        own = pair.drafter_table(params), pair.student_states(params, inputs)
        found = chunks.each(terms, *own, *target, chunk=chunk)
        accepted, matched = found["acceptance"], found["greedy_match"]
        return {name: mean(value, weight) for name, value in found.items()} | {
            "tau": mean(*losses.expected_tau(accepted, weight, num_draft)),
            "greedy_tau": mean(*losses.expected_tau(matched, weight, num_draft)),
        }

    return measure


def training_batches(config: LearningFromTarget, teacher, vocabulary):
    """Returns the batches of ``loop.TrainingTask``: stored rows and hidden states, or text."""
    if config.features:
        of, last = features.record_of(teacher, vocabulary), [teacher.config.num_layers]
        stored = features.read(config.features, of, config.data.length, last, config.top_k)
        if stored.laws and config.on_policy:
            raise ConfigError(
                f"on_policy={config.on_policy}, and features={config.features!r} holds laws: of "
                "rows that the drafter writes itself there are none; give features of hidden "
                "states, or none"
            )
        print(f"text          {stored.tokens.size:,} tokens in {config.features}")
        return features.batches(stored, config.data, shard=scale.shard_of(config.run))
    stream, _ = data.load_stream(config.data, "train")
    known = teacher.config.vocab_size
    of = samples.fingerprints(teacher, vocabulary)
    rows = [samples.read(path, of, known) for path in config.data.samples]
    written = sum(own.tokens.size for own in rows)
    print(f"text          {len(stream):,} tokens of corpus, {written:,} by the target")
    shard = scale.shard_of(config.run)
    return data.training_batches(stream, config.data, rows, shard=shard)


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What a draft model learns from and is measured on.

    Attributes:
      teacher: the frozen target.
      vocabulary: the tokenizer of both.
      heldout: held-out text.
      end_of_text: the token between documents.
    """

    teacher: LM
    vocabulary: Any
    heldout: data.Stream
    end_of_text: int


def load_lesson(config: LearningFromTarget) -> Lesson:
    """Loads the target, the tokenizer and the held-out text.

    Raises:
      ConfigError: the target does not fit the data, see ``load_teacher``.
    """
    vocabulary = tokenizer.load(config.data.tokenizer)
    teacher = load_teacher(config.teacher, vocabulary, config.data.length)
    heldout, end_of_text = data.load_stream(config.data, "heldout")
    print(f"held out      {len(heldout):,} tokens")
    return Lesson(teacher, vocabulary, heldout, end_of_text)


def run(config: DistillConfig, *, dry_run: bool = False) -> None:
    """Trains a draft model and exports it to ``run.folder/model``, without a tokenizer."""
    config.check_used()
    lesson = load_lesson(config)
    shape = config.model.decoder(lesson.teacher.config.vocab_size, lesson.end_of_text)
    params = model.starting_params(shape, config.run.seed, config.init)
    teach(config, lesson, shape, params, dry_run=dry_run)


def teach(
    config: LearningFromTarget, lesson: Lesson, shape: DecoderConfig, params, *, dry_run: bool
) -> None:
    """Trains a draft model from given weights, exports, measures and reports it.

    Args:
      config: how it learns.
      lesson: what it learns from.
      shape: the shape of the draft model.
      params: its first weights.
      dry_run: whether only the estimated memory and time are printed.
    """
    teacher, vocabulary = lesson.teacher, lesson.vocabulary
    pair = Pair(shape, teacher.config, lesson.end_of_text)
    sets = {"": data.heldout_batches(lesson.heldout, config.data)}
    of = samples.fingerprints(teacher, vocabulary)
    sets |= samples.heldout_batches(config.eval_samples, of, shape.vocab_size, config.data)
    cheap = make_evaluate(make_measure(pair, chunk=config.chunk), sets)
    prompts = decoding.prompt_sets(teacher, lesson.heldout, config.decoding, lesson.end_of_text)
    own = CausalLM(shape, axis=None)  # each device of a mesh holds the whole draft model
    drafter = specjax.drafters.DraftModel(model=own, num_draft=NUM_DRAFT)
    mesh = scale.layout_of(config.run).mesh
    decoded = decoding.make_decoded(teacher, drafter, prompts, config.decoding, mesh)
    task = TrainingTask(
        loss=make_loss(pair, config),
        params=params,
        batches=training_batches(config, teacher, vocabulary),
        evaluate=lambda params, frozen: cheap(params, frozen) | decoded(frozen, params),
        frozen=teacher.params,
        measures=lambda: [*cheap.names(params, teacher.params), *decoding.names(prompts)],
        best="decoded_tau" if prompts else "",
    )
    if dry_run:
        print(f"target        {teacher.name}: {model.words(teacher.config)}")
        return estimate(task, config.optimizer, config.run, model.words(shape))
    params = fit(task, resolved(config), config.optimizer, config.run)
    where, whose = Path(config.run.folder) / "model", (teacher.name, teacher.checkpoint)
    export.export(shape, params, where, vocabulary, with_tokenizer=False)
    made = card.Export(where, card.DRAFT, "draft", resolved(config), *whose)
    loaded = specjax.load(where, tokenizer=False)
    report.finish(config, made, teacher, loaded, prompts, NUM_DRAFT)
    checkpoint.mark_finished(Path(config.run.folder), resolved(config))
