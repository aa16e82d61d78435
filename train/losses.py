"""Objectives and measures over next-token laws. All reductions are in float32.

``p`` is the target's law and ``q`` the drafter's. Unless stated otherwise, functions take logits
``[..., V]`` of both and return one number for each position, ``[...]``, divergences in nats.
Speculative decoding accepts a drafted token with probability ``sum_x min(p(x), q(x)) =
1 - TV(p, q)`` (2211.17192, Theorem 3.5), so total variation is the measure of a drafter; the other
divergences are easier to descend far from the optimum.

Cross-entropy on text that the target wrote is sequence-level distillation (Seq-KD, 1606.07947): a
choice of data, not another formula. With a large vocabulary, logits of all positions at once take
too much memory: ``chunks.py`` computes losses for a few positions at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax._internal.pytree import pytree_dataclass

from .config import ConfigError

# The least logit and logarithm of a probability: masked logits (-inf) give a great loss, not NaN.
FLOOR = -1e5


def _logs(logits: jax.Array) -> jax.Array:
    wide = logits.astype(jnp.float32)
    return jnp.maximum(jax.nn.log_softmax(wide), FLOOR)


def cross_entropy(q_logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """``-log q(token)`` in nats, float32 ``[...]``; ``tokens`` are integers ``[...]``."""
    wide = q_logits.astype(jnp.float32)
    said = jnp.take_along_axis(wide, tokens[..., None], axis=-1)[..., 0]
    return jnp.minimum(jax.nn.logsumexp(wide, axis=-1) - said, -FLOOR)


def unlikelihood(q_logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """``-log(1 - q(token))`` in nats, float32 ``[...]``; ``tokens`` are integers ``[...]``.

    It is computed from the log-odds of the token, so that its gradient is finite where q is 1.
    """
    wide = q_logits.astype(jnp.float32)
    chosen = tokens[..., None] == jnp.arange(wide.shape[-1])
    said = jnp.sum(jnp.where(chosen, wide, 0.0), axis=-1)
    others = jax.nn.logsumexp(jnp.where(chosen, FLOOR, wide), axis=-1)
    return jax.nn.softplus(said - others)


def soft_cross_entropy(p: jax.Array, q_logits: jax.Array) -> jax.Array:
    """``-sum_x p(x) log q(x)`` in nats; ``p`` are probabilities, float32 ``[..., V]``."""
    wide = q_logits.astype(jnp.float32)
    return jax.nn.logsumexp(wide, axis=-1) - jnp.sum(p * jnp.maximum(wide, FLOOR), axis=-1)


def overlap(p: jax.Array, q_logits: jax.Array) -> jax.Array:
    """``sum_x min(p(x), q(x))``; ``p`` are probabilities, float32 ``[..., V]``."""
    return jnp.sum(jnp.minimum(p, jax.nn.softmax(q_logits.astype(jnp.float32))), axis=-1)


def _kl(log_a, log_b):
    return jnp.sum(jnp.exp(log_a) * (log_a - log_b), axis=-1)


def fkl(p_logits, q_logits):
    """Forward KL, ``sum_x p log(p / q)``: q should cover every token that p gives probability."""
    return _kl(_logs(p_logits), _logs(q_logits))


def rkl(p_logits, q_logits):
    """Reverse KL, ``sum_x q log(q / p)``: q should give no probability where p gives none."""
    return fkl(q_logits, p_logits)


def jsd(p_logits, q_logits, beta: float = 0.5):
    """Jensen-Shannon, ``beta KL(p | m) + (1 - beta) KL(q | m)`` with ``m = beta p + (1 - beta) q``.

    ``beta`` lies strictly between 0 and 1.

    References: generalised JSD, 2306.13649.
    """
    log_p, log_q = _logs(p_logits), _logs(q_logits)
    log_m = jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _log_acceptance(log_p, log_q):
    return jax.nn.logsumexp(jnp.minimum(log_p, log_q), axis=-1)


def acceptance(p_logits, q_logits):
    """``sum_x min(p, q)``: the probability that a token drawn from ``q`` is accepted."""
    return jnp.exp(_log_acceptance(_logs(p_logits), _logs(q_logits)))


def tvd(p_logits, q_logits):
    """Total variation, ``sum_x |p - q| / 2 = 1 - acceptance``."""
    return 1.0 - acceptance(p_logits, q_logits)


def negative_log_acceptance(p_logits, q_logits):
    """``-log sum_x min(p, q)``, computed by a log-sum-exp.

    The gradient is that of total variation divided by the acceptance, so it does not vanish where
    the laws hardly overlap.
    """
    return -_log_acceptance(_logs(p_logits), _logs(q_logits))


def kl_tv(p_logits, q_logits, mix: float = 0.5):
    """``mix * KL(p | q) + (1 - mix) * TV(p, q)``."""
    return mix * fkl(p_logits, q_logits) + (1 - mix) * tvd(p_logits, q_logits)


def lk(p_logits, q_logits, eta: float = 3.0):
    """``w KL(p | q) + (1 - w) TV(p, q)`` with ``w = exp(-eta * acceptance)``.

    It is close to KL where the laws hardly overlap and to total variation where they nearly agree.
    No gradient flows into ``w``, which is computed for each position.

    References: LK losses, 2602.23881.
    """
    distance = tvd(p_logits, q_logits)
    weight = jax.lax.stop_gradient(jnp.exp(-eta * (1.0 - distance)))
    return weight * fkl(p_logits, q_logits) + (1 - weight) * distance


DIVERGENCES = {
    "fkl": fkl,
    "rkl": rkl,
    "jsd": jsd,
    "tvd": tvd,
    "nla": negative_log_acceptance,
    "kl_tv": kl_tv,
    "lk": lk,
}


def divergence(name: str, *, beta: float = 0.5, mix: float = 0.5, eta: float = 3.0) -> Callable:
    """Returns a divergence ``D(p_logits, q_logits)``.

    Args:
      name: a key of ``DIVERGENCES``.
      beta: the parameter of ``jsd``.
      mix: the parameter of ``kl_tv``.
      eta: the parameter of ``lk``.

    Raises:
      ConfigError: the name is unknown or a number is out of range.
    """
    if name not in DIVERGENCES:
        raise ConfigError(f"divergence={name!r}; known: {', '.join(DIVERGENCES)}")
    if not 0 < beta < 1:
        raise ConfigError(f"beta={beta}; accepted: above 0, below 1 (the limits are fkl and rkl)")
    if not 0 <= mix <= 1:
        raise ConfigError(f"mix={mix}; accepted: 0 (tvd) to 1 (fkl)")
    if not 0 <= eta < float("inf"):
        raise ConfigError(f"eta={eta}; accepted: at least 0, and finite")
    own = {"jsd": {"beta": beta}, "kl_tv": {"mix": mix}, "lk": {"eta": eta}}.get(name, {})
    return functools.partial(DIVERGENCES[name], **own)


@pytree_dataclass
class TopLaws:
    """The target's laws, compressed to their most likely tokens.

    Attributes:
      ids: int32 ``[..., K]``, the most likely tokens.
      logits: float ``[..., K]``, their logits.
      rest: float32 ``[...]``, the log-sum-exp of the other tokens' logits; ``FLOOR`` if there are
        no others.
    """

    ids: jax.Array
    logits: jax.Array
    rest: jax.Array


def _rest(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """The log-sum-exp, float32 ``[...]``, of ``logits [..., V]`` without ``ids [..., K]``."""
    others = jnp.put_along_axis(
        logits.astype(jnp.float32), ids, -jnp.inf, axis=-1, inplace=False, mode="drop"
    )
    most = jax.lax.stop_gradient(jnp.maximum(jnp.max(others, axis=-1, keepdims=True), FLOOR))
    total = jnp.sum(jnp.exp(others - most), axis=-1)
    found = jnp.log(jnp.where(total > 0, total, 1.0)) + most[..., 0]
    return jnp.where(total > 0, found, FLOOR)


def compress(logits: jax.Array, k: int) -> TopLaws:
    """Keeps the ``k`` greatest of ``logits [..., V]``, and the sum of all others.

    Raises:
      ConfigError: ``k`` is not between 1 and V.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise ConfigError(f"top_k={k}; accepted: 1 to {logits.shape[-1]}, the vocabulary")
    best, ids = jax.lax.top_k(logits.astype(jnp.float32), k)
    return TopLaws(ids=ids.astype(jnp.int32), logits=best, rest=_rest(logits, ids))


