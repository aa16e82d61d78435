"""Trains heads on a frozen target, for all recipes of heads.

A recipe makes ``rows.Heads``; ``train`` runs, measures and exports them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import specjax

from . import (
    card,
    data,
    decoding,
    features,
    head_losses,
    measured,
    model,
    samples,
    scale,
    tokenizer,
    vocabulary_map,
)
from .config import (
    ConfigError,
    DataConfig,
    OptimizerConfig,
    RunConfig,
    check_stems,
    differences,
    flatten,
    resolved,
)
from .evaluate import make_evaluate
from .head_export import export_heads, finish, layout_of
from .loop import TrainingTask, estimate, fit
from .rows import Heads, in_float32, make_reader
from .teacher import load_teacher


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenConfig:
    """The settings of every recipe of heads. Each recipe adds the shape of its own heads."""

    teacher: str = "embedded"  # the frozen target: a name or folder that specjax.load takes
    features: str = ""  # a folder of the recipe `features`; "": the target runs in each step
    init: str = ""  # a folder of trained heads of the same shape to start from; "": new heads
    num_heads: int = 4  # the number of heads, or of steps of the unroll
    decay: float = 0.8  # the loss of head k (from 1) is weighted by decay^k; 1: a plain sum
    teacher_share: float = 0.0  # share of the loss against the target's law, not the next token
    eval_samples: tuple[str, ...] = ()  # files of `regenerate` from held-out prompts, to measure on
    decoding: decoding.DecodingConfig = decoding.DecodingConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()
    report: measured.ReportConfig = measured.ReportConfig()
    card: card.CardConfig = card.CardConfig()

    def __post_init__(self):
        if self.num_heads < 1:
            raise ConfigError(f"num_heads={self.num_heads}; accepted: at least 1")
        check_stems("eval_samples", self.eval_samples)
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay={self.decay}; accepted: above 0, at most 1")
        if not 0 <= self.teacher_share <= 1:
            raise ConfigError(f"teacher_share={self.teacher_share}; accepted: 0 to 1")
        if self.data.length < self.num_heads + 8:
            raise ConfigError(
                f"data.length={self.data.length} leaves too little of a row to predict: give at "
                f"least {self.num_heads + 8} for num_heads={self.num_heads}"
            )


@dataclasses.dataclass(frozen=True)
class Setting:
    """The target of a run, and the text to learn from and to measure on.

    Attributes:
      lm: the target.
      end_of_text: the id of the token between documents.
      batches: the batches of ``loop.TrainingTask``.
      sets: the held-out rows for ``evaluate.make_evaluate``.
      frequencies: float64 ``[V]``, the share of each token in the text to learn from.
      prompts: see ``decoding.prompt_sets``.
      num_tokens: one more than the largest id of the tokenizer, which may be less than the target's
        vocabulary; None: it is not known.
    """

    lm: specjax.models.LM
    end_of_text: int
    batches: object
    sets: dict
    frequencies: np.ndarray
    prompts: dict[str, decoding.Prompts]
    num_tokens: int | None = None

    @property
    def sizes(self) -> dict:
        """The sizes of the target that the configuration of every head has."""
        target = self.lm.target
        return {"hidden_size": target.config.hidden_size, "vocab_size": target.vocab_size}


def make_setting(
    config: FrozenConfig, layers_of=lambda count: (), check=lambda target: None
) -> Setting:
    """Loads the target and the text that the configuration names.

    Args:
      config: the configuration of a recipe of heads.
      layers_of: ``layers_of(count)``, the layers of a target with ``count`` layers whose hidden
        states the heads read besides those of the last layer.
      check: ``check(shape)`` raises ConfigError, before any text is read, for the shape of a target
        that the recipe cannot train on.

    Raises:
      ConfigError: the target or the text cannot be read, or do not fit each other.
    """
    vocabulary = tokenizer.load(config.data.tokenizer)
    lm = load_teacher(config.teacher, vocabulary, config.data.length)
    check(lm.config)
    layers = layers_of(lm.config.num_layers)
    features.check_layers(layers, lm.config.num_layers)
    heldout, end_of_text = data.load_stream(config.data, "heldout")
    known, written_by = lm.target.vocab_size, samples.fingerprints(lm, vocabulary)
    shard = scale.shard_of(config.run)
    if config.features:
        of, read = features.record_of(lm, vocabulary), {*layers, lm.config.num_layers}
        stored = features.read(config.features, of, config.data.length, sorted(read))
        batches = features.batches(stored, config.data, shard=shard)
        texts, shares = [stored.tokens], [1.0]
        print(f"text          {stored.tokens.size:,} tokens in {config.features}")
    else:
        stream, _ = data.load_stream(config.data, "train")
        rows = [samples.read(path, written_by, known) for path in config.data.samples]
        batches = data.training_batches(stream, config.data, rows, shard=shard)
        texts = [x.tokens for x in (*stream.mixed, *rows)]
        shares = *config.data.mixed_share, *config.data.samples_share
        texts, shares = [stream.tokens, *texts], [1 - sum(shares), *shares]
        written = sum(own.tokens.size for own in rows)
        own = f"{written:,} by the target, {sum(config.data.samples_share):.0%} of the rows"
        own = own if rows else "none by the target (the recipe `regenerate` has it write)"
        print(f"text          {len(stream):,} tokens of corpus, {own}")
    sets = {"": data.heldout_batches(heldout, config.data)}
    sets |= samples.heldout_batches(config.eval_samples, written_by, known, config.data)
    print(f"held out      {len(heldout):,} tokens")
    prompts = decoding.prompt_sets(lm, heldout, config.decoding, end_of_text)
    frequencies = vocabulary_map.frequencies(texts, shares, known)
    num_tokens = max(vocabulary.get_vocab().values()) + 1
    return Setting(lm, end_of_text, batches, sets, frequencies, prompts, num_tokens)


def mask_of(mask_token: int, setting: Setting) -> int:
    """Returns the token whose embedding stands for a token to be drafted.

    For -1 that is the first ``unused_row``, or the token between texts where all rows are tokens.
    Prints which it is.

    Raises:
      ConfigError: the text has this token, so that one embedding would stand for two things, or the
        target does not have it.
    """
    if mask_token < 0:
        row = unused_row(setting)
        if row is None:
            end = setting.end_of_text
            print(f"mask          token {end}, that between texts: no row of embeddings is unused")
            return end
        print(f"mask          token {row}, an unused row of the target's embeddings")
        return row
    shares, known = setting.frequencies, setting.lm.target.vocab_size
    if mask_token >= known:
        raise ConfigError(f"mask_token={mask_token}; accepted: -1, or 0 to {known - 1}")
    if shares is not None and shares[mask_token] and mask_token != setting.end_of_text:
        raise ConfigError(
            f"mask_token={mask_token}: {shares[mask_token]:.1%} of the text are this token; give "
            f"one that no text has, or -1, the token between texts ({setting.end_of_text})"
        )
    return mask_token


def unused_row(setting: Setting) -> int | None:
    """Returns the first id beyond the tokenizer's whose embedding is not zero, and that no text
    has; None: there is none. (With embeddings of zero all masks of a block would be alike.)"""
    target, first = setting.lm.target, setting.num_tokens
    if first is None or first >= target.vocab_size:
        return None
    rows = np.arange(first, target.vocab_size)
    embedded = target.embed(setting.lm.params, jnp.asarray(rows, jnp.int32)[None])
    free = np.any(np.asarray(embedded, np.float32) != 0, axis=0)
    if setting.frequencies is not None:
        free &= setting.frequencies[rows] == 0
    return int(rows[np.argmax(free)]) if np.any(free) else None


def starting_params(config: FrozenConfig, lm, heads: Heads):
    """The initial parameters: new ones, or those in ``config.init``, of the same shape once they
    are grown."""
    if not config.init:
        return heads.params
    found = specjax.load_drafter(config.init, lm)
    if heads.grown is not None:
        found = heads.grown(found)
    theirs, ours = found.drafter, heads.drafter
    if type(theirs) is not type(ours):
        raise ConfigError(
            f"init={config.init!r} holds a drafter {theirs.name!r}, this recipe trains "
            f"{ours.name!r}: give heads of that kind, or leave init out"
        )
    if theirs.config != ours.config:
        lines = differences(flatten(theirs.config), flatten(ours.config))
        raise ConfigError(
            f"init={config.init!r} holds heads of another shape (theirs -> this run's): "
            f"{'; '.join(lines)}; give them the same, or leave init out"
        )
    if found.drafter.features != heads.drafter.features:
        raise ConfigError(
            f"init={config.init!r} reads the target's hidden states {found.drafter.features}, this "
            f"run gives it {heads.drafter.features}"
        )
    return heads.unpublish(in_float32(found.params))


def train(
    config: FrozenConfig,
    setting: Setting,
    heads: Heads,
    *,
    dry_run: bool,
    make_loss=head_losses.make_loss,
    make_measure=head_losses.make_measure,
    settle=None,
):
    """Trains the heads, draws the report, and exports the heads to ``run.folder/model``.

    Args:
      config: the configuration of the recipe.
      setting: the target and the text, see ``make_setting``.
      heads: the heads to train.
      dry_run: print the estimates alone.
      make_loss: makes the loss from the heads, the target, ``rows.make_reader``'s function and the
        configuration.
      make_measure: makes the held-out measures from the same.
      settle: ``settle(heads, lm, read, params)`` returns the drafter that is exported with the
        trained ``params``; None: that of the heads.
    """
    lm, target = setting.lm, setting.lm.target
    layout_of(lm, heads.drafter, heads.publish(heads.params))  # raises before anything is trained
    reads = dict(entries=heads.lay is not None)
    read = make_reader(lm.config, setting.end_of_text, heads.layers, **reads)
    cheap = make_evaluate(make_measure(heads, target, read, config), setting.sets)
    mesh = scale.layout_of(config.run).mesh
    decoded = decoding.make_decoded(lm, heads.drafter, setting.prompts, config.decoding, mesh)

    def evaluate(params, frozen):
        return cheap(params, frozen) | decoded(frozen["target"], heads.publish(params))

    start, given = starting_params(config, lm, heads), {"target": lm.params}
    task = TrainingTask(
        loss=make_loss(heads, target, read, config),
        params=start,
        batches=setting.batches,
        evaluate=evaluate,
        frozen=given,
        measures=lambda: [*cheap.names(start, given), *decoding.names(setting.prompts)],
        best=best_of(config),
    )
    if dry_run:
        return estimate(task, config.optimizer, config.run, describe(setting, heads))
    params = fit(task, resolved(config), config.optimizer, config.run)
    if settle is not None:
        heads = dataclasses.replace(heads, drafter=settle(heads, lm, read, params))
    folder = Path(config.run.folder)
    export_heads(folder, lm, heads.drafter, heads.publish(params))
    finish(config, lm, heads.drafter, heads.publish(params), setting.prompts)


def describe(setting: Setting, heads: Heads) -> str:
    """A description of the drafter that a run would train. Prints the target that it reads."""
    lm, drafter = setting.lm, heads.drafter
    count = sum(x.size for x in jax.tree.leaves(lm.params))
    print(f"target        {lm.name}: {count:,} parameters, {model.words(lm.config)}")
    if heads.layers:
        print(f"reads         its hidden states {', '.join(map(str, heads.layers))}")
    if heads.vocab is not None:
        share = setting.frequencies[heads.vocab].sum()
        print(f"vocabulary    {len(heads.vocab):,} tokens, {share:.1%} of the text")
    fields = flatten(drafter.config, whole=False).items()
    return f"{drafter.name}: {', '.join(f'{n}={value}' for n, value in fields)}"


def best_of(config: FrozenConfig) -> str:
    """The measure by which the exported parameters are chosen; empty: the last parameters."""
    return "decoded_tau" if config.decoding.num_prompts else ""
