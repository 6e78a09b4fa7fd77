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
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from unmask.data.tokenizer import Tokenizer
from unmask.diffusion.denoise import Around, Denoise
from unmask.guidance.automaton import Numbers, TokenAutomaton, token_automaton
from unmask.guidance.bounds import Work
from unmask.guidance.messages import ASKED, MOST_WORK, OPEN, Moves, Weights, messages, plan, sums
from unmask.guidance.pausing import pause
from unmask.guidance.places import asked, first_place, fits, numbers
from unmask.types import DamagedError, Each, LogX, Rows, Times, Tokens

AT_ONCE = 1 << 24
"""Log-probabilities that are handed out at a time."""
FURTHER = 256
"""By how many tokens a hole may be too short to be told the length that can match."""

SUMMED_AT_ONCE = 1 << 19
"""Log-probabilities that are summed by classes at a time."""

Pattern: TypeAlias = str | TokenAutomaton
"""A regular expression, or what has been made of it already."""


@dataclass(frozen=True, eq=False)
class _Hole:
    """The places `first` to `last` - 1 of a sequence, with the pattern of their text."""

    first: int
    last: int
    automaton: TokenAutomaton

    @property
    def start(self) -> int:
        """The automaton's state before the hole."""
        return self.automaton.first if self.first == 0 else self.automaton.inside


@dataclass(eq=False)
class _Draws:
    """What a call asks for in a hole: its lines in the order of their places, and where tokens lead."""

    hole: _Hole
    lines: list[int]
    moves: Moves
    later: list[Weights] = field(default_factory=list)
    """The messages of some holes, of which this is one by `number`."""
    number: int = 0
    node: int = 0

    def after(self, place: int) -> Weights:
        """[K]: how much probability a token of each class at an asked place leaves to those after it."""
        left: Weights = self.later[place][self.number, self.moves[place][self.node]]
        return left


