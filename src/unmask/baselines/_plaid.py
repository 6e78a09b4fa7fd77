"""Plaid: likelihood-based Gaussian diffusion of embeddings (arXiv 2305.18619), a baseline of the MDLM paper.

    -log p(x) <= CE(x_theta(z_0), x)                              reconstruction
               + E_t 1/2 exp(-gamma) gamma'(t) |E_x - x_hat(z_t)|^2   diffusion
               + KL(q(z_1 | x) || N(0, 1))                        prior

per token, with x_hat = sum over v of x_theta(v) E_v. A batch is divided: some of its rows pay the reconstruction,
the others the diffusion term at stratified times, and each part is averaged over its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from unmask.baselines._bound import Rows, Terms
from unmask.baselines._denoiser import unwrap
from unmask.baselines._gaussian import GaussianDiffusion, GaussianState, noiseless, prior_nats, token_embeddings
from unmask.baselines._noise import BlockNoise, row_seeds, seeded_normal
from unmask.baselines._plaid_denoiser import EVAL_SHARE, PlaidDenoiser
from unmask.diffusion.categorical import SamplingParams
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.noise_level import validate_steps
from unmask.model.denoiser import ModelConfig
from unmask.objectives.base import LossSum, Objective
from unmask.objectives.mdlm import subs
from unmask.sampling.base import Sampler, init_tokens, require_process
from unmask.sampling.canvas import Canvas
from unmask.types import Batch, LogX, Queries, Tokens, Vocab

_MAX_WIDTH = 1 << 16


@dataclass(frozen=True)
class Plaid(Objective):
    """The variational bound of Gaussian diffusion over learned unit embeddings, with a learned schedule."""

    embedding_dim: int = 16
    """e, the dimension of the embeddings that are noised."""
    schedule_width: int = 1024
    """Units of the network that is the schedule."""
    gamma_0: float = -3.0
    """Negative log signal-to-noise ratio at t = 0 before training; it is learned."""
    gamma_1: float = 6.0
    """The same at t = 1."""
    self_conditioning: int = 4
    """Every so many rows of a training batch read an estimate of a first call; evaluation and sampling always do.
    0: never, anywhere."""
    prior_warmup: float = 0.05
    """The share of the run over which the output prior, alpha/sigma^2 <z, E_v>, is faded in."""
    readout_width: int = 256
    """The head's products are scaled by this over the network's width (muP)."""
    noise_lr_scale: float = 7.0
    """The learning rate of embeddings, schedule and its bounds, as a multiple of the network's."""

    def __post_init__(self) -> None:
        for name in ("embedding_dim", "schedule_width", "readout_width"):
            if not 1 <= getattr(self, name) <= _MAX_WIDTH:
                raise ValueError(f"{name} must be from 1 to {_MAX_WIDTH:,}; got {getattr(self, name)}")
        if not -math.inf < self.gamma_0 < self.gamma_1 < math.inf:
            raise ValueError(f"gamma_0 must be below gamma_1, both finite; got {self.gamma_0} and {self.gamma_1}")
        if self.self_conditioning < 0:
            raise ValueError(f"self_conditioning must be 0 (never) or above; got {self.self_conditioning}")
        if not 0 <= self.prior_warmup <= 1:
            raise ValueError(f"prior_warmup is a share of the run, in [0, 1]; got {self.prior_warmup}")
        if not 0 < self.noise_lr_scale < math.inf:
            raise ValueError(f"noise_lr_scale must be above 0 and finite; got {self.noise_lr_scale}")

    @property
    def process(self) -> GaussianDiffusion:
        return GaussianDiffusion()

    @property
    def normalized(self) -> bool:
        return True

    @property
    def is_softmax(self) -> bool:
        return True

    def build_denoiser(self, config: ModelConfig) -> PlaidDenoiser:
        return PlaidDenoiser(config)

    def log_probs(self, logits: Float[Tensor, "N V"], alpha: Float[Tensor, "N 1"], vocab: Vocab) -> LogX:
        return subs(logits, vocab)

    def token_nll(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> Float[Tensor, "B L"]:
        batch = batch.checked(denoiser.vocab)
        rows = self._divide(batch, generator)
        return self.row_terms(denoiser, batch, rows).nats(rows)

    def training_loss(self, denoiser: DenoiserLike, batch: Batch, generator: torch.Generator) -> LossSum:
        """The bound, from rows that are divided by the running deviations of its two parts."""
        model = unwrap(denoiser, PlaidDenoiser)
        if batch.resolved_global_batch_size < 2:
            raise ValueError("Plaid divides a batch into rows for its two terms: set batch_size to 2 or more")
        batch = batch.checked(denoiser.vocab)
        rows = self._divide(batch, generator, model.reconstruction_share)
        terms = self.row_terms(denoiser, batch, rows)
        return LossSum(terms.nats(rows).sum(), batch.loss_mask.sum(), terms.moments(rows, batch.loss_mask))

    def _divide(self, batch: Batch, generator: torch.Generator, training_share: float | None = None) -> Rows:
        """Which term each row pays: by a random order of the rows of the global batch, so that no row is special."""
        parts = [
            self._divide_group(part, part_generator, training_share)
            for part, part_generator in batch.split_by_noise(generator)
        ]
        joined = {
            name: torch.cat([getattr(part, name) for part in parts]).to(batch.tokens.device) for name in vars(parts[0])
        }
        return Rows(**joined)

    def _divide_group(self, batch: Batch, generator: torch.Generator, training_share: float | None) -> Rows:
        total = batch.resolved_global_batch_size
        order = torch.randperm(total, generator=generator)
        offset, rounding = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        seeds = row_seeds(batch, generator)
        index = order[batch.row_offset : batch.row_offset + len(batch.tokens), None]
        if training_share is None:
            expected = EVAL_SHARE * total
            count = math.floor(expected + rounding)  # at random, so that its mean is as expected
        else:
            count = max(1, min(total - 1, round(training_share * total)))
            expected = float(count)
        others = total - count if total > 1 else total - expected  # a single row pays one of the two
        reconstructs = index < count
        t = torch.where(reconstructs, 0, (index.double() - count + offset) / max(1, total - count))
        length, width = batch.tokens.shape[1], self.embedding_dim
        return Rows(
            t,
            torch.where(reconstructs, total / expected, 0.0).double(),
            torch.where(reconstructs, 0.0, total / others).double(),
            self._self_conditioned(index[:, 0], training_share is not None),
            seeded_normal(seeds, length * width).view(-1, length, width),
        )

    def _self_conditioned(self, index: Tensor, in_training: bool) -> Bool[Tensor, " B"]:
        every = self.self_conditioning
        if every == 0:
            return torch.zeros_like(index, dtype=torch.bool)
        return index % every == 0 if in_training else torch.ones_like(index, dtype=torch.bool)

    def row_terms(self, denoiser: DenoiserLike, batch: Batch, rows: Rows) -> Terms:
        """The three terms of the bound at the rows' times and noise. Prompts, and N in DNA, are read without noise.

        Gradients: rows that are self-conditioned train the network alone. The schedule's network gets 2 x (a row's
        diffusion term) times its gradient, which is that of the squared term: it minimizes the variance, and all
        else the bound.
        """
        model: PlaidDenoiser = unwrap(denoiser, PlaidDenoiser)
        model.require_whole()
        detached = rows.self_conditioned if model.training and torch.is_grad_enabled() else None
        row_diffusion = torch.zeros_like(rows.t)  # filled in below, before the hooks of the schedule run
        noise = model.schedule(rows.t, lambda gradient: 2 * row_diffusion * gradient)
        noise = noise if detached is None else noise.detached_at(detached)
        gamma_1 = model.schedule.bounds()[1].expand(len(batch), 1, 1)
        with torch.autocast(rows.t.device.type, enabled=False):
            matrix = model.embedding()
            clean = token_embeddings(matrix, batch.tokens, detached).double()
            z = noise.alpha[..., None] * clean + noise.sigma[..., None] * rows.eps
            if batch.prompt_mask is not None:
                z = torch.where(batch.prompt_mask[..., None], noiseless(clean, noise), z)
        state = GaussianState(z, torch.zeros_like(z), noise, detached)
        everywhere = Queries.everywhere(batch.tokens.shape, batch.tokens.device)
        call = _call(denoiser)
        if bool(rows.self_conditioned.any()):
            with torch.no_grad():
                first = model.estimate(call(state, rows.t, everywhere, batch.context), state)
            state = replace(state, estimate=first * rows.self_conditioned[:, None, None])
        log_x = call(state, rows.t, everywhere, batch.context)
        error = (clean - model.estimate(log_x, state)).square().sum(-1)
        reconstruction = -log_x.gather(-1, batch.tokens.flatten()[:, None]).view(batch.tokens.shape).double()
        counted = batch.loss_mask
        diffusion = noise.weight * error * counted
        with torch.no_grad():
            row_diffusion += diffusion.sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)
        if detached is not None:
            gamma_1 = torch.where(detached[:, None, None], gamma_1.detach(), gamma_1)
        return Terms(reconstruction * counted, diffusion, prior_nats(clean, gamma_1) * counted)


