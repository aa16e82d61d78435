"""A drafter that reads the last token of a prompt alone is spared the others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pairs import CONFIG

from specjax.decoding import prefill
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Adaptive
from specjax.drafters.base import ChainDrafter
from specjax.drafters.heads import HeadDrafter
from specjax.drafters.hydra import Hydra, HydraConfig
from specjax.drafters.medusa import Medusa, MedusaConfig
from specjax.models import Decoder
from specjax.models.causal_lm import CausalLM
from specjax.sampling.distribution import Sampling

pytestmark = pytest.mark.usefixtures("quick_compilation")
SHAPE = dataclasses.replace(CONFIG, vocab_size=64, num_layers=2, window=6)
SIZES = dict(hidden_size=SHAPE.hidden_size, vocab_size=SHAPE.vocab_size, num_heads=1)
LENGTHS = np.asarray([1, 2, 4, 5, 6, 11])
TOKENS = np.random.default_rng(0).integers(1, 64, (6, 11), np.int32)


@dataclasses.dataclass(frozen=True)
class Spied(CausalLM):
    """Notes of each pass that is traced how many nodes it has, and whether features are asked."""

    passes: tuple = dataclasses.field(default=(), compare=False)

    def verify(self, params, cache, draft, *, features=(), **more):
        self.passes[0].append((draft.num_nodes, bool(features)))
        return super().verify(params, cache, draft, features=features, **more)


class Whole(Medusa):
    reads_last = False


def begun(kind, more=()):
    """The state after the prompts, read 4 tokens at a time, and the passes; ``more``: tokens that
    are put after each of them."""
    target = Spied(SHAPE, passes=([],))
    drafter = kind(config=MedusaConfig(**SIZES), target=target)
    params = {"target": nnx.to_pure_dict(nnx.state(Decoder(SHAPE, rngs=nnx.Rngs(0))))}
    params["drafter"] = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), nnx.to_pure_dict(drafter.shapes)
    )

    def request(tokens, lengths):
        key, sampling = jax.random.key(0), Sampling()
        return prepare_inputs(target, drafter, tokens, lengths, key, 5, sampling, 24, ())[0]

    objects = target, drafter, "auto"
    run = jax.jit(functools.partial(prefill.start, *objects, 24, chunk=4))
    state, passes = run(params, request(TOKENS, LENGTHS)), [*target.passes[0]]
    if more:
        put = np.broadcast_to(np.asarray(more, np.int32), (6, len(more)))
        run = jax.jit(functools.partial(prefill.extend, *objects))
        state = run(params, state, request(put, np.full(6, len(more))))
    return state, passes


@pytest.mark.parametrize("more", [(), (3,), (3, 9, 2)])
def test_its_last_state_and_the_cache_are_what_they_are_if_it_is_shown_all(more):
    (mine, few), (whole, all_of_them) = begun(Medusa, more), begun(Whole, more)
    assert few == [(4, False), (4, True)] and all_of_them == [(4, True), (4, True)]
    assert (mine.length == LENGTHS + len(more) + 1 + bool(more)).all()
    one, other = np.asarray(mine.drafter_state.feature), np.asarray(whole.drafter_state.feature)
    assert np.allclose(one, other, atol=1e-5)
    assert (np.abs(other).max(axis=1) > 0.1).all()
    for x, y in zip(jax.tree.leaves(mine.cache), jax.tree.leaves(whole.cache), strict=True):
        assert np.allclose(x, y, atol=1e-5)


def test_who_reads_the_last_token_alone():
    def hydra(prefix):
        config = HydraConfig(prefix=prefix, **SIZES)
        return Hydra(config=config, target=CausalLM(SHAPE))

    layer = dataclasses.replace(SHAPE, num_layers=1)
    assert hydra(None).reads_last and Adaptive(hydra(None)).reads_last
    assert not hydra(layer).reads_last

    medusa = MedusaConfig(**SIZES)
    assert Medusa(config=medusa, target=CausalLM(SHAPE)).reads_last
    for kind in (HeadDrafter, Whole):  # a head says so by itself, whatever its hooks are
        assert not kind.reads_last

    class Bare(ChainDrafter):
        def draft_step(self, params, target_params, state, context):
            raise AssertionError("nothing is drafted here")

    assert not Adaptive(Bare(3)).reads_last
