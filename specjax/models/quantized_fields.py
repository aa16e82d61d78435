"""Fields of a ``quantization_config``: what is accepted, and how all else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping

WAY_OUT = "use the unquantized checkpoint"


def accept(config: Mapping, method: str, path: str, field: str, *accepted) -> None:
    """Raises ``ValueError`` unless ``config[field]`` (None: it has none) is one of ``accepted``."""
    value = config.get(field)
    if value not in accepted:
        known = ", ".join(map(repr, accepted))
        raise ValueError(
            f"config.json: quantized checkpoint (quant_method={method!r}): {path}{field}={value!r} "
            f"is not supported; accepted: {known}; {WAY_OUT}"
        )


def group_size(config: Mapping, method: str, path: str) -> int | None:
    """``group_size`` of a config; None: -1, one group of all inputs.

    Raises:
      ValueError: it is neither a positive integer nor -1.
    """
    size = config.get("group_size")
    if isinstance(size, bool) or not isinstance(size, int) or not (size > 0 or size == -1):
        accept({"group_size": size}, method, path, "group_size", "a positive integer", -1)
    return None if size == -1 else size
