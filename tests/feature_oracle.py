"""What a feature drafter drafts below a text, by passes from scratch and the obvious search."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from toys import whole

from specjax import trees
from specjax.drafters.peagle import PEagle
from specjax.models import DecoderConfig
from specjax.models.causal_lm import CausalLM

VOCAB = 11
SHAPE = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=12,
    intermediate_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_positions=300,
)
TARGET = CausalLM(SHAPE)


@functools.partial(jax.jit, static_argnums=(0, 1))
def slow(drafter, depth, params, text, length):
    """From scratch, for one row: logits ``[V]`` after ``depth`` drafted tokens, and the entries of
    each stage that ran; ``text`` int32 ``[S]``, of which ``length`` are known and then ``depth``
    are drafted. Column 0 is the pair that there is none of: zeros with the first token."""
    head, target, text = drafter.heads(params["drafter"]), params["target"], text[None]
    cache = TARGET.init(target, 1, text.size)
    features = TARGET.verify(target, cache, whole(text), features=drafter.features).features[0].T
    hidden = head.read(jnp.pad(features, ((0, 0), (1, 0)))[:, :-1])
    positions, several = jnp.arange(text.size)[None] - 1, drafter.num_stages > 1
    drafted = head.embed(text, TARGET, target)
    if isinstance(drafter, PEagle):  # its layers read nothing of what it drafts
        text = jnp.where(positions < length - 1, text, drafter.config.mask_token)
    sees = jnp.triu(jnp.ones((text.size, text.size), bool)).at[0, 1:].set(False)[None]
    kept, at, state = [], length - 1, None
    for step in range(depth + 1):
        stage = step if several else 0
        after = head.embed(jnp.roll(text, -stage, axis=1), TARGET, target)
        x = head.enter(after, hidden, stage)
        out, entries = head.run(x, positions, sees, batch=1, stage=stage)
        kept.append(jax.tree.map(lambda x: x[:, :, 1:], entries))
        logits = head.logits(out[:, at][:, None], 1, TARGET, target, stage)[0, 0]
        if getattr(head, "dependency", None) is not None:
            above, state = state, head.norm(out[:, at][:, None])
            if above is not None:
                state = state + dependency(params, drafted[:, at][:, None], state, above)
            logits = head.say(state, 1, TARGET, target)[0, 0]
        passed = head.passed(out, stage)
        if several:
            hidden = passed
        else:
            at = at + 1
            hidden = hidden.at[:, at].set(passed[:, at - 1])
    return logits, kept


def dependency(params, embedded, hidden, above):
    """What a P-EAGLE head adds to a state where it reads its draft, by the published formula."""
    own = jax.tree.map(jnp.asarray, params["drafter"]["dependency"])
    scale = jnp.sqrt(jnp.mean(embedded**2, axis=0) + SHAPE.norm_eps)
    read = jnp.concatenate([own["norm"]["weight"][:, None] * embedded / scale, hidden, above])
    gate, up = (own[name]["weight"] @ read for name in ("gate", "up"))
    return own["down"]["weight"] @ (gate / (1 + jnp.exp(-gate)) * up)


def ids_of(drafter, params):
    vocab = drafter.heads(params["drafter"]).vocab
    return np.arange(VOCAB) if vocab is None else np.asarray(vocab[...])


def from_scratch(drafter, depth, params, text):
    """Calls ``slow`` for a list of tokens, of which the last ``depth`` are drafted."""
    drafter = dataclasses.replace(drafter, topology=None)  # which has no part in it
    row = np.pad(np.asarray(text, np.int32), (0, 40 - len(text)))
    return jax.device_get(slow(drafter, depth, params, row, len(text) - depth))


def expected_paths(drafter, params, text):
    """The drafted paths below a text, by the obvious search with passes from scratch."""
    shape, ids = drafter.topology, ids_of(drafter, params)

    def after(path):
        logits = from_scratch(drafter, len(path), params, [*text, *path])[0]
        logits = np.asarray(logits, np.float64)
        law = logits - np.logaddexp.reduce(logits)
        order = np.argsort(-law, kind="stable")
        return [((*path, int(ids[n])), law[n]) for n in order]

    if isinstance(shape, trees.Tree):
        paths = [()]
        for parent, rank in list(zip(shape.parents, shape.ranks, strict=True))[1:]:
            paths.append(after(paths[parent])[rank][0])
        return {*paths[1:]}
    level, every = [((), 0.0)], []
    for _ in range(shape.depth):
        level = [(p, v + w) for path, v in level for p, w in after(path)[: shape.width]]
        found, level = level, sorted(level, key=lambda pair: -pair[1])[: shape.width]
        every += level if isinstance(shape, trees.Beams) else found
    if isinstance(shape, trees.Expand):
        every = sorted(every, key=lambda pair: -pair[1])[: shape.nodes]
    return {path for path, _ in every}


def drafted_paths(draft, row):
    tokens, parents = np.asarray(draft.tokens[row]), np.asarray(trees.parents(draft))
    parents, paths = np.broadcast_to(parents, draft.tokens.shape)[row], [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], int(tokens[node])))
    scored = np.ones(len(tokens), bool) if draft.scored is None else np.asarray(draft.scored[row])
    return {path for path, there in zip(paths[1:], scored[1:], strict=True) if there}
