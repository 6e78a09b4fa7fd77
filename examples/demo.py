"""`make demo`: a masked diffusion model that learns the Zen of Python in a minute, on any CPU.

The text comes with every Python, so nothing is downloaded. The loop below is all that training is:
`objective.token_nll` gives nats per token, torch does the rest.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import importlib
import io
import math
import time
from pathlib import Path

import tokenizers
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

import unmask

LENGTH, BATCH, RATE = 16, 32, 3e-3


def zen() -> str:
    """The text that `import this` prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return codecs.decode(importlib.import_module("this").s, "rot13")


def words(text: str) -> unmask.Tokenizer:
    """One token a word or punctuation mark; any `tokenizers.Tokenizer` would do."""
    split = pre_tokenizers.Split(tokenizers.Regex(r"[\w']+|[^\w\s]+"), "removed", invert=True)
    vocabulary = sorted({word for word, _ in split.pre_tokenize_str(text)})
    inner = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token=""))
    inner.pre_tokenizer = split
    inner.decoder = decoders.WordPiece(cleanup=True)  # no space before a full stop
    return unmask.Tokenizer(inner)


def windows(ids: Tensor, step: int) -> Tensor:
    """A batch of random stretches of the text: a function of the step."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(len(ids) - LENGTH + 1, (BATCH, 1), generator=generator)
    return ids[first + torch.arange(LENGTH)]


def train(lm: unmask.LanguageModel, ids: Tensor, seconds: float, console: Console) -> None:
    """Warm up, then decay to zero by the clock."""
    optimizer = torch.optim.AdamW(lm.denoise.parameters(), lr=RATE, betas=(0.9, 0.98))
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    lm.denoise.train()
    started, mean, step = time.monotonic(), math.log(lm.vocab.size), 0
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=1.0)
        while (done := (time.monotonic() - started) / seconds) < 1:
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1.0, step / 50, 2 * (1 - done))
            batch = unmask.Batch(windows(ids, step))
            generator = torch.Generator().manual_seed(step)
            loss = lm.objective.token_nll(lm.denoise, batch, generator).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(lm.denoise.parameters(), 1.0)
            optimizer.step()
            mean, step = 0.97 * mean + 0.03 * loss.item(), step + 1
            progress.update(bar, completed=done, description=f"step {step}, {mean:.2f} nats per word")
        progress.update(bar, completed=1.0)


def main() -> None:
    """Train, measure, sample, infill, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long to train")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where the model goes")
    options = parser.parse_args()
    console = Console(highlight=False)

    torch.manual_seed(0)
    text = zen()
    tokenizer = words(text)
    ids = torch.tensor(tokenizer.encode(text))
    backbone = unmask.DiTConfig(width=192, depth=2, heads=6, length=LENGTH, dropout=0.0)
    lm = unmask.LanguageModel.new(backbone, unmask.MDLM(), tokenizer)
    size = sum(p.numel() for p in lm.denoise.parameters())
    console.print(
        f"The Zen of Python: {len(ids)} words and marks, {tokenizer.size} different;"
        f" a DiT of {size / 1e6:.1f}M parameters."
    )
    train(lm, ids, options.seconds, console)

    order, shuffled = "Flat is better than nested.", "nested than better is Flat."
    for line in (order, shuffled):
        score = lm.score(line, draws=256)
        console.print(f"{score.nats_per_token:.2f} ± {score.standard_error:.2f} nats per word: {line}")
    for title, sampler in (
        ("two samples, in random order", unmask.Ancestral(steps=LENGTH)),
        ("two samples, the surest word first", unmask.Confidence(steps=LENGTH)),
    ):
        console.rule(title)
        for sample in lm.sample(n=2, sampler=sampler).texts:
            console.print(sample)
    console.rule("three templates, filled")
    for template in (
        "Beautiful is better than <mask>.",
        "<mask> is better than implicit.",
        "There should be <mask:5> one -- obvious way to do it.",
    ):
        console.print(f"{template}\n  -> {lm.infill(template).text}")
    console.rule()
    unmask.save(lm, options.out, overwrite=True)
    console.print(f"Saved in {options.out}. Now try:", soft_wrap=True)
    console.print(f'  .venv/bin/unmask infill {options.out} "Flat is <mask:2> nested."', soft_wrap=True)


if __name__ == "__main__":
    main()
