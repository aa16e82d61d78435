"""What the recipes of light heads share: a frozen target, its features, losses and measures.

A head ``k`` (from 0) at position ``t`` reads the target's last hidden state there, and as many of
the tokens behind it as its kind allows, and is about token ``t + 2 + k``: token ``t + 1``, which
that state itself says, is the root. A recipe brings ``Heads``; ``train`` does the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import specjax
from specjax.drafters.medusa import Medusa
from specjax.formats import FORMATS
from specjax.models.causal_lm import graph_definition
from specjax.models.layers import softcap
from specjax.pytree import pytree_dataclass
from specjax.types import Drafter, PyTree

from . import (
    card,
    data,
    decoding,
    features,
    measured,
    model,
    regenerate,
    report,
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
from .distill import load_teacher
from .evaluate import Mean, make_evaluate, mean
from .loop import Job, estimate, fit

MODEL = "model"  # the folder, within the run's, that heads are exported to


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenConfig:
    """What every recipe of heads is told; a recipe adds the shape of its own.

    ``teacher``: what ``specjax.load`` takes. ``features``: a folder of the recipe ``features``;
    empty: the target runs in each step, over rows of ``data``. ``init``: a folder of heads of this
    shape to go on from. ``decay``: the loss of head k (from 1) weighs ``decay ** k``, 0.8 in the
    paper of Medusa; 1: the plain sum. ``teacher_share``: of the loss, against the target's whole
    law (Hydra++'s teacher loss) in place of the text's next token. ``eval_samples``: files of
    ``regenerate`` made from held-out prompts, each measured apart.
    """

    teacher: str = "embedded"
    features: str = ""
    init: str = ""
    num_heads: int = 4
    decay: float = 0.8
    teacher_share: float = 0.0
    eval_samples: tuple[str, ...] = ()
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


@pytree_dataclass
class Rows:
    """A batch of text with its features.

    Attributes:
      tokens: int32 ``[B, L + 1]``.
      weight: float32 ``[B, L]``, how much the prediction of token t + 1 counts.
      segments: int32 ``[B, L + 1]``, which document a token belongs to.
      hidden: ``[B, L, F]`` of ``tokens[:, :-1]``, the target's last hidden state, normed.
      layers: the same of other layers, by their number, as far as they are asked for.
    """

    tokens: jax.Array
    weight: jax.Array
    segments: jax.Array
    hidden: jax.Array
    layers: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

    def behind(self, offset: int, steps: int) -> jax.Array:
        """int32 ``[B * steps]``: the token ``offset`` places behind each of the first steps."""
        return self.tokens[:, offset : offset + steps].reshape(-1)

    def states(self, offset: int, steps: int, layer: int | None = None) -> jax.Array:
        """``[F, B * steps]``, feature-major: the features at these places, the last ones or those
        of a layer."""
        found = self.hidden if layer is None else self.layers[layer]
        found = found[:, offset : offset + steps]
        return found.transpose(2, 0, 1).reshape(found.shape[2], -1)

    def embedded(self, head, target, params, steps: int) -> list[jax.Array]:
        """``[E, B * T]`` for each step ``s`` of an unroll: what a ``FeatureModule`` reads of the
        tokens ``1 + s`` places behind the first ``T = self.steps(steps)``."""
        end = self.steps(steps)
        tokens = [self.tokens[:, 1 + s : 1 + s + end] for s in range(steps)]
        return [head.embed(own, target, params) for own in tokens]

    def steps(self, num_heads: int) -> int:
        """At how many positions of a row, the first ones, all heads have something to say."""
        return self.hidden.shape[1] - num_heads


@dataclasses.dataclass(frozen=True)
class Heads:
    """What a recipe brings.

    Attributes:
      drafter: what decodes with them, for held-out tau.
      params: where they begin, ``params["drafter"]`` of the drafter.
      outputs: ``outputs(params, target params, rows) -> [(table [V, F], bias [V] or None, state
        [F, B * T])]``, one a head; ``table @ state + bias`` are its logits at the first
        ``T = rows.steps(K)`` positions. Not yet multiplied, so that one head's logits are in memory
        at a time.
      layers: of the target, besides its last, whose hidden states ``outputs`` reads.
      vocab: int32 ``[Vd]``, the tokens that rows of the tables are about;
        None: all.
      publish, unpublish: between parameters as they are trained and as the drafter takes them, one
        undoing the other.
    """

    drafter: Drafter
    params: PyTree
    outputs: Callable
    layers: tuple[int, ...] = ()
    vocab: np.ndarray | None = None
    publish: Callable[[PyTree], PyTree] = lambda params: params
    unpublish: Callable[[PyTree], PyTree] = lambda params: params


def fresh(drafter, seed: int, **options) -> PyTree:
    """``params["drafter"]`` as the drafter's module begins, which takes ``options``; in float32."""
    module = drafter.module(drafter.config, rngs=nnx.Rngs(seed), **options)
    return nnx.to_pure_dict(nnx.state(module))


def in_float32(params: PyTree) -> PyTree:
    """Floats in float32, in which alone the small steps of training add up."""

    def cast(x):
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, params)


