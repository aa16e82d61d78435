"""Tasks: prompts whose continuations are right or wrong, for ``specjax.quality``.

A task says of a text whether it solves the prompt: by a known answer, or by tests that are run with
the code that was written. The share of tasks that a rule solves is what its approximation costs the
user, where log-likelihoods only say how far the text is from the model's own.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping

# a sign belongs to a number unless a word or a number stands before it; commas part thousands alone
NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
)
# where the continuation of a function ends, as in HumanEval (Codex, arXiv 2107.03374, section 3.1)
ENDS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(")

# Sets the limits of its own process (seconds, bytes), runs the program that it reads, and then
# writes its last argument: a program that ends early, by exit(), has passed no tests.
LIMITED = """
import os, sys
said = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
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
os.write(said, sys.argv[3].encode())
"""
KEPT = ("SYSTEMROOT", "LD_LIBRARY_PATH")  # variables without which Python may not start


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
        with which the continuation must begin, as a whole word, spaces aside.
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
            return bool(re.match(re.escape(wanted) + r"(?!\w)", text.lstrip()))
        found = NUMBER.findall(text)
        return bool(found) and _value(found[0 if self.where == "first" else -1]) == _value(wanted)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


@dataclasses.dataclass(frozen=True)
class PythonTests(Task):
    """Tests of code: prompt, text and tests are run as one program, which must end without error.

    The program runs in a process of its own, in an empty folder, without the environment's
    variables, and with limits on time, the size of files and (on Linux) memory; the children in its
    process group end with it. **This is no sandbox**: code that a model wrote can read files, open
    connections and start processes that outlive it.

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
        if not 0 < self.seconds < math.inf or self.megabytes < 1:
            raise ValueError(
                f"seconds={self.seconds}, megabytes={self.megabytes}: both must be above 0, and "
                "finite"
            )

    def solved(self, prompt: str, text: str) -> bool:
        end = min((text.find(word) for word in self.ends if word in text), default=len(text))
        if not _passes("", self.seconds, self.megabytes):
            raise RuntimeError(
                f"an empty program does not run within seconds={self.seconds} and "
                f"megabytes={self.megabytes}, so that no code can be tested: give more"
            )
        return _run(f"{prompt}{text[:end]}\n{self.tests}\n", self.seconds, self.megabytes)


def _run(program: str, seconds: float, megabytes: int) -> bool:
    """Whether a program runs to its end, within its limits and without error."""
    token = secrets.token_hex()
    limits = [str(int(seconds) + 1), str(megabytes << 20), token]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", LIMITED, *limits],
            cwd=folder,
            env={name: os.environ[name] for name in KEPT if name in os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(program.encode(), timeout=seconds)
            return process.returncode == 0 and said == token.encode()
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)


_passes = functools.cache(_run)  # whether limits let a program run at all


def _end(process: subprocess.Popen) -> None:
    """Ends a process and the children in its group, and closes its pipes."""
    if os.name == "posix":
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    else:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


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
        where = {name: fields[name] for name in ("where",) if name in fields}
        answer = fields["answer"]
        return Answer(str(answer) if type(answer) in (int, float) else answer, **where)
    if "where" in fields:
        raise ValueError('"where" says which number is the answer: give "answer" too')
    return PythonTests(fields["tests"]) if "tests" in fields else None
