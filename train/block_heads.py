"""Recipe ``block_heads``: a Domino, XPress or LiLiCorr drafter on a frozen target, from anchors.

    loss = weighted mean over places of  value(corrected) + base_share * value(block)
           + free_share * mean over rounds of value(corrected, given the guesses of the round)
    LiLiCorr: weighted mean of  value(block) + lattice_share * -log softmax(scores)[token]
    value(q) = (1 - teacher_share) * -log q(token) + teacher_share * TV(q, p),  TV = |q - p|_1 / 2

``p`` is the target's law after the true tokens. The corrected logits are given the true token
before each place, those of the block nothing. Rounds are those of XPress's drafter: each is given
the most probable tokens of the round before, the first those of the block, and no gradient flows
through guesses. The k-th place is weighted by exp(-(k - 1) / decay_length). Blocks and anchors are
those of the recipe ``block``; the place of a Domino drafter's anchor predicts too.

The scores of LiLiCorr's candidates are given the true token before; a place counts there as long
as it and the places before it have the true token among their candidates.

``kind="xpress"`` and the defaults are the weights of XPress's authors (who weigh rounds by 0.3 and
the block by 0.6). Domino's authors train with ``teacher_share=0``, and move the weight from the
block to the corrected logits in the course of the run; here both weights are constant. LiLiCorr's
add a penalty on candidates that the target dislikes, and let a gradient flow through the
probabilities of candidates into the block; here neither is so. Held-out accuracies of LiLiCorr are
those of the block alone.

References: Domino, 2605.29707; XPress, 2608.02438; LiLiCorr, 2608.20530.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from specjax._internal.optional import required
from specjax.drafters.domino import Domino, DominoConfig
from specjax.drafters.lilicorr import LiLiCorr, LiLiCorrConfig
from specjax.drafters.xpress import XPress, XPressConfig

from . import block, chunks, frozen, head_losses, losses
from .config import ConfigError
from .rows import Heads, fresh

KINDS = ("domino", "xpress", "lilicorr")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHeadsTrainingConfig(block.BlockTrainingConfig):
    """The head of a block drafter, and the weights of its loss."""

    kind: str = "domino"  # domino, xpress or lilicorr
    num_heads: int = 7  # the tokens that a block drafts
    rank: int = 256  # of the tables that correct logits
    gru_size: int = 1024  # the numbers of Domino's recurrent state
    prefix: int = 1  # how many of Domino's first tokens have no correction
    inner_size: int = 512  # the inner features of XPress's refiner
    num_passes: int = 6  # passes of XPress's refiner while drafting
    rounds: int = 3  # of guesses in the loss of XPress
    num_candidates: int = 16  # of each place, in LiLiCorr
    lattice_size: int = 0  # features of a candidate in LiLiCorr's network; 0: the target's
    lattice_layers: int = 2  # its layers
    lattice_heads: int = 8  # heads of each of them
    factor_size: int = 256  # features of the vectors that it matches
    lattice_share: float = 0.25  # weight of its scores in the loss
    free_share: float = 0.3  # weight of these rounds
    base_share: float = 0.6  # weight of the block's own logits
    decay_length: float = 4.0  # place k of a block is weighted by exp(-(k - 1) / decay_length)
    teacher_share: float = 0.9  # share of the distance from the target's law

    def __post_init__(self):
        super().__post_init__()
        if self.kind not in KINDS:
            raise ConfigError(f"kind={self.kind!r}; known: {', '.join(KINDS)}")
        least = dict(num_heads=2, rank=1, gru_size=1, inner_size=1, num_passes=0, rounds=0)
        least |= dict(lattice_size=0, lattice_layers=1, lattice_heads=1, factor_size=1)
        least |= dict(num_candidates=1, prefix=0)
        shares = dict(free_share=0, base_share=0, lattice_share=0)
        for name, value in (least | shares).items():
            if vars(self)[name] < value:
                raise ConfigError(f"{name}={vars(self)[name]}; accepted: at least {value}")
        if self.prefix >= self.num_heads:
            raise ConfigError(
                f"prefix={self.prefix}; accepted: 0 to {self.num_heads - 1}, below num_heads"
            )

    @property
    def corrections(self) -> int:
        """How often a place is corrected: given the text, and in each round."""
        return 1 + (self.rounds if self.kind == "xpress" else 0)


Config = BlockHeadsTrainingConfig


def make_block_heads(config: BlockHeadsTrainingConfig, setting: frozen.Setting) -> Heads:
    """Makes a block drafter with a head and initial weights for the target of a setting.

    Its ``outputs`` take anchors as a further argument. The table of a place is the LM head and W2
    side by side, and zeros for the rounds; its state is that of the block, then what W2 reads given
    the text, then the same of each round. LiLiCorr's state is that of the block, then the scores of
    the candidates, and then for each of them 1 if it is the true token and counts, else 0.

    Raises:
      ConfigError: the target caps its logits, to which a correction would be added before the cap.
    """
    target = setting.lm.target
    block.check_uncapped(config, target)
    shape = block.shape_of(config, setting)
    if config.kind == "lilicorr":
        return make_lattice(config, target, shape)
    if config.kind == "domino":
        sizes = dict(gru_size=config.gru_size, rank=config.rank, prefix=config.prefix)
        own = DominoConfig(**shape, block_size=config.num_heads, **sizes)
        drafter, latents_of = Domino(config=own, target=target), domino_latents
    else:
        sizes = dict(rank=config.rank, inner_size=config.inner_size, num_passes=config.num_passes)
        own = XPressConfig(**shape, block_size=config.num_heads + 1, **sizes)
        drafter, latents_of = XPress(config=own, target=target), xpress_latents

    def outputs(params, target_params, rows, anchors):
        heads = drafter.heads(params)
        blocks = block.blocks_of(drafter, params, target_params, rows, anchors)
        head = target.head_table(target_params)
        second = heads.refiner.lm_head if config.kind == "xpress" else heads.lm_head
        w2 = second.weight[...].astype(head.dtype)
        given = heads, target, target_params, rows, anchors, blocks
        latents = latents_of(config, *given, head, w2)
        none = jnp.zeros((len(w2), (config.corrections - 1) * config.rank), head.dtype)
        table = jnp.concatenate([head, w2, none], axis=1)
        states = block.drafting(drafter, blocks)
        return [
            (table, None, jnp.concatenate([state, *(z.astype(state.dtype) for z in own)]))
            for state, own in zip(states, latents, strict=True)
        ]

    return Heads(drafter, fresh(drafter, config.run.seed), outputs, layers=config.layers)


def make_lattice(config: BlockHeadsTrainingConfig, target, shape: dict) -> Heads:
    """Makes a LiLiCorr drafter, see ``make_block_heads``."""
    own = LiLiCorrConfig(
        **shape,
        block_size=config.num_heads + 1,
        num_candidates=config.num_candidates,
        lattice_size=config.lattice_size or target.hidden_size,
        lattice_layers=config.lattice_layers,
        lattice_heads=config.lattice_heads,
        factor_size=config.factor_size,
    )
    drafter = LiLiCorr(config=own, target=target)

    def outputs(params, target_params, rows, anchors):
        heads, (batch, count) = drafter.heads(params), anchors.shape
        blocks = block.blocks_of(drafter, params, target_params, rows, anchors)
        head, hidden = target.head_table(target_params), blocks[..., 1:]
        table = jnp.concatenate([head, jnp.zeros((len(head), 2 * own.num_candidates))], axis=1)

        def likely(table, states, fixed, pieces):
            """The candidates, and the logs of their probabilities."""
            logits = chunks.logits_of(*jax.lax.stop_gradient((table, states)))
            best, tokens = jax.lax.top_k(logits, own.num_candidates)
            return tokens, best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)

        found = [
            chunks.each(likely, head, hidden[..., k].transpose(1, 2, 0), None, ())
            for k in range(config.num_heads)
        ]
        tokens, logs = (jnp.stack(x, axis=2) for x in zip(*found, strict=True))  # [B, A, D, K]
        before = jnp.maximum(anchors - 1, 0)
        known = block.at(rows.segments, before) == block.at(rows.segments, anchors)
        known = (known & (anchors > 0)).reshape(-1)
        read = jnp.concatenate([rows.layers[i] for i in own.target_layers], axis=2)
        read = block.at(read, before).reshape(batch * count, -1)
        embedded = target.embed(target_params, tokens.reshape(batch, -1))
        start, pairs = heads.lattice(
            embedded.astype(hidden.dtype),
            logs.reshape(batch * count, *logs.shape[2:]),
            hidden.reshape(len(hidden), batch * count, -1),
            heads.hidden_norm(heads.fc(read.T)),
            known,
        )
        true = jnp.stack([block.at(rows.tokens, anchors + 1 + k) for k in range(config.num_heads)])
        hits = tokens == true.transpose(1, 2, 0)[..., None]
        hits = hits.reshape(batch * count, *hits.shape[2:])
        counts = jnp.cumprod(hits.any(axis=2), axis=1)[:, :, None] * hits
        which, states = jnp.argmax(hits, axis=2), block.drafting(drafter, blocks)
        outputs, scores = [], start
        for k, state in enumerate(states):
            if k:
                given = which[:, k - 1, None, None]
                scores = jnp.take_along_axis(pairs[:, k - 1], given, axis=1)[:, 0]
            parts = [state, *(x.T.astype(state.dtype) for x in (scores, counts[:, k]))]
            outputs.append((table, None, jnp.concatenate(parts)))
        return outputs

    return Heads(drafter, fresh(drafter, config.run.seed), outputs, layers=config.layers)


def domino_latents(config, heads, target, target_params, rows, anchors, blocks, head, w2):
    """What W2 reads of each place that drafts, ``[R, B * A]``, given the text before it."""
    states = blocks.transpose(3, 0, 1, 2).reshape(blocks.shape[3], len(blocks), -1)
    memory = jnp.zeros((heads.memory_size, states.shape[2]), states.dtype)
    found = []
    for k, state in enumerate(states):
        tokens = block.at(rows.tokens, anchors + k)
        memory = heads.remember(memory, target.embed(target_params, tokens))
        latent = heads.latent(state, memory)
        found.append([latent if k >= config.prefix else jnp.zeros_like(latent)])
    return found


def xpress_latents(config, heads, target, target_params, rows, anchors, blocks, head, w2):
    """The same, and after it what W2 reads in each round of guesses."""
    refiner, (size, batch, count, places) = heads.refiner, blocks.shape
    given = refiner.given(blocks.reshape(size, -1, places))
    before = jnp.maximum(anchors - 1, 0)
    alone = block.at(rows.segments, before) != block.at(rows.segments, anchors)
    first = [jnp.where(alone, block.at(rows.tokens, anchors), block.at(rows.tokens, before))]
    first.append(block.at(rows.tokens, anchors))  # the root, which is never guessed

    def latents(tokens):
        """Of the places that draft, each ``[R, B * A]``, given the tokens before all places."""
        flat = jnp.stack([x.reshape(-1) for x in tokens], axis=1)
        mixed = refiner.mixed(given, flat)
        latent = refiner.latent(mixed.reshape(len(mixed), -1)).reshape(mixed.shape)
        return [latent[:, :, k] for k in range(places - 1)]

    def guesses(corrections):
        """The most probable tokens of each place that drafts, int32 ``[B, A]``."""
        table, best = head, []
        if corrections is not None:
            table = jnp.concatenate([head, w2], axis=1)
        for k in range(places - 1):
            state = blocks[..., k + 1]
            if corrections is not None:
                latent = corrections[k].reshape(-1, batch, count).astype(state.dtype)
                state = jnp.concatenate([state, latent])
            best.append(chunks.each(most_probable, table, state.transpose(1, 2, 0), None, ()))
        return best

    text = [block.at(rows.tokens, anchors + k) for k in range(1, places - 1)]
    found, free = [latents([*first, *text])], None
    for _ in range(config.rounds):
        guess = jax.lax.stop_gradient(guesses(jax.lax.stop_gradient(free)))
        free = latents([*first, *guess[:-1]])
        found.append(free)
    return [list(own) for own in zip(*found, strict=True)]


def most_probable(table, states, fixed, pieces):
    """The tokens with the greatest logits, int32 ``[B, C]``."""
    logits = chunks.logits_of(*jax.lax.stop_gradient((table, states)))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def make_terms(target, config: BlockHeadsTrainingConfig):
    """Returns the terms of a place, see ``block.make_terms``: also ``base``, the value of the block
    alone, ``free``, that of the rounds, and where the target's law is read ``accepted``, the
    probability 1 - TV that a token is accepted that is drawn given the text; and of LiLiCorr
    ``lattice``, the cross-entropy of its scores."""
    laws, share = head_losses.Laws(target), config.teacher_share
    size, rank = target.hidden_size, config.rank

    def terms_of(output, states, law, pieces):
        said, table = laws.said(law, pieces), output[0]
        base = chunks.logits_of(table[:, :size], states[..., :size])

        def value(q):
            """Its value, and TV."""
            total, distance = 0.0, None
            if share < 1:
                total += (1 - share) * losses.cross_entropy(q, said.next)
            if share:
                distance = jnp.abs(jax.nn.softmax(q) - required(said.law, "law"))
                distance = jnp.sum(distance, axis=-1) / 2
                total += share * distance
            return total, distance

        def corrected(which):
            start = size + which * rank
            latent = states[..., start : start + rank]
            return base + chunks.logits_of(table[:, size : size + rank], latent)

        if config.kind == "lilicorr":
            scores, counts = jnp.split(states[..., size:], 2, axis=-1)
            lattice = -jnp.sum(counts * jax.nn.log_softmax(scores), axis=-1)
            alone, _ = value(base)
            loss = alone + config.lattice_share * lattice
            return {"loss": loss, "base": alone, "lattice": lattice}
        (first, distance), (alone, _) = value(corrected(0)), value(base)
        free = [value(corrected(k))[0] for k in range(1, config.corrections)]
        terms = {"loss": first + config.base_share * alone, "base": alone}
        if free:
            terms["free"] = sum(free) / len(free)
            terms["loss"] += config.free_share * terms["free"]
        if distance is not None:
            terms["accepted"] = 1 - distance
        return terms

    return terms_of


def make_loss(made: Heads, target, read, config: BlockHeadsTrainingConfig):
    """Returns the loss for ``loop.TrainingTask``."""
    return block.make_loss(made, target, read, config, make_terms)


def run(config: BlockHeadsTrainingConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``."""
    setting = frozen.make_setting(config, lambda count: config.layers)
    how = dict(make_loss=make_loss, make_measure=block.make_measure)
    frozen.train(config, setting, make_block_heads(config, setting), dry_run=dry_run, **how)
