"""What the loop shows a drafter: every committed token once, and the nodes that it asked about."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged import MODEL, NUM, PARAMS, PROMPTS, VOCAB, new_tokens, pad, plain_texts, start, step
from toys import TreeDrafter, like, whole

import specjax
from specjax import Sampling
from specjax.decoding.inputs import prepare_inputs

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_passengers_are_scored_read_out_and_never_emitted():
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Reader(TreeDrafter):
        reads_nodes = True

        def readout(self, draft, scores):
            return scores.logits[:, 2]

        def observe(self, params, target_params, state, segment):
            if segment.round is not None:
                seen.append(segment.round[2].shape)
            return state

    passenger = Reader(model=MODEL, topology=(-1, 0, 0), passengers=(2,))
    tokens, lengths = pad(PROMPTS)
    params = {"target": PARAMS, "drafter": like(PARAMS, 1)}
    out = specjax.decode(
        MODEL, passenger, params, tokens, lengths, key=jax.random.key(0), max_new_tokens=NUM
    )
    assert new_tokens(out, PROMPTS) == plain_texts()
    assert seen and seen[0] == (8, VOCAB)
    assert int(out.stats.drafted.max()) <= NUM  # one candidate a round, the passenger is none


@dataclasses.dataclass(frozen=True)
class Recorder(TreeDrafter):
    """Writes down every segment: the pairs (feature of a token, the token after it)."""

    features = (0,)

    def init(self, params, target_params, batch, capacity, inputs=None):
        zeros = jnp.zeros((batch, capacity), jnp.int32)
        return zeros, zeros, jnp.zeros((batch, capacity, PARAMS["embed"].shape[1])), zeros

    def draft_step(self, params, target_params, state, context):
        draft, _ = super().draft_step(
            params, target_params, jnp.zeros(context.length.shape, jnp.int32), context
        )
        return draft, state

    def observe(self, params, target_params, state, segment):
        tokens, after, features, times = state
        steps = jnp.arange(segment.tokens.shape[1])
        at = jnp.where(steps < segment.num[:, None], segment.start[:, None] + steps, 10**6)
        rows = jnp.arange(at.shape[0])[:, None]
        return (
            tokens.at[rows, at].set(segment.tokens, mode="drop"),
            after.at[rows, at].set(segment.next, mode="drop"),
            features.at[rows, at].set(segment.features, mode="drop"),
            times.at[rows, at].add(1, mode="drop"),
        )


def test_segments_bring_every_token_once_with_its_feature_and_the_token_after_it():
    drafter = Recorder(model=MODEL)
    tokens, lengths = pad(PROMPTS)
    params = {"target": PARAMS, "drafter": like(PARAMS, 1)}
    request, capacity = prepare_inputs(
        MODEL, drafter, tokens, lengths, jax.random.key(0), NUM, Sampling(), None, ()
    )
    state = start(MODEL, drafter, "auto", capacity, params, request)
    state = step(MODEL, drafter, "auto", NUM * 3, params, state)
    text, cache = whole(state.tokens), MODEL.init(PARAMS, 8, capacity)
    truth = MODEL.verify(PARAMS, cache, text, features=(0,)).features
    fed, after, features, times = state.drafter_state
    for row, length in enumerate(np.asarray(state.length)):
        assert times[row, : length - 1].tolist() == [1] * (length - 1)
        assert not times[row, length - 1 :].any()
        assert (fed[row, : length - 1] == state.tokens[row, : length - 1]).all()
        assert (after[row, : length - 1] == state.tokens[row, 1:length]).all()
        np.testing.assert_allclose(features[row, : length - 1], truth[row, : length - 1], atol=1e-5)
