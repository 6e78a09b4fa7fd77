"""Discrete consistency distillation (Duo, arXiv 2506.10892), for uniform noise.

    t uniform in [0, 1],  t <- min(t + d, 1),  s = t - d,  d = 2^k/N in round k
    (z_s, z_t) = two states of one deterministic path of Gaussian diffusion, read by argmax
    loss = mean over tokens of KL(student(z_t, alpha_t) || teacher(z_s, alpha_s))

The path is w_t = a_t onehot(x) + b_t eps with a_t^2 = 1 - b_t^2 = sigmoid(-gamma(t)), gamma linear in t, and z_t =
argmax w_t. All tokens but x have the same coefficient, so the largest of them, j, is the same at all times, uniform and
independent of its size M: z_t = x while M - eps_x < e^(-gamma/2), and z_t = j after. So two uniform numbers for a token
draw the same states as a Gaussian for each token of the vocabulary: one for j, and one that is compared with P(gamma) =
P(z_t = x). With V clean tokens

    P(gamma) = integral of phi(y - e^(-gamma/2)) Phi(y)^(V - 1) dy,     alpha_t = (V P - 1)/(V - 1).

The network is told the time at which its own schedule has this alpha. For masked diffusion the coupling has no
counterpart: the state at t does not determine one at s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import UniformNoise
from unmask.diffusion.time_sampling import UniformTimes
from unmask.distillation.base import KL, RoundDistillation, predict
from unmask.objectives.base import LossSum, sample_noise
from unmask.types import Batch, Vocab

_NODES, _REACH = 1024, 9.0
"""Nodes of the quadrature of P, and how many standard deviations it reaches to either side."""


@dataclass(frozen=True, kw_only=True)
class DCD(RoundDistillation):
    """The student learns to say at a time what its teacher says a step earlier on the same path."""

    processes = (UniformNoise,)

    sampling_steps: int = 512
    """N, the steps in which the first teacher samples; each round halves them."""
    gamma_min: float = -4.0
    """gamma at t = 0: the smaller, the fewer tokens are replaced."""
    gamma_max: float = -1.0
    """gamma at t = 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gamma_min < self.gamma_max:
            raise ValueError(f"gamma_min must be below gamma_max; got {self.gamma_min} and {self.gamma_max}")

    def loss(
        self, student: DenoiserLike, teacher: DenoiserLike, batch: Batch, number: int, generator: torch.Generator
    ) -> LossSum:
        batch = batch.checked(student.vocab)
        noise = sample_noise(student, batch, UniformTimes(), generator)
        other = sample_noise(student, batch, UniformTimes(), generator).uniform
        divergence = self.divergence(student, teacher, batch, noise.u, number, noise.uniform, other)
        return LossSum(divergence.sum(), len(divergence))

    def divergence(
        self,
        student: DenoiserLike,
        teacher: DenoiserLike,
        batch: Batch,
        t: Float64[Tensor, "B 1"],
        number: int,
        uniform: Float64[Tensor, "B L"],
        other: Float64[Tensor, "B L"],
    ) -> Float[Tensor, " N"]:
        """KL [N] at the tokens of the loss mask, for a time t before the step is added: see `coupled`."""
        process, vocab, positions = student.process, student.vocab, batch.loss_positions()
        assert isinstance(process, UniformNoise)
        t = (t + self.step_size(number)).clamp(max=1)
        states = []
        for time in (t, t - self.step_size(number)):
            alpha = self.alpha(time, vocab.size - 1)
            z = torch.where(batch.loss_mask, coupled(batch.tokens, alpha, uniform, other, vocab), batch.tokens)
            states.append((z, process.schedule.inverse(alpha)))
        (z_t, time_t), (z_s, time_s) = states
        target = predict(teacher, z_s, time_s, positions, batch)
        row_fn = KL(target, vocab.mask_id, self.forward_kl)
        return student(z_t, time_t, positions, batch.context, row_fn=row_fn)

    def alpha(self, t: Float64[Tensor, "B 1"], num_clean: int) -> Float64[Tensor, "B 1"]:
        """alpha of the argmax at t, for a vocabulary of `num_clean` tokens."""
        signal = torch.exp(-(self.gamma_min + (self.gamma_max - self.gamma_min) * t) / 2)
        return (num_clean * prob_kept(signal, num_clean) - 1) / (num_clean - 1)


def prob_kept(signal: Float64[Tensor, "*shape"], num_clean: int) -> Float64[Tensor, "*shape"]:
    """P(eps_x + signal is the largest of `num_clean` standard normals, the others without it), by quadrature.

    The trapezoidal rule is exact to rounding here: the integrand is smooth and vanishes at both ends.
    """
    y = torch.linspace(-_REACH, _REACH, _NODES, dtype=torch.float64, device=signal.device)
    log_density = -y.square() / 2 - math.log(2 * math.pi) / 2
    log_others: Tensor = (num_clean - 1) * torch.special.log_ndtr(signal[..., None] + y)
    return (log_density + log_others).exp().sum(-1) * (2 * _REACH / (_NODES - 1))


def coupled(
    x: Int[Tensor, "B L"],
    alpha: Float64[Tensor, "B 1"],
    uniform: Float64[Tensor, "B L"],
    other: Float64[Tensor, "B L"],
    vocab: Vocab,
) -> Int[Tensor, "B L"]:
    """z ~ q(. | x) at `alpha`, on one path for all alpha: a token keeps its value down to some alpha, and has another
    one from there on.

    `uniform` decides when it is replaced, `other` by which of the other clean tokens.
    """
    num_clean = vocab.size - 1
    replaced = uniform < (1 - alpha) * (num_clean - 1) / num_clean
    clean_index = x - (x > vocab.mask_id).long()
    index = (other * (num_clean - 1)).long().clamp(max=num_clean - 2)
    index = index + (index >= clean_index)
    return torch.where(replaced, index + (index >= vocab.mask_id), x)
