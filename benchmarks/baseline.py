"""Additions to the reference implementation: semi-autoregressive sampling and likelihood estimates."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.mdlm_reference import ReferenceMDLM, ancestral_sample, stratified_times


@torch.no_grad()
def semi_autoregressive_sample(
    model: ReferenceMDLM, batch_size: int, length: int, stride: int, steps: int, max_steps: int | None = None
) -> Tensor:
    """Text longer than the model: fill a window, and keep its end as the context of the next one."""
    window = model.size.length
    z = torch.full((batch_size, length), model.mask_id)
    for first in range(0, length - window + 1, stride):
        z[:, first : first + window] = ancestral_sample(model, z[:, first : first + window].clone(), steps, max_steps)
    return z


@torch.no_grad()
def nll_estimates(model: ReferenceMDLM, windows: Tensor, draws: int, batch: int) -> Tensor:
    """Estimates [draws] of the nats per token of windows [N, L], each from times and masks of its own."""
    estimates = []
    for _ in range(draws):
        total = 0.0
        for x in torch.split(windows, batch):
            total += float(model.loss(x, stratified_times(len(x)), torch.rand(x.shape))) * x.numel()
        estimates.append(total / windows.numel())
    return torch.tensor(estimates)
