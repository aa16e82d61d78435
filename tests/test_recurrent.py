"""Recurrent drafters (MLP and LSTM speculators, ReDrafter) and the beams that ReDrafter drafts."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from toys import own_params

import specjax
from specjax import Sampling, trees
from specjax.drafters import redrafter, speculator
from specjax.drafters.heads import HeadState
from specjax.models import Decoder, DecoderConfig, save_pretrained
from specjax.trees import expand
from specjax.types import Context

VOCAB = 9
GOLDEN = Path(__file__).parent / "golden" / "recurrent"
SPECULATORS = ("mlp", "mlp_tied", "lstm", "lstm_untied")
REDRAFTERS = ("redrafter", "redrafter_sum")
TARGET = DecoderConfig(
    vocab_size=72,
    hidden_size=24,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=12,
    max_positions=64,
    tie_embeddings=True,
    eos_ids=(0,),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target with the hidden size and the vocabulary of the golden drafters."""
    folder = tmp_path_factory.mktemp("target")
    save_pretrained(Decoder(TARGET, rngs=nnx.Rngs(0)), folder)
    return specjax.load(folder, tokenizer=False)


def expected(case):
    return np.load(GOLDEN / case / "expected.npz")


def with_embedding(target, case):
    """The target's weights, with the embeddings that ReDrafter's golden case has."""
    params = nnx.to_pure_dict(target.params)
    return params | {"embedding": jnp.asarray(expected(case)["embedding"])}


def logits(loaded, case, target):
    """Teacher-forced, at all positions of the golden case: ``[B, T, n, V]``."""
    golden = expected(case)
    steps, length = golden["logits"].shape[0], golden["hidden"].shape[1]
    # the golden tokens follow the states; rows are long enough that no step reads beyond them
    hidden = np.pad(golden["hidden"], ((0, 0), (0, steps + 1), (0, 0)))
    tokens = np.pad(golden["tokens"], ((0, 0), (1, 0)))
    kind = redrafter if case in REDRAFTERS else speculator
    model = loaded.drafter.heads(loaded.params)
    if kind is speculator:
        return model.logits(hidden, tokens)[:, :length]
    params = with_embedding(target, case)
    found = model.logits(hidden, tokens, target.target, params, steps)[:, :length]
    return redrafter.kept(found, loaded.drafter.config.kept)


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
    """Returns for each row the set of token paths of this length below the root."""
    parent, depths = (
        np.broadcast_to(x(draft), draft.tokens.shape) for x in (trees.parents, trees.depths)
    )
    found = []
    for row, tokens in enumerate(np.asarray(draft.tokens)):
        ends = np.flatnonzero((depths[row] == depth) & (tokens >= 0))
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

    width, depth, table = 3, 4, np.asarray(laws)
    search = functools.partial(expand.expand, trees.Beams(width, depth), level=level, carry=())
    draft = jax.jit(lambda context: search(context)[0])(context([[5], [2]]))
    for row, root in enumerate((5, 2)):
        beams = [((), 0.0)]
        for length in range(1, depth + 1):
            longer = [
                ((*path, token), value + table[(root, *path)[-1], token])
                for path, value in beams
                for token in range(VOCAB)
            ]
            beams = sorted(longer, key=lambda beam: -beam[1])[:width]
            assert paths(draft, length)[row] == {path for path, _ in beams}


def test_a_search_with_more_beams_than_tokens_is_refused():
    def level(carry, grown, since):
        return jnp.zeros((1, grown.num_nodes - since, VOCAB)), carry

    with pytest.raises(ValueError, match="take a narrower tree"):
        expand.expand(trees.Beams(VOCAB + 1, 2), context([[5]]), level, ())


def test_beams_are_asked_for_in_words():
    assert trees.parse("beams:4x5") == trees.Beams(4, 5)
    assert trees.Beams(4, 5).num_nodes == 21
    for words in ("beams:4", "beams:0x3"):
        with pytest.raises(ValueError, match="beams:4x5"):
            trees.parse(words)


