"""The layer before light heads reads in rounds what it read in training."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from specjax.train import head_export
from specjax.train.config import ConfigError
from toys import bag, heads, own_params

import specjax
from specjax import trees
from specjax.decoding import loop
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Adaptive, DraftLengthPolicy, Hybrid, Hydra, NGram, Speculator, prefix
from specjax.drafters.hydra import HydraConfig
from specjax.drafters.prefix import read_rows
from specjax.drafters.speculator import SpeculatorConfig
from specjax.models import CausalLM, Decoder, DecoderConfig, save_pretrained
from specjax.types import Context, Segment

BATCH, LENGTH, PARTS = 2, 11, (4, 1, 3, 3)
TARGET = DecoderConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_positions=32,
    tie_embeddings=True,
)
LAYER = dataclasses.replace(TARGET, num_layers=1)
NARROW = dataclasses.replace(LAYER, hidden_size=8, num_heads=2, num_kv_heads=1, window=5)
SIZES = dict(hidden_size=16, vocab_size=40, num_heads=2)
DRAFTERS = {
    "hydra": Hydra(config=HydraConfig(prefix=LAYER, **SIZES), target=CausalLM(TARGET)),
    "speculator": Speculator(
        config=SpeculatorConfig(
            prefix=NARROW, inner_size=6, cell="lstm", tied=True, scaled=True, **SIZES
        ),
        target=CausalLM(TARGET),
    ),
}


def text():
    """``[B, T, F]`` hidden states, and int32 ``[B, T + 1]`` tokens."""
    one, other = jax.random.split(jax.random.key(3))
    hidden = jax.random.normal(one, (BATCH, LENGTH, TARGET.hidden_size))
    return hidden, jax.random.randint(other, (BATCH, LENGTH + 1), 0, TARGET.vocab_size)


def in_rounds(drafter, params, hidden, tokens):
    """What the heads read after each of the segments ``PARTS``, the second row's one token
    shorter, the rest of which comes with the next one; wider than what is valid of them."""
    state, found, begin = drafter.init(*own_params(params), BATCH, 16), [], np.zeros(BATCH, int)
    observe = jax.jit(drafter.observe)
    for k, end in enumerate(np.cumsum(PARTS)):
        ends = np.asarray([end, end - (k % 2)])
        where = np.minimum(begin[:, None] + np.arange(max(PARTS) + 1), LENGTH - 1)
        rows = np.arange(BATCH)[:, None]
        segment = Segment(
            tokens=tokens[rows, where],
            next=tokens[rows, where + 1],
            features=hidden[rows, where],
            start=jnp.asarray(begin, jnp.int32),
            num=jnp.asarray(ends - begin, jnp.int32),
        )
        state, begin = observe(*own_params(params), state, segment), ends
        found.append((ends, drafter.read(params["drafter"], state, context(tokens, ends)).T))
    return found


def context(tokens, ends):
    """The context of a round whose root is token ``ends`` of each row."""
    return Context(
        tokens=tokens,
        length=jnp.asarray(ends + 1, jnp.int32),
        budget=jnp.full((BATCH,), 9),
        key=jax.random.split(jax.random.key(0), BATCH),
        sampling=specjax.Sampling(),
    )


def test_a_speculators_layer_reads_a_token_and_a_state_side_by_side(tmp_path):
    drafter, (hidden, tokens) = DRAFTERS["speculator"], text()
    params = heads(drafter)
    specjax.save_drafter(drafter, params, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    x, token = hidden[0], found["forget_emb.0.weight"][tokens[0, 1:]]
    both = [y / np.sqrt((y * y).mean(axis=1, keepdims=True) + 1e-6) for y in (token, x)]
    wanted = np.concatenate(both, axis=1) @ found["prefix.fc.weight"].T
    entered = drafter.heads(params).enter(x.T, tokens[0, 1:])
    np.testing.assert_allclose(entered.T, wanted, atol=1e-5)
    assert np.abs(wanted).mean() > 0.1


@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_give_the_heads_what_training_gave_them(name):
    drafter = DRAFTERS[name]
    params = {"drafter": heads(drafter), "target": None}
    (hidden, tokens), module = text(), drafter.heads(params["drafter"])
    whole = read_rows(module, hidden.reshape(-1, hidden.shape[-1]).T, tokens)
    whole = whole.reshape(len(whole), BATCH, LENGTH)
    spread = jnp.abs(jnp.diff(whole, axis=2)).mean()
    for ends, feature in in_rounds(drafter, params, hidden, tokens):
        for row, end in enumerate(ends):
            np.testing.assert_allclose(feature[row], whole[:, row, end - 1], atol=1e-5)
    assert spread > 0.1  # places differ by far more than is let pass


@pytest.mark.parametrize("drafting", [(), (5,), (3, 9)])
@pytest.mark.parametrize("name", DRAFTERS)
def test_what_plain_rounds_said_is_read_before_something_is_drafted(name, drafting, monkeypatch):
    """One token a round; the second row has one less to say, and is over before the first."""
    monkeypatch.setattr(prefix, "PENDING", 4)
    monkeypatch.setattr(prefix, "AT_ONCE", 3)
    drafter, target = DRAFTERS[name], nnx.state(Decoder(TARGET, rngs=nnx.Rngs(0)))
    params = {"drafter": heads(drafter), "target": target}
    (hidden, tokens), rows = text(), np.arange(BATCH)
    whole = read_rows(drafter.heads(params["drafter"]), hidden.reshape(-1, 16).T, tokens)
    whole = whole.reshape(len(whole), BATCH, LENGTH)
    state, ends, waited = drafter.init(*own_params(params), BATCH, 16), np.zeros(BATCH, int), []
    for step in range(LENGTH + 1):
        now = context(tokens, ends)
        drafts = step in drafting or step == LENGTH
        if not drafts:
            state = drafter.sync(*own_params(params), state, now, before="rest")
        else:
            _, state = drafter.draft_step(*own_params(params), state, now)
            found = drafter.read(params["drafter"], state, now).T
            for row, end in enumerate(ends):
                np.testing.assert_allclose(found[row], whole[:, row, end - 1], atol=1e-5)
        waited.append(int((ends - state.done).max()))
        num = np.asarray([step < LENGTH, step < LENGTH - 1 and step > 0], int)
        where = np.minimum(ends, LENGTH - 1)
        segment = Segment(
            tokens=jnp.pad(tokens[rows, where][:, None], ((0, 0), (0, 2))),
            next=jnp.pad(tokens[rows, where + 1][:, None], ((0, 0), (0, 2)), constant_values=-1),
            features=jnp.pad(hidden[rows, where][:, None], ((0, 0), (0, 2), (0, 0))),
            start=jnp.asarray(ends, jnp.int32),
            num=jnp.asarray(num, jnp.int32),
            round=(trees.chain_draft(now, jnp.zeros((BATCH, 0), jnp.int32)), None, None),
        )
        state, ends = drafter.observe(*own_params(params), state, segment), ends + num
    assert max(waited) == 3 and waited[-1] == 0


def test_a_speculators_layer_reads_the_token_after_each_state():
    drafter = DRAFTERS["speculator"]
    params = {"drafter": heads(drafter), "target": None}
    hidden, tokens = text()
    right, wrong = (
        in_rounds(drafter, params, hidden, given)[-1][1]
        for given in (tokens, tokens.at[:, -1].add(1) % TARGET.vocab_size)
    )
    assert np.abs(right[0] - wrong[0]).max() > 0.01


def test_documents_are_kept_apart():
    drafter = DRAFTERS["speculator"]
    module, (hidden, tokens) = drafter.heads(heads(drafter)), text()
    x = hidden.reshape(-1, hidden.shape[-1]).T
    segments = jnp.broadcast_to(jnp.arange(LENGTH) > 4, (BATCH, LENGTH)).astype(int)
    apart, other = (
        read_rows(module, given, tokens, segments).reshape(8, BATCH, LENGTH)
        for given in (x, x.reshape(-1, BATCH, LENGTH).at[:, :, :5].add(1).reshape(x.shape))
    )
    np.testing.assert_array_equal(apart[:, :, 5:], other[:, :, 5:])
    assert np.abs(apart[:, :, :5] - other[:, :, :5]).max() > 0.01


CELLS = [dict(tied=True), dict(cell="mlp", tied=True), dict(cell="mlp", tied=False)]


@pytest.mark.parametrize("cell", CELLS)
def test_a_speculator_with_its_layer_is_loaded_as_it_was_saved(cell, tmp_path):
    save_pretrained(Decoder(TARGET, rngs=nnx.Rngs(0)), tmp_path / "target")
    lm = specjax.load(tmp_path / "target", tokenizer=False)
    normed = dict(model_type="qwen3", window=None, qk_norm=True, qkv_bias=True)
    for k, layer in enumerate([NARROW, dataclasses.replace(NARROW, **normed)]):
        layer = dataclasses.replace(layer, eos_ids=(), tie_embeddings=False)
        drafter = DRAFTERS["speculator"]
        config = dataclasses.replace(drafter.config, prefix=layer, **cell)
        drafter = dataclasses.replace(drafter, config=config)
        params, folder = heads(drafter), tmp_path / str(k)
        specjax.save_drafter(drafter, params, folder)
        written = json.loads((folder / "config.json").read_text())
        assert written["model_type"] == "prefix_speculator" and "architectures" not in written
        again = specjax.load_drafter(folder, lm)
        assert again.drafter.config == config
        jax.tree.map(np.testing.assert_array_equal, again.params, jax.tree.map(np.asarray, params))


@pytest.mark.parametrize("change", [dict(num_layers=2), dict(positions="learned")])
def test_what_is_no_prefix_layer_is_refused(change):
    layer = dataclasses.replace(NARROW, **change)
    with pytest.raises(ValueError, match="prefix: .*; accepted: one layer with rotary positions"):
        dataclasses.replace(DRAFTERS["speculator"].config, prefix=layer)
    with pytest.raises(ValueError, match="prefix: .*; accepted: one layer with rotary positions"):
        dataclasses.replace(DRAFTERS["hydra"].config, prefix=layer)


def test_a_hydra_prefix_that_its_file_could_not_hold_is_refused_before_training(tmp_path):
    layer = dataclasses.replace(LAYER, head_dim=2 * LAYER.head_dim)
    config = HydraConfig(prefix=layer, **SIZES)
    drafter = Hydra(config=config, target=CausalLM(TARGET))
    words = f"prefix layer has head_dim={layer.head_dim}, and the target makes it {LAYER.head_dim}"
    with pytest.raises(ValueError, match=f"{words}.*prefix_config"):
        specjax.save_drafter(drafter, heads(drafter), tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=words):  # the first thing that every recipe does
        head_export.layout_of(None, drafter, heads(drafter))


def test_a_file_whose_prefix_is_no_layer_is_refused(tmp_path):
    drafter = DRAFTERS["speculator"]
    specjax.save_drafter(drafter, heads(drafter), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"specjax": {"prefix": True}}))
    save_pretrained(Decoder(TARGET, rngs=nnx.Rngs(0)), tmp_path / "target")
    with pytest.raises(ValueError, match="prefix=True within specjax"):
        specjax.load_drafter(tmp_path, specjax.load(tmp_path / "target", tokenizer=False))


# ----------------------------------------------------------------------------- in the loop


@dataclasses.dataclass(frozen=True)
class Seldom(DraftLengthPolicy):
    """Drafts in every twelfth round."""

    name = "seldom"

    def init(self, batch, depth):
        return jnp.zeros((batch,), jnp.int32)

    def choose(self, memory, widths, costs, budget):
        return jnp.where(jnp.max(memory) % 12 == 11, widths[-1], 0), memory + 1

    def update(self, memory, outcome):
        return memory


TOY, TOY_PARAMS = bag(13, 3, features=8)


def seldom(behind_lookup):
    """A speculator that is seldom asked, with its weights; and how to find its state."""
    layer = dataclasses.replace(NARROW, vocab_size=13)
    config = SpeculatorConfig(
        hidden_size=8,
        vocab_size=13,
        inner_size=5,
        num_heads=2,
        cell="lstm",
        tied=True,
        prefix=layer,
    )
    base = Speculator(config=config, target=TOY, layer=1)
    inner = Hybrid(4, inner=base, lookup=NGram(longest=2, shortest=1)) if behind_lookup else base
    drafter = Adaptive(inner, Seldom())
    costs = np.ones(len(drafter.widths), np.float32)
    own = heads(base)
    params = {"target": TOY_PARAMS, "drafter": {"inner": own, "costs": costs}}
    return drafter, base, own, params


def read_anew(base, own, state):
    """The state after all committed tokens but the root, read in one pass."""
    draft = trees.chain_draft(context(state.tokens, np.zeros(BATCH, int)), state.tokens[:, 1:])
    draft = dataclasses.replace(draft, start=jnp.zeros(BATCH, jnp.int32))
    cache = TOY.init(TOY_PARAMS, BATCH, state.tokens.shape[1])
    segment = Segment(
        tokens=state.tokens,
        next=jnp.roll(state.tokens, -1, axis=1),
        features=TOY.verify(TOY_PARAMS, cache, draft, features=base.features).features,
        start=draft.start,
        num=state.length - 1,
    )
    params = {"target": TOY_PARAMS, "drafter": own}
    return base.observe(
        *own_params(params), base.init(*own_params(params), BATCH, state.tokens.shape[1]), segment
    )


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("behind_lookup", [False, True])
def test_the_loop_lets_it_read_what_it_missed(behind_lookup, monkeypatch):
    monkeypatch.setattr(prefix, "PENDING", 4)
    monkeypatch.setattr(prefix, "AT_ONCE", 3)
    drafter, base, own, params = seldom(behind_lookup)
    objects, waited = (TOY, drafter, "auto"), []

    def asked(tokens, new):
        given = np.asarray(tokens, np.int32), np.full(BATCH, 3)
        return prepare_inputs(
            TOY, drafter, *given, jax.random.key(0), new, specjax.Sampling(), 64, ()
        )

    def checked(state):
        inner = state.drafter_state.inner.inner if behind_lookup else state.drafter_state.inner
        waited.append(int((state.length - 1 - inner.done).max()))
        assert 0 <= waited[-1] <= 4
        now = context(state.tokens, state.length - 1)
        found, wanted = (
            base.sync(own, None, inner, now, before="prompt"),
            read_anew(base, own, state),
        )
        np.testing.assert_array_equal(found.done, state.length - 1)
        np.testing.assert_allclose(found.feature, wanted.feature, rtol=1e-4, atol=1e-4)
        for row, end in enumerate(found.done):
            seen = (np.arange(end - 4, end) if end > 4 else np.arange(end)) % 5  # a window of 5
            for one, other in zip(found.cache[0], wanted.cache[0], strict=True):
                np.testing.assert_allclose(
                    one[row][:, seen], other[row][:, seen], rtol=1e-4, atol=1e-4
                )
        return state

    request, capacity = asked([[1, 2, 3], [4, 5, 6]], np.asarray([17, 29]))
    state = checked(loop.jit_start(*objects, capacity, params, request))
    for new in (10, 7):
        while int(state.budget.max()):
            state = checked(loop.jit_burst(*objects, 5, params, state))
        request, _ = asked([[7, 8, 9], [1, 1, 2]], np.asarray([new, new]))
        state = checked(loop.jit_extend(*objects, params, state, request))
    assert 4 in waited
