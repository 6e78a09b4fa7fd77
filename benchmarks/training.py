"""Training: tokens per second and peak memory of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.measure import Alone, RandomText, Result, Work, bf16, compare, pair
from benchmarks.textbook import Size, Trainer
from unmask.data.loader import Loader, Wrapped
from unmask.training.loop import Run, Training
from unmask.training.optim import AdamW
from unmask.world import World

WORDS = Size(vocab=50_258, depth=8, width=512, length=128)
CHARACTERS = Size(vocab=28, depth=6, width=384, length=256, heads=6)

STEPS = 2
"""One after another, before it is the other way's turn."""


def textbook_trainer(size: Size) -> Trainer:
    """The textbook, ready to be stepped."""
    return Trainer(pair(size)[0])


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


def textbook_steps(size: Size, batch: int) -> Work:
    """Steps of the textbook, on the same rows each time."""
    trainer, x = textbook_trainer(size), rows(size, batch)

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


def throughput(work: str, bar: float, size: Size, batch: int, repeats: int) -> Result:
    """Seconds of a step."""
    with Alone(textbook_steps, size, batch) as theirs, Alone(own_steps, size, batch, bf16()) as ours:
        return compare(work, bar, theirs, ours, repeats, share=STEPS, own_share=STEPS)


if __name__ == "__main__":
    for result in (
        throughput("training, V = 50,258, 8 x 512, L = 128, batch 8", 4, WORDS, 8, 5),
        throughput("training, characters, 6 x 384, L = 256, batch 16", 2, CHARACTERS, 16, 5),
    ):
        print(result, result.ratio)
    print(torch.__version__)
