"""Labelled texts from tables: which columns are read, and what is wrong with a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.classification._labels import Labels
from unmask.data.readers import LABEL_COLUMN, TEXT_COLUMNS, ColumnOptions, Sources, validate_text

_Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """Rows of one or two texts each, with the cell of the label and the place of each row."""

    texts: tuple[tuple[str, ...], ...]
    """The texts of each row."""
    cells: tuple[Any, ...]
    """The labels as they are in the file; empty if they were not read."""
    places: tuple[str, ...]
    """Where each row is, for error messages."""
    columns: tuple[str, ...]
    """The columns of the texts."""

    def __len__(self) -> int:
        return len(self.texts)

    def select(self, rows: _Indices) -> Table:
        """Some of the rows."""
        index = rows.tolist()
        return replace(
            self,
            texts=tuple(self.texts[i] for i in index),
            cells=tuple(self.cells[i] for i in index) if self.cells else (),
            places=tuple(self.places[i] for i in index),
        )

    def targets(self, labels: Labels) -> NDArray[np.float64]:
        """The ids of the classes, or the numbers, of all rows."""
        if len(self.cells) != len(self.texts):
            raise ValueError("these rows were read without labels")
        pairs = zip(self.cells, self.places, strict=True)
        return np.array([labels.parse(cell, place) for cell, place in pairs], dtype=np.float64)


def column_options(texts: Sequence[str] = (), label: str | None = LABEL_COLUMN) -> ColumnOptions:
    """Alternative columns for `read_table`: one or two texts (none: the usual names) and, unless None, the label."""
    if len(texts) > 2 or len({*texts, label}) <= len(texts):
        given = ", ".join((*texts, label or ""))
        raise ValueError(f"one or two columns of text and another one for the label are needed; got {given}")
    names = [tuple(texts)] if texts else [(name,) for name in TEXT_COLUMNS]
    return [each if label is None else (*each, label) for each in names]


def read_table(
    sources: Sequence[str], columns: ColumnOptions = (), *, with_labels: bool, skip_empty: bool = False
) -> Table:
    """All rows of files, folders (of tables, or of classes) or datasets of the hub (`hub:NAME:CONFIG:SPLIT`).

    `columns`: alternatives, each one or two columns of text and, with labels, last that of the label. A row without
    text is refused or, with `skip_empty`, left out.
    """
    options = columns or column_options(label=LABEL_COLUMN if with_labels else None)
    texts: list[tuple[str, ...]] = []
    cells: list[Any] = []
    places: list[str] = []
    names: tuple[str, ...] = ()
    for place, found, values in _rows(sources, options):
        names = found[:-1] if with_labels else found
        row = tuple(validate_text(value, place, name) for name, value in zip(names, values, strict=False))
        empty = next((name for name, text in zip(names, row, strict=True) if not text.strip()), None)
        if empty is not None and skip_empty:
            continue
        if empty is not None:
            raise ValueError(f"{place} has an empty text in {empty!r}: fill it, or leave such rows out (--skip-empty)")
        texts.append(row)
        places.append(place)
        if with_labels:
            cells.append(values[-1])
    if not texts:
        raise ValueError(f"{', '.join(sources)} holds no rows")
    return Table(tuple(texts), tuple(cells), tuple(places), names)


def _rows(sources: Sequence[str], options: ColumnOptions) -> Iterator[tuple[str, tuple[str, ...], Sequence[Any]]]:
    if not sources:
        raise ValueError("there is no table to read: name one or more files")
    yield from Sources(sources).read_rows(options)


def split_rows(count: int, fraction: float, seed: int) -> tuple[_Indices, _Indices]:
    """A random part of so many rows, and the rest: (validation, training), both in the order of the table."""
    size = round(count * fraction)
    if not 0 < size < count:
        raise ValueError(f"a share of {fraction:g} of {count:,} rows leaves {size:,} rows for validation; take another")
    order = np.random.default_rng([seed, 1]).permutation(count)
    return np.sort(order[:size]), np.sort(order[size:])


def fold_rows(count: int, folds: int, fold: int) -> tuple[_Indices, _Indices]:
    """Fold number `fold` (from 0) of so many rows, and the rest: (test, training).

    The folds are those of one random order, whatever the seeds of training: every row is tested once.
    """
    if not 2 <= folds <= count:
        raise ValueError(f"{count:,} rows can be divided into 2 to {count:,} folds; got {folds}")
    order = np.random.default_rng([0, 2]).permutation(count)
    first, last = count * fold // folds, count * (fold + 1) // folds
    return np.sort(order[first:last]), np.sort(np.concatenate([order[:first], order[last:]]))
