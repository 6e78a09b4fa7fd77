"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from unmask.report.formatting import format_with_error


def estimate_cell(value: float | None, error: float | None) -> str:
    """Such as 3.214 ± 0.012; without an error, four digits."""
    return " ".join(filter(None, format_with_error(value, error)))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """On stdout; the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    for line in (header, *rows):
        cells = [f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([f"{line[0]:<{widths[0]}}", *cells]).rstrip())
