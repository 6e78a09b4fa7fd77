"""A pattern as an automaton over tokens: which ones a text may go on with, and where they lead."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmask.data.tokenizer import Tokenizer
from unmask.guidance.bounds import Kept, Work
from unmask.guidance.pausing import pause
from unmask.guidance.regex import DEAD, START, ByteAutomaton, byte_automaton
from unmask.guidance.spelling import spelling

Flags = NDArray[np.bool_]
Numbers = NDArray[np.signedinteger[Any]]

BEGINNING = -1
"""The start, where tokens are spelled as at the beginning of a text."""

MOST_STEPS = 1 << 26
"""Bytes of tokens that are read to find an automaton, and edges that are followed to find its lengths."""
MOST_PAIRS = 1 << 24
"""Of a state and a token that fits there."""
MOST_CELLS = 1 << 21
"""States times classes of tokens."""


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """Tokens that lead from every state to the same one are a class, and only classes matter.

    `table` [S, K] says where a class leads; state 0 is dead, and so is class 0, of tokens that never fit.
    `edges` are the pairs of states of which some token leads from the first to the second.
    """

    pattern: str
    table: Numbers
    accepting: Flags
    edges: tuple[Numbers, Numbers]
    classes: Numbers
    """[V]: the class of each token."""
    inside: int
    """The state in which a hole begins."""
    first: int
    """The state in which a hole begins that is the beginning of the text."""

    @property
    def size(self) -> int:
        """Bytes."""
        arrays = (self.table, self.accepting, *self.edges, self.classes)
        return sum(array.nbytes for array in arrays)

    def after(self, states: Flags) -> Flags:
        """The states [S] that some token leads to from any of these."""
        reached = np.zeros(len(self.table), dtype=np.bool_)
        sources, targets = self.edges
        reached[targets[states[sources]]] = True
        return reached

    def before(self, states: Flags) -> Flags:
        """The states [S] from which some token leads to any of these."""
        leading = np.zeros(len(self.table), dtype=np.bool_)
        sources, targets = self.edges
        leading[sources[states[targets]]] = True
        return leading

    def lengths(self, start: int, most: int) -> tuple[list[int], bool]:
        """In how many tokens, up to `most`, a text can be spelled that matches; and whether it can be in
        more than that."""
        here = np.arange(len(self.table)) == start
        found, work = list[int](), Work(self.pattern, MOST_STEPS)
        for length in range(1, most + 1):
            work.spend(len(self.edges[0]))
            pause()
            here = self.after(here)
            if not here.any():
                return found, False
            if (here & self.accepting).any():
                found.append(length)
        return found, True


def token_automaton(pattern: str, tokenizer: Tokenizer) -> TokenAutomaton:
    """The automaton of a pattern over a tokenizer's tokens."""
    automaton = AUTOMATA.get((pattern, tokenizer))
    if automaton is None:
        automaton = _token_automaton(pattern, tokenizer)
        AUTOMATA.put((pattern, tokenizer), automaton, automaton.size)
    return automaton


def _token_automaton(pattern: str, tokenizer: Tokenizer) -> TokenAutomaton:
    by_bytes = byte_automaton(pattern)
    inside, first = _spelled(tokenizer)
    steps, pairs = Work(pattern, MOST_STEPS), Work(pattern, MOST_PAIRS)
    number = {DEAD: DEAD, START: START} | ({} if first is inside else {BEGINNING: 2})
    rows, todo = list[tuple[Numbers, Numbers]](), list(number)[1:]
    for state in todo:
        if state == BEGINNING:
            tokens, reached = first.run(by_bytes, START, steps)
        else:
            tokens, reached = inside.run(by_bytes, state, steps)
        pairs.spend(len(tokens))
        for new in np.unique(reached).tolist():
            if new not in number:
                number[new] = len(number)
                todo.append(new)
        rows.append((tokens, reached))
    own = np.zeros(len(by_bytes.table), dtype=np.int64)
    own[[state for state in number if state != BEGINNING]] = [
        own for state, own in number.items() if state != BEGINNING
    ]
    accepting = np.array([state != BEGINNING and by_bytes.accepting[state] for state in number])
    rows = [(tokens, own[reached]) for tokens, reached in rows]
    table, edges, classes = _compressed(rows, tokenizer.size, Work(pattern, MOST_CELLS))
    return TokenAutomaton(pattern, table, accepting, edges, classes, START, number.get(BEGINNING, START))


