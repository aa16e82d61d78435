"""Heads by name, folder and object, through every door; they are right, so all is accepted."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asking import flat
from flax import nnx
from pairs import CONFIG, TOKENIZER
from tokenizers import Tokenizer

import specjax
from specjax import cli, trees
from specjax.drafters.blockwise import Blockwise, BlockwiseConfig
from specjax.drafters.hydra import Hydra, HydraConfig
from specjax.drafters.medusa import Medusa, MedusaConfig
from specjax.models import Decoder, save_pretrained

pytestmark = pytest.mark.usefixtures("quick_compilation")
HEADS, PROMPT, NEW = 3, "def f(x):", 24
COMMON = dict(max_new_tokens=NEW, stop=())
SIZES = dict(hidden_size=CONFIG.hidden_size, vocab_size=CONFIG.vocab_size)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A target in which each token has its successor, whatever stood before it; and weights of
    Medusa heads that know the successors of successors."""
    root = tmp_path_factory.mktemp("heads")
    shape = dataclasses.replace(CONFIG, tie_embeddings=False)
    model, key = Decoder(shape, rngs=nnx.Rngs(0)), jax.random.key(1)
    rows = jax.random.normal(key, (shape.vocab_size, shape.hidden_size))
    rows = rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
    after = jax.random.permutation(key, shape.vocab_size)
    heads, successor = [], after
    for _ in range(HEADS + 1):
        heads.append(jnp.zeros_like(rows).at[successor].set(rows))
        successor = after[successor]
    model.embedding[...], model.lm_head.weight[...] = rows, heads[0]
    for block in model.blocks:
        for layer in (block.attention.o, block.mlp.down):
            layer.weight[...] = jnp.zeros_like(layer.weight[...])
    save_pretrained(model, root / "target", tokenizer=Tokenizer.from_file(str(TOKENIZER)))
    lm = specjax.load(root / "target")
    config = MedusaConfig(num_heads=HEADS, **SIZES)
    drafter = Medusa(config=config, target=lm.target)
    params = nnx.to_pure_dict(zeros(drafter.shapes))
    params["lm_heads"] = {k: {"weight": heads[k + 1]} for k in range(HEADS)}
    specjax.save_drafter(drafter, params, root / "medusa", target=lm)
    return lm, root / "medusa"


def zeros(state):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)


@pytest.fixture(scope="module")
def plain(made):
    return specjax.generate(made[0], PROMPT, **flat(drafter=None, **COMMON)).text


def rounds_of(lm, drafter, plain, **options):
    out = specjax.generate(lm, PROMPT, **flat(drafter=drafter, **COMMON | options))
    assert out.text == plain
    return int(out.stats.rounds.sum())


