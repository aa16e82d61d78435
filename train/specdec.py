"""Recipe ``specdec``: a SpecDec drafter on the texts that its target writes.

    loss = mean over blocks and places k that are masks of
        (1 - smoothing) * -log q_k(token) + smoothing * mean over x of -log q_k(x)

The text is the target's own (sequence-level distillation). For an encoder-decoder target,
``sources`` is a file of texts, one a line, or, for one that reads features (Whisper), a folder of
``.npy`` files, one for each window; the target writes greedily what belongs to each, and its texts
are kept in ``run.folder/pairs.npz``. Until all are written, those that are finished are in
``run.folder/pairs.jsonl``, from which the same command goes on. For a decoder-only target,
``data.samples`` are files of the recipe ``regenerate``, and ``source`` tokens before what the
target wrote are what is encoded.

Each text has ``num_anchors`` blocks at random places, drawn anew in each step and computed in one
pass: the token there, which is known, and ``num_heads`` masks. A block sees the text before it and
the memory of the source. Training is glancing: a pass without a gradient counts the m places of a
block whose best token is not the text's, floor(c m) random places of the block then show the text's
token, and the others are learned; c falls from ``glance_start`` to ``glance_end`` in the course of
the run. With ``glance_start=0 glance_end=0`` all places are masks.

The encoder and the embeddings, those of positions too, begin as the target's where they have their
shape.

A run writes its log and the drafter, and unlike those of other heads neither a report nor a card.

Differs from the authors' code: several blocks of a text are learned in one step, there it is one;
the optimizer is that of the configuration.

References: SpecDec, 2203.16487 and github.com/hemingkx/SpecDec; glancing, 2008.07905;
sequence-level distillation, 1606.07947.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.drafters.specdec import SpecDec, SpecDecConfig
from specjax.models import lm as models
from specjax.models.seq2seq.config import EncoderDecoderConfig
from specjax.models.seq2seq.encoder_inputs import encodes
from specjax.types import PyTree

from . import block, checkpoint, chunks, data, head_export, losses, scale, specdiff
from .config import ConfigError, DataConfig, OptimizerConfig, RunConfig, resolved
from .evaluate import Mean, make_evaluate, mean
from .loop import TrainingTask, estimate, fit
from .pairs import (
    Pairs,
    check_count,
    check_mask,
    check_sampled,
    check_written,
    held_out,
    sampled_pairs,
    written_pairs,
)
from .rows import Rows, fresh

DECODED = "decoded_tau"  # the measure of ``make_decoded``
FAMILY = "t5"  # whose layers a drafter for a decoder-only target has


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecDecTrainingConfig:
    """The texts, the shape of the drafter, and its loss."""

    teacher: str = "embedded"  # the frozen target: a name or folder that specjax.load takes
    sources: str = ""  # a target with an encoder: the texts of a file, or the windows of a folder
    start_ids: tuple[int, ...] = ()  # that begin each text after features; (): the target's own
    source: int = 0  # tokens of the prompt that are encoded, for a decoder-only target; else 0
    num_heads: int = 8  # the masks of a block
    mask_token: int = -1  # whose embedding stands for a mask; -1: that which begins or ends a text
    num_encoder_layers: int = 0  # of the drafter; 0: as many as the target's, or its decoder's
    num_layers: int = 1  # of the drafter's decoder
    num_anchors: int = 8  # blocks per text and step
    glance_start: float = 0.5  # places shown for each wrong one at the first step
    glance_end: float = 0.3  # the same at the last step
    label_smoothing: float = 0.1  # share of the loss that favours no token
    decode_rows: int = 8  # held-out texts that are decoded, to measure decoded_tau; 0: none
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()

    def __post_init__(self):
        least = dict(source=0, num_heads=1, mask_token=-1, num_encoder_layers=0, num_layers=1)
        for name, value in (least | dict(num_anchors=1, decode_rows=0)).items():
            if vars(self)[name] < value:
                raise ConfigError(f"{name}={vars(self)[name]}; accepted: at least {value}")
        for name in ("glance_start", "glance_end", "label_smoothing"):
            if not 0 <= vars(self)[name] <= 1:
                raise ConfigError(f"{name}={vars(self)[name]}; accepted: 0 to 1")


Config = SpecDecTrainingConfig


def make_specdec(config: SpecDecTrainingConfig, teacher: models.LM) -> tuple[SpecDec, PyTree]:
    """Makes a SpecDec drafter with initial weights for a target.

    Raises:
      ConfigError: the drafter cannot be one of this target.
    """
    target, of = teacher.target, teacher.config
    if encodes(teacher):
        layers = config.num_encoder_layers or of.num_encoder_layers
        network = dataclasses.replace(of, num_encoder_layers=layers, num_layers=config.num_layers)
        table = teacher.params["embedding"][...]
    else:
        network = EncoderDecoderConfig(
            model_type=FAMILY,
            vocab_size=target.vocab_size,
            hidden_size=of.hidden_size,
            intermediate_size=of.intermediate_size,
            num_encoder_layers=config.num_encoder_layers or of.num_layers,
            num_layers=config.num_layers,
            num_heads=of.num_heads,
            head_dim=of.head_dim,
            scale_attention=True,
            scale_logits=True,
        )
        every = jnp.arange(target.vocab_size, dtype=jnp.int32)[None]
        table = target.embed(teacher.params, every).T
    mask = config.mask_token
    if mask < 0:
        ends = (of.start_id,) if encodes(teacher) else tuple(of.eos_ids)
        if not ends:
            raise ConfigError(
                f"mask_token=-1: {config.teacher!r} has no token that ends a text, whose embedding "
                "could stand for a mask; give mask_token=ID, a token that no text has"
            )
        mask = ends[0]
        print(f"mask          token {mask}, which begins or ends a text")
    shape = dict(num_heads=config.num_heads, mask_token=mask, source=config.source)
    try:
        drafter = SpecDec(config=SpecDecConfig(network=network, **shape), target=target)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    params = fresh(drafter, config.run.seed)
    if params["embedding"].shape == table.shape:
        params["embedding"] = jnp.asarray(table, jnp.float32)
    if encodes(teacher):
        for name in {"encoder", "position_embedding"} & set(params):
            params[name] = _begun(params[name], teacher.params[name])
    return drafter, params


def _begun(own, theirs):
    """``own`` with the values of ``theirs`` where there are such, of one shape."""
    if not isinstance(own, dict):
        value = jnp.asarray(theirs[...], jnp.float32)
        return value if value.shape == own.shape else own
    return {key: _begun(x, theirs[key]) if key in theirs else x for key, x in own.items()}


def read(batch: dict, spare: int) -> Rows:
    """The text of a batch as rows; what follows its end is another document, and ``spare`` tokens
    are added, so that blocks near the end have places."""
    tokens, length = jnp.asarray(batch["tokens"]), jnp.asarray(batch["length"])
    pad = ((0, 0), (0, spare))
    ended = jnp.arange(tokens.shape[1] + spare) >= length[:, None]
    return Rows(
        tokens=jnp.pad(tokens, pad),
        weight=jnp.pad(jnp.asarray(batch["weight"]), pad),
        segments=ended.astype(jnp.int32),
        hidden=jnp.zeros((*batch["weight"].shape, 0)),  # no hidden state of the target is read
    )


def encoded(config: EncoderDecoderConfig, batch: dict) -> dict:
    """What the encoder reads of a batch."""
    if config.reads == "features":
        return {"features": batch["source"]}
    return {"tokens": batch["source"], "lengths": batch["source_length"]}


def heads_of(drafter: SpecDec, params, batch, rows: Rows, anchors, shown) -> list[chunks.Head]:
    """A head for each mask of blocks, over all anchors, as ``block.laid`` returns them, without the
    target's hidden states.

    Args:
      drafter, params: the drafter and its weights.
      batch: the pairs, see ``Pairs.row``.
      rows: their text, of ``read``.
      anchors: int32 ``[B, A]``, where blocks begin.
      shown: bool ``[B, A, 1 + K]``, the places that hold the text's token and no mask.
    """
    network, (count, size) = drafter.heads(params), shown.shape[1:]
    length, rows_count = rows.hidden.shape[1], len(anchors)
    tokens = rows.tokens[:, :length]
    memory, lengths = network.encode(encoded(network.config, batch))
    where = (anchors[:, :, None] + jnp.arange(size)).reshape(rows_count, -1)
    blocks = jnp.take_along_axis(rows.tokens, where, axis=1)
    blocks = jnp.where(shown.reshape(blocks.shape), blocks, drafter.config.mask_token)
    positions, sees = block.places_of(rows, anchors, size)
    causal = jnp.arange(length)[:, None] <= jnp.arange(length)
    text = jnp.concatenate([causal, jnp.zeros((count * size, length), bool)])
    text = jnp.broadcast_to(text, (rows_count, *text.shape))
    hidden, _, _ = network.hidden(
        jnp.concatenate([tokens, blocks], axis=1),
        positions,
        jnp.concatenate([text, sees], axis=2),
        network.remember(memory),
        lengths,
    )
    states = hidden.reshape(len(hidden), rows_count, -1)[:, :, length:]
    if network.config.scale_logits:
        states = states * network.config.hidden_size**-0.5
    states = states.reshape(len(hidden), rows_count, count, size)
    table = network.embedding if network.lm_head is None else network.lm_head.weight
    outputs = [(table[...], None, states[..., k].reshape(len(hidden), -1)) for k in range(1, size)]
    heads = block.laid(outputs, rows, anchors)
    return [head._replace(pieces={"next": head.pieces["next"]}) for head in heads]


def make_loss(drafter: SpecDec, config: SpecDecTrainingConfig):
    """Returns the loss for ``loop.TrainingTask``."""
    smoothing = config.label_smoothing

    def terms_of(output, states, law, pieces):
        q = chunks.logits_of(output[0], states)
        even = jax.nn.logsumexp(q, axis=-1) - jnp.mean(q, axis=-1)
        text = losses.cross_entropy(q, pieces["next"])
        return {"loss": (1 - smoothing) * text + smoothing * even}

    def loss(params, frozen, batch, keys):
        del frozen  # the text is all that is learned of the target
        rows = read(batch, config.num_heads)
        drawn = jax.vmap(lambda key: jax.random.uniform(key, (config.num_anchors,)))(keys.rows)
        room = jnp.maximum(jnp.asarray(batch["length"]) - 1, 1)[:, None]
        anchors = jnp.minimum((drawn * room).astype(jnp.int32), room - 1)
        masks = jnp.ones((*anchors.shape, config.num_heads), bool)
        if config.glance_start or config.glance_end:
            still = jax.lax.stop_gradient(params)
            shown = specdiff.shown_to(rows, anchors, masks)
            first = heads_of(drafter, still, batch, rows, anchors, shown)
            done = jnp.minimum(1, keys.number / config.run.steps)
            share = config.glance_start + (config.glance_end - config.glance_start) * done
            others = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys.rows)
            masks, _ = specdiff.glanced(others, first, share, None)
        shown = specdiff.shown_to(rows, anchors, masks)
        heads = heads_of(drafter, params, batch, rows, anchors, shown)
        heads = [head._replace(weight=head.weight * masks[..., k]) for k, head in enumerate(heads)]
        total, counted, terms = 0.0, 0.0, {}
        for k, (nats, _) in enumerate(chunks.totals(terms_of, heads, None)):
            own = jnp.sum(heads[k].weight)
            terms[f"mask_{k + 1}"] = Mean(nats, own, 0.0)
            total, counted = total + nats, counted + own
        return {"loss": Mean(total, counted), **terms}

    return loss


def make_measure(drafter: SpecDec, config: SpecDecTrainingConfig):
    """Returns held-out measures for ``evaluate.make_evaluate``, of blocks that hold masks alone, at
    places evenly spread over each text."""

    def terms_of(tables, states, law, pieces):
        found = []
        for (table, _), state, piece in zip(tables, states, pieces, strict=True):
            q = chunks.logits_of(table, state)
            hit = jnp.argmax(q, axis=-1) == piece["next"]
            found.append((losses.cross_entropy(q, piece["next"]), hit))
        return found

    def measure(params, frozen, tokens, weight, length, source, source_length):
        batch = dict(tokens=tokens, weight=weight, length=length)
        batch |= dict(source=source, source_length=source_length)
        rows, spread = read(batch, config.num_heads), jnp.linspace(0, 1, config.num_anchors)
        anchors = (spread * jnp.maximum(length - 2, 0)[:, None]).astype(jnp.int32)
        shown = jnp.zeros((*anchors.shape, config.num_heads + 1), bool).at[:, :, 0].set(True)
        heads = heads_of(drafter, params, batch, rows, anchors, shown)
        tables, states, pieces, fits = zip(*heads, strict=True)
        values = chunks.each(terms_of, tables, states, None, pieces, chunk=chunks.SEVERAL)
        terms, found = {}, {}
        for k, (nats, hit) in enumerate(values):
            terms[f"mask_{k + 1}"] = mean(nats, fits[k], 1 / len(heads))  # a mean, as the loss is
            found[f"accuracy_{k + 1}"] = mean(hit, fits[k])
        return {"heldout_loss": terms, **found}

    return measure


def make_decoded(config: SpecDecTrainingConfig, teacher: models.LM, drafter: SpecDec, held: Pairs):
    """Returns ``decoded(params) -> {"decoded_tau": ...}``, by greedy decoding of held-out texts."""
    count = min(config.decode_rows, len(held.text))
    rows = [held.row(n) for n in range(count)]
    if teacher.target.reads == "features":
        given = dict(inputs=np.stack([row["source"] for row in rows])) if rows else {}
        prompts = [row["tokens"][: held.num_given].tolist() for row in rows]
    else:
        prompts, given = [row["source"][: row["source_length"]].tolist() for row in rows], {}

    def decoded(params) -> dict[str, float]:
        if not count:
            return {}
        room = config.data.length - held.num_given
        asked = dict(drafter=drafter, drafter_params=params, max_new_tokens=room, **given)
        greedy = specjax.Sampling(temperature=0.0)
        stats = specjax.generate(teacher, prompts, sampling=greedy, **asked).stats
        return {DECODED: stats.tau}

    return decoded


def run(config: SpecDecTrainingConfig, *, dry_run: bool = False) -> None:
    """Has the target write, trains, exports to ``run.folder/model``."""
    import grain

    teacher = models.load(config.teacher, quantize="float")
    writes = encodes(teacher)
    (check_written if writes else check_sampled)(config)
    drafter, params = make_specdec(config, teacher)
    if writes:
        pairs = written_pairs(config, teacher, dry_run=dry_run)
    else:
        pairs = sampled_pairs(config, teacher)
        check_count(config, len(pairs.text))
    check_mask(config, pairs)
    size, batch = len(pairs.text), config.data.batch
    of_one_batch = dry_run and writes
    kept = 0 if of_one_batch else held_out(config)  # a dry run measures nothing on them
    order = np.random.default_rng(config.data.seed).permutation(size)
    learned, held = order[kept:], order[:kept]
    numbers = grain.MapDataset.source(learned).seed(config.data.seed).shuffle().repeat(data.EPOCHS)
    batches = data.batched(
        numbers.map(pairs.row), config.data, scale.shard_of(config.run), prefetch=8
    )
    names = ("tokens", "weight", "length", "source", "source_length")
    rows = [pairs.row(n) for n in held]
    sets = [
        tuple(np.stack([row[name] for row in rows[i : i + batch]]) for name in names)
        for i in range(0, kept, batch)
    ]
    cheap = make_evaluate(make_measure(drafter, config), {"": sets})
    decoded = make_decoded(config, teacher, drafter, pairs.some(held))
    task = TrainingTask(
        loss=make_loss(drafter, config),
        params=params,
        batches=batches,
        evaluate=lambda params, frozen: cheap(params, frozen) | decoded(params),
        measures=lambda: [*cheap.names(params, None), *[DECODED][: config.decode_rows]],
        best=DECODED if config.decode_rows else "",
    )
    parts = "those of the first batch" if of_one_batch else f"of which {kept:,} are held out"
    print(f"pairs         {size:,}, {parts}")
    if dry_run:
        network = drafter.config.network
        words = f"{network.num_encoder_layers} + {network.num_layers} layers"
        return estimate(task, config.optimizer, config.run, f"specdec: {words}")
    params = fit(task, resolved(config), config.optimizer, config.run)
    head_export.export_heads(Path(config.run.folder), teacher, drafter, params)
    checkpoint.mark_finished(Path(config.run.folder), resolved(config))
