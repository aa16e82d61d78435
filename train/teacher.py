"""Loads the frozen target that a drafter learns from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specjax.models import lm

from .config import ConfigError

if TYPE_CHECKING:
    import tokenizers


def load_teacher(name: str, vocabulary: tokenizers.Tokenizer, length: int) -> lm.LM:
    """Loads the frozen target of a run and checks that it fits the data.

    Weights that the target's files hold in few bits are read as the floats for which they stand.

    Args:
      name: a name or folder that ``specjax.load`` takes.
      vocabulary: the tokenizer ``data.tokenizer``.
      length: ``data.length``, the tokens of context in a row.

    Raises:
      ConfigError: the target has another tokenizer, or a context shorter than a row.
    """
    teacher = lm.load(name, quantize="float")
    if teacher.tokenizer.vocabulary != {i: t for t, i in vocabulary.get_vocab().items()}:
        raise ConfigError(
            f"teacher={name!r} has another tokenizer than data.tokenizer: give "
            f"data.tokenizer={name!r}, the teacher's own"
        )
    most = teacher.max_positions  # its context, which may be shorter than its config says
    if most is not None and length > most:
        raise ConfigError(
            f"data.length={length}: teacher={name!r} reads up to {most} tokens; give no more"
        )
    return teacher
