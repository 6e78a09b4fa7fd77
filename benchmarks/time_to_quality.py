"""Time to quality: nats per token of held-out text after a given training time.

    python -m benchmarks.time_to_quality text8/train.txt text8/test.txt --seconds 240 --seed 1
    python -m benchmarks.time_to_quality --recipe stdlib-tiny --seconds 120
    python -m benchmarks.time_to_quality text8/train.txt text8/test.txt --arm no-muon --set backbone.depth=6

Only training is timed. On a busy machine, use `--steps` with the number of steps that an idle one does in the time.
The reported figure is always the bound itself, measured in the same way for every arm: on windows spread evenly over
a text on which no choice was made, with the averaged weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.side_by_side import PRECISIONS, current_peak_flops, fastest, to_unmask, unmask_uses_bf16
from examples.mdlm_reference import ModelSize, ReferenceMDLM, ReferenceTrainer
from unmask import DiTConfig, LanguageModel, NextToken
from unmask.config import override
from unmask.data.corpus import Corpus, Split, prepare
from unmask.data.loader import Loader, Wrapped
from unmask.distributed import Distributed
from unmask.experiment import Experiment
from unmask.likelihood.corpus import EvalConfig, score_corpus
from unmask.recipes import RECIPES
from unmask.run import build_trainer
from unmask.training.trainer import Trainer

CALIBRATION_STEPS = 20
"""Steps that are timed to find how many fit into the budget; they are not part of the run."""

ABLATIONS: dict[str, tuple[str, ...]] = {
    "local": ("backbone.local_init=null", "backbone.rope_theta=10000"),
    "exact": ("objective.exact_mask_counts=false",),
    "curriculum": ("training.curriculum=null",),
    "muon": ("training.optimizer=AdamW", "training.optimizer.lr=1e-3"),
    "unigram": ("unigram_bias_init=false",),
}
"""The ablated parts of the recipe, and the settings that leave them out."""


def apply_arm(experiment: Experiment, arm: str, overrides: Sequence[str]) -> Experiment:
    """The recipe as it is (default), without a part (no-PART), or autoregressive (ar)."""
    if arm == "ar":
        experiment = experiment.with_objective(NextToken())
    elif arm != "default":
        part = arm.removeprefix("no-")
        if part not in ABLATIONS:
            raise SystemExit(f"there is no arm {arm!r}; choose default, ar or no- and one of {', '.join(ABLATIONS)}")
        overrides = (*ABLATIONS[part], *overrides)
    return override(experiment, *overrides)


def train(
    experiment: Experiment, corpus: Corpus, seconds: float, seed: int, steps: int | None = None
) -> tuple[LanguageModel, dict[str, Any]]:
    """Train for the given time or number of steps; returns the averaged model, and the time and steps it took."""

    def build(steps: int) -> Trainer:
        settings = replace(
            experiment.training, steps=steps, warmup_steps=steps // 20, seed=seed, bf16=unmask_uses_bf16()
        )
        run = build_trainer(replace(experiment, training=settings), corpus, Distributed())
        run.model.train()
        return run

    steps = steps or max(1, int(seconds / _seconds_per_step(build(CALIBRATION_STEPS).step)))
    run = build(steps)
    start = time.perf_counter()
    for _ in range(steps):
        run.step()
    spent = time.perf_counter() - start
    run.model.load_state_dict(run.ema.weights, strict=False)
    model = LanguageModel(run.model, corpus.tokenizer)
    precision = "bfloat16" if unmask_uses_bf16() else "float32"
    return model, {"seconds": spent, "steps": steps, "tokens": run.state.tokens, "precision": precision}


def train_baseline(
    lr: float,
    size: ModelSize,
    batch: int,
    corpus: Corpus,
    seconds: float,
    seed: int,
    steps: int | None = None,
) -> tuple[LanguageModel, dict[str, Any]]:
    """The published recipe: AdamW, warm-up, constant learning rate, dropout, moving average; in the precision
    in which its steps are faster here."""
    loader = Loader(corpus.splits["train"], Wrapped(size.length), batch, seed)

    def build(bf16: bool) -> ReferenceTrainer:
        torch.manual_seed(seed)
        return ReferenceTrainer(ReferenceMDLM(size, dropout=0.1, bf16=bf16), lr)

    trials = {name: partial(build(bf16).step, loader.batch(0).tokens) for name, bf16 in PRECISIONS.items()}
    precision = fastest(trials)
    trainer = build(PRECISIONS[precision])
    step = 0
    start = time.perf_counter()
    while step < steps if steps else time.perf_counter() - start < seconds:
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 50)
        trainer.step(loader.batch(step).tokens)
        step += 1
    spent = time.perf_counter() - start
    with torch.no_grad():
        for parameter, average in zip(trainer.model.parameters(), trainer.ema_weights, strict=True):
            parameter.copy_(average)
    facts = {"seconds": spent, "steps": step, "tokens": step * batch * size.length, "precision": precision}
    return LanguageModel(to_unmask(trainer.model).denoiser, corpus.tokenizer), facts


def evaluate(model: LanguageModel, split: Split, windows: int, passes: int) -> dict[str, float]:
    """Nats per token on windows spread evenly over the text, and the standard error given the text."""
    length = model.denoiser.max_length
    assert length is not None
    with model.inference_mode():
        loader = Loader(split, Wrapped(length), batch_size=64)
        score = score_corpus(model.denoiser, model.objective, loader, EvalConfig(windows, passes, seed=1))
    return {"nats": score.nats_per_token, "error": score.standard_error}


def _seconds_per_step(step: Callable[[], object]) -> float:
    times = []
    for _ in range(CALIBRATION_STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.mean(times[2:])  # the first two include warm-up


def _corpora(experiment: Experiment, files: Sequence[str], folder: Path) -> tuple[Corpus, Split]:
    """The training and the evaluation corpus."""
    if not files:
        corpus = prepare(experiment.sources, folder / "own", experiment.tokenizer, experiment.prepare)
        return corpus, corpus.splits["valid"]
    training, held_out = files
    all_of_it = replace(experiment.prepare, validation_fraction=0.0)
    corpus = prepare([training], folder / "train", experiment.tokenizer, all_of_it)
    tokenizer = str(folder / "train" / "tokenizer.json")
    other = prepare([held_out], folder / Path(held_out).stem, tokenizer, all_of_it)
    return corpus, other.splits["train"]


def main() -> None:
    """Train, measure, and append one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("texts", nargs="*", help="two files, to train and to measure on; else the recipe's own")
    parser.add_argument("--recipe", default="text8-tiny", choices=RECIPES)
    parser.add_argument("--arm", default="default", help="default, no-PART, ar, baseline or baseline:LR")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--steps", type=int, help="so many steps, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], help="settings of the recipe, as unmask train has it")
    parser.add_argument("--windows", type=int, default=512)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("runs/quality"))
    args = parser.parse_args()
    if len(args.texts) not in (0, 2):
        parser.error(f"give two files, to train and to measure on, or none; got {len(args.texts)}")
    base = RECIPES[args.recipe]()
    corpus, held_out = _corpora(base, args.texts, args.folder / args.recipe)
    peak = current_peak_flops()
    experiment = apply_arm(base, "default" if args.arm.startswith("baseline") else args.arm, args.set)
    net, batch = experiment.backbone, experiment.training.batch_size
    assert isinstance(net, DiTConfig)  # as in all recipes that train from scratch
    if args.arm.startswith("baseline"):
        size = ModelSize(corpus.tokenizer.vocab_size + 1, net.depth, net.width, net.max_length, net.heads)
        lr = float(args.arm.partition(":")[2] or 3e-4)
        model, facts = train_baseline(lr, size, batch, corpus, args.seconds, args.seed, args.steps)
    else:
        model, facts = train(experiment, corpus, args.seconds, args.seed, args.steps)
    score = evaluate(model, held_out, args.windows, args.passes)
    line = {
        **{key: value for key, value in vars(args).items() if not isinstance(value, Path)},
        "time_limit": args.seconds,
        **facts,
        **score,
        "peak": peak,
    }
    with (args.folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(
        f"{args.arm} {' '.join(args.set)} {net.depth} x {net.width}, seed {args.seed}:"
        f" {score['nats']:.3f} ± {score['error']:.3f} nats/token"
        f" after {facts['seconds']:.0f} s, {facts['steps']} steps,"
        f" {facts['tokens'] / facts['seconds']:,.0f} tokens/s in {facts['precision']}"
    )


if __name__ == "__main__":
    main()
