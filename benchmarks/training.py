"""Training: tokens per second and peak memory of a step."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from benchmarks.measure import PRECISIONS, Alone, RandomText, Result, Work, bf16, compare, fastest, pair
from benchmarks.textbook import Size, Trainer
from unmask.data.loader import Loader, Wrapped
from unmask.training.loop import Run, Training
from unmask.training.optim import AdamW
from unmask.world import World

WORDS = Size(vocab=50_258, depth=8, width=512, length=128)
CHARACTERS = Size(vocab=28, depth=6, width=384, length=256, heads=6)
DEEP = Size(vocab=8_192, depth=12, width=384, length=512, heads=6)
WIDE = Size(vocab=32_000, depth=5, width=640, length=192, heads=10)
"""The last two are shapes that nothing was tuned on."""

STEPS = 2
"""One after another, before it is the other way's turn."""


def textbook_trainer(size: Size, bf16: bool = False) -> Trainer:
    """The textbook, ready to be stepped."""
    return Trainer(pair(size, bf16=bf16)[0])


def own_run(size: Size, batch: int, bf16: bool = False) -> Run:
    """Ours: the same network, optimizer, clipping and moving average."""
    model = pair(size)[1]
    loader = Loader(_text(size, batch), Wrapped(size.length), batch)
    settings = Training(steps=1000, batch_size=batch, optimizer=AdamW(lr=3e-4), warmup=0, bf16=bf16)
    model.denoise.train()
    return Run(model.denoise, model.objective, loader, settings, World())


def rows(size: Size, batch: int) -> Tensor:
    """Some of the text that ours is trained on, [batch, L]."""
    return torch.from_numpy(_text(size, batch).ids[: batch * size.length]).view(batch, size.length)


def _text(size: Size, batch: int) -> RandomText:
    return RandomText.of(64 * batch * size.length, size.vocab)


def textbook_steps(size: Size, batch: int, bf16: bool) -> Work:
    """Steps of the textbook, on the same rows each time."""
    trainer, x = textbook_trainer(size, bf16), rows(size, batch)

    def work() -> None:
        for _ in range(STEPS):
            trainer.step(x)

    return work


def own_steps(size: Size, batch: int, bf16: bool) -> Work:
    """Steps of ours in the middle of a run (the first ones count FLOPs, which takes time)."""
    run = own_run(size, batch, bf16)
    run.state.step = 100

    def work() -> None:
        for _ in range(STEPS):
            run.step()

    return work


def throughput(size: Size, batch: int, repeats: int = 7) -> Result:
    """Seconds of a step."""
    work = f"training, V = {size.vocab:,}, {size.depth} x {size.width}, L = {size.length}, batch {batch}"
    with ExitStack() as processes:
        ways = {
            name: processes.enter_context(Alone(textbook_steps, size, batch, bf16))
            for name, bf16 in PRECISIONS.items()
        }
        precision = fastest(ways)
        for name, way in ways.items():
            if name != precision:
                way.process.kill()  # or its memory would be held all the while
        ours = processes.enter_context(Alone(own_steps, size, batch, bf16()))
        return compare(work, precision, ways[precision], ours, repeats, share=STEPS, own_share=STEPS)


if __name__ == "__main__":
    for size, batch in ((WORDS, 8), (CHARACTERS, 16), (DEEP, 4), (WIDE, 8)):
        result = throughput(size, batch)
        print(result, result.ratio, flush=True)
