import shutil
from pathlib import Path

import pytest
from checkpoints import GOLDEN, SMALL, byte_tokenizer, random_model

from specjax.models import save_pretrained


@pytest.fixture
def llama(tmp_path):
    """A copy of a golden checkpoint, without a tokenizer, that a test may break."""
    return Path(shutil.copytree(GOLDEN / "llama", tmp_path / "llama"))


@pytest.fixture(scope="session")
def small():
    """A random Llama of 320 rows."""
    return random_model(SMALL)


@pytest.fixture
def folder(small, tmp_path):
    """``small`` and a tokenizer of 257 bytes, as ``load`` takes them."""
    save_pretrained(small, tmp_path / "small", tokenizer=byte_tokenizer())
    return tmp_path / "small"
