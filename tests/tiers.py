"""How a tier is run: the schedule of the tests, and the command that runs a tier.

    python -m pytest tests -n 2               the default tier: what everybody runs
    python tests/tiers.py merge               what a merge adds to it
    python tests/tiers.py full                every test, before a release
    python -m pytest tests/test_mesh.py       a named file runs whole, whatever its tier

``tier_table.py`` holds the table that says which tier a test is in. Tests that need several devices
run in a session of their own, whose process has eight virtual devices (SPECJAX_TEST_DEVICES=8); all
others see one device, on which the native kernels are used. Two things are errors: a line that
matches no test, and a test that needs several devices in the default tier, which has one device.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tier_table import DEFAULT, EVERYTHING, MERGE, TABLE, TIERS

# Files of toys, which the default and the merge tier compile without most of XLA's optimizations:
# compiling takes most of their time. The full tier compiles them as a user's program is compiled.
QUICK = {
    "test_acceptance.py",
    "test_adaptive.py",
    "test_approximate.py",
    "test_audit.py",
    "test_benchmarks.py",
    "test_bigram.py",
    "test_block_drafters.py",
    "test_block_heads.py",
    "test_block_layouts.py",
    "test_block_trees.py",
    "test_cascade.py",
    "test_cascade_tree.py",
    "test_chain_rules.py",
    "test_chat.py",
    "test_check_contract.py",
    "test_cli.py",
    "test_cli_checks.py",
    "test_cli_prompts.py",
    "test_contract.py",
    "test_contract_hooks.py",
    "test_copying.py",
    "test_coupled.py",
    "test_datastore.py",
    "test_dflash2.py",
    "test_docs.py",
    "test_draft_ahead.py",
    "test_draft_length.py",
    "test_drafter_registry.py",
    "test_drawn_or_top.py",
    "test_dspark.py",
    "test_edges.py",
    "test_engine_audit.py",
    "test_feature.py",
    "test_feature_formats.py",
    "test_feature_generations.py",
    "test_feature_refusals.py",
    "test_forty_lines.py",
    "test_head_benchmarks.py",
    "test_heads.py",
    "test_hybrid.py",
    "test_laws.py",
    "test_llmcad.py",
    "test_lookahead.py",
    "test_many_columns.py",
    "test_mesh.py",
    "test_mtp.py",
    "test_mtp_float8.py",
    "test_named_errors.py",
    "test_native.py",
    "test_native_quantized.py",
    "test_no_token.py",
    "test_other_vocabulary.py",
    "test_own_layers.py",
    "test_own_objects.py",
    "test_pass.py",
    "test_pipeline.py",
    "test_policies.py",
    "test_prefix.py",
    "test_pricing.py",
    "test_probe.py",
    "test_quality.py",
    "test_recurrent.py",
    "test_recycling.py",
    "test_requests.py",
    "test_reward_guided.py",
    "test_sampled.py",
    "test_sampled_faults.py",
    "test_serving.py",
    "test_session.py",
    "test_stepwise.py",
    "test_stopping.py",
    "test_synthetic.py",
    "test_tables.py",
    "test_text.py",
    "test_text_refusals.py",
    "test_tiles.py",
    "test_topology.py",
    "test_trace.py",
    "test_trace_page.py",
    "test_tree_search.py",
    "test_windows.py",
    "models/test_families.py",
    "models/test_hf.py",
    "models/test_lm.py",
    "models/test_mla.py",
    "models/test_moe.py",
    "models/test_parity.py",
    "models/test_quantize.py",
    "models/test_quantized_files.py",
    "models/test_t5.py",
    "models/test_whisper.py",
    "train/test_calibrate.py",
    "train/test_compare.py",
    "train/test_conversations.py",
    "train/test_data.py",
    "train/test_depth_width.py",
    "train/test_early_exit.py",
    "train/test_feature_init.py",
    "train/test_feature_recipes.py",
    "train/test_features.py",
    "train/test_head_losses.py",
    "train/test_head_recipes.py",
    "train/test_kangaroo_recipe.py",
    "train/test_losses.py",
    "train/test_optimizer.py",
    "train/test_own_drafts.py",
    "train/test_probe_recipe.py",
    "train/test_prune_recipe.py",
    "train/test_report.py",
    "train/test_reward_recipe.py",
    "train/test_specdec_recipe.py",
    "train/test_spire_recipe.py",
    "train/test_start.py",
    "train/test_streaks.py",
    "train/test_unlikelihood.py",
    "train/test_unroll.py",
    "train/test_unroll_streaks.py",
}

# Files of QUICK whose programs run for seconds: only the emitters of fusions are the former ones.
OPTIMIZED = {"test_acceptance.py"}

# A worker of xdist runs a file whole, because its tests share fixtures and programs. Exceptions:
SPREAD = {
    "test_acceptance.py",
    "test_drafts.py",
    "test_native.py",
    "test_sampled.py",
    "test_sampled_faults.py",
}

# Tests that need eight devices, and tests that the full tier repeats on them; there XLA's own
# products and attention are used instead of the kernels.
DEVICES = {
    "test_mesh.py": EVERYTHING,
    "test_decoder.py": "mesh",
    "test_draft_ahead.py": "two_groups",
    "test_memory.py": "plan_of_a_quantized",
    "test_pipeline.py": "on_a_mesh",
    "test_pipelined.py": "on_a_mesh",
    "test_rows.py": "over_a_mesh",
    "test_serving.py": "over_a_mesh",
    "models/test_encoder_serving.py": EVERYTHING,
    "models/test_family_drafters.py": "on_a_mesh",
    "models/test_shared_encoders.py": EVERYTHING,
    "train/test_scale.py": EVERYTHING,
}
REPEATED = (
    "test_decoder.py",
    "test_greedy.py",
    "test_heldout.py",
    "test_refused_inputs.py",
    "test_segments.py",
    "test_trees.py",
    "models/test_mla.py",
    "models/test_moe.py",
    "models/test_parity.py",
    "models/test_quantize.py",
    "models/test_quantized_copies.py",
)


class Schedule:
    """Looks tests up in the table, and records which lines matched a test."""

    def __init__(self, table=TABLE, devices=DEVICES):
        self.table = {
            place: [(EVERYTHING, rules)] if isinstance(rules, str) else list(rules)
            for place, rules in table.items()
        }
        self.devices = devices
        self.used, self.seen, self.misplaced = set(), set(), []

    def place(self, file):
        """The line for ``file``: that of the file, else that of its folder."""
        return next((p for p in (file, f"{file.partition('/')[0]}/") if p in self.table), None)

    def tier(self, file, test):
        """The tier of ``test`` (the text after the ``::``) in ``file`` (relative to ``tests/``)."""
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

    def group(self, file, test):
        """The group of tests that one worker runs with ``test``; None: there is none."""
        if file in SPREAD:
            return None
        _, bracket, case = test.partition("[")
        return file + case if file == "test_greedy.py" and bracket else file

    def many(self, file, test):
        """Whether ``test`` needs several devices."""
        pattern = self.devices.get(file)
        if pattern is None:
            return False
        self.seen.add(file)
        if re.search(pattern, test):
            self.used.add((file, pattern))
            if self.tier(file, test) == DEFAULT:  # that tier has one device: nobody would run it
                self.misplaced.append(f"{file}::{test}")
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
    """Runs the named tiers; further arguments are passed to pytest."""
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
