"""Eval, score and sample, started by tests on ranks: `worker.py MODEL TEXT OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from unmask import Ancestral, load
from unmask.distributed import Distributed, init_distributed
from unmask.evaluation.datasets import ResolvedDataset, resolve_dataset
from unmask.evaluation.evaluate import eval_layout, eval_split, evaluate_dataset, tokenize_dataset
from unmask.evaluation.orders import OrderConfig, evaluate_order
from unmask.likelihood.corpus import EvalConfig


def evaluate_all(model: Path, text: Path, scratch: Path, distributed: Distributed) -> dict[str, object]:
    """All figures, from any number of ranks."""
    lm = load(model).distribute(distributed)
    fetched: ResolvedDataset = resolve_dataset(str(text), scratch)
    corpus = tokenize_dataset(lm, fetched, scratch)
    score = evaluate_dataset(lm, fetched, corpus, config=EvalConfig(replicates=3, seed=5))
    precise = evaluate_dataset(lm, fetched, corpus, config=EvalConfig(windows=40, replicates=2, precision=0.02))
    each = lm.score(["abc", "a b c abc", "cc", "b"], draws=32, seed=1)
    many = lm.score(["a", "bc", "abc"] * 7, prompts=["", "cab", "b"] * 7, draws=16, precision=0.1)
    orders = [
        evaluate_order(lm, eval_split(corpus), eval_layout(lm, corpus, False), OrderConfig(name, 45)).to_dict()
        for name in ("margin", "random")
    ]
    samples = lm.sample(5, 12, sampler=Ancestral(steps=4), seed=3)
    return {
        "eval": score.to_dict(),
        "precise": precise.to_dict(),
        "score": [one.to_dict() for one in each.per_text],
        "requests": [one.to_dict() for one in many.per_text],
        "orders": orders,
        "tokens": samples.tokens.tolist(),
        "num_queries": samples.num_queries,
    }


def main() -> None:
    torch.set_num_threads(1)
    model, text, out = map(Path, sys.argv[1:])
    with init_distributed() as where:
        found = evaluate_all(model, text, out.with_name(f"scratch-{where.world_size}-{where.rank}"), where)
        out.with_name(f"{out.name}-{where.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
