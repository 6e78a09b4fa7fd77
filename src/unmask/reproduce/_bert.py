"""Masked language models that are fine-tuned with the MDLM loss: MosaicBERT, or small ones with published weights."""

from __future__ import annotations

from dataclasses import replace

from unmask.data.corpus import PrepareConfig
from unmask.data.loader import PerDocument, RowLayout, Wrapped
from unmask.data.readers import SourceConfig
from unmask.experiment import Experiment
from unmask.objectives import MDLM, NextToken
from unmask.recipes import mosaicbert
from unmask.reproduce._published import antiberty, minilm
from unmask.reproduce._trainings import text_sources
from unmask.reproduce._vocabulary import Setup, Training
from unmask.training.config import TrainingConfig
from unmask.training.optim import AdamW, ConstantLR

_FINE_TUNING = TrainingConfig(batch_size=16, optimizer=AdamW(lr=1e-4, betas=(0.95, 0.999)), ema_decay=0.97)


def english_trainings(setup: Setup) -> list[Training]:
    """BERT and BERT + MDLM-FT: MiniLM at the scale tiny; at the paper's MosaicBERT, and its causal variant."""
    return _mosaic_trainings() if not setup.is_tiny else _minilm_trainings(setup)


def _minilm_trainings(setup: Setup) -> list[Training]:
    experiment = _fine_tuning(text_sources(setup), Wrapped(64))
    tuned = Training("bert-mdlm", "bert-mdlm", experiment, "bert", published=minilm)
    return [replace(tuned, name="bert", method="bert", share=0.0), tuned]


def protein_trainings() -> list[Training]:
    """AntiBERTy and AntiBERTy + MDLM-FT, on antibodies as it knows them: [CLS] residues [SEP]."""
    prepare = PrepareConfig(source=SourceConfig(lines=True), first_token="[CLS]")
    experiment = replace(_fine_tuning((), PerDocument(128)), prepare=prepare)
    tuned = Training("antiberty-mdlm", "antiberty-mdlm", experiment, "antibodies", published=antiberty)
    return [replace(tuned, name="antiberty", method="antiberty", share=0.0), tuned]


def _fine_tuning(sources: tuple[str, ...], layout: RowLayout) -> Experiment:
    return Experiment(sources=sources, objective=MDLM(), layout=layout, training=_FINE_TUNING, init_from="")


def _mosaic_trainings() -> list[Training]:
    """The paper's settings (appendix D.6): 70,000 steps of 4,096 rows, then 5,000 of 512 rows."""
    pretraining = mosaicbert()
    training = TrainingConfig(
        steps=5000,
        batch_size=512,
        optimizer=AdamW(lr=5e-5, betas=(0.95, 0.999)),
        warmup_steps=2500,
        lr_schedule=ConstantLR(),
        ema_decay=0.0,
    )
    bert = Training("c4-bert", "bert", pretraining, "c4")
    ar = Training("c4-ar", "ar", pretraining.with_objective(NextToken()), "c4")
    tuned = replace(pretraining, objective=MDLM(), training=training, init_from="")
    return [ar, bert, Training("c4-bert-mdlm", "bert-mdlm", tuned, "c4", parent=bert)]
