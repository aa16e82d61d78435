"""One row in a process of its own: reads it from standard input, writes its outcome as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from . import rows
from .peers import MissingPeerError


def main() -> None:
    """The outcome is the only thing on standard output."""
    given = json.load(sys.stdin)
    bench = rows.Bench(**(given["bench"] | {"cache": Path(given["bench"]["cache"])}))
    with contextlib.redirect_stdout(sys.stderr):
        try:
            outcome = {"figures": rows.run(given["row"], bench)}
        except MissingPeerError as error:
            outcome = {"skipped": str(error)}
    print(json.dumps(outcome))


if __name__ == "__main__":
    main()
