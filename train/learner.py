"""Online distillation: a drafter that learns from the requests that it serves.

While a request is decoded, the target's law (its most likely tokens) is recorded at each position
where a draft was *rejected*, or at each position that was verified. The target has computed these
laws anyway. Between requests the drafter is trained on them for a few steps, and drafts for the
next request with the new weights.

Lossless: yes. Weights change only between requests, so the law that a draft states is the law from
which it was drawn. Weights are arguments of the compiled loop, so new ones compile nothing.

References: Online Speculative Decoding, 2310.07177, algorithm 1. There the drafter may be updated
within a request; here it is not.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

import specjax
from specjax import trees
from specjax._internal.pytree import pytree_dataclass
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.state import result
from specjax.drafters import DraftModel
from specjax.drafters.base import ChainDrafter
from specjax.models.causal_lm import CausalLM, graph_definition
from specjax.models.lm import as_drafter
from specjax.types import Draft, Drafter, PyTree

from . import chunks, features, losses
from .config import ConfigError, OptimizerConfig
from .losses import TopLaws
from .optimizer import make_optimizer

ENDLESS = 2**30  # rounds of a burst, which ends when all rows have; steps of learning


@pytree_dataclass
class LawRecorderState:
    """The state of a ``LawRecorder``.

    Attributes:
      inner: the state of the inner drafter.
      laws: the target's law about the token after each position, leaves ``[B, L, ...]``.
      seen: bool ``[B, L]``, whether a law was recorded at the position.
    """

    inner: PyTree
    laws: TopLaws
    seen: jax.Array


@dataclasses.dataclass(frozen=True)
class LawRecorder(ChainDrafter):
    """Drafts what ``inner`` drafts, and records the target's laws.

    Attributes:
      inner: the drafter.
      top_k: the number of tokens that are kept of each law.
      keep: the positions whose laws are recorded. ``rejected``: those after which tokens were
        proposed and another one was emitted; ``judged``: all that were verified, also those of
        accepted tokens. The first token of a text, which no round emits, has none.

    Lossless: yes, as ``inner`` is.
    """

    num_draft: int = 0
    inner: Drafter = None
    top_k: int = 32
    keep: str = "rejected"
    reads_nodes = True

    def __post_init__(self):
        object.__setattr__(self, "num_draft", self.inner.num_draft)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def depth(self) -> int:
        return self.inner.depth

    @property
    def features(self):
        return self.inner.features

    def init(self, params, target_params, batch, capacity, inputs=None):
        return LawRecorderState(
            inner=self.inner.init(params, target_params, batch, capacity, inputs),
            laws=_no_laws((batch, capacity), self.top_k, jnp),
            seen=jnp.zeros((batch, capacity), bool),
        )

    def draft_step(self, params, target_params, state, context):
        draft, inner = self.inner.draft_step(params, target_params, state.inner, context)
        return draft, dataclasses.replace(state, inner=inner)

    def readout(self, draft, scores):
        return scores.logits, self.inner.readout(draft, scores)

    def sync(self, params, target_params, state, context, *, before="prompt"):
        inner = self.inner.sync(params, target_params, state.inner, context, before=before)
        return dataclasses.replace(state, inner=inner)

    def observe(self, params, target_params, state, segment):
        if segment.round is None:
            inner = self.inner.observe(params, target_params, state.inner, segment)
            return dataclasses.replace(state, inner=inner)
        draft, verdict, (logits, own) = segment.round
        inner = dataclasses.replace(segment, round=(draft, verdict, own))
        inner = self.inner.observe(params, target_params, state.inner, inner)

        rows, count = jnp.arange(logits.shape[0])[:, None], verdict.count[:, None]
        if self.keep == "judged":
            steps = jnp.arange(verdict.path.shape[1])[None]
            kept = steps <= count
        else:
            steps = jnp.maximum(count, 0)
            kept = (count >= 0) & _rejected(draft, verdict.path, segment.next, steps)
        law = losses.compress(logits[rows, verdict.path[rows, steps]], self.top_k)
        capacity = state.seen.shape[1]  # column L does not exist, so a write to it is dropped
        where = jnp.where(kept, segment.start[:, None] + steps, capacity)
        put = lambda old, new: old.at[rows, where].set(new, mode="drop")  # noqa: E731
        return LawRecorderState(
            inner=inner,
            laws=jax.tree.map(put, state.laws, law),
            seen=put(state.seen, True),
        )


def _no_laws(shape: tuple[int, ...], top_k: int, arrays) -> TopLaws:
    """Laws of zeros; ``arrays`` is ``numpy`` or ``jax.numpy``."""
    return TopLaws(
        ids=arrays.zeros((*shape, top_k), arrays.int32),
        logits=arrays.zeros((*shape, top_k), arrays.float32),
        rest=arrays.zeros(shape, arrays.float32),
    )


def _rejected(draft: Draft, path, emitted, steps):
    """Whether tokens were proposed below the node ``path[steps]`` and all of them were rejected.

    ``steps`` is int32 ``[B, 1]``, the result bool ``[B, 1]``.
    """
    node = jnp.take_along_axis(path, steps, axis=1)
    said = jnp.take_along_axis(emitted, steps, axis=1)
    below = trees.parents(draft) == node
    if draft.candidate is not None:
        below &= draft.candidate
    right = jnp.any(below & (draft.tokens == said), axis=1, keepdims=True)
    return jnp.any(below, axis=1, keepdims=True) & ~right


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearningConfig:
    """How a drafter learns from the requests that it serves."""

    updates: int = 4  # training steps after each request
    rows: int = 16  # rows per step, drawn from the buffer
    buffer: int = 128  # the last rows, which are kept to learn from
    keep: str = "rejected"  # learn where drafts were rejected, or wherever they were "judged"
    top_k: int = 32  # tokens that are kept of each of the target's laws
    divergence: str = "fkl"  # as in the recipe distill
    beta: float = 0.5  # of jsd
    mix: float = 0.5  # of kl_tv
    eta: float = 3.0  # of lk
    optimizer: OptimizerConfig = OptimizerConfig(
        name="adamw", adam_rate=1e-3, weight_decay=0.0, warmup=8, decay_share=0.0
    )

    def __post_init__(self):
        for name in ("updates", "rows", "buffer", "top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"learning.{name}={getattr(self, name)}; accepted: at least 1")
        if self.keep not in ("rejected", "judged"):
            raise ConfigError(f"learning.keep={self.keep!r}; accepted: 'rejected' or 'judged'")
        self.distance()

    def distance(self):
        """Returns the divergence ``D(p_logits, q_logits)``."""
        how = {name: getattr(self, name) for name in ("beta", "mix", "eta")}
        return losses.divergence(self.divergence, **how)


class Online:
    """A target with a draft model that learns from the requests that both decode.

    Requests of one shape share all compiled programs, before and after each update::

        online = Online(specjax.load("embedded"), specjax.load("embedded-draft"), capacity=128)
        for tokens, lengths in requests:
            out = online.serve(tokens, lengths, key=key, max_new_tokens=64)
            online.learn()

    Attributes:
      params: ``{"target": ..., "drafter": ...}``, the weights that the next request is served with.
      num_laws: positions in the buffer.
    """

    def __init__(
        self,
        lm: specjax.models.LM,
        draft: specjax.models.LM,
        *,
        capacity: int,
        num_draft: int = 3,
        learning: LearningConfig = LearningConfig(),
        seed: int = 0,
    ):
        """Makes a session.

        Args:
          lm: the target.
          draft: the draft model, which is trained.
          capacity: the tokens of the longest row, prompt included.
          num_draft: the number of tokens that are drafted in a round.
          learning: how the draft model learns.
          seed: decides which rows of the buffer are drawn.

        Raises:
          ValueError: the draft model cannot draft for ``lm``, or is not a decoder-only model.
        """
        model = as_drafter(lm, draft)
        if not isinstance(model, CausalLM) or model.quantized:
            raise ValueError(
                f"{draft.name} cannot be trained here: give a decoder-only model whose weights "
                "are not quantized"
            )
        if learning.top_k > lm.target.vocab_size:
            raise ConfigError(
                f"learning.top_k={learning.top_k}; accepted: 1 to {lm.target.vocab_size}, the "
                "vocabulary"
            )
        self.lm, self.capacity, self.learning, self._seed = lm, capacity, learning, seed
        self.drafter = LawRecorder(
            inner=DraftModel(num_draft=num_draft, model=model),
            top_k=learning.top_k,
            keep=learning.keep,
        )
        own = jax.tree.map(lambda x: jnp.array(x, jnp.float32), draft.params)
        self.params = {"target": lm.params, "drafter": own}
        self._optimizer = make_optimizer(learning.optimizer, steps=ENDLESS)
        self._moments = self._optimizer.init(own)
        shape = learning.buffer, capacity
        self._buffer = {
            "tokens": np.zeros(shape, np.int32),
            "laws": _no_laws(shape, learning.top_k, np),
            "seen": np.zeros(shape, bool),
        }
        self._num_rows = self._num_updates = 0  # since the beginning
        self._step = jax.jit(self._make_step(model.config))

    @property
    def state(self) -> dict:
        """The state from which a session is resumed: arrays by name, ``params`` the drafter's.

        The next request changes the arrays of the buffer in place.
        """
        return {
            "params": self.params["drafter"],
            "optimizer": self._moments,
            "buffer": self._buffer,
            "num_rows": self._num_rows,
            "num_updates": self._num_updates,
        }

    @state.setter
    def state(self, state: dict) -> None:
        self.params = {**self.params, "drafter": state["params"]}
        self._moments = state["optimizer"]
        self._buffer = jax.tree.map(lambda x: np.require(x, requirements="W"), state["buffer"])
        self._num_rows, self._num_updates = int(state["num_rows"]), int(state["num_updates"])

    @property
    def num_laws(self) -> int:
        return int(self._buffer["seen"].sum())

    def serve(self, tokens, lengths, *, key, max_new_tokens, sampling=specjax.Sampling(), stops=()):
        """Decodes a request as ``specjax.decode`` does, and records the target's laws.

        Returns:
          ``Decoded``.

        Raises:
          ValueError: as ``specjax.decode``.
        """
        target = self.lm.target
        request, capacity = prepare_inputs(
            target,
            self.drafter,
            tokens,
            lengths,
            key,
            max_new_tokens,
            sampling,
            self.capacity,
            stops,
        )
        state = loop.jit_start(target, self.drafter, "auto", capacity, self.params, request)
        state = loop.jit_burst(target, self.drafter, "auto", ENDLESS, self.params, state)
        laws, seen = state.drafter_state.laws, state.drafter_state.seen
        kept = jax.device_get({"tokens": state.tokens, "laws": laws, "seen": seen})
        rows = np.flatnonzero(kept["seen"].any(axis=1))
        places = (self._num_rows + np.arange(len(rows))) % self.learning.buffer
        for old, new in zip(jax.tree.leaves(self._buffer), jax.tree.leaves(kept), strict=True):
            old[places] = new[rows]
        self._num_rows += len(rows)
        return result(state)

    def learn(self) -> dict[str, float]:
        """Updates the drafter from the buffer; the next request uses the new weights.

        Returns:
          The means over the steps of ``loss``, ``gradient_norm`` and ``top_k_error`` (see
          ``losses.lump_error``); an empty dictionary if the buffer is empty.

        Raises:
          FloatingPointError: a loss that is not finite; the weights stay as they were.
        """
        filled = min(self._num_rows, self.learning.buffer)
        if not filled:
            return {}
        params, moments, found = self.params["drafter"], self._moments, []
        rng = np.random.default_rng([self._seed, self._num_updates])
        for picks in rng.integers(0, filled, (self.learning.updates, self.learning.rows)):
            batch = jax.tree.map(lambda x: x[picks], self._buffer)  # noqa: B023
            params, moments, metrics = self._step(params, moments, batch)
            found.append(metrics)
        means = {name: float(np.mean([row[name] for row in found])) for name in found[0]}
        if not np.isfinite([means["loss"], means["gradient_norm"]]).all():
            raise FloatingPointError(
                f"loss {means['loss']}: the drafter keeps the weights it had; lower "
                "learning.optimizer.adam_rate"
            )
        self.params, self._moments = {**self.params, "drafter": params}, moments
        self._num_updates += self.learning.updates
        return means

    def _make_step(self, config):
        graphdef, distance = graph_definition(config), self.learning.distance()
        model = CausalLM(config)

        def terms(table, states, _fixed, laws):
            q = chunks.logits_of(table, states, config.logit_softcap)
            p, q = losses.lump(laws, q)
            return {"loss": distance(p, q), "top_k_error": losses.lump_error(p, q)}

        def loss(params, batch):
            segments = jnp.zeros_like(batch["tokens"])  # the row of a request is one document
            layers = (config.num_layers,)
            states = features.hidden_states(graphdef, params, batch["tokens"], segments, layers)[0]
            weight = batch["seen"].astype(jnp.float32)
            table = model.head_table(params)
            summed, others = chunks.total(terms, table, states, None, batch["laws"], weight)
            count = jnp.maximum(jnp.sum(weight), 1.0)
            return summed / count, others["top_k_error"] / count

        def step(params, moments, batch):
            (value, error), slope = jax.value_and_grad(loss, has_aux=True)(params, batch)
            norm = optax.tree.norm(slope)
            updates, moments = self._optimizer.update(slope, moments, params)
            params = optax.apply_updates(params, updates)
            return params, moments, {"loss": value, "gradient_norm": norm, "top_k_error": error}

        return step
