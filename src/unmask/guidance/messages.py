"""How much probability is left after each place of a hole: sums over all texts that match a pattern."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.guidance.automaton import Flags, Numbers, TokenAutomaton

Weights: TypeAlias = NDArray[np.float64]

Moves: TypeAlias = tuple[Numbers, ...]
"""For each asked place [n, K]: to which of the next place's nodes a class of tokens leads from each of
n nodes; -1 if nothing that follows can match."""

ASKED, OPEN = -1, -2
"""What may stand in a place of a hole beside the class of the token that is written there."""

AT_ONCE = 1 << 24
LARGEST = 1 << 27


@lru_cache(maxsize=1 << 8)
def plan(automaton: TokenAutomaton, start: int, content: tuple[int, ...]) -> Moves:
    """Where tokens lead at the asked places of a hole.

    A node is a set of states: those that the open places before it allow. Of a set only what can still be
    accepted after the rest of the hole is kept, so that a node says nothing but: this can still match.
    """
    can = _can_end(automaton, content)
    nodes: Flags = (np.arange(len(automaton.table)) == start)[None] & can[0]
    if not nodes.any():
        raise ValueError(f"what is written in a hole leaves no text that matches {automaton.pattern!r}")
    moves: list[Numbers] = []
    last = max(place for place, what in enumerate(content) if what == ASKED)
    for place, what in enumerate(content[: last + 1]):
        if what == ASKED:
            step, nodes = _images(automaton, nodes, can[place + 1])
            moves.append(step)
            continue
        nodes = _moved(automaton, nodes, what) & can[place + 1]
        if moves:
            nodes, same = _different(np.packbits(nodes, axis=1), len(automaton.table))
            moves[-1] = np.where(moves[-1] < 0, -1, same[moves[-1]])
    moves[-1] = np.minimum(moves[-1], 0)  # that it can end is all that matters
    return tuple(moves)


def _can_end(automaton: TokenAutomaton, content: tuple[int, ...]) -> list[Flags]:
    """For each place, and after the last, the states from which the rest of the hole can be accepted."""
    can = [automaton.accepting]
    for what in reversed(content):
        if what >= 0:
            can.append(can[-1][automaton.table[:, what]])
        else:
            can.append(np.asarray(automaton.reach[:, can[-1]].any(1)))
    return can[::-1]


def _moved(automaton: TokenAutomaton, nodes: Flags, what: int) -> Flags:
    """The sets of states [n, S] after a token of some class, or after any token."""
    moved = np.zeros_like(nodes)
    for node, states in zip(moved, nodes, strict=True):
        if what == OPEN:
            node |= automaton.reach[states].any(0)
        else:
            node[automaton.table[states, what]] = True
    return moved


def _images(automaton: TokenAutomaton, nodes: Flags, can: Flags) -> tuple[Numbers, Flags]:
    """For sets of states [n, S] where each class leads [n, K], and the sets that are reached."""
    table = automaton.table
    if bool((nodes.sum(1) == 1).all()):
        reached = table[nodes.argmax(1)]
        states = np.unique(reached[can[reached]])
        number = np.full(len(table), -1)
        number[states] = np.arange(len(states))
        return number[reached], states[:, None] == np.arange(len(table))
    if nodes.size * table.shape[1] > LARGEST:
        raise ValueError(
            f"the pattern {automaton.pattern!r} has too many states for a hole that is written with gaps;"
            " use a sampler that asks for all of its places, as Confidence does, or for one, as FirstHitting"
        )
    every = np.arange(len(table))
    bits = np.zeros((len(table), -(-len(table) // 8)), dtype=np.uint8)  # a set of each state alone, packed
    bits[every, every // 8] = np.where(can, 128 >> (every % 8), 0)
    images = np.zeros((len(nodes), table.shape[1], bits.shape[1]), dtype=np.uint8)
    for state in np.flatnonzero(nodes.any(0)):
        images[nodes[:, state]] |= bits[table[state]]
    sets, number = _different(images.reshape(-1, bits.shape[1]), len(table))
    empty = ~sets.any(1)
    rank = np.where(empty, -1, np.cumsum(~empty) - 1)
    return rank[number].reshape(len(nodes), -1), sets[~empty]


def _different(packed: NDArray[np.uint8], states: int) -> tuple[Flags, Numbers]:
    """The different sets, unpacked, and which of them each row is."""
    known: dict[bytes, int] = {}
    names = np.ascontiguousarray(packed).view(f"V{packed.shape[1]}")[:, 0].tolist()
    number = [known.setdefault(name, len(known)) for name in names]
    sets = np.frombuffer(b"".join(known), dtype=np.uint8).reshape(len(known), -1)
    return np.unpackbits(sets, axis=1, count=states).astype(np.bool_), np.array(number, dtype=np.int64)


def sums(lines: Tensor, kinds: Tensor, classes: int) -> Weights:
    """log sum exp over the tokens of each class [n, K], for lines [n, tokens] and the tokens' classes."""
    kinds = kinds.expand(lines.shape)
    top = lines.new_full((len(lines), classes), -torch.inf).scatter_reduce_(1, kinds, lines, "amax")
    scaled = (lines - top.gather(1, kinds)).nan_to_num(nan=0.0).exp_()
    total = torch.zeros_like(top).scatter_add_(1, kinds, scaled)
    result: Weights = (top + total.log()).cpu().numpy()
    return result


def messages(moves: Moves, weights: Weights) -> list[Weights]:
    """After each asked place, the log-probability [holes, n + 1] of all that follows from each node, for
    weights [holes, places - 1, K] of all places but the first. The last entry, -inf, is what -1 leads to."""
    nothing = np.full((len(weights), 1), -np.inf)
    later = [np.concatenate([np.zeros_like(nothing), nothing], 1)]
    for place in reversed(range(1, len(moves))):
        own, step = weights[:, place - 1, None], moves[place]
        parts = np.array_split(np.arange(len(own)), -(-len(own) * step.size // AT_ONCE))
        left = [_log_sum_exp(later[-1][part[:, None, None], step] + own[part]) for part in parts]
        later.append(np.concatenate([np.concatenate(left), nothing], 1))
    return later[::-1]


def _log_sum_exp(score: Weights) -> Weights:
    top = score.max(-1, keepdims=True)
    top[np.isneginf(top)] = 0
    with np.errstate(divide="ignore"):
        result: Weights = np.log(np.exp(score - top).sum(-1)) + top[..., 0]
    return result
