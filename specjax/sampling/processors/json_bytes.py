"""JSON as an automaton over bytes (RFC 8259, in UTF-8).

A state is ``(where, stack, blanks)``: a place in the grammar, the open brackets from the outside
in (a text of ``[`` and ``{``), and the number of white space characters just read.
"""

from __future__ import annotations

State = tuple[str, str, int]

TOPS = {"any": "value", "object": "only object", "array": "only array"}
_LITERALS = ("true", "false", "null")
_HEX = b"0123456789abcdefABCDEF"
# the place within a number -> (bytes, next place); and the places at which a number may end
_NUMBER = {
    "-": ((b"0", "0"), (b"123456789", "int")),
    "0": ((b".", "."), (b"eE", "e")),
    "int": ((b"0123456789", "int"), (b".", "."), (b"eE", "e")),
    ".": ((b"0123456789", "frac"),),
    "frac": ((b"0123456789", "frac"), (b"eE", "e")),
    "e": ((b"+-", "sign"), (b"0123456789", "exp")),
    "sign": ((b"0123456789", "exp"),),
    "exp": ((b"0123456789", "exp"),),
}
_NUMBER_ENDS = ("0", "int", "frac", "exp")
# the place within a character of several bytes -> (lowest, highest byte, next place); overlong
# forms, surrogates and code points above U+10FFFF are not valid UTF-8
_UTF8 = {
    "more 1": (0x80, 0xBF, "in"),
    "more 2": (0x80, 0xBF, "more 1"),
    "more 3": (0x80, 0xBF, "more 2"),
    "E0": (0xA0, 0xBF, "more 1"),
    "ED": (0x80, 0x9F, "more 1"),
    "F0": (0x90, 0xBF, "more 2"),
    "F4": (0x80, 0x8F, "more 2"),
}


def beginning(top: str) -> State:
    """Returns the state at the beginning of a text whose top value is ``top``, one of ``TOPS``."""
    return TOPS[top], "", 0


def accepting(state: State) -> bool:
    """Returns whether the text may end in ``state``."""
    where, stack, _ = state
    return not stack and (where == "after" or where.removeprefix("number ") in _NUMBER_ENDS)


def advance(state: State, byte: int, depth: int, blanks: int) -> State | None:
    """Returns the state after one more byte; None if no JSON text continues with this byte.

    Args:
      state: the state before the byte.
      byte: 0 to 255.
      depth: how deep arrays and objects may be nested.
      blanks: the most white space characters in a row.
    """
    where, stack, seen = state
    kind, _, place = where.partition(" ")
    if kind in ("key", "text"):
        return _in_string(kind, place, stack, byte)
    if kind in _LITERALS:
        rest = place[1:]
        found = byte == ord(place[0])
        return (f"{kind} {rest}" if rest else "after", stack, 0) if found else None
    if kind == "number":
        for letters, following in _NUMBER[place]:
            if byte in letters:
                return f"number {following}", stack, 0
        if place not in _NUMBER_ENDS:
            return None
        where, seen = "after", 0
    if where == "after" and not stack:  # no byte follows the text, not even white space
        return None
    if byte in b" \t\n\r":
        return (where, stack, seen + 1) if seen < blanks else None
    letter = chr(byte)
    if where == "after":
        if letter == ",":
            return ("name" if stack[-1] == "{" else "value"), stack, 0
        closes = letter == {"[": "]", "{": "}"}[stack[-1]]
        return ("after", stack[:-1], 0) if closes else None
    if where == "colon":
        return ("value", stack, 0) if letter == ":" else None
    if where in ("name", "name or end"):
        if letter == '"':
            return "key in", stack, 0
        return ("after", stack[:-1], 0) if letter == "}" and where == "name or end" else None
    if letter == "]" and where == "value or end":
        return "after", stack[:-1], 0
    return _value(where, stack, letter, depth)


def _value(where: str, stack: str, letter: str, depth: int) -> State | None:
    """Returns the state after the first byte of a value, or None."""
    opens = {"[": "only object", "{": "only array"}  # and the place at which each is not allowed
    if letter in opens and len(stack) < depth and where != opens[letter]:
        return ("value or end" if letter == "[" else "name or end"), stack + letter, 0
    if where.startswith("only"):
        return None
    if letter == '"':
        return "text in", stack, 0
    if letter in "-0123456789":
        place = letter if letter in "-0" else "int"
        return f"number {place}", stack, 0
    for literal in _LITERALS:
        if letter == literal[0]:
            return f"{literal} {literal[1:]}", stack, 0
    return None


def _in_string(kind: str, place: str, stack: str, byte: int) -> State | None:
    """Returns the state after a byte within the name of a member (``key``) or a string (``text``),
    or None."""

    def go(place):
        return f"{kind} {place}", stack, 0

    if place in _UTF8:
        low, high, following = _UTF8[place]
        return go(following) if low <= byte <= high else None
    if place == "escape":
        if byte == ord("u"):
            return go("hex 4")
        return go("in") if byte in b'"\\/bfnrt' else None
    if place.startswith("hex"):
        left = int(place[-1]) - 1
        return go(f"hex {left}" if left else "in") if byte in _HEX else None
    if byte == ord('"'):
        return ("colon" if kind == "key" else "after"), stack, 0
    if byte == ord("\\"):
        return go("escape")
    if byte < 0x80:
        return go("in") if byte >= 0x20 else None
    for first, last, following in (
        (0xC2, 0xDF, "more 1"),
        (0xE0, 0xE0, "E0"),
        (0xED, 0xED, "ED"),
        (0xE1, 0xEF, "more 2"),
        (0xF0, 0xF0, "F0"),
        (0xF4, 0xF4, "F4"),
        (0xF1, 0xF3, "more 3"),
    ):
        if first <= byte <= last:
            return go(following)
    return None
