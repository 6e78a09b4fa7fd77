"""Holes whose text must match a regular expression, whatever the sampler.

The network's lines know nothing of each other, and a pattern ties the tokens of a hole together. So those
that a call asks for are drawn one after the other, each given those before it: from the product of their
lines, restricted to texts that match, or that still can where places are left open. With the pattern as an
automaton over tokens that is exact: a message says how much probability is left after each place, in each
state.
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
from unmask.guidance.regex.token_dfa import IntArray, TokenDFA, token_dfa
from unmask.types import LogX, NonFiniteError, Positions, RowFn, Times, Tokens

_MAX_CHUNK_LOG_PROBS = 1 << 24
"""Log-probabilities that are handed out at a time."""
_EXTRA_SEARCH_TOKENS = 256
"""By how many tokens a hole may be too short to be told the length that can match."""

_MAX_SUM_LOG_PROBS = 1 << 19
"""Log-probabilities that are summed by classes at a time."""

Regex: TypeAlias = str | TokenDFA
"""A regular expression, or what has been made of it already."""


@dataclass(frozen=True, eq=False)
class _Hole:
    """The places `first` to `last` - 1 of a sequence, with the pattern of their text."""

    begin: int
    end: int
    dfa: TokenDFA

    @property
    def initial_state(self) -> int:
        """The automaton's state before the hole."""
        return self.dfa.text_start_state if self.begin == 0 else self.dfa.inner_state


@dataclass(eq=False)
class _SpanDraw:
    """What a call asks for in a hole: its lines in the order of their places, and where tokens lead."""

    hole: _Hole
    queries: list[int]
    transitions: Transitions
    messages: list[LogWeights] = field(default_factory=list)
    """The messages of some holes, of which this is one by `number`."""
    message_index: int = 0
    node: int = 0

    def future_log_weights(self, step: int) -> LogWeights:
        """[K]: how much probability a token of each class at an asked place leaves to those after it."""
        left: LogWeights = self.messages[step][self.message_index, self.transitions[step][self.node]]
        return left


