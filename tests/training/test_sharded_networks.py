"""Networks of transformers, of state spaces and of experts are sharded block by block: two ranks train as one does,
and checkpoints move between them.

On ranks, this file is also its own worker: `test_sharded_networks.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from processes import run_program
from unmask import MDLM, DiTConfig, LlamaBlock, ModelConfig, Vocab
from unmask.backbones.base import network_blocks
from unmask.backbones.moe import Experts
from unmask.distributed import Distributed, init_distributed
from unmask.training._checkpoint import CheckpointStore
from unmask.training._parallelism import DDP, FSDP
from unmask.training.config import TrainingConfig
from unmask.training.denoising import build_denoising_trainer
from unmask.training.optim import AdamW
from unmask.training.trainer import Trainer
from unmask.types import Batch

HF_NAMES = ("bert", "llama")
NAMES = (*HF_NAMES, "caduceus-ph", "caduceus-ps", "experts")
"""The heads of the state spaces are their embeddings: of PS, by way of complements."""
ROWS, LENGTH, MASK = 6, 9, 4
EXPERTS = DiTConfig(16, 2, 2, LENGTH, 0.0, llama=LlamaBlock(24, experts=Experts(6, 2, 8, 8, z_loss=0.01)))


@dataclass(frozen=True)
class Texts:
    def batch(self, step: int, row_offset: int, count: int) -> Batch:
        tokens = torch.randint(MASK, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
        return Batch(tokens[row_offset : row_offset + count], row_offset=row_offset, global_batch_size=ROWS)


def trainer_of(name: str, where: Distributed = Distributed(), parallelism: DDP | FSDP = DDP()) -> Trainer:  # noqa: B008
    from backbones import test_hf, test_ssm

    torch.manual_seed(0)
    model: Any
    if name == "experts":
        model = ModelConfig(Vocab(MASK + 1, MASK), EXPERTS, MDLM()).build()
    else:
        model = test_hf.denoiser(name) if name in HF_NAMES else test_ssm.build(test_ssm.CONFIGS[name])
    model = model.float().requires_grad_(True)
    config = TrainingConfig(
        steps=60,
        batch_size=ROWS,
        microbatch_size=1 if name == "experts" else 2,  # the balance of experts is that of a micro-batch
        optimizer=AdamW(lr=1e-3, eps=1e-4),
        warmup_steps=2,
        bf16=False,
        ema_decay=0.9,
        parallelism=parallelism,
    )
    return build_denoising_trainer(model, model.objective, Texts(), config, where)


def step(trainer: Trainer) -> list[float]:
    """Losses and the norm of the gradient, in which Adam hides a wrong factor."""
    metrics = trainer.step()
    return [metrics["loss"], metrics.get("aux_loss", 0.0), metrics["grad_norm"]]


def curve(trainer: Trainer, folder: Path) -> list[list[float]]:
    """Four steps; saved after two."""
    steps = [step(trainer) for _ in range(2)]
    trainer.save_checkpoint(CheckpointStore(folder, trainer.distributed))
    return [*steps, *(step(trainer) for _ in range(2))]


def assert_close(found: list[list[float]], expected: list[list[float]]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_two_ranks_train_as_one_and_checkpoints_move_between_them(tmp_path: Path) -> None:
    done = run_program(__file__, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    for name in NAMES:
        alone = curve(trainer_of(name), tmp_path / f"{name} alone")
        assert len({loss for loss, *_ in alone}) == 4
        assert all(aux_loss > 0 for _, aux_loss, _ in alone) == (name == "experts")
        assert_close(json.loads((tmp_path / name / "steps.json").read_text()), alone)
        resumed = trainer_of(name)
        resumed.load_checkpoint(CheckpointStore(tmp_path / name), 2)
        assert_close([step(resumed) for _ in range(2)], alone[2:])


def main() -> None:
    from torch.distributed.fsdp import FSDPModule

    torch.set_num_threads(1)
    with init_distributed() as where:
        for name in NAMES:
            trainer, folder = trainer_of(name, where, FSDP()), Path(sys.argv[1]) / name
            blocks = network_blocks(trainer.model)
            assert len(blocks) == 2
            assert all(isinstance(block, FSDPModule) for block in blocks)
            steps = curve(trainer, folder)
            again = trainer_of(name, where, FSDP())
            again.load_checkpoint(CheckpointStore(folder, where), 2)
            assert [step(again) for _ in range(2)] == steps[2:]
            if where.is_main:
                (folder / "steps.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
