"""SDTT, self-distillation through time (arXiv 2410.21035), for masked diffusion.

    t uniform in [0, 1],  z ~ q(z_t | x),  m = `teacher_steps`,  step size d = 2^k/N in round k
    for i = 1, ..., m:    p_i = teacher log x at (z, t_i),  t_i = t - (i - 1) d
                          z <- an ancestral step from t_i to t_i - d
    target[l] = p_i[l]    of the step i that unmasks position l; p_m[l] if none does
    loss = mean over the masked positions l of z_t of KL(student(z_t)[l] || target[l])

A target is the teacher's distribution, not the token that was drawn; the tokens drawn change the targets of later
steps only. As all probabilities sum to one, when a position is unmasked is independent of its token, so the step of
each position is drawn first, and the teacher is queried once for each position.

The published program takes the teacher's times from another grid, t_i = t s_i + (1 - t)(t - m d) with s_i from 1 to 0
(`published_times`), where t s_i + (1 - s_i)(t - m d) was meant: its first step then unmasks at the rate of another time
than t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from unmask.diffusion.categorical import sample_inverse_cdf
from unmask.diffusion.denoiser import DenoiserLike
from unmask.diffusion.process import Masking
from unmask.diffusion.schedule import Schedule
from unmask.diffusion.time_sampling import UniformTimes
from unmask.distillation.base import KL, RoundDistillation, predict
from unmask.objectives.base import LossSum, corrupt_batch, sample_noise
from unmask.types import Batch, Queries

_PUBLISHED_EPS = 1e-5
"""The smallest time of the published program."""


@dataclass(frozen=True, kw_only=True)
class SDTT(RoundDistillation):
    """The student learns what its teacher makes of the masked positions in several ancestral steps."""

    processes = (Masking,)

    sampling_steps: int = 1024
    """N, the steps in which the first teacher samples; each round halves them."""
    teacher_steps: int = 2
    """m, the teacher's steps that the student takes at once."""
    published_times: bool = False
    """Take the teacher's times from the published program's grid, which is not even."""

    def __post_init__(self) -> None:
        if self.teacher_steps < 1:
            raise ValueError(f"teacher_steps must be at least 1; got {self.teacher_steps}")
        super().__post_init__()

    @property
    def _steps_at_once(self) -> int:
        return self.teacher_steps

    def loss(
        self, student: DenoiserLike, teacher: DenoiserLike, batch: Batch, number: int, generator: torch.Generator
    ) -> LossSum:
        batch = batch.checked(student.vocab)
        host, process = batch.on_host, student.process
        assert isinstance(process, Masking)
        noise = sample_noise(student, host, UniformTimes(), generator)
        t = self.start(noise.u)
        z = corrupt_batch(process, host, process.alpha(t), noise.uniform, student.vocab)
        uniforms = [sample_noise(student, host, UniformTimes(), generator).uniform for _ in range(self.teacher_steps)]
        divergence = self.divergence(student, teacher, batch, z, t, number, uniforms)
        return LossSum(divergence.sum(), len(divergence))

    def divergence(
        self,
        student: DenoiserLike,
        teacher: DenoiserLike,
        batch: Batch,
        z: Int[Tensor, "B L"],
        t: Float64[Tensor, "B 1"],
        number: int,
        uniforms: list[Tensor],
    ) -> Float[Tensor, " N"]:
        """KL [N] at the masked positions of z, which is on the host like t and the uniform numbers [B, L].

        The first of these decide in which step a position is unmasked, the next what becomes of those of step 1, ...
        """
        device, vocab = batch.tokens.device, student.vocab
        masked = Queries.from_host(((z == vocab.mask_id) & batch.on_host.loss_mask).numpy(), device)
        target = self.targets(teacher, batch, z, t, number, uniforms)
        row_fn = KL(target, vocab.mask_id, self.forward_kl)
        return student(z.to(device), t.to(device), masked, batch.context, row_fn=row_fn)

    def targets(
        self,
        teacher: DenoiserLike,
        batch: Batch,
        z: Int[Tensor, "B L"],
        t: Float64[Tensor, "B 1"],
        number: int,
        uniforms: list[Tensor],
    ) -> Float[Tensor, "N V"]:
        """What the student is to predict at the masked positions of z, in their order: see `divergence`."""
        assert isinstance(teacher.process, Masking)
        device, times = batch.tokens.device, self.times(t, number)
        masked = (z == teacher.vocab.mask_id) & batch.on_host.loss_mask
        step = self.unmasking_steps(teacher.process.schedule, times, number, uniforms[0])
        z = z.to(device)
        rows, places = [], []
        for i, time in enumerate(times):
            now = masked & (step == i)
            queries = Queries.from_host(now.numpy(), device)
            log_x = predict(teacher, z, time.to(device), queries, batch)
            rows.append(log_x)
            places.append(now.flatten().nonzero()[:, 0])
            if i + 1 < len(times) and len(log_x):
                tokens = sample_inverse_cdf(log_x.exp(), uniforms[i + 1][now].to(device), check=False)
                z = z.index_put((queries[0], queries[1]), tokens.clamp(min=0))  # damaged rows have damaged targets
        return torch.cat(rows)[torch.cat(places).argsort().to(device)]

    def unmasking_steps(
        self, schedule: Schedule, times: list[Tensor], number: int, uniform: Float64[Tensor, "B L"]
    ) -> Int[Tensor, "B L"]:
        """The step, from 0, in which a masked position gets its target: the one that unmasks it, or the last."""
        step, still_masked = torch.zeros_like(uniform, dtype=torch.long), torch.ones_like(times[0])
        for time in times[:-1]:
            alpha_t, alpha_s = (_alpha(schedule, each) for each in (time, time - self.step_size(number)))
            still_masked = still_masked * (1 - Masking.unmask_prob(alpha_s, alpha_t))
            step += uniform < still_masked
        return step

    def times(self, t: Float64[Tensor, "B 1"], number: int) -> list[Tensor]:
        """The time of each of the teacher's steps from t."""
        size, m = self.step_size(number), self.teacher_steps
        if not self.published_times:
            return [(t - i * size).clamp(min=0) for i in range(m)]
        shares = torch.linspace(1, 0, m, dtype=t.dtype).tolist()
        return [(t * share + (1 - t) * (t - m * size)).clamp(min=0) for share in shares]

    def start(self, u: Float64[Tensor, "B 1"]) -> Float64[Tensor, "B 1"]:
        """The time of u in [0, 1)."""
        return _PUBLISHED_EPS + (1 - _PUBLISHED_EPS) * u if self.published_times else u

    def step_size(self, number: int) -> float:
        return super().step_size(number) * (1 - _PUBLISHED_EPS if self.published_times else 1)


def _alpha(schedule: Schedule, t: Float64[Tensor, "B 1"]) -> Float64[Tensor, "B 1"]:
    """alpha(t), exactly 1 from t = 0 on: sampling leaves no masks."""
    return torch.where(t <= 0, 1, schedule.alpha(t.clamp(min=0)))
