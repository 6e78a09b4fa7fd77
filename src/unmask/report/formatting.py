"""Numbers as people read them."""

from __future__ import annotations

import math

MISSING_VALUE = "\u2013"
"""Stands where there is no number."""


def format_with_error(value: float, error: float) -> tuple[str, str]:
    """A value to the digits that its standard error leaves standing, and the error with two: 5.32, 0.12."""
    if not error > 0:
        return f"{value:,.4g}", "exact"
    decimals = min(6, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:,.{decimals}f}", f"± {error:,.{decimals}f}"


def human_count(count: float) -> str:
    """A large number, shortly: 7.1 M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(count) >= size:
            return f"{count / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{count:,.0f}"


def format_cell(value: float | str | None) -> str:
    """An entry of a table."""
    if value is None:
        return MISSING_VALUE
    return value if isinstance(value, str) else f"{value:,.5g}" if isinstance(value, float) else f"{value:,}"
