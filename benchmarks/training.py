"""Training: tokens per second and peak memory of a step."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from benchmarks.side_by_side import (
    PRECISIONS,
    IsolatedProcess,
    RandomTokens,
    Result,
    WorkFn,
    compare,
    fastest,
    matched_pair,
    unmask_uses_bf16,
)
from examples.mdlm_reference import ModelSize, ReferenceTrainer
from unmask.data.loader import Loader, Wrapped
from unmask.training.config import TrainingConfig
from unmask.training.loss import DenoisingLoss
from unmask.training.optim import AdamW
from unmask.training.trainer import Trainer

WORDS = ModelSize(vocab=50_258, depth=8, width=512, length=128)
CHARACTERS = ModelSize(vocab=28, depth=6, width=384, length=256, heads=6)
DEEP = ModelSize(vocab=8_192, depth=12, width=384, length=512, heads=6)
WIDE = ModelSize(vocab=32_000, depth=5, width=640, length=192, heads=10)
"""The last two are shapes that nothing was tuned on."""

STEPS = 2
"""Consecutive steps in each turn."""


def baseline_trainer(size: ModelSize, bf16: bool = False) -> ReferenceTrainer:
    """The reference implementation, ready to train."""
    return ReferenceTrainer(matched_pair(size, bf16=bf16)[0])


def unmask_trainer(size: ModelSize, batch: int, bf16: bool = False) -> Trainer:
    """`unmask`: the same network, optimizer, clipping and moving average."""
    model = matched_pair(size)[1]
    loader = Loader(_random_tokens(size, batch), Wrapped(size.length), batch)
    settings = TrainingConfig(steps=1000, batch_size=batch, optimizer=AdamW(lr=3e-4), warmup_steps=0, bf16=bf16)
    model.denoiser.train()
    return Trainer(model.denoiser, DenoisingLoss(model.objective), loader, settings)


def random_batch(size: ModelSize, batch: int) -> Tensor:
    """Random tokens, [batch, L]."""
    return torch.from_numpy(_random_tokens(size, batch).ids[: batch * size.length]).view(batch, size.length)


def _random_tokens(size: ModelSize, batch: int) -> RandomTokens:
    return RandomTokens.generate(64 * batch * size.length, size.vocab)


def baseline_steps(size: ModelSize, batch: int, bf16: bool) -> WorkFn:
    """Steps of the reference, on the same rows each time."""
    trainer, x = baseline_trainer(size, bf16), random_batch(size, batch)

    def work() -> None:
        for _ in range(STEPS):
            trainer.step(x)

    return work


def unmask_steps(size: ModelSize, batch: int, bf16: bool) -> WorkFn:
    """Steps of `unmask` in the middle of a run (the first ones count FLOPs, which takes time)."""
    run = unmask_trainer(size, batch, bf16)
    run.state.step = 100

    def work() -> None:
        for _ in range(STEPS):
            run.step()

    return work


def measure_training(size: ModelSize, batch: int, repeats: int = 7) -> Result:
    """Seconds of a step."""
    work = f"training, V = {size.vocab:,}, {size.depth} x {size.width}, L = {size.length}, batch {batch}"
    with ExitStack() as processes:
        ways = {
            name: processes.enter_context(IsolatedProcess(baseline_steps, size, batch, bf16))
            for name, bf16 in PRECISIONS.items()
        }
        precision = fastest(ways)
        for name, way in ways.items():
            if name != precision:
                way.process.kill()  # frees its memory
        ours = processes.enter_context(IsolatedProcess(unmask_steps, size, batch, unmask_uses_bf16()))
        return compare(work, precision, ways[precision], ours, repeats, baseline_fraction=STEPS, ours_fraction=STEPS)


if __name__ == "__main__":
    for size, batch in ((WORDS, 8), (CHARACTERS, 16), (DEEP, 4), (WIDE, 8)):
        result = measure_training(size, batch)
        print(result, result.ratio, flush=True)
