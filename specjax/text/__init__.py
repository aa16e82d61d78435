"""Text in, text out: prompts, drafter names, stop strings, streaming, chats."""

from typing import TYPE_CHECKING

from .._internal import lazy

if TYPE_CHECKING:
    from .drafter_names import auto_drafter
    from .generation import Generation, Piece, TextStream
    from .task import GenerationTask

__all__ = ["Generation", "GenerationTask", "Piece", "TextStream", "auto_drafter"]

_LAZY = {
    "Generation": "generation",
    "GenerationTask": "task",
    "Piece": "generation",
    "TextStream": "generation",
    "auto_drafter": "drafter_names",
}
__getattr__, __dir__ = lazy.attach(__name__, _LAZY)
