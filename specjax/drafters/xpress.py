"""XPress: a block drafter whose logits are refined all at once, a few times.

    a_k = A [D h_k; G mean(h); W1[x_{k-1}]]             at each place k of a block, of rank R
    b_k = a_k + sum over j <= k of L[:, k, j] * a_j
    logits of the k-th drafted token = head(h_k) + W2 (b_k + U (silu(E b_k) * F b_k))

``h_k`` are the states of the places of a block (``block.py``), the root's place 0 among them;
``x_0`` is the root and ``x_{-1}`` the token before it. L is lower triangular for each of the R
features, so that a place reads the tokens before it and no others.

The tokens ``x`` that the logits are given are guesses: first the argmax of ``head(h)``, then that
of the logits of the pass before (Jacobi iteration). Each of the ``num_passes`` passes computes all
places at once; passes that would change nothing are left out. After as many passes as tokens the
guesses are what the same logits say from left to right. The laws of the places are those of the
last pass, given guesses that are a function of the context.

The most probable tokens are drafted by these passes. Where tokens are drawn
(``sibling_sampling="iid"`` or ``"distinct"``, as heads draw above temperature 0), they are drawn
from left to right, each from a law that is given the tokens before it, at one step of the head a
depth. ``in_turn`` asks for one of the two whatever is drafted.

Lossless: yes, under ``greedy`` and ``delta``; with ``sibling_sampling="iid"`` or ``"distinct"``
also under ``rejection``: the law from which a token is drawn is the law that the draft states.

Example::

    heads = specjax.load_drafter(xpress_folder, lm)
    specjax.generate(lm, "...", drafter=heads)

Differs from the authors' code: ``x_{-1}`` is the token before the root, as in their training (their
server takes the root for it); all tokens of the vocabulary are scored in each pass (their server
may score the best 512 of the first logits); ``in_turn``, trees and drawn tokens are new.

References: XPress, arXiv 2608.02438; vllm#54448, speculators#1061 (by the authors).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..models.layers import Linear, columns, product, swiglu_linear
from .block import BlockConfig, BlockLayers
from .corrected import CorrectedBlock, Drawing
from .heads import independent_level


@dataclasses.dataclass(frozen=True, kw_only=True)
class XPressConfig(BlockConfig):
    """The shape of an XPress drafter.

    Attributes:
      rank: R.
      inner_size: rows of E and F.
      num_passes: how often the logits are refined; 0: never.
    """

    rank: int = 256
    inner_size: int = 512
    num_passes: int = 6

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("rank", 1), ("inner_size", 1), ("num_passes", 0)):
            if vars(self)[name] < least:
                raise ValueError(f"{name}={vars(self)[name]}: it must be at least {least}")
        if self.from_root:
            raise ValueError(
                "from_root=True: the refiner of XPress reads the place of the root, which drafts "
                "nothing; leave from_root out"
            )


class Refiner(nnx.Module):
    """The head over the places of a block: feature-major, ``[R, ...]``."""

    def __init__(self, config: XPressConfig, *, rngs, param_dtype):
        size, rank, inner = config.hidden_size, config.rank, config.inner_size
        common: dict[str, Any] = dict(rngs=rngs, param_dtype=param_dtype)
        values = jax.random.normal(rngs.params(), (config.vocab_size, rank)) * 0.02
        self.embedding = nnx.Param(values.astype(param_dtype))
        self.local, self.whole = (Linear(size, rank, **common) for _ in range(2))
        self.fuse = Linear(3 * rank, rank, **common)
        places = config.block_size
        self.mix = nnx.Param(jnp.zeros((rank, places, places), param_dtype))
        self.gate, self.up = (Linear(rank, inner, **common) for _ in range(2))
        self.down = Linear(inner, rank, **common)
        self.lm_head = Linear(rank, config.vocab_size, scale=0.02, **common)

    def given(self, hidden: jax.Array) -> jax.Array:
        """What ``a`` reads of the states ``[H, B, N]`` of all places, ``[R, B, N]``."""
        size, batch, places = hidden.shape
        flat, mean = hidden.reshape(size, -1), jnp.mean(hidden, axis=2)
        local = self.local(flat).reshape(-1, batch, places)
        whole = jnp.broadcast_to(self.whole(mean)[:, :, None], local.shape)
        weight = self.fuse.weight[...][:, : 2 * len(local)]
        read = jnp.concatenate([local, whole]).reshape(2 * len(local), -1)
        return product(weight, read).reshape(-1, batch, places)

    def of_tokens(self, tokens: jax.Array) -> jax.Array:
        """What ``a`` reads of the tokens before, int32 ``[...]``: ``[R, ...]``."""
        read = columns(self.embedding[...], tokens)
        weight = self.fuse.weight[...][:, 2 * len(read) :]
        return product(weight, read).reshape(-1, *tokens.shape)

    @property
    def mixer(self) -> jax.Array:
        """``[R, N, N]``: what place k takes of place j, at ``[:, k, j]``."""
        raw = self.mix[...]
        return jnp.tril(raw) + jnp.eye(raw.shape[-1], dtype=raw.dtype)

    def mixed(self, given: jax.Array, before: jax.Array) -> jax.Array:
        """``b`` of the places after the root's, ``[R, B, N - 1]``; arguments as of ``refined``."""
        own = given + self.of_tokens(before)
        return jnp.einsum("rkj,rbj->rbk", self.mixer[:, 1:], own)

    def latent(self, mixed: jax.Array) -> jax.Array:
        """``[R, M]`` of ``b [R, M]``."""
        return mixed + self.down(swiglu_linear(mixed, self.gate, self.up))

    def say(self, latent: jax.Array) -> jax.Array:
        """What is added to the logits, float32 ``[M, V]``."""
        return product(self.lm_head.weight[...], latent, transpose_out=True).astype(jnp.float32)

    def refined(self, given: jax.Array, before: jax.Array) -> jax.Array:
        """What is added to the logits of the places after the root's, float32 ``[B, N - 1, V]``.

        Args:
          given: ``[R, B, N]``.
          before: int32 ``[B, N]``, the token before each place.
        """
        mixed = self.mixed(given, before)
        latent = self.latent(mixed.reshape(len(mixed), -1))
        return self.say(latent).reshape(len(before), mixed.shape[2], -1)


