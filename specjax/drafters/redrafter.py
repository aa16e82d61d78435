"""ReDrafter: a recurrent state over drafted tokens, beside the target's last hidden state.

    s_{i+1} = SiLU(W e_i + U s_i + b),      x = [h; s_{i+1}] (or P [h; s_{i+1}] + c)
    then x + SiLU(V x + d) for each layer,  logits = H x

``h`` is the hidden state whose logits produced the root, ``e_i`` the target's embedding of the
token that step ``i`` reads (the root first), and ``s_0 = 0``. Drafts are the beams of a search.

Lossless: yes; a beam search, or ``sibling_sampling="top"``, under ``greedy`` and ``delta``; static
trees that are drawn (``iid``, ``distinct``), whose laws are stated, also under ``rejection``. The
authors' own rule above temperature 0, which keeps the longest accepted beam, is not lossless and
not here.

Example::

    heads = specjax.load_drafter("path/to/redrafter", lm)
    specjax.generate(lm, "...", drafter=heads, drafting=specjax.Drafting(tree="beams:4x5"))

References: Cheng et al., arXiv 2403.09919; github.com/apple/ml-recurrent-drafter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..models.layers import Linear, product
from ..sampling import drawing
from ..trees.grown import Beams
from ..trees.topology import Topology
from .heads import HeadDrafter, states_of_parents


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReDrafterConfig:
    """The shape of a ReDrafter.

    Attributes:
      hidden_size: F, that of the target.
      vocab_size: V, that of the target.
      exit_size: X, the width of the head's blocks; unless it is ``2 F``, there is a projection
        ``P`` before them.
      num_layers: residual blocks of the head.
      recurrent: whether the state is that of a recurrent network, as above; else it is the sum of
        the embeddings.
      kept: how many of the most likely tokens keep their probability, as in the authors' code; the
        others get none. 0: all do.
    """

    hidden_size: int
    vocab_size: int
    exit_size: int
    num_layers: int = 2
    recurrent: bool = True
    kept: int = 50

    def __post_init__(self):
        for name in ("hidden_size", "vocab_size", "exit_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: it must be at least 1")
        if min(self.num_layers, self.kept) < 0:
            raise ValueError(f"num_layers={self.num_layers}, kept={self.kept}: at least 0")


class ReDrafterHead(nnx.Module):
    """The weights of a ReDrafter, by the names of the module's equations.

    States are feature-major: ``[F, M]`` over M columns.
    """

    def __init__(self, config: ReDrafterConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32):
        self.config = c = config
        common: dict[str, Any] = dict(rngs=rngs, param_dtype=param_dtype)
        size, both = c.hidden_size, 2 * c.hidden_size
        self.token = Linear(size, size, **common) if c.recurrent else None
        self.state = Linear(size, size, bias=True, **common) if c.recurrent else None
        projected = c.exit_size != both
        self.projection = Linear(both, c.exit_size, bias=True, **common) if projected else None
        layers = range(c.num_layers)
        self.layers = nnx.List(
            [Linear(c.exit_size, c.exit_size, bias=True, **common) for _ in layers]
        )
        self.lm_head = Linear(c.exit_size, c.vocab_size, **common)

    def step(self, state: jax.Array, embedded: jax.Array) -> jax.Array:
        """The state after a token whose embedding is ``embedded`` ``[F, M]``."""
        embedded = embedded.astype(state.dtype)
        if self.token is None or self.state is None:
            return state + embedded
        return jax.nn.silu(self.token(embedded) + self.state(state))

    def head(self, hidden: jax.Array, state: jax.Array) -> jax.Array:
        """The input ``[X, M]`` of the LM head."""
        x = jnp.concatenate([hidden, state], axis=0)
        x = x if self.projection is None else self.projection(x)
        for layer in self.layers:
            x = x + jax.nn.silu(layer(x))
        return x

    def say(self, x: jax.Array) -> jax.Array:
        """Logits float32 ``[M, V]`` of an output of ``head``."""
        return product(self.lm_head.weight[...], x, transpose_out=True).astype(jnp.float32)

    def states(self, hidden: jax.Array, embedded: Sequence[jax.Array]) -> list[jax.Array]:
        """The inputs ``[X, M]`` of the LM head in the first steps, with given tokens, whose
        embeddings are ``[F, M]``, in place of drafted ones."""
        state, found = jnp.zeros_like(hidden), []
        for read in embedded:
            state = self.step(state, read)
            found.append(self.head(hidden, state))
        return found

    def logits(self, hidden, tokens, target, params, steps: int) -> jax.Array:
        """The logits of the first ``steps``, with the true tokens in place of drafted ones.

        Args:
          hidden: ``[B, T, F]``, the target's last hidden state, normed.
          tokens: int32 ``[B, T]`` at the same positions.
          target: the target, whose embeddings are used.
          params: the weights of the target.

        Returns:
          float32 ``[B, T, steps, V]``: at position t, step i (from 0) predicts token t + 2 + i.
          Only positions t < T - 2 - i count: after them, tokens from the row's begin are read.
        """
        batch, length, size = hidden.shape
        read = [jnp.roll(tokens, -(i + 1), axis=1) for i in range(steps)]
        read = [target.embed(params, own) for own in read]
        states = self.states(hidden.reshape(-1, size).T, read)
        logits = jnp.stack([self.say(state) for state in states], axis=1)
        return logits.reshape(batch, length, steps, -1)


@dataclasses.dataclass(frozen=True)
class ReDrafter(HeadDrafter):
    """Drafts with a ReDrafter; ``params["drafter"]`` holds the weights of a ``ReDrafterHead``.

    Any topology of ``trees.topology`` can be drafted; the usual one is a beam search. Beams are
    candidates that the context determines, merged to one tree, through which the target's own
    draws pick a path.
    ``target``: the target whose hidden state and embeddings are read.
    """

    module = ReDrafterHead
    name = "redrafter"
    reads_last = True

    @property
    def max_depth(self) -> None:
        """None: the recurrent state reaches any depth."""

    @property
    def default_topology(self) -> Topology:
        """4 beams of 5 tokens."""
        return Beams(4, 5)

    def make_level(self, params, target_params, state, context):
        model = self.heads(params)
        feature = state.feature.T  # [F, B]

        def level(states, grown, since):
            """``states``: those of the nodes of each depth before this one."""
            tokens = grown.tokens[:, since:]
            before = (
                states_of_parents(states[-1], grown, since) if states else jnp.zeros_like(feature)
            )
            after = model.step(before, self.target.embed(target_params, tokens))
            hidden = jnp.repeat(feature, tokens.shape[1], axis=1)
            logits = kept(model.say(model.head(hidden, after)), self.config.kept)
            return logits.reshape(*tokens.shape, -1), (*states, after)

        return level, ()


def kept(logits: jax.Array, count: int) -> jax.Array:
    """Logits ``[..., V]``, of which all but the ``count`` greatest (0: none) are set to -inf."""
    if not 0 < count < logits.shape[-1]:
        return logits
    last = jnp.maximum(drawing.best(logits, count)[..., -1:], 0)
    least = jnp.take_along_axis(logits, last, axis=-1)
    return jnp.where(logits < least, -jnp.inf, logits)
