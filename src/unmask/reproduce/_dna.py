"""How methods are trained on DNA: Caduceus and Mamba of the paper's size, on a part of a human chromosome.

Caduceus is trained by MLM first, and every diffusion objective starts from it, as in the paper; Mamba, which is
autoregressive from the beginning, has as many steps as both trainings together.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unmask.backbones.caduceus import CaduceusConfig
from unmask.backbones.mamba import MambaConfig
from unmask.baselines import Plaid
from unmask.data.loader import GenomeWindows
from unmask.experiment import Experiment
from unmask.objectives import MDLM, MLM, SEDD, NextToken, Objective
from unmask.reproduce._vocabulary import Setup, Training
from unmask.training.config import TrainingConfig
from unmask.training.optim import AdamW, CosineDecay

GENOME = "dna/genomes/human_chrX_20Mb.fa.gz"
"""Where a data folder has 20 megabases of chromosome X."""

_OBJECTIVES: dict[str, tuple[Objective, float]] = {
    "mdlm": (MDLM(), 1.0),
    "sedd": (SEDD(), 1.0),
    "plaid": (Plaid(), 2.0),
}
"""What Caduceus is fine-tuned with, and what a step of it takes."""
_LENGTH = 256
_NETWORKS = (CaduceusConfig(max_length=_LENGTH), MambaConfig(max_length=_LENGTH))
"""The networks of the paper, of about 470,000 parameters each."""
_TRAINING = TrainingConfig(
    batch_size=8,
    optimizer=AdamW(lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1),
    lr_schedule=CosineDecay(min_factor=0.0125),
    ema_decay=0.97,
)


def dna_trainings(setup: Setup, *methods: str) -> list[Training]:
    """Trainings on DNA: mdlm, sedd, plaid (each from mlm), mlm, and ar (Mamba)."""
    assert setup.data is not None
    caduceus, mamba = _NETWORKS
    experiment = Experiment(
        sources=(str((setup.data / GENOME).resolve()),),
        tokenizer="dna",
        backbone=caduceus,
        objective=MLM(fraction=0.15),
        layout=GenomeWindows(caduceus.max_length or _LENGTH),
        training=_TRAINING,
    )
    mlm = Training("dna-mlm", "mlm", experiment, "dna")
    ar = replace(experiment, backbone=mamba, objective=NextToken())
    trainings = {"mlm": mlm, "ar": Training("dna-ar", "ar", ar, "dna", share=2.0, relative_cost=0.5, pace=experiment)}
    for name, (objective, cost) in _OBJECTIVES.items():
        tuned = replace(experiment, objective=objective, init_from="")
        tuned = replace(tuned, training=replace(_TRAINING, optimizer=replace(_TRAINING.optimizer, lr=1e-3)))
        trainings[name] = Training(f"dna-{name}", name, tuned, "dna", relative_cost=cost, pace=experiment, parent=mlm)
    return [trainings[method] for method in methods]


def missing_genome(setup: Setup) -> str | None:
    """Why there is no DNA to train on."""
    if not setup.is_tiny:
        return "the paper's scale needs hg38 and the intervals of its training set, which must be had first"
    if setup.data is None or not (Path(setup.data) / GENOME).is_file():
        return f"it needs a genome: DATA/{GENOME}"
    return None
