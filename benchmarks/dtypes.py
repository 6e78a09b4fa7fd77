"""What fewer bits cost: nats per token on a text, seconds and memory for every dtype, side by side.

    python -m benchmarks.dtypes MODEL TEXT_FILE [--tokens 4096] [--draws 16] [--repeats 2] [--group-sizes 32 64 128]

Every dtype scores the same windows of the text with the same masks, so that differences of nats are those of rounding
and not of chance. The dtypes take turns; seconds are the fastest of the repeats, and ratios are to float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import unmask
from unmask.hardware.dtypes import DtypeName
from unmask.ops.linear import DEFAULT_GROUP_SIZE

_DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16", "int8", "int4")


def measure(folder: Path, ids: list[int], dtype: DtypeName, group_size: int, draws: int) -> tuple[float, float, float]:
    """Nats per token, seconds of scoring, and gigabytes of the weights."""
    lm = unmask.load(folder, dtype=dtype, group_size=group_size)
    held = sum(weight.nbytes for weight in lm.denoiser.parameters()) / 1e9
    lm.denoiser.prepack()
    started = time.perf_counter()
    score = lm.score([ids], draws=draws)
    return score.nats_per_token, time.perf_counter() - started, held


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each dtype and group size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dtypes", description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--draws", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--group-sizes", nargs="*", type=int, default=[DEFAULT_GROUP_SIZE])
    options = parser.parse_args(arguments)
    tokenizer = unmask.load(options.model).tokenizer
    if tokenizer is None:
        raise SystemExit(f"{options.model} has no tokenizer to read {options.text} with")
    ids = tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.tokens]
    sizes = {dtype: options.group_sizes if dtype.startswith("int") else [DEFAULT_GROUP_SIZE] for dtype in _DTYPES}
    cases = [(dtype, size) for dtype in _DTYPES for size in sizes[dtype]]
    rounds = [
        {case: measure(options.model, ids, *case, options.draws) for case in cases} for _ in range(options.repeats)
    ]
    exact, slow = rounds[0][cases[0]][0], min(each[cases[0]][1] for each in rounds)
    print(f"{len(ids):,} tokens, {options.draws} draws, {torch.get_num_threads()} threads")
    print("dtype     group   nats/token  difference  seconds   ratio   weights")
    for case in cases:
        nats, _, held = rounds[0][case]
        seconds = min(each[case][1] for each in rounds)
        group = str(case[1]) if case[0].startswith("int") else ""
        print(
            f"{case[0]:9} {group:>5} {nats:12.4f} {nats - exact:+11.4f} {seconds:8.2f} {seconds / slow:7.2f}"
            f" {held:6.3f} GB"
        )


if __name__ == "__main__":
    main()
