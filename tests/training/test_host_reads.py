"""A whole training step, from batch to optimizer, waits for the device at most twice.

One read is the trainer's (loss, count and gradient norm), one is the number of masked tokens in a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from host_reads import host_reads
from unmask import DiTConfig, ModelConfig, Vocab
from unmask.objectives import D3PM, MDLM, OBJECTIVES, SEDD, BlockDiffusion, Objective
from unmask.training._batches import CheckedBatches
from unmask.training.config import TrainingConfig
from unmask.training.loss import DenoisingLoss
from unmask.training.trainer import Trainer
from unmask.types import Batch

VOCAB, LENGTH, ROWS = Vocab(7, 4), 12, 8
RECONSTRUCTION = 1
"""A second network call, at the visible tokens of z_0: their number is read as well."""
PADDING = 1
"""Padding is packed away in each network call: the number of tokens that are left is read."""


@dataclass(frozen=True)
class Texts:
    padded: bool

    def batch(self, step: int, row_offset: int, count: int) -> Batch:
        tokens = torch.randint(4, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        rows = slice(row_offset, row_offset + count)
        valid = torch.arange(LENGTH) < torch.arange(3, 3 + ROWS)[:, None]
        return Batch(tokens[rows], valid[rows] if self.padded else None, None, row_offset, ROWS)


def reads_of_a_step(objective: Objective, padded: bool = False, microbatch_size: int = ROWS) -> int:
    torch.manual_seed(0)
    causal = objective.process.is_left_to_right
    backbone = DiTConfig(width=16, depth=2, heads=2, max_length=LENGTH, dropout=0.1, causal=causal)
    config = TrainingConfig(steps=60, batch_size=ROWS, microbatch_size=microbatch_size, warmup_steps=2, bf16=False)
    model = ModelConfig(VOCAB, backbone, objective).build()
    trainer = Trainer(model, DenoisingLoss(objective), CheckedBatches(Texts(padded), VOCAB), config)
    for _ in range(4):
        trainer.step()
    with host_reads() as reads:
        trainer.step()
    return reads.total


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_training_step_reads_at_most_two_values(name: str) -> None:
    objective = OBJECTIVES[name]()
    reconstructs = isinstance(objective, D3PM)
    assert reads_of_a_step(objective) <= 2 + RECONSTRUCTION * reconstructs


@pytest.mark.parametrize("kind", [MDLM, SEDD, BlockDiffusion])
def test_so_does_one_with_exact_mask_counts(kind: type[MDLM | SEDD | BlockDiffusion]) -> None:
    assert reads_of_a_step(kind(exact_mask_counts=True)) <= 2


def test_every_micro_batch_reads_its_number_of_masked_tokens() -> None:
    assert reads_of_a_step(MDLM(), microbatch_size=2) <= 1 + ROWS // 2


def test_padding_costs_one_more_read() -> None:
    assert reads_of_a_step(MDLM(), padded=True) <= 2 + PADDING
