"""The table of tiers: which tier a test is in.

A test is in the default tier unless a line of the table says otherwise. The table names files, or
the tests of a file by regular expressions, which are searched in the text that pytest prints after
the ``::``; the first match decides. A line that matches no test is an error. ``tiers.py`` runs the
tiers, and says how the tests of a file are compiled and on how many devices they run.
"""

from __future__ import annotations

from tier_delays import delayed
from tier_folders import DEFAULT, EVERYTHING, FOLDERS, FULL, MERGE, TIERS

__all__ = ["DEFAULT", "EVERYTHING", "FULL", "MERGE", "TABLE", "TIERS"]

# drafters of the registry: each kind of head, tree, wrapper and state once; unions: merge tier
COVER = (
    "draft|ngram|hybrid draft|adaptive ngram|redrafter|blockwise|medusa"
    "|hydra prefix|mlp speculator|block|eagle|eagle3|mtp|mtp heads|tree per row|silent"
    "|p-eagle dependent|copying eagle3|suffix tree|recycling|self|jacobi blocks|lookahead"
    "|unsure draft"
)
DRAWN = (  # drafter and rule: ways to draw siblings and kinds of state once
    "plain-delta|draft-block|draft-rejection|draft tree iid-kseq|draft tree hub-hub"
    "|tree distinct-traversal|hydra-rejection|tli-rejection|copying eagle3-rejection"
)

MESHED = "draft|ngram|medusa|hydra prefix|eagle|mtp|adaptive eagle3|tree per row|hybrid draft"

