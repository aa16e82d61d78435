"""The keys of a file in errors about a configuration that was made from it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping


@contextlib.contextmanager
def file_keys(keys: Mapping[str, str]) -> Iterator[None]:
    """Lets the ``ValueError`` of a configuration name what a user finds in a file.

    Args:
      keys: keys of the file, each with the attribute that holds its value. An attribute of one word
        (``rank``) is replaced only where its value follows, ``rank=0``.

    Raises:
      ValueError: that of the block, with keys in place of attributes.

    Example::

        with file_keys({"mask_token_id": "mask_token"}):
            shape = BlockConfig(mask_token=99, ...)    # ValueError: mask_token_id=99: ...
    """
    try:
        yield
    except ValueError as error:
        named = {name: key for key, name in keys.items() if key != name}
        words = [rf"{re.escape(name)}\b" + ("" if "_" in name else "(?==)") for name in named]
        if not words:
            raise
        text = re.sub(rf"\b(?:{'|'.join(words)})", lambda found: named[found[0]], str(error))
        raise ValueError(text) from error