@dataclass(frozen=True)
class GaussianSteps(Sampler):
    """T steps z_t -> z_s from pure noise; the tokens are the argmax of the network's answer at t = 0.

        z_s = (1 - c)(alpha_s/alpha_t) z_t + c alpha_s x_hat + sqrt(c) sigma_s eps,   c = 1 - exp(gamma_s - gamma_t)

    Every call reads the estimate of the one before it. It writes whole texts: there is no prompt.
    """

    processes = (GaussianDiffusion,)

    steps: int = 128
    """T, the number of steps."""
    params: SamplingParams = SamplingParams()
    """The temperature divides the predicted noise (published texts: 0.9); there is no top_k and no top_p."""

    def __post_init__(self) -> None:
        validate_steps(self.steps)
        if self.params.temperature == 0:
            raise ValueError("Plaid's temperature divides its predicted noise, so it must be above 0; got 0")
        if self.params.top_k is not None or self.params.top_p is not None:
            raise ValueError("Plaid takes the most probable tokens at the end: leave out top_k and top_p")

    @property
    def may_remask(self) -> bool:
        return True

    def run(self, denoiser: DenoiserLike, canvas: Canvas) -> Iterator[Tokens]:
        require_process(denoiser, GaussianDiffusion)
        tokens = init_tokens(denoiser, canvas)
        holes = tokens == denoiser.vocab.mask_id
        rows = holes.any(1).nonzero()[:, 0]
        if not len(rows):
            return
        if not bool(holes[rows].all()):
            longest = "" if denoiser.max_length is None else f", of at most {denoiser.max_length:,} tokens"
            raise ValueError(f"Plaid writes whole texts{longest}: it can neither go on from a prompt nor fill holes")
        model: PlaidDenoiser = unwrap(denoiser, PlaidDenoiser)
        seeds = [canvas.seeds[row] for row in rows.tolist()]
        noise = BlockNoise(seeds, 0, tokens.shape[1], model.embedding_dim)
        for log_x in self._steps(denoiser, model, noise, rows):
            tokens = tokens.clone()
            tokens[rows] = log_x.argmax(-1).view(len(rows), -1)
            yield tokens

    def _steps(
        self, denoiser: DenoiserLike, model: PlaidDenoiser, noise: BlockNoise, sequence_ids: Tensor
    ) -> Iterator[LogX]:
        """log_x [B L, V] at t = 1, 1 - 1/T, ..., 0."""
        z = noise.normal(0).to(sequence_ids.device).double()
        estimate, self_conditioned = torch.zeros_like(z), cast("Plaid", model.objective).self_conditioning > 0
        everywhere = Queries.everywhere(z.shape[:2], z.device)
        for step in range(self.steps, -1, -1):
            t = torch.full((len(z), 1), step / self.steps, dtype=torch.float64, device=z.device)
            at = model.schedule(t)
            state = GaussianState(z, estimate, at)
            log_x = _call(denoiser)(state, t, everywhere, sequence_ids=sequence_ids)
            yield log_x
            if step == 0:
                return
            x_hat = model.estimate(log_x, state)
            before = model.schedule(t - 1 / self.steps)
            c = -torch.expm1(before.gamma - at.gamma)[..., None]
            mean = (1 - c) * (before.alpha / at.alpha)[..., None] * z + c * before.alpha[..., None] * self._temper(
                x_hat, state
            )
            fresh = noise.normal(self.steps - step + 1).to(z)
            z = mean + c.sqrt() * before.sigma[..., None] * fresh
            estimate = x_hat if self_conditioned else estimate

    def _temper(self, x_hat: Float64[Tensor, "B L e"], state: GaussianState) -> Float64[Tensor, "B L e"]:
        """x_hat for the predicted noise (z - alpha x_hat)/sigma divided by the temperature."""
        if self.params.temperature == 1:
            return x_hat
        alpha = state.noise.alpha[..., None]
        return (state.z - (state.z - alpha * x_hat) / self.params.temperature) / alpha


def _call(denoiser: DenoiserLike) -> Callable[..., Tensor]:
    """The denoiser as a function of `GaussianState`."""
    return cast("Callable[..., Tensor]", denoiser)
