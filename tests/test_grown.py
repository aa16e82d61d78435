"""Models grown to another size say what they said."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.train import features
from specjax.train.rows import fresh

import specjax
from benchmarks import grown, heldout, pairs
from benchmarks.tables import decoding
from specjax.checkpoints import HeadLM
from specjax.drafters import Plain, registry
from specjax.drafters.block import BlockConfig
from specjax.drafters.dflash2 import DFlash2Config
from specjax.drafters.domino import DominoConfig
from specjax.drafters.dspark import DSparkConfig
from specjax.drafters.hydra import Hydra, HydraConfig
from specjax.drafters.lilicorr import LiLiCorrConfig
from specjax.drafters.mtp import MTPConfig
from specjax.drafters.mtp_heads import MTPHeadsConfig
from specjax.drafters.pass_embeddings import PaSSConfig
from specjax.drafters.redrafter import ReDrafterConfig
from specjax.drafters.specdec import SpecDecConfig
from specjax.drafters.speculator import Speculator, SpeculatorConfig
from specjax.drafters.xpress import XPressConfig
from specjax.models import DecoderConfig
from specjax.models.causal_lm import graph_definition
from specjax.models.hf import abstract
from specjax.models.seq2seq.config import EncoderDecoderConfig
from specjax.text import drafter_names


@pytest.fixture(scope="module")
def two_sizes():
    """The embedded target, and the same grown a little."""
    sizes = dict(hidden_size=768, intermediate_size=896, num_heads=12, num_kv_heads=4)
    shape = dataclasses.replace(pairs.SHAPES["tiny"], num_layers=7, **sizes)
    lm = specjax.load("embedded", quantize="float")
    return lm, grown.grown_target(lm, shape)


def last_states(lm, tokens):
    """The normed hidden states ``[B, T, F]`` that heads read."""
    graphdef, last = graph_definition(lm.config), (lm.config.num_layers,)
    return features.hidden_states(graphdef, lm.params, tokens, jnp.zeros_like(tokens), last)[0]


TEXT = jnp.asarray([[5, 77, 900, 31, 44, 2000, 66, 5]])


OWN = [{n: getattr(grown.SHAPE, n) for n in grown._SIZES}]
OWN += [{"num_layers": layers, **own} for layers, own in grown.WIDE.items()]


@pytest.mark.parametrize("own", OWN)
def test_grown_models_have_100m_weights(own):
    whole = dataclasses.replace(specjax.load("embedded").config, **own)
    assert 95e6 < sum(x.size for x in jax.tree.leaves(abstract(whole)[1])) < 110e6


def test_a_grown_target_says_what_it_said(two_sizes):
    small, large = (last_states(lm, TEXT) for lm in two_sizes)
    np.testing.assert_allclose(large[..., : small.shape[2]], small, atol=1e-4)
    assert not large[..., small.shape[2] :].any()  # so that the LM head says the same
    added = [np.asarray(x[...]) for x in jax.tree.leaves(two_sizes[1].params["blocks"][6])]
    assert sum(x.any() for x in added) == len(added) - 2  # all but two outputs do their work


def wide_mlp(lm):
    """A speculator whose state is wider than the target's, of three sets of weights."""
    shape = dict(hidden_size=lm.config.hidden_size, vocab_size=lm.config.vocab_size)
    config = SpeculatorConfig(**shape, inner_size=512, scaled=True, one_table=False)
    found = Speculator(config=config, target=lm.target)
    return HeadLM(found, fresh(found, 0), "mlp", "", lm.checkpoint)


def layers_of(lm, **settings):
    """The shape of a layer that a head has, narrower than the target's."""
    shape = dict(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96)
    shape |= dict(vocab_size=lm.config.vocab_size, hidden_size=lm.config.hidden_size)
    return DecoderConfig(**shape, max_positions=1024, **settings)


def with_prefix(lm):
    """One with a layer of its own before the cell."""
    layer = dataclasses.replace(layers_of(lm), hidden_size=64)
    shape = dict(hidden_size=lm.config.hidden_size, vocab_size=lm.config.vocab_size)
    config = SpeculatorConfig(**shape, inner_size=48, prefix=layer)
    found = Speculator(config=config, target=lm.target)
    return HeadLM(found, fresh(found, 0), "prefix", "", lm.checkpoint)


