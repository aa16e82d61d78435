"""A conversation whose caches are kept: a turn reads its own tokens, not all that was said."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping

import numpy as np

from .. import sharding
from ..decoding import loop
from ..decoding.state import State
from ..models.lm import LM
from ..models.seq2seq.encoder_inputs import refuse_encoders
from ..models.tokenizer import Tokenizer
from .drafter_names import named
from .generation import Generation, Piece, TextStream
from .options import SharedOptions, options_from, takes
from .prepare import prepare_measured, seed_key
from .prompts import check_lm, check_tokenizer
from .task import GenerationTask

LEAST_BUFFER = 2048  # tokens of a conversation before it is moved to a larger buffer


@dataclasses.dataclass(frozen=True, eq=False)
class Turn(GenerationTask):
    """A task that goes on from the ``state`` of an earlier one, whose buffers it takes."""

    state: State | None = None

    def start(self) -> State:
        objects = self.lm.target, self.drafter, self.rule
        with sharding.using(self.lm.mesh, self.lm.params):
            return loop.jit_extend(*objects, self.params, self.state, self.request)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions(SharedOptions):
    """The options of ``Chat``."""

    seed: int = 0
    logprobs: bool | str = False
    system: str | None = None


class Chat:
    """A conversation with a model.

    With a chat template each turn is a user's message and the answer a message of the assistant;
    without one what is said is text, and the answer is what the model goes on to write. The state
    of the loop is kept between turns: only the new tokens are read, and the drafter's caches go on
    as well. All is read anew where the conversation outgrows its buffer, where the template spells
    what was said otherwise than it was generated, and after a text that a stop string cut.

    Attributes:
      lm: the model.
      messages: the conversation, ``{"role": ..., "content": ...}`` each.
      fed: tokens that were read, over all turns, answers not counted.
      templated: whether there is a chat template.

    Args:
      system: the system's message; only with a template.
      drafter, drafting, sampling, ...: as ``specjax.generate`` takes them. The seed goes up by one
        each turn.

    Raises:
      ValueError: options that ``generate`` refuses (at the first turn), a system's message without
        a template, several samples.

    Example::

        chat = specjax.Chat(lm, drafter="ngram")
        for piece in chat.say("Why is the sky blue?"):
            print(piece.text, end="")
    """

    @takes(ChatOptions)
    def __init__(self, lm: LM, *, options: ChatOptions):
        check_lm(lm)
        refuse_encoders(lm, "Chat")
        self._tokenizer = check_tokenizer(lm, "Chat")
        seed_key(options.seed)
        drafter, system = options.drafter, options.system
        if isinstance(drafter, str | os.PathLike):  # read once, not in every turn
            drafter = named(lm, drafter)
        self.lm, self.options, self.fed = lm, options_from(options, drafter=drafter), 0
        self._seed, self.templated = options.seed, self._tokenizer.has_template
        if system is not None and not self.templated:
            raise ValueError(f"system: {lm.name} has no chat template to put it in")
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.clear()

    def clear(self) -> None:
        """Forgets what was said."""
        self.messages: list[Mapping[str, str]] = list(self._opening)
        self._stream, self._ids, self._turns = None, [], 0

    def say(self, text: str) -> Iterator[Piece]:
        """The answer to ``text``, piece by piece. What is left out of the iteration, or cut off by
        an exception within it (Ctrl-C), is no part of the conversation but for what was committed
        until then.

        Raises:
          ValueError: an empty text; a conversation that does not fit into the model's context.
        """
        if not text:
            raise ValueError("say: the text is empty; give at least one character")
        stream = TextStream(self._turn(text))
        if self.templated:
            self.messages.append({"role": "user", "content": text})
        self._turns, self._stream = self._turns + 1, stream
        try:
            yield from stream
        finally:
            self._close(stream, text)

    @property
    def generation(self) -> Generation:
        """The last answer."""
        if self._stream is None:
            raise ValueError("generation: nothing was said yet")
        return self._stream.generation

    def _turn(self, text: str) -> GenerationTask:
        """The task of a turn. It goes on from the state of the last turn where it can, else it
        begins anew."""
        if self.templated:
            ids = self.lm.chat([*self.messages, {"role": "user", "content": text}])
        else:
            ids = [*self._ids, *_continued(self._tokenizer, text, first=not self._ids)]
        seed = (self._seed + self._turns) % 2**32
        options = dataclasses.replace(self.options, seed=seed)
        state = None if self._stream is None else self._stream.state
        if state is not None and self._goes_on(state, ids):
            more = ids[len(self._ids) :]
            work = prepare_measured(self.lm, [more], options, least_buffer=LEAST_BUFFER)
            room = state.tokens.shape[1] - len(ids)
            if int(work.request.budget[0]) <= room:
                self.fed += len(more)
                values = {f.name: getattr(work, f.name) for f in dataclasses.fields(GenerationTask)}
                values |= {"prompts": [np.asarray(ids, np.int32)]}
                return Turn(**values | {"capacity": state.tokens.shape[1], "state": state})
        self.fed += len(ids)
        return prepare_measured(self.lm, [ids], options, least_buffer=LEAST_BUFFER)

    def _goes_on(self, state: State, ids: list[int]) -> bool:
        """Whether ``state`` is alive and holds the conversation, with which ``ids`` begin."""
        known = len(self._ids)
        there = not state.length.is_deleted() and int(state.length[0]) == known < len(ids)
        return there and ids[:known] == self._ids

    def _close(self, stream: TextStream, text: str) -> None:
        """Takes what was committed into the conversation."""
        if stream.state is not None and not stream.state.length.is_deleted():
            stream.look()
        elif not stream.begun:  # Ctrl-C while the prompt was read
            if self.templated:
                self.messages.pop()
            return
        # else a burst that was cut off took the state along: what was shown is what there is
        answer = stream.generation
        prompt = answer.prompts[0].tolist()
        self._ids = prompt + answer.tokens[0].tolist()
        if self.templated:
            self.messages.append({"role": "assistant", "content": answer.text})


def _continued(tokenizer: Tokenizer, text: str, first: bool) -> list[int]:
    """Ids of a text in the middle of another: without what a tokenizer puts before a text."""
    ids, opening = tokenizer.encode(text), tokenizer.encode("")
    return ids if first or ids[: len(opening)] != opening else ids[len(opening) :]
