"""An objective of your own: a frozen dataclass that subclasses `Objective`, or one of its subclasses.

python -m examples.custom_objective
unmask train examples.custom_recipe:tiny --out runs/maskgit --objective examples.custom_objective:MaskGIT
unmask sample runs/maskgit --sampler confidence --allow-code
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from examples.custom_recipe import tiny, train
from unmask import MDLM, Batch
from unmask.diffusion.denoiser import DenoiserLike


@dataclass(frozen=True, kw_only=True)
class MaskGIT(MDLM):
    """Cross-entropy of the masked tokens, all with weight 1; not a bound on the likelihood, but often used."""

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Tensor:
        """Nats [B, L], zero where nothing is masked."""
        t = torch.rand(len(batch.tokens), 1, generator=generator).to(batch.tokens.device)
        noise = torch.rand(batch.tokens.shape, generator=generator).to(t)
        positions = (noise < t) & batch.loss_mask
        z = batch.tokens.masked_fill(positions, denoiser.vocab.mask_id)
        log_x = denoiser(z, t, positions, batch.context)
        nll = -log_x.gather(1, batch.tokens[positions][:, None])[:, 0]
        return torch.zeros_like(noise).masked_scatter(positions, nll)


if __name__ == "__main__":
    lm = train(tiny().with_objective(MaskGIT()))
    print(lm.objective, lm.sample(length=24, sampler="confidence").text)
