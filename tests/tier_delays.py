"""Tests that wait for a later tier because they take long: what they prove is proved there.

The default tier has six minutes on two cores, the default and the merge tier with installation and
lint twenty. Where several tests prove one thing, or several faults are planted in one place, the
quick ones stay where ``tier_table.py`` has them. The lines are read before those of the table.
"""

from __future__ import annotations

from tier_folders import FULL, MERGE

DELAYS = {
    "test_acceptance.py": [
        (r"exactly\[traversal-(distinct-topology4|iid-topology[37]\])", MERGE),
        (r"exactly\[traversal-hub-topology5|keeps_at_least.*\[iid", FULL),
    ],
    "test_audit.py": [(r"\[flat q", MERGE), (r"\[afresh|every_draft.*\[hub", FULL)],
    "test_bayesian_layers.py": [("stopped_search", MERGE)],
    "test_block_heads.py": [(r"slow_head.*\[lilicorr", FULL)],
    "test_cascade_tree.py": [(r"stated\[_drawn_again", MERGE), (r"alone\[auto", FULL)],
    "test_chain_of_one.py": [("", FULL)],
    "test_check_contract.py": [
        (r"named\[drafter[023]|hidden_states_and", MERGE),
        (r"every_check\[draft", FULL),
    ],
    "test_cli.py": [("json_is_one|terminal_shows", MERGE)],
    "test_decoder.py": [(r"each_path\[gpt2|copies.*\[self-3-300|explicit", FULL)],
    "test_docs.py": [("forty_lines", FULL)],
    "test_draft_ahead.py": [(r"pearl\]", FULL)],
    "test_draft_length.py": [(r"\[suffix\]|hopeless|budget_of_one", FULL)],
    "test_drafts.py": [(r"\[(fallback draft|merged|union of draft models)\]", FULL)],
    "test_edges.py": [("processors_of_transformers", FULL)],
    "test_feature.py": [("another_drafter_proposed", FULL)],
    "test_fixed_bits.py": [(r"\[(.*-)?float16", FULL)],
    "test_greedy.py": [
        (r"token_for_token.*\[(hybrid draft|lookahead|redrafter|recycling|jacobi blocks)\]", MERGE),
        (r"token_for_token.*\[(draft expanded|merged|fallback draft|llmcad)\]", FULL),
        (r"any_number.*\[union", FULL),
    ],
    "test_heads_decode.py": [("blockwise|served_with", FULL)],
    "test_horizontal.py": [
        (r"\[OtherPosition", MERGE),
        (r"law\[rejection|knows\[(alone|stopped)", FULL),
    ],
    "test_hybrid.py": [("finished_row", FULL)],
    "test_laws.py": [(r"json.*\[1.5", FULL)],
    "test_low_bits.py": [("is_named_so|no_such_cache", MERGE)],
    "test_lookahead.py": [(r"\[NeverForgets", MERGE)],
    "test_mesh.py": [("same_keys", FULL)],
    "test_mtp.py": [(r"differ\[deepseek", MERGE)],
    "test_native.py": [("warning.*v3", FULL)],
    "test_native_quantized.py": [("warning.*v3", FULL), (r"one_line.*float16", FULL)],
    "test_other_vocabulary.py": [
        ("several_spaces", MERGE),
        (r"\[(adaptive )?slem\]|SLEM-0|any_number.*\[tli\]", FULL),
    ],
    "test_pipeline.py": [("says_what", FULL)],
    "test_pipelined.py": [(r"formula\[latents", FULL)],
    "test_planner.py": [("takes_the_names", MERGE)],
    "test_policies.py": [(r"threshold\[Tree", FULL)],
    "test_prefix.py": [("documents_are", FULL)],
    "test_quality.py": [("temperature_0_lossless", FULL)],
    "test_quantized_decoding.py": [("command_states", FULL)],
    "test_recurrent.py": [("search_written_out", MERGE)],
    "test_recycling.py": [("best_successors", MERGE), (r"\[union of tables\]", FULL)],
    "test_requests.py": [("settings_and_budgets", FULL)],
    "test_sampled.py": [(r"\[(tli-rejection|draft tree hub-hub)\]", FULL)],
    "test_sanitizers.py": [("", FULL)],
    "test_self_draft.py": [(r"\[(the )?states ", MERGE)],
    "test_stepwise.py": [("0.0-(tree|draft)", FULL)],
    "test_switched.py": [("one_program", FULL)],
    "test_tables.py": [("what_they_share_once", MERGE)],
    "test_text.py": [
        ("stops_end|fill_the_context|without_a_tokenizer|that_is_the_target|interruption", MERGE)
    ],
    "test_trees.py": [("level_by_level", MERGE)],
    "fuzz/test_references.py": [("noise_is", MERGE)],
    "models/test_family_drafters.py": [("gpt2-tree|llama-exit", FULL)],
    "models/test_quantize.py": [("no_worse_than", MERGE)],
    "models/test_specdec.py": [("slow_pass", FULL)],
    "train/test_early_exit.py": [("first_layers", FULL)],
    "train/test_head_losses.py": [(r"at_once\[(0.0-None|1.0-vocab2)", FULL)],
    "train/test_losses.py": [(r"whole\[3", FULL)],
    "train/test_specdec_recipe.py": [("needs_texts", FULL)],
    "train/test_streaks.py": [("through the weights", MERGE)],
    "train/test_unroll.py": [("caches_of_their_own", FULL)],
}


def delayed(table: dict, delays: dict = DELAYS) -> dict:
    """The table of tiers with the lines of ``delays`` before those of their files.

    A file without a line of its own has the lines of its folder, or none.
    """
    found = dict(table)
    for file, lines in delays.items():
        folder = f"{file.partition('/')[0]}/"
        rules = table.get(file, table.get(folder, []))
        found[file] = [*lines, *([("", rules)] if isinstance(rules, str) else rules)]
    return found
