"""Which entries of a cache a drafted token sees between the sinks and the window.

The chosen entries lie where those of further sinks would (``kv_cache.recent``), since every drafted
token sees them: a part with this cache is one with ``sinks + budget`` sinks.
"""

from __future__ import annotations

import abc
import numbers

import jax
import jax.numpy as jnp
from flax import nnx

from ..types import PyTree
from .config import ATTENTION, DecoderConfig
from .decoder import abstract
from .layers import turns

NEVER = 2**30  # rounds


class ChosenEntries(abc.ABC):
    """A way to choose entries: ``top_chunks`` or ``snap_kv``.

    Attributes:
      budget: how many tokens are chosen by each layer and key/value head.
      every: the number of rounds from one choice to the next; ``NEVER``: there is one choice, as
        soon as the text is longer than sinks, budget and window.
      num_queries: O, the tokens whose queries choose: the last committed ones, or with ``NEVER``
        the last ones of the prompt.
    """

    budget: int
    every: int
    chunk = 1  # tokens that are chosen together, of which the budget is a multiple

    @property
    @abc.abstractmethod
    def num_queries(self) -> int: ...

    def check_budget(self, context: int | None, window: int, sinks: int) -> None:
        """Raises ValueError for a budget that, with the sinks and the window, would hold a context.

        Args:
          context: the length of the model's context in tokens; None: any.
          window, sinks: of the small cache in which the chosen tokens stand too.
        """
        if context is None or window + sinks + self.budget < context:
            return
        most = (context - 1 - window - sinks) // self.chunk * self.chunk
        wanted = f"give a budget of at most {most}"
        if self.chunk > 1:
            wanted += f", a multiple of chunk={self.chunk}"
        if most < 1:
            wanted = "sinks and window leave no room for one: give a smaller window or fewer sinks"
        raise ValueError(
            f"budget={self.budget}: the context of the model is {context} tokens, and the budget, "
            f"window={window} and sinks={sinks} would hold all of it; {wanted}"
        )

    @abc.abstractmethod
    def choose(
        self,
        config: DecoderConfig,
        params: PyTree,
        cache: PyTree,
        states: jax.Array,
        last: jax.Array,
        begin: jax.Array,
        length: jax.Array,
        layers: tuple[int, ...],
    ) -> jax.Array:
        """Chooses entries.

        Args:
          config: of the decoder with a small cache, among whose sinks those of the budget are
            counted.
          params: its weights.
          cache: of the whole decoder, with the entries of all tokens.
          states: ``[B, O, F]``, the inputs of ``layers``, side by side, at the tokens whose queries
            choose.
          last: int32 ``[B]``, the position of the last of these tokens; the others stand before it.
          begin: int32 ``[B]``, the first position whose state is there; earlier ones ask nothing.
          length: int32 ``[B]``, the number of entries in the cache. Where sinks, budget and window
            hold them all, the choice is arbitrary.
          layers: those that choose.

        Returns:
          int32 ``[B, layers, K, budget]``, the positions of the tokens chosen.
        """


def check_sizes(chosen, names: tuple[str, ...]) -> None:
    """Raises ValueError for a field that is no number from 1."""
    for name in names:
        size = getattr(chosen, name)
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
            raise ValueError(f"{name}={size!r}: it must be a whole number from 1")


def choosing_layers(config: DecoderConfig, without: tuple[frozenset[str], ...]) -> tuple[int, ...]:
    """The layers that choose: those whose attention runs and sees all tokens."""
    return tuple(
        i
        for i, left_out in enumerate(without)
        if ATTENTION not in left_out and not config.is_local(i)
    )


def queries(config: DecoderConfig, params, states: jax.Array, position: jax.Array, layers):
    """The queries of O tokens a row, of these layers: ``[B, K, E, G, O]`` each.

    Args:
      params: the weights of the decoder.
      states: ``[B, O, F]``, what these layers read, side by side.
      position: int32 ``[B, O]``, where the tokens stand.
    """
    model, (batch, count, _) = nnx.merge(abstract(config)[0], params), states.shape
    inputs = jnp.split(states.astype(model.norm.weight[...].dtype), len(layers), axis=2)
    found = []

    def keep(query, *fresh):
        found.append(query)
        return jnp.zeros_like(query), None

    for i, x in zip(layers, inputs, strict=True):
        rope = None
        if config.positions == "rope":
            rope = turns(config, position, not config.is_local(i), x.dtype)
        block = model.blocks[i]
        block.attention(block.enter(x.reshape(batch * count, -1).T)[0], rope, batch, keep)
    return found


def last_states(before: jax.Array, features: jax.Array, num: jax.Array) -> jax.Array:
    """The states of the last O committed tokens, ``[B, O, F]``.

    Args:
      before: ``[B, O, F]``, those before a segment.
      features: ``[B, T, F]`` of the segment.
      num: int32 ``[B]``, how many of its tokens were committed.
    """
    both = jnp.concatenate([before, features.astype(before.dtype)], axis=1)
    where = jnp.maximum(num, 0)[:, None] + jnp.arange(before.shape[1], dtype=jnp.int32)
    return jnp.take_along_axis(both, where[..., None], axis=1)
