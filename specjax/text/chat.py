"""A conversation whose caches are kept between turns, so that a turn reads only its own tokens."""

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

LEAST_BUFFER = 2048  # the capacity in tokens of a conversation's first buffer


@dataclasses.dataclass(frozen=True, eq=False)
class Turn(GenerationTask):
    """A task that continues from the ``state`` of an earlier task, whose buffers are donated."""

    state: State | None = None

    def start(self) -> State:
        objects = self.lm.target, self.drafter, self.rule
        with sharding.using(self.lm.mesh, self.lm.params):
            return loop.jit_extend(*objects, self.params, self.state, self.request)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions(SharedOptions):
    """The options of ``Chat``; its docstring explains them."""

    seed: int = 0
    logprobs: bool | str = False
    system: str | None = None


class Chat:
    """A conversation with a model.

    If the model has a chat template, each turn is a message of the user and the answer is a message
    of the assistant. Without a template, the turns are text, and the answer is the model's
    continuation of the text. The state of the loop is kept between turns, so that a turn reads only
    its new tokens, for the target and for the drafter. The whole conversation is read again in
    three cases: it exceeds its buffer, the template changes the tokens of an earlier answer, or a
    stop string cut the last answer.

    Args:
      lm: the target, from ``specjax.load``; a model with a tokenizer and without an encoder.
      system: the system message; only for models with a chat template.
      drafter, drafting, sampling, ...: see ``specjax.generate``. Each turn adds 1 to the seed.

    Attributes:
      lm: the model.
      messages: the conversation, a list of ``{"role": ..., "content": ...}``.
      fed: the number of tokens that were read in all turns, without the answers.
      templated: whether the model has a chat template.

    Raises:
      ValueError: ``generate`` refuses an option (in the first turn), or a system message is given
        for a model without a chat template.

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
        if isinstance(drafter, str | os.PathLike):  # loaded once, not in every turn
            drafter = named(lm, drafter)
        self.lm, self.options, self.fed = lm, options_from(options, drafter=drafter), 0
        self._seed, self.templated = options.seed, self._tokenizer.has_template
        if system is not None and not self.templated:
            raise ValueError(
                f"system: {lm.name} has no chat template for a system message: leave it out"
            )
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.clear()

    def clear(self) -> None:
        """Begins a new conversation; the system message is kept."""
        self.messages: list[Mapping[str, str]] = list(self._opening)
        self._stream, self._ids, self._turns = None, [], 0
        self._open: tuple[TextStream, str] | None = None  # a turn whose answer is being written

    def say(self, text: str) -> Iterator[Piece]:
        """Yields the answer to a turn, piece by piece.

        If the iteration ends early, or an exception (Ctrl-C) ends it, the tokens that were
        committed until then are the answer. The next turn ends it, too, even one that is refused.

        Args:
          text: the message of the user, or the text that the model continues.

        Raises:
          ValueError: the text is empty, or the conversation does not fit into the model's context.
        """
        if not text:
            raise ValueError("say: the text is empty; give at least one character")
        self._close(self._open)
        stream = TextStream(self._turn(text))
        if self.templated:
            self.messages.append({"role": "user", "content": text})
        self._turns, self._stream = self._turns + 1, stream
        self._open = turn = stream, text
        try:
            for piece in stream:
                yield piece
                if self._open is not turn:
                    return
        finally:
            self._close(turn)

    @property
    def generation(self) -> Generation:
        """The ``Generation`` of the last answer. Raises ``ValueError`` before the first turn."""
        if self._stream is None:
            raise ValueError("generation: there was no turn yet; call say first")
        return self._stream.generation

    def _turn(self, text: str) -> GenerationTask:
        """Returns the task of a turn, which continues from the state of the last turn if it can."""
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
        work = prepare_measured(self.lm, [ids], options, least_buffer=LEAST_BUFFER)
        self.fed += len(ids)
        return work

    def _goes_on(self, state: State, ids: list[int]) -> bool:
        """Returns whether ``state`` still exists and holds the conversation with which ``ids``
        begin."""
        known = len(self._ids)
        there = not state.length.is_deleted() and int(state.length[0]) == known < len(ids)
        return there and ids[:known] == self._ids

    def _close(self, turn: tuple[TextStream, str] | None) -> None:
        """Adds the committed tokens of an answer to the conversation, if the turn is open."""
        if turn is None or turn is not self._open:
            return
        self._open, (stream, _) = None, turn
        if stream.state is not None and not stream.state.length.is_deleted():
            stream.look()
        elif not stream.begun:  # Ctrl-C while the prompt was read
            if self.templated:
                self.messages.pop()
            return
        # else an interrupted burst has consumed the state: the answer is what was shown
        answer = stream.generation
        prompt = answer.prompts[0].tolist()
        self._ids = prompt + answer.tokens[0].tolist()
        if self.templated:
            self.messages.append({"role": "assistant", "content": answer.text})


def _continued(tokenizer: Tokenizer, text: str, first: bool) -> list[int]:
    """Returns the ids of a text within a conversation, without the tokens that the tokenizer puts
    at the beginning of a text."""
    ids, opening = tokenizer.encode(text), tokenizer.encode("")
    return ids if first or ids[: len(opening)] != opening else ids[len(opening) :]
