"""Semi-autoregressive generation: text of any length through a window that slides to the right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from unmask.diffusion.denoise import Denoise
from unmask.diffusion.noise import substream
from unmask.sampling.ancestral import Ancestral, FirstHitting, RandomOrder
from unmask.sampling.canvas import Canvas
from unmask.sampling.confidence import Confidence, EntropyBounded, Factor, Threshold
from unmask.sampling.remask import Remask
from unmask.types import Tokens

AnyWindowSampler: TypeAlias = (
    Ancestral | FirstHitting | RandomOrder | Confidence | Threshold | Factor | EntropyBounded | Remask
)


@dataclass(frozen=True)
class SemiAutoregressive:
    """Fill a window, move it by `stride` tokens, and let the `window - stride` it keeps be the context.

    `window` None is the longest the model takes. The last window ends where the canvas ends.
    """

    stride: int = 512
    window: int | None = None
    sampler: AnyWindowSampler = Ancestral()

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"stride must be at least 1; got {self.stride}")
        if self.window is not None and self.window <= self.stride:
            raise ValueError(f"a window of {self.window} tokens must be longer than its stride {self.stride}")

    def run(self, denoise: Denoise, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas after each step of each window."""
        denoise.vocab.check(canvas.tokens)
        z, length = canvas.tokens.long().clone(), canvas.tokens.shape[1]
        window = self.window or denoise.max_length or length
        if denoise.max_length is not None and window > denoise.max_length:
            raise ValueError(f"a window of {window} tokens is longer than the model's {denoise.max_length}")
        if window < length and window <= self.stride:
            raise ValueError(
                f"stride {self.stride} must be below the model's window of {window} tokens,"
                " so that some context is kept"
            )
        first, number = 0, 0
        while True:
            seeds = tuple(substream(seed, number) for seed in canvas.seeds)
            inside = slice(first, first + window)
            for written in self.sampler.run(denoise, Canvas(z[:, inside], seeds)):
                z = z.clone()
                z[:, inside] = written
                yield z
            if first + window >= length:
                return
            first, number = min(first + self.stride, length - window), number + 1
