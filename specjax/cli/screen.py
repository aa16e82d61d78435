"""Text on a terminal or in a pipe, and a generation as plain data."""

from __future__ import annotations

import io
import math
import sys

DRAFTED = "bold green"  # how accepted draft tokens look on a terminal


class Screen:
    """Text to stdout as it comes, figures to stderr; colours only on a terminal."""

    def __init__(self, prompt: str):
        from rich.console import Console

        if isinstance(sys.stdout, io.TextIOWrapper):  # some pipes cannot spell every character
            sys.stdout.reconfigure(errors="replace")
        # rich only colours: it must not wrap, mark up or highlight the text
        self.out = Console(file=sys.stdout, soft_wrap=True, markup=False, highlight=False)
        self.shown, self.ended = 0, True
        if self.out.is_terminal:  # at once: the first text may have to be compiled for
            self.out.print(prompt, style="dim", end="")

    def show(self, piece) -> None:
        self.shown += len(piece.text)  # first: Ctrl-C may cut the rest off
        self.ended = piece.text.endswith("\n")
        if not self.out.is_terminal:
            sys.stdout.write(piece.text)
        else:
            self.out.print(piece.text, style=DRAFTED if piece.from_draft else None, end="")
        sys.stdout.flush()

    def samples(self, result) -> None:
        """Several texts, one below the other."""
        for number, text in enumerate(result.texts, start=1):
            print(f"--- {number}\n{text}")

    def end(self, result, rate: float | None, legend: bool = True, note: str = "") -> None:
        """Shows committed text that is not shown yet, as after Ctrl-C, and a line of figures."""
        self.out.print(end="")  # what Ctrl-C left in the console's buffer stands before the figures
        rest = result.text[self.shown :] if len(result.texts) == 1 else ""
        ended = rest.endswith("\n") if rest else self.ended
        print(rest, end="" if ended else "\n", flush=True)
        line = f"{result.stats} · {sum(map(len, result.tokens))} tokens"
        line += f" · {rate:,.0f} tokens/s" if rate else ""
        line += f" · {note}" if note else ""
        line += "" if result.finished else " · interrupted"
        print(f"\n{line}", file=sys.stderr)
        if "no token" in result.reasons:
            print("ended: no token had any probability left", file=sys.stderr)
        if legend and self.out.is_terminal:
            from rich.text import Text

            drafted = ("accepted draft tokens", DRAFTED)
            self.out.print(Text.assemble(("prompt", "dim"), " · ", drafted, " · the target's own"))


def describe(result, prompt: str | list[int], lm, rule: str) -> dict:
    """A generation as plain data; ``rule``: the name of the one that judged."""
    stats = result.stats
    acceptance = stats.acceptance
    samples = [
        {
            "text": text,
            "reason": result.reasons[row],
            "tokens": result.tokens[row].tolist(),
            "from_draft": result.from_draft[row].tolist(),
        }
        | ({} if result.logprobs is None else {"logprobs": result.logprobs[row].tolist()})
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
