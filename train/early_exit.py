"""LayerSkip: a target whose first layers predict, for ``drafter="self:exit=E"``.

Two things are added to next-token cross-entropy. *Layer dropout*: in each row, layer ``l`` of L is
left out with probability ``S(t) * (exp(l ln 2 / (L - 1)) - 1) * dropout``, more often the later it
stands; ``S(t) = exp(t ln 2 / (T - 1)) - 1`` grows over the steps ``t`` of T, or is 1. *Early-exit
loss*: the target's own norm and head predict from the output of layers before the last, too::

    loss = sum over l of w(l, t) CE(head(norm(h_{l+1})))       w = C e / sum of C e
    e(l) = scale * (0 + 1 + ... + l) for l < L - 1,   e(L - 1) = L - 1 + scale * (0 + ... + L - 2)

The curriculum C(l, t) says which exits take part: ``rotational``, every ``rotation``-th one, and
others in the next step; ``gradual``, one more every T / (2 L) steps, from the last layer down;
``all``. The last layer always takes part.

The paper's sums give the first layer no weight and early ones little, which suits a model of dozens
of layers. In one of few layers an exit that pays is among the first: ``weights="linear"`` takes
``e(l) = scale * (l + 1)`` and ``e(L - 1) = L``, ``"equal"`` takes ``scale`` and 1 (as torchtune
does), and ``exits`` names the layers after which the model shall draft; the others are left out.

Differs from the paper: rows of one step are dropped independently of the number that is left.

References: LayerSkip, arXiv 2404.16710, sections 4.1.1 and 4.1.2.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from .config import ConfigError

CURRICULA = ("rotational", "gradual", "all")
WEIGHTS = ("sum", "linear", "equal")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyExitConfig:
    """LayerSkip's recipe; off by default."""

    scale: float = 0.0  # weight of early exits in the loss (the paper: 0.1 to 1); 0: none take part
    dropout: float = 0.0  # how often the last layer is left out (the paper: 0.1, 0.2); 0: never
    curriculum: str = "rotational"  # which exits take part in a step; or "gradual", "all"
    rotation: int = 0  # of "rotational": an exit takes part every so many steps; 0: one a step
    weights: str = "sum"  # how the weights of exits grow with depth; or "linear", "equal"
    exits: tuple[int, ...] = ()  # numbers of layers after which exits are trained; []: all
    growing: bool = True  # dropout grows over the run, as from random weights; else it is constant

    def __post_init__(self):
        if self.scale < 0 or not math.isfinite(self.scale):
            raise ConfigError(f"early_exit.scale={self.scale}; accepted: at least 0")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"early_exit.dropout={self.dropout}; accepted: from 0 to below 1")
        if self.curriculum not in CURRICULA:
            raise ConfigError(
                f"early_exit.curriculum={self.curriculum!r}; accepted: {', '.join(CURRICULA)}"
            )
        if self.rotation < 0:
            raise ConfigError(f"early_exit.rotation={self.rotation}; accepted: at least 0")
        if self.weights not in WEIGHTS:
            raise ConfigError(
                f"early_exit.weights={self.weights!r}; accepted: {', '.join(WEIGHTS)}"
            )
        if self.exits and self.scale == 0:
            raise ConfigError(
                f"early_exit.exits={list(self.exits)} and early_exit.scale=0: no exit is trained; "
                "give a scale above 0, or leave the exits out"
            )

    @property
    def used(self) -> bool:
        """Whether anything differs from plain pretraining."""
        return self.scale > 0 or self.dropout > 0

    def check(self, layers: int) -> None:
        """Raises ConfigError for a model of so few layers that there is no early exit, and for
        exits that it does not have or that have no weight."""
        if self.used and layers < 2:
            raise ConfigError(
                f"model.num_layers={layers}: early exits need at least 2 layers; set "
                "early_exit.scale=0 and early_exit.dropout=0"
            )
        wrong = [exit for exit in self.exits if not 1 <= exit < layers]
        if wrong or len(set(self.exits)) < len(self.exits):
            raise ConfigError(
                f"early_exit.exits={list(self.exits)}; accepted: numbers of layers from 1 to "
                f"{layers - 1}, each once"
            )
        if self.weights == "sum" and 1 in self.exits:
            raise ConfigError(
                "early_exit.exits: the exit after the first layer has no weight under "
                "early_exit.weights='sum'; set early_exit.weights to 'linear' or 'equal'"
            )


def scales(layers: int, scale: float, weights: str = "sum") -> np.ndarray:
    """e(l), float64 ``[L]``: the weights of all exits before the curriculum; ``weights``: see
    ``EarlyExitConfig``."""
    if weights != "sum":
        grown = np.arange(1.0, layers + 1) if weights == "linear" else np.ones(layers)
        return grown * np.append(np.full(layers - 1, scale), 1.0)
    sums = np.cumsum(np.arange(layers))
    found = scale * sums.astype(float)
    found[-1] = layers - 1 + (scale * sums[-2] if layers > 1 else 0)
    return found


def exits(config: EarlyExitConfig, layers: int, step, steps: int):
    """Which exits take part in a step.

    Args:
      step: int32 scalar, from 0.
      steps: of the run.

    Returns:
      ``(layers int32 [E], weights float32 [E + 1])``: the layers before the last one whose exits
      are computed, and the weights of their losses and, at the end, of that of the last layer. The
      weights sum to 1; a layer that does not take part has weight 0.
    """
    numbers = jnp.asarray([exit - 1 for exit in sorted(config.exits)] or np.arange(layers - 1))
    worth = jnp.asarray(scales(layers, config.scale, config.weights), jnp.float32)
    count = len(numbers)
    every = min(config.rotation or count, count)
    if config.scale == 0:
        chosen, there = jnp.zeros((0,), jnp.int32), jnp.zeros((0,), bool)
    elif config.curriculum == "rotational":
        index = step % every + every * jnp.arange(-(-count // every))
        chosen, there = numbers[jnp.minimum(index, count - 1)], index < count
    else:
        since = 0.5 * (layers - numbers) / layers * steps
        chosen, there = numbers, (step >= since) | (config.curriculum == "all")
    own = jnp.where(there, worth[chosen], 0.0)
    weights = jnp.concatenate([own, worth[-1:]])
    return chosen.astype(jnp.int32), weights / jnp.sum(weights)


def dropped(config: EarlyExitConfig, layers: int, step, steps: int) -> jax.Array:
    """float32 ``[L]``: how probably each layer is left out of a row in a step."""
    depth = jnp.exp(jnp.arange(layers) * math.log(2) / (layers - 1)) - 1
    grown = jnp.exp(step * math.log(2) / max(steps - 1, 1)) - 1 if config.growing else 1.0
    return grown * depth * config.dropout


def gates(config: EarlyExitConfig, layers: int, step, steps: int, keys) -> jax.Array | None:
    """float32 ``[L, 2, B]``: 0 for both sublayers of a layer that is left out of a row, else 1.

    ``keys``: of the rows ``[B]``, see ``step.Keys``. None where nothing is ever left out.
    """
    if not config.dropout:
        return None
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (layers,)))(keys)  # [B, L]
    kept = uniform >= dropped(config, layers, step, steps)
    return jnp.broadcast_to(kept.T[:, None], (layers, 2, len(kept))).astype(jnp.float32)
