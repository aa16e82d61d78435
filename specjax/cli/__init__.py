"""The command ``specjax``. This module imports little, so that Ctrl-C works from the start."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


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
        from . import commands

        return commands.run(argv)
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError) as error:
        print(f"specjax: error: {error}", file=sys.stderr)
        return 2  # options.USAGE_ERROR, which may not have been imported
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # options.INTERRUPTED
