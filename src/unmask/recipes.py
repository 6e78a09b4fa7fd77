"""Named experiments, as Python functions: call one, and change it with `dataclasses.replace`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unmask.backbones.caduceus import CaduceusConfig
from unmask.backbones.dit import DiTConfig, LocalInit, TimeConditioning
from unmask.backbones.mosaic_bert import MosaicBERTConfig
from unmask.data.corpus import PrepareConfig
from unmask.data.loader import GenomeWindows, PerDocument, PromptCompletionRows, Wrapped
from unmask.data.readers import ChatRecord, PromptCompletion, SourceConfig
from unmask.distillation import SDTT
from unmask.experiment import Experiment
from unmask.objectives import MDLM, MLM, FlexMDM
from unmask.training.config import TrainingConfig
from unmask.training.curriculum import TimeWidening
from unmask.training.lora import LoRA
from unmask.training.optim import AdamW, ConstantLR, CosineDecay, LinearDecay, Muon

_MDLM_TRAINING = TrainingConfig(
    steps=1_000_000, batch_size=512, optimizer=AdamW(lr=3e-4), warmup_steps=2500, ema_decay=0.9999
)
_LINE_DOCUMENTS = PrepareConfig(source=SourceConfig(lines=True))


def stdlib_tiny() -> Experiment:
    """Python's own standard library, a 4 x 192 model: three minutes on two cores, and nothing to download."""
    return _small_model_recipe("stdlib", "bpe:4096", width=192, heads=4, length=128, steps=640)


def stdlib_flexmdm() -> Experiment:
    """The same network with times, and texts of any length up to 127 tokens: it chooses how long a hole is."""
    experiment = stdlib_tiny()
    assert isinstance(experiment.backbone, DiTConfig)
    return replace(
        experiment,
        backbone=replace(experiment.backbone, time_conditioning=TimeConditioning()),
        objective=FlexMDM(),
        layout=Wrapped(127, shortest=8),
        training=replace(experiment.training, batch_size=16, curriculum=None),  # as many tokens as in stdlib_tiny
    )


def text8_tiny() -> Experiment:
    """Characters of Wikipedia, a 4 x 256 model: four minutes on two cores."""
    experiment = _small_model_recipe("text8/train.txt", "text8", width=256, heads=4, length=256, steps=430)
    training = replace(
        experiment.training,
        optimizer=Muon(lr=5e-3, momentum=0.9, adamw=AdamW(lr=2.5e-3)),
        curriculum=TimeWidening(end_fraction=0.85),
    )
    return replace(experiment, training=training)


def _small_model_recipe(source: str, tokenizer: str, *, width: int, heads: int, length: int, steps: int) -> Experiment:
    """All that makes small models learn fast; what each part is worth is in docs/performance.md."""
    return Experiment(
        sources=(source,),
        tokenizer=tokenizer,
        backbone=DiTConfig(
            width=width,
            depth=4,
            heads=heads,
            max_length=length,
            dropout=0.0,
            activation="relu2",
            rope_theta=100.0,
            local_init=LocalInit(),
        ),
        objective=MDLM(exact_mask_counts=True),
        unigram_bias_init=True,
        layout=Wrapped(length),
        training=TrainingConfig(
            steps=steps,
            batch_size=8,
            optimizer=Muon(lr=4e-3, momentum=0.9, adamw=AdamW(lr=2e-3)),
            warmup_steps=steps // 20,
            lr_schedule=LinearDecay(),
            curriculum=TimeWidening(),
            ema_decay=0.97,
            save_every=160,
            eval_every=160,
        ),
        eval_windows=40,
    )


def text8() -> Experiment:
    """Characters of Wikipedia, 27 symbols, windows of 256: the paper's 12 x 768 model."""
    return Experiment(
        sources=("text8/train.txt",),
        tokenizer="text8",
        backbone=DiTConfig(max_length=256),
        layout=Wrapped(256),
        training=_MDLM_TRAINING,
    )


def ptb() -> Experiment:
    """Penn Treebank, a sentence a document."""
    return Experiment(
        sources=("ptb/train.txt",),
        tokenizer="bpe:8192",
        backbone=DiTConfig(width=512, depth=8, heads=8, max_length=128),
        layout=Wrapped(128),
        prepare=_LINE_DOCUMENTS,
        training=_MDLM_TRAINING,
    )


def wikitext2() -> Experiment:
    """WikiText-2, articles running on."""
    return Experiment(
        sources=("wikitext2/train.tokens",),
        tokenizer="bpe:16384",
        backbone=DiTConfig(width=512, depth=8, heads=8, max_length=512),
        layout=Wrapped(512),
        training=_MDLM_TRAINING,
    )


def lm1b() -> Experiment:
    """One Billion Words with BERT's vocabulary, a sentence a row of 128: the paper's setting."""
    return Experiment(
        sources=("hub:lm1b",),
        tokenizer="hub:bert-base-uncased",
        backbone=DiTConfig(max_length=128),
        layout=PerDocument(128),
        training=_MDLM_TRAINING,
    )


