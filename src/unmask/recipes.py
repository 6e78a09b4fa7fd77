"""Named experiments, as Python functions: call one, and change it with `dataclasses.replace`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unmask.backbones.dit import DiTConfig, LocalStart
from unmask.data.columns import PromptAnswer
from unmask.data.corpus import PrepareOptions
from unmask.data.loader import Pairs, PerDocument, Wrapped
from unmask.data.sources import SourceOptions
from unmask.experiment import Experiment
from unmask.objectives import MDLM
from unmask.training.curriculum import Widening
from unmask.training.loop import Training
from unmask.training.lowrank import LowRank
from unmask.training.optim import AdamW, LinearDecay, Muon

PAPER = Training(steps=1_000_000, batch_size=512, optimizer=AdamW(lr=3e-4), warmup=2500, ema=0.9999)
LINES = PrepareOptions(source=SourceOptions(lines=True))


def stdlib_tiny() -> Experiment:
    """Python's own standard library, a 4 x 192 model: three minutes on two cores, and nothing to download."""
    return _quick("stdlib", "bpe:4096", width=192, heads=4, length=128, steps=640)


def text8_tiny() -> Experiment:
    """Characters of Wikipedia, a 4 x 256 model: four minutes on two cores."""
    experiment = _quick("text8/train.txt", "text8", width=256, heads=4, length=256, steps=430)
    training = replace(
        experiment.training,
        optimizer=Muon(lr=5e-3, momentum=0.9, rest=AdamW(lr=2.5e-3)),
        curriculum=Widening(until=0.85),
    )
    return replace(experiment, training=training)


def _quick(source: str, tokenizer: str, *, width: int, heads: int, length: int, steps: int) -> Experiment:
    """All that makes small models learn fast; what each part is worth is in docs/performance.md."""
    return Experiment(
        sources=(source,),
        tokenizer=tokenizer,
        backbone=DiTConfig(
            width=width,
            depth=4,
            heads=heads,
            length=length,
            dropout=0.0,
            activation="relu2",
            rotary_base=100.0,
            local=LocalStart(),
        ),
        objective=MDLM(exact_counts=True),
        unigram_start=True,
        layout=Wrapped(length),
        training=Training(
            steps=steps,
            batch_size=8,
            optimizer=Muon(lr=4e-3, momentum=0.9, rest=AdamW(lr=2e-3)),
            warmup=steps // 20,
            decay=LinearDecay(),
            curriculum=Widening(),
            ema=0.97,
            save_every=160,
            evaluate_every=160,
        ),
        evaluate_rows=40,
    )


def text8() -> Experiment:
    """Characters of Wikipedia, 27 symbols, windows of 256: the paper's 12 x 768 model."""
    return Experiment(
        sources=("text8/train.txt",),
        tokenizer="text8",
        backbone=DiTConfig(length=256),
        layout=Wrapped(256),
        training=PAPER,
    )


def ptb() -> Experiment:
    """Penn Treebank, a sentence a document."""
    return Experiment(
        sources=("ptb/train.txt",),
        tokenizer="bpe:8192",
        backbone=DiTConfig(width=512, depth=8, heads=8, length=128),
        layout=Wrapped(128),
        options=LINES,
        training=PAPER,
    )


def wikitext2() -> Experiment:
    """WikiText-2, articles running on."""
    return Experiment(
        sources=("wikitext2/train.tokens",),
        tokenizer="bpe:16384",
        backbone=DiTConfig(width=512, depth=8, heads=8, length=512),
        layout=Wrapped(512),
        training=PAPER,
    )


def lm1b() -> Experiment:
    """One Billion Words with BERT's vocabulary, a sentence a row of 128: the paper's setting."""
    return Experiment(
        sources=("hub:lm1b",),
        tokenizer="hub:bert-base-uncased",
        backbone=DiTConfig(length=128),
        layout=PerDocument(128),
        training=PAPER,
    )


def owt_small() -> Experiment:
    """OpenWebText with GPT-2's vocabulary, windows of 1,024, 12 x 768: the paper's main model."""
    return Experiment(
        sources=("hub:openwebtext",),
        tokenizer="hub:gpt2",
        backbone=DiTConfig(length=1024),
        layout=Wrapped(1024),
        training=PAPER,
    )


def dna() -> Experiment:
    """A genome, base by base, in windows of 1,024."""
    return Experiment(
        sources=("genome.fa.gz",),
        tokenizer="dna",
        backbone=DiTConfig(width=256, depth=8, heads=8, length=1024),
        layout=Wrapped(1024),
        training=PAPER,
    )


def finetune() -> Experiment:
    """Go on from a model (--start) with your own text (--sources): all of its weights, gently."""
    return Experiment(
        sources=(),  # to be named, as is
        start="",
        layout=Wrapped(128),
        training=Training(
            steps=1000,
            batch_size=16,
            optimizer=AdamW(lr=1e-4),
            warmup=50,
            decay=LinearDecay(),
            ema=0.99,
            save_every=250,
            evaluate_every=250,
        ),
    )


def answers() -> Experiment:
    """Go on from a model (--start) with prompts and answers (--sources pairs.jsonl), by differences of rank
    16."""
    base = finetune()
    return replace(
        base,
        options=PrepareOptions(source=SourceOptions(pairs=PromptAnswer())),
        layout=Pairs(256),
        low_rank=LowRank(rank=16),
        training=replace(base.training, optimizer=AdamW(lr=1e-3)),
    )


RECIPES: dict[str, Callable[[], Experiment]] = {
    "stdlib-tiny": stdlib_tiny,
    "text8-tiny": text8_tiny,
    "text8": text8,
    "ptb": ptb,
    "wikitext2": wikitext2,
    "lm1b": lm1b,
    "owt-small": owt_small,
    "dna": dna,
    "finetune": finetune,
    "answers": answers,
}