@pytest.mark.parametrize("case", SPECULATORS + REDRAFTERS)
def test_logits_are_the_official_implementations(case, target):
    loaded = specjax.load_drafter(GOLDEN / case, target)
    found = np.asarray(logits(loaded, case, target))
    wanted = expected(case)["logits"].transpose(1, 2, 0, 3)
    if case in REDRAFTERS:  # the official ones are shifted to a greatest of 0, and end at -50000
        wanted = np.where(wanted < -1e4, -np.inf, wanted)
        found = found - found.max(axis=-1, keepdims=True)
        assert (wanted == -np.inf).any()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def drafted(drafter, params, target_params, golden):
    """The draft below ``tokens[:, 0]``, which the target said from ``hidden[:, 0]``."""
    state = HeadState(feature=jnp.asarray(golden["hidden"][:, 0]))
    step = jax.jit(lambda *given: drafter.draft_step(*given)[0])
    return step(params, target_params, state, context(golden["tokens"][:, :1]))


@pytest.mark.parametrize("case", SPECULATORS)
def test_a_chain_of_drafts_is_the_official_implementations(case, target):
    loaded, golden = specjax.load_drafter(GOLDEN / case, target), expected(case)
    draft = drafted(loaded.drafter, loaded.params, target.params, golden)
    np.testing.assert_array_equal(draft.tokens[:, 1:], golden["drafts"])


@pytest.mark.parametrize("case", REDRAFTERS)
def test_the_longest_beams_are_the_official_implementations(case, target):
    loaded = specjax.load_drafter(GOLDEN / case, target, topology="beams:6x3")
    golden = expected(case)
    draft = drafted(loaded.drafter, loaded.params, with_embedding(target, case), golden)
    assert paths(draft, 3) == [{tuple(map(int, beam)) for beam in row} for row in golden["beams"]]


@pytest.mark.parametrize("case", SPECULATORS + REDRAFTERS)
def test_a_saved_drafter_is_loaded_again_as_it_was(case, target, tmp_path):
    loaded = specjax.load_drafter(GOLDEN / case, target)
    specjax.save_drafter(loaded.drafter, loaded.params, tmp_path, target=target)
    again = specjax.load_drafter(tmp_path, target)
    assert again.drafter == loaded.drafter
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    names = [load_file(folder / "model.safetensors").keys() for folder in (GOLDEN / case, tmp_path)]
    once = {name for name in names[1] if ".head." not in name}
    assert once <= names[0]  # what steps or gates share is written once, but LM heads
    theirs = json.loads((GOLDEN / case / "config.json").read_text())
    ours = json.loads((tmp_path / "config.json").read_text())
    sizes = {"vocab_size", "n_predict", "tie_weights", "scale_input", "method", "tie_lstm_embs"}
    sizes |= {"input_hidden_dim", "emb_dim", "model_type", "exit_dim", "num_draft_layers", "rnn"}
    assert {k: theirs[k] for k in sizes & {*theirs}} == {k: ours[k] for k in sizes & {*ours}}


@pytest.mark.parametrize(
    "shape",
    [
        trees.Beams(2, 3),
        trees.Expand(3, 2, 5),
        trees.Expand(3, 2, 5, gain=0.125, branch=0.25, sharpness=2.0),
        trees.Expand(3, 2, 5, siblings=2),
        trees.Expand(1, 2, 6, siblings=5, sharpness=np.float32(1.5)),
        trees.branching(2, 1),
        trees.chain(2),
    ],
    ids=repr,
)
def test_the_tree_and_the_filter_of_a_saved_drafter_are_loaded_again(shape, target, tmp_path):
    loaded = specjax.load_drafter(GOLDEN / "redrafter", target, topology=shape)
    config = dataclasses.replace(loaded.drafter.config, kept=7)
    drafter = dataclasses.replace(loaded.drafter, config=config)
    specjax.save_drafter(drafter, loaded.params, tmp_path)
    again = specjax.load_drafter(tmp_path, target)
    assert (again.drafter.topology, again.drafter.config) == (shape, config)


def test_a_tree_for_measuring_is_not_saved(target, tmp_path):
    loaded = specjax.load_drafter(GOLDEN / "redrafter", target)
    drafter = dataclasses.replace(loaded.drafter, topology=trees.Follow(2, 3))
    with pytest.raises(ValueError, match="Follow.*is for measuring"):
        specjax.save_drafter(drafter, loaded.params, tmp_path)


