"""ReMDM: tokens already written may be masked again, and so be corrected.

A visible token is masked again with probability sigma, and a masked one revealed with probability
(alpha_s - (1 - sigma) alpha_t)/(1 - alpha_t): each time's share of visible tokens stays MDLM's, for any
sigma up to sigma_max = min(1, (1 - alpha_s)/alpha_t).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from unmask.config import is_number
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise import seeded_uniform
from unmask.diffusion.noise_level import alpha_grid, validate_steps
from unmask.diffusion.process import Masking
from unmask.sampling.ancestral import scatter_tokens
from unmask.sampling.base import (
    DrawTokens,
    DrawWithConfidence,
    init_tokens,
    query_uniform,
    require_process,
    resolve_option,
)
from unmask.sampling.canvas import Canvas
from unmask.sampling.confidence import Probability
from unmask.types import Tokens


def _validate_eta(eta: float) -> None:
    if not is_number(eta) or not 0 <= eta <= 1:
        raise ValueError(f"eta, the strength of remasking, must be in [0, 1]; got {eta!r}")


@dataclass(frozen=True)
class Cap:
    """sigma = min(eta, sigma_max)."""

    eta: float = 0.008

    def __post_init__(self) -> None:
        _validate_eta(self.eta)

    def sigma(self, sigma_max: float, confidence: Tensor) -> Tensor:
        """[B, L], from each token's probability when it was written (inf where masked or fixed)."""
        return torch.full_like(confidence, min(self.eta, sigma_max))


@dataclass(frozen=True)
class Rescale:
    """sigma = eta sigma_max."""

    eta: float = 0.015

    def __post_init__(self) -> None:
        _validate_eta(self.eta)

    def sigma(self, sigma_max: float, confidence: Tensor) -> Tensor:
        """[B, L], from each token's probability when it was written (inf where masked or fixed)."""
        return torch.full_like(confidence, self.eta * sigma_max)


@dataclass(frozen=True)
class Conf:
    """sigma = eta sigma_max softmax(-probability when written): doubtful tokens go first ("conf")."""

    eta: float = 1.0

    def __post_init__(self) -> None:
        _validate_eta(self.eta)

    def sigma(self, sigma_max: float, confidence: Tensor) -> Tensor:
        """[B, L], from each token's probability when it was written (inf where masked or fixed)."""
        sigma = self.eta * sigma_max * (-confidence).softmax(1).nan_to_num()
        written = confidence.isfinite()
        # Masked tokens come back at the mean rate, so that the share of visible ones stays what it should be.
        mean = sigma.sum(1, keepdim=True) / written.sum(1, keepdim=True).clamp(min=1)
        return torch.where(written, sigma, mean)


_RemaskingSchedule: TypeAlias = Cap | Rescale | Conf
REMASKING_SCHEDULES: dict[str, _RemaskingSchedule] = {"cap": Cap(), "rescale": Rescale(), "conf": Conf()}


@dataclass(frozen=True)
class Loop:
    """Write up to a share `visible` by t = on, then only correct until t = off, then finish."""

    t_on: float = 0.55
    t_off: float = 0.05
    alpha_on: float = 0.9

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
class ReMDM:
    """T steps of revealing and remasking; with a `loop`, remasking happens inside it only.

    `remasking` is "cap", "rescale" or "conf", or one of these as an object, with a strength of its own
    (`Cap(eta=0.01)`); `loop` True is the usual one.
    """

    steps: int = 128
    remasking: _RemaskingSchedule | str = Rescale()
    loop: Loop | bool | None = None
    params: SamplingParams = SamplingParams()

    def __post_init__(self) -> None:
        validate_steps(self.steps)
        object.__setattr__(self, "remasking", resolve_option(self.remasking, REMASKING_SCHEDULES, "remasking"))
        if isinstance(self.loop, bool):
            object.__setattr__(self, "loop", Loop() if self.loop else None)
        if self.loop is not None and not isinstance(self.loop, Loop):
            raise ValueError(f"the loop must be a Loop, True or None; got {self.loop!r}")

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas after each step."""
        schedule, mask = require_process(denoiser, Masking).schedule, denoiser.vocab.mask_id
        z = init_tokens(denoiser, canvas)
        fixed = z != mask
        if isinstance(self.loop, Loop):
            visible = self.loop.alphas(self.steps)
        else:
            visible = alpha_grid(schedule, self.steps).flip(0)
        times = schedule.inverse(visible)
        sureness = torch.full(z.shape, torch.inf, dtype=torch.float64, device=z.device)
        for step in range(1, self.steps + 1):
            alpha_t, alpha_s = visible[step - 1 : step + 1].tolist()
            sigma = self._sigma(alpha_t, alpha_s, sureness)
            appear = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
            event = seeded_uniform(canvas.seeds, z.shape[1], 2 * step).to(z.device)
            shown = (z == mask) & (event < appear)
            hidden = ~fixed & (z != mask) & (event < sigma)
            active = shown.any(1).nonzero()[:, 0]
            if len(active):
                t = times[step - 1].expand(len(active), 1).to(z.device)
                uniform = query_uniform(canvas.seeds, active, 2 * step + 1, shown[active])
                judged = DrawWithConfidence(DrawTokens(self.params, uniform, mask), Probability(), denoiser.normalized)
                said = denoiser(z[active], t, shown[active], row_fn=judged, sequence_ids=active)
                z = scatter_tokens(z, active, shown[active], said[:, 0].long())
                sureness[shown] = said[:, 1]
            z = z.masked_fill(hidden, mask)
            sureness = sureness.masked_fill(hidden, torch.inf)
            yield z

    def _sigma(self, alpha_t: float, alpha_s: float, confidence: Tensor) -> Tensor:
        """The probability [B, L] of being masked again between these levels."""
        if self.loop is not None and alpha_s > alpha_t:
            return torch.zeros_like(confidence)
        largest = min(1.0, (1 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0
        assert not isinstance(self.remasking, str)
        return self.remasking.sigma(largest, confidence)
