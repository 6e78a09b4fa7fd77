"""Constrained infilling: the text of a hole must match an expression, with any sampler.

The network predicts each position independently, but a pattern makes the tokens of a hole dependent. So the
queried tokens of a hole are drawn from left to right, each given the ones before it, from the product of the
network's distributions restricted to texts that match (or can still match, if positions of the hole stay masked).
With the pattern as a DFA over tokens this is exact: a backward pass computes, for each queried position and state,
the total probability of all completions that are accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from unmask.context import Context
from unmask.data.tokenizers import BaseTokenizer
from unmask.diffusion.denoiser import DenoiserLike, DenoiserWrapper
from unmask.diffusion.process import LeftToRight
from unmask.guidance._calls import cache_offset, query_indices, resolve_sequence_ids, validate_shape
from unmask.guidance.regex._backward_messages import (
    FREE,
    MAX_MESSAGE_WORK,
    QUERIED,
    LogWeights,
    Transitions,
    backward_pass,
    class_logsumexp,
    transition_plan,
)
from unmask.guidance.regex.limits import WorkBudget, cooperative_yield
from unmask.guidance.regex.token_dfa import IntArray, TokenDFA
from unmask.guidance.structure.structure import Structure
from unmask.types import LogX, NonFiniteError, Positions, RowFn, Times, Tokens

_MAX_CHUNK_LOG_PROBS = 1 << 24
"""Log-probabilities that are passed to the row function at once."""
_EXTRA_SEARCH_TOKENS = 256
"""How many tokens beyond a hole's length are searched for a length that can match, for the error message."""

_MAX_SUM_LOG_PROBS = 1 << 19
"""Log-probabilities that are summed by token class at once."""

Regex: TypeAlias = str | Structure | TokenDFA
"""A regular expression, another structure, or its compiled automaton."""


@dataclass(frozen=True, eq=False)
class _Hole:
    """The positions `begin` to `end` - 1 of a sequence, and the pattern that their text must match."""

    begin: int
    end: int
    dfa: TokenDFA

    @property
    def initial_state(self) -> int:
        """The automaton's state before the hole's first token."""
        return self.dfa.text_start_state if self.begin == 0 else self.dfa.inner_state


@dataclass(eq=False)
class _SpanDraw:
    """The state of drawing the queried tokens of one hole from left to right."""

    hole: _Hole
    """The hole."""
    queries: list[int]
    """Indices of the call's queries in this hole, in the order of their positions."""
    transitions: Transitions
    """The automaton restricted to the queried positions."""
    messages: list[LogWeights] = field(default_factory=list)
    """The backward messages of a group of holes with the same transitions."""
    message_index: int = 0
    """The index of this hole in the group."""
    node: int = 0
    """The node reached by the tokens drawn so far."""

    def future_log_weights(self, step: int) -> LogWeights:
        """[K]: the log-probability of all matching completions after a token of each class at query `step`."""
        weights: LogWeights = self.messages[step][self.message_index, self.transitions[step].from_node(self.node)]
        return weights


