"""Tables of many requests: continuous batching, and text for training."""

from __future__ import annotations

from . import cells


def serving(rows) -> str:
    row, f = rows[0]
    note = (
        f"The embedded, trained pair; {row['prompts']} held-out prompts, cut to 1 to "
        f"{row['longest']} tokens ({f['prompt_tokens']:,} in all, whose reading is included), "
        f"each with 1 to {row['longest']} new tokens ({f['tokens']:,} in all). *Whole batches*: "
        "the next prompts wait until all rows of the batch are done. *Continuous*: they wait until "
        "an eighth of the rows is done. Both are `specjax.serve_offline`, run in turn; the ratio "
        "compares the two, and its interval is over the repeated runs."
    )
    return f"{note}\n\n" + cells.table(
        {
            "drafter, tokens a round": cells.drafter,
            "batch": lambda r, f: r["batch"],
            "T": lambda r, f: r.get("temperature", 0),
            "τ": lambda r, f: f"{f['tau']:.2f}",
            "whole batches, tokens/s": lambda r, f: cells.rate(f["tokens_per_second"]["whole"]),
            "continuous rows, tokens/s": lambda r, f: cells.rate(
                f["tokens_per_second"]["continuous"]
            ),
            "continuous over whole": lambda r, f: cells.ratio(f["ratio"]),
            "same texts": lambda r, f: "yes" if f["identical"] else "NO",
        },
        rows,
    )


def regeneration(rows) -> str:
    note = (
        "The embedded target continues prompts of its corpus, as in the recipe `regenerate`; the "
        "time includes the reading of the prompts. Both ways are `specjax.serve_offline` with the "
        "same batch, run in turn; the interval is over the repeated runs."
    )
    return f"{note}\n\n" + cells.table(
        {
            "drafter, tokens a round": cells.drafter,
            "batch": lambda r, f: r["batch"],
            "rows": lambda r, f: r["rows"],
            "new tokens": lambda r, f: f"{f['tokens']:,}",
            "T": lambda r, f: r.get("temperature", 0),
            "τ": lambda r, f: f"{f['tau']:.2f}",
            "plain, tokens/s": lambda r, f: cells.rate(f["tokens_per_second"]["plain"]),
            "drafted, tokens/s": lambda r, f: cells.rate(f["tokens_per_second"]["drafted"]),
            "ratio": lambda r, f: cells.ratio(f["ratio"]),
            "drafting": lambda r, f: cells.verdict(f["ratio"]),
            "same rows": lambda r, f: {None: "T > 0", True: "yes", False: "NO"}[f["identical"]],
        },
        rows,
    )
