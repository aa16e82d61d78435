"""Objectives and measures over next-token laws. All reductions are in float32.

``p`` is the target's law, ``q`` the drafter's; both come as logits ``[..., V]`` and each function
returns one number a position, ``[...]``. Speculative decoding accepts a drafted token with
probability ``sum_x min(p(x), q(x)) = 1 - TV(p, q)`` (2211.17192, Theorem 3.5), so total variation
is what the drafter is judged by; the others are easier to descend far from the optimum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _logs(logits: jax.Array) -> jax.Array:
    return jax.nn.log_softmax(logits.astype(jnp.float32))


def cross_entropy(q_logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """``-log q(token)`` in nats; ``tokens`` int ``[...]``."""
    return -jnp.take_along_axis(_logs(q_logits), tokens[..., None], axis=-1)[..., 0]


def fkl(p_logits, q_logits):
    """Forward KL, ``sum_x p log(p / q)``: the drafter covers all that the target may say."""
    log_p, log_q = _logs(p_logits), _logs(q_logits)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def rkl(p_logits, q_logits):
    """Reverse KL, ``sum_x q log(q / p)``: the drafter says only what the target may say."""
    return fkl(q_logits, p_logits)


def jsd(p_logits, q_logits, beta: float = 0.5):
    """Jensen-Shannon, ``beta KL(p | m) + (1 - beta) KL(q | m)`` with ``m = beta p + (1 - beta) q``.

    References: 2306.13649 (generalised JSD). ``beta`` lies strictly between 0 and 1.
    """
    log_p, log_q = _logs(p_logits), _logs(q_logits)
    log_m = jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
    return beta * jnp.sum(jnp.exp(log_p) * (log_p - log_m), axis=-1) + (1 - beta) * jnp.sum(
        jnp.exp(log_q) * (log_q - log_m), axis=-1
    )


def acceptance(p_logits, q_logits):
    """``sum_x min(p, q)``: the probability that a token drawn from ``q`` is accepted."""
    return jnp.sum(jnp.minimum(jnp.exp(_logs(p_logits)), jnp.exp(_logs(q_logits))), axis=-1)


def tvd(p_logits, q_logits):
    """Total variation, ``sum_x |p - q| / 2 = 1 - acceptance``."""
    return 1.0 - acceptance(p_logits, q_logits)


def negative_log_acceptance(p_logits, q_logits):
    """``-log sum_x min(p, q)``, floored at acceptance 1e-6 so that disjoint laws stay finite."""
    return -jnp.log(jnp.maximum(acceptance(p_logits, q_logits), 1e-6))


DIVERGENCES = {
    "fkl": fkl,
    "rkl": rkl,
    "jsd": jsd,
    "tvd": tvd,
    "nla": negative_log_acceptance,
}


def greedy_match(p_logits, q_logits):
    """1.0 where both laws have the same most likely token, else 0.0."""
    same = jnp.argmax(p_logits, axis=-1) == jnp.argmax(q_logits, axis=-1)
    return same.astype(jnp.float32)


def expected_tau(accepted: jax.Array, weight: jax.Array, num_draft: int):
    """Expected tokens of a round that starts at each position: ``1 + a_t + a_t a_{t+1} + ...``.

    Args:
      accepted: ``[B, T]``, the probability that a draft at the position is accepted given that
        all before it were.
      weight: ``[B, T]``, zero where a position must not be part of a round.
      num_draft: number of products; the 1 is the correction or bonus token.

    Returns:
      ``(tau [B, W], weight [B, W])`` for the ``W = T - num_draft + 1`` starts whose round fits.
    """
    windows = accepted.shape[-1] - num_draft + 1
    alive = fits = tau = jnp.ones(accepted.shape[:-1] + (windows,))
    for depth in range(num_draft):
        alive = alive * accepted[..., depth : depth + windows]
        fits = fits * weight[..., depth : depth + windows]
        tau = tau + alive
    return tau, fits
