"""A whole training step, from batch to optimizer, waits for the device at most twice.

It is once, in fact, whatever the objective, the padding and the number of micro-batches: the trainer reads loss, count
and gradient norm. Noise is drawn and applied on the host, so sizes are known there. Steps in which FLOPs are counted
are not special: the counts are of shapes. `host_reads.py` says what counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from host_reads import host_reads
from unmask import DiTConfig, ModelConfig, Vocab
from unmask.objectives import MDLM, OBJECTIVES, SEDD, BlockDiffusion, Objective
from unmask.training._batches import CheckedBatches
from unmask.training.config import TrainingConfig
from unmask.training.loss import DenoisingLoss
from unmask.training.trainer import Trainer
from unmask.types import Batch

VOCAB, LENGTH, ROWS = Vocab(7, 4), 12, 8


@dataclass(frozen=True)
class Texts:
    padded: bool
    prompted: bool

    def batch(self, step: int, row_offset: int, count: int) -> Batch:
        tokens = torch.randint(4, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        rows = slice(row_offset, row_offset + count)
        valid = torch.arange(LENGTH) < torch.arange(3, 3 + ROWS)[:, None]
        prompt = torch.arange(LENGTH).expand(ROWS, -1) < 2
        return Batch(
            tokens[rows],
            valid[rows] if self.padded else None,
            prompt[rows] if self.prompted else None,
            row_offset,
            ROWS,
        )


def reads_of_a_step(
    objective: Objective, *, padded: bool = False, prompted: bool = False, shifted: bool = False, micro: int = ROWS
) -> int:
    torch.manual_seed(0)
    causal = objective.process.is_left_to_right
    backbone = DiTConfig(
        width=16,
        depth=2,
        heads=2,
        max_length=LENGTH + objective.end_marks,
        dropout=0.1,
        causal=causal,
        shift_logits=shifted,
    )
    config = TrainingConfig(steps=60, batch_size=ROWS, microbatch_size=micro, warmup_steps=2, bf16=False)
    model = ModelConfig(VOCAB, backbone, objective).build()
    trainer = Trainer(model, DenoisingLoss(objective), CheckedBatches(Texts(padded, prompted), VOCAB), config)
    for _ in range(4):
        trainer.step()
    with host_reads() as reads:
        trainer.step()
    return reads.total


@pytest.mark.parametrize("data", [{}, {"padded": True}, {"padded": True, "prompted": True}], ids=str)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_training_step_reads_at_most_two_values(name: str, data: dict[str, bool]) -> None:
    assert reads_of_a_step(OBJECTIVES[name](), **data) <= 2


@pytest.mark.parametrize("kind", [MDLM, SEDD, BlockDiffusion])
def test_so_does_one_with_exact_mask_counts(kind: type[MDLM | SEDD | BlockDiffusion]) -> None:
    assert reads_of_a_step(kind(exact_mask_counts=True)) <= 2


@pytest.mark.parametrize("name", OBJECTIVES)
def test_so_does_one_of_many_micro_batches(name: str) -> None:
    """But for masks that depend on learned schedules, which are on the device: these are read for each of four."""
    objective: Objective = OBJECTIVES[name]()
    most = 2 if objective.new_parameters(VOCAB) is None else 1 + ROWS // 2
    assert reads_of_a_step(objective, padded=True, micro=2) <= most


def test_so_does_one_of_a_network_that_predicts_the_next_token() -> None:
    assert reads_of_a_step(MDLM(), padded=True, shifted=True) <= 2
