"""The quotient that all metrics share."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> Floats:
    """Elementwise quotient; NaN where the denominator is 0: not measured is not zero."""
    numerator, denominator = np.broadcast_arrays(np.asarray(numerator, float), np.asarray(denominator, float))
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator != 0)
