"""``specjax chat``: a conversation on the terminal, or lines from a pipe."""

from __future__ import annotations

import argparse
import sys

import specjax

from .options import add_decoding, options_of, save_session, set_up
from .screen import Screen

HELP = (
    "/new begins another conversation, /help shows this; Ctrl-C ends an answer, Ctrl-D the program"
)


def add(commands) -> None:
    """The arguments of the command."""
    p = commands.add_parser(
        "chat",
        help="talk with a model",
        description="A conversation. The model's caches are kept between turns: each turn reads "
        "its own tokens only. Without a chat template (the embedded model has none) your lines "
        f"and the model's make one text. {HELP}.",
    )
    p.add_argument("--system", help="the system's message, for models with a chat template")
    add_decoding(p)


def run(arguments: argparse.Namespace) -> int:
    """``specjax chat``: one turn a line, until the input ends."""
    lm = set_up(arguments)
    options = options_of(arguments, lm)
    chat = specjax.Chat(lm, system=arguments.system, **options)
    terminal = sys.stdin is not None and sys.stdin.isatty()
    if terminal:
        kind = "chat template" if chat.templated else "no chat template: plain text"
        print(f"{lm.name}, {kind}. {HELP}.", file=sys.stderr)
    while (line := _line(terminal)) is not None:
        if line.strip() == "/new":
            chat.clear()
        elif line.strip() == "/help":
            print(HELP, file=sys.stderr)
        elif line.strip():
            answer(chat, line if chat.templated else f"{line}\n")
            save_session(arguments, options)
    return 0


def answer(chat: specjax.Chat, text: str) -> None:
    """One turn. Ctrl-C ends the answer; what cannot be said is told, and the program goes on."""
    screen, fed = Screen(""), chat.fed
    try:
        for piece in chat.say(text):
            screen.show(piece)
    except KeyboardInterrupt:
        pass
    except ValueError as error:
        way_out = "; /new begins another conversation" if chat.messages or fed else ""
        print(f"specjax: error: {error}{way_out}", file=sys.stderr)
        return
    try:
        result = chat.generation
    except ValueError:  # Ctrl-C before anything was read
        print("interrupted", file=sys.stderr)
        return
    screen.end(result, None, legend=False, note=f"{chat.fed - fed} tokens read")


def _line(terminal: bool) -> str | None:
    """The next line, None at the end of the input."""
    while True:
        try:
            return input("> " if terminal else "")
        except EOFError:
            return None
        except RuntimeError:  # no stdin at all
            return None
        except KeyboardInterrupt:
            if not terminal:
                raise
            print(f"\n{HELP}", file=sys.stderr)
