"""When each token was written, seen from outside: a trace of the canvases that a sampler yields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.types import Tokens

_MASKED = -1
"""The step of a position that shows the mask: nothing is written there (yet, or any more)."""


@dataclass(frozen=True)
class Trace:
    """The canvas before the first step and after each: frames[k] is the one after step k = 1, 2, ...

    `step` [B, L] is the step at which each position got its final token: 0 if it was given, _MASKED if it
    is still masked. Samplers may write a position more than once; the last write counts.
    """

    canvases: tuple[Tokens, ...]
    written_step: Tensor

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


def _track_steps(canvases: Iterable[Tokens], initial: Tokens, mask_id: int) -> Iterator[tuple[Tokens, Tensor]]:
    """After each step: the canvas, and the step [B, L] at which each position got what it now shows."""
    before, step = initial, torch.where(initial == mask_id, _MASKED, 0)
    for number, z in enumerate(canvases, 1):
        step = torch.where(z == mask_id, _MASKED, torch.where(z != before, number, step))
        yield z, step
        before = z


def record_trace(yielded: Iterable[Tokens], initial: Tokens, mask_id: int) -> Trace:
    """Run a sampler to its end and keep all it showed; `start` is the canvas that it was given."""
    canvases, step = [initial], torch.where(initial == mask_id, _MASKED, 0)
    for z, step in _track_steps(yielded, initial, mask_id):  # noqa: B007
        canvases.append(z)
    return Trace(tuple(canvases), step)
