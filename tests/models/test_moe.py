"""Experts: their sums, their routers, and who is sent to none."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import GOLDEN, SMALL, golden_maker, random_params
from flax import nnx
from safetensors.numpy import load_file, save_file
from shapes import EXPERTS

import specjax
from specjax import trees
from specjax.models import Decoder, load, load_config, load_weights, moe, quantize
from specjax.models.causal_lm import CausalLM
from specjax.models.translate import config_from_hf
from specjax.types import Draft

X, H, WIDE, CHOSEN = 6, 8, 5, 2
CONFIG = dataclasses.replace(
    SMALL,
    **EXPERTS,
    norm_expert_weights=True,
    expert_scale=2.5,
)
FORMS = {"grouped": moe._grouped, "dense": moe._dense, "gathered": moe._gathered}


def stacks(seed=0):
    rng = np.random.default_rng(seed)
    shapes = (X, WIDE, H), (X, WIDE, H), (X, H, WIDE)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


def tokens_of(count, seed=1):
    """``x [H, M]``, experts ``[M, C]`` without repetition, weights ``[M, C]``."""
    rng = np.random.default_rng(seed)
    index = np.stack([rng.permutation(X)[:CHOSEN] for _ in range(count)]).astype(np.int32)
    x, weight = rng.normal(size=(H, count)), rng.uniform(0.1, 1, size=(count, CHOSEN))
    return jnp.asarray(x, jnp.float32), jnp.asarray(index), jnp.asarray(weight, jnp.float32)


def one_by_one(x, index, weight, gate, up, down):
    """The definition, token by token; expert ``X`` is none."""
    out = np.zeros(x.shape)
    for token in range(x.shape[1]):
        for expert, share in zip(index[token], weight[token], strict=True):
            if expert < X:
                a, b = gate[expert] @ x[:, token], up[expert] @ x[:, token]
                out[:, token] += share * (down[expert] @ (a / (1 + np.exp(-a)) * b))
    return out


def through(form, *arguments):
    return jax.jit(lambda *rest: FORMS[form](jax.nn.silu, *rest))(*arguments)


# ------------------------------------------------------------------- sums


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 3, 50])
def test_every_form_gives_the_weighted_sum_of_the_chosen_experts(form, count):
    x, index, weight = tokens_of(count)
    index = index.at[-1, 0].set(X) if count > 1 else index
    expected = one_by_one(*map(np.asarray, (x, index, weight, *stacks())))
    np.testing.assert_allclose(through(form, x, index, weight, *stacks()), expected, atol=1e-4)


@pytest.mark.parametrize("form", ["grouped", "gathered"])
def test_experts_that_nobody_chose_are_not_read(form):
    x, index, weight = tokens_of(3)
    index = jnp.asarray([[0, 4], [4, 0], [X, X]])
    broken = [w.at[jnp.asarray([1, 2, 3, 5])].set(jnp.nan) for w in stacks()]
    out = through(form, x, index, weight, *broken)
    np.testing.assert_array_equal(out, through(form, x, index, weight, *stacks()))


def test_no_token_is_dropped_where_all_choose_the_same_expert():
    x, _, weight = tokens_of(100)
    index = jnp.full((100, CHOSEN), 3).at[:, 1].set(1)
    expected = one_by_one(*map(np.asarray, (x, index, weight, *stacks())))
    np.testing.assert_allclose(through("grouped", x, index, weight, *stacks()), expected, atol=1e-4)


def test_what_a_token_gets_does_not_depend_on_its_batch_mates():
    """Bit by bit: neither on what they are nor on what they choose."""
    x, index, weight = tokens_of(50)
    mine = slice(10, 14)
    others, choices, _ = tokens_of(50, seed=2)
    crowded = choices.at[:20].set(index[10])
    found = [through("grouped", x, index, weight, *stacks())[:, mine]]
    for new in (choices, crowded, jnp.full_like(index, X)):
        new = new.at[mine].set(index[mine])
        mixed = others.at[:, mine].set(x[:, mine])
        found.append(through("grouped", mixed, new, weight, *stacks())[:, mine])
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_the_loop_over_experts_has_the_derivatives_of_the_sum():
    x, index, weight = tokens_of(9)

    def loss(form, x, weight, *experts):
        out = FORMS[form](jax.nn.silu, x, index, weight, *experts)
        return jnp.sum(jnp.sin(out))

    found, expected = (
        jax.jit(jax.grad(lambda *a, f=form: loss(f, *a), argnums=(0, 1, 2, 3, 4)))(
            x, weight, *stacks()
        )
        for form in ("grouped", "gathered")
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        assert jnp.any(a != 0)


# ------------------------------------------------------------------- routers


def route(config, x, **params):
    router = moe.Router(config, rngs=nnx.Rngs(0), param_dtype=jnp.float32)
    for name, value in params.items():
        getattr(router, name)[...] = jnp.asarray(value, jnp.float32)
    return router(jnp.asarray(x, jnp.float32))


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def test_a_greedy_router_takes_the_most_probable_experts():
    config = dataclasses.replace(
        CONFIG, routing="greedy", norm_expert_weights=False, expert_scale=1.0
    )
    x = np.random.default_rng(0).normal(size=(CONFIG.hidden_size, 3))
    weights = np.random.default_rng(1).normal(size=(8, CONFIG.hidden_size))
    index, share = route(config, x, weight=weights)
    for token in range(3):
        law = softmax(weights @ x[:, token])
        assert index[token].tolist() == np.argsort(-law)[:2].tolist()
        np.testing.assert_allclose(share[token], np.sort(law)[::-1][:2], rtol=1e-4)


def test_a_group_limited_router_opens_the_groups_of_the_best_experts():
    config = dataclasses.replace(
        CONFIG, routing="group_limited_greedy", groups_per_token=1, norm_expert_weights=False
    )
    logits = np.asarray([3.0, -9, 2, 2, 1, 1, 0, 0])  # the second is best only of its group
    x = np.ones((CONFIG.hidden_size, 1)) / CONFIG.hidden_size
    index, share = route(config, x, weight=np.repeat(logits[:, None], CONFIG.hidden_size, 1))
    assert index[0].tolist() == [0, 1]
    np.testing.assert_allclose(share[0], 2.5 * softmax(logits)[:2], rtol=1e-4)


def test_a_router_with_a_bias_chooses_by_it_and_weighs_without_it():
    logits = np.asarray([2.0, 1, 0, 0, 0, 0, -1, -1])
    x = np.ones((CONFIG.hidden_size, 1)) / CONFIG.hidden_size
    weights = np.repeat(logits[:, None], CONFIG.hidden_size, 1)
    index, _ = route(CONFIG, x, weight=weights, bias=np.zeros(8))
    assert index[0].tolist() == [0, 1]
    index, share = route(CONFIG, x, weight=weights, bias=[0, 0, 0, 0, 0, 0, 5, 5])
    assert sorted(index[0].tolist()) == [6, 7]
    np.testing.assert_allclose(share[0], [1.25, 1.25], rtol=1e-5)  # equal, 2.5 together


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(routing="hash"), "routing='hash' is unknown; known: greedy"),
        (dict(experts_per_token=0), "experts_per_token=0: it must be at least 1"),
        (dict(experts_per_token=5), "experts_per_token=5: there are 4 to choose from"),
        (dict(expert_groups=3), "num_experts=8, expert_groups=3"),
        (dict(expert_groups=8), "expert_groups=8.*of at least 2"),
        (dict(groups_per_token=5), "groups_per_token=5"),
    ],
)
def test_experts_that_cannot_be_routed_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


# ------------------------------------------------------------------- in a model


def scored(nodes, tokens, monkeypatch):
    """Logits ``[N, V]`` of a draft whose nodes are scored where ``nodes`` says so, and the experts
    that the nodes of each layer were sent to."""
    target, seen, mix = CausalLM(CONFIG), [], moe.mix
    params = random_params(CONFIG)
    monkeypatch.setattr(moe, "mix", lambda *a: (seen.append(a[2]), mix(*a))[1])

    @jax.jit
    def verify(params, tokens, nodes):
        topology = trees.chain_parents(tokens.shape[1] - 1)
        cache = target.init(params, 1, 8)
        draft = Draft(start=jnp.asarray([0]), tokens=tokens, topology=topology, scored=nodes)
        return target.verify(params, cache, draft).logits[0], jnp.stack(seen)

    return verify(params, jnp.asarray([tokens]), jnp.asarray([nodes]))


def test_a_node_that_is_not_scored_takes_no_expert_and_changes_nothing(monkeypatch):
    nodes = [True, True, False, True, False]
    logits, experts = scored(nodes, [5, 6, 7, 8, 9], monkeypatch)
    others, again = scored(nodes, [5, 6, 300, 8, 1], monkeypatch)
    idle = experts == CONFIG.num_experts
    assert (idle.all(axis=(0, 2)) == ~np.asarray(nodes)).all() and not idle[:, [0, 1, 3]].any()
    np.testing.assert_array_equal(logits[jnp.asarray(nodes)], others[jnp.asarray(nodes)])


def test_padding_and_finished_rows_take_no_expert(monkeypatch):
    """A prompt of 3 tokens beside one of 9, then a row that has ended beside one that emits
    three more: as many tokens are routed as there are, in every layer."""
    seen, mix = [], moe.mix

    def counting(activation, x, index, *rest):
        jax.debug.callback(lambda n: seen.append(int(n)), jnp.sum(index[:, 0] < 8))
        return mix(activation, x, index, *rest)

    monkeypatch.setattr(moe, "mix", counting)
    specjax.decode(
        CausalLM(CONFIG),
        specjax.drafters.Plain(),
        {"target": random_params(CONFIG)},
        np.random.default_rng(0).integers(0, 320, (2, 9)).astype(np.int32),
        np.asarray([9, 3], np.int32),
        key=jax.random.key(0),
        max_new_tokens=np.asarray([1, 4], np.int32),
    )
    jax.effects_barrier()
    read, rounds = [9 + 3], [1, 1, 1]
    assert sorted(seen) == sorted((read + rounds) * CONFIG.num_layers)


def test_layers_have_experts_where_the_config_says_so():
    config = dataclasses.replace(CONFIG, num_layers=7, plain_first=1, plain_layers=(3,))
    assert [config.has_experts(i) for i in range(7)] == [0, 1, 1, 0, 1, 1, 1]
    config = dataclasses.replace(config, sparse_step=2)
    assert [config.has_experts(i) for i in range(7)] == [0, 1, 0, 0, 0, 1, 0]
    shape = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    found = [isinstance(block.mlp, moe.MoE) for block in shape.blocks]
    assert found == [config.has_experts(i) for i in range(7)]


# ------------------------------------------------------------------- files


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_that_transformers_wrote_in_stacks_are_read_like_single_ones(case, tmp_path):
    pytest.importorskip("torch")
    model = golden_maker().random_model(case, seed=3)
    model.save_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "stacks", save_original_format=False)
    names = load_file(tmp_path / "stacks" / "model.safetensors").keys()
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    config = load_config(tmp_path / "single")
    single, stacked = (load_weights(tmp_path / n, config) for n in ("single", "stacks"))
    jax.tree.map(np.testing.assert_array_equal, single, stacked)


def changed(case, folder, change):
    """A copy of a golden checkpoint whose tensors ``change`` has been at."""
    shutil.copytree(GOLDEN / case, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_an_absent_expert_is_named(tmp_path):
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    folder = changed("qwen3_moe", tmp_path / "model", lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"missing \(1\): {name}"):
        load_weights(folder, load_config(folder))


def test_layers_for_multi_token_prediction_are_left_alone_and_no_others(tmp_path):
    def add(*names):
        extra = dict.fromkeys([f"model.layers.{name}.weight" for name in names], np.zeros((3, 3)))
        return lambda tensors: tensors.update(extra)

    modules = "2.eh_proj", "2.mlp.gate", "3.eh_proj", "3.mlp.gate"
    folder = changed("deepseek_v3", tmp_path / "modules", add(*modules))
    config = load_config(folder)
    expected = load_weights(GOLDEN / "deepseek_v3", config)
    jax.tree.map(np.testing.assert_array_equal, load_weights(folder, config), expected)
    folder = changed("deepseek_v3", tmp_path / "more", add("2.mlp.gate"))
    with pytest.raises(ValueError, match="left over"):
        load_weights(folder, config)


def test_a_routers_bias_stays_in_float32_in_a_model_of_bfloat16():
    config = load_config(GOLDEN / "deepseek_v3")
    router = load_weights(GOLDEN / "deepseek_v3", config, "bfloat16")["blocks"][1]["mlp"]["router"]
    stored = load_file(GOLDEN / "deepseek_v3" / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert (router["weight"].dtype, router["bias"].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(router["bias"][...], stored[name])


@pytest.mark.parametrize(
    "case, change, message",
    [
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantized.*'fp8'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "num_experts_per_tok=None"),
        ("deepseek_v2", {"kv_lora_rank": 0}, "kv_lora_rank=0"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True"),
    ],
)
def test_variants_that_are_not_implemented_are_refused(case, change, message):
    hf = json_of(case) | change
    with pytest.raises(ValueError, match=message):
        config_from_hf(hf)


def json_of(case):
    return json.loads((GOLDEN / case / "config.json").read_text())


# ------------------------------------------------------------------- eight bits


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_quantized_experts_say_what_their_dequantized_weights_say(scheme):
    pytest.importorskip("qwix")
    folder = GOLDEN / "deepseek_v3"
    lm = load(folder, tokenizer=False, quantize=scheme)
    layer = lm.params["blocks"][1]
    found = [layer["mlp"]["experts"][name][...] for name in ("gate", "up", "down")]
    assert all(map(quantize.is_quantized, found))
    kept = layer["mlp"]["router"]["weight"][...], layer["attention"]["kv_b"]["weight"][...]
    assert not any(map(quantize.is_quantized, kept))
    x = jax.random.normal(jax.random.key(0), (32, 12))
    index = jnp.asarray(np.random.default_rng(0).integers(0, 8, (12, 2)))
    weight = jnp.full((12, 2), 0.5)
    floats = [quantize.floats(w, jnp.float32) for w in found]
    for form in FORMS.values():
        ours, theirs = (
            jax.jit(lambda *w, f=form: f(jax.nn.silu, x, index, weight, *w))(*experts)
            for experts in (found, floats)
        )
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
