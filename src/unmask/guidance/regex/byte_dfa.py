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

from unmask.guidance.regex.limits import WorkBudget
from unmask.guidance.regex.utf8 import ByteEdge, utf8_dfa

_MAX_STATES = 1 << 13
"""Of an automaton; a pattern that needs more is refused."""
_MAX_WORK = 1 << 23
"""Elementary steps in which an automaton must be found: a second or two."""
_CHAR_CLASS_COST = 1 << 16
"""What it takes to ask `re` about every character."""

DEAD_STATE, START_STATE = 0, 1


@dataclass(frozen=True)
class ByteDFA:
    """`table` [S, 256] says where a byte leads; state 0 is dead and state 1 the start."""

    transitions: NDArray[np.int32]
    accepting: NDArray[np.bool_]


@dataclass(frozen=True)
class _CharClass:
    """One character out of a set, which is written as in a pattern."""

    source: str


@dataclass(frozen=True)
class _Concat:
    parts: tuple[_Node, ...]


@dataclass(frozen=True)
class _Alternation:
    options: tuple[_Node, ...]


@dataclass(frozen=True)
class _Repeat:
    part: _Node
    min_count: int
    max_count: int | None


_Node: TypeAlias = _CharClass | _Concat | _Alternation | _Repeat

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
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})")


class _Parser:
    """Reads a pattern that `re` has found to be well-formed."""

    def __init__(self, pattern: str) -> None:
        self.pattern, self.pos = pattern, 0

    def parse_alternation(self) -> _Node:
        options = [self.parse_concat()]
        while self._accept("|"):
            options.append(self.parse_concat())
        return options[0] if len(options) == 1 else _Alternation(tuple(options))

    def parse_concat(self) -> _Node:
        parts: list[_Node] = []
        while self.pos < len(self.pattern) and self.pattern[self.pos] not in "|)":
            parts.append(self._parse_quantifiers(self._parse_atom()))
        return _Concat(tuple(parts))

    def _parse_atom(self) -> _Node:
        if self._accept("("):
            if self._accept("?") and not self._accept(":"):
                name = re.compile(r"P<\w+>").match(self.pattern, self.pos)
                if name is None:
                    raise self._unsupported(f"'(?{self.pattern[self.pos : self.pos + 1]}...)'")
                self.pos = name.end()
            inside = self.parse_alternation()
            self.pos += 1  # its closing bracket
            return inside
        atom = _ATOM.match(self.pattern, self.pos)
        if atom is None:
            here = self.pattern[self.pos]
            shown = self.pattern[self.pos : self.pos + 2] if here == "\\" else here
            if here in "^$" or shown in ("\\A", "\\Z"):
                raise ValueError(
                    f"the pattern {self.pattern!r} has an anchor, {shown!r}; leave it away, as a hole is"
                    " always matched from its beginning to its end"
                )
            raise self._unsupported(repr(shown))
        self.pos = atom.end()
        return _CharClass(atom[0] if atom[0] not in ("]", "{", "}") else "\\" + atom[0])

    def _parse_quantifiers(self, part: _Node) -> _Node:
        while times := _QUANTIFIER.match(self.pattern, self.pos):
            sign, least, comma, most = times.groups()
            if not (sign or least or most):
                return part  # `{}` and `{,}` are what they look like
            self.pos = times.end()
            if self._accept("+"):
                raise self._unsupported("a possessive repeat")
            self._accept("?")  # lazy or greedy, it is the same set of texts
            if sign:
                part = _Repeat(part, int(sign == "+"), 1 if sign == "?" else None)
            elif comma:
                part = _Repeat(part, int(least or 0), int(most) if most else None)
            else:
                part = _Repeat(part, int(least), int(least))
        return part

    def _accept(self, sign: str) -> bool:
        found = self.pattern.startswith(sign, self.pos)
        self.pos += len(sign) * found
        return found

    def _unsupported(self, what: str) -> ValueError:
        return ValueError(
            f"the pattern {self.pattern!r} has {what}, which holes cannot be matched with; use characters,"
            " sets, groups, | and repeats"
        )


