"""``python -m train`` in a clone is ``specjax train``."""

from .cli import main

raise SystemExit(main())
