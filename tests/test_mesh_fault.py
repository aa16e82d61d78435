"""The planted fault of meshes, which needs eight devices, within the default tier."""

import os
import subprocess
import sys
from pathlib import Path


def test_fault_of_a_mesh_is_seen_by_a_process_with_eight_devices():
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/test_mesh.py", "-k", "fault", "--tier", "merge"],
        cwd=Path(__file__).parent.parent,
        env=own | {"SPECJAX_TEST_DEVICES": "8"},
        capture_output=True,
        text=True,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