# A file, or a folder (its name ends in "/"): its tier, or tiers of its tests by the first match.
LINES = {
    "test_acceptance.py": [
        (r"traversal_keeps.*\[(hub|distinct)", FULL),
        ("keep[s]?_at_least|k_seq_(with|goes)|both_keep_more|in_half|always_right", MERGE),
    ],
    "test_adaptive.py": [
        ("fault|refused|usual_widths", DEFAULT),
        ("wanted_width|other_costs", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_approximate.py": [
        (r"strictest.*(rank|distance|block|threshold)|keeps_more|within_the_bounds|typical", MERGE)
    ],
    "test_audit.py": [
        ("fault|refused|stated|engine_is_held|named_by", DEFAULT),
        (
            r"every_draft.*\[(delta|rejection|traversal|kseq|block)\]|shares_its|biased.*(typical|lenience)|exit_code|each_wrong",
            FULL,
        ),
        (EVERYTHING, MERGE),
    ],
    "test_benchmarks.py": [
        ("settings_that_its_kind|nan_in_json|put_into_words|curves|bisection", DEFAULT),
        (EVERYTHING, FULL),
    ],
    "test_bayesian_layers.py": [("command|one_program", FULL)],
    "test_bigram.py": [(r"fault|refused|many|decides\[2", DEFAULT), (EVERYTHING, MERGE)],
    "test_block_drafters.py": [
        (r"broken_twins.*(parallel heads|bidirectional|a causal layer)", MERGE),
        ("broken_twins|bad_shapes", DEFAULT),
        ("whole_rows", FULL),
    ],
    "test_block_heads.py": [("fault", DEFAULT), ("in turn|matched_v", FULL), (EVERYTHING, MERGE)],
    "test_block_layouts.py": [
        ("refused|root|window|spread|setting|short|two_places|again_is_not", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_block_trees.py": [("fault", DEFAULT), (EVERYTHING, MERGE)],
    "test_calculator.py": [("command_prints|form_of_the_page", MERGE)],
    "test_cascade.py": [
        (r"is_seen\[(released|None-self)", FULL),
        (r"is_seen\[None|refused", MERGE),
        ("equation|fault", DEFAULT),
        (EVERYTHING, FULL),
    ],
    "test_cascade_tree.py": [
        (r"stated\[_best", FULL),
        ("fault|refused|has_a_name", DEFAULT),
        (r"before_it\[cascade draft comb|alone\[auto", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_chain_of_one.py": MERGE,
    "test_chain_rules.py": [("fault|out_of_range|share_of", DEFAULT), (EVERYTHING, MERGE)],
    "test_chat.py": [("refuses|command|stop_str|no_text|next|_prompt_", MERGE), (EVERYTHING, FULL)],
    "test_check_contract.py": [
        (r"every_check\[(eagle3|tree)", FULL),
        (r"every_check\[(draft|ngram)", MERGE),
    ],
    "test_cli.py": [("vllm|num_draft_is|compare|without_noise|ctrl_c", MERGE)],
    "test_cli_prompts.py": [("plan_prints", MERGE), ("tree_counts|built_in_prompt", FULL)],
    "test_coupled.py": [
        (r"adaptive eagle3|alone|every_drafter.*\[(hybrid draft|mtp)", FULL),
        (rf"every_drafter.*\[(ngram|draft tree iid|{MESHED})\]", MERGE),
        ("keeps_what|compare", MERGE),
        ("list_coupling|more_siblings", FULL),
        ("every_drafter", FULL),
    ],
    "test_cpu_peers.py": [("run_by_its_engine", FULL)],
    "test_decoder.py": [
        ("tree_are_those_of_each_path.*0|written_inside", DEFAULT),
        (
            r"within_a_mesh|copies.*\[(plain-3|plain-1-5|draft|cascade|comb|self-1|ngram-1|ngram-3-3|recycling|spec|adaptive-1|suffix|lookahead|hydra|adaptive)|each_path.*(experts|llama|latents)",
            FULL,
        ),
        ("mesh|copies|each_path|follows|explicit", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_dflash2.py": [("do_not_fit", DEFAULT), (EVERYTHING, MERGE)],
    "test_docs.py": [
        (
            r"to_a_faster_one|top_to_bottom\[docs/(methods/|index|concepts/round|extend/logits"
            r"|howto/(requests|trace|audit|serving)|extend/)|70b",
            FULL,
        ),
        ("top_to_bottom|builds_strictly|by_the_command", MERGE),
    ],
    "test_draft_ahead.py": [
        ("fault|refused", DEFAULT),
        (r"pearl\]|_fan|_mod|next_prompt", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_draft_length.py": [
        ("every_policy.*(hugg|suffix)|hopeless|budget_of_one|exllamas|hugging_faces", MERGE),
        ("goodput", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_drafts.py": [
        (r"\[(blockwise|hydra prefix|medusa|mtp distinct|speculator prefix) iid\]", FULL),
        (r"\[(adaptive (s[ep]|d).*|unsure self.*|draft un.*|self st.*|.*ssd|switch.*)\]", FULL),
        (r"\[((hybrid|fallback) mtp|mtp distinct d.*|mtp heads iid|hybrid tli|tli tree)\]", FULL),
        (r"\[(fallback trees|table model t|union w|merged c|windowed|specdiff t|sparse)", FULL),
        (r"\[(xpress|lilicorr|llmcad chain|(adaptive|fallback) comb)\]", FULL),
        # variants of lines that stay, or the whole loop draws with them in the merge tier
        (r"\[(draft (one|itself|tree iid)|tree iid|hybrid self|self skip)\]", FULL),
        (r"\[(tables before|dspark few|horizontal c|(hybrid|adaptive) horiz)", FULL),
        (
            r"\[((hybrid|adaptive) )?cascade|\[(speculator|hydra) prefix distinct|kangaroo|in turn",
            FULL,
        ),
        (EVERYTHING, MERGE),
    ],
    "test_drafter_registry.py": [("saved_loaded_and_named|ones_own_are_lossless", MERGE)],
    "test_dspark.py": [("fault", DEFAULT), ("law_as|drops", FULL), (EVERYTHING, MERGE)],
    "test_edges.py": [("transformers|hardware|other_lengths|smaller_vocabulary|arithmetic", MERGE)],
    "test_engine_audit.py": [
        ("that_sees_it|cannot_be_audited", DEFAULT),
        ("sound_engine", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_feature.py": [
        ("faults_are_seen|usual_layers|no_head_can_be|must_write", DEFAULT),
        (r"from_scratch\[(eagle chain|all at once, read)", MERGE),
        ("pending|after_a_longer|is_read|copies", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_feature_formats.py": MERGE,
    "test_feature_generations.py": [(r"a_generation.*\[eagle3\]", MERGE), (EVERYTHING, FULL)],
    "test_feature_refusals.py": MERGE,
    "test_greedy.py": [
        (
            r"\[(probed|windowed|sparse) draft\]"
            r"|for_token.*\[(hybrid (ssd|casc|hor)|(horizontal|cascade) |pass\]|ssd)",
            FULL,
        ),
        (rf"token_for_token.*\[({COVER})\]", DEFAULT),
        (r"any_number.*\[(medusa|mtp)\]", DEFAULT),
        (r"any_number.*\[(union of draft models|silent)\]", MERGE),
        ("any_number|alone_is", FULL),
        (
            r"token_for_token.*\[(adaptive (?!ngram)|(hybrid|fallback) (mtp|spec|rec|look|comb)"
            "|tables? (model|before)|union with|merged chains|self (expanded|stop)"
            "|hybrid (self|tli)|tli tree|draft expanded by|lookahead (t|pairs)|suffix a|specdiff t"
            "|mtp distinct|unsure self|unsure draft exp|speculator p|kangaroo tree|dflash2|switch"
            # variants of lines that stay, and what other files of the merge tier decode greedily
            r"|tree (worst|iid)|draft (tree iid|unrelated|one\])|ngram e|recycling c|suffix\]"
            r"|jacobi(\]| h)|specdiff c|union of t|fallback tr|self (skip|tree)"
            "|block exp|domino|xpress|lilicorr|dspark few|llmcad [ct]|bigram o)",
            FULL,
        ),
        ("token_for_token", MERGE),
        ("stream_commits|cut_within|last_slot|array_of|penalty_and|longest", MERGE),
        ("and_scan|under_vmap", MERGE),
    ],
    "test_fixed_bits.py": [
        ("fault", DEFAULT),
        (r"tree|61-129|\[100|toy", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_forty_lines.py": [("one_law", MERGE)],
    "test_grown.py": [("reads_what_it_read", MERGE), (EVERYTHING, FULL)],
    "test_head_benchmarks.py": [("measured_together", FULL), ("in_folders", MERGE)],
    "test_heads.py": [("authors|named|wrong|counts|_kept|rows_at", MERGE), (EVERYTHING, FULL)],
    "test_heads_decode.py": MERGE,
    "test_heldout.py": [("worth_its_name", MERGE), (EVERYTHING, FULL)],
    "test_horizontal.py": [("fault|refused|built", DEFAULT), ("block", FULL), (EVERYTHING, MERGE)],
    "test_hybrid.py": [
        (r"any_copies.*(mtp|adaptive|hybrid draft)|score_is_high|row_copies", FULL),
        (EVERYTHING, MERGE),
    ],
    "test_kangaroo.py": [("fault|refused|is_s", DEFAULT), ("greedy", FULL), (EVERYTHING, MERGE)],
    "test_laws.py": [
        ("fault|refused|admits", DEFAULT),
        (r"contrastive|is_a_law|\[draft-rejection\]", FULL),
        (r"\[draft\]|gives_no_row|json", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_low_bits.py": [
        ("fault|refused|named", DEFAULT),
        (r"from_scratch\[fp8", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_llmcad.py": [("fault|refused", DEFAULT), (EVERYTHING, FULL)],
    "test_lagging.py": [("fault", DEFAULT), (EVERYTHING, FULL)],
    "test_lookahead.py": [
        ("fault|asked_for|refused|one_round|new_turn", DEFAULT),
        ("left_out_where", FULL),
        (EVERYTHING, MERGE),
    ],
    "test_measure.py": [
        ("parts_of_a_round|parts_leave|memory_adds|first_token|do_not_fit", FULL),
        ("pass", MERGE),
    ],
    "test_memory.py": [
        ("argmax|visited_nodes|seen_as_a_further", DEFAULT),
        (r"not_turned|ngram, sampled", FULL),
        ("ngram|sorts|greedy_round|for_itself", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_mesh.py": [
        (r"on_eight_devices_what.*\[adaptive", FULL),
        (rf"on_eight_devices_what.*\[({MESHED})\]", MERGE),
        (r"same_keys.*\[draft\]", MERGE),
        (r"its_share.*\[data=2,model=4\]|collects.*greedy", MERGE),
        ("on_eight_devices|what_one_device_says|its_share|collects_a_cache", FULL),
        (r"parts_are_read.*(gpt2|mixtral)", FULL),
        (EVERYTHING, MERGE),
    ],
    "test_mesh_processes.py": FULL,
    "test_mtp.py": [
        ("broken_twins", DEFAULT),
        (r"named|refused|of_a_llama|not_put|accepted_tokens.*deepseek", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_mtp_float8.py": MERGE,
    "test_native.py": [
        ("narrower_vectors", FULL),
        ("loop_on_kernels", FULL),
        ("derivatives|long_prompt", MERGE),
    ],
    "test_many_columns.py": [("narrower_vectors", FULL), ("derivatives|beside_any", MERGE)],
    "test_narrow.py": [("causal", FULL)],
    "test_native_library.py": [("without_a_compiler", FULL), ("of_the_wheel", MERGE)],
    "test_native_quantized.py": [
        ("one_group_off|any_length|refused|packed|bits_beside|rounded_once|few_columns", DEFAULT),
        (r"narrower_vectors.*\[-(m|DSPECJAX_WITHOUT_DOTS)|number_of_columns\[(530|61)-", FULL),
        (EVERYTHING, MERGE),
    ],
    "test_notebook.py": FULL,
    "test_other_processors.py": FULL,
    "test_other_vocabulary.py": [
        ("fault|refused_before|not_know|stand_for|on_the_host|several_spaces", DEFAULT),
        ("begins_a_text|without_room|up_to_seven", DEFAULT),
        (r"a_folder|any_number.*\[(hybrid tli|tli tree)\]", FULL),
        (EVERYTHING, MERGE),
    ],
    "test_own_layers.py": [("certainty_always|command|search|plan_proposes", FULL)],
    "test_package.py": [("wheel", FULL)],
    "test_pass.py": FULL,
    "test_pipeline.py": [
        ("sends_nothing", MERGE),
        (r"holds_its.*\[data=2,stage=4|says_what.*\[data=2,stage=4-draft|not_divided", MERGE),
        ("on_a_mesh", FULL),
    ],
    "test_pipelined.py": [
        ("on_a_mesh", FULL),
        ("fault|refused", DEFAULT),
        (r"formula\[l", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_planner.py": [
        ("runs_at|one_trace|heads|every_way|agree|where_tokens|ctrl_c|set_back|at_once", FULL)
    ],
    "test_policies.py": [
        ("refused|fault|by_its_name|from_outside", DEFAULT),
        (r"keeps_last=True\)-1\]|\[(block|None-4|0.4|0.5-1.0)\]|\)-4\]", FULL),
        (r"threshold\[chain|that_grows", FULL),
        (EVERYTHING, MERGE),
    ],
    "test_prefill.py": MERGE,
    "test_quantized_decoding.py": [
        ("fault|anything_is_read", DEFAULT),
        (r"plain_text|a_hundredth|further_off|divergence", FULL),
        (EVERYTHING, MERGE),
    ],
    "test_prefix.py": [
        ("no_prefix_layer|no_layer", DEFAULT),
        ("side_by_side|loaded_as_it_was|documents", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_pricing.py": [("refused", DEFAULT), ("lost_in", MERGE), (EVERYTHING, FULL)],
    "test_probe.py": [("fit_is_refused", DEFAULT), (EVERYTHING, FULL)],
    "test_quality.py": [("refused", DEFAULT), ("above_temperature_0", FULL), (EVERYTHING, MERGE)],
    "test_recurrent.py": [
        ("refused|asked_for|beams_are_those", DEFAULT),
        ("official", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_recycling.py": [
        ("nodes.*(union of tables|fallback)|cuts_off.*(union|fallback)|said_of.*hybrid", MERGE)
    ],
    "test_requests.py": [
        (r"refused|penalties|alone|without_a_law.*\[nan-ngram", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_reward_guided.py": [("is_refused|drawn_apart", DEFAULT), (EVERYTHING, MERGE)],
    "test_resting.py": [(r"\[2\]", DEFAULT), (EVERYTHING, MERGE)],
    "test_rows.py": [
        (r"refused|left_alone|mesh|in_place|frozen.*\[draft\]", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_sampled.py": [
        (rf"targets_law\[({DRAWN})\]", MERGE),
        ("targets_law", FULL),
        ("at_once|at_least", FULL),
    ],
    "test_servers.py": MERGE,
    "test_specdiff.py": [(r"the_loop|others\[True", FULL), ("reads|replay|saved", MERGE)],
    "test_sanitizers.py": [(r"float16|quantized", FULL), (EVERYTHING, MERGE)],
    "test_segments.py": [("segments_bring", MERGE)],
    "test_self_draft.py": [
        ("fault|refused|sublayers_are|say_why|leading|missing_layers", DEFAULT),
        (
            r"(anew|first_layers_says|nothing)\[experts|anew\[(windows-t|gpt2-t|latents-t|llama-[gn])"
            r"|nothing\[latents",
            FULL,
        ),
        (EVERYTHING, MERGE),
    ],
    "test_serving.py": [
        (
            "broken_lines|wrong_arguments|different_names|a_part_of_what|end_a_line|device_arrays|an_id_that",
            DEFAULT,
        ),
        (r"generate_gives.*(plain|tree|draft-0.9)", FULL),
        ("generate_gives|own_stop|command|same_name", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_small_cache.py": [("fault|of_a_d", DEFAULT), (r"h\[d|sinks_", MERGE), (EVERYTHING, FULL)],
    "test_small_cache_names.py": [("named_so", MERGE)],
    "test_sparse_draft.py": [
        ("refused", DEFAULT),
        (r"words_of|those_of_passes.*\[chunks", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_spire.py": [("refused", DEFAULT), ("numpy|text.*None", MERGE), (EVERYTHING, FULL)],
    "test_stepwise.py": [
        (r"1.0-(tree|draft|adaptive)", FULL),
        (r"1.0|adaptive|0.0-(tree|draft)", MERGE),
    ],
    "test_stopping.py": [
        ("refused|pieces|might_have", DEFAULT),
        (r"\[0.0-ngram|stream", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_switched.py": [("fault|imposs", DEFAULT), (r"\[llama|one_p", MERGE), (EVERYTHING, FULL)],
    "test_snap_kv.py": [
        ("fault|refused", DEFAULT),
        ("names_ask|second_prompt|wants_no_token", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_swift.py": [("fault|ends|is_saved", DEFAULT), ("proposals", MERGE), (EVERYTHING, FULL)],
    "test_synthetic.py": [
        ("cannot_be", DEFAULT),
        ("stated_rate|always", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_session.py": [
        ("refused", DEFAULT),
        ("made_before", FULL),
        ("not_depend|saved", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_datastore.py": [("the_command|leave_the_text|are_timed", FULL), ("of_the_device", MERGE)],
    "test_tasks.py": [("share_of_solved|price_of_an", FULL), ("ended_and_wrong", MERGE)],
    "test_tables.py": [("several_texts|sam_finds|many_matches|proposes_what", MERGE)],
    "test_text.py": [
        ("compare_[mc]", FULL),
        (r"names_a_drafter|heads_draw|in_a_batch\[(draft|ngram)", MERGE),
    ],
    "test_three_levels.py": [("fault|refused|names|spare", DEFAULT), (EVERYTHING, FULL)],
    "test_top_chunks.py": [("fault|refused", DEFAULT), ("names_ask", MERGE), (EVERYTHING, FULL)],
    "test_topology.py": [(r"measured_ranks|probable_paths\[opt", MERGE)],
    "test_trace.py": [
        ("without_a_tokenizer|datastore", MERGE),
        (r"decide_as.*(kseq|typical|merged)", FULL),
        ("general_words|cannot_be_traced|decide_as", MERGE),
        (EVERYTHING, FULL),
    ],
    "test_trace_page.py": MERGE,
    "test_workloads.py": FULL,
    "test_windows.py": [
        ("no_slot|slots_hold|window.*draft|ring_of_any|each_path|copies.*ngram", MERGE),
        (EVERYTHING, FULL),
    ],
} | FOLDERS
TABLE = delayed(LINES)
