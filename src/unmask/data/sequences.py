"""Files of biological sequences to documents: FASTA and FASTQ, one document a record."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import BinaryIO

from unmask.data.formats import UTF8, Piece, decoded, document, numbered_lines, pieces

FASTA = (".fa", ".fas", ".fasta", ".fna", ".ffn", ".frn", ".faa")
FASTQ = (".fq", ".fastq")

_LINE_END = re.compile(r"\n")
_BEFORE_HEADER = re.compile(r"\n(?=[>;])")


def fasta(handle: BinaryIO, origin: str, encoding: str = UTF8) -> Iterator[Piece]:
    """One document a record: the sequence in upper case, without its header."""
    for header, group in groupby(_runs(handle, origin, encoding), key=itemgetter(0)):
        yield from pieces((letters for _, letters in group), f"{origin} record of line {header}")


def fastq(handle: BinaryIO, origin: str, encoding: str = UTF8) -> Iterator[Piece]:
    """One document a read: the sequence in upper case, without its name and qualities.

    A sequence and its qualities may go over several lines, the same number of letters each. A quality line
    may begin with any sign, so records are told apart by counting.
    """
    lines = numbered_lines(decoded(handle, origin, encoding))
    for number, line in lines:
        if not line.strip():
            continue
        if not line.startswith("@"):
            raise ValueError(f"{origin} is not FASTQ: line {number} does not start with '@'")
        sequence = _sequence(lines, origin, number)
        _skip_qualities(lines, origin, number, len(sequence))
        yield from document(sequence.upper(), f"{origin} record of line {number}")


def _sequence(lines: Iterator[tuple[int, str]], origin: str, header: int) -> str:
    """The letters up to the line with a plus."""
    parts: list[str] = []
    for number, line in lines:
        if line.startswith("+"):
            return "".join(parts)
        if line.startswith("@"):
            raise ValueError(
                f"{origin} line {number} starts the next record where that of line {header} needs its '+'"
            )
        parts += line.split()
    raise ValueError(f"{origin} ends within the record of line {header}: it has no line that starts with '+'")


def _skip_qualities(lines: Iterator[tuple[int, str]], origin: str, header: int, length: int) -> None:
    """Pass over as many qualities as there are letters."""
    found = 0
    while found < length:
        number, line = next(lines, (0, ""))
        if not number:
            raise ValueError(
                f"{origin} ends within the record of line {header}: it has {found} qualities for"
                f" {length} letters"
            )
        found += len(line.strip())
        if found > length:
            raise ValueError(
                f"{origin} line {number} has too many qualities: the record of line {header} has {length}"
                f" letters and {found} qualities"
            )


def _runs(handle: BinaryIO, origin: str, encoding: str) -> Iterator[tuple[int, str]]:
    """Runs of letters, each with the line of its record's header; a line may be as long as a genome."""
    line, header, in_header, new_line = 1, 0, False, True
    for text in decoded(handle, origin, encoding):
        position = 0
        while position < len(text):
            start, opens = position, new_line and text[position] in ">;"
            if opens and text[position] == ">":
                header = line
            in_header = in_header or opens
            found = _LINE_END.search(text, position) if in_header else _BEFORE_HEADER.search(text, position)
            position = found.end() if found else len(text)
            if not in_header:
                letters = "".join(text[start:position].split()).upper()
                if letters and not header:
                    raise ValueError(f"{origin} is not FASTA: line {line} does not start with '>'")
                yield header, letters
            line += text.count("\n", start, position)
            new_line = text[position - 1] == "\n"
            in_header = in_header and not new_line
