"""The lines of the table of tiers (``tier_table.py``) for files in folders."""

from __future__ import annotations

DEFAULT, MERGE, FULL = TIERS = ("default", "merge", "full")
EVERYTHING = ""  # matches every test of a file

FOLDERS = {
    "fuzz/test_references.py": DEFAULT,
    "fuzz/test_compositions.py": [("decoder", MERGE)],
    "fuzz/": FULL,
    "models/test_families.py": [("DeepSeek-V3|A3B", FULL), ("published|every_family", MERGE)],
    "models/test_family_drafters.py": [
        (r"\[gpt2-tree\]|\[llama-eagle3\]", MERGE),
        (EVERYTHING, FULL),
    ],
    "models/test_parity.py": [
        (r"golden_ones\[(llama|gpt2)\]|golden_file", DEFAULT),
        ("golden_ones|rotations", MERGE),
        (EVERYTHING, FULL),
    ],
    "models/test_hf.py": [
        ("named|called|refused|reported|cut_short", DEFAULT),
        ("byte_for_byte|save|bare_trunk", MERGE),
        (EVERYTHING, FULL),
    ],
    "models/test_tokenizer.py": MERGE,
    "models/test_lm.py": [("other_padding", FULL), (EVERYTHING, MERGE)],
    "models/test_mla.py": MERGE,
    "models/test_moe.py": [
        ("derivatives|scored|padding|refused|weighted_sum", MERGE),
        (EVERYTHING, FULL),
    ],
    "models/test_quantized_files.py": [
        ("not_read|activations|fault|does_not_fit|contradict.*gptq v2", DEFAULT),
        ("refused|definition|bit_for_bit", MERGE),
        (EVERYTHING, FULL),
    ],
    "models/test_quantize.py": [
        ("no_scheme_has|no_worse_than", DEFAULT),
        ("not_called_approximate", FULL),
        (r"further_off|dequantized_weight\[5|unknown_scheme|approximate", MERGE),
        ("head_is_held|of_four_bits|does_not_divide", MERGE),
        (EVERYTHING, FULL),
    ],
    "models/test_quantized_copies.py": [("fault", DEFAULT), (EVERYTHING, FULL)],
    "models/test_quantized_laws.py": FULL,
    "models/test_t5.py": [(r"golden_ones|greedy_text.*ngram|refused|buckets", MERGE), ("", FULL)],
    "models/test_whisper.py": [
        (r"suppressed_tokens\[(distilled|stranger)\]", FULL),
        ("golden_ones|generates|refused", MERGE),
        (EVERYTHING, FULL),
    ],
    "models/test_specdec.py": [
        ("fault", DEFAULT),
        (r"\[t5\]|slow_pass|any_rounds|do_not_fit|not_understood", MERGE),
        (EVERYTHING, FULL),
    ],
    "models/": FULL,
    "train/test_calibrate.py": DEFAULT,
    "train/test_compare.py": DEFAULT,
    "train/test_config.py": MERGE,
    "train/test_losses.py": [
        (r"no_buffer_of_a_chunked|of_the_whole\[8|rkl|descending", FULL),
        (EVERYTHING, MERGE),
    ],
    "train/test_head_losses.py": [
        (
            r"entropy_within|agree_and_the|\[(pass|dspark|mtp_heads|specd.*|gl.*|paced)\]",
            FULL,
        ),
        (r"\[(domino|xpress|dflash2|lilicorr|streak)\]", FULL),
        (EVERYTHING, MERGE),
    ],
    "train/test_data.py": MERGE,
    "train/test_feature_init.py": [
        ("larger_vocabulary|mixed|held_out.*mtp_heads", MERGE),
        (EVERYTHING, FULL),
    ],
    "train/test_feature_recipes.py": FULL,
    "train/test_conversations.py": MERGE,
    "train/test_optimizer.py": MERGE,
    "train/test_probe_recipe.py": [("one_draft_model", MERGE), (EVERYTHING, FULL)],
    "train/test_reward_recipe.py": [("fault", DEFAULT), ("labels", FULL), (EVERYTHING, MERGE)],
    "train/test_report.py": MERGE,
    "train/test_regenerate.py": [("another_request", MERGE), (EVERYTHING, FULL)],
    "train/test_resume.py": [
        ("damaged|the_least_is|holds_its|full_while", MERGE),
        (EVERYTHING, FULL),
    ],
    "train/test_early_exit.py": [
        ("dropout_and_exits|dropped|the_recipe_trains", FULL),
        (EVERYTHING, MERGE),
    ],
    "train/test_kangaroo_recipe.py": [("fault", DEFAULT), ("refused", MERGE), (EVERYTHING, FULL)],
    "train/test_embedded.py": [("the_heads_are", MERGE)],
    "train/test_depth_width.py": [("fault", DEFAULT), (EVERYTHING, FULL)],
    "train/test_spire_recipe.py": [("fault", DEFAULT), ("refused", MERGE), (EVERYTHING, FULL)],
    "train/test_own_drafts.py": [
        ("fault|refused|drawn_tokens|without_a_prob", DEFAULT),
        (EVERYTHING, FULL),
    ],
    "train/test_prune_recipe.py": [("fault|one_by_one", DEFAULT), (EVERYTHING, FULL)],
    "train/test_specdec_recipe.py": [
        ("needs_texts|begin_every_text|dry_run|interrupted|processes|not_read", MERGE),
        (EVERYTHING, FULL),
    ],
    "train/test_settings_as_typed.py": DEFAULT,
    "train/test_start.py": [("another_shape", DEFAULT), (EVERYTHING, MERGE)],
    "train/test_streaks.py": [("fault", DEFAULT), (EVERYTHING, FULL)],
    "train/test_unlikelihood.py": [("learns_not", FULL), (EVERYTHING, MERGE)],
    "train/test_unroll_streaks.py": [("formulas", MERGE), (EVERYTHING, FULL)],
    "train/test_unroll.py": [("fault", DEFAULT), ("of_queries|eagle-512", FULL), ("", MERGE)],
    "train/": FULL,
}
