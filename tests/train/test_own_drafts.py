"""The loss on a drafter's own drafts against a slow loop; laws after drafts; what is refused."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from specjax.train import (
    block,
    block_heads,
    config,
    dspark,
    features,
    frozen,
    losses,
    model,
    own_drafts,
    unroll,
)
from specjax.train.config import DataConfig
from specjax.train.evaluate import weighed
from specjax.train.rows import make_reader
from specjax.train.step import make_keys
from training_toys import CONFIG, END

from specjax.drafters.domino import Domino
from specjax.drafters.dspark import DSpark
from specjax.models.causal_lm import CausalLM, graph_definition
from specjax.models.lm import LM

ROWS, LENGTH, PLACES, ANCHORS = 2, 14, 3, 4
DATA = DataConfig(length=LENGTH, batch=ROWS)
FIELDS = dict(num_heads=PLACES, num_anchors=ANCHORS, num_layers=1, layers=(1,), data=DATA)
FIELDS |= dict(decay_length=2.0)
HEADS = dict(rank=5, teacher_share=0.4, corrected_share=0.7, base_share=0.5)
OWN = {
    "dspark": dict(markov="rnn", markov_rank=5, ce_share=0.3),
    "dflash2": HEADS | dict(num_candidates=6, conv_group=8),
    "domino": HEADS | dict(gru_size=6, prefix=0),
}
GRAPH = graph_definition(CONFIG)


def sharp(params, seed, noise=0.4):
    """Weights far enough from uniform that some drafts are accepted and others are not."""
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    return jax.tree.map(lambda x: x + noise * jax.random.normal(next(keys), x.shape), params)


def recipe_of(kind, **fields):
    """The fields of a recipe, what makes its drafter, and what makes its loss."""
    fields = FIELDS | OWN[kind] | fields
    if kind == "dspark":
        return dspark.Config(**fields), dspark.make_dspark, dspark.make_loss
    own = block_heads.Config(kind=kind, **fields)
    return own, block_heads.make_block_heads, block_heads.make_loss


def made(kind="dspark", **fields):
    """A recipe, its target, what it trains, its loss, and two rows of several documents."""
    own, make, make_loss = recipe_of(kind, **fields)
    teacher = sharp(model.create(CONFIG, 1)[1], 2)
    setting = frozen.Setting(LM(CausalLM(CONFIG), teacher, None, "", ""), END, None, {}, None, {})
    built = make(own, setting)
    read = make_reader(CONFIG, END, built.layers, entries=built.lay is not None)
    random = np.random.default_rng(3)
    tokens = random.integers(1, CONFIG.vocab_size, (ROWS, LENGTH + 1)).astype(np.int32)
    tokens[:, 0] = tokens[0, 6] = END
    weight = np.ones((ROWS, LENGTH), np.float32)
    weight[1, 8:10] = 0
    batch = {"tokens": jnp.asarray(tokens), "weight": jnp.asarray(weight)}
    return own, teacher, built, read, make_loss(built, setting.lm.target, read, own), batch


@functools.cache
def keys_of_rows():
    with jax.ensure_compile_time_eval():  # a loss that is traced may be the first to ask
        return make_keys(jax.random.key(7), jnp.arange(ROWS))


@jax.jit
def laws_of(teacher, tokens, segments):
    """Logits ``[T, V]`` of the target at all places of one row."""
    return nnx.merge(GRAPH, teacher)(tokens[None], segments[None])[0]


states_of = jax.jit(block.states_of, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 6))
def next_place(drafter, params, teacher, memory, before, state, k):
    """What is said after a token: the logits ``[V]`` from which tokens are drafted, the memory of
    the heads, and what the loss reads besides: DSpark's chance, or the logits of the block alone
    and the corrected ones."""
    heads, table = drafter.heads(params), CausalLM(CONFIG).head_table(teacher)
    base, before = table @ state[:, 0], before[None]
    if isinstance(drafter, DSpark):
        latent, memory, chance = heads.step(memory, before, state)
        return base + heads.say(latent)[0], memory, chance[0]
    if isinstance(drafter, Domino):
        memory = heads.remember(memory, drafter.target.embed(teacher, before[None]))
        known = heads.say(heads.latent(state, memory))[0]
        q = base + (known if k >= drafter.config.prefix else 0)
        return q, memory, (base, q)
    known = heads.selector.predecessors[...][before[0]] * heads.selector.projection(state)[:, 0]
    q = base + heads.selector.successors[...] @ known
    candidate, law = candidates_of(base, drafter.config.num_candidates), jax.nn.softmax(base)
    among = jax.nn.softmax(jnp.where(candidate, q, -jnp.inf)) * jnp.sum(law * candidate)
    return jnp.log(jnp.where(candidate, among, law)), memory, (base, q)


def candidates_of(base, count):
    return base >= jnp.sort(base)[-count]


@functools.partial(jax.jit, static_argnums=(4, 5))
def loss_of_place(q, p, known, token, mine, own):
    law, said = jax.nn.softmax(p), jax.nn.softmax(q)
    distance, log_q = jnp.abs(said - law).sum(), jax.nn.log_softmax(q)
    if not isinstance(own, dspark.Config):
        base, corrected = known

        def nats(x):
            """Of token x, which is among the candidates in its own term."""
            may = jnp.arange(len(q)) == x
            may |= candidates_of(base, own.num_candidates) if own.kind == "dflash2" else True
            return -jax.nn.log_softmax(jnp.where(may, corrected, -jnp.inf))[x]

        alone = -jax.nn.log_softmax(base)
        first, block_alone = nats(token), alone[token]
        if mine:
            first = jnp.sum(law * jax.vmap(nats)(jnp.arange(len(q))))
            block_alone = jnp.sum(law * alone)
        apart = jnp.abs(jax.nn.softmax(base) - law).sum()
        values = [
            (1 - own.teacher_share) * nats_ + own.teacher_share * far / 2
            for nats_, far in ((first, distance), (block_alone, apart))
        ]
        return own.corrected_share * values[0] + own.base_share * values[1]
    value = own.ce_share * -(jnp.sum(law * log_q) if mine else log_q[token])
    value += (1 - own.ce_share) * distance
    accepted, sure = jax.lax.stop_gradient(1 - distance / 2), jax.nn.sigmoid(known)
    return value - (accepted * jnp.log(sure) + (1 - accepted) * jnp.log(1 - sure))


def places(own, built, teacher, params, rows, row, anchor, follow):
    """For each place after an anchor ``(q, p, known, token)``, one after the other; ``follow(k,
    q)`` is the token of place k."""
    one = jax.tree.map(lambda x: x[row : row + 1], dataclasses.replace(rows, entries=()))
    states = states_of(built.drafter, params, teacher, one, jnp.asarray([[anchor]]))
    memory = jnp.zeros((getattr(built.drafter.heads(params), "memory_size", 0), 1))
    text = rows.tokens[row, :LENGTH]
    segments = rows.segments[row, :LENGTH]
    segments = jnp.where(jnp.arange(LENGTH) > anchor, segments[anchor], segments)
    before, found = text[anchor], []
    for k, state in enumerate(states):
        q, memory, known = next_place(built.drafter, params, teacher, memory, before, state, k)
        text = text.at[anchor + k].set(before)  # the row, with the chain in place of the text
        p = laws_of(teacher, text, segments)[anchor + k]
        before = follow(k, q)
        found.append((q, p, known, before))
    return found


def drawn(q, uniform, temperature):
    if not temperature:
        return jnp.argmax(q)
    below = np.cumsum(np.asarray(jax.nn.softmax(q / temperature), np.float64))
    return jnp.asarray(int(np.searchsorted(below, uniform * below[-1], side="right")))


def chance_of(token, p, q, temperature):
    """The chance that a drafted token is accepted."""
    if not temperature:
        return float(jnp.argmax(p) == token)
    p, q = (float(jax.nn.softmax(x / temperature)[token]) for x in (p, q))
    return min(1.0, p / q)


def slow_loss(own, built, teacher, params, rows, written=None):
    """The loss by its definition, anchor after anchor. With ``written``, a dictionary, the drafts
    and weights in it are kept, or put into it."""
    anchors = block.drawn_anchors(keys_of_rows(), rows, own)
    total, counted, written = 0.0, 0.0, {} if written is None else written
    for row in range(ROWS):
        key = jax.random.fold_in(keys_of_rows().rows[row], 1)
        uniform = np.asarray(jax.random.uniform(key, (PLACES, own.own_anchors)))
        for a in range(ANCHORS):
            anchor, mine = int(anchors[row, a]), a < own.own_anchors

            def follow(k, q, row=row, a=a, anchor=anchor, mine=mine, uniform=uniform):
                if not mine:
                    return rows.tokens[row, anchor + 1 + k]
                if (row, a, k) not in written:
                    number = uniform[k, a] if k + 1 < PLACES else 0.0
                    written[row, a, k] = drawn(q, number, own.temperature)
                return written[row, a, k]

            alive = counts = float(rows.weight[row, anchor])
            chain = places(own, built, teacher, params, rows, row, anchor, follow)
            for k, (q, p, known, token) in enumerate(chain):
                same = bool(rows.segments[row, anchor + k] == rows.segments[row, anchor])
                counts *= float(rows.weight[row, anchor + k])
                weight = alive if mine else counts * same
                weight = written.setdefault((row, a, k, "weight"), weight)
                value = loss_of_place(q, p, known, token, mine, own)
                factor = math.exp(-k / own.decay_length) * weight
                total, counted = total + factor * value, counted + factor
                if mine and k + 1 < PLACES and (row, a, k + 1, "weight") not in written:
                    alive *= float(token != END) * chance_of(token, p, q, own.temperature)
    return total / counted


def differences(fields, slopes=True, seed=4, noise=0.4):
    """How far the loss and its gradient are from those of the slow loop, each as a share of the
    greatest true value; and the weights of the places after the first that hold own drafts.
    Without ``slopes``, None in place of the second."""
    own, teacher, built, read, loss, batch = made(**fields)
    params, rows, written = sharp(built.params, seed, noise), read(teacher, batch), {}

    def value(params):
        return weighed(loss(params, {"target": teacher}, batch, keys_of_rows()))

    wanted = slow_loss(own, built, teacher, params, rows, written)
    if slopes:
        found, slope = jax.jit(jax.value_and_grad(value))(params)
        slow = jax.grad(lambda own_: slow_loss(own, built, teacher, own_, rows, written))(params)
    else:
        found, slope, slow = jax.jit(value)(params), (), ()
    pairs = zip([found, *jax.tree.leaves(slope)], [wanted, *jax.tree.leaves(slow)], strict=True)
    errors = [jnp.abs(x - y).max() / jnp.maximum(jnp.abs(y).max(), 1e-3) for x, y in pairs]
    weights = [
        weight for (_, a, k, *said), weight in written.items() if said and k and a < own.own_anchors
    ]
    return float(errors[0]), float(np.max(errors[1:])) if slopes else None, weights


@pytest.mark.parametrize(
    ("fields", "how"),
    [
        ({}, {}),
        (dict(on_policy=0.5), dict(seed=2)),
        (dict(on_policy=1.0, temperature=0.6), dict(seed=5)),
        (dict(on_policy=0.75, temperature=0.0), dict(seed=9)),
        (dict(on_policy=0.75, kind="dflash2"), {}),
        (dict(on_policy=0.75, kind="domino"), dict(seed=6, noise=1.0)),
    ],
    ids=["text", "half", "all", "greedy", "candidates", "domino"],
)
def test_the_loss_and_its_gradient_are_those_of_a_slow_loop_with_the_drafts_held(fields, how):
    """The gradient takes drafts and weights as they are: none flows through drafting."""
    value, slope, weights = differences(fields, **how)
    assert value < 1e-4 and slope < 1e-3
    if fields.get("on_policy"):  # some drafts are rejected, and some accepted
        assert min(weights) < 0.3 < 0.5 < max(weights)


def never_rejected(chances):
    return lambda *given: jnp.ones_like(chances(*given))


def after_the_text(scored):
    def text(graphdef, params, rows, anchors, tokens, last):
        place = anchors[:, :, None] + jnp.arange(tokens.shape[2])
        tokens = block.at(rows.tokens, place.reshape(ROWS, -1)).reshape(tokens.shape)
        return scored(graphdef, params, rows, anchors, tokens, last)

    return text


def of_all_tokens(_):
    return lambda config, target: own_drafts.chunks.logits_of


def given_the_text(latents_of):
    def text(config, heads, target, target_params, rows, anchors, *rest):
        memory, at = latents_of(config, heads, target, target_params, rows, anchors, *rest)
        return memory, lambda memory, k, _: at(memory, k, block.at(rows.tokens, anchors + k))

    return text


@pytest.mark.parametrize(
    ("kind", "module", "name", "fault"),
    [
        ("dspark", own_drafts, "chances", never_rejected),
        ("dspark", own_drafts, "scored", after_the_text),
        ("dflash2", block_heads, "law_of", of_all_tokens),
        ("dflash2", block_heads, "dflash2_latents", given_the_text),
        ("domino", block_heads, "domino_latents", given_the_text),
    ],
    ids=[
        "rejections ignored",
        "laws after the text",
        "candidates ignored",
        "candidates after the text",
        "domino after the text",
    ],
)
def test_fault_a_loss_that_ignores_rejections_or_drafts_is_seen(
    monkeypatch, kind, module, name, fault
):
    monkeypatch.setattr(module, name, fault(getattr(module, name)))
    how = dict(seed=6, noise=1.0) if kind == "domino" else {}
    value, _, _ = differences(dict(on_policy=1.0, kind=kind), slopes=False, **how)
    assert value > 1e-3  # where the loss is right, it differs by less than 1e-4


@pytest.mark.parametrize("candidates", [None, 3])
def test_the_cross_entropy_of_drawn_tokens_is_its_mean_over_them(candidates):
    law, logits, base = jax.random.normal(jax.random.key(0), (3, 2, 4, 9)) * 2
    law, token = jax.nn.softmax(law), jnp.arange(9)
    candidate = candidates and block_heads.candidates_of(base, candidates)
    found = block_heads.drawn_cross_entropy(law, logits, candidate)
    each = [
        losses.cross_entropy(
            block_heads.with_token(logits, candidate, jnp.full((2, 4), x)), jnp.full((2, 4), x)
        )
        for x in token
    ]
    wanted = sum(law[..., x] * nats for x, nats in enumerate(each))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_token_without_a_probability_is_not_drafted_though_sums_are_rounded():
    """At the numbers around the sums of a large vocabulary, which do not rise alone."""
    size, keys = 150_000, jax.random.split(jax.random.key(0))
    some = jax.random.choice(keys[0], size, (16,), replace=False)
    logits = jnp.full(size, -jnp.inf).at[some].set(jax.random.normal(keys[1], (16,)))
    below = jnp.cumsum(jax.nn.softmax(logits[None, None]), axis=-1)[0, 0]
    sums = jnp.unique(below / below[-1])
    near = jnp.concatenate([sums, jnp.nextafter(sums, 0.0), jnp.nextafter(sums, 1.0)])
    uniform = near[near <= 1][None]
    output = jnp.eye(size, 1), None, jnp.zeros(uniform.shape)
    says = lambda table, states: jnp.broadcast_to(logits, (*uniform.shape, size))  # noqa: E731
    anchors = jnp.zeros(uniform.shape, jnp.int32)
    tokens, log_q = own_drafts.drafted(output, anchors, uniform, 1.0, says)
    assert jnp.isfinite(log_q).all() and {*tokens[0].tolist()} == {*some.tolist()}


@pytest.mark.parametrize("kind", ["plain", "window", "learned", "long"])
def test_drafts_are_scored_as_if_they_stood_in_the_row(kind, monkeypatch):
    changed = dict(window=dict(window=4), learned=dict(positions="learned")).get(kind, {})
    shape = dataclasses.replace(CONFIG, num_layers=2, **changed)
    if kind == "long":  # the keys of long rows are computed a block at a time
        monkeypatch.setattr(unroll, "BLOCK", 7)
    graphdef, teacher = graph_definition(shape), sharp(model.create(shape, 1)[1], 2)
    batch = made(on_policy=0.5)[-1]
    rows = make_reader(shape, END, entries=True)(teacher, batch)
    anchors = jnp.asarray([[2, 7, 9], [0, 4, 10]])
    tokens = jax.random.randint(jax.random.key(0), (ROWS, 3, PLACES), 1, CONFIG.vocab_size)
    tokens = tokens.at[:, :, 0].set(block.at(rows.tokens, anchors))
    found = own_drafts.scored(graphdef, teacher, rows, anchors, tokens, shape.num_layers)
    for row in range(ROWS):
        for d, anchor in enumerate(np.asarray(anchors[row])):
            here = slice(anchor, anchor + PLACES)
            text = rows.tokens[row, :LENGTH].at[here].set(tokens[row, d])
            segments = rows.segments[row, :LENGTH].at[here].set(rows.segments[row, anchor])
            given = text[None], segments[None], (shape.num_layers,)
            (wanted,) = features.hidden_states(graphdef, teacher, *given)
            np.testing.assert_allclose(found[row, d], wanted[0, here], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["on_policy=1.5"], r"on_policy=1.5, temperature=1.0; accepted: 0 to 1"),
        (["on_policy=0.5", "temperature=-1"], "temperature=-1.0; accepted: .* at least 0 and"),
        (["temperature=0"], "temperature=0.0 with on_policy=0, which drafts nothing"),
        (["on_policy=0.01"], "on_policy=0.01 of num_anchors=32 is less than one anchor"),
        (["on_policy=0.5", "features=stored"], "stored hidden states are of the text alone"),
        (["on_policy=0.5", "weighting=streak", "ce_share=1"], "leave weighting out"),
    ],
)
def test_own_drafts_that_cannot_be_are_refused(words, message):
    with pytest.raises(config.ConfigError, match=message):
        config.load(dspark.Config, None, words)


@pytest.mark.parametrize("kind", ["xpress", "lilicorr"])
def test_own_drafts_of_kinds_that_do_not_draft_in_turn_are_refused(kind):
    with pytest.raises(config.ConfigError, match=f"kind='{kind}': this recipe trains dflash2"):
        config.load(block_heads.Config, None, [f"kind={kind}", "on_policy=0.5"])
