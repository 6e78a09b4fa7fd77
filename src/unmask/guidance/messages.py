"""How much probability is left after each place of a hole: sums over all texts that match a pattern."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.guidance.automaton import Flags, Numbers, TokenAutomaton
from unmask.guidance.bounds import Kept, Work
from unmask.guidance.pausing import pause

Weights: TypeAlias = NDArray[np.float64]

Moves: TypeAlias = tuple[Numbers, ...]
"""For each asked place [n, K]: to which of the next place's nodes a class of tokens leads from each of
n nodes; -1 if nothing that follows can match."""

ASKED, OPEN = -1, -2
"""What may stand in a place of a hole beside the class of the token that is written there."""

AT_ONCE = 1 << 20
LARGEST = 1 << 27
MOST_WORK = 1 << 24
"""Numbers that the sums of one call for one text are made of: a few tenths of a second."""


def plan(automaton: TokenAutomaton, start: int, content: tuple[int, ...]) -> Moves:
    """Where tokens lead at the asked places of a hole.

    A node is a set of states: those that the open places before it allow. Of a set only what can still be
    accepted after the rest of the hole is kept, so that a node says nothing but: this can still match.
    """
    moves = PLANS.get((automaton, start, content))
    if moves is None:
        moves = _plan(automaton, start, content, Work(automaton.pattern, MOST_WORK))
        PLANS.put((automaton, start, content), moves, sum(step.nbytes for step in moves))
    return moves


PLANS = Kept[Moves](1 << 26)


def _plan(automaton: TokenAutomaton, start: int, content: tuple[int, ...], work: Work) -> Moves:
    can = _can_end(automaton, content, work)
    if not can[0][start]:
        raise ValueError(f"what is written in a hole leaves no text that matches {automaton.pattern!r}")
    nodes: Numbers | Flags = np.array([start])  # single states [n] or, after open places, sets of them [n, S]
    moves: list[Numbers] = []
    last = max(place for place, what in enumerate(content) if what == ASKED)
    for place, what in enumerate(content[: last + 1]):
        pause()
        if what == ASKED:
            step, nodes = _images(automaton, nodes, can[place + 1], work)
            moves.append(step)
            continue
        if what != OPEN and nodes.ndim == 1:
            nodes, same = np.unique(automaton.table[nodes, what], return_inverse=True)
        else:
            sets = _moved(automaton, _as_sets(nodes, len(automaton.table)), what, work) & can[place + 1]
            work.spend(sets.size // 8)
            nodes, same = _different(np.packbits(sets, axis=1), len(automaton.table))
        if moves:
            moves[-1] = np.where(moves[-1] < 0, -1, same.astype(np.int32)[moves[-1]])
    moves[-1] = np.minimum(moves[-1], 0)  # that it can end is all that matters
    return tuple(moves)


def _can_end(automaton: TokenAutomaton, content: tuple[int, ...], work: Work) -> list[Flags]:
    """For each place, and after the last, the states from which the rest of the hole can be accepted."""
    can = [automaton.accepting]
    for what in reversed(content):
        pause()
        if what >= 0:
            can.append(can[-1][automaton.table[:, what]])
        else:
            work.spend(len(automaton.edges[0]) // 8)
            can.append(automaton.before(can[-1]))
    return can[::-1]


def _as_sets(nodes: Numbers | Flags, states: int) -> Flags:
    return nodes if nodes.ndim == 2 else nodes[:, None] == np.arange(states)  # type: ignore[return-value]


def _moved(automaton: TokenAutomaton, nodes: Flags, what: int, work: Work) -> Flags:
    """The sets of states [n, S] after a token of some class, or after any token."""
    work.spend(len(nodes) * ((len(automaton.edges[0]) if what == OPEN else len(automaton.table)) // 8 + 1))
    moved = np.zeros_like(nodes)
    for node, states in zip(moved, nodes, strict=True):
        pause()
        if what == OPEN:
            node |= automaton.after(states)
        else:
            node[automaton.table[states, what]] = True
    return moved


def _images(
    automaton: TokenAutomaton, nodes: Numbers | Flags, can: Flags, work: Work
) -> tuple[Numbers, Numbers | Flags]:
    """For states [n] or sets of them [n, S] where each class leads [n, K], and what is reached."""
    table = automaton.table
    if nodes.ndim == 2 and bool((nodes.sum(1) == 1).all()):
        nodes = nodes.argmax(1)
    work.spend(len(nodes) * table.shape[1])
    if nodes.ndim == 1:
        reached = table[nodes]
        states = np.unique(reached[can[reached]])
        number = np.full(len(table), -1, dtype=np.int32)
        number[states] = np.arange(len(states))
        return number[reached], states
    if nodes.size * table.shape[1] > LARGEST:
        raise ValueError(
            f"the pattern {automaton.pattern!r} has too many states for a hole that is written with gaps;"
            " use a sampler that asks for all of its places, as Confidence does, or for one, as FirstHitting"
        )
    every = np.arange(len(table))
    bits = np.zeros((len(table), -(-len(table) // 8)), dtype=np.uint8)  # a set of each state alone, packed
    bits[every, every // 8] = np.where(can, 128 >> (every % 8), 0)
    images = np.zeros((len(nodes), table.shape[1], bits.shape[1]), dtype=np.uint8)
    work.spend(int(nodes.sum()) * images[0].size // 64 + images.size // 8)
    for state in np.flatnonzero(nodes.any(0)):
        pause()
        images[nodes[:, state]] |= bits[table[state]]
    sets, number = _different(images.reshape(-1, bits.shape[1]), len(table))
    empty = ~sets.any(1)
    rank = np.where(empty, -1, np.cumsum(~empty) - 1).astype(np.int32)
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
        pause()
        parts = np.array_split(np.arange(len(own)), min(len(own), -(-len(own) * step.size // AT_ONCE)))
        left = [_log_sum_exp(later[-1][part[:, None, None], step] + own[part]) for part in parts]
        later.append(np.concatenate([np.concatenate(left), nothing], 1))
    return later[::-1]


def _log_sum_exp(score: Weights) -> Weights:
    top = score.max(-1, keepdims=True)
    top[np.isneginf(top)] = 0
    with np.errstate(divide="ignore"):
        result: Weights = np.log(np.exp(score - top).sum(-1)) + top[..., 0]
    return result
