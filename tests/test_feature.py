"""Feature drafters: their passes, caches and pending pairs against passes from scratch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import cache_copies, hlo
from feature_oracle import SHAPE, TARGET, VOCAB, drafted_paths, expected_paths, from_scratch
from flax import nnx
from toys import Anything, heads

from specjax import Sampling, trees
from specjax.decoding import loop, prefill, round
from specjax.decoding.inputs import prepare_inputs
from specjax.drafters import Adaptive, DraftLengthPolicy, NGram, Union
from specjax.drafters.eagle import Eagle, EagleConfig
from specjax.drafters.eagle3 import Eagle3, Eagle3Config, check_vocab, usual_layers
from specjax.drafters.feature import FeatureDrafter
from specjax.drafters.feature_module import FeatureModule
from specjax.drafters.peagle import PEagle
from specjax.models import Decoder, DecoderConfig
from specjax.models.layers import Linear

LAYER = dataclasses.replace(SHAPE, num_layers=1)
NARROW = dataclasses.replace(LAYER, hidden_size=8, qkv_bias=True, num_layers=2)
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (4, 9)).astype(np.int32)
LENGTHS = np.asarray([9, 1, 2, 6], np.int32)
ALL_3 = dict(num_features=2, draft_vocab_size=7, fc_norm="each", fc_bias=True, head_bias=True)
CONFIG_3 = Eagle3Config(
    layer=NARROW, feature_size=12, normed_output=True, norm_before_residual=True, **ALL_3
)


@dataclasses.dataclass(frozen=True)
class TwoConfig:
    layer: DecoderConfig = LAYER
    hidden_size: int = LAYER.hidden_size
    vocab_size: int = VOCAB


class TwoStages(FeatureModule):
    """Stages that differ: what is drafted at each depth by a layer of its own."""

    def __init__(self, config, *, rngs):
        self.layer, size = config.layer, config.hidden_size
        make = EagleConfig(layer=config.layer)
        self.parts = nnx.List([Eagle.module(make, rngs=rngs) for _ in range(3)])
        self.gate = Linear(size, size, rngs=rngs)

    def stage_blocks(self, stage):
        return self.parts[stage].blocks

    def enter(self, embedded, hidden, stage=0):
        return self.parts[stage].enter(embedded, hidden)

    def passed(self, out, stage=0):
        return jnp.tanh(self.gate(out)) / 4  # small, or rounding grows from stage to stage

    def logits(self, out, batch, target, params, stage=0):
        return target.head(params, out, batch)


class Staged(FeatureDrafter):
    module, name, num_stages = TwoStages, "staged", 3


EAGLE = EagleConfig(layer=LAYER, fc_bias=True, embedding_norm=True, head_norm=True)
WINDOWED = dataclasses.replace(NARROW, window=5)
PARALLEL = Eagle3Config(layer=WINDOWED, feature_size=12, mask_token=6, **ALL_3)
DEPENDENT = dataclasses.replace(PARALLEL, dependency_size=5)  # which reads embeddings 12 wide
DRAFTERS = {
    "eagle chain": Eagle(config=EAGLE, target=TARGET, topology=trees.chain(2)),
    "eagle3 expanded": Eagle3(
        config=CONFIG_3, target=TARGET, layers=(1, 2), topology=trees.Expand(2, 3, 6)
    ),
    "stages": Staged(config=TwoConfig(), target=TARGET, topology=trees.Tree((-1, 0, 0, 1, 2, 3))),
    "all at once": PEagle(
        config=PARALLEL, target=TARGET, layers=(1, 2), topology=trees.Tree((-1, 0, 0, 1, 3))
    ),
    "all at once, read": PEagle(
        config=DEPENDENT, target=TARGET, layers=(1, 2), topology=trees.Expand(2, 3, 6)
    ),
}


ANYTHING = Anything(deepest=3, size=VOCAB)


@functools.cache
def target_params():
    params = nnx.to_pure_dict(nnx.split(Decoder(SHAPE, rngs=nnx.Rngs(0)))[1])
    return jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, params)


def weights_of(drafter):
    return {"target": target_params(), "drafter": heads(drafter)}


judge = jax.jit(round.draft_and_verify, static_argnums=(0, 1, 2))
conclude = jax.jit(round.commit_round, static_argnums=(0, 1))
begin = jax.jit(prefill.start, static_argnums=(0, 1, 2, 3, 6))


def started(drafter, params, num=20, chunk=4):
    """The state after prompts read ``chunk`` tokens at a time."""
    request, capacity = prepare_inputs(
        TARGET, drafter, PROMPTS, LENGTHS, jax.random.key(0), num, Sampling(), None, ()
    )
    return begin(TARGET, drafter, ANYTHING, capacity, params, request, chunk)


def differing(drafter, params, state, rounds=2, oracle=None):
    """Rows and rounds whose drafts or caches are not those from scratch of ``oracle``."""
    wrong, oracle = [], oracle or drafter
    for turn in range(rounds):
        judged = jax.device_get(judge(TARGET, drafter, ANYTHING, params, state))
        state, inner, plain = jax.device_get(state), judged.proposed, params
        if isinstance(drafter, Adaptive):
            inner, plain = inner.inner, params | {"drafter": params["drafter"]["inner"]}
        for row in range(len(LENGTHS)):
            text = np.asarray(state.tokens[row, : state.length[row]])
            if len(text) <= oracle.num_stages and oracle.num_stages > 1:
                continue  # pairs before the text: none is right
            drafted = drafted_paths(judged.draft, row)
            paths = expected_paths(oracle, plain, text) if drafted else set()
            if inner.ran is not None:
                paths = {path for path in paths if len(path) <= judged.proposed.width[row]}
            if drafted != paths or not cached(oracle, plain, inner, text, row):
                wrong.append((turn, row))
        state = conclude(TARGET, drafter, params, state, judged)
    return wrong


def cached(drafter, params, state, text, row):
    """Whether the cache of a row holds its true pairs, as they are from scratch; those that are
    pending may be lacking in a round that read nothing."""
    kept = from_scratch(drafter, drafter.num_stages - 1, params, [*text, *[0] * 2][: len(text)])[1]
    lacking = 0 if state.ran is None or state.ran[row] else int(state.count[row])
    pairs = ((s, o) for s, own in enumerate(kept) for o in zip(state.cache[s], own, strict=True))
    for stage, (slots, fresh) in pairs:
        true = max(len(text) - 1 - lacking - stage, 0)
        at = np.arange(true)[-(drafter.config.layer.window or true) :]
        for mine, other in zip(slots, fresh, strict=True):
            mine, other = mine[row, :, at % mine.shape[2]], other[0, :, at]  # may be a ring
            if true and np.abs(mine - other).max() > 1e-5 * np.abs(other).max():
                return False
    return True


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_and_caches_are_those_of_passes_from_scratch(name):
    drafter = DRAFTERS[name]
    params = weights_of(drafter)
    assert not differing(drafter, params, started(drafter, params))


@dataclasses.dataclass(frozen=True)
class InTurn(DraftLengthPolicy):
    """A policy: widths 0, several times, until what is pending must be read, then 2, and so on."""

    def init(self, batch, depth):
        return jnp.zeros((batch,), jnp.int32)

    def choose(self, memory, widths, costs, budget):
        return jnp.where(memory[0] % 5 < 4, 0, 2), memory + 1

    def update(self, memory, outcome):
        return memory


@pytest.mark.usefixtures("quick_compilation")
def test_rounds_that_draft_nothing_leave_their_pairs_pending():
    inner = DRAFTERS["eagle chain"]
    drafter, costs = Adaptive(inner, InTurn()), np.ones(3, np.float32)
    params = {"target": target_params(), "drafter": {"inner": heads(inner), "costs": costs}}
    assert not differing(drafter, params, started(drafter, params), rounds=6, oracle=inner)


@pytest.mark.usefixtures("quick_compilation")
def test_a_text_goes_on_after_a_longer_one():
    drafter = DRAFTERS["eagle chain"]
    params = weights_of(drafter)
    state = started(drafter, params)
    state = conclude(
        TARGET, drafter, params, state, judge(TARGET, drafter, ANYTHING, params, state)
    )
    more = np.asarray([[3, 1, 4], [1, 5, 9], [2, 6, 5], [3, 5, 8]], np.int32)
    request, _ = prepare_inputs(
        TARGET, drafter, more, np.asarray([3, 1, 2, 3]), jax.random.key(0), 9, Sampling(), None, ()
    )
    extend = jax.jit(loop.extend, static_argnums=(0, 1, 2))
    state = extend(TARGET, drafter, ANYTHING, params, state, request)
    assert not differing(drafter, params, state)


@pytest.mark.usefixtures("quick_compilation")
def test_a_path_that_another_drafter_proposed_is_read():
    inner = DRAFTERS["eagle chain"]
    drafter = Union(drafters=(inner, NGram(num_draft=4, shortest=1)))
    params = {"target": target_params(), "drafter": (heads(inner), None)}
    state, plain = started(drafter, params), params | {"drafter": heads(inner)}
    for _ in range(3):
        judged = judge(TARGET, drafter, ANYTHING, params, state)
        for row in range(len(LENGTHS)):
            text = np.asarray(state.tokens[row, : state.length[row]])
            assert cached(inner, plain, judged.proposed.inner[0], text, row)
            assert expected_paths(inner, plain, text) <= drafted_paths(judged.draft, row)
        state = conclude(TARGET, drafter, params, state, judged)


def fault(change):
    """An EAGLE drafter that takes in a changed segment."""

    class Faulty(Eagle):
        def observe(self, params, target_params, state, segment):
            return super().observe(params, target_params, state, change(segment))

    return Faulty(config=EAGLE, target=TARGET, topology=trees.chain(2))


FAULTS = {
    "pairs shifted by one": lambda s: dataclasses.replace(s, next=s.tokens),
    "one short after full acceptance": lambda s: dataclasses.replace(
        s, num=s.num - (s.num == 3) * (s.round is not None)
    ),
    "the root's feature missing": lambda s: dataclasses.replace(
        s,
        features=jnp.where(
            (jnp.arange(s.tokens.shape[1]) == s.num[:, None] - 1)[..., None], 0, s.features
        ),
    ),
}


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name):
    drafter, sound = fault(FAULTS[name]), DRAFTERS["eagle chain"]
    params = weights_of(sound)
    assert differing(drafter, params, started(drafter, params), oracle=sound)


class AllPending(PEagle):
    """Takes all columns of pending pairs for pairs, also unused ones, and drafts after them."""

    def _root(self, head, params, cache, features, tokens, start, count):
        count = jnp.full_like(count, tokens.shape[1])
        return super()._root(head, params, cache, features, tokens, start, count)


@pytest.mark.usefixtures("quick_compilation")
def test_columns_that_hold_no_pair_are_not_seen_by_those_of_further_depths():
    sound = DRAFTERS["all at once"]
    drafter = AllPending(config=PARALLEL, target=TARGET, layers=(1, 2), topology=sound.topology)
    params = weights_of(sound)
    assert differing(drafter, params, started(drafter, params), oracle=sound)


def test_the_loop_copies_no_cache_of_a_head():
    drafter = DRAFTERS["eagle chain"]
    layer, batch = drafter.config.layer, 3
    text = hlo(TARGET, drafter, weights_of(drafter), batch, 300, 0)
    assert not cache_copies(text, (batch, layer.num_kv_heads, 300, layer.head_dim))


# -------------------------------------------------------------------------------- what is refused


def test_usual_layers_are_low_middle_and_high():
    assert usual_layers(32) == (2, 16, 29)
    assert usual_layers(6) == (1, 3, 5)
    assert [usual_layers(n) for n in (1, 2, 3, 4)] == [(0, 0, 1), (0, 1, 2), (1, 2, 3), (1, 2, 3)]


def test_what_a_head_must_write_is_named():
    class Unwritten(FeatureModule):
        pass

    with pytest.raises(NotImplementedError, match="Unwritten must write enter.embedded, hidden"):
        Unwritten().enter(None, None)
    with pytest.raises(NotImplementedError, match="Unwritten must write logits.out, batch"):
        Unwritten().logits(None, 1, TARGET, target_params())


def test_what_no_head_can_be_is_named():
    wide = dataclasses.replace(LAYER, hidden_size=16)
    latent = dataclasses.replace(
        LAYER, num_kv_heads=1, head_dim=6, kv_rank=4, nope_dim=2, rope_dim=2, value_dim=2
    )
    for make, words in (
        (lambda: Eagle3(config=CONFIG_3, target=TARGET, layers=(1, 3)), "1, 3.*has 2 layers"),
        (lambda: Eagle3(config=CONFIG_3, target=TARGET, layers=(1, 2, 3)), "reads 2 hidden states"),
        (lambda: Eagle3(config=CONFIG_3, target=TARGET, layers=(1, 2), layer=1), "leave layer out"),
        (lambda: Eagle(config=EagleConfig(layer=LAYER), target=TARGET, layer=3), "eagle: layer=3:"),
        (lambda: Staged(config=TwoConfig(), target=TARGET, topology=trees.chain(4)), "4 deep"),
        (lambda: Eagle(config=EagleConfig(layer=wide), target=TARGET), "16 wide.* 12 wide"),
        (
            lambda: Eagle3(config=Eagle3Config(layer=wide), target=TARGET),
            "16 wide.* 12 wide",
        ),
        (
            lambda: Eagle3Config(layer=wide, feature_size=12, draft_vocab_size=0),
            "16 wide cannot",
        ),
        (lambda: Eagle3Config(layer=LAYER, draft_vocab_size=99), "from 1 to .* 11"),
        (lambda: Eagle3Config(layer=LAYER, fc_norm="all"), "accepted are .*'whole', 'each'"),
        (lambda: EagleConfig(layer=latent), "kv_rank=4"),
        (lambda: Eagle3Config(layer=LAYER, mask_token=11), "mask_token=11: .* 11 rows"),
        (lambda: PEagle(config=CONFIG_3, target=TARGET, layers=(1, 2)), "not trained to draft all"),
        (
            lambda: Eagle3Config(layer=LAYER, dependency_size=4),
            "dependency_size=4 with mask_token=None: accepted are 0, and",
        ),
        (lambda: check_vocab([0, 1, 11], 3, 11), "draft token 2 would be token 11 .* 11"),
        (lambda: check_vocab([0, 1, 1], 3, 11), "more than once, 1 for one"),
        (lambda: check_vocab([0, 1], 3, 11), "one integer for each of the 3"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
