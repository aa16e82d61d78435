"""Toy targets and test-only drafters: every shape of draft that the contract admits."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from stranger import Bag
from windowed_bag import WindowedBag, WindowedBagPart

from specjax import Context, Sampling, trees
from specjax.acceptance import walk
from specjax.drafters import bigram, text_table
from specjax.drafters.base import ChainDrafter
from specjax.models import DecoderConfig
from specjax.models.decoder import abstract
from specjax.sampling import drawing
from specjax.types import Draft, HeadTarget, Rule, Scores, SubNetwork, Target, Verdict


def bag(vocab, seed, features=6, sharpness=1.5):
    """A toy target and its weights."""
    embed, out = _normals(seed, (vocab, features), (features, vocab))
    return Readable(vocab), {"embed": jnp.asarray(embed), "out": jnp.asarray(sharpness * out)}


def _normals(seed, *shapes):
    """What ``jax.random.normal`` draws, with a key each, for two shapes, on the host.

    Toys of all sizes share the program that draws: a longer draw begins with the shorter one.
    """
    size = 1024
    while size < max(map(math.prod, shapes)):
        size *= 4
    drawn = np.asarray(_pair_of_draws(seed, size))
    return [x[: math.prod(shape)].reshape(shape) for x, shape in zip(drawn, shapes, strict=True)]


@functools.partial(jax.jit, static_argnums=1)
def _pair_of_draws(seed, size):
    keys = jax.random.split(jax.random.key(seed))
    return jax.vmap(lambda key: jax.random.normal(key, (size,)))(keys)


class Readable(HeadTarget, Bag):
    """A ``Bag`` with the methods for drafters that share the target's LM head and embeddings."""

    num_layers = 1
    reads_vectors = True

    def sub_network(self, *, exit=None, skip=(), window=None, sinks=0, switched=False):
        if window is not None:
            return WindowedBagPart(WindowedBag(self.vocab_size, window, sinks))
        return SwitchedBagPart(self) if switched else BagPart(self, hands_over=exit is not None)

    def verify(self, params, cache, draft, *, features=(), since=0, entries=None, logits=True):
        given = dict(features=features, since=since, entries=entries, logits=logits)
        if draft.vectors is not None:  # as tokens that the vocabulary lacks
            own, table = draft.vectors, params["embed"]
            params = params | {"embed": jnp.concatenate([table, own.table])}
            tokens = jnp.where(own.index < 0, draft.tokens, len(table) + own.index)
            draft = dataclasses.replace(draft, tokens=tokens, vectors=None)
        if draft.partial is None or since:
            scores = super().verify(params, cache, draft, **given)
            return dataclasses.replace(scores, features=_asked(scores.features, features))
        own, state = draft.partial.entries
        place = draft.partial.place
        if place is None:
            own, state = own[:, :, : draft.num_nodes], state[:, : draft.num_nodes]
        else:
            own = jnp.take_along_axis(own, place[:, None, :, None], axis=2)
            state = jnp.take_along_axis(state, place[:, :, None], axis=1)
        scores = jnp.tanh(state) @ params["out"] if logits else None
        state = _asked(state, features)
        return Scores(logits=scores, features=state, entries=own)

    def head(self, params, hidden, batch):
        return (jnp.tanh(hidden.T) @ params["out"]).reshape(batch, -1, self.vocab_size)

    def embed(self, params, tokens):
        return params["embed"][tokens.reshape(-1)].T


def _asked(state, features):
    """The only hidden state, ``[B, N, F]``, as often as it was asked for, side by side; or None."""
    return jnp.tile(state, len(features)) if features else None


@dataclasses.dataclass(frozen=True)
class BagPart(SubNetwork):
    """The sum of vectors, which is the toy's first layer, and then a cheaper second one."""

    whole: Readable
    hands_over: bool

    def verify(self, params, cache, draft, *, features=(), since=0, entries=None, logits=True):
        own, state = (None, None) if entries is None else entries
        scores = Bag.verify(
            self.whole, params, cache, draft, features=(1,), since=since, entries=own
        )
        fresh = scores.features
        said = (fresh / (1 + jnp.abs(fresh))) @ params["out"] if logits else None
        state = fresh if state is None else jnp.concatenate([state, fresh], axis=1)
        asked = _asked(fresh, features)
        return Scores(logits=said, features=asked, entries=(scores.entries, state))


