"""Text in, text out: prompts, drafter names, stop strings, streaming, chats."""

from typing import TYPE_CHECKING

from .._internal import lazy

if TYPE_CHECKING:
    from .generation import Generation, Piece, TextStream
    from .other_vocabulary import translated
    from .own_drafters import auto_drafter
    from .retrieval import Retrieval
    from .session import Session
    from .task import GenerationTask

__all__ = [
    "Generation",
    "GenerationTask",
    "Piece",
    "Retrieval",
    "Session",
    "TextStream",
    "auto_drafter",
    "translated",
]

_LAZY = {
    "Generation": "generation",
    "GenerationTask": "task",
    "Piece": "generation",
    "Retrieval": "retrieval",
    "Session": "session",
    "TextStream": "generation",
    "auto_drafter": "own_drafters",
    "translated": "other_vocabulary",
}
__getattr__, __dir__ = lazy.attach(__name__, _LAZY)
