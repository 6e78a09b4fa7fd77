"""Backward messages: the total probability of all accepted continuations of a hole, from each state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.guidance.regex.limits import LRUCache, WorkBudget, cooperative_yield
from unmask.guidance.regex.token_dfa import BoolArray, IntArray, TokenDFA

LogWeights: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Moves:
    """The moves from each of n nodes to the nodes of the next queried position that can still be accepted.

    Those of node i are the entries `begins[i]` to `begins[i + 1]` - 1, of which there is at least one.
    """

    begins: IntArray
    """[n + 1]"""
    classes: IntArray
    """[E]: the token class of each move."""
    targets: IntArray
    """[E]: the node that it leads to."""
    num_classes: int

    @classmethod
    def from_table(cls, table: IntArray) -> Moves:
        """The moves of a table [n, K] of nodes; -1 is none."""
        nodes, classes = np.nonzero(table >= 0)
        begins = np.searchsorted(nodes, np.arange(len(table) + 1))
        return cls(begins, classes.astype(np.int32), table[nodes, classes].astype(np.int32), table.shape[1])

    @property
    def num_bytes(self) -> int:
        """The size of the arrays in bytes."""
        return self.begins.nbytes + self.classes.nbytes + self.targets.nbytes

    def from_node(self, node: int) -> IntArray:
        """[K]: the node that each class leads to; -1 is none."""
        here = slice(self.begins[node], self.begins[node + 1])
        reached = np.full(self.num_classes, -1)
        reached[self.classes[here]] = self.targets[here]
        return reached


Transitions: TypeAlias = tuple[Moves, ...]
"""The moves at each queried position."""

QUERIED, FREE = -1, -2
"""The content of a position that is queried, or masked and not queried; otherwise it is the class of its token."""

_MAX_CHUNK_SCORES = 1 << 20
_MAX_SET_ENTRIES = 1 << 27
MAX_MESSAGE_WORK = 1 << 24
"""Terms summed in one call for one text: a few tenths of a second."""
_MAX_PLAN_WORK = 1 << 26
"""Elementary steps for finding the moves of one text: half a second."""
_ADVICE = "use shorter holes, more steps, or a sampler that queries all positions of a hole at once (confidence)"


def transition_plan(dfa: TokenDFA, state: int, content: tuple[int, ...]) -> Transitions:
    """The transitions at the queried positions of a hole.

    A node is the set of states that are reachable before a queried position, over all tokens of free positions before
    it. States from which the rest of the hole cannot be accepted are dropped.
    """
    return _PLAN_CACHE.get_or_build(
        (dfa, state, content),
        lambda: _build_plan(dfa, state, content, WorkBudget(dfa.subject, _MAX_PLAN_WORK, _ADVICE)),
        lambda plan: sum(step.num_bytes for step in plan),
    )


_PLAN_CACHE = LRUCache[Transitions](1 << 26)


def _build_plan(dfa: TokenDFA, initial_state: int, content: tuple[int, ...], budget: WorkBudget) -> Transitions:
    can = _can_accept(dfa, content, budget)
    if not can[0][initial_state]:
        raise ValueError(f"the tokens already in a hole rule out every match of {dfa.subject}")
    # States [n] or, after free positions, sets of states [n, S].
    nodes: IntArray | BoolArray = np.array([initial_state])
    moves: list[Moves] = []
    last = max(index for index, symbol in enumerate(content) if symbol == QUERIED)
    for index, symbol in enumerate(content[: last + 1]):
        cooperative_yield()
        if symbol == QUERIED:
            table, nodes = _successors(dfa, nodes, can[index + 1], budget)
            moves.append(Moves.from_table(table))
            continue
        if symbol != FREE and nodes.ndim == 1:
            nodes, same = np.unique(dfa.transitions[nodes, symbol], return_inverse=True)
        else:
            sets = _step_sets(dfa, _to_state_sets(nodes, len(dfa.transitions)), symbol, budget) & can[index + 1]
            budget.spend(sets.size // 8)
            nodes, same = _unique_sets(np.packbits(sets, axis=1), len(dfa.transitions))
        if moves:
            moves[-1] = replace(moves[-1], targets=same.astype(np.int32)[moves[-1].targets])
    moves[-1] = replace(
        moves[-1], targets=np.zeros_like(moves[-1].targets)
    )  # one final node: whether a match is still possible is all that matters
    return tuple(moves)


def _can_accept(dfa: TokenDFA, content: tuple[int, ...], budget: WorkBudget) -> list[BoolArray]:
    """For each position, and after the last, the states [S] from which the rest of the hole can be accepted."""
    can = [dfa.accepting]
    for symbol in reversed(content):
        cooperative_yield()
        if symbol >= 0:
            can.append(can[-1][dfa.transitions[:, symbol]])
        else:
            budget.spend(len(dfa.edges[0]) // 8)
            can.append(dfa.predecessors(can[-1]))
    return can[::-1]


def _to_state_sets(nodes: IntArray | BoolArray, num_states: int) -> BoolArray:
    return nodes if nodes.ndim == 2 else nodes[:, None] == np.arange(num_states)  # type: ignore[return-value]


def _step_sets(dfa: TokenDFA, nodes: BoolArray, symbol: int, budget: WorkBudget) -> BoolArray:
    """The sets of states [n, S] after a token of class `symbol`, or after any token if it is FREE."""
    budget.spend(len(nodes) * ((len(dfa.edges[0]) if symbol == FREE else len(dfa.transitions)) // 8 + 1))
    moved = np.zeros_like(nodes)
    for node, states in zip(moved, nodes, strict=True):
        cooperative_yield()
        if symbol == FREE:
            node |= dfa.successors(states)
        else:
            node[dfa.transitions[states, symbol]] = True
    return moved


def _successors(
    dfa: TokenDFA, nodes: IntArray | BoolArray, can_accept: BoolArray, budget: WorkBudget
) -> tuple[IntArray, IntArray | BoolArray]:
    """The node [n, K] that each class leads to from states [n] or sets of states [n, S], and the nodes reached."""
    table = dfa.transitions
    if nodes.ndim == 2 and bool((nodes.sum(1) == 1).all()):
        nodes = nodes.argmax(1)
    budget.spend(len(nodes) * table.shape[1] // 8 + 1)
    if nodes.ndim == 1:
        reached = table[nodes]
        states = np.unique(reached[can_accept[reached]])
        number = np.full(len(table), -1, dtype=np.int32)
        number[states] = np.arange(len(states))
        return number[reached], states
    if nodes.size * table.shape[1] > _MAX_SET_ENTRIES:
        raise ValueError(
            f"{dfa.subject} has too many states for a hole that is filled in several steps;"
            " use a sampler that queries all positions of a hole at once (Confidence), or one (FirstHitting)"
        )
    every = np.arange(len(table))
    bits = np.zeros((len(table), -(-len(table) // 8)), dtype=np.uint8)  # the singleton set of each state, packed
    bits[every, every // 8] = np.where(can_accept, 128 >> (every % 8), 0)
    images = np.zeros((len(nodes), table.shape[1], bits.shape[1]), dtype=np.uint8)
    budget.spend(int(nodes.sum()) * images[0].size // 64 + images.size // 8)
    for state in np.flatnonzero(nodes.any(0)):
        cooperative_yield()
        images[nodes[:, state]] |= bits[table[state]]
    sets, number = _unique_sets(images.reshape(-1, bits.shape[1]), len(table))
    empty = ~sets.any(1)
    rank = np.where(empty, -1, np.cumsum(~empty) - 1).astype(np.int32)
    return rank[number].reshape(len(nodes), -1), sets[~empty]


def _unique_sets(packed: NDArray[np.uint8], num_states: int) -> tuple[BoolArray, IntArray]:
    """The distinct sets, unpacked, and the index of each row in them."""
    known: dict[bytes, int] = {}
    names = np.ascontiguousarray(packed).view(f"V{packed.shape[1]}")[:, 0].tolist()
    number = [known.setdefault(name, len(known)) for name in names]
    sets = np.frombuffer(b"".join(known), dtype=np.uint8).reshape(len(known), -1)
    return np.unpackbits(sets, axis=1, count=num_states).astype(np.bool_), np.array(number, dtype=np.int64)


def class_logsumexp(log_x: Tensor, token_classes: Tensor, num_classes: int) -> LogWeights:
    """log sum exp over the tokens of each class [n, K], of log_x [n, tokens] with the tokens' classes [tokens]."""
    token_classes = token_classes.expand(log_x.shape)
    top = log_x.new_full((len(log_x), num_classes), -torch.inf).scatter_reduce_(1, token_classes, log_x, "amax")
    scaled = (log_x - top.gather(1, token_classes)).nan_to_num(nan=0.0).exp_()
    total = torch.zeros_like(top).scatter_add_(1, token_classes, scaled)
    result: LogWeights = (top + total.log()).cpu().numpy()
    return result


