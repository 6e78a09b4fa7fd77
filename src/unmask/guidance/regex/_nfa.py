"""Nondeterministic automata over bytes."""

from __future__ import annotations

from unmask.guidance.regex._utf8 import ByteEdge
from unmask.guidance.regex.limits import WorkBudget

MAX_STATES = 1 << 13
"""States of a deterministic automaton; an expression that needs more is an error."""
MAX_WORK = 1 << 23
"""Elementary steps for building an automaton: a second or two."""


class NFA:
    """States with edges of byte ranges, and epsilon edges."""

    def __init__(self, budget: WorkBudget) -> None:
        self.budget, self.max_states = budget, MAX_STATES
        self.edges: list[list[ByteEdge]] = []
        self.epsilon: list[list[int]] = []
        self._epsilon_closures: dict[int, frozenset[int]] = {}

    def add_state(self) -> int:
        """A new state without edges."""
        if len(self.edges) >= 4 * self.max_states:
            raise self.limit_error()
        self.edges.append([])
        self.epsilon.append([])
        return len(self.edges) - 1

    def add_epsilon_successor(self, state: int) -> int:
        """A new state after an epsilon edge, which keeps loops apart."""
        new = self.add_state()
        self.epsilon[state].append(new)
        return new

    def epsilon_closure(self, state: int) -> frozenset[int]:
        """The states reached by epsilon edges that have byte edges or are an end."""
        if state not in self._epsilon_closures:
            reached, todo = {state}, [state]
            for here in todo:
                self.budget.spend(1 + len(self.epsilon[here]))
                new = set(self.epsilon[here]) - reached
                reached |= new
                todo += new
            self._epsilon_closures[state] = frozenset(s for s in reached if self.edges[s] or not self.epsilon[s])
        return self._epsilon_closures[state]

    def keep_leading_to(self, end: int) -> bool:
        """Remove the edges to states from which `end` cannot be reached; returns whether any edges are left."""
        sources: list[list[int]] = [[] for _ in self.edges]
        for state, (edges, epsilon) in enumerate(zip(self.edges, self.epsilon, strict=True)):
            self.budget.spend(1)
            for target in (*(target for _, _, target in edges), *epsilon):
                sources[target].append(state)
        leading, todo = {end}, [end]
        for here in todo:
            new = set(sources[here]) - leading
            leading |= new
            todo += new
        self.edges = [[edge for edge in edges if edge[2] in leading] for edges in self.edges]
        self.epsilon = [[target for target in targets if target in leading] for targets in self.epsilon]
        return len(leading) > 1

    def limit_error(self) -> ValueError:
        """The error of an expression that needs too many states."""
        return ValueError(
            f"{self.budget.subject} needs an automaton of more than {self.max_states} states;"
            " use fewer or smaller repeats"
        )
