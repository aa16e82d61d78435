"""Tasks: prompts whose continuations are right or wrong, for ``specjax.quality``.

A task says of a text whether it solves the prompt: by a known answer, or by tests that are run with
the code that was written. The share of tasks that a rule solves is what its approximation costs the
user, where log-likelihoods only say how far the text is from the model's own.
"""

from __future__ import annotations

import abc
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
# where the continuation of a function ends, as in HumanEval (Codex, arXiv 2107.03374, section 3.1)
ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(")

# sets the limits of its own process (seconds, bytes), then runs the program that it reads
LIMITED = """
import sys
try:
    import resource
    most = {"RLIMIT_CPU": int(sys.argv[1]), "RLIMIT_FSIZE": int(sys.argv[2]), "RLIMIT_CORE": 0}
    if sys.platform == "linux":
        most["RLIMIT_AS"] = int(sys.argv[2])
    for name, limit in most.items():
        kind = getattr(resource, name)
        ceiling = resource.getrlimit(kind)[1]
        limit = limit if ceiling == resource.RLIM_INFINITY else min(limit, ceiling)
        resource.setrlimit(kind, (limit, limit))
except ImportError:  # no such limits on Windows
    pass
exec(compile(sys.stdin.buffer.read(), "task", "exec"), {"__name__": "__main__"})
"""


class Task(abc.ABC):
    """Says whether a text solves its prompt."""

    @abc.abstractmethod
    def solved(self, prompt: str, text: str) -> bool:
        """Whether ``text``, the continuation of ``prompt``, is right."""


@dataclasses.dataclass(frozen=True)
class Answer(Task):
    """A known answer.

    Attributes:
      answer: a number, which is compared with a number in the text, by value; or any other text,
        with which the continuation must begin, spaces aside.
      where: which number of the text is meant, ``"last"`` (a text that derives its answer, as in
        GSM8K, arXiv 2110.14168) or ``"first"`` (``3 + 4 =``).
    """

    answer: str
    where: str = "last"

    def __post_init__(self):
        if not isinstance(self.answer, str) or not self.answer.strip():
            raise ValueError(f"answer={self.answer!r}: give a text that is not empty")
        if self.where not in ("first", "last"):
            raise ValueError(f"where={self.where!r}: accepted are 'first' and 'last'")

    def solved(self, prompt: str, text: str) -> bool:
        wanted = self.answer.strip()
        if not NUMBER.fullmatch(wanted):
            return text.lstrip().startswith(wanted)
        found = NUMBER.findall(text)
        return bool(found) and _value(found[0 if self.where == "first" else -1]) == _value(wanted)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


@dataclasses.dataclass(frozen=True)
class PythonTests(Task):
    """Tests of code: prompt, text and tests are run as one program, which must end without error.

    The program runs in a process of its own, in an empty folder, without the environment's
    variables, and with limits on time, memory and the size of files; its children end with it.
    **This is no sandbox**: code that a model wrote can read files and open connections.

    Attributes:
      tests: the code that is run after the text, such as assertions.
      seconds: the most seconds that it may take.
      megabytes: the most memory that it may address (on Linux).
      ends: the text ends before the first of these strings.
    """

    tests: str
    seconds: float = 10.0
    megabytes: int = 1024
    ends: tuple[str, ...] = ENDS

    def __post_init__(self):
        if not isinstance(self.tests, str) or not self.tests.strip():
            raise ValueError(f"tests={self.tests!r}: give code that is not empty")
        if not self.seconds > 0 or self.megabytes < 1:
            raise ValueError(
                f"seconds={self.seconds}, megabytes={self.megabytes}: both must be above 0"
            )

    def solved(self, prompt: str, text: str) -> bool:
        end = min((text.find(word) for word in self.ends if word in text), default=len(text))
        program = f"{prompt}{text[:end]}\n{self.tests}\n"
        limits = [str(int(self.seconds) + 1), str(self.megabytes << 20)]
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.Popen(
                [sys.executable, "-I", "-c", LIMITED, *limits],
                cwd=folder,
                env={},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                process.communicate(program.encode(), timeout=self.seconds)
                return process.returncode == 0
            except subprocess.TimeoutExpired:
                return False
            finally:
                _end(process)


def _end(process: subprocess.Popen) -> None:
    """Ends a process and its children."""
    if os.name == "posix":
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    else:
        process.kill()
    process.wait()


def task_of(fields: Mapping) -> Task | None:
    """Returns the task in a line of a file of prompts, None if it has none.

    Args:
      fields: the line's object: ``"answer"`` (a text or a number) and perhaps ``"where"``, see
        ``Answer``; or ``"tests"``, see ``PythonTests``.

    Raises:
      ValueError: both an answer and tests, or a value that the task refuses.
    """
    if "answer" in fields and "tests" in fields:
        raise ValueError("a prompt has an answer or tests, not both")
    if "answer" in fields:
        where = {"where": fields["where"]} if "where" in fields else {}
        answer = fields["answer"]
        number = isinstance(answer, int | float) and not isinstance(answer, bool)
        return Answer(str(answer) if number else answer, **where)
    return PythonTests(fields["tests"]) if "tests" in fields else None
