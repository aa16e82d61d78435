"""A trace as one HTML page that needs nothing else: no network, no other file.

Tokens are untrusted text. They reach the page as JSON within a script element of which no
character can end or open anything (``<``, ``>``, ``&`` and all that is not ASCII are escaped), and
from there as text nodes. A content security policy forbids every request.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import tempfile
from importlib import resources
from pathlib import Path

SIGNATURE = '<meta name="generator" content="specjax trace">'  # in every page, near its beginning
_SCRIPTS = "trace_draw.js", "trace_page.js"  # joined into one
_HEAD = 1024  # bytes within which the signature stands


def page(data: dict) -> str:
    """The whole page for ``Trace.page_data()``; ASCII but for the words of the template."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":  # within JSON they stand in strings only
        text = text.replace(character, f"\\u{ord(character):04x}")
    title = html.escape(f"specjax trace: {data['model']}, {data['drafter']}")
    parts = {
        "title": title.encode("ascii", "xmlcharrefreplace").decode(),
        "style": _asset("trace.css"),
        "script": "\n".join(map(_asset, _SCRIPTS)),
        "data": text,
    }
    template = _asset("trace.html")
    # a filled-in part may look like a place to fill: the template is cut up once, before
    pieces = template.replace("}}", "{{").split("{{")
    return "".join(parts[x] if i % 2 else x for i, x in enumerate(pieces))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def check_output(file: str | os.PathLike) -> None:
    """Raises ``ValueError`` where ``save`` could not write, or would overwrite something else."""
    path = Path(file)
    if path.is_dir():
        raise ValueError(f"output {file} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"output {file}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(
            f"output {file}: the folder {path.parent} is not writable; name a file in another one"
        )
    if path.exists():
        with path.open("rb") as stream:
            if SIGNATURE.encode() not in stream.read(_HEAD):
                raise ValueError(f"output {file} exists and is not a trace page: name another file")


def save(data: dict, file: str | os.PathLike) -> int:
    """Writes the page for ``data``, whole or not at all; returns its size in bytes.

    Raises:
      ValueError: see ``check_output``.
      OSError: the disk is full, or the like.
    """
    check_output(file)
    text = page(data).encode()
    handle, name = tempfile.mkstemp(dir=Path(file).parent, prefix=".trace-", suffix=".html")
    try:
        with open(handle, "wb") as stream:
            stream.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # as any new file, where a temporary one is private
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return len(text)