def make_reader(config, end_of_text: int, layers=(), gradient: bool = False):
    """``read(target params, batch) -> Rows``; a batch of bare tokens runs the target.

    ``config``: the target's. ``layers``: see ``Heads``. ``gradient``: whether one flows into the
    features.
    """
    graphdef, last = graph_definition(config), config.num_layers
    layers = tuple(dict.fromkeys((*layers, last)))

    def read(params, batch) -> Rows:
        tokens, weight = data.unpacked(batch)
        segments = data.segments_of(tokens, end_of_text)
        stored = batch.get("hidden") if isinstance(batch, dict) else None
        if stored:
            dtype = params["norm"]["weight"].dtype  # of what it computes itself
            found = {i: x.astype(dtype) for i, x in stored.items()}
        else:
            inputs = tokens[:, :-1], segments[:, :-1]
            found = features.hidden_states(graphdef, params, *inputs, layers)
            found = dict(zip(layers, found, strict=True))
        found = found if gradient else jax.lax.stop_gradient(found)
        return Rows(
            tokens=tokens,
            weight=jnp.asarray(weight),
            segments=segments,
            hidden=found[last],
            layers=found,
        )

    return read


def logits_of(output, cap: float | None) -> jax.Array:
    """float32 ``[V, M]`` of one head."""
    table, bias, state = output
    logits = table @ state
    if bias is not None:
        logits = logits + bias[:, None]
    return softcap(logits, cap).astype(jnp.float32)


def target_logits(target, params, rows: Rows) -> jax.Array:
    """float32 ``[V, B, L]``: what the target says behind each token."""
    output = target.head_table(params), None, rows.states(0, rows.hidden.shape[1])
    logits = logits_of(output, target.config.logit_softcap)
    return logits.reshape(logits.shape[0], *rows.hidden.shape[:2])


def inside(rows: Rows, head: int, steps: int) -> jax.Array:
    """float32 ``[B * steps]``: the weight of the token that head (from 0) is about, where all that
    it goes on from is one document, so that the token could be known; else 0."""
    last = rows.segments[:, 1 + head : 1 + head + steps]
    # weights count predictions: that of token t + 2 + k stands at t + 1 + k
    weight = rows.weight[:, 1 + head : 1 + head + steps]
    return ((last == rows.segments[:, :steps]) * weight).reshape(-1)


def head_losses(
    outputs, target, params, rows: Rows, teacher_share: float, vocab=None
) -> list[Mean]:
    """Of each head, the ``Mean`` over its positions, in nats, of

        (1 - teacher_share) * -log q(next token)  +  teacher_share * -sum_x p(x) log q(x)

    with the target's own law ``p`` behind the true tokens. With a vocabulary of its own (``vocab``,
    see ``Heads``) that law is what remains of it there, renormalised, and positions count at which
    the target's best token is in it; ``teacher_share`` has to be 1.
    """
    steps, cap, values = rows.steps(len(outputs)), target.config.logit_softcap, []
    laws, known = None, None
    if teacher_share:
        laws = target_logits(target, params, rows)
        if vocab is not None:
            known = jnp.isin(jnp.argmax(laws, axis=0), vocab)  # [B, L]
            laws = laws[vocab]
        laws = jax.nn.softmax(laws, axis=0)
    for k, output in enumerate(outputs):
        logits = logits_of(output, cap)
        said = jnp.zeros(())
        if teacher_share < 1:
            token = rows.behind(2 + k, steps)
            said += (1 - teacher_share) * jnp.take_along_axis(logits, token[None], axis=0)[0]
        if teacher_share:
            law = laws[:, :, 1 + k : 1 + k + steps].reshape(logits.shape)
            said += teacher_share * jnp.sum(law * logits, axis=0)
        weight = inside(rows, k, steps)
        if known is not None:
            weight = weight * known[:, 1 + k : 1 + k + steps].reshape(-1)
        values.append(mean(jax.nn.logsumexp(logits, axis=0) - said, weight))
    return values