def owt_small() -> Experiment:
    """OpenWebText with GPT-2's vocabulary, windows of 1,024, 12 x 768: the paper's main model."""
    return Experiment(
        sources=("hub:openwebtext",),
        tokenizer="hub:gpt2",
        backbone=DiTConfig(max_length=1024),
        layout=Wrapped(1024),
        training=_MDLM_TRAINING,
    )


def dna() -> Experiment:
    """A genome, base by base, in windows of 1,024 on either strand."""
    return Experiment(
        sources=("genome.fa.gz",),
        tokenizer="dna",
        backbone=DiTConfig(width=256, depth=8, heads=8, max_length=1024),
        layout=GenomeWindows(1024),
        training=_MDLM_TRAINING,
    )


def dna_tiny() -> Experiment:
    """A genome (--sources genome.fa.gz), base by base, on either strand: a 4 x 128 model for a laptop."""
    experiment = _small_model_recipe("genome.fa.gz", "dna", width=128, heads=4, length=256, steps=400)
    return replace(experiment, layout=GenomeWindows(256))


def hg38_caduceus() -> Experiment:
    """The human genome, Caduceus trained by MLM in windows of 1,024: the paper's DNA model before its fine-tuning."""
    intervals = "hg38.ml.fa:sequences_human.bed"
    return Experiment(
        sources=(f"{intervals}:train",),
        tokenizer="dna",
        backbone=CaduceusConfig(max_length=1024),
        objective=MLM(fraction=0.15),
        layout=GenomeWindows(1024),
        prepare=PrepareConfig(source=SourceConfig(interval_bases=2**20), valid_sources=(f"{intervals}:valid",)),
        training=TrainingConfig(
            steps=10_000,
            batch_size=1024,
            optimizer=AdamW(lr=8e-3, betas=(0.9, 0.95), weight_decay=0.1),
            warmup_steps=1000,
            lr_schedule=CosineDecay(min_factor=0.0125),
            ema_decay=0.0,
        ),
    )


def mosaicbert() -> Experiment:
    """C4 with BERT's vocabulary, MosaicBERT trained by MLM: the paper's BERT before its fine-tuning with MDLM."""
    return Experiment(
        sources=("hub:allenai/c4:en",),
        tokenizer="hub:bert-base-uncased",
        backbone=MosaicBERTConfig(max_length=128),
        objective=MLM(fraction=0.3),
        layout=PerDocument(128),
        prepare=PrepareConfig(first_token="[CLS]"),
        training=TrainingConfig(
            steps=70_000,
            batch_size=4096,
            optimizer=AdamW(lr=5e-4, betas=(0.9, 0.98), weight_decay=1e-5, eps=1e-6),
            warmup_steps=4200,
            lr_schedule=LinearDecay(min_factor=0.02),
            ema_decay=0.0,
        ),
    )


def finetune() -> Experiment:
    """Go on from a model (--init-from) with your own text (--sources): all of its weights, gently."""
    return Experiment(
        sources=(),  # to be named, as is
        init_from="",
        layout=Wrapped(128),
        training=TrainingConfig(
            steps=1000,
            batch_size=16,
            optimizer=AdamW(lr=1e-4),
            warmup_steps=50,
            lr_schedule=LinearDecay(),
            ema_decay=0.99,
            save_every=250,
            eval_every=250,
        ),
    )


def sft() -> Experiment:
    """Go on from a model (--init-from) with prompts and completions (--sources pairs.jsonl), by LoRA of rank 16."""
    base = finetune()
    return replace(
        base,
        prepare=PrepareConfig(source=SourceConfig(pair_format=PromptCompletion())),
        layout=PromptCompletionRows(256),
        lora=LoRA(rank=16),
        training=replace(base.training, optimizer=AdamW(lr=1e-3)),
    )


def distill() -> Experiment:
    """Distil a model (--init-from) into one that samples in fewer steps, on your own text (--sources): 5 rounds."""
    base = finetune()
    return replace(
        base,
        distillation=SDTT(steps_per_round=200),
        training=replace(base.training, optimizer=AdamW(lr=3e-4), lr_schedule=ConstantLR()),
    )


def _chat() -> Experiment:
    """Go on from a chat model (--init-from) with conversations (--sources chats.jsonl), by LoRA of rank 16."""
    base = sft()
    return replace(base, prepare=PrepareConfig(source=SourceConfig(pair_format=ChatRecord())))


RECIPES: dict[str, Callable[[], Experiment]] = {
    "stdlib-tiny": stdlib_tiny,
    "stdlib-flexmdm": stdlib_flexmdm,
    "text8-tiny": text8_tiny,
    "text8": text8,
    "ptb": ptb,
    "wikitext2": wikitext2,
    "lm1b": lm1b,
    "owt-small": owt_small,
    "dna": dna,
    "dna-tiny": dna_tiny,
    "hg38-caduceus": hg38_caduceus,
    "mosaicbert": mosaicbert,
    "finetune": finetune,
    "sft": sft,
    "chat": _chat,
    "distill": distill,
}
