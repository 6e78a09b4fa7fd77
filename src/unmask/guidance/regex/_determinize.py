"""Deterministic automata over bytes: subset construction, minimization and products."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unmask.guidance.regex._nfa import MAX_STATES, MAX_WORK, NFA
from unmask.guidance.regex.limits import WorkBudget

DEAD_STATE, START_STATE = 0, 1


@dataclass(frozen=True)
class ByteDFA:
    """`transitions` [S, 256] is the next state after each byte; state 0 is dead and state 1 the start."""

    transitions: NDArray[np.int32]
    accepting: NDArray[np.bool_]


def determinize(nfa: NFA, start: int, end: int) -> ByteDFA:
    """Subset construction: sets of states become states, 0 is the empty set and 1 the start."""
    first = nfa.epsilon_closure(start)
    number = {frozenset[int](): DEAD_STATE, first: START_STATE}
    rows = [np.zeros(256, dtype=np.int32)]
    todo = [first]
    for states in todo:
        row = np.zeros(256, dtype=np.int32)
        for low, high, reached in _byte_transitions(nfa, states):
            if reached not in number:
                if len(number) >= nfa.max_states:
                    raise nfa.limit_error()
                nfa.budget.spend(len(reached))
                number[reached] = len(number)
                todo.append(reached)
            row[low : high + 1] = number[reached]
        rows.append(row)
    accepting = np.array([end in states for states in number])
    return ByteDFA(np.stack(rows), accepting)


def _byte_transitions(nfa: NFA, states: frozenset[int]) -> Iterator[tuple[int, int, frozenset[int]]]:
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


def minimize(dfa: ByteDFA) -> ByteDFA:
    """Moore's algorithm: states that no text distinguishes are merged.

    It takes as many rounds as the longest text needed to distinguish two states. Large repeats, which are nearly
    minimal anyway, are left as they are.
    """
    transitions, accepting = dfa.transitions, dfa.accepting
    columns = transitions[:, np.unique(group_equal_rows(transitions.T), return_index=True)[1]]
    kind = accepting.astype(np.int32)
    left = MAX_WORK // (4 + columns.shape[1] // 8) // len(transitions)
    while (refined := group_equal_rows(np.column_stack([kind, kind[columns]]))).max() > kind.max():
        kind, left = refined, left - 1
        if left < 0:
            return dfa
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


def group_equal_rows(rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """A group number for each row, the same for equal rows."""
    known: dict[bytes, int] = {}
    return np.array([known.setdefault(row.tobytes(), len(known)) for row in rows], dtype=np.int32)


def product(left: ByteDFA, right: ByteDFA, excludes: bool, budget: WorkBudget) -> ByteDFA:
    """The texts of `left` that `right` accepts too; or, if `excludes`, that it does not accept."""
    number = {(DEAD_STATE, DEAD_STATE): DEAD_STATE, (START_STATE, START_STATE): START_STATE}
    rows, todo = [np.zeros(256, dtype=np.int32)], [(START_STATE, START_STATE)]
    for first, second in todo:
        budget.spend(512)
        one, other = left.transitions[first], right.transitions[second]
        gone = one == DEAD_STATE if excludes else (one == DEAD_STATE) | (other == DEAD_STATE)
        pairs = list(zip(np.where(gone, DEAD_STATE, one).tolist(), np.where(gone, 0, other).tolist(), strict=True))
        for pair in pairs:
            if pair not in number:
                if len(number) >= MAX_STATES:
                    raise budget.limit_error()
                number[pair] = len(number)
                todo.append(pair)
        rows.append(np.array([number[pair] for pair in pairs], dtype=np.int32))
    accepting = np.array([left.accepting[a] and right.accepting[b] != excludes for a, b in number])
    return minimize(ByteDFA(np.stack(rows), accepting))
