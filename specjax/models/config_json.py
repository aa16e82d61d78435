"""What the ``config.json`` files of all families have in common."""

from __future__ import annotations

import dataclasses

from .config import DecoderConfig
from .seq2seq.config import EncoderDecoderConfig

Config = DecoderConfig | EncoderDecoderConfig


def check_expressed(config: Config, again: Config) -> None:
    """Raises ``ValueError`` where ``again``, which a config.json gives back, differs from
    ``config``, of which the config.json was made."""
    lost = [
        f"{f.name}={getattr(config, f.name)!r}"
        for f in dataclasses.fields(config)
        if getattr(config, f.name) != getattr(again, f.name)
    ]
    if lost:
        raise ValueError(
            f"a config.json of model_type={config.model_type!r} cannot express "
            f"{', '.join(lost)}: choose the model_type of a family that has it"
        )


def ids_of(value: object) -> tuple[int, ...]:
    """Token ids as config files hold them: one, a list, or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)
