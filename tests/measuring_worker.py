"""Eval, score and sample, started by tests under torchrun: `worker.py MODEL TEXT OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from unmask import Ancestral, load
from unmask.evaluation.textsets import FetchedSet, fetch
from unmask.measurement import Effort, evaluate_set, prepared
from unmask.world import World, world


def measured(model: Path, text: Path, scratch: Path, where: World) -> dict[str, object]:
    """All figures, from any number of ranks."""
    lm = load(model).across(where)
    fetched: FetchedSet = fetch(str(text), scratch)
    corpus = prepared(lm, fetched, scratch)
    score = evaluate_set(lm, fetched, corpus, effort=Effort(replicates=3, seed=5))
    precise = evaluate_set(lm, fetched, corpus, effort=Effort(rows=40, replicates=2, precision=0.02))
    each = lm.score(["abc", "a b c abc", "cc", "b"], draws=32, seed=1)
    samples = lm.sample(5, 12, sampler=Ancestral(steps=4), seed=3)
    return {
        "eval": score.figures(),
        "precise": precise.figures(),
        "score": [one.figures() for one in each.each],
        "tokens": samples.tokens.tolist(),
        "head_rows": samples.head_rows,
    }


def main() -> None:
    torch.set_num_threads(1)
    model, text, out = map(Path, sys.argv[1:])
    with world() as where:
        found = measured(model, text, out.with_name(f"scratch-{where.size}-{where.rank}"), where)
        out.with_name(f"{out.name}-{where.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
