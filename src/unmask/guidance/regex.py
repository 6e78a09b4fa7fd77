"""A regular expression as the smallest automaton over the bytes of UTF-8 text that matches it in full.

The syntax is Python's, without what is not regular (back references), what looks around, and flags. Sets of
characters, as in `[^a-z]`, `\\w` or `.`, are whatever Python's own `re` says they are.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from unmask.guidance.bounds import Work
from unmask.guidance.utf8 import Edge, utf8

MOST_STATES = 1 << 13
"""Of an automaton; a pattern that needs more is refused."""
MOST_WORK = 1 << 23
"""Elementary steps in which an automaton must be found: a second or two."""
A_SET = 1 << 16
"""What it takes to ask `re` about every character."""

DEAD, START = 0, 1


@dataclass(frozen=True)
class ByteAutomaton:
    """`table` [S, 256] says where a byte leads; state 0 is dead and state 1 the start."""

    table: NDArray[np.int32]
    accepting: NDArray[np.bool_]


@dataclass(frozen=True)
class _Set:
    """One character out of a set, which is written as in a pattern."""

    source: str


@dataclass(frozen=True)
class _Row:
    parts: tuple[_Node, ...]


@dataclass(frozen=True)
class _Either:
    options: tuple[_Node, ...]


@dataclass(frozen=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None


_Node: TypeAlias = _Set | _Row | _Either | _Repeat

_ATOM = re.compile(
    r"""
      \\(?: x[0-9a-fA-F]{2} | u[0-9a-fA-F]{4} | U[0-9a-fA-F]{8} | 0[0-7]{0,2} | [1-3][0-7]{2}
          | N\{[^}]*\} | [^bBAZ1-9xuUN] )
    | \[\^?\]?(?:\\.|[^]\\])*\]
    | [^\\[\](){}*+?|^$]
    | [\]{}]
    """,
    re.VERBOSE | re.DOTALL,
)
_TIMES = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})")


class _Parser:
    """Reads a pattern that `re` has found to be well-formed."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0

    def either(self) -> _Node:
        options = [self.row()]
        while self._next("|"):
            options.append(self.row())
        return options[0] if len(options) == 1 else _Either(tuple(options))

    def row(self) -> _Node:
        parts: list[_Node] = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return _Row(tuple(parts))

    def _atom(self) -> _Node:
        if self._next("("):
            if self._next("?") and not self._next(":"):
                name = re.compile(r"P<\w+>").match(self.pattern, self.at)
                if name is None:
                    raise self._refusal(f"'(?{self.pattern[self.at : self.at + 1]}...)'")
                self.at = name.end()
            inside = self.either()
            self.at += 1  # its closing bracket
            return inside
        atom = _ATOM.match(self.pattern, self.at)
        if atom is None:
            here = self.pattern[self.at]
            shown = self.pattern[self.at : self.at + 2] if here == "\\" else here
            if here in "^$" or shown in ("\\A", "\\Z"):
                raise ValueError(
                    f"the pattern {self.pattern!r} has an anchor, {shown!r}; leave it away, as a hole is"
                    " always matched from its beginning to its end"
                )
            raise self._refusal(repr(shown))
        self.at = atom.end()
        return _Set(atom[0] if atom[0] not in ("]", "{", "}") else "\\" + atom[0])

    def _repeated(self, part: _Node) -> _Node:
        while times := _TIMES.match(self.pattern, self.at):
            sign, least, comma, most = times.groups()
            if not (sign or least or most):
                return part  # `{}` and `{,}` are what they look like
            self.at = times.end()
            if self._next("+"):
                raise self._refusal("a possessive repeat")
            self._next("?")  # lazy or greedy, it is the same set of texts
            if sign:
                part = _Repeat(part, int(sign == "+"), 1 if sign == "?" else None)
            elif comma:
                part = _Repeat(part, int(least or 0), int(most) if most else None)
            else:
                part = _Repeat(part, int(least), int(least))
        return part

    def _next(self, sign: str) -> bool:
        found = self.pattern.startswith(sign, self.at)
        self.at += len(sign) * found
        return found

    def _refusal(self, what: str) -> ValueError:
        return ValueError(
            f"the pattern {self.pattern!r} has {what}, which holes cannot be matched with; use characters,"
            " sets, groups, | and repeats"
        )


