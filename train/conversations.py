"""Conversations: the form of their messages, their tokens, and which of the tokens are learned.

A message is ``{"role": "user", "content": "..."}``, or ``{"from": "human", "value": "..."}``. After
a system's message, which may be left out, users and assistant take turns.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import re
import string
from collections.abc import Mapping, Sequence

ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT
TURNS = ("user", "assistant")
CUT = "cut"  # a field of a message: the answer was cut at its budget, so its end is not learned
TODAY = datetime.datetime(2025, 1, 1)  # of templates that print it: the same on any day of a run
DATE = "strftime_now"  # the function that prints today in a template
# with a literal format alone: one string, which has neither quotes of its own nor escapes
CALL = re.compile(r"""\bstrftime_now\(\s*(["'])([^"'\\\n]*)\1\s*\)""")
# in the place of the function, before a template: a macro that writes TODAY in any format
TODAYS = (
    "{% macro strftime_now(format) %}{% set date = namespace(text=format) %}"
    "{% for code, text in CODES %}{% set date.text = date.text.replace(code, text) %}{% endfor %}"
    "{{ date.text }}{% endmacro %}\n"
)
FLAGS = ("", "-", "_", "0", "^", "#", "E", "O")  # of a code of ``strftime``
MARKED = re.compile(r"\{%-?\s*generation\b")  # marks the assistant's text in a template


def checked(messages) -> list[dict]:
    """Returns the messages in OpenAI's form.

    Raises:
      ValueError: a role is unknown, a message is empty, or roles do not alternate.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"{messages!r:.60} is neither a text nor a list of messages")
    found: list[dict] = []
    turns = 0
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"message {number} is {message!r:.60}; give an object with role and content"
            )
        said = message.get("role", message.get("from"))
        role = ROLES.get(said, said) if isinstance(said, str) else said
        if role not in ("system", *TURNS):
            known = ", ".join(("system", *TURNS, *ROLES))
            raise ValueError(f"message {number} has the role {said!r}; known: {known}")
        content = message.get("content", message.get("value"))
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"message {number}, of the role {role!r}, has no text")
        expected = TURNS[turns % 2]
        if role != expected and (role != "system" or number > 1):
            raise ValueError(
                f"roles do not alternate: message {number} has the role {role!r}; expected: "
                f"{expected!r}"
            )
        turns += role != "system"
        cut = {CUT: True} if message.get(CUT) else {}
        found.append({"role": role, "content": content, **cut})
    if not turns:
        raise ValueError("it has no message of a user")
    return found


@functools.cache
def _todays() -> str:
    """``TODAYS`` with what each code of ``strftime`` stands for; ``%%`` is kept apart meanwhile."""
    found = [("%%", "\0")]
    for code in (f"%{flag}{letter}" for letter in string.ascii_letters for flag in FLAGS):
        with contextlib.suppress(ValueError):  # a flag that this system does not know
            found.append((code, TODAY.strftime(code)))
    return TODAYS.replace("CODES", repr([*found, ("\0", "%")]))


def rendered(tokenizer, messages, asks: bool = True, **how):
    """Applies a tokenizer's chat template, in which today is always ``TODAY``.

    Args:
      tokenizer: a ``specjax.models.tokenizer.TransformersTokenizer`` with a chat template.
      messages: the messages in OpenAI's form.
      asks: whether the assistant's next turn is begun at the end.
      **how: further arguments of ``apply_chat_template`` of transformers.

    Raises:
      ValueError: the template refuses the messages.
    """
    from jinja2 import TemplateError

    template = tokenizer.backend.get_chat_template()
    template = CALL.sub(lambda call: repr(TODAY.strftime(call[2])), template)
    if DATE in template:  # the macro takes time with every call
        template = _todays() + template
    how |= dict(add_generation_prompt=asks, chat_template=template)
    try:
        return tokenizer.backend.apply_chat_template(list(messages), **how)
    except TemplateError as error:  # such as a system's message where there is no place for it
        raise ValueError(f"the chat template refuses it: {error}") from None


def encode(tokenizer, messages: Sequence[Mapping]) -> tuple[list[int], list[bool]]:
    """Returns the token ids of a conversation, and which of them are the assistant's.

    The assistant's tokens are those that the template marks by ``{% generation %}``. Without such
    marks they are, in each turn, the tokens after the prompt that the target would get, up to the
    end-of-text token (or to the end of the turn, if it has none).

    Args:
      tokenizer: a ``specjax.models.tokenizer.TransformersTokenizer`` with a chat template.
      messages: the messages in OpenAI's form.

    Raises:
      ValueError: the template refuses the messages; or it spells a turn differently if other turns
        follow, so that the assistant's tokens cannot be found.
    """
    if messages[-1].get(CUT):
        ids, counts = _encode(tokenizer, messages[:-1], True)
        answer = tokenizer.backend.encode(messages[-1]["content"], add_special_tokens=False)
        return [*ids, *answer], [*counts, *[True] * len(answer)]
    return _encode(tokenizer, messages, False)


def _encode(tokenizer, messages, asks: bool) -> tuple[list[int], list[bool]]:
    """``encode`` by the template; with ``asks`` the assistant's next turn is begun at the end."""
    if MARKED.search(tokenizer.backend.get_chat_template()):
        marks = dict(return_dict=True, return_assistant_tokens_mask=True)
        found = rendered(tokenizer, messages, asks, **marks)
        return list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]
    text = rendered(tokenizer, messages, asks, tokenize=False)
    turns = [
        (
            rendered(tokenizer, messages[:i], True, tokenize=False),
            rendered(tokenizer, messages[: i + 1], False, tokenize=False),
        )
        for i, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    found = tokenizer.backend(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, begins = found["input_ids"], [begin for begin, _ in found["offset_mapping"]]
    counts = [False] * len(ids)
    for before, after in turns:
        whole = text.startswith(after)
        end = len(after) if whole else len(text)
        own = [i for i, begin in enumerate(begins) if len(before) <= begin < end]
        ends = [n for n, i in enumerate(own, start=1) if ids[i] in tokenizer.eos_ids]
        if not text.startswith(before) or not (whole or ends):
            raise ValueError(
                "the chat template spells a turn differently if other turns follow, so the "
                "assistant's tokens cannot be found: mark them by {% generation %} in the template"
            )
        for i in own[: ends[0] if ends else None]:
            counts[i] = True
    return list(ids), counts
