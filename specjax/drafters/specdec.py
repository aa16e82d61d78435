"""SpecDec: a small encoder-decoder that fills in all masks of a block in one pass.

    memory = encoder(source)
    block  = [e(root), e(mask), ... e(mask)]     at the positions root, root + 1, ...
    logits of the j-th drafted token = head(decoder(block | text before the root, memory)_j)

The source is what the target's encoder reads; for a decoder-only target (``source`` above 0) it is
the end of the prompt, and the drafter's own text begins with the last token of the prompt. The
encoder is deep and runs once, the decoder is shallow. The tokens of a block attend to each other in
both directions, to the text before the root and to the memory. Tokens of the text see none after
them, so their keys and values are computed once: each round first reads what the last one
committed, as many tokens a pass as a round can commit, then fills in its block. A prompt
of the decoder, which encoder-decoder models may be given, is read in the same way before the first
draft.

Lossless: yes, under ``greedy`` and ``delta``; with ``sibling_sampling="iid"`` or ``"distinct"``
also under ``rejection`` (each token is drawn from the law of its position, which reads no drafted
token). The paper's own verification is the rule ``approximate-tolerance``, which is not.

Example::

    lm = specjax.load("google/flan-t5-xl")
    heads = specjax.load_drafter("runs/specdec/model", lm)
    specjax.generate(lm, "translate English to German: ...", drafter=heads)

Differs from the authors' code: there every token of the text sees the block, and the whole text is
computed again in each round; a mask is a copy of the source by a learned softmax over its
positions, here it is a token; positions are added again before each layer, here they are those of
the target's family (T5's relative ones, both ways).

References: SpecDec, arXiv 2203.16487; github.com/hemingkx/SpecDec.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .._internal.optional import required
from .._internal.pytree import pytree_dataclass
from ..models import kv_cache
from ..models.seq2seq.config import EncoderDecoderConfig
from ..models.seq2seq.encoder_decoder import EncoderDecoder
from ..models.seq2seq.relative_positions import spread_bias
from ..types import PyTree, Verdict
from .heads import HeadDrafter, independent_level


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecDecConfig:
    """The shape of a SpecDec drafter.

    Attributes:
      network: the shape of its encoder and decoder.
      num_heads: k, the masks of a block.
      mask_token: the id whose embedding stands for a token to be drafted.
      source: how many of the last tokens of the prompt the encoder reads, for a decoder-only
        target; 0: it reads what the target's encoder reads.
    """

    network: EncoderDecoderConfig
    num_heads: int
    mask_token: int
    source: int = 0

    def __post_init__(self):
        if self.num_heads < 1:
            raise ValueError(f"num_heads={self.num_heads}: a block has at least one mask")
        if self.source < 0:
            raise ValueError(f"source={self.source}: it must be at least 0")
        if not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(
                f"mask_token={self.mask_token}: the drafter's embedding table has "
                f"{self.vocab_size} rows"
            )

    @property
    def hidden_size(self) -> int:
        """The width of the drafter's own states."""
        return self.network.hidden_size

    @property
    def vocab_size(self) -> int:
        """V, the tokens of the target."""
        return self.network.vocab_size

    @property
    def reads(self) -> str | None:
        """What the target's encoder must read; None: the target has no encoder."""
        return None if self.source else self.network.reads


class SpecDecLayers(EncoderDecoder):
    """The weights of a SpecDec drafter: an encoder and a decoder that sees later places too."""

    def __init__(self, config: SpecDecConfig, *, rngs, param_dtype=jnp.float32):
        super().__init__(config.network, rngs=rngs, param_dtype=param_dtype)

    def _bias(self, positions, keys, axis):
        if keys is None:
            return None
        table = required(self.relative_bias, "relative_bias")[...]
        return spread_bias(table, self.config, positions, keys, axis, True)


@pytree_dataclass
class SpecDecState:
    """The state between rounds.

    Attributes:
      cache: keys and values of the decoder's layers; slot ``i`` has those of the i-th token of the
        drafter's text.
      memory: keys and values that they have of the source.
      source: int32 ``[B]``, the number of positions of the memory that are seen.
      filled: int32 ``[B]``, how many tokens of the text are in the cache.
      begin: int32 ``[B]``, the length of the prompt that was encoded; 0: none was, or the source is
        not the prompt.
    """

    cache: PyTree
    memory: PyTree
    source: jax.Array
    filled: jax.Array
    begin: jax.Array


