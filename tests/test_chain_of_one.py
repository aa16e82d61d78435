"""A batch of 32 rows and a chain of one draft, at default optimizations, in its own process.

A crash of compiled code ends the process, so it is the exit status that is looked at.
"""

import os
import subprocess
import sys
from pathlib import Path


def test_a_chain_of_one_draft_in_32_rows_does_not_crash():
    script = Path(__file__).with_name("chain_of_one.py")
    hidden = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr[-2000:]}"
    assert "decoded 32 rows" in done.stdout
