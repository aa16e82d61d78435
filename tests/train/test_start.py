"""The weights from which a decoder's training starts."""

import jax
import numpy as np
import pytest
from flax import nnx
from specjax.train import model

from specjax.models import load, save_pretrained
from specjax.models.decoder import Decoder

SHAPE = model.ModelConfig(
    hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
)
DECODER = SHAPE.decoder(64, 0)


def same(one, other):
    one, other = (jax.tree.leaves(x) for x in (one, other))
    return all(map(np.array_equal, one, other))


def test_a_run_starts_from_random_weights_or_from_the_floats_of_a_saved_model(tmp_path):
    saved = Decoder(DECODER, rngs=nnx.Rngs(5))
    save_pretrained(saved, tmp_path / "float")
    own = nnx.to_pure_dict(nnx.state(saved))
    assert same(model.starting_params(DECODER, 1, str(tmp_path / "float")), own)
    assert same(model.starting_params(DECODER, 5, ""), own)
    assert not same(model.starting_params(DECODER, 1, ""), own)


def test_weights_in_few_bits_are_read_as_the_floats_for_which_they_stand(tmp_path):
    save_pretrained(Decoder(DECODER, rngs=nnx.Rngs(5)), tmp_path / "float")
    few = load(tmp_path / "float", quantize="int8", tokenizer=False)
    save_pretrained(few, tmp_path / "few")
    found = model.starting_params(DECODER, 1, str(tmp_path / "few"))
    assert same(found, load(tmp_path / "few", quantize="float", tokenizer=False).params)
    assert {x.dtype.name for x in jax.tree.leaves(found)} == {"float32"}


def test_a_model_of_another_shape_is_refused(tmp_path):
    save_pretrained(Decoder(DECODER, rngs=nnx.Rngs(5)), tmp_path / "float")
    wider = SHAPE.decoder(96, 0)
    with pytest.raises(ValueError, match="shape|has"):
        model.starting_params(wider, 1, str(tmp_path / "float"))
