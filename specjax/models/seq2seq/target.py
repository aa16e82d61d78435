"""An encoder–decoder as a target: the encoder's memory beside the decoder's cache.

``inputs`` of ``decode`` and of ``init`` are a mapping of arrays that lead with B::

    {"tokens": int32 [B, S], "lengths": int32 [B]}   # T5: padded on the right with anything
    {"features": float [B, bins, frames]}            # Whisper: a whole window, 30 seconds
    {"memory": float [B, S, H], "lengths": int32 [B]}   # the output of this model's encoder

The mapping may have ``"begin"``, int32 ``[B]``, the lengths of the decoder's prompts: the tokens
that ``begin_suppress_tokens`` names are then not generated as the first token. For tokens that are
never generated, ``generate`` adds a bias; with ``decode`` pass ``Sampling(logit_bias=)``.

The prompts of the decoder are ``tokens`` of ``decode``. A draft model gets the same ``inputs`` and
encodes them by itself. If its encoder is that of the target (distil-whisper), pass both models the
``memory`` that ``encode`` returns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from ... import sharding
from ..._internal.pytree import pytree_dataclass
from ...sampling.distribution import IMPOSSIBLE
from ...sharding import DATA
from ...types import Draft, PyTree, Scores, Verdict
from .. import kv_cache
from ..causal_lm import layout, spread_logits, write
from ..checkpoint_target import CheckpointTarget
from .config import EncoderDecoderConfig
from .encoder_decoder import abstract

KINDS = (("memory", "lengths"), ("tokens", "lengths"), ("features",))
BEGIN = "begin"  # an optional key of inputs: int32 [B], the lengths of the decoder's prompts


@pytree_dataclass
class Cache:
    """The decoder's cache with the memory.

    Attributes:
      slots: the decoder's own keys and values, the only part that is ever written.
      memory: for each layer the keys and values of the memory, each ``[B, K, S, E]``.
      source: int32 ``[B]``, the number of valid slots of the memory.
      begin: int32 ``[B]``, the position of the first generated token, or None.
    """

    slots: PyTree
    memory: PyTree
    source: jax.Array
    begin: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Seq2SeqLM(CheckpointTarget):
    """A ``Target`` for T5 and Whisper; ``params`` is the NNX state of ``EncoderDecoder``.

    ``init`` runs the encoder once, ``verify`` only reads, and ``commit`` writes the decoder's
    slots. If ``inputs`` have the key ``"begin"``, the first generated token is none of the config's
    ``begin_suppress_ids``.

    Attributes:
      config: the shape of the model.
      rows, quantized, axis: as of ``CheckpointTarget``.
    """

    config: EncoderDecoderConfig

    @property
    def max_positions(self) -> int | None:
        return self.config.max_positions

    @property
    def reads(self) -> str:
        """The input of the encoder: ``"tokens"`` or ``"features"``."""
        return self.config.reads

    def sub_network(self, *, exit=None, skip=(), window=None, sinks=0, switched=False):
        """Raises ValueError: an encoder-decoder model drafts with no part of its layers."""
        raise ValueError(
            f"sub_network: {self.config.model_type!r} is an encoder-decoder model, each of whose "
            "decoder layers reads the encoder by cross-attention, and no part of such a model "
            "drafts; take a draft model that reads the same inputs, or drafter='ngram'"
        )

    def check_inputs(self, batch: int, inputs) -> None:
        """Raises ValueError for inputs that the encoder cannot read.

        Values are checked only where they are known, which is outside of ``jit``.
        """
        c, name = self.config, self.config.model_type
        accepted = {
            "tokens": '{"tokens": int32 [B, S], "lengths": int32 [B]}',
            "features": f'{{"features": float32 [B, {c.num_features}, {2 * (c.max_source or 0)}]}}',
        }[c.reads]
        way_out = f"give inputs={accepted}"
        if inputs is None:
            raise ValueError(
                f"inputs=None: {name!r} is an encoder-decoder model and there is nothing for its "
                f"encoder to read; {way_out}"
            )
        given = set(inputs) - {BEGIN} if isinstance(inputs, Mapping) else None
        kinds = [set(k) for k in KINDS if k[0] in ("memory", c.reads)]
        if given is None or given not in kinds:
            what = sorted(given) if given is not None else type(inputs).__name__
            raise ValueError(f"inputs: {what} is nothing that {name!r} reads; {way_out}")
        shapes = {key: np.shape(value) for key, value in inputs.items()}
        wanted = {
            "features": (batch, c.num_features, 2 * (c.max_source or 0)),
            "lengths": (batch,),
            BEGIN: (batch,),
        }
        for key, shape in shapes.items():
            if key in ("tokens", "memory"):
                size = shape[1] if len(shape) > 1 else 0
                rest = (c.hidden_size,) if key == "memory" else ()
                wanted[key] = (batch, max(size, 1), *rest)
            if shape != wanted[key]:
                raise ValueError(
                    f"inputs: {key} has shape {list(shape)}, expected {list(wanted[key])} for a "
                    f"batch of {batch}; {way_out}"
                )
        if "lengths" in inputs:
            self._check_lengths(inputs)

    def _check_lengths(self, inputs) -> None:
        lengths, tokens = (_known(inputs.get(key)) for key in ("lengths", "tokens"))
        if lengths is None:
            return
        source = inputs["tokens"] if "tokens" in inputs else inputs["memory"]
        size = np.shape(source)[1]
        way_out = f"give integers from 1 to {size}"
        if not np.issubdtype(lengths.dtype, np.integer) or not 1 <= lengths.min():
            raise ValueError(
                f"inputs: lengths={lengths}: every row needs at least one position; {way_out}"
            )
        if lengths.max() > size:
            raise ValueError(
                f"inputs: lengths: {lengths.max()} positions in a row of {size}; {way_out}"
            )
        if tokens is None:
            return
        used = tokens[np.arange(size) < lengths[:, None]]
        wrong = not np.issubdtype(tokens.dtype, np.integer)
        if wrong or used.min() < 0 or used.max() >= self.config.vocab_size:
            raise ValueError(
                f"inputs: tokens from {used.min()} to {used.max()} ({tokens.dtype}): ids are "
                f"integers below {self.config.vocab_size}; was another tokenizer used?"
            )

    def encode(self, params, inputs) -> PyTree:
        """Returns ``inputs`` with the encoder's output instead of its input; a pure function."""
        memory, lengths = self._model(params).encode(inputs, self.axis)
        return {k: v for k, v in inputs.items() if k == BEGIN} | dict(
            memory=memory, lengths=lengths
        )

    def init(self, params, batch: int, capacity: int, inputs=None) -> PyTree:
        self.check_inputs(batch, inputs)
        c, model = self.config, self._model(params)
        self._check_mesh()
        memory, lengths = model.encode(inputs, self.axis)
        dtype = self.activation_dtype(params)
        begin = inputs.get(BEGIN)
        slots = kv_cache.init([capacity] * c.num_layers, batch, c.num_heads, c.head_dim, dtype)

        def spread(x):
            return sharding.spread(x, DATA, self.axis, None, None)

        return Cache(
            slots=jax.tree.map(spread, slots),
            memory=jax.tree.map(spread, model.remember(memory)),
            source=lengths,
            begin=None if begin is None else jnp.asarray(begin, jnp.int32),
        )

    def verify(
        self, params, cache, draft: Draft, *, features=(), since=0, entries=None, logits=True
    ) -> Scores:
        model, batch = self._model(params), draft.tokens.shape[0]
        positions, sees, length = layout(draft)
        hidden, tapped, fresh = model.hidden(
            draft.tokens[:, since:],
            positions,
            sees[:, :, since:],
            cache.memory,
            cache.source,
            prefix=cache.slots,
            length=length,
            earlier=entries,
            taps=features,
            axis=self.axis,
        )
        out = None
        if logits:
            out = spread_logits(model.head(hidden, batch), self.vocab_size, self.axis)
            if cache.begin is not None and self.config.begin_suppress_ids:
                first = positions[:, since:, None] == cache.begin[:, None, None] - 1
                never = np.isin(np.arange(self.vocab_size), self.config.begin_suppress_ids)
                out = jnp.where(first & never, IMPOSSIBLE, out)
        return Scores(logits=out, features=tapped, entries=fresh)

    def commit(self, cache, entries, start, verdict: Verdict) -> PyTree:
        slots = write(cache.slots, entries, start, verdict, self.axis)
        return dataclasses.replace(cache, slots=slots)

    def _model(self, params):
        return nnx.merge(abstract(self.config)[0], params)


