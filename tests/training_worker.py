"""A small run, started by tests as a process of its own: `worker.py FOLDER [settings as JSON]`."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from unmask import MDLM, BlockDiffusion, DiTConfig, GenMD4, ModelConfig, Objective, Vocab
from unmask.data.loader import Loader, Wrapped
from unmask.distributed import Distributed, init_distributed
from unmask.training._checkpoint import CheckpointStore
from unmask.training._parallelism import FSDP
from unmask.training.config import TrainingConfig
from unmask.training.curriculum import VarianceClipping
from unmask.training.denoising import build_denoising_trainer
from unmask.training.logger import TrainingLogger
from unmask.training.loop import train
from unmask.training.optim import Muon
from unmask.training.trainer import Trainer

TRAINING = TrainingConfig(
    steps=12,
    batch_size=7,
    microbatch_size=2,
    optimizer=Muon(),
    warmup_steps=3,
    bf16=False,
    save_every=4,
    log_every=1,
)


BLOCKS, CLIPPED = BlockDiffusion(block_size=4), VarianceClipping(every=5, batches=2)


class CycleTokens:
    """Text with structure, so that there is something to learn: a noisy cycle of six tokens."""

    num_tokens = 5000
    document_ends = np.array([1500, 2500, 5000])

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        ids = np.arange(self.num_tokens) % 6
        self.ids = np.where(random.random(self.num_tokens) < 0.1, random.integers(0, 6, self.num_tokens), ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop]


def build_trainer(
    settings: TrainingConfig,
    dropout: float,
    where: Distributed,
    objective: Objective = MDLM(),  # noqa: B008
) -> Trainer:
    torch.manual_seed(0)
    backbone = DiTConfig(width=32, depth=2, heads=2, max_length=16, dropout=dropout)
    denoise = ModelConfig(Vocab(7, 6), backbone, objective).build()
    loader = Loader(CycleTokens(), Wrapped(16), settings.batch_size)
    return build_denoising_trainer(denoise, objective, loader, settings, where)


def limit_memory(run: Trainer) -> None:
    """From now on a forward pass needs a quarter of a gigabyte, and the process may have an eighth more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**27
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    run.model.register_forward_pre_hook(lambda *_: torch.empty(2**28, dtype=torch.uint8).numel() and None)


def main() -> None:
    folder, wishes = Path(sys.argv[1]), json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")
    torch.set_num_threads(1)
    sharded, dropout = wishes.pop("sharded", False), wishes.pop("dropout", 0.0)
    kill_at, kill_in_save = wishes.pop("kill_at", None), wishes.pop("kill_in_save", False)
    memory_ends_at, report_frames = wishes.pop("memory_ends_at", None), wishes.pop("report_frames", False)
    number = signal.Signals[wishes.pop("signal", "SIGKILL")]
    blocks, objective = wishes.pop("blocks", False), cast("Objective", MDLM())
    if blocks:
        wishes["curriculum"], objective = CLIPPED, BLOCKS
    if wishes.pop("genmd4", False):
        objective = GenMD4()
    settings = replace(TRAINING, **wishes, **({"parallelism": FSDP()} if sharded else {}))
    folder.mkdir(parents=True, exist_ok=True)
    with init_distributed() as where:
        run = build_trainer(settings, dropout, where, objective)
        checkpoints = CheckpointStore(folder, where)
        newest, _ = checkpoints.latest()
        if newest is not None:
            run.load_checkpoint(checkpoints, newest)
        take_step, real_rename = run.step, Path.rename

        def step() -> dict[str, float]:
            if run.state.step == kill_at:
                os.kill(os.getpid(), number)
            if run.state.step == memory_ends_at:
                limit_memory(run)
            return take_step()

        def rename(self: Path, target: Path) -> Path:
            if self.name == f".step-{8:08d}.writing":
                os.kill(os.getpid(), signal.SIGKILL)
            return real_rename(self, target)

        run.step = step  # type: ignore[method-assign]
        if kill_in_save:
            Path.rename = rename  # type: ignore[method-assign, assignment]
        with TrainingLogger(folder, settings.steps, run.state.step, quiet=not where.is_main) as log:
            finished = train(run, checkpoints, log)
    if report_frames:
        from torch._dynamo.utils import counters

        print(f"compiled frames: {counters['frames']['ok']}")
    sys.exit(0 if finished else 3)


if __name__ == "__main__":
    main()
