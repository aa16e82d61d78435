"""What every engine of the suite ``cpu-peers`` can do, and which engines there are.

Nothing here imports JAX: the process of a peer holds the peer alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

PRECISIONS = ("float32", "bfloat16", "int8", "int4")
METHODS = ("plain", "draft", "lookup")
OURS = "specjax"


class UnsupportedError(RuntimeError):
    """An engine lacks a precision or cannot hold a model; the message says which and why."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What an engine is started with.

    Attributes:
      folders: the checkpoints of target and draft model, as Hugging Face lays them out.
      prepared: the folder into which the adapter's ``prepare`` has written the weights.
      precision: one of ``PRECISIONS``.
      threads: the number of threads.
      longest: the tokens of the longest request, prompt and new tokens together.
      method: the method that is loaded at once; others may load more when they are first used.
    """

    folders: tuple[str, str]
    prepared: str
    precision: str
    threads: int
    longest: int
    method: str = "plain"


class Engine(Protocol):
    """A loaded pair of models; greedy, one text at a time.

    Attributes:
      scheme: what the precision means in this engine: weights, activations, cache.
      methods: those of ``METHODS`` that the engine has.
    """

    scheme: str
    methods: tuple[str, ...]

    def generate(
        self, method: str, prompt: np.ndarray, new: int, num_draft: int
    ) -> tuple[np.ndarray, int | None]:
        """Decodes one text.

        Args:
          method: one of ``methods``.
          prompt: int32 ``[T]``.
          new: the number of tokens to emit; no token ends the text.
          num_draft: the number of tokens that are drafted in a round.

        Returns:
          the new tokens, int32 ``[new]``, and the number of passes of the target that emitted
          them, that which reads the prompt included; None where the engine does not tell.
        """
        ...

    def pass_seconds(self, nodes: int, length: int) -> float | None:
        """The seconds of one pass of the target over ``nodes`` tokens after ``length`` tokens.

        None where the engine has no way to run one.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An engine that may be installed.

    Attributes:
      module: the module beside this one that has ``prepare(pair, precision, folder)``, which may
        raise ``UnsupportedError``, and ``start(setting) -> Engine``.
      needs: the modules that must be installed.
      install: the command that installs them.
      package: the package whose version is shown.
    """

    module: str
    needs: tuple[str, ...]
    install: str
    package: str

    @property
    def missing(self) -> list[str]:
        """The needed modules that are not installed."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def prepare(self, *arguments) -> None:
        """Writes a pair's weights as the engine reads them; see ``prepare`` of the module."""
        self._load().prepare(*arguments)

    def start(self, setting: Setting) -> Engine:
        """Loads the pair."""
        return self._load().start(setting)

    def _load(self):
        return importlib.import_module(f".{self.module}", __package__)


ADAPTERS = {
    OURS: Adapter("specjax_engine", (), "pip install -e .", "specjax"),
    "llama.cpp": Adapter(
        "llama_cpp_engine",
        ("llama_cpp", "gguf"),
        'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python '
        "llama-cpp-python gguf",
        "llama-cpp-python",
    ),
    "OpenVINO GenAI": Adapter(
        "openvino_engine",
        ("openvino", "openvino_genai"),
        "pip install openvino openvino-genai",
        "openvino-genai",
    ),
    "onnxruntime-genai": Adapter(
        "onnxruntime_engine",
        ("onnxruntime_genai", "onnxruntime", "onnx", "onnx_ir", "torch", "transformers"),
        "pip install onnxruntime-genai onnx onnx-ir torch transformers",
        "onnxruntime-genai",
    ),
    "transformers": Adapter(
        "transformers_engine",
        ("torch", "transformers"),
        'pip install torch transformers, or pip install -e ".[peers]"',
        "transformers",
    ),
}


def written_once(folder: str | Path, write: Callable[[Path], None]) -> None:
    """Fills ``folder`` by ``write(beside)`` unless it exists, so that it is never incomplete."""
    import os
    import shutil

    folder = Path(folder)
    if folder.exists():
        return
    beside = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        write(beside)
        os.replace(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