def hydra(lm):
    config = HydraConfig(hidden_size=lm.config.hidden_size, vocab_size=lm.config.vocab_size)
    found = Hydra(config=config, target=lm.target)
    return HeadLM(found, fresh(found, 0), "hydra", "", lm.checkpoint)


OWN = {"mlp": wide_mlp, "prefix": with_prefix, "hydra": hydra}


@pytest.mark.parametrize("name", ["medusa", "speculator", *OWN])
def test_grown_heads_say_what_they_said(two_sizes, name):
    said = []
    for lm in two_sizes:
        small = two_sizes[0]
        heads = OWN[name](small) if name in OWN else drafter_names.named(small, name)
        if lm is not small:
            heads = grown.grown_heads(heads, lm)
        module, hidden = heads.drafter.heads(heads.params), last_states(lm, TEXT)
        read = (TEXT,) if name != "medusa" else ()
        own = (lm.target, lm.params) if name in ("medusa", "hydra") else ()
        said.append(module.logits(hidden, *read, *own))
        assert heads.drafter.features == (lm.config.num_layers,)
    np.testing.assert_allclose(said[1], said[0], rtol=1e-4, atol=5e-4)


def any_heads(lm, name):
    """Heads of a kind with random weights in all places, also where training begins with zeros."""
    sizes = dict(hidden_size=lm.config.hidden_size, vocab_size=lm.config.vocab_size)
    layers = layers_of(lm, qk_norm=True)
    block = dict(layers=layers, block_size=4, mask_token=1, target_layers=(1, 3, 5))
    lattice = dict(lattice_size=8, lattice_heads=2, factor_size=6, num_candidates=4)
    network = dict(num_encoder_layers=2, num_heads=3, head_dim=16, intermediate_size=96)
    network = EncoderDecoderConfig(**sizes, **network, num_layers=1, model_type="t5")
    configs = {
        "hydra++": HydraConfig(**sizes, num_layers=2, prefix=layers_of(lm)),
        "redrafter": ReDrafterConfig(**sizes, exit_size=2 * sizes["hidden_size"]),
        "mtp": MTPConfig(layer=layers, num_modules=3, share_layers=True),
        "mtp_heads": MTPHeadsConfig(layers=dataclasses.replace(layers_of(lm), num_layers=3)),
        "pass": PaSSConfig(**sizes, num_heads=3),
        "specdec": SpecDecConfig(network=network, num_heads=3, mask_token=1, source=8),
        "block": BlockConfig(**block),
        "specdiff": BlockConfig(**block),
        "dspark": DSparkConfig(**block, markov="rnn", markov_rank=8, confidence=True),
        "dflash2": DFlash2Config(**block, conv_group=12, selector_rank=8, num_candidates=4),
        "xpress": XPressConfig(**block, rank=8, inner_size=12, num_passes=2),
        "domino": DominoConfig(**block, gru_size=8, rank=6),
        "lilicorr": LiLiCorrConfig(**block, **lattice),
    }
    kind = registry.drafter_class(name.removesuffix("++"))
    found, rng = kind(config=configs[name], target=lm.target), np.random.default_rng(0)

    def moved(x):
        return x + jnp.asarray(rng.normal(0, 0.05, x.shape), x.dtype)

    return HeadLM(found, jax.tree.map(moved, fresh(found, 0)), name, "", lm.checkpoint)


KINDS = ("hydra++", "redrafter", "mtp", "mtp_heads", "pass", "specdec", "block", "specdiff")
KINDS += ("dspark", "dflash2", "xpress", "domino", "lilicorr")


@pytest.mark.parametrize("name", KINDS)
def test_grown_heads_draft_what_they_drafted(two_sizes, name):
    told = []
    heads = any_heads(two_sizes[0], name)
    for lm in two_sizes:
        own = heads if lm is two_sizes[0] else grown.grown_heads(heads, lm)
        drafting = specjax.Drafting(num=3)
        how = dict(drafter=own, drafting=drafting, max_new_tokens=6)
        rounds = specjax.trace(lm, "def f(x):", **how).rounds
        told.append([[node.token for node in one.nodes] for one in rounds])
    assert told[1] == told[0]
    assert len({tuple(nodes) for nodes in told[0]}) > 1


