"""Sampling, infilling and sliding windows: the same distribution, for fewer calls and a smaller head."""

from __future__ import annotations

import torch

from benchmarks.measure import Result, compare, fast_pair
from benchmarks.textbook import Size, fill, slide
from benchmarks.training import CHARACTERS, DEEP, WIDE, WORDS
from unmask import Ancestral
from unmask.sampling.semi import SemiAutoregressive

LONG = Size(vocab=50_258, depth=8, width=512, length=1024)


def sampling(
    size: Size, rows: int, steps: int, repeats: int = 3, share: float = 1.0, own_share: float = 1.0
) -> Result:
    """Text from nothing but masks."""
    network = f"V = {size.vocab:,}, {size.depth} x {size.width}"
    work = f"sampling {rows} x {size.length} tokens, {network}, {steps:,} steps"
    blank = torch.full((rows, size.length), size.vocab - 1)
    return _compared(work, size, blank, steps, repeats, share, own_share)


def infilling(repeats: int, size: Size = LONG, steps: int = 32, share: float = 0.25) -> Result:
    """A tenth of a text is hidden."""
    text = torch.randint(size.vocab - 1, (1, size.length), generator=torch.Generator().manual_seed(0))
    hidden = text.masked_fill(torch.arange(size.length) % 10 == 3, size.vocab - 1)
    work = f"infilling 10 % of {size.length:,} tokens, V = {size.vocab:,}, {steps} steps"
    return _compared(work, size, hidden, steps, repeats, share)


def _compared(
    work: str,
    size: Size,
    canvas: torch.Tensor,
    steps: int,
    repeats: int,
    share: float,
    own_share: float = 1.0,
) -> Result:
    """The textbook's steps are alike: a share of them is run, and its last call of the network left out.

    Ours needs as many calls for a row's first tokens as for its last, so a share of the tokens is written.
    """
    textbook, precision, model = fast_pair(size, lambda textbook: fill(textbook, canvas, steps, only=1))
    enough = own_share * int((canvas == textbook.mask).sum())

    def ours() -> None:
        for frame in model.frames(canvas, Ancestral(steps)):
            if frame.head_rows >= enough:
                return

    return compare(
        work,
        precision,
        lambda: fill(textbook, canvas, steps, only=round(share * steps)),
        ours,
        repeats,
        note=f"textbook from {share:.0%} of the steps, unmask from {own_share:.0%} of the tokens",
        warm=False,
        share=share,
        own_share=own_share,
        counted=steps <= 32,
    )


def sliding(
    repeats: int, size: Size = LONG, length: int = 2048, steps: int = 32, share: float = 0.125
) -> Result:
    """Semi-autoregressive: windows of 1,024 that move by 512."""
    blank = torch.full((1, length), size.vocab - 1)
    window = blank[:, : size.length]
    textbook, precision, model = fast_pair(size, lambda textbook: fill(textbook, window, steps, only=1))
    sampler = SemiAutoregressive(stride=size.length // 2, sampler=Ancestral(steps))
    return compare(
        f"semi-autoregressive, {length:,} tokens, V = {size.vocab:,}, {steps} steps a window",
        precision,
        lambda: slide(textbook, 1, length, size.length // 2, steps, only=round(share * steps)),
        lambda: model.fill(blank, sampler),
        repeats,
        note=f"textbook from {share:.0%} of the steps",
        warm=False,
        share=share,
        counted=False,
    )


if __name__ == "__main__":
    for result in (
        sampling(WORDS, 4, 32, 2),
        sampling(DEEP, 2, 64, 2),
        sampling(WIDE, 6, 48, 2),
        infilling(1),
        sliding(1),
        sampling(CHARACTERS, 16, 1000, 1, share=0.03, own_share=0.2),
    ):
        print(result, result.ratio, flush=True)
