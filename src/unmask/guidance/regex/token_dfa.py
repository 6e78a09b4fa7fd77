"""A structure as a DFA over tokens: which tokens may follow in each state, and the state that each leads to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.data.tokenizers import BaseTokenizer
from unmask.guidance.regex._byte_dfa import DEAD_STATE, START_STATE, ByteDFA, byte_dfa
from unmask.guidance.regex._token_bytes import token_bytes
from unmask.guidance.regex.limits import LRUCache, WorkBudget, cooperative_yield
from unmask.guidance.structure.structure import Structure

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.signedinteger[Any]]

_TEXT_START = -1
"""The start state of a hole at the beginning of a text, where some tokenizers decode tokens differently."""

_MAX_BYTE_STEPS = 1 << 26
"""Token bytes read to build an automaton, and edges followed to find the lengths of its matches."""
_MAX_STATE_TOKEN_PAIRS = 1 << 24
"""Pairs of a state and a token that is allowed in it."""
_MAX_TABLE_ENTRIES = 1 << 21
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
        found, work = list[int](), WorkBudget(self.subject, _MAX_BYTE_STEPS)
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
    inside, first = _sorted_token_bytes(tokenizer)
    steps, pairs = WorkBudget(subject, _MAX_BYTE_STEPS), WorkBudget(subject, _MAX_STATE_TOKEN_PAIRS)
    number = {DEAD_STATE: DEAD_STATE, START_STATE: START_STATE} | ({} if first is inside else {_TEXT_START: 2})
    rows, todo = list[tuple[IntArray, IntArray]](), list(number)[1:]
    for state in todo:
        if state == _TEXT_START:
            tokens, reached = first.run(by_bytes, START_STATE, steps)
        else:
            tokens, reached = inside.run(by_bytes, state, steps)
        pairs.spend(len(tokens))
        for new in np.unique(reached).tolist():
            if new not in number:
                number[new] = len(number)
                todo.append(new)
        rows.append((tokens, reached))
    own = np.zeros(len(by_bytes.transitions), dtype=np.int64)
    own[[state for state in number if state != _TEXT_START]] = [
        own for state, own in number.items() if state != _TEXT_START
    ]
    accepting = np.array([state != _TEXT_START and by_bytes.accepting[state] for state in number])
    rows = [(tokens, own[reached]) for tokens, reached in rows]
    table, edges, classes = _merge_token_classes(rows, tokenizer.vocab_size, WorkBudget(subject, _MAX_TABLE_ENTRIES))
    return TokenDFA(subject, table, accepting, edges, classes, START_STATE, number.get(_TEXT_START, START_STATE))


TOKEN_DFA_CACHE = LRUCache[TokenDFA](1 << 26)
"""Automata by (structure, tokenizer), up to 64 MiB."""


class _SortedTokenBytes:
    """The bytes of all tokens, sorted: tokens with the same first byte are contiguous."""

    def __init__(self, token_bytes: Sequence[bytes | None]) -> None:
        texts = sorted((text, token) for token, text in enumerate(token_bytes) if text is not None)
        self.tokens = np.array([token for _, token in texts], dtype=np.int64)
        self.lengths = np.array([len(text) for text, _ in texts], dtype=np.int64)
        longest = int(self.lengths.max(initial=1))
        padded = b"".join(text.ljust(longest, b"\0") for text, _ in texts)
        self.bytes = np.frombuffer(padded, dtype=np.uint8).reshape(len(texts), longest).T.copy()
        self.num_empty = int((self.lengths == 0).sum())
        bounds = np.searchsorted(self.bytes[0, self.num_empty :], np.arange(257)) + self.num_empty
        self.by_first_byte = [np.arange(first, last) for first, last in itertools.pairwise(bounds.tolist())]

    def run(self, dfa: ByteDFA, start: int, budget: WorkBudget) -> tuple[IntArray, IntArray]:
        """The tokens that can be read from the state `start` without reaching the dead state, and their end states."""
        table = dfa.transitions
        ended = [(np.arange(self.num_empty), np.full(self.num_empty, start))]
        tokens = np.concatenate(
            [self.by_first_byte[byte] for byte in np.flatnonzero(table[start])] or [ended[0][0][:0]]
        )
        state = table[start, self.bytes[0, tokens]]
        for index in range(1, len(self.bytes)):
            budget.spend(64 + len(tokens))
            more = self.lengths[tokens] > index
            ended.append((tokens[~more], state[~more]))
            tokens = tokens[more]
            state = table[state[more], self.bytes[index, tokens]]
            alive = state != DEAD_STATE
            tokens, state = tokens[alive], state[alive]
            if len(tokens) == 0:
                break
        ended.append((tokens, state))
        reached = np.concatenate([state for _, state in ended]).astype(np.int64)
        tokens = self.tokens[np.concatenate([tokens for tokens, _ in ended])]
        return tokens.astype(np.int32), reached.astype(np.int32)


@lru_cache(maxsize=8)
def _sorted_token_bytes(tokenizer: BaseTokenizer) -> tuple[_SortedTokenBytes, _SortedTokenBytes]:
    """The bytes of tokens inside a text, and at its beginning; one object for both if they are equal."""
    bytes_of = token_bytes(tokenizer)
    inside = _SortedTokenBytes(bytes_of.inside)
    return inside, inside if bytes_of.at_start == bytes_of.inside else _SortedTokenBytes(bytes_of.at_start)


def _merge_token_classes(
    transitions: list[tuple[IntArray, IntArray]], vocab_size: int, budget: WorkBudget
) -> tuple[IntArray, tuple[IntArray, IntArray], IntArray]:
    """The transitions [S, K], edges and token classes [V], given the allowed tokens of each state from 1 on, and
    the states that they lead to."""
    states = len(transitions) + 1
    kind, kinds = np.zeros(vocab_size + 1, dtype=np.int64), 1  # an extra token that is allowed nowhere: class 0 exists
    for tokens, reached in transitions:
        _, new = np.unique(kind[tokens] * states + reached, return_inverse=True)
        kind[tokens] = kinds + new
        kinds += int(new.max(initial=-1)) + 1
    found, classes = np.unique(kind, return_inverse=True)
    classes = classes.reshape(-1)[:vocab_size]
    budget.spend(states * len(found))
    table = np.zeros((states, len(found)), dtype=np.int64)
    targets = [np.zeros(0, dtype=np.int64)]
    for state, (tokens, reached) in enumerate(transitions, start=1):
        table[state, classes[tokens]] = reached
        targets.append(np.unique(table[state])[1:] if len(tokens) else targets[0])
    sources = np.repeat(np.arange(states), [len(each) for each in targets])
    return table, (sources, np.concatenate(targets)), classes
