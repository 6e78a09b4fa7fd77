"""A network's auxiliary loss is added to the nats per token, as a mean over all tokens of the global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unmask import MDLM, ModelConfig, Vocab
from unmask.backbones.base import Backbone, BackboneConfig, Capabilities
from unmask.training._batches import CheckedBatches
from unmask.training.config import TrainingConfig
from unmask.training.loss import DenoisingLoss
from unmask.training.optim import AdamW
from unmask.training.trainer import Trainer
from unmask.types import Batch

VOCAB, LENGTH, ROWS = Vocab(7, 4), 6, 8


@dataclass(frozen=True)
class GatedConfig(BackboneConfig):
    max_length: int | None = LENGTH
    coefficient: float = 0.5

    def build(self, vocab: Vocab) -> Gated:
        return Gated(self, vocab)


class Gated(Backbone):
    """A network from outside with a router, whose mean square is its auxiliary loss."""

    def __init__(self, config: GatedConfig, vocab: Vocab) -> None:
        super().__init__()
        self.config, self._aux_loss = config, None
        self.embedding, self.router = nn.Embedding(vocab.size, 8), nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, vocab.size)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self.config.max_length)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def encode(self, h: Tensor, t: Tensor, positions: Any = None, context: Any = None) -> Tensor:
        gate = self.router(h)
        self._aux_loss = self.config.coefficient * gate.square().mean()
        h = h * gate.sigmoid()
        return h if positions is None else h[positions]

    def blocks(self) -> list[nn.Module]:
        return []

    def describe(self) -> dict[str, Any]:
        return {"network": "a router"}

    def aux_loss(self) -> Tensor | None:
        return self._aux_loss if self.config.coefficient else None


@dataclass(frozen=True)
class Texts:
    def batch(self, step: int, row_offset: int, count: int) -> Batch:
        tokens = torch.randint(4, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        return Batch(tokens[row_offset : row_offset + count], row_offset=row_offset, global_batch_size=ROWS)


def build(coefficient: float = 0.5) -> Any:
    torch.manual_seed(0)
    return ModelConfig(VOCAB, GatedConfig(coefficient=coefficient), MDLM()).build()


def train(coefficient: float, microbatch_size: int, steps: int = 5) -> tuple[list[dict[str, float]], Any]:
    model = build(coefficient)
    config = TrainingConfig(
        steps=9, batch_size=ROWS, microbatch_size=microbatch_size, optimizer=AdamW(lr=1e-2), warmup_steps=1, bf16=False
    )
    trainer = Trainer(model, DenoisingLoss(model.objective), CheckedBatches(Texts(), VOCAB), config)
    return [trainer.step() for _ in range(steps)], model


def test_it_is_trained_and_logged() -> None:
    without, _ = train(0.0, ROWS)
    logged, _ = train(0.5, ROWS)
    assert "aux_loss" not in without[0]
    assert logged[0]["loss"] == pytest.approx(without[0]["loss"] + logged[0]["aux_loss"], rel=1e-6)
    assert logged[0]["aux_loss"] > 0
    many, _ = train(50.0, ROWS, 9)
    assert many[-1]["aux_loss"] / 50 < logged[0]["aux_loss"] / 0.5  # the router learns from it


@pytest.mark.parametrize("microbatch_size", [2, 4])
def test_micro_batches_add_up(microbatch_size: int) -> None:
    whole, model = train(0.5, ROWS)
    parts, other = train(0.5, microbatch_size)
    for one, two in zip(whole, parts, strict=True):
        assert {name: two[name] for name in ("loss", "aux_loss", "grad_norm")} == pytest.approx(
            {name: one[name] for name in ("loss", "aux_loss", "grad_norm")}, rel=1e-5
        )
    for weight, same in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(weight, same, rtol=1e-4, atol=1e-6)


def test_ranks_with_different_numbers_of_tokens_count_as_often_as_they_have_tokens() -> None:
    """As ranks and micro-batches are summed: totals and metrics by themselves, divided by the sum of the counts."""
    model, sums, expected = build(), torch.zeros(3, dtype=torch.float64), 0.0
    for rows, length in ((6, 6), (2, 3)):
        batch = Batch(torch.randint(4, (rows, length), generator=torch.Generator().manual_seed(rows)))
        loss = DenoisingLoss(model.objective)(model, batch, torch.Generator().manual_seed(0))
        sums += loss.stack(torch.device("cpu"))
        aux = model.backbone.aux_loss()
        assert aux is not None
        expected += rows * length * float(aux.detach())
    assert float(sums[2]) == pytest.approx(expected, rel=1e-6)
    assert float(sums[1]) == 6 * 6 + 2 * 3
