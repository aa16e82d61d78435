"""The table of tiers: every line of it matches a test, and what it says is what is run."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import quickly
import tiers
from tier_table import DEFAULT, EVERYTHING, FULL, MERGE, TABLE
from tiers import Schedule

TESTS = Path(__file__).parent
README = (TESTS / "README.md").read_text()


def test_the_first_line_that_matches_decides_and_a_file_without_lines_is_in_the_default_tier():
    table = Schedule({"a.py": [("slow", MERGE), ("", FULL)], "b/": MERGE, "b/c.py": DEFAULT}, {})
    assert table.tier("a.py", "test_slow[x]") == MERGE and table.tier("a.py", "test_x") == FULL
    assert table.tier("b/d.py", "test_x") == MERGE and table.tier("b/c.py", "test_x") == DEFAULT
    assert table.tier("other.py", "test_x") == DEFAULT
    assert table.tiers("a.py") == {MERGE, FULL} and table.tiers("b/d.py") == {MERGE}


def test_a_tier_is_the_sessions_that_make_it_up():
    assert [devices for devices, _ in tiers.sessions(DEFAULT)] == [1]
    assert [devices for devices, _ in tiers.sessions(MERGE)] == [1, 8]
    assert [devices for devices, _ in tiers.sessions(FULL)] == [1, 8]


def test_a_test_that_needs_several_devices_is_in_no_tier_of_one_device(misplaced):
    assert not misplaced, f"tests/tiers.py: in the default tier, which has one device: {misplaced}"


def test_fault_a_test_of_several_devices_that_falls_into_the_default_tier_is_seen():
    table = Schedule(
        {"a.py": [("mesh", MERGE)], "b.py": DEFAULT}, {"a.py": "mesh|many", "b.py": ""}
    )
    for file, test in (("a.py", "test_mesh"), ("a.py", "test_many"), ("b.py", "test_x")):
        assert table.many(file, test)
    assert not table.many("a.py", "test_x")
    assert table.misplaced == ["a.py::test_many", "b.py::test_x"]


def test_no_file_whose_every_test_needs_several_devices_has_a_default_line():
    everything = [file for file, pattern in tiers.DEVICES.items() if pattern == EVERYTHING]
    assert everything and not [file for file in everything if DEFAULT in Schedule().tiers(file)]


def test_every_line_matches_a_test_of_a_file_that_was_collected_whole(unmatched):
    assert not unmatched, f"tests/tier_table.py: no test matches {unmatched}"


def test_the_options_of_a_quick_compilation_reach_the_compiler_there_alone(monkeypatch):
    monkeypatch.setattr(quickly, "quick_options", lambda: {"xla_no_such_option": True})
    program = jax.jit(lambda x: x + 1).lower(0)
    with quickly.compiling_quickly():
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            program.compile()
    program.compile()


# ------------------------------------------------------------------------------ the README


def proofs(text):
    """The rows of the table of proofs: ``(files that a row names, {tier: its cell})``."""
    for line in text.partition("| proof |")[2].splitlines()[2:]:
        if not line.startswith("|"):
            return
        proof, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        named = re.findall(r"`([a-z_]+/|(?:[a-z_]+/)*test_[a-z_]+\.py)`", proof)
        yield named, dict(zip((DEFAULT, MERGE, FULL), cells, strict=True))


def wrong_cells(text):
    """Cells that say what a tier runs where none of the row's tests is in that tier, and empty
    cells of the merge tier where some are."""
    table, found = Schedule(), []
    for named, cells in proofs(text):
        paths = [TESTS / name for name in named]
        files = [[*path.rglob("test_*.py")] if path.is_dir() else [path] for path in paths]
        run = {t for x in sum(files, []) for t in table.tiers(x.relative_to(TESTS).as_posix())}
        for tier, cell in cells.items():
            if run and (tier not in run if cell else tier == MERGE and tier in run):
                found.append((named, tier, cell))
    return found


def test_the_readme_says_in_which_tiers_a_proof_has_tests():
    assert sum(bool(named) for named, _ in proofs(README)) > 12
    assert not wrong_cells(README)


def test_fault_a_cell_of_a_tier_that_has_no_such_test_is_seen():
    row = "| proof | default | merge | full |\n|---|---|---|---|\n| x (`{}`) | {} | {} | {} |\n"
    assert not wrong_cells(row.format("test_workloads.py", "", "", "all"))
    assert wrong_cells(row.format("test_workloads.py", "", "all", ""))
    assert wrong_cells(row.format("test_coupled.py", "one", "", "all"))


def test_the_readme_names_files_that_exist():
    names = re.findall(r"`(?:tests/)?((?:[a-z_]+/)*[a-z_]+\.py)`", README)
    assert len(names) > 20 and not [name for name in names if not (TESTS / name).exists()]
    assert tiers.OPTIMIZED <= tiers.QUICK
    named = {*tiers.QUICK, *tiers.SPREAD, *tiers.DEVICES, *(x for x in TABLE if x[-1] != "/")}
    assert not [name for name in named if not (TESTS / name).exists()]


def test_continuous_integration_requires_the_tiers_that_the_readme_says_it_does():
    lines = (TESTS.parent / ".ci" / "run").read_text().splitlines()
    row = next(line for line in README.splitlines() if line.startswith("| `.ci/run` |"))
    assert "the default tier and the merge tier, all of which must pass" in row
    assert "set -eu" in lines  # a line that fails ends it
    assert {".ci/lint", "python -m pytest tests -n 2", "python tests/tiers.py merge"} <= {*lines}


def planted():
    """``(file, name)`` of each test of a planted fault."""
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_fault_"):
                yield path.relative_to(TESTS).as_posix(), node.name


def test_every_planted_fault_is_in_the_default_tier():
    table = Schedule()
    # test_mesh_fault.py runs those of test_mesh.py in a process with eight devices
    faults = [fault for fault in planted() if not table.many(*fault)]
    assert len(faults) > 50
    assert not [fault for fault in faults if table.tier(*fault) != DEFAULT]


def test_a_worker_runs_a_file_whole():
    """Otherwise its fixtures and programs are made by each worker, which takes far longer."""
    pytest.importorskip("xdist")
    files = "tests/test_edges.py", "tests/test_topology.py"
    command = [sys.executable, "-m", "pytest", *files, "--tier", "default", "-n", "2", "-vvv"]
    own = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, env=own, capture_output=True, text=True)
    ran = set(re.findall(r"\[(gw\d)\].* PASSED (\S+)::", done.stdout))
    assert {file for _, file in ran} == {*files}, done.stdout + done.stderr
    assert len(ran) == len(files)
