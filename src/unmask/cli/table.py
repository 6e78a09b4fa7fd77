"""Figures for people: aligned columns, and as many digits as the error leaves meaning to."""

from __future__ import annotations

import math
from collections.abc import Sequence


def format_with_error(value: float | None, error: float | None) -> str:
    """Such as 3.214 ± 0.012: the error to two digits, the value to as many places; four digits if exact."""
    if value is None:
        return "-"
    if not math.isfinite(value) or abs(value) >= 1e7:
        return f"{value:.2e}"
    if not error or not math.isfinite(error):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    places = min(4, max(0, 1 - math.floor(math.log10(error))))
    return f"{value:,.{places}f} ± {error:,.{places}f}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """On stdout; the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    for line in (header, *rows):
        cells = [f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([f"{line[0]:<{widths[0]}}", *cells]).rstrip())
