"""A pattern as an automaton over tokens: which ones a text may go on with, and where they lead."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.data.tokenizers import BaseTokenizer
from unmask.guidance.regex._byte_dfa import DEAD_STATE, START_STATE, ByteDFA, byte_dfa
from unmask.guidance.regex._token_bytes import token_bytes
from unmask.guidance.regex.limits import LRUCache, WorkBudget, cooperative_yield

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.signedinteger[Any]]

_TEXT_START = -1
"""The start, where tokens are spelled as at the beginning of a text."""

_MAX_BYTE_STEPS = 1 << 26
"""Bytes of tokens that are read to find an automaton, and edges that are followed to find its lengths."""
_MAX_STATE_TOKEN_PAIRS = 1 << 24
"""Of a state and a token that fits there."""
_MAX_TABLE_ENTRIES = 1 << 21
"""States times classes of tokens."""


@dataclass(frozen=True, eq=False)
class TokenDFA:
    """Tokens that lead from every state to the same one are a class, and only classes matter.

    `table` [S, K] says where a class leads; state 0 is dead, and so is class 0, of tokens that never fit.
    `edges` are the pairs of states of which some token leads from the first to the second.
    """

    pattern: str
    transitions: IntArray
    accepting: BoolArray
    edges: tuple[IntArray, IntArray]
    token_classes: IntArray
    """[V]: the class of each token."""
    inner_state: int
    """The state in which a hole begins."""
    text_start_state: int
    """The state in which a hole begins that is the beginning of the text."""

    @property
    def num_bytes(self) -> int:
        """Bytes."""
        arrays = (self.transitions, self.accepting, *self.edges, self.token_classes)
        return sum(array.nbytes for array in arrays)

    def successors(self, states: BoolArray) -> BoolArray:
        """The states [S] that some token leads to from any of these."""
        reached = np.zeros(len(self.transitions), dtype=np.bool_)
        sources, targets = self.edges
        reached[targets[states[sources]]] = True
        return reached

    def predecessors(self, states: BoolArray) -> BoolArray:
        """The states [S] from which some token leads to any of these."""
        leading = np.zeros(len(self.transitions), dtype=np.bool_)
        sources, targets = self.edges
        leading[sources[states[targets]]] = True
        return leading

    def match_lengths(self, state: int, max_length: int) -> tuple[list[int], bool]:
        """In how many tokens, up to `most`, a text can be spelled that matches; and whether it can be in
        more than that."""
        here = np.arange(len(self.transitions)) == state
        found, work = list[int](), WorkBudget(self.pattern, _MAX_BYTE_STEPS)
        for length in range(1, max_length + 1):
            work.spend(len(self.edges[0]))
            cooperative_yield()
            here = self.successors(here)
            if not here.any():
                return found, False
            if (here & self.accepting).any():
                found.append(length)
        return found, True


def token_dfa(pattern: str, tokenizer: BaseTokenizer) -> TokenDFA:
    """The automaton of a pattern over a tokenizer's tokens."""
    return TOKEN_DFA_CACHE.get_or_build(
        (pattern, tokenizer), lambda: _build_token_dfa(pattern, tokenizer), lambda dfa: dfa.num_bytes
    )


def _build_token_dfa(pattern: str, tokenizer: BaseTokenizer) -> TokenDFA:
    by_bytes = byte_dfa(pattern)
    inside, first = _sorted_token_bytes(tokenizer)
    steps, pairs = WorkBudget(pattern, _MAX_BYTE_STEPS), WorkBudget(pattern, _MAX_STATE_TOKEN_PAIRS)
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
    table, edges, classes = _merge_token_classes(rows, tokenizer.vocab_size, WorkBudget(pattern, _MAX_TABLE_ENTRIES))
    return TokenDFA(pattern, table, accepting, edges, classes, START_STATE, number.get(_TEXT_START, START_STATE))


TOKEN_DFA_CACHE = LRUCache[TokenDFA](1 << 26)
"""By pattern and tokenizer."""


class _SortedTokenBytes:
    """The bytes of tokens in sorted order, so that those with the same first byte are neighbours."""

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
        """The tokens that do not end dead from a state, and the states that they end in."""
        table = dfa.transitions
        ended = [(np.arange(self.num_empty), np.full(self.num_empty, start))]
        tokens = np.concatenate(
            [self.by_first_byte[byte] for byte in np.flatnonzero(table[start])] or [ended[0][0][:0]]
        )
        state = table[start, self.bytes[0, tokens]]
        for place in range(1, len(self.bytes)):
            budget.spend(64 + len(tokens))
            more = self.lengths[tokens] > place
            ended.append((tokens[~more], state[~more]))
            tokens = tokens[more]
            state = table[state[more], self.bytes[place, tokens]]
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
    """Of tokens inside a text, and of those that begin it."""
    spelled = token_bytes(tokenizer)
    inside = _SortedTokenBytes(spelled.inside)
    return inside, inside if spelled.at_start == spelled.inside else _SortedTokenBytes(spelled.at_start)


def _merge_token_classes(
    transitions: list[tuple[IntArray, IntArray]], vocab_size: int, budget: WorkBudget
) -> tuple[IntArray, tuple[IntArray, IntArray], IntArray]:
    """The table [S, K], the edges and the classes [V], given the tokens that fit in each state from 1 on and
    where they lead."""
    states = len(transitions) + 1
    kind, kinds = np.zeros(vocab_size + 1, dtype=np.int64), 1  # one token more, which fits nowhere: class 0
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
