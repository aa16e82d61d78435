"""The suite ``cpu-peers``: its guard against the load of others, its files, and its engines."""

import dataclasses
import itertools
import os
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import pairs, peers, runner, suites
from benchmarks.cpu_peers import engine, load, measure
from benchmarks.cpu_peers.children import Child
from benchmarks.cpu_peers.gguf_file import four_bits
from benchmarks.cpu_peers.weights import integers, quantization
from benchmarks.rows import Bench
from benchmarks.tables import cpu_peers as table
from specjax.kernels.quantized import Quantized, is_quantized, pack, widen
from specjax.models import save_pretrained
from specjax.models.quantize import encode

NAMED = SimpleNamespace(
    target=SimpleNamespace(fingerprint="a"), draft=SimpleNamespace(fingerprint="b")
)
PEERS = [name for name in engine.ADAPTERS if name != engine.OURS]

# ---------------------------------------------------------------- the load of others


def readings(others):
    """Makes readings in which measured processes use one core, and others ``others[i]`` cores in
    the second of turn ``i``."""
    clock, busy, own = 0.0, 0.0, 0.0
    for used in others:
        yield load.Reading(clock, busy, own)
        clock, busy, own = clock + 1, busy + 1 + used, own + 1
        yield load.Reading(clock, busy, own)


def kept(others, repetitions, **options):
    made, count = readings(others), itertools.count()
    calls = {"a": lambda: float(next(count)), "b": lambda: -1.0}
    options = dict(reading=lambda: next(made), pause=0.0) | options
    return load.in_turn(calls, repetitions=repetitions, **options)


def test_turns_in_which_others_ran_are_measured_again_once_the_machine_is_quiet():
    turn, probe = [0], [0]
    seconds, disturbed = kept([*turn, 0.9, 0.5, *probe, *turn, 0.2, *probe, 0.01], 3)
    assert seconds["a"].tolist() == [0, 2, 4] and disturbed == 2
    assert seconds["b"].tolist() == [-1, -1, -1]


def test_a_machine_that_is_never_quiet_is_given_up_with_the_load_that_was_seen():
    with pytest.raises(load.DisturbedError, match=r"others used 0\.50 cores.*end other programs"):
        kept([0.5] * 100, 2, patience=3)
    with pytest.raises(load.DisturbedError, match=r"21 of 21 turns, the last with 0\.40 cores"):
        kept([0.4, 0.0] * 100, 2)


def test_without_a_reading_every_turn_is_kept():
    seconds, disturbed = kept([], 4, reading=None)
    assert seconds["a"].tolist() == [0, 1, 2, 3] and not disturbed


def test_ticks_of_processors_and_of_processes_with_any_name_are_read(tmp_path):
    tick = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text("cpu  100 10 20 5000 300 3 4 13 50 50\ncpu0 1 1 1\n")
    (tmp_path / "7").mkdir()
    before = " ".join(map(str, range(1, 11)))  # state to cmajflt
    (tmp_path / "7" / "stat").write_text(f"7 (a) R (b) S {before} 40 2 9 9 0\n")
    found = load.read([7], tmp_path)
    assert found.busy * tick == pytest.approx(150) and found.own * tick == pytest.approx(42)


def test_fault_time_that_another_program_took_is_not_taken_for_idle():
    quiet = load.Reading(0, 0, 0), load.Reading(10, 18.0, 18.0)
    other = load.Reading(0, 0, 0), load.Reading(10, 18.0, 17.0)
    assert load.is_quiet(*quiet) and not load.is_quiet(*other)
    assert load.others(*other) == pytest.approx(0.1)


# ---------------------------------------------------------------- files, rows, tables


