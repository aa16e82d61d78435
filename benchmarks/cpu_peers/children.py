"""The processes of several engines, of which one runs at a time.

The libraries bring thread pools of their own, whose threads may wait actively for a while after
their work. A process that is not asked is therefore stopped by the system (``SIGSTOP``).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from .engine import Setting

ROOT = Path(__file__).parents[2]


class EngineError(RuntimeError):
    """An engine failed; the message is its own."""


class Child:
    """An engine in a process of its own; a context, which ends the process.

    Attributes:
      started: the answer to the setting: ``seconds`` of loading, ``scheme``, ``methods``,
        ``version``.
    """

    def __init__(self, engine: str, setting: Setting, log: Path | None = None):
        self.engine = engine
        threads = str(setting.threads)
        environment = os.environ | {"NPROC": threads, "OMP_NUM_THREADS": threads}
        environment |= {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), *_paths()]))
        self._log = log.open("ab") if log else subprocess.DEVNULL
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cpu_peers.child"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.started = self._exchange({"engine": engine, **dataclasses.asdict(setting)})
        except BaseException:
            self.close()
            raise
        self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **command) -> dict:
        """Lets the process run for one command; see ``child.py``.

        Raises:
          EngineError: the engine failed or ended.
        """
        self._process.send_signal(signal.SIGCONT)
        answer = self._exchange(command)
        self._stop()
        return answer

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def _exchange(self, line: dict) -> dict:
        pipes = self._process.stdin, self._process.stdout
        assert all(pipes)
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
            said = self._process.stdout.readline()
        except BrokenPipeError:
            said = ""
        if not said:
            raise EngineError(f"{self.engine}: the process ended with {self._process.wait()}")
        answer = json.loads(said)
        if "failed" in answer:
            raise EngineError(f"{self.engine}: {answer['failed']}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        if self._log is not subprocess.DEVNULL:
            self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _paths() -> list[str]:
    return os.environ.get("PYTHONPATH", "").split(os.pathsep)
