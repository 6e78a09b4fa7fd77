"""Networks of transformers are sharded block by block: two ranks train as one does, and checkpoints move between them.

On ranks, this file is also its own worker: `test_hf_fsdp.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import run_program
from unmask.backbones.base import network_blocks
from unmask.distributed import Distributed, init_distributed
from unmask.training._checkpoint import CheckpointStore
from unmask.training._parallelism import DDP, FSDP
from unmask.training.config import TrainingConfig
from unmask.training.denoising import build_denoising_trainer
from unmask.training.optim import AdamW
from unmask.training.trainer import Trainer
from unmask.types import Batch

NAMES = ("bert", "llama")
ROWS, LENGTH, MASK = 6, 9, 4


@dataclass(frozen=True)
class Texts:
    def batch(self, step: int, row_offset: int, count: int) -> Batch:
        tokens = torch.randint(MASK, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        return Batch(tokens[row_offset : row_offset + count], row_offset=row_offset, global_batch_size=ROWS)


def trainer_of(name: str, where: Distributed = Distributed(), parallelism: DDP | FSDP = DDP()) -> Trainer:  # noqa: B008
    from backbones.test_hf import denoiser

    model: Any = denoiser(name).float().requires_grad_(True)
    config = TrainingConfig(
        steps=60,
        batch_size=ROWS,
        microbatch_size=2,
        optimizer=AdamW(lr=1e-3, eps=1e-4),
        warmup_steps=2,
        bf16=False,
        ema_decay=0.9,
        parallelism=parallelism,
    )
    return build_denoising_trainer(model, model.objective, Texts(), config, where)


def curve(trainer: Trainer, folder: Path) -> list[float]:
    """The losses of four steps; saved after two."""
    losses = []
    for step in range(4):
        if step == 2:
            trainer.save_checkpoint(CheckpointStore(folder, trainer.distributed))
        losses.append(trainer.step()["loss"])
    return losses


def test_two_ranks_train_as_one_and_checkpoints_move_between_them(tmp_path: Path) -> None:
    done = run_program(__file__, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    for name in NAMES:
        alone = curve(trainer_of(name), tmp_path / f"{name} alone")
        assert len(set(alone)) == 4
        found = json.loads((tmp_path / name / "losses.json").read_text())
        assert found == pytest.approx(alone, abs=1e-5)
        resumed = trainer_of(name)
        resumed.load_checkpoint(CheckpointStore(tmp_path / name), 2)
        assert [resumed.step()["loss"] for _ in range(2)] == pytest.approx(alone[2:], abs=1e-5)


def main() -> None:
    from torch.distributed.fsdp import FSDPModule

    torch.set_num_threads(1)
    with init_distributed() as where:
        for name in NAMES:
            trainer, folder = trainer_of(name, where, FSDP()), Path(sys.argv[1]) / name
            blocks = network_blocks(trainer.model)
            assert len(blocks) == 2
            assert all(isinstance(block, FSDPModule) for block in blocks)
            losses = curve(trainer, folder)
            again = trainer_of(name, where, FSDP())
            again.load_checkpoint(CheckpointStore(folder, where), 2)
            assert [again.step()["loss"] for _ in range(2)] == losses[2:]
            if where.is_main:
                (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
