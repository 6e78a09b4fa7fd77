"""Regions of FASTA files: contigs, parts of contigs, and intervals of BED files.

    genome.fa.gz:chrX                            a contig
    genome.fa.gz:chrX:1,000,001-2,000,000        its second million bases, counted from 1, both ends included
    genome.fa.gz:regions.bed                     the intervals of a BED file, which counts from 0, ends excluded
    genome.fa.gz:regions.bed:train               those with this word in the fourth column

Each region is a document. One contig at a time is in memory.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import BinaryIO, NamedTuple

from unmask.data.readers._fasta import BLOCK_BASES, sequence_runs
from unmask.data.readers._text import (
    DEFAULT_ENCODING,
    TextChunk,
    chunk_text,
    decode_stream,
    format_names,
    numbered_lines,
)

_REGION = re.compile(r"(?P<contig>.+):(?P<first>[\d,]+)-(?P<last>[\d,]*)")
_BED_HEADERS = ("#", "track", "browser")


class Interval(NamedTuple):
    """Bases start, ..., stop - 1 of a contig, counted from 0; to its end if `stop` is None.

    With `extend_to`, so many bases from the start on, moved back inside at the contig's end.
    """

    contig: str
    start: int = 0
    stop: int | None = None
    extend_to: int | None = None

    def within(self, length: int) -> tuple[int, int]:
        """Start and stop in a contig of `length` bases."""
        if self.extend_to is None or self.start >= length:
            return self.start, length if self.stop is None else self.stop
        return max(0, min(self.start, length - self.extend_to)), min(length, self.start + self.extend_to)


def parse_region(text: str) -> Interval:
    """CONTIG or CONTIG:FIRST-LAST, counted from 1; without LAST, to the end."""
    match = _REGION.fullmatch(text)
    if match is None:
        return Interval(text)
    first, last = (int(match[end].replace(",", "") or 0) for end in ("first", "last"))
    if first < 1 or (match["last"] and last < first):
        raise ValueError(f"a region is CONTIG:FIRST-LAST with 1 <= FIRST <= LAST; got {text!r}")
    return Interval(match["contig"], first - 1, last or None)


def read_bed(handle: BinaryIO, source: str, label: str | None, extend_to: int | None = None) -> list[Interval]:
    """The intervals of a BED file; with `label`, those that have it in the fourth column."""
    intervals, labels = [], set()
    for number, line in numbered_lines(decode_stream(handle, source), source):
        fields = line.split()
        if not fields or fields[0].startswith(_BED_HEADERS):
            continue
        ends = [int(field) if field.isdecimal() else -1 for field in fields[1:3]]
        if len(ends) < 2 or not 0 <= ends[0] < ends[1]:
            raise ValueError(
                f"{source} line {number} is not BED: it needs a contig, a start and a larger end, counted from 0;"
                f" got {line[:60]!r}"
            )
        if len(fields) > 3:
            labels.add(fields[3])
        if label is None or label in fields[3:4]:
            intervals.append(Interval(fields[0], ends[0], ends[1], extend_to))
    if not intervals and label is not None:
        raise ValueError(f"{source} has no interval {label!r} in its fourth column, but {format_names(sorted(labels))}")
    if not intervals:
        raise ValueError(f"{source} has no intervals")
    return intervals


def read_regions(
    handle: BinaryIO,
    source: str,
    wanted: Sequence[Interval] | None,
    excluded: Sequence[Interval] = (),
    encoding: str = DEFAULT_ENCODING,
) -> Iterator[TextChunk]:
    """One document per wanted interval (None: per contig), without the excluded ones, in the order of the contigs.

    An interval that is excluded in its middle becomes two documents.
    """
    wanted_in, excluded_in = _by_contig(wanted or ()), _by_contig(excluded)
    names: list[str] = []
    for (_, name), runs in groupby(sequence_runs(handle, source, encoding), key=lambda run: run[:2]):
        names.append(name)
        intervals = [Interval(name)] if wanted is None else wanted_in.pop(name, [])
        if not intervals:
            continue  # its letters are not kept
        letters = "".join(run.letters for run in runs)
        cut = [interval.within(len(letters)) for interval in excluded_in.get(name, [])]
        for interval in intervals:
            start, stop = interval.within(len(letters))
            _check_inside(interval, start, stop, len(letters), source)
            for first, last in _without(start, stop, cut):
                yield from chunk_text([letters[first:last]], f"{source} {name}:{first + 1}-{last}", BLOCK_BASES)
        if wanted is not None and not wanted_in:
            return
    for name in wanted_in:
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        nearest = f"; the nearest are {format_names(close)}" if close else f"; it has {format_names(names)}"
        raise ValueError(f"{source} has no contig {name!r}{nearest}")


def _by_contig(intervals: Sequence[Interval]) -> dict[str, list[Interval]]:
    found: dict[str, list[Interval]] = {}
    for interval in intervals:
        found.setdefault(interval.contig, []).append(interval)
    return found


def _check_inside(interval: Interval, start: int, stop: int, length: int, source: str) -> None:
    if not start < stop <= length:
        last = "" if interval.stop is None else f"{interval.stop:,}"
        raise ValueError(
            f"{interval.contig}:{interval.start + 1:,}-{last} ends beyond {source}: its contig {interval.contig} has"
            f" {length:,} bases"
        )


def _without(start: int, stop: int, cut: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of start, ..., stop - 1 that are in none of the intervals `cut`."""
    for first, last in sorted(cut):
        if start < first:
            yield start, min(first, stop)
        start = max(start, last)
        if start >= stop:
            return
    yield start, stop
