"""PaSS: what the target says at vectors after the text, against passes without cache and tree."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from stranger import Bag
from toys import bag, heads, like

import specjax
from specjax import Sampling, trees
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.decoding.round import commit_round, draft_and_verify
from specjax.drafters import DraftModel, Fallback, Hybrid, NGram, PaSS, Union
from specjax.drafters.pass_embeddings import PaSSConfig, PaSSState
from specjax.models.causal_lm import graph_definition
from specjax.tracing import record

pytestmark = pytest.mark.usefixtures("quick_compilation")
TARGET = Path(__file__).parent / "golden" / "heads" / "target"  # a Llama of two layers
CONFIG = PaSSConfig(hidden_size=24, vocab_size=72, num_heads=2)
TREE = trees.Tree((-1, 0, 0, 1))
PROMPTS, LENGTHS = np.random.default_rng(0).integers(0, 72, (2, 7)), np.asarray([7, 4])


@pytest.fixture(scope="module")
def lm():
    return specjax.load(TARGET, tokenizer=False, dtype="float32")


class Rootward(PaSS):
    """A fault: what is said after the root is drafted next, whatever was kept."""

    def observe(self, params, target_params, state, segment):
        if segment.round is not None:
            draft, verdict, said = segment.round
            said = jnp.tile(said[:, : self.depth], (1, self.tree.num_nodes, 1))
            segment = dataclasses.replace(segment, round=(draft, verdict, said))
        return super().observe(params, target_params, state, segment)


@functools.partial(jax.jit, static_argnums=(0, 1))
def one_round(target, drafter, params, state):
    """The state after a greedy round, and how many tokens were kept in each row."""
    judged = draft_and_verify(target, drafter, "greedy", params, state)
    return commit_round(target, drafter, params, state, judged), judged.verdict.count


@functools.partial(jax.jit, static_argnums=0)
def over(graph, params, tokens, vectors, index):
    """Logits ``[T, V]`` of one row of tokens, some of which are vectors."""
    model, size = nnx.merge(graph, params), tokens.shape[1]
    sees = jnp.triu(jnp.ones((size, size), bool))[None]
    hidden, _, _ = model.hidden(tokens, jnp.arange(size)[None], sees, vectors=(vectors, index))
    return model.head(hidden, 1)[0]


def after_rounds(lm, kind, vectors, count=6):
    """The drafter's state after each of some greedy rounds, with the texts that it is about."""
    drafter = kind(config=CONFIG, target=lm.target, topology=TREE)
    params = {"target": lm.params, "drafter": {"embeddings": jnp.asarray(vectors)}}
    given = lm.target, drafter, PROMPTS.astype(np.int32), LENGTHS, jax.random.key(0)
    request, capacity = prepare_inputs(*given, 20, Sampling(), None, ())
    state = loop.jit_start(lm.target, drafter, "greedy", capacity, params, request)
    found = []
    for _ in range(count):
        state, kept = one_round(lm.target, drafter, params, state)
        said, length, tokens = state.drafter_state, state.length, state.tokens
        found.append([np.asarray(x) for x in (said.logits, said.known, length, tokens, kept)])
    return found


def said_after(lm, vectors, text):
    """The target's logits ``[K, V]`` at the vectors after a text, from one pass over both."""
    count, spare = len(vectors), 30 - len(text) - len(vectors)  # one shape for all texts
    tokens = jnp.asarray([[*text, *[0] * (count + spare)]], jnp.int32)
    index = jnp.asarray([[*[-1] * len(text), *range(count), *[-1] * spare]])
    graph = graph_definition(lm.config)
    logits = over(graph, lm.params, tokens, jnp.asarray(vectors), index)
    return np.asarray(logits)[len(text) : len(text) + count]


def error(lm, kind, vectors, read=None):
    """The greatest difference from passes over the text, and the tokens that were kept."""
    worst, most = 0.0, 0
    for logits, known, length, tokens, kept in after_rounds(lm, kind, vectors):
        assert known.all()
        for row in range(2):
            text = tokens[row, : length[row] - 1]  # the root is not read yet
            wanted = said_after(lm, vectors if read is None else read, text.tolist())
            worst = max(worst, np.abs(logits[row] - wanted).max())
        most = max(most, kept.max())
    return worst, most


def leading(lm):
    """Vectors with which something is accepted: embeddings of tokens that the target says."""
    table = np.asarray(lm.params["embedding"][...], np.float32)
    best = 0, None
    for seed in range(12):
        picked = table[np.random.default_rng(seed).integers(0, 72, 2)] * 1.5
        most = max(kept.max() for *_, kept in after_rounds(lm, PaSS, picked, 4))
        best = max(best, (most, seed))
        if most:
            return picked
    raise AssertionError("nothing is accepted")


