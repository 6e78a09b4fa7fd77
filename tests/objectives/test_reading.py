"""Every objective's nats and gradients are the same from whole lines of log_x as from parts of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from unmask.backbones import head
from unmask.diffusion.denoise import Around
from unmask.model import Denoiser
from unmask.objectives import MDLM, AnyObjective, reading
from unmask.types import Batch, Each, Rows, Times, Tokens

every_objective = pytest.mark.parametrize("kind", tiny.OBJECTIVES, ids=lambda kind: kind.__name__)


class Whole(Around):
    """A denoiser that is asked for whole lines, and autograd for all gradients."""

    def __call__(
        self, z: Tokens, t: Times, rows: Rows, *, each: Each | None = None, **context: Any
    ) -> Tensor:
        assert each is not None
        return each(self.denoise(z, t, rows, **context), slice(None))


def trainable(objective: AnyObjective) -> Denoiser:
    return copy.deepcopy(tiny.denoiser(objective)).requires_grad_(True).train()


def loss(denoise: Any, objective: AnyObjective) -> Tensor:
    tokens = torch.arange(5 * tiny.LENGTH).view(5, -1) % 4
    return objective.token_nll(denoise, Batch(tokens), torch.Generator().manual_seed(3))


@every_objective
@pytest.mark.parametrize("at_once", [1, 40, 1 << 24])
def test_parts_are_as_good_as_the_whole(
    kind: type[AnyObjective], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "AT_ONCE", at_once)
    monkeypatch.setattr(reading, "WIDE_AT_ONCE", at_once // 3)
    objective = kind()
    parts, whole = trainable(objective), trainable(objective)
    ours, expected = loss(parts, objective), loss(Whole(whole), objective)
    torch.testing.assert_close(ours, expected)
    for nats in (ours, expected):
        (nats.sum() / 7).backward()
    for (name, mine), theirs in zip(parts.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda told, name=name: f"{name}: {told}")


@every_objective
def test_without_gradients_too(kind: type[AnyObjective], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "AT_ONCE", 40)
    objective = kind()
    denoise = tiny.denoiser(objective)
    torch.testing.assert_close(loss(denoise, objective), loss(Whole(denoise), objective))


def test_a_network_that_is_not_finite_is_told() -> None:
    denoise = copy.deepcopy(tiny.denoiser(MDLM()))
    denoise.backbone.output.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        loss(denoise, MDLM())
