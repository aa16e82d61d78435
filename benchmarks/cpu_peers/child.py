"""The process of one engine: it waits for a command, carries it out, and answers.

Commands and answers are lines of JSON. What libraries print goes to the standard error output,
so that the answers stay alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np

from .engine import ADAPTERS, Engine, Setting


def main() -> None:
    """Serves commands until the input ends; the first line is the setting."""
    _end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())
    adapter = ADAPTERS[first.pop("engine")]
    engine = None
    try:
        begin = time.perf_counter()
        engine = adapter.start(Setting(**first | {"folders": tuple(first["folders"])}))
        started = {
            "seconds": time.perf_counter() - begin,
            "scheme": engine.scheme,
            "methods": list(engine.methods),
            "version": importlib.metadata.version(adapter.package),
        }
    except Exception as error:
        started = _failure(error)
    answers.write(json.dumps(started) + "\n")
    for line in sys.stdin if engine else ():
        try:
            answer = _answer(engine, json.loads(line))
        except Exception as error:
            answer = _failure(error)
        answers.write(json.dumps(answer) + "\n")


def _end_with_parent() -> None:
    """A process that is stopped would outlive a parent that was killed."""
    import ctypes

    set_death_signal = 1  # PR_SET_PDEATHSIG of Linux
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def _failure(error: Exception) -> dict:
    traceback.print_exc()
    return {"failed": f"{type(error).__name__}: {error}"[:500]}


def _answer(engine: Engine, command: dict) -> dict:
    kind = command.pop("do")
    if kind == "memory":
        return memory()
    if kind == "pass":
        return {"seconds": engine.pass_seconds(**command)}
    prompt = np.asarray(command.pop("prompt"), np.int32)
    begin = time.perf_counter()
    tokens, rounds = engine.generate(prompt=prompt, **command)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "tokens": [int(t) for t in tokens], "rounds": rounds}


def memory() -> dict[str, int]:
    """Bytes of this process in memory, now and at most."""
    names = {"VmRSS": "resident", "VmHWM": "peak"}
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {shown: int(fields[name].split()[0]) << 10 for name, shown in names.items()}


if __name__ == "__main__":
    main()
