"""Writes a trace as one HTML page that needs no network and no other file.

Tokens are untrusted text. The page holds them as JSON within a script element, in which ``<``,
``>``, ``&`` and every character outside of ASCII are escaped, so that no token can close or open an
element; the script shows them as text nodes. A content security policy forbids every request.
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
_SCRIPTS = "trace_draw.js", "trace_page.js"  # joined into one script
_HEAD = 1024  # the signature is within so many bytes from the beginning


def page(data: dict) -> str:
    """Returns the HTML page for ``Trace.page_data()``; only the template's text is not ASCII."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":  # in JSON these characters occur within strings only
        text = text.replace(character, f"\\u{ord(character):04x}")
    title = html.escape(f"specjax trace: {data['model']}, {data['drafter']}")
    parts = {
        "title": title.encode("ascii", "xmlcharrefreplace").decode(),
        "style": _asset("trace.css"),
        "script": "\n".join(map(_asset, _SCRIPTS)),
        "data": text,
    }
    template = _asset("trace.html")
    # a part may itself contain braces, so the template is split once, before parts are inserted
    pieces = template.replace("}}", "{{").split("{{")
    return "".join(parts[x] if i % 2 else x for i, x in enumerate(pieces))


def _asset(name: str) -> str:
    return resources.files("specjax.tracing").joinpath("assets", name).read_text(encoding="utf-8")


def check_output(file: str | os.PathLike) -> None:
    """Raises ``ValueError`` if ``save`` could not write ``file``, or would overwrite another file
    than a trace page."""
    path = Path(file)
    if path.is_dir():
        raise ValueError(f"output {file} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"output {file}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(
            f"output {file}: the folder {path.parent} is not writable; name another folder"
        )
    if path.exists():
        with path.open("rb") as stream:
            if SIGNATURE.encode() not in stream.read(_HEAD):
                raise ValueError(f"output {file} exists and is not a trace page: name another file")


def save(data: dict, file: str | os.PathLike) -> int:
    """Writes the page for ``data``, whole or not at all.

    Args:
      data: ``Trace.page_data()``.
      file: the name of the page; an earlier trace page is replaced.

    Returns:
      the size of the page in bytes.

    Raises:
      ValueError: ``file`` cannot be written, or is not a trace page, see ``check_output``.
      OSError: writing failed, for example because the disk is full.
    """
    check_output(file)
    text = page(data).encode()
    handle, name = tempfile.mkstemp(dir=Path(file).parent, prefix=".trace-", suffix=".html")
    try:
        with open(handle, "wb") as stream:
            stream.write(text)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # the permissions of a new file; a temporary one is private
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return len(text)
