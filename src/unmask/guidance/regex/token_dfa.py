"""A structure as a DFA over tokens: which tokens may follow in each state, and the state that each leads to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.data.tokenizers import BaseTokenizer
from unmask.guidance.regex._byte_dfa import DEAD_STATE, START_STATE, byte_dfa
from unmask.guidance.regex._determinize import group_equal_rows
from unmask.guidance.regex._token_trie import token_tries
from unmask.guidance.regex.limits import LRUCache, WorkBudget, cooperative_yield
from unmask.guidance.structure.structure import Structure

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.signedinteger[Any]]

_MAX_EDGES = 1 << 26
"""Edges that are followed to find the lengths of matches."""
_MAX_TABLE_ENTRIES = 1 << 22
"""States times token classes."""


@dataclass(frozen=True, eq=False)
class TokenDFA:
    """A DFA over token classes: two tokens are of the same class if they lead to the same state from every state.

    State 0 is dead. Class 0 holds the tokens that are allowed nowhere.
    """

    subject: str
    """What messages call it, as in `the pattern 'a+'`."""
    transitions: IntArray
    """[S, K]: the next state after a token of each class."""
    accepting: BoolArray
    """[S]: whether the text read so far is a match."""
    edges: tuple[IntArray, IntArray]
    """Sources and targets [E]: the pairs of states such that some token leads from the first to the second."""
    token_classes: IntArray
    """[V]: the class of each token."""
    inner_state: int
    """The start state of a hole inside a text."""
    text_start_state: int
    """The start state of a hole at the beginning of a text."""

    @classmethod
    def compile(cls, structure: Structure, tokenizer: BaseTokenizer) -> TokenDFA:
        """The automaton of a structure over a tokenizer's tokens, from the cache if it is there."""
        return TOKEN_DFA_CACHE.get_or_build(
            (structure, tokenizer), lambda: _build_token_dfa(structure, tokenizer), lambda dfa: dfa.num_bytes
        )

    @property
    def num_bytes(self) -> int:
        """The size of the arrays in bytes."""
        arrays = (self.transitions, self.accepting, *self.edges, self.token_classes)
        return sum(array.nbytes for array in arrays)

    def with_ends(self, end_ids: tuple[int, ...]) -> TokenDFA:
        """The automaton of texts that may end before the hole does: by one of these tokens, after which any follow."""
        return TOKEN_DFA_CACHE.get_or_build((self, end_ids), lambda: self._add_ends(end_ids), lambda dfa: dfa.num_bytes)

    def _add_ends(self, end_ids: tuple[int, ...]) -> TokenDFA:
        ended, end_class = self.transitions.shape
        table = np.pad(self.transitions, ((0, 1), (0, 2)))  # a class of ends, and one of all else that is no text
        table[:ended, end_class] = np.where(self.accepting, ended, DEAD_STATE)
        table[ended, 1:] = ended
        classes = np.where(self.token_classes == 0, end_class + 1, self.token_classes)
        classes[[token for token in end_ids if token < len(classes)]] = end_class
        finals = np.flatnonzero(self.accepting)
        sources = np.concatenate([self.edges[0], finals, [ended]])
        targets = np.concatenate([self.edges[1], np.full(len(finals) + 1, ended)])
        accepting = np.append(self.accepting, True)
        return replace(self, transitions=table, accepting=accepting, edges=(sources, targets), token_classes=classes)

    def successors(self, states: BoolArray) -> BoolArray:
        """The states [S] that are reached from any of `states` by one token."""
        reached = np.zeros(len(self.transitions), dtype=np.bool_)
        sources, targets = self.edges
        reached[targets[states[sources]]] = True
        return reached

    def predecessors(self, states: BoolArray) -> BoolArray:
        """The states [S] from which one token leads to any of `states`."""
        leading = np.zeros(len(self.transitions), dtype=np.bool_)
        sources, targets = self.edges
        leading[sources[states[targets]]] = True
        return leading

    def match_lengths(self, state: int, max_length: int) -> tuple[list[int], bool]:
        """The numbers of tokens, up to `max_length`, that a match from `state` can have; and whether longer
        matches may exist."""
        here = np.arange(len(self.transitions)) == state
        found, work = list[int](), WorkBudget(self.subject, _MAX_EDGES)
        for length in range(1, max_length + 1):
            work.spend(len(self.edges[0]))
            cooperative_yield()
            here = self.successors(here)
            if not here.any():
                return found, False
            if (here & self.accepting).any():
                found.append(length)
        return found, True


def _build_token_dfa(structure: Structure, tokenizer: BaseTokenizer) -> TokenDFA:
    by_bytes, subject = byte_dfa(structure.expression()), structure.subject
    inside, first = token_tries(tokenizer)
    kinds, functions = inside.functions(by_bytes, subject)
    begun: IntArray | None = None
    if first is not inside:  # some tokenizers decode tokens at the beginning of a text differently
        first_kinds, first_functions = first.functions(by_bytes, subject)
        begun = first_functions[:, START_STATE][first_kinds]  # [V]: the state after each token there
    used, kinds = np.unique(np.append(kinds, DEAD_STATE), return_inverse=True)
    functions, kinds = functions[used], kinds.reshape(-1)[:-1]
    states = _reached(functions, [START_STATE] if begun is None else [START_STATE, *np.unique(begun).tolist()])
    WorkBudget(subject, _MAX_TABLE_ENTRIES).spend(len(states) * len(functions))
    number = np.zeros(len(by_bytes.accepting), dtype=np.int32)
    number[states] = np.arange(len(states))
    table, accepting = number[functions[:, states]], by_bytes.accepting[states]
    classes = group_equal_rows(table)
    table, kinds = table[np.unique(classes, return_index=True)[1]], classes[kinds].astype(np.int64)
    start = START_STATE
    if begun is not None:  # one more state, for a hole at the beginning, which no token leads to
        start = len(states)
        pairs = np.append(kinds * start + number[begun], DEAD_STATE)
        found, inverse = np.unique(pairs, return_inverse=True)
        table, kinds = np.column_stack([table[found // start], found % start]), inverse.reshape(-1)[:-1]
        accepting = np.append(accepting, False)
    table = np.ascontiguousarray(table.T, dtype=np.int32)
    return TokenDFA(subject, table, accepting, _edges(table), kinds, START_STATE, start)


def _reached(functions: IntArray, starts: list[int]) -> IntArray:
    """The dead state, and those that are reached from these by tokens; they are rows [K, S] of states."""
    reached = np.zeros(functions.shape[1], dtype=np.bool_)
    reached[DEAD_STATE] = True
    new = np.array(starts)
    while len(new):
        reached[new] = True
        cooperative_yield()
        new = np.unique(functions[:, new])
        new = new[~reached[new]]
    return np.flatnonzero(reached)


def _edges(table: IntArray) -> tuple[IntArray, IntArray]:
    """The pairs of states such that some class leads from the first to the second."""
    targets = [np.unique(row) for row in table]
    targets = [row[row != DEAD_STATE].astype(np.int64) for row in targets]
    return np.repeat(np.arange(len(table)), [len(row) for row in targets]), np.concatenate(targets)


TOKEN_DFA_CACHE = LRUCache[TokenDFA](1 << 26)
"""Automata by (structure, tokenizer), up to 64 MiB."""
