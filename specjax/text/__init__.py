"""Text in, text out: prompts, drafter names, stop strings, streaming, chats."""

from typing import TYPE_CHECKING

from .._internal import lazy

if TYPE_CHECKING:
    from .generation import Generation, Piece, TextStream
    from .other_vocabulary import translated
    from .own_drafters import auto_drafter
    from .retrieval import Retrieval
    from .reward_steps import LikelihoodReward, RewardGuided, ScalarReward, reward_guided
    from .session import Session
    from .swift import Swift
    from .task import GenerationTask

__all__ = [
    "Generation",
    "GenerationTask",
    "LikelihoodReward",
    "Piece",
    "Retrieval",
    "RewardGuided",
    "ScalarReward",
    "Session",
    "Swift",
    "TextStream",
    "auto_drafter",
    "reward_guided",
    "translated",
]

_LAZY = {
    "Generation": "generation",
    "GenerationTask": "task",
    "LikelihoodReward": "reward_steps",
    "Piece": "generation",
    "Retrieval": "retrieval",
    "RewardGuided": "reward_steps",
    "ScalarReward": "reward_steps",
    "Session": "session",
    "Swift": "swift",
    "TextStream": "generation",
    "auto_drafter": "own_drafters",
    "reward_guided": "reward_steps",
    "translated": "other_vocabulary",
}
__getattr__, __dir__ = lazy.attach(__name__, _LAZY)
