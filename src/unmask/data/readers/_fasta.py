"""Biological sequences: FASTA and FASTQ, one document per record."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import BinaryIO, NamedTuple

from unmask.data.readers._text import (
    DEFAULT_ENCODING,
    TextChunk,
    chunk_document,
    chunk_text,
    decode_stream,
    numbered_lines,
)

BLOCK_BASES = 1_000_000
"""Letters of a chunk: validation holds out whole megabases of a contig."""

_MAX_TITLE_CHARS = 4096
"""Characters of a header that are kept, to find the record's name."""

_LINE_END = re.compile(r"\n")
_BEFORE_HEADER = re.compile(r"\n(?=[>;])")


def _read_fasta(handle: BinaryIO, source: str, encoding: str = DEFAULT_ENCODING) -> Iterator[TextChunk]:
    """One document per record: the sequence in upper case, without its header."""
    for header, runs in groupby(sequence_runs(handle, source, encoding), key=itemgetter(0)):
        yield from chunk_text((run.letters for run in runs), f"{source} record of line {header}", BLOCK_BASES)


def _read_fastq(handle: BinaryIO, source: str, encoding: str = DEFAULT_ENCODING) -> Iterator[TextChunk]:
    """One document per read: the sequence in upper case, without its name and qualities.

    A sequence and its qualities may span several lines and have the same length. A quality line may begin
    with any character, so the end of a record is found by counting.
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
    """The letters up to the line that starts with '+'."""
    parts: list[str] = []
    for number, line in lines:
        if line.startswith("+"):
            return "".join(parts)
        if line.startswith("@"):
            raise ValueError(f"{source} line {number} starts a record before that of line {header} has its '+' line")
        parts += line.split()
    raise ValueError(f"{source} ends within the record of line {header}: it has no line that starts with '+'")


def _skip_qualities(lines: Iterator[tuple[int, str]], source: str, header: int, length: int) -> None:
    """Skip as many qualities as there are letters."""
    count = 0
    while count < length:
        number, line = next(lines, (0, ""))
        if not number:
            raise ValueError(
                f"{source} ends within the record of line {header}: it has {count} qualities for {length} letters"
            )
        count += len(line.strip())
        if count > length:
            raise ValueError(
                f"{source} line {number} has too many qualities: the record of line {header} has {length}"
                f" letters and {count} qualities"
            )


class SequenceRun(NamedTuple):
    """Letters of a record: the line of its header, its name (the header's first word), and some of its letters."""

    header: int
    name: str
    letters: str


def sequence_runs(handle: BinaryIO, source: str, encoding: str) -> Iterator[SequenceRun]:
    """Runs of letters, in upper case and without white space; a line may be as long as a genome."""
    line, header, title, in_header, new_line = 1, 0, "", False, True
    for text in decode_stream(handle, source, encoding):
        position = 0
        while position < len(text):
            start, opens = position, new_line and text[position] in ">;"
            if opens and text[position] == ">":
                header, title = line, ""
            in_header = in_header or opens
            match = _LINE_END.search(text, position) if in_header else _BEFORE_HEADER.search(text, position)
            position = match.end() if match else len(text)
            if not in_header:
                letters = "".join(text[start:position].split()).upper()
                if letters and not header:
                    raise ValueError(f"{source} is not FASTA: line {line} does not start with '>'")
                yield SequenceRun(header, _record_name(title), letters)
            elif line == header:  # and not a comment
                title = (title + text[start:position])[:_MAX_TITLE_CHARS]
            line += text.count("\n", start, position)
            new_line = text[position - 1] == "\n"
            in_header = in_header and not new_line


def _record_name(title: str) -> str:
    return next(iter(title.removeprefix(">").split()), "")


FASTA_SUFFIXES = (".fa", ".fas", ".fasta", ".fna", ".ffn", ".frn", ".faa")

SEQUENCE_READERS = {**dict.fromkeys(FASTA_SUFFIXES, _read_fasta), **dict.fromkeys((".fq", ".fastq"), _read_fastq)}
"""The reader of each sequence format, by suffix."""
