"""Semi-autoregressive generation: text of any length through a window that slides to the right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unmask.config import lookup
from unmask.diffusion.denoiser import DenoiserLike
from unmask.sampling import PROCESS_SAMPLERS, SAMPLERS
from unmask.sampling.ancestral import Ancestral
from unmask.sampling.base import Sampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.windows import sample_windows, strided_windows
from unmask.types import Tokens


def fills_window(sampler: Sampler) -> bool:
    """Whether a sampler fills a window or a block as a whole, as all but those of `PROCESS_SAMPLERS` do."""
    return not isinstance(sampler, tuple(PROCESS_SAMPLERS.values()))


def resolve_masked_sampler(sampler: Sampler | str) -> Sampler:
    """A sampler of a window or a block, which may be given by its name."""
    if isinstance(sampler, str):
        named: Sampler = lookup(sampler, SAMPLERS, "sampler")()
        return named
    if not isinstance(sampler, Sampler):
        raise ValueError(f"the sampler of a window must be one of {', '.join(SAMPLERS)}; got {sampler!r}")
    return sampler


@dataclass(frozen=True)
class SemiAutoregressive:
    """Fill a window, move it by `stride` tokens, and let the `window - stride` it keeps be the context.

    `window` None is the longest the model takes. The last window ends where the canvas ends. (A
    `LanguageModel` writes long texts in windows by itself; this is for those who want others.)
    """

    stride: int = 512
    window: int | None = None
    sampler: Sampler | str = Ancestral()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampler", resolve_masked_sampler(self.sampler))
        if not isinstance(self.stride, int) or self.stride < 1:
            raise ValueError(f"stride must be at least 1; got {self.stride!r}")
        if self.window is not None and not (isinstance(self.window, int) and self.window > self.stride):
            raise ValueError(f"a window of {self.window!r} tokens must be longer than its stride {self.stride}")

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas after each step of each window."""
        length = canvas.tokens.shape[1]
        window = self.window or denoiser.max_length or length
        if denoiser.max_length is not None and window > denoiser.max_length:
            raise ValueError(f"a window of {window} tokens is longer than the model's {denoiser.max_length}")
        if window < length and window <= self.stride:
            raise ValueError(
                f"stride {self.stride} must be below the model's window of {window} tokens,"
                " so that some context is kept"
            )
        yield from sample_windows(
            denoiser,
            canvas,
            resolve_masked_sampler(self.sampler),
            strided_windows(length, window, self.stride),
        )