def shared(losses: list[Mean], decay: float, factor: float = 1.0) -> dict[str, Mean]:
    """``factor * sum_k decay ** k * loss_k``: the terms ``head_1 ...`` of a ``loop.Job``'s loss."""
    return {
        f"head_{k + 1}": value._replace(share=factor * decay ** (k + 1))
        for k, value in enumerate(losses)
    }


def make_loss(heads: Heads, target, read, config: FrozenConfig):
    """The loss of all heads, as ``loop.Job`` takes it."""

    def loss(params, frozen, batch, key):
        del key
        rows = read(frozen["target"], batch)
        outputs = heads.outputs(params, frozen["target"], rows)
        how = config.teacher_share, heads.vocab
        losses = head_losses(outputs, target, frozen["target"], rows, *how)
        return shared(losses, config.decay)

    return loss


def make_measure(heads: Heads, target, read, config: FrozenConfig):
    """Held-out, cheap: the loss, how often each head's best token is the target's own, and the
    tokens of a round that they would make of the text's (``greedy_tau``: exact where the target
    wrote it)."""

    def measure(params, frozen, tokens, weight):
        rows = read(frozen["target"], {"tokens": tokens, "weight": weight})
        outputs = heads.outputs(params, frozen["target"], rows)
        steps = rows.steps(len(outputs))
        alive = jnp.ones(weight[:, :steps].shape)
        counted, tau, found = alive, alive, {}
        how = config.teacher_share, heads.vocab
        losses = head_losses(outputs, target, frozen["target"], rows, *how)
        said = jnp.argmax(target_logits(target, frozen["target"], rows), axis=0)  # [B, L]
        for k, output in enumerate(outputs):
            best = jnp.argmax(logits_of(output, target.config.logit_softcap), axis=0)
            best = best if heads.vocab is None else jnp.asarray(heads.vocab)[best]
            own = said[:, 1 + k : 1 + k + steps]
            hit = (best.reshape(own.shape) == own).astype(jnp.float32)
            fits = inside(rows, k, steps).reshape(alive.shape)
            found[f"accuracy_{k + 1}"] = mean(hit, fits)
            alive, counted = alive * hit, counted * fits
            tau = tau + alive
        found["greedy_tau"] = mean(tau, counted)
        return {"heldout_loss": shared(losses, config.decay), **found}

    return measure


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a configuration stands for: the target, and the text to learn from and measure on.

    Attributes:
      lm: the target. ``end_of_text``: what parts documents.
      batches: for ``loop.Job``. ``sets``: for ``evaluate.make_evaluate``.
      frequencies: float64 ``[V]``, the share of each token in the text to learn from.
      prompts: see ``decoding.prompt_sets``.
    """

    lm: specjax.models.LM
    end_of_text: int
    batches: object
    sets: dict
    frequencies: np.ndarray
    prompts: dict[str, decoding.Prompts]

    @property
    def sizes(self) -> dict:
        """What the shape of every head is told of the target."""
        target = self.lm.target
        return {"hidden_size": target.config.hidden_size, "vocab_size": target.vocab_size}


def make_setting(config: FrozenConfig, layers_of=lambda count: ()) -> Setting:
    """Reads what the configuration names. Raises ConfigError where it cannot be had.

    ``layers_of``: says of a target with ``count`` layers whose hidden states, besides those of the
    last one, are to be read."""
    vocabulary = tokenizer.load(config.data.tokenizer)
    lm = load_teacher(config.teacher, vocabulary, config.data.length)
    layers = layers_of(lm.config.num_layers)
    features.check_layers(layers, lm.config.num_layers)
    heldout, end_of_text = data.load_stream(config.data, "heldout")
    known = lm.target.vocab_size
    shard = scale.shard_of(config.run)
    if config.features:
        of, read = features.record_of(lm, vocabulary), {*layers, lm.config.num_layers}
        stored = features.read(config.features, of, config.data.length, sorted(read))
        batches = features.batches(stored, config.data, shard=shard)
        texts, shares = [stored.tokens], [1.0]
        print(f"text          {stored.tokens.size:,} tokens in {config.features}")
    else:
        stream, _ = data.load_stream(config.data, "train")
        samples = [regenerate.read(path, known) for path in config.data.samples]
        batches = data.training_batches(stream, config.data, samples, shard=shard)
        shares = config.data.samples_share
        texts = [stream.tokens, *(own.tokens for own in samples)]
        shares = [1 - sum(shares), *shares]
        written = sum(own.tokens.size for own in samples)
        own = f"{written:,} by the target, {sum(config.data.samples_share):.0%} of the rows"
        own = own if samples else "none by the target (the recipe `regenerate` has it write)"
        print(f"text          {len(stream):,} tokens of corpus, {own}")
    sets = {"": data.heldout_batches(heldout, config.data)}
    for path in config.eval_samples:
        sets[f"{Path(path).stem}/"] = regenerate.read(path, known).batches(config.data.batch)
    print(f"held out      {len(heldout):,} tokens")
    prompts = decoding.prompt_sets(lm, heldout, config.decoding, end_of_text)
    frequencies = vocabulary_map.frequencies(texts, shares, known)
    return Setting(lm, end_of_text, batches, sets, frequencies, prompts)


def starting_params(config: FrozenConfig, lm, heads: Heads):
    """What the heads begin with: their own, or those in ``config.init``, of the same shape."""
    if not config.init:
        return heads.params
    found = specjax.load_drafter(config.init, lm)
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
    loss=None,
    measure=None,
):
    """Trains the heads, draws the curves, exports to ``run.folder/model``.

    ``loss``, ``measure``: if not ``make_loss``'s and ``make_measure``'s.
    """
    lm, target = setting.lm, setting.lm.target
    layout_of(lm, heads.drafter, heads.publish(heads.params))  # or nothing is trained
    read = make_reader(lm.config, setting.end_of_text, heads.layers)
    measure = measure or make_measure(heads, target, read, config)
    cheap = make_evaluate(measure, setting.sets)
    mesh = scale.layout_of(config.run).mesh
    decoded = decoding.make_decoded(lm, heads.drafter, setting.prompts, config.decoding, mesh)

    def evaluate(params, frozen):
        return cheap(params, frozen) | decoded(frozen["target"], heads.publish(params))

    job = Job(
        loss=loss or make_loss(heads, target, read, config),
        params=starting_params(config, lm, heads),
        batches=setting.batches,
        evaluate=evaluate,
        frozen={"target": lm.params},
        best=best_of(config),
    )
    if dry_run:
        return estimate(job, config.optimizer, config.run, describe(setting, heads))
    params = fit(job, resolved(config), config.optimizer, config.run)
    folder = Path(config.run.folder)
    export_heads(folder, lm, heads.drafter, heads.publish(params))
    finish(config, lm, heads.drafter, heads.publish(params), setting.prompts)


def describe(setting: Setting, heads: Heads) -> str:
    """The drafter that a run would make, in words; prints which target it reads."""
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
    """By which measure the parameters of a run are chosen; none: the last ones."""
    return "decoded_tau" if config.decoding.num_prompts else ""


def layout_of(lm, drafter: Drafter, params) -> str:
    """The first layout that can hold such heads, their authors' if it can.

    Medusa's heads of several blocks go in vLLM's: their authors' has one block, gone through again.

    Raises:
      ConfigError: there is none.
    """
    if isinstance(drafter, Medusa) and drafter.config.num_layers > 1:
        return "medusa-vllm"
    refused = []
    for name, layout in FORMATS.items():
        if isinstance(drafter, layout.DRAFTER):
            try:
                layout.save(drafter, params, lm)
            except ValueError as error:
                refused.append(str(error))
            else:
                return name
    raise ConfigError(f"such heads could not be written: {'; '.join(dict.fromkeys(refused))}")


@scale.by_first
def export_heads(folder: Path, lm, drafter: Drafter, params) -> None:
    """Writes the heads' published layout in bfloat16, with the fingerprint of their target."""
    layout, where = layout_of(lm, drafter, params), folder / MODEL
    how = dict(format=layout, target=lm, dtype="bfloat16", overwrite=True)  # what it wrote itself
    specjax.save_drafter(drafter, params, where, **how)
    print(f"exported to {where}, in the layout {layout!r}")


def finish(config: FrozenConfig, lm, drafter: Drafter, params, prompts: dict) -> None:
    """What follows the export of heads, see ``report.finish``."""
    where, layout = Path(config.run.folder) / MODEL, layout_of(lm, drafter, params)
    whose = lm.name, lm.checkpoint
    made = card.Export(where, layout, drafter.name, resolved(config), *whose)
    report.finish(config, made, lm, specjax.load_drafter(where, lm), prompts)
