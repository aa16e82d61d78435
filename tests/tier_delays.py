"""Tests that wait for a later tier because they take long: what they prove is proved there.

The default tier has six minutes on two cores, the default and the merge tier with installation and
lint twenty. Where several tests prove one thing, or several faults are planted in one place, the
quick ones stay where ``tier_table.py`` has them. The lines are read before those of the table.
"""

from __future__ import annotations

from tier_folders import FULL, MERGE

DELAYS = {
    "test_acceptance.py": [
        (r"exactly\[(traversal-iid-topology3\]|traversal-distinct-topology4|hub-hub)", FULL),
        (r"beside_it_never\[(kseq|hub)", FULL),
        (r"exactly\[(traversal-iid-topology7\]|rejection-hub)", MERGE),
        (r"several_drafters.*\[rejection|may_end.*\[kseq|typical_acc", MERGE),
        (r"exactly\[(traversal-hub-topology5|kseq-iid-topology10)|keeps_at_least.*\[iid", FULL),
    ],
    "test_approximate.py": [(r"distinct\]|within_the_bounds.*gap", FULL)],
    "test_audit.py": [(r"\[flat q|\[afresh|every_draft.*\[hub", FULL)],
    "test_bayesian_layers.py": [("stopped_search", MERGE)],
    "test_bigram.py": [(r"decides\[4|without_successor\[3", FULL)],
    "test_block_drafters.py": [(r"\[(parallel heads|bidirectional)", FULL)],
    "test_block_heads.py": [(r"slow_head.*\[lilicorr", FULL)],
    "test_cascade_tree.py": [(r"stated\[_drawn_again|alone\[auto", FULL)],
    "test_chain_of_one.py": [("", FULL)],
    "test_cascade.py": [(r"drawn_from.*\[innermost law-draft", MERGE)],
    "test_check_contract.py": [
        # the same mistake is named in test_policies.py
        (r"every_check\[draft|named\[drafter[013]", FULL),
        (r"named\[drafter2|hidden_states_and|right_target", MERGE),
    ],
    "test_cli.py": [(r"json_is_one|terminal_shows|traceback\[(plan|generate)", MERGE)],
    "test_copying.py": [("held_out", MERGE)],
    "test_coupled.py": [(r"every_drafter.*\[(draft|eagle|hydra prefix|tree per row)\]", FULL)],
    "test_decoder.py": [(r"each_path\[gpt2|copies.*\[(self-3-300|plain-1-2304)|explicit", FULL)],
    "test_docs.py": [("forty_lines|rule.md-", FULL)],
    "test_drafter_registry.py": [(r"conformance_tests\[tli", MERGE)],
    "test_dspark.py": [("schedule_rests|temperature_of_a_place", FULL)],
    "test_draft_ahead.py": [(r"pearl\]|no_more\[drafter1", FULL)],
    "test_draft_length.py": [(r"\[(suffix|huggingface)\]|hopeless|budget_of_one", FULL)],
    "test_drafts.py": [
        # one drafter of each kind stays; for the last ones, their own files compute laws anew
        (r"\[(fallback draft|merged|union of draft models|hybrid draft|tree per row)\]", FULL),
        (r"\[p-eagle dependent\]", FULL),
        (r"\[((mtp heads|medusa|blockwise) distinct|draft tree [dh].*|(llmcad|self) tree)\]", FULL),
        (r"\[(probed draft|unsure draft|lstm speculator|p-eagle|eagle|dflash2|domino)\]", FULL),
        (r"\[(cascade comb|spire|horizontal|specdiff|self|hydra|mlp speculator|block)\]", FULL),
    ],
    "test_edges.py": [("processors_of_transformers", FULL), ("silent_one", MERGE)],
    "test_feature.py": [
        ("after_a_longer", FULL),
        (r"from_scratch\[all at once, read", FULL),
        ("root's feature|shifted by one", MERGE),
        ("another_drafter_proposed", FULL),
    ],
    "test_first_token.py": [
        (r"samples_of|law\[(eagle3|ngram)|read\[0.9|shared_noise.*\[rejection", FULL),
        (r"shared_noise|law\[(tree distinct|draft)", MERGE),
        ("stops_a_row|last_token_alone|whole_prompt", MERGE),
    ],
    "test_fixed_bits.py": [(r"\[(.*-)?float16|2200-bfloat16|width_and_batch\[bfloat16", FULL)],
    "test_greedy.py": [
        (r"token_for_token.*\[(adaptive p-eagle.*|union of draft models)\]", FULL),
        (r"token_for_token.*\[(draft )?tree distinct\]", FULL),
        (r"token_for_token.*\[(hybrid draft|lookahead|redrafter|recycling|jacobi blocks)\]", MERGE),
        (r"token_for_token.*\[(suffix tree|unsure draft|eagle|mtp heads|.*p-eagle.*)\]", MERGE),
        (r"token_for_token.*\[adaptive ngram\]", MERGE),
        ("traced_once", MERGE),
        ("under_vmap", FULL),
        (r"token_for_token.*\[(draft expanded|merged|fallback draft|llmcad)\]", FULL),
        (r"token_for_token.*\[(cascade draft comb|draft tree hub|ngram tree)\]", FULL),
        (r"any_number.*\[union|array_of.*\[tree|penalty_and.*\[(tree|draft)", FULL),
    ],
    "test_heads.py": [(r"authors_code\[(hydra_prefix|medusa_tied)", FULL)],
    "test_heads_decode.py": [("blockwise|served_with|hydra_reads", FULL)],
    "test_horizontal.py": [
        (r"\[FirstLaw", MERGE),
        (r"\[OtherPosition|law\[rejection|knows\[(alone|stopped)|texts_with_a_matrix", FULL),
    ],
    "test_hybrid.py": [(r"finished_row|not_depend.*\[(stop|pearl|draft)", FULL)],
    "test_laws.py": [(r"json.*\[1.5", FULL)],
    "test_low_bits.py": [("is_named_so|no_such_cache", MERGE)],
    "test_lookahead.py": [
        (r"\[(OneKeyOff|SeesOneMore)", MERGE),
        (r"\[NeverForgets|paths\[plain", FULL),
    ],
    "test_many_columns.py": [
        (r"number_of_columns\[(98|530)", FULL),
        (r"number_of_columns\[95", MERGE),
    ],
    "test_memory.py": [("seen_as_a_further", MERGE), ("drafts_for_itself", FULL)],
    "test_mesh.py": [(r"same_keys|one_says\[(hybrid draft|hydra prefix|mtp|eagle|ngram)\]", FULL)],
    "test_mtp.py": [(r"differ\[deepseek", FULL)],
    "test_narrow.py": [(r"float32\[oi", FULL), (r"float32\[bmd", MERGE)],
    "test_native.py": [("warning|attention_has_the_derivatives", FULL)],
    "test_native_quantized.py": [
        (
            r"same_law\[.*on1|turned_if_asked_for\[[13]\]|number_of_columns\[(25-2304|1-192)-.*(zeros|channels|wide)",
            FULL,
        ),
        (r"warning|one_line.*float16|same_law\[5-|number_of_columns\[(7-|1-192-int8)", FULL),
    ],
    "test_other_vocabulary.py": [
        ("several_spaces", FULL),
        (r"\[(adaptive )?slem\]|(SLEM-0|TLI)|any_number.*\[tli\]", FULL),
    ],
    "test_package.py": [("embedded_models_load", MERGE)],
    "test_pipeline.py": [("says_what", FULL)],
    "test_pipelined.py": [(r"formula\[latents", FULL)],
    "test_planner.py": [("takes_the_names|faster_than_a_plain|approximate_rule", MERGE)],
    "test_policies.py": [(r"turns_7_3.*\[block", MERGE), (r"threshold\[Tree", FULL)],
    "test_prefill.py": [(r"shown_all\[more[01]", FULL)],
    "test_prefix.py": [(r"documents_are|as_it_was_saved\[cell1", FULL)],
    "test_quality.py": [("temperature_0_lossless", FULL)],
    "test_quantized_decoding.py": [("command_states", FULL)],
    "test_recurrent.py": [
        (r"official.*\[(mlp_tied|redrafter_sum|lstm_untied)\]", FULL),
        ("search_written_out", MERGE),
    ],
    "test_recycling.py": [
        ("best_successors", MERGE),
        (r"\[union of tables\]|(with_other_drafters|taken_for_seen).*\[fallback", FULL),
    ],
    "test_requests.py": [("settings_and_budgets", FULL)],
    "test_rows.py": [(r"another_kind|in_place.*\[True", FULL)],
    "test_sampled.py": [
        (r"\[(draft tree iid-kseq|tli-rejection|draft tree hub-hub|hydra-rejection)\]", FULL)
    ],
    "test_sanitizers.py": [("", FULL)],
    "test_self_draft.py": [
        (r"\[(the )?states |text_is_that.*\[(skip|tree)|anew\[llama", FULL),
        ("second_call|missing_layers", FULL),
        (r"\[the entries", MERGE),
    ],
    "test_spire.py": [(r"greedy_texts.*\[None", FULL)],
    "test_stepwise.py": [("0.0-(tree|draft)", FULL)],
    "test_tiers.py": [("worker_runs", MERGE)],
    "test_switched.py": [("one_program", FULL)],
    "test_synthetic.py": [("with its cost", FULL)],
    "test_tables.py": [("what_they_share_once", MERGE)],
    "test_text.py": [
        ("stops_end|fill_the_context|without_a_tokenizer|that_is_the_target|interruption", MERGE),
        ("another_prompt_compiles|seed_decides|pieces_join|auto_drafts_by|once_for_the", MERGE),
    ],
    "test_tiles.py": [("entries_have_derivatives", FULL)],
    "test_trees.py": [("level_by_level|read_in_sequence", MERGE)],
    "fuzz/test_references.py": [("noise_is", FULL)],
    "models/test_families.py": [
        (r"parameters\[(DeepSeek-V2-Lite|Mi[sx]tral|Qwen|Phi|gemma-2|TinyLlama|pythia|opt)", FULL),
    ],
    "models/test_family_drafters.py": [("gpt2-tree|llama-exit|qwen3-skip", FULL)],
    "models/test_lm.py": [(r"orbax\[(folder|embedded-draft)", FULL)],
    "models/test_moe.py": [("take_no_expert", FULL)],
    "models/test_parity.py": [(r"100_000\[(default|linear|yarn-4)", FULL)],
    "models/test_quantize.py": [
        (r"dequantized_weight\[5-(2-64|64-32)|further_off.*fp8", FULL),
        ("no_worse_than", MERGE),
    ],
    "models/test_quantized_files.py": [
        (r"bit_for_bit.*(group|lm_head=int4)|definition\[gptq", FULL),
    ],
    "models/test_specdec.py": [("slow_pass", FULL)],
    "train/test_early_exit.py": [("first_layers", FULL)],
    "train/test_head_losses.py": [
        (r"at_once\[(0.0-None|1.0-vocab2)", FULL),
        (r"all_positions\[(hydra|pretrain|blockwise|hass|medusa|mlp|redrafter)\]", FULL),
    ],
    "train/test_losses.py": [(r"whole\[(3|1000)|understate.*\[(tvd|jsd|kl_tv)|stated_error", FULL)],
    "train/test_own_drafts.py": [
        (r"after the text\]", FULL),
        (r"fault.*\[(rej|cand)", MERGE),
    ],
    "train/test_optimizer.py": [(r"muon.*shape1", FULL)],
    "train/test_specdec_recipe.py": [("needs_texts", FULL)],
    "train/test_streaks.py": [("through the weights", FULL)],
    "train/test_unlikelihood.py": [(r"model_writes\[15", FULL)],
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
