"""ReMDM (arXiv 2503.00307): tokens that have been written may be masked again, and so be corrected.

A visible token is masked again with probability sigma, and a masked one unmasked with probability
(alpha_s - (1 - sigma) alpha_t)/(1 - alpha_t). The expected share of visible tokens at each time then is MDLM's,
for any sigma up to sigma_max = min(1, (1 - alpha_s)/alpha_t).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.config import is_number
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import seeded_uniform_array
from unmask.diffusion.noise_level import alpha_grid, validate_steps
from unmask.diffusion.process import Masking
from unmask.diffusion.schedule import Schedule
from unmask.sampling._row_fns import DrawTokens, DrawWithConfidence
from unmask.sampling._unmasking import scatter_tokens, to_device
from unmask.sampling.base import Sampler, init_tokens, require_process, resolve_option
from unmask.sampling.canvas import Canvas
from unmask.sampling.confidence import Probability
from unmask.types import Queries, Tokens

_Floats: TypeAlias = NDArray[np.float64]


def _validate_eta(eta: float) -> None:
    if not is_number(eta) or not 0 <= eta <= 1:
        raise ValueError(f"eta, the strength of remasking, must be in [0, 1]; got {eta!r}")


@dataclass(frozen=True)
class Cap:
    """sigma = min(eta, sigma_max)."""

    uses_confidence: ClassVar[bool] = False
    eta: float = 0.008
    """The largest sigma."""

    def __post_init__(self) -> None:
        _validate_eta(self.eta)

    def sigma(self, sigma_max: float, confidence: _Floats) -> _Floats:
        """[B, L], from each token's probability when it was written (inf where masked or fixed)."""
        return np.full_like(confidence, min(self.eta, sigma_max))


@dataclass(frozen=True)
class Rescale:
    """sigma = eta sigma_max."""

    uses_confidence: ClassVar[bool] = False
    eta: float = 0.015
    """The share of sigma_max."""

    def __post_init__(self) -> None:
        _validate_eta(self.eta)

    def sigma(self, sigma_max: float, confidence: _Floats) -> _Floats:
        """[B, L], from each token's probability when it was written (inf where masked or fixed)."""
        return np.full_like(confidence, self.eta * sigma_max)


@dataclass(frozen=True)
class Conf:
    """sigma = eta sigma_max softmax(-confidence): tokens that were written with low probability are remasked first."""

    uses_confidence: ClassVar[bool] = True
    eta: float = 1.0
    """The share of sigma_max, before it is distributed."""

    def __post_init__(self) -> None:
        _validate_eta(self.eta)

    def sigma(self, sigma_max: float, confidence: _Floats) -> _Floats:
        """[B, L], from each token's probability when it was written (inf where masked or fixed)."""
        written = np.isfinite(confidence)
        weight = np.exp(-confidence)  # 0 where nothing is written
        sigma = self.eta * sigma_max * weight / np.maximum(weight.sum(1, keepdims=True), np.finfo(np.float64).tiny)
        # Masked positions get the mean, so that the expected share of visible tokens stays MDLM's.
        mean = sigma.sum(1, keepdims=True) / np.maximum(written.sum(1, keepdims=True), 1)
        result: _Floats = np.where(written, sigma, mean)
        return result


_RemaskingSchedule: TypeAlias = Cap | Rescale | Conf
REMASKING_SCHEDULES: dict[str, _RemaskingSchedule] = {"cap": Cap(), "rescale": Rescale(), "conf": Conf()}


@dataclass(frozen=True)
class Loop:
    """Unmask up to a share `alpha_on` by t = t_on, then only correct until t = t_off, then finish."""

    t_on: float = 0.55
    """Where the corrections begin."""
    t_off: float = 0.05
    """Where the corrections end."""
    alpha_on: float = 0.9
    """The share of visible tokens meanwhile."""

    def __post_init__(self) -> None:
        if not (0 < self.t_off < self.t_on < 1 and 0 < self.alpha_on < 1):
            raise ValueError(
                f"a loop needs 0 < t_off < t_on < 1 and 0 < alpha_on < 1;"
                f" got t_off {self.t_off}, t_on {self.t_on}, alpha_on {self.alpha_on}"
            )

    def alphas(self, steps: int) -> Tensor:
        """The visible share at t = 1, ..., 0: float64 [T + 1]."""
        t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        writing = (1 - t) / (1 - self.t_on) * self.alpha_on
        finishing = 1 - t / self.t_off * (1 - self.alpha_on)
        return torch.where(t > self.t_on, writing, torch.where(t < self.t_off, finishing, self.alpha_on))


