"""Tokenization: `unmask prepare` compared with the tokenizers library itself.

    python -m benchmarks.prepare FILE [--repeats 3]

The baseline encodes all lines of the file in one batch and saves one array; both use the tokenizer that
`prepare` has made, whose training is not timed. `prepare` also hashes, checks and writes atomically.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.side_by_side import median, time_alternating
from unmask import Tokenizer
from unmask.data.corpus import prepare

TOKENIZERS = ("bytes", "bpe:4096")


def tokenize_directly(file: Path, out: Path, tokenizer: Tokenizer) -> None:
    """All lines in one batch, as many training scripts do."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    encoded = tokenizer.backend.encode_batch(lines)
    np.save(out, np.concatenate([np.array(line.ids, np.uint16) for line in encoded]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, help="a text file of a few megabytes")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    megabytes = args.file.stat().st_size / 1e6
    for name in TOKENIZERS:
        with tempfile.TemporaryDirectory() as folder:
            made, number = Path(folder) / "made", itertools.count()
            prepare([str(args.file)], made, name)
            tokenizer = Tokenizer.from_file(made / "tokenizer.json")
            spec = name if name == "bytes" else str(made / "tokenizer.json")
            plain, ours = time_alternating(
                lambda: tokenize_directly(args.file, Path(folder) / "plain.npy", tokenizer),  # noqa: B023
                lambda: prepare([str(args.file)], Path(folder) / str(next(number)), spec),  # noqa: B023
                args.repeats,
            )
        ratios = [baseline / unmask for baseline, unmask in zip(plain, ours, strict=True)]
        print(
            f"{name}: {megabytes / median(ours):.1f} MB/s, plainly {megabytes / median(plain):.1f} MB/s:"
            f" {median(ratios):.1f}x ({min(ratios):.1f} to {max(ratios):.1f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
