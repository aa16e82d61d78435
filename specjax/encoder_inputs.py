"""What an encoder–decoder model is asked: texts or features for its encoder, tokens to begin with.

For T5 a prompt is what the encoder reads. For Whisper the encoder reads ``inputs``, and a prompt
is what the decoder begins with.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping

import numpy as np

from .models.lm import LM
from .models.seq2seq import BEGIN, Seq2SeqLM, same_encoder

NARROWEST = 32  # tokens that an encoder reads, at least, in doublings: few programs
_SHARED = weakref.WeakKeyDictionary()  # target -> draft model -> whether one memory serves both


def encodes(lm: LM) -> bool:
    """Whether a model has an encoder."""
    return isinstance(lm.target, Seq2SeqLM)


def read(lm: LM, prompts, inputs, ids_of: Callable) -> tuple[list[list[int]], dict]:
    """The decoder's prompts, and ``inputs`` as ``decode`` takes them.

    Args:
      lm: a model for which ``encodes(lm)``.
      prompts: without ``inputs``, what the encoder reads; else what the decoder begins with, None
        for what the model says it begins with.
      inputs: features alone (``[bins, frames]`` for one row), or a mapping as in
        ``models.seq2seq``.
      ids_of: ``job.prompt_ids``.

    Raises:
      ValueError: nothing to read, or rows that do not match.
    """
    config = lm.target.config
    if inputs is None and config.reads == "tokens":
        if prompts is None:
            raise ValueError(f"prompts: None: {lm.name} reads a text; give it as the prompt")
        given = ids_of(lm, prompts)
        lengths = np.asarray([len(row) for row in given], np.int32)
        width = NARROWEST
        while width < lengths.max():
            width *= 2
        tokens = np.zeros((len(given), width), np.int32)
        for row, ids in enumerate(given):
            tokens[row, : len(ids)] = ids
        inputs, prompts = dict(tokens=tokens, lengths=lengths), None
    elif not isinstance(inputs, Mapping) and inputs is not None:
        features = np.asarray(inputs)
        inputs = {"features": features[None] if features.ndim == 2 else features}
    rows = [np.shape(x)[:1] for x in inputs.values()] if inputs else []
    batch = rows[0][0] if rows and rows[0] else 1
    lm.target.check_inputs(batch, inputs)
    ids = _begin(lm, prompts, batch, ids_of)
    return ids, {**inputs, BEGIN: np.asarray([len(row) for row in ids], np.int32)}


def _begin(lm: LM, prompts, batch: int, ids_of: Callable) -> list[list[int]]:
    """The decoder's prompts, one a row."""
    if prompts is None:
        if not lm.config.start_ids:
            raise ValueError(
                f"prompts: None: {lm.name} knows several languages and names none to begin with; "
                "give prompts=specjax.models.start_ids(lm, language='en') or another"
            )
        prompts = [list(lm.config.start_ids)]
    elif isinstance(prompts, str) or any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(
            "prompts: with inputs these are token ids that the decoder begins with, not a text; "
            "for Whisper see specjax.models.start_ids; None takes the model's own"
        )
    ids = ids_of(lm, prompts)
    ids = ids * batch if len(ids) == 1 else ids
    if len(ids) != batch:
        raise ValueError(f"prompts: {len(ids)} of them for {batch} rows of inputs: give one a row")
    return ids


def refuse_encoders(lm: LM, what: str) -> None:
    """Raises ``ValueError`` for an encoder-decoder model, whose prompts ``what`` does not take."""
    if encodes(lm):
        raise ValueError(
            f"{what}: {lm.name} is an encoder-decoder model ({lm.config.model_type}), which only "
            "generate, stream_text and decode take"
        )


def suppressed(lm: LM, bias):
    """``bias`` (an array, or None) and minus infinity on what the model never says."""
    said = lm.config.suppress_ids if encodes(lm) else ()
    ids = [i for i in said if i < lm.target.vocab_size]
    if not ids:
        return bias
    never = np.zeros(lm.target.vocab_size, np.float32)
    never[ids] = -np.inf
    return never if bias is None else np.asarray(bias) + never


def one_memory(target: LM, draft: object) -> bool:
    """Whether what the target's encoder returns is what the draft model's would, bit by bit.

    Compares the weights, once for each pair.
    """
    if not isinstance(draft, LM) or not encodes(target) or not encodes(draft):
        return False
    known = _SHARED.setdefault(target, weakref.WeakKeyDictionary())
    if draft not in known:
        known[draft] = same_encoder(target.target, target.params, draft.target, draft.params)
    return known[draft]
