"""Conversations: what their messages must be like, how a target reads them, what counts in them.

A message is ``{"role": "user", "content": "..."}``, or ``{"from": "human", "value": "..."}``. After
a system's message, which may be left out, users and assistant take turns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT
TURNS = ("user", "assistant")
CUT = "cut"  # a message's field: the answer ended for want of room, so its end says nothing
MARKED = re.compile(r"\{%-?\s*generation\b")  # by it a template says what the assistant writes


def checked(messages) -> list[dict]:
    """The messages in OpenAI's shape.

    Raises:
      ValueError: an unknown role, an empty message, roles that do not alternate.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ValueError(f"{messages!r:.60} is neither a text nor a list of messages")
    found: list[dict] = []
    turns = 0
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"message {number} is {message!r:.60}, no object with role and content"
            )
        said = message.get("role", message.get("from"))
        role = ROLES.get(said, said) if isinstance(said, str) else said
        if role not in ("system", *TURNS):
            known = ", ".join(("system", *TURNS, *ROLES))
            raise ValueError(f"message {number} has the role {said!r}; known: {known}")
        content = message.get("content", message.get("value"))
        if not isinstance(content, str) or not content.strip():
            raise ValueError(f"message {number}, of the {role}, has no text")
        expected = TURNS[turns % 2]
        if role != expected and (role != "system" or number > 1):
            raise ValueError(
                f"roles do not alternate: message {number} is of the {role}, where the {expected} "
                "is due"
            )
        turns += role != "system"
        cut = {CUT: True} if message.get(CUT) else {}
        found.append({"role": role, "content": content, **cut})
    if not turns:
        raise ValueError("nobody says anything in it")
    return found


def encode(tokenizer, messages: Sequence[Mapping]) -> tuple[list[int], list[bool]]:
    """A conversation as the target reads it, and which tokens are the assistant's.

    These are what a template marks by ``{% generation %}``; without such marks, of each turn all
    from behind the prompt that the target would be given to the token that ends the text (or to
    the turn's end, where none does).

    Args:
      tokenizer: a ``specjax.models.tokenizer.TransformersTokenizer`` with a chat template.

    Raises:
      ValueError: the template refuses the messages, or spells a turn otherwise once others follow,
        so that it cannot be told which tokens are whose.
    """
    if messages[-1].get(CUT):
        ids, counts = _encode(tokenizer, messages[:-1], True)
        answer = tokenizer.backend.encode(messages[-1]["content"], add_special_tokens=False)
        return [*ids, *answer], [*counts, *[True] * len(answer)]
    return _encode(tokenizer, messages, False)


def _encode(tokenizer, messages, asks: bool) -> tuple[list[int], list[bool]]:
    """``asks``: whether the beginning of the assistant's next turn stands at the end."""
    from jinja2 import TemplateError

    backend = tokenizer.backend

    def rendered(messages, asks, **how):
        return backend.apply_chat_template(list(messages), add_generation_prompt=asks, **how)

    try:
        if MARKED.search(backend.get_chat_template()):
            marks = dict(return_dict=True, return_assistant_tokens_mask=True)
            found = rendered(messages, asks, **marks)
            return list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]
        text = rendered(messages, asks, tokenize=False)
        turns = [
            (
                rendered(messages[:i], True, tokenize=False),
                rendered(messages[: i + 1], False, tokenize=False),
            )
            for i, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
    except TemplateError as error:  # such as a system's message where there is no place for it
        raise ValueError(f"the chat template refuses it: {error}") from None
    found = backend(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, begins = found["input_ids"], [begin for begin, _ in found["offset_mapping"]]
    counts = [False] * len(ids)
    for before, after in turns:
        whole = text.startswith(after)
        end = len(after) if whole else len(text)
        own = [i for i, begin in enumerate(begins) if len(before) <= begin < end]
        ends = [n for n, i in enumerate(own, start=1) if ids[i] in tokenizer.eos_ids]
        if not text.startswith(before) or not (whole or ends):
            raise ValueError(
                "the chat template spells a turn otherwise once others follow: whose tokens are "
                "whose is not known, unless the template marks it by {% generation %}"
            )
        for i in own[: ends[0] if ends else None]:
            counts[i] = True
    return list(ids), counts