class XPressLayers(BlockLayers):
    """The weights of an XPress drafter: those of a block drafter, and of its refiner."""

    def __init__(self, config: XPressConfig, *, rngs, param_dtype=jnp.float32):
        super().__init__(config, rngs=rngs, param_dtype=param_dtype)
        self.refiner = Refiner(config, rngs=rngs, param_dtype=param_dtype)

    def say(self, latent):
        return self.refiner.say(latent)


def first_tokens(context) -> jax.Array:
    """The token before the root and the root, int32 ``[B, 2]``; the root twice if it is alone."""
    at = jnp.maximum(context.length[:, None] - jnp.asarray([2, 1]), 0)
    return jnp.take_along_axis(context.tokens, at, axis=1)


@dataclasses.dataclass(frozen=True)
class XPress(CorrectedBlock):
    """Drafts with XPress; ``params["drafter"]`` holds the weights of ``XPressLayers``.

    Attributes:
      in_turn: whether tokens are drafted from left to right, each given those before it, instead of
        from the last of ``num_passes`` passes over all places; None: in turn where they are drawn,
        from the last pass where the most probable ones are taken.
    """

    in_turn: bool | None = None
    module = XPressLayers
    name = "xpress"
    stored_settings = ("in_turn",)
    can_draw_from_part = False
    whole_block = True  # the mean and the mixer are over the places of a whole block

    def begin(self, heads, target_params, state, context) -> Drawing:
        """The memory of a path are the sums ``b`` of all places, as far as its tokens are known."""
        refiner: Refiner = heads.refiner
        hidden = self.places(heads, target_params, state, context)
        size, batch, places = hidden.shape
        drafting = hidden[:, :, 1 : 1 + self.depth]
        given = refiner.given(hidden)
        at_root = given[:, :, 0] + refiner.of_tokens(first_tokens(context)[:, 0])
        sums = refiner.mixer[:, :, 0][:, None] * at_root[:, :, None]
        return Drawing(
            hidden=given[:, :, 1 : 1 + self.depth],
            base=self.target.head(target_params, drafting.reshape(size, -1), batch),
            memory=sums.transpose(1, 0, 2).reshape(batch, 1, -1),
            chances=jnp.zeros((batch, 0), jnp.float32),
        )

    def step(self, heads, target_params, memory, tokens, hidden, depth):
        refiner: Refiner = heads.refiner
        own = hidden + refiner.of_tokens(tokens.reshape(-1))
        sums = memory.reshape(len(own), -1, memory.shape[1])  # [R, N, M]
        sums = sums + refiner.mixer[:, :, depth + 1][:, :, None] * own[:, None]
        return refiner.latent(sums[:, depth + 1]), sums.reshape(memory.shape), None

    def make_level(self, params, target_params, state, context):
        drawn = self.sibling_sampling != "top"
        if drawn if self.in_turn is None else self.in_turn:
            return super().make_level(params, target_params, state, context)
        heads = self.heads(params)

        def logits():
            hidden = self.places(heads, target_params, state, context)
            size, batch, places = hidden.shape
            masks = hidden[:, :, 1:].reshape(size, -1)
            base = self.target.head(target_params, masks, batch)
            given, first = heads.refiner.given(hidden), first_tokens(context)

            def refine(guess):
                before = jnp.concatenate([first, guess[:, :-1]], axis=1)
                return base + heads.refiner.refined(given, before)

            def on(carry):
                done, _, changed = carry
                return (done < self.config.num_passes - 1) & changed

            def once_more(carry):
                done, guess, _ = carry
                better = jnp.argmax(refine(guess), axis=-1).astype(jnp.int32)
                return done + 1, better, jnp.any(better != guess)

            guess = jnp.argmax(base, axis=-1).astype(jnp.int32)
            _, guess, _ = jax.lax.while_loop(on, once_more, (0, guess, jnp.bool_(True)))
            said = refine(guess) if self.config.num_passes else base
            return said[:, : self.depth]

        return independent_level(logits)
