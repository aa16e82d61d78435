"""``specjax bigram``: a table of the successors of tokens, counted from files of texts."""

from __future__ import annotations

import argparse

from ..checkpoints import save_drafter
from ..drafters import Bigram, bigram
from .text_files import add_texts, token_ids


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "bigram",
        help="count texts for a table of n-grams to draft from",
        description="The table holds the token that most often followed each token in the texts. "
        "specjax generate --drafter ngram+FOLDER copies from the text so far, and drafts from the "
        "table where nothing can be copied; with cascade:draft:ngram+FOLDER both draft for a draft "
        "model. The generated text still follows the model's law.",
    )
    add_texts(p, "the folder of the table, which must not exist")
    p.add_argument(
        "--order",
        type=int,
        default=2,
        help="the number of tokens of the longest n-gram, 2 by default; with 3 the last two tokens "
        "decide where the texts had them at least twice, else the last one",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the table, prints how many contexts it has, and returns the exit code."""
    if not 2 <= arguments.order <= bigram.MOST_ORDER:
        raise ValueError(
            f"--order {arguments.order}: an n-gram has 2 to {bigram.MOST_ORDER} tokens; 2 is a "
            "bigram"
        )
    lm, ids = token_ids(arguments)
    size, order = lm.target.vocab_size, arguments.order
    tables = bigram.count(ids, size, order)
    save_drafter(Bigram(vocab_size=size, order=order), tables, arguments.output)
    known = int((tables["after.1"] >= 0).sum())
    longer = sum(len(x) for name, x in tables.items() if name.startswith("contexts"))
    also = f", and {longer:,} longer contexts" if order > 2 else ""
    print(f"{arguments.output}: the successors of {known:,} of {size:,} tokens{also}")
    return 0
