"""The effect of bfloat16 on the nats: the same model, texts and masks in float32 and in bfloat16.

    python -m benchmarks.bf16_error runs/demo runs/demo/corpus --windows 32 --passes 4

Masks are the same, so their noise cancels: the difference is known far better than either figure.
"""

from __future__ import annotations

import argparse
import copy
import statistics

import torch

import unmask
from unmask.data.corpus import Corpus
from unmask.data.loader import Loader, Wrapped
from unmask.likelihood._estimate import NatsEstimator


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("corpus", help="a prepared corpus, whose held-out part is used")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--passes", type=int, default=4)
    args = parser.parse_args()
    model = unmask.load(args.model)
    rounded = unmask.LanguageModel(copy.deepcopy(model.denoiser), model.tokenizer)
    rounded.denoiser.to_bf16()
    length = model.denoiser.max_length
    assert length is not None
    loader = Loader(Corpus.open(args.corpus).splits["valid"], Wrapped(length), batch_size=8)
    exact, differences = [], []
    for number in range(args.passes):
        for first in range(0, args.windows, 8):
            batch = loader.sequential_batch(first, 8, num_windows=args.windows)
            found = []
            for each in (model, rounded):
                generator = torch.Generator().manual_seed(1000 * number + first)
                with each.inference_mode():
                    nats = NatsEstimator(each.denoiser, each.objective).draw(batch, generator).nats.sum()
                found.append(float(nats) / float(batch.loss_mask.sum()))
            exact.append(found[0])
            differences.append(found[1] - found[0])
    error = statistics.stdev(differences) / len(differences) ** 0.5
    print(
        f"float32 {statistics.mean(exact):.4f} nats/token; bfloat16 differs by"
        f" {statistics.mean(differences):+.5f} ± {error:.5f}"
    )


if __name__ == "__main__":
    main()
