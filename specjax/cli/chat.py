"""``specjax chat``: a conversation on the terminal, or lines from a pipe."""

from __future__ import annotations

import argparse
import io
import sys

import specjax

from .options import USAGE_ERROR, add_decoding, options_of, set_up
from .screen import Screen
from .sessions import save_session
from .typed_names import in_options

HELP = (
    "/new begins another conversation, /help shows this line; Ctrl-C ends an answer, Ctrl-D ends "
    "the program"
)


def add(commands) -> None:
    """Adds the command and its arguments."""
    p = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Holds a conversation. The caches of the model are kept between turns, so "
        "that each turn reads only its own tokens. If the model has no chat template (the embedded "
        f"model has none), your lines and the model's lines make one text. {HELP}. If the "
        "lines come from a pipe, a line that is refused ends the program with exit code 2.",
    )
    p.add_argument("--system", help="the system message, for models with a chat template")
    add_decoding(p)


def run(arguments: argparse.Namespace) -> int:
    """Answers one line of input after the other, until the input ends; returns the exit code."""
    lm = set_up(arguments)
    options = options_of(arguments, lm)
    chat = specjax.Chat(lm, system=arguments.system, **options)
    terminal = sys.stdin is not None and sys.stdin.isatty()
    if terminal:
        kind = "chat template" if chat.templated else "no chat template: plain text"
        print(f"{lm.name}, {kind}. {HELP}.", file=sys.stderr)
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")  # in every locale
    while (line := _line(terminal)) is not None:
        if line.strip() == "/new":
            chat.clear()
        elif line.strip() == "/help":
            print(HELP, file=sys.stderr)
        elif line.strip():
            if not answer(chat, line if chat.templated else f"{line}\n") and not terminal:
                return USAGE_ERROR
            save_session(arguments, options)
    return 0


def answer(chat: specjax.Chat, text: str) -> bool:
    """Prints the answer to one turn.

    Ctrl-C ends the answer. If a turn is refused, for example because the context is full, the error
    is printed.

    Returns:
      False if the turn was refused.
    """
    screen, fed = Screen(""), chat.fed
    try:
        for piece in chat.say(text):
            screen.show(piece)
    except KeyboardInterrupt:
        pass
    except ValueError as error:
        way_out = "; /new begins another conversation" if chat.messages or fed else ""
        print(f"specjax: error: {in_options(error, add)}{way_out}", file=sys.stderr)
        return False
    try:
        result = chat.generation
    except ValueError:  # Ctrl-C before anything was read
        print("interrupted", file=sys.stderr)
        return True
    screen.end(result, None, legend=False, note=f"{chat.fed - fed} tokens read")
    return True


def _line(terminal: bool) -> str | None:
    """Returns the next line of input; None at its end."""
    while True:
        try:
            return input("> " if terminal else "")
        except UnicodeDecodeError:
            raise ValueError("a line that was piped in is not UTF-8 text") from None
        except EOFError:
            return None
        except RuntimeError:  # the process has no stdin
            return None
        except KeyboardInterrupt:
            if not terminal:
                raise
            print(f"\n{HELP}", file=sys.stderr)
