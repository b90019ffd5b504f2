"""How numbers are written in tables and sentences. A value that was not measured is a dash, never a zero."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

NOT_MEASURED = "—"


def is_missing(value: Any) -> bool:
    """Whether a value was not measured (None, NaN, infinite)."""
    return value is None or pd.isna(value) or not math.isfinite(float(value))


def number(value: Any, digits: int = 2) -> str:
    """A plain number, for example `1.85`."""
    return NOT_MEASURED if is_missing(value) else f"{float(value):.{digits}f}"


def percent(value: Any, digits: int = 1) -> str:
    """A fraction in percent without the sign, for example `67.4`; the unit belongs in the heading."""
    return NOT_MEASURED if is_missing(value) else f"{100 * float(value):.{digits}f}"


def percentage(value: Any, digits: int = 1) -> str:
    """A fraction in percent with the sign, for example `67.4%`; for sentences."""
    return NOT_MEASURED if is_missing(value) else f"{percent(value, digits)}%"


def points(value: Any, digits: int = 1) -> str:
    """A difference of fractions in percentage points with its sign, for example `−1.2`."""
    if is_missing(value):
        return NOT_MEASURED
    text = f"{100 * float(value):+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def with_interval(value: Any, low: Any, high: Any, digits: int = 1) -> str:
    """A percentage with its 95% interval, for example `67.4 [65.0, 69.8]`."""
    text = percent(value, digits)
    if text == NOT_MEASURED or is_missing(low) or is_missing(high):
        return text
    return f"{text} [{percent(low, digits)}, {percent(high, digits)}]"


def with_deviation(value: Any, deviation: Any, digits: int = 2) -> str:
    """A mean over seeds with its standard deviation, for example `67.40 ± 0.20`; a single seed has no deviation."""
    text = percent(value, digits)
    return text if text == NOT_MEASURED or is_missing(deviation) else f"{text} ± {percent(deviation, digits)}"


def probability(value: Any) -> str:
    """A p-value; very small ones as `< 0.001`."""
    if is_missing(value):
        return NOT_MEASURED
    return "< 0.001" if float(value) < 0.001 else f"{float(value):.3f}"


def p_text(value: Any) -> str:
    """A p-value for a sentence, for example `p = 0.012` or `p < 0.001`."""
    text = probability(value)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def plural(count: int, word: str) -> str:
    """A count with its noun, for example `1 image` or `1,200 images`."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def budget_text(value: float) -> str:
    """A token budget, for example `0.3`, `1.0` or `0.25`."""
    return f"{value:.1f}" if abs(10 * value - round(10 * value)) < 1e-9 else f"{value:g}"
