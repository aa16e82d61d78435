"""Tables of the library ``rich`` as texts."""

from __future__ import annotations

import io


def table_text(table, width: int) -> str:
    """Returns a ``rich`` table without colours, in lines of at most ``width`` characters where its
    words are short enough."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, markup=False, emoji=False)
    console.print(table)
    return out.getvalue()