class RegexConstraint(DenoiserWrapper):
    """Fills the holes (runs of masks) of a canvas `tokens` [B, L] with texts that match a pattern in full.

    A single pattern applies to all holes; a sequence gives one per hole of every sequence, and None leaves a hole
    unconstrained. A hole's text is what it adds to the decoded sequence: a WordPiece tokenizer begins it with a
    space if a word precedes it. Draws at temperature 1 are from the exact conditional distribution; with other
    sampling params each token is drawn given those before it, and the text matches as well. What must
    match is the text up to the first of the `end_ids`, if there is one. An instance belongs to one canvas, and to one
    sampling run at a time.
    """

    def __init__(
        self,
        denoiser: DenoiserLike,
        tokens: Tokens,
        regex: Regex | Sequence[Regex | None],
        tokenizer: BaseTokenizer,
        end_ids: tuple[int, ...] = (),
    ) -> None:
        super().__init__(denoiser)
        self.tokens, self.current_tokens = tokens, tokens.clone()
        self.hole_ids = torch.full(tokens.shape, -1)
        self.holes: list[_Hole] = []
        for row, ids in enumerate(tokens.tolist()):
            for hole in _find_holes(ids, self.vocab.mask_id, regex, tokenizer, end_ids):
                self.hole_ids[row, hole.begin : hole.end] = len(self.holes)
                self.holes.append(hole)
        _validate_lengths(self.holes)
        self.token_classes = {hole.dfa: self._model_token_classes(hole.dfa) for hole in self.holes}
        fit = np.any([classes > 0 for classes in self.token_classes.values()], axis=0)
        self.live_ids = torch.from_numpy(np.flatnonzero(fit))
        """The ids that are allowed somewhere: only their log-probabilities are kept."""
        self.live_classes = {
            automaton: classes[self.live_ids.numpy()] for automaton, classes in self.token_classes.items()
        }

    def _model_token_classes(self, dfa: TokenDFA) -> IntArray:
        """The class [V] of each of the model's ids, of which there may be more than in the tokenizer."""
        classes = np.zeros(self.vocab.size, dtype=np.int64)
        classes[: len(dfa.token_classes)] = dfa.token_classes
        classes[self.vocab.mask_id] = 0
        return classes

    def __call__(
        self,
        z: Tokens,
        t: Times,
        positions: Positions,
        context: Context = Context(),
        *,
        row_fn: RowFn | None = None,
        sequence_ids: Tensor | None = None,
    ) -> Tensor:
        sequence_ids, start = resolve_sequence_ids(z, sequence_ids), cache_offset(context)
        validate_shape(z, sequence_ids, start, self.tokens.shape, "the holes")
        sequence, position = query_indices(positions)
        position = position + (start or 0)
        owner = self.hole_ids.to(z.device)[sequence_ids[sequence], position]
        text = self._full_tokens(z, sequence_ids, start)
        if not bool((owner >= 0).any()):
            return self.denoiser(z, t, positions, context, row_fn=row_fn, sequence_ids=sequence_ids)
        if row_fn is None and _any_hole_repeats(sequence[owner >= 0], owner[owner >= 0]):
            raise ValueError(
                "the tokens of a hole that must match a pattern depend on each other, so they have no independent"
                " log-probabilities, which this sampler needs for this model: use one that draws tokens by themselves"
                " (confidence, first-hitting), that is, with row_fn=, if the model has one"
            )
        buffer = _RowBuffer(row_fn or _identity, owner >= 0, self.live_ids.to(z.device))
        self.denoiser(z, t, positions, context, row_fn=buffer, sequence_ids=sequence_ids)
        # Built after the network call: a request that waits for its batch should not hold this memory.
        draws = self._span_draws(text, sequence.tolist(), position.tolist(), owner.tolist())
        self._compute_messages(draws, buffer)
        for step in range(max(len(draw.queries) for draw in draws)):
            cooperative_yield()
            self._draw_step([draw for draw in draws if len(draw.queries) > step], step, buffer)
        assert buffer.values is not None
        return buffer.values

    def _full_tokens(self, z: Tokens, sequence_ids: Tensor, offset: int | None) -> Tokens:
        """All tokens [b, L] of a call's sequences; a call with a cache passes only the part that it reads.

        What is read from left to right is one position behind: the token before each.
        """
        behind = isinstance(self.process, LeftToRight)
        if offset is None and not behind:
            return z
        here = sequence_ids.to(self.current_tokens.device)
        if not offset:  # a new run: forget the tokens of an earlier one
            self.current_tokens[here] = self.tokens[here]
        begin = (offset or 0) - behind
        shown = z[:, max(0, -begin) :].to(self.current_tokens.device)
        begin = max(0, begin)
        self.current_tokens[here, begin : begin + shown.shape[1]] = shown
        return self.current_tokens[here]

    def _span_draws(
        self, full_tokens: Tokens, sequence: list[int], position: list[int], hole_ids: list[int]
    ) -> list[_SpanDraw]:
        by_hole: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for query, key in enumerate(zip(sequence, hole_ids, strict=True)):
            if key[1] >= 0:
                by_hole.setdefault(key, []).append((position[query], query))
        draws, ids, mask = [], full_tokens.cpu().numpy(), self.vocab.mask_id
        work: dict[int, WorkBudget] = {}
        for (row, hole_id), queries in by_hole.items():
            hole = self.holes[hole_id]
            written = ids[row, hole.begin : hole.end]
            content = np.where(written == mask, FREE, self.token_classes[hole.dfa][written])
            content[[there - hole.begin for there, _ in queries]] = QUERIED
            moves = transition_plan(hole.dfa, hole.initial_state, tuple(content.tolist()))
            work.setdefault(row, WorkBudget(hole.dfa.subject, MAX_MESSAGE_WORK)).spend(
                sum(len(s.targets) for s in moves)
            )
            draws.append(_SpanDraw(hole, [query for _, query in sorted(queries)], moves))
        return draws

    def _compute_messages(self, draws: list[_SpanDraw], buffer: _RowBuffer) -> None:
        """The backward messages of all draws; those with the same transitions are computed together."""
        groups: dict[int, list[_SpanDraw]] = {}
        for draw in draws:
            groups.setdefault(id(draw.transitions), []).append(draw)
        weights: dict[int, LogWeights] = {}
        for automaton, classes in self.live_classes.items():
            # Messages are sums over later queries: the first query of a hole is in none.
            queries = [query for d in draws if d.hole.dfa is automaton for query in d.queries[1:]]
            if queries:
                kinds = torch.from_numpy(classes).to(buffer.live_ids.device)
                chunk = max(1, _MAX_SUM_LOG_PROBS // len(classes))
                for first in range(0, len(queries), chunk):
                    cooperative_yield()
                    part = queries[first : first + chunk]
                    summed = class_logsumexp(buffer.log_probs(part), kinds, automaton.transitions.shape[1])
                    weights.update(zip(part, summed, strict=True))
        for group in groups.values():
            log_weights = np.array([[weights[query] for query in draw.queries[1:]] for draw in group])
            messages = backward_pass(group[0].transitions, log_weights)
            for index, draw in enumerate(group):
                draw.messages, draw.message_index = messages, index

    def _draw_step(self, draws: list[_SpanDraw], step: int, buffer: _RowBuffer) -> None:
        """Draw the token of query `step` of each hole, given those before it."""
        device, chunk = buffer.live_ids.device, max(1, _MAX_CHUNK_LOG_PROBS // self.vocab.size)
        for first in range(0, len(draws), chunk):
            part = draws[first : first + chunk]
            queries = [draw.queries[step] for draw in part]
            after = np.empty((len(part), len(self.live_ids)))
            for automaton, classes in self.live_classes.items():
                own = [i for i, draw in enumerate(part) if draw.hole.dfa is automaton]
                if own:
                    after[own] = np.stack([part[i].future_log_weights(step) for i in own])[:, classes]
            log_x = buffer.log_probs(queries) + torch.from_numpy(after).to(device)
            log_x = log_x - _checked_logsumexp(log_x)
            full_log_x = log_x.new_full((len(queries), self.vocab.size), -torch.inf)
            full_log_x[:, buffer.live_ids] = log_x
            values = buffer.evaluate(full_log_x, torch.tensor(queries, device=device))
            if step + 1 < max(len(draw.queries) for draw in part):
                for draw, token in zip(part, _token_ids(values), strict=True):
                    draw.node = int(
                        draw.transitions[step].from_node(draw.node)[self.token_classes[draw.hole.dfa][token]]
                    )


def _any_hole_repeats(sequence: Tensor, hole_ids: Tensor) -> bool:
    """Whether two queries are in the same hole."""
    pairs = list(zip(sequence.tolist(), hole_ids.tolist(), strict=True))
    return len(set(pairs)) < len(pairs)


class _RowBuffer:
    """A row function that stores the rows of constrained queries, restricted to live ids, and applies `row_fn` to
    the others."""

    def __init__(self, row_fn: RowFn, constrained: Tensor, live_ids: Tensor) -> None:
        self.row_fn, self.constrained, self.live_ids = row_fn, constrained, live_ids
        self.slot = constrained.cumsum(0) - 1
        self.buffer: Tensor | None = None
        self.values: Tensor | None = None

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Tensor:
        query = torch.arange(len(self.constrained), device=self.constrained.device)[indices]
        constrained = self.constrained[query]
        if self.buffer is None:
            self.buffer = log_x.new_empty(int(self.constrained.sum()), len(self.live_ids))
        self.buffer[self.slot[query[constrained]]] = log_x[constrained][:, self.live_ids]
        if not bool(constrained.all()):
            self.evaluate(log_x[~constrained], query[~constrained])
        return log_x.amax(-1)  # any value per row that is NaN if the row is: the denoiser checks it

    def log_probs(self, queries: Sequence[int]) -> Tensor:
        """The stored rows, float64 [n, live ids]."""
        assert self.buffer is not None
        return self.buffer[self.slot[torch.tensor(queries, device=self.slot.device)]].double()

    def evaluate(self, log_x: LogX, queries: Tensor) -> Tensor:
        """The values of `row_fn` for these queries, which are also stored in `values`."""
        values = self.row_fn(log_x, queries)
        if self.values is None:
            self.values = values.new_empty(len(self.constrained), *values.shape[1:])
        self.values[queries] = values.to(self.values)
        return values


def _identity(log_x: LogX, _: slice | Tensor) -> Tensor:
    return log_x


def _checked_logsumexp(log_x: LogX) -> Tensor:
    """log sum exp [n, 1] of rows; an error if a row leaves no probability to any match."""
    total = log_x.logsumexp(-1, keepdim=True)
    if bool(total.isnan().any()):
        raise NonFiniteError("the network's log-probabilities are NaN; its weights are damaged")
    if bool((total == -torch.inf).any()):
        raise ValueError(
            "no text that matches the pattern of a hole has a probability above 0, given the network and the banned"
            " tokens; allow more tokens, or use another pattern"
        )
    return total


def _token_ids(values: Tensor) -> list[int]:
    """The drawn tokens in the values of a sampler's row function: the values, or their first column."""
    if values.ndim == 1 and values.is_floating_point():
        raise ValueError(
            "the tokens of a hole that must match a pattern are drawn one after the other, so row_fn= must return"
            " token ids (int64 [N], or the first column of [N, k]); got one floating-point number per query"
        )
    return (values if values.ndim == 1 else values[:, 0]).long().tolist()


def _find_holes(
    ids: list[int],
    mask_id: int,
    regex: Regex | Sequence[Regex | None],
    tokenizer: BaseTokenizer,
    end_ids: tuple[int, ...],
) -> list[_Hole]:
    """The runs of masks that have a pattern."""
    runs, begin = [], 0
    for masked, run in itertools.groupby(ids, lambda id_: id_ == mask_id):
        length = len(list(run))
        runs += [(begin, begin + length)] if masked else []
        begin += length
    patterns = [regex] * len(runs) if isinstance(regex, str | Structure | TokenDFA) else list(regex)
    if len(patterns) != len(runs):
        raise ValueError(f"give one pattern, or one per hole ({len(runs)}); got {len(patterns)}")
    return [
        _Hole(first, last, _compiled(wanted, tokenizer, end_ids))
        for (first, last), wanted in zip(runs, patterns, strict=True)
        if wanted is not None
    ]


def _compiled(wanted: Regex, tokenizer: BaseTokenizer, end_ids: tuple[int, ...]) -> TokenDFA:
    structure = Structure.regex(wanted) if isinstance(wanted, str) else wanted
    dfa = structure if isinstance(structure, TokenDFA) else TokenDFA.compile(structure, tokenizer)
    return dfa.with_ends(end_ids) if end_ids else dfa


def _validate_lengths(holes: list[_Hole]) -> None:
    """ValueError for a hole that is too short or too long for its pattern."""
    for automaton, start, length in {(h.dfa, h.initial_state, h.end - h.begin) for h in holes}:
        possible, _ = automaton.match_lengths(start, length)
        if length in possible:
            continue
        possible, more = automaton.match_lengths(start, length + _EXTRA_SEARCH_TOKENS)
        if not possible and more:
            raise ValueError(
                f"a hole of {length} tokens cannot match {automaton.subject}, and neither can one of up to"
                f" {length + _EXTRA_SEARCH_TOKENS} tokens"
            )
        if not possible:
            raise ValueError(f"no sequence of the tokenizer's tokens matches {automaton.subject}")
        near = min(possible, key=lambda other: abs(other - length))
        raise ValueError(
            f"a hole of {length} tokens cannot match {automaton.subject}, which needs at least"
            f" {possible[0]} tokens; the nearest length that can match is {near}"
        )
