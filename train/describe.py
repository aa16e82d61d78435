"""Prints the fields of a recipe with their defaults and descriptions, as its help."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
import typing

COMMENT = re.compile(r"^    (\w+): [^#\n]*#\s*(.*)$", re.MULTILINE)


def help_of(name: str, recipe) -> str:
    """The help of a recipe: the docstring of its module, then its fields by section."""
    head = f"specjax train {name} --config NAME_OR_FILE [--dry-run] [field=value ...]"
    parts = [
        head,
        inspect.cleandoc(recipe.__doc__),
        "Fields, given as field=value or in a TOML file:",
    ]
    return "\n\n".join([*parts, *_sections(recipe.Config)]) + "\n"


def _sections(kind: type, where: str = "") -> list[str]:
    """The blocks of a dataclass's own fields, then those of its sections."""
    hints, sections, blocks, shown = typing.get_type_hints(kind), {}, [], set()
    for owner in reversed(kind.__mro__):  # what all such recipes have comes first
        if not dataclasses.is_dataclass(owner):
            continue
        own = owner.__dict__.get("__annotations__", {})
        comments = dict(COMMENT.findall(inspect.getsource(owner)))
        lines = []
        for field in dataclasses.fields(kind):
            if field.name not in own or not field.init or field.name in shown:
                continue
            shown.add(field.name)
            hint = hints[field.name]
            if dataclasses.is_dataclass(hint):
                sections[field.name] = hint
            else:
                lines.append(_line(where + field.name, field, hint, comments.get(field.name)))
        if lines:
            doc = textwrap.indent(inspect.cleandoc(owner.__doc__), "  ")
            blocks.append("\n".join([f"[{where[:-1]}]"] * bool(where) + [doc, "", *lines]))
    for name, section in sections.items():
        blocks += _sections(section, f"{where}{name}.")
    return blocks


def _line(name: str, field: dataclasses.Field, hint, comment: str | None) -> str:
    if field.default is dataclasses.MISSING:
        value = f"({getattr(hint, '__name__', hint)}, must be given)"
    else:
        value = json.dumps(field.default)
    words = f"    {name} = {value}"
    return f"{words:<40}  {comment}" if comment else words
