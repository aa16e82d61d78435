"""Makes the golden files of T5 and Whisper: ``python tests/golden/make_encoder_decoder.py``.

As ``make.py``, with ``expected.npz`` holding what the encoder reads, the decoder's tokens, their
logits, and what transformers generates greedily, ``[rows, new tokens]``, from the first of them.
"""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path

import numpy as np

T5 = dict(
    vocab_size=64,
    d_model=32,
    d_kv=12,  # heads of 48 features together, unlike the hidden size
    d_ff=40,
    num_layers=3,
    num_decoder_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,  # the 40 tokens below go beyond it
)
WHISPER = dict(
    vocab_size=64,
    d_model=32,
    encoder_layers=3,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=40,
    decoder_ffn_dim=40,
    num_mel_bins=8,
    max_source_positions=20,
    max_target_positions=48,
    decoder_start_token_id=3,
    bos_token_id=2,
    eos_token_id=2,
    pad_token_id=2,
)
# name -> (architecture, config)
CASES: dict[str, tuple[str, dict]] = {
    "t5": ("T5", T5),
    "t5_gated": ("T5", T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "whisper": ("Whisper", WHISPER),
}
SEEDS = {"t5": 8, "t5_gated": 2, "whisper": 6}  # whose greedy texts are varied
LENGTHS = np.asarray([40, 17, 1], np.int32)  # of the texts that T5's encoder reads
NEW = 36  # tokens that are generated


def random_model(case: str, seed: int):
    """A transformers model of ``case`` in float32, every parameter random, values in bfloat16."""
    import torch
    import transformers

    kind, options = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    if not options.get("tie_word_embeddings", True):
        model.lm_head.weight = torch.nn.Parameter(torch.empty(64, 32))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            small = re.search(r"\b[qk](_proj)?\.weight|emb|shared|lm_head", key)
            if value.ndim == 1:
                value.copy_(noise * 0.2 + float("norm" in key))
            elif "relative" in key:
                value.copy_(noise)
            elif small:  # large scores would magnify roundings
                value.copy_(noise * 0.2)
            else:
                value.copy_(noise * 0.3)
            value.copy_(value.bfloat16().float())
    if kind == "T5":
        model.generation_config.eos_token_id = None  # so that no row ends
    return model


def sources(case: str, seed: int) -> dict[str, np.ndarray]:
    """What the encoder reads, as ``inputs`` of ``specjax.decode``."""
    rng = np.random.default_rng(seed)
    if case == "whisper":
        return {"features": rng.normal(size=(3, 8, 40)).astype(np.float32)}
    tokens = rng.integers(2, 64, size=(3, 40)).astype(np.int32)
    return {"tokens": tokens, "lengths": LENGTHS}


def _theirs(inputs) -> dict:
    import torch

    if "features" in inputs:
        return {"input_features": torch.tensor(inputs["features"])}
    tokens, lengths = inputs["tokens"], inputs["lengths"]
    seen = np.arange(tokens.shape[1]) < lengths[:, None]
    return {"input_ids": torch.tensor(tokens).long(), "attention_mask": torch.tensor(seen).long()}


def logits_of(model, inputs, tokens: np.ndarray) -> np.ndarray:
    """Float32 ``[B, T, V]`` of a transformers model."""
    import torch

    with torch.no_grad():
        given = _theirs(inputs)
        return model(**given, decoder_input_ids=torch.tensor(tokens).long()).logits.numpy()


def generated(model, inputs) -> np.ndarray:
    """The tokens that transformers generates greedily after the start, int32 ``[B, NEW]``."""
    import torch

    model = copy.deepcopy(model)  # Whisper's generate edits its configuration
    with torch.no_grad():
        out = model.generate(**_theirs(inputs), max_new_tokens=NEW, do_sample=False).numpy()
    return out[:, -NEW:].astype(np.int32)


def quieten(model, inputs) -> None:
    """Has a Whisper suppress what it says most, at first and later, and the end of the text."""
    free = generated(model, inputs)
    first, often = int(free[0, 0]), int(np.bincount(free.ravel()).argmax())
    model.generation_config.begin_suppress_tokens = [first, 2]
    model.generation_config.suppress_tokens = [2, often if often != first else int(free[0, -1])]


def main(folder: Path) -> None:
    import torch

    for case, seed in SEEDS.items():
        model, inputs = random_model(case, seed), sources(case, seed)
        if case == "whisper":
            model.generation_config.suppress_tokens = [2]
            quieten(model, inputs)
        tokens = np.random.default_rng(seed).integers(64, size=(3, 40)).astype(np.int32)
        logits, new = logits_of(model, inputs, tokens), generated(model, inputs)
        model.to(torch.bfloat16).save_pretrained(folder / case)
        values = inputs | dict(decoder=tokens, logits=logits, generated=new)
        np.savez_compressed(folder / case / "expected.npz", **values)
        print(f"{case}: logits within ±{np.abs(logits).max():.1f}; {new[0]}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(__file__).parent / "encoder_decoder")
