"""Recipe ``block_heads``: a Domino, XPress, DFlash2 or LiLiCorr drafter, from random anchors.

    loss = weighted mean over places of  corrected_share * value(corrected)
           + base_share * value(block)
           + free_share * mean over rounds of value(corrected, given the guesses of the round)
    LiLiCorr: weighted mean of  value(block) + lattice_share * -log softmax(scores)[token]
    value(q) = (1 - teacher_share) * -log q(token) + teacher_share * TV(q, p),  TV = |q - p|_1 / 2

``p`` is the target's law after the true tokens (but see ``on_policy``). The corrected logits are
given the true token before each place, those of the block nothing. Rounds are those of XPress's
drafter: each is given the most probable tokens of the round before, the first those of the block,
and no gradient flows through guesses. The k-th place is weighted by exp(-(k - 1) / decay_length).
Blocks and anchors are those of the recipe ``block``; the place of a Domino drafter's anchor
predicts too.

The corrected logits of DFlash2 are those of its candidates, the tokens with the greatest logits of
the block at their place; only where -log q(token) is learned is the true token a candidate too. In
TV, and where own drafts are drawn, q is the law from which the drafter draws, in which tokens that
are no candidates keep what the block gives them. The convolutions begin as the identity.

The scores of LiLiCorr's candidates are given the true token before; a place counts there as long
as it and the places before it have the true token among their candidates.

``corrected_share`` and ``base_share`` move linearly to ``corrected_share_end`` and
``base_share_end``, which hold from the share ``shares_moved`` of the run on. Where these fields and
``teacher_share`` are left out, they are those of the authors of the kind: Domino moves from the
block alone (1, 0) to the corrected logits alone (0, 1), both on the text; XPress has 1 and 0.6,
nine tenths against the target's law, and weighs rounds by 0.3; DFlash2 has 1 and 1 on the text,
LiLiCorr the block and a quarter of its scores on the text. A start that is given is also the end,
unless that is given too. ``config.json`` of a run holds what was taken. For blocks of 16 places the
authors' ``decay_length`` is 7.

With ``on_policy``, a share of the anchors of a DFlash2 or Domino drafter is followed by its own
drafts instead of the text (``own_drafts.py``). There p and q are the laws after these drafts, and
the mean of -log q(token) over the tokens that the target would draw takes the place of -log
q(token). In the term of a token, that token counts as a candidate of DFlash2.

LiLiCorr's authors add a penalty on candidates that the target dislikes, and let a gradient flow
through the probabilities of candidates into the block; here neither is so. SpecForge moves Domino's
weights in the first half of a run (``shares_moved=0.5``), the authors' scripts in all of it.
Held-out accuracies of LiLiCorr are those of the block alone, those of DFlash2 those of corrected
logits of all tokens.

References: Domino, 2605.29707; XPress, 2608.02438; LiLiCorr, 2608.20530; DFlash2, in
speculators#1006 and SpecForge#772 (training).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax._internal.optional import required
from specjax.drafters.dflash2 import DFlash2, DFlash2Config
from specjax.drafters.domino import Domino, DominoConfig
from specjax.drafters.lilicorr import LiLiCorrConfig
from specjax.drafters.xpress import XPress, XPressConfig

from . import block, chunks, frozen, head_losses, lattice, losses, own_drafts
from .config import ConfigError
from .corrections import dflash2_latents, domino_latents, second_table, xpress_latents
from .rows import Heads, fresh

# the authors' teacher_share; corrected_share and base_share, each at the start and at the end
SHARES = {
    "domino": (0.0, (0.0, 1.0), (1.0, 0.0)),
    "xpress": (0.9, (1.0, 1.0), (0.6, 0.6)),
    "dflash2": (0.0, (1.0, 1.0), (1.0, 1.0)),
    "lilicorr": (0.0, (0.0, 0.0), (1.0, 1.0)),
}
KINDS = tuple(SHARES)
ON_OWN_DRAFTS = "dflash2", "domino"  # kinds that this recipe trains on their own drafts


def by_kind() -> Any:
    """A field whose default is that of the ``kind``."""
    return dataclasses.field(default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHeadsTrainingConfig(own_drafts.OwnDraftsConfig):
    """The head of a block drafter, and the weights of its loss."""

    kind: str = "domino"  # domino, xpress, dflash2 or lilicorr
    num_heads: int = 7  # the tokens that a block drafts
    rank: int = 256  # of the tables that correct logits
    gru_size: int = 1024  # the numbers of Domino's recurrent state
    prefix: int = 1  # how many of Domino's first tokens have no correction
    inner_size: int = 512  # the inner features of XPress's refiner
    num_passes: int = 6  # passes of XPress's refiner while drafting
    rounds: int = 3  # of guesses in the loss of XPress
    num_candidates: int = 16  # of each place, in DFlash2 and LiLiCorr
    conv_taps: int = 2  # places that a convolution of DFlash2 reads
    conv_group: int = 16  # neighbouring features with one dynamic kernel
    lattice_size: int = 0  # features of a candidate in LiLiCorr's network; 0: the target's
    lattice_layers: int = 2  # its layers
    lattice_heads: int = 8  # heads of each of them
    factor_size: int = 256  # features of the vectors that it matches
    lattice_share: float = 0.25  # weight of its scores in the loss
    free_share: float = 0.3  # weight of these rounds
    corrected_share: float = by_kind()  # weight of the corrected logits; left out: the kind's own
    corrected_share_end: float = by_kind()  # the same at the end; left out: as corrected_share
    base_share: float = by_kind()  # weight of the block's own logits; left out: the kind's own
    base_share_end: float = by_kind()  # the same at the end of the run; left out: as base_share
    shares_moved: float = 1.0  # the share of the run in which these weights move to their ends
    decay_length: float = 4.0  # place k of a block is weighted by exp(-(k - 1) / decay_length)
    teacher_share: float = by_kind()  # share of the distance from the target's law; left out: own

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ConfigError(f"kind={self.kind!r}; known: {', '.join(KINDS)}")
        if self.on_policy and self.kind not in ON_OWN_DRAFTS:
            raise ConfigError(
                f"on_policy={self.on_policy} with kind={self.kind!r}: this recipe trains "
                f"{' and '.join(ON_OWN_DRAFTS)} alone on their own drafts; leave on_policy out"
            )
        self._fill_shares()
        super().__post_init__()
        least = dict(num_heads=2, rank=1, gru_size=1, inner_size=1, num_passes=0, rounds=0)
        least |= dict(lattice_size=0, lattice_layers=1, lattice_heads=1, factor_size=1)
        least |= dict(num_candidates=1, prefix=0, conv_taps=1, conv_group=1)
        shares = dict(free_share=0, lattice_share=0, corrected_share=0, corrected_share_end=0)
        shares |= dict(base_share=0, base_share_end=0)
        for name, value in (least | shares).items():
            if vars(self)[name] < value:
                raise ConfigError(f"{name}={vars(self)[name]}; accepted: at least {value}")
        if self.prefix >= self.num_heads:
            raise ConfigError(
                f"prefix={self.prefix}; accepted: 0 to {self.num_heads - 1}, below num_heads"
            )
        if not 0 < self.shares_moved <= 1:
            raise ConfigError(f"shares_moved={self.shares_moved}; accepted: above 0, at most 1")
        if self.kind != "lilicorr" and not (self.corrected_share or self.corrected_share_end):
            raise ConfigError(
                "corrected_share=0 at the start and the end: the head would learn nothing; give "
                "one above 0, or take the recipe block"
            )

    def _fill_shares(self):
        """Sets the weights that were left out to those of the kind."""
        teacher, corrected, base = SHARES[self.kind]
        filled = {}
        for name, (start, end) in (("corrected_share", corrected), ("base_share", base)):
            given = vars(self)[name]
            filled[f"{name}_end"] = end if given is None else given
            filled[name] = start
        for name, value in (filled | {"teacher_share": teacher}).items():
            if vars(self)[name] is None:
                object.__setattr__(self, name, value)

    def shares(self, number) -> jax.Array:
        """The weights of the corrected logits and of the block's own, float32 ``[2]``.

        ``number``: int32, the number of the step, from 0.
        """
        moved = jnp.minimum(number / (self.shares_moved * self.run.steps), 1.0)
        start = jnp.asarray([self.corrected_share, self.base_share], jnp.float32)
        end = jnp.asarray([self.corrected_share_end, self.base_share_end], jnp.float32)
        return start + moved * (end - start)

    @property
    def corrections(self) -> int:
        """How often a place is corrected: given the text, and in each round."""
        return 1 + (self.rounds if self.kind == "xpress" else 0)


Config = BlockHeadsTrainingConfig


def make_block_heads(config: BlockHeadsTrainingConfig, setting: frozen.Setting) -> Heads:
    """Makes a block drafter with a head and initial weights for the target of a setting.

    Its ``outputs`` take anchors as a further argument, and ``chosen`` of ``own_drafts.make_lay``.
    The table of a place is the LM head and W2 side by side, and zeros for the rounds; its state is
    that of the block, then what W2 reads given the tokens before, then the same of each round.
    LiLiCorr's state is that of the block, then the scores of the candidates, and then for each of
    them 1 if it is the true token and counts, else 0.

    Raises:
      ConfigError: the target caps its logits, to which a correction would be added before the cap;
        sizes that do not fit each other or the target.
    """
    target = setting.lm.target
    block.check_uncapped(config, target)
    shape = block.shape_of(config, setting)
    if config.kind == "lilicorr":
        check_tokens(config, target)
        try:
            own = LiLiCorrConfig(
                **shape,
                block_size=config.num_heads + 1,
                num_candidates=config.num_candidates,
                lattice_size=config.lattice_size or target.hidden_size,
                lattice_layers=config.lattice_layers,
                lattice_heads=config.lattice_heads,
                factor_size=config.factor_size,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        return lattice.make_lattice(own, target, config.run.seed)
    if config.kind == "domino":
        sizes = dict(gru_size=config.gru_size, rank=config.rank, prefix=config.prefix)
        own = DominoConfig(**shape, block_size=config.num_heads, **sizes)
        drafter, latents_of = Domino(config=own, target=target), domino_latents
    elif config.kind == "dflash2":
        check_candidates(config, target)
        sizes = dict(selector_rank=config.rank, num_candidates=config.num_candidates)
        sizes |= dict(conv_taps=config.conv_taps, conv_group=config.conv_group)
        own = DFlash2Config(**shape, block_size=config.num_heads + 1, **sizes)
        drafter, latents_of = DFlash2(config=own, target=target), dflash2_latents
    else:
        sizes = dict(rank=config.rank, inner_size=config.inner_size, num_passes=config.num_passes)
        own = XPressConfig(**shape, block_size=config.num_heads + 1, **sizes)
        drafter, latents_of = XPress(config=own, target=target), xpress_latents

    def outputs(params, target_params, rows, anchors, chosen=None):
        heads, found = drafter.heads(params), []
        blocks = block.blocks_of(drafter, params, target_params, rows, anchors)
        spare = (config.corrections - 1) * config.rank
        table = block.wide_table(target, target_params, second_table(heads, config.kind), spare)
        text = rows, anchors, blocks, table
        memory, latents_at = latents_of(config, heads, target, target_params, *text)
        for k, state in enumerate(block.drafting(drafter, blocks)):
            if k == 0 or chosen is None:
                before = block.at(rows.tokens, anchors + k)
            else:
                before = chosen(k - 1, found[-1])
            latents, memory = latents_at(memory, k, before)
            parts = [state, *(z.astype(state.dtype) for z in latents)]
            found.append((table, None, jnp.concatenate(parts)))
        return found

    lay = None
    if config.on_policy:
        lay = own_drafts.make_lay(config, setting, outputs, law_of(config, target))
    params = fresh(drafter, config.run.seed)
    return Heads(drafter, params, outputs, layers=drafter.config.target_layers, lay=lay)


def check_candidates(config: BlockHeadsTrainingConfig, target) -> None:
    """Raises ``ConfigError`` for candidates or convolutions that the target does not admit."""
    if target.hidden_size % config.conv_group:
        raise ConfigError(
            f"conv_group={config.conv_group}; accepted: a divisor of {target.hidden_size}, the "
            "hidden size of the target"
        )
    check_tokens(config, target)


def check_tokens(config: BlockHeadsTrainingConfig, target) -> None:
    """Raises ``ConfigError`` for more candidates than the target has tokens."""
    if config.num_candidates > target.vocab_size:
        raise ConfigError(
            f"num_candidates={config.num_candidates}; accepted: at most {target.vocab_size}, the "
            "tokens of the target"
        )


def make_terms(target, config: BlockHeadsTrainingConfig):
    """Returns the terms of a place, see ``block.make_terms``: also ``base``, the value of the block
    alone, ``free``, that of the rounds, and where the target's law is read ``accepted``, the
    probability 1 - TV that a token is accepted that is drawn given the tokens before; and of
    LiLiCorr ``lattice``, the cross-entropy of its scores."""
    laws, share = head_losses.Laws(target), config.teacher_share
    size, rank = target.hidden_size, config.rank

    def terms_of(output, states, law, pieces):
        said, table = laws.said(law, pieces), output[0]
        base = chunks.logits_of(table[:, :size], states[..., :size])

        def nats(q, candidate):
            """The cross-entropy that is learned."""
            found = losses.cross_entropy(with_token(q, candidate, said.next), said.next)
            if not config.on_policy:
                return found
            drawn = drawn_cross_entropy(required(said.law, "law"), q, candidate)
            return jnp.where(pieces["own"], drawn, found)

        def distance_of(q, candidate):
            """TV of the law from which tokens are drawn."""
            drafted = jax.nn.softmax(q if candidate is None else whole_law(q, candidate, base))
            return jnp.sum(jnp.abs(drafted - required(said.law, "law")), axis=-1) / 2

        def value(q, candidate=None):
            """Its value, and TV; ``candidate``: tokens that may be drafted, None: all of them."""
            total, distance = 0.0, None
            if share < 1:
                total += (1 - share) * nats(q / config.streak_temperature, candidate)
            if share:
                distance = distance_of(q, candidate)
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
        candidate = None
        if config.kind == "dflash2":
            candidate = candidates_of(base, config.num_candidates)
        q = corrected(0)
        (first, distance), (alone, _) = value(q, candidate), value(base)
        free = [value(corrected(k))[0] for k in range(1, config.corrections)]
        corrected_share, base_share = jnp.moveaxis(pieces["shares"], -1, 0)
        terms = {"loss": corrected_share * first + base_share * alone, "base": alone}
        if free:
            terms["free"] = sum(free) / len(free)
            terms["loss"] += config.free_share * terms["free"]
        if distance is None and config.reads_law:  # logged alone
            distance = distance_of(jax.lax.stop_gradient(q), candidate)
        if distance is not None:
            terms["accepted"] = 1 - distance
        return terms

    return terms_of


def law_of(config: BlockHeadsTrainingConfig, target):
    """Returns ``logits_of(table, states, token=None)``, for ``own_drafts.make_lay``: the logits of
    the law from which tokens are drawn, of DFlash2 the whole law. With ``token`` those of the law
    that is learned, of DFlash2 over candidates and ``token`` alone."""
    if config.kind != "dflash2":
        return lambda table, states, token=None: chunks.logits_of(table, states)

    def logits_of(table, states, token=None):
        size = target.hidden_size
        base = chunks.logits_of(table[:, :size], states[..., :size])
        candidate = candidates_of(base, config.num_candidates)
        q = chunks.logits_of(table, states)
        if token is None:
            return whole_law(q, candidate, base)
        return with_token(q, candidate, token)

    return logits_of


def candidates_of(base: jax.Array, count: int) -> jax.Array:
    """Bool ``[B, C, V]``, the tokens with the ``count`` greatest logits of the block; all of them
    where several have the least of these logits."""
    base = jax.lax.stop_gradient(base)
    return base >= jax.lax.top_k(base, count)[0][..., -1:]


def drawable(logits: jax.Array, candidate: jax.Array) -> jax.Array:
    """Logits ``[B, C, V]`` without those of tokens that are no candidates."""
    return jnp.where(candidate, logits, -jnp.inf)


def whole_law(logits: jax.Array, candidate: jax.Array, base: jax.Array) -> jax.Array:
    """The logarithms ``[B, C, V]`` of the law from which DFlash2 draws (``drafters.candidates``):
    candidates share, by ``logits``, the probability that the block, of the logits ``base``, gives
    them, and other tokens keep theirs."""
    law = jax.nn.log_softmax(base)
    mass = jax.nn.logsumexp(drawable(law, candidate), axis=-1, keepdims=True)
    return jnp.where(candidate, jax.nn.log_softmax(drawable(logits, candidate)) + mass, law)


def with_token(logits: jax.Array, candidate: jax.Array | None, token: jax.Array) -> jax.Array:
    """Logits ``[B, C, V]`` of the candidates and of int32 ``token [B, C]``; where ``candidate`` is
    None, those of all tokens."""
    if candidate is None:
        return logits
    return drawable(logits, candidate | (jnp.arange(logits.shape[-1]) == token[..., None]))


def drawn_cross_entropy(law: jax.Array, logits: jax.Array, candidate: jax.Array | None):
    """The mean over tokens of a law of their cross-entropies, float32 ``[B, C]`` in nats.

    Args:
      law: float32 ``[B, C, V]``, probabilities.
      logits: ``[B, C, V]``.
      candidate: bool ``[B, C, V]``; each token is judged among these and itself. None: among all.
    """
    if candidate is None:
        return losses.soft_cross_entropy(law, logits)
    among = jax.nn.logsumexp(drawable(logits, candidate), axis=-1, keepdims=True)
    total = jnp.where(candidate, among, jnp.logaddexp(among, logits))
    return jnp.sum(law * (total - logits), axis=-1)


make_loss = functools.partial(
    block.make_loss,
    terms=make_terms,
    text_logits=law_of,
    moving=lambda config, number: {"shares": config.shares(number)},
)


def run(config: BlockHeadsTrainingConfig, *, dry_run: bool = False) -> None:
    """Trains, draws the curves, exports to ``run.folder/model``."""
    block.run_blocks(config, make_block_heads, make_loss, dry_run=dry_run)
