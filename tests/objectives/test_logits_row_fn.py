"""Every objective has the same loss and gradients from chunks of log_x as from all of it at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_models
from unmask.diffusion.denoiser import DenoiserWrapper
from unmask.model import Denoiser
from unmask.objectives import MDLM, Objective
from unmask.ops import chunked_head as head
from unmask.types import Batch, Positions, RowFn, Times, Tokens

every_objective = pytest.mark.parametrize("kind", tiny_models.OBJECTIVES, ids=lambda kind: kind.__name__)


class Whole(DenoiserWrapper):
    """A denoiser that computes log_x whole, with gradients by autograd."""

    def __call__(
        self, z: Tokens, t: Times, positions: Positions, *rest: Any, row_fn: RowFn | None = None, **options: Any
    ) -> Tensor:
        assert row_fn is not None
        return row_fn(self.denoiser(z, t, positions, *rest, **options), slice(None))


def trainable(objective: Objective) -> Denoiser:
    return copy.deepcopy(tiny_models.tiny_denoiser(objective)).requires_grad_(True).train()


def loss(denoiser: Any, objective: Objective) -> Tensor:
    tokens = torch.arange(5 * tiny_models.LENGTH).view(5, -1) % 4
    return objective.token_nll(denoiser, Batch(tokens), torch.Generator().manual_seed(3))


@every_objective
@pytest.mark.parametrize("at_once", [1, 40, 1 << 24])
def test_parts_are_as_good_as_the_whole(kind: type[Objective], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_MAX_CHUNK_LOGITS", at_once)
    monkeypatch.setattr(head, "_MAX_CACHED_LOGITS", at_once // 3)
    objective = kind()
    parts, whole = trainable(objective), trainable(objective)
    ours, expected = loss(parts, objective), loss(Whole(whole), objective)
    torch.testing.assert_close(ours, expected)
    for nats in (ours, expected):
        (nats.sum() / 7).backward()
    for (name, mine), theirs in zip(parts.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda told, name=name: f"{name}: {told}")


@every_objective
def test_without_gradients_too(kind: type[Objective], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_MAX_CHUNK_LOGITS", 40)
    objective = kind()
    denoise = tiny_models.tiny_denoiser(objective)
    torch.testing.assert_close(loss(denoise, objective), loss(Whole(denoise), objective))


def test_a_network_that_is_not_finite_is_told() -> None:
    denoise = copy.deepcopy(tiny_models.tiny_denoiser(MDLM()))
    denoise.backbone.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        loss(denoise, MDLM())
