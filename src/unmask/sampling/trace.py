"""Which step wrote which token: the differences between the canvases that a sampler yields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.types import Tokens

_MASKED = -1
"""The step of a position that is masked: not written yet, or remasked."""


@dataclass(frozen=True)
class Trace:
    """All steps of a sampler. It may write a position more than once; the last write counts."""

    canvases: tuple[Tokens, ...]
    """The canvas before the first step, and after each: canvases[k] is the one after step k = 1, 2, ..."""
    written_step: Tensor
    """int64 [B, L]: the step at which each position got its final token, 0 if it was given, -1 if it is masked."""

    @property
    def tokens(self) -> Tokens:
        """The canvas at the end, [B, L]."""
        return self.canvases[-1]

    @property
    def last_step(self) -> Tensor:
        """The last step at which something of each row changed, [B]."""
        last = torch.zeros(len(self.tokens), dtype=torch.int64)
        for number in range(1, len(self.canvases)):
            last[(self.canvases[number] != self.canvases[number - 1]).any(1).cpu()] = number
        return last

    def history(self, sequence: int, position: int) -> list[tuple[int, int]]:
        """Everything that a position has shown, as (step, id), from step 0 on."""
        shown = [int(frame[sequence, position]) for frame in self.canvases]
        return [(k, id_) for k, id_ in enumerate(shown) if k == 0 or id_ != shown[k - 1]]


@dataclass(frozen=True)
class _TracedStep:
    """The canvas after a step, and what the step changed."""

    number: int
    """1 for the first step."""
    tokens: Tokens
    """int64 [B, L]: the canvas after the step."""
    changed: Tensor
    """bool [B, L]: the positions that the step wrote, rewrote or remasked."""
    written_step: Tensor
    """int64 [B, L]: the step at which each position got its token, 0 if it was given, -1 if it is masked."""


def track_steps(canvases: Iterable[Tokens], initial: Tokens, mask_id: int) -> Iterator[_TracedStep]:
    """Each canvas that a sampler yields for the `initial` one, with what has changed."""
    before, written = initial, torch.where(initial == mask_id, _MASKED, 0)
    for number, z in enumerate(canvases, 1):
        changed = z != before
        written = torch.where(z == mask_id, _MASKED, torch.where(changed, number, written))
        yield _TracedStep(number, z, changed, written)
        before = z


def record_trace(canvases: Iterable[Tokens], initial: Tokens, mask_id: int) -> Trace:
    """Run a sampler on the canvas `initial` to its end, and record all steps."""
    recorded, written = [initial], torch.where(initial == mask_id, _MASKED, 0)
    for step in track_steps(canvases, initial, mask_id):
        recorded.append(step.tokens)
        written = step.written_step
    return Trace(tuple(recorded), written)
