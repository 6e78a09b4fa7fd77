"""Numbers and tables formatted for pages and the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

MISSING_VALUE = "-"
"""Shown where there is no number."""


def format_with_error(value: float | None, error: float | None) -> tuple[str, str]:
    """A value and its standard error, with the decimals of the error's two leading digits: ("5.321", "± 0.012").

    Four digits and no error if that is unknown or zero.
    """
    if value is None:
        return MISSING_VALUE, ""
    if not math.isfinite(value) or abs(value) >= 1e7:
        return f"{value:.2e}", ""
    if not error or not math.isfinite(error):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}", ""
    decimals = min(4, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:,.{decimals}f}", f"± {error:,.{decimals}f}"


def human_count(count: float) -> str:
    """A large number with a unit: 7.1 M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(count) >= size:
            return f"{count / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{count:,.0f}"


def format_cell(value: float | str | None) -> str:
    """A cell of a table."""
    if value is None:
        return MISSING_VALUE
    return value if isinstance(value, str) else f"{value:,.5g}" if isinstance(value, float) else f"{value:,}"


def format_estimate(value: float | None, error: float | None) -> str:
    """Such as 3.214 ± 0.012; without an error, four digits."""
    return " ".join(filter(None, format_with_error(value, error)))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """On stdout; the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    for line in (header, *rows):
        cells = [f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([f"{line[0]:<{widths[0]}}", *cells]).rstrip())
