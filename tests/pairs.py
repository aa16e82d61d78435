"""A tiny target and draft model in Hugging Face layout, with the embedded tokenizer."""

import json
from pathlib import Path

import pytest
from flax import nnx
from tokenizers import Tokenizer

import specjax
from specjax.models import Decoder, DecoderConfig, save_pretrained

TOKENIZER = Path(specjax.__file__).parent / "models" / "embedded" / "target" / "tokenizer.json"
VOCABULARY = Tokenizer.from_file(str(TOKENIZER)).get_vocab_size()
CONFIG = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,  # tests with this pair do not test the model
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    max_positions=600,
    tie_embeddings=True,
    eos_ids=(0,),
)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Folders of a target, of a draft model, and of one with another tokenizer."""
    root, tokenizer = tmp_path_factory.mktemp("pair"), Tokenizer.from_file(str(TOKENIZER))
    content = json.loads(tokenizer.to_str())
    ids = content["model"]["vocab"]
    ids["self"], ids["def"] = ids["def"], ids["self"]
    other = Tokenizer.from_str(json.dumps(content))
    tokenizers = {"target": tokenizer, "draft": tokenizer, "stranger": other}
    for seed, (name, own) in enumerate(tokenizers.items()):
        save_pretrained(Decoder(CONFIG, rngs=nnx.Rngs(seed)), root / name, tokenizer=own)
    return {name: root / name for name in tokenizers}


@pytest.fixture(scope="session")
def pair(folders):
    """The target and the draft model, loaded."""
    return specjax.load(folders["target"]), specjax.load(folders["draft"])