@dataclasses.dataclass(frozen=True)
class SwitchedBagPart(SubNetwork):
    """The toy, whose vectors and whose head two switches make cheaper."""

    whole: Readable

    def verify(self, params, cache, draft, *, features=(), since=0, entries=None, logits=True):
        weights, ((attention, mlp),) = params
        given = dict(features=(1,), since=since, entries=entries)
        scores = Bag.verify(self.whole, weights, cache, draft, **given)
        state = jnp.where(attention, 1.0, 0.5) * scores.features
        said = jnp.where(mlp, jnp.tanh(state), state / (1 + jnp.abs(state))) @ weights["out"]
        return Scores(logits=said, features=None, entries=scores.entries)


def own_params(params):
    """The first two arguments of a drafter's hooks, from the ``params`` of ``decode``."""
    return params.get("drafter"), params.get("target")


def counted(vocab, order=2):
    """A table of the n-grams of random texts."""
    random = np.random.default_rng(order)
    return bigram.count(random.integers(0, vocab, (4, 6 * vocab)), vocab, order, least=1)


def like(params, seed, noise=0.7):
    """Weights near ``params``: a drafter that is often, but not always, right."""
    drawn = _normals(seed, *(params[name].shape for name in sorted(params)))
    return {
        name: jnp.asarray(np.asarray(params[name]) + noise * x)
        for name, x in zip(sorted(params), drawn, strict=True)
    }


def context(batch, sampling=Sampling(temperature=1.0), length=1):
    """The context of a round with ``length`` committed tokens, all 0."""
    return Context(
        tokens=jnp.zeros((batch, length), jnp.int32),
        length=jnp.full((batch,), length, jnp.int32),
        budget=jnp.full((batch,), 9, jnp.int32),
        key=jax.random.split(jax.random.key(0), batch),
        sampling=sampling.rows(batch),
    )


def whole(tokens):
    """Whole texts int32 ``[B, T]`` as a draft, for one pass over all of them."""
    batch, size = tokens.shape
    start = jnp.zeros((batch,), jnp.int32)
    return Draft(start=start, tokens=tokens, topology=trees.chain_parents(size - 1))


def cache_of(model, params, tokens, count):
    """The cache of ``tokens[:count]``, built from scratch; ``count`` int32 ``[B]``."""
    batch, size = tokens.shape
    draft, cache = whole(tokens), model.init(params, batch, size)
    entries = model.verify(params, cache, draft).entries
    path = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    verdict = Verdict(path=path, count=count - 1, token=count)
    return model.commit(cache, entries, draft.start, verdict)


def read(model, params, context):
    """The cache of ``tokens[:length - 1]``, built from scratch."""
    return cache_of(model, params, context.tokens, context.length - 1)


def unseen(model):
    """The toy ``model`` as an object for which nothing was traced so far."""
    return type("Unseen", (type(model),), {})(model.vocab_size)


def heads(drafter, seed=2):
    """Weights for a drafter that reads hidden states, none of them zero; nothing is compiled."""
    leaves, structure = jax.tree.flatten(nnx.to_pure_dict(drafter.shapes))
    random = np.random.default_rng(seed)

    def draw(x):
        if jnp.issubdtype(x.dtype, jnp.integer):  # a draft vocabulary
            return 1 + np.arange(x.size, dtype=x.dtype)[::-1]
        return (0.5 * random.standard_normal(x.shape)).astype(x.dtype)

    return jax.tree.unflatten(structure, [jnp.asarray(draw(x)) for x in leaves])