class Matching(Around):
    """The holes of a canvas `tokens` [B, L], runs of masks, filled with texts that match a pattern in full.

    One pattern is for all holes; of several, each is for one hole of every sequence, and None for a hole that
    may hold anything. A hole's text is what it adds to the decoded sequence: after other words, a WordPiece
    tokenizer begins it with a space. Sums are exact for draws at temperature 1; any other choice of tokens
    is made place by place, and matches too. It belongs to one canvas, and to one run at a time.
    """

    def __init__(
        self,
        denoise: Denoise,
        tokens: Tokens,
        pattern: Pattern | Sequence[Pattern | None],
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(denoise)
        self.tokens, self.seen = tokens, tokens.clone()
        self.owner = torch.full(tokens.shape, -1)
        self.holes: list[_Hole] = []
        for row, ids in enumerate(tokens.tolist()):
            for hole in _holes(ids, self.vocab.mask, pattern, tokenizer):
                self.owner[row, hole.first : hole.last] = len(self.holes)
                self.holes.append(hole)
        _check(self.holes)
        self.classes = {hole.automaton: self._classes(hole.automaton) for hole in self.holes}
        fit = np.any([classes > 0 for classes in self.classes.values()], axis=0)
        self.live = torch.from_numpy(np.flatnonzero(fit))
        """The ids that fit anywhere: of no other need the log-probability be kept."""
        self.fitting = {automaton: classes[self.live.numpy()] for automaton, classes in self.classes.items()}

    def _classes(self, automaton: TokenAutomaton) -> Numbers:
        """The class [V] of each of the model's ids, which may be more than the tokenizer's."""
        classes = np.zeros(self.vocab.size, dtype=np.int64)
        classes[: len(automaton.classes)] = automaton.classes
        classes[self.vocab.mask] = 0
        return classes

    def __call__(
        self,
        z: Tokens,
        t: Times,
        rows: Rows,
        *,
        each: Each | None = None,
        which: Tensor | None = None,
        **context: Any,
    ) -> Tensor:
        which, start = numbers(z, which), first_place(context)
        fits(z, which, start, self.tokens.shape, "the holes")
        sequence, place = asked(rows)
        place = place + (start or 0)
        owner = self.owner.to(z.device)[which[sequence], place]
        text = self._text(z, which, start)
        if not bool((owner >= 0).any()):
            return self.denoise(z, t, rows, each=each, which=which, **context)
        if each is None and _several(sequence[owner >= 0], owner[owner >= 0]):
            raise ValueError(
                "the tokens of a hole that must match a pattern depend on each other, so they cannot be given"
                " as lines; ask with each= for tokens, or for one place of a hole at a time"
            )
        heard = _Heard(each or _line, owner >= 0, self.live.to(z.device))
        self.denoise(z, t, rows, each=heard, which=which, **context)
        # Only now: who waits for an answer should not keep what it will need in memory.
        draws = self._draws(text, sequence.tolist(), place.tolist(), owner.tolist())
        self._weigh(draws, heard)
        for number in range(max(len(draw.lines) for draw in draws)):
            pause()
            self._draw([draw for draw in draws if len(draw.lines) > number], number, heard)
        assert heard.said is not None
        return heard.said

    def _text(self, z: Tokens, which: Tensor, start: int | None) -> Tokens:
        """The whole text [b, L] of a call's sequences; beside a cache, a call shows only what has changed."""
        if start is None:
            return z
        here = which.to(self.seen.device)
        if start == 0:  # whatever an earlier run wrote after it
            self.seen[here] = self.tokens[here]
        self.seen[here, start : start + z.shape[1]] = z.to(self.seen.device)
        return self.seen[here]

    def _draws(self, text: Tokens, sequence: list[int], place: list[int], owner: list[int]) -> list[_Draws]:
        lines: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for line, key in enumerate(zip(sequence, owner, strict=True)):
            if key[1] >= 0:
                lines.setdefault(key, []).append((place[line], line))
        draws, ids, mask = [], text.cpu().numpy(), self.vocab.mask
        work: dict[int, Work] = {}
        for (row, number), places in lines.items():
            hole = self.holes[number]
            written = ids[row, hole.first : hole.last]
            content = np.where(written == mask, OPEN, self.classes[hole.automaton][written])
            content[[there - hole.first for there, _ in places]] = ASKED
            moves = plan(hole.automaton, hole.start, tuple(content.tolist()))
            work.setdefault(row, Work(hole.automaton.pattern, MOST_WORK)).spend(sum(s.size for s in moves))
            draws.append(_Draws(hole, [line for _, line in sorted(places)], moves))
        return draws

    def _weigh(self, draws: list[_Draws], heard: _Heard) -> None:
        """The messages of all draws: those with the same moves at once."""
        groups: dict[int, list[_Draws]] = {}
        for draw in draws:
            groups.setdefault(id(draw.moves), []).append(draw)
        weights: dict[int, Weights] = {}
        for automaton, classes in self.fitting.items():
            # What is drawn first needs no message of its own.
            lines = [line for d in draws if d.hole.automaton is automaton for line in d.lines[1:]]
            if lines:
                kinds = torch.from_numpy(classes).to(heard.live.device)
                at_once = max(1, SUMMED_AT_ONCE // len(classes))
                for first in range(0, len(lines), at_once):
                    pause()
                    part = lines[first : first + at_once]
                    summed = sums(heard.lines(part), kinds, automaton.table.shape[1])
                    weights.update(zip(part, summed, strict=True))
        for group in groups.values():
            weighed = np.array([[weights[line] for line in draw.lines[1:]] for draw in group])
            later = messages(group[0].moves, weighed)
            for number, draw in enumerate(group):
                draw.later, draw.number = later, number

    def _draw(self, draws: list[_Draws], number: int, heard: _Heard) -> None:
        """Draw the asked token `number` of each hole, given those before it."""
        device, at_once = heard.live.device, max(1, AT_ONCE // self.vocab.size)
        for first in range(0, len(draws), at_once):
            part = draws[first : first + at_once]
            lines = [draw.lines[number] for draw in part]
            after = np.empty((len(part), len(self.live)))
            for automaton, classes in self.fitting.items():
                own = [i for i, draw in enumerate(part) if draw.hole.automaton is automaton]
                if own:
                    after[own] = np.stack([part[i].after(number) for i in own])[:, classes]
            log_x = heard.lines(lines) + torch.from_numpy(after).to(device)
            log_x = log_x - _total(log_x)
            whole = log_x.new_full((len(lines), self.vocab.size), -torch.inf)
            whole[:, heard.live] = log_x
            said = heard.tell(whole, torch.tensor(lines, device=device))
            if number + 1 < max(len(draw.lines) for draw in part):
                for draw, token in zip(part, _tokens(said), strict=True):
                    draw.node = int(draw.moves[number][draw.node, self.classes[draw.hole.automaton][token]])


def _several(sequence: Tensor, owner: Tensor) -> bool:
    """Whether more than one line is of the same hole."""
    pairs = list(zip(sequence.tolist(), owner.tolist(), strict=True))
    return len(set(pairs)) < len(pairs)


class _Heard:
    """Keeps the lines of holes with patterns, as far as tokens fit; others are answered at once."""

    def __init__(self, each: Each, bound: Tensor, live: Tensor) -> None:
        self.each, self.bound, self.live = each, bound, live
        self.number = bound.cumsum(0) - 1
        self.kept: Tensor | None = None
        self.said: Tensor | None = None

    def __call__(self, log_x: LogX, part: slice | Tensor) -> Tensor:
        line = torch.arange(len(self.bound), device=self.bound.device)[part]
        bound = self.bound[line]
        if self.kept is None:
            self.kept = log_x.new_empty(int(self.bound.sum()), len(self.live))
        self.kept[self.number[line[bound]]] = log_x[bound][:, self.live]
        if not bool(bound.all()):
            self.tell(log_x[~bound], line[~bound])
        return log_x.amax(-1)  # something for each line, which is NaN if a line is

    def lines(self, numbers: Sequence[int]) -> Tensor:
        """float64 [n, live]."""
        assert self.kept is not None
        return self.kept[self.number[torch.tensor(numbers, device=self.number.device)]].double()

    def tell(self, log_x: LogX, line: Tensor) -> Tensor:
        """What is said of these lines, which is remembered."""
        said = self.each(log_x, line)
        if self.said is None:
            self.said = said.new_empty(len(self.bound), *said.shape[1:])
        self.said[line] = said.to(self.said)
        return said


def _line(log_x: LogX, _: slice | Tensor) -> Tensor:
    return log_x


def _total(log_x: LogX) -> Tensor:
    """log sum exp [n, 1] of lines that leave something to a text that matches."""
    total = log_x.logsumexp(-1, keepdim=True)
    if bool(total.isnan().any()):
        raise DamagedError("the network's log-probabilities are NaN; its weights are damaged")
    if bool((total == -torch.inf).any()):
        raise ValueError(
            "the network, or what it was told to avoid, leaves no probability to any text that matches the"
            " pattern of a hole"
        )
    return total


def _tokens(said: Tensor) -> list[int]:
    """The drawn tokens, in what a sampler says of its lines: these, or these and something more."""
    if said.ndim == 1 and said.is_floating_point():
        raise ValueError(
            "the tokens of a hole that must match a pattern are drawn one after the other, so each= must say"
            " which token it draws, as samplers do; got numbers that are no tokens"
        )
    return (said if said.ndim == 1 else said[:, 0]).long().tolist()


def _holes(
    ids: list[int], mask: int, pattern: Pattern | Sequence[Pattern | None], tokenizer: Tokenizer
) -> list[_Hole]:
    """The runs of masks that have a pattern."""
    runs, place = [], 0
    for masked, run in itertools.groupby(ids, lambda id_: id_ == mask):
        length = len(list(run))
        runs += [(place, place + length)] if masked else []
        place += length
    patterns = [pattern] * len(runs) if isinstance(pattern, str | TokenAutomaton) else list(pattern)
    if len(patterns) != len(runs):
        raise ValueError(f"a text with {len(runs)} holes needs as many patterns, or one; got {len(patterns)}")
    return [
        _Hole(first, last, token_automaton(wanted, tokenizer) if isinstance(wanted, str) else wanted)
        for (first, last), wanted in zip(runs, patterns, strict=True)
        if wanted is not None
    ]


def _check(holes: list[_Hole]) -> None:
    """Refuse holes that are too short or too long for their pattern."""
    for automaton, start, length in {(h.automaton, h.start, h.last - h.first) for h in holes}:
        possible, _ = automaton.lengths(start, length)
        if length in possible:
            continue
        possible, more = automaton.lengths(start, length + FURTHER)
        if not possible and more:
            raise ValueError(
                f"a hole of {length} tokens cannot match {automaton.pattern[:60]!r}, nor can one of up to"
                f" {length + FURTHER}"
            )
        if not possible:
            raise ValueError(f"no text of the tokenizer's tokens matches the pattern {automaton.pattern!r}")
        near = min(possible, key=lambda other: abs(other - length))
        raise ValueError(
            f"a hole of {length} tokens cannot match {automaton.pattern!r}, which takes"
            f" {possible[0]} tokens or more; the nearest number that can be is {near}"
        )
