"""Writing and editing at once: what was written is read again, and replaced where something else is likelier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.config import is_number
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import seeded_uniform
from unmask.diffusion.process import Masking
from unmask.sampling._row_fns import DrawTokens, DrawWithConfidence
from unmask.sampling._unmasking import IntArray, round_and_break_ties, time_from_mask_ratio, to_device
from unmask.sampling.base import Sampler, init_tokens, require_process
from unmask.sampling.canvas import Canvas
from unmask.sampling.confidence import Probability
from unmask.types import Queries, Tokens


@dataclass(frozen=True)
class JointThreshold(Sampler):
    """Every call predicts all positions of the canvas that were masked at first (LLaDA2.1).

    Masked ones get their token if its probability is above `threshold`, and the likeliest in any case; a token that was
    written before is replaced by another one whose probability is above `edit_threshold`. Once nothing is masked it
    goes on until a call replaces nothing, at most `max_post_steps` times. The network must have learned to correct
    tokens, as LLaDA2.1 has.
    """

    threshold: float = 0.9
    """The probability above which a token is written together with others."""
    edit_threshold: float | None = 0.9
    """The probability above which a token replaces one that was written before; None: nothing is replaced."""
    max_post_steps: int = 16
    """Calls that only replace tokens, once nothing is masked."""
    params: SamplingParams = SamplingParams()
    """How tokens are drawn."""

    def __post_init__(self) -> None:
        for name in ("threshold", "edit_threshold"):
            value = getattr(self, name)
            if not (value is None and name == "edit_threshold") and not (is_number(value) and 0 <= value <= 1):
                raise ValueError(f"{name} is a probability in [0, 1]; got {value!r}")
        if not isinstance(self.max_post_steps, int) or self.max_post_steps < 0:
            raise ValueError(f"max_post_steps must be 0 or above; got {self.max_post_steps!r}")

    @property
    def may_remask(self) -> bool:
        return self.edit_threshold is not None

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        require_process(denoiser, Masking)
        z, mask = init_tokens(denoiser, canvas), denoiser.vocab.mask_id
        writable = canvas.host_mask(mask)
        num_initial = writable.sum(1)
        num_masked, post_steps, step = num_initial.copy(), np.zeros(len(z), dtype=np.int64), 0
        active = np.flatnonzero(num_masked)
        while len(active):
            ids = to_device(active, z.device)
            now, was_finished = z[ids], num_masked[active] == 0
            t = time_from_mask_ratio(
                denoiser, torch.from_numpy(num_masked[active, None]), torch.from_numpy(num_initial[active, None])
            )
            predicted = self._predict(denoiser, canvas, now, t.to(z.device), active, writable[active], step)
            written, num_changed = self._change(now, *predicted, mask)
            z = z.index_copy(0, ids, written)
            counts = torch.stack([(written == mask).sum(1), num_changed], -1).cpu().numpy()
            num_masked[active] = counts[:, 0]
            post_steps[active] += was_finished
            yield z
            step += 1
            settled = was_finished & ((counts[:, 1] == 0) | (post_steps[active] >= self.max_post_steps))
            no_editing = (num_masked[active] == 0) & (self.edit_threshold is None or self.max_post_steps == 0)
            active = active[~(settled | no_editing)]

    def _predict(
        self,
        denoiser: DenoiserLike,
        canvas: Canvas,
        now: Tokens,
        t: Tensor,
        active: IntArray,
        writable: NDArray[np.bool_],
        step: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The drawn tokens [b, L] with their probabilities, exact and so that none are equal; these are -1 at positions
        that are not to be written."""
        queries = Queries.from_host(writable, now.device)
        seeds = [canvas.seeds[b] for b in active]
        uniform, tie_break = (
            seeded_uniform(seeds, now.shape[1], 2 * step + draw).to(now.device)[queries] for draw in (0, 1)
        )
        draw = DrawTokens(self.params, uniform, denoiser.vocab.mask_id)
        row_fn = DrawWithConfidence(draw, (Probability(),), denoiser.normalized)
        values = denoiser(now, t, queries, row_fn=row_fn, sequence_ids=to_device(active, now.device))
        nowhere = values.new_full(now.shape, -1)
        return (
            now.index_put(tuple(queries), values[:, 0].long()),
            nowhere.index_put(tuple(queries), values[:, 1]),
            nowhere.index_put(tuple(queries), round_and_break_ties(values[:, 1], tie_break)),
        )

    def _change(
        self, now: Tokens, token: Tensor, probability: Tensor, order: Tensor, mask: int
    ) -> tuple[Tokens, Tensor]:
        """The canvas after a call, and how many tokens of each sequence were replaced."""
        masked = now == mask
        first = order.masked_fill(~masked, -1).argmax(1, keepdim=True)
        change = masked & ((probability > self.threshold) | torch.zeros_like(masked).scatter(1, first, True))
        if self.edit_threshold is None:
            return torch.where(change, token, now), torch.zeros_like(now[:, 0])
        edit = ~masked & (token != now) & (probability > self.edit_threshold)
        return torch.where(change | edit, token, now), edit.sum(1)
