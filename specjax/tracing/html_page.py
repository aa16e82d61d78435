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

from .api import Trace
from .record import Round

SIGNATURE = '<meta name="generator" content="specjax trace">'  # of every page, near its beginning
_HEAD = 1024  # bytes within which it stands


def page(trace: Trace) -> str:
    """The whole page, ASCII but for the words of its template."""
    data = json.dumps(content(trace), separators=(",", ":"), allow_nan=False)
    for character in "<>&":  # within JSON they stand in strings only
        data = data.replace(character, f"\\u{ord(character):04x}")
    title = html.escape(f"specjax trace: {trace.model}, {trace.drafter}")
    filled = {
        "title": title.encode("ascii", "xmlcharrefreplace").decode(),
        "style": _part("trace.css"),
        "script": _part("trace.js"),
        "data": data,
    }
    text = _part("trace.html")
    # what is filled in may look like a place to fill: the template is cut up once, before
    pieces = text.replace("}}", "{{").split("{{")
    return "".join(filled[x] if i % 2 else x for i, x in enumerate(pieces))


def content(trace: Trace) -> dict:
    """What the page draws, as plain data: a round's nodes as columns, tokens spelled once."""
    used = {token for one in trace.rounds for token in _tokens(one) if token >= 0}
    tokens = {}
    for token in sorted(used):
        spelled = trace.spell(token)
        tokens[token] = [spelled.text] if spelled.kind == "text" else [spelled.text, spelled.kind]
    return {
        "model": trace.model,
        "drafter": trace.drafter,
        "rule": trace.rule,
        "lossless": trace.lossless,
        "approximate": trace.approximate,
        "settings": trace.settings,
        "greedy": trace.greedy,
        "prompt": trace.prompt,
        "source": trace.source,
        "interrupted": trace.interrupted,
        "tokens": tokens,
        "rounds": [
            _columns(one, pieces) for one, pieces in zip(trace.rounds, trace.pieces, strict=True)
        ],
    }


def _columns(one: Round, pieces: list[str]) -> dict:
    nodes = one.nodes
    return {
        "token": [node.token for node in nodes],
        "parent": [node.parent for node in nodes],
        "p": [_short(node.p) for node in nodes],
        "q": [_short(node.q) for node in nodes],
        "status": [node.status for node in nodes],
        "why": [node.why for node in nodes],
        "top": {
            n: [[token, _short(p)] for token, p in node.top]
            for n, node in enumerate(nodes)
            if node.top
        },
        "path": one.path,
        "kind": one.kind,
        "said": one.token,
        "p_said": _short(one.p),
        "emitted": one.emitted,
        "drafted": one.from_draft,
        "pieces": pieces,
        "reason": one.reason,
    }


def _tokens(one: Round) -> list[int]:
    best = [token for node in one.nodes for token, _ in node.top]
    return [node.token for node in one.nodes] + best + [one.token, *one.emitted]


def _short(p: float | None) -> float | None:
    return None if p is None else float(f"{p:.4g}")


def _part(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def check(file: str | os.PathLike) -> None:
    """Raises ``ValueError`` where ``save`` could not write, or would overwrite something else."""
    path = Path(file)
    if path.is_dir():
        raise ValueError(f"output {file} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"output {file}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"output {file}: nothing can be written into {path.parent}")
    if path.exists():
        with path.open("rb") as stream:
            if SIGNATURE.encode() not in stream.read(_HEAD):
                raise ValueError(
                    f"output {file} exists and is no page of this command: name another file"
                )


def save(trace: Trace, file: str | os.PathLike) -> int:
    """Writes the page, whole or not at all; returns its size in bytes.

    Raises:
      ValueError: see ``check``.
      OSError: the disk is full, or the like.
    """
    check(file)
    text = page(trace).encode()
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
