"""The moves that tokens make in a byte automaton, found for all tokens and all states at once.

What a token does is a function from states to states: a row [S] of the state that is reached from each. Tokens with the
same function are interchangeable, and there are few functions: hundreds where a vocabulary has 150,000 tokens. So the
trie of the tokens' bytes is walked level by level, and only the distinct functions of a level are composed with bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from unmask.data.tokenizers import BaseTokenizer
from unmask.guidance.regex._determinize import ByteDFA, group_equal_rows
from unmask.guidance.regex._token_bytes import token_bytes
from unmask.guidance.regex.limits import WorkBudget

_Ints = NDArray[np.int64]
_Functions = NDArray[np.int16]
"""[F, S]: the state that each function leads to from each state; row 0 is dead everywhere, row 1 the identity."""

_DEAD, _IDENTITY = 0, 1
_MAX_NODES = 1 << 26
"""Nodes of the trie that are visited."""
_MAX_MOVES = 1 << 28
"""States that are moved by a byte: a second."""
_MAX_ENTRIES = 1 << 23
"""States times functions."""
_CHUNK_ENTRIES = 1 << 20


@dataclass(frozen=True)
class _Level:
    """The distinct beginnings of tokens of one length."""

    parents: _Ints
    """The number of each beginning without its last byte, in the level before."""
    bytes: NDArray[np.uint8]
    """The last byte of each."""
    tokens: _Ints
    """The tokens of this length."""
    nodes: _Ints
    """The number of each of them among the beginnings."""


class TokenTrie:
    """The bytes of tokens, given the text of each, or None for a token without text."""

    def __init__(self, token_bytes: Sequence[bytes | None]) -> None:
        texts = sorted((text, token) for token, text in enumerate(token_bytes) if text is not None)
        self.num_tokens = len(token_bytes)
        tokens = np.array([token for _, token in texts], dtype=np.int64)
        lengths = np.array([len(text) for text, _ in texts], dtype=np.int64)
        self.empty = tokens[lengths == 0]
        """The tokens that add nothing."""
        self.levels: list[_Level] = []
        shared = _shared_lengths([text for text, _ in texts])
        parents = np.zeros(len(texts), dtype=np.int64)  # of each token, the number of its beginning in the level before
        for length in range(1, int(lengths.max(initial=0)) + 1):
            long = np.flatnonzero(lengths >= length)  # sorted, so that those that begin alike are neighbours
            is_new = shared[long] < length
            own = np.cumsum(is_new) - 1
            last = np.array([texts[index][0][length - 1] for index in long[is_new].tolist()], dtype=np.uint8)
            ends = lengths[long] == length
            self.levels.append(_Level(parents[long[is_new]], last, tokens[long[ends]], own[ends]))
            parents[long] = own

    def functions(self, dfa: ByteDFA, subject: str) -> tuple[_Ints, _Functions]:
        """The function [V] of each token, 0 if it is allowed nowhere, and all functions."""
        known, kinds = _KnownFunctions(dfa, subject), np.zeros(self.num_tokens, dtype=np.int64)
        kinds[self.empty] = _IDENTITY
        here, visits = np.array([_IDENTITY]), WorkBudget(subject, _MAX_NODES)
        for level in self.levels:
            visits.spend(len(level.parents))
            here = known.after(here[level.parents], level.bytes)
            if not here.any():
                break
            kinds[level.tokens] = here[level.nodes]
        return kinds, known.rows()


class _KnownFunctions:
    """The functions that were found, and their compositions with bytes."""

    def __init__(self, dfa: ByteDFA, subject: str) -> None:
        kinds = group_equal_rows(dfa.transitions.T)
        _, first = np.unique(kinds, return_index=True)
        self.byte_kinds, self.num_byte_kinds = kinds.astype(np.int64), len(first)
        self.table = dfa.transitions[:, first].astype(np.int16)
        self.moves, self.entries = WorkBudget(subject, _MAX_MOVES), WorkBudget(subject, _MAX_ENTRIES)
        self.numbers: dict[bytes, int] = {}
        states = np.arange(len(self.table), dtype=np.int16)
        self._number(np.stack([np.zeros_like(states), states]))

    def after(self, functions: _Ints, last: NDArray[np.uint8]) -> _Ints:
        """The function of each of these, followed by a byte."""
        pairs = functions * self.num_byte_kinds + self.byte_kinds[last]
        is_asked = np.zeros(len(self.numbers) * self.num_byte_kinds, dtype=np.bool_)
        is_asked[pairs] = True
        is_asked[: self.num_byte_kinds] = False  # the dead function stays dead
        asked, found = np.flatnonzero(is_asked), np.zeros(len(is_asked), dtype=np.int64)
        self.moves.spend(len(asked) * len(self.table))
        before, own = self.rows(), np.split(asked, range(0, len(asked), max(1, _CHUNK_ENTRIES // len(self.table))))
        for part in own:
            found[part] = self._number(
                self.table[before[part // self.num_byte_kinds], (part % self.num_byte_kinds)[:, None]]
            )
        after: _Ints = found[pairs]
        return after

    def _number(self, rows: _Functions) -> list[int]:
        numbers = []
        for row in rows:
            name = row.tobytes()
            if name not in self.numbers:
                self.entries.spend(len(row))
                self.numbers[name] = len(self.numbers)
            numbers.append(self.numbers[name])
        return numbers

    def rows(self) -> _Functions:
        """All functions, in the order of their numbers."""
        return np.frombuffer(b"".join(self.numbers), dtype=np.int16).reshape(len(self.numbers), -1)


def _shared_lengths(texts: Sequence[bytes]) -> _Ints:
    """How many bytes each text shares with the one before it."""
    shared = np.zeros(len(texts), dtype=np.int64)
    for index in range(1, len(texts)):
        one, other = texts[index - 1], texts[index]
        length = min(len(one), len(other))
        shared[index] = next((n for n in range(length) if one[n] != other[n]), length)
    return shared


@lru_cache(maxsize=8)
def token_tries(tokenizer: BaseTokenizer) -> tuple[TokenTrie, TokenTrie]:
    """The tokens inside a text, and at its beginning; one object for both if they are equal."""
    bytes_of = token_bytes(tokenizer)
    inside = TokenTrie(bytes_of.inside)
    return inside, inside if bytes_of.at_start == bytes_of.inside else TokenTrie(bytes_of.at_start)