@dataclasses.dataclass(frozen=True)
class SpecDec(HeadDrafter):
    """Drafts with SpecDec; ``params["drafter"]`` holds the weights of ``SpecDecLayers``.

    A block has ``config.num_heads`` masks; a draft of fewer tokens is its beginning.

    Raises:
      ValueError: the target has no encoder, or one that reads something else than the drafter's;
        or it has one, and the drafter would read the prompt.
    """

    layer: int | None = 0  # no hidden state of the target is read
    module = SpecDecLayers
    name = "specdec"
    reads_last = True
    serves_encoders = True

    def __post_init__(self):
        super().__post_init__()
        ours, theirs = self.config.reads, self.target.reads
        if ours != theirs:
            kinds = {None: "a prompt alone", "tokens": "tokens", "features": "features"}
            raise ValueError(
                f"specdec: the drafter is for targets that read {kinds[ours]}, and this target "
                f"reads {kinds[theirs]}: give source=0 for a target with an encoder that reads "
                "what the drafter's reads, and source above 0 for a decoder-only target"
            )

    @property
    def features(self) -> tuple[int, ...]:
        return ()

    def init(self, params, target_params, batch, capacity, inputs=None):
        network, c = self.heads(params), self.config.network
        none = jnp.zeros((batch,), jnp.int32)
        if self.config.source:
            memory, source = jnp.zeros((batch, self.config.source, c.hidden_size)), none
        elif inputs is None or "memory" in inputs:
            raise ValueError(
                "inputs: a SpecDec drafter has an encoder of its own, which reads tokens or "
                "features and not the memory of another encoder; give inputs with "
                f'"{self.config.reads}"'
            )
        else:
            memory, source = network.encode(inputs)
        dtype = self.dtype_of(params)
        slots = [capacity] * c.num_layers
        return SpecDecState(
            cache=kv_cache.init(slots, batch, c.num_heads, c.head_dim, dtype),
            memory=network.remember(memory),
            source=source,
            filled=none,
            begin=none,
        )

    def draft_step(self, params, target_params, state, context):
        network = self.heads(params)
        if self.config.source:
            state = self._encode_prompt(network, state, context)
        state = self._read_text(network, state, context)
        return super().draft_step(params, target_params, state, context)

    def make_level(self, params, target_params, state, context):
        def say():
            network, root = self.heads(params), context.root[:, None]
            masks = ((0, 0), (0, self.config.num_heads))
            tokens = jnp.pad(root, masks, constant_values=self.config.mask_token)
            start = context.length - 1 - self._origin(state)
            hidden, _, _ = network.hidden(
                tokens,
                start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32),
                jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool),
                state.memory,
                state.source,
                prefix=state.cache,
                length=start,
            )
            places = hidden.reshape(len(hidden), *tokens.shape)[:, :, 1 : self.depth + 1]
            return network.head(places.reshape(len(hidden), -1), len(tokens))

        return independent_level(say)

    def observe(self, params, target_params, state, segment):
        return state  # it reads the text when it drafts

    def rewind(self, state, length):
        there = jnp.maximum(length - 1 - self._origin(state), 0)
        return dataclasses.replace(state, filled=jnp.minimum(state.filled, there))

    def _origin(self, state) -> jax.Array:
        """int32 ``[B]``, where in the target's text the drafter's begins."""
        return jnp.maximum(state.begin - 1, 0)

    def _encode_prompt(self, network, state, context) -> SpecDecState:
        """Encodes the prompts of rows in which they are new; the memory is copied only then.

        A branch alone would copy the memory in each round, a loop alone would encode in each round:
        XLA computes what does not depend on the loop's state before the loop, though it never runs.
        """
        begin, size = required(context.begin, "begin"), self.config.source

        def stale(state):
            return state.begin != begin

        def encode(state):
            rows, count = stale(state), jnp.minimum(begin, size)
            where = (begin - count)[:, None] + jnp.arange(size, dtype=jnp.int32)
            tokens = jnp.take_along_axis(context.tokens, where, axis=1, mode="clip")
            memory, _ = network.encode({"tokens": tokens, "lengths": count})

            def chosen(new, old):
                return jnp.where(
                    rows.reshape(-1, *[1] * (old.ndim - 1)), new.astype(old.dtype), old
                )

            return dataclasses.replace(
                state,
                memory=jax.tree.map(chosen, network.remember(memory), state.memory),
                source=chosen(count, state.source),
                filled=jnp.where(rows, 0, state.filled),
                begin=begin,
            )

        def any_stale(state):
            return jnp.any(stale(state))

        def body(state):
            return jax.lax.cond(any_stale(state), encode, lambda state: state, state)

        return jax.lax.while_loop(any_stale, body, state)

    def _read_text(self, network, state, context) -> SpecDecState:
        """Reads what is lacking of the text before the root, in rows that draft."""
        chunk = min(self.depth + 1, context.tokens.shape[1])
        steps = jnp.arange(chunk, dtype=jnp.int32)
        origin = self._origin(state)
        until = jnp.where(context.budget > 0, context.length - 1 - origin, 0)

        def lacking(state):
            return jnp.maximum(until - state.filled, 0)

        def read(state):
            where, num = state.filled[:, None] + steps, jnp.minimum(lacking(state), chunk)
            tokens = jnp.take_along_axis(
                context.tokens, origin[:, None] + where, axis=1, mode="clip"
            )
            _, _, entries = network.hidden(
                tokens,
                where,
                jnp.triu(jnp.ones((chunk, chunk), bool))[None],  # [key, query]
                state.memory,
                state.source,
                prefix=state.cache,
                length=state.filled,
            )
            path = jnp.broadcast_to(steps, tokens.shape)
            verdict = Verdict(path=path, count=num - 1, token=num)
            cache = kv_cache.commit(state.cache, entries, state.filled, verdict)
            return dataclasses.replace(state, cache=cache, filled=state.filled + num)

        return jax.lax.while_loop(lambda state: jnp.any(lacking(state) > 0), read, state)