def test_blocks_of_four_bits_are_the_integers_that_specjax_computes_with():
    rng = np.random.default_rng(0)
    values, scale = rng.integers(0, 16, (6, 64)), rng.normal(size=(6, 2)).astype(np.float32)
    weight = Quantized(pack(jnp.asarray(values)), scale)
    blocks = four_bits(weight).reshape(6, 2, 18)
    read = blocks[..., :2].copy().view(np.float16)[..., 0]
    np.testing.assert_allclose(read, scale, rtol=1e-3)
    halves = blocks[..., 2:] & 15, blocks[..., 2:] >> 4
    np.testing.assert_array_equal(np.concatenate(halves, axis=-1).reshape(6, 64), values)
    signed, scales = integers(weight)
    np.testing.assert_array_equal(signed, values - 8)
    np.testing.assert_array_equal(scales, scale)


def test_rows_name_the_installed_engines_and_those_to_install(monkeypatch):
    known = dict(engine.ADAPTERS)
    known["llama.cpp"] = dataclasses.replace(known["llama.cpp"], needs=("no_such_module",))
    known["OpenVINO GenAI"] = dataclasses.replace(known["OpenVINO GenAI"], needs=("numpy",))
    for place in (engine, suites, measure):
        monkeypatch.setattr(place, "ADAPTERS", known)
    chosen = {"engines": ["llama.cpp", "OpenVINO GenAI"], "precisions": ["int4"]}
    pair, embedded, missing = suites.rows_of("cpu-peers", **chosen)
    assert pair["engines"] == embedded["engines"] == ["OpenVINO GenAI"]
    assert missing["engines"] == ["llama.cpp"] and embedded["pair"] == "embedded"
    in_float32 = suites.rows_of("cpu-peers", **chosen | {"precisions": ["float32"]})
    read = [(row["pair"], row.get("checkpoint")) for row in in_float32[:-1]]
    assert read == [("100m", "float32"), ("100m", "bfloat16"), ("embedded", "float32")]
    with pytest.raises(ValueError, match="--engines vllm: known: specjax, llama.cpp"):
        suites.rows_of("cpu-peers", engines=["vllm"])
    settings = {k: v for k, v in missing.items() if k != "kind"}
    with pytest.raises(peers.MissingPeerError, match='GGML_NATIVE=ON" pip install') as raised:
        measure.cpu_peers(None, **settings)  # nothing is made for it
    assert "llama.cpp: no_such_module not installed" in str(raised.value)


def test_a_precision_that_a_peer_lacks_is_said(tmp_path, monkeypatch):
    bare = dataclasses.replace(engine.ADAPTERS["transformers"], needs=())
    monkeypatch.setitem(engine.ADAPTERS, "transformers", bare)
    ready, lacking = measure._prepared(Bench(tmp_path), NAMED, "int4", ["transformers"])
    assert not ready and "no weights in 4 bits" in lacking["transformers"]


def test_a_peer_that_fails_at_its_first_request_is_named_and_ours_never_left_out(monkeypatch):
    """With no peer left there is nothing to compare, and the reason is the peer's own."""
    shape = SimpleNamespace(vocab_size=64, context_length=512)
    target = SimpleNamespace(config=shape, fingerprint="a")
    made = SimpleNamespace(synthetic=True, target=target, draft=NAMED.draft, folders=("t", "d"))
    monkeypatch.setattr(Bench, "pair", lambda *_: made)
    adapters = {name: SimpleNamespace(missing=()) for name in engine.ADAPTERS}
    failing = {"llama.cpp", "transformers"}

    def alone(name, *_):
        if name in failing:
            raise measure.EngineError(f"{name}: no\n such instruction")
        return {}

    monkeypatch.setattr(measure, "ADAPTERS", adapters)
    monkeypatch.setattr(measure, "_prepared", lambda *a: (dict.fromkeys(a[-1]), {}))
    monkeypatch.setattr(measure, "_started", lambda name, *_: name)
    monkeypatch.setattr(measure, "_alone", alone)
    ask = lambda: measure.cpu_peers(  # noqa: E731
        Bench(None), pair="tiny", precision="float32", engines=sorted(failing)
    )
    with pytest.raises(peers.MissingPeerError, match="llama.cpp: no such instruction; transf"):
        ask()
    failing.add(engine.OURS)
    with pytest.raises(measure.EngineError, match=f"{engine.OURS}: no"):
        ask()


