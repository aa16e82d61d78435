"""What an encoder–decoder model is asked: texts or features for its encoder, tokens to begin with.

For T5 a prompt is what the encoder reads. For Whisper the encoder reads ``inputs``, and a prompt
is what the decoder begins with. Where many prompts are decoded in turn, what a row's encoder reads
is its *source*: token ids, or ``Features``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..lm import LM
from .config import EncoderDecoderConfig
from .target import BEGIN, Seq2SeqLM, same_encoder

NARROWEST = 32  # tokens that an encoder reads, at least, in doublings: few programs
FEATURES = "features"  # field of a prompt
_SHARED = weakref.WeakKeyDictionary()  # target -> draft model -> whether one memory serves both


@dataclasses.dataclass(frozen=True, eq=False)
class Features:
    """A window, float32 ``[bins, frames]``: of a file, or an array; ``digest``: of its values."""

    where: Path | np.ndarray
    digest: str

    def read(self) -> np.ndarray:
        """The values. Raises ``ValueError`` or ``OSError`` for a file that holds none."""
        return _array(self.where)


Source = tuple[int, ...] | Features | None


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
        inputs, prompts = of_rows(given, width_of(given)), None
    elif not isinstance(inputs, Mapping) and inputs is not None:
        features = np.asarray(inputs)
        inputs = {"features": features[None] if features.ndim == 2 else features}
    rows = [np.shape(x)[:1] for x in inputs.values()] if inputs else []
    batch = rows[0][0] if rows and rows[0] else 1
    lm.target.check_inputs(batch, inputs)
    ids = _begin(lm, prompts, batch, ids_of)
    return ids, {**inputs, BEGIN: lengths_of(ids)}


def _begin(lm: LM, prompts, batch: int, ids_of: Callable) -> list[list[int]]:
    """The decoder's prompts, one a row."""
    if prompts is None:
        prompts = [usual_begin(lm.config, lm.name)]
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


def usual_begin(config: EncoderDecoderConfig, name: str) -> list[int]:
    """What the decoder begins with where nothing else is asked for; ``name``: of the model."""
    if not config.start_ids:
        raise ValueError(
            f"prompt: {name} knows several languages and names none to begin with; give token ids, "
            "those of specjax.models.start_ids(lm, language='en') or another"
        )
    return list(config.start_ids)


def window_of(config: EncoderDecoderConfig, given) -> np.ndarray:
    """Float32 ``[bins, frames]`` as the encoder reads it, of an array, lists of numbers or the
    ``Path`` of a ``.npy`` file. Raises ``ValueError`` for anything else."""
    array, wanted = _array(given), (config.num_features, 2 * config.max_source)
    if array.shape != wanted:
        raise ValueError(f"features: the shape is {list(array.shape)}, expected {list(wanted)}")
    if not np.isfinite(array).all():
        raise ValueError("features: not all of them are finite numbers")
    return array


def refuse_encoders(lm: LM, what: str) -> None:
    """Raises ``ValueError`` for an encoder-decoder model, whose prompts ``what`` does not take."""
    if encodes(lm):
        raise ValueError(
            f"{what}: {lm.name} is an encoder-decoder model ({lm.config.model_type}), which has no "
            f"place in {what}; generate, stream_text, serve_offline and decode take it"
        )


# ---------------------------------------------------------------- a row at a time


def of_prompt(
    lm: LM, fields: Mapping[str, object], folder: Path, ids_of: Callable
) -> tuple[list[int], Source]:
    """What the decoder begins with, and what the encoder reads, of one prompt.

    Args:
      fields: ``"prompt"`` and, for a model that reads features, ``"features"``: an array or lists
        of numbers, or the name of a ``.npy`` file; the prompt may then be left out.
      folder: of names that are relative.

    Raises:
      ValueError, TypeError: nothing that the model reads.
    """
    if not encodes(lm):
        return ids_of(lm, [fields["prompt"]])[0], None
    config = lm.config
    if config.reads == "tokens":
        (source,) = ids_of(lm, [fields["prompt"]])
        if not 0 <= min(source) <= max(source) < config.vocab_size:
            raise ValueError(f"token ids must be in [0, {config.vocab_size})")
        return _begin(lm, None, 1, ids_of)[0], tuple(source)
    if FEATURES not in fields:
        raise ValueError(f"{lm.name} reads features: give them in a field {FEATURES!r}")
    given = fields[FEATURES]
    where = folder / given if isinstance(given, str | os.PathLike) else given
    array = window_of(config, where)
    digest = hashlib.sha256(array.tobytes()).hexdigest()[:16]
    prompt = fields.get("prompt")
    prompts = None if prompt is None else prompt if isinstance(prompt, str) else [prompt]
    kept = where if isinstance(where, Path) else array
    return _begin(lm, prompts, 1, ids_of)[0], Features(kept, digest)


def of_prompts(lm: LM, prompts, ids_of: Callable) -> list[tuple[list[int], Source]]:
    """``of_prompt`` of each prompt; of a model that reads features these are arrays, names of files
    or mappings."""
    if encodes(lm) and lm.config.reads == FEATURES:
        alone = isinstance(prompts, str | os.PathLike | Mapping) or np.ndim(prompts) == 2
        rows = [prompts] if alone else [] if prompts is None else list(prompts)
        if not rows:
            raise ValueError(f"prompts: give what {lm.name} hears: features, or files of them")
        rows = [row if isinstance(row, Mapping) else {FEATURES: row} for row in rows]
    else:
        rows = [{"prompt": ids} for ids in ids_of(lm, prompts)]
    return [of_prompt(lm, row, Path(), ids_of) for row in rows]


def _array(where) -> np.ndarray:
    """Of a file, an array or lists of numbers. Raises ``ValueError`` for anything else."""
    try:
        where = np.load(where, allow_pickle=False) if isinstance(where, Path) else np.asarray(where)
    except (OSError, ValueError, EOFError) as error:
        what = f"{where} holds" if isinstance(where, Path) else "what was given is"
        raise ValueError(f"features: {what} no array ({error})") from None
    if not isinstance(where, np.ndarray) or where.dtype.kind not in "fiu":
        raise ValueError("features: give one array of numbers, [bins, frames]")
    return np.asarray(where, np.float32, order="C")


def width_of(sources: Sequence[Source]) -> int:
    """Of buffers that hold any of these texts: one of a few sizes; 0 where they are none."""
    if isinstance(sources[0], Features | None):
        return 0
    width = NARROWEST
    while width < max(map(len, sources)):
        width *= 2
    return width


def of_rows(sources: Sequence[Source], width: int) -> dict[str, np.ndarray] | None:
    """``inputs`` of a batch, texts padded to ``width``; None where nothing is read."""
    if sources[0] is None:
        return None
    if isinstance(sources[0], Features):
        return {"features": np.stack([source.read() for source in sources])}
    tokens = np.zeros((len(sources), width), np.int32)
    for row, ids in enumerate(sources):
        tokens[row, : len(ids)] = ids
    return dict(tokens=tokens, lengths=lengths_of(sources))


def lengths_of(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """int32 ``[B]``."""
    return np.asarray([len(row) for row in rows], np.int32)


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
