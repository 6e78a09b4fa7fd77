"""An expression as a minimal DFA over the bytes of UTF-8 text that matches it in full.

Sets of characters, as in `[^a-z]`, `\\w` or `.`, are those of Python's own `re`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from unmask.guidance.regex._determinize import DEAD_STATE, START_STATE, ByteDFA, determinize, minimize, product
from unmask.guidance.regex._expression import (
    MAX_DEPTH,
    Alternation,
    ByteRange,
    CharClass,
    Concat,
    Expression,
    Joined,
    Node,
    Product,
    Reference,
    Repeat,
)
from unmask.guidance.regex._nfa import MAX_WORK, NFA
from unmask.guidance.regex._utf8 import utf8_dfa
from unmask.guidance.regex.limits import WorkBudget

__all__ = ["DEAD_STATE", "START_STATE", "ByteDFA", "byte_dfa"]

_CHAR_CLASS_COST = 1 << 16
"""Elementary steps for matching `re` against every character."""


def byte_dfa(expression: Expression) -> ByteDFA:
    """The minimal automaton of an expression; a larger one if minimizing would take too long."""
    builder = _Builder(expression)
    try:
        dfa = builder.build(expression.root)
    except RecursionError:
        raise ValueError(f"{expression.subject} is nested too deeply; use fewer groups") from None
    except OverflowError:
        raise builder.nfa.limit_error() from None
    if not dfa.accepting.any():
        nested = f" that has a rule at most {MAX_DEPTH} times inside itself" if builder.was_cut else ""
        raise ValueError(f"no text{nested} matches {expression.subject}")
    return dfa


@dataclass(frozen=True)
class _Frame:
    """A rule that is open: the states before and after its text."""

    entry: int
    exit: int


@dataclass(frozen=True)
class _Scope:
    """Where in the rules a node is."""

    depths: dict[str, int] = field(default_factory=dict)
    """How often each rule is open around it."""
    begun: dict[str, _Frame] = field(default_factory=dict)
    """Open rules of which no text is read before the node: the same rule here ends where that one ends."""
    ending: dict[str, _Frame] = field(default_factory=dict)
    """Open rules that are complete after the node: the same rule here goes on where that one began."""

    def part(self, is_first: bool, is_last: bool) -> _Scope:
        """The scope of a part of a sequence."""
        return replace(self, begun=self.begun if is_first else {}, ending=self.ending if is_last else {})


class _Builder:
    """Adds the automata of nodes to an NFA.

    A rule that refers to itself at its beginning or end becomes a loop, which is exact. A rule that refers to itself
    in between is copied, up to `MAX_DEPTH` times inside itself.
    """

    def __init__(self, expression: Expression) -> None:
        self.rules, self.budget = expression.rules, WorkBudget(expression.subject, MAX_WORK)
        self.nfa, self._char_classes = NFA(self.budget), set[str]()
        self.was_cut = False
        """Whether a rule would have been open more often than it may be."""
        self._begins_with_itself = {name for name in self.rules if name in self._reached(name, 0)}
        self._ends_with_itself = {name for name in self.rules if name in self._reached(name, -1)}

    def build(self, node: Node) -> ByteDFA:
        """The automaton of a node by itself."""
        outer, self.nfa = self.nfa, NFA(self.budget)
        start = self.nfa.add_state()
        end = self.nfa.add_epsilon_successor(self.add(node, start, _Scope()))
        self.nfa.keep_leading_to(end)
        dfa = minimize(determinize(self.nfa, start, end))
        self.nfa = outer
        return dfa

    def _reached(self, rule: str, side: int) -> set[str]:
        """The rules with which a rule can begin (`side` 0) or end (-1), directly or not."""
        reached, todo = set[str](), [rule]
        for name in todo:
            self.budget.spend(8)
            new = set(_outer_references(self.rules[name], side)) - reached
            reached |= new
            todo += new
        return reached

    def add(self, node: Node, start: int, scope: _Scope) -> int:
        """Add the automaton of a node from state `start` on; returns its end state."""
        self.budget.spend(8)
        match node:
            case CharClass(source):
                return self._add_char_class(source, start)
            case ByteRange(low, high):
                end = self.nfa.add_state()
                self.nfa.edges[start].append((low, high, end))
                return end
            case Concat(parts):
                return self._add_concat(parts, start, scope)
            case Alternation(options):
                return self._add_alternation(options, start, scope)
            case Repeat(part, least, most):
                return self._add_repeat(part, least, most, start, scope.part(False, False))
            case Joined():
                return self._add_joined(node, start, scope.part(False, False))
            case Product(left, right, excludes):
                return self._add_dfa(product(self.build(left), self.build(right), excludes, self.budget), start)
            case Reference(rule):
                return self._add_rule(rule, start, scope)

    def _add_concat(self, parts: tuple[Node, ...], start: int, scope: _Scope) -> int:
        for index, part in enumerate(parts):
            start = self.add(part, start, scope.part(index == 0, index == len(parts) - 1))
        return start

    def _add_alternation(self, options: tuple[Node, ...], start: int, scope: _Scope) -> int:
        end = self.nfa.add_state()
        for option in options:
            self.nfa.epsilon[self.add(option, self.nfa.add_epsilon_successor(start), scope)].append(end)
        return end

    def _add_repeat(self, part: Node, min_count: int, max_count: int | None, start: int, scope: _Scope) -> int:
        for _ in range(min_count):
            start = self.add(part, start, scope)
        end = self.nfa.add_state()
        if max_count is None:
            start = self.nfa.add_epsilon_successor(start)
            self.nfa.epsilon[self.add(part, start, scope)].append(start)
        for _ in range((max_count or min_count) - min_count):
            self.nfa.epsilon[start].append(end)
            start = self.add(part, self.nfa.add_epsilon_successor(start), scope)
        self.nfa.epsilon[start].append(end)
        return end

    def _add_joined(self, node: Joined, start: int, scope: _Scope) -> int:
        """Two states between any two parts: nothing has been written yet, or something has."""
        epsilon = self.nfa.epsilon
        nothing, something = self.nfa.add_epsilon_successor(start), self.nfa.add_state()
        for part, is_optional in zip(node.parts, node.is_optional, strict=True):
            before = self.nfa.add_epsilon_successor(nothing)
            epsilon[self.add(node.separator, something, scope)].append(before)
            after = self.nfa.add_epsilon_successor(self.add(part, before, scope))
            nothing = self.nfa.add_epsilon_successor(nothing) if is_optional else self.nfa.add_state()
            if is_optional:
                epsilon[something].append(after)
            something = after
        if node.rest is not None:
            before = self.nfa.add_epsilon_successor(nothing)
            loop = self.nfa.add_epsilon_successor(something)
            epsilon[self.add(node.separator, loop, scope)].append(before)
            epsilon[self.add(node.rest, before, scope)].append(loop)
            something = loop
        end = self.nfa.add_epsilon_successor(nothing)
        epsilon[something].append(end)
        return end

    def _add_rule(self, rule: str, start: int, scope: _Scope) -> int:
        if rule in scope.begun:
            return scope.begun[rule].exit
        if rule in scope.ending:
            self.nfa.epsilon[start].append(scope.ending[rule].entry)
            return self.nfa.add_state()
        depth = scope.depths.get(rule, 0)
        if depth == MAX_DEPTH:
            self.was_cut = True
            return self.nfa.add_state()  # nothing leads there
        frame = _Frame(self.nfa.add_epsilon_successor(start), self.nfa.add_state())
        # The exit of a rule that begins with itself has edges of its own, so that rules around it do not end there;
        # the entry of one that ends with itself is entered again, so that rules around it do not begin there.
        begun = {} if rule in self._ends_with_itself else scope.begun
        ending = {} if rule in self._begins_with_itself else scope.ending
        inside = _Scope({**scope.depths, rule: depth + 1}, {**begun, rule: frame}, {**ending, rule: frame})
        self.nfa.epsilon[self.add(self.rules[rule], frame.entry, inside)].append(frame.exit)
        return frame.exit

    def _add_char_class(self, source: str, start: int) -> int:
        if source not in self._char_classes:
            self._char_classes.add(source)
            self.budget.spend(_CHAR_CLASS_COST if len(source) > 1 or source == "." else 1)
        nodes = utf8_dfa(source)
        own = [start, *(self.nfa.add_state() for _ in nodes)]  # the last one is the end, -1
        for number, edges in enumerate(nodes):
            self.nfa.edges[own[number]] += [(low, high, own[target]) for low, high, target in edges]
        return own[-1]

    def _add_dfa(self, dfa: ByteDFA, start: int) -> int:
        own = [self.nfa.add_state() for _ in dfa.accepting]
        self.nfa.epsilon[start].append(own[START_STATE])
        end = self.nfa.add_state()
        for state, row in enumerate(dfa.transitions):
            self.budget.spend(64)
            if dfa.accepting[state]:
                self.nfa.epsilon[own[state]].append(end)
            cuts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), 256]
            for low, after in itertools.pairwise(cuts):
                if row[low] != DEAD_STATE:
                    self.nfa.edges[own[state]].append((low, after - 1, own[row[low]]))
        return end


def _outer_references(node: Node, side: int) -> Iterator[str]:
    """The rules to which a node refers at its beginning (`side` 0) or end (-1)."""
    match node:
        case Reference(rule):
            yield rule
        case Concat(parts) if parts:
            yield from _outer_references(parts[side], side)
        case Alternation(options):
            for option in options:
                yield from _outer_references(option, side)