def decoder_weights(config, seed=2):
    """Random weights for a decoder of this shape, norms near 1; nothing is compiled."""
    leaves, structure = jax.tree.flatten(abstract(config)[1])
    random = np.random.default_rng(seed)

    def draw(x):
        return random.normal(float(x.ndim < 2), 0.5, x.shape).astype(x.dtype)

    return jax.tree.unflatten(structure, [jnp.asarray(draw(x)) for x in leaves])


@dataclasses.dataclass(frozen=True)
class TreeDrafter(ChainDrafter):
    """Drafts a tree with a toy model, from scratch in every round, without a cache.

    ``sibling_sampling`` is ``top`` (the r-th child is the r-th best token), ``worst`` (the least
    likely ones), ``iid`` or ``distinct``. ``weights`` is a key of ``params["drafter"]``, or None
    for all of it.
    """

    model: Target = None
    topology: tuple = (-1, 0, 0, 1, 2)
    sibling_sampling: str = "top"
    weights: str | None = None
    passengers: tuple = ()
    random_parents: bool = False
    silent_every: int = 0
    name = "toy tree"

    def __post_init__(self):
        object.__setattr__(self, "num_draft", len(self.topology) - 1)

    @property
    def depth(self):
        nodes = len(self.topology)
        return nodes - 1 if self.random_parents else trees.Tree(self.topology).depth

    def init(self, params, target_params, batch, capacity, inputs=None):
        return jnp.zeros((batch,), jnp.int32)

    def draft_step(self, params, target_params, state, context):
        params = params if self.weights is None else params[self.weights]
        batch, nodes = context.tokens.shape[0], len(self.topology)
        cache = read(self.model, params, context)
        uniform = drawing.uniforms(context.key, 2 * nodes)
        parent = self.topology
        if self.random_parents:  # independent of the tokens: other uniforms
            grown = jnp.floor(uniform[:, nodes:] * jnp.arange(nodes)).astype(jnp.int32)
            parent = grown.at[:, 0].set(-1)
        tokens, laws = jnp.zeros((batch, nodes - 1), jnp.int32), []
        for node in range(1, nodes):
            draft = trees.tree_draft(context, tokens, parent)
            logits = self.model.verify(params, cache, draft).logits
            above = jnp.broadcast_to(trees.parents(draft), (batch, nodes))[:, node]
            prefix = context.prefix(trees.prefix_tokens(draft, above))
            scores = jnp.take_along_axis(logits, above[:, None, None], axis=1)[:, 0]
            if context.sampling.greedy:
                q = jax.nn.softmax(scores)
            else:
                q = context.sampling.probabilities(scores, prefix)
            siblings = jnp.broadcast_to(trees.parents(draft), (batch, nodes)) == above[:, None]
            siblings &= (jnp.arange(nodes) < node) & (jnp.arange(nodes) > 0)
            taken = jnp.any(
                siblings[:, :, None] & (draft.tokens[:, :, None] == jnp.arange(q.shape[1])), axis=1
            )
            laws.append(q)
            if self.sibling_sampling == "iid":
                token = drawing.draw(q, uniform[:, node])
            elif self.sibling_sampling == "distinct":
                token = drawing.draw(jnp.where(taken, 0.0, q), uniform[:, node])
            else:
                token = drawing.argmax(
                    jnp.where(taken, -1.0, q if self.sibling_sampling == "top" else 1 - q)
                )
            tokens = tokens.at[:, node - 1].set(token)
        sampled = self.sibling_sampling in ("iid", "distinct") and not context.sampling.greedy
        index = jnp.broadcast_to(jnp.arange(nodes - 1), tokens.shape)
        if (
            sampled and self.sibling_sampling == "distinct"
        ):  # siblings share one law: that of the first
            above = jnp.broadcast_to(trees.parents(draft), (batch, nodes))[:, 1:]
            index = jnp.argmax(above[:, :, None] == above[:, None, :], axis=2)
        candidate = jnp.asarray([n not in self.passengers for n in range(1, nodes)])
        draft = trees.tree_draft(
            context,
            tokens,
            parent,
            laws=jnp.stack(laws, axis=1) if sampled else None,
            law=index if sampled else None,
            candidate=jnp.broadcast_to(candidate, tokens.shape),
            draws="distinct" if self.sibling_sampling == "distinct" else "iid",
        )
        if self.silent_every:
            speaks = (state % self.silent_every) > 0
            candidate = draft.candidate.at[:, 0].set(speaks)
            draft = dataclasses.replace(draft, candidate=candidate)
        return draft, state + 1


