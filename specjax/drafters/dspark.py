"""DSpark: a block drafter whose tokens read the one drafted before, and which knows its chances.

    logits of the k-th drafted token = head(h_k) + (what ``markov.py`` makes of x_{k-1} and h_k)
    c_k = sigmoid(w [h_k; W1[x_{k-1}]] + b)        the chance that the k-th token is accepted

``h_k`` are the states of a block (``block.py``), in which the root's place drafts as well, and
``x_0`` is the root. The layers run once a round; then tokens are drawn from left to right, each
from a law that is given the one before, and which is the law that the draft states.

``c_k`` ends a chain where more of it does not pay: at ``least``, by the thresholds of a policy
(``Context.confidence``), or by the costs of rounds (``Context.costs``, the policy ``schedule``).
Products of chances err more than each chance does; ``temperatures`` divide the logits of the
chances, one for each place (sequential temperature scaling; ``train/calibrate.py`` fits them).

Lossless: yes, under ``greedy`` and ``delta``; with ``sibling_sampling="iid"`` or ``"distinct"``
also under ``rejection``. ``c_k`` reads the tokens before the k-th and never the k-th itself, and
whoever ends a chain looks at the c of no token after the first that it leaves out.

Example::

    heads = specjax.load_drafter("deepseek-ai/dspark_qwen3_4b_block7", lm)
    specjax.generate(lm, "...", drafter=heads, drafting=specjax.Drafting(num="auto:schedule"))

Differs from the authors' code: ``q`` and the draw are of one dtype, float32 (there the draw is in
the model's, DeepSpec#31); in trees, which they do not draft, no confidence of the head is used.

References: DSpark, arXiv 2607.05147; github.com/deepseek-ai/DeepSpec.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .. import trees
from .._internal.optional import required
from ..models.layers import Linear
from ..trees import expand
from ..types import Confidence
from .block import BlockConfig, BlockLayers
from .corrected import CorrectedBlock
from .draft_length.schedule import worth_drafting
from .markov import KINDS, Kind, MarkovHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """The shape of a DSpark drafter.

    Attributes:
      markov_rank: R, of the Markov head; 0: there is none.
      markov: its kind: ``"vanilla"``, ``"gated"`` or ``"rnn"``.
      confidence: whether there is a confidence head.
      confidence_reads_token: whether it reads the token before too; else only the state.
    """

    from_root: bool = True
    markov_rank: int = 256
    markov: Kind = "vanilla"
    confidence: bool = True
    confidence_reads_token: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.markov not in KINDS:
            raise ValueError(f"markov={self.markov!r}: accepted are {', '.join(KINDS)}")
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank={self.markov_rank}: it must be at least 0")
        if self.markov_rank and self.markov == "rnn" and not self.from_root:
            raise ValueError(
                "markov='rnn' with from_root=False is not supported: its memory would begin at the "
                "place of the root, which drafts nothing"
            )
        if not self.markov_rank and self.confidence and self.confidence_reads_token:
            raise ValueError(
                "markov_rank=0: a confidence head reads tokens by the Markov head's table; give "
                "confidence_reads_token=False"
            )


class DSparkLayers(BlockLayers):
    """The weights of a DSpark drafter: those of a block drafter, and of its two heads."""

    def __init__(self, config: DSparkConfig, *, rngs, param_dtype=jnp.float32):
        super().__init__(config, rngs=rngs, param_dtype=param_dtype)
        rank, size = config.markov_rank, config.hidden_size
        common: dict[str, Any] = dict(rngs=rngs, param_dtype=param_dtype)
        sizes = dict(rank=rank, hidden_size=size, vocab_size=config.vocab_size)
        sizes |= dict(num_words=config.draft_vocab_size)
        self.markov = MarkovHead(config.markov, **sizes, **common) if rank else None
        self.reads_token = config.confidence_reads_token
        read = size + rank * self.reads_token
        self.confidence = Linear(read, 1, bias=True, **common) if config.confidence else None

    def say(self, latent):
        """What the Markov head adds to logits, float32 ``[M, V]``."""
        return required(self.markov, "markov").say(latent)

    def step(self, memory, tokens, hidden):
        """What a place reads of the token before, and its chance.

        Args:
          memory: ``[S, M]``, S the ``memory_size``.
          tokens: int32 ``[M]``, the tokens before.
          hidden: ``[H, M]``, the states of the place.

        Returns:
          the latent of the Markov head ``[R, M]``, None without one; the memory after this place;
          and float32 ``[M]``, the logit of the chance, 0 without a confidence head.
        """
        latent, read = None, [hidden]
        if self.markov is not None:
            embedded = self.markov.embed(tokens)
            latent, memory = self.markov.step(memory, embedded, hidden)
            read += [embedded] if self.reads_token else []
        if self.confidence is None:
            return latent, memory, jnp.zeros(tokens.shape, jnp.float32)
        chance = self.confidence(jnp.concatenate(read, axis=0))
        return latent, memory, chance[0].astype(jnp.float32)

    @property
    def memory_size(self) -> int:
        """S, the numbers that are remembered of a token; before the first they are zeros."""
        return 0 if self.markov is None else self.markov.memory_size


@dataclasses.dataclass(frozen=True)
class DSpark(CorrectedBlock):
    """Drafts with DSpark; ``params["drafter"]`` holds the weights of ``DSparkLayers``.

    Attributes:
      least: in [0, 1]; a row drafts nothing from the first token on whose chance is below it, as
        the authors' ``confidence_threshold``. 0: everything is drafted.
      temperatures: of the places, each above 0, by which the logits of their chances are divided;
        (): 1 for all.

    Raises:
      ValueError: ``least`` is out of range, or is given without a confidence head or for a tree;
        ``temperatures`` are not one for each place, or there is no confidence head.
    """

    least: float = 0.0
    temperatures: tuple[float, ...] = ()
    module = DSparkLayers
    name = "dspark"
    stored_settings = ("least",)

    def __post_init__(self):
        super().__post_init__()
        Confidence(self.least)
        if self.least and not self.knows_chances:
            raise ValueError(
                f"DSpark(least={self.least}): the head has no confidence head, or drafts a tree "
                f"({self.tree}); leave least out (of a file that was saved with it: delete "
                '"least" from "specjax" in config.json), or draft a chain with a confidence head'
            )
        given, places = self.temperatures, self.config.num_heads
        if given and not (
            self.config.confidence
            and len(given) == places
            and all(isinstance(t, (int, float)) and 0 < t < math.inf for t in given)
        ):
            raise ValueError(
                f"DSpark(temperatures={given}): accepted are {places} numbers above 0, one for "
                "each place, for a drafter with a confidence head; leave them out for 1"
            )

    @property
    def knows_chances(self) -> bool:
        """Whether chains are ended by the confidence head: there is one, and the draft a chain."""
        return self.config.confidence and self.tree == trees.chain(self.depth)

    def step(self, heads, target_params, memory, tokens, hidden, depth):
        return heads.step(memory, tokens.reshape(-1), hidden)

    def draft_step(self, params, target_params, state, context):
        ends = self.least, context.confidence is not None, context.costs is not None
        if not (self.knows_chances and any(ends)):
            return super().draft_step(params, target_params, state, context)
        level, carry = self.make_level(params, target_params, state, context)
        asked = dataclasses.replace(context, confidence=None)  # the head's is the better one
        draft, known, _ = expand.expand(
            self.tree,
            asked,
            level,
            carry,
            sibling_sampling=self.sibling_sampling,
            words=self.words(params),
        )
        chances = self.chances(known.chances)
        return trees.limit_depth(draft, self.worthwhile(chances, context)), state

    def chances(self, logits: jax.Array) -> jax.Array:
        """The chances of the first K places, float32 ``[..., K]``, of their logits."""
        scales = jnp.asarray(self.temperatures or (1.0,) * self.config.num_heads, jnp.float32)
        return jax.nn.sigmoid(logits / scales[: logits.shape[-1]])

    def worthwhile(self, chances: jax.Array, context) -> jax.Array:
        """How many tokens of its chain each row proposes, int32 ``[B]``.

        Args:
          chances: float32 ``[B, K]``, of each token, which reads the tokens before that one.
        """
        survival = jnp.cumprod(chances, axis=1)
        most = jnp.full(len(chances), self.depth, jnp.int32)
        own = Confidence(self.least, keeps_last=False)
        for end in (own, context.confidence):
            if end is not None:
                sure = (survival if end.along == "path" else chances) >= end.least
                reached = jnp.sum(jnp.cumprod(sure, axis=1), axis=1) + end.keeps_last
                most = jnp.minimum(most, reached)
        if context.costs is not None:
            costs = context.costs[: self.depth + 1]  # a combination may draft deeper than its parts
            survival = jnp.where(jnp.arange(self.depth) < most[:, None], survival, 0.0)
            most = jnp.minimum(most, worth_drafting(survival, costs, context.budget))
        return most
