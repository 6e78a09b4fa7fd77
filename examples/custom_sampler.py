"""A sampler of your own: a subclass of `Sampler` with a method `run`.

python -m examples.custom_sampler
unmask sample runs/tiny --sampler examples.custom_sampler:Leftmost --sampler-option width=2
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.custom_recipe import tiny, train
from unmask import Sampler, SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.sampling.canvas import Canvas


@dataclass(frozen=True)
class Leftmost(Sampler):
    """Unmask the `width` leftmost masked tokens of every sequence in each step."""

    width: int = 4
    params: SamplingParams = SamplingParams()

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tensor]:
        """Yield the canvas [B, L] after each step."""
        z, generator = canvas.tokens.clone(), torch.Generator().manual_seed(canvas.seeds[0])
        while bool((masked := z == denoiser.vocab.mask_id).any()):
            positions = masked & (masked.cumsum(1) <= self.width)
            t = masked.double().mean(1, keepdim=True)
            probabilities = self.params.probabilities(denoiser(z, t, positions))
            z[positions] = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
            yield z.clone()


if __name__ == "__main__":
    print(train(tiny()).sample(n=2, length=24, sampler=Leftmost(width=3)).texts)