def lump(laws: TopLaws, q_logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lumps all tokens that were not kept into one, so that any divergence can be computed.

    Lumping never raises a divergence of ``DIVERGENCES``, except for the mixture ``lk``. It changes
    none if the drafter has the target's proportions among the lumped tokens. ``acceptance`` of the
    result is too great by at most ``lump_error``.

    Args:
      laws: the target's laws.
      q_logits: ``[..., V]``, the drafter's logits.

    Returns:
      Logits float32 ``[..., K + 1]`` of p and of q over the kept tokens and the lump.
    """
    own = jnp.take_along_axis(q_logits.astype(jnp.float32), laws.ids, axis=-1)
    q = jnp.concatenate([own, _rest(q_logits, laws.ids)[..., None]], axis=-1)
    p = jnp.concatenate([laws.logits.astype(jnp.float32), laws.rest[..., None]], axis=-1)
    return p, q


def lump_error(p: jax.Array, q: jax.Array) -> jax.Array:
    """The bound, ``[...]``, by which lumped laws (see ``lump``) may overstate ``acceptance``.

    Total variation is understated by at most the same: the bound is ``min(p, q)`` of the lump.
    """
    return jnp.exp(jnp.minimum(_logs(p)[..., -1], _logs(q)[..., -1]))


def greedy_match(p_logits, q_logits):
    """1.0 where both laws have the same most likely token, else 0.0."""
    same = jnp.argmax(p_logits, axis=-1) == jnp.argmax(q_logits, axis=-1)
    return same.astype(jnp.float32)


def expected_tau(accepted: jax.Array, weight: jax.Array, num_draft: int):
    """Expected tokens of a round that starts at each position: ``1 + a_t + a_t a_{t+1} + ...``.

    Args:
      accepted: ``[B, T]``, the probability that the draft at a position is accepted, given that
        all drafts before it were.
      weight: ``[B, T]``, zero where a position must not be part of a round.
      num_draft: the number of products; the 1 is the correction or bonus token.

    Returns:
      ``(tau [B, W], weight [B, W])`` for the ``W = T - num_draft + 1`` starts whose rounds fit.
    """
    windows = accepted.shape[-1] - num_draft + 1
    alive = fits = tau = jnp.ones(accepted.shape[:-1] + (windows,))
    for depth in range(num_draft):
        alive = alive * accepted[..., depth : depth + windows]
        fits = fits * weight[..., depth : depth + windows]
        tau = tau + alive
    return tau, fits
