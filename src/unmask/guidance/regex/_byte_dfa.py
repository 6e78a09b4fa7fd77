"""A regular expression as a minimal DFA over the bytes of UTF-8 text that matches it in full.

Sets of characters, as in `[^a-z]`, `\\w` or `.`, are those of Python's own `re`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unmask.guidance.regex._parser import Alternation, CharClass, Concat, Node, Repeat, nested_too_deeply, parse
from unmask.guidance.regex._utf8 import ByteEdge, utf8_dfa
from unmask.guidance.regex.limits import WorkBudget

_MAX_STATES = 1 << 13
"""States of an automaton; a pattern that needs more is an error."""
_MAX_WORK = 1 << 23
"""Elementary steps for building an automaton: a second or two."""
_CHAR_CLASS_COST = 1 << 16
"""Elementary steps for matching `re` against every character."""

DEAD_STATE, START_STATE = 0, 1


@dataclass(frozen=True)
class ByteDFA:
    """`transitions` [S, 256] is the next state after each byte; state 0 is dead and state 1 the start."""

    transitions: NDArray[np.int32]
    accepting: NDArray[np.bool_]


def byte_dfa(pattern: str) -> ByteDFA:
    """The minimal automaton of a pattern; a larger one if minimizing would take too long."""
    nfa = _NFA(pattern)
    start = nfa.add_state()
    try:
        end = nfa.add_node(parse(pattern), start)
    except RecursionError:
        raise nested_too_deeply(pattern) from None
    except OverflowError:
        raise nfa.limit_error() from None
    return _minimize(*_determinize(nfa, start, end))


class _NFA:
    """States with edges of byte ranges, and epsilon edges."""

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
        """The states reached by epsilon edges that have byte edges or are the end."""
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
            " use fewer or smaller repeats"
        )

    def add_node(self, node: Node, start: int) -> int:
        """Add the automaton of a node from state `start` on; returns its end state."""
        self.budget.spend(8)
        match node:
            case CharClass(source):
                return self._add_char_class(source, start)
            case Concat(parts):
                for part in parts:
                    start = self.add_node(part, start)
                return start
            case Alternation(options):
                end = self.add_state()
                for option in options:
                    self.epsilon[self.add_node(option, self._epsilon_successor(start))].append(end)
                return end
            case Repeat(part, least, most):
                return self._add_repeat(part, least, most, start)

    def _add_repeat(self, part: Node, min_count: int, max_count: int | None, start: int) -> int:
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
        """A new state after an epsilon edge, which keeps loops apart."""
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
    """Subset construction: sets of states become states, 0 is the empty set and 1 the start."""
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
    """Byte ranges, and the set of states that each leads to from any of `states`."""
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
    """Moore's algorithm: states that no text distinguishes are merged.

    It takes as many rounds as the longest text needed to distinguish two states. Large repeats, which are nearly
    minimal anyway, are left as they are.
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
    """A group number for each row, the same for equal rows."""
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(row.tobytes(), len(known)) for row in rows], dtype=np.int32)