encode = jax.jit(Seq2SeqLM.encode, static_argnums=0)


def same_encoder(target: Seq2SeqLM, params, drafter: Seq2SeqLM, drafter_params) -> bool:
    """Whether two models have the same encoder, bit by bit, so that they can share a memory.

    Matrices may be stored in different types, as are those that bfloat16 represents exactly and
    that are computed in float32: the type of the activations is that of all other weights.
    """
    ours, theirs = (_reading_part(*pair) for pair in ((target, params), (drafter, drafter_params)))
    leaves, others = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    alike = jax.tree.structure(ours) == jax.tree.structure(theirs) and all(
        x.shape == y.shape and (x.ndim > 1 or x.dtype == y.dtype)
        for x, y in zip(leaves, others, strict=True)
    )
    return alike and all(map(_equal, leaves, others))


def _reading_part(model: Seq2SeqLM, params):
    """Everything on which the memory depends."""
    embedding = params["embedding"] if model.reads == "tokens" else ()
    same = ("reads", "norm_eps", "activation", "num_heads", "num_buckets", "max_distance")
    config = tuple(getattr(model.config, name) for name in same)
    return {repr(config): (nnx.to_pure_dict(params["encoder"]), embedding)}


@functools.partial(jax.jit)
def _equal_on_device(x, y):
    return jnp.all(x == y)


def _equal(x, y) -> bool:
    return x is y or bool(_equal_on_device(x, y))


def _known(x) -> np.ndarray | None:
    """The values of ``x``; None where they are not known, as under ``jit``."""
    if x is None or isinstance(x, Tracer):
        return None
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return None
    return np.asarray(x)
