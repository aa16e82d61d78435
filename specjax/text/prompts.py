"""Turns prompts, which are texts, token ids or conversations, into checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from ..models.lm import LM
from ..models.tokenizer import Tokenizer
from ..types import Target

MESSAGES = "messages"  # the only key of a conversation


def prompt_ids(lm: LM, prompts) -> list[list[int]]:
    """Returns the token ids of each prompt.

    Args:
      lm: the target.
      prompts: a text, its token ids, or a conversation, ``{"messages": [{"role": "user",
        "content": "..."}]}``, which the model's chat template turns into tokens; or a list of
        these. A model without a tokenizer takes token ids only.

    Raises:
      ValueError: the batch or a prompt is empty, a prompt is a text for a model without a
        tokenizer, or a conversation has another form, or ends with an answer.
      TypeError: a prompt is none of these, or ``lm`` is not an ``LM``.
    """
    check_lm(lm)
    if isinstance(prompts, jax.Array):
        prompts = np.asarray(prompts)
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence | Mapping | np.ndarray):
        raise _no_prompt(prompts)
    if isinstance(prompts, str | Mapping) or (
        len(prompts) and isinstance(prompts[0], int | np.integer)
    ):
        prompts = [prompts]
    if not len(prompts):
        raise ValueError("prompts: the batch is empty; give at least one prompt")
    ids = []
    for row, prompt in enumerate(prompts):
        which = f"prompt {row}" if len(prompts) > 1 else "the prompt"
        if isinstance(prompt, jax.Array):
            prompt = np.asarray(prompt)
        if isinstance(prompt, Mapping):
            prompt = _answered(lm, prompt, which)
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence | np.ndarray):
            raise _no_prompt(prompt)
        tokens = _encoded(lm, prompt, which) if isinstance(prompt, str) else prompt
        if not len(tokens):
            raise ValueError(
                f"{which} is empty: give at least one character, or the ids of a token to begin "
                "with, such as [lm.config.bos_id]"
            )
        if not all(isinstance(token, int | np.integer) for token in tokens):
            raise _no_prompt(prompt)
        ids.append([int(token) for token in tokens])
    return ids


def check_lm(lm) -> None:
    """Raises ``TypeError`` if ``lm`` is not an ``LM``."""
    if isinstance(lm, LM):
        return
    way_out = "give a model from specjax.load as the first argument, and the prompts as the second"
    if isinstance(lm, Target):
        way_out = (
            "a target alone has no weights and no tokenizer: give specjax.LM.of(target, params, "
            "tokenizer=None), or decode token ids with specjax.decode"
        )
    given = repr(lm) if isinstance(lm, str | int | float | None) else type(lm).__name__
    raise TypeError(f"lm={given:.60} is no language model: {way_out}")


def check_tokenizer(lm: LM, what: str) -> Tokenizer:
    """Returns the tokenizer of a model.

    Args:
      lm: the model.
      what: the option or the function that needs a tokenizer, for the error.

    Raises:
      ValueError: the model has no tokenizer.
    """
    if lm.tokenizer is None:
        raise ValueError(
            f"{what}: {lm.name} has no tokenizer; load it with one, or give token ids to "
            "specjax.generate, which then returns token ids"
        )
    return lm.tokenizer


def _encoded(lm: LM, text: str, which: str) -> list[int]:
    tokenizer = check_tokenizer(lm, f"{which} is a text")
    if not _is_unicode(text):
        raise ValueError(f"{which} is not a valid text: it was read from bytes that are not UTF-8")
    # an empty text is an empty prompt, even if the tokenizer would add a token at its beginning
    return tokenizer.encode(text) if text else []


def check_conversation(messages, which: str) -> None:
    """Checks a list of messages that an assistant is to answer; ``which`` names it in errors.

    Raises:
      ValueError: it is no such list, a message has no role or no content, or the last one is the
        assistant's.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(
            f"{which}: {messages!r:.60} is no conversation: give a list such as "
            '[{"role": "user", "content": "..."}]'
        )
    for number, one in enumerate(messages):
        held = one if isinstance(one, Mapping) else {}
        if lacks := [key for key in ("role", "content") if key not in held]:
            raise ValueError(f"{which}: message {number} has no {' and no '.join(lacks)}")
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{which}: it ends with the assistant's message, so that there is nothing to answer: "
            "leave that message out"
        )


def _answered(lm: LM, prompt: Mapping, which: str) -> list[int]:
    """The token ids of a conversation, up to where the assistant's answer begins."""
    if [*prompt] != [MESSAGES]:
        raise ValueError(
            f"{which} has the keys {[*prompt]}: a conversation has the key {MESSAGES!r} alone"
        )
    check_conversation(prompt[MESSAGES], which)
    return lm.chat(prompt[MESSAGES])


def _no_prompt(given) -> TypeError:
    return TypeError(
        f"prompts: {given!r:.60} is no prompt: give a text, a list of token ids (integers), a "
        'conversation {"messages": [...]}, or a list of these'
    )


def _is_unicode(text: str) -> bool:
    """Returns False for a text with bytes that are not UTF-8, as a command argument can be."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