def byte_automaton(pattern: str) -> ByteAutomaton:
    """The smallest automaton of a pattern; where that would take long, one that may be larger."""
    net = _Net(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what `re` may read otherwise one day
            re.compile(pattern)
        start = net.state()
        end = net.add(_Parser(pattern).either(), start)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is not a regular expression: {error}") from None
    except RecursionError:
        raise ValueError(f"the pattern {pattern[:60]!r} is nested too deeply; use fewer groups") from None
    except OverflowError:
        raise net.too_large() from None
    return _smallest(*_determined(net, start, end))


class _Net:
    """States with edges of byte ranges, and edges that cost nothing."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.edges: list[list[Edge]] = []
        self.free: list[list[int]] = []
        self.closures: dict[int, frozenset[int]] = {}
        self.work, self.sets = Work(pattern, MOST_WORK), set[str]()

    def state(self) -> int:
        if len(self.edges) >= 4 * MOST_STATES:
            raise self.too_large()
        self.edges.append([])
        self.free.append([])
        return len(self.edges) - 1

    def closure(self, state: int) -> frozenset[int]:
        """All that is reached for nothing, as far as it matters: where bytes lead on, and the end."""
        if state not in self.closures:
            reached, todo = {state}, [state]
            for here in todo:
                self.work.spend(1 + len(self.free[here]))
                new = set(self.free[here]) - reached
                reached |= new
                todo += new
            self.closures[state] = frozenset(s for s in reached if self.edges[s] or not self.free[s])
        return self.closures[state]

    def too_large(self) -> ValueError:
        return ValueError(
            f"the pattern {self.pattern[:60]!r} needs an automaton of more than {MOST_STATES} states;"
            " repeat smaller parts, or less often"
        )

    def add(self, node: _Node, start: int) -> int:
        """What the node matches from `start` on; the state it ends in."""
        self.work.spend(8)
        match node:
            case _Set(source):
                return self._set(source, start)
            case _Row(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case _Either(options):
                end = self.state()
                for option in options:
                    self.free[self.add(option, self._after(start))].append(end)
                return end
            case _Repeat(part, least, most):
                return self._repeat(part, least, most, start)

    def _repeat(self, part: _Node, least: int, most: int | None, start: int) -> int:
        for _ in range(least):
            start = self.add(part, start)
        end = self.state()
        if most is None:
            start = self._after(start)
            self.free[self.add(part, start)].append(start)
        for _ in range((most or least) - least):
            self.free[start].append(end)
            start = self.add(part, self._after(start))
        self.free[start].append(end)
        return end

    def _after(self, state: int) -> int:
        """A state of its own, so that loops do not meet."""
        new = self.state()
        self.free[state].append(new)
        return new

    def _set(self, source: str, start: int) -> int:
        if source not in self.sets:
            self.sets.add(source)
            self.work.spend(A_SET if len(source) > 1 or source == "." else 1)
        nodes = utf8(source)
        own = [start, *(self.state() for _ in nodes)]  # the last one is the end, -1
        for number, edges in enumerate(nodes):
            self.edges[own[number]] += [(low, high, own[target]) for low, high, target in edges]
        return own[-1]


def _determined(net: _Net, start: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Sets of states that are reached together, as states: 0 is none of them, 1 the first."""
    first = net.closure(start)
    number = {frozenset[int](): DEAD, first: START}
    rows = [np.zeros(256, dtype=np.int32)]
    todo = [first]
    for states in todo:
        row = np.zeros(256, dtype=np.int32)
        for low, high, reached in _moves(net, states):
            if reached not in number:
                if len(number) >= MOST_STATES:
                    raise net.too_large()
                net.work.spend(len(reached))
                number[reached] = len(number)
                todo.append(reached)
            row[low : high + 1] = number[reached]
        rows.append(row)
    accepting = np.array([end in states for states in number])
    return np.stack(rows), accepting


def _moves(net: _Net, states: frozenset[int]) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Ranges of bytes and the states that they lead to from any of these."""
    net.work.spend(sum(2 + 4 * len(net.edges[state]) for state in states))
    edges = sorted(edge for state in states for edge in net.edges[state])
    if all(before[1] < after[0] for before, after in itertools.pairwise(edges)):
        yield from ((low, high, net.closure(target)) for low, high, target in edges)
        return
    cuts = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
    for low, after in itertools.pairwise(cuts):
        targets = {target for first, last, target in edges if first <= low <= last}
        net.work.spend(len(edges) + sum(len(net.closure(target)) for target in targets))
        yield low, after - 1, frozenset().union(*map(net.closure, targets))


def _smallest(table: NDArray[np.int32], accepting: NDArray[np.bool_]) -> ByteAutomaton:
    """Moore's refinement: states that no text tells apart are one.

    It takes as many rounds as texts that tell two states apart are long, so that large repeats, which are
    about as small as can be anyway, are left as they are.
    """
    columns = table[:, np.unique(_kinds(table.T), return_index=True)[1]]
    kind = accepting.astype(np.int32)
    left = MOST_WORK // (4 + columns.shape[1] // 8) // len(table)
    while (refined := _kinds(np.column_stack([kind, kind[columns]]))).max() > kind.max():
        kind, left = refined, left - 1
        if left < 0:
            return ByteAutomaton(table, accepting)
    order = np.full(kind.max() + 1, -1)
    order[kind[DEAD]] = DEAD
    if kind[START] != kind[DEAD]:
        order[kind[START]] = START
    rest = order < 0
    order[rest] = np.arange(2, 2 + rest.sum())
    number = order[kind]
    smallest = np.zeros((max(2, number.max() + 1), 256), dtype=np.int32)
    accepts = np.zeros(len(smallest), dtype=np.bool_)
    smallest[number], accepts[number] = number[table], accepting
    return ByteAutomaton(smallest, accepts)


def _kinds(rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """A number for each row, the same for equal rows."""
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(row.tobytes(), len(known)) for row in rows], dtype=np.int32)
