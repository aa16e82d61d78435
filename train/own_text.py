"""Text that a model in training writes itself, with the weights of the current step."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import specjax
from specjax.models import DecoderConfig
from specjax.models.causal_lm import CausalLM

from .step import Keys


def order_of(keys: Keys) -> jax.Array:
    """The order in which the rows of a batch are taken, int32 ``[B]``; the first are continued.

    It follows the numbers of the rows, since their places differ between processes, and begins one
    row later in each step: a mixture has its sources at the same places of every batch.
    """
    return jnp.roll(jnp.argsort(keys.index), -jnp.asarray(keys.number))


def make_writer(
    shape: DecoderConfig, end_of_text: int, length: int, prompt_tokens: int, temperature: float
):
    """Returns ``write(params, tokens [B, length + 1], keys [B]) -> (tokens, weight [B, length])``.

    The model continues the first ``prompt_tokens`` of each row, greedily at temperature 0; only its
    own tokens have a weight. No gradient flows through what is written.
    """
    model = CausalLM(shape)

    def write(params, tokens, keys):
        out = specjax.decode(
            model,
            specjax.drafters.Plain(),
            {"target": jax.lax.stop_gradient(params)},
            tokens[:, :prompt_tokens],
            jnp.full((tokens.shape[0],), prompt_tokens, jnp.int32),
            key=keys,
            max_new_tokens=length + 1 - prompt_tokens,
            sampling=specjax.Sampling(temperature=temperature),
            capacity=length + 1,
            stops=[end_of_text],
        )
        place = jnp.arange(length + 1)
        written = (place >= prompt_tokens) & (place < out.lengths[:, None])
        kept = jnp.where(place < out.lengths[:, None], out.tokens, end_of_text)
        return kept, written[:, 1:].astype(jnp.float32)

    return write
