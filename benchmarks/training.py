"""Training: tokens per second and peak memory of a step."""

from __future__ import annotations

import torch

from benchmarks.measure import RandomText, Result, bf16, compare, pair
from benchmarks.textbook import Size, Trainer
from unmask.data.loader import Loader, Wrapped
from unmask.training.loop import Run, Training
from unmask.training.optim import AdamW
from unmask.world import World

WORDS = Size(vocab=50_258, depth=8, width=512, length=128)
CHARACTERS = Size(vocab=28, depth=6, width=384, length=256, heads=6)


def steps(size: Size, batch: int, bf16: bool = False) -> tuple[Trainer, Run]:
    """Both, ready to be stepped: the same network, optimizer, clipping and moving average."""
    textbook, model = pair(size)
    text = RandomText.of(64 * batch * size.length, size.vocab)
    loader = Loader(text, Wrapped(size.length), batch)
    settings = Training(steps=1000, batch_size=batch, optimizer=AdamW(lr=3e-4), warmup=0, bf16=bf16)
    model.denoise.train()
    return Trainer(textbook), Run(model.denoise, model.objective, loader, settings, World())


def throughput(work: str, bar: float, size: Size, batch: int, repeats: int, at_once: int = 1) -> Result:
    """Seconds of `at_once` steps."""
    trainer, run = steps(size, batch, bf16())
    x = run.loader.batch(0).tokens

    def theirs() -> None:
        for _ in range(at_once):
            trainer.step(x)

    def ours() -> None:
        for _ in range(at_once):
            run.step()

    return compare(work, bar, theirs, ours, repeats)


if __name__ == "__main__":
    for result in (
        throughput("training, V = 50,258, 8 x 512, L = 128, batch 8", 4, WORDS, 8, 5),
        throughput("training, characters, 6 x 384, L = 256, batch 16", 2, CHARACTERS, 16, 5),
    ):
        print(result, result.ratio)
    print(torch.__version__)