class RegexConstraint(DenoiserWrapper):
    """The holes of a canvas `tokens` [B, L], runs of masks, filled with texts that match a pattern in full.

    One pattern is for all holes; of several, each is for one hole of every sequence, and None for a hole that
    may hold anything. A hole's text is what it adds to the decoded sequence: after other words, a WordPiece
    tokenizer begins it with a space. Sums are exact for draws at temperature 1; any other choice of tokens
    is made place by place, and matches too. It belongs to one canvas, and to one run at a time.
    """

    def __init__(
        self,
        denoiser: DenoiserLike,
        tokens: Tokens,
        regex: Regex | Sequence[Regex | None],
        tokenizer: BaseTokenizer,
    ) -> None:
        super().__init__(denoiser)
        self.tokens, self.current_tokens = tokens, tokens.clone()
        self.hole_ids = torch.full(tokens.shape, -1)
        self.holes: list[_Hole] = []
        for row, ids in enumerate(tokens.tolist()):
            for hole in _find_holes(ids, self.vocab.mask_id, regex, tokenizer):
                self.hole_ids[row, hole.begin : hole.end] = len(self.holes)
                self.holes.append(hole)
        _validate_lengths(self.holes)
        self.token_classes = {hole.dfa: self._model_token_classes(hole.dfa) for hole in self.holes}
        fit = np.any([classes > 0 for classes in self.token_classes.values()], axis=0)
        self.live_ids = torch.from_numpy(np.flatnonzero(fit))
        """The ids that fit anywhere: of no other need the log-probability be kept."""
        self.live_classes = {
            automaton: classes[self.live_ids.numpy()] for automaton, classes in self.token_classes.items()
        }

    def _model_token_classes(self, dfa: TokenDFA) -> IntArray:
        """The class [V] of each of the model's ids, which may be more than the tokenizer's."""
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
        sequence, place = query_indices(positions)
        place = place + (start or 0)
        owner = self.hole_ids.to(z.device)[sequence_ids[sequence], place]
        text = self._full_tokens(z, sequence_ids, start)
        if not bool((owner >= 0).any()):
            return self.denoiser(z, t, positions, context, row_fn=row_fn, sequence_ids=sequence_ids)
        if row_fn is None and _any_hole_repeats(sequence[owner >= 0], owner[owner >= 0]):
            raise ValueError(
                "the tokens of a hole that must match a pattern depend on each other, so they cannot be given"
                " as lines; ask with row_fn= for tokens, or for one place of a hole at a time"
            )
        heard = _RowBuffer(row_fn or _identity, owner >= 0, self.live_ids.to(z.device))
        self.denoiser(z, t, positions, context, row_fn=heard, sequence_ids=sequence_ids)
        # Only now: who waits for an answer should not keep what it will need in memory.
        draws = self._span_draws(text, sequence.tolist(), place.tolist(), owner.tolist())
        self._compute_messages(draws, heard)
        for number in range(max(len(draw.queries) for draw in draws)):
            cooperative_yield()
            self._draw_step([draw for draw in draws if len(draw.queries) > number], number, heard)
        assert heard.values is not None
        return heard.values

    def _full_tokens(self, z: Tokens, sequence_ids: Tensor, offset: int | None) -> Tokens:
        """The whole text [b, L] of a call's sequences; beside a cache, a call shows only what has changed."""
        if offset is None:
            return z
        here = sequence_ids.to(self.current_tokens.device)
        if offset == 0:  # whatever an earlier run wrote after it
            self.current_tokens[here] = self.tokens[here]
        self.current_tokens[here, offset : offset + z.shape[1]] = z.to(self.current_tokens.device)
        return self.current_tokens[here]

    def _span_draws(
        self, full_tokens: Tokens, sequence: list[int], position: list[int], hole_ids: list[int]
    ) -> list[_SpanDraw]:
        lines: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for line, key in enumerate(zip(sequence, hole_ids, strict=True)):
            if key[1] >= 0:
                lines.setdefault(key, []).append((position[line], line))
        draws, ids, mask = [], full_tokens.cpu().numpy(), self.vocab.mask_id
        work: dict[int, WorkBudget] = {}
        for (row, number), places in lines.items():
            hole = self.holes[number]
            written = ids[row, hole.begin : hole.end]
            content = np.where(written == mask, FREE, self.token_classes[hole.dfa][written])
            content[[there - hole.begin for there, _ in places]] = QUERIED
            moves = transition_plan(hole.dfa, hole.initial_state, tuple(content.tolist()))
            work.setdefault(row, WorkBudget(hole.dfa.pattern, MAX_MESSAGE_WORK)).spend(sum(s.size for s in moves))
            draws.append(_SpanDraw(hole, [line for _, line in sorted(places)], moves))
        return draws

    def _compute_messages(self, draws: list[_SpanDraw], buffer: _RowBuffer) -> None:
        """The messages of all draws: those with the same moves at once."""
        groups: dict[int, list[_SpanDraw]] = {}
        for draw in draws:
            groups.setdefault(id(draw.transitions), []).append(draw)
        weights: dict[int, LogWeights] = {}
        for automaton, classes in self.live_classes.items():
            # What is drawn first needs no message of its own.
            lines = [line for d in draws if d.hole.dfa is automaton for line in d.queries[1:]]
            if lines:
                kinds = torch.from_numpy(classes).to(buffer.live_ids.device)
                at_once = max(1, _MAX_SUM_LOG_PROBS // len(classes))
                for first in range(0, len(lines), at_once):
                    cooperative_yield()
                    part = lines[first : first + at_once]
                    summed = class_logsumexp(buffer.log_probs(part), kinds, automaton.transitions.shape[1])
                    weights.update(zip(part, summed, strict=True))
        for group in groups.values():
            weighed = np.array([[weights[line] for line in draw.queries[1:]] for draw in group])
            later = backward_pass(group[0].transitions, weighed)
            for number, draw in enumerate(group):
                draw.messages, draw.message_index = later, number

    def _draw_step(self, draws: list[_SpanDraw], step: int, buffer: _RowBuffer) -> None:
        """Draw the asked token `number` of each hole, given those before it."""
        device, at_once = buffer.live_ids.device, max(1, _MAX_CHUNK_LOG_PROBS // self.vocab.size)
        for first in range(0, len(draws), at_once):
            part = draws[first : first + at_once]
            lines = [draw.queries[step] for draw in part]
            after = np.empty((len(part), len(self.live_ids)))
            for automaton, classes in self.live_classes.items():
                own = [i for i, draw in enumerate(part) if draw.hole.dfa is automaton]
                if own:
                    after[own] = np.stack([part[i].future_log_weights(step) for i in own])[:, classes]
            log_x = buffer.log_probs(lines) + torch.from_numpy(after).to(device)
            log_x = log_x - _checked_logsumexp(log_x)
            whole = log_x.new_full((len(lines), self.vocab.size), -torch.inf)
            whole[:, buffer.live_ids] = log_x
            said = buffer.evaluate(whole, torch.tensor(lines, device=device))
            if step + 1 < max(len(draw.queries) for draw in part):
                for draw, token in zip(part, _token_ids(said), strict=True):
                    draw.node = int(draw.transitions[step][draw.node, self.token_classes[draw.hole.dfa][token]])


def _any_hole_repeats(sequence: Tensor, hole_ids: Tensor) -> bool:
    """Whether more than one line is of the same hole."""
    pairs = list(zip(sequence.tolist(), hole_ids.tolist(), strict=True))
    return len(set(pairs)) < len(pairs)


class _RowBuffer:
    """Keeps the lines of holes with patterns, as far as tokens fit; others are answered at once."""

    def __init__(self, row_fn: RowFn, constrained: Tensor, live_ids: Tensor) -> None:
        self.row_fn, self.constrained, self.live_ids = row_fn, constrained, live_ids
        self.slot = constrained.cumsum(0) - 1
        self.buffer: Tensor | None = None
        self.values: Tensor | None = None

    def __call__(self, log_x: LogX, indices: slice | Tensor) -> Tensor:
        line = torch.arange(len(self.constrained), device=self.constrained.device)[indices]
        bound = self.constrained[line]
        if self.buffer is None:
            self.buffer = log_x.new_empty(int(self.constrained.sum()), len(self.live_ids))
        self.buffer[self.slot[line[bound]]] = log_x[bound][:, self.live_ids]
        if not bool(bound.all()):
            self.evaluate(log_x[~bound], line[~bound])
        return log_x.amax(-1)  # something for each line, which is NaN if a line is

    def log_probs(self, queries: Sequence[int]) -> Tensor:
        """float64 [n, live]."""
        assert self.buffer is not None
        return self.buffer[self.slot[torch.tensor(queries, device=self.slot.device)]].double()

    def evaluate(self, log_x: LogX, queries: Tensor) -> Tensor:
        """What is said of these lines, which is remembered."""
        said = self.row_fn(log_x, queries)
        if self.values is None:
            self.values = said.new_empty(len(self.constrained), *said.shape[1:])
        self.values[queries] = said.to(self.values)
        return said


def _identity(log_x: LogX, _: slice | Tensor) -> Tensor:
    return log_x


def _checked_logsumexp(log_x: LogX) -> Tensor:
    """log sum exp [n, 1] of lines that leave something to a text that matches."""
    total = log_x.logsumexp(-1, keepdim=True)
    if bool(total.isnan().any()):
        raise NonFiniteError("the network's log-probabilities are NaN; its weights are damaged")
    if bool((total == -torch.inf).any()):
        raise ValueError(
            "the network, or what it was told to avoid, leaves no probability to any text that matches the"
            " pattern of a hole"
        )
    return total


def _token_ids(values: Tensor) -> list[int]:
    """The drawn tokens, in what a sampler says of its lines: these, or these and something more."""
    if values.ndim == 1 and values.is_floating_point():
        raise ValueError(
            "the tokens of a hole that must match a pattern are drawn one after the other, so row_fn= must say"
            " which token it draws, as samplers do; got numbers that are no tokens"
        )
    return (values if values.ndim == 1 else values[:, 0]).long().tolist()


def _find_holes(
    ids: list[int], mask_id: int, regex: Regex | Sequence[Regex | None], tokenizer: BaseTokenizer
) -> list[_Hole]:
    """The runs of masks that have a pattern."""
    runs, place = [], 0
    for masked, run in itertools.groupby(ids, lambda id_: id_ == mask_id):
        length = len(list(run))
        runs += [(place, place + length)] if masked else []
        place += length
    patterns = [regex] * len(runs) if isinstance(regex, str | TokenDFA) else list(regex)
    if len(patterns) != len(runs):
        raise ValueError(f"a text with {len(runs)} holes needs as many patterns, or one; got {len(patterns)}")
    return [
        _Hole(first, last, token_dfa(wanted, tokenizer) if isinstance(wanted, str) else wanted)
        for (first, last), wanted in zip(runs, patterns, strict=True)
        if wanted is not None
    ]


def _validate_lengths(holes: list[_Hole]) -> None:
    """Refuse holes that are too short or too long for their pattern."""
    for automaton, start, length in {(h.dfa, h.initial_state, h.end - h.begin) for h in holes}:
        possible, _ = automaton.match_lengths(start, length)
        if length in possible:
            continue
        possible, more = automaton.match_lengths(start, length + _EXTRA_SEARCH_TOKENS)
        if not possible and more:
            raise ValueError(
                f"a hole of {length} tokens cannot match {automaton.pattern[:60]!r}, nor can one of up to"
                f" {length + _EXTRA_SEARCH_TOKENS}"
            )
        if not possible:
            raise ValueError(f"no text of the tokenizer's tokens matches the pattern {automaton.pattern!r}")
        near = min(possible, key=lambda other: abs(other - length))
        raise ValueError(
            f"a hole of {length} tokens cannot match {automaton.pattern!r}, which takes"
            f" {possible[0]} tokens or more; the nearest number that can be is {near}"
        )
