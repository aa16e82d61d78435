"""The inputs of encoder–decoder models: texts or features for the encoder, the decoder's prompt.

For T5 the encoder reads the prompt. For Whisper the encoder reads ``inputs``, and the decoder
begins with the prompt. Where many prompts are decoded in turn, the input of a row's encoder is
called its *source*: token ids, or ``Features``.
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

NARROWEST = 32  # the least width of an encoder's input; widths double, so programs are few
FEATURES = "features"  # the field of a prompt
_SHARED = weakref.WeakKeyDictionary()  # target -> draft model -> whether one memory serves both


@dataclasses.dataclass(frozen=True, eq=False)
class Features:
    """A window of features, float32 ``[bins, frames]``, from a file or an array.

    ``digest`` is a hash of the values.
    """

    where: Path | np.ndarray
    digest: str

    def read(self) -> np.ndarray:
        """Returns the values. Raises ``ValueError`` or ``OSError`` for a file without features."""
        return _array(self.where)


Source = tuple[int, ...] | Features | None


def encodes(lm: LM) -> bool:
    """Whether a model has an encoder."""
    return isinstance(lm.target, Seq2SeqLM)


def read(lm: LM, prompts, inputs, ids_of: Callable) -> tuple[list[list[int]], dict]:
    """Returns the decoder's prompts, and ``inputs`` as ``decode`` takes them.

    Args:
      lm: a model for which ``encodes(lm)``.
      prompts: without ``inputs``, the texts for the encoder; with ``inputs``, the decoder's
        prompts, where None stands for the model's default prompt.
      inputs: features alone (``[bins, frames]`` for one row), or a mapping as in
        ``models.seq2seq.target``.
      ids_of: a function from a prompt to its token ids.

    Raises:
      ValueError: there is nothing to read, or the numbers of rows differ.
    """
    config = lm.target.config
    if inputs is None and config.reads == "tokens":
        if prompts is None:
            raise ValueError(f"prompts=None: {lm.name} reads a text; give it as the prompt")
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
    """Returns the token ids of the decoder's prompts, one for each row."""
    if prompts is None:
        prompts = [usual_begin(lm.config, lm.name)]
    elif isinstance(prompts, str) or any(isinstance(prompt, str) for prompt in prompts):
        raise ValueError(
            f"prompts={prompts!r:.60}: give token ids that the decoder begins with, such as "
            "specjax.models.start_ids makes for Whisper, or None for the model's default"
        )
    ids = ids_of(lm, prompts)
    ids = ids * batch if len(ids) == 1 else ids
    if len(ids) != batch:
        raise ValueError(f"prompts: {len(ids)} of them for {batch} rows of inputs: give one a row")
    return ids


def usual_begin(config: EncoderDecoderConfig, name: str) -> list[int]:
    """Returns the decoder's default prompt; errors call the model ``name``."""
    if not config.start_ids:
        raise ValueError(
            f"prompt: {name} knows several languages and has no default prompt; give token ids, "
            "for example those of specjax.models.start_ids(lm, language='en')"
        )
    return list(config.start_ids)


def window_of(config: EncoderDecoderConfig, given) -> np.ndarray:
    """Returns features, float32 ``[bins, frames]``, as the encoder reads them.

    Args:
      config: the shape of the model.
      given: an array, lists of numbers, or the ``Path`` of a ``.npy`` file.

    Raises:
      ValueError: ``given`` is none of these, or its shape is wrong.
    """
    array, wanted = _array(given), (config.num_features, 2 * config.max_source)
    if array.shape != wanted:
        raise ValueError(f"features: the shape is {list(array.shape)}, expected {list(wanted)}")
    if not np.isfinite(array).all():
        wrong = int((~np.isfinite(array)).sum())
        raise ValueError(
            f"features: not all of them are finite numbers: mend {wrong} of {array.size}"
        )
    return array


def refuse_encoders(lm: LM, what: str) -> None:
    """Raises ``ValueError`` for an encoder-decoder model, which the function ``what`` refuses."""
    if encodes(lm):
        raise ValueError(
            f"{what}: {lm.name} is an encoder-decoder model ({lm.config.model_type}), which has no "
            f"place in {what}; generate, stream_text, serve_offline and decode take it"
        )


# ---------------------------------------------------------------- a row at a time


