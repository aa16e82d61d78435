"""The command ``specjax``. This module imports little, so that Ctrl-C works from the start."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence

INTERRUPTED = 130  # options.INTERRUPTED, which may not have been imported


def command() -> int:
    """Runs the command of the process, which ends here after Ctrl-C.

    XLA compiles and computes on in threads of its own, and they crash where Python takes itself
    down meanwhile. One of several processes ends as usual, so that the others learn of it.
    """
    code = main()
    if code == INTERRUPTED and not _has_peers():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                if stream is not None:
                    stream.flush()
        os._exit(code)
    return code


def _has_peers() -> bool:
    """Whether this is one of several processes of JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.process_count() > 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
      argv: the words after ``specjax``; None: those of the process.

    Returns:
      the exit code: 0, 2 for bad input, 130 after Ctrl-C; some commands return 1 for a result that
      their help describes.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        with _short_warnings(), _heard_interrupts():
            from . import commands

            code = commands.run(argv)
        if sys.stdout is not None:
            sys.stdout.flush()  # where there is no room for the last lines, as on a full disk
        return code
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError) as error:
        full = _stdout_fails()
        said = f"stdout: {full}" if full else _said(error, argv)
        print(f"specjax: error: {said}", file=sys.stderr)
        return 2  # options.USAGE_ERROR, which may not have been imported
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Prints warnings for users as errors are printed, without the file and line of Python code."""
    usual = warnings.formatwarning

    def short(message, category, *place, **line):
        if category is not UserWarning:
            return usual(message, category, *place, **line)
        return f"specjax: warning: {' '.join(str(message).split())}\n"

    warnings.formatwarning = short
    try:
        yield
    finally:
        warnings.formatwarning = usual


@contextlib.contextmanager
def _heard_interrupts() -> Iterator[None]:
    """Repeats a Ctrl-C that Python drops, because it came in a callback, such as that by which JAX
    collects garbage."""
    usual = sys.unraisablehook

    timers: list[threading.Timer] = []

    def again():
        if hasattr(signal, "pthread_kill"):  # it also wakes a thread that waits
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        else:
            _thread.interrupt_main()

    def hook(unraisable):
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            timers.append(threading.Timer(0.05, again))
            timers[-1].start()
        else:
            usual(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
        for timer in timers:
            timer.cancel()


def _said(error: Exception, argv: Sequence[str]) -> str:
    """The text of an error, in the words of the command that was typed."""
    from .commands import COMMANDS
    from .typed_names import in_options

    command = COMMANDS.get(argv[0]) if argv else None
    return str(error) if command is None else in_options(error, command.add)


def _stdout_fails() -> str:
    """Why stdout takes no text, such as a full disk; empty: it does. What waits there is dropped,
    since Python would write it at its end and fail again."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return error.strerror or "it cannot be written"
    return ""
