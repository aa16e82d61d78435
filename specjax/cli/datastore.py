"""``specjax datastore build``: a folder of texts that a drafter copies from."""

from __future__ import annotations

import argparse

from ..drafters import datastore
from ..text.session import fingerprint
from .text_files import add_texts, token_ids


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "datastore",
        help="build a datastore of texts to draft from",
        description="A datastore holds the tokens of texts and an index, by which the tokens that "
        "followed a sequence are found without reading all texts. specjax generate --datastore "
        "FOLDER drafts from it; the generated text still follows the model's law.",
    )
    actions = p.add_subparsers(dest="action", required=True, help="what is done")
    p = actions.add_parser("build", help="make a datastore of files")
    add_texts(p, "the folder of the datastore, which must not exist")
    p.add_argument(
        "--chunk",
        type=int,
        default=datastore.CHUNK,
        help="the number of tokens that are sorted together, 4194304 by default; fewer tokens need "
        "less memory",
    )


def run(arguments: argparse.Namespace) -> int:
    """Builds the datastore, prints its number of tokens, and returns the exit code."""
    if arguments.chunk < 1:
        raise ValueError(f"--chunk {arguments.chunk}: it must be at least 1")
    lm, ids = token_ids(arguments)
    made = datastore.build(arguments.output, ids, fingerprint(lm), chunk=arguments.chunk)
    print(f"{arguments.output}: {made.num_tokens:,} tokens, of which one ends each text")
    return 0
