"""The interface of a backend: its operations, and its properties.

Shapes: ``[out, in]`` is a weight as safetensors files hold it; ``M`` columns (tokens) of
activations, feature-major: ``[in, M]``. Letters of ``attend`` are those of ``types``, with ``K``
key/value heads, ``G`` query heads that share one, ``E`` features of a head, ``M`` own entries.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import quantized

PREFILL_CHUNK = 256  # prompt tokens fed at once: bounds the memory of a long prompt


class Backend(abc.ABC):
    """The operations and preferences of one kind of device. Hashable, without state.

    ``specjax.kernels.current()`` returns the one for the devices in use. All backends return the
    same results up to rounding; a backend never changes which numbers a weight stands for.
    """

    name: str = ""  # for records of measurements

    # ---------------------------------------------------------------- operations

    def dot(self, weight, x: jax.Array, transpose_out: bool = False) -> jax.Array:
        """``weight [out, in] @ x [in, M]``.

        Args:
          weight: floats, ``quantized.Quantized`` (eight or four bits), or a ``qwix.QArray`` (fp8).
          x: ``[in, M]``.
          transpose_out: whether to return ``[M, out]``, the form in which logits are read.

        Returns:
          ``[out, M]``, in the type of ``x`` and the weight.
        """
        return self.dots((weight,), x, transpose_out)[0]

    @abc.abstractmethod
    def dots(
        self, weights: Sequence, x: jax.Array, transpose_out: bool = False
    ) -> tuple[jax.Array, ...]:
        """``dot`` of several weights with the same ``x``, in one call where that is cheaper."""

    @abc.abstractmethod
    def einsum_float32(self, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """``jnp.einsum`` of two arrays of any floating type, summed and returned in float32."""

    @abc.abstractmethod
    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        own_mask: jax.Array,
        prefix: tuple[jax.Array, ...] | None = None,
        length: jax.Array | None = None,
        choice: jax.Array | None = None,
        *,
        window: int | None = None,
        sinks: int = 0,
        positions: jax.Array | None = None,
        softcap: float | None = None,
        bias: tuple | None = None,
        causal: bool = False,
        rounded: bool = False,
    ) -> jax.Array:
        """Softmax attention of a few nodes over a cache and over each other.

        Its cost follows the tokens in use, not the capacity of the cache.

        Args:
          query: ``[B, K, E, G, N]``, already rotated, not scaled.
          key, value: ``[B, K, M, E]``, entries of this draft: earlier nodes, if any, then these N.
          own_mask: bool ``[B or 1, M, N]``; ``own_mask[b, m, n]``: node ``n`` sees entry ``m``.
          prefix: ``(keys, values)``, each ``[B, K, S, E]``, or None where nothing is committed.
            They may be codes in eight bits: int8 with the scales of keys and of values after them,
            float32 ``[B, K, S, 1]``; or uint8, the bytes of float8 e4m3, without scales.
          length: int32 ``[B]``, how many tokens of a row are committed: the slots of the prefix
            that a node sees, unless there is a window.
          choice: int32 scalar, index into ``attention.prefix_sizes(S)`` of a size that holds every
            row.
          window: the prefix is a ring, position ``p`` in slot ``p mod S``, ``S >= window``; a node
            sees the ``window`` positions up to its own. The caller applies it to ``own_mask``.
          sinks: with a window, A: the first A slots hold the first A positions, which every node
            sees, and position ``p >= A`` is in slot ``A + (p - A) mod (S - A)``, ``S - A >=
            window``.
          positions: int32 ``[B, N]`` of the nodes; needed with a window.
          softcap: bound on the scores, or None.
          bias: None, or what is added to the scores: float32 ``[B or 1, K, G, N, M]`` for the own
            entries, and ``[B or 1, K, G, N, S]`` (or None, without a prefix) for the slots.
          causal: whether ``M = N`` and no node sees an entry after its own, which saves half of
            the work where there is no prefix. ``own_mask`` still holds what a node sees.
          rounded: whether numbers may be rounded to 16 bits where a prompt is read, as those of
            models with quantized weights may.

        Returns:
          ``[B, K, E, G, N]``.
        """

    @abc.abstractmethod
    def argmax(self, x: jax.Array) -> jax.Array:
        """Index of the first maximum over the last axis, int32; -1 where that is not finite.

        NaN among the numbers is passed over, or makes the result -1.
        """

    @abc.abstractmethod
    def likeliest(self, x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """Indices of the ``count`` greatest numbers over the last axis, int32, in descending order,
        the first of equal ones first; and ``log_softmax(x)`` there, float32.

        -1 and -inf where a number is not finite, and for all where a number is NaN or +inf. Nothing
        is said of derivatives.
        """

    @abc.abstractmethod
    def norm(
        self,
        x: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None = None,
        *,
        eps: float,
        centered: bool = False,
        plus_one: bool = False,
    ) -> jax.Array:
        """``x`` over the root of its mean square along axis 0, computed in float32.

        Args:
          x: ``[F, ...]``.
          weight, bias: ``[F]``; factors of the features, and what is added to them.
          eps: added to the mean square.
          centered: whether the mean is subtracted before (a layer norm; otherwise an RMS norm).
          plus_one: whether one is added to the weights; the result is then rounded once, as
            Gemma's, and otherwise before the product with the weights as well.

        Returns:
          ``[F, ...]``, in the type of ``x``.
        """

    def swiglu(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """``silu(gate) * up``, of one shape and type."""
        return jax.nn.silu(gate) * up

    def swiglu_dots(self, gate, up, x: jax.Array) -> jax.Array:
        """``swiglu`` of the products of two weights, as ``dot`` takes them, with ``x [in, M]``."""
        return self.swiglu(*self.dots((gate, up), x))

    def columns(self, table, index: jax.Array, dtype) -> jax.Array:
        """Rows of a table of embeddings, as columns.

        Args:
          table: ``[V, H]``, as ``dot`` takes weights.
          index: int32 ``[n]``.
          dtype: of the result.

        Returns:
          ``[H, n]``.
        """
        return quantized.take(table, index, dtype).T

    def write(
        self, slots: Sequence, entries: Sequence, path: jax.Array, where: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Caches with the entries of a path in some of their slots, in the memory of the caches
        where every read of them comes before.

        Args:
          slots: caches, each ``[B, K, S, E]``, of any types and sizes but for B and S.
          entries: for each cache ``[B, K, N, E]``, of its type.
          path: int32 ``[B, T]``, in ``[0, N)``: the entries to be written, one after the other.
          where: int32 ``[B, T]``, the slot of each of them, none twice in a row; S: it is not
            written.

        Returns:
          the caches, each ``[B, K, S, E]``.
        """
        return tuple(_scattered(*pair, path, where) for pair in zip(slots, entries, strict=True))

    def materialize(self, x: jax.Array) -> jax.Array:
        """``x``, computed once however often it is used, where XLA would compute it each time."""
        return x

    def fence(self, x: jax.Array) -> jax.Array:
        """``x``, with a barrier where XLA would fold what follows into the product before it."""
        return x

    def store(self, params: Any) -> Any:
        """Weights in the types in which ``dot`` reads them fastest; their numbers stay the same."""
        return params

    def settle(self, params: Any) -> Any:
        """Weights in memory that is fast to read, where the system has such; their numbers and
        types stay the same."""
        return params

    # ---------------------------------------------------------------- preferences

    def matrix_dtype(self, stored: jnp.dtype, dtype: jnp.dtype) -> jnp.dtype:
        """The type in memory of a matrix that a checkpoint holds in ``stored``, in a model that
        computes in ``dtype``: another one if it holds the same numbers and ``dot`` reads it
        faster."""
        del stored
        return dtype

    def param_dtype(self, stored: jnp.dtype) -> jnp.dtype:
        """The type of weights in memory by default, for a checkpoint that is mostly ``stored``."""
        return stored

    def loops_over_experts(self) -> bool:
        """Whether a loop that reads the chosen experts one by one is cheapest for few tokens."""
        return False

    def prefill_chunk(self, weights: Sequence) -> int:
        """Prompt tokens to feed at once to a model with these weights, in the forms that ``dot``
        takes."""
        del weights
        return PREFILL_CHUNK

    def serving_chunk(self) -> int:
        """Prompt tokens to feed at once where prompts arrive one by one."""
        return PREFILL_CHUNK

    def threads_wanted(self, num_devices: int) -> int | None:
        """Threads that ``num_devices`` devices of one process need; None: it does not matter."""
        del num_devices
        return None

    def devices_share_cores(self) -> bool:
        """Whether several devices are virtual ones, which share the same cores."""
        return False


def _scattered(slots, entries, path, where):
    """``Backend.write`` of one cache."""
    batch, heads, capacity, size = slots.shape
    # [B * K, S, E]: with one row and one node, XLA copies a 4-D cache before it scatters
    rows, where = jnp.arange(batch * heads)[:, None], jnp.repeat(where, heads, axis=0)
    if entries.shape[2] > 1:
        entries = jnp.take_along_axis(entries, path[:, None, :, None], axis=2, mode="clip")
    flat = slots.reshape(batch * heads, capacity, size)
    entries = entries.reshape(batch * heads, -1, size)
    return flat.at[rows, where].set(entries, mode="drop").reshape(slots.shape)
