"""Attention of a few new nodes to a committed prefix and to their own ancestors, on a mesh.

Letters of shapes besides those of ``types``: ``K`` key/value heads, ``G`` query heads for each of
them, ``E`` the features of a head, ``M`` nodes of the draft that have entries.
"""

from __future__ import annotations

from .. import kernels, sharding
from ..sharding import DATA


def attend_spread(
    query,
    key,
    value,
    own_mask,
    *,
    axis=None,
    prefix=None,
    length=None,
    choice=None,
    positions=None,
    bias=None,
    **settings,
):
    """Calls ``kernels.current().attend``, on each device of the mesh in use, if any.

    Each device has its own rows (over ``data``) and heads (over ``axis``; None: all heads), and
    no part of another device's cache. Where a single key head serves all queries (latent
    attention), every device has that head and a part of the queries.

    Args:
      axis: the axis of the mesh over which heads are spread, or None.

    All other arguments and the result are those of ``kernels.Backend.attend``.
    """

    def own(query, key, value, own_mask, prefix, length, choice, positions, bias):
        more = dict(length=length, choice=choice, positions=positions, bias=bias, **settings)
        return kernels.current().attend(query, key, value, own_mask, prefix, **more)

    row, heads = (DATA,), (DATA, axis)
    queries = heads
    if query.shape[1] == 1 and axis:
        heads, queries = row, (DATA, None, None, axis)
    mask_rows = row if len(own_mask) == len(query) else ()
    bias_heads = heads if bias is None or len(bias[0]) == len(query) else (None, axis)
    specs = [queries, heads, heads, mask_rows, heads, row, (), row, bias_heads]
    run = sharding.locally(own, specs, queries)
    return run(query, key, value, own_mask, prefix, length, choice, positions, bias)


def within(mask, positions, here, window, sinks=0):
    """``mask`` bool ``[B or 1, M, N]`` without the entries, at ``positions`` int32 ``[1 or B, M]``,
    that nodes at ``here`` int32 ``[B, N]`` do not see for a window beside sinks."""
    if window is None or positions.shape[1] <= window:
        return mask
    seen = positions[:, :, None] > here[:, None, :] - window
    return mask & (seen | (positions < sinks)[:, :, None] if sinks else seen)
