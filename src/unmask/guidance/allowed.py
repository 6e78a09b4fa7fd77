"""Hard constraints, place by place: which tokens may be written at all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmask.diffusion.denoise import Around, Denoise, Joinable
from unmask.guidance.places import asked, first_place, fits, numbers, with_mass_of
from unmask.types import Each, LogX, Rows, Times, Tokens


@dataclass(frozen=True, eq=False)
class Cut(Joinable):
    """What `each` says of lines that have nothing but the allowed tokens [V] left, or those lines."""

    allowed: Tensor
    each: Joinable | None

    def __call__(self, log_x: LogX, part: slice | Tensor) -> Tensor:
        never = ~self.allowed.to(log_x.device)
        log_x = with_mass_of(log_x, log_x.masked_fill(never, -torch.inf))
        return log_x if self.each is None else self.each(log_x, part)

    @property
    def kind(self) -> Hashable:
        """Whose tokens are the same, and who say one kind of thing."""
        return Cut, id(self.allowed), None if self.each is None else self.each.kind

    def join(self, others: Sequence[Cut], lines: Sequence[int]) -> Each:
        """One cut for all lines."""
        if self.each is None:
            return self
        said = self.each.join([other.each for other in others], lines)
        return lambda log_x, part: said(Cut(self.allowed, None)(log_x, part), part)


class Allowed(Around):
    """log_x with nothing but the allowed tokens, renormalised.

    `allowed` are booleans: [V] for all places alike, [L, V] by place, or [B, L, V] by the number of the
    sequence too. A hole that no token is allowed in is refused at the first call, before anything is drawn.
    """

    def __init__(self, denoise: Denoise, allowed: Tensor) -> None:
        super().__init__(denoise)
        if (
            allowed.dtype != torch.bool
            or allowed.ndim not in (1, 2, 3)
            or allowed.shape[-1] != self.vocab.size
        ):
            raise ValueError(
                f"allowed must be booleans [V], [L, V] or [B, L, V] with V = {self.vocab.size};"
                f" got {allowed.dtype} of shape {list(allowed.shape)}"
            )
        if bool(allowed[..., self.vocab.mask].any()):
            allowed = allowed.clone()
            allowed[..., self.vocab.mask] = False
        self.allowed = allowed
        self.possible = self.allowed.any(-1)

    @classmethod
    def never(cls, denoise: Denoise, ids: Iterable[int]) -> Allowed:
        """Everything but these ids, wherever it is."""
        allowed = torch.ones(denoise.vocab.size, dtype=torch.bool)
        allowed[_ids(denoise, ids)] = False
        return cls(denoise, allowed)

    @classmethod
    def at(cls, denoise: Denoise, sets: Mapping[int, Iterable[int]], length: int) -> Allowed:
        """Only these ids at these places of sequences of `length` tokens, anything elsewhere."""
        allowed = torch.ones(length, denoise.vocab.size, dtype=torch.bool)
        for place, ids in sets.items():
            if not 0 <= place < length:
                raise ValueError(f"there is no place {place} in a text of {length} tokens, 0..{length - 1}")
            allowed[place] = False
            allowed[place, _ids(denoise, ids)] = True
        return cls(denoise, allowed)

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
        if self.allowed.ndim == 1 and bool(self.possible) and (each is None or isinstance(each, Joinable)):
            return self.denoise(z, t, rows, each=Cut(self.allowed, each), which=which, **context)
        which, start = numbers(z, which), first_place(context)
        if self.allowed.ndim > 1:
            fits(z, which, start, self.allowed.shape[:-1], "the allowed tokens")
        self._check(z, which, start or 0)
        sequence, place = asked(rows)
        sequence, place = which[sequence], place + (start or 0)

        def cut(log_x: LogX, part: slice | Tensor) -> Tensor:
            here: tuple[Tensor, ...] = (sequence[part], place[part])
            here = here[3 - self.allowed.ndim :]
            allowed = self.allowed[tuple(index.to(self.allowed.device) for index in here)]
            log_x = with_mass_of(log_x, log_x.masked_fill(~allowed.to(log_x.device), -torch.inf))
            return log_x if each is None else each(log_x, part)

        return self.denoise(z, t, rows, each=cut, which=which, **context)

    def _check(self, z: Tokens, which: Tensor, start: int) -> None:
        possible = self.possible
        if possible.ndim == 2:
            possible = possible[which.to(possible.device)]
        if possible.ndim:
            possible = possible[..., start : start + z.shape[1]]
        stuck = ((z == self.vocab.mask) & ~possible.to(z.device)).nonzero()
        if len(stuck):
            sequence, place = stuck[0].tolist()
            raise ValueError(
                f"no token is allowed at place {start + place} of sequence {int(which[sequence])}, which is"
                " to be written; allow at least one there"
            )


def _ids(denoise: Denoise, ids: Iterable[int]) -> list[int]:
    wanted = list(ids)
    for id_ in wanted:
        if not 0 <= id_ < denoise.vocab.size:
            raise ValueError(f"token id {id_} is outside the vocabulary 0..{denoise.vocab.size - 1}")
    return wanted
