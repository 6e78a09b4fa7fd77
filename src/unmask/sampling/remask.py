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
from unmask.diffusion.categorical import Choice
from unmask.diffusion.denoise import Denoise
from unmask.diffusion.noise import uniforms
from unmask.diffusion.process import Masking
from unmask.diffusion.times import check_steps, levels
from unmask.sampling.ancestral import write
from unmask.sampling.base import Drawn, Judged, by_name, reversed_process, row_uniforms, start
from unmask.sampling.canvas import Canvas
from unmask.sampling.confidence import Probability
from unmask.types import Tokens


def _check_eta(eta: float) -> None:
    if not is_number(eta) or not 0 <= eta <= 1:
        raise ValueError(f"eta, the strength of remasking, must be in [0, 1]; got {eta!r}")


@dataclass(frozen=True)
class Cap:
    """sigma = min(eta, sigma_max)."""

    eta: float = 0.008

    def __post_init__(self) -> None:
        _check_eta(self.eta)

    def sigma(self, largest: float, sureness: Tensor) -> Tensor:
        """[B, L], from each token's probability when it was written (inf where masked or fixed)."""
        return torch.full_like(sureness, min(self.eta, largest))


@dataclass(frozen=True)
class Rescale:
    """sigma = eta sigma_max."""

    eta: float = 0.015

    def __post_init__(self) -> None:
        _check_eta(self.eta)

    def sigma(self, largest: float, sureness: Tensor) -> Tensor:
        """[B, L], from each token's probability when it was written (inf where masked or fixed)."""
        return torch.full_like(sureness, self.eta * largest)


@dataclass(frozen=True)
class LeastSure:
    """sigma = eta sigma_max softmax(-probability when written): doubtful tokens go first ("conf")."""

    eta: float = 1.0

    def __post_init__(self) -> None:
        _check_eta(self.eta)

    def sigma(self, largest: float, sureness: Tensor) -> Tensor:
        """[B, L], from each token's probability when it was written (inf where masked or fixed)."""
        sigma = self.eta * largest * (-sureness).softmax(1).nan_to_num()
        written = sureness.isfinite()
        # Masked tokens come back at the mean rate, so that the share of visible ones stays what it should be.
        mean = sigma.sum(1, keepdim=True) / written.sum(1, keepdim=True).clamp(min=1)
        return torch.where(written, sigma, mean)


AnyRemasking: TypeAlias = Cap | Rescale | LeastSure
REMASKINGS: dict[str, AnyRemasking] = {"cap": Cap(), "rescale": Rescale(), "least-sure": LeastSure()}


@dataclass(frozen=True)
class Loop:
    """Write up to a share `visible` by t = on, then only correct until t = off, then finish."""

    on: float = 0.55
    off: float = 0.05
    visible: float = 0.9

    def __post_init__(self) -> None:
        if not (0 < self.off < self.on < 1 and 0 < self.visible < 1):
            raise ValueError(
                f"a loop needs 0 < off < on < 1 and 0 < visible < 1;"
                f" got off {self.off}, on {self.on}, visible {self.visible}"
            )

    def levels(self, steps: int) -> Tensor:
        """The visible share at t = 1, ..., 0: float64 [T + 1]."""
        t = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        writing = (1 - t) / (1 - self.on) * self.visible
        finishing = 1 - t / self.off * (1 - self.visible)
        return torch.where(t > self.on, writing, torch.where(t < self.off, finishing, self.visible))


@dataclass(frozen=True)
class Remask:
    """T steps of revealing and remasking; with a `loop`, remasking happens inside it only.

    `remasking` is "cap", "rescale" or "least-sure", or one of these as an object, with a strength of its own
    (`Cap(eta=0.01)`); `loop` True is the usual one.
    """

    steps: int = 128
    remasking: AnyRemasking | str = Rescale()
    loop: Loop | bool | None = None
    choice: Choice = Choice()

    def __post_init__(self) -> None:
        check_steps(self.steps)
        object.__setattr__(self, "remasking", by_name(self.remasking, REMASKINGS, "remasking"))
        if isinstance(self.loop, bool):
            object.__setattr__(self, "loop", Loop() if self.loop else None)
        if self.loop is not None and not isinstance(self.loop, Loop):
            raise ValueError(f"the loop must be a Loop, True or None; got {self.loop!r}")

    def run(self, denoise: Denoise, canvas: Canvas) -> Iterator[Tokens]:
        """Yield the canvas after each step."""
        schedule, mask = reversed_process(denoise, Masking).schedule, denoise.vocab.mask
        z = start(denoise, canvas)
        fixed = z != mask
        if isinstance(self.loop, Loop):
            visible = self.loop.levels(self.steps)
        else:
            visible = levels(schedule, self.steps).flip(0)
        times = schedule.inverse(visible)
        sureness = torch.full(z.shape, torch.inf, dtype=torch.float64, device=z.device)
        for step in range(1, self.steps + 1):
            alpha_t, alpha_s = visible[step - 1 : step + 1].tolist()
            sigma = self._sigma(alpha_t, alpha_s, sureness)
            appear = (alpha_s - (1 - sigma) * alpha_t) / (1 - alpha_t)
            event = uniforms(canvas.seeds, z.shape[1], 2 * step).to(z.device)
            shown = (z == mask) & (event < appear)
            hidden = ~fixed & (z != mask) & (event < sigma)
            active = shown.any(1).nonzero()[:, 0]
            if len(active):
                t = times[step - 1].expand(len(active), 1).to(z.device)
                uniform = row_uniforms(canvas.seeds, active, 2 * step + 1, shown[active])
                judged = Judged(Drawn(self.choice, uniform, mask), Probability(), denoise.normalised)
                said = denoise(z[active], t, shown[active], each=judged, which=active)
                z = write(z, active, shown[active], said[:, 0].long())
                sureness[shown] = said[:, 1]
            z = z.masked_fill(hidden, mask)
            sureness = sureness.masked_fill(hidden, torch.inf)
            yield z

    def _sigma(self, alpha_t: float, alpha_s: float, sureness: Tensor) -> Tensor:
        """The probability [B, L] of being masked again between these levels."""
        if self.loop is not None and alpha_s > alpha_t:
            return torch.zeros_like(sureness)
        largest = min(1.0, (1 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0
        assert not isinstance(self.remasking, str)
        return self.remasking.sigma(largest, sureness)