def byte_dfa(pattern: str) -> ByteDFA:
    """The smallest automaton of a pattern; where that would take long, one that may be larger."""
    net = _NFA(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what `re` may read otherwise one day
            re.compile(pattern)
        start = net.add_state()
        end = net.add_node(_Parser(pattern).parse_alternation(), start)
    except re.error as error:
        raise ValueError(f"the pattern {pattern!r} is not a regular expression: {error}") from None
    except RecursionError:
        raise ValueError(f"the pattern {pattern[:60]!r} is nested too deeply; use fewer groups") from None
    except OverflowError:
        raise net.limit_error() from None
    return _minimize(*_determinize(net, start, end))


class _NFA:
    """States with edges of byte ranges, and edges that cost nothing."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.edges: list[list[ByteEdge]] = []
        self.epsilon: list[list[int]] = []
        self.epsilon_closures: dict[int, frozenset[int]] = {}
        self.budget, self.char_classes = WorkBudget(pattern, _MAX_WORK), set[str]()

    def add_state(self) -> int:
        if len(self.edges) >= 4 * _MAX_STATES:
            raise self.limit_error()
        self.edges.append([])
        self.epsilon.append([])
        return len(self.edges) - 1

    def epsilon_closure(self, state: int) -> frozenset[int]:
        """All that is reached for nothing, as far as it matters: where bytes lead on, and the end."""
        if state not in self.epsilon_closures:
            reached, todo = {state}, [state]
            for here in todo:
                self.budget.spend(1 + len(self.epsilon[here]))
                new = set(self.epsilon[here]) - reached
                reached |= new
                todo += new
            self.epsilon_closures[state] = frozenset(s for s in reached if self.edges[s] or not self.epsilon[s])
        return self.epsilon_closures[state]

    def limit_error(self) -> ValueError:
        return ValueError(
            f"the pattern {self.pattern[:60]!r} needs an automaton of more than {_MAX_STATES} states;"
            " repeat smaller parts, or less often"
        )

    def add_node(self, node: _Node, start: int) -> int:
        """What the node matches from `start` on; the state it ends in."""
        self.budget.spend(8)
        match node:
            case _CharClass(source):
                return self._add_char_class(source, start)
            case _Concat(parts):
                for part in parts:
                    start = self.add_node(part, start)
                return start
            case _Alternation(options):
                end = self.add_state()
                for option in options:
                    self.epsilon[self.add_node(option, self._epsilon_successor(start))].append(end)
                return end
            case _Repeat(part, least, most):
                return self._add_repeat(part, least, most, start)

    def _add_repeat(self, part: _Node, min_count: int, max_count: int | None, start: int) -> int:
        for _ in range(min_count):
            start = self.add_node(part, start)
        end = self.add_state()
        if max_count is None:
            start = self._epsilon_successor(start)
            self.epsilon[self.add_node(part, start)].append(start)
        for _ in range((max_count or min_count) - min_count):
            self.epsilon[start].append(end)
            start = self.add_node(part, self._epsilon_successor(start))
        self.epsilon[start].append(end)
        return end

    def _epsilon_successor(self, state: int) -> int:
        """A state of its own, so that loops do not meet."""
        new = self.add_state()
        self.epsilon[state].append(new)
        return new

    def _add_char_class(self, source: str, start: int) -> int:
        if source not in self.char_classes:
            self.char_classes.add(source)
            self.budget.spend(_CHAR_CLASS_COST if len(source) > 1 or source == "." else 1)
        nodes = utf8_dfa(source)
        own = [start, *(self.add_state() for _ in nodes)]  # the last one is the end, -1
        for number, edges in enumerate(nodes):
            self.edges[own[number]] += [(low, high, own[target]) for low, high, target in edges]
        return own[-1]


def _determinize(nfa: _NFA, start: int, end: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Sets of states that are reached together, as states: 0 is none of them, 1 the first."""
    first = nfa.epsilon_closure(start)
    number = {frozenset[int](): DEAD_STATE, first: START_STATE}
    rows = [np.zeros(256, dtype=np.int32)]
    todo = [first]
    for states in todo:
        row = np.zeros(256, dtype=np.int32)
        for low, high, reached in _byte_transitions(nfa, states):
            if reached not in number:
                if len(number) >= _MAX_STATES:
                    raise nfa.limit_error()
                nfa.budget.spend(len(reached))
                number[reached] = len(number)
                todo.append(reached)
            row[low : high + 1] = number[reached]
        rows.append(row)
    accepting = np.array([end in states for states in number])
    return np.stack(rows), accepting


def _byte_transitions(nfa: _NFA, states: frozenset[int]) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Ranges of bytes and the states that they lead to from any of these."""
    nfa.budget.spend(sum(2 + 4 * len(nfa.edges[state]) for state in states))
    edges = sorted(edge for state in states for edge in nfa.edges[state])
    if all(before[1] < after[0] for before, after in itertools.pairwise(edges)):
        yield from ((low, high, nfa.epsilon_closure(target)) for low, high, target in edges)
        return
    cuts = sorted({low for low, _, _ in edges} | {high + 1 for _, high, _ in edges})
    for low, after in itertools.pairwise(cuts):
        targets = {target for first, last, target in edges if first <= low <= last}
        nfa.budget.spend(len(edges) + sum(len(nfa.epsilon_closure(target)) for target in targets))
        yield low, after - 1, frozenset().union(*map(nfa.epsilon_closure, targets))


def _minimize(transitions: NDArray[np.int32], accepting: NDArray[np.bool_]) -> ByteDFA:
    """Moore's refinement: states that no text tells apart are one.

    It takes as many rounds as texts that tell two states apart are long, so that large repeats, which are
    about as small as can be anyway, are left as they are.
    """
    columns = transitions[:, np.unique(_group_equal_rows(transitions.T), return_index=True)[1]]
    kind = accepting.astype(np.int32)
    left = _MAX_WORK // (4 + columns.shape[1] // 8) // len(transitions)
    while (refined := _group_equal_rows(np.column_stack([kind, kind[columns]]))).max() > kind.max():
        kind, left = refined, left - 1
        if left < 0:
            return ByteDFA(transitions, accepting)
    order = np.full(kind.max() + 1, -1)
    order[kind[DEAD_STATE]] = DEAD_STATE
    if kind[START_STATE] != kind[DEAD_STATE]:
        order[kind[START_STATE]] = START_STATE
    rest = order < 0
    order[rest] = np.arange(2, 2 + rest.sum())
    number = order[kind]
    smallest = np.zeros((max(2, number.max() + 1), 256), dtype=np.int32)
    accepts = np.zeros(len(smallest), dtype=np.bool_)
    smallest[number], accepts[number] = number[transitions], accepting
    return ByteDFA(smallest, accepts)


def _group_equal_rows(rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """A number for each row, the same for equal rows."""
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(row.tobytes(), len(known)) for row in rows], dtype=np.int32)
