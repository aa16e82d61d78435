"""``python -m specjax`` is the command ``specjax``."""

from .cli import main

raise SystemExit(main())