def test_the_table_shows_engines_ratios_and_what_was_not_measured():
    spread = {"median": 0.02, "q25": 0.019, "q75": 0.021, "n": 7}
    method = {"tokens_per_second": spread, "seconds_per_round": spread, "rounds": 32, "tau": 2.0}
    method |= {"same_as_ours": 0.5, "same_as_plain": 1.0}
    own = {"scheme": "F32", "version": "1.2", "load_seconds": 0.5, "first_token": spread}
    own |= {"memory": {"resident": 5e8, "peak": 6e8}, "passes": {1: spread, 8: spread}}
    own |= {"methods": {"plain": method, "draft": method | {"seconds_per_round": None}}}
    ratio = {"median": 1.25, "low": 1.1, "high": 1.4, "confidence": 0.98}
    figures = {"engines": {"specjax": own, "llama.cpp": own | {"passes": {}}}, "threads": 2}
    figures |= {"against": {"a round": {"peer": "llama.cpp", "ratio": ratio}}, "disturbed": 3}
    figures |= {"lacking": {"x": "pip install x"}, "quiet": True, "synthetic": True}
    figures = runner.plain_numbers(figures)  # as they are read from a file
    row = {"pair": "100m", "precision": "int8", "num_draft": 4}
    page = table.cpu_peers([(row, figures)])
    assert "### 100m (synthetic), int8\n" in page and "3 turns in which others ran" in page
    assert "| a round | llama.cpp | 1.25 [1.10, 1.40] |" in page
    assert "- x was not measured: pip install x" in page
    (line,) = (x for x in page.splitlines() if x.startswith("| llama.cpp |"))
    assert "| 20.0 | – | – |" in line and "| –, – |" in line and "50 %, 50 %, –" in line
    page = table.cpu_peers([(row | {"checkpoint": "bfloat16"}, figures | {"quiet": False})])
    assert "### 100m (synthetic), int8, checkpoints in bfloat16\n" in page
    assert "say nothing about speed" in page


# ---------------------------------------------------------------- the engines


def tiny(change=1.0):
    """A pair of random weights; ``change`` multiplies one matrix of the target's last layer."""
    shape = dataclasses.replace(pairs.SHAPES["tiny"], max_positions=512)
    weights = pairs._times(
        pairs._random(shape, "float32", 0),
        lambda path: change if path == "blocks.3.mlp.down.weight" else 1.0,
    )
    target, draft = pairs._lms("tiny", shape, weights)
    return pairs.Pair("tiny", target, draft, asked=0.5)


def said(name, folder, precision="float32", change=1.0):
    """``{method: (tokens, rounds)}`` of an engine in a process of its own, and its answers."""
    made, adapter, prompt = tiny(change), engine.ADAPTERS[name], list(range(5, 29))
    adapter.prepare(made, precision, folder / "prepared")
    for part in ("target", "draft"):
        save_pretrained(getattr(made, part), folder / part)
    folders = (str(folder / "target"), str(folder / "draft"))
    setting = engine.Setting(folders, str(folder / "prepared"), precision, 2, 128)
    with Child(name, setting) as child:
        command = dict(do="text", prompt=prompt, new=24, num_draft=4)
        texts = {m: child.ask(**command, method=m) for m in child.started["methods"]}
        assert child.ask(do="pass", nodes=5, length=40)["seconds"] > 0
        assert child.ask(do="memory")["peak"] > 1 << 20
    return texts


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return said(engine.OURS, tmp_path_factory.mktemp("ours"))


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_emits_our_tokens_and_others_of_changed_weights_run_by_its_engine(
    name, ours, tmp_path
):
    if missing := engine.ADAPTERS[name].missing:
        pytest.skip(f"needs {', '.join(missing)}")

    def same(texts, method):
        a, b = (np.asarray(x["tokens"]) for x in (ours["plain"], texts[method]))
        return peers.same_text([a], [b])

    texts = said(name, tmp_path / "same")
    assert {m: same(texts, m) for m in texts} == dict.fromkeys(texts, 1.0)
    # peers read the prompt by a pass that emits one token, and ours begins with a round
    assert texts["draft"]["rounds"] - ours["draft"]["rounds"] in (0, 1)
    assert same(said(name, tmp_path / "changed", change=3.0), "plain") < 1


