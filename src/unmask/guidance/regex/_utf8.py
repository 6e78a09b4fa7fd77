"""Character classes as automata over the bytes of their UTF-8 encoding."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

_NUM_CODE_POINTS = 0x110000

ByteEdge: TypeAlias = tuple[int, int, int]
"""(first byte, last byte, node): bytes of this range lead to the node."""


@cache
def _all_characters() -> str:
    codes = np.arange(_NUM_CODE_POINTS, dtype="<u4").tobytes()
    return codes.decode("utf-32-le", errors="surrogatepass")


@lru_cache(maxsize=128)
def utf8_dfa(char_class: str) -> list[list[ByteEdge]]:
    """The automaton of a character class, such as `[^a-z]`: the edges of each node. Node 0 is the start, -1 the end;
    equal suffixes share a node."""
    if len(char_class) == 1 and char_class != ".":
        spelled = char_class.encode()
        ends = [*range(1, len(spelled)), -1]
        return [[(byte, byte, end)] for byte, end in zip(spelled, ends, strict=True)]
    member = np.zeros(5 << 18, dtype=np.bool_)  # up to the last code point that a leading byte of F4 could begin
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        members = re.compile(f"(?:{char_class})+")
    for found in members.finditer(_all_characters()):
        member[found.start() : found.end()] = True
    member[0xD800:0xE000] = False  # surrogates are not characters
    return _build_dfa(member)


def _build_dfa(member: NDArray[np.bool_]) -> list[list[ByteEdge]]:
    nodes: list[list[ByteEdge]] = [[]]
    known: dict[bytes, int] = {}

    def tail(codes: NDArray[np.bool_]) -> int | None:
        """The node for the remaining bytes, given which codes of the last 6, 12 or 18 bits are members."""
        if not codes.any():
            return None
        if len(codes) == 1:
            return -1
        key = codes.tobytes()
        if key not in known:
            parts = codes.reshape(64, -1)
            edges = _merge_ranges((0x80 + i, tail(part)) for i, part in enumerate(parts))
            nodes.append(edges)
            known[key] = len(nodes) - 1
        return known[key]

    leads: list[tuple[int, int | None]] = [(code, tail(member[code : code + 1])) for code in range(0x80)]
    for first, last, base, size in ((0xC2, 0xDF, 0xC0, 6), (0xE0, 0xEF, 0xE0, 12), (0xF0, 0xF4, 0xF0, 18)):
        long = member.copy()
        long[: {6: 0x80, 12: 0x800, 18: 0x10000}[size]] = False  # these have a shorter encoding
        leads += [
            (lead, tail(long[(lead - base) << size : (lead - base + 1) << size])) for lead in range(first, last + 1)
        ]
    nodes[0] = _merge_ranges(iter(leads))
    return nodes


def _merge_ranges(targets: Iterator[tuple[int, int | None]]) -> list[ByteEdge]:
    """Bytes in rising order with their targets, adjacent bytes of the same target merged into ranges."""
    ranges: list[ByteEdge] = []
    for byte, target in targets:
        if target is None:
            continue
        if ranges and ranges[-1][1:] == (byte - 1, target):
            ranges[-1] = (ranges[-1][0], byte, target)
        else:
            ranges.append((byte, byte, target))
    return ranges