@dataclasses.dataclass(frozen=True)
class Merged(ChainDrafter):
    """Merges the trees of several drafters; equal siblings stay two nodes (twins)."""

    drafters: tuple = ()
    one_law: bool = False
    drop_twins: bool = False  # a planted fault: equal siblings are not drawn again
    name = "merged"

    def __post_init__(self):
        object.__setattr__(self, "num_draft", sum(d.num_draft for d in self.drafters))

    @property
    def depth(self):
        return max(d.depth for d in self.drafters)

    def draft_step(self, params, target_params, state, context):
        drafts = []
        for i, drafter in enumerate(self.drafters):
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(context.key, i)
            step = drafter.init(params, target_params, context.tokens.shape[0], 0)
            own = dataclasses.replace(context, key=keys)
            drafts.append(drafter.draft_step(params, target_params, step, own)[0])
        draft = trees.merge_drafts(*drafts, one_law=self.one_law)
        if self.drop_twins:
            same = (draft.parent[:, :, None] == draft.parent[:, None, :]) & (
                draft.tokens[:, :, None] == draft.tokens[:, None, :]
            )
            earlier = jnp.any(
                same & (jnp.arange(draft.num_nodes)[:, None] < jnp.arange(draft.num_nodes)), axis=1
            )
            draft = dataclasses.replace(draft, candidate=draft.candidate & ~earlier)
        return draft, state


@dataclasses.dataclass(frozen=True)
class Anything(Rule):
    """A rule that accepts any path, in a way that depends on what was drafted: all depths occur.

    Attributes:
      deepest: the greatest depth that is accepted.
      size: how many tokens may follow the path.
      first: the least of them.
    """

    deepest: int
    size: int
    first: int = 0
    name, lossless = "approximate-anything", False

    def __call__(self, params, draft, p, q, key):
        mixed = jnp.sum(draft.tokens * (1 + jnp.arange(draft.num_nodes)), axis=1)
        able = walk.eligible(draft).at[:, 0].set(True)
        able &= trees.depths(draft) <= mixed[:, None] % (self.deepest + 1)
        able = jnp.all(able[:, :, None] | ~trees.ancestors(draft), axis=1)
        depth = jnp.where(able, trees.depths(draft), -1)
        return walk.verdict(draft, jnp.argmax(depth, axis=1), self.first + mixed % self.size)


def small_layer(vocab_size, hidden_size, **settings):
    """A decoder layer whose every size is as small as can be."""
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=4,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        max_positions=64,
        **settings,
    )


def said_below(drafter, params, target_params, state, context, paths, *more):
    """Logits ``[B, D, V]`` that a drafter of levels says below each token of paths int32
    ``[B, D]``, given from the root down, and the carry of the last level."""
    level, carry = drafter.make_level(params, target_params, state, context, *more)
    logits = []
    for depth in range(paths.shape[1]):
        chain = trees.chain_parents(depth)
        grown = Draft(start=context.length - 1, tokens=paths[:, : depth + 1], topology=chain)
        row, carry = level(carry, grown, depth)
        logits.append(row[:, 0])
    return jnp.stack(logits, axis=1), carry


def shared(vocab, texts=4):
    """Texts that a table holds, of all rows."""
    table = text_table.empty(64, block=4)
    for seed in range(texts):
        random = np.random.default_rng(seed)
        table = text_table.add(table, random.integers(0, vocab, 12), 3)
    return table


def probe(hidden_size):
    """A probe of a draft model that flags about half of all tokens."""
    weight = np.random.default_rng(0).normal(size=hidden_size).astype(np.float32)
    return {"weight": weight, "bias": np.float32(0)}
