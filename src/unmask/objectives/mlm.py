"""MLM: BERT's masked language modelling, cross-entropy at a fixed share of chosen tokens.

    loss = (1/f) * sum over chosen positions l of -log x_theta(x_l | z)

Each token is chosen with probability f; a chosen token becomes the mask, a random token, or stays as it is, in fixed
shares (80, 10 and 10 % in BERT and Caduceus). The noise level is the same in every row, so the loss is no bound on
-log p: it is never shown as a likelihood. A network that was trained with it is read by SUBS, and its bound is MDLM's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import Masking
from unmask.diffusion.schedule import LogLinear, Schedule
from unmask.diffusion.time_sampling import UniformTimes
from unmask.objectives.base import Objective, sample_noise
from unmask.objectives.mdlm import MDLM, subs
from unmask.ops.chunked_head import WeightedNLL
from unmask.ops.packing import scatter_rows
from unmask.types import Batch, LogX, Queries, Vocab


@dataclass(frozen=True, kw_only=True)
class MLM(Objective):
    """Cross-entropy at a share `fraction` of the tokens, per chosen token on average. Not a bound on -log p."""

    fraction: float = 0.3
    """The probability that a token is chosen: 0.3 in MosaicBERT, 0.15 in BERT and Caduceus."""
    mask_share: float = 0.8
    """The share of chosen tokens that become the mask."""
    random_share: float = 0.1
    """The share of chosen tokens that become a random token; the rest stay as they are."""
    schedule: Schedule = LogLinear()
    """The noise schedule of the samplers and of the bound, which are MDLM's."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1; got {self.fraction}")
        mask, random = self.mask_share, self.random_share
        if min(mask, random) < 0 or mask + random > 1 + 1e-9:
            raise ValueError(
                f"mask_share and random_share must be 0 or above and together at most 1; got {mask} and {random}"
            )

    @property
    def process(self) -> Masking:
        return Masking(self.schedule)

    @property
    def normalized(self) -> bool:
        return True

    @property
    def is_softmax(self) -> bool:
        return True

    @property
    def bound(self) -> MDLM:
        """MDLM's bound of the same network."""
        return MDLM(schedule=self.schedule)

    def in_steps(self, steps: int | None) -> Objective:
        return self.bound.in_steps(steps)

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Float[Tensor, "B L"]:
        """Cross-entropy [B, L] at the chosen tokens, divided by `fraction`; zero elsewhere. No bound on -log p."""
        batch = batch.checked(denoiser.vocab)
        host, device = batch.on_host, batch.tokens.device
        uniform = sample_noise(denoiser, host, UniformTimes(), generator).uniform
        chosen = (uniform < self.fraction) & host.loss_mask
        z = self._corrupt(host.tokens, chosen, uniform / self.fraction, denoiser.vocab).to(device)
        visible = torch.full((len(z), 1), 1 - self.fraction, dtype=torch.float64, device=device)
        positions = Queries.from_host(chosen.numpy(), device)
        weight = torch.full_like(visible, 1 / self.fraction)
        row_fn = WeightedNLL(positions.gather(batch.tokens), positions.gather(weight))
        nll = denoiser(z, self.schedule.inverse(visible), positions, batch.context, row_fn=row_fn)
        return scatter_rows(nll, positions)

    def _corrupt(
        self, x: Int[Tensor, "B L"], chosen: Bool[Tensor, "B L"], u: Float64[Tensor, "B L"], vocab: Vocab
    ) -> Int[Tensor, "B L"]:
        """The text with its chosen tokens replaced; u [B, L] is uniform in [0, 1) where a token is chosen.

        Below `mask_share` it stands for the mask, in the next `random_share` for a token (any but the mask), beyond
        for the token itself.
        """
        z = torch.where(chosen & (u < self.mask_share), vocab.mask_id, x)
        if not self.random_share:
            return z
        place = (u - self.mask_share) / self.random_share
        other = (place * (vocab.size - 1)).long().clamp(0, vocab.size - 2)
        other = other + (other >= vocab.mask_id)
        return torch.where(chosen & (place >= 0) & (place < 1), other, z)
