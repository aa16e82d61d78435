"""``python -m specjax`` is the command ``specjax``."""

from .cli import command

raise SystemExit(command())
