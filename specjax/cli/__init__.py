"""The command ``specjax``. Nothing heavy is imported here, so that Ctrl-C is met from the start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        from . import commands

        return commands.run(argv)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError) as error:
        print(f"specjax: error: {error}", file=sys.stderr)
        return 2  # options.USAGE_ERROR, which may not have been imported
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # options.INTERRUPTED
