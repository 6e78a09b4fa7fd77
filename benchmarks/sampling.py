"""Sampling, infilling and semi-autoregressive generation, compared with the reference implementation."""

from __future__ import annotations

import torch

from benchmarks.baseline import semi_autoregressive_sample
from benchmarks.side_by_side import Result, compare, fastest_pair
from benchmarks.training import CHARACTERS, DEEP, WIDE, WORDS
from examples.mdlm_reference import ModelSize, ancestral_sample
from unmask import Ancestral
from unmask.sampling.semi_autoregressive import SemiAutoregressive

LONG_SIZE = ModelSize(vocab=50_258, depth=8, width=512, length=1024)


def measure_sampling(
    size: ModelSize,
    batch_size: int,
    steps: int,
    repeats: int = 3,
    baseline_fraction: float = 1.0,
    ours_fraction: float = 1.0,
) -> Result:
    """Unconditional sampling."""
    network = f"V = {size.vocab:,}, {size.depth} x {size.width}"
    work = f"sampling {batch_size} x {size.length} tokens, {network}, {steps:,} steps"
    blank = torch.full((batch_size, size.length), size.vocab - 1)
    return _compare(work, size, blank, steps, repeats, baseline_fraction, ours_fraction)


def measure_infilling(
    repeats: int, size: ModelSize = LONG_SIZE, steps: int = 32, baseline_fraction: float = 0.25
) -> Result:
    """Infilling of a tenth of a text."""
    text = torch.randint(size.vocab - 1, (1, size.length), generator=torch.Generator().manual_seed(0))
    hidden = text.masked_fill(torch.arange(size.length) % 10 == 3, size.vocab - 1)
    work = f"infilling 10 % of {size.length:,} tokens, V = {size.vocab:,}, {steps} steps"
    return _compare(work, size, hidden, steps, repeats, baseline_fraction)


def _compare(
    work: str,
    size: ModelSize,
    canvas: torch.Tensor,
    steps: int,
    repeats: int,
    baseline_fraction: float,
    ours_fraction: float = 1.0,
) -> Result:
    """All steps of the reference cost the same: a fraction of them is run, without its last network call.

    `unmask` needs as many calls for the first tokens of a sequence as for the last: a fraction of them is generated.
    """
    reference, precision, model = fastest_pair(
        size, lambda reference: ancestral_sample(reference, canvas, steps, max_steps=1)
    )
    enough = ours_fraction * int((canvas == reference.mask_id).sum())

    def ours() -> None:
        for frame in model.generate_steps(canvas, Ancestral(steps)):
            if frame.num_queries >= enough:
                return

    return compare(
        work,
        precision,
        lambda: ancestral_sample(reference, canvas, steps, max_steps=round(baseline_fraction * steps)),
        ours,
        repeats,
        note=f"reference from {baseline_fraction:.0%} of the steps, unmask from {ours_fraction:.0%} of the tokens",
        warmup=False,
        baseline_fraction=baseline_fraction,
        ours_fraction=ours_fraction,
        with_flops=steps <= 32,
    )


def measure_semi_autoregressive(
    repeats: int,
    size: ModelSize = LONG_SIZE,
    length: int = 2048,
    steps: int = 32,
    baseline_fraction: float = 0.125,
) -> Result:
    """Semi-autoregressive: windows of 1,024 that move by 512."""
    blank = torch.full((1, length), size.vocab - 1)
    window = blank[:, : size.length]
    reference, precision, model = fastest_pair(
        size, lambda reference: ancestral_sample(reference, window, steps, max_steps=1)
    )
    sampler = SemiAutoregressive(stride=size.length // 2, sampler=Ancestral(steps))
    return compare(
        f"semi-autoregressive, {length:,} tokens, V = {size.vocab:,}, {steps} steps a window",
        precision,
        lambda: semi_autoregressive_sample(
            reference, 1, length, size.length // 2, steps, max_steps=round(baseline_fraction * steps)
        ),
        lambda: model.generate(blank, sampler),
        repeats,
        note=f"reference from {baseline_fraction:.0%} of the steps",
        warmup=False,
        baseline_fraction=baseline_fraction,
        with_flops=False,
    )


if __name__ == "__main__":
    for result in (
        measure_sampling(WORDS, 4, 32, 2),
        measure_sampling(DEEP, 2, 64, 2),
        measure_sampling(WIDE, 6, 48, 2),
        measure_infilling(1),
        measure_semi_autoregressive(1),
        measure_sampling(CHARACTERS, 16, 1000, 1, baseline_fraction=0.03, ours_fraction=0.2),
    ):
        print(result, result.ratio, flush=True)
