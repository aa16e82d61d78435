"""The table of tiers: every line of it matches a test, and what it says is what is run."""

import tiers
from tier_table import DEFAULT, EVERYTHING, FULL, MERGE
from tiers import Schedule


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
