"""Figures in the form in which they are stored: a median with quartiles, or with an interval."""

from __future__ import annotations

import numpy as np


def spread(values: np.ndarray) -> dict[str, float]:
    """Returns median, quartiles and number of repeated measurements ``values``."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "q25": float(low), "q75": float(high), "n": len(values)}


def interval(result: tuple[float, tuple[float, float], float]) -> dict[str, float]:
    """Returns the result of ``timing.ratio`` or ``timing.median_interval`` by name."""
    median, (low, high), confidence = result
    return {"median": median, "low": low, "high": high, "confidence": float(confidence)}