AUTOMATA = Kept[TokenAutomaton](1 << 26)
"""By pattern and tokenizer."""


class _Texts:
    """The bytes of tokens in sorted order, so that those with the same first byte are neighbours."""

    def __init__(self, spelled: Sequence[bytes | None]) -> None:
        texts = sorted((text, token) for token, text in enumerate(spelled) if text is not None)
        self.tokens = np.array([token for _, token in texts], dtype=np.int64)
        self.length = np.array([len(text) for text, _ in texts], dtype=np.int64)
        longest = int(self.length.max(initial=1))
        padded = b"".join(text.ljust(longest, b"\0") for text, _ in texts)
        self.bytes = np.frombuffer(padded, dtype=np.uint8).reshape(len(texts), longest).T.copy()
        self.empty = int((self.length == 0).sum())
        bounds = np.searchsorted(self.bytes[0, self.empty :], np.arange(257)) + self.empty
        self.begins = [np.arange(first, last) for first, last in itertools.pairwise(bounds.tolist())]

    def run(self, automaton: ByteAutomaton, start: int, work: Work) -> tuple[Numbers, Numbers]:
        """The tokens that do not end dead from a state, and the states that they end in."""
        table = automaton.table
        ended = [(np.arange(self.empty), np.full(self.empty, start))]
        tokens = np.concatenate(
            [self.begins[byte] for byte in np.flatnonzero(table[start])] or [ended[0][0][:0]]
        )
        state = table[start, self.bytes[0, tokens]]
        for place in range(1, len(self.bytes)):
            work.spend(64 + len(tokens))
            more = self.length[tokens] > place
            ended.append((tokens[~more], state[~more]))
            tokens = tokens[more]
            state = table[state[more], self.bytes[place, tokens]]
            alive = state != DEAD
            tokens, state = tokens[alive], state[alive]
            if len(tokens) == 0:
                break
        ended.append((tokens, state))
        reached = np.concatenate([state for _, state in ended]).astype(np.int64)
        tokens = self.tokens[np.concatenate([tokens for tokens, _ in ended])]
        return tokens.astype(np.int32), reached.astype(np.int32)


@lru_cache(maxsize=8)
def _spelled(tokenizer: Tokenizer) -> tuple[_Texts, _Texts]:
    """Of tokens inside a text, and of those that begin it."""
    spelled = spelling(tokenizer)
    inside = _Texts(spelled.inside)
    return inside, inside if spelled.first == spelled.inside else _Texts(spelled.first)


def _compressed(
    rows: list[tuple[Numbers, Numbers]], size: int, work: Work
) -> tuple[Numbers, tuple[Numbers, Numbers], Numbers]:
    """The table [S, K], the edges and the classes [V], given the tokens that fit in each state from 1 on and
    where they lead."""
    states = len(rows) + 1
    kind, kinds = np.zeros(size + 1, dtype=np.int64), 1  # one token more, which fits nowhere: class 0
    for tokens, reached in rows:
        _, new = np.unique(kind[tokens] * states + reached, return_inverse=True)
        kind[tokens] = kinds + new
        kinds += int(new.max(initial=-1)) + 1
    found, classes = np.unique(kind, return_inverse=True)
    classes = classes.reshape(-1)[:size]
    work.spend(states * len(found))
    table = np.zeros((states, len(found)), dtype=np.int64)
    targets = [np.zeros(0, dtype=np.int64)]
    for state, (tokens, reached) in enumerate(rows, start=1):
        table[state, classes[tokens]] = reached
        targets.append(np.unique(table[state])[1:] if len(tokens) else targets[0])
    sources = np.repeat(np.arange(states), [len(each) for each in targets])
    return table, (sources, np.concatenate(targets)), classes
