"""Which test runs when: the table of tiers, and the command that runs a tier.

    python -m pytest tests -n 2               the default tier: what everybody runs
    python tests/tiers.py merge               what a merge adds to it
    python tests/tiers.py full                every test, before a release
    python -m pytest tests/test_mesh.py       a file that is named runs whole, whatever its tier

Tests are in the default tier unless the table below says otherwise: a file by its name, or the
tests of a file by regular expressions that are searched in what pytest prints after the ``::``; the
first that matches decides. Tests that need several devices run in a session of their own, whose
process has eight virtual devices (SPECJAX_TEST_DEVICES=8); all others see the one device that a
user has, on which the native kernels are used. A line that matches no test is an error.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DEFAULT, MERGE, FULL = TIERS = ("default", "merge", "full")
EVERYTHING = ""  # matches every test of a file

TABLE = {
    "test_mesh.py": MERGE,
    "test_mesh_processes.py": FULL,
    "test_notebook.py": FULL,
    "test_benchmarks.py": FULL,
    "train/": MERGE,
    "models/": MERGE,
}

# What needs eight devices, and what is repeated on them in the full tier: there XLA's own products
# and attention serve instead of the kernels.
DEVICES = {
    "test_mesh.py": EVERYTHING,
    "test_decoder.py": "mesh",
    "test_memory.py": "mesh",
    "test_rows.py": "over_a_mesh",
    "test_serving.py": "over_a_mesh",
    "models/test_encoder_serving.py": EVERYTHING,
    "models/test_family_drafters.py": "on_a_mesh",
    "models/test_shared_encoders.py": EVERYTHING,
    "train/test_scale.py": EVERYTHING,
}
REPEATED = ("test_decoder.py", "test_heldout.py", "test_greedy.py", "models/")


class Schedule:
    """Looks tests up in the table, and remembers which of its lines have served."""

    def __init__(self, table=TABLE, devices=DEVICES):
        self.table = {
            place: [(EVERYTHING, rules)] if isinstance(rules, str) else list(rules)
            for place, rules in table.items()
        }
        self.devices = devices
        self.used, self.seen = set(), set()

    def place(self, file):
        """The line for ``file``: its own, else that of its folder."""
        return next((p for p in (file, f"{file.partition('/')[0]}/") if p in self.table), None)

    def tier(self, file, test):
        """The tier of ``test`` (what stands after the ``::``) in ``file`` (below ``tests/``)."""
        place = self.place(file)
        self.seen.add(place)
        for pattern, tier in self.table.get(place, ()):
            if re.search(pattern, test):
                self.used.add((place, pattern))
                return tier
        return DEFAULT

    def tiers(self, file):
        """All tiers that tests of ``file`` may be in."""
        rules = self.table.get(self.place(file), ())
        found = {tier for _, tier in rules}
        return found if any(p == EVERYTHING for p, _ in rules) else found | {DEFAULT}

    def many(self, file, test):
        """Whether ``test`` needs several devices."""
        pattern = self.devices.get(file)
        if pattern is None:
            return False
        self.seen.add(file)
        if re.search(pattern, test):
            self.used.add((file, pattern))
            return True
        return False

    def unused(self):
        """Lines of the table, for files that were seen, that matched none of their tests."""
        lines = [(place, p) for place, rules in self.table.items() for p, _ in rules]
        lines += self.devices.items()
        return [x for x in lines if x[0] in self.seen and x not in self.used]


def sessions(tier):
    """``(devices, options)`` of the runs of pytest that make up ``tier``."""
    if tier == DEFAULT:
        return [(1, ["--tier", DEFAULT])]
    wanted = "merge" if tier == MERGE else "default,merge,full"
    return [(1, ["--tier", wanted]), (8, ["--tier", wanted])]


def main(arguments):
    """Runs the tiers that are named, each with what else pytest is told."""
    names = [x for x in arguments if x in TIERS]
    others = [x for x in arguments if x not in TIERS]
    if not names:
        print(f"usage: python tests/tiers.py {{{','.join(TIERS)}}} [options of pytest]")
        return 2
    if not any(x.startswith("-n") for x in others):
        others += ["-n", "2"]
    failed = []
    for name in names:
        for devices, options in sessions(name):
            command = [sys.executable, "-m", "pytest", "tests", *options, *others]
            print(f"{name} tier, {devices} device(s): {' '.join(command[1:])}", flush=True)
            done = subprocess.run(
                command,
                cwd=Path(__file__).parent.parent,
                env=os.environ | {"SPECJAX_TEST_DEVICES": str(devices)},
            )
            if done.returncode:
                failed.append(f"{name} on {devices}")
    print("failed: " + ", ".join(failed) if failed else f"passed: {', '.join(names)}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