def backward_pass(transitions: Transitions, log_weights: LogWeights) -> list[LogWeights]:
    """After each queried position, the log-probability [holes, n + 1] of all accepted continuations from each node.

    `log_weights` [holes, positions - 1, K] are those of all queried positions but the first. The last entry of a
    message, -inf, is the one that the index -1 refers to.
    """
    nothing = np.full((len(log_weights), 1), -np.inf)
    messages = [np.concatenate([np.zeros_like(nothing), nothing], 1)]
    for index in reversed(range(1, len(transitions))):
        own, moves = log_weights[:, index - 1], transitions[index]
        cooperative_yield()
        chunks = min(len(own), -(-len(own) * len(moves.targets) // _MAX_CHUNK_SCORES))
        parts = np.array_split(np.arange(len(own)), chunks)
        sums = [
            _summed_by_node(messages[-1][part][:, moves.targets] + own[part][:, moves.classes], moves) for part in parts
        ]
        messages.append(np.concatenate([np.concatenate(sums), nothing], 1))
    return messages[::-1]


def _summed_by_node(scores: LogWeights, moves: Moves) -> LogWeights:
    """log sum exp [holes, n] over the moves of each node."""
    begins = moves.begins[:-1]
    top = np.maximum.reduceat(scores, begins, axis=1)
    top[np.isneginf(top)] = 0
    scaled = np.exp(scores - np.repeat(top, np.diff(moves.begins), axis=1))
    with np.errstate(divide="ignore"):
        result: LogWeights = np.log(np.add.reduceat(scaled, begins, axis=1)) + top
    return result
