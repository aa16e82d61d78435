"""Ctrl-C at a moment that a test chooses."""

from specjax.cli import screen


def interrupting(function, nth):
    """``function``, whose call ``nth`` (from 1) is interrupted before it does anything."""
    calls = []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return function(*given)

    return interrupted


def interrupt_screen(monkeypatch, nth):
    """Interrupts a command after it showed piece ``nth`` (from 1); returns the list of the texts
    of all pieces, which grows while they are shown."""
    show, shown = screen.Screen.show, []

    def interrupted(self, piece):
        show(self, piece)
        shown.append(piece.text)
        if len(shown) == nth:
            raise KeyboardInterrupt

    monkeypatch.setattr(screen.Screen, "show", interrupted)
    return shown
