"""Exporting a trained decoder: bfloat16 safetensors in Hugging Face layout, with fingerprints."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from specjax.models.causal_lm import graph_definition
from specjax.models.config import DecoderConfig

from . import tokenizer as tokenizers
from .scale import by_first

FINGERPRINTS = "fingerprint.json"
FILES = ("config.json", tokenizers.GENERATION, "model.safetensors", "tokenizer.json")


@by_first
def export(
    config: DecoderConfig,
    params,
    folder: Path,
    tokenizer,
    *,
    with_tokenizer: bool = True,
    source: str = "",
) -> None:
    """Writes ``config.json``, ``model.safetensors`` and, unless it is shared, the tokenizer.

    ``source`` is the name by which the tokenizer was loaded: its settings and its chat template are
    then exported with it.

    ``fingerprint.json`` holds the SHA-256 of the files, and that of the tokenizer's behaviour, by
    which a drafter without a tokenizer of its own is matched to its target.
    """
    from specjax.models.hf import save_pretrained

    folder.mkdir(parents=True, exist_ok=True)
    save_pretrained(nnx.merge(graph_definition(config), params), folder, dtype=jnp.bfloat16)
    if with_tokenizer:
        end = tokenizer.id_to_token(config.eos_ids[0]) if config.eos_ids else tokenizers.END_OF_TEXT
        tokenizers.save(tokenizer, folder, end, source)
        ends = {"bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids)}
        (folder / tokenizers.GENERATION).write_text(json.dumps(ends, indent=2) + "\n")
    write_fingerprints(folder, tokenizer)
    print(f"exported to {folder}")


def write_fingerprints(folder: Path, tokenizer) -> None:
    """Writes ``{"tokenizer": sha, "files": {name: sha}}`` for the files that affect generation."""
    files = [folder / name for name in FILES if (folder / name).is_file()]
    record = {
        "tokenizer": tokenizers.fingerprint(tokenizer),
        "files": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
    }
    (folder / FINGERPRINTS).write_text(json.dumps(record, indent=2) + "\n")