def of_prompt(
    lm: LM, fields: Mapping[str, object], folder: Path, ids_of: Callable
) -> tuple[list[int], Source]:
    """Returns the decoder's prompt and the encoder's source for one prompt.

    Args:
      lm: a model for which ``encodes(lm)``.
      fields: ``"prompt"`` and, for a model that reads features, ``"features"``: an array or lists
        of numbers, or the name of a ``.npy`` file; the prompt may then be left out.
      folder: the folder to which file names are relative.
      ids_of: a function from a prompt to its token ids.

    Raises:
      ValueError: the fields are nothing that the model reads.
      TypeError: a field has the wrong type.
    """
    if not encodes(lm):
        return ids_of(lm, [fields["prompt"]])[0], None
    config = lm.config
    if config.reads == "tokens":
        (source,) = ids_of(lm, [fields["prompt"]])
        if not 0 <= min(source) <= max(source) < config.vocab_size:
            raise ValueError(
                f"prompt: ids from {min(source)} to {max(source)}: token ids must be in "
                f"[0, {config.vocab_size})"
            )
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
    """Calls ``of_prompt`` for each prompt.

    The prompts of a model that reads features are arrays, names of files, or mappings.
    """
    if encodes(lm) and lm.config.reads == FEATURES:
        alone = isinstance(prompts, str | os.PathLike | Mapping) or np.ndim(prompts) == 2
        rows = [prompts] if alone else [] if prompts is None else list(prompts)
        if not rows:
            raise ValueError(
                f"prompts={prompts!r}: {lm.name} reads features; give arrays of them, or files"
            )
        rows = [row if isinstance(row, Mapping) else {FEATURES: row} for row in rows]
    else:
        rows = [{"prompt": ids} for ids in ids_of(lm, prompts)]
    return [of_prompt(lm, row, Path(), ids_of) for row in rows]


def _array(where) -> np.ndarray:
    """Reads an array from a file or from numbers. Raises ``ValueError`` for anything else."""
    try:
        where = np.load(where, allow_pickle=False) if isinstance(where, Path) else np.asarray(where)
    except (OSError, ValueError, EOFError) as error:
        what = f"{where} holds" if isinstance(where, Path) else f"a {type(where).__name__} is"
        raise ValueError(f"features: {what} no array ({error})") from None
    if not isinstance(where, np.ndarray) or where.dtype.kind not in "fiu":
        raise ValueError("features: expected one array of numbers, [bins, frames]: give that")
    return np.asarray(where, np.float32, order="C")


def width_of(sources: Sequence[Source]) -> int:
    """The width of a buffer for all these texts, one of a few sizes; 0 if there are no texts."""
    if isinstance(sources[0], Features | None):
        return 0
    width = NARROWEST
    while width < max(map(len, sources)):
        width *= 2
    return width


def of_rows(sources: Sequence[Source], width: int) -> dict[str, np.ndarray] | None:
    """The ``inputs`` of a batch, with texts padded to ``width``; None if there is no source."""
    if sources[0] is None:
        return None
    if isinstance(sources[0], Features):
        return {"features": np.stack([source.read() for source in sources])}
    tokens = np.zeros((len(sources), width), np.int32)
    for row, ids in enumerate(sources):
        tokens[row, : len(ids)] = ids
    return dict(tokens=tokens, lengths=lengths_of(sources))


def lengths_of(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """The lengths of rows, int32 ``[B]``."""
    return np.asarray([len(row) for row in rows], np.int32)


def suppressed(lm: LM, bias):
    """``bias`` (an array, or None) with minus infinity for tokens that are never generated."""
    said = lm.config.suppress_ids if encodes(lm) else ()
    ids = [i for i in said if i < lm.target.vocab_size]
    if not ids:
        return bias
    never = np.zeros(lm.target.vocab_size, np.float32)
    never[ids] = -np.inf
    return never if bias is None else np.asarray(bias) + never


def one_memory(target: LM, draft: object) -> bool:
    """Whether the encoders of target and draft model return the same memory, bit by bit.

    The weights of each pair of models are compared once.
    """
    if not isinstance(draft, LM) or not encodes(target) or not encodes(draft):
        return False
    known = _SHARED.setdefault(target, weakref.WeakKeyDictionary())
    if draft not in known:
        known[draft] = same_encoder(target.target, target.params, draft.target, draft.params)
    return known[draft]