@pytest.mark.parametrize("precision", engine.PRECISIONS[1:])
@pytest.mark.parametrize("name", PEERS)
def test_a_precision_gives_text_or_a_reason_run_by_its_engine(name, precision, tmp_path):
    if missing := engine.ADAPTERS[name].missing:
        pytest.skip(f"needs {', '.join(missing)}")
    try:
        texts = said(name, tmp_path, precision)
    except engine.UnsupportedError as error:
        assert precision in str(error) or f"{precision[3:]} bits" in str(error)
        return
    assert {len(x["tokens"]) for x in texts.values()} == {24}


def widened(lm, precision):
    """The float model whose weights are the numbers for which the quantized ones stand."""
    flat = []
    for path, param in nnx.to_flat_state(lm.params):
        name, value = ".".join(map(str, path)), param.get_value()
        held = encode(name, value, quantization(precision, lm.config), jnp.float32)
        flat.append((path, param.replace(widen(held) if is_quantized(held) else held)))
    return nnx.from_flat_state(flat)


@pytest.mark.parametrize("precision", engine.PRECISIONS)
def test_openvinos_file_holds_our_numbers_run_by_its_engine(precision, tmp_path):
    openvino = pytest.importorskip("openvino")
    from benchmarks.cpu_peers import openvino_ir

    lm, ids = tiny().target, np.arange(5, 29)[None]
    openvino_ir.write(lm, precision, tmp_path / "model.xml")
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    exact["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
    model = openvino.Core().compile_model(str(tmp_path / "model.xml"), "CPU", exact)
    places, mask = np.arange(24)[None], np.ones((1, 24), np.int64)
    found = model([ids, mask, places, np.zeros(1, np.int32)])["logits"]
    if precision in ("int8", "int4"):
        params = widened(lm, precision)
    else:
        params = jax.tree.map(lambda x: x.astype(precision).astype(jnp.float32), lm.params)
    ours = nnx.merge(pairs.graph_definition(lm.config), params)(jnp.asarray(ids))
    np.testing.assert_allclose(found, ours, atol=2e-3)


@pytest.mark.parametrize("precision", engine.PRECISIONS)
def test_the_gguf_file_holds_our_numbers_run_by_its_engine(precision, tmp_path):
    gguf = pytest.importorskip("gguf")
    from benchmarks.cpu_peers import gguf_file

    lm = tiny().target
    gguf_file.write(lm, precision, tmp_path / "model.gguf")
    stored = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert len(stored) == 2 + 9 * lm.config.num_layers
    float_model = lm.params if precision != "int4" else widened(lm, "int4")
    tolerance = {"float32": 0, "bfloat16": 1e-2, "int8": 1e-2, "int4": 1e-2}[precision]
    for name, path in (
        ("token_embd.weight", ("embedding",)),
        ("blk.2.ffn_down.weight", ("blocks", 2, "mlp", "down", "weight")),
        ("blk.3.attn_v.weight", ("blocks", 3, "attention", "v", "weight")),
        ("blk.1.attn_norm.weight", ("blocks", 1, "attention_norm", "weight")),
    ):
        found = gguf.quants.dequantize(stored[name].data, stored[name].tensor_type)
        ours = np.asarray(dict(nnx.to_flat_state(float_model))[path].get_value())
        largest = np.max(np.abs(ours))
        np.testing.assert_allclose(found, ours, atol=tolerance * largest, rtol=0)
