"""Semi-autoregressive generation: text of any length through a window that slides to the right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import Masking, PerTokenMasking
from unmask.sampling.ancestral import Ancestral
from unmask.sampling.base import Sampler, resolve_inner_sampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.windows import sample_windows, strided_windows
from unmask.types import Tokens


@dataclass(frozen=True)
class SemiAutoregressive(Sampler):
    """Fill a window, move it by `stride` tokens, and use the `window - stride` tokens it keeps as context.

    The last window ends where the canvas ends. (A `LanguageModel` generates long texts in windows by itself; this is
    for other strides or windows.)
    """

    processes = (Masking, PerTokenMasking)

    stride: int = 512
    """By how many tokens the window moves."""
    window: int | None = None
    """Tokens per window; None is the model's max_length."""
    sampler: Sampler | str = Ancestral()
    """What fills each window: a sampler of masked diffusion, or its name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampler", resolve_inner_sampler(self.sampler))
        if not isinstance(self.stride, int) or self.stride < 1:
            raise ValueError(f"stride must be at least 1; got {self.stride!r}")
        if self.window is not None and not (isinstance(self.window, int) and self.window > self.stride):
            raise ValueError(f"a window of {self.window!r} tokens must be longer than its stride {self.stride}")

    @property
    def inner(self) -> Sampler:
        return resolve_inner_sampler(self.sampler)

    @property
    def steps(self) -> int | None:
        return self.inner.steps

    @property
    def may_remask(self) -> bool:
        return self.inner.may_remask

    @property
    def any_length(self) -> bool:
        return True

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        length = canvas.tokens.shape[1]
        window = self.window or denoiser.max_length or length
        if denoiser.max_length is not None and window > denoiser.max_length:
            raise ValueError(f"a window of {window} tokens is longer than the model's maximum of {denoiser.max_length}")
        if window < length and window <= self.stride:
            raise ValueError(
                f"stride {self.stride} must be below the model's window of {window} tokens,"
                " so that some context is kept"
            )
        yield from sample_windows(denoiser, canvas, self.inner, strided_windows(length, window, self.stride))
