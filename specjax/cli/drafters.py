"""``specjax drafters``: lists the drafters by the names that users type."""

from __future__ import annotations

import argparse

from ..drafters import registry
from ..text.drafter_names import AUTO, COPYING, LOOKUPS
from ..text.own_layers import SELF

# what is typed and what it means, beside the names of the registry
OTHER_WAYS = {
    AUTO: "heads, a small draft model or saved layers in the model's own folder, else ngram",
    f"{SELF}:exit=E": "the first E layers of the target draft, then the LM head",
    f"{SELF}:skip=LAYERS": "the target drafts without these sublayers, such as attention.3-5,mlp.7",
    "NAME": "a draft model or heads in the folder NAME, or on the hub (owner/name)",
    "MODULE:CLASS": "a drafter of your own in MODULE.py of the current folder, or installed; with "
    "settings as MODULE:CLASS:period=3",
    "tli:NAME, slem:NAME": "a draft model with another tokenizer",
    "cascade:OUTER:INNER": "the draft model OUTER, for which INNER drafts: a table, NAME, cascade",
    ", ".join(f"{lookup}NAME" for lookup in LOOKUPS): "copied tokens where the text repeats "
    "itself, else what draft, self, NAME or the heads of a name below propose",
    f"{COPYING}NAME": "what draft, self, NAME or heads propose, at temperature 0 with a "
    "bonus for what followed the same words in the text",
}


def add(commands) -> None:
    """Adds the command, which has no arguments."""
    commands.add_parser(
        "drafters",
        help="list the drafters that --drafter takes",
        description="Lists every value of --drafter with what it proposes.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the list; returns the exit code."""
    named = [entry for entry in registry.entries() if entry.kind in ("basic", "table")]
    plain = [e for e in named if e.name != SELF and e.name not in ("tli", "slem")]
    sections = {
        "Names and forms": OTHER_WAYS,
        "Drafters without weights, and the target's own draft model": _lines(plain),
        "Heads and counted tables, in the target's own folder or loaded as NAME": _lines(
            registry.entries("head")
        ),
        "Made of other drafters, as objects in Python": _objects("wrapper"),
        "With weights of their own, as objects in Python": _objects("object"),
    }
    width = max(len(name) for lines in sections.values() for name in lines if len(name) < 40)
    for title, lines in sections.items():
        print(f"{title}:")
        for name, what in lines.items():
            print(f"  {name:<{width}}  {what}")
    return 0


def _objects(kind: registry.Kind) -> dict[str, str]:
    entries = registry.entries(kind)
    return {f"specjax.drafters.{entry.class_name}": entry.summary for entry in entries}


def _lines(entries) -> dict[str, str]:
    """Returns what drafters propose by their names, aliases among them."""
    return {", ".join((entry.name, *entry.aliases)): entry.summary for entry in entries}