@dataclass(frozen=True)
class ReMDM(Sampler):
    """T steps of unmasking and remasking; with a loop, remasking happens only inside it."""

    steps: int = 128
    """T, the number of steps; more are better and slower."""
    remasking: _RemaskingSchedule | str = Rescale()
    """How sigma is chosen: "cap", "rescale" or "conf", or an object with a strength (`Cap(eta=0.01)`)."""
    loop: Loop | bool | None = None
    """The interval of t that is spent on corrections; True is the default `Loop()`, None is none."""
    params: SamplingParams = SamplingParams()
    """How tokens are drawn."""

    def __post_init__(self) -> None:
        validate_steps(self.steps)
        object.__setattr__(self, "remasking", resolve_option(self.remasking, REMASKING_SCHEDULES, "remasking"))
        if isinstance(self.loop, bool):
            object.__setattr__(self, "loop", Loop() if self.loop else None)
        if self.loop is not None and not isinstance(self.loop, Loop):
            raise ValueError(f"the loop must be a Loop, True or None; got {self.loop!r}")

    @property
    def may_remask(self) -> bool:
        return True

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        schedule, mask = require_process(denoiser, Masking).schedule, denoiser.vocab.mask_id
        remasking = resolve_option(self.remasking, REMASKING_SCHEDULES, "remasking")
        z = init_tokens(denoiser, canvas)
        masked = canvas.host_mask(mask)  # known on the host from then on: it depends on the tokens' confidence at most
        fixed, confidence = ~masked, np.full(z.shape, np.inf)
        alphas = self._alphas(schedule)
        times, levels = schedule.inverse(alphas), alphas.tolist()
        for step in range(1, self.steps + 1):
            alpha_t, alpha_s = levels[step - 1 : step + 1]
            sigma = self._sigma(remasking, alpha_t, alpha_s, confidence)
            unmask_prob = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
            event = seeded_uniform_array(canvas.seeds, z.shape[1], 2 * step)
            unmask = masked & (event < unmask_prob)
            remask = (~fixed & ~masked & (event < sigma)).nonzero()
            if unmask.any():
                uniform = seeded_uniform_array(canvas.seeds, z.shape[1], 2 * step + 1)[unmask]
                z, written = self._unmask(denoiser, z, times[step - 1], unmask, uniform)
                masked &= ~unmask
                if remasking.uses_confidence:
                    confidence[unmask] = written.tolist()
            rows, columns = (to_device(index, z.device) for index in remask)
            z = scatter_tokens(z, rows, columns, torch.full_like(rows, mask))
            masked[remask], confidence[remask] = True, np.inf
            yield z

    def _unmask(
        self, denoiser: DenoiserLike, z: Tokens, t: Tensor, unmask: NDArray[np.bool_], uniform: _Floats
    ) -> tuple[Tokens, Tensor]:
        """The canvas with tokens at the positions `unmask` [B, L], and the probability [N] of each of them."""
        active, device = np.flatnonzero(unmask.any(1)), z.device
        ids, queries = to_device(active, device), Queries.from_host(unmask[active], device)
        draw = DrawTokens(self.params, to_device(uniform, device), denoiser.vocab.mask_id)
        row_fn = DrawWithConfidence(draw, (Probability(),), denoiser.normalized)
        times = t.expand(len(active), 1).to(device)
        values = denoiser(z[ids], times, queries, row_fn=row_fn, sequence_ids=ids)
        return scatter_tokens(z, ids[queries[0]], queries[1], values[:, 0].long()), values[:, 1]

    def _alphas(self, schedule: Schedule) -> Tensor:
        """alpha at t = 1, ..., 0: float64 [T + 1]."""
        if isinstance(self.loop, Loop):
            return self.loop.alphas(self.steps)
        return alpha_grid(schedule, self.steps).flip(0)

    def _sigma(self, remasking: _RemaskingSchedule, alpha_t: float, alpha_s: float, confidence: _Floats) -> _Floats:
        """The probability [B, L] of being masked again between these levels."""
        if self.loop is not None and alpha_s > alpha_t:
            return np.zeros_like(confidence)
        sigma_max = min(1.0, (1 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0
        return remasking.sigma(sigma_max, confidence)
