"""The table of what approximate rules cost and gain."""

from __future__ import annotations

from . import cells


def quality(rows) -> str:
    note = (
        "The embedded pair, three drafted tokens a round, held-out prompts. *log p* is the "
        "target's mean log-likelihood of an emitted token, *best* the share of tokens that are the "
        "target's most likely ones, *rank* the mean number of more likely tokens, *same* the share "
        "of texts that equal plain decoding, *TV* and *KL* the distance of the law of the next "
        "token beside the distance that as many draws from the target's law have. The ratios are "
        "τ times a plain step over a round with the lossless rule, an upper bound for rules "
        "that rank tokens (`benchmarks/quality.py`); the target of 100M writes the same texts. The "
        "first setting of each rule is the strictest; settings of a rule follow each other as they "
        "get wider."
    )
    points = []
    for row, figures in rows:
        listed = figures["points"] if not points or points[-1][0] != row["temperature"] else []
        for point in listed or figures["points"][1:]:
            points.append((row["temperature"], row["rule"], point))
    columns = {
        "T": lambda t, rule, p: f"{t:g}",
        "rule": lambda t, rule, p: (
            "lossless" if p["setting"] == "lossless" else f"{rule}:{p['setting']}"
        ),
        "τ": lambda t, rule, p: f"{p['tau']:.2f}",
        "ratio, embedded": lambda t, rule, p: f"{p['ratio']['embedded']:.2f}",
        "ratio, grown": lambda t, rule, p: f"{p['ratio']['grown']:.2f}",
        "log p": lambda t, rule, p: f"{p['loglik']:.3f}",
        "best": lambda t, rule, p: cells.share(p["best"]),
        "rank": lambda t, rule, p: f"{p['rank']:.2f}",
        "same": lambda t, rule, p: cells.share(p["same"]),
        "TV (noise)": lambda t, rule, p: _pair(p["variation"], t),
        "KL (noise)": lambda t, rule, p: _pair(p["divergence"], t),
    }
    plain = "; ".join(
        f"T = {t:g}: log p {f['plain']['loglik']:.3f}, plain step and round in ms "
        + ", ".join(f"{size} {1e3 * a:.2f}, {1e3 * b:.2f}" for size, (a, b) in f["costs"].items())
        for t, f in {row["temperature"]: figures for row, figures in rows}.items()
    )
    return f"{note}\n\nPlain decoding, {plain}.\n\n" + cells.table(columns, points)


def _pair(found, temperature: float) -> str:
    if found is None:
        return "–"
    return f"{found[0]:.3f} ({found[1]:.3f})" if temperature else f"{found[0]:.3f}"
