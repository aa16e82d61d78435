"""Figures as they are written: a median with its quartiles, or with an interval."""

from __future__ import annotations

import numpy as np


def spread(values: np.ndarray) -> dict[str, float]:
    """Median, quartiles and number of ``values``, repeated measurements."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "q25": float(low), "q75": float(high), "n": len(values)}


def interval(result: tuple[float, tuple[float, float], float]) -> dict[str, float]:
    """The result of ``timing.ratio`` or ``timing.median_interval``, by name."""
    median, (low, high), confidence = result
    return {"median": median, "low": low, "high": high, "confidence": float(confidence)}