def broken(case, folder, config=(), tensors=()):
    """A copy of a golden case with entries changed, or taken out (None)."""
    shutil.copytree(GOLDEN / case, folder, dirs_exist_ok=True)
    for name, read, changes in (("config.json", None, config), ("model.safetensors", 1, tensors)):
        path = folder / name
        content = load_file(path) if read else json.loads(path.read_text())
        content = {k: v for k, v in (content | dict(changes)).items() if v is not None}
        save_file(content, path) if read else path.write_text(json.dumps(content))


@pytest.mark.parametrize(("case", "tables"), [("mlp", 3), ("mlp_tied", 1)])
def test_names_may_lack_their_prefix_and_shared_weights_have_several(
    case, tables, target, tmp_path
):
    tensors = load_file(GOLDEN / case / "model.safetensors")
    renamed = {name.removeprefix("speculator."): x for name, x in tensors.items()}
    if tables == 1:
        renamed["emb.2.weight"] = renamed["emb.0.weight"]
    broken(case, tmp_path, tensors=dict.fromkeys(tensors) | renamed)
    loaded = specjax.load_drafter(tmp_path, target)
    assert len(loaded.params["embeddings"]) == tables
    wanted = specjax.load_drafter(GOLDEN / case, target).params
    jax.tree.map(np.testing.assert_array_equal, loaded.params, wanted)


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("mlp", dict(config={"emb_dim": 32}), "hidden_size=32"),
        ("lstm", dict(config={"vocab_size": 80}), "vocab_size=80"),
        ("lstm", dict(config={"proj_dim": "16.32"}), "16.32"),
        ("lstm", dict(config={"method": "sum_rnn"}), "sum_rnn"),
        ("mlp", dict(config={"n_predict": None}), "lacks n_predict"),
        ("mlp", dict(config={"n_predict": 2}), "left over"),
        ("mlp_tied", dict(config={"n_predict": 1}), "n_predict=1 leaves nothing to tie"),
        ("mlp", dict(tensors={"speculator.ln.1.bias": None}), "ln.1.bias"),
        ("mlp_tied", dict(tensors={"speculator.emb.0.weight": None}), "emb.0.weight"),
        ("redrafter", dict(config={"exit_dim": None}), "lacks exit_dim"),
        ("redrafter", dict(config={"specjax": {"kept": "5"}}), "kept='5': it must be a whole"),
        ("redrafter", dict(config={"exit_dim": 0}), "exit_dim=0: it must be at least 1"),
        ("redrafter", dict(config={"rnn": "false"}), "rnn='false': it must be true or false"),
        ("redrafter", dict(config={"num_draft_layers": 3}), "lm_head.3.weight"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(case, changes, words, target, tmp_path):
    broken(case, tmp_path, **changes)
    with pytest.raises(ValueError, match=words):
        specjax.load_drafter(tmp_path, target)


def test_a_tree_deeper_than_the_heads_is_refused(target):
    with pytest.raises(ValueError, match="3 heads"):
        specjax.load_drafter(GOLDEN / "mlp", target, topology=trees.chain(4))


def test_the_state_of_a_node_is_that_of_its_own_path(target):
    """In a tree, logits below a node are those of its path drafted alone."""
    loaded, golden = specjax.load_drafter(GOLDEN / "lstm", target), expected("lstm")
    weights = {"target": target.params, "drafter": loaded.params}
    state = HeadState(feature=jnp.asarray(golden["hidden"][:, 0]))
    shape = trees.branching(2, 2, 1)
    drafter = dataclasses.replace(loaded.drafter, topology=shape, sibling_sampling="iid")
    paths = ((0, 1, 3), (0, 2, 6))  # nodes, from the root down

    @jax.jit
    def both(weights, state, hot):
        draft, _ = drafter.draft_step(*own_params(weights), state, hot)
        level, carry = drafter.make_level(*own_params(weights), state, hot)
        alone = []
        for path in paths:
            states, tokens = carry, draft.tokens[:, jnp.asarray(path)]
            for i in range(len(path)):
                chain = trees.chain_draft(hot, tokens[:, 1 : i + 1])
                found, states = level(states, chain, i)
                alone.append(jax.nn.softmax(found[:, 0]))
        return draft, alone

    hot = context(golden["tokens"][:, :1], Sampling(temperature=1.0))
    draft, alone = both(weights, state, hot)
    below = [draft.law[0, shape.parents.index(node)] for path in paths for node in path]
    for own, law in zip(below, alone, strict=True):
        np.testing.assert_allclose(draft.laws[:, own], law, rtol=1e-4, atol=1e-6)
