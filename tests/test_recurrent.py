"""Recurrent drafters (MLP and LSTM speculators, ReDrafter) and the beams that ReDrafter drafts."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax import Sampling, topology, tree
from specjax.drafters import growth
from specjax.types import Context

VOCAB = 9


def context(tokens, sampling=Sampling(temperature=0)):
    """A round of which ``tokens`` int ``[B, T]`` are committed."""
    batch, length = np.shape(tokens)
    return Context(
        tokens=jnp.asarray(tokens, jnp.int32),
        length=jnp.full((batch,), length, jnp.int32),
        budget=jnp.full((batch,), 9, jnp.int32),
        key=jax.random.split(jax.random.key(0), batch),
        sampling=sampling.rows(batch),
    )


def paths(draft, depth):
    """Of each row the set of token paths of this length below the root."""
    parent, depths = (
        np.broadcast_to(x(draft), draft.tokens.shape) for x in (tree.parents, tree.depths)
    )
    found = []
    for row, tokens in enumerate(np.asarray(draft.tokens)):
        ends = np.flatnonzero((depths[row] == depth) & np.asarray(draft.candidate)[row])
        own = set()
        for node in ends:
            path = []
            while node:
                path.append(int(tokens[node]))
                node = parent[row, node]
            own.add(tuple(path[::-1]))
        found.append(own)
    return found


def test_beams_are_those_of_a_search_written_out():
    laws = jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(1), (VOCAB, VOCAB)))

    def level(carry, grown, since):
        return laws[grown.tokens[:, since:]], carry

    width, depth = 3, 4
    draft, _, _ = growth.grow(topology.Beams(width, depth), context([[5], [2]]), level, ())
    for row, root in enumerate((5, 2)):
        beams = [((), 0.0)]
        for length in range(1, depth + 1):
            longer = [
                ((*path, token), value + float(laws[(root, *path)[-1], token]))
                for path, value in beams
                for token in range(VOCAB)
            ]
            beams = sorted(longer, key=lambda beam: -beam[1])[:width]
            assert paths(draft, length)[row] == {path for path, _ in beams}