def test_what_is_drafted_is_what_the_target_says_at_vectors_after_the_text(lm):
    vectors = leading(lm)
    found, most = error(lm, PaSS, vectors)
    assert found < 1e-4 and most > 0
    assert error(lm, PaSS, vectors, read=vectors[::-1].copy())[0] > 0.01
    assert error(lm, Rootward, vectors)[0] > 0.01  # a fault that loses no law, only drafts


class Spilled(PaSS):
    """The first candidate is read as a vector, and not as its token."""

    @property
    def _shape(self):
        parents, index = super()._shape
        return parents, np.where(np.arange(len(index)) == 1, 0, index)


@pytest.mark.parametrize("kind", [PaSS, Spilled], ids=["as_it_is", "fault"])
def test_nothing_sees_a_vector(kind):
    """The logits at candidates are the same, bit for bit, whatever stands after them."""
    model, params = bag(5, 0)
    drafter = kind(
        config=PaSSConfig(hidden_size=6, vocab_size=5, num_heads=2), target=model, topology=TREE
    )
    tokens = jnp.asarray([[1, 2, 3, 0, 0]], jnp.int32)
    given = model, drafter, np.asarray(tokens), np.asarray([3]), jax.random.key(0)
    request, capacity = prepare_inputs(*given, 2, Sampling(), None, ())
    found = []
    for seed in (1, 2):
        own = {"target": params, "drafter": heads(drafter, seed)}
        state = loop.jit_start(model, drafter, "greedy", capacity, own, request)
        said = jax.random.normal(jax.random.key(3), (1, 2, 5))  # so that a tree is proposed
        own_state = PaSSState(logits=said, known=jnp.ones((1,), bool))
        state = dataclasses.replace(state, drafter_state=own_state)
        judged = draft_and_verify(model, drafter, "greedy", own, state)
        found.append(np.asarray(judged.scores.logits))
    nodes = TREE.num_nodes
    assert np.array_equal(found[0][:, :nodes], found[1][:, :nodes]) == (kind is PaSS)
    assert (found[0][:, nodes:] != found[1][:, nodes:]).any(axis=2).all()


def test_any_row_is_recorded(lm):
    drafter = PaSS(config=CONFIG, target=lm.target, topology=TREE)
    params = {"target": lm.params, "drafter": heads(drafter)}
    given = lm.target, drafter, PROMPTS.astype(np.int32), LENGTHS, jax.random.key(0)
    request, capacity = prepare_inputs(*given, 3, Sampling(), None, ())
    state = loop.jit_start(lm.target, drafter, "greedy", capacity, params, request)
    rounds = record.record_rounds(lm.target, drafter, "greedy", params, state, row=1)
    assert sum(len(one.emitted) for one, _ in rounds) == 2  # after the one that the prompt gave


def test_vectors_are_written_and_loaded_again(lm, tmp_path):
    drafter = PaSS(config=CONFIG, target=lm.target)
    vectors = heads(drafter)
    specjax.save_drafter(drafter, vectors, tmp_path, target=lm)
    found = specjax.load_drafter(tmp_path, lm)
    assert found.drafter == drafter and drafter.depth == 2
    assert np.array_equal(found.params["embeddings"], vectors["embeddings"])


def test_what_cannot_draft_with_vectors_is_refused(lm):
    target, weights = bag(72, 0, features=24)
    with pytest.raises(ValueError, match="follows the drafted tokens"):
        PaSS(config=CONFIG, target=lm.target, topology=trees.Expand(2, 2, 3))
    with pytest.raises(ValueError, match="2 heads"):
        PaSS(config=CONFIG, target=lm.target, topology=trees.chain(3))

    class Blind(type(target)):
        reads_vectors = False

    with pytest.raises(ValueError, match="reads tokens and no vectors"):
        PaSS(config=CONFIG, target=Blind(72))
    with pytest.raises(ValueError, match="num_heads=0"):
        dataclasses.replace(CONFIG, num_heads=0)
    assert not Bag.reads_vectors
    drafter, own = PaSS(config=CONFIG, target=target), like(weights, 1)
    with pytest.raises(ValueError, match="give a drafter of chains"):
        Hybrid(inner=drafter)
    beside = DraftModel(2, model=target)
    for wrapped, params in (
        (Union(drafters=(beside, drafter)), (own, heads(drafter))),
        (Fallback(first=NGram(2), inner=drafter), heads(drafter)),
    ):
        given = {"target": weights, "drafter": params}
        texts = np.zeros((1, 3), np.int32), np.asarray([3])
        with pytest.raises(ValueError, match="stands alone"):
            specjax.decode(target, wrapped, given, *texts, max_new_tokens=4, key=jax.random.key(0))
