"""Time to quality: nats per character of text8 (or another text) after so many seconds of training.

    python -m benchmarks.quality text8/train.txt text8/test.txt --arm default --seconds 240 --seed 0

Only training is timed. What is reported is always the true bound, measured in the same way for every arm: on
windows that lie evenly over a text that no choice was made on, with the averaged weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.measure import converted, peak_now
from benchmarks.textbook import Size, Textbook, Trainer
from unmask import MDLM, LanguageModel
from unmask.backbones.dit import DiTConfig, LocalStart
from unmask.data.corpus import Corpus, PrepareOptions, prepare
from unmask.data.loader import Loader, Wrapped
from unmask.evaluation.likelihood import score_rows
from unmask.objectives import Autoregression
from unmask.training.curriculum import Widening
from unmask.training.loop import Run, Training
from unmask.training.optim import AdamW, LinearDecay, Muon
from unmask.world import World

CALIBRATION = 12
"""Steps whose time says how many fit into the budget; they are not part of the run."""


@dataclass(frozen=True)
class Arm:
    """A recipe: a network, an objective, and how it is trained but for the number of steps."""

    backbone: DiTConfig
    objective: MDLM | Autoregression
    training: Training
    warmup: float = 0.05


def default(width: int, depth: int, length: int, batch: int, lr: float) -> Arm:
    """All parts that were found to help."""
    return Arm(
        DiTConfig(
            width=width,
            depth=depth,
            heads=width // 64,
            length=length,
            dropout=0.0,
            rotary_base=100.0,
            local=LocalStart(),
        ),
        MDLM(exact_counts=True),
        Training(
            batch_size=batch,
            optimizer=Muon(lr=lr, rest=AdamW(lr=lr / 2)),
            decay=LinearDecay(),
            curriculum=Widening(),
            ema=0.98,
        ),
    )


def without(arm: Arm, part: str) -> Arm:
    """The same recipe without one of its parts."""
    backbone, training, objective = arm.backbone, arm.training, arm.objective
    if part == "local":
        backbone = replace(backbone, local=None, rotary_base=10_000.0)
    elif part == "curriculum":
        training = replace(training, curriculum=None)
    elif part == "muon":
        training = replace(training, optimizer=AdamW(lr=1e-3))
    elif part == "exact":
        objective = MDLM()
    elif part == "diffusion":  # autoregression of the same size: exact, and no masks
        backbone = replace(backbone, local=None, causal=True)
        objective, training = Autoregression(), replace(training, curriculum=None)
    else:
        raise SystemExit(f"there is no part {part!r} to leave out")
    return replace(arm, backbone=backbone, training=training, objective=objective)


def train(arm: Arm, corpus: Corpus, seconds: float, seed: int) -> tuple[LanguageModel, dict[str, float]]:
    """As many steps as fit into the time, and the model with its averaged weights."""

    def fresh(steps: int) -> tuple[LanguageModel, Run]:
        torch.manual_seed(seed)
        model = LanguageModel.new(arm.backbone, arm.objective, corpus.tokenizer)
        settings = replace(arm.training, steps=steps, warmup=round(arm.warmup * steps), seed=seed, bf16=False)
        loader = Loader(corpus.splits["train"], Wrapped(arm.backbone.length), settings.batch_size, seed)
        model.denoise.train()
        return model, Run(model.denoise, arm.objective, loader, settings, World())

    steps = int(seconds / _seconds_a_step(fresh(CALIBRATION)[1].step))
    model, run = fresh(steps)
    start = time.perf_counter()
    for _ in range(steps):
        run.step()
    spent = time.perf_counter() - start
    with torch.no_grad():
        for name, parameter in model.denoise.named_parameters():
            parameter.copy_(run.ema.weights[name])
    return model, {"seconds": spent, "steps": steps, "tokens": run.state.tokens}


def train_textbook(
    lr: float, size: Size, batch: int, corpus: Corpus, seconds: float, seed: int
) -> tuple[LanguageModel, dict[str, float]]:
    """The published recipe: AdamW, warm-up, constant learning rate, dropout, moving average."""
    loader = Loader(corpus.splits["train"], Wrapped(size.length), batch, seed)

    def fresh() -> Trainer:
        torch.manual_seed(seed)
        return Trainer(Textbook(size, dropout=0.1), lr)

    trainer = fresh()
    step = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 50)
        trainer.step(loader.batch(step).tokens)
        step += 1
    spent = time.perf_counter() - start
    with torch.no_grad():
        for parameter, average in zip(trainer.model.parameters(), trainer.average, strict=True):
            parameter.copy_(average)
    facts = {"seconds": spent, "steps": step, "tokens": step * batch * size.length}
    return LanguageModel(converted(trainer.model).denoise, corpus.tokenizer), facts


def measure(model: LanguageModel, corpus: Corpus, windows: int, passes: int) -> dict[str, float]:
    """Nats per token on windows that lie evenly over the text, and their standard error given the text."""
    (split,) = corpus.splits.values()
    length = model.denoise.max_length
    assert length is not None
    with model.inference():
        loader = Loader(split, Wrapped(length), batch_size=64)
        score = score_rows(model.denoise, model.objective, loader, None, windows, passes, seed=1)
    return {"nats": score.nats_per_token, "error": score.standard_error}


def _seconds_a_step(step: Callable[[], object]) -> float:
    times = []
    for _ in range(CALIBRATION):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def main() -> None:
    """Train, measure, and append one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("train")
    parser.add_argument("test")
    parser.add_argument("--tokenizer", default="text8")
    parser.add_argument("--arm", default="default", help="default, no-PART, textbook or textbook:LR")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--windows", type=int, default=512)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("runs/quality"))
    asked = parser.parse_args()
    corpus = prepare([asked.train], asked.folder / "train", asked.tokenizer, PrepareOptions(share=0))
    tokenizer = str(asked.folder / "train" / "tokenizer.json")
    held_out = prepare([asked.test], asked.folder / "test", tokenizer, PrepareOptions(share=0))
    peak = peak_now()
    if asked.arm.startswith("textbook"):
        size = Size(corpus.tokenizer.size + 1, asked.depth, asked.width, asked.length, asked.width // 64)
        lr = float(asked.arm.partition(":")[2] or 3e-4)
        model, facts = train_textbook(lr, size, asked.batch, corpus, asked.seconds, asked.seed)
    else:
        arm = default(asked.width, asked.depth, asked.length, asked.batch, asked.lr)
        if asked.arm != "default":
            arm = without(arm, asked.arm.removeprefix("no-"))
        model, facts = train(arm, corpus, asked.seconds, asked.seed)
    found = measure(model, held_out, asked.windows, asked.passes)
    line = {
        **{key: value for key, value in vars(asked).items() if not isinstance(value, Path)},
        "asked": asked.seconds,
        **facts,
        **found,
        "peak": peak,
    }
    with (asked.folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(
        f"{asked.arm} {asked.depth} x {asked.width}, seed {asked.seed}:"
        f" {found['nats']:.3f} ± {found['error']:.3f} nats/token"
        f" after {facts['seconds']:.0f} s, {facts['steps']} steps,"
        f" {facts['tokens'] / facts['seconds']:,.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