def test_a_folder_and_what_was_loaded_from_it_draft_what_comes(made, plain):
    lm, folder = made
    heads = specjax.load_drafter(folder, lm)
    assert rounds_of(lm, str(folder), plain) == -(-(NEW - 1) // (HEADS + 1))
    # how much of it pays is measured, and a machine may say: nothing
    assert -(-(NEW - 1) // (HEADS + 1)) <= rounds_of(lm, heads, plain, num_draft="auto") <= NEW


def test_hydra_reads_the_tokens_drafted_so_far(made, plain):
    lm, _ = made
    config = HydraConfig(num_heads=HEADS, tied=True, **SIZES)
    heads = {}
    for k in range(HEADS):  # what follows the last token is what the target says of it
        last = jnp.concatenate([jnp.zeros((32, 32 * (k + 1))), jnp.eye(32)], axis=1)
        none = {"weight": jnp.zeros_like(last), "bias": jnp.zeros(32)}
        heads[k] = {0: {"linear": none, "residual": none | {"weight": last}}}
    drafter = Hydra(config=config, target=lm.target, topology=trees.Expand(2, 3, 10))
    rounds = rounds_of(lm, drafter, plain, drafter_params={"heads": heads})
    assert rounds == NEW // (HEADS + 1)


def test_blockwise_offsets_lie_side_by_side(made):
    lm, _ = made
    config = BlockwiseConfig(num_heads=2, trunk_size=4, **SIZES)
    shapes = {"trunk": (4, 32), "offsets": (64, 4)}
    params = {n: {"weight": jnp.zeros(s), "bias": jnp.zeros(s[0])} for n, s in shapes.items()}
    prompts, options = [PROMPT, PROMPT], dict(max_new_tokens=3, stop=())
    plain = specjax.generate(lm, prompts, **flat(drafter=None, **options))
    # moved by its bias, an offset says the same token whatever was read: that of the first round
    rows = lm.target.head_table(lm.params)
    first, second = (100 * rows[token] for token in np.asarray(plain.tokens[0])[:2])
    params["offsets"]["bias"] = jnp.concatenate([first, second])
    drafter = Blockwise(config=config, target=lm.target)
    out = specjax.generate(lm, prompts, **flat(drafter=drafter, drafter_params=params, **options))
    assert out.texts == plain.texts
    assert out.stats.rounds.tolist() == [1, 1]


def test_a_conversation_keeps_the_state_of_its_heads(made):
    lm, folder = made
    said = []
    for drafter in (None, folder):
        chat = specjax.Chat(lm, **flat(drafter=drafter, **COMMON))
        said.append(["".join(p.text for p in chat.say(words)) for words in (PROMPT, " x")])
    assert said[0] == said[1]


def test_rows_are_served_with_heads(made, plain):
    lm, folder = made
    heads = specjax.load_drafter(folder, lm)
    prompts = ["class A:", PROMPT, "x"]
    served = specjax.serve_offline(lm, prompts, **flat(drafter=heads, batch=2, **COMMON))
    assert next(row.text for row in served.rows if row.index == 1) == plain


def test_the_command_takes_a_folder_of_heads_and_a_tree(made, capsys):
    lm, folder = made
    words = ["generate", PROMPT, "--model", lm.name, "--drafter", str(folder), "--json"]
    assert cli.main([*words, "--tree", "2x1", "--max-tokens", "6"]) == 0
    assert json.loads(capsys.readouterr().out)["drafter"] == "medusa"


def test_what_heads_cannot_do_is_named(made):
    lm, folder = made
    heads = specjax.load_drafter(folder, lm)
    for options, words in (
        (dict(drafter=heads, num_draft=4), "has 3 heads, and chain.4. .* num=3 or less"),
        (dict(drafter=heads, tree="chain:5"), "has 3 heads"),
        (dict(drafter="medusa"), "has no medusa heads of its own"),
        (
            dict(drafter="hydro"),
            "'hydro' is unknown: did you mean 'hydra'. Accepted are the names",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            specjax.generate(lm, PROMPT, **flat(**options))
    other = dataclasses.replace(lm, checkpoint="another")
    with pytest.raises(ValueError, match="loaded for another target"):
        specjax.generate(other, PROMPT, drafter=heads)
    with pytest.raises(ValueError, match="fingerprint .*, and .* has "):
        specjax.load_drafter(folder, other)
    with pytest.raises(ValueError, match="hidden_size=32 .the target: 384.; load"):
        specjax.load_drafter(folder, dataclasses.replace(specjax.load("embedded"), checkpoint=""))


KINDS = ["mtp_heads", "pass_embeddings", "blockwise", "bigram", "mlp_speculator"]
KINDS += ["recurrent_drafting_drafter"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_type_alone_tells_that_a_folder_holds_heads(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_heads": 2}))
    with pytest.raises(ValueError, match="these are heads, for which no memory"):
        specjax.plan_memory("embedded", tmp_path)


def test_heads_without_weights_are_refused_and_heads_are_no_model_to_be_priced(made):
    lm, folder = made
    heads = specjax.load_drafter(folder, lm)
    with pytest.raises(ValueError, match="medusa needs its weights; give them as drafter_params"):
        specjax.generate(lm, PROMPT, drafter=heads.drafter)
    with pytest.raises(ValueError, match="these are heads, for which no memory"):
        specjax.plan_memory(lm.name, folder)