def test_a_grown_eagle3_head_reads_what_it_read(two_sizes):
    heads = drafter_names.named(two_sizes[0], "eagle3")
    assert heads.drafter.layers == grown.grown_heads(heads, two_sizes[1]).drafter.layers
    read = []
    for lm in two_sizes:
        wide = heads if lm is two_sizes[0] else grown.grown_heads(heads, lm)
        where, blank = wide.drafter.layers, jnp.zeros_like(TEXT)
        states = features.hidden_states(graph_definition(lm.config), lm.params, TEXT, blank, where)
        columns = jnp.concatenate([x[0].T for x in states], axis=0)
        read.append(wide.drafter.heads(wide.params).read(columns))
    np.testing.assert_allclose(read[1], read[0], rtol=1e-3, atol=1e-3)
    head = dataclasses.replace(heads.drafter.config, own_embedding=False)
    borrowed = dataclasses.replace(heads, drafter=dataclasses.replace(heads.drafter, config=head))
    with pytest.raises(ValueError, match="embeddings and an LM head of its own"):
        grown.grown_heads(borrowed, two_sizes[1])


def test_real_text_is_measured_with_grown_models_too(two_sizes, monkeypatch):
    monkeypatch.setattr(grown, "grown_embedded", lambda: two_sizes[1])
    monkeypatch.setattr(heldout, "grown_embedded", lambda: two_sizes[1])
    given, prepare = [], heldout.prepare_fastest

    def seen(lm, text, options, **sizes):
        given.append((lm, options.drafter))
        return prepare(lm, text, options, **sizes)

    monkeypatch.setattr(heldout, "prepare_fastest", seen)
    ways = [{"drafter": "ngram+speculator", "num_draft": 2}]
    settings = dict(ways=ways, temperature=0.0, prompts=2, new=12, repetitions=1)
    figures = [heldout.measure_ways(None, grown=way, **settings) for way in (False, True)]
    (one,), (other,) = (found["ways"] for found in figures)
    assert other["identical"] == "2 of 2" and other["tau"] == one["tau"] > 1
    lms, drafts = zip(*given[len(given) // 2 :], strict=True)
    assert {lm.name for lm in lms} == {two_sizes[1].name}
    assert drafts[0] is None and drafts[1].inner.drafter.config.hidden_size == 768

    rows = [dict(settings, grown=way) for way in (False, True)]
    lines = decoding.drafters(list(zip(rows, figures, strict=True))).splitlines()
    assert [line.split("|")[1].strip() for line in lines[-2:]] == ["embedded", "grown to 100M"]


def test_what_cannot_be_grown_is_refused(two_sizes):
    small, large = two_sizes
    for name in ("self:exit=2", "ngram+self:exit=2"):
        with pytest.raises(ValueError, match="cannot be grown"):
            grown.grown_drafter(name)
    other = dataclasses.replace(drafter_names.named(small, "medusa"), drafter=Plain())
    with pytest.raises(ValueError, match="a Plain cannot be grown"):
        grown.grown_heads(other, large)
    with pytest.raises(ValueError, match="at least"):
        grown.grown_target(large, small.config)
    with pytest.raises(ValueError, match="at least"):  # smaller groups of queries
        shape = dataclasses.replace(large.config, num_heads=8, num_kv_heads=8)
        grown.grown_target(small, shape)
    narrow = dataclasses.replace(large.config, hidden_size=640)
    with pytest.raises(ValueError, match="do not grow"):
        other = grown.grown_target(small, narrow)
        grown.grown_heads(drafter_names.named(small, "medusa"), other)


def test_the_command_writes_the_target_as_a_folder_that_load_takes(monkeypatch, tmp_path):
    small = specjax.load("embedded", quantize="float")
    monkeypatch.setattr(grown, "grown_embedded", lambda: small)
    assert grown.main([str(tmp_path)]) == 0
    again = specjax.load(str(tmp_path), quantize="float")
    assert last_states(again, TEXT).tolist() == last_states(small, TEXT).tolist()
