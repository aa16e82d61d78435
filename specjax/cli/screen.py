"""Prints text on a terminal or into a pipe, and turns a generation into plain data."""

from __future__ import annotations

import io
import math
import shutil
import sys

DRAFTED = "bold green"  # the style of accepted draft tokens on a terminal


class Screen:
    """Prints text to stdout as it is generated, and figures to stderr; colours on a terminal only.

    Args:
      prompt: the prompt, which is printed at once on a terminal.
    """

    def __init__(self, prompt: str):
        from rich.console import Console

        if isinstance(sys.stdout, io.TextIOWrapper):  # some encodings lack some characters
            sys.stdout.reconfigure(errors="replace")
        terminal = sys.stdout.isatty()  # a file has the text alone, whatever FORCE_COLOR says
        self.out = Console(file=sys.stdout, soft_wrap=True, force_terminal=terminal)
        self.shown, self.ended = 0, True
        if terminal:  # at once, because the first text may wait for a compilation
            self._write(prompt, "dim")

    def show(self, piece) -> None:
        """Prints one piece of text, a ``text.generation.Piece``."""
        self.shown += len(piece.text)  # first: Ctrl-C may cut the rest off
        self.ended = piece.text.endswith("\n")
        if not self.out.is_terminal:
            sys.stdout.write(piece.text)
        else:
            self._write(piece.text, DRAFTED if piece.from_draft else "none")
        sys.stdout.flush()

    def _write(self, text: str, style: str) -> None:
        """Writes text to a terminal with all its characters: rich adds the colours alone."""
        from rich.segment import Segment, Segments
        from rich.style import Style

        self.out.print(Segments([Segment(text, Style.parse(style))]), end="")

    def samples(self, result) -> None:
        """Prints several texts, one below the other."""
        for number, text in enumerate(result.texts, start=1):
            print(f"--- {number}\n{text}")

    def end(self, result, rate: float | None, legend: bool = True, note: str = "") -> None:
        """Prints committed text that was not printed yet, as after Ctrl-C, and a line of figures.

        Args:
          result: the ``Generation``.
          rate: tokens per second, or None.
          legend: whether the colours are explained on a terminal.
          note: a further figure.
        """
        self.out.print(end="")  # flushes text that Ctrl-C left in the console's buffer
        rest = result.text[self.shown :] if len(result.texts) == 1 else ""
        ended = rest.endswith("\n") if rest else self.ended
        print(rest, end="" if ended else "\n", flush=True)
        line = f"{result.stats} · {sum(map(len, result.tokens))} tokens"
        line += f" · {rate:,.0f} tokens/s" if rate else ""
        line += f" · {note}" if note else ""
        line += "" if result.finished else " · interrupted"
        print(f"\n{line}", file=sys.stderr)
        if "no token" in result.reasons:
            print("the text ended because no token had any probability", file=sys.stderr)
        if legend and self.out.is_terminal:
            from rich.text import Text

            drafted = ("accepted draft tokens", DRAFTED)
            self.out.print(Text.assemble(("prompt", "dim"), " · ", drafted, " · the target's own"))


def in_width(found) -> str:
    """A result with a table as text: on a terminal of its width, elsewhere as ``str`` has it."""
    return found.text(shutil.get_terminal_size().columns) if sys.stdout.isatty() else str(found)


def _numbers(values) -> list[float | None]:
    """Values as JSON holds them, which has no infinite numbers."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def describe(result, prompt: str | list[int], lm, rule: str) -> dict:
    """Returns a generation as JSON values.

    Args:
      result: the ``Generation``.
      prompt: the prompt as it was given.
      lm: the target.
      rule: the name of the acceptance rule.
    """
    stats = result.stats
    acceptance = stats.acceptance
    samples = [
        {
            "text": text,
            "reason": result.reasons[row],
            "tokens": result.tokens[row].tolist(),
            "from_draft": result.from_draft[row].tolist(),
        }
        | ({} if result.logprobs is None else {"logprobs": _numbers(result.logprobs[row])})
        for row, text in enumerate(result.texts)
    ]
    return {
        "model": lm.name,
        "drafter": stats.drafter,
        "rule": rule,
        "prompt": prompt,
        "finished": result.finished,
        **samples[0],
        **({"samples": samples} if len(samples) > 1 else {}),
        "prompt_tokens": result.prompts[0].tolist(),
        "stats": {
            "rounds": int(stats.rounds.sum()),
            "drafted": int(stats.drafted.sum()),
            "accepted": int(stats.accepted.sum()),
            "passengers": int(stats.passengers.sum()),
            "tau": stats.tau,
            "acceptance": None if math.isnan(acceptance) else acceptance,
            "acceptance_by_position": stats.acceptance_by_position.tolist(),
            "approximate": bool(stats.approximate),
            "approximation": stats.approximate or None,
        },
    }
