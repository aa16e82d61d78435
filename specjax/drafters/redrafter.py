"""ReDrafter: a recurrent state over drafted tokens beside the target's last hidden state."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from ..models.layers import Linear, product
from ..sampling import drawing
from ..trees.topology import Beams, Topology
from .heads import HeadDrafter, states_of_parents


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReDrafterConfig:
    """The shape of a ReDrafter.

    Attributes:
      hidden_size: F, the target's.
      vocab_size: V.
      exit_size: of what the head's blocks work on; ``2 F``: the two states as they are, otherwise
        a projection goes before.
      num_layers: residual blocks of the head.
      recurrent: the state is a recurrent network's; otherwise the sum of the embeddings read.
      kept: all but the most likely tokens get no probability, as in the authors' code; 0 keeps all.
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
    """The weights. ``h`` is the target's hidden state, ``e_i`` the target's embedding of the token
    read at step ``i``, ``s_0 = 0``::

        s_{i+1} = SiLU(W e_i + U s_i + b),      x = [h; s_{i+1}] (or P [h; s_{i+1}] + c)
        then x + SiLU(V x + d) for each layer,  logits = H x

    States are feature-major: ``[F, M]`` over M columns.
    """

    def __init__(self, config: ReDrafterConfig, *, rngs: nnx.Rngs, param_dtype=jnp.float32):
        self.config = c = config
        common = dict(rngs=rngs, param_dtype=param_dtype)
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
        """The state behind a token whose embedding is ``embedded`` ``[F, M]``."""
        embedded = embedded.astype(state.dtype)
        if self.token is None:
            return state + embedded
        return jax.nn.silu(self.token(embedded) + self.state(state))

    def head(self, hidden: jax.Array, state: jax.Array) -> jax.Array:
        """What the LM head reads, ``[X, M]``."""
        x = jnp.concatenate([hidden, state], axis=0)
        x = x if self.projection is None else self.projection(x)
        for layer in self.layers:
            x = x + jax.nn.silu(layer(x))
        return x

    def say(self, x: jax.Array) -> jax.Array:
        """Logits float32 ``[M, V]`` of what ``head`` made."""
        return product(self.lm_head.weight[...], x, transpose_out=True).astype(jnp.float32)

    def states(self, hidden: jax.Array, embedded: Sequence[jax.Array]) -> list[jax.Array]:
        """What the LM head reads in the first steps, ``[X, M]`` each, with the embeddings of given
        tokens, ``[F, M]`` each, in place of drafted ones."""
        state, found = jnp.zeros_like(hidden), []
        for read in embedded:
            state = self.step(state, read)
            found.append(self.head(hidden, state))
        return found

    def logits(self, hidden, tokens, target, params, steps: int) -> jax.Array:
        """The first ``steps`` with the true tokens in place of drafted ones.

        Args:
          hidden: ``[B, T, F]``, the target's last hidden state, normed.
          tokens: int32 ``[B, T]`` at the same positions.
          target, params: the target and its weights, for embeddings.

        Returns:
          float32 ``[B, T, steps, V]``: at position t step i (from 0) is about token t + 2 + i,
          which stands in the row where t < T - 2 - i; beyond, the row's begin is read in its place.
        """
        batch, length, size = hidden.shape
        read = [jnp.roll(tokens, -(i + 1), axis=1) for i in range(steps)]
        read = [target.embed(params, own) for own in read]
        states = self.states(hidden.reshape(-1, size).T, read)
        logits = jnp.stack([self.say(state) for state in states], axis=1)
        return logits.reshape(batch, length, steps, -1)


@dataclasses.dataclass(frozen=True)
class ReDrafter(HeadDrafter):
    """Drafts with a ReDrafter, the tree of a beam search by default; ``params["drafter"]`` is the
    state of a ``ReDrafterHead``.

    ``target``: whose hidden state and embeddings are read.

    The authors accept, above temperature 0, the longest of the beams, each judged by drafts of its
    own, which shifts the law (their README says so). Here beams are what they are: candidates that
    the context determines, merged to one tree, of which the target's own draws pick a path.

    Lossless: yes; a beam search, or ``sibling_sampling="top"``, under ``greedy`` and
    ``delta``; static trees drawn (``iid``, ``distinct``), whose laws are stated,
    under ``rejection`` as well.

    References: Cheng et al., arXiv 2403.09919; github.com/apple/ml-recurrent-drafter.
    """

    module = ReDrafterHead
    name = "redrafter"

    @property
    def max_depth(self) -> None:
        """Any: one state goes on and on."""

    @property
    def default_topology(self) -> Topology:
        """4 beams of 5 tokens."""
        return Beams(4, 5)

    def make_level(self, params, target_params, state, context):
        model = self.heads(params)
        feature = state.feature.T  # [F, B]

        def level(states, grown, since):
            """``states``: of the nodes of each depth before this one."""
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
    """Logits ``[..., V]``, those below the ``count`` greatest (0: all) set to -inf."""
    if not 0 < count < logits.shape[-1]:
        return logits
    last = jnp.maximum(drawing.best(logits, count)[..., -1:], 0)
    least = jnp.take_along_axis(logits, last, axis=-1)
    return jnp.where(logits < least, -jnp.inf, logits)
