"""Files of biological sequences to documents: FASTA and FASTQ, one document a record."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import BinaryIO

from unmask.data.readers.text import (
    DEFAULT_ENCODING,
    TextChunk,
    chunk_document,
    chunk_text,
    decode_stream,
    numbered_lines,
)

FASTA_SUFFIXES = (".fa", ".fas", ".fasta", ".fna", ".ffn", ".frn", ".faa")
FASTQ_SUFFIXES = (".fq", ".fastq")

_LINE_END = re.compile(r"\n")
_BEFORE_HEADER = re.compile(r"\n(?=[>;])")


def read_fasta(handle: BinaryIO, source: str, encoding: str = DEFAULT_ENCODING) -> Iterator[TextChunk]:
    """One document a record: the sequence in upper case, without its header."""
    for header, group in groupby(_sequence_runs(handle, source, encoding), key=itemgetter(0)):
        yield from chunk_text((letters for _, letters in group), f"{source} record of line {header}")


def read_fastq(handle: BinaryIO, source: str, encoding: str = DEFAULT_ENCODING) -> Iterator[TextChunk]:
    """One document a read: the sequence in upper case, without its name and qualities.

    A sequence and its qualities may go over several lines, the same number of letters each. A quality line
    may begin with any sign, so records are told apart by counting.
    """
    lines = numbered_lines(decode_stream(handle, source, encoding))
    for number, line in lines:
        if not line.strip():
            continue
        if not line.startswith("@"):
            raise ValueError(f"{source} is not FASTQ: line {number} does not start with '@'")
        sequence = _read_sequence(lines, source, number)
        _skip_qualities(lines, source, number, len(sequence))
        yield from chunk_document(sequence.upper(), f"{source} record of line {number}")


def _read_sequence(lines: Iterator[tuple[int, str]], source: str, header: int) -> str:
    """The letters up to the line with a plus."""
    parts: list[str] = []
    for number, line in lines:
        if line.startswith("+"):
            return "".join(parts)
        if line.startswith("@"):
            raise ValueError(f"{source} line {number} starts the next record where that of line {header} needs its '+'")
        parts += line.split()
    raise ValueError(f"{source} ends within the record of line {header}: it has no line that starts with '+'")


def _skip_qualities(lines: Iterator[tuple[int, str]], source: str, header: int, length: int) -> None:
    """Pass over as many qualities as there are letters."""
    found = 0
    while found < length:
        number, line = next(lines, (0, ""))
        if not number:
            raise ValueError(
                f"{source} ends within the record of line {header}: it has {found} qualities for {length} letters"
            )
        found += len(line.strip())
        if found > length:
            raise ValueError(
                f"{source} line {number} has too many qualities: the record of line {header} has {length}"
                f" letters and {found} qualities"
            )


def _sequence_runs(handle: BinaryIO, source: str, encoding: str) -> Iterator[tuple[int, str]]:
    """Runs of letters, each with the line of its record's header; a line may be as long as a genome."""
    line, header, in_header, new_line = 1, 0, False, True
    for text in decode_stream(handle, source, encoding):
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
                    raise ValueError(f"{source} is not FASTA: line {line} does not start with '>'")
                yield header, letters
            line += text.count("\n", start, position)
            new_line = text[position - 1] == "\n"
            in_header = in_header and not new_line
