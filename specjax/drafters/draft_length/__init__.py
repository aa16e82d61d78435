"""Draft-length policies: how many tokens ``Adaptive`` asks another drafter for, one file a policy.

``policies.py`` registers them; ``policy.py`` has their contract.
"""

from .exllama import ExLlama
from .goodput import Goodput
from .huggingface import HuggingFace
from .policies import POLICIES, named_policy
from .policy import DraftLengthPolicy, Outcome
from .schedule import Schedule
from .suffix import SuffixMatch

__all__ = [
    "POLICIES",
    "DraftLengthPolicy",
    "ExLlama",
    "Goodput",
    "HuggingFace",
    "Outcome",
    "Schedule",
    "SuffixMatch",
    "named_policy",
]
