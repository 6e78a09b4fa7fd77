"""Left to right, one token at a time, with a cache: the sampler of autoregressive models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from unmask.context import Context, Prefix
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import seeded_uniform_array
from unmask.diffusion.process import LeftToRight, shift_right
from unmask.sampling._row_fns import DrawTokens
from unmask.sampling._unmasking import scatter_tokens, to_device
from unmask.sampling.base import Sampler, init_tokens, require_process
from unmask.sampling.canvas import Canvas
from unmask.types import Queries, Tokens


@dataclass(frozen=True)
class Autoregressive(Sampler):
    """x[l] ~ p(. | x[:l]) at the masked positions; fixed tokens stay, but only those before a position are read."""

    processes = (LeftToRight,)

    params: SamplingParams = SamplingParams()
    """How tokens are drawn."""

    @property
    def order_follows(self) -> Literal["predictions"]:
        return "predictions"

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        require_process(denoiser, LeftToRight)
        z, masked = init_tokens(denoiser, canvas), canvas.host_mask(denoiser.vocab.mask_id)
        given = int(masked.any(0).argmax())  # what is read before the call for the first hole
        cache = denoiser.new_cache(Prefix(shift_right(z, denoiser.vocab)[:, :given]))
        uniform = seeded_uniform_array(canvas.seeds, z.shape[1], draw=1)
        t = torch.zeros(len(z), 1, device=z.device)
        for position in np.flatnonzero(masked.any(0)).tolist():
            unread = shift_right(z, denoiser.vocab)[:, cache.end : position + 1]
            rows = masked[:, position]
            draw = DrawTokens(self.params, to_device(uniform[rows, position], z.device), denoiser.vocab.mask_id)
            last = Queries.from_host(rows[:, None], z.device).in_longer(unread.shape[1], unread.shape[1] - 1)
            tokens = denoiser(unread, t, last, Context(cache=cache.view()), row_fn=draw)
            z = scatter_tokens(z, last[0], torch.full_like(last[0], position), tokens)
            yield z
