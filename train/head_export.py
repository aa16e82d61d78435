"""Exports trained heads in a published layout, with the fingerprint of their target."""

from __future__ import annotations

from pathlib import Path

import specjax
from specjax.checkpoints import FORMATS
from specjax.drafters import registry
from specjax.drafters.medusa import Medusa
from specjax.types import Drafter

from . import card, checkpoint, report, scale
from .config import ConfigError, resolved

MODEL = "model"  # the folder within run.folder to which heads are exported


def layout_of(lm, drafter: Drafter, params) -> str:
    """Returns the first layout that can hold the heads, which is their authors' if possible.

    Medusa heads with several blocks need vLLM's layout; the authors' layout has one block.

    Raises:
      ConfigError: no layout can hold the heads.
    """
    if isinstance(drafter, Medusa) and drafter.config.num_layers > 1:
        return "medusa-vllm"
    refused = []
    for name in registry.formats_of(drafter):
        try:
            FORMATS[name].save(drafter, params, lm)
        except ValueError as error:
            refused.append(str(error))
        else:
            return name
    raise ConfigError(f"such heads could not be written: {'; '.join(dict.fromkeys(refused))}")


@scale.by_first
def export_heads(folder: Path, lm, drafter: Drafter, params) -> None:
    """Writes the heads' published layout in bfloat16, with the fingerprint of their target."""
    layout, where = layout_of(lm, drafter, params), folder / MODEL
    how = dict(format=layout, target=lm, dtype="bfloat16", overwrite=True)  # of an earlier export
    specjax.save_drafter(drafter, params, where, **how)
    print(f"exported to {where}, in the layout {layout!r}")


def finish(config, lm, drafter: Drafter, params, prompts: dict) -> None:
    """Measures exported heads, writes their report, see ``report.finish``, and marks the run as
    finished."""
    where, layout = Path(config.run.folder) / MODEL, layout_of(lm, drafter, params)
    whose = lm.name, lm.checkpoint
    served = not getattr(drafter.config, "dependency_size", 0)  # an extension of a served layout
    settings = resolved(config)
    made = card.Export(where, layout, drafter.name, settings, *whose, served=served)
    report.finish(config, made, lm, specjax.load_drafter(where, lm), prompts)
    checkpoint.mark_finished(Path(config.run.folder), settings)
