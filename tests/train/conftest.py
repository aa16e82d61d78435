"""Shared by tests of recipes: a corpus, a target trained on it for a few steps, and its text."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from brief_runs import SHAPE
from quickly import compiling_quickly
from specjax.train.cli import main


@dataclasses.dataclass(frozen=True)
class Place:
    """``train(recipe, *fields)`` runs the command, returns its status; ``teacher`` is a field."""

    root: Path
    train: Callable[..., int]
    teacher: str

    def __iter__(self):
        return iter((self.root, self.train, self.teacher))


@pytest.fixture(scope="session")
def place(tmp_path_factory, hurried):
    """A folder with a corpus, a target trained on it for a few steps, and text by that target."""
    with compiling_quickly() if hurried else contextlib.nullcontext():
        return made(tmp_path_factory)


def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("recipes")
    (root / "corpus").mkdir()
    (root / "empty.toml").write_text("")
    for i in range(60):
        text = "".join(f"x{j} = f(x{j * i % 7})\n" for j in range(20))
        (root / "corpus" / f"{i}.txt").write_text(text)
    common = ["--config", str(root / "empty.toml"), f"data.corpus={root / 'corpus'}"]
    common += ["data.length=24", "data.batch=4", "data.eval_rows=4"]

    def train(recipe, *fields):
        return main([recipe, *common, *fields])

    fields = [f"run.folder={root / 'target'}", "run.steps=60", "optimizer.warmup=4"]
    fields += ["optimizer.adam_rate=0.05"]  # far enough from uniform to have something to teach
    assert train("pretrain", "model.hidden_size=16", *SHAPE, *fields) == 0
    teacher = f"teacher={root / 'target' / 'model'}"
    fields = ["num_rows=8", "new_tokens=12", "shortest=4", teacher]
    assert train("regenerate", *fields, f"output={root / 'samples.npz'}") == 0
    return Place(root, train, teacher)
